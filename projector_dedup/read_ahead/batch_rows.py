"""Rows that the messages of a batch share: read once and written once.

As far as a handler can tell, its session begins empty, and what the messages before it wrote is in the database, as
after a COMMIT. A row that it asks for by ``session.get()`` comes from memory if another message has read or changed it,
or if it was read ahead (``batch_keys.py``). A change stays in memory, and is written in one statement before any other
statement that a handler sends, or at the end. Only cacheable entities are kept (``cacheable.py``, and what the dialect
says of the table); everything else goes to the database at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

from sqlalchemy import Insert, Select, Table
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import InstanceState
from sqlalchemy.orm.attributes import instance_state
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.sql import Executable

from ..dialects.cacheable_tables import parameter
from ..guards import Guard, end_message
from ..row_source import Load
from .batch_keys import KeysAhead, KeysOf
from .cacheable import (
    Cacheable,
    begins_ordinarily,
    cacheable_entity,
    is_immutable,
    is_read_by,
    is_sql,
    no_flush_listeners,
    no_load_listeners,
)

Make = Callable[[Table, tuple[str, ...]], Executable]

Updates = list[tuple[Any, dict[str, Any]]]
"""The key of a row, and what is to be written to it."""


class BatchRows:
    """The rows that the messages of one unit of work have read, and the changes that are still to be written."""

    def __init__(self, guard: Guard, events: Sequence[Any], keys_of: KeysOf) -> None:
        self._session = guard.session
        self._connection = guard.connection
        self._database = guard.dialect.cacheable_rows
        self._aborts = guard.dialect.aborts
        self._failed = guard.statement_failed
        self._failure: BaseException | None = None  # of a statement below; a handler that swallows it meets it again
        self._entities: dict[Any, Cacheable | None] = {}
        self._tables: set[Any] = set()  # theirs, of those that are cacheable
        self._statements: dict[tuple[Make, Cacheable, tuple[str, ...]], Executable] = {}
        self._ahead = KeysAhead(events, keys_of)
        self._values: dict[Any, Mapping[str, Any]] = {}  # by identity key: what a SELECT would find
        self._unwritten: dict[Any, tuple[Cacheable, dict[str, Any]]] = {}
        self._stopped = not (self._database.writes_late and begins_ordinarily(self._session, self._connection))
        self._quiet = True  # this message has sent nothing of its own to the database
        self._expected: type[Any] | None = None  # the statements that are sent on its behalf

    def get(self, entity: Any, ident: Any, load: Load) -> Any:
        """Return what ``session.get()`` would return, without a SELECT if the row is known."""
        session = self._session
        cacheable = self._cacheable(entity) if self._keeps() and no_load_listeners(session) else None
        key = cacheable.identity_key(ident) if cacheable is not None and cacheable.no_load_listeners() else None
        if cacheable is None or key is None or key in session.identity_map:
            return load(entity, ident)
        if session.autoflush and not session._flushing and (session.identity_map or session.new):  # as autoflush asks
            self._flush()
            if key in session.identity_map:  # it was new
                return load(entity, ident)
        if self._quiet and cacheable.reads_ahead and key not in self._values:
            self._read_ahead(cacheable, key)
        if (values := self._values.get(key)) is not None:
            return cacheable.restored(session, key, values)
        with self._expecting(Select):
            instance = load(entity, ident)
        if instance is not None and self._quiet and (values := cacheable.values(instance_state(instance))) is not None:
            self._values[key] = values
        return instance

    def before_statement(self, statement: Any) -> None:
        """Called before a statement, which must find what was changed, and may change any row."""
        if self._expected is None or not isinstance(statement, self._expected):
            self.write()
        elif self._expected is Insert:
            if statement.table in self._tables and _only_inserts(statement):
                self._send()  # it changes no other row
            else:
                self.write()

    def stop(self) -> None:
        """Write everything, and keep no row from here on: statements follow that are not reported."""
        self.write()
        self._stopped = True

    def end_message(self) -> None:
        """Keep or write what a message has changed, before the next one; the session forgets it, as after a COMMIT."""
        self._raise_failure()
        end_message(self._session, self._flush)
        self._quiet = True
        self._ahead.next_message()

    def write(self) -> None:
        """Write every change, and forget every row."""
        self._raise_failure()
        self._quiet = False
        self._values.clear()
        self._send()

    def _keeps(self) -> bool:
        return self._quiet and not self._stopped and not self._session.in_nested_transaction()

    def _flush(self) -> None:
        """Flush the session, but keep what can be written late."""
        session = self._session
        kept = self._keeps() and no_flush_listeners(session) and self._keep()
        if kept and not session.new:
            return
        with self._expecting(Insert if kept else None):
            session.flush()

    def _keep(self) -> bool:
        """Take over what this message changed, so that only INSERTs are left to flush. True if that could be done."""
        session = self._session
        if session.deleted or not all(map(self._is_cacheable_new, session.new)):
            return False
        changed: list[tuple[Cacheable, InstanceState[Any], dict[str, Any]]] = []
        for instance in session.dirty:
            state = instance_state(instance)
            cacheable = self._cacheable(type(instance)) if state.key in self._values else None
            changes = cacheable.changes(state) if cacheable is not None and cacheable.no_flush_listeners() else None
            if cacheable is None or changes is None:
                return False
            changed.append((cacheable, state, changes))
        for cacheable, state, changes in changed:
            if changes:
                self._values[state.key] = {**self._values[state.key], **changes}
                self._unwritten.setdefault(state.key, (cacheable, {}))[1].update(changes)
            state._commit_all(state.dict, session.identity_map)  # as a flush leaves it
        return True

    def _read_ahead(self, cacheable: Cacheable, key: Any) -> None:
        """Read the row of ``key``, and rows for which later messages will probably ask: their snapshot is the same."""
        if not (no_flush_listeners(self._session) and cacheable.no_flush_listeners()):
            return  # each message will write at once, and make what was read forgotten
        ahead = map(cacheable.identity_key, self._ahead.of(cacheable.entity, key[1]))
        keys = [key, *(each for each in ahead if each is not None and each != key and each not in self._values)]
        if len(keys) == 1:
            return
        names = tuple(cacheable.columns[name] for name in cacheable.loaded)
        for row in self._read(cacheable, names, zip(*(each[1] for each in keys), strict=True)):
            identity, values = row[: len(cacheable.keys)], row[len(cacheable.keys) :]
            if all(map(is_immutable, values)):
                read = dict(zip(cacheable.loaded, values, strict=True))
                self._values[cacheable.mapper.identity_key_from_primary_key(identity)] = read

    def _read(self, cacheable: Cacheable, names: tuple[str, ...], lists: Iterable[Iterable[Any]]) -> Sequence[Any]:
        with self._remembering_failure():
            try:
                found: Sequence[Any] = self._execute(cacheable, self._database.reading, names, lists).all()
            except Exception as error:
                if isinstance(error, DBAPIError) and (error.connection_invalidated or self._aborts(error)):
                    raise
                return ()  # there is a row that the driver, or its type, cannot read; who asks for it meets that
            return found

    def _is_cacheable_new(self, instance: Any) -> bool:
        """True if the INSERT of a new instance computes nothing."""
        values = instance_state(instance).dict.values()
        return self._cacheable(type(instance)) is not None and not any(map(is_sql, values))

    def _send(self) -> None:
        unwritten, self._unwritten = self._unwritten, {}
        alike: dict[tuple[Cacheable, tuple[str, ...]], Updates] = {}
        for identity_key, (cacheable, changes) in unwritten.items():
            alike.setdefault((cacheable, tuple(sorted(changes))), []).append((identity_key[1], changes))
        with self._remembering_failure():
            for (cacheable, names), updates in alike.items():
                updates.sort(key=itemgetter(0))  # rivals mostly lock them in one order, then
                self._update(cacheable, names, updates)

    def _update(self, cacheable: Cacheable, names: tuple[str, ...], updates: Updates) -> None:
        columns = tuple(cacheable.columns[name] for name in names)
        keys = zip(*(ident for ident, _ in updates), strict=True)
        lists = [*keys, *([changes[name] for _, changes in updates] for name in names)]
        result = self._execute(cacheable, self._database.writing, columns, lists)
        if result.rowcount != len(updates):
            raise StaleDataError(f"UPDATE of {len(updates)} rows of {cacheable.table.name} found {result.rowcount}")

    def _execute(self, entity: Cacheable, make: Make, columns: tuple[str, ...], lists: Iterable[Iterable[Any]]) -> Any:
        if (make, entity, columns) not in self._statements:
            self._statements[make, entity, columns] = make(entity.table, columns)
        parameters = {parameter(place): list(values) for place, values in enumerate(lists)}
        # Past the guard, which has called this object, or would take the statement for the handler's
        return Connection.execute(self._connection, self._statements[make, entity, columns], parameters)

    def _cacheable(self, entity: Any) -> Cacheable | None:
        if entity not in self._entities:
            with self._remembering_failure():
                found = cacheable_entity(entity, self._connection, self._database.look)
            if found is not None and not is_read_by(self._connection, self._session, found.mapper):
                found = None
            if found is not None and any(each and each.identity == found.identity for each in self._entities.values()):
                found = None  # a table that has several entities: one would not see what the other changed
            self._entities[entity] = found
            if found is not None:
                self._tables.add(found.table)
        return self._entities[entity]

    @contextmanager
    def _expecting(self, statements: type[Any] | None) -> Iterator[None]:
        before, self._expected = self._expected, statements
        try:
            yield
        finally:
            self._expected = before

    @contextmanager
    def _remembering_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failure = error
            self._failed(error)
            raise

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _only_inserts(statement: Any) -> bool:
    """True if an INSERT can only add rows: not a dialect's own, which may be an upsert, and without SELECT or CTE."""
    return type(statement) is Insert and statement.select is None and not statement._independent_ctes
