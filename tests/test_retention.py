"""`cleanup` deletes expired markers in batches, and nothing else."""

from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, MetaData, func, insert, select, text

from projector_dedup import MissingTableError, make_tables
from projector_dedup.retention import cleanup

metadata = MetaData()
tables = make_tables(metadata)


def _markers(engine: Engine, ages_in_hours: list[float]) -> None:
    metadata.create_all(engine)
    now = datetime.now(UTC)
    with engine.begin() as connection:
        connection.execute(
            insert(tables.marker),
            [
                {"message_id": str(n), "handler": "h", "processed_at": now - timedelta(hours=age)}
                for n, age in enumerate(ages_in_hours)
            ],
        )


def _left(engine: Engine) -> set[str]:
    with engine.connect() as connection:
        return set(connection.scalars(select(tables.marker.c.message_id)))


def test_only_markers_older_than_the_retention_are_deleted(engine: Engine) -> None:
    """The default keeps a week: 167 hours stay, 169 go."""
    _markers(engine, [0, 1, 167, 169, 1000])
    assert cleanup(engine) == 2
    assert _left(engine) == {"0", "1", "2"}


def test_every_batch_is_a_transaction_of_its_own(engine: Engine) -> None:
    """What a batch deleted is gone for others before the next one starts."""
    _markers(engine, [1000] * 7)
    seen = []

    def look(deleted: int) -> None:
        with engine.connect() as other:
            seen.append((deleted, other.scalar(select(func.count()).select_from(tables.marker))))

    assert cleanup(engine, batch_size=3, on_batch=look) == 7
    assert seen == [(3, 4), (3, 1), (1, 0)]


def test_the_age_is_by_the_databases_clock(engine: Engine) -> None:
    """A marker written by a claim a moment ago is younger than any retention, whatever this machine's zone."""
    metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(insert(tables.marker), {"message_id": "new", "handler": "h"})
    assert cleanup(engine, retention_hours=0.01) == 0
    assert _left(engine) == {"new"}


@pytest.mark.parametrize("retention", [0, -1, float("nan")])
def test_a_retention_that_would_delete_everything_is_refused(engine: Engine, retention: float) -> None:
    """Nothing is deleted."""
    _markers(engine, [1000])
    with pytest.raises(ValueError, match="retention_hours"):
        cleanup(engine, retention_hours=retention)
    assert _left(engine) == {"0"}


def test_a_batch_without_a_size_is_refused(engine: Engine) -> None:
    """Zero would never end."""
    with pytest.raises(ValueError, match="batch_size"):
        cleanup(engine, batch_size=0)


def test_a_missing_table_is_named(engine: Engine) -> None:
    """With what creates it, instead of a driver's error."""
    with pytest.raises(MissingTableError, match="processed_message is missing"):
        cleanup(engine)


def test_the_index_serves_the_search_for_old_markers(engine: Engine) -> None:
    """SQLite's planner uses it; PostgreSQL's may prefer to scan a small table, so there it only has to exist."""
    metadata.create_all(engine)
    if engine.dialect.name != "sqlite":
        assert "ix_processed_message_processed_at" in {index.name for index in tables.marker.indexes}
        return
    with engine.connect() as connection:
        plan = connection.execute(
            text(
                "EXPLAIN QUERY PLAN SELECT rowid FROM processed_message WHERE processed_at < datetime('now') "
                "ORDER BY processed_at LIMIT 5"
            )
        ).all()
    assert "ix_processed_message_processed_at" in str(plan)
