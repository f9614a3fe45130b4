"""What the commands print: tables and colours on a terminal, plain columns in a pipe, JSON for machines."""

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

from projector_dedup.upkeep import days, moment

from .options import Deployment

json_option = click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON document: a list with an object for each database that answered. What failed is on stderr.",
)


@contextmanager
def document(*, wanted: bool) -> Iterator[Callable[[Deployment, dict[str, Any]], None]]:
    """Yields what adds a deployment to the JSON document, which is printed in the end, also after a failure."""
    found: list[dict[str, Any]] = []
    try:
        yield lambda deployment, values: found.append({**_place(deployment), **values})
    finally:
        if wanted:
            click.echo(json.dumps(found, default=_plain, indent=2, ensure_ascii=False))


def _place(deployment: Deployment) -> dict[str, Any]:
    return {"database": deployment.database, "table": deployment.tables.marker.fullname}


def as_object(value: Any) -> dict[str, Any]:
    """A dataclass of the library's, for JSON."""
    return asdict(value)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    raise TypeError(f"{type(value).__name__} has no place in the JSON of a command")


def coloured(text: str, colour: str) -> str:
    """The text in a colour, which `click.echo` leaves to terminals, unless there is to be none (no-color.org)."""
    return text if os.environ.get("NO_COLOR") else click.style(text, fg=colour, bold=True)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """A table; the columns named in ``right`` are flush right."""
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
    """A moment, and how long ago it was."""
    return "-" if at is None else f"{moment(at)} ({days(now - at)} ago)"


def size(number: int | None) -> str:
    """Bytes, as people say them."""
    if number is None:
        return "unknown"
    value, units = float(number), ["bytes", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.{0 if units[0] == 'bytes' else 1}f} {units[0]}"


def markers(number: int) -> str:
    """So many markers."""
    return f"{number:,} marker{'' if number == 1 else 's'}"
