"""Rates: everybody; with redeliveries; with a network in between; on SQLite and MariaDB."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

from sqlalchemy import create_engine, text

from .. import contenders as who
from ..contenders import orm
from ..harness import Bench, Entry, enter, race
from ..results import Plot, Section, Table, rounds_of, standings
from ..servers import Server, sqlite
from ..wire import Wire

_SHARES = (20, 90)
_DELAYS = (0.0005, 0.002)
_REDELIVERED = (
    who.BASE, who.DEFAULT, who.UPSERT, who.BATCH_100, who.BATCH_1000, who.ONE_STATEMENT, who.SELECT_INSERT,
    who.ON_CONFLICT, who.CTE, who.SET_BASED, who.PROTEAN, who.EVENTSOURCING,
)  # fmt: skip
_DUPLICATE = "deliver, duplicate"
_DELAYED = (who.BASE, who.DEFAULT, _DUPLICATE, who.BATCH_100, who.SELECT_INSERT, who.ON_CONFLICT, who.PROTEAN)
ON_ENGINES = (who.BASE, who.DEFAULT, who.BATCH_100, who.BATCH_1000, who.ROWS_ONCE, who.SELECT_INSERT)


def rates(bench: Bench) -> Section:
    """Every contender, one worker, every message new: divided by the same ORM code without deduplication."""
    everybody = who.on_engine("postgresql")
    entries = [enter(bench.postgresql, each) for each in everybody.values() if each.tasks == 1]
    race(entries, bench.rounds(40), bench.seconds)
    base = next(entry for entry in entries if entry.contender.name == who.BASE)
    tables, measured = [standings(entries, base)], rounds_of(entries)
    for driver in who.ASYNC:  # one after the other: each has 64 connections
        pair = [enter(bench.postgresql, everybody[name]) for name in (who.BASE_ASYNC[driver], who.ASYNC[driver])]
        race(pair, bench.rounds(40), 2 * bench.seconds)
        tables.append(standings(pair, pair[0]))
        measured |= rounds_of(pair)
    missing = "".join(f" Not there: {name} ({why})." for name, why in who.MISSING.items())
    singles, batches = ([e for e in entries if (e.contender.batch > 1) is many] for many in (False, True))
    return Section(
        "rates",
        "New messages, one worker",
        f"Rates divided by that of `{who.BASE}` in the same round, under asyncio (32 tasks and connections) by that of "
        "the same driver without deduplication. `CPU`: of the client, for each message." + missing,
        tables,
        [
            _bars("rates-single", "One message, one transaction", singles, base),
            _bars("rates-batch", "Batches", batches, base, logarithmic=True),
        ],
        measured,
    )


def _bars(file: str, title: str, entries: list[Entry], base: Entry, *, logarithmic: bool = False) -> Plot:
    bars = [(entry.contender.name, entry.ratios(base)) for entry in entries]
    return Plot(file, title, f"rate ÷ {who.BASE}", bars, marks={who.BASE: 1.0}, logarithmic_x=logarithmic)


def redeliveries(bench: Bench) -> Section:
    """Some messages come again: what a duplicate costs, and what it does to the read model of who cannot tell."""
    entries: dict[int, list[Entry]] = {}
    for share in _SHARES:
        everybody = who.on_engine("postgresql")
        entries[share] = [
            enter(bench.postgresql, everybody[name], f"{share}-", redelivered=share / 100)
            for name in _REDELIVERED
            if name in everybody
        ]
        race(entries[share], bench.rounds(40), bench.seconds)
    columns = [f"{share} %" for share in _SHARES]
    plot = _bars("redeliveries", "90 % redeliveries", entries[90], entries[90][0], logarithmic=True)
    plot.axis, plot.marks = f"rate ÷ {who.BASE}, which counts them all", {}
    return Section(
        "redeliveries",
        "Redeliveries",
        "With that probability, a message is one of the last 2,000 again. Rates are divided by that of "
        f"`{who.BASE}` at the same share, which applies every redelivery.",
        [Table(["rate ÷ no dedup, read model", *columns], _side_by_side(entries.values()))],
        [plot],
        {name: rate for share in _SHARES for name, rate in rounds_of(entries[share], f", {share} %").items()},
    )


def _side_by_side(races: Iterable[list[Entry]]) -> list[list[str]]:
    """A row for each contender, with a cell for each race: its ratio to the first one there, and its read model."""
    return [
        [row[0].contender.name, *(f"{e.ratios(race[0])}, {e.totals()}" for e, race in zip(row, races, strict=True))]
        for row in zip(*races, strict=True)
    ]


def distance(bench: Bench) -> Section:
    """The same race with a network in between, on PostgreSQL and on MariaDB."""
    section = Section(
        "distance",
        "With a network in between",
        f"A proxy delays each round trip. Rates are divided by that of `{who.BASE}`. `duplicate`: each message was "
        "applied before. `SELECT 1` took, directly and with the delays, ",
    )
    told: list[str] = []
    for server in filter(None, (bench.postgresql, bench.mariadb)):
        everybody = {**who.on_engine(server.engine), _DUPLICATE: orm.Deliver(_DUPLICATE)}
        entries: dict[float, list[Entry]] = {}
        took = [_round_trip(server)]
        for delay in _DELAYS:
            entries[delay] = [
                enter(server, everybody[name], f"{delay}-", redelivered=float(name == _DUPLICATE))
                for name in _DELAYED
                if name in everybody
            ]
            with Wire(server.url, delay) as wire:
                took.append(_round_trip(server, wire))
                race(entries[delay], bench.rounds(25), 4 * bench.seconds, wire.through)
            section.rounds |= rounds_of(entries[delay], f", {server.engine}, {_milliseconds(delay)}")
        columns = ["contender", *map(_milliseconds, _DELAYS)]
        section.tables.append(Table(columns, _side_by_side(entries.values()), server.version))
        *first, last = (f"{seconds * 1e6:,.0f}" for seconds in took)
        told.append(f"{', '.join(first)} and {last} µs on {server.version.split()[0]}")
    section.text += f"{', '.join(told)}."
    return section


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:g} ms"


def _round_trip(server: Server, wire: Wire | None = None) -> float:
    """Seconds for the smallest of statements."""
    engine = create_engine(wire.through(server.url) if wire else server.url, isolation_level="AUTOCOMMIT")
    seconds = []
    with engine.connect() as connection:
        for _ in range(300):
            began = time.perf_counter()
            connection.execute(text("SELECT 1"))
            seconds.append(time.perf_counter() - began)
    engine.dispose()
    return statistics.median(seconds)


def engines(bench: Bench) -> Section:
    """SQLite and MariaDB: the same handler, with and without deduplication."""
    section = Section(
        "engines",
        "SQLite and MariaDB",
        f"Rates divided by that of `{who.BASE}` on the same engine. SQLite: files, with a write-ahead log.",
    )
    with sqlite() as files:
        for server in filter(None, (files, bench.mariadb)):
            everybody = who.on_engine(server.engine)
            entries = [enter(server, everybody[name]) for name in ON_ENGINES]
            race(entries, bench.rounds(25), bench.seconds)
            table = standings(entries, entries[0])
            table.title = server.version
            section.tables.append(table)
            section.rounds |= rounds_of(entries, f", {server.version.split()[0]}")
    if bench.mariadb is None:
        section.text += " MariaDB was left out: no server was given (`--mariadb URL`)."
    return section
