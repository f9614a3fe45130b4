"""`idempotency schema`: print the SQL that makes the tables, for those who run it themselves."""

from __future__ import annotations

import click
from sqlalchemy import MetaData

from projector_dedup import DedupTables
from projector_dedup.maintenance.ddl import ddl

from .errors import one_line
from .options import EXIT_CODES, debug_option, table_options


@click.command(epilog=EXIT_CODES)
@click.option(
    "--dialect",
    type=click.Choice(["postgresql", "mariadb", "mysql", "sqlite"]),
    default="postgresql",
    show_default=True,
    help="The database that is to run it.",
)
@table_options
@click.option("--schema", help="The schema of the table.  [default: that of whoever runs it]")
@debug_option
def schema(dialect: str, kind: type[DedupTables], table: str, schema: str | None, debug: bool) -> None:
    """Print the SQL that makes the tables. Needs no database.

    `idempotency migrate` adopts tables that were made by it.

    \b
    Examples:
      idempotency schema | psql orders
      idempotency schema --dialect mariadb --table inbox --schema billing
      idempotency schema --commands
    """
    with one_line(debug=debug):
        click.echo(ddl(dialect, kind.make(MetaData(), table, schema)), nl=False)
