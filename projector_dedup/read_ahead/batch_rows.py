"""Rows between the messages of a batch: read once, written once, and forgotten before anything else could matter.

As far as a handler can tell, its session begins empty, and what the messages before it wrote is in the database, as
after a COMMIT. A row that it asks for by ``session.get()`` comes from here if one of them has read or changed it, or if
it was read ahead with the row of one of them (``keys_ahead.py``). What it changes stays here, and is written in one
statement before any other statement that it sends, or at the end. Only what is plain is kept (``plain.py``, and the
dialect's word on its table); all else goes to the database at once.
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
from sqlalchemy.orm.exc import FlushError, StaleDataError
from sqlalchemy.sql import Executable

from ..dialects.plain_tables import parameter
from ..row_source import Load
from .batch_keys import KeysAhead, KeysOf
from .cacheable import (
    Plain,
    Watched,
    flushes_unheard,
    is_immutable,
    is_plain_beginning,
    is_read_by,
    is_sql,
    loads_unheard,
    plain_entity,
)

Make = Callable[[Table, tuple[str, ...]], Executable]
_FLUSHES = 100  # as many as a COMMIT of SQLAlchemy's tries

Updates = list[tuple[Any, dict[str, Any]]]
"""The key of a row, and what is to be written to it."""


class BatchRows:
    """What the messages of one unit of work have read, and what is still to be written."""

    def __init__(self, watched: Watched, events: Sequence[Any], keys_of: KeysOf) -> None:
        self._session = watched.session
        self._connection = watched.connection
        self._database = watched.dialect.plain_rows
        self._aborts = watched.dialect.aborts
        self._failed = watched.statement_failed
        self._failure: BaseException | None = None  # of ours; who swallows it meets it again
        self._entities: dict[Any, Plain | None] = {}
        self._tables: set[Any] = set()  # theirs, of those that are plain
        self._statements: dict[tuple[Make, Plain, tuple[str, ...]], Executable] = {}
        self._ahead = KeysAhead(events, keys_of)
        self._values: dict[Any, Mapping[str, Any]] = {}  # by identity key: what a SELECT would find
        self._unwritten: dict[Any, tuple[Plain, dict[str, Any]]] = {}
        self._stopped = not (self._database.writes_late and is_plain_beginning(self._session, self._connection))
        self._quiet = True  # this message has sent nothing of its own to the database
        self._expected: type[Any] | None = None  # the statements that are sent on its behalf

    def get(self, entity: Any, ident: Any, load: Load) -> Any:
        """``session.get()``, without a SELECT for what is known."""
        session = self._session
        plain = self._plain(entity) if self._keeps() and loads_unheard(session) else None
        key = plain.identity_key(ident) if plain is not None and plain.loads_unheard() else None
        if plain is None or key is None or key in session.identity_map:
            return load(entity, ident)
        if session.autoflush and not session._flushing and (session.identity_map or session.new):  # as autoflush asks
            self._flush()
            if key in session.identity_map:  # it was new
                return load(entity, ident)
        if self._quiet and plain.reads_ahead and key not in self._values:
            self._read_ahead(plain, key)
        if (values := self._values.get(key)) is not None:
            return plain.restored(session, key, values)
        with self._expecting(Select):
            instance = load(entity, ident)
        if instance is not None and self._quiet and (values := plain.values(instance_state(instance))) is not None:
            self._values[key] = values
        return instance

    def before_statement(self, statement: Any) -> None:
        """Before a statement: it finds what was written, and may change anything."""
        if self._expected is None or not isinstance(statement, self._expected):
            self.write()
        elif self._expected is Insert:
            if statement.table in self._tables and _only_inserts(statement):
                self._send()  # it changes no other row
            else:
                self.write()

    def stop(self) -> None:
        """Before statements that nobody tells us of, or that are about other rows: keep nothing from here on."""
        self.write()
        self._stopped = True

    def end_message(self) -> None:
        """Between two messages: keep or write what the first has changed; the session forgets it, as after a COMMIT."""
        self._raise_failure()
        if not any(self._flush() for _ in range(_FLUSHES)):
            raise FlushError(f"{_FLUSHES} flushes in a row left something to flush; look at what listens to them")
        if self._session.expire_on_commit:
            self._session.expire_all()
        self._session.expunge_all()
        self._quiet = True
        self._ahead.next_message()

    def write(self) -> None:
        """Write what is not written, and know nothing any more."""
        self._raise_failure()
        self._quiet = False
        self._values.clear()
        self._send()

    def _keeps(self) -> bool:
        return self._quiet and not self._stopped and not self._session.in_nested_transaction()

    def _flush(self) -> bool:
        """As ``session.flush()``, but what can be written late stays here. Whether no listener has changed more."""
        session = self._session
        kept = self._keeps() and flushes_unheard(session) and self._keep()
        if kept and not session.new:
            return True
        with self._expecting(Insert if kept else None):
            session.flush()
        return not (session.identity_map.check_modified() or session.new or session.deleted)

    def _keep(self) -> bool:
        """Take what this message changed, so that an INSERT of what is new is all that is left; or nothing."""
        session = self._session
        if session.deleted or not all(map(self._is_plain_new, session.new)):
            return False
        changed: list[tuple[Plain, InstanceState[Any], dict[str, Any]]] = []
        for instance in session.dirty:
            state = instance_state(instance)
            plain = self._plain(type(instance)) if state.key in self._values else None
            changes = plain.changes(state) if plain is not None and plain.flushes_unheard() else None
            if plain is None or changes is None:
                return False
            changed.append((plain, state, changes))
        for plain, state, changes in changed:
            if changes:
                self._values[state.key] = {**self._values[state.key], **changes}
                self._unwritten.setdefault(state.key, (plain, {}))[1].update(changes)
            state._commit_all(state.dict, session.identity_map)  # as a flush leaves it
        return True

    def _read_ahead(self, plain: Plain, key: Any) -> None:
        """With the row of ``key``, those that messages to come will ask for, as it seems: a snapshot has no later."""
        if not (flushes_unheard(self._session) and plain.flushes_unheard()):
            return  # each message will write at once, and make what was read forgotten
        ahead = map(plain.identity_key, self._ahead.of(plain.entity, key[1]))
        keys = [key, *(each for each in ahead if each is not None and each != key and each not in self._values)]
        if len(keys) == 1:
            return
        names = tuple(plain.columns[name] for name in plain.loaded)
        for row in self._read(plain, names, zip(*(each[1] for each in keys), strict=True)):
            identity, values = row[: len(plain.keys)], row[len(plain.keys) :]
            if all(map(is_immutable, values)):
                read = dict(zip(plain.loaded, values, strict=True))
                self._values[plain.mapper.identity_key_from_primary_key(identity)] = read

    def _read(self, plain: Plain, names: tuple[str, ...], lists: Iterable[Iterable[Any]]) -> Sequence[Any]:
        with self._remembering_failure():
            try:
                found: Sequence[Any] = self._execute(plain, self._database.reading, names, lists).all()
            except Exception as error:
                if isinstance(error, DBAPIError) and (error.connection_invalidated or self._aborts(error)):
                    raise
                return ()  # there is a row that the driver, or its type, cannot read; who asks for it meets that
            return found

    def _is_plain_new(self, instance: Any) -> bool:
        """Whether its INSERT computes nothing."""
        return self._plain(type(instance)) is not None and not any(map(is_sql, instance_state(instance).dict.values()))

    def _send(self) -> None:
        unwritten, self._unwritten = self._unwritten, {}
        alike: dict[tuple[Plain, tuple[str, ...]], Updates] = {}
        for identity_key, (plain, changes) in unwritten.items():
            alike.setdefault((plain, tuple(sorted(changes))), []).append((identity_key[1], changes))
        with self._remembering_failure():
            for (plain, names), updates in alike.items():
                updates.sort(key=itemgetter(0))  # rivals mostly lock them in one order, then
                self._update(plain, names, updates)

    def _update(self, plain: Plain, names: tuple[str, ...], updates: Updates) -> None:
        columns = tuple(plain.columns[name] for name in names)
        keys = zip(*(ident for ident, _ in updates), strict=True)
        lists = [*keys, *([changes[name] for _, changes in updates] for name in names)]
        result = self._execute(plain, self._database.writing, columns, lists)
        if result.rowcount != len(updates):
            raise StaleDataError(f"UPDATE of {len(updates)} rows of {plain.table.name} found {result.rowcount}")

    def _execute(self, plain: Plain, make: Make, columns: tuple[str, ...], lists: Iterable[Iterable[Any]]) -> Any:
        if (make, plain, columns) not in self._statements:
            self._statements[make, plain, columns] = make(plain.table, columns)
        parameters = {parameter(place): list(values) for place, values in enumerate(lists)}
        # Past the guard, which has called us, or would take this for the handler's
        return Connection.execute(self._connection, self._statements[make, plain, columns], parameters)

    def _plain(self, entity: Any) -> Plain | None:
        if entity not in self._entities:
            with self._remembering_failure():
                plain = plain_entity(entity, self._connection, self._database.look)
            if plain is not None and not is_read_by(self._connection, self._session, plain.mapper):
                plain = None
            if plain is not None and any(each and each.identity == plain.identity for each in self._entities.values()):
                plain = None  # a table that has several entities: one would not see what the other changed
            self._entities[entity] = plain
            if plain is not None:
                self._tables.add(plain.table)
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
    """As a flush does; what runs within one, a default say, may send an upsert."""
    return type(statement) is Insert and statement.select is None and not statement._independent_ctes
