"""What a database must be able to say; where a dialect says nothing else, what the SQL standard and PEP 249 expect."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from sqlalchemy import URL, Row, Table
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable

from ..errors import UnsafeSessionError
from ..transaction_text import Grammar
from .answers import Failure, Status
from .claims import Key, Parameters, look_then_insert
from .levels import is_as_strict
from .maintenance import Maintenance
from .places import place_of_server
from .plain_tables import PlainRows, Wanted, claiming
from .shared_connection import refuse_sharing


class Dialect(Maintenance):
    """One database. A dialect holds no state: one instance serves every engine."""

    names: ClassVar[frozenset[str]]  #: as SQLAlchemy calls it
    drivers: ClassVar[frozenset[str]]
    grammar: ClassVar[Grammar] = Grammar()

    locks_rows: ClassVar[bool] = True
    """Whether FOR UPDATE locks rows; else writers are serialised, and nothing needs it."""

    untried: ClassVar[bool] = False
    """Whether nobody knows it: it is probed before the first claim, and asked before every COMMIT."""

    bounds_waits: ClassVar[bool] = True
    """Whether it knows ``claim_timeout``; else the bounded claim is refused."""

    locking_isolation: ClassVar[str] = "READ COMMITTED"
    """The level for entities in ``read_models``, where FOR UPDATE locks them."""

    abort_lasts: ClassVar[bool] = False  #: Whether statements go on succeeding in a transaction that was rolled back

    begins_with_level: ClassVar[bool] = False
    """Whether the driver says the level with BEGIN, so that asking for it costs nothing and outlives nothing."""

    commits_duplicates: ClassVar[bool] = False
    """Whether the transaction of a claim that found a duplicate had better end by COMMIT than by ROLLBACK."""

    claims_may_read: ClassVar[bool] = False
    """Whether ``claim_and_read`` spares a round trip, or the ORM's work for a SELECT."""

    plain_rows: ClassVar[PlainRows] = PlainRows()
    """What it can tell of tables whose rows may be read early and written late."""

    def place_of(self, url: URL) -> Hashable | None:
        """Tells two databases apart, and engines of one database not; None where ``url`` does not say."""
        return place_of_server(url)

    def lives_in_connection(self, url: URL) -> bool:
        """True if the database is gone when its last connection is closed."""
        return False

    # Opening a unit of work -----------------------------------------------------------------------------------------

    def prepare(self, engine: Engine) -> None:  # most need nothing
        """What an engine needs once, before its first unit of work; again if that was interrupted. Or refuse it."""

    @abstractmethod
    def detecting_isolation(self, engine: Engine) -> str | None:
        """The weakest level at which the database itself refuses a lost update; None where none is to be asked for."""

    def detects_lost_updates(self, connection: Connection, level: str) -> bool:
        """True if a ``level`` that the user chose is one at which no update is lost on this connection."""
        detecting = self.detecting_isolation(connection.engine)
        return detecting is None or is_as_strict(level, detecting)

    def opening(
        self, engine: Engine, *, marked: bool, locking: bool = False, chosen: bool = False
    ) -> AbstractContextManager[None]:
        """Entered while the connection of a unit of work is taken from the pool.

        ``locking``: what changes is read under lock. ``chosen``: the isolation level is the user's.
        """
        return nullcontext()

    def claim_begins(self, connection: Connection) -> bool:
        """Whether ``claim`` would send BEGIN, at ``LEVEL_OF_BEGIN``: the driver lets it, and nothing has begun."""
        return False

    def refuse_unsafe(self, connection: Connection) -> None:
        """Raise ``RefusedError`` for an engine on which the promise would not hold. No round trip to a server."""
        refuse_sharing(connection)
        driver = connection.connection.dbapi_connection
        if driver is not None and connection.dialect.detect_autocommit_setting(driver):
            raise UnsafeSessionError(
                "the engine is in AUTOCOMMIT: marker and read model would be committed one by one; give the "
                "dispatcher an engine without it, such as engine.execution_options(isolation_level='REPEATABLE READ')"
            )

    def refuse_table(self, connection: Connection, table: Table) -> None:
        """Raise ``UnsafeSessionError`` for a table whose rows no rollback takes back."""

    def refuse_marker(self, connection: Connection, marker: Table) -> None:
        """The same for the marker table, and ``MissingTableError`` where a claim would not notice what it lacks."""
        self.refuse_table(connection, marker)

    def begin(self, connection: Connection, marker: Table | None, wait: float | None) -> None:
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

    def claim_and_read(
        self, connection: Connection, marker: Table, wanted: Wanted, parameters: Parameters
    ) -> Row[Any] | None:
        """Insert the marker and read the rows ``wanted``: what ``PlainRows.claiming`` gives, None for a duplicate.

        The statement is made here, for the connection at hand: one of another database might insert nothing.
        Raises ``UnreadableRowError`` where it was perhaps not the claim that failed, after which nothing may commit.
        """
        statement = claiming(self.plain_rows, marker, wanted)
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

    def transaction_id(self, connection: Connection) -> str | None:
        """What tells the open transaction from any other for good; None where ``mark_transaction`` is to mark it."""
        return None

    def has_committed(self, connection: Connection, transaction_id: str) -> bool:
        """True if the transaction that had that id, and is not open any more, has committed."""
        raise NotImplementedError

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

    def place(self, connection: Connection) -> str | None:
        """The schema in which tables without one are now, where that is one and a handler may change it."""
        return None

    def is_only(self, connection: Connection, table: Table) -> bool:
        """True if the name leads to ``table`` only, whichever schema, database or role a handler has chosen since."""
        return True

    def abandon(self, connection: Connection) -> None:
        """Roll back what is open, if anything is, now that the transaction of the claim is not."""
        Connection.exec_driver_sql(connection, "ROLLBACK")

    # What happened --------------------------------------------------------------------------------------------------

    def committing(self, driver_connection: Any) -> AbstractContextManager[None]:
        """Entered around COMMIT. Raises ``TimeoutError`` if the answer says that the commit may yet be lost."""
        return nullcontext()

    @abstractmethod
    def status(self, driver_connection: Any) -> Status:
        """How the transaction stands. Reads the driver's memory: no round trip."""

    def aborts(self, error: DBAPIError) -> bool:
        """Whether the error ended the transaction, or made the server refuse what follows outside a savepoint."""
        return False

    @abstractmethod
    def classify(self, error: Exception) -> Failure:
        """By SQLSTATE or driver code, never by class or text; ``error`` may be the driver's own, or no database's."""

    @abstractmethod
    def commit_refused(self, error: DBAPIError) -> bool:
        """Whether an error of COMMIT is the server's answer that it did *not* commit."""
