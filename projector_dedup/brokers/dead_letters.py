"""Dead letters as a person sees them, and what the person decides about each: keep it, replay it, or drop it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from .incoming import Incoming

__all__ = ["DeadLetter", "Decide", "Fate", "Sifted"]

Fate = Literal["keep", "replay", "drop", "stop"]
"""What becomes of a dead letter. ``"stop"`` keeps it and all dead letters behind it."""


@dataclass(frozen=True)
class DeadLetter:
    """One dead letter.

    ``id`` is the message id, as in the log. A message without an id has ``sha256:`` and 16 digits of the hash of its
    body in place of it. ``reason`` is the error for which the message was rejected, and ``occurred_at`` the time that
    the producer gave it. ``deliveries`` is the number of its deliveries; only RabbitMQ and Kafka keep it. What is not
    known is None, or an empty ``reason``.
    """

    id: str
    reason: str
    occurred_at: datetime | None
    deliveries: int | None
    body: bytes
    headers: Mapping[str, object]


Decide = Callable[[DeadLetter], Fate]
"""A function that decides what becomes of a dead letter."""


@dataclass(frozen=True)
class Sifted:
    """How many dead letters there were at the beginning, and how many of them were replayed or dropped.

    ``there`` is None if the broker cannot count them. SQS only estimates the number.
    """

    there: int | None
    settled: int


Judge = Callable[[Incoming, object, int | None], Fate]
"""A function that decides about a dead letter: the message, the reason of its rejection, the number of deliveries."""


def replay_each(_incoming: Incoming, _reason: object, _deliveries: int | None) -> Fate:
    """Replay every dead letter."""
    return "replay"
