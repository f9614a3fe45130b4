"""The drivers of SQLite: how each tells whether its ``commit()`` has an effect."""

from __future__ import annotations

from sqlalchemy.engine import Connection

from ..answers import Status
from .dialect import SQLite

_COMMITS = "projector_dedup_commits"  # in the ``info`` of a physical connection


class Pysqlite(SQLite):
    """SQLite through sqlite3, of Python's own library."""

    drivers = frozenset({"pysqlite"})

    def commits_nothing(self, connection: Connection) -> bool:
        """True if the connection was made with autocommit=True, which sqlite3 has since Python 3.12."""
        return getattr(connection.connection.dbapi_connection, "autocommit", None) is True


class Aiosqlite(SQLite):
    """SQLite through aiosqlite, which does not tell with which autocommit a connection was made."""

    drivers = frozenset({"aiosqlite"})

    def commits_nothing(self, connection: Connection) -> bool:
        """True if ``commit()`` has no effect: tried once for each physical connection, if no transaction is open."""
        driver = connection.connection.driver_connection
        if _COMMITS not in connection.info and self.status(driver) is Status.NONE:
            connection.exec_driver_sql("BEGIN")
            connection.connection.commit()
            connection.info[_COMMITS] = self.status(driver) is Status.NONE
            if not connection.info[_COMMITS]:
                connection.exec_driver_sql("ROLLBACK")
        return connection.info.get(_COMMITS) is False
