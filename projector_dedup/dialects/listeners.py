"""Listeners on an engine's connections: ours, attached once and together, before any unit of work; and the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from threading import Lock
from typing import Any
from weakref import WeakSet

from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.interfaces import Dialect as EngineDialect
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.pool import PoolProxiedConnection

_PACKAGE = f"{__package__.partition('.')[0]}."

TABLES = "projector_dedup_tables"  #: in the ``info`` of a physical connection: what was found of tables, by their names

_lock = Lock()
_listened_to: WeakSet[EngineDialect] = WeakSet()  # which an engine's execution_options() clones share


def listen_once(engine: Engine, *, before_others: bool = False, **listeners: Sequence[Callable[..., Any]]) -> None:
    """Attach ``listeners`` by the name of their event, unless they are.

    With ``before_others`` those of ``checkout`` are called before the user's, so that what these set lasts.

    SQLAlchemy fails where it calls its listeners while another thread adds one: "deque mutated during iteration". So
    whoever comes second waits here until the first has added all, and connects only then.
    """
    with _lock:
        if engine.dialect not in _listened_to:
            for name, functions in listeners.items():
                for function in functions:
                    event.listen(engine, name, function, insert=before_others and name == "checkout")
            _listened_to.add(engine.dialect)


def are_of_others(events: Iterable[Iterable[object]]) -> bool:
    """Whether there are listeners but ours."""
    for listeners in events:
        for listener in listeners:
            if not (getattr(listener, "__module__", None) or "").startswith(_PACKAGE):
                return True
    return False


def info_of(connection: Connection) -> dict[Any, Any]:
    """Return the ``info`` of the physical connection, past any guard of the connection."""
    driver: PoolProxiedConnection = Connection.connection.__get__(connection)
    return driver.info


def forget_if_moved(connection: Connection, *begins: Iterable[object]) -> bool:
    """Forget what was found of tables where a listener may choose a database, or a schema, for each transaction.

    ``begins`` are the listeners to the session's beginning. Returns True if there is such a listener.
    """
    pool, engine = connection.engine.pool.dispatch, connection.dispatch
    moved = are_of_others((*begins, pool.checkout, engine.engine_connect, engine.begin))
    if moved:
        info_of(connection).pop(TABLES, None)
    return moved


def ask(dialect: EngineDialect, dbapi_connection: Any, sql: str) -> list[Any]:
    """Run ``sql`` in a listener of ``checkout``, and return its rows; a connection that is dead is replaced."""
    cursor = dbapi_connection.cursor()
    try:
        cursor.execute(sql)
        return list(cursor.fetchall()) if cursor.description else []
    except Exception as error:
        if isinstance(error, dialect.loaded_dbapi.Error) and not dialect.is_disconnect(error, None, cursor):
            raise  # the server's answer: another connection would get it too
        raise DisconnectionError from error  # the pool makes another
    finally:
        cursor.close()
