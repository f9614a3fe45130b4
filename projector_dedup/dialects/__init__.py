"""Say what each database does differently when a message is claimed and committed; no other package names one."""

from __future__ import annotations

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, InternalError, OperationalError

from ..errors import UnsupportedDatabaseError
from .answers import Failure, Status, modules_of, sqlstate_of
from .claims import Key, handler_parameters, key_of, same_key
from .cleanup import Expired, any_expired, is_expired
from .interface import Dialect
from .last_statement import LastChange, LastStatement
from .levels import LEVEL_OF_BEGIN, LEVELS, is_as_strict
from .mariadb import Aiomysql, Asyncmy, MariaDB, MySQLClient, PyMySQL
from .postgresql import Asyncpg, PostgreSQL, Psycopg, Psycopg2
from .sqlite import Aiosqlite, Pysqlite, SQLite, configure_sqlite

__all__ = [
    "LEVELS",
    "LEVEL_OF_BEGIN",
    "Dialect",
    "Expired",
    "Failure",
    "Key",
    "LastChange",
    "LastStatement",
    "MariaDB",
    "PostgreSQL",
    "SQLite",
    "Status",
    "any_expired",
    "configure_sqlite",
    "dialect_of",
    "failure_of",
    "handler_parameters",
    "is_as_strict",
    "is_expired",
    "key_of",
    "register",
    "same_key",
]

_DIALECTS: dict[tuple[str, str], Dialect] = {}
_BY_MODULE: dict[str, Dialect] = {}


def register(dialect: Dialect) -> None:
    """Use ``dialect`` for its ``names`` and ``drivers`` from here on; of several for one driver the last is used.

    The library trusts a registered dialect. Run the contract suite to see whether your database keeps the promise
    (docs/bring-your-database.md).
    """
    _DIALECTS.update({(name, driver): dialect for name in dialect.names for driver in dialect.drivers})
    for module in dialect.modules or dialect.drivers:
        _BY_MODULE.setdefault(module, dialect)  # a driver may serve a second database, and its errors do not say which


for _known in (Psycopg, Psycopg2, Asyncpg, PyMySQL, MySQLClient, Asyncmy, Aiomysql, Pysqlite, Aiosqlite):
    register(_known())


def dialect_of(bind: Engine | Connection) -> Dialect:
    """Return the dialect that was registered for the database and driver of ``bind``.

    Raises ``UnsupportedDatabaseError`` for any other database or driver.
    """
    spoken = bind.dialect
    found = _DIALECTS.get((spoken.name, spoken.driver))
    if found is None:
        supported = ", ".join(sorted(f"{name}+{driver}" for name, driver in _DIALECTS))
        raise UnsupportedDatabaseError(
            f"{spoken.name}+{spoken.driver} is not supported. Use one of {supported}; or write a dialect for it, run "
            "the contract suite, and call projector_dedup.dialects.register (docs/bring-your-database.md)"
        )
    return found


def failure_of(error: Exception) -> Failure | None:
    """Return what an error of a database means, by the dialect of the driver that raised it; None for any other error.

    ``error`` is SQLAlchemy's, or the driver's own. If no dialect is registered for the driver, as for a second
    database of a handler, only SQLAlchemy's errors are known: by the classes of the SQLSTATE, or by those of PEP 249.
    """
    for module in modules_of(error):
        if module in _BY_MODULE:
            return _BY_MODULE[module].classify(error)
    if not isinstance(error, DBAPIError):
        return None
    if error.connection_invalidated or (sqlstate_of(error) or "").startswith(("08", "40")):
        return Failure.TRANSIENT
    return Failure.LATER if isinstance(error, (OperationalError, InternalError)) else Failure.PERMANENT
