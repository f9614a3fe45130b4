"""The options that name a database and its tables, and the engine of a command."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click
from sqlalchemy import URL, Engine, MetaData, create_engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from projector_dedup.http.parked import ParkedTables
from projector_dedup.maintenance.schema import KINDS
from projector_dedup.tables import DedupTables

from .output import Failed, one_line, reason

EXIT_CODES = """\b
Exit codes:
  0  done
  1  failed; one line on stderr tells you what to do
  2  the command line is wrong"""

HANDLED = tuple(kind for kind in KINDS if kind is not ParkedTables)
"""The kinds of tables whose rows say that something was handled."""

debug_option = click.option("--debug", is_flag=True, help="Show the traceback of a failure.")

_EXAMPLE = (
    "postgresql+psycopg://user@host:5432/database, mariadb+pymysql://user@host:3306/database or sqlite:///file.db"
)
_CONNECT_TIMEOUT = 10  # seconds; without it, a host that drops packets would block the command for minutes

# The command is synchronous, so it replaces an async driver, or no driver, by the sync driver that is tested.
_DRIVERS = {
    "postgres": "postgresql+psycopg",
    "postgresql": "postgresql+psycopg",
    "postgresql+asyncpg": "postgresql+psycopg",
    "postgresql+psycopg_async": "postgresql+psycopg",
    "sqlite": "sqlite+pysqlite",
    "sqlite+aiosqlite": "sqlite+pysqlite",
    "mysql": "mysql+pymysql",
    "mysql+aiomysql": "mysql+pymysql",
    "mysql+asyncmy": "mysql+pymysql",
    "mariadb": "mariadb+pymysql",
    "mariadb+aiomysql": "mariadb+pymysql",
    "mariadb+asyncmy": "mariadb+pymysql",
}
_EXTRAS = {"psycopg": "postgresql", "psycopg2": "psycopg2", "pymysql": "pymysql", "mysqldb": "mysqlclient"}


@dataclass(frozen=True)
class Deployment:
    """One deployment of the library: its tables in one database."""

    url: URL
    tables: DedupTables

    def __str__(self) -> str:
        marker = self.tables.marker.fullname
        return self.database if marker == self.tables.default_name else f"{self.database}: {marker}"

    @property
    def database(self) -> str:
        """The database's URL for printing, without its password and its parameters, which may contain a password."""
        return self.url.set(query={}).render_as_string(hide_password=True)

    @property
    def place(self) -> dict[str, str]:
        """The database and the table, for JSON."""
        return {"database": self.database, "table": self.tables.marker.fullname}

    def rows(self, number: int) -> str:
        """Return the number with the word for a row of the tables: "1 marker", "2,000 records"."""
        return f"{number:,} {self.tables.noun}{'' if number == 1 else 's'}"

    @contextmanager
    def opened(self) -> Iterator[Engine]:
        """Connect once, and yield an engine for the database.

        Raises `Failed`, with the remedy, for a missing SQLite file, or if the connection fails.
        """
        engine = self._engine()
        try:
            self._connect(engine)
            yield engine
        finally:
            engine.dispose()

    def _engine(self) -> Engine:
        url, driver = self.url, self.url.drivername.partition("+")[2]
        if url.get_backend_name() == "sqlite":
            _refuse_no_file(url)
        arguments: dict[str, Any] = {"prepare_threshold": None} if driver == "psycopg" else {}  # for PgBouncer
        if driver in _EXTRAS and "connect_timeout" not in url.query:
            arguments["connect_timeout"] = _CONNECT_TIMEOUT
        try:
            return create_engine(url, connect_args=arguments)
        except (NoSuchModuleError, ImportError) as error:
            if driver in _EXTRAS and isinstance(error, ImportError):
                remedy = f"pip install 'projector-dedup[{_EXTRAS[driver]}]'"
                raise Failed(f"the driver of {url.drivername} is not installed; run: {remedy}") from error
            raise Failed(f"this command does not support {url.drivername}; write the URL like {_EXAMPLE}") from None
        except (ArgumentError, TypeError, ValueError) as error:
            raise Failed(
                f"SQLAlchemy does not accept the database URL {self.database}: {reason(error)}; correct the URL"
            ) from error

    def _connect(self, engine: Engine) -> None:
        sqlite = engine.dialect.name == "sqlite"
        try:
            with engine.connect() as connection:
                if sqlite:
                    connection.exec_driver_sql("PRAGMA schema_version")  # makes SQLite open the file
        except (DBAPIError, OSError) as error:
            raise Failed(
                f"cannot connect to {self.database}: {reason(error)}; check that the server runs, and that host, port, "
                "user, password and database are correct"
                if not sqlite
                else f"cannot open {self.database}: {reason(error)}; check that it is an SQLite file that no other "
                "program locks, and that you may write to its folder"
            ) from error


