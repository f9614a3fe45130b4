"""Several processes at once: who loses updates, and what it costs not to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .. import contenders as who
from ..crew import Crew, Done
from ..harness import ROWS, Bench, Quartiles, enter, progress
from ..results import Plot, Section, Table

_WORKERS = (1, 2, 4, 8)
_READ_MODELS = {"one of 100 rows": ROWS, "one hot row": 1}
_WHO = (
    who.BASE, who.DEFAULT, who.READ_MODELS, who.BASE_UPSERT, who.UPSERT, who.UPSERT_RC, who.SELECT_INSERT,
    who.ON_CONFLICT, who.CTE, who.PROTEAN,
)  # fmt: skip
Cell = tuple[str, str, int]
"""Contender, read model, workers."""


@dataclass
class _Found:
    """What became of the turns of one cell."""

    turns: list[Done] = field(default_factory=list)
    found: int = 0
    expected: int = 0

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


def workers(bench: Bench) -> Section:
    """All new messages, shared out among worker processes."""
    everybody = who.on_engine("postgresql")
    names = [name for name in _WHO if name in everybody]
    cells = {(name, kind, count): _Found() for kind in _READ_MODELS for count in _WORKERS for name in names}
    with Crew(max(_WORKERS)) as crew:
        entries = {
            (name, kind): enter(bench.postgresql, everybody[name], kind, rows=rows, scattered=True)
            for name in names
            for kind, rows in _READ_MODELS.items()
        }
        for number in range(rounds := bench.rounds(3)):
            for (name, kind, count), cell in cells.items():
                progress(f"round {number + 1} of {rounds}: {kind}, {count} workers, {name}")
                entry = entries[name, kind]
                rate = cell.rates[-1] if cell.turns else 50 * count
                expected, total = entry.stream.new, entry.place.total()
                cell.turns.append(crew.deliver(entry, count, max(8, round(rate * 8 * bench.seconds / count))))
                cell.expected += entry.stream.new - expected
                cell.found += entry.place.total() - total
    progress("")
    section = Section(
        "workers",
        "Several workers",
        "Processes, each with one connection; every message new; a delivery that raises comes again, as a broker would "
        f"bring it (none did, where no table tells). Rates are divided by that of `{who.BASE}` with as many workers, "
        "in the same round (medians). eventsourcing is not among them: its position admits one consumer for each "
        "stream.",
        rounds={_label(*cell): found.rates for cell, found in cells.items()},
    )
    some_raised = any(turn.raised for found in cells.values() for turn in found.turns)
    for kind, rows in _READ_MODELS.items():

        def table(title: str, kind: str = kind) -> Table:
            shown: dict[str, Callable[[Cell], str]] = {
                f"rate ÷ {who.BASE}": lambda cell: f"{_ratio(section, cell, cell[2]).middle:.2f}",
                "read model": lambda cell: cells[cell].kept,
                "deliveries that raised, of all": lambda cell: cells[cell].raised,
            }
            lines = [[name, *(shown[title]((name, kind, count)) for count in _WORKERS)] for name in names]
            return Table([f"{kind}, workers:", *map(str, _WORKERS)], lines, title)

        section.tables += [table(f"rate ÷ {who.BASE}"), table("read model")]
        section.tables += [table("deliveries that raised, of all")] if some_raised else []
        lines = {}
        for name in names:
            wrong = any(cells[name, kind, count].kept != "right" for count in _WORKERS)  # a rate is not worth much then
            points = [(float(count), *_ratio(section, (name, kind, count), 1)) for count in _WORKERS]
            lines[name + (" (WRONG)" if wrong else "")] = points
        axis = f"rate ÷ {who.BASE}, 1 worker"
        section.plots.append(Plot(f"workers-{rows}", f"Workers on {kind}", axis, [], lines, "workers"))
    return section


def _label(name: str, kind: str, count: int) -> str:
    return f"{name}, {kind}, {count}"


def _ratio(section: Section, cell: Cell, base_workers: int) -> Quartiles:
    found = section.ratio(_label(*cell), _label(who.BASE, cell[1], base_workers))
    assert found is not None
    return found
