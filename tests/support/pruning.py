"""A batch of a cleanup, held before its COMMIT."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from sqlalchemy import Engine
from sqlalchemy.engine import Connection

from projector_dedup import DedupTables
from projector_dedup.dialects import Expired, dialect_of


@contextmanager
def uncommitted_batch(engine: Engine, tables: DedupTables, batch_size: int) -> Iterator[Connection]:
    """The statement of a cleanup, on the way that it would take; the block ends its transaction."""
    dialect = dialect_of(engine)
    expired = Expired(tables.marker, datetime.now(UTC) - timedelta(hours=168), None, batch_size)
    with engine.connect() as connection:
        route = dialect.cleanup_route(connection, expired)
    with engine.execution_options(isolation_level=dialect.cleanup_isolation).connect() as connection:
        assert connection.execute(route.statement, next(iter(route.batches))).rowcount > 0
        yield connection
