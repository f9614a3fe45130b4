"""Rows that are read before a handler asks for them: those that ``reads`` declares, and those of a whole batch.

This file is the only door to the package. The library delivers without it: ``Dispatcher(read_ahead=False)``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy.engine import Engine

from ..closing import connected
from ..dialects import Dialect
from ..guards import Guard
from ..message import Message, printable
from ..reads import DeclaredReads, Key
from ..row_source import ReadAheadError, RowSource
from ..tables import DedupTables
from .batch_rows import BatchRows
from .cacheable import Cacheable, cacheable_entity
from .claimed_rows import Declared, claim, may_be_served

logger = logging.getLogger("projector_dedup")

MOST_ROWS = 8
"""So many rows at most come with one claim; a message that declares more is claimed alone."""

_Known = dict[tuple[type[Any], DedupTables], Cacheable | None]
_catalogue: WeakKeyDictionary[Engine, _Known] = WeakKeyDictionary()
"""Entities as each engine's catalogue describes them, by tables of markers; None for one that no claim may read."""
_warned: set[str] = set()


class ReadingAhead:
    """Reads ahead for one handler: what it declares, of entities that are locked or not."""

    def __init__(
        self, identity: str, reads: DeclaredReads | None, locked: tuple[type[Any], ...], tables: DedupTables
    ) -> None:
        self._identity = identity
        self._reads = reads
        self._entities = () if reads is None else tuple(reads.entities)
        self.declares_rows = bool(self._entities)
        self._locked = locked
        self._tables = tables

    def prepare(self, engine: Engine, dialect: Dialect) -> None:
        """Find out, once for each engine, which of the declared entities have rows that may be read with a claim."""
        if not dialect.claims_may_read:
            return
        known = _catalogue.setdefault(engine, {})
        unknown = [entity for entity in self._entities if (entity, self._tables) not in known]
        if not unknown:
            return
        readable = dialect.cacheable_rows.readable
        with connected(engine) as connection:
            if (marker := readable(connection, self._tables.marker)) is None:
                return  # it is missing: the claim will say so
            for entity in unknown:
                cacheable = cacheable_entity(entity, connection, readable)
                known[entity, self._tables] = (
                    None if cacheable is None or cacheable.identity == marker.identity else cacheable
                )

    def claim(self, guard: Guard, key: dict[str, Any], message: Message, insert: Callable[[], bool]) -> bool:
        """Claim the message with the rows that its event declares, or by ``insert`` if there had better be none."""
        declared = self._declared(guard, message)
        if not declared or not self._may_read(guard, declared):
            return insert()
        try:
            return claim(guard, self._tables, key, declared, locked=bool(self._locked))
        except ReadAheadError as error:
            if error.lasts:
                known = _catalogue.setdefault(guard.connection.engine, {})
                known.update({(cacheable.entity, self._tables): None for cacheable, _ in declared})
                self._warn(declared[0][0].entity, message.body, "and what it found failed the claim", error.__cause__)
            raise

    def batch(self, guard: Guard, events: Sequence[Any]) -> RowSource:
        """Return the rows of a batch, of which those that are declared are read together."""
        return BatchRows(guard, events, self._keys_of)

    def _keys_of(self, entity: Any, event: Any) -> list[Key]:
        """Return the keys that are declared for an event; none, and a warning once, if that fails."""
        if self._reads is None or entity not in self._entities:
            return []
        try:
            keys = self._reads.keys_of(entity, event)
        except Exception as error:  # noqa: BLE001  # the event's or the user's own; the declaration is advice
            self._warn(entity, event, "found no keys", error)
            return []
        if any(part is None for key in keys for part in key):
            self._warn(entity, event, "found None: correct the path, or give a function that returns [] without a row")
            return []
        return keys

    def _declared(self, guard: Guard, message: Message) -> Declared:
        """Return the rows of the message that a claim may read here, of entities on cacheable tables."""
        known, declared = _catalogue.get(guard.connection.engine, {}), Declared()
        for entity in self._entities:
            cacheable = known.get((entity, self._tables))
            if cacheable is None or (self._locked and entity not in self._locked):
                continue
            keys = self._keys_of(entity, message.body)
            for key in keys:
                if cacheable.identity_key(key) is None:
                    wanted = ", ".join(f"{column.name} {column.type!r}" for column in cacheable.table.primary_key)
                    kinds = ", ".join(type(part).__name__ for part in key)
                    self._warn(
                        entity, message.body, f"found ({kinds}), but the key is ({wanted}): give values of its types"
                    )
                    return []
            # Locked in one order everywhere, so that two messages on the same rows seldom wait for each other.
            declared += [(cacheable, key) for key in (sorted(keys) if self._locked else keys)]
        return declared if len(declared) <= MOST_ROWS else []

    def _may_read(self, guard: Guard, declared: Declared) -> bool:
        lasting = bool(self._locked) or guard.dialect.cacheable_rows.keeps_snapshots(guard.connection)
        return lasting and may_be_served(guard, [cacheable for cacheable, _ in declared])

    def _warn(self, entity: Any, event: Any, what: str, error: BaseException | None = None) -> None:
        """Warn, once for each handler, that its rows are read only when it asks for them, which is slower."""
        if self._identity not in _warned:
            _warned.add(self._identity)
            logger.warning(
                "handler %s: reads={%s: ...} in %s %s; its rows are read when the handler asks for them",
                printable(self._identity),
                entity.__name__,
                type(event).__name__,
                what if error is None else f"{what} ({type(error).__name__})",
            )
