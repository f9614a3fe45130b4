"""Whether a database has the tables that this version needs, and what mends it if not."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Table, inspect
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from .dialects import dialect_of
from .errors import MissingTableError
from .markers import insert_marker, marker_key
from .tables import DedupTables, default_tables


@dataclass(frozen=True)
class Finding:
    """Something to mend; ``fatal`` if deliveries fail or could be lost before it is."""

    problem: str
    remedy: str
    fatal: bool = True


def check(engine: Engine, tables: DedupTables = default_tables) -> list[Finding]:
    """Everything that is wrong with the tables in this database; an empty list means that all is well."""
    with engine.connect() as connection:
        findings = [
            finding
            for table in (tables.marker, tables.state)
            for finding in _check_table(connection, table, tables.remedy)
        ]
        if not any(finding.fatal for finding in findings):
            findings += _check_comparison(connection, tables)
        findings += [Finding(problem, remedy, fatal=False) for problem, remedy in dialect_of(engine).advice(connection)]
    return findings


def _check_comparison(connection: Connection, tables: DedupTables) -> list[Finding]:
    """Claim ids that look alike, and take them back: a collation that merges two would lose messages."""
    dialect = dialect_of(connection)
    ids = ["a", "A", "a ", "e", "\N{LATIN SMALL LETTER E WITH ACUTE}", "1", "01"]
    try:
        merged = [i for i in ids if not insert_marker(connection, dialect, tables, marker_key(i, "idempotency check"))]
    except (DBAPIError, MissingTableError) as error:
        return [
            Finding(f"no marker could be inserted to try the table: {type(error).__name__}", tables.remedy, fatal=False)
        ]
    finally:
        connection.rollback()
    if not merged:
        return []
    return [
        Finding(
            f"{tables.marker.fullname} takes different message ids for one (such as {merged[0]!r})",
            "its columns must compare byte for byte, or messages are lost; " + tables.remedy,
        )
    ]


def verify(engine: Engine, tables: DedupTables = default_tables) -> None:
    """Raise ``MissingTableError`` for the first fatal finding."""
    for finding in check(engine, tables):
        if finding.fatal:
            raise MissingTableError(f"{finding.problem}; {finding.remedy}")


def _check_table(connection: Connection, table: Table, remedy: str) -> list[Finding]:
    inspector = inspect(connection)
    if not inspector.has_table(table.name, schema=table.schema):
        return [Finding(f"the table {table.fullname} is missing", remedy)]
    findings = []
    present = {column["name"] for column in inspector.get_columns(table.name, schema=table.schema)}
    for column in table.columns:
        if column.name not in present:
            findings.append(Finding(f"{table.fullname} has no column {column.name}", remedy))
    expected = [column.name for column in table.primary_key]
    actual = inspector.get_pk_constraint(table.name, schema=table.schema)["constrained_columns"]
    unique = [
        set(index["column_names"])
        for index in inspector.get_indexes(table.name, schema=table.schema)
        if index["unique"]
    ]
    if set(actual) != set(expected) and set(expected) not in unique:
        findings.append(
            Finding(
                f"{table.fullname} has no unique index over ({', '.join(expected)})",
                "without it a duplicate would be applied; " + remedy,
            )
        )
    for index in table.indexes:
        first = next(iter(index.columns)).name
        if not any(
            found["column_names"][:1] == [first] for found in inspector.get_indexes(table.name, schema=table.schema)
        ):
            findings.append(
                Finding(
                    f"{table.fullname} has no index on {first}",
                    "create it, or cleanup reads the whole table",
                    fatal=False,
                )
            )
    return findings
