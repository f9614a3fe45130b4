"""Row locks for ``read_models`` (invariant I6).

At the default isolation level the database refuses a lost update, and the library retries the message. If many messages
change the same row, most of them would be retried. So a projector may declare ``read_models``: every SELECT of such an
entity locks its rows (FOR NO KEY UPDATE). The transaction runs at READ COMMITTED, so a message that has waited for a
lock sees the changes of the other message.

At READ COMMITTED the database does not refuse lost updates. So a flush refuses to change any row that this unit of work
has neither read under lock nor inserted, also rows of undeclared entities. An undeclared entity with a version counter
is exempt, because its UPDATE detects the conflict. A declared entity must be locked at every level. The library also
refuses a SELECT of a declared entity that cannot lock. It does not detect textual SQL, and not a value that a handler
reads and then writes with its own UPDATE statement.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy import Column, Select, event, inspect, select, tuple_
from sqlalchemy.ext.mutable import MutableBase
from sqlalchemy.orm import (
    InstanceState,
    LoaderCallableStatus,
    Mapper,
    ORMExecuteState,
    QueryContext,
    RelationshipDirection,
    SessionTransaction,
    UOWTransaction,
)
from sqlalchemy.sql import ClauseElement, Join
from sqlalchemy.sql.expression import Alias, FromClause
from sqlalchemy.sql.util import find_tables, surface_selectables_only

from .errors import UnlockedWriteError
from .guard import GuardedSession

_LOCKED = "projector_dedup_locked_tables"
_AT_ONCE = 500  # keys in one SELECT


class LockingSession(GuardedSession):
    """Remembers which rows its transaction has read under lock or inserted."""

    read_models: tuple[type[Any], ...] = ()
    declared_tables: frozenset[FromClause] = frozenset()
    conflicts_are_found = False  # True: at this isolation level the database itself refuses lost updates
    verifies = False  # True: a flush compares unlocked rows with the database, instead of refusing to change them

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.locked_instances: WeakSet[InstanceState[Any]] = WeakSet()
        self.inserted: set[Any] = set()  # identity keys: an instance may be loaded anew
        #: rows that ``verify_unlocked`` has locked, and the names of the values that had changed by then
        self.stale: WeakKeyDictionary[InstanceState[Any], set[str]] = WeakKeyDictionary()
        self.before_savepoint: WeakKeyDictionary[SessionTransaction, tuple[WeakSet[InstanceState[Any]], set[Any]]] = (
            WeakKeyDictionary()
        )

    @property
    def locks(self) -> bool:
        """True if the database locks rows. A database that serialises writers needs no locks."""
        return self.guard is not None and self.guard.dialect.locks_rows

    def before_rollback_to_savepoint(self) -> None:
        """Forget all locks before a rollback to a savepoint of the connection, which may release some of them."""
        self.stale.clear()
        if not self.in_nested_transaction():  # otherwise the listeners of the session's savepoints restore the locks
            self.locked_instances.clear()
            self.inserted.clear()

    def may_write(self, state: InstanceState[Any]) -> bool:
        """True if this transaction locked or inserted the row, or if it is undeclared and conflicts are detected."""
        if state in self.locked_instances or state.key in self.inserted:
            return True
        if issubclass(state.class_, self.read_models):
            return False
        return self.conflicts_are_found or state.mapper.version_id_col is not None


def locking_session(
    session_class: type[GuardedSession], read_models: tuple[type[Any], ...], *, verifies: bool
) -> type[LockingSession]:
    """Return a subclass of the guarded session class that reads ``read_models`` under lock.

    If it ``verifies``, a flush compares the other rows that it changes with the database.
    """
    declared = frozenset(table for model in read_models for table in inspect(model).tables)
    for model in read_models:
        _remember_locked_instances(model)  # type: ignore[arg-type]  # mypy takes a class for its instance here
    return type(
        f"Locking{session_class.__name__}",
        (LockingSession, session_class),
        {"read_models": read_models, "declared_tables": declared, "verifies": verifies},
    )


@event.listens_for(LockingSession, "do_orm_execute")
def _lock_what_is_read(state: ORMExecuteState) -> None:
    session, statement = state.session, state.statement
    if not isinstance(session, LockingSession) or not session.locks:
        return
    locked: frozenset[Any] = frozenset()
    if state.is_select and not (state.is_column_load and _asked(statement) is None):
        locked = _lock(state, session.declared_tables)
    elif state.is_insert or state.is_update:
        locked = frozenset({getattr(statement, "table", None)})  # RETURNING: rows as this transaction has written them
    if locked:
        for mapper in state.all_mappers:
            _remember_locked_instances(mapper.class_)  # type: ignore[arg-type]  # mypy takes a class for its instance
    state.update_execution_options(**{_LOCKED: locked})  # also if empty: the SELECT of a relationship inherits options


@event.listens_for(LockingSession, "before_flush")
def _refuse_unlocked_writes(session: LockingSession, _context: UOWTransaction, _instances: object) -> None:
    if not session.locks:
        return
    if session.verifies:
        verify_unlocked(session)
        return
    removed = session.deleted
    for instance in (*session.dirty, *removed):
        _refuse_unlocked(session, inspect(instance), is_deleted=instance in removed)


@event.listens_for(LockingSession, "after_flush")
def _refuse_what_the_flush_added(session: LockingSession, context: UOWTransaction) -> None:
    """Refuse rows that relationships or listeners added to the flush, such as the row of a removed child."""
    if not session.locks or session.verifies:
        return
    for state, (is_deleted, only_listed) in context.states.items():
        if not only_listed and state.key is not None:  # without a key it was inserted
            _refuse_unlocked(session, state, is_deleted=is_deleted)


def verify_unlocked(session: LockingSession) -> None:
    """Lock the rows that a flush will change, and compare what it overwrites with what the handler has read.

    Raises ``OvertakenError`` if another transaction has changed a value since, and ``UnlockedWriteError`` if the
    handler has changed a value in place, so that there is nothing to compare.
    """
    if session.conflicts_are_found:
        return
    groups: dict[Mapper[Any], dict[InstanceState[Any], set[str]]] = {}
    for state, names in _flushed(session):
        if state in session.stale:  # locked by an earlier flush, so only this transaction has changed it since
            if not session.stale[state].isdisjoint(names):
                _raise_changed(session, state.mapper)
        elif not session.may_write(state):
            groups.setdefault(state.mapper, {}).setdefault(state, set()).update(names)
    for mapper in sorted(groups, key=lambda each: each.class_.__qualname__):  # in one order everywhere: no deadlock
        rows = list(groups[mapper].items())
        for start in range(0, len(rows), _AT_ONCE):
            _verify(session, mapper, rows[start : start + _AT_ONCE])


def _flushed(session: LockingSession) -> Iterator[tuple[InstanceState[Any], Iterable[str]]]:
    """Yield the rows that a flush will UPDATE or DELETE, and the names of the values that it overwrites or removes."""
    removed = session.deleted
    for instance in (*session.dirty, *removed):
        state, deleted = inspect(instance), instance in removed
        if deleted:
            yield state, [name for name in state.mapper.column_attrs.keys() if name in state.dict]  # noqa: SIM118  # no dict
        elif names := _overwritten(state):
            yield state, names
        for relation in state.mapper.relationships:
            if relation.direction is RelationshipDirection.ONETOMANY and relation.key in state.dict:
                history = state.attrs[relation.key].history
                children = (*history.deleted, *history.added, *(history.unchanged if deleted else ()))
                for child in (inspect(each) for each in children if each is not None):
                    if child.persistent:
                        yield child, _attributes(child.mapper, relation.remote_side)


def _overwritten(state: InstanceState[Any]) -> list[str]:
    """Return the names of the values that a flush would overwrite. A changed collection changes other rows."""
    names = [name for name in state.mapper.column_attrs.keys() if state.attrs[name].history.has_changes()]  # noqa: SIM118
    for relation in state.mapper.relationships:
        if relation.direction is RelationshipDirection.MANYTOONE and state.attrs[relation.key].history.has_changes():
            names += _attributes(state.mapper, relation.local_columns)
    return names


def _attributes(mapper: Mapper[Any], columns: Iterable[Any]) -> list[str]:
    """Return the names of the attributes that have these columns of the mapper's table."""
    return [mapper.get_property_by_column(column).key for column in columns if column in mapper.columns.values()]


