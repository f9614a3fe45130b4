"""Ask MariaDB's catalogue how big a table is, and take a sample of the markers."""

from __future__ import annotations

from itertools import pairwise

from sqlalchemy import FromClause, Table, func, select, text, union_all
from sqlalchemy.engine import Connection

_SLICES = 50

_SIZE = text(
    """
    SELECT table_rows, data_length + index_length FROM information_schema.tables
    WHERE table_schema = coalesce(:schema, database()) AND table_name = :name
    """
)


def measured(connection: Connection, table: Table) -> tuple[int | None, int | None]:
    """Return the rows, and the bytes with all indexes, as InnoDB estimates them; None for what it does not know."""
    place = {"schema": connection.schema_for_object(table), "name": table.name}
    rows, size = connection.execute(_SIZE, place).one()
    return None if rows is None else int(rows), None if size is None else int(size)


def sampled(connection: Connection, marker: Table, rows: int) -> FromClause:
    """Return a sample of about ``rows`` markers: the first ones of each of many equal slices of time.

    An index has all the columns that are read.
    """
    at = marker.c.processed_at
    oldest, newest = connection.execute(select(func.min(at), func.max(at))).one()
    length = (newest - oldest) / _SLICES
    bounds = [oldest + number * length for number in range(_SLICES)]
    slices = [
        select(marker.c.handler, at).where(at >= begin, at < end).order_by(at).limit(rows // _SLICES).subquery()
        for begin, end in pairwise(bounds)
    ]
    last = select(marker.c.handler, at).where(at >= bounds[-1]).order_by(at.desc()).limit(rows // _SLICES).subquery()
    return union_all(*(select(part.c.handler, part.c.processed_at) for part in (*slices, last))).subquery("sample")
