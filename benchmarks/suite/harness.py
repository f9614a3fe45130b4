"""Contenders take messages, some of them again, in turns; what they did is checked against what they were given."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import random
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar, NamedTuple

from sqlalchemy import URL

from .servers import Place, Server

ROWS = 100
_REMEMBERED = 2_000


class Item(NamedTuple):
    """One message: add one to ``row``. ``number`` is its position in its stream, for who tracks positions."""

    id: str
    row: int
    number: int


class Stream:
    """The messages of one contender. ``redelivered`` is the share of those that had been delivered before.

    Rows follow each other, so that the messages at hand at any time change different ones; ``scattered``: in no order.
    """

    def __init__(self, name: str, redelivered: float = 0.0, rows: int = ROWS, *, scattered: bool = False) -> None:
        self.new = 0
        self._name = name
        self._redelivered = redelivered
        self._rows = rows
        self._scattered = scattered
        self._random = random.Random(name)
        self._sent: list[Item] = []

    def take(self, count: int) -> list[Item]:
        """The next ``count`` messages."""
        return [self._next() for _ in range(count)]

    def _next(self) -> Item:
        if self._sent and self._random.random() < self._redelivered:
            return self._random.choice(self._sent)
        digest = hashlib.md5(f"{self._name}-{self.new}".encode(), usedforsecurity=False).digest()
        row = int.from_bytes(digest[:4]) if self._scattered else self.new
        item = Item(str(uuid.UUID(bytes=digest)), row % self._rows, self.new + 1)
        if self._redelivered:
            slot = self.new % _REMEMBERED
            self._sent[slot : slot + 1] = [item]
        self.new += 1
        return item


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
        """Before its first turn. The URL has the driver of ``drivers``; there may be a proxy in it."""
        raise NotImplementedError

    def messages(self, items: Sequence[Item]) -> Sequence[Any]:
        """The items as a consumer hands them over."""
        return items

    def deliver(self, messages: Sequence[Any]) -> None:
        """Apply the messages. One that raises would be delivered again."""
        raise NotImplementedError

    def disconnect(self) -> None:
        """After its last."""
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
def connected(entry: Entry, warm_for: float, through: Callable[[URL], URL] = lambda url: url) -> Iterator[float]:
    """While its contender is connected and warm, with what it needs compiled, prepared and learned; its rate.

    Warming ends after ``warm_for`` seconds, or when each of its statements was sent often enough, for new messages too.
    """
    contender, stream = entry.contender, entry.stream
    turns: list[Turn] = []
    contender.connect(through(entry.place.by(contender.drivers[entry.place.engine])))
    try:
        end, enough = time.perf_counter() + warm_for, stream.new + 8 * contender.tasks
        while not turns or (time.perf_counter() < end and (len(turns) < 8 or stream.new < enough)):
            turns.append(_timed(contender, stream.take(_step(contender))))
        late = turns[len(turns) // 2 :]
        yield sum(turn.messages for turn in late) / sum(turn.seconds for turn in late)
    finally:
        contender.disconnect()


def _step(contender: Contender) -> int:
    return max(4, contender.batch * contender.tasks)


def _timed(contender: Contender, items: Sequence[Item]) -> Turn:
    messages = contender.messages(items)
    began, spent = time.perf_counter(), time.process_time()
    contender.deliver(messages)
    return Turn(len(items), time.perf_counter() - began, time.process_time() - spent)


def race(
    entries: Sequence[Entry], rounds: int, seconds: float, through: Callable[[URL], URL] = lambda url: url
) -> None:
    """Everybody delivers for about ``seconds`` in each round, in whole batches, in an order of the round's own.

    All stay connected. Turns are short, so that a slow second of the machine strikes all who are compared.
    """
    order = random.Random(rounds)
    with contextlib.ExitStack() as stack:
        counts: list[int] = []
        for entry in entries:
            progress(f"warming up: {len(counts) + 1} of {len(entries)}, {entry.contender.name}")
            rate, step = stack.enter_context(connected(entry, 20 * seconds, through)), _step(entry.contender)
            counts.append(step * ceil(rate * seconds / step))
        gc.collect()
        gc.freeze()  # or each would pay for what all the others hold
        stack.callback(gc.unfreeze)
        for number in range(rounds):
            progress(f"round {number + 1} of {rounds}")
            for entry, count in order.sample([*zip(entries, counts, strict=True)], len(entries)):
                entry.turns.append(_timed(entry.contender, entry.stream.take(count)))
    progress("")


def progress(line: str) -> None:
    """What is going on, for whoever waits; on stderr."""
    if sys.stderr.isatty():
        print(f"\r\033[K{line[:79]}", end="", file=sys.stderr, flush=True)
    elif line:
        print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Bench:
    """``quick`` tries everything out in about two minutes; its figures mean nothing."""

    postgresql: Server
    mariadb: Server | None = None
    quick: bool = False

    @property
    def seconds(self) -> float:
        """How long a turn takes, about."""
        return 0.01 if self.quick else 0.06

    def rounds(self, full: int) -> int:
        """How many of them."""
        return 1 if self.quick else full

    def size(self, full: int) -> int:
        """How many messages, markers, ..."""
        return full // 100 if self.quick else full
