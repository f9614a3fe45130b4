"""`cleanup` deletes expired markers in batches, and nothing else; it says truly what it left, whoever meets it."""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
from click.testing import CliRunner
from projector_dedup.cli.main import main
from sqlalchemy import Connection, Engine, create_engine, delete, event, text
from sqlalchemy.orm import Session

from databases import DRIVERS, Database, Driver
from marked import fill, left, metadata, on_one_database, one_of_each_engine, tables, url_of  # noqa: F401  # a fixture
from projector_dedup.dialects import dialect_of
from projector_dedup.errors import CleanupInterruptedError, RetentionTooShortError
from projector_dedup.late import PRUNED_UNTIL
from projector_dedup.maintenance.cleanup import (
    Pruned,
    cleanup,
    count_expired,
    declare_horizon,
    prune,
    redelivery_horizon,
)
from projector_dedup.maintenance.databases import Expired, database_of
from projector_dedup.maintenance.state import CLEANED_AT, RETENTION, read_state
from projector_dedup.markers import claim
from projector_dedup.options import RetryPolicy
from pruning import uncommitted_batch
from rig import Outside

HASTY = RetryPolicy(within=0.3)
NAN, INFINITE, CENTURY = float("nan"), float("inf"), 24 * 366 * 101


def run(engine: Engine, *arguments: str) -> tuple[int, str, str]:
    """`idempotency`, on the database of the engine: its exit code, stdout and stderr."""
    done = CliRunner().invoke(main, [arguments[0], "--database-url", url_of(engine), *arguments[1:]])
    return done.exit_code, done.stdout, done.stderr


def state(engine: Engine) -> dict[str, str]:
    """The state table, as another connection reads it."""
    with engine.connect() as connection:
        return read_state(connection, tables)


def locks_rows(engine: Engine) -> None:
    """Skip where nothing but the whole file can be held."""
    if not dialect_of(engine).locks_rows:
        pytest.skip("writers are serialised")


# What goes ----------------------------------------------------------------------------------------------------------


def test_only_markers_older_than_the_retention_are_deleted(engine: Engine) -> None:
    """The default keeps a week and an hour: 168 hours stay, 170 go. The clock is the database's, whatever the zone."""
    fill(engine, [0, 2, 168, 170, 1000])
    assert count_expired(engine) == 2
    assert count_expired(engine, up_to=1) == 1
    assert cleanup(engine) == 2
    assert left(engine) == ["0", "1", "2"]
    with engine.begin() as connection:
        connection.execute(tables.marker.insert(), {"message_id": "by the database's clock", "handler": "h"})
    declare_horizon(engine, 0.5)
    assert cleanup(engine) == 2
    assert left(engine) == ["0", "by the database's clock"]


@pytest.mark.parametrize("driver", [each for each in DRIVERS if not each.is_async], ids=str)
def test_every_batch_is_a_transaction_of_its_own(driver: Driver, request: pytest.FixtureRequest) -> None:
    """What a batch deleted is counted by each driver, and gone for others before the next one starts."""
    if not driver.installed:
        pytest.skip(f"{driver.module} is not installed")
    database: Database = request.getfixturevalue(driver.engine)
    engine = create_engine(database.url(driver.drivername))
    fill(engine, [1000] * 7)
    seen: list[tuple[int, int]] = []
    assert cleanup(engine, batch_size=3, on_batch=lambda deleted: seen.append((deleted, len(left(engine))))) == 7
    assert seen == [(3, 4), (3, 1), (1, 0)]
    engine.dispose()


def test_one_handlers_markers_go_alone(engine: Engine) -> None:
    """And those of others stay, as old as they are."""
    fill(engine, {"one": [1000] * 100, "other": [1000] * 50})
    assert count_expired(engine, handler="one") == 100
    assert cleanup(engine, handler="one", batch_size=30) == 100
    assert len(left(engine)) == 50


