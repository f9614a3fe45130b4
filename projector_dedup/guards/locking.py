"""Invariant I6 for hot rows: entities that a projector declares in ``read_models`` are read under lock.

The default, conflict detection at REPEATABLE READ, needs nothing of this. Where many workers change one row it makes
most of them run again, and there a lock is faster: every SELECT that names a declared table gets FOR NO KEY UPDATE
OF that table, at READ COMMITTED. What cannot be locked is refused, never read unlocked: a lock that is missing
silently is a lost update (docs/adr/0003-lost-updates.md). What is not seen: textual SQL, what runs on
``session.connection()`` instead of the session, and a value kept from a savepoint that was rolled back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Select, event, inspect
from sqlalchemy.orm import InstanceState, ORMExecuteState, QueryContext, SessionTransaction, UOWTransaction
from sqlalchemy.sql import Join
from sqlalchemy.sql.expression import Alias, FromClause
from sqlalchemy.sql.util import find_tables, surface_selectables_only

from ..errors import UnlockedWriteError
from .session import GuardedSession, kept_on_class

_LOCKED = "projector_dedup_locked_tables"


class LockingSession(GuardedSession):
    """Remembers which instances were read under lock, for as long as its one transaction lasts."""

    read_models: tuple[type[Any], ...] = ()
    declared_tables: frozenset[FromClause] = frozenset()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.locked_instances: WeakSet[InstanceState[Any]] = WeakSet()
        self.locked_before: WeakKeyDictionary[SessionTransaction, WeakSet[InstanceState[Any]]] = WeakKeyDictionary()

    def remember_locked(self, instance: object) -> None:
        """Note that the instance was read under lock, by the claim of its message."""
        self.locked_instances.add(inspect(instance))

    @property
    def locks(self) -> bool:
        """True if the database locks rows; where writers are serialised, nothing needs a lock."""
        return self.guard is not None and self.guard.dialect.locks_rows


@kept_on_class
def locking_session(session_class: type[GuardedSession], read_models: tuple[type[Any], ...]) -> type[LockingSession]:
    """Return a subclass of the guarded session class, which reads ``read_models`` under lock."""
    declared = frozenset(table for model in read_models for table in inspect(model).tables)
    for model in read_models:
        _remember_locked_instances(model)  # type: ignore[arg-type]  # mypy takes a class for its instance here
    return type(
        f"Locking{session_class.__name__}",
        (LockingSession, session_class),
        {"read_models": read_models, "declared_tables": declared},
    )


@event.listens_for(LockingSession, "do_orm_execute")
def _lock_what_is_read(state: ORMExecuteState) -> None:
    session = state.session
    if isinstance(session, LockingSession) and session.locks and state.is_select and not state.is_column_load:
        _lock(state, session.declared_tables)


@event.listens_for(LockingSession, "before_flush")
def _refuse_unlocked_writes(session: LockingSession, _context: UOWTransaction, _instances: object) -> None:
    if not session.locks:
        return
    for instance in (*session.dirty, *session.deleted):
        if (
            isinstance(instance, session.read_models)
            and inspect(instance) not in session.locked_instances
            and (instance in session.deleted or session.is_modified(instance))
        ):
            raise UnlockedWriteError(
                f"{type(instance).__name__} is declared in read_models and was changed, but this instance was "
                "not read under lock (it came with another entity, as by joinedload, or its lock went with a savepoint "
                "that was rolled back); read it with session.get() or select() first, after a savepoint with "
                "populate_existing=True, or leave read_models away"
            )


@event.listens_for(LockingSession, "after_transaction_create")
def _savepoint_begins(session: LockingSession, transaction: SessionTransaction) -> None:
    if transaction.nested:
        session.locked_before[transaction] = session.locked_instances.copy()


@event.listens_for(LockingSession, "after_soft_rollback")
def _savepoint_is_rolled_back(session: LockingSession, transaction: SessionTransaction) -> None:
    # ROLLBACK TO releases the row locks that were taken since; those from before the savepoint are held still.
    if transaction.nested:
        session.locked_instances &= session.locked_before.pop(transaction, WeakSet())


def _lock(state: ORMExecuteState, declared: frozenset[FromClause]) -> None:
    statement: Any = state.statement
    named = {
        table for table in find_tables(statement, check_columns=True, include_aliases=True) if _is(table, declared)
    }
    if not named:
        return
    if not isinstance(statement, Select):
        raise _cannot_lock(named)
    lockable = {source for source in _lockable(statement.get_final_froms()) if _is(source, declared)}
    if not {_table(source) for source in named} <= {_table(source) for source in lockable}:
        raise _cannot_lock(named)
    asked = statement._for_update_arg
    if asked is None:
        state.statement = statement.with_for_update(key_share=True, of=tuple(lockable))
    elif asked.read or not (asked.of is None or lockable <= _sources(asked.of)):  # else it is kept: it is stronger
        raise UnlockedWriteError(
            f"{_names(named)} is declared in read_models, and the with_for_update() of this SELECT does not lock it "
            "against other writers (read=True, or of= without it); leave with_for_update() away, and the lock is added"
        )
    state.update_execution_options(**{_LOCKED: frozenset(_table(source) for source in lockable)})


def _lockable(sources: Any, *, nullable: bool = False) -> Iterator[FromClause]:
    """Yield the tables whose rows FOR UPDATE can lock: not a subquery, nor the nullable side of an outer join."""
    for source in sources:
        if isinstance(source, Join):
            yield from _lockable([source.left], nullable=nullable or source.full)
            yield from _lockable([source.right], nullable=nullable or source.full or source.isouter)
        elif not nullable:
            yield source


def _table(source: FromClause) -> FromClause:
    return source.element if isinstance(source, Alias) else source


def _is(source: Any, declared: frozenset[FromClause]) -> bool:
    return _table(source) in declared


def _sources(of: Iterable[Any]) -> set[Any]:
    return {source for entity in of for source in surface_selectables_only(entity)}


def _names(sources: Iterable[Any]) -> str:
    return ", ".join(sorted({str(_table(source)) for source in sources}))


def _cannot_lock(named: set[Any]) -> UnlockedWriteError:
    return UnlockedWriteError(
        f"{_names(named)} is declared in read_models, and this SELECT cannot lock its rows (a subquery, a UNION, or "
        "the nullable side of an outer join); read the entity by a SELECT of its own, or leave read_models away"
    )


@cache
def _remember_locked_instances(model: type[Any]) -> None:
    @event.listens_for(model, "load", propagate=True, raw=True)
    def _loaded(state: InstanceState[Any], context: QueryContext) -> None:
        _remember(state, context)

    @event.listens_for(model, "refresh", propagate=True, raw=True)
    def _refreshed(state: InstanceState[Any], context: QueryContext, names: object) -> None:
        if names is None:  # else only what was missing was read: the other values are older than the lock
            _remember(state, context)


def _remember(state: InstanceState[Any], context: QueryContext | None) -> None:
    session = context.session if context is not None else None
    if isinstance(session, LockingSession) and context is not None:
        locked: frozenset[FromClause] = context.execution_options.get(_LOCKED, frozenset())  # type: ignore[assignment]
        if not locked.isdisjoint(state.mapper.tables):
            session.locked_instances.add(state)
