"""Ask whether a connection to PostgreSQL leads through a pooler, where numbered prepared statements get mixed up.

Each physical connection is asked for itself: an address may lead to a server today and to a PgBouncer tomorrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from uuid import uuid4

from sqlalchemy.engine.interfaces import Dialect as EngineDialect

from ...errors import UnsupportedDatabaseError
from ..listeners import ask

_BACKEND_AND_NUMBERED = """
    SELECT pg_backend_pid(), EXISTS (
        SELECT FROM pg_prepared_statements WHERE prepare_time >= now() AND starts_with(name, '__asyncpg_stmt_')
    )"""
_ASKED = "projector_dedup_pooler"  # in the ``info`` of a physical connection

_asking: ContextVar[bool] = ContextVar("projector_dedup_asking", default=False)


@contextmanager
def asking() -> Iterator[None]:
    """Ask each connection that is taken from the pool in the block, unless it was asked before."""
    token = _asking.set(True)
    try:
        yield
    finally:
        _asking.reset(token)


def refusing(
    dialect: EngineDialect, refuse_pooler: Callable[[EngineDialect, Any, Any], None]
) -> Callable[[Any, Any, object], None]:
    """Return a listener to ``checkout`` that calls ``PostgreSQL.refuse_pooler`` once for each physical connection.

    The listener does nothing outside a block of ``asking``.
    """

    def refuse(dbapi_connection: Any, record: Any, _proxy: object) -> None:
        if not _asking.get() or _ASKED in record.info:
            return
        refuse_pooler(dialect, dbapi_connection, record.driver_connection)
        record.info[_ASKED] = True

    return refuse


def ask_backend(dialect: EngineDialect, dbapi_connection: Any, *, begun: bool) -> tuple[int, bool]:
    """Return the number of the server process that answers, and True if it keeps a statement that asyncpg numbered.

    A pooler tells its clients the number of a process that it has made up, so the driver knows another one then.
    Unless a transaction had ``begun`` before, the one of this question is rolled back.
    """
    sql = f"{_BACKEND_AND_NUMBERED} -- {uuid4()}"  # another text each time: a statement from a cache shows nothing
    ((backend, is_numbered),) = ask(dialect, dbapi_connection, sql)
    if not begun:
        dbapi_connection.rollback()
    return backend, is_numbered


def numbered_behind_pooler(connect_args: str) -> UnsupportedDatabaseError:
    """Return the error for an engine that numbers its statements behind a pooler; ``connect_args`` are the remedy."""
    return UnsupportedDatabaseError(
        "this engine reaches PostgreSQL through a pooler, such as PgBouncer, and prepares statements under "
        "names that other clients of the pooler give to statements of theirs: it could run one of those. "
        f"Give create_engine(connect_args={connect_args})"
    )
