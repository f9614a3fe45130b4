"""Attach the library's listeners to an engine once, before any unit of work, and detect listeners of the user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any
from weakref import WeakSet

from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.interfaces import Dialect as EngineDialect
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.orm import Session
from sqlalchemy.pool import PoolProxiedConnection

_PACKAGE = f"{__package__.partition('.')[0]}."

TABLES = "projector_dedup_tables"  #: in the ``info`` of a physical connection: the tables that were checked

_lock = Lock()
_listened_to: WeakSet[EngineDialect] = WeakSet()  # an engine's execution_options() clones share it


def listen_once(engine: Engine, *, before_others: bool = False, **listeners: Sequence[Callable[..., Any]]) -> None:
    """Attach ``listeners``, by the name of their event, unless this engine already has them.

    With ``before_others``, listeners of ``checkout`` run before the user's, so that the user's settings remain.

    SQLAlchemy fails if it calls its listeners while another thread adds one: "deque mutated during iteration". So a
    second thread waits here until the first has added all listeners, and connects only then.
    """
    with _lock:
        if engine.dialect not in _listened_to:
            for name, functions in listeners.items():
                for function in functions:
                    event.listen(engine, name, function, insert=before_others and name == "checkout")
            _listened_to.add(engine.dialect)


def are_of_others(events: Iterable[Iterable[object]]) -> bool:
    """True if one of the listeners of these events is not from this package."""
    for listeners in events:
        for listener in listeners:
            if not (getattr(listener, "__module__", None) or "").startswith(_PACKAGE):
                return True
    return False


def info_of(connection: Connection) -> dict[Any, Any]:
    """Return the ``info`` of the physical connection, bypassing the guard of the connection."""
    driver: PoolProxiedConnection = Connection.connection.__get__(connection)
    return driver.info


def may_move(session: Session, bind: Engine | Connection) -> bool:
    """True if a user's listener may select another database or schema for each transaction."""
    begins = session.dispatch.after_begin, session.dispatch.after_transaction_create
    pool, engine = bind.engine.pool.dispatch, bind.dispatch
    return are_of_others((*begins, pool.checkout, engine.engine_connect, engine.begin))


def forget_if_moved(session: Session, connection: Connection) -> None:
    """Forget which tables were checked on this connection if a user's listener may have selected another schema."""
    if may_move(session, connection):
        info_of(connection).pop(TABLES, None)


def is_listened_to(connection: Connection) -> bool:
    """True if a user's listener runs after a statement or before COMMIT, and may execute another statement."""
    events = connection.dispatch
    return are_of_others((events.after_cursor_execute, events.after_execute, events.commit))


def ask(dialect: EngineDialect, dbapi_connection: Any, sql: str) -> list[Any]:
    """Run ``sql`` in a listener of ``checkout``, and return its rows.

    Raises ``DisconnectionError`` if the connection is lost. SQLAlchemy's pool then takes another connection.
    """
    cursor = dbapi_connection.cursor()
    try:
        cursor.execute(sql)
        return list(cursor.fetchall()) if cursor.description else []
    except Exception as error:
        if isinstance(error, dialect.loaded_dbapi.Error) and not dialect.is_disconnect(error, None, cursor):
            raise  # the server answered, and another connection would get the same answer
        raise DisconnectionError from error
    finally:
        cursor.close()
