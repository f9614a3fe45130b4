"""A question before what cannot be undone; where there is no terminal, the command line must answer it."""

from __future__ import annotations

import sys

import click


def want_terminal() -> None:
    """Raise a usage error where nobody could answer."""
    if not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to ask on: say --yes")


def confirmed(question: str) -> bool:
    """What somebody at the terminal says."""
    want_terminal()
    return click.confirm(question, default=False, err=True)
