"""Which ORM entities are safe to cache: no event listeners, no computed columns, no version counter.

An entity that is cacheable may be read earlier, or written later, and no code of the user's could tell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import cached_property
from operator import attrgetter
from typing import Any
from uuid import UUID
from weakref import WeakKeyDictionary

from sqlalchemy import ClauseElement, Table, inspect
from sqlalchemy.engine import Connection
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import ColumnProperty, InstanceState, Mapper, Session
from sqlalchemy.orm.attributes import instance_state

from ..dialects.cacheable_tables import CacheableColumn, CacheableTable
from ..dialects.listeners import are_of_others

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

_ordinary_classes: WeakKeyDictionary[type[Session], bool] = WeakKeyDictionary()  # every sessionmaker makes one

_PACKAGE = f"{__package__.partition('.')[0]}."
_IMMUTABLE = {type(None), bool, int, float, str, bytes, Decimal, date, datetime, time, timedelta}


def has_options(session: Session) -> bool:
    """True if the session has execution options (SQLAlchemy 2.1), by which every statement may do something else."""
    return bool(getattr(session, "execution_options", None))


def no_load_listeners(session: Session) -> bool:
    """True if the session has no execution options and no listener, of a locking session say, that sees SELECTs."""
    return not has_options(session) and not any(_LOADING(session.dispatch))


def no_load_listeners_of_others(session: Session) -> bool:
    """True if the session has no execution options, and no listener of the user's that sees SELECTs."""
    return not has_options(session) and not are_of_others(_LOADING(session.dispatch))


def no_flush_listeners(session: Session) -> bool:
    """True if no listener would notice that the session flushes later."""
    return not any(_FLUSHING(session.dispatch))


def no_begin_listeners(session: Session) -> bool:
    """True if no listener and no class of the user's has a part in how the session begins a transaction."""
    return _is_ordinary_class(type(session)) and not are_of_others(_BEGINNING(session.dispatch))


def begins_ordinarily(session: Session, connection: Connection) -> bool:
    """True if no code of the user's has a part in the transaction, or sees or changes its statements.

    A listener to its beginning had the connection first, and may have kept a cursor of the driver's.
    """
    listened_to = any(_CONNECTION_EVENTS(connection.dispatch))
    changes_sql = any(getattr(each, "__name__", "") != _ONLY_SEES for each in connection.dispatch.before_cursor_execute)
    return no_begin_listeners(session) and not (listened_to or changes_sql)


def is_read_by(connection: Connection, session: Session, mapper: Mapper[Any]) -> bool:
    """True if the session would read the entity on this connection: each entity may have an engine of its own."""
    try:
        return session.get_bind(mapper) is connection.engine
    except UnboundExecutionError:
        return False


def _is_ordinary_class(session_class: type[Session]) -> bool:
    """True if the class overrides nothing of SQLAlchemy's ``Session``, apart from this library's guards."""
    if session_class not in _ordinary_classes:
        users = (each for each in session_class.__mro__ if not each.__module__.startswith(("sqlalchemy.", _PACKAGE)))
        names = (name for each in users for name in vars(each) if not name.startswith(("__", "_projector_dedup_")))
        _ordinary_classes[session_class] = not any(hasattr(Session, name) for name in names)
    return _ordinary_classes[session_class]


def is_sql(value: Any) -> bool:
    """True if the value of an attribute is an SQL expression, which the database would compute."""
    return hasattr(value, "__clause_element__") or isinstance(value, ClauseElement)


