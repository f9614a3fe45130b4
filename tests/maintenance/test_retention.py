"""`cleanup` deletes expired markers in batches, and nothing else."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, MetaData, create_engine, event, func, insert, select, text
from sqlalchemy.orm import Session

from projector_dedup import MissingTableError, claim, make_tables
from projector_dedup.dialects import dialect_of
from projector_dedup.maintenance.cleanup import cleanup
from projector_dedup.maintenance.databases import database_of
from pruning import uncommitted_batch

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


def _analyze(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("ANALYZE TABLE processed_message" if engine.name == "mariadb" else "ANALYZE"))


def _plan(engine: Engine) -> str:
    explain = "EXPLAIN QUERY PLAN " if engine.dialect.name == "sqlite" else "EXPLAIN "
    statement: Any = database_of(engine).cleanup_statement(tables.marker)
    bounds = {"cutoff": datetime.now(UTC) - timedelta(hours=1), "batch_size": 100}
    options = {"render_postcompile": True}
    compiled = statement.compile(engine, compile_kwargs=options)
    given = compiled.construct_params(bounds)
    arguments = tuple(given[name] for name in compiled.positiontup) if compiled.positional else given
    sql = str(compiled).removeprefix("SET STATEMENT innodb_lock_wait_timeout = 1 FOR ")  # EXPLAIN takes no SET
    with engine.connect() as connection:
        return str(connection.exec_driver_sql(explain + sql, arguments).all())


def test_the_index_serves_the_search_for_old_markers(engine: Engine) -> None:
    """Retention finds what is old by the index on `processed_at`, and does not read the other markers."""
    _markers(engine, [1000.0] * 20 + [0.0] * 5000)
    _analyze(engine)
    plan = _plan(engine)
    assert "ix_processed_message_processed_at" in plan
    assert "Seq Scan" not in plan
    assert "'processed_message', 'ALL'" not in plan


@pytest.mark.parametrize("level", ["by default", "SERIALIZABLE"])
def test_two_cleaners_share_the_work(engine: Engine, level: str) -> None:
    """At any level of the engine's: together they delete every expired marker once, and neither fails."""
    _markers(engine, [1000.0] * 600 + [0.0] * 5)
    given = engine if level == "by default" else engine.execution_options(isolation_level=level)
    both = threading.Barrier(2)

    def clean(_number: int) -> int:
        both.wait()
        return cleanup(given, batch_size=25)

    with ThreadPoolExecutor(2) as cleaners:
        deleted = list(cleaners.map(clean, range(2)))
    assert sum(deleted) == 600
    assert len(_left(engine)) == 5


@pytest.mark.parametrize("fresh", [0, 3, 3000])
def test_a_cleaner_holds_up_no_other_message(engine: Engine, fresh: int) -> None:
    """While a batch is uncommitted, claims of other ids go on; one of a deleted id waits, and is new.

    One that waited for the batch would fail: it is not committed before, and nobody here waits longer than 5 s.
    """
    if not dialect_of(engine).locks_rows:
        pytest.skip("writers are serialised: everybody waits for the batch")
    _markers(engine, [1000.0] * 10 + [0.0] * fresh)
    _analyze(engine)
    bounded = {"innodb_lock_wait_timeout": 5} if engine.name == "mariadb" else {"lock_timeout": 5000}
    other = create_engine(engine.url)
    event.listen(other, "connect", lambda connection, _: _set(connection, bounded))
    with ThreadPoolExecutor(1) as threads, uncommitted_batch(engine, tables, 7) as batch:
        for message_id in ("new", "00", "5x", "~"):  # before, between and after what is deleted
            with Session(other) as session:
                assert claim(session, message_id, "h")
                session.commit()
        if fresh > 1000:  # fewer, and a planner reads them all, under lock on MariaDB: a redelivery waits for the batch
            with Session(other) as session:
                assert not claim(session, "10", "h")
        redelivered = threads.submit(_claims, other, "0")
        time.sleep(0.2)  # it has nothing to win: the next line holds whether the claim waits yet or not
        assert not redelivered.done()
        batch.commit()
        assert redelivered.result()
    assert cleanup(engine, batch_size=7) == 3
    other.dispose()
    assert _left(engine) == {"new", "00", "5x", "~", "0", *(str(10 + n) for n in range(fresh))}


def _set(connection: Any, variables: dict[str, int]) -> None:
    with contextlib.closing(connection.cursor()) as cursor:
        for name, value in variables.items():
            cursor.execute(f"SET {name} = {value}")
    connection.commit()


def _claims(engine: Engine, message_id: str) -> bool:
    with Session(engine) as session:
        new = claim(session, message_id, "h")
        session.commit()
        return new
