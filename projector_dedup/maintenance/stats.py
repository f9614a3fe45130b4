"""Statistics of the marker table: how many markers each handler has, how old they are, how many have expired."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import FromClause, Row, case, func, select
from sqlalchemy.engine import Connection, Engine

from ..dialects import dialect_of
from ..tables import DedupTables, default_tables
from .connection import connected_to
from .kinds import refuse_other_kind
from .state import State, state_of
from .times import in_utc

DEFAULT_RETENTION_HOURS = 168.0  #: taken where no cleanup has recorded another


@dataclass(frozen=True)
class HandlerStats:
    """The number of markers of one handler, and when its oldest and its newest were written."""

    handler: str
    markers: int
    oldest: datetime
    newest: datetime


@dataclass(frozen=True)
class Stats:
    """The statistics of one marker table at the moment ``at``, by the database's clock.

    If ``estimated``, the values of ``markers``, ``expired`` and ``handlers`` are taken from the catalogue and a sample,
    and a handler with few markers may be missing. ``oldest`` and ``newest`` are exact. ``expired`` counts the markers
    older than ``retention_hours``. ``bytes`` includes indexes, and is None where the database cannot tell.
    """

    at: datetime
    markers: int
    estimated: bool
    bytes: int | None
    oldest: datetime | None
    newest: datetime | None
    retention_hours: float
    expired: int
    handlers: tuple[HandlerStats, ...]
    state: State


def stats(
    engine: Engine,
    *,
    tables: DedupTables = default_tables,
    retention_hours: float | None = None,
    exact_up_to: int = 1_000_000,
) -> Stats:
    """Count the markers of each handler and return the statistics of the table.

    In a table with more than ``exact_up_to`` rows only a sample is counted. The number of rows is taken from the
    database's catalogue; SQLite's has none, so there every row is counted. A marker older than ``retention_hours``
    counts as expired; the default is the retention of the last complete cleanup, else 168.

    Raises ``MissingTableError`` if the tables are missing.
    """
    dialect = dialect_of(engine)
    with connected_to(engine, tables) as connection:
        refuse_other_kind(connection, tables, any_kind=True)
        now, state = dialect.now(connection), state_of(connection, tables)
        hours = retention_hours or state.retention_hours or DEFAULT_RETENTION_HOURS
        oldest, newest = _extent(connection, tables)
        rows, size = dialect.measured(connection, tables.marker)
        big = None if rows is None or rows <= exact_up_to or oldest is None else rows
        source = tables.marker if big is None else dialect.sampled(connection, tables.marker, exact_up_to // 10, big)
        found = _by_handler(connection, source, now - timedelta(hours=hours))
        counted: int = sum(row.markers for row in found)
        scale = big / counted if big and counted else 1
        handlers = [
            HandlerStats(row.handler, round(row.markers * scale), in_utc(row.oldest), in_utc(row.newest))
            for row in found
        ]
        return Stats(
            at=now,
            markers=counted if big is None else big,
            estimated=big is not None,
            bytes=size,
            oldest=oldest,
            newest=newest,
            retention_hours=hours,
            expired=round(int(sum(row.expired for row in found)) * scale),
            handlers=tuple(sorted(handlers, key=lambda each: (-each.markers, each.handler))),
            state=state,
        )


def _extent(connection: Connection, tables: DedupTables) -> tuple[datetime | None, datetime | None]:
    """Return when the oldest and the newest marker were written, by two reads of an index; None for an empty table."""
    at = tables.marker.c.processed_at
    ends = [connection.scalar(select(end(at))) for end in (func.min, func.max)]
    oldest, newest = (None if end is None else in_utc(end) for end in ends)
    return oldest, newest


def _by_handler(connection: Connection, source: FromClause, expires: datetime) -> list[Row[Any]]:
    at = source.c.processed_at
    return list(
        connection.execute(
            select(
                source.c.handler,
                func.count().label("markers"),
                func.min(at).label("oldest"),
                func.max(at).label("newest"),
                func.sum(case((at < expires, 1), else_=0)).label("expired"),
            ).group_by(source.c.handler)
        )
    )
