"""Define what a delivery asks of a database, with the answers of the SQL standard and PEP 249 as defaults.

Each database has a file beside this one, with a subclass of ``Dialect``, and a subclass of that for each driver.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, ClassVar

from sqlalchemy import Row, Table, Update
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, InternalError, OperationalError
from sqlalchemy.pool import SingletonThreadPool, StaticPool
from sqlalchemy.sql import Executable

from ..errors import TransactionViolatedError, UnsafeSessionError, UnsupportedDatabaseError
from ..transaction_text import Grammar
from .claims import Key, Parameters, look_then_insert

LEVELS = ("READ UNCOMMITTED", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
LEVEL_OF_BEGIN = "projector_dedup_level"  #: the execution option with the level, where the claim sends BEGIN


def is_as_strict(found: str, level: str) -> bool:
    """True if the level ``found`` is ``level``, or rules out all anomalies that ``level`` rules out."""
    return found == level or (found in LEVELS and level in LEVELS[: LEVELS.index(found)])


def chosen_level(source: Engine | Connection) -> str | None:
    """Return the level that the user gave to ``execution_options()`` or ``create_engine()``; None if there is none."""
    level: str | None = source.get_execution_options().get("isolation_level")
    if level is None:  # create_engine() keeps it under a private name only
        level = getattr(source.dialect, "_on_connect_isolation_level", None)
    return level


# What an error means, and how a transaction stands -------------------------------------------------------------------


class Failure(Enum):
    """Says what a database error means for the unit of work that met it."""

    TRANSIENT = "transient"  #: no bug; it passes: retry the whole unit of work
    READ_ONLY = "read only"  #: transient, but not on this connection: another server has become the primary
    LOCK_TIMEOUT = "lock timeout"  #: transient, but on a claim with claim_timeout it means InProgress
    UNIQUE = "unique"  #: a rival may have created the row: run again, a few times
    LATER = "later"  #: passes, but hardly within seconds: a full disk, a statement that somebody cancelled
    NO_TABLE = "no table"  #: on a claim: the marker table is missing, or not ours
    PERMANENT = "permanent"  #: running again would fail again


class Status(Enum):
    """Says how the transaction stands, as the driver knows it without asking the server."""

    OPEN = "open"  #: a transaction is open, or the driver cannot tell
    ABORTED = "aborted"  #: an error aborted the transaction: the server accepts no statement but ROLLBACK
    NONE = "none"  #: no transaction is open
    BUSY = "busy"  #: a statement was interrupted half-way, or the connection is gone


def sqlstate_of(error: Exception) -> str | None:
    """Return the SQLSTATE of an error; None if the server sent nothing, because the connection was lost.

    psycopg2 calls it pgcode, and pg8000 has it among the fields of PostgreSQL's protocol.
    """
    for each in _driver_errors(error):
        value = getattr(each, "sqlstate", None) or getattr(each, "pgcode", None)
        if value is None and isinstance(fields := next(iter(getattr(each, "args", ())), None), dict):
            value = fields.get("C")
        if isinstance(value, str):
            return value
    return None


def routine_of(error: Exception) -> str | None:
    """Return the function of PostgreSQL's source that raised the error; None if the server did not name it."""
    for each in _driver_errors(error):
        said = getattr(each, "diag", each)  # psycopg keeps the fields of an error there
        value = getattr(said, "source_function", None) or getattr(said, "server_source_function", None)
        if isinstance(value, str):
            return value
    return None


def is_operational(error: Exception) -> bool:
    """True if an error is an ``OperationalError`` of PEP 249, for which the program is rarely to blame."""
    original = getattr(error, "orig", error)
    return any(each.__name__ == "OperationalError" for each in type(original).__mro__)


def modules_of(error: Exception) -> Iterator[str]:
    """Yield the modules that an error's classes come from: the name of the driver is among them, if it is a driver's.

    SQLAlchemy's adapters for asyncio have classes of their own, in a module that ends with the driver's name.
    """
    for each in type(getattr(error, "orig", error)).__mro__:
        module = str(each.__module__)  # a class may be made with anything there
        yield module.rpartition(".")[2] if module.startswith("sqlalchemy.dialects.") else module.partition(".")[0]


