"""`idempotency schema` prints the SQL that creates the tables."""

from __future__ import annotations

import click

from projector_dedup.maintenance.schema import ddl, upgrade_ddl
from projector_dedup.tables import DedupTables

from .options import EXIT_CODES, debug_option, table_options
from .output import one_line


@click.command(epilog=EXIT_CODES)
@click.option(
    "--dialect",
    type=click.Choice(["postgresql", "mariadb", "mysql", "sqlite"]),
    default="postgresql",
    show_default=True,
    help="The database that will run the SQL.",
)
@click.option("--upgrade", is_flag=True, help="Print the SQL that changes tables of the version before.")
@table_options
@debug_option
def schema(dialect: str, upgrade: bool, tables: DedupTables, debug: bool) -> None:
    """Print the SQL that creates the tables, without a database.

    Use it if you do not use Alembic, or if another team or tool creates your tables.

    \b
    Examples:
      idempotency schema | psql orders
      idempotency schema --dialect sqlite | sqlite3 read_model.db
      idempotency schema --dialect mariadb --table inbox --schema billing
      idempotency schema --commands
      idempotency schema --upgrade | psql orders
    """
    with one_line(debug=debug):
        sql = upgrade_ddl(dialect, tables) if upgrade else ddl(dialect, tables)
        click.echo(f"-- for {dialect} (--dialect names another database: mariadb, mysql or sqlite)\n{sql}", nl=False)
