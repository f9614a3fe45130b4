"""The connection that a handler gets: an ordinary one, except that it reports to the guard."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from sqlalchemy import Select
from sqlalchemy.engine import Connection
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.schema import DefaultGenerator
from sqlalchemy.sql.dml import UpdateBase
from sqlalchemy.sql.elements import ReleaseSavepointClause, RollbackToSavepointClause, SavepointClause

from ..dialects.listeners import info_of
from ..errors import TransactionViolatedError
from ..transaction_text import sql_sent, sql_text

if TYPE_CHECKING:
    from .guard import Guard

_STREAMING = frozenset({"stream_results", "yield_per"})
_SAVEPOINTS = (SavepointClause, RollbackToSavepointClause, ReleaseSavepointClause)


class GuardedConnection(Connection):
    """The one connection of a unit of work while a handler has it.

    ConnectionEvents would see the same, but cost every statement of every message; and an exception raised in
    their ``commit`` leaves the transaction open in the pool.
    """

    guard: Guard
    unguarded: ClassVar[type[Connection]] = Connection
    _ending = False

    @property
    def connection(self) -> PoolProxiedConnection:
        """Return the driver's connection. SQLAlchemy goes this way to COMMIT and ROLLBACK only; a handler may, too."""
        if not self._ending:
            self.guard.driver_exposed()
            if self.guard.rows is not None:
                self.guard.rows.stop()
        return super().connection

    @property
    def info(self) -> dict[Any, Any]:
        """Return the dictionary that the pool keeps for the physical connection. Nobody reaches the driver by it."""
        return info_of(self)

    def execution_options(self, **options: Any) -> Any:
        """Set options, which may say that all tables are in another schema from here on: no row is served any more."""
        if self.guard.rows is not None:
            self.guard.rows.stop()
        if self.guard.several:
            _refuse_for_several(self.guard)
        return super().execution_options(**options)

    def commit(self) -> None:
        """Commit for the unit of work; raise ``TransactionViolatedError`` if a handler calls it."""
        self.guard.before_commit("connection.commit")
        super().commit()

    def _commit_impl(self) -> None:
        self.guard.before_commit("connection.get_transaction().commit")
        self.guard.verify()  # listeners of the user's ran since the unit of work did
        self.guard.commit_was_sent = self._ending = True
        try:
            with self.guard.dialect.committing(self.guard.driver):
                if self.guard.last is not None:
                    with self.guard.dialect.taking_commit_along(self.guard.driver):
                        self.guard.last.run(self.guard.claim_transaction.where_claimed())
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
        """Execute a statement, and report it to the guard. The statements of the ORM and of Core come through here."""
        return self._watched(super().execute, statement, *args, **kwargs)

    def scalar(self, statement: Any, *args: Any, **kwargs: Any) -> Any:
        """Execute a statement for one value, and report it. The one way of Core that does not call ``execute``."""
        if self.guard.several and not isinstance(statement, DefaultGenerator):
            return self.execute(statement, *args, **kwargs).scalar()  # the same, with a result that tells what was sent
        return self._watched(super().scalar, statement, *args, **kwargs)

    def exec_driver_sql(self, statement: str, *args: Any, **kwargs: Any) -> Any:
        """Execute SQL text that SQLAlchemy does not look into, and report it to the guard."""
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
            guard.require_server_check()  # what is fetched later may fail, and nobody is told
        try:
            result = run(statement, *args, **kwargs)
        except BaseException as error:
            guard.statement_failed(error)
            raise
        guard.after_statement()
        if guard.several and guard.dialect.grammar.sets_for_transaction(sql_sent(result)):
            _refuse_for_several(guard)
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


def _refuse_for_several(guard: Guard) -> NoReturn:
    """Make the unit of work fail: a batch then applies this message alone, in a transaction of its own."""
    guard.violation = guard.violation or TransactionViolatedError(
        "the handler set something for its transaction, which several messages share; everything was rolled back, and "
        "the message is tried again in a transaction of its own. Let the error pass"
    )
    raise guard.violation


def guard_connection(connection: Connection, guard: Guard) -> None:
    """Let a connection that is open already report to ``guard``."""
    connection.__class__ = _guarded_connection(type(connection))  # type: ignore[arg-type]  # mypy takes a class for its instance here
    connection.guard = guard  # type: ignore[attr-defined]  # it is one now


def release_connection(connection: Connection) -> None:
    """Make a connection what it was, and forget the guard: a circle would be left to the garbage collector."""
    if isinstance(connection, GuardedConnection):
        connection.__class__ = connection.unguarded  # type: ignore[assignment]  # the same
        del connection.guard


@cache
def _guarded_connection(connection_class: type[Connection]) -> type[Connection]:
    if connection_class is Connection:
        return GuardedConnection
    bases = (GuardedConnection, connection_class)
    return type(f"Guarded{connection_class.__name__}", bases, {"unguarded": connection_class})
