"""What is tried again, for how long, and what surfaces in the end."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import Engine, create_engine, event, func, insert, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.orm.exc import StaleDataError

from databases import Database, Driver, each_driver
from projector_dedup import Dispatcher, Outcome, on, projector
from projector_dedup.errors import CommitOutcomeUnknown, RetriesExhaustedError
from projector_dedup.options import RetryPolicy
from rig import NOTHING, ONCE, TOTAL, Durable, Rig, Total, add, state, tables_on

Body = Callable[[Session], object]


@pytest.fixture(params=["postgresql", "mariadb"])
def server(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """A database server with the tables in it."""
    database: Database = request.getfixturevalue(request.param)
    engine = tables_on(create_engine(database.url()))
    yield engine
    engine.dispose()


WAITERS = {
    "postgresql": "SELECT count(*) FROM pg_stat_activity "
    "WHERE datname = current_database() AND wait_event_type = 'Lock'",
    "mariadb": "SELECT count(*) FROM information_schema.innodb_trx t JOIN information_schema.processlist p "
    "ON p.id = t.trx_mysql_thread_id WHERE p.db = database() AND t.trx_state = 'LOCK WAIT'",
}
CONFLICT = {
    "postgresql": "DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$",
    "mariadb": "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213",
}


def _waiters(engine: Engine) -> int:
    time.sleep(0.15)  # MariaDB makes no new copy of innodb_trx while it is asked for every 100 ms
    with engine.connect() as connection:
        return connection.scalar(text(WAITERS[engine.dialect.name])) or 0


def _conflict(session: Session) -> None:
    session.execute(text(CONFLICT[session.connection().dialect.name]))


def _dispatcher(engine: Engine, body: Body, *, idempotent: bool = True, retry: RetryPolicy | None = None) -> Dispatcher:
    @projector(idempotent=idempotent, name="retry")
    @on(str)
    def handler(_event: str, session: Session) -> None:
        body(session)

    return Dispatcher(sessionmaker(engine), handler, retry=retry)


def test_a_slow_winner_does_not_cost_the_loser_its_retries(server: Engine) -> None:
    """The time for retries starts at the first failure: a loser that waited longer than that is still a duplicate."""
    entered, finish = threading.Event(), threading.Event()

    def slow(session: Session) -> None:
        add(session)
        session.flush()
        entered.set()
        assert finish.wait(20)

    dispatcher = _dispatcher(server, slow, retry=RetryPolicy(within=0.05))
    outcomes: list[Outcome] = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(dispatcher.deliver("e", message_id="1").outcome)) for _ in "ab"
    ]
    threads[0].start()
    assert entered.wait(20)
    threads[1].start()
    while not _waiters(server):
        assert threads[1].is_alive()
    time.sleep(0.2)  # not to win a race: longer than `within`, which must not matter
    finish.set()
    for thread in threads:
        thread.join(20)
    assert sorted(outcome.value for outcome in outcomes) == ["applied", "duplicate"]
    assert state(server) == ONCE


def test_different_unique_violations_are_different_rivals(server: Engine) -> None:
    """A handler that creates several rows may meet several rivals; only the same violation again is a bug.

    SQLite's errors do not say which row, and need not: there are no rivals where writers take turns.
    """
    runs: list[int] = []

    def meets_a_rival_each_time(session: Session) -> None:
        runs.append(1)
        number = len(runs)
        session.add(Total(account=f"row-{number}", amount=1))
        session.flush()
        if number <= 4:
            session.execute(text(f"INSERT INTO total VALUES ('row-{number}', 1)"))

    assert _dispatcher(server, meets_a_rival_each_time).deliver("e", message_id="1").outcome is Outcome.APPLIED
    assert len(runs) == 5
    assert state(server) == ONCE


def test_the_same_unique_violation_is_the_users_error(engine: Engine) -> None:
    """It is tried again twice, then the user's own IntegrityError surfaces, and nothing is applied."""
    tables_on(engine)
    runs: list[int] = []

    def bug(session: Session) -> None:
        runs.append(1)
        session.add_all([Total(account="same", amount=1)])
        session.flush()
        session.execute(text("INSERT INTO total VALUES ('same', 1)"))

    with pytest.raises(IntegrityError):
        _dispatcher(engine, bug).deliver("e", message_id="1")
    assert len(runs) == 3
    assert state(engine) == NOTHING


