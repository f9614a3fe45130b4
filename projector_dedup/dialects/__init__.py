"""The only place that names a database: what each does differently when a message is claimed and committed."""

from __future__ import annotations

import logging
from weakref import WeakSet

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine import Dialect as EngineDialect

from .answers import Failure, Status
from .claims import Key, handler_parameters, key_of, same_key
from .interface import Dialect
from .levels import LEVEL_OF_BEGIN, LEVELS, is_as_strict
from .mysql import MySQL
from .portable import Portable
from .postgresql import PostgreSQL
from .pruning import Expired, Route, any_expired, is_expired
from .sqlite import SQLite
from .sqlite_setup import configure_sqlite

__all__ = [
    "LEVELS",
    "LEVEL_OF_BEGIN",
    "Dialect",
    "Expired",
    "Failure",
    "Key",
    "Route",
    "Status",
    "any_expired",
    "configure_sqlite",
    "dialect_of",
    "handler_parameters",
    "is_as_strict",
    "is_expired",
    "key_of",
    "register",
    "same_key",
]

logger = logging.getLogger("projector_dedup")

_DIALECTS: dict[tuple[str, str], Dialect] = {}
_PORTABLE = Portable()

_warned: WeakSet[EngineDialect] = WeakSet()


def register(dialect: Dialect) -> None:
    """Use ``dialect`` for its names and drivers from here on; the last one registered wins.

    Whose it is answers for it: nothing is probed, and the contract suite says whether it keeps the promise.
    """
    _DIALECTS.update({(name, driver): dialect for name in dialect.names for driver in dialect.drivers})


for _dialect in (PostgreSQL(), MySQL(), SQLite()):
    register(_dialect)


def dialect_of(bind: Engine | Connection) -> Dialect:
    """The dialect for a bind: a database and driver that were tried, or what any database has, with a warning."""
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
