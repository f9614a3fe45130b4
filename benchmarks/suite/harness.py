"""Contenders take turns in rounds; what they did is checked against what they were given."""

from __future__ import annotations

import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, NamedTuple

from sqlalchemy import URL

from .messages import Item, Stream
from .servers import Place, Server


class Contender:
    """One way of applying messages to the read model. Only ``deliver`` is timed."""

    name: str
    engines: ClassVar[frozenset[str]] = frozenset({"postgresql"})
    drivers: ClassVar[dict[str, str]] = {"postgresql": "postgresql+psycopg"}
    batch = 1  # how many messages it takes at once
    tasks = 1  # how many it works on at the same time
    markers = ""  # the table that remembers them

    def create(self, place: Place) -> None:
        """Make its tables, and the rows of the read model; once."""
        raise NotImplementedError

    def connect(self, url: URL) -> None:
        """Before its turn. The URL has the driver of ``drivers``; there may be a proxy in it."""
        raise NotImplementedError

    def messages(self, items: Sequence[Item]) -> Sequence[Any]:
        """The items as a consumer hands them over."""
        return items

    def deliver(self, messages: Sequence[Any]) -> None:
        """Apply the messages. One that raises would be delivered again."""
        raise NotImplementedError

    def disconnect(self) -> None:
        """After its turn: the server has connections for one or two contenders, not for all."""
        raise NotImplementedError


class Turn(NamedTuple):
    """What one contender did in one round."""

    messages: int
    seconds: float
    cpu: float
    """Seconds of the client's processors."""

    @property
    def rate(self) -> float:
        """Messages a second."""
        return self.messages / self.seconds


class Quartiles(NamedTuple):
    """A figure, and how far it can be trusted."""

    low: float
    middle: float
    high: float

    def __str__(self) -> str:
        digits = 2 if self.middle < 10 else 1 if self.middle < 100 else 0
        return f"{self.middle:.{digits}f} ({self.low:.{digits}f}..{self.high:.{digits}f})"


def quartiles(values: Iterable[float]) -> Quartiles:
    """Of one value: itself three times."""
    found = sorted(values)
    return Quartiles(*statistics.quantiles(found * 2 if len(found) == 1 else found, n=4, method="inclusive"))


@dataclass
class Entry:
    """A contender in a race: its database, its messages, and what became of them."""

    contender: Contender
    place: Place
    stream: Stream

    def __post_init__(self) -> None:
        self.turns: list[Turn] = []

    def ratios(self, base: Entry) -> Quartiles:
        """Its rate divided by that of ``base`` in the same round."""
        return quartiles(mine.rate / other.rate for mine, other in zip(self.turns, base.turns, strict=True))

    @property
    def rate(self) -> float:
        """Messages a second, the median."""
        return statistics.median(turn.rate for turn in self.turns)

    @property
    def cpu(self) -> float:
        """Microseconds of the client's processors for each message, the median."""
        return statistics.median(turn.cpu / turn.messages for turn in self.turns) * 1e6

    def totals(self) -> Totals:
        """The read model, held against what was delivered."""
        return Totals(self.place.total(), self.stream.new)


class Totals(NamedTuple):
    """What the read model has, and what it should have."""

    found: int
    expected: int

    @property
    def right(self) -> bool:
        """Each message counted once."""
        return self.found == self.expected

    def __str__(self) -> str:
        if self.right:
            return f"{self.found:,} right"
        return f"{self.found - self.expected:+,} of {self.expected:,}"


def enter(server: Server, contender: Contender, label: str = "", **stream: Any) -> Entry:
    """A contender in a new database of its own."""
    place = server.place()
    contender.create(place)
    return Entry(contender, place, Stream(f"{label}{contender.name}", **stream))


@contextlib.contextmanager
def connected(
    entry: Entry, warm_for: float, through: Callable[[URL], URL] = lambda url: url
) -> Iterator[tuple[Contender, Turn]]:
    """For the length of a turn. It begins warm: connected, and with statements compiled and prepared.

    Warming ends after ``warm_for`` seconds, or when psycopg and SQLAlchemy have seen each statement a few times on each
    connection; yields the last of it, too.
    """
    contender = entry.contender
    contender.connect(through(entry.place.by(contender.drivers[entry.place.engine])))
    try:
        end = time.perf_counter() + warm_for
        steps = [_timed(contender, entry.stream.take(_step(contender)))]
        while len(steps) < 8 and time.perf_counter() < end:
            steps.append(_timed(contender, entry.stream.take(_step(contender))))
        yield contender, steps[-1]
    finally:
        contender.disconnect()


def _step(contender: Contender) -> int:
    return max(4, contender.batch * contender.tasks)


def take_turn(entry: Entry, seconds: float, through: Callable[[URL], URL] = lambda url: url) -> None:
    """Deliver for about ``seconds``, in whole batches, at least two; how many that is, the last turn tells."""
    with connected(entry, seconds / 2, through) as (contender, warm):
        rate, step = (entry.turns[-1] if entry.turns else warm).rate, _step(contender)
        count = step * max(2, ceil(rate * seconds / step))
        entry.turns.append(_timed(contender, entry.stream.take(count)))


def _timed(contender: Contender, items: Sequence[Item]) -> Turn:
    messages = contender.messages(items)
    began, spent = time.perf_counter(), time.process_time()
    contender.deliver(messages)
    return Turn(len(items), time.perf_counter() - began, time.process_time() - spent)


def race(entries: Sequence[Entry], rounds: int, turn: Callable[[Entry], None]) -> None:
    """Everybody once in each round, in an order of its own, so that a slow minute of the machine strikes all."""
    order = random.Random(rounds)
    for number in range(rounds):
        for position, entry in enumerate(order.sample(entries, len(entries))):
            progress(f"round {number + 1} of {rounds}: {position + 1} of {len(entries)}, {entry.contender.name}")
            turn(entry)
    progress("")


def progress(line: str) -> None:
    """What is going on, for whoever waits; on stderr."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line[:79]}", end="", file=sys.stderr, flush=True)
    elif line:
        print(line, file=sys.stderr, flush=True)
