"""The output of the command: tables, JSON, progress, questions, signals, and errors in one line with the remedy."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from types import FrameType
from typing import IO, Any

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from projector_dedup.errors import ProjectorDedupError
from projector_dedup.message import printable, traced

_WIDTH = 80  # columns of a terminal that does not report its width
_IN_A_PIPE = 10_000  # columns, so that a row is one line
_INSISTING = 3  # signals after which the command stops at once

# A text of click, a driver or an application may contain a URL, and a URL may contain a password with any character.
_SECRET = re.compile(r"\S*://.*|((?:password|passwd|passphrase)\s*[=:])(?!\s*(?:YES|NO)\)).*", re.IGNORECASE)

json_option = click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")


class Failed(click.ClickException):
    """The command failed. The text tells the user what to do."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the text to stderr, or to ``file``."""
        stream = file or sys.stderr
        click.echo(fitted(f"Error: {self.message}", stream), file=stream)


def without_secrets(text: str) -> str:
    """Return a foreign text with `***` instead of each URL or password and the rest of its line."""
    return _SECRET.sub(lambda found: f"{found[1] or ''}***", text)


def reason(error: BaseException) -> str:
    """Return the first line of an error's text. For a database error, that is the driver's text."""
    if isinstance(error, (ProjectorDedupError, click.ClickException)):
        return str(error).partition("\n")[0]
    text = str(error)
    if isinstance(error, DBAPIError) and error.orig is not None:
        text, args = str(error.orig), error.orig.args
        if len(args) == 2 and isinstance(args[0], int):  # MariaDB's drivers: its number, then its words
            text = str(args[1])
    lines = text.strip().splitlines()
    return without_secrets(lines[0].strip()) if lines else type(error).__name__


def explained(error: Exception) -> str:
    """Return in one line what went wrong, and how to find out more."""
    if isinstance(error, (ProjectorDedupError, ValueError, click.ClickException)):
        return reason(error)
    if isinstance(error, DBAPIError):
        return f"the database returned an error: {reason(error)} (--debug shows the statement)"
    if isinstance(error, (SQLAlchemyError, OSError)):
        return f"{reason(error)} (--debug shows the traceback)"
    return f"unexpected {type(error).__name__}: {reason(error)}; please report it, with the output of --debug"


@contextmanager
def one_line(*, debug: bool) -> Iterator[None]:
    """Turn every error of the block into `Failed` with a text of one line. ``debug`` prints the traceback first."""
    try:
        yield
    except (click.Abort, BrokenPipeError):  # the user interrupts a question, or the reader of the pipe has ended
        raise
    except Exception as error:  # the last place to turn an error into one line and exit code 1
        if debug:
            click.echo(without_secrets(traced(error)), err=True)
        if isinstance(error, click.ClickException):
            raise
        raise Failed(explained(error)) from None


def harmless(text: str) -> str:
    """Return the text with every character escaped on which a terminal acts, except for the ends of lines.

    A text of a message, a handler or a server could otherwise forge what an operator reads.
    """
    return "\n".join(printable(line) for line in text.split("\n"))


def fitted(text: str, stream: IO[Any], indent: str = "") -> str:
    """Return the harmless text for ``stream``. For a terminal, break long lines between words, and indent the rest."""
    text = harmless(text)
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size((_WIDTH, 24)).columns
    return "\n".join(
        textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        if len(line) > width
        else line
        for line in text.split("\n")
    )


def say(text: str, indent: str = "") -> None:
    """Print a text to stdout, with lines that fit the terminal."""
    click.echo(fitted(text, sys.stdout, indent))


def coloured(text: str, colour: str) -> str:
    """Return the text in a colour, unless the environment has NO_COLOR (no-color.org).

    `click.echo` removes the colour if it does not print to a terminal.
    """
    return text if os.environ.get("NO_COLOR") else click.style(text, fg=colour, bold=True)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print a table, or plain columns into a pipe. The columns named in ``right`` are aligned right."""
    console = Console(highlight=False)
    if sys.stdout.isatty():
        drawn = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    else:
        console.width = _IN_A_PIPE
        drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for header in headers:
        drawn.add_column(header, justify="right" if header in right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))
    console.print(drawn)


def print_json(values: dict[str, Any]) -> None:
    """Print an object as JSON, with times in ISO 8601 and durations in seconds."""
    click.echo(readable_json(values))


def readable_json(value: Any) -> str:
    """Return indented JSON in which every character is escaped on which a terminal acts, as ``\\u`` and its digits."""
    text = json.dumps(value, default=_plain, indent=2, ensure_ascii=False)
    return "".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text)


def log_json(event: str, **facts: Any) -> None:
    """Print a JSON object in one line, for a log: first ``event``, then ``facts`` in the given order."""
    click.echo(json.dumps({"event": event, **facts}))


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    raise TypeError(f"{type(value).__name__} cannot be printed as JSON")


def capital(text: str) -> str:
    """Return the text with its first letter in upper case."""
    return text[0].upper() + text[1:]


@contextmanager
def counting(verb: str) -> Iterator[Callable[[int], None]]:
    """Yield a function that increases a count such as "Deleted 5,000 ...", which appears only on a terminal."""
    so_far = 0
    with Console(stderr=True, highlight=False).status(f"{verb} 0 ...") as status:

        def add(more: int) -> None:
            nonlocal so_far
            so_far += more
            status.update(f"{verb} {so_far:,} ...")

        yield add


def require_terminal() -> None:
    """Raise `click.UsageError` if stdin is no terminal, so that nobody could answer a question."""
    if not sys.stdin.isatty():
        raise click.UsageError("there is no terminal to ask for confirmation; add --yes")


def confirmed(question: str) -> bool:
    """Ask ``question`` on the terminal, and return True if the answer is yes. An empty answer means no.

    Raises `click.UsageError` if there is no terminal.
    """
    require_terminal()
    return click.confirm(harmless(question), default=False, err=True)


@contextmanager
def noted() -> Iterator[Callable[[], bool]]:
    """Catch Ctrl-C and SIGTERM during the block, and yield a function that returns True after one of them.

    The third signal raises `KeyboardInterrupt` at once.
    """
    count = 0

    def note(_signal: int, _frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count >= _INSISTING:
            raise KeyboardInterrupt

    usual = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: count > 0
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


@contextmanager
def between_batches(verb: str) -> Iterator[Callable[[int], None]]:
    """Yield a function to call after each batch. It increases the count, and ends the run after Ctrl-C or SIGTERM.

    An exception at any other place, such as a callback of the driver, could be swallowed.
    """
    with noted() as interrupted, counting(verb) as add:

        def after(more: int) -> None:
            add(more)
            if interrupted():
                raise KeyboardInterrupt

        yield after
