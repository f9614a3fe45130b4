"""Databases that the library knows, under names that it does not: it has to take them for any other database.

Importing this module registers them with SQLAlchemy, in the worker processes of the contract too.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy.dialects import registry
from sqlalchemy.dialects.mysql.pymysql import MySQLDialect_pymysql
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.dialects.sqlite.aiosqlite import SQLiteDialect_aiosqlite
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

from databases import Driver


class _Untold:
    """A dialect that cannot tell whether the driver is in AUTOCOMMIT, like most of third parties."""

    def detect_autocommit_setting(self, _dbapi_connection: Any) -> bool:
        """Raise NotImplementedError: the dialect cannot tell."""
        raise NotImplementedError


class UntriedPsycopg(_Untold, PGDialect_psycopg):
    """PostgreSQL."""

    name = "untried_postgresql"
    supports_statement_cache = True


class UntriedAsyncpg(_Untold, PGDialect_asyncpg):
    """PostgreSQL by an asynchronous driver."""

    name = "untried_postgresql"
    supports_statement_cache = True


class UntriedPyMySQL(_Untold, MySQLDialect_pymysql):
    """MariaDB."""

    name = "untried_mariadb"
    supports_statement_cache = True


class UntriedSQLite(_Untold, SQLiteDialect_pysqlite):
    """SQLite, whose driver begins late."""

    name = "untried_sqlite"
    supports_statement_cache = True


class UntriedAiosqlite(_Untold, SQLiteDialect_aiosqlite):
    """SQLite by an asynchronous driver."""

    name = "untried_sqlite"
    supports_statement_cache = True


class WithoutRelease(UntriedPsycopg):
    """A database whose savepoints end only with the transaction, like SQL Server and Oracle."""

    name = "untried_norelease"
    supports_statement_cache = True

    def do_release_savepoint(self, connection: Any, name: str) -> None:
        """Do nothing: there is no such statement."""


class WithoutLevels(UntriedPsycopg):
    """A database whose isolation level cannot be set."""

    name = "untried_nolevels"
    supports_statement_cache = True

    def get_isolation_level_values(self, dbapi_conn: Any) -> Any:
        """Raise NotImplementedError: the dialect cannot tell."""
        raise NotImplementedError


@dataclass(frozen=True)
class UntriedDriver(Driver):
    """A driver under a name that the library does not know."""

    known_engine: str = ""

    @property
    def engine(self) -> str:
        """The database behind the driver."""
        return self.known_engine


UNTRIED = (
    UntriedDriver("untried_postgresql+psycopg", "psycopg", known_engine="postgresql"),
    UntriedDriver("untried_postgresql+asyncpg", "asyncpg", is_async=True, known_engine="postgresql"),
    UntriedDriver("untried_mariadb+pymysql", "pymysql", known_engine="mariadb"),
    UntriedDriver("untried_sqlite+pysqlite", "sqlite3", known_engine="sqlite"),
    UntriedDriver("untried_sqlite+aiosqlite", "aiosqlite", is_async=True, known_engine="sqlite"),
)
PG8000 = UntriedDriver("postgresql+pg8000", "pg8000", known_engine="postgresql")

_DIALECTS = (
    UntriedPsycopg,
    UntriedAsyncpg,
    UntriedPyMySQL,
    UntriedSQLite,
    UntriedAiosqlite,
    WithoutRelease,
    WithoutLevels,
)
for _dialect in _DIALECTS:
    for _name in (_dialect.name, f"{_dialect.name}.{_dialect.driver}"):
        registry.register(_name, __name__, _dialect.__name__)


def registered(_engine: Any) -> None:
    """Do nothing: as `Subject.prepare`, it makes worker processes import this module."""
