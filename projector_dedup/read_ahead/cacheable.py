"""Entities that may be read earlier and written later, and nobody could tell: nothing listens, nothing is derived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cached_property
from operator import attrgetter
from typing import Any, Protocol
from uuid import UUID
from weakref import WeakKeyDictionary

from sqlalchemy import ClauseElement, Table, inspect
from sqlalchemy.engine import Connection
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import ColumnProperty, InstanceState, Mapper, Session
from sqlalchemy.orm.attributes import instance_state

from ..dialects import Dialect
from ..dialects.listeners import are_of_others
from ..dialects.plain_tables import PlainColumn, PlainTable
from ..row_source import RowSource

# What is asked for every message: all of its listeners at once, by one call; of a session, and of an entity.
_BEGINNING = attrgetter("after_begin", "after_transaction_create")
_LOADING = attrgetter(
    "do_orm_execute", "before_attach", "after_attach", "loaded_as_persistent", "detached_to_persistent"
)
_FLUSHING = attrgetter(
    *("before_flush", "after_flush", "after_flush_postexec"),
    *("after_transaction_create", "after_transaction_end"),  # a flush has a transaction of its own
)
_ROW_LOADED = attrgetter("load", "refresh")
_ROW_FLUSHED = attrgetter("refresh_flush", "expire")
_ROW_WRITTEN = attrgetter("before_insert", "after_insert", "before_update", "after_update")
_CONNECTION_EVENTS = attrgetter("before_execute", "after_execute")  # those of cursors see SQL as it is sent
_ONLY_SEES = "wrap_before_cursor_execute"  # what SQLAlchemy makes of a listener without ``retval``
_LOADED_WHEN_ASKED_FOR = {"select", True, "raise", "raise_on_sql", "noload", "dynamic", "write_only"}  # True: "select"

_plain_classes: WeakKeyDictionary[type[Session], bool] = WeakKeyDictionary()  # every sessionmaker makes one

_PACKAGE = f"{__package__.partition('.')[0]}."
_IMMUTABLE = {type(None), bool, int, float, str, bytes, Decimal, date, datetime, time, timedelta}


class Watched(Protocol):
    """The unit of work that reads or keeps rows: ``guards.Guard``."""

    connection: Connection
    dialect: Dialect
    rows: RowSource | None

    @property
    def session(self) -> Any:
        """The handler's session."""

    def before_statement(self, sql: str | None, written: Table | None) -> None:
        """Raise if there may not be another statement: the transaction is not ours any more."""

    def statement_failed(self, error: BaseException) -> None:
        """Remember an error of a statement of ours, which nobody else saw."""


def has_options(session: Session) -> bool:
    """Whether all that it does is done in some other way than usual; of SQLAlchemy 2.1."""
    return bool(getattr(session, "execution_options", None))


def loads_unheard(session: Session) -> bool:
    """Whether nobody listens who would notice that it sends a SELECT less; we do, where rows are read under lock."""
    return not has_options(session) and not any(_LOADING(session.dispatch))


def loads_without_listeners(session: Session) -> bool:
    """True if no listener of the user's would notice that the session sends a SELECT less."""
    return not has_options(session) and not are_of_others(_LOADING(session.dispatch))


def flushes_unheard(session: Session) -> bool:
    """Whether nobody listens who would notice that it flushes later."""
    return not any(_FLUSHING(session.dispatch))


def begins_unheard(session: Session) -> bool:
    """Whether nobody has a say in how it begins a transaction: no listener, no class of the user's."""
    return _is_plain_class(type(session)) and not are_of_others(_BEGINNING(session.dispatch))


def is_plain_beginning(session: Session, connection: Connection) -> bool:
    """Whether its transaction is nobody's but the session's, and nobody would notice fewer statements, or change each.

    Who listens to its beginning had the connection before we did, and may have a cursor of the driver's.
    """
    listened_to = any(_CONNECTION_EVENTS(connection.dispatch))
    changes_sql = any(getattr(each, "__name__", "") != _ONLY_SEES for each in connection.dispatch.before_cursor_execute)
    return begins_unheard(session) and not (listened_to or changes_sql)


def is_read_by(connection: Connection, session: Session, mapper: Mapper[Any]) -> bool:
    """Whether it is on this connection that the session would read the entity: there may be an engine for each."""
    try:
        return session.get_bind(mapper) is connection.engine
    except UnboundExecutionError:
        return False


def _is_plain_class(session_class: type[Session]) -> bool:
    """Whether it does everything as SQLAlchemy's does, but for our guards: one of the user's may do more."""
    if session_class not in _plain_classes:
        users = (each for each in session_class.__mro__ if not each.__module__.startswith(("sqlalchemy.", _PACKAGE)))
        names = (name for each in users for name in vars(each) if not name.startswith(("__", "_projector_dedup_")))
        _plain_classes[session_class] = not any(hasattr(Session, name) for name in names)
    return _plain_classes[session_class]


def is_sql(value: Any) -> bool:
    """Whether an attribute has an expression for its value, which the database would compute."""
    return hasattr(value, "__clause_element__") or isinstance(value, ClauseElement)


