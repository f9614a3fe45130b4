"""Invariant I4: the transaction that commits is the one that holds the marker.

A handler gets a real Session, so it can do what it must not: commit, roll back, close, swallow the error that
aborted the transaction. The guard of a unit of work prevents what it can see coming, notices the rest before
COMMIT, and remembers it even if the handler swallows the exception. It asks the driver, which costs no round trip;
only where a handler took the driver's own connection, it asks the server (ADR 7; unseen: docs/handlers.md).
"""

from __future__ import annotations

from contextlib import suppress
from typing import NoReturn

from sqlalchemy import Table
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, PendingRollbackError

from ..closing import roll_back
from ..dialects import Failure, LastStatement, Status
from ..errors import TransactionViolatedError, UnsafeSessionError
from ..row_source import RowSource
from .claim_transaction import ClaimTransaction, Savepoints, what_is_durable
from .connection import guard_connection, release_connection
from .session import GuardedSession


class Guard:
    """Watches the session and the connection of one unit of work, from its claim to its commit."""

    def __init__(self, session: GuardedSession, claim_transaction: ClaimTransaction) -> None:
        self.session, self.claim_transaction = session, claim_transaction
        self.dialect, self.driver = claim_transaction.dialect, claim_transaction.driver
        self.connection = connection = claim_transaction.connection
        self.violation: TransactionViolatedError | None = None
        self.aborted_by: DBAPIError | None = None
        self._begun = self.watching = False  # the latter is true while a handler has the session
        self.several = False  # messages share the transaction, and a handler has one of them at a time
        self.driver_was_exposed = False  # to a handler, which may have committed there, past us
        self.server_check_required = False  # before COMMIT
        self.commit_was_sent = self.commit_was_answered = False
        self.must_disconnect = False  # what the driver is in the midst of, nobody knows
        self.savepoints = Savepoints(claim_transaction)
        self.rows: RowSource | None = None
        self.last: LastStatement | None = None  # sent with COMMIT
        self._session_transaction = session.get_transaction()
        self._transaction = connection.get_transaction()
        self._savepoint = connection.get_nested_transaction()  # only inside an external transaction

    def watch(self) -> Status:
        """Have session and connection report here from now on; return how the transaction stands."""
        status = self.dialect.status(self.driver)
        self.watching, self._begun = True, status is Status.OPEN
        guard_connection(self.connection, self)
        self.session.guard = self
        return status

    def release(self) -> None:
        """Give the connection back as it was."""
        self.watching, self.rows = False, None  # which point back here: a circle
        release_connection(self.connection)
        self.session.guard = None

    def violate(self, what: str) -> TransactionViolatedError:
        """Remember the first violation; whatever comes later, this unit of work will not commit."""
        if self.violation is None:
            self.violation = TransactionViolatedError(
                f"{what}; only the unit of work may end its transaction. Everything was rolled back, so a "
                "redelivery runs the handler again"
            )
        return self.violation

    def ended_below(self) -> TransactionViolatedError:
        """Return the violation of a transaction that ended below SQLAlchemy; ask whether by a commit or a rollback."""
        self.must_disconnect = not self.dialect.lives_in_connection(self.connection.engine.url)
        what = "the handler ended the transaction on the driver's connection, below SQLAlchemy"
        if self.violation is None:
            left = what_is_durable(self.claim_transaction)
            if left is not None:
                self.violation = TransactionViolatedError(what + left, durable=True)
        return self.violate(what)

    # What the guarded session and connection report --------------------------------------------------------------

    def before_statement(self, sql: str | None, written: Table | None, *, mends: bool = False) -> None:
        """Called before any statement: raise if nothing may run any more, or not this statement.

        A command that begins or ends a transaction is a violation; for text that may hide one, the server is asked
        before COMMIT. ``sql`` is the statement's text if it is text, ``written`` the table that it changes if not. It
        ``mends`` if it may succeed where others do not, as ROLLBACK TO SAVEPOINT may.
        """
        if self.violation is not None:
            raise self.violation
        if self.connection.get_transaction() is not self._transaction:
            self._rolled_back()
        if self.aborted_by is not None and not mends:
            self._refuse_aborted()
        if sql is not None:
            if command := self.dialect.grammar.transaction_command(sql):
                raise self.violate(f"the handler ran {command}, which begins or ends a transaction")
            if self.dialect.grammar.hides_errors(sql):
                raise UnsafeSessionError(
                    "several statements in one SQL text: the drivers of this database tell nobody when the second "
                    "fails, or rolls everything back; execute them one by one"
                )
            if self.dialect.grammar.hides_commands(sql):
                self.driver_exposed()
        if self._begun and self.dialect.status(self.driver) is Status.NONE:
            raise self.ended_below()
        if written is not None:
            self.dialect.refuse_table(self.connection, written)

    def after_statement(self) -> None:
        """Called after a statement succeeded, which on most databases proves that the transaction is alive."""
        self._begun = self._begun or self.dialect.status(self.driver) is Status.OPEN
        if not self.dialect.abort_lasts:
            self.aborted_by = None

    def savepoint_ended(self, name: str, *, rolled_back: bool) -> None:
        """Called after a savepoint was released or rolled back: after the latter the transaction is alive."""
        if rolled_back:
            self.aborted_by = None
        self.savepoints.ended(name)

    def driver_exposed(self) -> None:
        """Called before a handler gets the driver's own connection, on which it may end the transaction unseen."""
        if self.watching and not self.driver_was_exposed:
            self.driver_was_exposed = True  # first: a listener that hears of the next statement may ask for the driver
            self.claim_transaction.note_place()
        self.require_server_check()

    def require_server_check(self) -> None:
        """Have the server asked before COMMIT: what comes next may fail, and end the transaction, with nobody told."""
        if self.watching:
            self._refuse_aborted()
            self.server_check_required = True
            self.savepoints.mark()

    def statement_failed(self, error: BaseException) -> None:
        """Called after a statement failed. The first error counts: those that follow only say that all is aborted."""
        if self.aborted_by is not None or not isinstance(error, DBAPIError):
            return
        if error.connection_invalidated or self.dialect.aborts(error):
            self.aborted_by = error

    def before_commit(self, how: str) -> None:
        """Called before the session or the connection commits its transaction; a savepoint does not count."""
        if self.watching:
            raise self.violate(f"the handler called {how}()")

    def before_rollback(self) -> None:
        """Called before a rollback: find a commit below SQLAlchemy, which the rollback would hide."""
        if self.watching and self.violation is None and self._may_be_committed_below():
            self.ended_below()

    def connected(self, connection: Connection) -> None:
        """Called after the session has begun a transaction: raise if a handler has a second connection now."""
        if connection is not self.connection and self.watching and not self.commit_was_answered:
            if self.session.get_transaction() is not self._session_transaction:
                self._rolled_back()
            raise self.violate(
                "the session went to a second database connection (another bind, or another engine on the same "
                "database): marker and read model must be on one"
            )

    # What the unit of work asks ----------------------------------------------------------------------------------

    def verify(self) -> None:
        """Raise ``TransactionViolatedError`` unless this is the transaction of the claim, whole and able to commit."""
        if self.violation is not None:
            raise self.violation
        if self.connection.invalidated:
            raise self.violate("the handler swallowed the loss of the database connection") from self.aborted_by
        same = self.session.get_transaction() is self._session_transaction
        if not same or self.connection.get_transaction() is not self._transaction:
            self._rolled_back()
        if self.session.in_nested_transaction() or self.connection.get_nested_transaction() is not self._savepoint:
            raise self.violate("the handler left a savepoint open; use `with session.begin_nested()`")
        status = self.dialect.status(self.driver)
        if self._begun and status is Status.NONE:
            raise self.ended_below()
        if status is Status.ABORTED or self.aborted_by is not None:
            raise self._swallowed() from self.aborted_by
        if status is Status.BUSY:
            if not self.driver_was_exposed:
                self.verify_with_server()  # it was lost, perhaps: the driver says so
            raise self.violate("the handler closed the driver's connection, or left a statement unfinished on it")

    def verify_with_server(self) -> None:
        """Raise what ``verify`` raises, by a question to the server, which knows what went past SQLAlchemy."""
        try:
            ours = self.claim_transaction.is_open()
        except DBAPIError as error:
            if self.connection.invalidated or self.dialect.classify(error) is Failure.TRANSIENT:
                raise
            raise self._swallowed() from error
        if not ours:
            raise self.ended_below()

    def made_durable(self) -> TransactionViolatedError | None:
        """Return the violation of a handler that committed and then failed: its error must not say "rolled back"."""
        if self.violation is None and self.watching and self._may_be_committed_below():
            with suppress(DBAPIError):  # nobody can be asked any more; the handler's own error goes on
                self.ended_below()
        return self.violation if self.violation is not None and self.violation.durable else None

    def leave_nothing_open(self) -> None:
        """End the transaction where SQLAlchemy would not, before the connection goes back to its pool."""
        if self.connection.closed or self.connection.invalidated:
            return
        status = self.dialect.status(self.driver)
        if self.must_disconnect or status is Status.BUSY:
            self.connection.invalidate()
        elif status in (Status.OPEN, Status.ABORTED) and (self._transaction is None or not self._transaction.is_active):
            # SQLAlchemy takes a transaction whose COMMIT failed, or was prevented or interrupted before, for ended.
            # SQLite keeps it: a retry on the same connection would find its own marker, and call that a duplicate.
            roll_back(self.connection)

    def _may_be_committed_below(self) -> bool:
        ended = self.connection.closed or self.connection.invalidated
        if ended or not self._begun or self.connection.get_transaction() is not self._transaction:
            return False
        status = self.dialect.status(self.driver)
        if status in (Status.OPEN, Status.ABORTED) and self.driver_was_exposed:
            claimed = self.claim_transaction
            try:
                return not claimed.is_open() and claimed.is_committed() is not False
            except DBAPIError:  # aborted: what is open now will not commit, but what was before it may have
                with suppress(DBAPIError, PendingRollbackError):  # the latter: lost meanwhile
                    return claimed.is_committed() is True
        return status is Status.NONE

    def _refuse_aborted(self) -> None:
        if self.aborted_by is not None and self.dialect.abort_lasts:
            raise self._swallowed() from self.aborted_by

    def _rolled_back(self) -> NoReturn:
        if self.aborted_by is not None:
            raise self._swallowed() from self.aborted_by
        raise self.violate(
            "the handler rolled back or closed the session or its connection, or swallowed a failed flush; put "
            "what may fail inside `with session.begin_nested()`"
        )

    def _swallowed(self) -> TransactionViolatedError:
        if self.violation is None and self._may_be_committed_below():
            return self.ended_below()
        return self.violate(
            "the handler swallowed a database error that aborted the transaction; put what may fail inside "
            "`with session.begin_nested()`"
        )
