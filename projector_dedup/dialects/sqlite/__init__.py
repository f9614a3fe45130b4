"""SQLite, with a class for each of the drivers sqlite3 and aiosqlite."""

from .drivers import Aiosqlite, Pysqlite
from .setup import configure_sqlite

__all__ = ["Aiosqlite", "Pysqlite", "configure_sqlite"]