def _verify(session: LockingSession, mapper: Mapper[Any], rows: list[tuple[InstanceState[Any], set[str]]]) -> None:
    loaded = {name for state, names in rows for name in {*names, *state.dict} if name in mapper.column_attrs}
    columns = {
        name: each for name in sorted(loaded) if isinstance(each := mapper.column_attrs[name].columns[0], Column)
    }
    by_key = {state.key[1]: (state, names) for state, names in rows if state.key is not None}
    key: Any = mapper.primary_key
    chosen = key[0].in_([each[0] for each in by_key]) if len(key) == 1 else tuple_(*key).in_(list(by_key))
    found = select(*key, *columns.values()).select_from(mapper.persist_selectable).where(chosen).order_by(*key)
    answer = session.connection().execute(found.with_for_update(key_share=not session.deleted)).all()
    now = {tuple(row[: len(key)]): dict(zip(columns, row[len(key) :], strict=True)) for row in answer}
    for identity, (state, names) in by_key.items():
        values = now.get(tuple(identity))
        if values is None:
            _raise_changed(session, mapper)
        _refuse_values_in_place(state, names)
        stale = {name for name in columns if not _is_unchanged(state, name, columns[name], values[name])}
        if not stale.isdisjoint(names):
            _raise_changed(session, mapper)
        session.stale[state] = stale


