"""Ask before a step that cannot be undone; where there is no terminal to ask on, the option --yes must answer."""

from __future__ import annotations

import sys

import click


def want_terminal() -> None:
    """Raise `click.UsageError` if there is no terminal on which somebody could answer."""
    if not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to ask on: say --yes")


def confirmed(question: str) -> bool:
    """Ask ``question`` on the terminal and return True if the answer is yes; no answer means no.

    Raises `click.UsageError` if there is no terminal.
    """
    want_terminal()
    return click.confirm(question, default=False, err=True)
