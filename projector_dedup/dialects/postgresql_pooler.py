"""Whether a connection to PostgreSQL leads through a pooler, where numbered prepared statements get mixed up.

Each physical connection is asked for itself: an address may lead to a server today and to a PgBouncer tomorrow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from uuid import uuid4

from sqlalchemy.engine.interfaces import Dialect as EngineDialect

from ..errors import UnsupportedDatabaseError
from .listeners import ask

_BACKEND_AND_NUMBERED = """
    SELECT pg_backend_pid(), EXISTS (
        SELECT FROM pg_prepared_statements WHERE prepare_time >= now() AND starts_with(name, '__asyncpg_stmt_')
    )"""
_UNNAMED_PSYCOPG = "{'prepare_threshold': None}"
_UNNAMED_ASYNCPG = (
    "{'statement_cache_size': 0, 'prepared_statement_cache_size': 0, 'prepared_statement_name_func': str}"
)
_ASKED = "projector_dedup_pooler"  # in the ``info`` of a physical connection

_asking: ContextVar[bool] = ContextVar("projector_dedup_asking", default=False)


@contextmanager
def asking() -> Iterator[None]:
    """Within the block, connections that are taken from the pool are asked, unless they were."""
    token = _asking.set(True)
    try:
        yield
    finally:
        _asking.reset(token)


def refusing(dialect: EngineDialect) -> Callable[[Any, Any, object], None]:
    """Make a listener that refuses a connection through a pooler, if it numbers its statements."""

    def refuse(dbapi_connection: Any, record: Any, _proxy: object) -> None:
        if not _asking.get() or _ASKED in record.info:
            return
        driver: Any = record.driver_connection
        asyncpg = hasattr(driver, "get_server_pid")
        if asyncpg or getattr(driver, "prepare_threshold", None) is not None:
            _refuse_numbered(dialect, dbapi_connection, driver, asyncpg=asyncpg)
        record.info[_ASKED] = True

    return refuse


def _refuse_numbered(dialect: EngineDialect, dbapi_connection: Any, driver: Any, *, asyncpg: bool) -> None:
    begun = driver.is_in_transaction() if asyncpg else bool(driver.pgconn.transaction_status)
    ((backend, numbered),) = ask(dialect, dbapi_connection, f"{_BACKEND_AND_NUMBERED} -- {uuid4()}")  # never cached
    known = driver.get_server_pid() if asyncpg else driver.info.backend_pid
    if not begun:
        dbapi_connection.rollback()
    if backend == known:
        return  # no pooler: it would have made up a process of its own
    if numbered or not asyncpg:
        raise UnsupportedDatabaseError(
            "this engine reaches PostgreSQL through a pooler, such as PgBouncer, and prepares statements under "
            "names that other clients of the pooler give to statements of theirs: it could run one of those. "
            f"Give create_engine(connect_args={_UNNAMED_ASYNCPG if asyncpg else _UNNAMED_PSYCOPG})"
        )
