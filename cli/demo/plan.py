"""The plan of a demo run: the order of deliveries, which of them come twice, and where a worker crashes."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Generic, TypeVar

M = TypeVar("M")


class Crash(IntEnum):
    """The points at which a worker is killed."""

    BEFORE_COMMIT = 1  # the writes are flushed to the database
    AFTER_COMMIT = 2  # the message is not acknowledged


@dataclass
class Lane(Generic[M]):
    """The deliveries of one worker, and the positions among them at which it is killed, in order."""

    deliveries: list[M]
    crashes: deque[tuple[int, Crash]] = field(default_factory=deque)


def plan(
    messages: Sequence[M], *, workers: int, seed: int, redelivered: float, crashes: int, window: int = 500
) -> list[Lane[M]]:
    """Return the deliveries and crashes of each worker.

    ``redelivered`` is the number of deliveries for each message beside its first: with 0.2 a fifth of the messages
    comes twice, with 2 each comes three times. Workers are killed ``crashes`` times at each of the two points.
    ``window`` is the number of messages over which order is lost; the copies of a message may meet in two workers at
    the same time. The same seed makes the same plan, so that both sides get the same deliveries and crashes.
    """
    chance = random.Random(seed)  # noqa: S311  # a plan, not a secret
    whole, share = divmod(redelivered, 1)
    again = chance.sample(range(len(messages)), round(len(messages) * share))
    numbers = [*list(range(len(messages))) * (1 + int(whole)), *again]
    numbers.sort(key=lambda number: number + chance.uniform(0, window))
    lanes = [Lane([messages[number] for number in numbers[worker::workers]]) for worker in range(workers)]

    # Workers are killed at the first copy of a message, and at messages that come once if there are any: another copy
    # may be a duplicate, whose unit of work has no commit to be killed before.
    copies = Counter(numbers)
    fewest = min(copies.values())
    first = {number: position for position, number in reversed(list(enumerate(numbers)))}
    places = [
        (position % workers, position // workers)
        for position, number in enumerate(numbers)
        if copies[number] == fewest and first[number] == position
    ]
    kinds = [Crash.BEFORE_COMMIT, Crash.AFTER_COMMIT] * crashes
    chosen = chance.sample(places, min(len(kinds), len(places)))
    for (worker, position), kind in sorted(zip(chosen, kinds, strict=False), key=lambda pair: pair[0]):
        lanes[worker].crashes.append((position, kind))
    return lanes
