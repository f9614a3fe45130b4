"""Rates, in turns: of each round, the ratio of ours to each of the others."""

from __future__ import annotations

import random
import statistics
import time
import uuid
from dataclasses import dataclass

from sqlalchemy import make_url

from suite.servers import Place, Server
from suite.wire import Wire

from . import model
from .contenders import Asked, Contender

TRIPS = 50  # commands over which round trips are counted
LOGGED = 500  # commands over which bytes of log are counted


@dataclass
class Entry:
    """A contender, its database, and what it was given."""

    contender: Contender
    place: Place
    given: int = 0

    def ask(self, asked: Asked) -> None:
        """Have commands answered."""
        self.contender.ask(asked)
        self.given += len({key for key, _ in asked})

    def total(self) -> str:
        """Return whether each command was done once, by the rows."""
        off = self.place.total() - self.given
        return "right" if not off else f"{off:+,} of {self.given:,}"


def entered(kind: type[Contender], server: Server) -> Entry:
    """Give a contender a database with all that it needs."""
    contender, place = kind(), server.place()
    model.create(place)
    contender.create(place)
    return Entry(contender, place)


def commands(number: int, known: int = 0) -> Asked:
    """Return commands; ``known`` of a hundred come with the key and the row of one before."""
    found: list[tuple[str, int]] = []
    for _ in range(number):
        again = found and random.random() * 100 < known
        found.append(random.choice(found) if again else (str(uuid.uuid4()), random.randrange(model.ROWS)))
    return found


def rates(entries: list[Entry], redis: str | None, *, rounds: int, each: int, known: int) -> dict[str, list[float]]:
    """Return the commands per second of each contender, round by round."""
    found: dict[str, list[float]] = {entry.contender.name: [] for entry in entries}
    for entry in entries:
        entry.contender.connect(entry.place.url, redis)
        entry.ask(commands(2 * each))
    for _ in range(rounds):
        for entry in random.sample(entries, len(entries)):
            asked = commands(each, known)
            began = time.perf_counter()
            entry.contender.ask(asked)
            found[entry.contender.name].append(each / (time.perf_counter() - began))
            entry.given += len({key for key, _ in asked})
    for entry in entries:
        entry.contender.disconnect()
    return found


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Return the median of the ratios of each round, with the quartiles."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def trips(entry: Entry, redis: str | None) -> str:
    """Return the round trips of a new command, and of one that comes again, to the database and to Redis."""
    cache = make_url(redis) if redis else entry.place.url
    with Wire(entry.place.url) as wire, Wire(cache) as other:
        through = other.through(cache).render_as_string(hide_password=False)
        entry.contender.connect(wire.through(entry.place.url), through)
        asked = commands(TRIPS)
        entry.ask(commands(TRIPS))
        counted = []
        for _ in ("new", "again"):
            before = wire.trips + other.trips
            entry.contender.ask(asked)
            counted.append((wire.trips + other.trips - before) / TRIPS)
        entry.given += TRIPS
        entry.contender.disconnect()
    return " / ".join(f"{number:.1f}" for number in counted)


def log(entry: Entry, redis: str | None) -> float:
    """Return the bytes of the write-ahead log for each new command, the handler's own included."""
    entry.contender.connect(entry.place.url, redis)
    entry.ask(commands(LOGGED))
    entry.place.run("CHECKPOINT")
    entry.ask(commands(LOGGED))  # whole pages go into the log after a checkpoint
    windows = []
    for _ in range(5):  # a checkpoint of the server's own spoils one of them, and not the median
        before = _written(entry.place)
        entry.ask(commands(LOGGED // 5))
        windows.append((_written(entry.place) - before) / (LOGGED // 5))
    entry.contender.disconnect()
    return statistics.median(windows)


def _written(place: Place) -> int:
    return place.ask("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')")
