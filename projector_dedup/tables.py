"""The two tables of the library: markers (one row for each message and handler), and state (the declared settings)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import ClassVar

from sqlalchemy import Column, Index, MetaData, PrimaryKeyConstraint, Table, Text
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Mapped, registry

from .dialects.columns import TABLE_OPTIONS, exact_bytes, exact_text, moment, utc_now
from .errors import RefusedError
from .message import MAX_HANDLER_BYTES, MAX_MESSAGE_ID_BYTES

DEFAULT_NAME = "processed_message"
SINCE = "projector_dedup_since"  #: in the ``info`` of a column: the schema version that added it
MAX_NAME_BYTES = 63 - len("ix__processed_at")  #: PostgreSQL cuts names of more than 63 bytes silently


@dataclass(frozen=True, repr=False)
class DedupTables:
    """The marker table and the state table of one deployment of the library, as ``make_tables`` returns them."""

    marker: Table
    state: Table

    maker: ClassVar[str] = "make_tables"
    default_name: ClassVar[str] = DEFAULT_NAME
    option: ClassVar[str] = ""
    """The option of `idempotency` that selects tables of this kind."""
    revisions: ClassVar[tuple[str, ...]] = ("projector_dedup_0001", "projector_dedup_0004")
    """The migrations of these tables, in order. Migration n leads to schema version n."""
    noun: ClassVar[str] = "marker"
    """The word for a row of the first table, in error messages."""
    handler: ClassVar[str] = "handler"
    """The word for the value of the column ``handler``, in error messages."""
    subject: ClassVar[str] = "projectors"  #: the owner of these tables, in error messages
    keyed: ClassVar[bool] = False  #: True if a row is not the marker of a message

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.marker.fullname}>"  # short: the default would list every column

    @staticmethod
    def make(metadata: MetaData, name: str, schema: str | None) -> DedupTables:
        """Return tables of this kind, added to ``metadata``."""
        return make_tables(metadata, name, schema)

    @property
    def version(self) -> int:
        """The version of these tables' schema. This code also works with the version before."""
        return len(self.revisions)

    def remedy(self, connection: Connection) -> str:
        """Return how to create the tables in the schema that ``connection`` uses, for error messages."""
        schema, given, options = connection.schema_for_object(self.marker), "", self.option
        if self.marker.name != self.default_name:
            given, options = f", name={self.marker.name!r}", f"{options} --table {self.marker.name}"
        if schema is not None:
            options += f" --schema {schema}"
        if self.marker.schema is not None:
            given += f", schema={self.marker.schema!r}"
        elsewhere = ", on the engine that has this schema_translate_map" if schema != self.marker.schema else ""
        return (
            f"call {self.maker}(metadata{given}), and create it with your Alembic (`alembic upgrade heads`), in "
            f"development with metadata.create_all(engine); or run the SQL that `idempotency schema{options}` "
            f"prints{elsewhere}"
        )

    def mending(self, connection: Connection) -> str:
        """Return how to correct tables that exist and are wrong, for error messages."""
        return (
            f"write a migration that changes {full_name(self.marker, connection)} to what {self.maker}() defines; "
            "create_all() does not change a table that exists"
        )

    def missing(self, connection: Connection) -> str:
        """Return an error message: the tables are missing, and how to create them."""
        return (
            f"the table {full_name(self.marker, connection)} is missing, or does not have the columns that this "
            f"version expects; {self.remedy(connection)}; `idempotency check{self.option}` prints what is wrong"
        )


def make_tables(metadata: MetaData, name: str = DEFAULT_NAME, schema: str | None = None) -> DedupTables:
    """Add the marker table ``name`` and the state table ``<name>_state`` to your ``metadata``, and return both.

    ``schema`` is the database schema, or None for the default one. If you give a name or a schema, pass the result as
    ``tables=`` to each dispatcher. One database may have several pairs of tables.

    Raises ``ValueError`` for a name that is empty or longer than 47 bytes: the database would cut its index names.
    Raises ``TypeError`` for anything but a ``MetaData``. Raises ``RefusedError`` if ``metadata`` already has a table of
    that name: keep the result of the first call.
    """
    tables = key_tables(metadata, name, schema)
    tables.marker.append_column(Column("digest", exact_bytes(), nullable=True, info={SINCE: 2}))
    return tables


def key_tables(metadata: MetaData, name: str, schema: str | None) -> DedupTables:
    """Add a table with the columns that tables of all kinds have, and its state table. Raises like ``make_tables``."""
    given: object = metadata
    if not isinstance(given, MetaData):
        raise TypeError(f"make_tables takes a MetaData, such as Base.metadata, not {given!r}")
    if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
        raise ValueError(
            f"the name of the marker table must have 1 to {MAX_NAME_BYTES} bytes, and {name!r} has "
            f"{len(name.encode())}: with a longer name, the database would cut the names of the indexes; choose "
            "another name"
        )
    within = schema if schema is not None else metadata.schema
    for each in (name, f"{name}_state"):
        key = each if within is None else f"{within}.{each}"
        if key in metadata.tables:
            raise RefusedError(
                f"this MetaData already has a table {key}: add these tables once and keep the result; choose another "
                "name for a second pair of tables"
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
    """Return the name of ``table`` with its schema, after the ``schema_translate_map`` of ``connection``."""
    schema = connection.schema_for_object(table)
    return table.name if schema is None else f"{schema}.{table.name}"


default_metadata = MetaData()
default_tables = make_tables(default_metadata)


class ProcessedMessage:
    """The marker table as an ORM entity, for your queries: which handlers applied a message, and when."""

    message_id: Mapped[str]
    handler: Mapped[str]
    processed_at: Mapped[datetime]
    occurred_at: Mapped[datetime | None]


# Without the digest, so that the entity can also read tables of the version before.
registry().map_imperatively(ProcessedMessage, default_tables.marker, exclude_properties=["digest"])
