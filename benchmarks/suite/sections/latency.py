"""The same race with a network in between: 0.5 ms more for each round trip."""

from __future__ import annotations

import statistics
import time

from sqlalchemy import create_engine, text

from .. import contenders as who
from ..bench import Bench
from ..harness import enter, race
from ..results import Plot, Section, rates, standings
from ..servers import Server
from ..wire import Wire

KEY = "latency"
_DELAY = 0.0005
_WHO = (
    who.BASE, who.DEFAULT, who.READ_MODELS, who.UPSERT, who.BATCH_100, who.BATCH_1000, who.SHARED_100, who.SHARED_1000,
    who.ROWS_ONCE, who.ONE_STATEMENT,
    who.BASE_ASYNC["asyncpg"], who.ASYNC["asyncpg"], who.SELECT_INSERT, who.ON_CONFLICT, who.CTE, who.SET_BASED,
    who.PROTEAN, who.EVENTSOURCING,
)  # fmt: skip


def measure(bench: Bench) -> Section:
    """Rates, through a proxy that waits."""
    everybody = who.on_engine("postgresql")
    entries = [enter(bench.postgresql, everybody[name]) for name in _WHO if name in everybody]
    with Wire(bench.postgresql.url) as direct, Wire(bench.postgresql.url, _DELAY) as wire:
        proxied, delayed = (_round_trip(bench.postgresql, each) for each in (direct, wire))
        race(entries, bench.rounds(25), 2 * bench.seconds, wire.through)
    text = (
        f"A proxy holds each round trip up. `SELECT 1` by psycopg took {_round_trip(bench.postgresql) * 1e6:,.0f} µs "
        f"directly, {proxied * 1e6:,.0f} µs through the proxy, {delayed * 1e6:,.0f} µs through it with the delay "
        "(medians): the 32 connections of an async contender also wait for their 32 proxies."
    )
    base = entries[0]
    bars = [(entry.contender.name, entry.ratios(base)) for entry in entries]
    plot = Plot(KEY, "With 0.5 ms added to each round trip", f"rate ÷ {who.BASE}", bars, logarithmic_x=True)
    return Section(KEY, "With 0.5 ms of latency", text, [standings(entries, base)], [plot], rates(entries))


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
