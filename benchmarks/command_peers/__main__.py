"""Measure commands beside the peers, and print tables in Markdown: `make bench-commands`."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import platform
import random
import signal
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import NamedTuple

from sqlalchemy import event, make_url
from sqlalchemy.orm import Session

from suite.harness import progress, quartiles
from suite.servers import Place, Server, postgresql
from suite.wire import Wire

from .contenders import GROUPS, OF_THE_HANDLER, ROWS, Asked, Contender

PACKAGES = ("SQLAlchemy", "psycopg", "asyncpg", "fastapi", "idemkit", "fastidempotent", "dbos", "redis")
TRIPS = 50  # commands over which round trips are counted
LOGGED = 500  # commands over which bytes of log are counted
PATIENCE = 60.0  # seconds for which a caller asks again


@dataclass
class Entry:
    """A contender, its database, and what it was given."""

    contender: Contender
    place: Place
    redis: str | None
    given: int = 0

    @classmethod
    def of(cls, kind: type[Contender], server: Server, redis: str | None = None) -> Entry:
        """Give a contender a database with all that it needs."""
        entry = cls(kind(), server.place(), redis)
        entry.contender.create(entry.place)
        return entry

    def connect(self) -> None:
        """Open its connections."""
        self.contender.connect(self.place.url, self.redis)

    def ask(self, asked: Asked) -> None:
        """Have commands answered."""
        self.contender.ask(asked)
        self.given += len({key for key, _ in asked})

    def total(self) -> str:
        """Return whether each command was done once, by the rows."""
        off = self.place.total() - self.given
        return "right" if not off else f"{off:+,} of {self.given:,}"


def commands(number: int, known: int = 0) -> Asked:
    """Return commands; ``known`` of a hundred come with the key and the row of one before."""
    found: list[tuple[str, int]] = []
    for _ in range(number):
        again = found and random.random() * 100 < known
        found.append(random.choice(found) if again else (str(uuid.uuid4()), random.randrange(ROWS)))
    return found


def rates(entries: list[Entry], *, rounds: int, each: int, known: int) -> list[list[float]]:
    """Return the commands per second of each contender, in turns, round by round."""
    found: dict[str, list[float]] = {entry.contender.name: [] for entry in entries}
    for entry in entries:
        entry.connect()
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
    return list(found.values())


def trips(entry: Entry) -> str:
    """Return the round trips of a new command, and of one that comes again, to the database and to Redis."""
    cache = make_url(entry.redis) if entry.redis else entry.place.url
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


def log(entry: Entry) -> str:
    """Return the bytes of the write-ahead log for each new command, the handler's own included."""
    entry.connect()
    entry.ask(commands(LOGGED))
    entry.place.run("CHECKPOINT")
    entry.ask(commands(LOGGED))  # whole pages go into the log after a checkpoint
    windows = []
    for _ in range(5):  # a checkpoint of the server's own spoils one of them, and not the median
        before = _written(entry.place)
        entry.ask(commands(LOGGED // 5))
        windows.append((_written(entry.place) - before) / (LOGGED // 5))
    entry.contender.disconnect()
    return f"{statistics.median(windows):,.0f}"


def _written(place: Place) -> int:
    return place.ask("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')")


class Crashes(NamedTuple):
    """What became of commands whose worker was killed; the wait is in seconds."""

    killed: int
    twice: int
    unanswered: int
    waited: float


def crashes(entry: Entry, number: int) -> Crashes:
    """Have ``number`` commands killed after the commit, and ask for each again, in new processes, until it answers."""
    before, killed, answered, waits = entry.place.total(), 0, 0, []
    for one in commands(number):
        killed += _in_a_child(_killed, entry, [one]) == -signal.SIGKILL
        began = time.monotonic()
        answered += _in_a_child(_asked_again, entry, [one]) == 0
        waits.append(time.monotonic() - began)
    return Crashes(killed, entry.place.total() - before - number, number - answered, statistics.median(waits))


def _killed(entry: Entry, asked: Asked) -> None:
    entry.connect()

    @event.listens_for(Session, "after_commit")
    def _die(session: Session) -> None:
        if session.info.get(OF_THE_HANDLER):
            os.kill(os.getpid(), signal.SIGKILL)

    entry.contender.ask(asked)


def _asked_again(entry: Entry, asked: Asked) -> None:
    entry.connect()
    until = time.monotonic() + PATIENCE
    while True:
        try:
            entry.contender.ask(asked)
            return
        except Exception:  # refused for now, whatever its name is
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def _in_a_child(work: Callable[[Entry, Asked], None], entry: Entry, asked: Asked) -> int:
    """Do the work in a process of its own; return its exit code, negative if it was killed."""
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 1
        with contextlib.suppress(Exception):
            work(entry, asked)
            code = 0
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    """Measure what is asked for."""
    sections = ("crashes", "rates", "trips", "log")  # crashes first: they fork, and the peers leave threads behind
    parser = argparse.ArgumentParser(prog="make bench-commands", description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(sections)}; all by default")
    parser.add_argument(
        "--postgresql", help="URL; one from a wheel by default. Bytes of log want a server of one's own"
    )
    parser.add_argument("--redis", help="URL; without it, those who need it are left out")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--each", type=int, default=20, help="commands in a turn")
    parser.add_argument("--crashes", type=int, default=20)
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    with postgresql(arguments.postgresql) as server:
        random.seed(2013)  # not before: the server chooses its port at random
        versions = (f"{name} {metadata.version(name)}" for name in PACKAGES)
        print(", ".join([server.version, f"Python {platform.python_version()}", *versions]))
        print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        for section in sections:
            if section in (arguments.sections or sections):
                _section(section, server, arguments)
        print(f"load after: {os.getloadavg()[0]:.1f}")


def _section(section: str, server: Server, arguments: argparse.Namespace) -> None:
    headers = {
        "crashes": ["killed", "done twice", "never answered", "answered after, s"],
        "rates": ["ours ÷ contender, 0 % asked again", "totals", "90 % asked again", "totals"],
        "trips": ["round trips, new / again", "totals"],
        "log": ["bytes of log", "totals"],
    }
    _row(["measured", "contender", *headers[section]], before="\n")
    _row(["---"] * (2 + len(headers[section])))
    for group, kinds in GROUPS.items():
        able = [kind for kind in kinds if arguments.redis or not kind.with_redis]
        progress(f"{section}: {group}")
        for kind, cells in zip(able, _cells(section, able, server, arguments), strict=True):
            _row([group, kind.name, *cells])


def _cells(
    section: str, kinds: Sequence[type[Contender]], server: Server, arguments: argparse.Namespace
) -> list[list[str]]:
    if section == "rates":
        columns = [
            _ratios([Entry.of(kind, server, arguments.redis) for kind in kinds], arguments, known) for known in (0, 90)
        ]
        return [[*new, *again] for new, again in zip(*columns, strict=True)]
    cells = []
    for kind in kinds:
        entry = Entry.of(kind, server, arguments.redis if kind.with_redis else None)
        if section == "crashes":
            killed, twice, unanswered, waited = crashes(entry, arguments.crashes)
            cells.append([str(killed), str(twice), str(unanswered), f"{waited:.1f}"])
        else:
            cells.append([trips(entry) if section == "trips" else log(entry), entry.total()])
        server.drop(entry.place)
    return cells


def _ratios(entries: list[Entry], arguments: argparse.Namespace, known: int) -> list[list[str]]:
    found = rates(entries, rounds=arguments.rounds, each=arguments.each, known=known)
    return [
        [str(quartiles(ours / rate for ours, rate in zip(found[0], theirs, strict=True))), entry.total()]
        for entry, theirs in zip(entries, found, strict=True)
    ]


def _row(cells: Sequence[str], before: str = "") -> None:
    print(f"{before}| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
