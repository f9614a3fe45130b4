"""Ask MariaDB's catalogue how big a table is."""

from __future__ import annotations

from sqlalchemy import Table, text
from sqlalchemy.engine import Connection

_SIZE = text(
    """
    SELECT data_length + index_length FROM information_schema.tables
    WHERE table_schema = coalesce(:schema, database()) AND table_name = :name
    """
)


def size(connection: Connection, table: Table) -> int | None:
    """Return the bytes of the table with all indexes, as InnoDB estimates them; None if it does not know."""
    place = {"schema": connection.schema_for_object(table), "name": table.name}
    found = connection.scalar(_SIZE, place)
    return None if found is None else int(found)
