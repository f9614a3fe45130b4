"""SQLite's own troubles: locked files, full disks, readers in the way, and the drivers' ways to begin a transaction."""

import contextlib
import multiprocessing
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL, create_engine, event, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import Pool, QueuePool, SingletonThreadPool

from contract import ConcurrencyContract
from convergence import Broker, generate, totals_of
from databases import DRIVERS, Database, Driver
from kit import Added, Harness, Subject, Total, add, until_acknowledged
from projector_dedup import Dispatcher, Outcome, on, projector
from projector_dedup.dialects import configure_sqlite
from projector_dedup.errors import (
    CommitOutcomeUnknown,
    RetriesExhaustedError,
    TransactionViolatedError,
    UnsafeSessionError,
    UnsupportedDatabaseError,
)
from projector_dedup.markers import claim
from projector_dedup.options import RetryPolicy
from ready import ready

SQLITE = [driver for driver in DRIVERS if driver.engine == "sqlite"]
HASTY = 0.001  # seconds; a writer that meets another one hears "database is locked" nearly at once

JOURNALS: dict[str, dict[str, Any]] = {
    "delete": {"engine_arguments": {"connect_args": {"timeout": HASTY}}},
    "wal": {"prepare": partial(configure_sqlite, busy_timeout=HASTY)},
}


@pytest.fixture(params=SQLITE, ids=str)
def url(request: pytest.FixtureRequest, sqlite: Database) -> URL:
    """An empty file, for each of SQLite's drivers."""
    driver: Driver = request.param
    return sqlite.url(driver.drivername)


@pytest.fixture(params=JOURNALS)
def harness(request: pytest.FixtureRequest, url: URL) -> Iterator[Harness]:
    """The contract's tables in either journal mode, with a busy timeout that is always too short."""
    with ready(url, **JOURNALS[request.param]) as harness:
        yield harness


def path_of(harness: Harness) -> str:
    """The file."""
    return str(harness.subject.url.database)


# "database is locked" ----------------------------------------------------------------------------------------------


def test_processes_converge_though_the_file_is_locked(harness: Harness) -> None:
    """Four processes that hardly wait for one another: locked means again, never a wrong total."""
    messages = generate(5, 60)
    stream = [item for item in messages.items() for _ in range(3)]
    Broker(harness.subject, stream, {}).run(workers=4)
    assert harness.totals() == totals_of(messages)
    assert harness.markers() == sorted((message_id, "totals") for message_id in messages)


def test_a_storm_of_locks_costs_deliveries_but_no_message(harness: Harness) -> None:
    """Threads without retries, and a stranger who takes the write lock again and again: what fails applied nothing."""
    messages = generate(6, 40)
    stream = list(messages.items()) * 2
    dispatcher = harness.dispatcher(retry=RetryPolicy(attempts=1))
    failures: list[Exception] = []
    over = threading.Event()

    def consume() -> None:
        while stream:
            message_id, happened = stream.pop()

            def deliver(message_id: str = message_id, happened: Added = happened) -> Any:
                try:
                    return harness.deliver(dispatcher, happened, message_id)
                except RetriesExhaustedError as error:
                    failures.append(error)
                    raise

            until_acknowledged(deliver, RetriesExhaustedError, times=5_000)

    def disturb() -> None:
        with contextlib.closing(sqlite3.connect(path_of(harness), timeout=300, isolation_level=None)) as stranger:
            while not over.is_set():
                stranger.execute("BEGIN IMMEDIATE")
                stranger.execute("UPDATE contract_total SET amount = amount")
                stranger.execute("COMMIT")

    stranger = harness.start(disturb)
    consumers = [harness.start(consume) for _ in range(4)]
    for consumer in consumers:
        consumer.result()
    over.set()
    stranger.result()
    assert failures, "nobody ever met a lock"
    assert all(isinstance(failure.__cause__, OperationalError) for failure in failures)
    assert harness.totals() == totals_of(messages)
    assert harness.markers() == sorted((message_id, "totals") for message_id in messages)