def parse(text: str) -> URL:
    """Return the URL with a synchronous driver.

    Raises `Failed`, without quoting the text, if it is not the URL of a database.
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):  # their texts quote the URL with its password
        raise Failed(f"the database URL cannot be read; write it like {_EXAMPLE}") from None
    path = "" if url.get_backend_name() == "sqlite" else url.database
    if "@" in f"{url.host}/{path}?{text.partition('?')[2]}":  # a part of the password may be in what we print
        raise Failed(
            "the database URL has an @ behind its host; in a user name or a password, write @ as %40, / as %2F and ? "
            "as %3F"
        )
    return url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))


def _refuse_no_file(url: URL) -> None:
    name = url.database or ":memory:"
    if ":memory:" in name or "mode=memory" in name:
        raise Failed(
            "an SQLite database in memory is new and empty for this command; give a file, as in sqlite:///file.db"
        )
    if not name.startswith("file:") and not Path(name).is_file():
        raise Failed(
            f"there is no file {name}; write three slashes before a relative path, and four before an absolute one"
        )


class Number(click.FloatRange):
    """A finite number in a range. Click would call any other text "not a valid float range"."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number. Fails for NaN, which click accepts in every range."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail("give a finite number", param, ctx)
        return number


class WholeNumber(click.IntRange):
    """A whole number in a range. Click would call any other text "not a valid integer range"."""

    name = "whole number"


def table_options(command: Callable[..., Any], *, kinds: Sequence[type[DedupTables]] = KINDS) -> Callable[..., Any]:
    """Add the options that select the tables to ``command``, which gets them as ``tables`` and must have --debug.

    The default is the first of the ``kinds``. The option of another kind selects that kind.
    """
    first, *others = kinds
    usual = "; ".join([first.default_name, *(f"with{each.option} {each.default_name}" for each in others)])

    @wraps(command)
    def run(table: str | None, schema: str | None, **rest: Any) -> Any:
        chosen = [each for each in others if rest.pop(each.subject)]
        with one_line(debug=rest["debug"]):
            if len(chosen) > 1:
                both = " or".join(each.option for each in chosen)
                raise click.UsageError(f"give{both}; for several kinds of tables, run the command once for each")
            kind = chosen[0] if chosen else first
            tables = kind.make(MetaData(), table or kind.default_name, schema)
        return command(tables=tables, **rest)

    for each in reversed(others):
        words = f"Use the tables of {each.subject}, not those of {first.subject}."
        run = click.option(each.option.strip(), each.subject, is_flag=True, help=words)(run)
    for option in (
        click.option("--schema", help="The schema of the table.  [default: the connection's own]"),
        click.option("--table", help=f"The name of the table.  [default: {usual}]"),
    ):
        run = option(run)
    return run


def database_options(
    command: Callable[..., Any], *, kinds: Sequence[type[DedupTables]] = HANDLED
) -> Callable[..., Any]:
    """Add the options that name a database to ``command``, which gets a ``Deployment`` as its first argument.

    The tables of the deployment are of one of the ``kinds``.
    """

    @wraps(command)
    def run(database_url: str, tables: DedupTables, debug: bool, **rest: Any) -> Any:
        with one_line(debug=debug):
            return command(Deployment(parse(database_url), tables), **rest)

    options: tuple[Callable[[Any], Any], ...] = (
        debug_option,
        partial(table_options, kinds=kinds),
        click.option(
            "--database-url",
            envvar="PROJECTOR_DEDUP_DATABASE_URL",
            show_envvar=True,
            required=True,
            help="The SQLAlchemy URL of the read model's database. An async driver is replaced by a sync driver. Other "
            "users of the machine can see arguments, so use the variable for a URL with a password.",
        ),
    )
    for option in options:
        run = option(run)
    return run


of_all_kinds = partial(database_options, kinds=KINDS)

# Spans of time ----------------------------------------------------------------------------------------------------

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def span(text: str) -> timedelta:
    """Return the duration of a text such as 90s, 15m, 2h or 1d."""
    found = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if found is None:
        raise click.BadParameter("write a number and s, m, h or d, for example 15m")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


overdue_option = click.option(
    "--overdue",
    type=span,
    default="15m",
    show_default=True,
    help="Exit with 1 for an effect that was armed or due longer ago than this.",
)
