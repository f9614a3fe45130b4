"""Several workers with batches that meet on rows which exist, or which they create."""

from __future__ import annotations

from ..contenders.batched import KEYS, SINGLE, SIZE, WAYS, Batches
from ..harness import Bench, enter, progress, race
from ..results import Section, Table, rounds_of

_WORKERS = (1, 4, 8)


def batched(bench: Bench) -> Section:
    """Each way with one, four and eight threads, beside single deliveries of one."""
    section = Section(
        "batches",
        "Several workers with batches",
        f"Threads of one process; every message new; batches of {SIZE}; {KEYS:,} rows in no order, or 2,000 new rows "
        "for each 4,000 messages. Divided by the rate of one worker with single deliveries in the same round. `runs`: "
        "of the handler, for each message.",
    )
    for creates in (False, True):
        kind = "rows are new" if creates else "rows exist"
        rows = []
        for way in WAYS:
            row = [way]
            for workers in _WORKERS:
                progress(f"{kind}: {way}, {workers}")
                one, many = Batches(SINGLE, 1, creates=creates), Batches(way, workers, creates=creates)
                entries = [
                    enter(bench.postgresql, each, label, rows=KEYS, scattered=True)
                    for label, each in (("one ", one), ("many ", many))
                ]
                race(entries, bench.rounds(5), 12 * bench.seconds)
                section.rounds |= rounds_of(entries[1:], f", {kind}")
                wrong = "" if entries[1].totals().right else f" {entries[1].totals()}"
                row.append(f"{entries[1].ratios(entries[0])}; {many.runs / entries[1].stream.new:.1f} runs{wrong}")
            rows.append(row)
        section.tables.append(Table([f"{kind}, workers:", *map(str, _WORKERS)], rows))
    return section
