"""`idempotency cleanup`: delete the markers of messages that were processed long ago."""

from __future__ import annotations

import math
import time

import click
from sqlalchemy import Engine

from projector_dedup.maintenance.cleanup import COUNTED, count_expired, prune
from projector_dedup.maintenance.horizon import MAX_HOURS, refuse_short_retention
from projector_dedup.maintenance.markers import has_markers
from projector_dedup.maintenance.stats import stats
from projector_dedup.message import printable

from .errors import Failed
from .interrupts import noted
from .log import log_json
from .options import EXIT_CODES, Deployment, Deployments, database_options
from .progress import counting


def _finite(_context: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise click.BadParameter("it must be a finite number")
    return value


@click.command(epilog=EXIT_CODES)
@database_options
@click.option(
    "--retention-hours",
    type=click.FloatRange(min=0, min_open=True, max=MAX_HOURS),
    default=168.0,
    show_default=True,
    callback=_finite,
    help="Keep markers for this long. It must exceed the longest redelivery (broker, dead letters, manual replay): "
    "a message that comes again after its marker was deleted is applied again. `idempotency horizon` declares it.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=5000,
    show_default=True,
    help="Markers deleted in one transaction, about. Smaller batches hold locks for a shorter time.",
)
@click.option("--max-batches", type=click.IntRange(min=1), help="Stop after so many batches.")
@click.option(
    "--time-budget",
    type=click.FloatRange(min=0, min_open=True, max=MAX_HOURS),
    callback=_finite,
    help="Stop after so many seconds, for each database.",
)
@click.option(
    "--pause",
    type=click.FloatRange(min=0, max=MAX_HOURS),
    default=0.0,
    show_default=True,
    callback=_finite,
    help="Seconds from one batch to the next, for replicas to catch up, say.",
)
@click.option(
    "--handler",
    "--operation",
    help="Delete the markers of this handler, or the records of this operation, only. A name that has none is refused.",
)
@click.option("--dry-run", is_flag=True, help=f"Delete nothing: count, up to {COUNTED:,}.")
@click.option("--force", is_flag=True, help="Prune even below the declared redelivery horizon.")
@click.option("--log-json", "as_json", is_flag=True, help="A JSON object a line on stdout instead of text.")
def cleanup(
    deployments: Deployments,
    retention_hours: float,
    batch_size: int,
    max_batches: int | None,
    time_budget: float | None,
    pause: float,
    handler: str | None,
    dry_run: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Delete the markers of messages that were processed long ago. Meant for cron.

    Every batch commits by itself, so a run may be interrupted at any time and run again; several may run at once.
    After SIGTERM or Ctrl-C the batch is finished, and the exit code is 0.

    \b
    Examples:
      idempotency cleanup --database-url postgresql+psycopg://app@db.example/orders
      idempotency cleanup --retention-hours 720 --batch-size 1000 --time-budget 600
      idempotency cleanup --dry-run
      idempotency cleanup --commands --operation shop.place-order
    """
    of = f" of {printable(handler)}" if handler else ""
    known = 0  # databases that have a marker of the handler
    age = f"older than {retention_hours:g} hours"

    def refuse_unknown(deployment: Deployment, engine: Engine, found: int) -> None:
        nonlocal known
        if found or handler is None or has_markers(engine, handler, tables=deployment.tables):
            known += 1
        elif not deployments.several:
            raise Failed(_unknown(deployment, engine, handler))

    def count(deployment: Deployment, engine: Engine) -> None:
        if not force:
            refuse_short_retention(engine, retention_hours, tables=deployment.tables)
        found = count_expired(engine, retention_hours=retention_hours, tables=deployment.tables, handler=handler)
        refuse_unknown(deployment, engine, found)
        if as_json:
            log_json("cleanup", deployment=str(deployment), dry_run=True, expired=found, counted_all=found < COUNTED)
        else:
            at_least = "at least " if found >= COUNTED else ""
            line = f"Would delete {at_least}{deployments.rows(found)}{of} {age}."
            deployments.say(deployment, line)

    def failed(url: str, failure: Failed) -> None:
        if as_json:
            log_json("cleanup", deployment=url, error=failure.message)

    with noted() as interrupted:

        def clean(deployment: Deployment, engine: Engine) -> None:
            began = time.monotonic()
            with counting("Deleted") as progress:
                done = prune(
                    engine,
                    retention_hours=retention_hours,
                    batch_size=batch_size,
                    tables=deployment.tables,
                    on_batch=progress,
                    max_batches=max_batches,
                    time_budget=time_budget,
                    pause=pause,
                    handler=handler,
                    force=force,
                    stop=interrupted,
                )
            refuse_unknown(deployment, engine, done.deleted)
            if as_json:
                seconds = round(time.monotonic() - began, 3)
                facts = {"deleted": done.deleted, "complete": done.complete, "seconds": seconds}
                log_json("cleanup", deployment=str(deployment), **facts)
                return
            line = f"Deleted {deployments.rows(done.deleted)}{of} {age}"
            deployments.say(deployment, f"{line}." if done.complete else f"{line}; {done.left}: more may be left.")

        deployments.each(count if dry_run else clean, on_failure=failed)
    if not known:
        raise Failed(f"no {deployments.kind.noun}{of} in any of these databases")


def _unknown(deployment: Deployment, engine: Engine, handler: str) -> str:
    """Return that a handler has no marker, and which handlers have some: the name is taken for a typing error."""
    tables = deployment.tables
    names = [printable(each.handler) for each in stats(engine, tables=tables).handlers]
    some = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return f"no {tables.noun} of {printable(handler)} in {deployment}: look at the spelling; " + (
        f"the {tables.handler}s that have some are {some}" if names else "the table is empty"
    )
