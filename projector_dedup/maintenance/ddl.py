"""The tables as SQL text, for those who run it themselves, and for `idempotency migrate --dry-run`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Dialect, Table, insert, make_url
from sqlalchemy.schema import CreateIndex, CreateTable, ExecutableDDLElement

from ..tables import DedupTables, default_tables
from .state import SCHEMA_VERSION

_RIGHTS = "SELECT, INSERT, UPDATE, DELETE"


def ddl(database: str, tables: DedupTables = default_tables) -> str:
    """Return the SQL that makes the tables on ``database``: "postgresql", "mariadb", "mysql" or "sqlite".

    Each statement ends with ";". The last lines are comments: the GRANT statements for the application's user.

    Raises ``sqlalchemy.exc.NoSuchModuleError`` for a database that SQLAlchemy does not know.
    """
    dialect_class: Any = make_url(f"{database}://").get_dialect()
    dialect: Dialect = dialect_class(paramstyle="named")  # a driver's own would double each % of a name
    both = (tables.marker, tables.state)
    statements = [*creating(both, dialect), version_row(tables, dialect)]
    names = [dialect.identifier_preparer.format_table(table) for table in both]
    grants = [f"-- GRANT {_RIGHTS} ON {name} TO <application user>;" for name in names]
    told = "-- Whoever delivers, checks and cleans up needs no more rights than these, where there are users:"
    return "\n".join([*(f"{statement};\n" for statement in statements), told, *grants, ""])


def creating(tables: Sequence[Table], dialect: Dialect) -> list[str]:
    """Return the statements that create ``tables``, then those that create their indexes, without ";"."""
    elements: list[ExecutableDDLElement] = [CreateTable(table) for table in tables]
    elements += [CreateIndex(index) for table in tables for index in table.indexes]
    return [str(element.compile(dialect=dialect)).strip() for element in elements]


def version_row(tables: DedupTables, dialect: Dialect) -> str:
    """Return the INSERT that writes this version of the schema into the state table, without ";"."""
    row = insert(tables.state).values(key=SCHEMA_VERSION, value=str(tables.version))
    return str(row.compile(dialect=dialect, compile_kwargs={"literal_binds": True}))
