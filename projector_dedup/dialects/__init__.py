"""Say what each database does differently when a message is claimed and committed; no other package names one."""

from __future__ import annotations

import logging
from weakref import WeakSet

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine import Dialect as EngineDialect
from sqlalchemy.exc import DBAPIError

from .answers import Failure, Status, modules_of
from .claims import Key, handler_parameters, key_of, same_key
from .cleanup import Expired, any_expired, is_expired
from .interface import Dialect
from .last_statement import LastChange, LastStatement
from .levels import LEVEL_OF_BEGIN, LEVELS, is_as_strict
from .mariadb import Aiomysql, Asyncmy, MySQLClient, PyMySQL
from .portable import Portable
from .postgresql import Asyncpg, Psycopg, Psycopg2
from .sqlite import Aiosqlite, Pysqlite, configure_sqlite

__all__ = [
    "LEVELS",
    "LEVEL_OF_BEGIN",
    "Dialect",
    "Expired",
    "Failure",
    "Key",
    "LastChange",
    "LastStatement",
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

logger = logging.getLogger("projector_dedup")

_DIALECTS: dict[tuple[str, str], Dialect] = {}
_BY_MODULE: dict[str, Dialect] = {}
_PORTABLE = Portable()

_warned: WeakSet[EngineDialect] = WeakSet()


def register(dialect: Dialect) -> None:
    """Use ``dialect`` for its ``names`` and ``drivers`` from here on; of several for one driver the last is used.

    A registered dialect is trusted, and not tried before the first claim unless it is ``unknown``. Run the contract
    suite on it to see whether the database keeps the promise (docs/bring-your-database.md).
    """
    _DIALECTS.update({(name, driver): dialect for name in dialect.names for driver in dialect.drivers})
    for module in dialect.modules or dialect.drivers:
        _BY_MODULE.setdefault(module, dialect)  # a driver may serve a second database, and its errors do not say which


for _known in (Psycopg, Psycopg2, Asyncpg, PyMySQL, MySQLClient, Asyncmy, Aiomysql, Pysqlite, Aiosqlite):
    register(_known())


def dialect_of(bind: Engine | Connection) -> Dialect:
    """Return the dialect that was registered for the database and driver of ``bind``.

    For any other database return the portable dialect, and log a warning once for each engine.
    """
    spoken = bind.dialect
    found = _DIALECTS.get((spoken.name, spoken.driver))
    if found is not None:
        return found
    if spoken not in _warned:
        _warned.add(spoken)
        logger.warning(
            "%s with the driver %s was not tried; what every database has is used, and probed before the first claim. "
            "Run the contract suite on it: docs/bring-your-database.md",
            spoken.name,
            spoken.driver,
        )
    return _PORTABLE


def failure_of(error: Exception) -> Failure | None:
    """Return what an error of a database means, by the dialect of the driver that raised it; None for any other error.

    ``error`` is SQLAlchemy's, or the driver's own. A driver that no dialect is registered for is known by
    SQLAlchemy's errors alone.
    """
    for module in modules_of(error):
        if module in _BY_MODULE:
            return _BY_MODULE[module].classify(error)
    return _PORTABLE.classify(error) if isinstance(error, DBAPIError) else None
