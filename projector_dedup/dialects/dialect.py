"""The interface between a delivery and a database, with the SQL standard and PEP 249 as defaults.

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
LEVEL_OF_BEGIN = "projector_dedup_level"  #: the execution option with the level, if the claim sends BEGIN


def is_as_strict(found: str, level: str) -> bool:
    """True if the level ``found`` is ``level``, or rules out all anomalies that ``level`` rules out."""
    return found == level or (found in LEVELS and level in LEVELS[: LEVELS.index(found)])


def chosen_level(source: Engine | Connection) -> str | None:
    """Return the level that the user gave to ``execution_options()`` or ``create_engine()``, or None."""
    level: str | None = source.get_execution_options().get("isolation_level")
    if level is None:  # create_engine() stores it only under a private name
        level = getattr(source.dialect, "_on_connect_isolation_level", None)
    return level


def quoted_name(connection: Connection, table: Table) -> str:
    """Return the table's name with its schema, quoted, after the ``schema_translate_map`` of ``connection``."""
    quote, schema = connection.dialect.identifier_preparer.quote, connection.schema_for_object(table)
    return ".".join(quote(part) for part in (schema, table.name) if part)


# The meaning of errors, and the status of a transaction --------------------------------------------------------------


class Failure(Enum):
    """The meaning of a database error for the unit of work."""

    TRANSIENT = "transient"  #: no bug: retry the whole unit of work
    READ_ONLY = "read only"  #: retry on another connection, because another server has become the primary
    LOCK_TIMEOUT = "lock timeout"  #: retry; for a claim with claim_timeout it means InProgress
    UNIQUE = "unique"  #: a concurrent transaction may have inserted the row: retry a few times
    LATER = "later"  #: will probably last longer than seconds, such as a full disk or a cancelled statement
    NO_TABLE = "no table"  #: for a claim: the marker table is missing, or has wrong columns
    PERMANENT = "permanent"  #: a retry would fail again


class Status(Enum):
    """The status of the transaction, as the driver knows it without asking the server."""

    OPEN = "open"  #: a transaction is open, or the driver cannot tell
    ABORTED = "aborted"  #: an error aborted the transaction: the server accepts no statement but ROLLBACK
    NONE = "none"  #: no transaction is open
    BUSY = "busy"  #: a statement was interrupted half-way, or the connection is gone


class Snapshot(Enum):
    """When a transaction takes the snapshot of the rows that its later reads show."""

    NEVER = "never"  #: each statement sees the newest rows, or locks what it reads
    CLAIM = "claim"  #: with its first statement, which is the claim
    READ = "read"  #: with its first SELECT that locks nothing


def sqlstate_of(error: Exception) -> str | None:
    """Return the SQLSTATE of an error, or None if the server sent none, for example because the connection was lost.

    psycopg2 calls it pgcode, and pg8000 has it in the fields of PostgreSQL's protocol.
    """
    for each in _driver_errors(error):
        value = getattr(each, "sqlstate", None) or getattr(each, "pgcode", None)
        if value is None and isinstance(fields := next(iter(getattr(each, "args", ())), None), dict):
            value = fields.get("C")
        if isinstance(value, str):
            return value
    return None


def routine_of(error: Exception) -> str | None:
    """Return the function of PostgreSQL's source code that raised the error, or None if the server did not name it."""
    for each in _driver_errors(error):
        said = getattr(each, "diag", each)  # psycopg keeps the fields of an error there
        value = getattr(said, "source_function", None) or getattr(said, "server_source_function", None)
        if isinstance(value, str):
            return value
    return None


def is_operational(error: Exception) -> bool:
    """True if an error is an ``OperationalError`` of PEP 249, which is rarely a bug of the program."""
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
    """The last statement of a unit of work's transaction. Afterwards ``row`` is its result."""

    def __init__(self, statement: Executable, parameters: Mapping[str, Any]) -> None:
        self.statement = statement
        self.parameters = parameters
        self.row: Row[Any] | None = None  # the first row, or None if there is none

    def run(self, connection: Connection) -> None:
        """Execute the statement, bypassing the guard of the connection, and keep the first row of its result."""
        result = Connection.execute(connection, self.statement, self.parameters)
        self.row = result.first() if result.returns_rows else None


