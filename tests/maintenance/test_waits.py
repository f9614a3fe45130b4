"""Whoever holds a table does not hold the commands that look after it: their waits end, and say what to do."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError

from command import idempotency
from databases import Database
from marked import fill, left, metadata, url_of
from projector_dedup import CleanupInterruptedError, RetryPolicy
from projector_dedup.dialects import Failure, dialect_of
from projector_dedup.maintenance.cleanup import prune
from projector_dedup.maintenance.running import limited
from projector_dedup.maintenance.stats import stats

LIMITS = {
    "postgresql": "SELECT setting FROM pg_settings WHERE name = 'lock_timeout'",
    "mariadb": "SELECT concat(@@lock_wait_timeout, ' ', @@innodb_lock_wait_timeout)",
    "sqlite": "PRAGMA busy_timeout",
}


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    """An engine on a database with the tables and three old markers."""
    engine = create_engine(database.url())
    fill(engine, [1000] * 3)
    yield engine
    engine.dispose()


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Hold the marker table against readers and writers, as somebody's ALTER TABLE does."""
    lock, release = {
        "postgresql": ("LOCK TABLE processed_message IN ACCESS EXCLUSIVE MODE", None),
        "mariadb": ("LOCK TABLES processed_message WRITE", "UNLOCK TABLES"),
        "sqlite": ("BEGIN EXCLUSIVE", None),
    }[engine.dialect.name]
    with engine.connect() as connection:
        connection.exec_driver_sql(lock)
        try:
            yield
        finally:
            if release is not None:
                connection.exec_driver_sql(release)


@pytest.mark.parametrize(
    "command",
    [["check"], ["stats"], ["cleanup"], ["cleanup", "--dry-run"], ["show", "0"], ["forget", "0", "--yes"]],
    ids=" ".join,
)
def test_a_command_ends_though_somebody_holds_the_table(command: list[str], engine: Engine) -> None:
    """Exit code 1 and one line with the table and what to do, while the lock is still held; nothing is deleted."""
    url = url_of(engine)
    with held(engine):
        done = idempotency(*command, "--database-url", url, "--lock-timeout", "0.2")
    assert done.returncode == 1, done.stdout
    assert len(done.stderr.splitlines()) == 1
    assert "another transaction locked processed_message for more than 0.2 seconds" in done.stderr
    assert "--lock-timeout" in done.stderr
    assert len(left(engine)) == 3
    assert idempotency(*command, "--database-url", url, "--lock-timeout", "0.2").returncode == 0


def test_a_batch_gives_up_a_lock_that_comes_during_the_run(engine: Engine) -> None:
    """Between two batches somebody takes the table: what was deleted stays deleted, and the error says how much."""
    holding = held(engine)

    def lock(_deleted: int) -> None:
        holding.__enter__()

    few = RetryPolicy(attempts=2, within=0.2)
    try:
        deleted = prune(limited(engine, 0.2), batch_size=2, on_batch=lock, retry=few).deleted
    except CleanupInterruptedError as error:
        deleted = error.deleted
    holding.__exit__(None, None, None)
    assert deleted == 2
    assert len(left(engine)) == 1


def test_a_connection_goes_back_with_its_usual_limit(engine: Engine) -> None:
    """The copy shares the pool: whoever delivers on a connection next waits as before, after COMMIT and ROLLBACK."""

    def limit_of(connection: Connection) -> str:
        return str(connection.scalar(text(LIMITS[engine.dialect.name])))

    with engine.connect() as connection:
        usual = limit_of(connection)
    short = limited(engine, 3)
    wanted = {"postgresql": "3000", "mariadb": "3 3", "sqlite": "3000"}[engine.dialect.name]
    for end in (Connection.commit, Connection.rollback, Connection.close):
        with short.connect() as connection:
            assert limit_of(connection) == wanted
            end(connection)
        with engine.connect() as connection:
            assert limit_of(connection) == usual != wanted


def test_the_limit_holds_at_another_level_too(engine: Engine) -> None:
    """A copy of the copy, which cleanup makes for its isolation level, is limited as well."""
    level = "SERIALIZABLE" if engine.dialect.name == "sqlite" else "READ COMMITTED"
    with held(engine), pytest.raises(DBAPIError) as caught:
        stats(limited(limited(engine, 60), 0.2).execution_options(isolation_level=level))
    assert dialect_of(engine).classify(caught.value) is Failure.LOCK_TIMEOUT


def test_nothing_is_set_for_others_behind_a_pooler(postgresql: Database) -> None:
    """On PostgreSQL every limit is the transaction's own, and every statement of a cleanup is in a transaction."""
    engine, sent = create_engine(postgresql.url()), []
    metadata.create_all(engine)
    event.listen(
        engine,
        "before_cursor_execute",
        lambda connection, _cursor, statement, *_: sent.append(
            (statement, connection.connection.driver_connection.autocommit)
        ),
    )
    prune(limited(engine))
    engine.dispose()
    limits = [statement for statement, _ in sent if statement.startswith("SET")]
    assert limits
    assert set(limits) == {"SET LOCAL lock_timeout = 10000"}
    assert {autocommit for _, autocommit in sent} == {False}


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_limit_that_cannot_be_meant(seconds: float, sqlite: Database) -> None:
    """No time at all would be no limit to PostgreSQL."""
    with pytest.raises(ValueError, match="lock_timeout"):
        limited(create_engine(sqlite.url()), seconds)
