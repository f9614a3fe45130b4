"""`idempotency stats`: count the markers of each handler, and those that cleanup would delete."""

from __future__ import annotations

import sys

import click
from sqlalchemy import Engine

from projector_dedup import DedupTables
from projector_dedup.maintenance.horizon import MAX_HOURS
from projector_dedup.maintenance.stats import Stats, stats
from projector_dedup.maintenance.times import moment_with_zone, moment_without_zone
from projector_dedup.message import printable

from .interrupts import noted, rest
from .next_step import after_stats, commands_beside
from .options import EXIT_CODES, Deployment, Deployments, database_options
from .output import ago, as_object, document, json_option, size, table
from .wrapping import fitted


@click.command("stats", epilog=EXIT_CODES)
@database_options
@click.option(
    "--retention-hours",
    type=click.FloatRange(min=0, min_open=True, max=MAX_HOURS),
    help="What would a cleanup that keeps so much delete?  [default: that of the last complete cleanup, else 168]",
)
@click.option(
    "--watch",
    is_flag=False,
    flag_value=2.0,
    type=click.FloatRange(min=0.1, max=86_400),
    metavar="[SECONDS]",
    help="Look again after so many seconds, 2 if none are given, until Ctrl-C. A terminal is drawn anew; in a pipe "
    "each look is a line.",
)
@json_option
def show_stats(deployments: Deployments, retention_hours: float | None, watch: float | None, as_json: bool) -> None:
    """Count the markers of each handler; tell their age and size.

    And how many of them cleanup would delete.

    Every marker is read, which takes some seconds for ten million of them. Deliveries go on meanwhile.

    \b
    Examples:
      idempotency stats --database-url postgresql+psycopg://app@db.example/orders
      idempotency stats --json | jq '.[].expired'
      idempotency stats --watch 10
    """
    if watch is not None:
        if as_json:
            raise click.UsageError("--watch and --json exclude each other: a document has an end")
        _watch(deployments, retention_hours, watch)
        return
    with document(wanted=as_json) as add:

        def look(deployment: Deployment, engine: Engine) -> None:
            found = stats(engine, tables=deployment.tables, retention_hours=retention_hours)
            if as_json:
                add(deployment, as_object(found))
            else:
                click.echo(deployment)
                _print(found, engine, deployment.tables)

        deployments.each(look)


def _watch(deployments: Deployments, retention_hours: float | None, seconds: float) -> None:
    """Look every so many seconds, until Ctrl-C or SIGTERM; a look that has begun is ended."""
    drawn = sys.stdout.isatty()

    def look(deployment: Deployment, engine: Engine) -> None:
        found = stats(engine, tables=deployment.tables, retention_hours=retention_hours)
        if drawn:
            click.echo(deployment)
            _print(found, engine, deployment.tables)
            return
        newest = ago(found.newest, found.at)
        counted = f"{deployments.rows(found.markers)}, newest {newest}, {found.expired:,} expired"
        click.echo(f"{moment_with_zone(found.at)}  {deployment}: {counted}")
        sys.stdout.flush()

    with noted() as interrupted:
        while not interrupted():
            if drawn:
                click.clear()
            deployments.each(look)
            if drawn:
                click.echo(f"\nAgain every {seconds:g} seconds; Ctrl-C ends.")
            rest(seconds, interrupted)


def _print(found: Stats, engine: Engine, tables: DedupTables) -> None:
    state = found.state
    cleaned = "-" if state.retention_hours is None else f", {state.retention_hours:g} hours kept"
    for name, value in (
        (f"{tables.noun}s", f"{found.markers:,}"),
        ("on disk", f"{size(found.bytes)}, indexes included"),
        ("oldest", ago(found.oldest, found.at)),
        ("newest", ago(found.newest, found.at)),
        ("cleanup would delete", f"{found.expired:,}, older than {found.retention_hours:g} hours"),
        ("last complete cleanup", "never" if state.cleaned_at is None else ago(state.cleaned_at, found.at) + cleaned),
        ("redelivery horizon", "not declared" if state.horizon_hours is None else f"{state.horizon_hours:g} hours"),
        ("schema version", state.schema_version or "not recorded (fine: idempotency did not make the tables)"),
    ):
        click.echo(f"  {name:<22}  {value}")
    if found.handlers:
        click.echo()
        rows = [
            (
                printable(each.handler),
                f"{each.markers:,}",
                moment_without_zone(each.oldest),
                moment_without_zone(each.newest),
            )
            for each in found.handlers
        ]
        counted = f"{tables.noun}s"
        table((tables.handler, counted, "oldest (UTC)", "newest (UTC)"), rows, right=(counted,))
    click.echo(f"\n{fitted(after_stats(found, tables) + commands_beside(engine, tables), sys.stdout)}")