@each_driver()
def test_a_violation_is_the_same_whatever_else_was_written(driver: Driver, rig_on: Callable[..., Rig]) -> None:
    """A bug that writes another value each time, the time of day say, is a bug all the same: three runs, no more."""
    rig = rig_on(driver)
    runs: list[int] = []

    def bug(session: Session) -> None:
        runs.append(1)
        session.execute(insert(TOTAL).values(account="same", amount=len(runs)))
        session.execute(insert(TOTAL).values(account="same", amount=1000 + len(runs)))

    with pytest.raises(IntegrityError):
        rig.deliver(bug)
    assert len(runs) == 3
    assert rig.durable() == NOTHING


def test_a_violation_that_comes_too_late_to_be_tried_again_is_no_bug_yet(server: Engine) -> None:
    """After conflicts for as long as the policy allows, a first violation may be a rival's: the message is kept."""
    runs: list[int] = []

    def conflicts_then_violates(session: Session) -> None:
        runs.append(1)
        if len(runs) == 1:
            _conflict(session)
        session.execute(text("INSERT INTO total VALUES ('same', 1), ('same', 2)"))

    policy = RetryPolicy(attempts=2, base=0)
    with pytest.raises(RetriesExhaustedError) as exhausted:
        _dispatcher(server, conflicts_then_violates, retry=policy).deliver("e", message_id="1")
    assert isinstance(exhausted.value.__cause__, IntegrityError)
    assert state(server) == NOTHING


def test_a_violation_that_may_not_be_tried_again_is_the_users_error(server: Engine) -> None:
    """Who asks for no retries gets the violation itself."""

    def bug(session: Session) -> None:
        session.execute(text("INSERT INTO total VALUES ('same', 1), ('same', 2)"))

    with pytest.raises(IntegrityError):
        _dispatcher(server, bug, retry=RetryPolicy(attempts=1)).deliver("e", message_id="1")


def test_those_who_waited_for_a_winner_that_fails_settle_it_among_themselves(server: Engine) -> None:
    """On MariaDB all but one may be victims of a deadlock; in the end one applies, and the others are duplicates."""
    entered, fail = threading.Event(), threading.Event()
    waiters = 5

    def body(session: Session) -> None:
        first = not entered.is_set()
        entered.set()
        add(session)
        session.flush()
        if first:
            assert fail.wait(30)
            raise ZeroDivisionError

    dispatcher = _dispatcher(server, body)
    with ThreadPoolExecutor(waiters + 1) as threads:
        winner = threads.submit(dispatcher.deliver, "e", message_id="1")
        assert entered.wait(20)
        others = [threads.submit(dispatcher.deliver, "e", message_id="1") for _ in range(waiters)]
        while _waiters(server) < waiters:
            assert not any(other.done() for other in others)
        fail.set()
        assert isinstance(winner.exception(), ZeroDivisionError)
        outcomes = [other.result().outcome for other in others]
    assert sorted(outcome.value for outcome in outcomes) == ["applied"] + ["duplicate"] * (waiters - 1)
    assert state(server) == ONCE


