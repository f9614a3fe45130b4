"""Statistics of the marker table: how many markers each handler has, how old they are, how many have expired."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import case, func, select
from sqlalchemy.engine import Connection, Engine

from ..tables import DedupTables, default_tables
from .databases import database_of, in_utc
from .running import connected_to, refuse_other_kind
from .state import State, state_of

DEFAULT_RETENTION_HOURS = 168.0  #: taken where no cleanup has recorded another


@dataclass(frozen=True)
class HandlerStats:
    """The number of markers of one handler, and when its oldest and its newest were written.

    Effects that are not finished have no age. Both moments are None if a name has no others.
    """

    handler: str
    markers: int
    oldest: datetime | None
    newest: datetime | None


@dataclass(frozen=True)
class Ages:
    """The oldest and the newest marker of a table, and its state table, at the moment ``at`` by the database's clock.

    ``retention_hours`` is how long cleanup keeps markers: as asked for, as the last complete cleanup did, else 168.
    """

    at: datetime
    oldest: datetime | None
    newest: datetime | None
    retention_hours: float
    state: State

    @property
    def has_expired(self) -> bool:
        """True if a marker is older than ``retention_hours``."""
        return self.oldest is not None and self.oldest < self.at - timedelta(hours=self.retention_hours)


@dataclass(frozen=True)
class Stats(Ages):
    """The ages, and how many markers there are: in all, older than ``retention_hours``, and of each handler.

    ``bytes`` includes indexes, and is None where the database cannot tell.
    """

    markers: int
    expired: int
    handlers: tuple[HandlerStats, ...]
    bytes: int | None


def stats(engine: Engine, *, tables: DedupTables = default_tables, retention_hours: float | None = None) -> Stats:
    """Count the markers of each handler and return the statistics of the table.

    Every marker is read: that takes some seconds for ten million of them. Deliveries go on meanwhile. A marker older
    than ``retention_hours`` counts as expired; the default is the retention of the last complete cleanup, else 168.

    Raises ``MissingTableError`` if the tables are missing.
    """
    marker = tables.marker
    with connected_to(engine, tables) as connection:
        refuse_other_kind(connection, tables)
        found = _ages(connection, tables, retention_hours)
        expires = found.at - timedelta(hours=found.retention_hours)
        at = marker.c.processed_at
        rows = connection.execute(
            select(
                marker.c.handler,
                func.count().label("markers"),
                func.min(at).label("oldest"),
                func.max(at).label("newest"),
                func.sum(case((at < expires, 1), else_=0)).label("expired"),
            ).group_by(marker.c.handler)
        ).all()
        size = database_of(connection).size(connection, marker)
    handlers = [HandlerStats(row.handler, row.markers, _moment(row.oldest), _moment(row.newest)) for row in rows]
    return Stats(
        **vars(found),
        markers=sum(row.markers for row in rows),
        expired=sum(int(row.expired) for row in rows),
        handlers=tuple(sorted(handlers, key=lambda each: (-each.markers, each.handler))),
        bytes=size,
    )


def ages(engine: Engine, *, tables: DedupTables = default_tables) -> Ages:
    """Return how old the markers are; it reads both ends of an index and the state table, however big the table is.

    Raises ``MissingTableError`` if the tables are missing.
    """
    with connected_to(engine, tables) as connection:
        return _ages(connection, tables, None)


def _ages(connection: Connection, tables: DedupTables, retention_hours: float | None) -> Ages:
    now, state, at = database_of(connection).now(connection), state_of(connection, tables), tables.marker.c.processed_at
    ends = [connection.scalar(select(end(at))) for end in (func.min, func.max)]  # two reads of the index
    oldest, newest = (_moment(end) for end in ends)
    return Ages(now, oldest, newest, retention_hours or state.retention_hours or DEFAULT_RETENTION_HOURS, state)


def _moment(found: datetime | None) -> datetime | None:
    return None if found is None else in_utc(found)
