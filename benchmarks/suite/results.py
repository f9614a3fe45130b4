"""What a section found: text, tables, plots, and the figures of each round. All of it can be written as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field

from .harness import Entry, Quartiles, quartiles

Point = tuple[float, float, float, float]
"""x, and the quartiles of y."""


@dataclass
class Table:
    """Rows of text; the first column is left-aligned, the others right."""

    columns: list[str]
    rows: list[list[str]]
    title: str = ""


@dataclass
class Plot:
    """Bars (a label and quartiles each) or lines (points over x); ``file`` is its name without ``.svg``."""

    file: str
    title: str
    axis: str
    bars: list[tuple[str, Quartiles]] = field(default_factory=list)
    lines: dict[str, list[Point]] = field(default_factory=dict)
    x_axis: str = ""
    logarithmic_x: bool = False
    marks: dict[str, float] = field(default_factory=dict)


@dataclass
class Section:
    """One chapter of the report."""

    key: str
    title: str
    text: str
    tables: list[Table] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    rounds: dict[str, list[float]] = field(default_factory=dict)
    """By label: a rate, or whatever was counted, in each round."""

    def ratio(self, label: str, base: str) -> Quartiles | None:
        """Of two labels, round by round; None where one of them was not there."""
        if label not in self.rounds or base not in self.rounds:
            return None
        return quartiles(a / b for a, b in zip(self.rounds[label], self.rounds[base], strict=True))

    def difference(self, label: str, base: str) -> Quartiles | None:
        """The same, subtracted."""
        if label not in self.rounds or base not in self.rounds:
            return None
        return quartiles(a - b for a, b in zip(self.rounds[label], self.rounds[base], strict=True))


@dataclass
class Run:
    """A whole run."""

    machine: dict[str, str]
    quick: bool
    sections: list[Section] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """For ``results.json``."""
        return json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False) + "\n"


def standings(entries: list[Entry], base: Entry) -> Table:
    """Who was how fast, at what cost, and whether the read model is right."""
    return Table(
        ["contender", "÷ base", "msg/s", "CPU µs", "read model"],
        [
            [
                entry.contender.name,
                str(entry.ratios(base)),
                f"{entry.rate:,.0f}",
                f"{entry.cpu:,.0f}",
                str(entry.totals()),
            ]
            for entry in entries
        ],
    )


def rounds_of(entries: list[Entry], suffix: str = "") -> dict[str, list[float]]:
    """For ``Section.rounds``."""
    return {entry.contender.name + suffix: [turn.rate for turn in entry.turns] for entry in entries}
