"""The age of the markers of a table, the handlers that have some, and the gauges for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import Table, func, select, text
from sqlalchemy.engine import Connection, Engine

from ..dialects import MariaDB, PostgreSQL, dialect_of, quoted_name
from ..dialects.columns import utc_now
from ..effects import EffectTables
from ..late import MARGIN, in_utc
from ..tables import DedupTables, default_tables
from .databases import database_of
from .effects import OVERDUE, count, is_overdue, is_unknown, needs_person
from .running import connected_to
from .state import DEFAULT_RETENTION_HOURS, State, state_of

_LOOKED_AT = 1_000  # the newest markers
MAX_COUNTED = 1_000  #: effects that ``gauges`` counts


@dataclass(frozen=True)
class Ages:
    """The oldest marker of a table, and its state table, at the moment ``at`` by the database's clock.

    ``retention_hours`` is how long markers must be kept: the declared horizon or the retention of the last complete
    cleanup, whichever is longer, else 168. ``timeless`` are handlers that have applied messages without a time lately.
    """

    at: datetime
    oldest: datetime | None
    retention_hours: float
    state: State
    timeless: tuple[str, ...]

    @property
    def has_expired(self) -> bool:
        """True if a marker is so old that cleanup deletes it."""
        return self.oldest is not None and self.oldest < self.at - timedelta(hours=self.retention_hours) - MARGIN


def ages(engine: Engine, *, tables: DedupTables = default_tables) -> Ages:
    """Return how old the markers are. The cost does not grow with the table: one end of an index is read.

    Raises ``MissingTableError`` if the tables are missing.
    """
    with connected_to(engine, tables) as connection:
        now, state = database_of(connection).now(connection), state_of(connection, tables)
        oldest = _moment(connection.scalar(select(func.min(tables.marker.c.processed_at))))
        timeless = () if tables.keyed else _timeless(connection, tables)
    return Ages(now, oldest, _kept_hours(state), state, timeless)


def handlers_of(engine: Engine, *, tables: DedupTables = default_tables) -> frozenset[str]:
    """Return the names of all handlers that have a marker. The function reads every marker.

    Raises ``MissingTableError`` if the tables are missing.
    """
    with connected_to(engine, tables) as connection:
        return frozenset(connection.scalars(select(tables.marker.c.handler).distinct()))


@dataclass(frozen=True)
class Gauges:
    """The values that a database tells of a table without a scan; None for a value that it cannot tell cheaply.

    ``rows`` is the server's estimate. ``oldest`` is the age of the oldest row in seconds. ``lag`` is the number of
    seconds by which that age exceeds what must be kept: the declared horizon or the retention of the last complete
    cleanup, whichever is longer, else 168 hours. Effects are counted up to 1,000, and are None for a table of another
    kind: ``unknown`` are those of which nobody knows whether they were done, ``person`` those that need a person, and
    ``overdue`` those that were due, or were armed and never sent, more than 15 minutes ago.
    """

    rows: int | None
    oldest: float | None
    lag: float | None
    unknown: int | None = None
    person: int | None = None
    overdue: int | None = None


def gauges(engine: Engine, *, tables: DedupTables = default_tables) -> Gauges:
    """Return the gauges of the table. The cost does not grow with the table: ends of indexes and statistics are read.

    Raises ``MissingTableError`` if the tables are missing.
    """
    marker = tables.marker
    with connected_to(engine, tables) as connection:
        state = state_of(connection, tables)
        first = select(func.min(marker.c.processed_at)).scalar_subquery()  # which reads one end of the index
        oldest, now = (_moment(each) for each in connection.execute(select(first, utc_now())).one())
        rows, effects = _estimated_rows(connection, marker), {}
        if isinstance(tables, EffectTables):
            which = {
                "unknown": is_unknown(tables),
                "person": needs_person(tables),
                "overdue": is_overdue(tables, OVERDUE),
            }
            effects = {name: count(connection, tables, each, MAX_COUNTED) for name, each in which.items()}
    if oldest is None or now is None:
        return Gauges(rows, None, None, **effects)
    age = (now - oldest).total_seconds()
    return Gauges(rows, age, max(0.0, age - 3600 * _kept_hours(state)), **effects)


def _estimated_rows(connection: Connection, table: Table) -> int | None:
    """Return the number of rows by the server's statistics, without a scan; None if the server has none."""
    dialect = dialect_of(connection)
    if isinstance(dialect, PostgreSQL):  # as of the last VACUUM or ANALYZE; -1 if there was none
        asked = text("SELECT nullif(reltuples, -1) FROM pg_class WHERE oid = to_regclass(:name)")
        found = connection.scalar(asked, {"name": quoted_name(connection, table)})
    elif isinstance(dialect, MariaDB):
        place = "table_schema = coalesce(:schema, database()) AND table_name = :name"
        asked = text(f"SELECT table_rows FROM information_schema.tables WHERE {place}")  # noqa: S608  # no value
        found = connection.scalar(asked, {"schema": connection.schema_for_object(table), "name": table.name})
    else:
        return None
    return None if found is None else int(found)


def _kept_hours(state: State) -> float:
    """Return how long markers must be kept: the last complete cleanup's retention or the horizon, the longer one."""
    return max(state.retention_hours or 0.0, state.horizon_hours or 0.0) or DEFAULT_RETENTION_HOURS


def _timeless(connection: Connection, tables: DedupTables) -> tuple[str, ...]:
    """Return the handlers that have a marker without ``occurred_at`` among the newest markers of the table."""
    marker = tables.marker
    newest = select(marker.c.handler, marker.c.occurred_at).order_by(marker.c.processed_at.desc()).limit(_LOOKED_AT)
    some = newest.subquery("newest")
    return tuple(sorted(connection.scalars(select(some.c.handler).where(some.c.occurred_at.is_(None)).distinct())))


def _moment(found: datetime | None) -> datetime | None:
    return None if found is None else in_utc(found)
