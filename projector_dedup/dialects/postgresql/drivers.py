"""Say what differs between the drivers of PostgreSQL: status, warnings, names of prepared statements, and BEGIN."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any

from sqlalchemy.engine import Connection
from sqlalchemy.engine.interfaces import Dialect as EngineDialect

from ..answers import Status
from ..levels import LEVEL_OF_BEGIN
from ..listeners import hears_of_statements
from .dialect import PostgreSQL
from .pooler import ask_backend, numbered_behind_pooler
from .standby import confirming

# libpq's PGTransactionStatusType: idle, active, in transaction, in an aborted transaction, unknown
_LIBPQ_STATUS = (Status.NONE, Status.BUSY, Status.OPEN, Status.ABORTED, Status.BUSY)

_PSYCOPG_WITHOUT_NAMES = "{'prepare_threshold': None}"
_ASYNCPG_WITHOUT_NUMBERS = (
    "{'statement_cache_size': 0, 'prepared_statement_cache_size': 0, 'prepared_statement_name_func': str}"
)


class Psycopg(PostgreSQL):
    """Uses PostgreSQL through psycopg 3, sync or async, the only driver that can send BEGIN or COMMIT along."""

    drivers = frozenset({"psycopg", "psycopg_async"})

    def status(self, driver_connection: Any) -> Status:
        """Return how libpq says that the transaction stands."""
        return _LIBPQ_STATUS[driver_connection.pgconn.transaction_status]  # not .info, which is made anew each time

    def claim_begins(self, connection: Connection) -> bool:
        """True if ``claim`` can send BEGIN along on this connection: see ``psycopg_claim.can_begin``."""
        return _names_parameters(connection) and _psycopg_claim().can_begin(connection.connection.driver_connection)

    def beginning(self, connection: Connection) -> AbstractContextManager[object]:
        """Return a block in which the first statement takes BEGIN along, or one without effect if it cannot."""
        if not _names_parameters(connection):
            return nullcontext()
        block: AbstractContextManager[object] = _psycopg_claim().beginning(
            connection.connection.driver_connection, connection.get_execution_options().get(LEVEL_OF_BEGIN)
        )
        return block

    def commit_goes_along(self, connection: Connection, driver_connection: Any) -> bool:
        """True if the last statement can take COMMIT along on this connection: see ``psycopg_claim.can_end``.

        Not where a listener of the user's may execute something between that statement and COMMIT.
        """
        if not _names_parameters(connection) or hears_of_statements(connection):
            return False
        return bool(_psycopg_claim().can_end(driver_connection))

    def taking_commit_along(self, driver_connection: Any) -> AbstractContextManager[object]:
        """Return a block in which a statement takes COMMIT along; a COMMIT of the driver's after it does nothing."""
        block: AbstractContextManager[object] = _psycopg_claim().ending(driver_connection)
        return block

    def committing(self, driver_connection: Any) -> AbstractContextManager[None]:
        """Return a block for COMMIT; it raises ``TimeoutError`` if the wait for a synchronous standby was ended."""
        return confirming(
            driver_connection.add_notice_handler,
            driver_connection.remove_notice_handler,
            routine_of=lambda notice: notice.source_function,
        )

    def refuse_pooler(self, dialect: EngineDialect, dbapi_connection: Any, driver_connection: Any) -> None:
        """Raise ``UnsupportedDatabaseError`` if the connection leads through a pooler and psycopg prepares statements.

        psycopg names them by number only after some executions, so whether any is there today says nothing.
        """
        if driver_connection.prepare_threshold is None:
            return
        begun = bool(driver_connection.pgconn.transaction_status)
        backend, _ = ask_backend(dialect, dbapi_connection, begun=begun)
        if backend != driver_connection.info.backend_pid:
            raise numbered_behind_pooler(_PSYCOPG_WITHOUT_NAMES)


class Psycopg2(PostgreSQL):
    """Uses PostgreSQL through psycopg2, which prepares no statements, and keeps only the text of warnings."""

    drivers = frozenset({"psycopg2"})

    def status(self, driver_connection: Any) -> Status:
        """Return how libpq says that the transaction stands."""
        return _LIBPQ_STATUS[driver_connection.info.transaction_status]


class Asyncpg(PostgreSQL):
    """Uses PostgreSQL through asyncpg, which prepares every statement."""

    drivers = frozenset({"asyncpg"})

    def status(self, driver_connection: Any) -> Status:
        """Return OPEN, NONE, or BUSY for a closed connection.

        asyncpg cannot tell an aborted transaction from an open one; the guard remembers the error instead.
        """
        if driver_connection.is_closed():
            return Status.BUSY
        return Status.OPEN if driver_connection.is_in_transaction() else Status.NONE

    def committing(self, driver_connection: Any) -> AbstractContextManager[None]:
        """Return a block for COMMIT; it raises ``TimeoutError`` if the wait for a synchronous standby was ended."""
        if driver_connection.is_closed():  # asyncpg adds no listener then
            return nullcontext()
        return confirming(
            driver_connection.add_log_listener,
            driver_connection.remove_log_listener,
            routine_of=lambda message: message.server_source_function,
        )

    def refuse_pooler(self, dialect: EngineDialect, dbapi_connection: Any, driver_connection: Any) -> None:
        """Raise ``UnsupportedDatabaseError`` if the connection leads through a pooler and asyncpg numbers statements.

        asyncpg also prepares the statement that asks, whose name shows whether statements are numbered.
        """
        begun = driver_connection.is_in_transaction()
        backend, is_numbered = ask_backend(dialect, dbapi_connection, begun=begun)
        if is_numbered and backend != driver_connection.get_server_pid():
            raise numbered_behind_pooler(_ASYNCPG_WITHOUT_NUMBERS)


def _names_parameters(connection: Connection) -> bool:
    """True if SQLAlchemy writes parameters as ``%(name)s``, which it does unless the user chose another style."""
    return bool(connection.dialect.paramstyle == "pyformat")


@cache
def _psycopg_claim() -> ModuleType:
    """Import and return ``psycopg_claim``: only now, since psycopg is perhaps not installed for the other drivers."""
    from . import psycopg_claim

    return psycopg_claim
