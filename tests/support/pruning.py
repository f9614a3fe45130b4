"""A batch of a cleanup, held before its COMMIT."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from sqlalchemy import Engine
from sqlalchemy.engine import Connection

from projector_dedup.maintenance.databases import Expired, database_of
from projector_dedup.tables import DedupTables


@contextmanager
def uncommitted_batch(engine: Engine, tables: DedupTables, batch_size: int) -> Iterator[Connection]:
    """The statement of a cleanup; the block ends its transaction."""
    database = database_of(engine)
    expired = Expired(tables.marker, datetime.now(UTC) - timedelta(hours=168), None, batch_size)
    with engine.execution_options(isolation_level=database.cleanup_isolation).connect() as connection:
        assert connection.execute(database.cleanup_statement(expired)).rowcount > 0
        yield connection
