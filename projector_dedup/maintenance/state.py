"""The state table: a text value for each key, such as the schema version or the time of the last cleanup."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import IntegrityError

from ..late import PRUNED_UNTIL, REDELIVERY_HORIZON, in_utc, stored_hours
from ..tables import DedupTables, default_tables
from .databases import database_of
from .running import connected_to

SCHEMA_VERSION = "schema_version"  #: of the tables, where our revisions or the SQL of `idempotency schema` made them
HORIZON_BEFORE = "horizon_before"  #: hours and a moment: the horizon that workers may use until then, after a change
RETENTION = "retention_hours"  #: of the last complete cleanup of all handlers
CLEANED_AT = "cleaned_at"  #: when that cleanup ended: ISO 8601, UTC, by the database's clock
DEFAULT_RETENTION_HOURS = 168.0  #: of a cleanup to which nobody has given a retention, where no horizon is declared
PRUNED_HANDLER = "pruned:"  #: with the hash of a handler's name: cleanup may have deleted markers of this handler


@dataclass(frozen=True)
class State:
    """The horizon and the last cleanups, from the state table. Each value is None if it is missing or not valid."""

    horizon_hours: float | None
    retention_hours: float | None
    cleaned_at: datetime | None
    pruned_until: datetime | None
    before_hours: float | None = None
    before_until: datetime | None = None

    def judged_hours(self, now: datetime) -> float:
        """Return the longest horizon, in hours, by which a worker may judge messages ``now``.

        It is infinite if a worker may know that no horizon is declared.
        """
        declared = math.inf if self.horizon_hours is None else self.horizon_hours
        if self.before_hours is None or self.before_until is None or self.before_until <= now:
            return declared
        return max(declared, self.before_hours)


def state_of(connection: Connection, tables: DedupTables) -> State:
    """Return the values of the state table as numbers and moments."""
    known = read_state(connection, tables)
    hours, _, until = known.get(HORIZON_BEFORE, "").partition(" ")
    return State(
        _hours(known.get(REDELIVERY_HORIZON)),
        _hours(known.get(RETENTION)),
        _moment(known.get(CLEANED_AT)),
        _moment(known.get(PRUNED_UNTIL)),
        _hours(hours),
        _moment(until),
    )


def pruned_until(engine: Engine, *, tables: DedupTables = default_tables) -> datetime | None:
    """Return the time before which markers may be deleted, or None if no cleanup has deleted any.

    Raises ``MissingTableError`` if the state table is missing.
    """
    with connected_to(engine, tables) as connection:
        return state_of(connection, tables).pruned_until


def read_state(connection: Connection, tables: DedupTables) -> dict[str, str]:
    """Return all keys of the state table with their values."""
    return {row.key: row.value for row in connection.execute(select(tables.state.c.key, tables.state.c.value))}


def write_state(connection: Connection, tables: DedupTables, values: Mapping[str, str | None]) -> None:
    """Write ``values``, and delete the keys whose value is None, in the caller's transaction.

    The last writer of a key wins.
    """
    known, state = read_state(connection, tables), tables.state
    for key, value in values.items():
        if value is None:
            connection.execute(state.delete().where(state.c.key == key))
            continue
        # An UPDATE that finds nothing would lock the gap, on MariaDB.
        if key not in known and insert_state(connection, tables, key, value):
            continue
        connection.execute(state.update().where(state.c.key == key).values(value=value))


def insert_state(connection: Connection, tables: DedupTables, key: str, value: str) -> bool:
    """Insert a key in the caller's transaction. Return False if another transaction has inserted it before."""
    try:
        with connection.begin_nested():
            connection.execute(tables.state.insert(), {"key": key, "value": value})
    except IntegrityError:
        return False
    return True


def advance_state(connection: Connection, tables: DedupTables, key: str, value: str) -> None:
    """Write ``value`` in the caller's transaction, unless the stored value is later.

    The UPDATE compares the values as text, because times in this form sort like text.
    """
    if key not in read_state(connection, tables):
        write_state(connection, tables, {key: value})
    state = tables.state
    connection.execute(state.update().where(state.c.key == key, state.c.value < value).values(value=value))


def pruned_key(handler: str) -> str:
    """Return the key that the state table has if cleanup may have deleted markers of ``handler``."""
    return PRUNED_HANDLER + hashlib.sha256(handler.encode()).hexdigest()


def moment_text(moment: datetime) -> str:
    """Return the text of a moment for the state table: in UTC, always of the same form, so that texts sort by time."""
    return moment.astimezone(UTC).isoformat(timespec="microseconds")


def now_text(connection: Connection) -> str:
    """Return the current time of the database's clock, as text."""
    return moment_text(database_of(connection).now(connection))


# Moments and spans of time ----------------------------------------------------------------------------------------


def duration(span: timedelta) -> str:
    """Return a span of time in minutes, hours or days, such as "3 hours".

    A negative span is "0 minutes": two clocks may differ by a second.
    """
    minutes = max(0, span.total_seconds() / 60)
    length, unit = (1, "minute") if minutes < 60 else (60, "hour") if minutes < 48 * 60 else (24 * 60, "day")
    number = round(minutes / length)
    return f"{number} {unit}{'' if number == 1 else 's'}"


def in_hours(hours: float) -> str:
    """Return a number of hours as text, such as "1 hour" or "240 hours"."""
    return f"{hours:g} hour{'' if hours == 1 else 's'}"


def moment_with_zone(at: datetime) -> str:
    """Return a moment, which is in UTC, to the second: "2026-01-31 23:59:59 UTC"."""
    return f"{moment_without_zone(at)} UTC"


def moment_without_zone(at: datetime) -> str:
    """Return a moment to the second, for a column whose heading names the time zone: "2026-01-31 23:59:59"."""
    return f"{at:%Y-%m-%d %H:%M:%S}"


def _hours(text: str | None) -> float | None:
    try:
        return None if text is None else stored_hours(text)
    except ValueError:
        return None


def _moment(text: str | None) -> datetime | None:
    try:
        return None if text is None else in_utc(datetime.fromisoformat(text))
    except ValueError:
        return None
