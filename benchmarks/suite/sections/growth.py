"""Does a message cost more with ten million markers?"""

from __future__ import annotations

from .. import contenders as who
from ..contenders.orm import IDENTITY
from ..harness import Bench, Entry, Stream, enter, progress, race
from ..results import Plot, Section, Table

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
        "Cost of a new message, divided by that with 10,000 markers in the same round. Random ids."
        + (f" Read models WRONG at {', '.join(wrong)}." if wrong else ""),
        [Table(["markers", *costs], rows)],
        [Plot("table-size", "Cost of a new message", "÷ cost at 10,000", [], lines, "markers", logarithmic_x=True)],
        {
            f"{size:,}": [turn.seconds / turn.messages for turn in one.turns]
            for size, one in zip(_SIZES, ours, strict=True)
        },
    )
