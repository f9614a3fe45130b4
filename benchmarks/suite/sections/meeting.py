"""Messages that meet on rows: what it costs, how often handlers run, and what is lost without the library."""

from __future__ import annotations

from ..contenders.meeting import SHAPES, Delivered, Shape, Unprotected
from ..harness import Bench, Totals, enter, progress, race
from ..results import Section, Table, rounds_of

_ROUNDS = {1: 40, 8: 12}
"""By threads. With more of them a turn is longer, or the last of its messages would be much of it."""


def meeting(bench: Bench) -> Section:
    """Each shape by one thread and by eight: this library beside the same handler without it."""
    section = Section(
        "meeting",
        "Messages that meet",
        "Threads of one process; every message new. `÷ no dedup`: the rate of `deliver` by that of the same handler in "
        "`session.begin()` in the same round, which runs again after a unique violation or a deadlock. `runs`: of the "
        "handler, for each message.",
    )
    rows = [_row(bench, section, shape, threads) for shape in SHAPES for threads in _ROUNDS]
    columns = ["handler", "threads", "÷ no dedup", "msg/s", "runs", "deliver: read model", "no dedup: read model"]
    section.tables.append(Table(columns, rows))
    return section


def _row(bench: Bench, section: Section, shape: Shape, threads: int) -> list[str]:
    progress(f"{shape.name}, threads: {threads}")
    delivered, unprotected = Delivered(shape, threads), Unprotected(shape, threads)
    entries = [enter(bench.postgresql, each, scattered=True) for each in (delivered, unprotected)]
    race(entries, bench.rounds(_ROUNDS[threads]), threads * bench.seconds)
    section.rounds |= rounds_of(entries, f", {shape.name}, {threads}")
    ours, base = entries
    return [
        shape.name,
        str(threads),
        str(ours.ratios(base)),
        f"{ours.rate:,.0f}",
        f"{len(delivered.runs) / ours.stream.new:.2f}",
        *(str(Totals(entry.place.ask(shape.counted), entry.stream.new)) for entry in entries),
    ]