def test_the_index_serves_the_search_for_old_markers(engine: Engine) -> None:
    """Retention finds what is old by the index on `processed_at`, and does not read the other markers."""
    fill(engine, [1000.0] * 20 + [0.0] * 5000)
    _analyze(engine)
    explain = "EXPLAIN QUERY PLAN " if engine.dialect.name == "sqlite" else "EXPLAIN "
    expired = Expired(tables.marker, datetime.now(UTC) - timedelta(hours=1), None, 100)
    statement: Any = database_of(engine).cleanup_statement(expired)
    compiled = statement.compile(engine, compile_kwargs={"literal_binds": True})
    # EXPLAIN takes no SET.
    sql = str(compiled).removeprefix("SET STATEMENT innodb_lock_wait_timeout = 1, sql_safe_updates = 0 FOR ")
    with engine.connect() as connection:
        plan = str([tuple(row) for row in connection.exec_driver_sql(explain + sql)])  # a Row is shortened
    assert "ix_processed_message_processed_at" in plan
    assert "Seq Scan" not in plan
    assert "'processed_message', 'ALL'" not in plan


def _analyze(engine: Engine) -> None:
    table = " TABLE processed_message" if engine.name in ("mariadb", "mysql") else ""
    with engine.begin() as connection:
        connection.execute(text(f"ANALYZE{table}"))


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
    fill(engine, [0.1 if number % 5 else 720 for number in range(2000)])
    assert prune(engine, batch_size=150) == Pruned(400, None, declared=168)
    assert len(left(engine)) == 1600
    engine.dispose()


def test_nothing_is_set_for_others_behind_a_pooler(postgresql: Database) -> None:
    """Every statement of a cleanup is in a transaction, and every setting is the transaction's own."""
    engine, sent = create_engine(postgresql.url()), []
    fill(engine, [1000])
    event.listen(
        engine,
        "before_cursor_execute",
        lambda connection, _cursor, statement, *_: sent.append(
            (statement, connection.connection.driver_connection.autocommit)
        ),
    )
    assert prune(engine).deleted == 1
    engine.dispose()
    assert [statement for statement, _ in sent if statement.startswith("SET ")] == []
    assert {autocommit for _, autocommit in sent} == {False}


# Others -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def held(engine: Engine, message_id: str) -> Iterator[Connection]:
    """A marker that another transaction is about to delete, until the block ends: then it is rolled back."""
    other = create_engine(engine.url)
    with other.connect() as connection:
        connection.execute(delete(tables.marker).where(tables.marker.c.message_id == message_id))
        yield connection
        connection.rollback()
    other.dispose()


def test_what_another_transaction_holds_is_not_taken_for_done(engine: Engine) -> None:
    """A marker held to the end of the wait: all others go, and the run says that it is not complete."""
    locks_rows(engine)
    fill(engine, [1000] * 200 + [0] * 3000)  # fewer, and MariaDB's planner reads them all, under lock
    with held(engine, "17"):
        done = prune(engine, retry=HASTY, batch_size=50)
    assert (done.deleted, done.complete) == (199, False)
    assert "locks expired markers" in str(done.left)
    assert len(left(engine)) == 3001
    assert prune(engine).complete


def test_what_is_let_go_while_the_cleaner_waits_is_deleted(engine: Engine) -> None:
    """It looks again, and is complete."""
    locks_rows(engine)
    fill(engine, [1000] * 200 + [0] * 3000)
    with held(engine, "17") as connection:
        event.listen(engine, "before_cursor_execute", _after_a_look(connection.rollback))
        done = prune(engine, batch_size=50)
    assert (done.deleted, done.complete) == (200, True)
    assert len(left(engine)) == 3000


