"""Does a worker grow? The memory of a process over a million messages."""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import Connection

from .. import contenders as who
from ..bench import Bench
from ..harness import Totals, enter, progress
from ..messages import Stream
from ..results import Plot, Point, Section, Table

KEY = "memory"
_MESSAGES = {who.DEFAULT: 200_000, who.BATCH_1000: 1_000_000, who.ONE_STATEMENT: 1_000_000}
_LIMIT = 100.0  # seconds for each, which is told if it was not enough
_SAMPLES = 50


def measure(bench: Bench) -> Section:
    """Each in a fresh process."""
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
        KEY,
        "Memory of a worker",
        f"Resident memory in MB of a process of its own, after a tenth of the messages and after all. Each had "
        f"{_LIMIT:.0f} seconds at most.",
        [Table(["contender", "messages", "at 10 %", "at the end", "growth", "read model"], rows)],
        [Plot(KEY, "Memory of a worker", "resident MB", lines=lines, x_axis="messages")],
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
    from sqlalchemy import make_url

    contender, stream, process = who.on_engine("postgresql")[name], Stream(name), psutil.Process()
    step = max(contender.batch, messages // _SAMPLES // contender.batch * contender.batch)
    contender.connect(make_url(url))
    end = time.monotonic() + _LIMIT
    while stream.new < messages and time.monotonic() < end:
        for _ in range(0, step, max(contender.batch, 100)):
            contender.deliver(contender.messages(stream.take(max(contender.batch, 100))))
        connection.send((stream.new, process.memory_info().rss / 2**20))
    contender.disconnect()
