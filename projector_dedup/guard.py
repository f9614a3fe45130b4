"""Guard the transaction of a claim while a handler has it: the marker must commit with writes that are right.

A handler gets a real Session, so it can commit, roll back, close, or swallow the error that aborted the transaction.
Every statement of a session goes through its ``Connection``. So while a handler has the session, the class of this
connection is ``GuardedConnection``, which reports each statement, COMMIT and ROLLBACK to the unit of work's ``Guard``.

If the guard sees a violation in advance, it *prevents* it: it raises before anything is sent. It *detects* other
violations before COMMIT by asking the driver, which costs no round trip. It asks the server with ``strict=True``, and
if the handler used the driver's own connection, streamed a result or, on MariaDB, called a stored procedure, because no
driver reports what happens there. The guard asks one question: is the claim's transaction still the open one? If not,
the handler may have committed, and the guard does not find out what. The guard remembers a violation, also if the
handler swallows the exception, and then the unit of work never commits.

The guard also *gives an attempt up* if the handler would go on with rows that are older than it expects, because the
library has raised the isolation level (docs/adr/0004-lost-updates.md). Then the library runs the message again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, NoReturn

from sqlalchemy import Column, Delete, Insert, Select, Table, UniqueConstraint, Update, event, literal_column, select
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.schema import DefaultGenerator
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.sql.elements import ReleaseSavepointClause, RollbackToSavepointClause, SavepointClause

from .closing import roll_back
from .dialects import Dialect, Failure, LastStatement, Snapshot, Status, info_of, marker_exists
from .errors import OvertakenError, TransactionViolatedError, UnsafeSessionError
from .tables import DedupTables
from .transaction_text import sql_sent, sql_text

_SAVEPOINTS = (SavepointClause, RollbackToSavepointClause, ReleaseSavepointClause)
_MARK = "the mark"  # the entry for the mark in the list of savepoints
_ANY_TEXT = ""  # stands for the texts of all violations whose rows the library cannot look for
_MOST_REFUSALS = 100  # statements, until the guard ends the handler
_MOST_RUNS = 3  # for hidden rows at one level: then it is another constraint that the library does not know

_ENDED = (
    "the handler ended the transaction, or broke the connection, where SQLAlchemy does not see it: on the driver's own "
    "connection or in a procedure. What the handler wrote may be COMMITTED, and the marker with it. Look for the "
    "marker with `idempotency show`. If it is there, a redelivery is skipped as a duplicate: correct the read model by "
    "hand. If it is not, a redelivery runs the handler again: check first whether writes of the handler are committed"
)


class GuardedSession(Session):
    """The private Session class of a unit of work. The library's listeners never reach the user's own sessions."""

    guard: Guard | None = None  # while a handler has the session
    taken: tuple[Connection, ...] = ()  # the connections on which the session has begun transactions
    building = False  # True: the projector is building, so its handler cannot arm effects
    snapshot = Snapshot.NEVER  # when the transaction takes the snapshot that its reads show
    may_lower = False  # True: the library has raised the isolation level, and can run the handler at the default level
    accepted: frozenset[str] | None = None  # unique violations for which the message has run again; None: all
    is_flushing = False

    def flush(self, objects: Any = None) -> None:
        """Flush, and let the guard know that the statements are those of a flush."""
        self.is_flushing = True
        try:
            super().flush(objects)
        finally:
            self.is_flushing = False

    def before_rollback_to_savepoint(self) -> None:
        """Do nothing. A session with ``read_models`` forgets here the locks that the rollback may release."""

    def begin(self, nested: bool = False) -> SessionTransaction:
        """Begin a savepoint, or the transaction of the unit of work. Raises ``TransactionViolatedError`` in a handler.

        SQLAlchemy would only say that a transaction is already begun.
        """
        if self.guard is not None and not nested:
            self.guard.before_begin()
        return super().begin(nested)

    def connection(self, bind_arguments: Any = None, execution_options: Any = None) -> Connection:
        """Return the connection of the claim. Raises ``UnsafeSessionError`` for a schema map, which comes too late.

        SQLAlchemy would only warn, and ignore the map.
        """
        if self.guard is not None and "schema_translate_map" in (execution_options or {}):
            raise UnsafeSessionError(
                "session.connection(execution_options={'schema_translate_map': ...}) comes too late in a handler: "
                "the transaction has begun. Give the dispatcher an engine with the map, or give the statement the map"
            )
        return super().connection(bind_arguments=bind_arguments, execution_options=execution_options)


class _Clash:
    """A unique violation of a handler's statement, and the driver's text of it."""

    def __init__(self, text: str, statement: Any, parameters: Any) -> None:
        self.text, self.statement, self._parameters = text, statement, parameters

    def values(self, connection: Connection) -> dict[str, Any]:
        """Return the values of the row by column. Return nothing unless the statement is an INSERT of one row."""
        rows = self._parameters if isinstance(self._parameters, list) else [self._parameters or {}]
        if not isinstance(self.statement, Insert) or len(rows) != 1:
            return {}
        try:
            return dict(self.statement.compile(dialect=connection.dialect, column_keys=list(rows[0])).params) | rows[0]
        except SQLAlchemyError:
            return {}


def _unique_keys(table: Any) -> list[Any]:
    """Return the columns of each unique key that the table declares, except for partial indexes and expressions."""
    keys = [table.primary_key.columns]
    keys += [each.columns for each in table.constraints if isinstance(each, UniqueConstraint)]
    for index in table.indexes:
        whole = index.dialect_options["postgresql"]["where"] is None
        if index.unique and whole and all(isinstance(each, Column) for each in index.expressions):
            keys.append(index.columns)
    return keys


class StoppedHandler(BaseException):  # it is no error, and no ``except Exception`` may catch it
    """Ends a handler that catches every Exception and tries again, although its transaction accepts no statement."""


def was_stopped(error: BaseException | None) -> bool:
    """True if the guard has ended the handler, and the handler raised nothing else but errors."""
    if not isinstance(error, BaseExceptionGroup):  # an asyncio.TaskGroup raises one
        return isinstance(error, StoppedHandler)
    stopped, others = error.split(StoppedHandler)
    return stopped is not None and (others is None or isinstance(others, Exception))


class Guard:
    """Watches the transaction of one unit of work from its claim to its COMMIT, and remembers the first violation."""

    def __init__(
        self,
        session: GuardedSession,
        connection: Connection,
        dialect: Dialect,
        tables: DedupTables,
        key: dict[str, Any] | None,
    ) -> None:
        self.session, self.connection, self.dialect = session, connection, dialect
        self.driver = connection.connection.driver_connection
        self.key = key  # of the marker; None: without a claim
        self.violation: TransactionViolatedError | None = None
        self.aborted_by: DBAPIError | None = None  # the error after which the server accepts no statement
        self.overtaken: OvertakenError | None = None  # why the attempt is given up: it runs again in a new transaction
        self.watching = False  # True: a handler has the session, so statements, COMMIT and ROLLBACK are checked
        self.several = False  # True: several messages share the transaction
        self.server_check_required = False
        self.driver_was_exposed = False  # True: the handler has the driver's connection, and may have committed there
        self.must_disconnect = False  # the state of the driver is unknown
        self.commit_was_sent = self.commit_was_answered = False
        self.last: LastStatement | None = None  # sent together with COMMIT
        self._tables = tables
        self._schemas = connection.get_execution_options().get("schema_translate_map")
        self._begun = False  # the driver has reported that the transaction is open
        self._session_transaction = session.get_transaction()
        self._transaction = connection.get_transaction()
        self._outer_savepoint = connection.get_nested_transaction()  # only inside an external transaction
        self._has_snapshot = session.snapshot is Snapshot.CLAIM  # True: newer rows may be hidden from its reads
        self._claimed_several = False
        self._locked_late = False  # True: the handler has taken a lock that is younger than the snapshot
        self._clash: _Clash | None = None  # a unique violation, until a statement succeeds after it
        self._refusals = 0  # how many statements were refused since the transaction accepts none
        self._savepoints: list[str] = []  # the open savepoints in order, including the mark
        self._marked = False  # True: a savepoint or the transaction id distinguishes this transaction from later ones
        self._transaction_id: str | None = None  # the server's id of the transaction, if the server has such ids

    # From claim to commit -------------------------------------------------------------------------------------------

    def watch(self) -> Status:
        """Make the session and the connection report to this guard. Return the status of the transaction."""
        status = self.dialect.status(self.driver)
        self.watching, self._begun = True, status is Status.OPEN
        self.connection.__class__ = _guarded(type(self.connection))  # type: ignore[arg-type]  # a class, for mypy
        self.connection.guard = self.session.guard = self  # type: ignore[attr-defined]
        return status

    def release(self) -> None:
        """Restore the connection's class, and remove its reference to this guard, which would be a cycle."""
        self.watching, self.session.guard = False, None
        if isinstance(self.connection, GuardedConnection):
            self.connection.__class__ = self.connection.unguarded  # type: ignore[assignment]
            del self.connection.guard

    def verify(self) -> None:
        """Raise ``TransactionViolatedError`` unless the transaction of the claim is still open and able to commit.

        Raise ``OvertakenError`` if the attempt was given up.
        """
        if self.overtaken is not None:
            raise self.overtaken
        if self.violation is not None:
            raise self.violation
        if self.connection.invalidated:
            raise self.violate("the handler swallowed the loss of the database connection") from self.aborted_by
        same = self.session.get_transaction() is self._session_transaction
        if not same or self.connection.get_transaction() is not self._transaction:
            self._raise_rolled_back()
        if (
            self.session.in_nested_transaction()
            or self.connection.get_nested_transaction() is not self._outer_savepoint
        ):
            raise self.violate("the handler left a savepoint open; use `with session.begin_nested()`")
        status = self.dialect.status(self.driver)
        if self._begun and status is Status.NONE:
            self._raise_ended()
        if status is Status.ABORTED or self.aborted_by is not None:
            raise self._swallowed() from self.aborted_by
        if status is Status.BUSY:
            if self.driver_was_exposed:
                raise self._ended()
            self.verify_with_server()  # if the connection was lost, this raises the driver's error
            raise self.violate("the handler closed the driver's connection, or left a statement unfinished on it")

    def verify_with_server(self) -> None:
        """Ask the server whether the claim's transaction is still open. Raises the errors of ``verify``."""
        try:
            ours = self._is_open()
        except DBAPIError as error:
            if self.connection.invalidated or self.dialect.classify(error) is Failure.TRANSIENT:
                raise
            raise self._swallowed() from error
        if not ours:
            raise self._ended()

    def leave_nothing_open(self) -> None:
        """End a transaction that SQLAlchemy would leave open, before the connection goes back to its pool."""
        if self.connection.closed or self.connection.invalidated:
            return
        status = self.dialect.status(self.driver)
        if self.must_disconnect or status is Status.BUSY:
            self.connection.invalidate()
        elif status in (Status.OPEN, Status.ABORTED) and (self._transaction is None or not self._transaction.is_active):
            # After a COMMIT that failed, was prevented or was interrupted, SQLAlchemy considers the transaction ended.
            # SQLite keeps it open: a retry on the same connection would find its own marker, and return DUPLICATE.
            roll_back(self.connection)

    # What the guarded connection and session report ----------------------------------------------------------------

    def before_statement(self, sql: str | None, written: Table | None, *, mends: bool = False) -> None:
        """Raise if the transaction accepts no more statements, or if this statement is forbidden.

        ``sql`` is the text of a statement that the handler wrote as text. ``written`` is the table that any other
        statement changes. ``mends`` is True for ROLLBACK TO SAVEPOINT, which can succeed in an aborted transaction.
        """
        if self.violation is not None:
            self._raise_again(self.violation)
        if self.overtaken is not None and not mends:
            self._raise_again(self.overtaken)
        if self.connection.get_transaction() is not self._transaction:
            self._raise_rolled_back()
        if self.aborted_by is not None and not mends:
            self._refuse_aborted()
        if sql is not None:
            grammar = self.dialect.grammar
            if command := grammar.transaction_command(sql):
                raise self.violate(f"the handler ran {command}, which begins or ends a transaction")
            if grammar.hides_errors(sql):
                raise UnsafeSessionError(
                    "the SQL text contains several statements, and the drivers of this database do not report an error "
                    "of the second one; execute the statements one by one"
                )
            if grammar.hides_commands(sql):
                self.driver_exposed()
        if self._begun and self.dialect.status(self.driver) is Status.NONE:
            self._raise_ended()
        if written is not None:
            self.dialect.refuse_table(self.connection, written)

    def after_statement(self) -> None:
        """Note that a statement succeeded, which on most databases proves that the transaction is not aborted."""
        self._begun = self._begun or self.dialect.status(self.driver) is Status.OPEN
        if not self.dialect.abort_lasts and not self._is_conflict(self.aborted_by):
            self.aborted_by = None

    def statement_failed(self, error: BaseException, statement: Any, parameters: Any) -> None:
        """Note that a statement failed. The first error counts: later ones only report the aborted transaction."""
        if self.overtaken is not None or self.aborted_by is not None:
            return
        if not isinstance(error, DBAPIError):
            # For example a cancellation by asyncio.timeout(), which the handler may catch.
            if self.connection.invalidated and not isinstance(error, Exception):
                lost = RuntimeError(type(error).__name__)
                self.aborted_by = OperationalError(None, None, lost, connection_invalidated=True)
            return
        ended = self._begun and self.dialect.status(self.driver) is Status.NONE  # SQLite: INSERT OR ROLLBACK
        if error.connection_invalidated or ended or self.dialect.aborts(error) or self._is_conflict(error):
            self.aborted_by = error
        if self._has_snapshot and self.dialect.classify(error) is Failure.UNIQUE:
            self._clash = _Clash(str(error.orig), statement, parameters)
        elif self._has_snapshot and self.session.may_lower and self.dialect.misses_parent(error):
            self.overtake("the snapshot may hide the row that a foreign key refers to")

    def _is_conflict(self, error: DBAPIError | None) -> bool:
        """True if the library runs the handler again after ``error``, whatever the handler does with it.

        A savepoint undoes the statements of this transaction. It does not undo what another transaction has done.
        """
        return error is not None and self.dialect.classify(error) is Failure.TRANSIENT

    def savepoint_began(self, name: str) -> None:
        """Note that a savepoint was set."""
        self._savepoints.append(name)

    def savepoint_ended(self, name: str, *, rolled_back: bool) -> None:
        """Note that a savepoint was released or rolled back. Later savepoints have ended with it."""
        if rolled_back and not self._is_conflict(self.aborted_by):
            self.aborted_by = None
        place = self._savepoints.index(name) if name in self._savepoints else 0
        gone = self._savepoints[place:]
        del self._savepoints[place:]
        if _MARK in gone:
            self.mark()  # the savepoint ended, so this is still the same transaction

    def driver_exposed(self) -> None:
        """Record that the handler took the driver's own connection, where the guard cannot see a COMMIT."""
        self.driver_was_exposed = self.driver_was_exposed or self.watching
        self.require_server_check()

    def require_server_check(self) -> None:
        """Ask the server before COMMIT, because the driver may not report the end of the transaction."""
        if self.watching:
            self._refuse_aborted()
            self.server_check_required = True
            self.mark()

    def before_commit(self, how: str) -> None:
        """Raise if a handler commits. It may release a savepoint."""
        if self.watching:
            raise self.violate(f"the handler called {how}()")

    def before_begin(self) -> None:
        """Raise if a handler begins a transaction. It may begin a savepoint."""
        if self.watching:
            raise self.violate(
                "the handler called session.begin(), but the transaction has begun; remove the call, or use `with "
                "session.begin_nested()`"
            )

    def before_rollback(self) -> None:
        """Before a rollback, detect a commit on the driver's connection, which the rollback would hide."""
        self.after_failure(None)

    def connected(self, connection: Connection) -> None:
        """Raise if the session of a handler has begun a transaction on a second connection."""
        if connection is not self.connection and self.watching and not self.commit_was_answered:
            if self.session.get_transaction() is not self._session_transaction:
                self._raise_rolled_back()
            raise self.violate(
                "the session opened a second database connection (another bind, or another engine on the same "
                "database), but marker and read model must use one connection; give the sessionmaker one engine"
            )

    # What the snapshot hides ----------------------------------------------------------------------------------------
    #
    # If the library has raised the isolation level, the snapshot can be older than the handler expects: a row that
    # another transaction has inserted since is hidden, and no error says so (docs/adr/0004-lost-updates.md).

    def sees_new_rows(self) -> bool:
        """True if no statement of this transaction can miss a row, so that ``before_read`` and ``sent`` do nothing."""
        return self.session.snapshot is Snapshot.NEVER

    def claimed_several(self) -> None:
        """Note that the claim was for several messages. Some databases look for their markers by a SELECT."""
        self._has_snapshot = self._claimed_several = not self.sees_new_rows()

    def next_message(self) -> None:
        """Note that the next message of a batch begins. The locks of the earlier ones do not protect what it reads."""
        self._locked_late = False

    def before_read(self, statement: Any, sql: str | None) -> None:
        """Give the attempt up before a SELECT whose rows would be older than the handler's lock on them.

        ``sql`` is the text of a statement that the handler wrote as text. Raises ``OvertakenError``.
        """
        if not self._locked_late:
            return
        locks = isinstance(statement, Select) and statement._for_update_arg is not None
        if isinstance(statement, Select) and not (locks and self.session.snapshot is Snapshot.READ):
            self._refuse_late_read()
        if sql is not None and self.dialect.grammar.reads_snapshot(sql):
            self._refuse_late_read()

    def sent(self, statement: Any, sql: str) -> None:
        """Note whether a statement that succeeded has taken the snapshot, or a lock that is younger than it.

        Raises ``OvertakenError`` if the statement has read behind such a lock, for example an INSERT with a subquery.
        """
        grammar, flushing = self.dialect.grammar, self.session.is_flushing
        if not self._has_snapshot:
            self._has_snapshot = grammar.reads_snapshot(sql)
        elif self._locked_late:
            # The UPDATE of a flush writes a row that the handler has read, and the database compares the row.
            if not (flushing and isinstance(statement, (Update, Delete))) and grammar.reads_snapshot(sql):
                self._refuse_late_read()
        elif not flushing and self._protects_locks():
            self._locked_late = grammar.takes_lock(sql)

    def _protects_locks(self) -> bool:
        """True if the handler's locks would protect its reads in a transaction of a session of the user's.

        In such a transaction the level is the default one, and no claim and no earlier message has taken the snapshot.
        """
        return self.session.may_lower or self._is_beside_others()

    def _is_beside_others(self) -> bool:
        """True if the snapshot is older than the handler's first statement, because messages share the transaction."""
        return self._claimed_several and self.session.snapshot is Snapshot.READ

    def _refuse_late_read(self) -> NoReturn:
        if not self.session.may_lower:
            self.refuse_for_several("takes a lock and then reads")
        error = self.overtake("the handler takes a lock and then reads, and its snapshot is older than the lock")
        error.by_lock = True
        raise error

    def refuse_hidden_row(self) -> None:
        """Give the attempt up if the snapshot hides the row of a unique violation that the handler caught.

        Call it after a statement that succeeded, such as ROLLBACK TO SAVEPOINT. Raises ``OvertakenError``. At a level
        that the library must not lower, it runs the message again once for each violation.
        """
        clash, self._clash = self._clash, None
        if clash is None:
            return
        values = clash.values(self.connection)
        text, accepted = clash.text if values else _ANY_TEXT, self.session.accepted
        if not self.session.may_lower and (accepted is None or text in accepted or len(accepted) >= _MOST_RUNS):
            return
        if values and self._is_visible(clash, values):
            return
        if self._is_beside_others():
            self.refuse_for_several("catches a unique violation")
        raise self.overtake("the snapshot hides the row of a unique violation that the handler caught", text)

    def _is_visible(self, clash: _Clash, values: dict[str, Any]) -> bool:
        """True if the transaction sees a row with a unique key of the row that could not be inserted."""
        table = clash.statement.table
        places = clash.statement.get_execution_options().get("schema_translate_map")
        try:
            for columns in _unique_keys(table):
                if all(values.get(column.key) is not None for column in columns):
                    found: Select[Any] = select(literal_column("1")).select_from(table)
                    found = found.where(*(column == values[column.key] for column in columns))
                    if places is not None:
                        found = found.execution_options(schema_translate_map=places)
                    if Connection.execute(self.connection, found).first() is not None:
                        return True
        except (SQLAlchemyError, AttributeError):  # no right to read, or not the Table of a MetaData
            pass
        return False

    def overtake(self, what: str, text: str = "") -> OvertakenError:
        """Remember that the attempt is given up, so that it never commits. Return the error to raise.

        ``text`` is the driver's text of a unique violation.
        """
        if self.overtaken is None:
            level = self.dialect.locking_isolation if self.session.may_lower else None
            again = f" with isolation={level!r}" if level else ""
            self.overtaken = OvertakenError(f"{what}; run the unit of work again{again}", isolation=level)
            self.overtaken.text = text
        return self.overtaken

    def _raise_again(self, error: TransactionViolatedError | OvertakenError) -> NoReturn:
        """Raise the error after which the transaction accepts no statement, or end a handler that always catches it."""
        self._refusals += 1
        if self._refusals > _MOST_REFUSALS:
            raise StoppedHandler from error
        raise error

    # Violations -----------------------------------------------------------------------------------------------------

    def violate(self, what: str) -> TransactionViolatedError:
        """Remember the first violation, so that the unit of work never commits. Return its error."""
        if self.violation is None:
            self.violation = TransactionViolatedError(
                f"{what}; only the library may commit or roll back. Everything was rolled back, so a redelivery runs "
                "the handler again"
            )
        return self.violation

    def refuse_for_several(self, does: str = "changes a setting of the transaction") -> NoReturn:
        """Refuse what does not work beside other messages of the batch. The batch then applies this message alone."""
        self.violation = self.violation or TransactionViolatedError(
            f"the handler {does}, but several messages share the transaction; everything was rolled back, and a batch "
            "applies the message again in its own transaction. Do not catch this error. After claim_many(), claim this "
            "message alone"
        )
        raise self.violation

    def after_failure(self, error: BaseException | None) -> TransactionViolatedError | None:
        """Return the violation of a handler that may have committed before it failed with ``error``, or None.

        Call it before a rollback. It replaces an earlier violation that says that everything was rolled back.
        """
        if self.watching and (self.violation is None or not self.violation.durable) and self._has_ended(error):
            self._ended()
        return self.violation if self.violation is not None and self.violation.durable else None

    def _ended(self) -> TransactionViolatedError:
        self.must_disconnect = True
        self.violation = TransactionViolatedError(_ENDED, durable=True)
        return self.violation

    def _raise_ended(self) -> NoReturn:
        if self.aborted_by is not None:
            raise self._swallowed() from self.aborted_by
        raise self._ended()

    def _refuse_aborted(self) -> None:
        if self.aborted_by is not None and (self.dialect.abort_lasts or self._is_conflict(self.aborted_by)):
            raise self._swallowed() from self.aborted_by

    def _raise_rolled_back(self) -> NoReturn:
        if self.aborted_by is not None:
            raise self._swallowed() from self.aborted_by
        raise self.violate(
            "the handler rolled back or closed the session or its connection, or swallowed a failed flush; put code "
            "that may fail inside `with session.begin_nested()`"
        )

    def _swallowed(self) -> TransactionViolatedError:
        return self.violate(
            "the handler swallowed a database error that aborted the transaction; put code that may fail inside "
            "`with session.begin_nested()`"
        )

    # Questions to the server, one round trip each ---------------------------------------------------------------------

    def mark(self) -> None:
        """Mark the transaction once, to distinguish it from any later one on the connection."""
        if _MARK in self._savepoints:
            return
        self._savepoints.append(_MARK)  # set first: a listener to the mark's own statement may ask for the driver
        try:
            if self._transaction_id is None:  # ask only once: later, another transaction may be open
                self._transaction_id = self.dialect.transaction_id(self.connection)
            if self._transaction_id is None:
                self.dialect.mark_transaction(self.connection)
            self._marked = True
        except BaseException:
            self._savepoints.remove(_MARK)
            raise

    def _is_open(self) -> bool:
        """True if the open transaction is the claim's, and is not aborted. Removes the mark."""
        connection, marked, self._marked = self._where_claimed(), self._marked, False
        if self._transaction_id is not None:
            return self.dialect.transaction_id(connection) == self._transaction_id
        if marked:
            return self.dialect.is_marked(connection)
        if self.key is None:
            return Connection.execute(connection, select(literal_column("1"))).first() is not None
        return marker_exists(connection, self._tables.marker, self.key)

    def _has_ended(self, error: BaseException | None) -> bool:
        """True if the handler may have committed the claim's transaction where SQLAlchemy does not see it.

        Costs a round trip only if the handler had the driver's connection, or if the driver says that nothing is open.
        """
        connection = self.connection
        if connection.closed or connection.invalidated or connection.get_transaction() is not self._transaction:
            return False
        status = self.dialect.status(self.driver)
        by_server = self.aborted_by is not None or (isinstance(error, Exception) and self.dialect.aborts(error))
        if not (self._begun and status is Status.NONE):
            if status is Status.BUSY or not self.driver_was_exposed:
                return False
            try:
                if self._is_open():
                    return False
            except DBAPIError:  # an aborted transaction, or a lost connection
                by_server = True
        return not by_server or self._is_marker_committed()

    def _is_marker_committed(self) -> bool:
        """True if the marker may be committed, although the server itself has ended the transaction after an error."""
        if self.key is None or self.connection.invalidated:
            return False
        connection = self._where_claimed()
        try:
            if self.dialect.status(self.driver) is not Status.NONE:
                Connection.exec_driver_sql(connection, "ROLLBACK")
            return marker_exists(connection, self._tables.marker, self.key)
        except DBAPIError:  # for example, the handler chose a role that must not read markers
            return not connection.invalidated

    def _where_claimed(self) -> Connection:
        """Return the connection with the schema map of the claim, which a handler may have replaced."""
        return Connection.execution_options(self.connection, schema_translate_map=self._schemas)  # past the guard

    def run_last(self) -> None:
        """Run the last statement of the transaction, without the guard's checks."""
        if self.last is not None:
            self.last.run(self._where_claimed())


