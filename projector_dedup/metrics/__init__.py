"""Metrics and traces of deliveries (docs/observing.md).

``prometheus`` and ``opentelemetry`` have an observer for a dispatcher; ``prometheus_tables`` reads the tables when
Prometheus asks. Each needs the extra ``prometheus`` or ``opentelemetry``. Here are the labels and buckets that both
observers share.
"""

from __future__ import annotations

from typing import NamedTuple

from ..observer import Observation

HOUR = 3600.0
AGE_BUCKETS = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, HOUR, 4 * HOUR, 24 * HOUR, 7 * 24 * HOUR)
"""Upper bounds of the ages of messages, in seconds: a consumer keeps up, or was down for a weekend."""


class Series(NamedTuple):
    """The labels of an observation. Each label has few values, because every combination is a separate time series."""

    handler: str
    message_type: str
    outcome: str


def series_of(observation: Observation) -> Series:
    """Return the labels of an observation.

    For a message without a handler, the handler and the type are empty: a producer could send a new type each time. If
    the answer to COMMIT was lost and the retry finds the marker, the observation counts as applied, not as a duplicate.
    """
    outcome = "applied" if observation.after_unknown_commit else observation.outcome
    if observation.handler is None:
        return Series("", "", outcome)
    return Series(observation.handler, observation.message_type or "", outcome)


def age_of(observation: Observation) -> float | None:
    """Return the age to record in seconds: 0 for a message from the future, None without an age or before a retry."""
    if observation.age is None or observation.outcome == "retried":
        return None
    return max(0.0, observation.age)


def duration_of(observation: Observation) -> float | None:
    """Return the duration to record in seconds; None if no handler was called or a retry follows."""
    if observation.handler is None or observation.outcome == "retried":
        return None
    return observation.duration
