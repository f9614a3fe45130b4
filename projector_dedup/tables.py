"""The two tables: a marker per message and handler, and a little state."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Column, DateTime, Index, MetaData, PrimaryKeyConstraint, String, Table, Text, func
from sqlalchemy.orm import Mapped, registry

from .message import MAX_HANDLER_BYTES, MAX_MESSAGE_ID_BYTES

DEFAULT_NAME = "processed_message"


@dataclass(frozen=True)
class DedupTables:
    """The tables of one deployment of the library; ``make_tables`` makes them."""

    marker: Table
    state: Table

    @property
    def remedy(self) -> str:
        """What creates them, for the text of errors."""
        given = "" if self.marker.name == DEFAULT_NAME else f", name={self.marker.name!r}"
        given += "" if self.marker.schema is None else f", schema={self.marker.schema!r}"
        migration = "" if given else ", or with the Alembic migration (`alembic upgrade head`)"
        return f"create it with make_tables(metadata{given}) and metadata.create_all(engine){migration}"


def make_tables(metadata: MetaData, name: str = DEFAULT_NAME, schema: str | None = None) -> DedupTables:
    """Add the marker table ``name`` and ``<name>_state`` to the user's own ``MetaData``.

    Pass the result as ``tables=`` wherever the name or schema differs from the default.
    """
    marker = Table(
        name,
        metadata,
        # Text that compares byte for byte, whatever the database's collation: two ids are never taken for one.
        Column("message_id", _exact_text(MAX_MESSAGE_ID_BYTES), nullable=False),
        Column("handler", _exact_text(MAX_HANDLER_BYTES), nullable=False),
        Column("processed_at", DateTime(timezone=True), nullable=False, server_default=func.current_timestamp()),
        Column("occurred_at", DateTime(timezone=True), nullable=True),
        PrimaryKeyConstraint("message_id", "handler", name=f"pk_{name}"),
        Index(f"ix_{name}_processed_at", "processed_at"),  # retention finds the oldest markers by it
        schema=schema,
    )
    state = Table(
        f"{name}_state",
        metadata,
        Column("key", _exact_text(MAX_HANDLER_BYTES), nullable=False),
        Column("value", Text(), nullable=False),
        PrimaryKeyConstraint("key", name=f"pk_{name}_state"),
        schema=schema,
    )
    return DedupTables(marker, state)


def _exact_text(length: int) -> String:
    return String(length).with_variant(Text(collation="C"), "postgresql")


default_metadata = MetaData()
default_tables = make_tables(default_metadata)


class ProcessedMessage:
    """The marker, mapped for querying: "was this message applied, by whom, when?". The claim does not use it."""

    message_id: Mapped[str]
    handler: Mapped[str]
    processed_at: Mapped[datetime]
    occurred_at: Mapped[datetime | None]


registry().map_imperatively(ProcessedMessage, default_tables.marker)
