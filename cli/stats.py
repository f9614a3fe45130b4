"""`idempotency stats` counts the markers of each handler, and those that cleanup would delete."""

from __future__ import annotations

from dataclasses import asdict

import click

from projector_dedup import DedupTables
from projector_dedup.maintenance.cleanup import MAX_HOURS
from projector_dedup.maintenance.state import in_hours, moment_without_zone
from projector_dedup.maintenance.stats import Stats, stats
from projector_dedup.message import printable

from .check import after_stats, others_beside
from .options import EXIT_CODES, Deployment, Number, database_options
from .output import ago, json_option, print_json, say, size, table


@click.command("stats", epilog=EXIT_CODES, short_help="Count the markers, and print their age and size.")
@database_options
@click.option(
    "--retention-hours",
    type=Number(min=0, min_open=True, max=MAX_HOURS),
    help="How many markers would a cleanup with this retention delete?  [default: the retention of the last complete "
    "cleanup, else the declared horizon, else 168]",
)
@json_option
def show_stats(deployment: Deployment, retention_hours: float | None, as_json: bool) -> None:
    """Count the markers of each handler, and print their age, their size, and how many cleanup would delete.

    Run it to see how the table grows, and before you choose a retention. The command reads every marker, which takes
    some seconds for ten million markers. Deliveries may continue meanwhile.

    \b
    Examples:
      idempotency stats --database-url postgresql+psycopg://app@db/orders
      idempotency stats --json | jq .expired
    """
    tables = deployment.tables
    with deployment.opened() as engine:
        found = stats(engine, tables=tables, retention_hours=retention_hours)
        if as_json:
            print_json({**deployment.place, **asdict(found)})
            return
        say(str(deployment))
        _print(found, tables)
        say(f"\n{after_stats(found, tables)}{others_beside(engine, tables)}")


def _print(found: Stats, tables: DedupTables) -> None:
    state = found.state
    cleaned = "-" if state.retention_hours is None else f", keeps {state.retention_hours:g} h"
    for name, value in (
        (f"{tables.noun}s", f"{found.markers:,}"),
        ("on disk", f"{size(found.bytes)}, indexes included"),
        ("oldest", ago(found.oldest, found.at)),
        ("newest", ago(found.newest, found.at)),
        ("cleanup would delete", f"{found.expired:,}, older than {in_hours(found.retention_hours)}"),
        ("last complete cleanup", "never" if state.cleaned_at is None else ago(state.cleaned_at, found.at) + cleaned),
        ("redelivery horizon", "not declared" if state.horizon_hours is None else in_hours(state.horizon_hours)),
        ("schema version", state.schema_version or "not recorded: idempotency did not create the tables"),
    ):
        click.echo(f"  {name:<22}  {value}")
    if not found.handlers:
        return
    click.echo()
    counted = f"{tables.noun}s"
    table(
        (tables.handler, counted, "oldest (UTC)", "newest (UTC)"),
        [
            (
                printable(each.handler),
                f"{each.markers:,}",
                *("-" if at is None else moment_without_zone(at) for at in (each.oldest, each.newest)),
            )
            for each in found.handlers
        ],
        right=(counted,),
    )
