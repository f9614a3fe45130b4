"""PostgreSQL, with a class for each of the drivers psycopg, psycopg2 and asyncpg."""

from .dialect import PostgreSQL
from .drivers import Asyncpg, Psycopg, Psycopg2

__all__ = ["Asyncpg", "PostgreSQL", "Psycopg", "Psycopg2"]
