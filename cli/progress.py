"""Signs that a command works, on stderr, and only if that is a terminal: a count that grows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click


@contextmanager
def counting(verb: str) -> Iterator[Callable[[int], None] | None]:
    """Yield a function that adds to a count on the terminal, such as "Deleted 5,000 ..."; None without a terminal.

    It is drawn by rich, if that is installed.
    """
    if not sys.stderr.isatty():
        yield None
        return
    so_far = 0
    try:
        from rich.console import Console
    except ImportError:

        def add(more: int) -> None:
            nonlocal so_far
            so_far += more
            click.echo(f"\r{verb} {so_far:,} ...", nl=False, err=True)

        try:
            yield add
        finally:
            if so_far:
                click.echo(err=True)
        return
    with Console(stderr=True, highlight=False).status(f"{verb} 0 ...") as status:

        def show(more: int) -> None:
            nonlocal so_far
            so_far += more
            status.update(f"{verb} {so_far:,} ...")

        yield show