def _driver_errors(error: Exception) -> Iterator[object]:
    """Yield the driver's errors behind an error of SQLAlchemy's.

    For asyncpg SQLAlchemy puts an error of its own in between, which does not always have the SQLSTATE of its cause.
    """
    original = getattr(error, "orig", error)
    yield original
    if type(original).__module__.startswith("sqlalchemy."):
        yield original.__cause__


# The last statement --------------------------------------------------------------------------------------------------

_NOT_THERE = {
    "22012",  # division_by_zero: another number of rows than was expected (Dialect.changing)
    "42501",  # insufficient_privilege: for a role that the handler chose
    "42P01",  # undefined_table: in a schema that the handler chose
}


class LastStatement:
    """A statement that a unit of work runs behind everything else in its transaction; ``row`` is its answer then."""

    def __init__(self, statement: Executable, parameters: Mapping[str, Any]) -> None:
        self.statement = statement
        self.parameters = parameters
        self.row: Row[Any] | None = None  # the first one; None also if there was none

    def run(self, connection: Connection) -> None:
        """Execute the statement past any guard of the connection, and keep the first row of its answer."""
        result = Connection.execute(connection, self.statement, self.parameters)
        self.row = result.first() if result.returns_rows else None


class LastChange(LastStatement):
    """An UPDATE, as ``Dialect.changing`` made it, that changes a given number of ``rows``, or is an error."""

    def __init__(self, statement: Executable, parameters: Mapping[str, Any], rows: int) -> None:
        super().__init__(statement, parameters)
        self.rows = rows

    def run(self, connection: Connection) -> None:
        """Execute the UPDATE. Raises ``TransactionViolatedError`` if the rows were not there any more."""
        try:
            result = Connection.execute(connection, self.statement, self.parameters)
            changed = result.scalar() if result.returns_rows else result.rowcount
        except DBAPIError as error:
            if sqlstate_of(error) not in _NOT_THERE:
                raise
            changed = 0
        if changed != self.rows:
            raise TransactionViolatedError(
                "the row of the claim is not there any more: the handler deleted or changed it, or chose another "
                "schema, database or role for the rest of the transaction. Everything was rolled back"
            )


# The dialect ---------------------------------------------------------------------------------------------------------


class Dialect(ABC):
    """Says how a database does what a unit of work needs. It holds no state: one instance serves every engine."""

    names: ClassVar[frozenset[str]]  #: SQLAlchemy's names of the database
    drivers: ClassVar[frozenset[str]]  #: SQLAlchemy's names of the drivers
    modules: ClassVar[frozenset[str]] = frozenset()  #: modules of the drivers' errors, if they are not named as drivers
    grammar: ClassVar[Grammar] = Grammar()  #: tells by its text whether a statement may end the transaction

    locks_rows: ClassVar[bool] = True
    """True if FOR UPDATE locks rows; False where writers take turns, so that no row needs a lock."""

    detecting_isolation: ClassVar[str | None] = None
    """The weakest level at which the database refuses lost updates; None if ``opening`` chooses or no level matters."""

    locking_isolation: ClassVar[str] = "READ COMMITTED"
    """The isolation level for handlers whose entities in ``read_models`` are locked by FOR UPDATE."""

    abort_lasts: ClassVar[bool] = False
    """True if statements still succeed after the server rolled back, so that the error has to be remembered."""

    begins_with_level: ClassVar[bool] = False
    """True if the driver sends the level with BEGIN: it costs no round trip then, and ends with the transaction."""

    commits_duplicates: ClassVar[bool] = False
    """True if the transaction of a claim that found a duplicate must end by COMMIT, not by ROLLBACK."""

    remembers_tables: ClassVar[bool] = False
    """True if findings about tables are kept for a connection, so that a listener may switch its database unnoticed."""

    # Opening a unit of work -----------------------------------------------------------------------------------------

    def prepare(self, engine: Engine) -> None:  # most need nothing
        """Make an engine ready before its first unit of work, or raise an error that refuses it.

        Called once for each engine, and again if the first call was interrupted.
        """

    def detects_lost_updates(self, connection: Connection, level: str | None) -> bool:
        """True if no update is lost on this connection at ``level``; None stands for the one that ``opening`` sets."""
        detecting = self.detecting_isolation
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
        """Send BEGIN before the savepoint of an external transaction, which would otherwise be the transaction."""
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
        """Run the claim, and return True if its row count says that every marker is new, False if one was there.

        Raises ``DBAPIError`` for anything else.
        """
        return insert_and_count(connection, statement, key) == names

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

    def insert_new(self, connection: Connection, table: Table, values: Mapping[str, Any]) -> bool:
        """Insert a row into a table of ours; return False if a row with its message id and handler is there."""
        try:
            connection.execute(table.insert().values(values))
        except DBAPIError as error:
            if self.classify(error) is Failure.UNIQUE:
                return False
            raise
        return True

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
        """Return the current default schema; None if a handler cannot change it, or if there are several."""
        return None

    def is_only(self, connection: Connection, table: Table) -> bool:
        """True if no other table has the name of ``table``, whatever schema, database or role the handler chose."""
        return True

    # The last statement of a transaction -----------------------------------------------------------------------------

    def changing(self, update: Update, rows: int) -> Executable:
        """Return the statement for a ``LastChange`` of so many ``rows``.

        If COMMIT can be sent with the statement, the statement fails if it changes another number of rows.
        """
        return update

    def commit_goes_along(self, connection: Connection, driver_connection: Any) -> bool:
        """True if COMMIT can be sent with the last statement, for one round trip instead of two."""
        return False

    def taking_commit_along(self, driver_connection: Any) -> AbstractContextManager[object]:
        """Return a block in which a statement takes COMMIT along; used only where ``commit_goes_along``."""
        return nullcontext()

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


