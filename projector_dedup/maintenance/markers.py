"""The markers of one message: ``find`` lists them, ``forget`` deletes them; ``records`` does so for commands.

``has_markers`` tells whether a handler is known at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Row, delete, select
from sqlalchemy.engine import Engine

from ..message import valid_handler, valid_message_id
from ..tables import DedupTables, default_tables
from .connection import connected_to
from .databases import database_of
from .kinds import refuse_other_kind
from .times import in_utc


@dataclass(frozen=True)
class Marker:
    """A marker: the record that a handler applied a message, and when. ``age`` is by the database's clock."""

    message_id: str
    handler: str
    processed_at: datetime
    occurred_at: datetime | None
    age: timedelta


def find(engine: Engine, message_id: object, *, tables: DedupTables = default_tables) -> list[Marker]:
    """Return the markers of one message, by handler; none if no handler applied it, or its markers were pruned.

    Raises ``InvalidMessageIdError`` for an id that no message can have, ``MissingTableError`` if the tables are
    missing.
    """
    return [marker for marker, _ in find_rows(engine, valid_message_id(message_id), tables)]


def find_rows(engine: Engine, message_id: str, tables: DedupTables) -> list[tuple[Marker, Row[Any]]]:
    """Return each row of an id, by handler, as a marker and with all columns that its table has."""
    marker = tables.marker
    with connected_to(engine, tables) as connection:
        refuse_other_kind(connection, tables)
        now = database_of(engine).now(connection)
        statement = select(marker).where(marker.c.message_id == message_id).order_by(marker.c.handler)
        rows = connection.execute(statement).all()
    found = []
    for row in rows:
        at = in_utc(row.processed_at)
        occurred = None if row.occurred_at is None else in_utc(row.occurred_at)
        found.append((Marker(row.message_id, row.handler, at, occurred, now - at), row))
    return found


def has_markers(engine: Engine, handler: str, *, tables: DedupTables = default_tables) -> bool:
    """True if the table has a marker of the handler, of whatever age.

    Raises ``RefusedError`` for a name that no handler can have, ``MissingTableError`` if the tables are missing.
    """
    some = select(tables.marker.c.handler).where(tables.marker.c.handler == valid_handler(handler)).limit(1)
    with connected_to(engine, tables) as connection:
        return connection.execute(some).first() is not None


def forget(
    engine: Engine, message_id: object, *, handler: str | None = None, tables: DedupTables = default_tables
) -> int:
    """Delete the markers of one message, or that of one handler, so that a redelivery is applied *again*.

    Returns how many there were. Nothing that was applied is undone: whoever repairs the read model has to do that.

    Raises ``InvalidMessageIdError`` for an id that no message can have, ``RefusedError`` for a name that no handler
    can have, ``MissingTableError`` if the tables are missing.
    """
    marker, level = tables.marker, database_of(engine).cleanup_isolation
    conditions = [marker.c.message_id == valid_message_id(message_id)]
    if handler is not None:
        conditions.append(marker.c.handler == valid_handler(handler))
    options = {} if level is None else {"isolation_level": level}
    with connected_to(engine, tables) as connection, connection.execution_options(**options).begin():
        refuse_other_kind(connection, tables)
        there = connection.execute(select(marker.c.handler).where(*conditions).with_for_update()).all()
        connection.execute(delete(marker).where(*conditions))
    return len(there)
