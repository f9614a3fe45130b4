"""`idempotency cleanup` and `horizon`: delete the markers of messages that cannot come again any more."""

from __future__ import annotations

import math
import time
from typing import Any

import click

from projector_dedup.maintenance.check import verify
from projector_dedup.maintenance.cleanup import (
    COUNTED,
    MAX_HOURS,
    count_expired,
    declare_horizon,
    prune,
    redelivery_horizon,
    refuse_short_retention,
)
from projector_dedup.maintenance.rows import has_markers
from projector_dedup.message import printable

from .options import EXIT_CODES, Deployment, database_options
from .output import Failed, confirmed, counting, explained, log_json, noted, say


def _finite(_context: click.Context, _parameter: click.Parameter, value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):  # click finds NaN in every range
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
    help="Markers deleted in one transaction. Smaller batches hold locks for a shorter time.",
)
@click.option("--max-batches", type=click.IntRange(min=1), help="Stop after so many batches.")
@click.option(
    "--time-budget",
    type=click.FloatRange(min=0, min_open=True, max=MAX_HOURS),
    callback=_finite,
    help="Stop after so many seconds.",
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
    "--effect",
    help="Delete the markers of this handler, or the records of this operation, only. A name that has none is refused.",
)
@click.option("--dry-run", is_flag=True, help=f"Delete nothing: count, up to {COUNTED:,}.")
@click.option("--force", is_flag=True, help="Prune even below the declared redelivery horizon.")
@click.option("--log-json", "as_json", is_flag=True, help="A line with a JSON object on stdout instead of text.")
def cleanup(deployment: Deployment, as_json: bool, **options: Any) -> None:
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
    try:
        line, facts = _cleaned(deployment, **options)
    except Exception as error:
        if as_json:
            log_json("cleanup", deployment=str(deployment), error=explained(error))
        raise
    if as_json:
        log_json("cleanup", deployment=str(deployment), **facts)
    else:
        say(line)


def _cleaned(deployment: Deployment, *, dry_run: bool, **bounds: Any) -> tuple[str, dict[str, Any]]:
    """Delete, or in a dry run count, and return what was done: in a line for people, and as facts for machines."""
    handler, hours, tables = bounds["handler"], bounds["retention_hours"], deployment.tables
    what = f"{'' if handler is None else f' of {printable(handler)}'} older than {hours:g} hours"
    with deployment.opened() as engine:
        if dry_run:
            if not bounds["force"]:
                refuse_short_retention(engine, hours, tables=tables)
            found = count_expired(engine, retention_hours=hours, tables=tables, handler=handler)
            at_least = "at least " if found >= COUNTED else ""
            line = f"Would delete {at_least}{deployment.rows(found)}{what}."
            facts: dict[str, Any] = {"dry_run": True, "expired": found, "counted_all": found < COUNTED}
        else:
            began = time.monotonic()
            with noted() as interrupted, counting("Deleted") as progress:
                done = prune(engine, tables=tables, on_batch=progress, stop=interrupted, **bounds)
            found, seconds = done.deleted, round(time.monotonic() - began, 3)
            rest = "." if done.complete else f"; {done.left}: more may be left."
            line = f"Deleted {deployment.rows(found)}{what}{rest}"
            facts = {"deleted": found, "complete": done.complete, "seconds": seconds}
        if not found and handler is not None and not has_markers(engine, handler, tables=tables):
            raise Failed(
                f"no {tables.noun} of {printable(handler)} in {deployment}: look at the spelling; `idempotency "
                f"stats{tables.option}` has the names"
            )
    return line, facts


@click.command(epilog=EXIT_CODES)
@database_options
@click.argument("hours", required=False, type=click.FloatRange(min=0, min_open=True, max=MAX_HOURS), callback=_finite)
@click.option("--yes", is_flag=True, help="Lower it without asking.")
def horizon(deployment: Deployment, hours: float | None, yes: bool) -> None:
    """Show the redelivery horizon, or declare it.

    It is the longest time after which a message may come again: the broker's retention, the dead-letter queue and a
    replay by hand, added up. Once declared, `cleanup` refuses a shorter retention, from whichever machine it is run.
    To raise it is always safe; before it is lowered, this asks.

    \b
    Examples:
      idempotency horizon
      idempotency horizon 336
    """
    tables = deployment.tables
    with deployment.opened() as engine:
        verify(engine, tables)
        known = redelivery_horizon(engine, tables=tables)
        if hours is not None:
            if known is not None and hours < known and not yes:
                question = (
                    f"{deployment}: messages may be redelivered for {known:g} hours. Forget them after {hours:g}?"
                )
                if not confirmed(question):
                    raise Failed(f"the horizon stays at {known:g} hours; --yes lowers it without asking")
            declare_horizon(engine, hours, tables=tables)
            known = hours
    say("No redelivery horizon is declared." if known is None else f"The redelivery horizon is {known:g} hours.")
