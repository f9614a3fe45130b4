"""`idempotency rename`: copy a handler's markers to its new name."""

from __future__ import annotations

from collections.abc import Callable

import click
from sqlalchemy import Engine

from projector_dedup.maintenance.rename import MAX_BATCH_SIZE, Renamed
from projector_dedup.maintenance.rename import rename as rename_markers

from .ask import confirmed
from .errors import Failed
from .interrupts import deferred
from .options import EXIT_CODES, Deployment, Deployments, database_options
from .progress import counting


@click.command(epilog=EXIT_CODES)
@database_options
@click.argument("old")
@click.argument("new")
@click.option(
    "--remove-old",
    is_flag=True,
    help="Delete the markers of OLD as well, as soon as they are copied. Only when no code of the old name will run "
    "again, a deploy that is rolled back included; else let cleanup delete them in its time.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(1, MAX_BATCH_SIZE),
    default=1000,
    show_default=True,
    help="Markers copied in one transaction. Smaller batches hold locks for a shorter time.",
)
@click.option("--dry-run", is_flag=True, help="Count; write nothing.")
@click.option("--yes", is_flag=True, help="Do not ask before --remove-old.")
def rename(
    deployments: Deployments, old: str, new: str, remove_old: bool, batch_size: int, dry_run: bool, yes: bool
) -> None:
    """Copy the markers of the handler OLD to the name NEW, so that `formerly` can go from the code.

    Run it when every process knows the new name. Deliveries and cleanup may go on meanwhile. Every batch commits by
    itself, so a run may be interrupted at any time and run again.

    \b
    Examples:
      idempotency rename billing.projections.Totals.add account-totals.add --dry-run
      idempotency rename billing.projections.Totals.add account-totals.add
    """
    question = f"Will no code of the name {old} run again? Its {deployments.kind.noun}s will be deleted"
    if remove_old and not dry_run and not yes and not confirmed(question):
        raise Failed("nothing was renamed")

    def copy(deployment: Deployment, engine: Engine) -> None:
        with deferred() as interrupted, counting("Copied") as count:
            so_far = 0

            def progress(renamed: Renamed) -> None:
                nonlocal so_far
                if count is not None:
                    count(renamed.copied - so_far)
                so_far = renamed.copied
                interrupted()

            done = rename_markers(
                engine,
                old,
                new,
                tables=deployment.tables,
                batch_size=batch_size,
                remove_old=remove_old,
                dry_run=dry_run,
                on_batch=progress,
            )
        deployments.say(deployment, _said(done, old, new, deployments.rows, dry_run=dry_run))

    deployments.each(copy)


def _said(done: Renamed, old: str, new: str, rows: Callable[[int], str], *, dry_run: bool) -> str:
    if done == Renamed():
        return f"Nothing is left under {old}."
    would = "Would have copied" if dry_run else "Copied"
    line = f"{would} {rows(done.copied)} of {old} to {new}; {done.already:,} had one already."
    if done.removed:
        line += f" {'Would have removed' if dry_run else 'Removed'} {rows(done.removed)} of {old}."
    return line