@dataclass(frozen=True, eq=False)
class Cacheable:
    """An entity on a cacheable table: what was read of it, and changed, can be told from its attributes alone."""

    mapper: Mapper[Any]
    table: Table
    identity: object  # the table's
    columns: Mapping[str, str]  # by attribute
    loaded: tuple[str, ...]  # the attributes that a SELECT gives
    typed: Mapping[str, CacheableColumn]  # by attribute, those of which the database's type is known
    keys: tuple[CacheableColumn, ...]
    reads_ahead: bool

    @property
    def entity(self) -> type[Any]:
        """The mapped class."""
        return self.mapper.class_

    @cached_property
    def loaded_columns(self) -> tuple[str, ...]:
        """The columns that a SELECT gives, by the names that they have in the database."""
        return tuple(self.columns[name] for name in self.loaded)

    def no_load_listeners(self) -> bool:
        """True if no listener would notice that a row of the entity is loaded without a SELECT."""
        manager: Any = self.mapper.class_manager
        return not are_of_others(_ROW_LOADED(manager.dispatch))

    def no_flush_listeners(self) -> bool:
        """True if no listener would notice that a row of the entity is written later, together with others."""
        manager: Any = self.mapper.class_manager
        return not any(_ROW_FLUSHED(manager.dispatch)) and not any(_ROW_WRITTEN(self.mapper.dispatch))

    def identity_key(self, ident: Any) -> Any:
        """Return the key of the identity map; None if the database might find a row of another key by it."""
        values = ident if type(ident) is tuple else (ident,)
        if len(values) != len(self.keys):
            return None
        for column, value in zip(self.keys, values, strict=True):
            if not column.accepts(value):
                return None
        return self.mapper.identity_key_from_primary_key(values)

    def changes(self, state: InstanceState[Any]) -> dict[str, Any] | None:
        """Return the values that an UPDATE would write, by attribute, perhaps none; None if it must not wait."""
        changes, values = {}, state.dict
        for name, before in state.committed_state.items():
            column = self.typed.get(name)
            if column is None or not column.can_change or name not in values or not column.accepts(values[name]):
                return None
            if type(before) is not type(values[name]) or before != values[name]:
                changes[name] = values[name]
        return changes

    def values(self, state: InstanceState[Any]) -> dict[str, Any] | None:
        """Return the values that were read, or None if one is missing, or could be changed in place."""
        values = {name: state.dict[name] for name in self.loaded if name in state.dict}
        return values if len(values) == len(self.loaded) and all(map(is_immutable, values.values())) else None

    def restored(self, session: Session, key: Any, values: Mapping[str, Any]) -> Any:
        """Return the instance that ``session.get()`` would load, made from values that were read without the ORM.

        This does what the ORM's loader does; ``make_transient_to_detached`` would expire what is deferred, and
        ``session.add()`` would look for what is related.
        """
        instance = self.mapper.class_manager.new_instance()
        state = instance_state(instance)
        state.dict.update(values)
        state.key = key
        session.identity_map.add(state)
        state.session_id = session.hash_key
        return instance


def cacheable_entity(
    entity: Any, connection: Connection, look: Callable[[Connection, Table], CacheableTable | None]
) -> Cacheable | None:
    """Return what is known of an entity, or None if it is not cacheable. ``look`` asks the database about its table."""
    mapper: Any = inspect(entity, raiseerr=False)
    if not isinstance(mapper, Mapper) or not _is_cacheable_mapper(mapper):
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
    return Cacheable(mapper, table, found.identity, columns, loaded, typed, keys, found.reads_ahead)


def _is_cacheable_mapper(mapper: Mapper[Any]) -> bool:
    table = mapper.local_table
    return (
        isinstance(table, Table)
        and mapper.persist_selectable is table
        and not (mapper.inherits or mapper.polymorphic_on is not None or mapper.composites)
        and mapper.version_id_col is None
        and mapper.primary_key == tuple(table.primary_key)
        and all(map(_is_cacheable_property, mapper.column_attrs))
        and all(each.lazy in _LOADED_WHEN_ASKED_FOR for each in mapper.relationships)
    )


def _is_cacheable_property(attribute: ColumnProperty[Any]) -> bool:
    """True if an attribute is a column, which neither the ORM nor the database computes."""
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
    """True if a value cannot be changed in place."""
    return type(value) in _IMMUTABLE or isinstance(value, (Enum, UUID))
