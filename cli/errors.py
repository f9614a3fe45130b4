"""How the command fails: one line that says what to do, exit code 1, and never a password in it."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import click
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from projector_dedup import ProjectorDedupError

# Up to the *last* @ of the word: a password that was not percent-encoded may have one itself.
_CREDENTIALS = re.compile(r"(://[^\s:/@]*:)\S*@")
_SECRET_PARAMETER = re.compile(r"((?:password|passwd|passphrase|sslpassword)=)[^\s&]+", re.IGNORECASE)


class Failed(click.ClickException):
    """The command could not do what it was asked; the text says what to do."""

    exit_code = 1


def without_secrets(text: str) -> str:
    """Return the text with `***` in place of whatever looks like a password in a URL or a connection string."""
    return _SECRET_PARAMETER.sub(r"\1***", _CREDENTIALS.sub(r"\1***@", text))


def reason(error: BaseException) -> str:
    """Return the first line of an error's text; of a database error, the driver's own without SQLAlchemy's words."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        error = error.orig
        if len(error.args) == 2 and isinstance(error.args[0], int):  # MariaDB's drivers: its number, then its words
            return str(error.args[1])
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


@contextmanager
def one_line(*, debug: bool) -> Iterator[None]:
    """Turn every error of the block into `Failed`, whose text is one line; ``debug`` prints the traceback before."""
    try:
        yield
    except click.ClickException as error:
        _show(error, debug)
        raise
    except (click.Abort, BrokenPipeError):  # nobody answers, or nobody reads any more
        raise
    except Exception as error:  # noqa: BLE001  # nothing is above this but the command itself: one line, exit code 1
        _show(error, debug)
        raise Failed(_explained(error)) from None


def _explained(error: Exception) -> str:
    if isinstance(error, (ProjectorDedupError, ValueError)):
        return reason(error)
    if isinstance(error, DBAPIError):
        return f"the database refused: {reason(error)} (--debug shows the statement)"
    if isinstance(error, (SQLAlchemyError, OSError)):
        return f"{reason(error)} (--debug shows where)"
    return f"unexpected {type(error).__name__}: {reason(error)}; please report it, with the output of --debug"


def _show(error: Exception, debug: bool) -> None:
    if debug:
        print(without_secrets("".join(traceback.format_exception(error))), end="", file=sys.stderr)