@dataclass(frozen=True, eq=False)
class Plain:
    """An entity on a plain table: what was read of it, and changed, can be told from its attributes alone."""

    mapper: Mapper[Any]
    table: Table
    identity: object  # the table's
    columns: Mapping[str, str]  # by attribute
    loaded: tuple[str, ...]  # the attributes that a SELECT gives
    typed: Mapping[str, PlainColumn]  # by attribute, those of which the database's type is known
    keys: tuple[PlainColumn, ...]
    reads_ahead: bool

    @property
    def entity(self) -> type[Any]:
        """The mapped class."""
        return self.mapper.class_

    @cached_property
    def loaded_columns(self) -> tuple[str, ...]:
        """The columns that a SELECT gives, by the names that they have in the database."""
        return tuple(self.columns[name] for name in self.loaded)

    def loads_unheard(self) -> bool:
        """Whether nobody would notice that a row of it is loaded without a SELECT."""
        manager: Any = self.mapper.class_manager
        return not are_of_others(_ROW_LOADED(manager.dispatch))

    def flushes_unheard(self) -> bool:
        """Whether nobody would notice that one is written later, and with others."""
        manager: Any = self.mapper.class_manager
        return not any(_ROW_FLUSHED(manager.dispatch)) and not any(_ROW_WRITTEN(self.mapper.dispatch))

    def identity_key(self, ident: Any) -> Any:
        """As the identity map has it; None if the database might find another row than the one of just this key."""
        values = ident if type(ident) is tuple else (ident,)
        if len(values) != len(self.keys):
            return None
        for column, value in zip(self.keys, values, strict=True):
            if not column.accepts(value):
                return None
        return self.mapper.identity_key_from_primary_key(values)

    def changes(self, state: InstanceState[Any]) -> dict[str, Any] | None:
        """What an UPDATE would write; None if that had better be now."""
        changes, values = {}, state.dict
        for name, before in state.committed_state.items():
            column = self.typed.get(name)
            if column is None or not column.can_change or name not in values or not column.accepts(values[name]):
                return None
            if type(before) is not type(values[name]) or before != values[name]:
                changes[name] = values[name]
        return changes

    def values(self, state: InstanceState[Any]) -> dict[str, Any] | None:
        """What was read; None if not all of it is there, or some could be changed in place."""
        values = {name: state.dict[name] for name in self.loaded if name in state.dict}
        return values if len(values) == len(self.loaded) and all(map(is_immutable, values.values())) else None

    def restored(self, session: Session, key: Any, values: Mapping[str, Any]) -> Any:
        """What ``session.get()`` gives of a row that was read, by us.

        As the ORM's loader does it; ``make_transient_to_detached`` would expire what is deferred, and ``session.add()``
        would look for what is related.
        """
        instance = self.mapper.class_manager.new_instance()
        state = instance_state(instance)
        state.dict.update(values)
        state.key = key
        session.identity_map.add(state)
        state.session_id = session.hash_key
        return instance


def plain_entity(
    entity: Any, connection: Connection, look: Callable[[Connection, Table], PlainTable | None]
) -> Plain | None:
    """What is known of an entity, None if it is not plain. ``look`` asks the database about its table."""
    mapper: Any = inspect(entity, raiseerr=False)
    if not isinstance(mapper, Mapper) or not _is_plain_mapper(mapper):
        return None
    table: Any = mapper.local_table
    found = look(connection, table)
    if found is None:
        return None
    columns = {each.key: str(each.columns[0].name) for each in mapper.column_attrs}
    loaded = tuple(each.key for each in mapper.column_attrs if not each.deferred)
    typed = {name: found.columns[column] for name, column in columns.items() if column in found.columns}
    keys = tuple(found.columns[column.name] for column in mapper.primary_key if column.name in found.columns)
    if len(keys) < len(mapper.primary_key):
        return None
    return Plain(mapper, table, found.identity, columns, loaded, typed, keys, found.reads_ahead)


def _is_plain_mapper(mapper: Mapper[Any]) -> bool:
    table = mapper.local_table
    return (
        isinstance(table, Table)
        and mapper.persist_selectable is table
        and not (mapper.inherits or mapper.polymorphic_on is not None or mapper.composites)
        and mapper.version_id_col is None
        and mapper.primary_key == tuple(table.primary_key)
        and all(map(_is_plain_property, mapper.column_attrs))
        and all(each.lazy in _LOADED_WHEN_ASKED_FOR for each in mapper.relationships)
    )


def _is_plain_property(attribute: ColumnProperty[Any]) -> bool:
    """A column, and nothing that is computed from one, here or there."""
    column: Any = attribute.columns[0]
    return (
        len(attribute.columns) == 1
        and isinstance(column.table, Table)
        and column.key == column.name  # by which the catalogue knows it
        and type(column.type).__module__.startswith("sqlalchemy.")  # one of the user's may do anything with a value
        and column.onupdate is column.server_onupdate is column.computed is None
        and not (column.default is not None and column.default.is_clause_element)
        and not attribute.raiseload
    )


def is_immutable(value: Any) -> bool:
    """Whether nobody can change it in place."""
    return type(value) in _IMMUTABLE or isinstance(value, (Enum, UUID))
