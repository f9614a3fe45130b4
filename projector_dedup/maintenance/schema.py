"""The kinds of tables, their structure and schema version, and the SQL that creates them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Column, Dialect, MetaData, Table, insert, inspect, make_url, update
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.schema import CreateColumn, CreateIndex, CreateTable

from ..commands import CommandTables
from ..effects import EffectTables
from ..errors import MissingTableError
from ..http.parked import ParkedTables
from ..tables import SINCE, DedupTables, default_tables, full_name
from .databases import database_of
from .findings import Finding, advice
from .running import connected_to
from .state import SCHEMA_VERSION, read_state

KINDS: tuple[type[DedupTables], ...] = (DedupTables, CommandTables, EffectTables, ParkedTables)
"""The kinds of tables. All have the same key, and each has columns of its own."""

_OF_ANY_KIND = {
    column.name for kind in KINDS for column in kind.make(MetaData(), kind.default_name, None).marker.columns
}

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
        mend = f"set it to the value that `idempotency schema{tables.option}` inserts"
        return [Finding(problem, f"another program wrote {known}; {mend}")]
    if int(written) > ours:
        return [Finding(problem, "upgrade projector-dedup here, because a newer version has migrated the tables")]
    if int(written) < ours - 1:
        return [Finding(problem, f"this code works with version {ours - 1} too, but not with older ones; {upgrade}")]
    return [Finding(problem, f"this code works with both; when no older code runs any more, {upgrade}", fatal=False)]


def structure_findings(connection: Connection, tables: DedupTables) -> list[Finding]:
    """Return the problems of the columns and keys of both tables. Write nothing."""
    return [each for table in (tables.marker, tables.state) for each in _table_findings(connection, table, tables)]


def _table_findings(connection: Connection, table: Table, tables: DedupTables) -> Iterator[Finding]:
    """Yield the problems of the structure of ``table``, which is one of ``tables``. Write nothing."""
    inspector, schema, name = inspect(connection), connection.schema_for_object(table), full_name(table, connection)
    if not inspector.has_table(table.name, schema=schema):
        yield Finding(f"the table {name} is missing", tables.remedy(connection))
        return
    present = {column["name"]: column for column in inspector.get_columns(table.name, schema=schema)}
    remedy = tables.mending(connection)
    if table is tables.marker and (theirs := sorted(_OF_ANY_KIND & present.keys() - table.columns.keys())):
        yield Finding(
            f"{name} is a table of another kind: it has the columns {', '.join(theirs)}",
            f"name a table of {tables.maker}(); or use the maker of its kind, and its option of `idempotency`",
        )
        return
    for column in table.columns:
        if column.name not in present:
            works = column.info.get(SINCE) == tables.version  # with the version before
            yield Finding(f"{name} has no column {column.name}", remedy, fatal=not works)
            continue
        found = present[column.name]
        if column.server_default is not None and found["nullable"] and found["default"] is None:
            yield Finding(
                f"{name}.{column.name} may be NULL, and has no default",
                f"cleanup would never delete a {tables.noun} without this time; " + remedy,
            )
        if column.name == "processed_at" and column.nullable and (not found["nullable"] or found["default"]):
            yield has_default(f"{name}.{column.name}", remedy)
        kind = found["type"]
        if database_of(connection).keeps_zones and getattr(kind, "timezone", True) is False:
            yield Finding(
                f"{name}.{column.name} has no time zone",
                "cleanup in a session with another time zone would delete too early; " + remedy,
            )
        wanted, length = (getattr(kind, "length", None) for kind in (column.type, kind))
        if wanted is not None and length is not None and length < wanted:
            yield Finding(
                f"{name}.{column.name} takes {length} characters or bytes, not {wanted}",
                "longer values would fail, or be cut and taken for one another; " + remedy,
            )
    expected = [column.name for column in table.primary_key]
    actual = inspector.get_pk_constraint(table.name, schema=schema)["constrained_columns"]
    indexes = inspector.get_indexes(table.name, schema=schema)
    unique = [set(index["column_names"]) for index in indexes if index["unique"]]
    if set(actual) != set(expected) and set(expected) not in unique:
        yield Finding(
            f"{name} has no unique index over ({', '.join(expected)})",
            "without one a duplicate would be applied; " + remedy,
        )
    for index in table.indexes:
        first = next(iter(index.columns)).name
        if not any(one["column_names"][:1] == [first] for one in indexes):
            yield advice(f"{name} has no index on {first}", "create it, or cleanup reads the whole table")


def columns_there(connection: Connection, table: Table) -> list[Column[Any]]:
    """Return the columns of ``table`` without those that only a newer version added to it. It may be missing."""
    inspector, schema = inspect(connection), connection.schema_for_object(table)
    if not inspector.has_table(table.name, schema=schema):
        return list(table.columns)
    present = {column["name"] for column in inspector.get_columns(table.name, schema=schema)}
    return [column for column in table.columns if column.name in present or SINCE not in column.info]


def has_default(column: str, remedy: str) -> Finding:
    """Return the finding that a row gets a time before it has an outcome."""
    return Finding(
        f"{column} is not NULL in a row without an outcome",
        "cleanup would delete unfinished effects; the column must be nullable and have no default; " + remedy,
    )


def require_tables(engine: Engine, tables: DedupTables) -> None:
    """Raise ``MissingTableError`` if the structure of the tables or the stored schema version do not fit this code.

    Only ``check`` verifies more, because it inserts rows to find out.
    """
    with connected_to(engine, tables) as connection:
        require_tables_on(connection, tables)


def require_tables_on(connection: Connection, tables: DedupTables) -> None:
    """Like ``require_tables``, in the caller's transaction."""
    for look in (structure_findings, version_findings):
        for finding in look(connection, tables):
            if finding.fatal:
                raise MissingTableError(f"{finding.problem}; {finding.remedy}")


def ddl(database: str, tables: DedupTables = default_tables) -> str:
    """Return the SQL that creates the tables on ``database``: "postgresql", "mariadb", "mysql" or "sqlite".

    Each statement ends with ";". The last lines are comments with the GRANT statements for the application's user.

    Raises ``sqlalchemy.exc.NoSuchModuleError`` for a database that SQLAlchemy does not support.
    """
    dialect, both = _printing(database), (tables.marker, tables.state)
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


def upgrade_ddl(database: str, tables: DedupTables = default_tables) -> str:
    """Return the SQL that changes tables of the version before into those of this one. Raises like ``ddl``."""
    dialect, marker, state = _printing(database), tables.marker, tables.state
    name = dialect.identifier_preparer.format_table(marker)
    new = [column for column in marker.columns if column.info.get(SINCE) == tables.version]
    if not new:
        return f"-- the tables of {tables.subject} are the same as in the version before\n"
    version = update(state).where(state.c.key == SCHEMA_VERSION).values(value=str(tables.version))
    statements = [
        *(f"ALTER TABLE {name} ADD COLUMN {CreateColumn(column).compile(dialect=dialect)}" for column in new),
        version.compile(dialect=dialect, compile_kwargs={"literal_binds": True}),
    ]
    return "\n".join(f"{str(statement).strip()};\n" for statement in statements)


def _printing(database: str) -> Dialect:
    dialect_class: Any = make_url(f"{database}://").get_dialect()
    dialect: Dialect = dialect_class(paramstyle="named")  # a driver's own would double each % of a name
    return dialect
