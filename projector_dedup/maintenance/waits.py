"""Limit how long maintenance waits for a lock: whoever holds a table would otherwise hold a command for ever."""

from __future__ import annotations

from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from .databases import database_of

LOCK_TIMEOUT = 10.0  #: seconds
_OPTION = "projector_dedup_lock_timeout"  # of a connection: its limit in seconds
_USUAL = "projector_dedup_usual_limit"  # in the info of a connection: the statement that brings its own limit back


def limited(engine: Engine, lock_timeout: float = LOCK_TIMEOUT) -> Engine:
    """Return a copy of ``engine`` whose transactions wait at most ``lock_timeout`` seconds for any one lock.

    Give it to the functions of this package, as `idempotency` does: a statement that would wait longer fails, and what
    can be tried again is tried again. The copy shares the pool of ``engine``; a connection that goes back has its usual
    limit. MariaDB counts whole seconds.

    Raises ``ValueError`` for a time that is not positive.
    """
    if not lock_timeout > 0:
        raise ValueError(f"lock_timeout is in seconds and must be positive, not {lock_timeout:g}")
    copy = engine.execution_options(**{_OPTION: lock_timeout})
    if not is_limited(engine):
        event.listen(copy, "begin", _limit)
        event.listen(copy, "commit", _give_back)
        event.listen(copy, "rollback", _give_back)
    return copy


def is_limited(engine: Engine) -> bool:
    """True if the engine is a copy that ``limited`` made, or a copy of one."""
    return engine.get_execution_options().get(_OPTION) is not None


def unlimited(engine: Engine) -> Engine:
    """Return a copy of the engine without the limit, for a migration, which has a shorter one."""
    return engine.execution_options(**{_OPTION: None})


def _limit(connection: Connection) -> None:
    seconds = connection.get_execution_options().get(_OPTION)
    if seconds is not None:
        connection.info[_USUAL] = database_of(connection).limit_waits(connection, seconds)


def _give_back(connection: Connection) -> None:
    if connection.invalidated or (usual := connection.info.pop(_USUAL, None)) is None:
        return
    try:
        connection.exec_driver_sql(usual)
    except DBAPIError:  # of a connection that is lost; the error that ends the transaction is the one to raise
        connection.invalidate()
