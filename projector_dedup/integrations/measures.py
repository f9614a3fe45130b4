"""Names and buckets that the observers for Prometheus and OpenTelemetry share."""

from __future__ import annotations

from typing import NamedTuple

from ..observer import Observation

HOUR = 3600.0
AGE_BUCKETS = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, HOUR, 4 * HOUR, 24 * HOUR, 7 * 24 * HOUR)
"""Upper bounds, in seconds, of ages of messages: a consumer keeps up, or was down for the weekend."""


class Series(NamedTuple):
    """The labels under which an observation is counted; each has few values, because each combination is kept."""

    handler: str
    message_type: str
    outcome: str


def series_of(observation: Observation) -> Series:
    """Return the labels of an observation.

    A message that went to no handler has neither handler nor type: the type may be made up, and new each time. A
    duplicate that this delivery had applied itself, by a COMMIT whose answer was lost, is counted as applied.
    """
    outcome = "applied" if observation.after_unknown_commit else observation.outcome
    if observation.handler is None:
        return Series("", "", outcome)
    return Series(observation.handler, observation.message_type or "", outcome)


def age_of(observation: Observation) -> float | None:
    """Return the age to record, 0 for a message from the future, or None if there is none or more is to come."""
    if observation.age is None or observation.outcome == "retried":
        return None
    return max(0.0, observation.age)


def duration_of(observation: Observation) -> float | None:
    """Return the duration to record, or None if no handler was tried or another attempt is to come."""
    if observation.handler is None or observation.outcome == "retried":
        return None
    return observation.duration
