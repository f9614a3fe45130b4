"""The options that name a database and its tables, and the engine that a command gets on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import click
from sqlalchemy import URL, Engine, MetaData, create_engine, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

from projector_dedup import DedupTables
from projector_dedup.dialects import Failure, dialect_of
from projector_dedup.maintenance.running import KINDS, LOCK_TIMEOUT, limited

from .output import Failed, one_line, reason

EXIT_CODES = """\b
Exit codes:
  0  done
  1  failed; one line on stderr says what to do
  2  the command line was wrong"""

debug_option = click.option("--debug", is_flag=True, help="Show the traceback of a failure.")

_EXAMPLE = (
    "postgresql+psycopg://user@host:5432/database, mariadb+pymysql://user@host:3306/database or sqlite:///file.db"
)
_CONNECT_TIMEOUT = 10  # seconds; a host that drops packets would otherwise hold the command for minutes

# The command is synchronous: in place of an async driver, or of none, it takes the sync driver that is tested.
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
    lock_timeout: float

    def __str__(self) -> str:
        marker = self.tables.marker.fullname
        return self.database if marker == self.tables.default_name else f"{self.database}: {marker}"

    @property
    def database(self) -> str:
        """The database's URL as text for printing: without its password, and without parameters, which may be one."""
        return self.url.set(query={}).render_as_string(hide_password=True)

    @property
    def place(self) -> dict[str, str]:
        """The database and the table, for JSON."""
        return {"database": self.database, "table": self.tables.marker.fullname}

    def rows(self, number: int) -> str:
        """Return the number with the word for a row of the tables: "1 marker", "2,000 records"."""
        return f"{number:,} {self.tables.noun}{'' if number == 1 else 's'}"

    @contextmanager
    def opened(self, *, create: bool = False) -> Iterator[Engine]:
        """Connect once, and yield an engine on the database, whose waits for locks are limited.

        A file of SQLite that does not exist is created if ``create``; otherwise it is taken for a mistyped path.
        Raises `Failed`, with the remedy, if no connection can be had, or if a lock was waited for too long.
        """
        engine = self._engine(create)
        try:
            self._connect(engine)
            yield limited(engine, self.lock_timeout)
        except Exception as error:
            if not _is_lock_timeout(engine, error):
                raise
            raise Failed(
                f"{reason(error)}: another transaction held {self.tables.marker.fullname} for more than "
                f"{self.lock_timeout:g} seconds; end the one that is open for long, or wait longer with "
                "--lock-timeout (docs/runbook.md: a table is locked)"
            ) from error
        finally:
            engine.dispose()

    def _engine(self, create: bool) -> Engine:
        url, driver = self.url, self.url.drivername.partition("+")[2]
        if url.get_backend_name() == "sqlite":
            _refuse_no_file(url, create)
        arguments: dict[str, Any] = {"prepare_threshold": None} if driver == "psycopg" else {}  # fits a PgBouncer too
        if driver in _EXTRAS and "connect_timeout" not in url.query:
            arguments["connect_timeout"] = _CONNECT_TIMEOUT
        if driver == "pysqlite":  # the journal mode of the file stays as its owner chose it
            arguments["timeout"] = self.lock_timeout  # seconds to wait for a writer
        try:
            return create_engine(url, connect_args=arguments)
        except (NoSuchModuleError, ImportError) as error:
            if driver in _EXTRAS and isinstance(error, ImportError):
                remedy = f"pip install 'projector-dedup[{_EXTRAS[driver]}]'"
                raise Failed(f"the driver of {url.drivername} is not installed: {remedy}") from error
            raise Failed(
                f"{url.drivername} is not a database this command knows; write the URL like {_EXAMPLE}"
            ) from None
        except (ArgumentError, TypeError, ValueError) as error:
            raise Failed(f"the database URL {self.database} is not accepted: {reason(error)}") from error

    def _connect(self, engine: Engine) -> None:
        sqlite = engine.dialect.name == "sqlite"
        try:
            with engine.connect() as connection:
                if sqlite:
                    connection.exec_driver_sql("PRAGMA schema_version")  # SQLite does not open the file before
        except (DBAPIError, OSError) as error:
            if _is_lock_timeout(engine, error):
                raise
            raise Failed(
                f"no connection to {self.database}: {reason(error)}; does the server run, and are host, port, user, "
                "password and database right?"
                if not sqlite
                else f"cannot open {self.database}: {reason(error)}; is it an SQLite file in a folder that may be "
                "written to?"
            ) from error


