"""The tables as SQL text, for whoever runs it by other means than ours."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Dialect, insert, make_url
from sqlalchemy.schema import CreateIndex, CreateTable

from .state import SCHEMA_VERSION
from .tables import SCHEMA, DedupTables, default_tables

_RIGHTS = "SELECT, INSERT, UPDATE, DELETE"


def ddl(database: str, tables: DedupTables = default_tables) -> str:
    """What makes the tables on ``database`` ("postgresql", "mariadb", "mysql", "sqlite"), statements ended by ";".

    Raises ``sqlalchemy.exc.NoSuchModuleError`` for a database that SQLAlchemy does not know.
    """
    dialect_class: Any = make_url(f"{database}://").get_dialect()
    dialect: Dialect = dialect_class(paramstyle="named")  # a driver's own would double each % of a name
    both = (tables.marker, tables.state)
    statements = [str(CreateTable(table).compile(dialect=dialect)) for table in both]
    statements += [str(CreateIndex(index).compile(dialect=dialect)) for table in both for index in table.indexes]
    row = insert(tables.state).values(key=SCHEMA_VERSION, value=str(SCHEMA))
    statements.append(str(row.compile(dialect=dialect, compile_kwargs={"literal_binds": True})))
    names = [dialect.identifier_preparer.format_table(table) for table in both]
    grants = [f"-- GRANT {_RIGHTS} ON {name} TO <application user>;" for name in names]
    told = "-- Whoever delivers, checks and cleans up needs no more rights than these, where there are users:"
    return "\n".join([*(f"{statement.strip()};\n" for statement in statements), told, *grants, ""])
