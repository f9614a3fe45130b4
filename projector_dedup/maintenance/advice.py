"""Advice for `idempotency check`: cleanup that does not keep up, a horizon that is broken, handlers nobody knows."""

from __future__ import annotations

from collections.abc import Iterator, Set
from datetime import timedelta

from ..dialects import Finding, advice
from ..message import printable
from ..tables import DedupTables, default_tables
from .stats import Ages
from .times import duration, moment_with_zone

_SLACK = timedelta(days=2)  # a cleanup that was missed once, at a weekend say, is not worth a finding


def advise(found: Ages, unknown: Set[str] = frozenset(), *, tables: DedupTables = default_tables) -> list[Finding]:
    """Return what somebody should do about the ``tables``, judged by the ages of their markers; none of it is fatal.

    ``unknown`` are the handlers that have markers (``handlers_of``) without those of every dispatcher on these tables
    (``Dispatcher.identities``).
    """
    return [*_pruning(found, tables), *_horizon(found, tables), *_unknown(unknown)]


def _pruning(found: Ages, tables: DedupTables) -> Iterator[Finding]:
    if found.oldest is None:
        return
    state, age, command = found.state, found.at - found.oldest, f"`idempotency cleanup{tables.option}`"
    clean = f"run {command} from cron, or look why it fails there"
    if state.cleaned_at is None:
        if age > timedelta(hours=found.retention_hours):
            yield advice(
                f"the oldest {tables.noun} is {duration(age)} old, and no complete cleanup was ever recorded",
                f"put {command} into cron, or the table grows for ever",
            )
    elif age > timedelta(hours=found.retention_hours) + _SLACK:
        yield advice(
            f"the oldest {tables.noun} is {duration(age)} old, though {found.retention_hours:g} hours are kept; the "
            f"last complete cleanup was {duration(found.at - state.cleaned_at)} ago",
            clean,
        )
    elif found.at - state.cleaned_at > max(_SLACK, timedelta(hours=2 * found.retention_hours)):
        yield advice(f"the last complete cleanup was {duration(found.at - state.cleaned_at)} ago", clean)


def _horizon(found: Ages, tables: DedupTables) -> Iterator[Finding]:
    state, horizon = found.state, found.state.horizon_hours
    if horizon is None:
        return
    if state.retention_hours is not None and state.retention_hours < horizon:
        yield advice(
            f"the last cleanup kept {state.retention_hours:g} hours of {tables.noun}s, but a message may return after "
            f"{horizon:g} (the declared horizon): it would be applied again",
            f"run cleanup with --retention-hours {horizon:g} or more, without --force; or declare the horizon that is "
            "true, with `idempotency horizon`",
        )
    elif state.pruned_until is not None and state.pruned_until > found.at - timedelta(hours=horizon):
        yield advice(
            f"{tables.noun}s up to {moment_with_zone(state.pruned_until)} are deleted, but a message may return after "
            f"{horizon:g} hours (the declared horizon); one whose {tables.noun} is deleted would be applied again",
            "replay no message from before that moment",
        )


def _unknown(unknown: Set[str]) -> Iterator[Finding]:
    if unknown:
        names = [printable(name) for name in sorted(unknown)]
        more = f" and {len(names) - 10} more" if len(names) > 10 else ""
        yield advice(
            f"markers of handlers that the application does not know: {', '.join(names[:10])}{more}",
            "if one was renamed, its messages are applied again under the new name: `idempotency rename OLD NEW`, and "
            "formerly=[...] while old code runs; if it was removed, or another application's, this is nothing",
        )
