"""Dead letters as a person sees them, and what the person decides about each: keep it, replay it, or drop it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeVar

from .incoming import Incoming

__all__ = ["DeadLetter", "Decide", "Fate", "Sifted"]

L = TypeVar("L")  # a dead letter, as the broker's client has it

_QUIET = 5.0  # seconds without an older dead letter, after which `sift_older` ends
_HELD = 600  # seconds for which it holds a letter back that stays: otherwise the broker would send it again

Fate = Literal["keep", "replay", "drop", "stop"]
"""The decision about a dead letter. ``"stop"`` keeps it and all dead letters behind it."""


@dataclass(frozen=True)
class DeadLetter:
    """One dead letter.

    ``id`` is the message id, as in the log: with a source, its stored form. A message without an id that is text has
    ``sha256:`` and 16 digits of the hash of its body in place of it. ``reason`` is the error for which the message was
    rejected, and ``occurred_at`` the time that the producer gave it. ``deliveries`` is the number of its deliveries;
    only RabbitMQ and Kafka keep it. What is not known is None, or an empty ``reason``.
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

    ``there`` is None for Pub/Sub and Kafka, which do not count them. SQS only estimates the number.
    """

    there: int | None
    settled: int


Judge = Callable[[Incoming, object, int | None], Fate]
"""A function that decides about a dead letter: the message, the reason of its rejection, the number of deliveries."""


def replay_each(*_: object) -> Fate:
    """Replay every dead letter."""
    return "replay"


def sift_older(
    receive: Callable[[], Sequence[L]],
    judge: Callable[[L], Fate],
    replay: Callable[[L], object],
    drop: Callable[[L], object],
    *,
    is_newer: Callable[[L], bool],
    delay: Callable[[L, int], object],
) -> int:
    """Settle the dead letters that were there before the start, and return the number of those replayed or dropped.

    For a broker that can neither count nor order them: ``receive`` returns some, and none if there is none. A message
    that is rejected again meanwhile is a newer letter: moving it would never end. ``replay`` does not drop the letter.
    ``delay`` holds a letter back for a number of seconds: until the end, if the letter is newer or is kept.
    """
    last, settled, kept, stopped = time.monotonic(), 0, list[L](), False
    try:
        while not stopped and time.monotonic() < last + _QUIET and (letters := receive()):
            kept += letters
            for letter in letters:
                is_old = not (stopped or is_newer(letter))
                fate: Fate = judge(letter) if is_old else "keep"
                if fate == "replay":
                    replay(letter)
                if fate in ("replay", "drop"):
                    drop(letter)
                    kept.remove(letter)
                    settled += 1
                else:
                    delay(letter, _HELD)
                stopped = stopped or fate == "stop"
                last = time.monotonic() if is_old else last
    finally:  # also of an interruption: no letter stays hidden
        for letter in kept:
            delay(letter, 0)
    return settled
