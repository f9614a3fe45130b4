"""`idempotency cleanup` deletes old markers. `idempotency horizon` declares how late a message may come again."""

from __future__ import annotations

import time
from typing import Any

import click

from projector_dedup.maintenance.cleanup import (
    COUNTED,
    MAX_HOURS,
    count_expired,
    declare_horizon,
    prune,
    redelivery_horizon,
    retention_of,
)
from projector_dedup.maintenance.rows import has_markers
from projector_dedup.maintenance.state import in_hours
from projector_dedup.message import printable

from .options import EXIT_CODES, Deployment, Number, WholeNumber, database_options, of_all_kinds
from .output import Failed, confirmed, counting, explained, log_json, noted, say


@click.command(epilog=EXIT_CODES)
@of_all_kinds
@click.option(
    "--retention-hours",
    type=Number(min=0, min_open=True, max=MAX_HOURS),
    help="Keep markers for this many hours. Choose more than the longest time after which the broker, the dead-letter "
    "queue or an operator may deliver a message again.  [default: the declared horizon, else 168]",
)
@click.option(
    "--batch-size",
    type=WholeNumber(min=1),
    default=5000,
    show_default=True,
    help="How many markers to delete in one transaction. Smaller batches hold locks for a shorter time.",
)
@click.option("--max-batches", type=WholeNumber(min=1), help="Stop after this many batches.")
@click.option(
    "--time-budget",
    type=Number(min=0, min_open=True, max=MAX_HOURS),
    help="Stop after this many seconds.",
)
@click.option(
    "--pause",
    type=Number(min=0, max=MAX_HOURS),
    default=0.0,
    show_default=True,
    help="How many seconds to wait between two batches, for example to let replicas catch up.",
)
@click.option(
    "--handler",
    "--operation",
    "--effect",
    help="Delete only the markers of this handler, or the records of this operation. Fails if there is none.",
)
@click.option("--dry-run", is_flag=True, help=f"Only count the expired markers, up to {COUNTED:,}. Delete nothing.")
@click.option("--log-json", "as_json", is_flag=True, help="Print one line with a JSON object instead of text.")
@click.option(
    "--quiet",
    is_flag=True,
    help="Print nothing after a complete run, so that cron sends mail only if something needs attention.",
)
def cleanup(deployment: Deployment, as_json: bool, quiet: bool, **options: Any) -> None:
    """Delete the markers of messages that were processed long ago.

    Run it every day from cron; deliveries may continue meanwhile. Each batch commits separately, so you may interrupt a
    run at any time, run it again, or run several at once. After SIGTERM or Ctrl-C it finishes the current batch, and
    the exit code is 0.

    \b
    Examples:
      idempotency cleanup --database-url postgresql+psycopg://app@db/orders
      idempotency cleanup --retention-hours 720 --time-budget 600
      idempotency cleanup --dry-run
      idempotency cleanup --commands --operation shop.place-order
    """
    try:
        line, facts = _cleaned(deployment, **options)
    except Exception as error:
        if as_json:
            log_json("cleanup", deployment=str(deployment), error=explained(error))
        raise
    if quiet and facts.get("complete"):
        return
    if as_json:
        log_json("cleanup", deployment=str(deployment), **facts)
    else:
        say(line)


def _cleaned(deployment: Deployment, *, dry_run: bool, **bounds: Any) -> tuple[str, dict[str, Any]]:
    """Delete expired markers (or count them in a dry run). Return the result as a line of text and as JSON values."""
    handler, tables = bounds["handler"], deployment.tables
    with deployment.opened() as engine:
        hours = retention_of(engine, bounds["retention_hours"], tables=tables)
        what = f"{'' if handler is None else f' of {printable(handler)}'} older than {in_hours(hours)}"
        if dry_run:
            found = count_expired(engine, retention_hours=hours, tables=tables, handler=handler)
            at_least = "at least " if found >= COUNTED else ""
            line = f"Would delete {at_least}{deployment.rows(found)}{what}."
            facts: dict[str, Any] = {"dry_run": True, "expired": found, "counted_all": found < COUNTED}
        else:
            began = time.monotonic()
            with noted() as interrupted, counting("Deleted") as progress:
                done = prune(engine, tables=tables, on_batch=progress, stop=interrupted, **bounds)
            found, seconds = done.deleted, round(time.monotonic() - began, 3)
            rest = "." if done.complete else f"; {done.left}: older markers may remain. Run the cleanup again."
            line = f"Deleted {deployment.rows(found)}{what}{rest}"
            facts = {"deleted": found, "complete": done.complete, "seconds": seconds}
            if done.rebuilt:
                names = ", ".join(printable(name) for name in done.rebuilt)
                line += f" Kept the markers of open rebuilds: {names} (finish them by `idempotency rebuild --verify`)."
                facts["rebuilds"] = list(done.rebuilt)
            if done.declared is not None:
                line += (
                    f" Declared {in_hours(done.declared)} as the redelivery horizon, because none was declared. Run it "
                    "again in an hour: then it also deletes the markers of messages with a time."
                )
                facts["declared_horizon_hours"] = done.declared
        if not found and handler is not None and not has_markers(engine, handler, tables=tables):
            raise Failed(
                f"there is no {tables.noun} of {printable(handler)} in {deployment}; check the name in the "
                f"column handler of {tables.marker.fullname}"
            )
    return line, facts


@click.command(epilog=EXIT_CODES)
@database_options
@click.argument("hours", required=False, type=Number(min=0, min_open=True, max=MAX_HOURS))
@click.option("--yes", is_flag=True, help="Lower the horizon without asking.")
def horizon(deployment: Deployment, hours: float | None, yes: bool) -> None:
    """Show the redelivery horizon, or declare it in HOURS.

    The horizon is the longest time after which a message may come again: add up the broker's retention, the time in the
    dead-letter queue, and the time until a manual replay. Declare it once, before you put `cleanup` into cron. On every
    machine, `cleanup` then keeps markers for this time, and refuses a shorter retention. Dispatchers refuse a message
    without a marker that occurred earlier, as late. A raised horizon does not bring back markers that are deleted.
    Before the command lowers the horizon, it asks for confirmation.

    \b
    Examples:
      idempotency horizon
      idempotency horizon 336
    """
    tables = deployment.tables
    with deployment.opened() as engine:
        known = None if hours is not None and yes else redelivery_horizon(engine, tables=tables)
        if hours is not None:
            if known is not None and hours < known:
                question = (
                    f"{deployment}: the horizon is {in_hours(known)}. A message that comes later is refused as late, "
                    f"or applied again if it carries no time. Lower it to {in_hours(hours)}?"
                )
                if not confirmed(question):
                    raise Failed(f"the horizon is still {in_hours(known)}; --yes lowers it without asking")
            declare_horizon(engine, hours, tables=tables)
            known = hours
    say("No redelivery horizon is declared." if known is None else f"The redelivery horizon is {in_hours(known)}.")
