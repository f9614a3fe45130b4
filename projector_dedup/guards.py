"""Invariant I4: the transaction that commits is the one that holds the marker.

A handler gets a real Session, so it can do what it must not: commit, roll back, close, swallow the error that
aborted the transaction. The guard of a unit of work prevents what it can see coming, notices the rest before
COMMIT, and remembers it even if the handler swallows the exception. It asks the driver, never the server: no
round trip (docs/adr/0007 weighs what each measure costs, README lists what no measure sees).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, cast

from sqlalchemy import event
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import FromStatement, Session, SessionTransaction
from sqlalchemy.sql.elements import TextClause
from sqlalchemy.sql.selectable import TextualSelect

from .dialects import Dialect, Status
from .errors import TransactionViolatedError


class Guard:
    """Watches the session and the connection of one unit of work, from its first statement to its commit."""

    def __init__(
        self, session: Session, connection: Connection, dialect: Dialect, marker_committed: Callable[[], bool]
    ) -> None:
        self.dialect = dialect
        self.session = session
        self.connection = connection
        self.driver = connection.connection.driver_connection
        self.violation: TransactionViolatedError | None = None
        self.doomed_by: DBAPIError | None = None
        self._marker_committed = marker_committed
        self._transaction = session.get_transaction()
        self._savepoint = connection.get_nested_transaction()  # only inside an external transaction
        self._may_end = False
        self._begun = False
        self._connection_class = type(connection)
        connection.__class__ = _guarded_connection(self._connection_class)  # type: ignore[arg-type]  # mypy takes a class for its instance here
        cast(GuardedConnection, connection).guard = self
        cast(GuardedSession, session).guard = self

    def release(self) -> None:
        """Give the connection back as it was."""
        self._may_end = True
        self.connection.__class__ = self._connection_class
        del cast(GuardedConnection, self.connection).guard
        cast(GuardedSession, self.session).guard = None

    def violate(self, what: str) -> TransactionViolatedError:
        """Remember the first violation; whatever comes later, this unit of work will not commit."""
        if self.violation is None:
            self.violation = TransactionViolatedError(
                f"{what}; only the unit of work may end its transaction. Everything was rolled back, so a "
                "redelivery runs the handler again"
            )
        return self.violation

    def ended_below(self) -> TransactionViolatedError:
        """The transaction is gone, and SQLAlchemy did not see it go: was it a commit or a rollback?"""
        what = "the handler ended the transaction on the driver's connection, below SQLAlchemy"
        if self.violation is None and self._marker_committed():
            self.violation = TransactionViolatedError(
                f"{what}, by a commit: the marker and what the handler had written by then are COMMITTED, and what "
                "it wrote later is not. A redelivery will be skipped as a duplicate, so look at the read model",
                durable=True,
            )
        return self.violate(what)

    # What the guarded connection reports -------------------------------------------------------------------------

    def before_statement(self, sql: str | None) -> None:
        """Before any statement: nothing more runs after a violation, or in a transaction that is not ours."""
        if self.violation is not None:
            raise self.violation
        if sql is not None and (command := transaction_command(sql)):
            raise self.violate(f"the handler ran {command} as SQL text")
        if self._begun and self.dialect.status(self.driver) is Status.NONE:
            raise self.ended_below()

    def after_statement(self) -> None:
        """A statement that succeeds proves that the transaction is not aborted (it was rolled back to a savepoint)."""
        self._begun = True
        self.doomed_by = None

    def statement_failed(self, error: BaseException) -> None:
        """Inside a savepoint, rolling back to it will mend the transaction; outside, nothing will."""
        if isinstance(error, DBAPIError) and self.connection.get_nested_transaction() is self._savepoint:
            if error.connection_invalidated or self.dialect.dooms(error):
                self.doomed_by = error

    def before_end(self, how: str) -> None:
        """Before the session or connection ends its transaction."""
        if not self._may_end:
            raise self.violate(f"the handler called {how}()")

    def connected(self, connection: Connection) -> None:
        """A session that takes a second connection has two transactions, which cannot commit as one."""
        if connection is not self.connection and not self._may_end:
            if self.session.get_transaction() is not self._transaction:
                raise self.violate("the handler rolled back or closed the session, then used it again")
            raise self.violate(
                "the session went to a second database connection (another bind, or another engine on the same "
                "database): marker and read model must be on one"
            )

    # What the unit of work asks ----------------------------------------------------------------------------------

    def verify(self) -> None:
        """Everything has been flushed: is this still the transaction of the claim, whole and able to commit?"""
        if self.violation is not None:
            raise self.violation
        transaction = self.session.get_transaction()
        if transaction is not self._transaction or self.connection.closed or not self.connection.in_transaction():
            raise self.violate("the handler rolled back or closed the session or its connection")
        if self.session.in_nested_transaction() or self.connection.get_nested_transaction() is not self._savepoint:
            raise self.violate("the handler left a savepoint open; use `with session.begin_nested()`")
        if self.connection.invalidated:
            raise self.violate("the handler swallowed the loss of the database connection") from self.doomed_by
        status = self.dialect.status(self.driver)
        if self._begun and status is Status.NONE:
            raise self.ended_below()
        if status is Status.ABORTED or self.doomed_by is not None:
            raise self.violate(
                "the handler swallowed a database error that aborted the transaction; put what may fail inside "
                "`with session.begin_nested()`"
            ) from self.doomed_by
        if status is Status.BUSY:
            raise self.violate("the handler left a statement unfinished on the driver's connection")

    def allow_end(self) -> None:
        """From here on it is the unit of work that commits."""
        self._may_end = True

    def disconnect(self) -> None:
        """Close the database connection itself: whatever was left in it goes with it."""
        if not self.connection.closed:
            self.connection.invalidate()

    def must_disconnect(self) -> bool:
        """Whether the connection may not go back to the pool: its state is not what SQLAlchemy believes."""
        return self.violation is not None or self.dialect.status(self.driver) is Status.BUSY


class GuardedSession(Session):
    """The private Session class of a unit of work; the user's own sessions are never listened to."""

    guard: Guard | None = None


