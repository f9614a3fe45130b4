"""A run as text: aligned columns for a terminal, and RESULTS.md."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from . import targets
from .results import Run, Section, Table

WIDTH = 80


def on_terminal(section: Section) -> str:
    """A section, at 80 columns."""
    parts = [f"\n{section.title}\n{'=' * len(section.title)}", textwrap.fill(section.text, WIDTH)]
    parts += [_columns(table) for table in section.tables]
    return "\n\n".join(parts)


def targets_on_terminal(run: Run) -> str:
    """What was promised."""
    return "\nTargets\n=======\n\n" + _columns(targets.table(run))


def _columns(table: Table) -> str:
    lines = [table.columns, *table.rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(table.columns))]
    text = "\n".join(
        "  ".join(
            cell.rjust(width) if at else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
    return f"{table.title}\n\n{text}" if table.title else text


def markdown(run: Run, pictures: Path) -> str:
    """RESULTS.md. ``pictures`` is where the plots are, as seen from there."""
    return "\n".join(_lines(run, pictures)) + "\n"


def _lines(run: Run, pictures: Path) -> Iterator[str]:
    yield "# Results"
    yield ""
    yield "Written by `make bench`; [how it measures](README.md). Only ratios within one run mean anything."
    yield ""
    if run.quick:
        yield "**A quick run: its figures mean nothing.**"
        yield ""
    yield from _table(Table(["", ""], [[name, value] for name, value in run.machine.items()]))
    for name, why in run.failed.items():
        yield f"**`{name}` failed**: {why}"
        yield ""
    yield "## Targets"
    yield ""
    yield "Set before anything was measured: PostgreSQL, psycopg 3, defaults, every guard on. `met` is by the median."
    yield ""
    yield from _table(targets.table(run))
    for section in run.sections:
        yield f"## {section.title}"
        yield ""
        yield from textwrap.wrap(section.text, 120)
        yield ""
        if section.date not in ("", run.machine.get("date")):
            yield f"Measured before the others, on {section.date}."
            yield ""
        for table in section.tables:
            yield from _table(table)
        for plot in section.plots:
            yield f"![{plot.title}]({(pictures / plot.file).as_posix()}.svg)"
            yield ""


def _table(table: Table) -> Iterator[str]:
    if table.title:
        yield f"{table.title}:"
        yield ""
    yield f"| {' | '.join(table.columns)} |"
    yield f"|{'|'.join(['---', *['---:'] * (len(table.columns) - 1)])}|"
    for row in table.rows:
        yield f"| {' | '.join(row)} |"
    yield ""
