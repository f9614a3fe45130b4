"""Pruning: markers older than the retention are deleted, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy.engine import Engine

from .dialects import dialect_of
from .errors import UnsupportedDatabaseError
from .schema import verify
from .tables import DedupTables, default_tables

MAX_RETENTION_HOURS = 24 * 366 * 100


def cleanup(
    engine: Engine,
    *,
    retention_hours: float = 168,
    batch_size: int = 5_000,
    tables: DedupTables = default_tables,
    on_batch: Callable[[int], None] | None = None,
) -> int:
    """Delete the markers processed more than ``retention_hours`` ago, by the database's clock; returns how many.

    Every batch of ``batch_size`` markers is a short transaction of its own, so a run can be stopped at any time;
    ``on_batch`` is told the size of each. A message that is redelivered after its marker was pruned is applied
    *again*: the retention must exceed the longest redelivery (broker, dead-letter queue, manual replay).

    Raises ``ValueError`` for a retention or batch that is not positive, ``MissingTableError`` for a missing table,
    ``UnsupportedDatabaseError`` for an engine that a dispatcher would refuse too.
    """
    if not 0 < retention_hours <= MAX_RETENTION_HOURS:
        raise ValueError(
            f"retention_hours must be positive and at most {MAX_RETENTION_HOURS} (a century), not {retention_hours:g}"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    verify(engine, tables)
    dialect = dialect_of(engine)
    dialect.prepare(engine)
    level = {} if dialect.pruning_isolation is None else {"isolation_level": dialect.pruning_isolation}
    statement = dialect.prune_statement(tables.marker)
    bounds = {"seconds": retention_hours * 3600, "batch_size": batch_size}
    total = 0
    while True:
        with engine.connect() as connection, connection.execution_options(**level).begin():
            deleted = connection.execute(statement, bounds).rowcount
        if deleted < 0:
            raise UnsupportedDatabaseError(
                "a batch was deleted, but the driver does not say of how many markers, so the last one would not be "
                "known; delete from the table by a statement of your own"
            )
        if not deleted:
            return total
        total += deleted
        if on_batch is not None:
            on_batch(deleted)
