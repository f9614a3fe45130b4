"""Several processes at once: who loses updates, and what it costs not to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

from .. import contenders as who
from ..bench import Bench
from ..crew import Crew, Done
from ..harness import Quartiles, enter, progress
from ..messages import ROWS
from ..results import Plot, Section, Table

KEY = "workers"
_WORKERS = (1, 2, 4, 8)
_READ_MODELS = {"one of 100 rows": ROWS, "one hot row": 1}
_WHO = (
    who.BASE, who.DEFAULT, who.READ_MODELS, who.BASE_UPSERT, who.UPSERT, who.UPSERT_RC, who.SELECT_INSERT,
    who.ON_CONFLICT, who.CTE, who.PROTEAN,
)  # fmt: skip
Cell = tuple[str, str, int]
"""Contender, read model, workers."""


class _Found:
    """What became of the turns of one cell."""

    def __init__(self) -> None:
        self.turns: list[Done] = []
        self.found = self.expected = 0

    @property
    def rates(self) -> list[float]:
        """Messages a second, all workers together."""
        return [turn.messages / turn.seconds for turn in self.turns]

    @property
    def kept(self) -> str:
        """Of what was delivered."""
        return "right" if self.found == self.expected else f"{self.found / self.expected - 1:+.1%}"

    @property
    def raised(self) -> str:
        """Of all deliveries."""
        return f"{sum(turn.raised for turn in self.turns) / self.expected:.1%}"


def measure(bench: Bench) -> Section:
    """All new messages, shared out among worker processes."""
    everybody = who.on_engine("postgresql")
    names = [name for name in _WHO if name in everybody]
    cells: defaultdict[Cell, _Found] = defaultdict(_Found)
    with Crew(max(_WORKERS)) as crew:
        entries = {
            (name, kind): enter(bench.postgresql, everybody[name], kind, rows=rows, scattered=True)
            for name in names
            for kind, rows in _READ_MODELS.items()
        }
        rounds = bench.rounds(3)
        for number in range(rounds):
            for kind in _READ_MODELS:
                for workers in _WORKERS:
                    for name in names:
                        progress(f"round {number + 1} of {rounds}: {kind}, {workers} workers, {name}")
                        cell, entry = cells[name, kind, workers], entries[name, kind]
                        rate = cell.rates[-1] if cell.turns else 50 * workers
                        expected, total = entry.stream.new, entry.place.total()
                        cell.turns.append(
                            crew.deliver(entry, workers, max(8, round(rate * 8 * bench.seconds / workers)))
                        )
                        cell.expected += entry.stream.new - expected
                        cell.found += entry.place.total() - total
    progress("")
    section = Section(
        KEY,
        "Several workers",
        "Processes, each with one connection; every message new; a delivery that raises comes again, as a broker would "
        f"bring it (none did, where no table tells). Rates are divided by that of `{who.BASE}` with as many workers, "
        "in the same round (medians). eventsourcing is not among them: its position admits one consumer for each "
        "stream.",
        rounds={_label(*cell): found.rates for cell, found in cells.items()},
    )
    for kind, rows in _READ_MODELS.items():
        shown: dict[str, Callable[[Cell], str]] = {
            f"rate ÷ {who.BASE}": lambda cell: f"{_ratio(section, cell, cell[2]).middle:.2f}",
            "read model": lambda cell: cells[cell].kept,
        }
        if any(turn.raised for found in cells.values() for turn in found.turns):
            shown["deliveries that raised, of all"] = lambda cell: cells[cell].raised
        for title, show in shown.items():
            lines = [[name, *(show((name, kind, workers)) for workers in _WORKERS)] for name in names]
            section.tables.append(Table([f"{kind}, workers:", *map(str, _WORKERS)], lines, title))
        points = {
            name + _warning(cells, name, kind): [(float(w), *_ratio(section, (name, kind, w), 1)) for w in _WORKERS]
            for name in names
        }
        axis = f"rate ÷ {who.BASE}, 1 worker"
        section.plots.append(Plot(f"workers-{rows}", f"Workers on {kind}", axis, lines=points, x_axis="workers"))
    return section


def _warning(cells: Mapping[Cell, _Found], name: str, kind: str) -> str:
    """A rate is not worth much where updates are lost."""
    return "" if all(cells[name, kind, workers].kept == "right" for workers in _WORKERS) else " (WRONG)"


def _label(name: str, kind: str, workers: int) -> str:
    return f"{name}, {kind}, {workers}"


def _ratio(section: Section, cell: Cell, base_workers: int) -> Quartiles:
    found = section.ratio(_label(*cell), _label(who.BASE, cell[1], base_workers))
    assert found is not None
    return found
