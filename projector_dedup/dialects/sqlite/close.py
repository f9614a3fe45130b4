"""Make ``close()`` of a SQLite connection end its transaction, also when a statement was interrupted.

Since Python 3.11, ``sqlite3.Connection.close()`` leaves unfinished cursors alone, and SQLite keeps a connection with
an unfinished statement alive, locks included, until the cursor dies. An interrupted statement leaves just
that: SQLAlchemy invalidates the connection, which closes it, while the exception's traceback holds the cursor. Every
writer of the database then waits for the garbage collector (tests/delivery/test_interrupts.py).
"""

from __future__ import annotations

import contextlib
import sqlite3
from functools import cache
from typing import Any
from weakref import WeakSet, ref

from sqlalchemy.engine import Engine
from sqlalchemy.engine.interfaces import Dialect as EngineDialect
from sqlalchemy.pool import QueuePool

from ..listeners import listen_once

_MANY = 50  # cursors; with more, those that are gone are forgotten


class _ClosingConnection(sqlite3.Connection):
    """Finishes its cursors and rolls back before it closes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._cursors: list[ref[sqlite3.Cursor]] = []
        super().__init__(*args, **kwargs)

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        cursor = super().cursor(*args, **kwargs)
        if len(self._cursors) > _MANY:
            self._cursors = [known for known in self._cursors if known() is not None]
        self._cursors.append(ref(cursor))
        return cursor

    def close(self) -> None:
        # An error means: closed already, or called by a thread that may not close it. Then there is nothing to finish.
        with contextlib.suppress(sqlite3.Error):
            for known in self._cursors:
                if (cursor := known()) is not None:
                    cursor.close()
            if self.in_transaction:
                self.rollback()
        super().close()


@cache
def _closing(connection_class: type[sqlite3.Connection]) -> type[sqlite3.Connection]:
    if issubclass(connection_class, _ClosingConnection):
        return connection_class  # older SQLAlchemy hands the same keywords to every connect
    if connection_class is sqlite3.Connection:
        return _ClosingConnection
    return type(f"Closing{connection_class.__name__}", (_ClosingConnection, connection_class), {})


# Engines that have no connection older than the listeners; by the dialect, which execution_options() clones share.
_prepared: WeakSet[EngineDialect] = WeakSet()


def close_ends_transactions(engine: Engine) -> None:
    """Make the engine's connections end their transaction when they close, and have none when they are taken."""
    if engine.dialect in _prepared:
        return
    checkout = [_checkout] if isinstance(engine.pool, QueuePool) else []
    listen_once(engine, before_others=True, do_connect=[_connect], checkout=checkout)
    if isinstance(engine.pool, QueuePool):
        # Not dispose(): a connection that another task takes meanwhile would return to a pool that nobody closes.
        for _ in range(engine.pool.checkedin()):
            with engine.connect() as connection:
                connection.invalidate()
    _prepared.add(engine.dialect)


def _connect(_dialect: EngineDialect, _record: object, _arguments: object, keywords: dict[str, Any]) -> None:
    if "async_creator_fn" not in keywords:  # the user makes the connection, and its class is the user's choice
        keywords["factory"] = _closing(keywords.get("factory", sqlite3.Connection))


def _checkout(dbapi_connection: Any, _record: object, _proxy: object) -> None:
    """End a transaction that a refused COMMIT left open: SQLAlchemy returns such a connection to the pool as it is.

    The next transaction on it would commit writes that were reported as failed, perhaps with a marker.
    """
    if getattr(dbapi_connection, "driver_connection", dbapi_connection).in_transaction:
        dbapi_connection.rollback()