class LastChange(LastStatement):
    """An UPDATE from ``Dialect.changing`` that must change exactly ``rows`` rows."""

    def __init__(self, statement: Executable, parameters: Mapping[str, Any], rows: int) -> None:
        super().__init__(statement, parameters)
        self.rows = rows

    def run(self, connection: Connection) -> None:
        """Execute the UPDATE. Raises ``TransactionViolatedError`` if the rows are missing."""
        try:
            result = Connection.execute(connection, self.statement, self.parameters)
            changed = result.scalar() if result.returns_rows else result.rowcount
        except DBAPIError as error:
            if sqlstate_of(error) not in _NOT_THERE:
                raise
            changed = 0
        if changed != self.rows:
            raise TransactionViolatedError(
                "the row of the claim is missing: the handler deleted or changed it, or selected another schema, "
                "database or role for the rest of the transaction. Everything was rolled back; correct the handler"
            )


# The dialect ---------------------------------------------------------------------------------------------------------


class Dialect(ABC):
    """How a database does what a unit of work needs. It has no state, so one instance serves every engine."""

    names: ClassVar[frozenset[str]]  #: SQLAlchemy's names of the database
    drivers: ClassVar[frozenset[str]]  #: SQLAlchemy's names of the drivers
    modules: ClassVar[frozenset[str]] = frozenset()  #: modules of the drivers' errors, if they differ from ``drivers``
    grammar: ClassVar[Grammar] = Grammar()  #: finds statements that may end the transaction by their text

    locks_rows: ClassVar[bool] = True
    """True if FOR UPDATE locks rows, False if the database serialises writers, so that no row needs a lock."""

    detecting_isolation: ClassVar[str | None] = None
    """The weakest level at which the database refuses lost updates, or None if ``opening`` sets it or none matters."""

    locking_isolation: ClassVar[str] = "READ COMMITTED"
    """The isolation level for handlers with ``read_models``, whose rows FOR UPDATE locks."""

    abort_lasts: ClassVar[bool] = False
    """True if statements still succeed after the server rolled back, so that the guard must remember the error."""

    begins_with_level: ClassVar[bool] = False
    """True if the driver sends the level with BEGIN, which costs no round trip and ends with the transaction."""

    commits_duplicates: ClassVar[bool] = False
    """True if the transaction of a duplicate must end with COMMIT, not with ROLLBACK."""

    remembers_tables: ClassVar[bool] = False
    """True if the results of table checks are kept for each connection. A listener may then switch the database."""

    # Opening a unit of work -----------------------------------------------------------------------------------------

    def prepare(self, engine: Engine) -> None:  # most need nothing
        """Prepare an engine before its first unit of work, or refuse it by an error.

        The library calls it once for each engine, and again if the first call was interrupted.
        """

    def detects_lost_updates(self, connection: Connection, level: str | None) -> bool:
        """True if no update is lost on this connection at ``level`` (None: the level that ``opening`` sets)."""
        detecting = self.detecting_isolation
        return detecting is None or (level is not None and is_as_strict(level, detecting))

    def default_level(self, connection: Connection) -> str | None:
        """Return the isolation level that a session of the user's, which chooses none, has on this connection."""
        level: str | None = connection.dialect.default_isolation_level
        return level

    def snapshot(self, connection: Connection, level: str | None) -> Snapshot:
        """Return when a transaction takes its snapshot at ``level`` (None: the level that ``opening`` sets)."""
        return Snapshot.NEVER

    def opening(
        self, engine: Engine, *, marked: bool, locking: bool = False, chosen: bool = False, wait: float | None = None
    ) -> AbstractContextManager[None]:
        """Return a block in which a unit of work takes its connection from the pool.

        ``marked``: the unit of work claims messages. ``locking``: it reads the rows that it changes under lock.
        ``chosen``: the user has chosen the isolation level. ``wait`` limits the claim's wait, in seconds.
        """
        return nullcontext()

    def claim_begins(self, connection: Connection) -> bool:
        """True if ``claim`` would also send BEGIN, at ``LEVEL_OF_BEGIN``. No transaction must have begun."""
        return False

    def refuse_unsafe(self, connection: Connection) -> None:
        """Raise ``RefusedError`` for an engine on which the guarantees would not hold. Send nothing to the server."""
        self.refuse_sharing(connection.engine)
        driver = connection.connection.dbapi_connection
        if driver is not None and connection.dialect.detect_autocommit_setting(driver):
            raise UnsafeSessionError(
                "the engine is in AUTOCOMMIT, so marker and read model would be committed separately; give the "
                "dispatcher an engine without it, such as engine.execution_options(isolation_level='REPEATABLE READ')"
            )

    def refuse_sharing(self, engine: Engine) -> None:
        """Raise ``UnsupportedDatabaseError`` for a pool that gives the same connection to several sessions at once."""
        if isinstance(engine.pool, (StaticPool, SingletonThreadPool)):
            raise UnsupportedDatabaseError(
                f"the pool of this engine ({type(engine.pool).__name__}) gives several sessions the same connection, "
                "so one of them would commit or roll back the work of another. Remove poolclass=. For SQLite use a "
                "file, such as sqlite:///read_model.db, because SQLAlchemy chooses such a pool for a database in memory"
            )

    def refuse_table(self, connection: Connection, table: Table) -> None:
        """Raise ``UnsafeSessionError`` for a table without transactions, because a rollback would not undo changes."""

    def refuse_marker(self, connection: Connection, marker: Table) -> None:
        """Raise ``UnsafeSessionError`` for a marker table without transactions.

        Also raise ``MissingTableError`` if it lacks its unique index and a claim would not notice.
        """
        self.refuse_table(connection, marker)

    def begin(self, connection: Connection, marker: Table | None, wait: float | None) -> None:
        """Run the statements that must come before the claim. ``wait`` limits the claim's wait, in seconds.

        ``marker`` is the table of the claim, or None without a claim.
        """

    def limit_waits(self, connection: Connection) -> None:  # most servers have a limit of their own
        """Limit how long a statement of the transaction waits for a lock, where the server would wait for ever."""

    def lock_nothing(self, connection: Connection) -> None:  # on most servers, no plain SELECT does
        """Let the plain SELECTs of the transaction that begins now lock nothing, so they wait for nobody."""

    def begin_around(self, connection: Connection, marker: Table | None) -> None:
        """Send BEGIN before the savepoint of an external transaction, which would else be the transaction itself."""
        self.begin(connection, marker, None)

    # The marker -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def claim_statement(self, marker: Table, *, bounded: bool, names: int = 1, digest: bool = False) -> Executable:
        """Return the INSERT of ``:message_id, :handler, :occurred_at`` that ``claim`` runs.

        If ``bounded``, it also has the parameter ``:wait_ms``, and fails with a lock timeout if it waits longer. With
        several ``names`` it inserts a row for each, in the order of ``handler_parameters``. With ``digest`` it also
        inserts ``:digest``.
        """

    @abstractmethod
    def lock_statement(self, marker: Table, *, bounded: bool) -> Executable:
        """Return an upsert with the same parameters, which locks the row in both cases.

        If ``bounded``, it also has the parameter ``:wait_ms``, like a claim.
        """

    def claim(
        self, connection: Connection, statement: Executable, marker: Table, key: Mapping[str, Any], *, names: int = 1
    ) -> bool:
        """Run the claim. Return True if every marker is new, False if one exists, by the row count.

        Raises ``DBAPIError`` in every other case.
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
        """Insert the markers of ``keys`` for ``claim_many``, all or none, in this order."""
        statement = self.claim_statement(marker, bounded="wait_ms" in keys[0], digest="digest" in keys[0])
        connection.execute(statement, keys)

    def insert_new(self, connection: Connection, table: Table, values: Mapping[str, Any]) -> bool:
        """Insert a row into a table of the library. Return False if its message id and handler exist already."""
        try:
            connection.execute(table.insert().values(values))
        except DBAPIError as error:
            if self.classify(error) is Failure.UNIQUE:
                return False
            raise
        return True

    def transaction_id(self, connection: Connection) -> str | None:
        """Return an id that no other transaction ever has.

        Return None if the database has no such id. The guard then uses ``mark_transaction``.
        """
        return None

    def mark_transaction(self, connection: Connection) -> None:
        """Set a savepoint in the transaction of the claim, by which ``is_marked`` recognises the transaction."""
        Connection.exec_driver_sql(connection, "SAVEPOINT projector_dedup")  # bypasses the guard of the connection

    def is_marked(self, connection: Connection) -> bool:
        """True if the open transaction is the one that ``mark_transaction`` marked.

        The call costs a round trip and removes the mark, so call it only once.
        """
        try:
            Connection.exec_driver_sql(connection, "RELEASE SAVEPOINT projector_dedup")
        except DBAPIError as error:
            if connection.invalidated or self.classify(error) is Failure.TRANSIENT:
                raise
            return False
        return True

    # The last statement of a transaction -----------------------------------------------------------------------------

    def changing(self, update: Update, rows: int) -> Executable:
        """Return the statement for a ``LastChange`` of ``rows`` rows.

        If COMMIT can be sent with the statement, the statement must fail if it changes another number of rows.
        """
        return update

    def commit_goes_along(self, connection: Connection, driver_connection: Any) -> bool:
        """True if COMMIT can be sent with the last statement, in one round trip instead of two."""
        return False

    def taking_commit_along(self, driver_connection: Any) -> AbstractContextManager[object]:
        """Return a block in which a statement is sent together with COMMIT. Used only if ``commit_goes_along``."""
        return nullcontext()

    # The result -----------------------------------------------------------------------------------------------------

    def committing(self, driver_connection: Any) -> AbstractContextManager[None]:
        """Return a block for COMMIT. It raises ``TimeoutError`` if the server reports that the commit may be lost."""
        return nullcontext()

    @abstractmethod
    def status(self, driver_connection: Any) -> Status:
        """Return the status of the transaction as the driver knows it, without a round trip."""

    def aborts(self, error: Exception) -> bool:
        """True if the error ended the transaction, or if the server then refuses statements outside a savepoint.

        ``error`` may be SQLAlchemy's or the driver's, or no database error at all.
        """
        return False

    @abstractmethod
    def classify(self, error: Exception) -> Failure:
        """Return the meaning of the error, by its SQLSTATE or the driver's code, never by its text.

        ``error`` may be SQLAlchemy's or the driver's, or no database error at all.
        """

    def misses_parent(self, error: Exception) -> bool:
        """True if a foreign key was violated, and the snapshot may hide the row that it refers to."""
        return False

    @abstractmethod
    def commit_refused(self, error: DBAPIError) -> bool:
        """True if an error of COMMIT proves that the server did *not* commit."""


def insert_and_count(connection: Connection, statement: Executable, parameters: Parameters) -> int:
    """Execute the INSERT ``statement`` and return its row count, which costs less than RETURNING.

    Raises ``UnsupportedDatabaseError`` if the driver reports no row count.
    """
    count = connection.execute(statement, parameters).rowcount
    if count < 0:
        raise UnsupportedDatabaseError(
            "the driver does not report how many rows the claim has inserted; use another driver"
        )
    return count


# The registry --------------------------------------------------------------------------------------------------------

_DIALECTS: dict[tuple[str, str], Dialect] = {}
_BY_MODULE: dict[str, Dialect] = {}


def register(dialect: Dialect) -> None:
    """Use ``dialect`` for its ``names`` and ``drivers`` from now on. A later dialect for the same driver replaces it.

    The library trusts a registered dialect. Run the contract suite to find out whether your database keeps the
    guarantees (docs/bring-your-database.md).
    """
    _DIALECTS.update({(name, driver): dialect for name in dialect.names for driver in dialect.drivers})
    for module in dialect.modules or dialect.drivers:
        _BY_MODULE.setdefault(module, dialect)  # a driver may serve two databases, and its errors do not name which


def dialect_of(bind: Engine | Connection) -> Dialect:
    """Return the dialect that was registered for the database and driver of ``bind``.

    Raises ``UnsupportedDatabaseError`` for any other database or driver.
    """
    spoken = bind.dialect
    found = _DIALECTS.get((spoken.name, spoken.driver))
    if found is None:
        supported = ", ".join(sorted(f"{name}+{driver}" for name, driver in _DIALECTS))
        raise UnsupportedDatabaseError(
            f"{spoken.name}+{spoken.driver} is not supported. Use one of {supported}, or write a dialect for it, run "
            "the contract suite, and call projector_dedup.dialects.register (docs/bring-your-database.md)"
        )
    return found


def failure_of(error: Exception) -> Failure | None:
    """Return the meaning of a database error by the dialect of its driver, or None for any other error.

    ``error`` is SQLAlchemy's or the driver's. If no dialect is registered for the driver, as for a second database of a
    handler, the function knows only SQLAlchemy's errors, by their SQLSTATE or their class of PEP 249.
    """
    for module in modules_of(error):
        if module in _BY_MODULE:
            return _BY_MODULE[module].classify(error)
    if not isinstance(error, DBAPIError):
        return None
    if error.connection_invalidated or (sqlstate_of(error) or "").startswith(("08", "40")):
        return Failure.TRANSIENT
    return Failure.LATER if isinstance(error, (OperationalError, InternalError)) else Failure.PERMANENT
