"""The redelivery horizon: how late a message may come again, declared once and kept beside the markers."""

from __future__ import annotations

import math

from sqlalchemy.engine import Engine

from ..errors import RetentionTooShortError
from ..tables import DedupTables, default_tables
from .check import verify
from .connection import connected_to
from .state import REDELIVERY_HORIZON, read_state, write_state

MAX_HOURS = 24 * 366 * 100


def check_hours(name: str, hours: float) -> None:
    """Raise ``ValueError`` unless ``hours`` is more than 0 and at most a century; ``name`` is for the text."""
    if not (math.isfinite(hours) and 0 < hours <= MAX_HOURS):
        raise ValueError(f"{name} must be positive and at most {MAX_HOURS} (a century), not {hours:g}")


def declare_horizon(engine: Engine, hours: float | None, *, tables: DedupTables = default_tables) -> None:
    """Declare that a message may come again up to ``hours`` after it was first processed; None deletes the horizon.

    Add up what can bring a message back: the broker's retention, the dead-letter queue, a replay by hand. The horizon
    is written into the database, so ``cleanup`` keeps to it on whichever machine it is run.

    Raises ``ValueError`` for hours that are not positive or more than a century, ``MissingTableError`` for a missing
    table.
    """
    if hours is not None:
        check_hours("the redelivery horizon", hours)
    verify(engine, tables)
    with engine.begin() as connection:
        write_state(connection, tables, {REDELIVERY_HORIZON: None if hours is None else repr(float(hours))})


def redelivery_horizon(engine: Engine, *, tables: DedupTables = default_tables) -> float | None:
    """Return the declared horizon in hours; None if none was declared.

    Raises ``MissingTableError`` if the state table is missing.
    """
    with connected_to(engine, tables) as connection:
        declared = read_state(connection, tables).get(REDELIVERY_HORIZON)
    return None if declared is None else float(declared)


def refuse_short_retention(engine: Engine, retention_hours: float, *, tables: DedupTables = default_tables) -> None:
    """Raise ``RetentionTooShortError`` if ``retention_hours`` is below the declared horizon."""
    horizon = redelivery_horizon(engine, tables=tables)
    if horizon is not None and retention_hours < horizon:
        raise RetentionTooShortError(
            f"a retention of {retention_hours:g} hours is shorter than the redelivery horizon of {horizon:g} hours: a "
            f"message that comes again in between would be applied again; keep the {tables.noun}s for at least "
            f"{horizon:g} hours, or declare a shorter horizon (`idempotency horizon`), or insist (force=True, --force)"
        )
