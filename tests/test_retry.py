"""What is tried again, for how long, and what surfaces in the end."""

import threading
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine, create_engine, func, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from databases import Database
from projector_dedup import (
    CommitOutcomeUnknown,
    Dispatcher,
    Outcome,
    RetriesExhaustedError,
    RetryPolicy,
    make_tables,
    on,
    projector,
)


class Base(DeclarativeBase):
    """The read model of these tests."""


class Total(Base):
    """A row."""

    __tablename__ = "total"
    id: Mapped[str] = mapped_column(primary_key=True)
    amount: Mapped[int]


tables = make_tables(Base.metadata)
Body = Callable[[Session], object]


@pytest.fixture
def postgresql_engine(postgresql: Database) -> Iterator[Engine]:
    """With the tables in it."""
    engine = create_engine(postgresql.url())
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def _dispatcher(engine: Engine, body: Body, *, idempotent: bool = True, retry: RetryPolicy | None = None) -> Dispatcher:
    @projector(idempotent=idempotent, name="retry")
    @on(str)
    def handler(_event: str, session: Session) -> None:
        body(session)

    return Dispatcher(sessionmaker(engine), handler, retry=retry)


def _add(session: Session) -> None:
    total = session.get(Total, "a")
    if total is None:
        total = Total(id="a", amount=0)
        session.add(total)
    total.amount += 1


def _state(engine: Engine) -> tuple[int, int]:
    with Session(engine) as session:
        markers = session.scalar(select(func.count()).select_from(tables.marker)) or 0
        return markers, session.scalar(select(func.sum(Total.amount))) or 0


def test_a_slow_winner_does_not_cost_the_loser_its_retries(postgresql_engine: Engine) -> None:
    """The time for retries starts at the first failure: a loser that waited longer than that is still a duplicate."""
    entered, finish = threading.Event(), threading.Event()

    def slow(session: Session) -> None:
        _add(session)
        session.flush()
        entered.set()
        assert finish.wait(20)

    dispatcher = _dispatcher(postgresql_engine, slow, retry=RetryPolicy(within=0.05))
    outcomes: list[Outcome] = []
    threads = [
        threading.Thread(target=lambda: outcomes.append(dispatcher.deliver("e", message_id="1").outcome)) for _ in "ab"
    ]
    threads[0].start()
    assert entered.wait(20)
    threads[1].start()
    waited = threading.Event()
    while not _somebody_waits(postgresql_engine):
        assert threads[1].is_alive()
    waited.wait(0.2)  # not to win a race: longer than `within`, which must not matter
    finish.set()
    for thread in threads:
        thread.join(20)
    assert sorted(outcome.value for outcome in outcomes) == ["applied", "duplicate"]
    assert _state(postgresql_engine) == (1, 1)


def _somebody_waits(engine: Engine) -> bool:
    with engine.connect() as connection:
        return bool(connection.scalar(text("SELECT count(*) FROM pg_locks WHERE NOT granted")))


def test_different_unique_violations_are_different_rivals(engine: Engine) -> None:
    """A handler that creates several rows may meet several rivals; only the same violation again is a bug."""
    Base.metadata.create_all(engine)
    runs: list[int] = []

    def meets_a_rival_each_time(session: Session) -> None:
        runs.append(1)
        number = len(runs)
        session.add(Total(id=f"row-{number}", amount=1))
        session.flush()
        if number <= 4:
            session.execute(text(f"INSERT INTO total VALUES ('row-{number}', 1)"))

    outcome = _dispatcher(engine, meets_a_rival_each_time).deliver("e", message_id="1").outcome
    if engine.dialect.name == "postgresql":  # whose errors say which key
        assert outcome is Outcome.APPLIED
        assert len(runs) == 5
        assert _state(engine) == (1, 1)


def test_the_same_unique_violation_is_the_users_error(engine: Engine) -> None:
    """It is tried again twice, then the user's own IntegrityError surfaces, and nothing is applied."""
    Base.metadata.create_all(engine)
    runs: list[int] = []

    def bug(session: Session) -> None:
        runs.append(1)
        session.add_all([Total(id="same", amount=1)])
        session.flush()
        session.execute(text("INSERT INTO total VALUES ('same', 1)"))

    with pytest.raises(IntegrityError):
        _dispatcher(engine, bug).deliver("e", message_id="1")
    assert len(runs) == 3
    assert _state(engine) == (0, 0)


def test_retries_are_bounded_by_their_number(postgresql_engine: Engine) -> None:
    """A conflict that never ends is raised as RetriesExhaustedError, with the last one as its cause."""
    runs: list[int] = []

    def conflict(session: Session) -> None:
        runs.append(1)
        session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$"))

    dispatcher = _dispatcher(postgresql_engine, conflict, retry=RetryPolicy(attempts=4, base=0))
    with pytest.raises(RetriesExhaustedError) as exhausted:
        dispatcher.deliver("e", message_id="1")
    assert len(runs) == 4
    assert getattr(getattr(exhausted.value.__cause__, "orig", None), "sqlstate", None) == "40001"
    assert _state(postgresql_engine) == (0, 0)


def test_a_policy_of_many_attempts_does_not_overflow(postgresql_engine: Engine) -> None:
    """The backoff doubles only so far."""
    runs: list[int] = []

    def conflict(session: Session) -> None:
        runs.append(1)
        if len(runs) < 1_100:
            session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'conflict' USING ERRCODE = '40001'; END $$"))

    policy = RetryPolicy(attempts=2_000, within=100, cap=0)
    assert (
        _dispatcher(postgresql_engine, conflict, retry=policy).deliver("e", message_id="1").outcome is Outcome.APPLIED
    )


@pytest.mark.parametrize("policy", [{"attempts": 0}, {"within": -1}, {"base": -1}])
def test_a_policy_that_means_nothing_is_refused(policy: dict[str, int]) -> None:
    """At start-up, not at the first failure."""
    with pytest.raises(ValueError, match="RetryPolicy"):
        RetryPolicy(**policy)


def test_an_unknown_outcome_of_another_delivery_is_not_ours(postgresql_engine: Engine) -> None:
    """A handler that delivers elsewhere and hears CommitOutcomeUnknown fails once; it is not run again."""
    runs: list[int] = []

    def inner_unknown(_session: Session) -> None:
        runs.append(1)
        raise CommitOutcomeUnknown("elsewhere") from OSError()

    with pytest.raises(CommitOutcomeUnknown, match="elsewhere"):
        _dispatcher(postgresql_engine, inner_unknown).deliver("e", message_id="1")
    assert len(runs) == 1
    assert _state(postgresql_engine) == (0, 0)
