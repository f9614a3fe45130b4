"""`idempotency migrate`: make the tables, or bring them to the schema of this version."""

from __future__ import annotations

import click
from sqlalchemy import Engine

from projector_dedup.maintenance.migrate import Migrated, planned
from projector_dedup.maintenance.migrate import migrate as bring_up_to_date

from .options import EXIT_CODES, Deployment, Deployments, database_options


@click.command(epilog=EXIT_CODES)
@database_options
@click.option("--dry-run", is_flag=True, help="Print the SQL that would run, and change nothing.")
def migrate(deployments: Deployments, dry_run: bool) -> None:
    """Make the tables, or bring them to the schema of this version. For those without Alembic.

    Tables that are there and right are adopted; those that are wrong are left as they are, and told. May be run at
    any time, and by several at once. On SQLite it creates the file.

    \b
    Examples:
      idempotency migrate --database-url postgresql+psycopg://owner@db.example/orders
      idempotency migrate --table inbox --schema billing --dry-run
      idempotency migrate --commands
    """

    def run(deployment: Deployment, engine: Engine) -> None:
        name = deployment.tables.marker.fullname
        if dry_run:
            deployments.say(deployment, planned(engine, deployment.tables).strip() or f"-- {name}: nothing to do")
        else:
            deployments.say(deployment, f"{name} {_told(bring_up_to_date(engine, deployment.tables))}.")

    deployments.each(run, create=not dry_run)


def _told(done: Migrated) -> str:
    if done.before is None:
        return f"was created at version {done.after}"
    adopted = "was there and right: adopted, and " if done.adopted else ""
    if done.before < done.after:
        return f"{adopted}went from version {done.before} to {done.after}"
    return f"{adopted}is at version {done.after}"
