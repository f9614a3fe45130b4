"""`idempotency cleanup`: delete the markers of messages that were processed long ago."""

from __future__ import annotations

import math
import sys

import click
from sqlalchemy import Engine

from projector_dedup.retention import cleanup as delete_old_markers

from .options import EXIT_CODES, Deployment, Deployments, database_options


def _finite(_context: click.Context, _parameter: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter("it must be a finite number of hours")
    return value


@click.command(epilog=EXIT_CODES)
@database_options
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
def cleanup(deployments: Deployments, retention_hours: float, batch_size: int) -> None:
    """Delete the markers of messages that were processed long ago. Meant for cron.

    Every batch commits by itself, so a run may be interrupted at any time and run again; several may run at once.

    \b
    Examples:
      idempotency cleanup --database-url postgresql+psycopg://app@db.example/orders
      idempotency cleanup --retention-hours 720 --batch-size 1000
    """

    def clean(deployment: Deployment, engine: Engine) -> None:
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
                tables=deployment.tables,
                on_batch=progress if sys.stderr.isatty() else None,
            )
        finally:
            if so_far:
                click.echo(err=True)
        line = f"Deleted {deleted:,} marker{'' if deleted == 1 else 's'} older than {retention_hours:g} hours."
        deployments.say(deployment, line)

    deployments.each(clean)
