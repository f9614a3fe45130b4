"""`idempotency schema`: print the SQL that makes the tables, for those who run it themselves."""

from __future__ import annotations

import click
from sqlalchemy import MetaData

from projector_dedup import make_tables
from projector_dedup.maintenance.ddl import ddl
from projector_dedup.tables import DEFAULT_NAME

from .errors import one_line
from .options import EXIT_CODES, debug_option


@click.command(epilog=EXIT_CODES)
@click.option(
    "--dialect",
    type=click.Choice(["postgresql", "mariadb", "mysql", "sqlite"]),
    default="postgresql",
    show_default=True,
    help="The database that is to run it.",
)
@click.option("--table", default=DEFAULT_NAME, show_default=True, help="The name of the marker table.")
@click.option("--schema", help="The schema of the marker table.  [default: that of whoever runs it]")
@debug_option
def schema(dialect: str, table: str, schema: str | None, debug: bool) -> None:
    """Print the SQL that makes the tables. Needs no database.

    `idempotency migrate` adopts tables that were made by it.

    \b
    Examples:
      idempotency schema | psql orders
      idempotency schema --dialect mariadb --table inbox --schema billing
    """
    with one_line(debug=debug):
        click.echo(ddl(dialect, make_tables(MetaData(), table, schema)), nl=False)