def test_a_lock_wait_of_the_handler_is_tried_again(mariadb: Database) -> None:
    """MariaDB's own bound (1205) undoes one statement only; the unit of work runs again whole, and is no InProgress."""
    engine = create_engine(mariadb.url(), connect_args={"init_command": "SET innodb_lock_wait_timeout = 1"})
    tables_on(engine)
    with Session(engine) as session:
        add(session)
        session.commit()
    holder = Session(engine)
    holder.execute(select(Total).where(Total.account == "a").with_for_update()).all()
    runs: list[int] = []

    def body(session: Session) -> None:
        runs.append(1)
        session.add(Total(account=f"b{len(runs)}", amount=1))
        session.flush()
        if len(runs) == 2:
            holder.rollback()
        add(session)

    assert _dispatcher(engine, body).deliver("e", message_id="1").outcome is Outcome.APPLIED
    assert len(runs) == 2
    assert state(engine) == Durable(1, 3)
    holder.close()
    engine.dispose()


def test_retries_are_bounded_by_their_number(server: Engine) -> None:
    """A conflict that never ends is raised as RetriesExhaustedError, with the last one as its cause."""
    runs: list[int] = []

    def conflict(session: Session) -> None:
        runs.append(1)
        _conflict(session)

    dispatcher = _dispatcher(server, conflict, retry=RetryPolicy(attempts=4, base=0))
    with pytest.raises(RetriesExhaustedError) as exhausted:
        dispatcher.deliver("e", message_id="1")
    assert len(runs) == 4
    assert isinstance(exhausted.value.__cause__, DBAPIError)
    assert "conflict" in str(exhausted.value.__cause__) or "1213" in str(exhausted.value.__cause__)
    assert state(server) == NOTHING


def test_a_policy_of_many_attempts_does_not_overflow(factory: sessionmaker[Session]) -> None:
    """The backoff doubles only so far."""
    attempts = iter(range(10_000))

    @projector(idempotent=True, name="retry")
    @on(str)
    def handler(_event: str, _session: Session) -> None:
        if next(attempts) < 1_100:
            raise StaleDataError("somebody was faster")

    dispatcher = Dispatcher(factory, handler, retry=RetryPolicy(attempts=2_000, within=100, cap=0))
    assert dispatcher.deliver("e", message_id="1").outcome is Outcome.APPLIED


@pytest.mark.parametrize("policy", [{"attempts": 0}, {"within": -1}, {"base": -1}])
def test_a_policy_that_means_nothing_is_refused(policy: dict[str, int]) -> None:
    """At start-up, not at the first failure."""
    with pytest.raises(ValueError, match="RetryPolicy"):
        RetryPolicy(**policy)  # type: ignore[arg-type]  # one number each


def test_an_unknown_outcome_of_another_delivery_is_not_ours(server: Engine) -> None:
    """A handler that delivers elsewhere and hears CommitOutcomeUnknown fails once; it is not run again."""
    runs: list[int] = []

    def inner_unknown(_session: Session) -> None:
        runs.append(1)
        raise CommitOutcomeUnknown("elsewhere") from OSError()

    with pytest.raises(CommitOutcomeUnknown, match="elsewhere"):
        _dispatcher(server, inner_unknown).deliver("e", message_id="1")
    assert len(runs) == 1
    assert state(server) == NOTHING


@pytest.mark.parametrize("error", [ConnectionResetError("lookup"), TimeoutError("lookup")], ids=repr)
def test_a_listener_that_cannot_reach_its_directory_is_tried_again(server: Engine, error: OSError) -> None:
    """A listener that looks a tenant up when the transaction begins fails like a connection that cannot be had."""
    begun: list[object] = []

    class Choosing(Session):
        """A Session class of the user's."""

    def choose(*_: object) -> None:
        begun.append(1)
        if len(begun) == 1:
            raise error

    event.listen(Choosing, "after_begin", choose)
    handler = projector(idempotent=True, name="h")(
        on(str)(lambda _, session: session.add(Total(account="a", amount=1)))
    )
    dispatcher = Dispatcher(sessionmaker(server, class_=Choosing), handler)
    assert dispatcher.deliver("it", message_id="m1").outcome is Outcome.APPLIED
    assert len(begun) == 2
    with Session(server) as session:
        assert session.scalar(select(func.sum(Total.amount))) == 1
