"""Use PostgreSQL: a claim waits on the unique index, and the server refuses lost updates at REPEATABLE READ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sqlalchemy import Table, Update, case, func, literal_column, select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.interfaces import Dialect as EngineDialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable

from ...closing import connected
from ...transaction_text import OPAQUE, Grammar
from ..answers import Failure, sqlstate_of
from ..claims import Key, Parameters, insert_and_count
from ..findings import Finding, advice
from ..interface import Dialect
from ..listeners import listen_once
from ..migrating import lock_transaction
from . import catalog
from .claim import claim_many, claim_names, insert_statement
from .cleanup import picking
from .errors import classify, commit_refused
from .pooler import asking, refusing
from .replication import replication


class PostgreSQL(Dialect):
    """Uses PostgreSQL 13 and later; ``drivers`` has a class for each driver, with what differs between them."""

    names = frozenset({"postgresql"})
    grammar = Grammar(
        # strings with backslash escapes, and dollar quotes
        opaque=(r"(?<![a-z0-9_])e'(?:[^'\\]|\\.|'')*'", *OPAQUE[:2], r"\$(\w*)\$.*?\$\1\$", *OPAQUE[2:])
    )
    begins_with_level = True
    keeps_zones = True
    commits_duplicates = True  # for a standby, and for what psycopg has prepared: ``ending.commit_duplicate``
    cleanup_isolation = "READ COMMITTED"  # above it, what another cleaner deleted is a serialization failure

    def prepare(self, engine: Engine) -> None:
        """Raise ``UnsupportedDatabaseError`` behind a pooler if the driver names prepared statements by number.

        Other clients of the pooler give the same names to other statements (docs/adr/0011).
        """
        listen_once(engine, before_others=True, checkout=[refusing(engine.dialect, self.refuse_pooler)])
        with asking(), connected(engine):
            pass  # for those that have no units of work: a command

    def refuse_pooler(self, dialect: EngineDialect, dbapi_connection: Any, driver_connection: Any) -> None:
        """Raise ``UnsupportedDatabaseError`` if a pooler would mix up the driver's prepared statements.

        Called once for each physical connection. Nothing is asked for a driver that numbers no statements.
        """

    def opening(
        self, engine: Engine, *, marked: bool, locking: bool = False, chosen: bool = False
    ) -> AbstractContextManager[None]:
        """Return a block in which each new connection of the pool is asked whether it leads through a pooler."""
        return asking()

    def detecting_isolation(self, engine: Engine) -> str | None:
        """Return REPEATABLE READ, where the second writer of a row gets 40001."""
        return "REPEATABLE READ"

    def claim_statement(self, marker: Table, *, bounded: bool, names: int = 1) -> Executable:
        """Return an INSERT that skips markers that are there.

        An error for such a marker would abort the transaction.
        """
        return insert_statement(marker, bounded=bounded, names=names)

    def claim(
        self, connection: Connection, statement: Executable, marker: Table, key: Mapping[str, Any], *, names: int = 1
    ) -> bool:
        """Run the claim and return True if every marker is new; in one round trip with BEGIN, if the driver can."""
        with self.beginning(connection):
            if names == 1:
                return insert_and_count(connection, statement, key) == 1
            new = connection.execute(statement, key).scalars().all()
        return claim_names(connection, marker, key["message_id"], new, names)

    def beginning(self, connection: Connection) -> AbstractContextManager[object]:
        """Return a block in which the first statement brings BEGIN along, where the driver can do that.

        Other drivers send BEGIN by themselves, and wait for its answer.
        """
        return nullcontext()

    def claim_many(self, connection: Connection, marker: Table, keys: Sequence[Parameters]) -> set[Key]:
        """Claim any number of markers in one statement, and return the keys of those that are new."""
        return claim_many(connection, marker, keys)

    def changing(self, update: Update, rows: int) -> Executable:
        """Return the UPDATE within a SELECT of how many rows it changed, which fails if that is not ``rows``."""
        changed = update.returning(literal_column("1")).cte("changed")
        found = func.count()
        return select(found / case((found == rows, 1), else_=0)).select_from(changed)

    def transaction_id(self, connection: Connection) -> str | None:
        """Return the server's number of the open transaction.

        The query names no table, so it works under whatever search_path and role a handler has chosen.
        """
        found = "SELECT pg_catalog.pg_current_xact_id()::pg_catalog.text"
        transaction_id: str = Connection.exec_driver_sql(connection, found).scalar_one()  # past any guard
        return transaction_id

    def has_committed(self, connection: Connection, transaction_id: str) -> bool:
        """True if the server's record says that the transaction with this number has committed."""
        status = f"SELECT pg_catalog.pg_xact_status('{int(transaction_id)}'::pg_catalog.xid8)"
        return bool(Connection.exec_driver_sql(connection, status).scalar_one() == "committed")

    def is_only(self, connection: Connection, table: Table) -> bool:
        """True if no other schema has a table of the same name."""
        return catalog.namesakes(connection, table) <= 1

    def cleanup_statement(self, marker: Table, *, of_handler: bool = False) -> Executable:
        """Return a DELETE of the oldest expired markers; it skips rows that another cleaner has locked."""
        return picking(marker, of_handler=of_handler)

    def findings(self, connection: Connection, marker: Table) -> list[Finding]:
        """Return what is wrong with the table's storage and vacuuming, and what a failover would keep."""
        found = catalog.storage(connection, marker)
        if connection.exec_driver_sql("SELECT pg_is_in_recovery()").scalar_one():
            found.append(advice("this server is a standby: it cannot store markers", "give the URL of the primary"))
            return found
        return [*found, *replication(connection)]

    def size(self, connection: Connection, table: Table) -> int | None:
        """Return the bytes of the table with all indexes."""
        return catalog.size(connection, table)

    def limit_waits(self, connection: Connection, seconds: float) -> str | None:
        """Set ``lock_timeout`` for the transaction: behind a pooler a session's setting would meet somebody else."""
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {max(1, round(seconds * 1000))}")
        return None

    def migrating(self, connection: Connection, name: str) -> AbstractContextManager[None]:
        """Take an advisory lock for the migration, and return a block without further effect."""
        lock_transaction(connection, name)
        return nullcontext()

    def aborts(self, error: DBAPIError) -> bool:
        """True if the server sent the error: any such error aborts the transaction."""
        return sqlstate_of(error) is not None

    def classify(self, error: Exception) -> Failure:
        """Return what the error means by its SQLSTATE, which every driver has; their classes of errors differ."""
        return classify(error)

    def commit_refused(self, error: DBAPIError) -> bool:
        """True if the server sent the error of COMMIT and goes on running: then it has rolled back."""
        return commit_refused(error)
