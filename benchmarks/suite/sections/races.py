"""Rates: everybody; with redeliveries; with a network in between; on SQLite and MariaDB."""

from __future__ import annotations

import statistics
import time

from sqlalchemy import create_engine, text

from .. import contenders as who
from ..harness import Bench, Entry, enter, race
from ..results import Plot, Section, Table, rounds_of, standings
from ..servers import Server, sqlite
from ..wire import Wire

_SHARES = (20, 90)
_DELAY = 0.0005
_REDELIVERED = (
    who.BASE, who.DEFAULT, who.UPSERT, who.BATCH_100, who.BATCH_1000, who.ONE_STATEMENT, who.SELECT_INSERT,
    who.ON_CONFLICT, who.CTE, who.SET_BASED, who.PROTEAN, who.EVENTSOURCING,
)  # fmt: skip
_DELAYED = (
    who.BASE, who.DEFAULT, who.READ_MODELS, who.UPSERT, who.BATCH_100, who.BATCH_1000, who.ROWS_ONCE, who.ONE_STATEMENT,
    who.BASE_ASYNC["asyncpg"], who.ASYNC["asyncpg"], who.SELECT_INSERT, who.ON_CONFLICT, who.CTE, who.SET_BASED,
    who.PROTEAN, who.EVENTSOURCING,
)  # fmt: skip
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
    rows = [list(each) for each in zip(*entries.values(), strict=True)]  # a contender, at each share
    found = [
        [f"{entry.ratios(entries[share][0])}, {entry.totals()}" for share, entry in zip(_SHARES, row, strict=True)]
        for row in rows
    ]
    names = [row[0].contender.name for row in rows]
    plot = _bars("redeliveries", "90 % redeliveries", entries[90], entries[90][0], logarithmic=True)
    plot.axis, plot.marks = f"rate ÷ {who.BASE}, which counts them all", {}
    return Section(
        "redeliveries",
        "Redeliveries",
        "With that probability, a message is one of the last 2,000 again. Rates are divided by that of "
        f"`{who.BASE}` at the same share, which applies every redelivery.",
        [
            Table(
                ["rate ÷ no dedup, read model", *columns],
                [[name, *cells] for name, cells in zip(names, found, strict=True)],
            )
        ],
        [plot],
        {name: rate for share in _SHARES for name, rate in rounds_of(entries[share], f", {share} %").items()},
    )


def latency(bench: Bench) -> Section:
    """The same race with a network in between: 0.5 ms more for each round trip."""
    everybody = who.on_engine("postgresql")
    entries = [enter(bench.postgresql, everybody[name]) for name in _DELAYED if name in everybody]
    with Wire(bench.postgresql.url) as direct, Wire(bench.postgresql.url, _DELAY) as wire:
        proxied, delayed = (_round_trip(bench.postgresql, each) for each in (direct, wire))
        race(entries, bench.rounds(25), 2 * bench.seconds, wire.through)
    told = (
        f"A proxy delays each round trip. `SELECT 1` by psycopg took {_round_trip(bench.postgresql) * 1e6:,.0f} µs "
        f"directly, {proxied * 1e6:,.0f} µs through the proxy, {delayed * 1e6:,.0f} µs with the delay (medians)."
    )
    plot = _bars("latency", "With 0.5 ms added to each round trip", entries, entries[0], logarithmic=True)
    plot.marks = {}
    table = standings(entries, entries[0])
    return Section("latency", "With 0.5 ms of latency", told, [table], [plot], rounds_of(entries))


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