def _raise_changed(session: LockingSession, mapper: Mapper[Any]) -> NoReturn:
    assert session.guard is not None  # noqa: S101  # ``locks`` was True
    raise session.guard.overtake(
        f"a row of {mapper.class_.__name__} has changed since the handler read it, by another transaction or by a "
        "statement of the handler's own, after which it must refresh the row"
    )


def _refuse_values_in_place(state: InstanceState[Any], names: Iterable[str]) -> None:
    """Raise ``UnlockedWriteError`` if one of these values was changed in place: the value that was read is lost."""
    for name in names:
        given = state.dict.get(name)
        unknown = isinstance(state.committed_state.get(name), LoaderCallableStatus)
        if unknown and isinstance(given, (MutableBase, dict, list, set)):
            raise UnlockedWriteError(
                f"{state.class_.__name__}.{name} was changed in place in a row that is not locked, so the library "
                "cannot detect a concurrent change; read the row with with_for_update=True, or declare its entity in "
                "read_models"
            )


def _is_unchanged(state: InstanceState[Any], name: str, column: Any, now: Any) -> bool:
    """True if the row still has the value that the handler has read, or the handler has read none.

    Values that cannot be compared count as equal: NaN, objects without equality, and whatever differs from a copy of
    itself because such a value is inside.
    """
    given = state.dict.get(name, LoaderCallableStatus.NO_VALUE)
    loaded = state.committed_state.get(name, given)
    if isinstance(loaded, LoaderCallableStatus):
        return True
    if loaded is now or isinstance(given, ClauseElement) or column.type.compare_values(loaded, now):
        return True
    try:
        return bool(loaded != pickle.loads(pickle.dumps(loaded)))  # noqa: S301  # its own bytes
    except Exception:  # noqa: BLE001  # a class of the user's may raise anything
        return True


def _refuse_unlocked(session: LockingSession, state: InstanceState[Any], *, is_deleted: bool) -> None:
    if not session.may_write(state) and (is_deleted or _is_updated(state)):
        raise _unlocked(state.class_, declared=issubclass(state.class_, session.read_models))


def _is_updated(state: InstanceState[Any]) -> bool:
    """True if a flush would UPDATE the row itself. A change of a collection, for example, changes other rows."""
    relations = [each.key for each in state.mapper.relationships if each.direction is RelationshipDirection.MANYTOONE]
    return any(state.attrs[name].history.has_changes() for name in (*state.mapper.column_attrs.keys(), *relations))


@event.listens_for(LockingSession, "pending_to_persistent")
def _inserted(session: LockingSession, instance: object) -> None:
    session.inserted.add(inspect(instance).key)  # no other transaction can change the row before the COMMIT


@event.listens_for(LockingSession, "after_transaction_create")
def _savepoint_begins(session: LockingSession, transaction: SessionTransaction) -> None:
    if transaction.nested:
        session.before_savepoint[transaction] = session.locked_instances.copy(), session.inserted.copy()


