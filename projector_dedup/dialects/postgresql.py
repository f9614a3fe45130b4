"""PostgreSQL: the claim waits on the unique index; lost updates are refused at REPEATABLE READ."""

from __future__ import annotations

from typing import Any

from sqlalchemy import DateTime, Select, Table, Text, bindparam, delete, func, literal_column, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import ColumnElement, Executable

from ..errors import UnsafeSessionError
from .interface import Dialect, Failure, Status

# Error codes: PostgreSQL documentation, appendix A.
_TRANSIENT = {
    "40001",  # serialization_failure: another transaction changed what this one had read
    "40P01",  # deadlock_detected
    "40003",  # statement_completion_unknown
    "57P01",  # admin_shutdown
    "57P02",  # crash_shutdown
    "57P03",  # cannot_connect_now
    "53300",  # too_many_connections
    "25P03",  # idle_in_transaction_session_timeout
}
_LOCK_TIMEOUT = "55P03"
_UNIQUE = {"23505", "23P01"}  # unique_violation, exclusion_violation
_NO_TABLE = {"42P01", "42703", "42P10", "3F000"}  # undefined table, column, unique index, schema
_MAYBE_COMMITTED = {"40003", "57P01", "57P02"}  # a shutdown may come after a local commit, before its answer


# libpq's PGTransactionStatusType: idle, active, in transaction, in an aborted transaction, unknown
_LIBPQ_STATUS = (Status.NONE, Status.BUSY, Status.OPEN, Status.ABORTED, Status.BUSY)


class PostgreSQL(Dialect):
    """PostgreSQL 13 and later."""

    name = "postgresql"
    drivers = frozenset({"psycopg", "psycopg_async", "asyncpg"})
    detecting_isolation = "REPEATABLE READ"

    def prepare(self, engine: Engine) -> None:
        """Nothing."""

    def refuse_unsafe(self, connection: Connection) -> None:
        """AUTOCOMMIT, however it was set: the driver knows."""
        driver = connection.connection.dbapi_connection
        if driver is not None and connection.dialect.detect_autocommit_setting(driver):
            raise UnsafeSessionError(
                "the engine is in AUTOCOMMIT: marker and read model would be committed one by one; give the "
                "dispatcher an engine without it, such as engine.execution_options(isolation_level='REPEATABLE READ')"
            )

    def begin(self, connection: Connection, wait: float | None) -> None:
        """Nothing: the driver sends BEGIN before the claim."""

    def claim_statement(self, marker: Table, *, bounded: bool) -> Executable:
        """ON CONFLICT names its columns, so that a table without the unique index is an error, not a double apply."""
        names = ["message_id", "handler", "occurred_at"]
        values: list[ColumnElement[Any]] = [
            bindparam("message_id", type_=Text()),
            bindparam("handler", type_=Text()),
            bindparam("occurred_at", type_=DateTime(timezone=True)),
        ]
        statement = insert(marker)
        if bounded:
            # One round trip for both; it goes on to bound the lock waits of the handler (docs/adr/0006).
            wait = func.set_config("lock_timeout", func.concat(bindparam("wait_ms", type_=Text()), "ms"), True)
            bound = select(wait.label("wait")).cte("bound").prefix_with("MATERIALIZED")
            statement = statement.from_select(names, select(*values).select_from(bound))
        else:
            statement = statement.values(dict(zip(names, values, strict=True)))
        return statement.on_conflict_do_nothing(index_elements=["message_id", "handler"]).returning(literal_column("1"))

    def ownership_statement(self, marker: Table) -> Executable:
        """The row's xmin is the transaction that inserted it."""
        return (
            select(literal_column("1"))
            .where(
                marker.c.message_id == bindparam("message_id"),
                marker.c.handler == bindparam("handler"),
                literal_column("xmin") == literal_column("pg_current_xact_id_if_assigned()::xid"),
            )
            .select_from(marker)
        )

    def prune_statement(self, marker: Table) -> Executable:
        """By physical address, which takes no second index lookup; rows another cleaner holds are left to it."""
        oldest: Select[Any] = (
            select(literal_column("ctid"))
            .select_from(marker)
            .where(marker.c.processed_at < func.now() - bindparam("seconds") * literal_column("interval '1 second'"))
            .order_by(marker.c.processed_at)
            .limit(bindparam("batch_size"))
            .with_for_update(skip_locked=True)
        )
        return delete(marker).where(literal_column("ctid") == func.any(func.array(oldest.scalar_subquery())))

    def advice(self, connection: Connection) -> list[tuple[str, str]]:
        """A standby accepts no markers."""
        if connection.exec_driver_sql("SELECT pg_is_in_recovery()").scalar_one():
            return [("this server is a standby: it cannot store markers", "give the URL of the primary")]
        return []

    def status(self, driver_connection: Any) -> Status:
        """asyncpg cannot tell an aborted transaction from an open one: there the guard remembers the error."""
        if hasattr(driver_connection, "is_in_transaction"):
            if driver_connection.is_closed():
                return Status.BUSY
            return Status.OPEN if driver_connection.is_in_transaction() else Status.NONE
        return _LIBPQ_STATUS[int(driver_connection.info.transaction_status)]

    def dooms(self, error: DBAPIError) -> bool:
        """Any error that the server sent aborts the transaction."""
        return _sqlstate(error) is not None

    def classify(self, error: Exception) -> Failure:
        """By SQLSTATE, which psycopg and asyncpg both have; their classes differ."""
        sqlstate = _sqlstate(error) or ""
        if sqlstate == _LOCK_TIMEOUT:
            return Failure.LOCK_TIMEOUT
        if getattr(error, "connection_invalidated", False) or sqlstate in _TRANSIENT or sqlstate.startswith("08"):
            return Failure.TRANSIENT
        if sqlstate in _UNIQUE:
            return Failure.UNIQUE
        return Failure.NO_TABLE if sqlstate in _NO_TABLE else Failure.PERMANENT

    def commit_refused(self, error: DBAPIError) -> bool:
        """An error of a COMMIT that the living server sent means: rolled back."""
        sqlstate = _sqlstate(error)
        return (
            sqlstate is not None
            and not error.connection_invalidated
            and not sqlstate.startswith("08")
            and sqlstate not in _MAYBE_COMMITTED
        )


def _sqlstate(error: Exception) -> str | None:
    value = getattr(getattr(error, "orig", error), "sqlstate", None)
    return value if isinstance(value, str) else None
