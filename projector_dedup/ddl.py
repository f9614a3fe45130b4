"""The tables as SQL text, for whoever runs it by other means than ours."""

from __future__ import annotations

from sqlalchemy import insert, make_url
from sqlalchemy.schema import CreateIndex, CreateTable

from .state import SCHEMA_VERSION
from .tables import SCHEMA, DedupTables, default_tables

_RIGHTS = "SELECT, INSERT, UPDATE, DELETE"


def ddl(database: str, tables: DedupTables = default_tables) -> str:
    """What makes the tables on ``database`` ("postgresql", "mariadb", "mysql", "sqlite"), statements ended by ";".

    Raises ``sqlalchemy.exc.NoSuchModuleError`` for a database that SQLAlchemy does not know.
    """
    dialect = make_url(f"{database}://").get_dialect()(paramstyle="named")
    both = (tables.marker, tables.state)
    statements = [str(CreateTable(table).compile(dialect=dialect)) for table in both]
    statements += [str(CreateIndex(index).compile(dialect=dialect)) for table in both for index in table.indexes]
    row = insert(tables.state).values(key=SCHEMA_VERSION, value=str(SCHEMA))
    statements.append(str(row.compile(dialect=dialect, compile_kwargs={"literal_binds": True})))
    preparer = dialect.identifier_preparer
    grants = [f"-- GRANT {_RIGHTS} ON {preparer.format_table(table)} TO <application user>;" for table in both]
    rights = ["-- Whoever delivers, checks and cleans up needs no more rights than these, where there are users:", *grants]
    return "\n".join([*(f"{statement.strip()};\n" for statement in statements), *rights]) + "\n"
