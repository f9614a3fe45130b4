"""The session that a handler gets: an ordinary one, except that it reports to the guard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from sqlalchemy import Table, event
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session, SessionTransaction

from ..dialects import Dialect
from ..errors import TransactionViolatedError, UnsafeSessionError
from ..row_source import RowSource
from .class_cache import kept_on_class
from .tag import Savepoints


class Watcher(Protocol):
    """Who is told: ``guards.Guard``. Whatever it raises stops what was about to happen."""

    connection: Connection
    dialect: Dialect
    driver: Any
    watching: bool
    several: bool
    violation: TransactionViolatedError | None
    commit_was_sent: bool
    commit_was_answered: bool
    savepoints: Savepoints
    rows: RowSource | None

    def before_statement(self, sql: str | None, written: Table | None, *, mends: bool) -> None:
        """A statement is about to run; ``sql`` is its text if it is text, ``written`` the table it changes if not.

        It ``mends`` if it may succeed where others do not, as ROLLBACK TO SAVEPOINT may.
        """

    def after_statement(self) -> None:
        """It ran."""

    def statement_failed(self, error: BaseException) -> None:
        """It did not."""

    def savepoint_ended(self, name: str, *, rolled_back: bool) -> None:
        """A savepoint was released or rolled back."""

    def lend_driver(self) -> None:
        """What comes next may go past the guarded connection."""

    def distrust(self) -> None:
        """What comes next may fail, and end the transaction, with nobody to tell."""

    def before_commit(self, how: str) -> None:
        """The transaction, not a savepoint, is about to be committed."""

    def before_rollback(self) -> None:
        """The same, to be rolled back."""

    def verify(self) -> None:
        """The transaction is about to be committed by the unit of work."""

    def connected(self, connection: Connection) -> None:
        """The session has begun a transaction on a connection."""


class GuardedSession(Session):
    """The private Session class of a unit of work; the user's own sessions are never listened to."""

    guard: Watcher | None = None
    taken: tuple[Connection, ...] = ()  # connections, by the transactions that it has begun

    def get(self, entity: Any, ident: Any, **options: Any) -> Any:
        """Return the entity; from memory, if its row was read ahead and nobody could tell."""
        if self.guard is None or self.guard.rows is None or _are_asked_for(options):
            return super().get(entity, ident, **options)
        return self.guard.rows.get(entity, ident, super().get)

    def remember_locked(self, instance: object) -> None:
        """Called where an instance was read under lock, past this session's own loading."""

    def connection(self, bind_arguments: Any = None, execution_options: Any = None) -> Connection:
        """The connection of the claim. SQLAlchemy drops options that come after it, with no more than a warning."""
        if self.guard is not None and "schema_translate_map" in (execution_options or {}):
            raise UnsafeSessionError(
                "session.connection(execution_options={'schema_translate_map': ...}) comes too late in a handler: "
                "the transaction has begun. Give the dispatcher an engine that has the map, or give it to the statement"
            )
        return super().connection(bind_arguments=bind_arguments, execution_options=execution_options)


def _are_asked_for(options: Mapping[str, Any]) -> bool:
    """``with_for_update={}`` is."""
    given = [name for name, value in options.items() if value is not None and value is not False]
    return bool(given) and (given != ["execution_options"] or bool(options["execution_options"]))


@kept_on_class
def guarded_session(session_class: type[Session]) -> type[GuardedSession]:
    """The user's Session class, with the guard's listeners on a subclass of its own."""
    return type(f"Guarded{session_class.__name__}", (GuardedSession, session_class), {})


# Once for all subclasses: SQLAlchemy keeps every listener that was ever registered, also when its class is gone.
@event.listens_for(GuardedSession, "before_commit")
def _before_commit(session: GuardedSession) -> None:
    # It also fires for savepoints, which are the handler's to release.
    if session.guard is not None and not session.in_nested_transaction():
        session.guard.before_commit("session.commit")


@event.listens_for(GuardedSession, "after_begin")
def _after_begin(session: GuardedSession, _transaction: SessionTransaction, connection: Connection) -> None:
    if connection not in session.taken:  # else it is a savepoint that begins
        session.taken = (*session.taken, connection)
    if session.guard is not None:
        session.guard.connected(connection)
