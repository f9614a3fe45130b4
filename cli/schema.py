"""`idempotency migrate` creates the tables. `idempotency schema` prints the SQL that creates them."""

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
    """Create the tables, or upgrade them to this version.

    Run it before you deploy a new version, if you do not use Alembic. It adopts existing tables that are correct. It
    does not change existing tables that are wrong, and prints what is wrong. You may run it at any time, and several
    times at once. For SQLite it creates the file.

    \b
    Examples:
      idempotency migrate --database-url postgresql+psycopg://owner@db/orders
      idempotency migrate --table inbox --schema billing
      idempotency migrate --commands
    """
    tables = deployment.tables
    with deployment.opened(create=True) as engine:
        say(f"{tables.marker.fullname} {_outcome(bring_up_to_date(engine, tables))}.")


def _outcome(done: Migrated) -> str:
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
    help="The database that will run the SQL.",
)
@table_options
@debug_option
def schema(dialect: str, tables: DedupTables, debug: bool) -> None:
    """Print the SQL that creates the tables, without a database.

    Use it if another team or tool creates your tables. `idempotency migrate` adopts tables that this SQL created.

    \b
    Examples:
      idempotency schema | psql orders
      idempotency schema --dialect mariadb --table inbox --schema billing
      idempotency schema --commands
    """
    with one_line(debug=debug):
        sql = ddl(dialect, tables)
        click.echo(f"-- for {dialect} (--dialect names another database: mariadb, mysql or sqlite)\n{sql}", nl=False)
