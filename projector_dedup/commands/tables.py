"""The two tables of commands: one has a record for each key, with its outcome, the other a few values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sqlalchemy import Column, MetaData, SmallInteger

from ..dialects.columns import exact_bytes, exact_text
from ..tables import DedupTables, make_tables

DEFAULT_NAME = "processed_command"
MAX_CODEC_BYTES = 64


@dataclass(frozen=True, repr=False)
class CommandTables(DedupTables):
    """The record table and the state table of commands, as ``make_command_tables`` returns them.

    A record's key is in the columns of a marker: ``handler`` is the operation, ``message_id`` the scope and the key.
    """

    maker: ClassVar[str] = "make_command_tables"
    default_name: ClassVar[str] = DEFAULT_NAME
    option: ClassVar[str] = " --commands"
    revisions: ClassVar[tuple[str, ...]] = ("projector_dedup_0002",)
    noun: ClassVar[str] = "record"
    handler: ClassVar[str] = "operation"

    @staticmethod
    def make(metadata: MetaData, name: str, schema: str | None) -> CommandTables:
        """Return tables of this kind, added to ``metadata``."""
        return make_command_tables(metadata, name, schema)


def make_command_tables(metadata: MetaData, name: str = DEFAULT_NAME, schema: str | None = None) -> CommandTables:
    """Add the record table ``name`` and the state table ``<name>_state`` to the user's ``metadata``; return both.

    Pass the result as ``tables=`` to ``Commands`` where name or schema differ from the default. One database may have
    several such pairs, with a retention each.

    Raises ``ValueError`` for an empty name or one of more than 43 bytes: longer names of its indexes would be cut.
    """
    tables = make_tables(metadata, name, schema)
    for column in (
        Column("fingerprint", exact_bytes(), nullable=True),  # NULL until the command has an outcome
        Column("outcome", SmallInteger(), nullable=True),
        Column("codec", exact_text(MAX_CODEC_BYTES), nullable=True),
        Column("result", exact_bytes(), nullable=True),
    ):
        tables.marker.append_column(column)
    return CommandTables(tables.marker, tables.state)


default_command_tables = make_command_tables(MetaData())
