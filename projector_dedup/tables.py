"""The two tables: one has a marker for each message and handler, the other a few values of the deployment."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from sqlalchemy import Column, Index, MetaData, PrimaryKeyConstraint, Table, Text
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Mapped, registry

from .dialects.columns import TABLE_OPTIONS, exact_text, moment, utc_now
from .message import MAX_HANDLER_BYTES, MAX_MESSAGE_ID_BYTES

DEFAULT_NAME = "processed_message"
MAX_NAME_BYTES = 63 - len("_alembic_version_pkc")  #: PostgreSQL cuts names of more than 63 bytes silently


@dataclass(frozen=True, repr=False)
class DedupTables:
    """The marker table and the state table of one deployment of the library, as ``make_tables`` returns them."""

    marker: Table
    state: Table

    maker: ClassVar[str] = "make_tables"
    default_name: ClassVar[str] = DEFAULT_NAME
    option: ClassVar[str] = ""
    """The option by which `idempotency` is told that tables are of this kind."""
    revisions: ClassVar[tuple[str, ...]] = ("projector_dedup_0001",)
    """The migrations that made tables of this kind what they are, in order; the nth leads to schema version n."""
    noun: ClassVar[str] = "marker"
    """The word for a row of the first table, in texts."""
    handler: ClassVar[str] = "handler"
    """The word for what stands in the column ``handler``, in texts."""
    subject: ClassVar[str] = "projectors"  #: whose tables these are, in texts
    keyed: ClassVar[bool] = False  #: True if ``message_id`` is made of a scope and a key

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.marker.fullname}>"  # a Table would say all its columns, in each signature

    @staticmethod
    def make(metadata: MetaData, name: str, schema: str | None) -> DedupTables:
        """Return tables of this kind, added to ``metadata``."""
        return make_tables(metadata, name, schema)

    @property
    def version(self) -> int:
        """The version of these tables' schema; this code works on the version before, too."""
        return len(self.revisions)

    def remedy(self, connection: Connection) -> str:
        """Return how to create the tables in the schema where ``connection`` looks for them, for texts of errors."""
        schema, given, options = connection.schema_for_object(self.marker), "", self.option
        if self.marker.name != self.default_name:
            given, options = f", name={self.marker.name!r}", f"{options} --table {self.marker.name}"
        if schema is not None:
            options += f" --schema {schema}"
        if self.marker.schema is not None:
            given += f", schema={self.marker.schema!r}"
        elsewhere = ", on the engine that has this schema_translate_map" if schema != self.marker.schema else ""
        return (
            f"let its owner create it: your Alembic (`alembic upgrade heads`, with {self.maker}(metadata{given}) in "
            f"its metadata), metadata.create_all(engine), or `idempotency migrate{options}` "
            f"(`idempotency schema{options}` prints the DDL){elsewhere}"
        )

    def mending(self, connection: Connection) -> str:
        """Return how to correct tables that exist and are wrong, for texts of errors."""
        return (
            f"alter {full_name(self.marker, connection)} to what {self.maker}() makes, by a migration: create_all() "
            "leaves a table that is there as it is"
        )

    def missing(self, connection: Connection) -> str:
        """Return that the tables are missing, and how to create them, for texts of errors."""
        return (
            f"the table {full_name(self.marker, connection)} is missing, or is not the one this version expects; "
            f"{self.remedy(connection)}; `idempotency check{self.option}` says what is wrong"
        )


def make_tables(metadata: MetaData, name: str = DEFAULT_NAME, schema: str | None = None) -> DedupTables:
    """Add the marker table ``name`` and the state table ``<name>_state`` to the user's ``metadata``; return both.

    Pass the result as ``tables=`` wherever name or schema differ from the default. One database may have several such
    pairs.

    Raises ``ValueError`` for an empty name or one of more than 43 bytes: longer names of its indexes would be cut.
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
        Index(f"ix_{name}_processed_at", "processed_at"),  # cleanup finds the oldest markers by it
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
    """Return the name of ``table`` with the schema that ``connection`` uses, by its ``schema_translate_map`` if any."""
    schema = connection.schema_for_object(table)
    return table.name if schema is None else f"{schema}.{table.name}"


default_metadata = MetaData()
default_tables = make_tables(default_metadata)


class ProcessedMessage:
    """The marker as an ORM entity, for queries: which handlers applied a message, and when? Claims do not use it."""

    message_id: Mapped[str]
    handler: Mapped[str]
    processed_at: Mapped[datetime]
    occurred_at: Mapped[datetime | None]


registry().map_imperatively(ProcessedMessage, default_tables.marker)