READER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN")
connection.execute("SELECT count(*) FROM contract_total").fetchone()
print("reading", flush=True)
sys.stdin.readline()
"""


@contextlib.contextmanager
def reader_of(path: str) -> Iterator[None]:
    """Another process, in the midst of a transaction that reads."""
    with subprocess.Popen(
        [sys.executable, "-c", READER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        try:
            yield
        finally:
            process.communicate("enough\n")


def test_a_process_that_reads_for_long_is_in_the_way_of_a_rollback_journal_only(harness: Harness) -> None:
    """With write-ahead logging the delivery passes; without it COMMIT is refused, and nothing is applied till later."""
    journal = harness.transact(lambda session: session.execute(text("PRAGMA journal_mode")).scalar_one())
    dispatcher = harness.dispatcher(retry=RetryPolicy(attempts=3, base=0))
    with reader_of(path_of(harness)):
        if journal == "wal":
            assert harness.deliver(dispatcher).outcome is Outcome.APPLIED
        else:
            with pytest.raises(RetriesExhaustedError):
                harness.deliver(dispatcher)
            assert (harness.totals(), harness.markers()) == ({}, [])
    assert harness.deliver(dispatcher).outcome is (Outcome.DUPLICATE if journal == "wal" else Outcome.APPLIED)
    assert (harness.totals(), harness.markers()) == ({"a": 1}, [("m1", "totals")])


# A full disk -------------------------------------------------------------------------------------------------------


class Disk:
    """How many pages the file may have; every transaction of the engine heeds it."""

    def __init__(self, harness: Harness) -> None:
        self.pages = 1_000_000
        self._path = path_of(harness)
        event.listen(harness.engine, "checkout", self._limit)

    def fill(self) -> None:
        """Not one page more."""
        with contextlib.closing(sqlite3.connect(self._path)) as connection:
            (self.pages,) = connection.execute("PRAGMA page_count").fetchone()

    def _limit(self, dbapi_connection: Any, *_: object) -> None:
        cursor = dbapi_connection.cursor()
        cursor.execute(f"PRAGMA max_page_count = {self.pages}")
        cursor.close()


def bulky(happened: Added, session: Session) -> None:
    """A handler that needs some pages."""
    add(happened, session)
    session.add(Total(key="x" * 100_000, amount=0))
    session.flush()


@pytest.mark.parametrize("swallowed", [False, True], ids=["raised", "swallowed"])
def test_a_full_disk_applies_nothing_until_there_is_room(harness: Harness, swallowed: bool) -> None:
    """SQLite undoes the whole transaction, the marker too: the delivery raises, even if the handler says nothing."""
    disk = Disk(harness)

    def body(happened: Added, session: Session) -> None:
        try:
            bulky(happened, session)
        except OperationalError:
            if not swallowed:
                raise
            session.rollback()

    dispatcher = harness.dispatcher(harness.handler(body))
    disk.fill()
    with pytest.raises(TransactionViolatedError if swallowed else OperationalError):
        harness.deliver(dispatcher)
    assert (harness.totals(), harness.markers()) == ({}, [])
    disk.pages = 1_000_000
    assert harness.deliver(dispatcher).outcome is Outcome.APPLIED
    assert harness.deliver(dispatcher).outcome is Outcome.DUPLICATE
    assert harness.totals()["a"] == 1
    assert harness.markers() == [("m1", "totals")]


def test_a_core_statement_that_meets_a_full_disk_and_is_swallowed(harness: Harness) -> None:
    """What the handler writes afterwards, outside any transaction, is prevented."""
    disk = Disk(harness)

    def body(happened: Added, session: Session) -> None:
        with contextlib.suppress(OperationalError):
            session.execute(text("INSERT INTO contract_total VALUES (:key, 0)"), {"key": "x" * 100_000})
        add(happened, session)

    disk.fill()
    with pytest.raises(TransactionViolatedError):
        harness.deliver(harness.dispatcher(harness.handler(body)))
    assert (harness.totals(), harness.markers()) == ({}, [])


def _commit_on_a_full_disk(journal: str, url: URL, line: Connection) -> None:
    """In a process of its own, whose files cannot grow while COMMIT is under way."""
    import resource  # Windows has no such thing

    limit, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Harness(Subject(url, **JOURNALS[journal])) as harness:
        path = path_of(harness)

        def body(happened: Added, session: Session) -> None:
            bulky(happened, session)
            size = max(Path(path + suffix).stat().st_size for suffix in ("", "-wal") if Path(path + suffix).exists())
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

        dispatcher = harness.dispatcher(harness.handler(body), retry=RetryPolicy(attempts=2, base=0))
        try:
            harness.deliver(dispatcher)
            line.send("applied")
        except (CommitOutcomeUnknown, OperationalError) as error:
            line.send(type(error).__name__)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on the size of files")
@pytest.mark.parametrize("journal", JOURNALS)
def test_a_commit_that_cannot_be_written_is_not_acknowledged(journal: str, url: URL) -> None:
    """No room when COMMIT comes to write: whether it did is not guessed, nothing is applied, a redelivery applies."""
    with ready(url, **JOURNALS[journal]) as harness:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_commit_on_a_full_disk, args=(journal, url, theirs))
        process.start()
        theirs.close()
        assert ours.poll(30)
        assert ours.recv() == "CommitOutcomeUnknown"
        process.join()
        assert (harness.totals(), harness.markers()) == ({}, [])
        assert harness.deliver(harness.dispatcher()).outcome is Outcome.APPLIED
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [("m1", "totals")])


# The drivers' own transactions, since Python 3.12 ------------------------------------------------------------------

if sys.version_info >= (3, 12):

    class TestDriverBegins(ConcurrencyContract):
        """`autocommit=False`: the driver keeps a transaction open at all times; the claim is its first statement."""

        @pytest.fixture(params=[(SQLITE[0], configure_sqlite), (SQLITE[1], None)], ids=["pysqlite, wal", "aiosqlite"])
        def subject(self, request: pytest.FixtureRequest, sqlite: Database) -> Subject:
            """Each driver, in one journal mode each."""
            driver, prepare = request.param
            arguments = {"connect_args": {"autocommit": False}}
            return Subject(sqlite.url(driver.drivername), engine_arguments=arguments, prepare=prepare)

    @pytest.mark.contract
    def test_a_driver_whose_commit_does_nothing_is_refused(url: URL) -> None:
        """`autocommit=True`: commit() has no effect, so a transaction that the claim began would never be committed."""
        with (
            Harness(Subject(url)) as harness,
            Harness(Subject(url, engine_arguments={"connect_args": {"autocommit": True}})) as committing,
        ):
            harness.create_tables()
            for _ in range(2):
                with pytest.raises(UnsafeSessionError, match="AUTOCOMMIT"):
                    committing.deliver(committing.dispatcher())
                with pytest.raises(UnsafeSessionError, match="AUTOCOMMIT"):
                    committing.transact(lambda session: claim(session, "m1", "totals"))
            assert (harness.totals(), harness.markers()) == ({}, [])


IN_MEMORY = (
    "sqlite://",
    "sqlite:///:memory:",
    "sqlite:///file:named?mode=memory&cache=shared&uri=true",
    "sqlite:///file::memory:?cache=shared&uri=true",
    "sqlite:///file:/kept?vfs=memdb&uri=true",
)


@pytest.mark.filterwarnings("ignore:.*pool.*:sqlalchemy.exc.SADeprecationWarning")
@pytest.mark.parametrize("pool", [SingletonThreadPool, QueuePool])
@pytest.mark.parametrize("url", IN_MEMORY)
def test_a_database_in_memory_is_refused(url: str, pool: type[Pool]) -> None:
    """Its sessions would share a connection, or it would be lost with one; the text names a file as the remedy."""
    engine = create_engine(url, poolclass=pool)
    with pytest.raises(UnsupportedDatabaseError, match="use a file, such as"):
        Dispatcher(sessionmaker(engine), projector(idempotent=True, name="totals")(on(Added)(add))).deliver(
            Added(), message_id="m1"
        )
    engine.dispose()
