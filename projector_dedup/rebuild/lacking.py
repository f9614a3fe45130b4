"""Compare two generations of a projector by their markers, and find the messages that the new one lacks.

A comparison reads the markers of both generations once. It finds messages that the source of a rebuild did not have,
messages that failed, and messages that a process without the new generation applied.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import combinations
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Subquery, and_, case, func, or_, select
from sqlalchemy.engine import Connection
from sqlalchemy.util import greenlet_spawn

from ..dispatcher import AsyncDispatcher, Dispatcher
from ..errors import RefusedError
from ..handler import Handler
from ..maintenance.rebuilds import OpenRebuild, open_rebuilds
from ..maintenance.running import connected_to
from ..maintenance.state import state_of
from ..message import Route, printable
from ..tables import DedupTables
from ..waiting import AWAITING, BLOCKING, Waiting

_PAUSE = 0.5  # seconds between two looks at messages that may be in flight


@dataclass(frozen=True)
class Lacking:
    """The result of a comparison.

    - ``old``: the number of messages with a marker of the old generation.
    - ``number``: how many of these the new generation lacks. ``ids`` has the first of their ids, sorted.
    - ``new_only``: the number of messages with a marker of the new generation only.
    - ``known_since``: the time before which markers were deleted when the rebuild began, or None. Messages from before
      this time cannot be compared; only the source can contain them.
    - ``source_read``: True if a run of the open rebuild has read its source to the end, and no message failed. None if
      no rebuild is open.
    - ``building``: True if the dispatcher still has ``building(...)`` around the new generation, so that its failures
      do not fail a delivery.
    """

    old: int
    number: int
    ids: tuple[str, ...]
    new_only: int
    known_since: datetime | None
    source_read: bool | None
    building: bool


class Pair(NamedTuple):
    """Names of handlers. Each message with a marker of ``old`` must also have a marker of ``new``."""

    old: frozenset[str]
    new: frozenset[str]


def lacking(
    dispatcher: Dispatcher, projector: str, *, beside: str | None = None, limit: int = 1_000, settle: float = 0.0
) -> Lacking:
    """Compare ``projector`` with the old generation ``beside``, and return what it lacks.

    - ``beside``: omit it while the dispatcher has ``building(...)``, or while a rebuild is open.
    - ``limit``: the largest number of ids to return.
    - ``settle``: seconds. A message that is being delivered is lacking for a moment, so the function repeats the
      comparison for at most this time, until no message is lacking.

    Handlers are compared by the events that they take. Raises ``RefusedError`` if the new generation does not take all
    events of an old handler, or takes an event in several handlers, and for a name that the dispatcher does not have.
    Raises ``MissingTableError`` if the tables are missing.
    """
    return _lacking(dispatcher, projector, beside, limit, settle, BLOCKING)


async def alacking(
    dispatcher: AsyncDispatcher, projector: str, *, beside: str | None = None, limit: int = 1_000, settle: float = 0.0
) -> Lacking:
    """Compare with an ``AsyncDispatcher``. See ``lacking``."""
    return await greenlet_spawn(_lacking, dispatcher, projector, beside, limit, settle, AWAITING)


def _lacking(
    dispatcher: Dispatcher | AsyncDispatcher,
    projector: str,
    beside: str | None,
    limit: int,
    settle: float,
    waiting: Waiting,
) -> Lacking:
    engine, tables = dispatcher.markers_engine, dispatcher.tables
    new, end = handlers_of(dispatcher, projector), time.monotonic() + settle
    with connected_to(engine, tables) as connection:
        known = open_rebuilds(connection, tables).get(projector)
        old = handlers_of(dispatcher, _old_name(projector, new[0], beside, known))
        pairs = pairs_of(old, new)
        if known is not None:
            _refuse_unknown(known, [*old, *new])
        found = _compared(connection, tables, pairs, limit, new, known)
        while 0 < found.number <= limit and time.monotonic() < end:  # more than ``limit`` are not in flight
            connection.rollback()
            waiting.sleep(min(_PAUSE, settle))
            if len(_first(connection, _judged(tables, pairs, found.ids), pairs, limit)) < found.number:
                found = _compared(connection, tables, pairs, limit, new, known)
    return found


def _old_name(projector: str, new: Handler, beside: str | None, known: OpenRebuild | None) -> str:
    """Return the name of the old generation: as the caller, ``building`` or the open rebuild says."""
    names = {name for name in (beside, new.beside, None if known is None else known.beside) if name is not None}
    if not names:
        raise RefusedError(
            f"nothing says beside which projector {printable(projector)} was built; say beside=..., or --beside NAME"
        )
    if len(names) > 1 or projector in names:
        raise RefusedError(
            f"{printable(projector)} is compared with the projector beside which it was built, and that is said in two "
            f"ways, or is itself: {', '.join(sorted(map(printable, names)))}"
        )
    return names.pop()


def _refuse_unknown(known: OpenRebuild, handlers: Sequence[Handler]) -> None:
    """Raise ``RefusedError`` if the rebuild was opened with names that no handler has any more."""
    missing = {*known.handlers}.difference(*(handler.names for handler in handlers))
    if missing:
        raise RefusedError(
            "the rebuild was opened with handlers that the dispatcher does not have any more: "
            f"{', '.join(sorted(map(printable, missing))[:5])}. Bring them back (formerly=[...] for a name that was "
            "changed), or drop the new generation (docs/rebuild.md) and begin again"
        )


# Which handlers are compared ----------------------------------------------------------------------------------------


def handlers_of(dispatcher: Dispatcher | AsyncDispatcher, projector: str) -> list[Handler]:
    """Return the handlers of an idempotent projector, by its name; raise ``RefusedError`` if there is none."""
    found = [handler for handler in dispatcher.handlers if handler.owner == projector]
    if not found:
        known = ", ".join(sorted({printable(handler.owner) for handler in dispatcher.handlers}))
        raise RefusedError(f"the dispatcher has no projector {printable(projector)}; it has: {known}")
    if not all(handler.idempotent for handler in found):
        raise RefusedError(
            f"{printable(projector)} has no markers, so a message that comes again would be applied again; write "
            "@projector(idempotent=True)"
        )
    return found


def pairs_of(old: Sequence[Handler], new: Sequence[Handler]) -> list[Pair]:
    """Return which handlers' markers are compared, or raise ``RefusedError`` if a marker does not tell enough.

    A handler of the new generation that takes all events of an old one must have all its messages. Several that share
    the events of an old one have each message once, if no event is taken by two of them.
    """
    pairs = []
    for first, second in combinations(old, 2):
        if not first.names.isdisjoint(second.names):
            raise RefusedError(
                f"{first.identity} and {second.identity} share a former name, and a marker under it does not tell "
                "whose it is: `idempotency rename` gives each its own markers"
            )
    for one in old:
        derived = [route for each in new for route in each.on.routes if route not in one.on.routes and one.takes(route)]
        takes = {each: {route for route in one.on.routes if each.takes(route)} for each in new}
        whole = [each for each in new if _takes_all(each, one)]
        parts = [each for each in new if takes[each] and each not in whole]
        pairs += [Pair(one.names, each.names) for each in whole]
        shared: list[Route] = [route for each in parts for route in takes[each]]
        exact = not one.on.subclasses and sorted(map(str, shared)) == sorted(map(str, one.on.routes))
        if derived:  # a message of a derived class must be in the handler of that class, too
            exact, whole = False, []
        if parts and exact:
            pairs.append(Pair(one.names, frozenset().union(*(each.names for each in parts))))
        elif parts or not whole:
            raise RefusedError(
                f"a marker of {one.identity} does not tell which handlers of {new[0].owner} must have its message: the "
                "new generation must take every event of that handler, by one handler, or by several that have no "
                "event in common. For an event that is not needed any more, write a handler that does nothing"
            )
    return pairs


def _takes_all(new: Handler, old: Handler) -> bool:
    return all(new.takes(route) for route in old.on.routes) and (new.on.subclasses or not old.on.subclasses)


# The comparison ----------------------------------------------------------------------------------------------------


def _compared(
    connection: Connection,
    tables: DedupTables,
    pairs: Sequence[Pair],
    limit: int,
    new: Sequence[Handler],
    known: OpenRebuild | None,
) -> Lacking:
    judged = _judged(tables, pairs)
    had = or_(*(judged.c[f"old_{number}"] == 1 for number in range(len(pairs))))

    def number(condition: ColumnElement[bool]) -> ColumnElement[int]:
        return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)

    old, lacks, new_only = connection.execute(
        select(number(had), number(_lacks(judged, pairs)), number(~had)).select_from(judged)
    ).one()
    ids = _first(connection, judged, pairs, limit) if lacks else ()
    return Lacking(
        int(old),
        int(lacks),
        ids,
        int(new_only),
        known_since=state_of(connection, tables).pruned_until if known is None else known.known_since_at,
        source_read=None if known is None else known.complete,
        building=any(each.beside is not None for each in new),
    )


def _judged(tables: DedupTables, pairs: Sequence[Pair], ids: Collection[str] | None = None) -> Subquery:
    """Return, for each message that either generation has applied, 1 or 0 for each side of each pair.

    The rows are grouped in the order of the primary key. ``NOT EXISTS`` was tens of times slower on MariaDB.
    """
    marker = tables.marker

    def has(names: Collection[str]) -> ColumnElement[Any]:
        return func.max(case((marker.c.handler.in_(sorted(names)), 1), else_=0))

    columns = [has(pair.old).label(f"old_{number}") for number, pair in enumerate(pairs)]
    columns += [has(pair.new).label(f"new_{number}") for number, pair in enumerate(pairs)]
    every = sorted(frozenset().union(*(names for pair in pairs for names in pair)))
    statement = select(marker.c.message_id, *columns).where(marker.c.handler.in_(every)).group_by(marker.c.message_id)
    return (statement if ids is None else statement.where(marker.c.message_id.in_(ids))).subquery()


def _lacks(judged: Subquery, pairs: Sequence[Pair]) -> ColumnElement[bool]:
    return or_(*(and_(judged.c[f"old_{number}"] == 1, judged.c[f"new_{number}"] == 0) for number in range(len(pairs))))


def _first(connection: Connection, judged: Subquery, pairs: Sequence[Pair], limit: int) -> tuple[str, ...]:
    lacks = select(judged.c.message_id).where(_lacks(judged, pairs)).order_by(judged.c.message_id).limit(limit)
    return tuple(connection.execute(lacks).scalars())
