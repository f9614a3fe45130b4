"""The session and the connection that a handler gets: ordinary ones, except that they report to the guard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, Protocol

from sqlalchemy import Select, Table, event
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.sql.elements import ReleaseSavepointClause, RollbackToSavepointClause, SavepointClause

from .class_cache import kept_on_class
from .dialects import Dialect
from .errors import UnsafeSessionError
from .marks import Savepoints
from .plain import KnownRows
from .transaction_text import sql_text


class Watcher(Protocol):
    """Who is told: ``guards.Guard``. Whatever it raises stops what was about to happen."""

    dialect: Dialect
    watching: bool
    commit_was_sent: bool
    commit_was_answered: bool
    savepoints: Savepoints
    rows: KnownRows | None

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

    def get(self, entity: Any, ident: Any, **options: Any) -> Any:
        """In a batch, rows that are known are not read again."""
        if self.guard is None or self.guard.rows is None or _are_asked_for(options):
            return super().get(entity, ident, **options)
        return self.guard.rows.get(entity, ident, super().get)

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
    if session.guard is not None:
        session.guard.connected(connection)


_STREAMING = frozenset({"stream_results", "yield_per"})
_SAVEPOINTS = (SavepointClause, RollbackToSavepointClause, ReleaseSavepointClause)


class GuardedConnection(Connection):
    """The one connection of a unit of work while a handler has it.

    ConnectionEvents would see the same, but cost every statement of every message; and an exception raised in
    their ``commit`` leaves the transaction open in the pool.
    """

    guard: Watcher
    unguarded: ClassVar[type[Connection]] = Connection
    _ending = False

    @property
    def connection(self) -> PoolProxiedConnection:
        """The driver's connection. SQLAlchemy takes this way to it for COMMIT and ROLLBACK only; a handler may."""
        if not self._ending:
            self.guard.lend_driver()
            if self.guard.rows is not None:
                self.guard.rows.stop()
        return super().connection

    def execution_options(self, **options: Any) -> Any:
        """Which may say that all tables are in another schema from here on."""
        if self.guard.rows is not None:
            self.guard.rows.stop()
        return super().execution_options(**options)

    def commit(self) -> None:
        """Prevented: only the unit of work commits."""
        self.guard.before_commit("connection.commit")
        super().commit()

    def _commit_impl(self) -> None:
        self.guard.before_commit("connection.get_transaction().commit")
        self.guard.verify()  # listeners of the user's ran since the unit of work did
        self.guard.commit_was_sent = self._ending = True
        try:
            super()._commit_impl()
        finally:
            self._ending = False
        self.guard.commit_was_answered = True

    def _rollback_impl(self) -> None:
        self.guard.before_rollback()
        self._ending = True
        try:
            super()._rollback_impl()
        finally:
            self._ending = False

    def execute(self, statement: Any, *args: Any, **kwargs: Any) -> Any:
        """Every statement of the ORM and of Core comes through here."""
        return self._watched(super().execute, statement, *args, **kwargs)

    def scalar(self, statement: Any, *args: Any, **kwargs: Any) -> Any:
        """The one way of Core that does not call ``execute``."""
        return self._watched(super().scalar, statement, *args, **kwargs)

    def exec_driver_sql(self, statement: str, *args: Any, **kwargs: Any) -> Any:
        """SQL text that SQLAlchemy does not look into."""
        return self._watched(super().exec_driver_sql, statement, *args, **kwargs)

    def _watched(self, run: Callable[..., Any], statement: Any, *args: Any, **kwargs: Any) -> Any:
        guard = self.guard
        written: Any = statement.table if isinstance(statement, UpdateBase) else None
        usual = written is not None or isinstance(statement, Select)  # neither text nor a savepoint
        savepoint = not usual and isinstance(statement, _SAVEPOINTS)
        rolls_back = savepoint and isinstance(statement, RollbackToSavepointClause)
        guard.before_statement(None if usual else sql_text(statement, self.dialect), written, mends=rolls_back)
        if guard.rows is not None:
            guard.rows.before_statement(statement)
        if self._streams(statement, kwargs.get("execution_options")):
            guard.distrust()  # of what is fetched later
        try:
            result = run(statement, *args, **kwargs)
        except BaseException as error:
            guard.statement_failed(error)
            raise
        guard.after_statement()
        if not savepoint:
            return result
        if isinstance(statement, SavepointClause):
            guard.savepoints.began(statement.ident)
        else:
            guard.savepoint_ended(statement.ident, rolled_back=rolls_back)
        return result

    def _streams(self, statement: Any, options: Mapping[str, Any] | None) -> bool:
        its_own = statement.get_execution_options() if hasattr(statement, "get_execution_options") else None
        for each in its_own, options, self.get_execution_options():
            if each and not _STREAMING.isdisjoint(each) and any(map(each.get, _STREAMING)):
                return True
        return False


def guard_connection(connection: Connection, guard: Watcher) -> None:
    """Let a connection that is open already report to ``guard``."""
    connection.__class__ = _guarded_connection(type(connection))  # type: ignore[arg-type]  # mypy takes a class for its instance here
    connection.guard = guard  # type: ignore[attr-defined]  # it is one now


def release_connection(connection: Connection) -> None:
    """Make it what it was, and forget the guard: a circle would be left to the garbage collector."""
    if isinstance(connection, GuardedConnection):
        connection.__class__ = connection.unguarded  # type: ignore[assignment]  # the same
        del connection.guard


@cache
def _guarded_connection(connection_class: type[Connection]) -> type[Connection]:
    if connection_class is Connection:
        return GuardedConnection
    bases = (GuardedConnection, connection_class)
    return type(f"Guarded{connection_class.__name__}", bases, {"unguarded": connection_class})
