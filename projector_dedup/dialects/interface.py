"""Define what a dialect must say of its database; the defaults are what the SQL standard and PEP 249 expect."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from sqlalchemy import Table
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import SingletonThreadPool, StaticPool
from sqlalchemy.sql import Executable

from ..errors import UnsafeSessionError, UnsupportedDatabaseError
from ..transaction_text import Grammar
from .answers import Failure, Status
from .claims import Key, Parameters, look_then_insert
from .last_statement import LastStatements
from .levels import is_as_strict
from .maintenance import Maintenance


class Dialect(Maintenance, LastStatements):
    """Says how a database does what a unit of work needs. It holds no state: one instance serves every engine."""

    names: ClassVar[frozenset[str]]  #: SQLAlchemy's names of the database
    drivers: ClassVar[frozenset[str]]  #: SQLAlchemy's names of the drivers
    modules: ClassVar[frozenset[str]] = frozenset()  #: modules of the drivers' errors, if they are not named as drivers
    grammar: ClassVar[Grammar] = Grammar()  #: tells by its text whether a statement may end the transaction

    locks_rows: ClassVar[bool] = True
    """True if FOR UPDATE locks rows; False where writers take turns, so that no row needs a lock."""

    locking_isolation: ClassVar[str] = "READ COMMITTED"
    """The isolation level for handlers whose entities in ``read_models`` are locked by FOR UPDATE."""

    abort_lasts: ClassVar[bool] = False
    """True if statements still succeed after the server rolled back, so that the error has to be remembered."""

    begins_with_level: ClassVar[bool] = False
    """True if the driver sends the level with BEGIN: to choose it costs no round trip and ends with the transaction."""

    commits_duplicates: ClassVar[bool] = False
    """True if the transaction of a claim that found a duplicate had better end by COMMIT than by ROLLBACK."""

    remembers_tables: ClassVar[bool] = False
    """True if findings about tables are kept for a connection, so that a listener that moves it must be looked for."""

    # Opening a unit of work -----------------------------------------------------------------------------------------

    def prepare(self, engine: Engine) -> None:  # most need nothing
        """Make an engine ready before its first unit of work, or raise an error that refuses it.

        Called once for each engine, and again if the first call was interrupted.
        """

    @abstractmethod
    def detecting_isolation(self, engine: Engine) -> str | None:
        """Return the weakest level at which the database refuses lost updates; None if no level is to be chosen."""

    def detects_lost_updates(self, connection: Connection, level: str | None) -> bool:
        """True if no update is lost on this connection at ``level``; None stands for the one that ``opening`` sets."""
        detecting = self.detecting_isolation(connection.engine)
        return detecting is None or (level is not None and is_as_strict(level, detecting))

    def opening(
        self, engine: Engine, *, marked: bool, locking: bool = False, chosen: bool = False
    ) -> AbstractContextManager[None]:
        """Return a block in which the connection of a unit of work is taken from the pool.

        ``marked``: the unit of work claims messages. ``locking``: it reads what it changes under lock. ``chosen``: the
        user chose the isolation level.
        """
        return nullcontext()

    def claim_begins(self, connection: Connection) -> bool:
        """True if ``claim`` would send BEGIN with it, at ``LEVEL_OF_BEGIN``: possible if no transaction has begun."""
        return False

    def refuse_unsafe(self, connection: Connection) -> None:
        """Raise ``RefusedError`` for an engine on which the promise would not hold. Sends nothing to a server."""
        self.refuse_sharing(connection.engine)
        driver = connection.connection.dbapi_connection
        if driver is not None and connection.dialect.detect_autocommit_setting(driver):
            raise UnsafeSessionError(
                "the engine is in AUTOCOMMIT: marker and read model would be committed one by one; give the "
                "dispatcher an engine without it, such as engine.execution_options(isolation_level='REPEATABLE READ')"
            )

    def refuse_sharing(self, engine: Engine) -> None:
        """Raise ``UnsupportedDatabaseError`` for a pool that gives one connection to several users at once."""
        if isinstance(engine.pool, (StaticPool, SingletonThreadPool)):
            raise UnsupportedDatabaseError(
                f"the pool of this engine ({type(engine.pool).__name__}) gives several sessions the same connection, "
                "so one of them would commit or roll back the work of another. Leave out poolclass=. For SQLite use a "
                "file, such as sqlite:///read_model.db: in memory, SQLAlchemy chooses such a pool"
            )

    def refuse_table(self, connection: Connection, table: Table) -> None:
        """Raise ``UnsafeSessionError`` for a table without transactions, whose rows a rollback does not remove."""

    def refuse_marker(self, connection: Connection, marker: Table) -> None:
        """Raise ``UnsafeSessionError`` for a marker table without transactions.

        Also raise ``MissingTableError`` if it lacks its unique index and a claim would not notice.
        """
        self.refuse_table(connection, marker)

    def begin(self, connection: Connection, marker: Table | None, wait: float | None) -> None:
        """Run what must come before the claim; ``wait`` bounds the claim's wait, in seconds.

        ``marker`` is the table of the claim, or None if the unit of work makes none.
        """

    def begin_around(self, connection: Connection, marker: Table | None) -> None:
        """Run what must come before a savepoint that the claim is in: BEGIN, or that would be the transaction."""
        self.begin(connection, marker, None)

    # The marker -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def claim_statement(self, marker: Table, *, bounded: bool, names: int = 1) -> Executable:
        """Return an INSERT of ``:message_id, :handler, :occurred_at``, for ``claim`` to run.

        If ``bounded``, it also takes ``:wait_ms``, and fails with a lock timeout when it waited longer. With several
        ``names`` it inserts a row for each, in the order of ``handler_parameters``.
        """

    def claim(
        self, connection: Connection, statement: Executable, marker: Table, key: Mapping[str, Any], *, names: int = 1
    ) -> bool:
        """Run the claim, and return True if every marker is new, False if one of them was there.

        Raises ``DBAPIError`` for anything else.
        """
        return len(connection.execute(statement, key).all()) == names

    def claim_many(self, connection: Connection, marker: Table, keys: Sequence[Parameters]) -> set[Key]:
        """Claim several markers and return the keys of the new ones.

        ``keys`` are the parameters of ``claim_statement``, in the order in which every delivery locks them; those with
        ``wait_ms`` are bounded. Raises ``OvertakenError`` if another delivery claimed one of them at the same time.
        """
        return look_then_insert(
            connection,
            marker,
            keys,
            lambda part: self.insert_many(connection, marker, part),
            lambda error: self.classify(error) is Failure.UNIQUE,
        )

    def insert_many(self, connection: Connection, marker: Table, keys: list[Parameters]) -> None:
        """Insert the markers of ``keys`` for ``claim_many``, all or none, in the order given."""
        connection.execute(self.claim_statement(marker, bounded="wait_ms" in keys[0]), keys)

    def transaction_id(self, connection: Connection) -> str | None:
        """Return an id that no other transaction ever has.

        Return None if the database has none; ``mark_transaction`` is used then.
        """
        return None

    def has_committed(self, connection: Connection, transaction_id: str) -> bool:
        """True if the transaction with this id has committed; it is not open any more when this is asked."""
        raise NotImplementedError

    def mark_transaction(self, connection: Connection) -> None:
        """Leave a savepoint in the transaction of the claim, which ends with it, for ``is_marked`` to find."""
        Connection.exec_driver_sql(connection, "SAVEPOINT projector_dedup")  # past any guard of the connection

    def is_marked(self, connection: Connection) -> bool:
        """True if the transaction that is open now is the one that ``mark_transaction`` marked.

        Takes a round trip and removes the mark, so it can be asked once.
        """
        try:
            Connection.exec_driver_sql(connection, "RELEASE SAVEPOINT projector_dedup")
        except DBAPIError as error:
            if connection.invalidated or self.classify(error) is Failure.TRANSIENT:
                raise
            return False
        return True

    def place(self, connection: Connection) -> str | None:
        """Return the schema of tables that name none, if a handler may change it; None if not, or if it is several."""
        return None

    def is_only(self, connection: Connection, table: Table) -> bool:
        """True if the name of ``table`` leads to no other one, whatever schema, database or role was chosen since."""
        return True

    def abandon(self, connection: Connection) -> None:
        """Roll back whatever transaction is open after that of the claim has ended; do nothing if none is."""
        Connection.exec_driver_sql(connection, "ROLLBACK")

    # What happened --------------------------------------------------------------------------------------------------

    def committing(self, driver_connection: Any) -> AbstractContextManager[None]:
        """Return a block for COMMIT; it raises ``TimeoutError`` if the server says that the commit may yet be lost."""
        return nullcontext()

    @abstractmethod
    def status(self, driver_connection: Any) -> Status:
        """Return how the transaction stands, by what the driver remembers: without a round trip."""

    def aborts(self, error: DBAPIError) -> bool:
        """True if the error ended the transaction, or makes the server refuse what follows outside a savepoint."""
        return False

    @abstractmethod
    def classify(self, error: Exception) -> Failure:
        """Return what the error means, by its SQLSTATE or the driver's code, never by its text.

        ``error`` may also be the driver's own, or come from no database at all.
        """

    @abstractmethod
    def commit_refused(self, error: DBAPIError) -> bool:
        """True if an error of COMMIT is the server's answer that it did *not* commit."""
