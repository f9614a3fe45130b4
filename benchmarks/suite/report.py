"""A run as text: RESULTS.md, and each part of it on the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from . import targets
from .results import Run, Section, Table


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
    yield from target_lines(run)
    for section in run.sections:
        yield from section_lines(section, pictures)


def target_lines(run: Run) -> Iterator[str]:
    """What was promised."""
    yield "## Targets"
    yield ""
    yield "Set before anything was measured: PostgreSQL, psycopg 3, defaults, every guard on. `met` is by the median."
    yield ""
    yield from _table(targets.table(run))


def section_lines(section: Section, pictures: Path) -> Iterator[str]:
    """One section."""
    yield f"## {section.title}"
    yield ""
    yield from textwrap.wrap(section.text, 120)
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
