"""Detect and prevent a handler that ends the transaction of its claim: the marker must commit with its writes.

A handler gets a real Session, so it can commit, roll back, close, or swallow the error that aborted the transaction.
Every statement of a session goes through its ``Connection``. So while a handler has the session, the class of this
connection is ``GuardedConnection``, which reports each statement, COMMIT and ROLLBACK to the unit of work's ``Guard``.

If the guard sees a violation in advance, it *prevents* it: it raises before anything is sent. It *detects* other
violations before COMMIT by asking the driver, which costs no round trip. It asks the server with ``strict=True``, and
if the handler used the driver's own connection, streamed a result or, on MariaDB, called a stored procedure, because no
driver reports what happens there. The guard remembers the first violation, also if the handler swallows the exception,
and then the unit of work never commits.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar, NoReturn

from sqlalchemy import Select, Table, event, literal_column, select
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.schema import DefaultGenerator
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.sql.elements import ReleaseSavepointClause, RollbackToSavepointClause, SavepointClause

from .closing import roll_back
from .dialects import Dialect, Failure, LastStatement, Status, info_of, marker_exists
from .errors import TransactionViolatedError, UnsafeSessionError
from .tables import DedupTables
from .transaction_text import sql_sent, sql_text

_SAVEPOINTS = (SavepointClause, RollbackToSavepointClause, ReleaseSavepointClause)
_MARK = "the mark"  # the entry for the mark in the list of savepoints


class GuardedSession(Session):
    """The private Session class of a unit of work. The library's listeners never reach the user's own sessions."""

    guard: Guard | None = None  # while a handler has the session
    taken: tuple[Connection, ...] = ()  # the connections on which the session has begun transactions
    keeps_over_flush = False  # True: a flush does not forget the declared rows, although a trigger may change them
    unwritten = False  # True: earlier messages have made changes that are not flushed yet
    building = False  # True: the projector is building, so its handler cannot arm effects
    stale = False  # True: the session may have rows as they were in a savepoint that was rolled back

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        #: strong references, because the identity map has only weak ones
        self.kept: list[object] = []
        self.flush_depth = 0

    def flush(self, objects: Any = None) -> None:
        """Flush, and count the depth, so that ``before_statement`` recognises the statements of a flush."""
        self.flush_depth += 1
        try:
            super().flush(objects)
        finally:
            self.flush_depth -= 1

    def before_statement(self, *, writes: bool) -> None:
        """Forget the declared rows if the statement ``writes``, because it may change them in the database.

        Instances that the handler still references stay in the session, as in every session.
        """
        if not writes:
            return
        if self.kept and not (self.flush_depth and self.keeps_over_flush):
            self.kept.clear()

    def before_rollback_to_savepoint(self) -> None:
        """Forget the rows that were read ahead, because they may have values from the savepoint."""
        self.kept.clear()

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
        self._savepoints: list[str] = []  # the open savepoints in order, including the mark
        self._marked = False  # True: a savepoint or the transaction id distinguishes this transaction from later ones
        self._transaction_id: str | None = None  # the server's id of the transaction, if the server has such ids
        self._place: str | None = None  # the database of the claim, if the handler may have chosen another one

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
        """Raise ``TransactionViolatedError`` unless the transaction of the claim is still open and able to commit."""
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
            raise self.ended_below()
        if status is Status.ABORTED or self.aborted_by is not None:
            raise self._swallowed() from self.aborted_by
        if status is Status.BUSY:
            if not self.driver_was_exposed:
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
            raise self.ended_below()

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
            raise self.violation
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
            raise self.ended_below()
        if written is not None:
            self.dialect.refuse_table(self.connection, written)

    def after_statement(self) -> None:
        """Note that a statement succeeded, which on most databases proves that the transaction is not aborted."""
        self._begun = self._begun or self.dialect.status(self.driver) is Status.OPEN
        if not self.dialect.abort_lasts:
            self.aborted_by = None

    def statement_failed(self, error: BaseException) -> None:
        """Note that a statement failed. The first error counts: later ones only report the aborted transaction."""
        if self.aborted_by is not None or not isinstance(error, DBAPIError):
            return
        if error.connection_invalidated or self.dialect.aborts(error):
            self.aborted_by = error

    def savepoint_began(self, name: str) -> None:
        """Note that a savepoint was set."""
        self._savepoints.append(name)

    def savepoint_ended(self, name: str, *, rolled_back: bool) -> None:
        """Note that a savepoint was released or rolled back. Later savepoints have ended with it."""
        if rolled_back:
            self.aborted_by = None
        place = self._savepoints.index(name) if name in self._savepoints else 0
        gone = self._savepoints[place:]
        del self._savepoints[place:]
        if _MARK in gone:
            self.mark()  # the savepoint ended, so this is still the same transaction

    def driver_exposed(self) -> None:
        """Record that the handler took the driver's own connection, where the guard cannot see a COMMIT."""
        self.session.before_statement(writes=True)
        if self.watching and not self.driver_was_exposed:
            self.driver_was_exposed = True  # set first: a listener to the next statement may ask for the driver
            if self._where_claimed().schema_for_object(self._tables.marker) is None:
                self._place = self.dialect.place(self.connection)
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
            raise self.made_durable() or self.violate(f"the handler called {how}()")

    def before_begin(self) -> None:
        """Raise if a handler begins a transaction. It may begin a savepoint."""
        if self.watching:
            raise self.made_durable() or self.violate(
                "the handler called session.begin(), but the transaction has begun; remove the call, or use `with "
                "session.begin_nested()`"
            )

    def before_rollback(self) -> None:
        """Before a rollback, detect a commit on the driver's connection, which the rollback would hide."""
        if self.watching and self.violation is None and self._may_be_committed_below():
            self.ended_below()

    def connected(self, connection: Connection) -> None:
        """Raise if the session of a handler has begun a transaction on a second connection."""
        if connection is not self.connection and self.watching and not self.commit_was_answered:
            if self.session.get_transaction() is not self._session_transaction:
                self._raise_rolled_back()
            raise self.violate(
                "the session opened a second database connection (another bind, or another engine on the same "
                "database), but marker and read model must use one connection; give the sessionmaker one engine"
            )

    # Violations -----------------------------------------------------------------------------------------------------

    def violate(self, what: str) -> TransactionViolatedError:
        """Remember the first violation, so that the unit of work never commits. Return its error."""
        if self.violation is None:
            self.violation = TransactionViolatedError(
                f"{what}; only the library may commit or roll back. Everything was rolled back, so a redelivery runs "
                "the handler again"
            )
        return self.violation

    def refuse_for_several(self) -> NoReturn:
        """Refuse an action that would affect other messages of the batch. The batch then applies this message alone."""
        self.violation = self.violation or TransactionViolatedError(
            "the handler changed a setting of the transaction, or dropped changes of the session, but several messages "
            "share both; everything was rolled back, and the library applies the message again in its own transaction. "
            "Do not catch this error"
        )
        raise self.violation

    def ended_below(self) -> TransactionViolatedError:
        """Return the violation of a handler that ended the transaction on the driver's connection.

        Find out whether the handler committed.
        """
        self.must_disconnect = True
        what = "the handler ended the transaction on the driver's own connection, which SQLAlchemy does not see"
        if self.violation is None and (left := self._what_is_durable()) is not None:
            self.violation = TransactionViolatedError(what + left, durable=True)
        return self.violate(what)

    def made_durable(self) -> TransactionViolatedError | None:
        """Return the violation of a handler that committed and then failed, so that its writes are not rolled back."""
        if self.violation is None and self.watching and self._may_be_committed_below():
            with suppress(DBAPIError):  # the server cannot be asked; the handler's own error is raised
                self.ended_below()
        return self.violation if self.violation is not None and self.violation.durable else None

    def _refuse_aborted(self) -> None:
        if self.aborted_by is not None and self.dialect.abort_lasts:
            raise self._swallowed() from self.aborted_by

    def _raise_rolled_back(self) -> NoReturn:
        if self.aborted_by is not None:
            raise self._swallowed() from self.aborted_by
        raise self.violate(
            "the handler rolled back or closed the session or its connection, or swallowed a failed flush; put code "
            "that may fail inside `with session.begin_nested()`"
        )

    def _swallowed(self) -> TransactionViolatedError:
        if self.violation is None and self._may_be_committed_below():
            return self.ended_below()
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

    def _is_committed(self) -> bool | None:
        """True if the ended transaction has committed the marker, False if not, None if that is unknown."""
        if self.key is None:
            return None
        connection, marker = self._where_claimed(), self._tables.marker
        if self.dialect.status(self.driver) in (Status.OPEN, Status.ABORTED):
            # The transaction that is open now is not the claim's, and must not commit.
            Connection.exec_driver_sql(connection, "ROLLBACK")
        if self._transaction_id is not None:
            return self.dialect.has_committed(connection, self._transaction_id)
        try:
            if self._place is not None:
                places: Any = {**(self._schemas or {}), marker.schema: self._place}
                connection = Connection.execution_options(connection, schema_translate_map=places)
            found = marker_exists(connection, marker, self.key)
            # The handler may have chosen another schema, database or role, for as long as the connection lives.
            named = connection.schema_for_object(marker) is not None
            return found if named or self.dialect.is_only(connection, marker) else None
        except DBAPIError as error:
            if connection.invalidated or self.dialect.classify(error) is Failure.TRANSIENT:
                raise
            return None

    def _may_be_committed_below(self) -> bool:
        ended = self.connection.closed or self.connection.invalidated
        if ended or not self._begun or self.connection.get_transaction() is not self._transaction:
            return False
        status = self.dialect.status(self.driver)
        if status in (Status.OPEN, Status.ABORTED) and self.driver_was_exposed:
            try:
                return not self._is_open() and self._is_committed() is not False
            except DBAPIError:  # the open transaction is aborted, but an earlier one may have committed
                with suppress(DBAPIError, PendingRollbackError):  # PendingRollbackError: the connection was lost
                    return self._is_committed() is True
        return status is Status.NONE

    def _what_is_durable(self) -> str | None:
        """Describe what a commit on the driver's connection made durable. Return None if there was no commit."""
        committed = self._is_committed()
        if committed:
            return (
                ", by a commit: the marker and the handler's writes until then are COMMITTED, and its later writes may "
                "not be. A redelivery will be skipped as a duplicate, so correct the read model by hand"
            )
        if committed is None and self.key is None:
            return (
                ". If this was a commit, the handler's writes are COMMITTED, and without a marker a redelivery writes "
                "them again: check the read model first"
            )
        if committed is None:
            return (
                ". If this was a commit, the marker and the handler's writes are COMMITTED, and a redelivery will be "
                "skipped as a duplicate. The library does not know, because several tables have the marker's name, or "
                "because the handler chose another schema, database or role. Check the marker table and the read model"
            )
        return None

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
        else:
            guard.session.before_statement(writes=written is not None or not (usual or savepoint))
        guard.before_statement(None if usual else sql_text(statement, self.dialect), written, mends=rolls_back)
        if self._streams(statement, kwargs.get("execution_options")):
            guard.require_server_check()  # a later fetch can fail without a report
        try:
            result = run(statement, *args, **kwargs)
        except BaseException as error:
            guard.statement_failed(error)
            raise
        guard.after_statement()
        if guard.several and guard.dialect.grammar.sets_for_transaction(sql_sent(result)):
            guard.refuse_for_several()
        if savepoint:
            if isinstance(statement, SavepointClause):
                guard.savepoint_began(statement.ident)
            else:
                guard.savepoint_ended(statement.ident, rolled_back=rolls_back)
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
        self.guard.session.before_statement(writes=True)
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
