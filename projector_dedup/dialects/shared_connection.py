"""Refuse pools that give one connection to several users at once: what one commits or rolls back, all do.

StaticPool gives one connection to all threads, and is refused. SingletonThreadPool, SQLAlchemy's choice for SQLite in
memory, gives each thread one, which is fine until a unit of work has it: no other code of the thread may take it then,
or end a transaction on it (docs/adr/0026-delivering-inside-a-handler.md).
"""

from __future__ import annotations

from threading import Lock
from weakref import WeakSet, ref

from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.pool import SingletonThreadPool, StaticPool

from ..errors import UnsafeSessionError, UnsupportedDatabaseError

_HOLDER = "projector_dedup_holder"

_lock = Lock()
_watched: WeakSet[Engine] = WeakSet()


def refuse_sharing(connection: Connection) -> None:
    """Raise ``UnsupportedDatabaseError`` if other threads have the connection of this unit of work too.

    If only other code of this thread could get it, from now on that code is refused with ``UnsafeSessionError``.
    """
    pool = connection.engine.pool
    if isinstance(pool, StaticPool):
        raise UnsupportedDatabaseError(
            "this engine shares one connection between all threads and tasks (StaticPool, the default of aiosqlite's "
            ":memory:), so their transactions would mix; give the dispatcher an engine with a pool of its own, and for "
            "SQLite a file, such as sqlite:///read_model.db"
        )
    # Inside a savepoint the transaction is the caller's, who may go on with the connection when we have ended.
    if isinstance(pool, SingletonThreadPool) and connection.in_transaction() and not connection.in_nested_transaction():
        _watch(connection.engine)
        connection.info[_HOLDER] = ref(connection)


def _watch(engine: Engine) -> None:
    while (original := getattr(engine, "_proxied", None)) is not None:  # execution_options() made a copy of it,
        engine = original  # and has all copies call the listeners of the original
    with _lock:
        if engine not in _watched:
            event.listen(engine, "engine_connect", _taken)
            event.listen(engine, "commit", _refuse_second_user)
            event.listen(engine, "rollback", _refuse_second_user)
            _watched.add(engine)


def _taken(connection: Connection) -> None:
    """Refuse a new ``Connection`` if a unit of work has it; SQLAlchemy's pool has no event for a second user."""
    try:
        _refuse_second_user(connection)
    except UnsafeSessionError:
        connection.close()  # or the pool would count one user too many
        raise


def _refuse_second_user(connection: Connection) -> None:
    if connection.closed or connection.invalidated:
        return
    found = connection.info.get(_HOLDER)
    holder: Connection | None = found() if found is not None else None
    if holder is not None and holder is not connection and holder.in_transaction():
        raise UnsafeSessionError(
            "a unit of work has this thread's only connection (SingletonThreadPool, the default of SQLite in memory), "
            "and another session would get the same connection: its commit(), rollback() or close() would end the "
            "unit of work's transaction. In a handler use the session that it is given; else wait until the unit of "
            "work has ended; or give the engine a file, such as sqlite:///read_model.db"
        )
