"""Compare the tables of a database with those that this version needs, and say how to mend what is wrong."""

from __future__ import annotations

import secrets

from sqlalchemy import Table, inspect
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from ..commands import CommandTables
from ..dialects import Dialect, Failure, Finding, advice, dialect_of
from ..errors import MissingTableError, RefusedError
from ..markers import insert_marker, marker_key
from ..message import MAX_MESSAGE_ID_BYTES, printable
from ..tables import DedupTables, default_tables, full_name
from .kinds import keeps_records, other_kind
from .state import SCHEMA_VERSION, read_state

_LONG = "x" * (MAX_MESSAGE_ID_BYTES - 1)
LOOK_ALIKES = ("a", "A", "a ", "e", "\N{LATIN SMALL LETTER E WITH ACUTE}", "1", "01", _LONG + "1", _LONG + "2")


def check(engine: Engine, tables: DedupTables = default_tables) -> list[Finding]:
    """Return everything that is wrong with the tables in this database; an empty list means that all is well.

    To try the tables out, markers are inserted and rolled back again. Settings of the database are looked at too.
    """
    with engine.connect() as connection:
        return _check_tables(connection, tables) + dialect_of(engine).findings(connection, tables.marker)


def _check_tables(connection: Connection, tables: DedupTables, *, any_kind: bool = False) -> list[Finding]:
    findings = [
        finding
        for table in (tables.marker, tables.state)
        for finding in check_table(connection, table, tables, any_kind=any_kind)
    ]
    if not any(finding.fatal for finding in findings):
        findings += _check_version(connection, tables)
        findings += _check_comparison(connection, tables)
    return findings


def _check_version(connection: Connection, tables: DedupTables) -> list[Finding]:
    """Compare the schema version in the state table with that of this code.

    Nothing is found where no version was written: such tables are the user's own, and their structure decides.
    """
    written, ours = read_state(connection, tables).get(SCHEMA_VERSION), tables.version
    if written is None or written == str(ours):
        return []
    problem = f"{full_name(tables.marker, connection)} is at schema version {written}, and this code is for {ours}"
    migrate = f"run `idempotency migrate{tables.option}`, or `alembic upgrade heads` where your Alembic owns the tables"
    if not written.isdecimal():
        known = f"{SCHEMA_VERSION!r} of {full_name(tables.state, connection)}"
        return [
            Finding(
                problem,
                f"somebody else wrote {known}; set it to what `idempotency schema{tables.option}` inserts there",
            )
        ]
    if int(written) > ours:
        return [Finding(problem, "upgrade projector-dedup here: a newer version of it has migrated the tables")]
    if int(written) < ours - 1:
        return [Finding(problem, f"this code works on {ours - 1} too, but on nothing older; {migrate}")]
    return [Finding(problem, f"this code works on both; once no older code runs any more, {migrate}", fatal=False)]


def _check_comparison(connection: Connection, tables: DedupTables) -> list[Finding]:
    """Insert markers of ids that look alike, and roll them back: a table that takes two for one would lose messages.

    In a table of commands one of them becomes a whole record, which must be read back as it was written.
    """
    dialect, remedy = dialect_of(connection), tables.mending(connection)
    handler = f"idempotency check {secrets.token_hex(8)}"  # of its own: two checks at once do not wait
    merges = Finding(
        f"{full_name(tables.marker, connection)} takes different message ids for one",
        "its columns must compare byte for byte, or messages are lost; " + remedy,
    )
    try:
        new = [insert_marker(connection, dialect, tables, marker_key(each, handler)) for each in LOOK_ALIKES]
        kept = not all(new) or _keeps(connection, dialect, tables, handler)
    except RefusedError as error:
        return [Finding(str(error), remedy)]
    except DBAPIError as error:
        if dialect.classify(error) is Failure.UNIQUE:
            return [merges]
        words = printable(str(error.orig)).partition("\\n")[0][:200]
        problem = f"no {tables.noun} could be inserted to try {full_name(tables.marker, connection)}: {words}"
        if dialect.classify(error) is Failure.READ_ONLY:
            connection.invalidate()  # else its pool would stay with this server when another is the primary
            return [Finding(problem, "this server takes no writes now: give the URL of the primary, or try again")]
        mend = "give its user SELECT, INSERT, UPDATE and DELETE, or check as the user that delivers; or else " + remedy
        passes = dialect.classify(error) in (Failure.TRANSIENT, Failure.LOCK_TIMEOUT)
        return [advice(problem, "another transaction holds it: try again") if passes else Finding(problem, mend)]
    finally:
        connection.rollback()
    if not all(new):
        return [merges]
    problem = f"{full_name(tables.marker, connection)} does not give back a record as it was written"
    return [] if kept else [Finding(problem, "results would be cut or changed; " + remedy)]