def parse(text: str) -> URL:
    """Return the URL, with a synchronous driver in place of an asynchronous one or of none.

    Raises `Failed`, without quoting the text, if it is no URL of a database.
    """
    try:
        url = make_url(text.strip())
    except (ArgumentError, ValueError):  # their texts quote the URL, password and all
        raise Failed(f"the database URL cannot be read; write it like {_EXAMPLE}") from None
    if "@" in (url.host or "") or "@" in text.partition("?")[2]:
        raise Failed("the database URL has more than one @; write the one in the password as %40, and a ? as %3F")
    if "@" in (url.database or "") and url.get_backend_name() != "sqlite":
        raise Failed("the database URL has a / before its @; write one in the user's name as %2F, and an @ as %40")
    if url.get_backend_name() in ("mysql", "mariadb") and not url.database:
        raise Failed(f"the database URL names no database; write it like {_EXAMPLE}")
    url = url.set(drivername=_DRIVERS.get(url.drivername, url.drivername))
    if url.drivername == "postgresql+psycopg" and "ssl" in url.query:  # asyncpg's name for sslmode
        url = url.difference_update_query(["ssl"]).update_query_dict({"sslmode": url.query["ssl"]})
    return url


def _refuse_no_file(url: URL, create: bool) -> None:
    name = url.database or ":memory:"
    if ":memory:" in name or "mode=memory" in name:
        raise Failed(
            "an SQLite database in memory would be new and empty for this command; give a file, as in sqlite:///file.db"
        )
    if not create and not name.startswith("file:") and not Path(name).is_file():
        raise Failed(f"there is no file {name}; three slashes begin a relative path, four an absolute one")


def _is_lock_timeout(engine: Engine, error: Exception) -> bool:
    """True if the error, or the one that caused it, says that a lock was waited for too long."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, DBAPIError):
        found = found.__cause__
    return found is not None and dialect_of(engine).classify(found) is Failure.LOCK_TIMEOUT


class _OneText(click.types.StringParamType):
    """A text that may have blanks. An option that may be repeated would take them, in a variable, for separators."""

    def split_envvar_value(self, rv: str) -> list[str]:
        """Return the whole value of the variable."""
        return [rv]


def _only_one(_context: click.Context, _parameter: click.Parameter, given: tuple[str, ...]) -> str | None:
    if len(given) > 1:  # else click would take the last one, and say nothing
        raise click.BadParameter("give one; for several, run the command once for each")
    return given[0] if given else None


def table_options(command: Callable[..., Any], *, kinds: Sequence[type[DedupTables]] = KINDS) -> Callable[..., Any]:
    """Add the options that say which tables are meant: ``command``, which has --debug, gets them as ``tables``.

    They are of the first of the ``kinds``, unless the option of another one is given.
    """
    first, *others = kinds
    usual = "; ".join([first.default_name, *(f"with{each.option} {each.default_name}" for each in others)])

    @wraps(command)
    def run(table: str | None, schema: str | None, **rest: Any) -> Any:
        chosen = [each for each in others if rest.pop(each.subject)]
        with one_line(debug=rest["debug"]):
            if len(chosen) > 1:
                both = " or".join(each.option for each in chosen)
                raise click.UsageError(f"say{both}; for several kinds of tables, run the command once for each")
            kind = chosen[0] if chosen else first
            tables = kind.make(MetaData(), table or kind.default_name, schema)
        return command(tables=tables, **rest)

    for each in reversed(others):
        words = f"The tables of {each.subject} instead of those of {first.subject}."
        run = click.option(each.option.strip(), each.subject, is_flag=True, help=words)(run)
    for option in (
        click.option(
            "--schema",
            multiple=True,
            callback=_only_one,
            help="The schema of the table.  [default: the connection's own]",
        ),
        click.option("--table", help=f"The name of the table.  [default: {usual}]"),
    ):
        run = option(run)
    return run


def database_options(command: Callable[..., Any], *, kinds: Sequence[type[DedupTables]] = KINDS) -> Callable[..., Any]:
    """Add the options that name a database to ``command``, which is called with a ``Deployment`` as first argument.

    Its tables are of one of the ``kinds``.
    """

    @wraps(command)
    def run(database_url: str, tables: DedupTables, lock_timeout: float, debug: bool, **rest: Any) -> Any:
        with one_line(debug=debug):
            return command(Deployment(parse(database_url), tables, lock_timeout), **rest)

    options: tuple[Callable[[Any], Any], ...] = (
        debug_option,
        click.option(
            "--lock-timeout",
            type=click.FloatRange(min=0.01, max=86_400),
            default=LOCK_TIMEOUT,
            show_default=True,
            help="Seconds that a statement waits for a lock that another transaction holds. On MariaDB whole ones.",
        ),
        partial(table_options, kinds=kinds),
        click.option(
            "--database-url",
            envvar="PROJECTOR_DEDUP_DATABASE_URL",
            show_envvar=True,
            required=True,
            type=_OneText(),
            multiple=True,
            callback=_only_one,
            help="The database of the read model, as SQLAlchemy writes it. Async drivers are replaced by their sync "
            "twin. Other users of a machine can see arguments: prefer the variable for a URL with a password.",
        ),
    )
    for option in options:
        run = option(run)
    return run
