"""Rows between the messages of a batch: read once, written once, and forgotten before anything else could matter.

As far as a handler can tell, its session begins empty, and what the messages before it wrote is in the database, as
after a COMMIT. A row that it asks for by ``session.get()`` comes from here if one of them has read or changed it. What
it changes stays here, and is written in one statement before any other statement that it sends, or at the end. Only
what is plain is kept (``plain.py``, and the dialect's word on its table); all else goes to the database at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, Protocol

from sqlalchemy import Insert, Select, inspect
from sqlalchemy.engine import Connection
from sqlalchemy.orm import InstanceState, Session, make_transient_to_detached
from sqlalchemy.orm.attributes import set_committed_value
from sqlalchemy.orm.exc import StaleDataError

from .dialects import Dialect
from .plain import Plain, is_plain_session, is_sql, plain_entity

Load = Callable[[Any, Any], Any]


class Watched(Protocol):
    """The unit of work that has them: ``guards.Guard``."""

    session: Session
    connection: Connection
    dialect: Dialect

    def statement_failed(self, error: BaseException) -> None:
        """One of ours did, and nobody else saw it."""


class Rows:
    """What the messages of one unit of work have read, and what is still to be written."""

    def __init__(self, watched: Watched) -> None:
        self._session = watched.session
        self._connection = watched.connection
        self._late_writes = watched.dialect.late_writes
        self._failed = watched.statement_failed
        self._entities: dict[Any, Plain | None] = {}
        self._tables: set[Any] = set()  # theirs, of those that are plain
        self._values: dict[Any, Mapping[str, Any]] = {}  # by identity key: what a SELECT would find
        self._unwritten: dict[Any, tuple[Plain, dict[str, Any]]] = {}
        self._plain_session = is_plain_session(watched.session)
        self._quiet = self._plain_session  # this message has sent nothing of its own to the database
        self._harmless: type[Any] | None = None  # the statements that are sent on its behalf

    def get(self, entity: Any, ident: Any, load: Load) -> Any:
        """``session.get()``, without a SELECT for what is known."""
        plain = self._plain(entity) if self._quiet and getattr(load, "__func__", None) is Session.get else None
        key = plain.identity_key(ident) if plain is not None else None
        if plain is None or key is None or key in self._session.identity_map:
            return load(entity, ident)
        if self._session.autoflush:
            self._flush()  # as the SELECT would
            if key in self._session.identity_map:  # it was new
                return load(entity, ident)
        if (values := self._values.get(key)) is not None:
            return self._restored(plain, values)
        self._harmless = Select
        try:
            instance = load(entity, ident)
        finally:
            self._harmless = None
        if instance is not None and self._quiet:
            self._values[key] = plain.values(inspect(instance))
        return instance

    def before_statement(self, statement: Any = None) -> None:
        """Before a statement, or something that may send one: it finds what was written, and may change it."""
        if (
            self._harmless is None
            or not isinstance(statement, self._harmless)
            or (self._harmless is Insert and statement.table not in self._tables)
        ):
            self.write()

    def end_message(self, *, trusted: bool) -> None:
        """Between two messages; they are not ``trusted`` if one may reach the database past us from now on."""
        self._flush()
        self._session.expunge_all()
        self._quiet = trusted and self._plain_session

    def _flush(self) -> None:
        """As ``session.flush()``, but what can be written late stays here."""
        kept = self._quiet and self._keep()
        if kept and not self._session.new:
            return
        self._harmless = Insert if kept else None
        try:
            self._session.flush()
        finally:
            self._harmless = None

    def write(self) -> None:
        """Write what is not written, and know nothing any more."""
        self._quiet = False
        self._values.clear()
        unwritten, self._unwritten = self._unwritten, {}
        alike: dict[tuple[Plain, tuple[str, ...]], list[tuple[Any, dict[str, Any]]]] = {}
        for (_, ident, *_), (plain, changes) in unwritten.items():
            alike.setdefault((plain, tuple(sorted(changes))), []).append((ident, changes))
        for (plain, names), rows in alike.items():
            rows.sort(key=itemgetter(0))  # rival batches lock them in one order
            try:
                self._update(plain, names, rows)
            except BaseException as error:
                self._failed(error)
                raise

    def _update(self, plain: Plain, names: tuple[str, ...], rows: list[tuple[Any, dict[str, Any]]]) -> None:
        statement = self._late_writes.statement(plain.table, tuple(plain.columns[name] for name in names))
        values = {f"new_{plain.columns[name]}": [changes[name] for _, changes in rows] for name in names}
        for place, column in enumerate(plain.table.primary_key):
            values[f"new_{column.name}"] = [ident[place] for ident, _ in rows]
        written = Connection.execute(self._connection, statement, values).rowcount  # past the guard, which called us
        if written != len(rows):
            raise StaleDataError(f"UPDATE of {len(rows)} rows of {plain.table.name} found {written}")

    def _plain(self, entity: Any) -> Plain | None:
        if entity not in self._entities:
            try:
                plain = plain_entity(entity, self._connection, self._late_writes.look)
            except BaseException as error:
                self._failed(error)
                raise
            if plain is not None and any(each and each.identity == plain.identity for each in self._entities.values()):
                plain = None  # a table that has several entities: one would not see what the other changed
            self._entities[entity] = plain
            self._tables |= {plain.table} if plain is not None else set()
        return self._entities[entity]

    def _restored(self, plain: Plain, values: Mapping[str, Any]) -> Any:
        instance = plain.mapper.class_manager.new_instance()
        for name, value in values.items():
            set_committed_value(instance, name, value)
        make_transient_to_detached(instance)
        self._session.add(instance)
        return instance

    def _keep(self) -> bool:
        """Take what this message changed, so that an INSERT of what is new is all that is left; or nothing."""
        session = self._session
        if session.deleted or not all(map(self._is_plain_new, session.new)):
            return False
        changed: list[tuple[Plain, InstanceState[Any], dict[str, Any]]] = []
        for instance in session.dirty:
            state = inspect(instance)
            plain = self._plain(type(instance)) if state.key in self._values else None
            changes = plain.changes(state) if plain is not None else None
            if plain is None or changes is None:
                return False
            if changes:
                changed.append((plain, state, changes))
        for plain, state, changes in changed:
            self._values[state.key] = plain.after(self._values[state.key], changes)
            self._unwritten.setdefault(state.key, (plain, {}))[1].update(changes)
            for name, value in changes.items():
                set_committed_value(state.obj(), name, value)
        return True

    def _is_plain_new(self, instance: Any) -> bool:
        """Whether its INSERT reads nothing."""
        return self._plain(type(instance)) is not None and not any(map(is_sql, inspect(instance).dict.values()))
