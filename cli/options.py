"""The options that name databases and tables, and the loop that runs a command on each of these deployments."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click
from sqlalchemy import URL, Engine, MetaData

from projector_dedup import DedupTables
from projector_dedup.commands import CommandTables
from projector_dedup.maintenance.waits import LOCK_TIMEOUT, limited

from .connect import open_engine, parse, shown, shown_or_number
from .errors import Failed, is_lock_timeout, one_line, reason
from .wrapping import fitted

EXIT_CODES = """\b
Exit codes:
  0  done
  1  failed; one line on stderr says what to do
  2  the command line was wrong"""

debug_option = click.option("--debug", is_flag=True, help="Show the traceback of a failure.")


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
        """The database's URL as text for printing, without any password."""
        return shown(self.url)


@dataclass(frozen=True)
class Deployments:
    """Every deployment that one run of a command is about: each of the databases, with each of the schemas."""

    texts: tuple[str, ...]
    schemas: tuple[str | None, ...]
    kind: type[DedupTables]
    table: str
    lock_timeout: float
    debug: bool

    @property
    def of_commands(self) -> bool:
        """True if the tables are those of commands, not of projectors."""
        return self.kind is CommandTables

    def rows(self, number: int) -> str:
        """Return the number with the word for a row of the tables: "1 marker", "2,000 records"."""
        return f"{number:,} {self.kind.noun}{'' if number == 1 else 's'}"

    @property
    def several(self) -> bool:
        """True if there is more than one deployment, so that each line must name its own."""
        return len(self.texts) * len(self.schemas) > 1

    def say(self, deployment: Deployment, line: str) -> None:
        """Print a line about one deployment, with its name before it if there are several."""
        click.echo(fitted(f"{deployment}: {line}" if self.several else line, sys.stdout))

    def each(
        self,
        act: Callable[[Deployment, Engine], None],
        *,
        create: bool = False,
        on_failure: Callable[[str, Failed], None] | None = None,
    ) -> None:
        """Run ``act`` on each deployment, one after the other, with an engine that is disposed of afterwards.

        ``create`` lets SQLite make the file. ``on_failure`` is called with each failure and the URL that it is about,
        or the number of a URL that cannot be read.

        Raises `Failed` at once if there is only one deployment. Of several, each failure is printed in a line, the
        others are run, and `Failed` is raised in the end.
        """
        failures = 0
        for number, text in enumerate(self.texts, 1):
            for schema in self.schemas:
                try:
                    with one_line(debug=self.debug):
                        self._act(act, text, schema, create)
                except Failed as failed:
                    if on_failure is not None:
                        on_failure(shown_or_number(text, number), failed)
                    if not self.several:
                        raise
                    failed.show()
                    failures += 1
        if failures:
            raise Failed(f"{failures} of {len(self.texts) * len(self.schemas)} failed, see above")

    def _act(self, act: Callable[[Deployment, Engine], None], text: str, schema: str | None, create: bool) -> None:
        deployment = Deployment(parse(text), self.kind.make(MetaData(), self.table, schema))
        engine = open_engine(deployment.url, create=create, lock_timeout=self.lock_timeout)
        try:
            act(deployment, limited(engine, self.lock_timeout))
        except Exception as error:
            if is_lock_timeout(engine, error):
                raise Failed(
                    f"{reason(error)}: another transaction held {deployment.tables.marker.fullname} for more than "
                    f"{self.lock_timeout:g} seconds; end the one that is open for long, or wait longer with "
                    "--lock-timeout (docs/runbook.md: a table is locked)"
                ) from error
            raise
        finally:
            engine.dispose()


def table_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say which tables are meant: ``command`` gets their ``kind`` and the name ``table``."""

    @wraps(command)
    def run(commands: bool, table: str | None, **rest: Any) -> Any:
        kind = CommandTables if commands else DedupTables
        return command(kind=kind, table=kind.default_name if table is None else table, **rest)

    for option in (
        click.option(
            "--table",
            help=f"The name of the table.  [default: {DedupTables.default_name}; with{CommandTables.option} "
            f"{CommandTables.default_name}]",
        ),
        click.option(
            CommandTables.option.strip(), is_flag=True, help="The tables of commands instead of those of projectors."
        ),
    ):
        run = option(run)
    return run


def database_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that name databases to ``command``, which is called with ``deployments`` as first argument."""

    @wraps(command)
    def run(
        database_url: tuple[str, ...],
        schema: tuple[str, ...],
        kind: type[DedupTables],
        table: str,
        lock_timeout: float,
        debug: bool,
        **rest: Any,
    ) -> Any:
        return command(Deployments(database_url, schema or (None,), kind, table, lock_timeout, debug), **rest)

    options: tuple[Callable[[Any], Any], ...] = (
        debug_option,
        click.option(
            "--lock-timeout",
            type=click.FloatRange(min=0.01, max=86_400),
            default=LOCK_TIMEOUT,
            show_default=True,
            help="Seconds that a statement waits for a lock that another transaction holds. On MariaDB whole ones.",
        ),
        click.option(
            "--schema",
            multiple=True,
            help="The schema of the table; may be given several times.  [default: the connection's own]",
        ),
        table_options,
        click.option(
            "--database-url",
            envvar="PROJECTOR_DEDUP_DATABASE_URL",
            show_envvar=True,
            required=True,
            multiple=True,
            help="The database of the read model, as SQLAlchemy writes it; may be given several times. Async drivers "
            "are replaced by their sync twin. Other users of a machine can see arguments: prefer the variable for a "
            "URL with a password (several: separated by spaces).",
        ),
    )
    for option in options:
        run = option(run)
    return run