@cache
def guarded_session(session_class: type[Session]) -> type[GuardedSession]:
    """The user's Session class, with the guard's listeners on a subclass of its own."""
    guarded = type(f"Guarded{session_class.__name__}", (GuardedSession, session_class), {})

    @event.listens_for(guarded, "before_commit")
    def _before_commit(session: GuardedSession) -> None:
        # It also fires for savepoints, which are the handler's to release.
        if session.guard is not None and not session.in_nested_transaction():
            session.guard.before_end("session.commit")

    @event.listens_for(guarded, "after_begin")
    def _after_begin(session: GuardedSession, _transaction: SessionTransaction, connection: Connection) -> None:
        if session.guard is not None:
            session.guard.connected(connection)

    return guarded


class GuardedConnection(Connection):
    """The one connection of a unit of work while a handler has it.

    ConnectionEvents would see the same, but cost every statement of every message; and an exception raised in
    their ``commit`` leaves the transaction open in the pool.
    """

    guard: Guard

    def commit(self) -> None:
        """Prevented: only the unit of work commits."""
        self.guard.before_end("connection.commit")
        super().commit()

    def _commit_impl(self) -> None:
        self.guard.before_end("connection.get_transaction().commit")
        super()._commit_impl()

    def execute(self, statement: Any, *args: Any, **kwargs: Any) -> Any:
        """Every statement of the ORM and of Core comes through here."""
        return self._watched(_sql_text(statement), super().execute, statement, *args, **kwargs)

    def scalar(self, statement: Any, *args: Any, **kwargs: Any) -> Any:
        """The one way of Core that does not call ``execute``."""
        return self._watched(_sql_text(statement), super().scalar, statement, *args, **kwargs)

    def exec_driver_sql(self, statement: str, *args: Any, **kwargs: Any) -> Any:
        """SQL text that SQLAlchemy does not look into."""
        return self._watched(statement, super().exec_driver_sql, statement, *args, **kwargs)

    def _watched(self, sql: str | None, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        guard = self.guard
        guard.before_statement(sql)
        try:
            result = run(*args, **kwargs)
        except BaseException as error:
            guard.statement_failed(error)
            raise
        guard.after_statement()
        return result


@cache
def _guarded_connection(connection_class: type[Connection]) -> type[Connection]:
    if connection_class is Connection:
        return GuardedConnection
    return type(f"Guarded{connection_class.__name__}", (GuardedConnection, connection_class), {})


# SQL text that ends or begins a transaction ----------------------------------------------------------------------

_OPAQUE = re.compile(
    r"""  (?<![a-z0-9_])e'(?:[^'\\]|\\.|'')*'  # PostgreSQL string with backslash escapes
        | '(?:[^']|'')*' | "(?:[^"]|"")*"      # strings and quoted names
        | \$(\w*)\$.*?\$\1\$                   # PostgreSQL dollar quotes
        | --[^\n]* | /\*.*?\*/                 # comments
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_COMMAND = re.compile(
    r"\W*(COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION|ROLLBACK(?!(\s+(WORK|TRANSACTION))?\s+TO\b))\b",
    re.IGNORECASE,
)
_ROUTINE = re.compile(r"\s*CREATE\b[^;]*\b(TRIGGER|FUNCTION|PROCEDURE)\b", re.IGNORECASE)


def transaction_command(sql: str) -> str | None:
    """The first command in ``sql`` that would begin or end a transaction; savepoints may come and go."""
    bare = _OPAQUE.sub(" ", sql)
    if _ROUTINE.match(bare):  # its body may say BEGIN and END
        return None
    for statement in bare.split(";"):
        if found := _COMMAND.match(statement):
            return found[1].upper()
    return None


def _sql_text(statement: Any) -> str | None:
    if isinstance(statement, (FromStatement, TextualSelect)):
        statement = statement.element
    return statement.text if isinstance(statement, TextClause) else None
