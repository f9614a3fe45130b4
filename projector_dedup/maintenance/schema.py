"""The kinds of tables, and the SQL that creates them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Dialect, insert, make_url
from sqlalchemy.schema import CreateIndex, CreateTable

from ..commands import CommandTables
from ..effects import EffectTables
from ..tables import DedupTables, default_tables
from .state import SCHEMA_VERSION

KINDS: tuple[type[DedupTables], ...] = (DedupTables, CommandTables, EffectTables)
"""The kinds of tables. Each has the columns of those before it, and some of its own."""

_RIGHTS = "SELECT, INSERT, UPDATE, DELETE"


def ddl(database: str, tables: DedupTables = default_tables) -> str:
    """Return the SQL that creates the tables on ``database``: "postgresql", "mariadb", "mysql" or "sqlite".

    Each statement ends with ";". The last lines are comments with the GRANT statements for the application's user.

    Raises ``sqlalchemy.exc.NoSuchModuleError`` for a database that SQLAlchemy does not support.
    """
    dialect_class: Any = make_url(f"{database}://").get_dialect()
    dialect: Dialect = dialect_class(paramstyle="named")  # a driver's own would double each % of a name
    both = (tables.marker, tables.state)
    version = insert(tables.state).values(key=SCHEMA_VERSION, value=str(tables.version))
    statements = [
        *(CreateTable(table).compile(dialect=dialect) for table in both),
        *(CreateIndex(index).compile(dialect=dialect) for table in both for index in table.indexes),
        version.compile(dialect=dialect, compile_kwargs={"literal_binds": True}),
    ]
    names = [dialect.identifier_preparer.format_table(table) for table in both]
    grants = [f"-- GRANT {_RIGHTS} ON {name} TO <application user>;" for name in names]
    rights = "-- The user that delivers, checks and cleans up needs these rights, and no others:"
    return "\n".join([*(f"{str(statement).strip()};\n" for statement in statements), rights, *grants, ""])