@event.listens_for(LockingSession, "after_soft_rollback")
def _savepoint_is_rolled_back(session: LockingSession, transaction: SessionTransaction) -> None:
    # ROLLBACK TO releases the row locks that were taken after the savepoint, and keeps those from before.
    if transaction.nested:
        locked, inserted = session.before_savepoint.pop(transaction, (WeakSet(), set()))
        session.locked_instances &= locked
        session.inserted &= inserted


def _lock(state: ORMExecuteState, declared: frozenset[FromClause]) -> frozenset[FromClause]:
    """Add a lock to a SELECT from declared tables. Return the tables whose rows it locks."""
    statement: Any = state.statement
    asked = _asked(statement)
    sources = set(_lockable(statement.get_final_froms())) if isinstance(statement, Select) else set()
    kept = sources if asked is None or asked.of is None else sources & _sources(asked.of)
    named = {
        table for table in find_tables(statement, check_columns=True, include_aliases=True) if _is(table, declared)
    }
    lockable = {source for source in sources if _is(source, declared)}
    if not {_table(source) for source in named} <= {_table(source) for source in lockable}:
        raise _cannot_lock(named)
    if asked is None:
        if named:
            state.statement = statement.with_for_update(key_share=True, of=tuple(lockable))
        return frozenset(_table(source) for source in lockable)
    if named and (asked.read or not lockable <= kept):  # otherwise keep the handler's own lock, which is stronger
        raise UnlockedWriteError(
            f"{_names(named)} is declared in read_models, but the with_for_update() of this SELECT does not lock it "
            "against other writers (read=True, or of= without it); remove with_for_update(): the library adds the lock"
        )
    return frozenset() if asked.read else frozenset(_table(source) for source in kept)


def _asked(statement: Any) -> Any:
    """Return the handler's own with_for_update() of a SELECT, or None."""
    return statement._for_update_arg if isinstance(statement, Select) else None


def _lockable(sources: Any, *, nullable: bool = False) -> Iterator[FromClause]:
    """Yield the tables whose rows FOR UPDATE can lock. It locks no subquery and no nullable side of an outer join."""
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
        f"{_names(named)} is declared in read_models, but this SELECT cannot lock its rows (a subquery, a UNION, or "
        "the nullable side of an outer join); read the entity with its own SELECT, or do not declare it in read_models"
    )


def _unlocked(entity: type[Any], *, declared: bool) -> UnlockedWriteError:
    name = entity.__name__
    if declared:
        return UnlockedWriteError(
            f"{name} is declared in read_models and was changed, but this instance was not read under lock (it was "
            "loaded with another entity, for example by joinedload, or a rollback to a savepoint released its lock); "
            "first read it with session.get() or select(), after a savepoint with populate_existing=True, or remove it "
            "from read_models"
        )
    return UnlockedWriteError(
        f"{name} was changed without a lock, and it is not declared in read_models. With read_models the transaction "
        "runs at READ COMMITTED, where a concurrent change of the same row by another message would be lost. Add "
        f"{name} to read_models, or lock the row when you read it: session.get({name}, key, with_for_update=True), or "
        "session.refresh(row, with_for_update=True) if the session has it already"
    )


@cache
def _remember_locked_instances(model: type[Any]) -> None:
    @event.listens_for(model, "load", propagate=True, raw=True)
    def _loaded(state: InstanceState[Any], context: QueryContext) -> None:
        _remember(state, context)

    @event.listens_for(model, "refresh", propagate=True, raw=True)
    def _refreshed(state: InstanceState[Any], context: QueryContext, names: object) -> None:
        if names is None:  # otherwise only missing columns were read, and the other values are older than the lock
            _remember(state, context)


def _remember(state: InstanceState[Any], context: QueryContext | None) -> None:
    session = context.session if context is not None else None
    if isinstance(session, LockingSession) and context is not None:
        locked: frozenset[FromClause] = context.execution_options.get(_LOCKED, frozenset())  # type: ignore[assignment]
        # An eager load reads the row by a JOIN that SQLAlchemy adds after the lock.
        came_along = len(state.load_path) - len(context.compile_state.current_path) > 1
        if locked.issuperset(state.mapper.tables) and not came_along:
            session.locked_instances.add(state)
