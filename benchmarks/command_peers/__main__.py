"""Measure commands beside the peers, and print tables in Markdown: `make bench-commands`."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import random
from collections.abc import Sequence
from importlib import metadata

from suite.harness import progress
from suite.servers import Server, postgresql

from . import crashes, races
from .contenders import GROUPS, Contender

PACKAGES = ("SQLAlchemy", "psycopg", "asyncpg", "fastapi", "idemkit", "fastidempotent", "dbos", "redis")


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(prog="command_peers", description=__doc__)
    parser.add_argument("sections", nargs="*", help="of rates, trips, log, crashes; all by default")
    parser.add_argument(
        "--postgresql", help="URL; one from a wheel by default. Bytes of log want a server of one's own"
    )
    parser.add_argument("--redis", help="URL; without it, those who need it are left out")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--each", type=int, default=20, help="commands in a turn")
    parser.add_argument("--crashes", type=int, default=20)
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    sections = arguments.sections or ["rates", "trips", "log", "crashes"]
    with postgresql(arguments.postgresql) as server:
        random.seed(2013)  # not before: the server chooses its port at random
        print(", ".join([server.version, f"Python {platform.python_version()}", *map(_version, PACKAGES)]))
        print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
        if "crashes" in sections:  # first: it forks, and the peers leave threads behind
            _crashes(server, arguments)
        if "rates" in sections:
            _rates(server, arguments)
        if {"trips", "log"} & set(sections):
            _counts(server, arguments, sections)
        print(f"load after: {os.getloadavg()[0]:.1f}")


def _kinds(group: str, redis: str | None) -> list[type[Contender]]:
    ours, others = GROUPS[group]
    return [ours, *(each for each in others if redis or not each.with_redis)]


def _rates(server: Server, arguments: argparse.Namespace) -> None:
    for group in GROUPS:
        rows = []
        kinds = _kinds(group, arguments.redis)
        for known in (0, 90):
            progress(f"{group}, {known} % asked again")
            entries = [races.entered(kind, server) for kind in kinds]
            found = races.rates(entries, arguments.redis, rounds=arguments.rounds, each=arguments.each, known=known)
            for entry in entries:
                name = entry.contender.name
                beside = races.ratio(found[kinds[0].name], found[name]) if name != kinds[0].name else "1"
                rows.append([f"{known} %", name, beside, entry.total()])
            for entry in entries:
                server.drop(entry.place)
        print(f"{group}:\n")
        _table(["asked again", "contender", "ours ÷ contender", "totals"], rows)


def _counts(server: Server, arguments: argparse.Namespace, sections: Sequence[str]) -> None:
    rows = []
    for group in GROUPS:
        for kind in _kinds(group, arguments.redis):
            progress(f"{kind.name}, counted")
            entry = races.entered(kind, server)
            redis = arguments.redis if kind.with_redis else None
            counted = races.trips(entry, redis) if "trips" in sections else "-"
            written = f"{races.log(entry, redis):,.0f}" if "log" in sections else "-"
            rows.append([group, kind.name, counted, written, entry.total()])
            server.drop(entry.place)
    _table(["measured", "contender", "round trips, new / again", "bytes of log", "totals"], rows)


def _crashes(server: Server, arguments: argparse.Namespace) -> None:
    rows = []
    for group in GROUPS:
        for kind in _kinds(group, arguments.redis):
            if not kind.name.startswith("no library"):
                progress(f"{kind.name}, killed")
                entry = races.entered(kind, server)
                rows.append([kind.name, *crashes.crashes(entry, arguments.redis, arguments.crashes).cells()])
                server.drop(entry.place)
    _table(["contender", "killed", "done twice", "never answered", "answered after"], rows)


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for cells in (headers, ["---"] * len(headers), *rows):
        print(f"| {' | '.join(cells)} |")
    print(flush=True)


def _version(package: str) -> str:
    return f"{package} {metadata.version(package)}"


if __name__ == "__main__":
    main()
