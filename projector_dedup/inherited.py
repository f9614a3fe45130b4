"""After a fork, leave the connections of an engine to the parent process, which continues to use them.

Parent and child share the socket of such a connection, so each could read answers to statements of the other.
SQLAlchemy's recipe compares process ids when the pool gives a connection out. But before that, the pool may ping or
recycle the connection, on the shared socket. So in a child, the engine gets a new pool instead.
"""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any
from weakref import WeakSet

from sqlalchemy.engine import Engine
from sqlalchemy.engine.interfaces import Dialect as EngineDialect
from sqlalchemy.pool import ConnectionPoolEntry, Pool, QueuePool


def after_fork(function: Callable[[], None]) -> Callable[[], None]:
    """Decorate a function that runs in each process that is forked from this one. Windows has no fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
    return function


class _Child:
    """The state of a forked process. It starts anew at each fork, also the lock, which a thread may have held."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.own: WeakSet[EngineDialect] = WeakSet()  # of engines that have a new pool; copies of an engine share it


_child: list[_Child] = []  # empty in a process that was not forked
_left: WeakSet[Pool] = WeakSet()
_kept: list[Pool] = []  # to delete a connection of SQLite or asyncio could disturb the parent


@after_fork
def _begin_anew() -> None:
    _child[:] = [_Child()]


def leave_to_parent(engine: Engine) -> None:
    """Give the engine a new pool, once in each forked process. Do nothing in a process that was not forked.

    The function closes the idle connections of the old pool in this process only. It does not touch connections in use.
    It does not recognise a fork that came before the import of the library.
    """
    if not _child or engine.dialect in _child[0].own:
        return
    with _child[0].lock:
        if engine.dialect in _child[0].own:
            return
        pool = engine.pool
        engine.dispose(close=False)
        if engine.dialect.is_async or engine.dialect.name == "sqlite":
            _kept.append(pool)
        else:
            _left.add(pool)
            idle: Any = pool._pool if isinstance(pool, QueuePool) else None
            for record in list(idle.queue) if idle is not None else ():
                _hang_up(record.dbapi_connection)
        _child[0].own.add(engine.dialect)


def _hang_up(driver: Any) -> None:
    """Close the connection in this process, and send nothing to the server, which would end the parent's session."""
    with suppress(Exception):  # the connection is closed already
        if hasattr(driver, "_force_close"):  # PyMySQL
            driver._force_close()
        elif hasattr(driver, "fileno"):
            nowhere = os.open(os.devnull, os.O_RDWR)
            os.dup2(nowhere, driver.fileno(), inheritable=False)
            os.close(nowhere)
            driver.close()


@atexit.register
def _leave_what_is_in_use() -> None:
    """Hang up connections of the parent that are still in use here: mysqlclient would say goodbye to the server."""
    if pools := list(_left):
        gc.unfreeze()  # a server may have frozen them before the fork
        for record in gc.get_referrers(*pools):
            if isinstance(record, ConnectionPoolEntry) and hasattr(record, "dbapi_connection"):
                _hang_up(record.dbapi_connection)
