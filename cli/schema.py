"""`idempotency migrate` and `schema`: make the tables, or print the SQL that makes them."""

from __future__ import annotations

import click

from projector_dedup import DedupTables
from projector_dedup.maintenance.schema import Migrated, ddl
from projector_dedup.maintenance.schema import migrate as bring_up_to_date

from .options import EXIT_CODES, Deployment, database_options, debug_option, table_options
from .output import one_line, say


@click.command(epilog=EXIT_CODES)
@database_options
def migrate(deployment: Deployment) -> None:
    """Make the tables, or bring them to the schema of this version. For those without Alembic.

    Tables that are there and right are adopted; those that are wrong are left as they are, and told. May be run at
    any time, and by several at once. On SQLite it creates the file.

    \b
    Examples:
      idempotency migrate --database-url postgresql+psycopg://owner@db.example/orders
      idempotency migrate --table inbox --schema billing
      idempotency migrate --commands
    """
    tables = deployment.tables
    with deployment.opened(create=True) as engine:
        say(f"{tables.marker.fullname} {_told(bring_up_to_date(engine, tables))}.")


def _told(done: Migrated) -> str:
    if done.before is None:
        return f"was created at version {done.after}"
    adopted = "was there and right: adopted, and " if done.adopted else ""
    if done.before < done.after:
        return f"{adopted}went from version {done.before} to {done.after}"
    return f"{adopted}is at version {done.after}"


@click.command(epilog=EXIT_CODES)
@click.option(
    "--dialect",
    type=click.Choice(["postgresql", "mariadb", "mysql", "sqlite"]),
    default="postgresql",
    show_default=True,
    help="The database that is to run it.",
)
@table_options
@debug_option
def schema(dialect: str, tables: DedupTables, debug: bool) -> None:
    """Print the SQL that makes the tables. Needs no database.

    `idempotency migrate` adopts tables that were made by it.

    \b
    Examples:
      idempotency schema | psql orders
      idempotency schema --dialect mariadb --table inbox --schema billing
      idempotency schema --commands
    """
    with one_line(debug=debug):
        click.echo(ddl(dialect, tables), nl=False)
