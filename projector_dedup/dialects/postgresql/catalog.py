"""Ask PostgreSQL's catalogue for the size of a table, and for settings that harm the markers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Row, Table, text
from sqlalchemy.engine import Connection

from ..findings import Finding, advice

_BIG = 1_000_000  # rows; autovacuum comes when a fifth of them is dead

_SETTINGS = text(
    """
    SELECT relpersistence = 'u' AS unlogged, reltuples > :big AS big, current_setting('autovacuum') AS autovacuum,
        (SELECT option_value FROM pg_options_to_table(reloptions) WHERE option_name = 'autovacuum_enabled') AS enabled,
        coalesce(
            (SELECT option_value FROM pg_options_to_table(reloptions)
                WHERE option_name = 'autovacuum_vacuum_scale_factor'),
            current_setting('autovacuum_vacuum_scale_factor')
        )::float AS scale_factor
    FROM pg_class WHERE oid = to_regclass(:name) AND relkind IN ('r', 'p')
    """
)


def regclass(connection: Connection, table: Table) -> str:
    """Return the table's name, quoted, as the server's functions take it."""
    quote, schema = connection.dialect.identifier_preparer.quote, connection.schema_for_object(table)
    return ".".join(quote(part) for part in (schema, table.name) if part)


def namesakes(connection: Connection, table: Table) -> int:
    """Return how many tables and views of this name there are in all schemas, which could be taken for the table."""
    found = text("SELECT count(*) FROM pg_catalog.pg_class WHERE relname = :name AND relkind IN ('r', 'p', 'v', 'f')")
    number: int = Connection.execute(connection, found, {"name": table.name}).scalar_one()  # past any guard
    return number


def storage(connection: Connection, table: Table) -> list[Finding]:
    """Return findings about how the marker table is stored and vacuumed."""
    name = regclass(connection, table)
    found = connection.execute(_SETTINGS, {"name": name, "big": _BIG}).first()
    return [] if found is None else [*_persistence(name, found), *_vacuum(name, found)]


def _persistence(name: str, found: Row[Any]) -> list[Finding]:
    if not found.unlogged:
        return []
    return [
        Finding(
            f"{name} is UNLOGGED: a crash of the server empties it, while the read model stays",
            f"every redelivery after that would be applied again; ALTER TABLE {name} SET LOGGED",
        )
    ]


def _vacuum(name: str, found: Row[Any]) -> Iterator[Finding]:
    stays = "what cleanup deletes keeps its space, and slows cleanup down"
    if found.autovacuum == "off":
        yield advice(f"autovacuum is off on this server: {stays}", "turn it on, or VACUUM after each cleanup")
    if found.enabled in ("false", "off", "no", "0"):
        remedy = f"ALTER TABLE {name} RESET (autovacuum_enabled)"
        yield advice(f"autovacuum is off for {name}: {stays}", remedy)
    if found.big and found.scale_factor > 0.05:
        yield advice(
            f"{name} is big, and autovacuum waits until {found.scale_factor:.0%} of it is dead",
            f"ALTER TABLE {name} SET (autovacuum_vacuum_scale_factor = 0.02)",
        )


def size(connection: Connection, table: Table) -> int | None:
    """Return the bytes of the table with all indexes."""
    found: int | None = connection.scalar(
        text("SELECT pg_total_relation_size(to_regclass(:name))"), {"name": regclass(connection, table)}
    )
    return found
