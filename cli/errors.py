"""How the command fails: one line that says what to do, exit code 1, and never a password in it."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any
from urllib.parse import unquote_plus

import click
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from projector_dedup import ProjectorDedupError
from projector_dedup.dialects import Failure, dialect_of

from .wrapping import fitted

# Up to the *last* @ of the word: a password that was not percent-encoded may have one itself.
_BEFORE_AT = re.compile(r"(?P<scheme>[\w+]*)://(?P<before>\S*)@")
_USER_AND_PASSWORD = re.compile(r"([^:/?]*):.*")
_QUERY = re.compile(r"(://\S*?\?)(\S+?)(?=[:;,.]?(?:\s|\Z))")
_SECRET_PARAMETER = re.compile(r"((?:password|passwd|passphrase|sslpassword)=)[^\s&]+", re.IGNORECASE)

# Parameters of a connection that say where it leads, and how. Any other may be a secret, or "password" misspelt.
_SHOWN = frozenset(
    {
        *("application_name", "cache", "channel_binding", "charset", "client_encoding", "connect_timeout", "dbname"),
        *("gssencmode", "host", "hostaddr", "load_balance_hosts", "mode", "port", "read_default_file", "service"),
        *("ssl", "ssl_mode", "sslmode", "sslrootcert", "target_session_attrs", "timeout", "unix_socket", "uri"),
        *("user", "vfs"),
    }
)
_HARMLESS_OPTIONS = re.compile(r"(\s*-c\s*(search_path|role|lock_timeout|statement_timeout)=[\w,.]+)+\s*")

_LONG_ENOUGH = 6  # shorter values would take words out of every text
_secrets: set[str] = set()  # what `keep_secret` was given, in this process


class Failed(click.ClickException):
    """The command could not do what it was asked; the text says what to do, and has no secret in it."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(without_secrets(message))

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the text on stderr, or to ``file``."""
        stream = file or sys.stderr
        click.echo(fitted(f"Error: {self.message}", stream), file=stream)


def is_shown(name: str, value: str) -> bool:
    """True if a parameter of a connection may be printed with its value."""
    return name in _SHOWN or (name == "options" and _HARMLESS_OPTIONS.fullmatch(value) is not None)


def keep_secret(value: str) -> None:
    """Have `***` printed in place of the value, and of each value in it: a server may quote one in an error."""
    words = (word.rpartition("=")[2] for word in re.split(r"[\s,'\"\\]+", value))
    _secrets.update(each for each in (value, *words) if len(each) >= _LONG_ENOUGH)


def without_secrets(text: str) -> str:
    """Return the text with `***` in place of whatever may be a secret in a URL or a connection string."""
    text = _QUERY.sub(_shown_query, _BEFORE_AT.sub(_shown_user, text))
    text = _SECRET_PARAMETER.sub(r"\1***", text)
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


def _shown_user(found: re.Match[str]) -> str:
    scheme, before = found["scheme"], found["before"]
    if named := _USER_AND_PASSWORD.fullmatch(before):
        return f"{scheme}://{named[1]}:***@"
    if not re.search(r"[/?]", before) or scheme.startswith("sqlite"):  # a user alone; the path of a file
        return found[0]
    return f"{scheme}://***@"


def _shown_query(found: re.Match[str]) -> str:
    pairs = (pair.partition("=") for pair in found[2].split("&"))
    shown = [f"{name}{sign}{value if is_shown(name, unquote_plus(value)) else '***'}" for name, sign, value in pairs]
    return found[1] + "&".join(shown)


def reason(error: BaseException) -> str:
    """Return the first line of an error's text; of a database error, the driver's own without SQLAlchemy's words."""
    if isinstance(error, DBAPIError) and error.orig is not None:
        error = error.orig
        if len(error.args) == 2 and isinstance(error.args[0], int):  # MariaDB's drivers: its number, then its words
            return str(error.args[1])
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def is_lock_timeout(engine: Engine, error: Exception) -> bool:
    """True if the error, or the one that caused it, says that a lock was waited for too long."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, DBAPIError):
        found = found.__cause__
    return found is not None and dialect_of(engine).classify(found) is Failure.LOCK_TIMEOUT


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