def _after_a_look(act: Callable[[], object]) -> Callable[..., None]:
    """Act before the first DELETE that comes behind a look at what is left."""
    seen: list[str] = []

    def listen(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if seen or "DELETE" in statement:
            seen.append("DELETE" if "DELETE" in statement else "look")
            if seen[-1] == "DELETE" and "look" in seen:
                act()

    return listen


@pytest.mark.parametrize("level", ["by default", "SERIALIZABLE"])
def test_two_cleaners_share_the_work(engine: Engine, level: str) -> None:
    """At any level of the engine's: each marker is counted by one of them; each ends only when nothing is left."""
    fill(engine, [1000.0] * 600 + [0.0] * 5)
    given = engine if level == "by default" else engine.execution_options(isolation_level=level)
    both = threading.Barrier(2)

    def clean(_number: int) -> tuple[int, bool, int]:
        both.wait()
        done = prune(given, batch_size=25)
        return done.deleted, done.complete, len(left(engine))

    with ThreadPoolExecutor(2) as cleaners:
        deleted, complete, after = zip(*cleaners.map(clean, range(2)), strict=True)
    assert sum(deleted) == 600
    assert (complete, after) == ((True, True), (5, 5))


@pytest.mark.parametrize("fresh", [0, 3, 3000])
def test_a_cleaner_holds_up_no_other_message(engine: Engine, fresh: int) -> None:
    """While a batch is uncommitted, claims of other ids go on; one that waited for it would fail after 5 seconds."""
    locks_rows(engine)
    fill(engine, [1000.0] * 10 + [0.0] * fresh)
    _analyze(engine)
    bounded = {"lock_timeout": 5000} if engine.name == "postgresql" else {"innodb_lock_wait_timeout": 5}
    other = create_engine(engine.url)
    event.listen(other, "connect", lambda connection, _: _set(connection, bounded))
    with uncommitted_batch(engine, tables, 7) as batch:
        for message_id in ("new", "00", "5x", "~"):  # before, between and after what is deleted
            assert claims(other, message_id)
        if fresh > 1000:  # fewer, and a planner reads them all, under lock on MariaDB: a redelivery waits for the batch
            assert not claims(other, "10")
        batch.commit()
    assert cleanup(engine, batch_size=7) == 3
    other.dispose()
    assert left(engine) == sorted(["new", "00", "5x", "~", *(str(10 + number) for number in range(fresh))])


def _set(connection: Any, variables: dict[str, int]) -> None:
    with contextlib.closing(connection.cursor()) as cursor:
        for name, value in variables.items():
            cursor.execute(f"SET {name} = {value}")
    connection.commit()


def claims(engine: Engine, message_id: str) -> bool:
    """Claim a message and commit; True if it is new."""
    with Session(engine) as session:
        new = claim(session, message_id, "h")
        session.commit()
    return new


@pytest.mark.parametrize("commits", [True, False])
def test_a_claim_that_meets_its_own_pruning_waits_for_it(engine: Engine, commits: bool) -> None:
    """A redelivery is new if the prune commits, by design, and a duplicate if that rolls back."""
    fill(engine, [1000] * 200)
    patient = create_engine(engine.url)
    rows = dialect_of(engine).locks_rows
    with contextlib.ExitStack() as stack:
        batch = stack.enter_context(uncommitted_batch(engine, tables, 500) if rows else held(engine, "0"))
        end = batch.commit if commits else batch.rollback
        if rows:
            threads = stack.enter_context(ThreadPoolExecutor(1))
            redelivery = threads.submit(claims, patient, "0")
            time.sleep(0.3)
            assert not redelivery.done()  # a claim that did not wait would be through by far
            end()
            assert redelivery.result() is commits
        else:
            impatient = create_engine(engine.url, connect_args={"timeout": 0})
            with pytest.raises(Exception, match="locked"):
                claims(impatient, "0")
            impatient.dispose()
            end()
            assert claims(patient, "0") is commits
    patient.dispose()


# Errors -------------------------------------------------------------------------------------------------------------


def _before_delete(engine: Engine, act: Callable[[Connection], object], numbers: Any) -> None:
    """Run ``act`` before the DELETEs of these numbers, in their open transactions."""
    deletes = count()

    def listen(connection: Connection, _cursor: object, statement: str, *_: object) -> None:
        if "DELETE" in statement and next(deletes) in numbers:
            act(connection)

    event.listen(engine, "before_cursor_execute", listen)


def test_a_lost_connection_costs_a_batch_no_more_than_time(engine: Engine, database: Database) -> None:
    """Two batches are killed in the middle; the run begins them again and deletes everything."""
    locks_rows(engine)
    fill(engine, [1000] * 70 + [0] * 3)
    _before_delete(engine, lambda _: Outside(database).kill_others(), {2, 5})
    assert cleanup(engine, batch_size=10) == 70
    assert len(left(engine)) == 3


def test_a_connection_that_is_lost_time_and_again_ends_the_run_with_the_count(
    engine: Engine, database: Database
) -> None:
    """The error says how many markers were deleted until then, and they are."""
    locks_rows(engine)
    fill(engine, [1000] * 70 + [0] * 3)
    _before_delete(engine, lambda _: Outside(database).kill_others(), range(3, 1000))
    with pytest.raises(CleanupInterruptedError, match="at least 30 markers") as raised:
        cleanup(engine, batch_size=10, retry=RetryPolicy(attempts=3))
    assert raised.value.deleted == 30
    assert len(left(engine)) == 43


def test_a_deadlock_is_tried_again(engine: Engine) -> None:
    """A batch that the database gives up in favour of another transaction is deleted the next time."""
    locks_rows(engine)
    fill(engine, [1000] * 30)
    refusals = {"postgresql": "DO $$ BEGIN RAISE 'chosen' USING ERRCODE = '40P01'; END $$"}
    refusal = refusals.get(engine.name, "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213, MESSAGE_TEXT = 'chosen'")
    _before_delete(engine, lambda connection: connection.exec_driver_sql(refusal), {0})
    assert cleanup(engine, batch_size=10) == 30
    assert left(engine) == []


def test_a_writer_that_keeps_the_file_ends_the_run_with_the_count(sqlite: Database) -> None:
    """SQLite has one lock for all; a run that cannot have it says how far it came."""
    engine = create_engine(sqlite.url(), connect_args={"timeout": 0})
    fill(engine, [1000] * 30)
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


# Bounds and signals -------------------------------------------------------------------------------------------------


def test_a_run_ends_at_its_bounds_and_says_so(engine: Engine) -> None:
    """After so many batches, after some time, or when it is told to."""
    fill(engine, [1000] * 70)
    told = iter([False, True])
    bounds: tuple[dict[str, Any], ...] = ({"max_batches": 2}, {"time_budget": 1e-9}, {"stop": lambda: next(told)})
    for bound, deleted, why in zip(bounds, (20, 0, 10), ("2 batches", "seconds", "stop"), strict=True):
        done = prune(engine, batch_size=10, **bound)
        assert (done.deleted, done.complete, why in str(done.left)) == (deleted, False, True)
    assert len(left(engine)) == 40


def test_a_pause_ends_when_the_run_is_told_to_stop(engine: Engine) -> None:
    """A SIGTERM is not slept through: the pause here is a day."""
    fill(engine, [1000] * 20)
    told = threading.Event()
    done = prune(engine, batch_size=10, pause=86400, stop=told.is_set, on_batch=lambda _deleted: told.set())
    assert (done.deleted, done.complete) == (10, False)


@pytest.mark.parametrize(
    ("bound", "values"),
    [
        ("retention_hours", (0, -1, NAN, INFINITE, CENTURY)),
        ("batch_size", (0, -5)),
        ("max_batches", (0, -1)),
        ("time_budget", (0, -1, NAN, INFINITE)),
        ("pause", (-1, NAN, INFINITE)),
    ],
)
def test_a_bound_that_cannot_be_meant_is_refused(bound: str, values: tuple[Any, ...], sqlite: Database) -> None:
    """Its name is in the error, and nothing is deleted; to the command it is a usage error."""
    engine = create_engine(sqlite.url())
    fill(engine, [1000])
    for value in values:
        with pytest.raises(ValueError, match=bound):
            cleanup(engine, **{bound: value})
        assert run(engine, "cleanup", f"--{bound.replace('_', '-')}", str(value))[0] == 2
    assert left(engine) == ["0"]
    engine.dispose()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
@on_one_database
def test_a_signal_ends_the_run_after_the_batch(number: signal.Signals, engine: Engine) -> None:
    """Exit code 0, and a count that is true; it is sent to a real process that rests for a day between batches."""
    fill(engine, [1000] * 30)
    declare_horizon(engine, 168)
    command = [sys.executable, "-u", "-c", _TELLS_OF_BATCHES, "cleanup", "--batch-size", "10", "--pause", "86400"]
    environment = {**os.environ, "PROJECTOR_DEDUP_DATABASE_URL": url_of(engine)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "batch 10\n"
        process.send_signal(number)
        said, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert said == (
        "Deleted 10 markers older than 168 hours; the run was stopped: older markers may remain. Run the cleanup "
        "again.\n"
    )
    assert len(left(engine)) == 20


_TELLS_OF_BATCHES = """
import contextlib, sys
from projector_dedup.cli import cleanup
from projector_dedup.cli.main import main

@contextlib.contextmanager
def counting(verb):
    yield lambda deleted: print("batch", deleted, file=sys.stderr, flush=True)

cleanup.counting = counting
main()
"""


# The command --------------------------------------------------------------------------------------------------------


@on_one_database
def test_a_dry_run_deletes_nothing(engine: Engine) -> None:
    """It says how many would go."""
    fill(engine, [1000] * 7)
    assert run(engine, "cleanup", "--dry-run") == (0, "Would delete 7 markers older than 168 hours.\n", "")
    assert len(left(engine)) == 7


@on_one_database
def test_a_handlers_markers_and_bounds(engine: Engine) -> None:
    """What was left out is said."""
    fill(engine, [1000] * 7)
    declare_horizon(engine, 168)
    young = ("--handler", "h", "--retention-hours", "2000")
    assert run(engine, "cleanup", *young) == (0, "Deleted 0 markers of h older than 2000 hours.\n", "")
    code, said, _ = run(engine, "cleanup", "--batch-size", "2", "--max-batches", "2", "--time-budget", "600")
    assert (code, len(left(engine))) == (0, 3)
    assert said.startswith("Deleted 4 markers older than 168 hours; the limit of 2 batches is reached")


@on_one_database
@pytest.mark.parametrize("dry_run", [False, True], ids=["", "--dry-run"])
def test_a_handler_that_nobody_knows_is_refused(dry_run: bool, engine: Engine) -> None:
    """A misspelt name deletes nothing and says so, with the place that has the names."""
    fill(engine, [1000] * 7)
    code, said, wrong = run(engine, "cleanup", "--handler", "H", *(["--dry-run"] if dry_run else []))
    assert (code, said) == (1, "")
    assert "no marker of H in " in wrong
    assert "check the name in the column handler of processed_message" in wrong
    assert len(left(engine)) == 7


@on_one_database
@pytest.mark.parametrize("form", [(), ("--log-json",)], ids=["text", "json"])
def test_a_quiet_run_speaks_only_if_something_needs_attention(engine: Engine, form: tuple[str, ...]) -> None:
    """Nothing after a complete run; a run that a bound has ended, a dry run and an error are printed as before."""
    fill(engine, [1000] * 7)
    quiet = ("cleanup", "--quiet", *form)
    assert "7" in run(engine, *quiet, "--dry-run")[1]
    code, said, _ = run(engine, *quiet, "--batch-size", "2", "--max-batches", "1")
    assert (code, said != "", len(left(engine))) == (0, True, 5)
    assert run(engine, *quiet) == (0, "", "")
    assert left(engine) == []
    declare_horizon(engine, 336)
    code, _, wrong = run(engine, *quiet, "--retention-hours", "24")
    assert code == 1
    assert "336" in wrong


@on_one_database
def test_a_line_of_json(engine: Engine) -> None:
    """Also for a run that failed, without its password; the exit code tells as well."""
    fill(engine, [1000] * 7)
    declare_horizon(engine, 168)
    code, said, _ = run(engine, "cleanup", "--log-json")
    good = json.loads(said)
    assert (code, good.pop("seconds") >= 0) == (0, True)
    assert good == {
        "event": "cleanup",
        "deployment": engine.url.render_as_string(),
        "deleted": 7,
        "complete": True,
    }
    bad = create_engine("postgresql+psycopg://app:s3cret@127.0.0.1:1/orders")
    code, said, _ = run(bad, "cleanup", "--log-json")
    failed = json.loads(said)
    assert (code, failed["event"], failed["deployment"]) == (1, "cleanup", bad.url.render_as_string())
    assert "cannot connect" in failed["error"]
    assert "s3cret" not in said


# The redelivery horizon ---------------------------------------------------------------------------------------------


def test_a_horizon_is_declared_shown_and_taken_back(engine: Engine) -> None:
    """Before it is declared there is none; what cannot be meant is refused, and the declared one stays."""
    metadata.create_all(engine)
    seen = [redelivery_horizon(engine)]
    for hours in (336, 72.5, None):
        declare_horizon(engine, hours)
        seen.append(redelivery_horizon(engine))
    assert seen == [None, 336, 72.5, None]
    declare_horizon(engine, 24)
    for hours in (0, -1, NAN, INFINITE, CENTURY):
        with pytest.raises(ValueError, match="horizon"):
            declare_horizon(engine, hours)
    assert redelivery_horizon(engine) == 24


def test_a_shorter_retention_is_refused(engine: Engine) -> None:
    """The error names both numbers, and nothing is deleted; at the horizon, cleanup goes on."""
    fill(engine, [400, 340, 300])
    declare_horizon(engine, 336)
    with pytest.raises(RetentionTooShortError, match=r"168 hours.*336 hours") as raised:
        cleanup(engine, retention_hours=168)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)  # our own; for a worker's parent
    assert len(left(engine)) == 3
    assert cleanup(engine, retention_hours=336) == 2
    assert left(engine) == ["2"]


def test_without_a_retention_the_declared_horizon_is_taken(engine: Engine) -> None:
    """It is the retention, be it longer or shorter than 168 hours, which are taken if none was declared."""
    fill(engine, [400, 340, 300, 120, 60])
    declare_horizon(engine, 336)
    assert (count_expired(engine), cleanup(engine)) == (2, 2)
    assert left(engine) == ["2", "3", "4"]
    declare_horizon(engine, None)
    assert (count_expired(engine), cleanup(engine)) == (1, 1)
    assert redelivery_horizon(engine) == 168
    declare_horizon(engine, 100)
    assert (count_expired(engine), cleanup(engine)) == (1, 1)
    assert left(engine) == ["4"]


def test_a_finished_run_leaves_word(engine: Engine) -> None:
    """The retention, when it ended, and the moment before which no marker is kept, by the database's clock in UTC."""
    fill(engine, [400])
    before = datetime.now(UTC) - timedelta(seconds=2)  # SQLite's clock has whole seconds
    cleanup(engine, retention_hours=200)
    after = datetime.now(UTC) + timedelta(seconds=1)
    told = state(engine)
    assert float(told[RETENTION]) == 200
    assert before <= datetime.fromisoformat(told[CLEANED_AT]) <= after
    assert before <= datetime.fromisoformat(told[PRUNED_UNTIL]) + timedelta(hours=201) <= after


def test_what_was_pruned_once_stays_known(engine: Engine) -> None:
    """A later run with a longer retention does not move back the moment before which markers are gone."""
    fill(engine, [400])
    cleanup(engine, retention_hours=10)
    assert PRUNED_UNTIL in state(engine)
    pruned_until = state(engine)[PRUNED_UNTIL]
    fill(engine, [2000])  # without a marker to delete, nothing would be written
    assert cleanup(engine, retention_hours=1000) == 1
    assert (state(engine)[PRUNED_UNTIL], float(state(engine)[RETENTION])) == (pruned_until, 1000)


@pytest.mark.parametrize("bounds", [{"handler": "h"}, {"max_batches": 1, "batch_size": 1}, {"stop": lambda: True}])
def test_a_run_that_left_markers_does_not_claim_to_be_complete(engine: Engine, bounds: dict[str, Any]) -> None:
    """One handler's, or stopped early: older markers may be there, and some may be gone, which is told."""
    fill(engine, [400, 401])
    cleanup(engine, **bounds)
    assert PRUNED_UNTIL in state(engine)
    assert state(engine).keys().isdisjoint({RETENTION, CLEANED_AT})


def test_a_run_that_finds_nothing_to_delete_leaves_no_such_moment(engine: Engine) -> None:
    """What is compared by markers can be known since the beginning."""
    fill(engine, [1])
    cleanup(engine)
    assert PRUNED_UNTIL not in state(engine)


def test_a_user_who_may_not_write_the_state_can_prune(postgresql: Database, caplog: pytest.LogCaptureFixture) -> None:
    """The markers are deleted and counted; that nobody will know is logged, with the remedy."""
    owner = create_engine(postgresql.url())
    fill(owner, [400, 1])
    role = f"pruner_{postgresql.url().database}"
    with owner.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN"))
        connection.execute(text(f"GRANT USAGE ON SCHEMA public TO {role}"))
        connection.execute(text(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {tables.marker.name} TO {role}"))
        connection.execute(text(f"GRANT SELECT ON {tables.state.name} TO {role}"))
    engine = create_engine(postgresql.url(), connect_args={"options": f"-c role={role}"})
    try:
        done = prune(engine)
    finally:
        engine.dispose()
        with owner.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {role}"))
            connection.execute(text(f"DROP ROLE {role}"))
    assert (done.deleted, done.complete) == (1, True)
    assert left(owner) == ["1"]
    assert state(owner) == {}
    assert "processed_message_state could not be written" in caplog.text
    assert "could not write into processed_message_state" in caplog.text
    owner.dispose()


@on_one_database
def test_the_command_declares_and_shows_the_horizon(engine: Engine) -> None:
    """Raised it is at once, lowered with --yes only; cleanup then refuses what is below."""
    fill(engine, [400])
    shown = (0, "The redelivery horizon is 336 hours.\n", "")
    assert run(engine, "horizon") == (0, "No redelivery horizon is declared.\n", "")
    assert run(engine, "horizon", "336") == shown
    assert run(engine, "horizon", "100")[0] == 2  # nobody could be asked
    assert run(engine, "horizon") == shown
    code, _, refusal = run(engine, "cleanup", "--retention-hours", "168")
    assert (code, "168 hours" in refusal, "336 hours" in refusal) == (1, True, True)
    assert run(engine, "cleanup", "--dry-run") == (0, "Would delete 1 marker older than 336 hours.\n", "")
    assert run(engine, "cleanup") == (0, "Deleted 1 marker older than 336 hours.\n", "")
    assert run(engine, "horizon", "100", "--yes") == (0, "The redelivery horizon is 100 hours.\n", "")
    assert [run(engine, "horizon", hours)[0] for hours in ("0", "nan", "inf", "a")] == [2] * 4
