"""Does a message cost more with ten million markers, and does a worker grow over a million messages?"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

from sqlalchemy import make_url

from .. import contenders as who
from ..contenders.orm import IDENTITY
from ..harness import Bench, Entry, Stream, Totals, enter, progress, race
from ..results import Plot, Point, Section, Table

_SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
FILL = (
    "ALTER TABLE processed_message DROP CONSTRAINT pk_processed_message",
    "DROP INDEX ix_processed_message_processed_at",
    f"INSERT INTO processed_message (message_id, handler, processed_at) SELECT CAST(CAST(md5(CAST(n AS text)) AS uuid)"
    f" AS text), '{IDENTITY}', now() - n * interval '50 milliseconds' FROM generate_series(1, {{size}}) n",
    "SET maintenance_work_mem = '512MB'",
    "ALTER TABLE processed_message ADD CONSTRAINT pk_processed_message PRIMARY KEY (message_id, handler)",
    "CREATE INDEX ix_processed_message_processed_at ON processed_message (processed_at)",
    "VACUUM ANALYZE processed_message",
    "CHECKPOINT",
)
_MESSAGES = {who.DEFAULT: 200_000, who.BATCH_1000: 1_000_000, who.ONE_STATEMENT: 1_000_000}
_LIMIT = 100.0  # seconds for each, which is told if it was not enough
_SAMPLES = 50


def table_size(bench: Bench) -> Section:
    """Ours and the barest, in the same databases; cost is the inverse of the rate."""
    ours: list[Entry] = []
    bare: list[Entry] = []
    for size in _SIZES:
        everybody = who.on_engine("postgresql")
        ours.append(enter(bench.postgresql, everybody[who.DEFAULT], f"{size}-"))
        progress(f"filling in {bench.size(size):,} markers")
        ours[-1].place.run(*(statement.format(size=bench.size(size)) for statement in FILL))
        bare.append(Entry(everybody[who.CTE], ours[-1].place, Stream(f"{size}-raw")))
    race([*ours, *bare], bench.rounds(40), bench.seconds)
    wrong = []
    for size, one, other in zip(_SIZES, ours, bare, strict=True):
        if one.place.total() != one.stream.new + other.stream.new:
            wrong.append(f"{size:,}")
        bench.postgresql.drop(one.place)
    costs = {name: [each[0].ratios(one) for one in each] for name, each in ((who.DEFAULT, ours), (who.CTE, bare))}
    rows = [[f"{size:,}", *(str(found[at]) for found in costs.values())] for at, size in enumerate(_SIZES)]
    lines = {
        name: [(float(size), *cost) for size, cost in zip(_SIZES, found, strict=True)] for name, found in costs.items()
    }
    return Section(
        "table-size",
        "Cost against the number of markers",
        "Cost of a new message with so many markers in the table, divided by that with 10,000 in the same round. Ids "
        f"in random order. Read models: {'WRONG at ' + ', '.join(wrong) if wrong else 'right'}.",
        [Table(["markers", *costs], rows)],
        [Plot("table-size", "Cost of a new message", "÷ cost at 10,000", [], lines, "markers", logarithmic_x=True)],
        {
            f"{size:,}": [turn.seconds / turn.messages for turn in one.turns]
            for size, one in zip(_SIZES, ours, strict=True)
        },
    )


def memory(bench: Bench) -> Section:
    """The memory of a process over a million messages: each contender in a fresh one."""
    rows, lines = [], {}
    for name, full in _MESSAGES.items():
        entry = enter(bench.postgresql, who.on_engine("postgresql")[name])
        url = entry.place.url.render_as_string(hide_password=False)
        mine, theirs = multiprocessing.Pipe()
        arguments = (theirs, name, url, bench.size(full))
        process = multiprocessing.get_context("spawn").Process(target=_work, args=arguments, daemon=True)
        process.start()
        theirs.close()
        points = _samples(mine, name)
        process.join()
        delivered = int(points[-1][0])
        totals = Totals(entry.place.total(), delivered)
        bench.postgresql.drop(entry.place)
        first, last = points[len(points) // 10][1], points[-1][1]
        rows.append([name, f"{delivered:,}", f"{first:.1f}", f"{last:.1f}", f"{last - first:+.1f}", str(totals)])
        lines[name] = points
    return Section(
        "memory",
        "Memory of a worker",
        f"Resident memory in MB of a process of its own, after a tenth of the messages and after all. Each had "
        f"{_LIMIT:.0f} seconds at most.",
        [Table(["contender", "messages", "at 10 %", "at the end", "growth", "read model"], rows)],
        [Plot("memory", "Memory of a worker", "resident MB", [], lines, "messages")],
        {name: [point[1] for point in points] for name, points in lines.items()},
    )


def _samples(connection: Connection, name: str) -> list[Point]:
    points: list[Point] = []
    while True:
        try:
            delivered, size = connection.recv()
        except EOFError:
            progress("")
            return points
        progress(f"{name}: {delivered:,} messages, {size:.1f} MB")
        points.append((delivered, size, size, size))


def _work(connection: Connection, name: str, url: str, messages: int) -> None:
    import psutil

    contender, stream, process = who.on_engine("postgresql")[name], Stream(name), psutil.Process()
    step = max(contender.batch, messages // _SAMPLES // contender.batch * contender.batch)
    contender.connect(make_url(url))
    end = time.monotonic() + _LIMIT
    while stream.new < messages and time.monotonic() < end:
        for _ in range(0, step, max(contender.batch, 100)):
            contender.deliver(contender.messages(stream.take(max(contender.batch, 100))))
        connection.send((stream.new, process.memory_info().rss / 2**20))
    contender.disconnect()
