"""What a database must be able to say, so that the rest of the library need not know which one it is.

Where nothing else is said, a dialect does what the SQL standard and PEP 249 lead one to expect.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import Any, ClassVar

from sqlalchemy import FromClause, Row, Table, select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool
from sqlalchemy.sql import Executable

from ..errors import UnsafeSessionError, UnsupportedDatabaseError
from ..findings import Finding
from ..transaction_text import Grammar
from .answers import Failure, Status
from .claims import Key, Parameters, look_then_insert
from .columns import utc_now
from .plain_tables import PlainRows
from .pruning import Expired, Route, by_index

LEVELS = ("READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
LEVEL_OF_BEGIN = "projector_dedup_level"  #: the execution option that says it where ``Dialect.claim_begins``


def refuse_shared_connection(connection: Connection) -> None:
    """Raise where all threads and tasks get one connection: one's COMMIT would commit the other's marker."""
    if isinstance(connection.engine.pool, StaticPool):
        raise UnsupportedDatabaseError(
            "this engine shares one connection between all threads and tasks (StaticPool, the default of aiosqlite's "
            ":memory:), so their transactions would mix; give the dispatcher an engine with a pool of its own, and for "
            "SQLite a file, such as sqlite:///read_model.db"
        )


class Dialect(ABC):
    """One database. A dialect holds no state: one instance serves every engine."""

    names: ClassVar[frozenset[str]]  #: as SQLAlchemy calls it
    drivers: ClassVar[frozenset[str]]
    grammar: ClassVar[Grammar] = Grammar()

    locks_rows: ClassVar[bool] = True
    """Whether FOR UPDATE locks rows; else writers are serialised, and nothing needs it."""

    pruning_isolation: ClassVar[str | None] = None
    """The level at which a cleaner meets only the rows that it deletes; None where there is nothing to choose."""

    untried: ClassVar[bool] = False
    """Whether nobody knows it: it is probed before the first claim, and asked before every COMMIT."""

    keeps_zones: ClassVar[bool] = False
    """Whether it has a type of moments that need no agreement on their time zone."""

    bounds_waits: ClassVar[bool] = True
    """Whether it knows ``claim_timeout``; else the bounded claim is refused."""

    locking_isolation: ClassVar[str] = "READ COMMITTED"
    """The level for entities in ``read_models``, where FOR UPDATE locks them."""

    doom_lasts: ClassVar[bool] = False
    """Whether statements go on succeeding in a transaction that the server has rolled back."""

    begins_with_level: ClassVar[bool] = False
    """Whether the driver says the level with BEGIN, so that asking for it costs nothing and outlives nothing."""

    commits_duplicates: ClassVar[bool] = False
    """Whether the transaction of a claim that found a duplicate had better end by COMMIT than by ROLLBACK."""

    claims_may_read: ClassVar[bool] = False
    """Whether ``claim_and_read`` and ``is_known`` are worth a thought."""

    transactional_ddl: ClassVar[bool | None] = None
    """Whether a migration is one transaction; None for what Alembic thinks of the database."""

    plain_rows: ClassVar[PlainRows] = PlainRows()
    """What it can tell of tables whose rows may be read early and written late."""

    # Opening a unit of work -----------------------------------------------------------------------------------------

    def prepare(self, engine: Engine) -> None:  # noqa: B027  # most need nothing
        """What an engine needs once, before its first unit of work; again if that was interrupted. Or refuse it."""

    @abstractmethod
    def detecting_isolation(self, engine: Engine) -> str | None:
        """The weakest level at which the database itself refuses a lost update; None where writers are serialised."""

    def opening(self, *, marked: bool) -> AbstractContextManager[None]:
        """Entered while the connection of a unit of work is taken from the pool."""
        return nullcontext()

    def claim_begins(self, connection: Connection) -> bool:
        """Whether ``claim`` would send BEGIN, at ``LEVEL_OF_BEGIN``: the driver lets it, and nothing has begun."""
        return False

    def refuse_unsafe(self, connection: Connection) -> None:
        """Raise ``RefusedError`` for an engine on which the promise would not hold. No round trip to a server."""
        refuse_shared_connection(connection)
        driver = connection.connection.dbapi_connection
        if driver is not None and connection.dialect.detect_autocommit_setting(driver):
            raise UnsafeSessionError(
                "the engine is in AUTOCOMMIT: marker and read model would be committed one by one; give the "
                "dispatcher an engine without it, such as engine.execution_options(isolation_level='REPEATABLE READ')"
            )

    def refuse_table(self, connection: Connection, table: Table) -> None:  # noqa: B027
        """Raise ``UnsafeSessionError`` for a table whose rows no rollback takes back. Asks once for each table."""

    def refuse_marker(self, connection: Connection, marker: Table) -> None:
        """The same for the marker table, and ``MissingTableError`` where a claim would not notice what it lacks."""
        self.refuse_table(connection, marker)

    def begin(self, connection: Connection, marker: Table | None, wait: float | None) -> None:  # noqa: B027
        """What must run before the claim, if there is to be one in ``marker``; ``wait`` bounds it in seconds."""

    def begin_around(self, connection: Connection, marker: Table | None) -> None:
        """The same, where a savepoint comes before the claim: it must not be the outermost."""
        self.begin(connection, marker, None)

    # The marker -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def claim_statement(self, marker: Table, *, bounded: bool, names: int = 1) -> Executable:
        """Insert ``:message_id, :handler, :occurred_at``, in the form that ``claim`` understands.

        ``bounded``: it also takes ``:wait_ms`` and fails with a lock timeout when it waited longer. With several
        ``names`` it inserts one row for each, in the order of ``handler_parameters``.
        """

    def claim(
        self, connection: Connection, statement: Executable, marker: Table, key: Mapping[str, Any], *, names: int = 1
    ) -> bool:
        """Run the claim: True if every marker is new, False if one was there; anything else raises ``DBAPIError``."""
        return len(connection.execute(statement, key).all()) == names

    def is_known(self, connection: Connection, statement: Executable, key: Parameters) -> bool | None:
        """Whether ``statement`` finds the marker; None where to look costs as much as a claim that meets it."""
        return None

    def claim_and_read(
        self, connection: Connection, statement: Executable, marker: Table, parameters: Parameters
    ) -> Row[Any] | None:
        """Run a claim of ``PlainRows.claiming``: what it gives, None for a duplicate.

        Raises ``UnreadableRowError`` where it was perhaps not the claim that failed, after which nothing may commit.
        """
        return self.plain_rows.claim(connection, statement, parameters)

    def claim_many(self, connection: Connection, marker: Table, keys: Sequence[Parameters]) -> set[Key]:
        """Claim several markers, given in the order of their locks; returns the new ones, or raises ``OvertakenError``.

        ``keys`` are the parameters of ``claim_statement``; those with ``wait_ms`` are bounded.
        """
        return look_then_insert(
            connection,
            marker,
            keys,
            lambda part: self.insert_many(connection, marker, part),
            lambda error: self.classify(error) is Failure.UNIQUE,
        )

    def insert_many(self, connection: Connection, marker: Table, keys: list[Parameters]) -> None:
        """Insert markers of ``keys`` for ``claim_many``, all or none, in their order."""
        connection.execute(self.claim_statement(marker, bounded="wait_ms" in keys[0]), keys)

    def mark_transaction(self, connection: Connection) -> None:
        """Leave something in the transaction of the claim that ends with it, for ``is_marked``."""
        Connection.exec_driver_sql(connection, "SAVEPOINT projector_dedup")  # past any guard of the connection

    def is_marked(self, connection: Connection, marker: Table, key: Mapping[str, Any] | None) -> bool:
        """Whether the transaction that is open now is the one that was marked. A round trip, to be made once."""
        try:
            Connection.exec_driver_sql(connection, "RELEASE SAVEPOINT projector_dedup")
        except DBAPIError as error:
            if connection.invalidated or self.classify(error) is Failure.TRANSIENT:
                raise
            return False
        return True

    def abandon(self, connection: Connection) -> None:
        """Roll back what is open, if anything is, now that the transaction of the claim is not."""
        Connection.exec_driver_sql(connection, "ROLLBACK")

    # Pruning --------------------------------------------------------------------------------------------------------

    def now(self, connection: Connection) -> datetime:
        """By the clock that the claims were stamped with, in UTC."""
        found: datetime = connection.execute(select(utc_now())).scalar_one()
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)

    @abstractmethod
    def prune_statement(self, marker: Table, *, of_handler: bool = False) -> Executable:
        """Delete the oldest ``:batch_size`` markers from before ``:cutoff``, of ``:handler`` if ``of_handler``.

        What others hold is left to them, where the database can do that.
        """

    def pruning_route(self, connection: Connection, expired: Expired) -> Route:
        """The fastest way through what is expired. It may leave what others hold; then the index is asked."""
        return self.index_route(expired)

    def index_route(self, expired: Expired) -> Route:
        """Oldest first, until nothing is found."""
        return by_index(self.prune_statement(expired.marker, of_handler=expired.handler is not None), expired)

    def migrating(self, connection: Connection, name: str) -> AbstractContextManager[None]:
        """Entered in the transaction of a migration of the table set ``name``: a second one waits for the first.

        Within, whatever would have to wait for other transactions fails with a lock timeout after a moment.
        """
        return nullcontext()

    # What the people who run it want to know ------------------------------------------------------------------------

    def findings(self, connection: Connection, marker: Table) -> list[Finding]:
        """Settings of this database and of the marker table that are wrong, or could be better."""
        return []

    def measured(self, connection: Connection, table: Table) -> tuple[int | None, int | None]:
        """About how many rows, and bytes with all indexes, by the catalogue: None where only counting would tell."""
        return None, None

    def sampled(self, connection: Connection, marker: Table, rows: int, of: int) -> FromClause:
        """``handler`` and ``processed_at`` of about ``rows`` markers of about ``of``; of all where there is no way."""
        return marker

    # What happened --------------------------------------------------------------------------------------------------

    @abstractmethod
    def status(self, driver_connection: Any) -> Status:
        """How the transaction stands. Reads the driver's memory: no round trip."""

    def dooms(self, error: DBAPIError) -> bool:
        """Whether the error ended the transaction, or made the server refuse what follows outside a savepoint."""
        return False

    @abstractmethod
    def classify(self, error: Exception) -> Failure:
        """By SQLSTATE or driver code, never by class or text; ``error`` may be the driver's own, or no database's."""

    @abstractmethod
    def commit_refused(self, error: DBAPIError) -> bool:
        """Whether an error of COMMIT is the server's answer that it did *not* commit."""
