"""Does a message cost more when there are ten million markers?"""

from __future__ import annotations

from .. import contenders as who
from ..bench import Bench
from ..contenders.library import IDENTITY
from ..harness import Entry, Quartiles, enter, progress, race
from ..messages import Stream
from ..results import Plot, Section, Table
from ..servers import Place

KEY = "table-size"
_SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
_FILL = (
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


def measure(bench: Bench) -> Section:
    """Ours and the barest, in the same databases; cost is the inverse of the rate."""
    entries: dict[tuple[str, int], Entry] = {}
    for size in _SIZES:
        everybody = who.on_engine("postgresql")
        ours = enter(bench.postgresql, everybody[who.DEFAULT], f"{size}-")
        _fill(ours.place, bench.size(size))
        entries[who.DEFAULT, size] = ours
        entries[who.CTE, size] = Entry(everybody[who.CTE], ours.place, Stream(f"{size}-raw"))
    race(list(entries.values()), bench.rounds(40), bench.seconds)
    wrong = [f"{size:,}" for size in _SIZES if not _right(entries, size)]
    for size in _SIZES:
        bench.postgresql.drop(entries[who.DEFAULT, size].place)
    costs = {name: [_cost(entries, name, size) for size in _SIZES] for name in (who.DEFAULT, who.CTE)}
    rows = [[f"{size:,}", *(str(costs[name][at]) for name in costs)] for at, size in enumerate(_SIZES)]
    points = {
        name: [(float(size), *cost) for size, cost in zip(_SIZES, found, strict=True)] for name, found in costs.items()
    }
    return Section(
        KEY,
        "Cost against the number of markers",
        "Cost of a new message with so many markers in the table, divided by that with 10,000 in the same round. Ids "
        f"in random order. Read models: {'WRONG at ' + ', '.join(wrong) if wrong else 'right'}.",
        [Table(["markers", *costs], rows)],
        [Plot(KEY, "Cost of a new message", "÷ cost at 10,000", lines=points, x_axis="markers", logarithmic_x=True)],
        {f"{size:,}": [turn.seconds / turn.messages for turn in entries[who.DEFAULT, size].turns] for size in _SIZES},
    )


def _fill(place: Place, size: int) -> None:
    progress(f"filling in {size:,} markers")
    place.run(*(statement.format(size=size) for statement in _FILL))


def _cost(entries: dict[tuple[str, int], Entry], name: str, size: int) -> Quartiles:
    return entries[name, _SIZES[0]].ratios(entries[name, size])


def _right(entries: dict[tuple[str, int], Entry], size: int) -> bool:
    both = [entries[name, size] for name in (who.DEFAULT, who.CTE)]
    return both[0].place.total() == sum(entry.stream.new for entry in both)
