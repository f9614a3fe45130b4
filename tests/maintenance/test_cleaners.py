"""Cleaners meet each other, held locks, lost connections, bounds and signals, and say truly what they left."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
from sqlalchemy import URL, Connection, Engine, MetaData, create_engine, delete, event, func, insert, select, text
from sqlalchemy.orm import Session

from databases import Database
from projector_dedup import CleanupInterruptedError, RetryPolicy, claim, make_tables
from projector_dedup.dialects import dialect_of
from projector_dedup.maintenance.cleanup import Pruned, cleanup, count_expired, prune
from pruning import uncommitted_batch

metadata = MetaData()
tables = make_tables(metadata)
HASTY = RetryPolicy(within=0.3)


@pytest.fixture(name="sync_url")
def one_url_of_each_engine(database: Database) -> URL:
    """What these tests are about does not depend on the driver."""
    return database.url()


def fill(engine: Engine, expired: int, fresh: int = 0, handler: str = "h") -> None:
    """Markers "0", "1", ...: first the expired ones, of different ages."""
    metadata.create_all(engine)
    now = datetime.now(UTC)
    rows = [
        {
            "message_id": str(number),
            "handler": handler,
            "processed_at": now - timedelta(hours=1000 * (number < expired), microseconds=number),
        }
        for number in range(expired + fresh)
    ]
    with engine.begin() as connection:
        connection.execute(insert(tables.marker), rows)


def left(engine: Engine) -> int:
    """Markers, as others see them."""
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(tables.marker)) or 0


@contextlib.contextmanager
def held(engine: Engine, message_id: str) -> Iterator[Connection]:
    """A marker that another transaction is about to delete, until the block ends: then it is rolled back."""
    other = create_engine(engine.url)
    with other.connect() as connection:
        connection.execute(delete(tables.marker).where(tables.marker.c.message_id == message_id))
        yield connection
        connection.rollback()
    other.dispose()


def test_everything_expired_goes_and_nothing_else(engine: Engine) -> None:
    """In several batches, of which the last is not full."""
    fill(engine, 100, 20)
    assert prune(engine, batch_size=30).complete
    assert left(engine) == 20


def test_one_handlers_markers_go_alone(engine: Engine) -> None:
    """And those of others stay, as old as they are."""
    fill(engine, 100, handler="one")
    fill(engine, 50, handler="other")
    assert count_expired(engine, handler="one") == 100
    assert cleanup(engine, handler="one", batch_size=30) == 100
    assert left(engine) == 50


def test_a_dry_run_counts_and_deletes_nothing(engine: Engine) -> None:
    """Up to a number, at which it stops reading."""
    fill(engine, 30, 5)
    assert count_expired(engine) == 30
    assert count_expired(engine, up_to=7) == 7
    assert left(engine) == 35


# Others ----------------------------------------------------------------------------------------------------------


def test_what_another_transaction_holds_is_not_taken_for_done(engine: Engine) -> None:
    """A marker held to the end of the wait: all others go, and the run says that it is not complete."""
    if not dialect_of(engine).locks_rows:
        pytest.skip("writers are serialised: nothing but the file can be held")
    fill(engine, 200, fresh=3000)  # fewer, and MariaDB's planner reads them all, under lock
    with held(engine, "17"):
        done = prune(engine, retry=HASTY, batch_size=50)
        assert done.deleted == 199
        assert not done.complete
        assert "holds expired markers" in str(done.left)
    assert left(engine) == 3001
    assert prune(engine).complete


def test_what_is_let_go_while_the_cleaner_waits_is_deleted(engine: Engine) -> None:
    """It looks again, and is complete."""
    if not dialect_of(engine).locks_rows:
        pytest.skip("writers are serialised: nothing but the file can be held")
    fill(engine, 200, fresh=3000)  # fewer, and MariaDB's planner reads them all, under lock
    with held(engine, "17") as connection:
        event.listen(engine, "before_cursor_execute", _after_a_look(connection.rollback))
        done = prune(engine, batch_size=50)
    assert (done.deleted, done.complete) == (200, True)
    assert left(engine) == 3000


def _after_a_look(act: Any) -> Any:
    """Before the first DELETE that comes behind a look at what is left."""
    seen: list[str] = []

    def listen(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if seen or "DELETE FROM" in statement:
            seen.append("DELETE" if "DELETE FROM" in statement else "look")
            if seen[-1] == "DELETE" and "look" in seen:
                act()

    return listen


def test_two_cleaners_end_when_all_is_gone(engine: Engine) -> None:
    """Each marker is counted by one of them, and each of them is complete only when nothing is left."""
    fill(engine, 600, 5)
    both = threading.Barrier(2)
    after: list[int] = []

    def clean(_number: int) -> int:
        both.wait()
        done = prune(engine, batch_size=36)
        assert done.complete
        after.append(left(engine))
        return done.deleted

    with ThreadPoolExecutor(2) as cleaners:
        deleted = list(cleaners.map(clean, range(2)))
    assert sum(deleted) == 600
    assert after == [5, 5]


@pytest.mark.parametrize("commits", [True, False])
def test_a_claim_that_meets_its_own_pruning_waits_for_it(engine: Engine, commits: bool) -> None:
    """A redelivery is new if the prune commits, by design, and a duplicate if that rolls back."""
    fill(engine, 200)
    if not dialect_of(engine).locks_rows:
        return _serialised(engine, commits)
    other = create_engine(engine.url)
    claimed = threading.Event()

    def redelivered() -> bool:
        with Session(other) as session:
            new = claim(session, "0", "h")
            session.commit()
        claimed.set()
        return new

    with ThreadPoolExecutor(1) as threads, uncommitted_batch(engine, tables, 500) as connection:
        redelivery = threads.submit(redelivered)
        assert not claimed.wait(0.3)  # a claim that did not wait would be through by far
        (connection.commit if commits else connection.rollback)()
        assert redelivery.result() is commits
    other.dispose()
    return None


def _serialised(engine: Engine, commits: bool) -> None:
    """The file has one writer: a claim comes before the batch, or after it."""
    other = create_engine(engine.url, connect_args={"timeout": 0})
    with other.connect() as connection:
        connection.execute(delete(tables.marker).where(tables.marker.c.message_id == "0"))
        impatient = create_engine(engine.url, connect_args={"timeout": 0})
        with Session(impatient) as session, pytest.raises(Exception, match="locked"):
            claim(session, "0", "h")
        impatient.dispose()
        connection.commit() if commits else connection.rollback()
    with Session(other) as session:
        assert claim(session, "0", "h") is commits
        session.commit()
    other.dispose()


# Errors ----------------------------------------------------------------------------------------------------------


def _kill_others(database: Database) -> None:
    """End every other connection to the database, as an administrator does."""
    admin = create_engine(database.url())
    with admin.connect() as connection:
        if database.engine == "postgresql":
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            )
        else:
            for (number,) in connection.execute(
                text(
                    "SELECT id FROM information_schema.processlist WHERE db = database() AND id <> connection_id() "
                    "AND command = 'Sleep'"
                )
            ).all():
                connection.execute(text(f"KILL {number}"))
    admin.dispose()


@pytest.fixture(params=["postgresql", "mariadb"])
def server(request: pytest.FixtureRequest) -> Database:
    """A database whose connections can be killed."""
    found: Database = request.getfixturevalue(request.param)
    return found


def _before_delete(engine: Engine, act: Any, numbers: Any) -> None:
    """Run ``act`` before the DELETEs of these numbers, in their open transactions."""
    deletes = count()

    def listen(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "DELETE FROM" in statement and next(deletes) in numbers:
            act()

    event.listen(engine, "before_cursor_execute", listen)


def test_a_lost_connection_costs_a_batch_no_more_than_time(server: Database) -> None:
    """Two batches are killed in the middle; the run begins them again and deletes everything."""
    engine = create_engine(server.url())
    fill(engine, 70, 3)
    _before_delete(engine, lambda: _kill_others(server), {2, 5})
    assert cleanup(engine, batch_size=10) == 70
    assert left(engine) == 3
    engine.dispose()


def test_a_connection_that_is_lost_time_and_again_ends_the_run_with_the_count(server: Database) -> None:
    """The error says how many markers were deleted until then, and they are."""
    engine = create_engine(server.url())
    fill(engine, 70, 3)
    _before_delete(engine, lambda: _kill_others(server), range(3, 1000))
    with pytest.raises(CleanupInterruptedError, match="at least 30 markers") as raised:
        cleanup(engine, batch_size=10, retry=RetryPolicy(attempts=3))
    assert raised.value.deleted == 30
    engine.dispose()
    assert left(engine) == 43
    engine.dispose()


def test_a_deadlock_is_tried_again(engine: Engine) -> None:
    """A batch that the database gives up in favour of another transaction is deleted the next time."""
    if not dialect_of(engine).locks_rows:
        pytest.skip("one writer cannot deadlock")
    fill(engine, 30)
    refusals = {"postgresql": "DO $$ BEGIN RAISE 'chosen' USING ERRCODE = '40P01'; END $$"}
    refusal = refusals.get(engine.name, "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'chosen'")
    sent: list[int] = []

    def fail(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if "DELETE FROM" in statement and not sent:
            sent.append(1)
            connection.exec_driver_sql(refusal)

    event.listen(engine, "before_cursor_execute", fail)
    assert cleanup(engine, batch_size=10) == 30
    assert sent
    assert left(engine) == 0


def test_a_writer_that_keeps_the_file_ends_the_run_with_the_count(sqlite: Database) -> None:
    """SQLite has one lock for all; a run that cannot have it says how far it came."""
    engine = create_engine(sqlite.url(), connect_args={"timeout": 0})
    fill(engine, 30)
    other = create_engine(sqlite.url())
    with other.connect() as writer:

        def hold(deleted: int) -> None:
            assert deleted == 10
            writer.exec_driver_sql("BEGIN IMMEDIATE")

        with pytest.raises(CleanupInterruptedError, match="at least 10 markers") as raised:
            cleanup(engine, batch_size=10, on_batch=hold, retry=HASTY)
    assert raised.value.deleted == 10
    engine.dispose()
    other.dispose()


# Bounds ----------------------------------------------------------------------------------------------------------


def test_a_run_ends_at_its_bounds_and_says_so(engine: Engine) -> None:
    """After so many batches, after some time, or when it is told to."""
    fill(engine, 70)
    told = iter([False, True])
    runs = [
        prune(engine, batch_size=10, max_batches=2),
        prune(engine, batch_size=10, time_budget=1e-9),
        prune(engine, batch_size=10, stop=lambda: next(told)),
    ]
    assert [run.deleted for run in runs] == [20, 0, 10]
    assert [run.complete for run in runs] == [False] * 3
    assert ["2 batches" in str(runs[0].left), "seconds" in str(runs[1].left), "stop" in str(runs[2].left)] == [True] * 3
    assert left(engine) == 40


def test_a_pause_ends_when_the_run_is_told_to_stop(engine: Engine) -> None:
    """A SIGTERM is not slept through: the pause here is a day."""
    fill(engine, 20)
    told = threading.Event()
    done = prune(engine, batch_size=10, pause=86400, stop=told.is_set, on_batch=lambda _deleted: told.set())
    assert (done.deleted, done.complete) == (10, False)


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    "bounds",
    [
        *({"retention_hours": hours} for hours in (0, -1, NAN, INFINITE, 24 * 366 * 101)),
        *({"batch_size": size} for size in (0, -5)),
        *({"max_batches": number} for number in (0, -1)),
        *({"time_budget": seconds} for seconds in (0, -1, NAN, INFINITE)),
        *({"pause": seconds} for seconds in (-1, NAN, INFINITE)),
    ],
    ids=str,
)
def test_a_bound_that_cannot_be_meant_is_refused(bounds: dict[str, Any], sqlite: Database) -> None:
    """Its name is in the error, and nothing is deleted."""
    engine = create_engine(sqlite.url())
    fill(engine, 1)
    with pytest.raises(ValueError, match=next(iter(bounds))):
        cleanup(engine, **bounds)
    assert left(engine) == 1
    engine.dispose()


def test_a_partitioned_table_loses_nothing_that_is_young(postgresql: Database) -> None:
    """A row's address is its own in its partition only."""
    engine = create_engine(postgresql.url())
    with engine.begin() as connection:
        for statement in (
            'CREATE TABLE processed_message (message_id text COLLATE "C" NOT NULL, handler text COLLATE "C" NOT NULL, '
            "processed_at timestamptz NOT NULL DEFAULT now(), occurred_at timestamptz, "
            "PRIMARY KEY (message_id, handler)) PARTITION BY HASH (message_id)",
            *(
                f"CREATE TABLE part_{number} PARTITION OF processed_message "
                f"FOR VALUES WITH (MODULUS 4, REMAINDER {number})"
                for number in range(4)
            ),
            "CREATE INDEX ON processed_message (processed_at)",
        ):
            connection.execute(text(statement))
        tables.state.create(connection)
        connection.execute(
            text(
                "INSERT INTO processed_message (message_id, handler, processed_at) SELECT n, 'h', "
                "now() - CASE WHEN n % 5 = 0 THEN interval '30 days' ELSE interval '1 minute' END "
                "FROM generate_series(1, 2000) n"
            )
        )
    assert prune(engine, batch_size=150) == Pruned(400, None)
    assert left(engine) == 1600
    engine.dispose()
