"""Rows that come with the claim of a message, because ``reads`` declares them: a round trip less for each.

They are read in the statement of the claim, so from the same snapshot, or under lock. The handler gets each of them by
``session.get`` for as long as it has sent nothing of its own to the database; then all of them are forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, NamedTuple

from sqlalchemy.exc import DBAPIError

from ..dialects import Failure
from ..dialects.cacheable_tables import UnreadableRowError, Wanted, WantedRow, parameter
from ..guards import Guard
from ..markers import insert_marker_and_read
from ..reads import Key
from ..row_source import Load, ReadAheadError
from ..tables import DedupTables
from .cacheable import Cacheable, begins_ordinarily, is_read_by, no_load_listeners_of_others

Declared = list[tuple[Cacheable, Key]]
"""The entities and keys of the rows that a message's handler will ask for."""


class _Row(NamedTuple):
    cacheable: Cacheable
    values: Mapping[str, Any] | None  # None: there is no such row


class ClaimedRows:
    """The rows of one unit of work that were read with its claim, by identity key."""

    def __init__(self, guard: Guard, rows: dict[Any, _Row], *, locked: bool) -> None:
        self._guard = guard
        self._rows = rows
        self._locked = locked

    def get(self, entity: Any, ident: Any, load: Load) -> Any:
        """Return the row from memory, once; ``load`` it if the handler has changed something, or asks for another."""
        session = self._guard.session
        found = self._found(entity, ident) if self._rows and not self._guard.connection.invalidated else None
        if found is None or session.new or session.dirty or session.deleted or session.in_nested_transaction():
            return load(entity, ident)  # which flushes first, and sends a SELECT: both are told of
        self._guard.before_statement(None, None)  # as before that SELECT
        key, row = found
        del self._rows[key]
        if row.values is None:
            return None
        instance = row.cacheable.restored(session, key, row.values)
        if self._locked:
            self._guard.session.remember_locked(instance)
        return instance

    def before_statement(self, _statement: Any) -> None:
        """Forget the rows: the statement may change them, and what a SELECT finds is the ORM's to keep."""
        self._rows.clear()

    def end_message(self) -> None:
        """Do nothing: a unit of work of several messages reads none of them with its claim."""

    def stop(self) -> None:
        """Forget the rows."""
        self._rows.clear()

    def _found(self, entity: Any, ident: Any) -> tuple[Any, _Row] | None:
        for key, row in self._rows.items():
            if row.cacheable.entity is entity and row.cacheable.identity_key(ident) == key:
                is_there = key in self._guard.session.identity_map  # by the handler's own add() or merge()
                return (key, row) if not is_there and may_be_served(self._guard, [row.cacheable]) else None
        return None


def claim(guard: Guard, tables: DedupTables, key: dict[str, Any], declared: Declared, *, locked: bool) -> bool:
    """Claim a message and read the declared rows with it; return True if the message is new.

    The rows are given to ``guard`` only if a later SELECT would read the same; else they are dropped. Raises
    ``ReadAheadError`` if the rows could not be read, or a lock on them was not had in time.
    """
    wanted = Wanted(tuple(WantedRow(cacheable.table, cacheable.loaded_columns) for cacheable, _ in declared), locked)
    asked = chain.from_iterable(ident for _, ident in declared)
    parameters = key | {parameter(place): part for place, part in enumerate(asked)}
    connection, dialect = guard.connection, guard.dialect
    try:
        found = insert_marker_and_read(connection, dialect, tables, wanted, parameters)
    except UnreadableRowError as error:
        raise ReadAheadError from error.__cause__
    except DBAPIError as error:
        if locked and dialect.classify(error) is Failure.LOCK_TIMEOUT:
            raise ReadAheadError(lasts=False) from error
        raise
    if found is None:
        return False
    lasts, *values = tuple(found)
    if lasts:
        guard.rows = ClaimedRows(guard, _by_identity(declared, iter(values), missing=not locked), locked=locked)
    return True


def _by_identity(declared: Declared, values: Any, *, missing: bool) -> dict[Any, _Row]:
    """Sort what was read into rows; those that are ``missing`` count only where nobody can have added them since."""
    rows: dict[Any, _Row] = {}
    for cacheable, ident in declared:
        key = tuple(next(values) for _ in ident)
        read = dict(zip(cacheable.loaded, [next(values) for _ in cacheable.loaded], strict=True))
        identity = cacheable.identity_key(ident)
        if key == ident and all(type(one) is type(other) for one, other in zip(key, ident, strict=True)):
            rows[identity] = _Row(cacheable, read)
        elif missing and key == (None,) * len(key):
            rows[identity] = _Row(cacheable, None)
    return rows


def may_be_served(guard: Guard, entities: Iterable[Cacheable]) -> bool:
    """True if serving rows of these entities from memory cannot be told from running the SELECT."""
    session, connection = guard.session, guard.connection
    return (
        begins_ordinarily(session, connection)
        and no_load_listeners_of_others(session)
        and all(
            cacheable.no_load_listeners() and is_read_by(connection, session, cacheable.mapper)
            for cacheable in entities
        )
    )
