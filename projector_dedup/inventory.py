"""What is in the marker table: how many markers, of whom, how old; and those of one message, to look at or forget."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import FromClause, Row, case, delete, func, select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from .dialects import Failure, dialect_of
from .errors import MissingTableError
from .message import valid_handler, valid_message_id
from .state import CLEANED_AT, PRUNED_UNTIL, REDELIVERY_HORIZON, RETENTION, SCHEMA_VERSION, read_state
from .tables import DedupTables, default_tables

DEFAULT_RETENTION_HOURS = 168.0


@dataclass(frozen=True)
class HandlerStats:
    """The markers of one handler; the moments are those of its oldest and newest marker."""

    handler: str
    markers: int
    oldest: datetime
    newest: datetime


@dataclass(frozen=True)
class State:
    """What the deployment knows of itself; None for what it was never told, or cannot be read."""

    schema_version: str | None
    horizon_hours: float | None
    retention_hours: float | None
    cleaned_at: datetime | None
    pruned_until: datetime | None


@dataclass(frozen=True)
class Stats:
    """The markers of one deployment.

    ``estimated``: ``markers``, ``expired`` and what ``handlers`` has are of a sample, and a handler with few markers
    may be missing. ``oldest`` and ``newest`` are exact. ``bytes`` is None where the database cannot tell.
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


@dataclass(frozen=True)
class Marker:
    """That a message was applied by a handler, and when. ``age`` is by the database's clock."""

    message_id: str
    handler: str
    processed_at: datetime
    occurred_at: datetime | None
    age: timedelta


def stats(
    engine: Engine,
    *,
    tables: DedupTables = default_tables,
    retention_hours: float | None = None,
    exact_up_to: int = 1_000_000,
) -> Stats:
    """Count the markers of each handler; of a table with more than ``exact_up_to`` rows, those of a sample.

    How many rows there are, the database's catalogue knows; SQLite's does not, and is always counted.
    ``retention_hours`` says what ``cleanup`` would delete; by default it is that of the last cleanup, or 168.

    Raises ``MissingTableError`` for tables that are not there.
    """
    dialect = dialect_of(engine)
    with _connection(engine, tables) as connection:
        now, state = dialect.now(connection), _state_of(connection, tables)
        hours = retention_hours or state.retention_hours or DEFAULT_RETENTION_HOURS
        oldest, newest = _extent(connection, tables)
        rows, size = dialect.measured(connection, tables.marker)
        big = None if rows is None or rows <= exact_up_to or oldest is None else rows
        source = tables.marker if big is None else dialect.sampled(connection, tables.marker, exact_up_to // 10, big)
        found = _by_handler(connection, source, now - timedelta(hours=hours))
        counted: int = sum(row.markers for row in found)
        scale = big / counted if big and counted else 1
        handlers = [
            HandlerStats(row.handler, round(row.markers * scale), _in_utc(row.oldest), _in_utc(row.newest))
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


def find(engine: Engine, message_id: object, *, tables: DedupTables = default_tables) -> list[Marker]:
    """The markers of one message, by handler; empty if nobody applied it, or its markers were pruned.

    Raises ``InvalidMessageIdError`` for what could not be an id, ``MissingTableError`` for tables that are not there.
    """
    marker, known = tables.marker, valid_message_id(message_id)
    with _connection(engine, tables) as connection:
        now = dialect_of(engine).now(connection)
        rows = connection.execute(select(marker).where(marker.c.message_id == known).order_by(marker.c.handler)).all()
    found = []
    for row in rows:
        at = _in_utc(row.processed_at)
        occurred = None if row.occurred_at is None else _in_utc(row.occurred_at)
        found.append(Marker(row.message_id, row.handler, at, occurred, now - at))
    return found


def forget(
    engine: Engine, message_id: object, *, handler: str | None = None, tables: DedupTables = default_tables
) -> int:
    """Delete the markers of one message, or that of one handler, so that a redelivery is applied *again*.

    Returns how many there were. Nothing that was applied is undone: that is for whoever mends the read model.

    Raises ``InvalidMessageIdError`` for what could not be an id, ``MissingTableError`` for tables that are not there.
    """
    marker, dialect = tables.marker, dialect_of(engine)
    conditions = [marker.c.message_id == valid_message_id(message_id)]
    if handler is not None:
        conditions.append(marker.c.handler == valid_handler(handler))
    level = {} if dialect.pruning_isolation is None else {"isolation_level": dialect.pruning_isolation}
    with _connection(engine, tables) as connection, connection.execution_options(**level).begin():
        there = connection.execute(select(marker.c.handler).where(*conditions).with_for_update()).all()
        connection.execute(delete(marker).where(*conditions))
    return len(there)


@contextmanager
def _connection(engine: Engine, tables: DedupTables) -> Iterator[Connection]:
    dialect = dialect_of(engine)
    dialect.prepare(engine)
    with engine.connect() as connection:
        try:
            yield connection
        except DBAPIError as error:
            if dialect.classify(error) is Failure.NO_TABLE:
                raise MissingTableError(tables.missing(connection)) from error
            raise


def _state_of(connection: Connection, tables: DedupTables) -> State:
    """What the state table says."""
    known = read_state(connection, tables)
    return State(
        known.get(SCHEMA_VERSION),
        _hours(known.get(REDELIVERY_HORIZON)),
        _hours(known.get(RETENTION)),
        _moment(known.get(CLEANED_AT)),
        _moment(known.get(PRUNED_UNTIL)),
    )


def pruned_until(engine: Engine, *, tables: DedupTables = default_tables) -> datetime | None:
    """Before which moment no marker is kept any more; None if no complete cleanup was recorded."""
    with _connection(engine, tables) as connection:
        return _state_of(connection, tables).pruned_until


def _extent(connection: Connection, tables: DedupTables) -> tuple[datetime | None, datetime | None]:
    """When the oldest and the newest marker were written: two looks into the index."""
    at = tables.marker.c.processed_at
    ends = [connection.scalar(select(end(at))) for end in (func.min, func.max)]
    oldest, newest = (None if end is None else _in_utc(end) for end in ends)
    return oldest, newest


def _in_utc(moment: datetime) -> datetime:
    """What the database gave: some keep no zone, and then it is UTC."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


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


def _hours(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _moment(text: str | None) -> datetime | None:
    try:
        return None if text is None else _in_utc(datetime.fromisoformat(text))
    except ValueError:
        return None
