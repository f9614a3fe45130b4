"""Moments and spans of time: as a database returns them, and as the command prints them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta


def in_utc(moment: datetime) -> datetime:
    """Return a moment that a database gave, in UTC. One without a time zone is taken for UTC: all are stored so."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def duration(span: timedelta) -> str:
    """Return a span of time in minutes, hours or days, such as "3 hours".

    A negative span is "0 minutes": two clocks may differ by a second.
    """
    minutes = max(0, span.total_seconds() / 60)
    length, unit = (1, "minute") if minutes < 60 else (60, "hour") if minutes < 48 * 60 else (24 * 60, "day")
    number = round(minutes / length)
    return f"{number} {unit}{'' if number == 1 else 's'}"


def moment_with_zone(at: datetime) -> str:
    """Return a moment, which is in UTC, to the second: "2026-01-31 23:59:59 UTC"."""
    return f"{moment_without_zone(at)} UTC"


def moment_without_zone(at: datetime) -> str:
    """Return a moment to the second, for a column whose heading names the time zone: "2026-01-31 23:59:59"."""
    return f"{at:%Y-%m-%d %H:%M:%S}"