def _keeps(connection: Connection, dialect: Dialect, tables: DedupTables, handler: str) -> bool:
    return not isinstance(tables, CommandTables) or keeps_records(connection, dialect, tables, LOOK_ALIKES[0], handler)


def verify(engine: Engine, tables: DedupTables = default_tables, *, any_kind: bool = False) -> None:
    """Raise ``MissingTableError`` for the first fatal finding about the tables; return if there is none.

    To try the tables out, markers are inserted and rolled back again. Settings of the database are not looked at. With
    ``any_kind``, a table of commands passes for one of projectors, which has fewer columns.
    """
    with engine.connect() as connection:
        findings = _check_tables(connection, tables, any_kind=any_kind)
    for finding in findings:
        if finding.fatal:
            raise MissingTableError(f"{finding.problem}; {finding.remedy}")


def check_table(connection: Connection, table: Table, tables: DedupTables, *, any_kind: bool = False) -> list[Finding]:
    """Return what is wrong with the structure of ``table``, which is one of ``tables``; nothing is written."""
    inspector, schema, name = inspect(connection), connection.schema_for_object(table), full_name(table, connection)
    if not inspector.has_table(table.name, schema=schema):
        return [Finding(f"the table {name} is missing", tables.remedy(connection))]
    findings, remedy = [], tables.mending(connection)
    present = {column["name"]: column for column in inspector.get_columns(table.name, schema=schema)}
    other = other_kind(connection, tables, present, any_kind=any_kind) if table is tables.marker else None
    if other is not None:
        return [other]
    for column in table.columns:
        if column.name not in present:
            findings.append(Finding(f"{name} has no column {column.name}", remedy))
            continue
        found = present[column.name]
        if column.server_default is not None and found["nullable"] and found["default"] is None:
            findings.append(
                Finding(
                    f"{name}.{column.name} may be NULL, and has no default",
                    f"a {tables.noun} without that time would never be pruned; " + remedy,
                )
            )
        kind = found["type"]
        if dialect_of(connection).keeps_zones and getattr(kind, "timezone", True) is False:
            findings.append(
                Finding(
                    f"{name}.{column.name} has no time zone",
                    "a session in another time zone would prune too early; " + remedy,
                )
            )
        wanted, length = (getattr(kind, "length", None) for kind in (column.type, kind))
        if wanted is not None and length is not None and length < wanted:
            findings.append(
                Finding(
                    f"{name}.{column.name} takes {length} characters or bytes, not {wanted}",
                    "longer values would fail, or be cut and taken for one another; " + remedy,
                )
            )
    expected = [column.name for column in table.primary_key]
    actual = inspector.get_pk_constraint(table.name, schema=schema)["constrained_columns"]
    unique = [
        set(index["column_names"]) for index in inspector.get_indexes(table.name, schema=schema) if index["unique"]
    ]
    if set(actual) != set(expected) and set(expected) not in unique:
        findings.append(
            Finding(
                f"{name} has no unique index over ({', '.join(expected)})",
                "without one a duplicate would be applied; " + remedy,
            )
        )
    for index in table.indexes:
        first = next(iter(index.columns)).name
        if not any(one["column_names"][:1] == [first] for one in inspector.get_indexes(table.name, schema=schema)):
            findings.append(advice(f"{name} has no index on {first}", "create it, or cleanup reads the whole table"))
    return findings
