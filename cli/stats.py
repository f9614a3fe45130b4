"""`idempotency stats`: count the markers of each handler, and those that cleanup would delete."""

from __future__ import annotations

import click
from sqlalchemy import Engine

from projector_dedup import DedupTables
from projector_dedup.maintenance.horizon import MAX_HOURS
from projector_dedup.maintenance.stats import Stats, stats
from projector_dedup.maintenance.times import moment_without_zone
from projector_dedup.message import printable

from .options import EXIT_CODES, Deployment, Deployments, database_options
from .output import ago, as_object, document, json_option, size, table


@click.command("stats", epilog=EXIT_CODES)
@database_options
@click.option(
    "--retention-hours",
    type=click.FloatRange(min=0, min_open=True, max=MAX_HOURS),
    help="What would a cleanup that keeps so much delete?  [default: that of the last complete cleanup, else 168]",
)
@json_option
def show_stats(deployments: Deployments, retention_hours: float | None, as_json: bool) -> None:
    """Count the markers of each handler; tell their age and size.

    And how many of them cleanup would delete.

    Of more than a million markers, those of a sample are counted, where the database's catalogue knows how many there
    are (PostgreSQL, MariaDB): the numbers are marked ~ then, and a handler with few markers may be missing.

    \b
    Examples:
      idempotency stats --database-url postgresql+psycopg://app@db.example/orders
      idempotency stats --json | jq '.[].expired'
    """
    with document(wanted=as_json) as add:

        def look(deployment: Deployment, engine: Engine) -> None:
            found = stats(engine, tables=deployment.tables, retention_hours=retention_hours)
            if as_json:
                add(deployment, as_object(found))
            else:
                click.echo(deployment)
                _print(found, deployment.tables)

        deployments.each(look)


def _print(found: Stats, tables: DedupTables) -> None:
    about, state = "~" if found.estimated else "", found.state
    cleaned = "-" if state.retention_hours is None else f", {state.retention_hours:g} hours kept"
    for name, value in (
        (f"{tables.noun}s", f"{about}{found.markers:,}"),
        ("on disk", f"{size(found.bytes)}, indexes included"),
        ("oldest", ago(found.oldest, found.at)),
        ("newest", ago(found.newest, found.at)),
        ("cleanup would delete", f"{about}{found.expired:,}, older than {found.retention_hours:g} hours"),
        ("last complete cleanup", "never" if state.cleaned_at is None else ago(state.cleaned_at, found.at) + cleaned),
        ("redelivery horizon", "not declared" if state.horizon_hours is None else f"{state.horizon_hours:g} hours"),
        ("schema version", state.schema_version or "not recorded"),
    ):
        click.echo(f"  {name:<22}  {value}")
    if found.handlers:
        click.echo()
        rows = [
            (
                printable(each.handler),
                f"{about}{each.markers:,}",
                moment_without_zone(each.oldest),
                moment_without_zone(each.newest),
            )
            for each in found.handlers
        ]
        counted = f"{tables.noun}s"
        table((tables.handler, counted, "oldest (UTC)", "newest (UTC)"), rows, right=(counted,))
    if found.estimated:
        click.echo(
            f"\n~: of a sample; the oldest and newest of a {tables.handler} are too, and one with few {tables.noun}s "
            "may be missing"
        )
