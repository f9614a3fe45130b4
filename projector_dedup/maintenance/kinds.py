"""Tell a table of projectors from one of commands, and try out what only a table of commands must keep."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import inspect
from sqlalchemy.engine import Connection

from ..commands import CommandTables, default_command_tables
from ..commands.record import MAX_CODEC_BYTES, RESULT, Record, recalling, recording
from ..dialects import Dialect, Finding
from ..errors import MissingTableError
from ..tables import DedupTables, default_tables, full_name

_EVERY_BYTE = bytes(range(256))
_WHOLE = Record(RESULT, "x" * MAX_CODEC_BYTES, _EVERY_BYTE * 256, _EVERY_BYTE[-32:])
"""A record that fills its columns: a result of 64 KiB with every byte, which no text column gives back."""

_OF_COMMANDS = {each.name for each in default_command_tables.marker.columns} - {
    each.name for each in default_tables.marker.columns
}


def other_kind(
    connection: Connection, tables: DedupTables, columns: Collection[str], *, any_kind: bool = False
) -> Finding | None:
    """Return that the table with these ``columns`` is of the other kind than ``tables``; None if it is not.

    With ``any_kind``, a table of commands passes for one of projectors: it has every column of those.
    """
    wanted, found = isinstance(tables, CommandTables), _OF_COMMANDS & set(columns)
    name = full_name(tables.marker, connection)
    if wanted and not found and {"message_id", "handler"} <= set(columns):
        return Finding(
            f"{name} is a table of projectors, not of commands",
            f"name a table that {tables.maker}() makes, such as {tables.default_name}; or, if it is the projectors' "
            f"that is meant, leave out{tables.option}",
        )
    if not wanted and not any_kind and found == _OF_COMMANDS:
        return Finding(
            f"{name} is a table of commands, not of projectors",
            f"say{CommandTables.option}, and {CommandTables.maker}() in Python; or name a table that {tables.maker}() "
            "makes",
        )
    return None


def refuse_other_kind(connection: Connection, tables: DedupTables, *, any_kind: bool = False) -> None:
    """Raise ``MissingTableError`` if the table is there, and ``other_kind`` finds it to be another than ``tables``."""
    schema, inspector = connection.schema_for_object(tables.marker), inspect(connection)
    if not inspector.has_table(tables.marker.name, schema=schema):
        return
    columns = [column["name"] for column in inspector.get_columns(tables.marker.name, schema=schema)]
    finding = other_kind(connection, tables, columns, any_kind=any_kind)
    if finding is not None:
        raise MissingTableError(f"{finding.problem}; {finding.remedy}")


def keeps_records(connection: Connection, dialect: Dialect, tables: CommandTables, stored: str, operation: str) -> bool:
    """Write a record that fills its columns into a row that is there, and return True if it is read back as it was."""
    recording(dialect, tables, stored, (operation,), _WHOLE).run(connection)
    recall = recalling(tables, stored, (operation,))
    recall.run(connection)
    row = recall.row
    if row is None or not all(isinstance(each, (bytes, memoryview)) for each in (row.fingerprint, row.result)):
        return False
    found = Record(row.outcome, row.codec, bytes(row.result), bytes(row.fingerprint))
    return found == _WHOLE
