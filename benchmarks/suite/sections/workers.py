"""Several processes at once: who loses updates, and what it costs not to."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import make_url

from .. import contenders as who
from ..harness import ROWS, Bench, Entry, Item, Quartiles, enter, progress
from ..results import Plot, Section, Table

_WORKERS = (1, 2, 4, 8)
_READ_MODELS = {"one of 100 rows": ROWS, "one hot row": 1}
_WHO = (
    who.BASE, who.DEFAULT, who.READ_MODELS, who.BASE_UPSERT, who.UPSERT, who.UPSERT_RC, who.SELECT_INSERT,
    who.ON_CONFLICT, who.CTE, who.PROTEAN,
)  # fmt: skip
Cell = tuple[str, str, int]
"""Contender, read model, workers."""


_WARM = 4  # messages that each worker delivers before the clock runs
_barriers: dict[int, Any] = {}  # in a worker: where so many of them wait until all have connected


class _Done(NamedTuple):
    """What some workers did together."""

    messages: int
    seconds: float
    raised: int
    """Deliveries that raised, and came again as a broker would bring them."""


@dataclass
class _Found:
    """What became of the turns of one cell."""

    turns: list[_Done] = field(default_factory=list)
    found: int = 0
    expected: int = 0

    @property
    def rates(self) -> list[float]:
        """Messages a second, all workers together."""
        return [turn.messages / turn.seconds for turn in self.turns]

    @property
    def wrong(self) -> str:
        """What the read model has more or less than was delivered; empty if it is right."""
        return "" if self.found == self.expected else f", {self.found / self.expected - 1:+.1%}"

    @property
    def raised(self) -> str:
        """Of all deliveries."""
        return f"{sum(turn.raised for turn in self.turns) / self.expected:.1%}"


def workers(bench: Bench) -> Section:
    """All new messages, shared out among worker processes."""
    everybody = who.on_engine("postgresql")
    names = [name for name in _WHO if name in everybody]
    cells = {(name, kind, count): _Found() for kind in _READ_MODELS for count in _WORKERS for name in names}
    context = multiprocessing.get_context("spawn")
    barriers = {count: context.Barrier(count) for count in _WORKERS}
    with ProcessPoolExecutor(max(_WORKERS), context, _begin, (barriers,)) as processes:
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
                cell.turns.append(_deliver(processes, entry, count, max(8, round(rate * 8 * bench.seconds / count))))
                cell.expected += entry.stream.new - expected
                cell.found += entry.place.total() - total
    progress("")
    section = Section(
        "workers",
        "Several workers",
        "Processes, each with one connection; every message new; a delivery that raises comes again. Rates are divided "
        f"by that of `{who.BASE}` with as many workers in the same round. Beside it: what a wrong read model lacks.",
        rounds={_label(*cell): found.rates for cell, found in cells.items()},
    )
    rates, raised = f"rate ÷ {who.BASE}", "deliveries that raised, of all"
    some_raised = any(turn.raised for found in cells.values() for turn in found.turns)
    for kind, rows in _READ_MODELS.items():

        def table(title: str, kind: str = kind) -> Table:
            shown: dict[str, Callable[[Cell], str]] = {
                rates: lambda cell: f"{_ratio(section, cell, cell[2]).middle:.2f}{cells[cell].wrong}",
                raised: lambda cell: cells[cell].raised,
            }
            lines = [[name, *(shown[title]((name, kind, count)) for count in _WORKERS)] for name in names]
            return Table([f"{kind}, workers:", *map(str, _WORKERS)], lines, title)

        section.tables += [table(rates), *([table(raised)] if some_raised else [])]
        lines = {}
        for name in names:
            wrong = any(cells[name, kind, count].wrong for count in _WORKERS)  # a rate is not worth much then
            points = [(float(count), *_ratio(section, (name, kind, count), 1)) for count in _WORKERS]
            lines[name + (" (WRONG)" if wrong else "")] = points
        axis = f"rate ÷ {who.BASE}, 1 worker"
        section.plots.append(Plot(f"workers-{rows}", f"Workers on {kind}", axis, [], lines, "workers"))
    return section


def _deliver(processes: ProcessPoolExecutor, entry: Entry, count: int, each: int) -> _Done:
    """Have ``each`` messages delivered by each of so many workers, who begin together."""
    place = entry.place.by(entry.contender.drivers[entry.place.engine]).render_as_string(hide_password=False)
    name, stream = entry.contender.name, entry.stream
    running = [processes.submit(_work, name, place, stream.take(_WARM + each), count) for _ in range(count)]
    began, ended, raised = zip(*(worker.result() for worker in running), strict=True)
    return _Done(count * each, max(ended) - min(began), sum(raised))


_mine = cache(who.on_engine)  # in a worker: everybody, made once


def _begin(barriers: dict[int, Any]) -> None:
    _mine("postgresql")  # takes seconds
    _barriers.update(barriers)


def _work(name: str, url: str, items: Sequence[Item], count: int) -> tuple[float, float, int]:
    """Run in a worker: return when it began and ended, by the clock of the machine, and the deliveries that raised."""
    contender = _mine("postgresql")[name]
    contender.connect(make_url(url))
    messages = [contender.messages([item]) for item in items]
    _one_by_one(contender.deliver, messages[:_WARM])
    _barriers[count].wait(60)
    began = time.monotonic()
    raised = _one_by_one(contender.deliver, messages[_WARM:])
    ended = time.monotonic()
    contender.disconnect()
    return began, ended, raised


def _one_by_one(deliver: Callable[[Any], None], messages: Sequence[Any]) -> int:
    """Deliver messages; what raises is delivered again, until it does not. Return how often that was."""
    raised = 0
    for message in messages:
        while True:
            try:
                deliver(message)
                break
            except Exception:  # as a consumer would: not acknowledged, so it comes again
                raised += 1
                if raised > 100 * len(messages):
                    raise
    return raised


def _label(name: str, kind: str, count: int) -> str:
    return f"{name}, {kind}, {count}"


def _ratio(section: Section, cell: Cell, base_workers: int) -> Quartiles:
    found = section.ratio(_label(*cell), _label(who.BASE, cell[1], base_workers))
    assert found is not None
    return found
