"""The plan of a demo run: the order of deliveries, which of them come twice, and where a worker crashes."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from .flights import FlightScheduled

_WINDOW = 500  # deliveries over which order is lost


class Crash(Enum):
    """The points at which a worker crashes; the value is its exit code then."""

    BEFORE_COMMIT = 70  # the writes are flushed to the database
    AFTER_COMMIT = 71  # the message is not acknowledged


@dataclass
class Lane:
    """The deliveries of one worker, and the positions among them at which it crashes, in order."""

    deliveries: list[FlightScheduled]
    crashes: deque[tuple[int, Crash]] = field(default_factory=deque)


def plan(
    flights: Sequence[FlightScheduled], *, workers: int, seed: int, redelivered: float, crashes: int
) -> list[Lane]:
    """Return the deliveries and crashes of each worker.

    A share ``redelivered`` of the messages comes twice, and workers crash ``crashes`` times at each of the two points.
    The copies of a message may meet in two workers at the same time. The same seed makes the same plan, so that both
    projectors live through the same deliveries and the same crashes.
    """
    chance = random.Random(seed)  # noqa: S311  # a plan, not a secret
    again = chance.sample(range(len(flights)), round(len(flights) * redelivered))
    numbers = [*range(len(flights)), *again]
    numbers.sort(key=lambda number: number + chance.uniform(0, _WINDOW))
    lanes = [Lane([flights[number] for number in numbers[worker::workers]]) for worker in range(workers)]

    # Workers crash at messages that come once: the copy of another might be a duplicate, whose unit of work has no
    # commit to crash before, and then the two projectors would not see the same crashes.
    copies = Counter(numbers)
    places = [
        (position % workers, position // workers) for position, number in enumerate(numbers) if copies[number] == 1
    ]
    kinds = [Crash.BEFORE_COMMIT, Crash.AFTER_COMMIT] * crashes
    chosen = chance.sample(places, min(len(kinds), len(places)))
    for (worker, position), kind in sorted(zip(chosen, kinds, strict=False), key=lambda pair: pair[0]):
        lanes[worker].crashes.append((position, kind))
    return lanes
