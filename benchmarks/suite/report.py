"""A run as text: RESULTS.md, and each part of it on the terminal."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from . import targets
from .results import Run, Section, Table

_SAID_ONCE = re.compile(r"(, )?[\d,]+ right$| \((?P<same>[\d.]+)\.\.(?P=same)\)$")
"""A read model that is right, and quartiles that are equal: the head of the report says so, and no table repeats it."""

_ONLY_IN_JSON = ("msg/s",)
"""Columns that mean nothing outside of their run."""


def markdown(run: Run, pictures: Path) -> str:
    """RESULTS.md. ``pictures`` is where the plots are, as seen from there."""
    return "\n".join(_lines(run, pictures)) + "\n"


def _lines(run: Run, pictures: Path) -> Iterator[str]:
    yield "# Results"
    yield ""
    yield "Written by `make bench`; [how it measures](README.md). Only ratios within one run mean anything: medians"
    yield "(quartiles). A read model is right unless its table says how many messages it lacks (`-`) or counts twice"
    yield "(`+`). Rates and every round are in `results/results.json`. `R. C.`: READ COMMITTED."
    yield ""
    if run.quick:
        yield "**A quick run: its figures mean nothing.**"
        yield ""
    yield from textwrap.wrap("; ".join(f"{name}: {value}" for name, value in run.machine.items()) + ".", 120)
    yield ""
    for name, why in run.failed.items():
        yield f"**`{name}` failed**: {why}"
        yield ""
    yield from target_lines(run)
    for section in run.sections:
        yield from section_lines(section, pictures)


def target_lines(run: Run) -> Iterator[str]:
    """What was promised."""
    yield "## Targets"
    yield ""
    yield "Set before anything was measured: PostgreSQL, psycopg 3, defaults. `met` is by the median."
    yield ""
    yield from _table(targets.table(run))


def section_lines(section: Section, pictures: Path) -> Iterator[str]:
    """One section."""
    yield f"## {section.title}"
    yield ""
    yield from textwrap.wrap(section.text, 120)
    yield ""
    before: Table | None = None
    for table in _joined(section.tables):
        if table.title and not (before and before.title == table.title):
            yield f"{table.title}:"
            yield ""
        yield from _table(table)
        before = table
    for plot in section.plots:
        yield f"![{plot.title}]({(pictures / plot.file).as_posix()}.svg)"
        yield ""


def _joined(tables: list[Table]) -> Iterator[Table]:
    """Tables of one head, one below the other, are one table."""
    for (title, columns), alike in groupby(tables, key=lambda table: (table.title, table.columns)):
        yield Table(columns, [row for table in alike for row in table.rows], title)


def _table(table: Table) -> Iterator[str]:
    columns, *rows = _columns_with_news([table.columns, *_together(table.rows)])
    yield f"| {' | '.join(columns)} |"
    yield f"|{'|'.join(['---', *['---:'] * (len(columns) - 1)])}|"
    for before, row in zip([columns, *rows], rows, strict=False):
        name = row[0] if row[0] != before[0] else ""
        yield f"| {' | '.join([name, *row[1:]])} |"
    yield ""


def _together(rows: list[list[str]]) -> list[list[str]]:
    """Leave out what the head of the report says, and put rows whose cells are all equal into one, with their names."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in rows:
        names.setdefault(tuple(_SAID_ONCE.sub("", cell) for cell in cells), []).append(name)
    return [["; ".join(those), *cells] for cells, those in names.items()]


def _columns_with_news(lines: list[list[str]]) -> list[list[str]]:
    columns, *rows = lines
    kept = [at for at, name in enumerate(columns) if name not in _ONLY_IN_JSON and any(row[at] for row in rows)]
    return [[line[at] for at in kept] for line in lines]