def insert_and_count(connection: Connection, statement: Executable, parameters: Parameters) -> int:
    """Execute the INSERT ``statement`` and return how many rows it inserted: a row count costs less than RETURNING.

    Raises ``UnsupportedDatabaseError`` if the driver gives no row count.
    """
    count = connection.execute(statement, parameters).rowcount
    if count < 0:
        raise UnsupportedDatabaseError("the driver does not say how many rows the claim has inserted")
    return count


# The registry --------------------------------------------------------------------------------------------------------

_DIALECTS: dict[tuple[str, str], Dialect] = {}
_BY_MODULE: dict[str, Dialect] = {}


def register(dialect: Dialect) -> None:
    """Use ``dialect`` for its ``names`` and ``drivers`` from here on; of several for one driver the last is used.

    The library trusts a registered dialect. Run the contract suite to see whether your database keeps the promise
    (docs/bring-your-database.md).
    """
    _DIALECTS.update({(name, driver): dialect for name in dialect.names for driver in dialect.drivers})
    for module in dialect.modules or dialect.drivers:
        _BY_MODULE.setdefault(module, dialect)  # a driver may serve a second database, and its errors do not say which


def dialect_of(bind: Engine | Connection) -> Dialect:
    """Return the dialect that was registered for the database and driver of ``bind``.

    Raises ``UnsupportedDatabaseError`` for any other database or driver.
    """
    spoken = bind.dialect
    found = _DIALECTS.get((spoken.name, spoken.driver))
    if found is None:
        supported = ", ".join(sorted(f"{name}+{driver}" for name, driver in _DIALECTS))
        raise UnsupportedDatabaseError(
            f"{spoken.name}+{spoken.driver} is not supported. Use one of {supported}; or write a dialect for it, run "
            "the contract suite, and call projector_dedup.dialects.register (docs/bring-your-database.md)"
        )
    return found


def failure_of(error: Exception) -> Failure | None:
    """Return what an error of a database means, by the dialect of the driver that raised it; None for any other error.

    ``error`` is SQLAlchemy's, or the driver's own. If no dialect is registered for the driver, as for a second
    database of a handler, only SQLAlchemy's errors are known: by the classes of the SQLSTATE, or by those of PEP 249.
    """
    for module in modules_of(error):
        if module in _BY_MODULE:
            return _BY_MODULE[module].classify(error)
    if not isinstance(error, DBAPIError):
        return None
    if error.connection_invalidated or (sqlstate_of(error) or "").startswith(("08", "40")):
        return Failure.TRANSIENT
    return Failure.LATER if isinstance(error, (OperationalError, InternalError)) else Failure.PERMANENT
