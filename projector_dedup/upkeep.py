"""Whether the markers are looked after: pruning keeps up, the horizon is kept, every handler is still known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from datetime import datetime, timedelta

from .findings import Finding, advice
from .inventory import Stats
from .message import printable

_SLACK = timedelta(days=2)  # what was missed once, at a weekend say, is no news

_CLEAN = "run `idempotency cleanup` from cron, or look why it fails there"


def upkeep(found: Stats, identities: Set[str] | None = None) -> list[Finding]:
    """What ``stats`` shows that somebody should do; ``identities`` are those of all dispatchers on these tables."""
    return [*_pruning(found), *_horizon(found), *(() if identities is None else _unknown(found, identities))]


def _pruning(found: Stats) -> Iterator[Finding]:
    if found.oldest is None:
        return
    state, age = found.state, found.at - found.oldest
    if state.cleaned_at is None:
        if age > timedelta(hours=found.retention_hours):
            yield advice(
                f"the oldest marker is {days(age)} old, and no complete cleanup was ever recorded",
                "put `idempotency cleanup` into cron, or the table grows for ever",
            )
    elif age > timedelta(hours=found.retention_hours) + _SLACK:
        yield advice(
            f"the oldest marker is {days(age)} old, though {found.retention_hours:g} hours are kept; the last complete "
            f"cleanup was {days(found.at - state.cleaned_at)} ago",
            _CLEAN,
        )
    elif found.at - state.cleaned_at > max(_SLACK, timedelta(hours=2 * found.retention_hours)):
        yield advice(f"the last complete cleanup was {days(found.at - state.cleaned_at)} ago", _CLEAN)


def _horizon(found: Stats) -> Iterator[Finding]:
    state, horizon = found.state, found.state.horizon_hours
    if horizon is None:
        return
    if state.retention_hours is not None and state.retention_hours < horizon:
        yield advice(
            f"the last cleanup kept {state.retention_hours:g} hours of markers, but a message may return after "
            f"{horizon:g} (the declared horizon): it would be applied again",
            f"run cleanup with --retention-hours {horizon:g} or more, without --force; or declare the horizon that is "
            "true, with `idempotency horizon`",
        )
    elif state.pruned_until is not None and state.pruned_until > found.at - timedelta(hours=horizon):
        yield advice(
            f"markers up to {moment(state.pruned_until)} are deleted, but a message may return after {horizon:g} hours "
            "(the declared horizon): until then, what was first delivered before may be applied again",
            "replay nothing from before that moment",
        )


def _unknown(found: Stats, identities: Set[str]) -> Iterator[Finding]:
    unknown = sorted({each.handler for each in found.handlers} - identities)
    if unknown:
        yield advice(
            f"markers of handlers that the application does not know: {_names(unknown)}"
            + (" (looked for in a sample)" if found.estimated else ""),
            "if one was renamed, its messages are applied again under the new name: `idempotency rename OLD NEW`, and "
            "formerly=[...] while old code runs; if it was removed, or another application's, this is nothing",
        )


def _names(unknown: Iterable[str]) -> str:
    names = [printable(name) for name in unknown]
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def days(span: timedelta) -> str:
    """A span as people say it; clocks that differ by a second make none of less than nothing."""
    minutes = max(0, span.total_seconds() / 60)
    length, unit = (1, "minute") if minutes < 60 else (60, "hour") if minutes < 48 * 60 else (24 * 60, "day")
    number = round(minutes / length)
    return f"{number} {unit}{'' if number == 1 else 's'}"


def moment(at: datetime) -> str:
    """A moment, with its zone."""
    return f"{seconds(at)} UTC"


def seconds(at: datetime) -> str:
    """A moment in UTC, to the second."""
    return f"{at:%Y-%m-%d %H:%M:%S}"
