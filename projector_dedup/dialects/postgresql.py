"""PostgreSQL: the claim waits on the unique index; lost updates are refused at REPEATABLE READ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any
from uuid import uuid4

from sqlalchemy import (
    FromClause,
    Row,
    Table,
    literal_column,
    select,
)
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable

from ..errors import UnsupportedDatabaseError
from ..findings import Finding, advice
from ..transaction_text import OPAQUE, Grammar
from . import postgresql_catalog, postgresql_rows
from .answers import Failure, Status, sqlstate_of
from .claims import Key, Parameters, inserted
from .interface import LEVEL_OF_BEGIN, Dialect
from .migrating import lock_transaction
from .postgresql_claim import insert_many, insert_markers, inserted_here
from .postgresql_pruning import picking, sweep
from .pruning import Expired, Route

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
_NO_TABLE = {
    *("42P01", "42703", "42P10", "3F000"),  # undefined table, column, unique index, schema
    *("22001", "23502"),  # a column that is too short, that takes no NULL and has no default
}
_MAYBE_COMMITTED = {"40003", "57P01", "57P02"}  # a shutdown may come after a local commit, before its answer

_BACKEND_AND_NUMBERED = """
    SELECT pg_backend_pid(), EXISTS (
        SELECT FROM pg_prepared_statements WHERE prepare_time >= now() AND starts_with(name, '__asyncpg_stmt_')
    )"""
_UNNAMED_PSYCOPG = "{'prepare_threshold': None}"
_UNNAMED_ASYNCPG = (
    "{'statement_cache_size': 0, 'prepared_statement_cache_size': 0, 'prepared_statement_name_func': str}"
)

# libpq's PGTransactionStatusType: idle, active, in transaction, in an aborted transaction, unknown
_LIBPQ_STATUS = (Status.NONE, Status.BUSY, Status.OPEN, Status.ABORTED, Status.BUSY)


class PostgreSQL(Dialect):
    """PostgreSQL 13 and later."""

    names = frozenset({"postgresql"})
    drivers = frozenset({"psycopg", "psycopg_async", "psycopg2", "asyncpg"})
    grammar = Grammar(
        # strings with backslash escapes, and dollar quotes
        opaque=(r"(?<![a-z0-9_])e'(?:[^'\\]|\\.|'')*'", *OPAQUE[:2], r"\$(\w*)\$.*?\$\1\$", *OPAQUE[2:])
    )
    begins_with_level = True
    keeps_zones = True
    commits_duplicates = True  # at a ROLLBACK psycopg forgets what it has prepared, and has the server forget it
    claims_may_read = True
    plain_rows = postgresql_rows.PostgreSQLRows()

    def prepare(self, engine: Engine) -> None:
        """Behind a pooler, refuse what names prepared statements by number: so do its other clients (docs/adr/0011)."""
        with engine.connect() as connection:
            driver: Any = connection.connection.driver_connection
            never_cached = f"{_BACKEND_AND_NUMBERED} -- {uuid4()}"
            backend, numbered = connection.exec_driver_sql(never_cached).one()
            asyncpg = hasattr(driver, "get_server_pid")
            known = driver.get_server_pid() if asyncpg else driver.info.backend_pid  # while it is open
        if backend == known:
            return  # no pooler: it would have made up a process of its own
        if numbered or getattr(driver, "prepare_threshold", None) is not None:
            raise UnsupportedDatabaseError(
                "this engine reaches PostgreSQL through a pooler, such as PgBouncer, and prepares statements under "
                "names that other clients of the pooler give to statements of theirs: it could run one of those. "
                f"Give create_engine(connect_args={_UNNAMED_ASYNCPG if asyncpg else _UNNAMED_PSYCOPG})"
            )

    pruning_isolation = "READ COMMITTED"  # above it, what another cleaner deleted is a serialization failure

    def detecting_isolation(self, engine: Engine) -> str | None:
        """There the second writer of a row gets 40001."""
        return "REPEATABLE READ"

    def claim_begins(self, connection: Connection) -> bool:
        """psycopg 3."""
        driver: Any = connection.connection.driver_connection
        return hasattr(driver, "pgconn") and _psycopg_claim().can_begin(driver)

    def claim_statement(self, marker: Table, *, bounded: bool, names: int = 1) -> Executable:
        """Nothing is raised for a marker that is there: it would abort the transaction."""
        return insert_markers(marker, bounded=bounded, names=names)

    def claim(
        self, connection: Connection, statement: Executable, marker: Table, key: Mapping[str, Any], *, names: int = 1
    ) -> bool:
        """BEGIN and the claim are one round trip, if the driver can do that."""
        with _beginning(connection):
            return inserted(connection, statement, key) == names

    def is_known(self, connection: Connection, statement: Executable, key: Parameters) -> bool | None:
        """Without BEGIN, where the driver can do that: one round trip, and none to end the transaction.

        None also where a listener has sent something of its own before it, which may be for a transaction only.
        """
        driver: Any = connection.connection.driver_connection
        if not hasattr(driver, "pgconn"):
            return None
        with _psycopg_claim().looking(driver) as sent:
            if sent is None:
                return None
            with connection.execute(statement, key) as result:
                return result.rowcount > 0 if len(sent) == 1 else None  # of a cursor of ours, which knows it

    def claim_and_read(
        self, connection: Connection, statement: Executable, marker: Table, parameters: Parameters
    ) -> Row[Any] | None:
        """As ``claim``."""
        with _beginning(connection):
            return super().claim_and_read(connection, statement, marker, parameters)

    def claim_many(self, connection: Connection, marker: Table, keys: Sequence[Parameters]) -> set[Key]:
        """One statement for any number: it says which rows are new."""
        return {(row[0], row[1]) for row in connection.execute(*insert_many(marker, keys)).all()}

    def mark_transaction(self, connection: Connection) -> None:
        """The marker's row is mark enough."""

    def is_marked(self, connection: Connection, marker: Table, key: Mapping[str, Any] | None) -> bool:
        """The row's xmin is the transaction that inserted it."""
        statement = select(literal_column("1")) if key is None else inserted_here(marker)
        return Connection.execute(connection, statement, key).first() is not None  # past any guard

    def prune_statement(self, marker: Table, *, of_handler: bool = False) -> Executable:
        """Rows another cleaner holds are left to it."""
        return picking(marker, of_handler=of_handler)

    def pruning_route(self, connection: Connection, expired: Expired) -> Route:
        """Page after page, if most of the table is expired."""
        return sweep(connection, expired) or self.index_route(expired)

    def index_route(self, expired: Expired) -> Route:
        """Each statement is a transaction."""
        return replace(super().index_route(expired), isolation="AUTOCOMMIT")

    def findings(self, connection: Connection, marker: Table) -> list[Finding]:
        """A standby accepts no markers; and how the table is stored and vacuumed."""
        found = postgresql_catalog.storage(connection, marker)
        if connection.exec_driver_sql("SELECT pg_is_in_recovery()").scalar_one():
            found.append(advice("this server is a standby: it cannot store markers", "give the URL of the primary"))
        return found

    def measured(self, connection: Connection, table: Table) -> tuple[int | None, int | None]:
        """By the planner."""
        return postgresql_catalog.measured(connection, table)

    def sampled(self, connection: Connection, marker: Table, rows: int, of: int) -> FromClause:
        """By TABLESAMPLE."""
        return postgresql_catalog.sampled(marker, min(1, rows / of))

    def migrating(self, connection: Connection, name: str) -> AbstractContextManager[None]:
        """An advisory lock."""
        lock_transaction(connection, name)
        return nullcontext()

    def status(self, driver_connection: Any) -> Status:
        """asyncpg cannot tell an aborted transaction from an open one: there the guard remembers the error."""
        if hasattr(driver_connection, "pgconn"):  # psycopg 3; its .info would be made anew each time
            return _LIBPQ_STATUS[driver_connection.pgconn.transaction_status]
        if hasattr(driver_connection, "is_in_transaction"):
            if driver_connection.is_closed():
                return Status.BUSY
            return Status.OPEN if driver_connection.is_in_transaction() else Status.NONE
        return _LIBPQ_STATUS[driver_connection.info.transaction_status]

    def dooms(self, error: DBAPIError) -> bool:
        """Any error that the server sent aborts the transaction."""
        return sqlstate_of(error) is not None

    def classify(self, error: Exception) -> Failure:
        """By SQLSTATE, which every driver has; their classes differ."""
        sqlstate = sqlstate_of(error) or ""
        if sqlstate == _LOCK_TIMEOUT:
            return Failure.LOCK_TIMEOUT
        if getattr(error, "connection_invalidated", False) or sqlstate in _TRANSIENT or sqlstate.startswith("08"):
            return Failure.TRANSIENT
        if sqlstate in _UNIQUE:
            return Failure.UNIQUE
        return Failure.NO_TABLE if sqlstate in _NO_TABLE else Failure.PERMANENT

    def commit_refused(self, error: DBAPIError) -> bool:
        """An error of a COMMIT that the living server sent means: rolled back."""
        sqlstate = sqlstate_of(error)
        return (
            sqlstate is not None
            and not error.connection_invalidated
            and not sqlstate.startswith("08")
            and sqlstate not in _MAYBE_COMMITTED
        )


def _beginning(connection: Connection) -> AbstractContextManager[object]:
    """Within, the first statement takes BEGIN along, if the driver is one that can do that."""
    driver: Any = connection.connection.driver_connection
    if not hasattr(driver, "pgconn"):
        return nullcontext()
    beginning: AbstractContextManager[object] = _psycopg_claim().beginning(
        driver, connection.get_execution_options().get(LEVEL_OF_BEGIN)
    )
    return beginning


@cache
def _psycopg_claim() -> ModuleType:
    """Imported where there is a connection of psycopg's: then there is psycopg."""
    from . import psycopg_claim

    return psycopg_claim
