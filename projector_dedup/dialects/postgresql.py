"""PostgreSQL: the claim waits on the unique index; lost updates are refused at REPEATABLE READ."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from types import ModuleType
from typing import Any

from sqlalchemy import URL, FromClause, Row, Table
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable

from ..closing import connected
from ..findings import Finding, advice
from ..transaction_text import OPAQUE, Grammar
from . import postgresql_catalog, postgresql_rows
from .answers import Failure, Status, sqlstate_of
from .claims import Key, Parameters, inserted
from .interface import Dialect
from .levels import LEVEL_OF_BEGIN
from .listeners import listen_once
from .migrating import lock_transaction
from .places import place_of_server
from .plain_tables import Wanted
from .postgresql_claim import claim_many, claim_names, insert_markers
from .postgresql_errors import classify, commit_refused
from .postgresql_pooler import asking, refusing
from .postgresql_pruning import picking, sweep
from .postgresql_standby import confirming
from .pruning import Expired, Route

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

    def place_of(self, url: URL) -> Hashable | None:
        """The database by its host and name, whichever its schemas."""
        return place_of_server(url, port=5432, names={"host", "hostaddr", "port", "dbname", "service"})

    def prepare(self, engine: Engine) -> None:
        """Behind a pooler, refuse what names prepared statements by number: so do its other clients (docs/adr/0011)."""
        listen_once(engine, before_others=True, checkout=[refusing(engine.dialect)])
        with asking(), connected(engine):
            pass  # for those that have no units of work: a command

    def opening(
        self, engine: Engine, *, marked: bool, locking: bool = False, chosen: bool = False
    ) -> AbstractContextManager[None]:
        """Each connection is asked at its first unit of work."""
        return asking()

    pruning_isolation = "READ COMMITTED"  # above it, what another cleaner deleted is a serialization failure

    def detecting_isolation(self, engine: Engine) -> str | None:
        """There the second writer of a row gets 40001."""
        return "REPEATABLE READ"

    def claim_begins(self, connection: Connection) -> bool:
        """psycopg 3."""
        return _speaks_to_libpq(connection) and _psycopg_claim().can_begin(connection.connection.driver_connection)

    def claim_statement(self, marker: Table, *, bounded: bool, names: int = 1) -> Executable:
        """Nothing is raised for a marker that is there: it would abort the transaction."""
        return insert_markers(marker, bounded=bounded, names=names)

    def claim(
        self, connection: Connection, statement: Executable, marker: Table, key: Mapping[str, Any], *, names: int = 1
    ) -> bool:
        """BEGIN and the claim are one round trip, if the driver can do that."""
        with _beginning(connection):
            if names == 1:
                return inserted(connection, statement, key) == 1
            new = connection.execute(statement, key).scalars().all()
        return claim_names(connection, marker, key["message_id"], new, names)

    def claim_and_read(
        self, connection: Connection, marker: Table, wanted: Wanted, parameters: Parameters
    ) -> Row[Any] | None:
        """As ``claim``."""
        with _beginning(connection):
            return super().claim_and_read(connection, marker, wanted, parameters)

    def claim_many(self, connection: Connection, marker: Table, keys: Sequence[Parameters]) -> set[Key]:
        """One statement for any number: it says which rows are new."""
        return claim_many(connection, marker, keys)

    def transaction_id(self, connection: Connection) -> str | None:
        """It names no table, so that it is found under whatever search_path and role a handler has chosen."""
        found = "SELECT pg_catalog.pg_current_xact_id()::pg_catalog.text"
        transaction_id: str = Connection.exec_driver_sql(connection, found).scalar_one()  # past any guard
        return transaction_id

    def has_committed(self, connection: Connection, transaction_id: str) -> bool:
        """By the server's own record."""
        status = f"SELECT pg_catalog.pg_xact_status('{int(transaction_id)}'::pg_catalog.xid8)"
        return bool(Connection.exec_driver_sql(connection, status).scalar_one() == "committed")

    def is_only(self, connection: Connection, table: Table) -> bool:
        """Another schema may have a table of its name."""
        return postgresql_catalog.namesakes(connection, table) <= 1

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

    def committing(self, driver_connection: Any) -> AbstractContextManager[None]:
        """Hears that a wait for a synchronous standby was ended."""
        return confirming(driver_connection)

    def status(self, driver_connection: Any) -> Status:
        """asyncpg cannot tell an aborted transaction from an open one: there the guard remembers the error."""
        if hasattr(driver_connection, "pgconn"):  # psycopg 3; its .info would be made anew each time
            return _LIBPQ_STATUS[driver_connection.pgconn.transaction_status]
        if hasattr(driver_connection, "is_in_transaction"):
            if driver_connection.is_closed():
                return Status.BUSY
            return Status.OPEN if driver_connection.is_in_transaction() else Status.NONE
        return _LIBPQ_STATUS[driver_connection.info.transaction_status]

    def aborts(self, error: DBAPIError) -> bool:
        """Any error that the server sent aborts the transaction."""
        return sqlstate_of(error) is not None

    def classify(self, error: Exception) -> Failure:
        """By SQLSTATE, which every driver has; their classes differ."""
        return classify(error)

    def commit_refused(self, error: DBAPIError) -> bool:
        """An error of a COMMIT that the living server sent means: rolled back."""
        return commit_refused(error)


def _beginning(connection: Connection) -> AbstractContextManager[object]:
    """Within, the first statement takes BEGIN along, if the driver is one that can do that."""
    if not _speaks_to_libpq(connection):
        return nullcontext()
    beginning: AbstractContextManager[object] = _psycopg_claim().beginning(
        connection.connection.driver_connection, connection.get_execution_options().get(LEVEL_OF_BEGIN)
    )
    return beginning


def _speaks_to_libpq(connection: Connection) -> bool:
    """True if the driver is psycopg 3, and SQLAlchemy names parameters as it does where nothing else is asked for."""
    driver: Any = connection.connection.driver_connection
    return hasattr(driver, "pgconn") and connection.dialect.paramstyle == "pyformat"


@cache
def _psycopg_claim() -> ModuleType:
    """Imported where there is a connection of psycopg's: then there is psycopg."""
    from . import psycopg_claim

    return psycopg_claim
