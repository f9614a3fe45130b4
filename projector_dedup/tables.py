"""The two tables: a marker per message and handler, and a little state."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Column, Index, MetaData, PrimaryKeyConstraint, Table, Text
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Mapped, registry

from .dialects.columns import TABLE_OPTIONS, exact_text, moment, utc_now
from .message import MAX_HANDLER_BYTES, MAX_MESSAGE_ID_BYTES

DEFAULT_NAME = "processed_message"
SCHEMA = 1  #: version of what make_tables() makes; this code works on the one before, too
MAX_NAME_BYTES = 63 - len("_alembic_version_pkc")  #: PostgreSQL cuts what is longer, silently


@dataclass(frozen=True)
class DedupTables:
    """The tables of one deployment of the library; ``make_tables`` makes them."""

    marker: Table
    state: Table

    def remedy(self, connection: Connection) -> str:
        """What creates them where ``connection`` looks for them, for the text of errors."""
        schema, given, options = connection.schema_for_object(self.marker), "", ""
        if self.marker.name != DEFAULT_NAME:
            given, options = f", name={self.marker.name!r}", f" --table {self.marker.name}"
        if schema is not None:
            options += f" --schema {schema}"
        if self.marker.schema is not None:
            given += f", schema={self.marker.schema!r}"
        elsewhere = ", on the engine that has this schema_translate_map" if schema != self.marker.schema else ""
        return (
            f"let its owner create it: your Alembic (`alembic upgrade heads`, with make_tables(metadata{given}) in its "
            f"metadata), metadata.create_all(engine), or `idempotency migrate{options}` (`idempotency schema{options}` "
            f"prints the DDL){elsewhere}"
        )

    def mending(self, connection: Connection) -> str:
        """What makes them right where they are there and wrong."""
        return (
            f"alter {full_name(self.marker, connection)} to what make_tables() makes, by a migration: create_all() "
            "leaves a table that is there as it is"
        )

    def missing(self, connection: Connection) -> str:
        """That they are not there, and what to do, for the text of errors."""
        return (
            f"the table {full_name(self.marker, connection)} is missing, or is not the one this version expects; "
            f"{self.remedy(connection)}; `idempotency check` says what is wrong"
        )


def make_tables(metadata: MetaData, name: str = DEFAULT_NAME, schema: str | None = None) -> DedupTables:
    """Add the marker table ``name`` and ``<name>_state`` to the user's own ``MetaData``.

    Pass the result as ``tables=`` wherever the name or schema differs from the default. Several may share a database.

    Raises ``ValueError`` for a name of more than 43 bytes, because some database would cut those of its indexes.
    """
    if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise ValueError(
            f"the name of the marker table has {len(name.encode())} bytes, and must have 1 to {MAX_NAME_BYTES}: those "
            f"of its indexes are made from it, and no database may cut them; choose another than {name!r}"
        )
    marker = Table(
        name,
        metadata,
        Column("message_id", exact_text(MAX_MESSAGE_ID_BYTES), nullable=False),
        Column("handler", exact_text(MAX_HANDLER_BYTES), nullable=False),
        Column("processed_at", moment(), nullable=False, server_default=utc_now()),
        Column("occurred_at", moment(), nullable=True),
        PrimaryKeyConstraint("message_id", "handler", name=f"pk_{name}"),
        Index(f"ix_{name}_processed_at", "processed_at"),  # retention finds the oldest markers by it
        schema=schema,
        **TABLE_OPTIONS,
    )
    state = Table(
        f"{name}_state",
        metadata,
        Column("key", exact_text(MAX_HANDLER_BYTES), nullable=False),
        Column("value", Text(), nullable=False),
        PrimaryKeyConstraint("key", name=f"pk_{name}_state"),
        schema=schema,
        **TABLE_OPTIONS,
    )
    return DedupTables(marker, state)


def full_name(table: Table, connection: Connection) -> str:
    """The table as ``connection`` addresses it: its engine may have a ``schema_translate_map``."""
    schema = connection.schema_for_object(table)
    return table.name if schema is None else f"{schema}.{table.name}"


default_metadata = MetaData()
default_tables = make_tables(default_metadata)


class ProcessedMessage:
    """The marker, mapped for querying: "was this message applied, by whom, when?". The claim does not use it."""

    message_id: Mapped[str]
    handler: Mapped[str]
    processed_at: Mapped[datetime]
    occurred_at: Mapped[datetime | None]


registry().map_imperatively(ProcessedMessage, default_tables.marker)
