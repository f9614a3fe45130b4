"""Print the results of commands: tables and colours on a terminal, plain columns in a pipe, JSON for machines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

import click

from projector_dedup.maintenance.times import duration, moment_with_zone

from .options import Deployment

json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON document: a list with an object for each database that answered. What failed is on stderr.",
)


@contextmanager
def document(*, wanted: bool) -> Iterator[Callable[[Deployment, dict[str, Any]], None]]:
    """Yield a function that adds an object about one deployment to a JSON document.

    If ``wanted``, the document is printed after the block, also where the block failed.
    """
    found: list[dict[str, Any]] = []
    try:
        yield lambda deployment, values: found.append({**_place(deployment), **values})
    finally:
        if wanted:
            click.echo(json.dumps(found, default=_plain, indent=2, ensure_ascii=False))


def _place(deployment: Deployment) -> dict[str, Any]:
    return {"database": deployment.database, "table": deployment.tables.marker.fullname}


def as_object(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, for JSON."""
    return asdict(value)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    raise TypeError(f"{type(value).__name__} has no place in the JSON of a command")


def coloured(text: str, colour: str) -> str:
    """Return the text in a colour, unless the environment has NO_COLOR (no-color.org).

    `click.echo` removes the colour again where it does not print to a terminal.
    """
    return text if os.environ.get("NO_COLOR") else click.style(text, fg=colour, bold=True)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print a table, by rich on a terminal if it is installed; the columns named in ``right`` are aligned right."""
    if sys.stdout.isatty() and _by_rich(headers, rows, right):
        return
    widths = [max(len(cell) for cell in column) for column in zip(headers, *rows, strict=True)]
    for line in (headers, *rows):
        cells = [
            cell.rjust(width) if header in right else cell.ljust(width)
            for cell, width, header in zip(line, widths, headers, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def _by_rich(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> bool:
    try:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        return False
    drawn = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for header in headers:
        drawn.add_column(header, justify="right" if header in right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    Console(highlight=False).print(drawn)
    return True


def ago(at: datetime | None, now: datetime) -> str:
    """Return a moment and how long before ``now`` it was; "-" for None."""
    return "-" if at is None else f"{moment_with_zone(at)} ({duration(now - at)} ago)"


def size(number: int | None) -> str:
    """Return a number of bytes in a readable unit, such as "1.5 MB"; "unknown" for None."""
    if number is None:
        return "unknown"
    value, units = float(number), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.{0 if units[0] == 'bytes' else 1}f} {units[0]}"