class GuardedConnection(Connection):
    """The connection of a unit of work while a handler has it. It reports each call that reaches the server.

    SQLAlchemy's ConnectionEvents would report the same. But they cost 35 to 50 us for each message, and an exception in
    their ``commit`` leaves the transaction open in the pool.
    """

    guard: Guard
    unguarded: ClassVar[type[Connection]] = Connection
    _ending = False

    def execute(self, statement: Any, *args: Any, **kwargs: Any) -> Any:
        """Execute a statement, and report it. All statements of the ORM and of Core use this method."""
        return self._watched(super().execute, statement, *args, **kwargs)

    def scalar(self, statement: Any, *args: Any, **kwargs: Any) -> Any:
        """Execute a statement for one value, and report it."""
        if isinstance(statement, DefaultGenerator):
            return self._watched(super().scalar, statement, *args, **kwargs)
        return self.execute(statement, *args, **kwargs).scalar()

    def exec_driver_sql(self, statement: str, *args: Any, **kwargs: Any) -> Any:
        """Execute SQL text that SQLAlchemy does not compile, and report it."""
        return self._watched(super().exec_driver_sql, statement, *args, **kwargs)

    def _watched(self, run: Callable[..., Any], statement: Any, *args: Any, **kwargs: Any) -> Any:
        guard = self.guard
        written: Any = statement.table if isinstance(statement, UpdateBase) else None
        usual = written is not None or isinstance(statement, Select)  # neither text nor a savepoint
        savepoint = not usual and isinstance(statement, _SAVEPOINTS)
        rolls_back = savepoint and isinstance(statement, RollbackToSavepointClause)
        if rolls_back:
            guard.session.before_rollback_to_savepoint()
        sql = None if usual else sql_text(statement, self.dialect)
        guard.before_statement(sql, written, mends=rolls_back)
        hides = not (savepoint or guard.sees_new_rows())
        if hides:
            guard.before_read(statement, sql)
        if self._streams(statement, kwargs.get("execution_options")):
            guard.require_server_check()  # a later fetch can fail without a report
        try:
            result = run(statement, *args, **kwargs)
        except BaseException as error:
            guard.statement_failed(error, statement, args[0] if args else None)
            raise
        if hides:
            guard.sent(statement, sql_sent(result))
        guard.after_statement()
        if guard.several and guard.dialect.grammar.sets_for_transaction(sql_sent(result)):
            guard.refuse_for_several()
        if savepoint:
            if isinstance(statement, SavepointClause):
                guard.savepoint_began(statement.ident)
            else:
                guard.savepoint_ended(statement.ident, rolled_back=rolls_back)
        guard.refuse_hidden_row()
        return result

    def _streams(self, statement: Any, options: Any) -> bool:
        its_own = statement.get_execution_options() if hasattr(statement, "get_execution_options") else None
        for given in its_own, options, self.get_execution_options():
            if given and (given.get("stream_results") or given.get("yield_per")):
                return True
        return False

    @property
    def connection(self) -> PoolProxiedConnection:
        """Return the driver's connection. Except for COMMIT and ROLLBACK, the caller is a handler."""
        if not self._ending:
            self.guard.driver_exposed()
        return super().connection

    @property
    def info(self) -> dict[Any, Any]:
        """Return the dictionary that the pool keeps for the physical connection. It does not expose the driver."""
        return info_of(self)

    def execution_options(self, **options: Any) -> Any:
        """Set options, such as a schema map. Refused in a batch, because they would affect the other messages."""
        if self.guard.several:
            self.guard.refuse_for_several()
        return super().execution_options(**options)

    def commit(self) -> None:
        """Commit for the unit of work. Raises ``TransactionViolatedError`` if a handler calls it."""
        self.guard.before_commit("connection.commit")
        super().commit()

    def _commit_impl(self) -> None:
        guard = self.guard
        guard.before_commit("connection.get_transaction().commit")
        guard.verify()  # the user's listeners may have run since the unit of work verified
        guard.commit_was_sent = self._ending = True
        try:
            with guard.dialect.committing(guard.driver):
                if guard.last is not None:
                    with guard.dialect.taking_commit_along(guard.driver):
                        guard.run_last()
                super()._commit_impl()
        finally:
            self._ending = False
        guard.commit_was_answered = True

    def _rollback_impl(self) -> None:
        self.guard.before_rollback()
        self._ending = True
        try:
            super()._rollback_impl()
        finally:
            self._ending = False


@cache
def _guarded(connection_class: type[Connection]) -> type[Connection]:
    if connection_class is Connection:
        return GuardedConnection
    bases = (GuardedConnection, connection_class)
    return type(f"Guarded{connection_class.__name__}", bases, {"unguarded": connection_class})


# Once for all subclasses: SQLAlchemy keeps every listener that was ever registered, also when its class is gone.
@event.listens_for(GuardedSession, "before_commit")
def _before_commit(session: GuardedSession) -> None:
    if session.guard is not None and not session.in_nested_transaction():  # it also fires for savepoints
        session.guard.before_commit("session.commit")


@event.listens_for(GuardedSession, "after_begin")
def _after_begin(session: GuardedSession, _transaction: SessionTransaction, connection: Connection) -> None:
    if connection not in session.taken:  # else it is a savepoint that begins
        session.taken = (*session.taken, connection)
    if session.guard is not None:
        session.guard.connected(connection)
