"""The redelivery horizon in the state table, and the markers that a cleanup may delete by it.

The redelivery horizon is the longest time after which a message may come again. ``projector_dedup.late`` explains how
workers judge late messages by it, and why a cleanup keeps markers longer than that.
"""

from __future__ import annotations

import math
from datetime import timedelta

from sqlalchemy import select
from sqlalchemy.engine import Connection

from ..late import MARGIN, REDELIVERY_HORIZON
from ..tables import DedupTables
from .databases import Expired, database_of
from .state import HORIZON_BEFORE, insert_state, kept_handlers, moment_text, open_rebuilds, state_of, write_state


def expired_now(
    connection: Connection, tables: DedupTables, hours: float, handler: str | None = None, batch_size: int = 0
) -> Expired:
    """Return the markers that a cleanup with a retention of ``hours`` would delete now. Nothing is written.

    ``late`` explains why markers of messages stay longer than the horizon.
    """
    now, state = database_of(connection).now(connection), state_of(connection, tables)
    kept = kept_handlers(open_rebuilds(connection, tables))
    if tables.keyed:  # records and effects: what comes again after them is not detected
        return Expired(tables.marker, now - timedelta(hours=hours), handler, batch_size, kept)
    judged = state.judged_hours(now)
    undated = math.isinf(judged)
    cutoff = now - timedelta(hours=hours if undated else max(hours, judged)) - MARGIN
    return Expired(tables.marker, cutoff, handler, batch_size, kept, undated)


def lock_horizon(connection: Connection, tables: DedupTables) -> bool:
    """Lock the row of the declared horizon until the transaction ends. Return False if no horizon is declared."""
    state = tables.state
    row = select(state.c.value).where(state.c.key == REDELIVERY_HORIZON).with_for_update()
    return connection.execute(row).first() is not None


def write_horizon(connection: Connection, tables: DedupTables, hours: float | None) -> None:
    """Write the horizon in the caller's transaction, which has locked it. None deletes it."""
    text = None if hours is None else repr(float(hours))
    write_state(connection, tables, {**_before(connection, tables), REDELIVERY_HORIZON: text})


def declare_first(connection: Connection, tables: DedupTables, hours: float) -> bool:
    """Declare the horizon in the caller's transaction. Return False if another transaction has declared one."""
    before = _before(connection, tables)
    if not insert_state(connection, tables, REDELIVERY_HORIZON, repr(float(hours))):
        return False
    write_state(connection, tables, before)
    return True


def _before(connection: Connection, tables: DedupTables) -> dict[str, str]:
    """Return the horizon by which workers may judge messages until they have read a change that happens now."""
    now = database_of(connection).now(connection)
    hours = state_of(connection, tables).judged_hours(now)
    return {HORIZON_BEFORE: f"{hours!r} {moment_text(now + MARGIN)}"}
