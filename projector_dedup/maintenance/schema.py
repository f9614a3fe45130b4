"""The kinds of tables, their schema version, and the SQL that creates them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Dialect, false, insert, make_url, select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.schema import CreateIndex, CreateTable

from ..commands import CommandTables
from ..effects import EffectTables
from ..errors import MissingTableError
from ..tables import DedupTables, default_tables, full_name
from .findings import Finding
from .running import connected_to
from .state import SCHEMA_VERSION, read_state

KINDS: tuple[type[DedupTables], ...] = (DedupTables, CommandTables, EffectTables)
"""The kinds of tables. Each has the columns of those before it, and some of its own."""

_RIGHTS = "SELECT, INSERT, UPDATE, DELETE"


def version_findings(connection: Connection, tables: DedupTables) -> list[Finding]:
    """Compare the stored schema version with that of this code. Return no finding if none was stored."""
    written, ours = read_state(connection, tables).get(SCHEMA_VERSION), tables.version
    if written is None or written == str(ours):
        return []
    problem = f"{full_name(tables.marker, connection)} is at schema version {written}, and this code is for {ours}"
    upgrade = f"run `alembic upgrade heads`, or change the tables to what `idempotency schema{tables.option}` prints"
    if not written.isdecimal():
        known = f"{SCHEMA_VERSION!r} of {full_name(tables.state, connection)}"
        return [
            Finding(
                problem,
                f"another program wrote {known}; set it to the value that `idempotency schema{tables.option}` inserts",
            )
        ]
    if int(written) > ours:
        return [Finding(problem, "upgrade projector-dedup here, because a newer version has migrated the tables")]
    if int(written) < ours - 1:
        return [Finding(problem, f"this code works with version {ours - 1} too, but not with older ones; {upgrade}")]
    return [Finding(problem, f"this code works with both; when no older code runs any more, {upgrade}", fatal=False)]


def require_tables(engine: Engine, tables: DedupTables) -> None:
    """Raise ``MissingTableError`` if the stored schema version or the columns do not fit this code.

    Only ``check`` verifies more, because it inserts rows to find out.
    """
    with connected_to(engine, tables) as connection:
        for finding in version_findings(connection, tables):
            if finding.fatal:
                raise MissingTableError(f"{finding.problem}; {finding.remedy}")
        connection.execute(select(*tables.marker.columns).where(false()))  # without a version, the columns decide


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
