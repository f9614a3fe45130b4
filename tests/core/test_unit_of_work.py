"""The unit of work by itself: it commits once, and nobody else commits in it."""

import gc
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.orm import Session, sessionmaker

from marked import one_of_each_engine  # noqa: F401  # a fixture
from projector_dedup import Dispatcher, Message, Outcome, on, projector
from projector_dedup.errors import InProgress, TransactionViolatedError, UnsafeSessionError
from projector_dedup.unit_of_work import UnitOfWork
from rig import NOTHING, ONCE, Total, state, tables_on


@pytest.fixture
def factory(engine: Engine) -> Iterator[sessionmaker[Session]]:
    """On an engine with the tables, on each database in turn."""
    yield sessionmaker(tables_on(engine))
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool


def test_a_duplicate_cannot_be_written_past_it(factory: sessionmaker[Session]) -> None:
    """Neither the unit of work of a duplicate commits, nor its session; reading the answer of it goes on."""
    with UnitOfWork(factory) as uow:
        uow.claim("1", "h")
        uow.session.add(Total(account="a", amount=1))
        uow.commit()
    with UnitOfWork(factory) as uow:
        assert not uow.claim("1", "h")
        total = uow.session.get_one(Total, "a")
        assert total.amount == 1
        total.amount = 5
        uow.session.flush()
        with pytest.raises(UnsafeSessionError, match="duplicate"):
            uow.commit()
        with pytest.raises(TransactionViolatedError):
            uow.session.commit()
    assert state(factory.kw["bind"]) == ONCE


def test_after_the_commit_reading_goes_on_and_writing_does_not(factory: sessionmaker[Session]) -> None:
    """What was committed can be read; a second commit would be without a marker."""
    with UnitOfWork(factory) as uow:
        uow.claim("1", "h")
        total = Total(account="a", amount=1)
        uow.session.add(total)
        uow.commit()
        assert total.amount == 1
        total.amount = 2
        with pytest.raises(TransactionViolatedError):
            uow.session.commit()
        with pytest.raises(UnsafeSessionError, match="already committed"):
            uow.commit()
    assert state(factory.kw["bind"]) == ONCE


def _handler(_event: str, session: Session) -> None:
    session.add(Total(account="a", amount=1))


handler = projector(idempotent=True, name="uow")(on(str)(_handler))


def test_a_listener_that_breaks_the_transaction_at_the_last_moment_is_noticed(factory: sessionmaker[Session]) -> None:
    """A `before_commit` hook of the user's swallows a database error: on PostgreSQL, COMMIT would commit nothing."""

    @event.listens_for(factory, "before_commit")
    def _audit(session: Session) -> None:
        try:
            session.execute(text("SELECT no_such_column"))
        except Exception:  # noqa: BLE001  # as people write it
            return

    dispatcher = Dispatcher(factory, handler)
    if factory.kw["bind"].dialect.name != "postgresql":  # an error undoes its statement only
        assert dispatcher.deliver("e", message_id="1").outcome is Outcome.APPLIED
        event.remove(factory, "before_commit", _audit)
        assert state(factory.kw["bind"]) == ONCE
        return
    with pytest.raises(TransactionViolatedError):
        dispatcher.deliver("e", message_id="1")
    event.remove(factory, "before_commit", _audit)
    assert state(factory.kw["bind"]) == NOTHING
    assert dispatcher.deliver("e", message_id="1").outcome is Outcome.APPLIED
    assert state(factory.kw["bind"]) == ONCE


class NeverCommits(Session):
    """What some test kits do."""

    def commit(self) -> None:
        """Flush only."""
        self.flush()


def test_a_session_class_that_does_not_commit_is_noticed(engine: Engine) -> None:
    """`APPLIED` means that a COMMIT was answered, not that `commit()` returned."""
    tables_on(engine)
    with pytest.raises(TransactionViolatedError, match="sent no COMMIT"):
        Dispatcher(sessionmaker(engine, class_=NeverCommits), handler).deliver("e", message_id="1")
    assert state(engine) == NOTHING


def test_the_first_deliveries_of_an_engine_may_come_together(engine: Engine) -> None:
    """What an engine is asked once is not asked wrongly when threads meet there."""
    tables_on(engine)
    engine.dispose()
    barrier = threading.Barrier(5)
    outcomes: list[Outcome] = []

    def deliver() -> None:
        barrier.wait()
        outcomes.append(Dispatcher(sessionmaker(engine), handler).deliver("e", message_id="1").outcome)

    threads = [threading.Thread(target=deliver) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcome.value for outcome in outcomes) == ["applied"] + ["duplicate"] * 4
    assert state(engine) == ONCE


def test_a_delivery_leaves_nothing_to_the_garbage_collector(factory: sessionmaker[Session]) -> None:
    """Session, connection and guard go when the message is done; what points in a circle would wait, and add up."""

    @projector(idempotent=True, name="totals")
    @on(str)
    def add(key: str, session: Session) -> None:
        session.add(Total(account=key, amount=1))

    dispatcher = Dispatcher(factory, add)
    for key in ("warm-1", "warm-2", "warm-2"):
        dispatcher.deliver(key, message_id=key)
    gc.collect()
    gc.collect()  # Python 3.14 takes a second time for the engines of earlier tests
    gc.disable()
    try:
        for number in range(100):
            dispatcher.deliver(f"m{number}", message_id=f"m{number}")
        assert gc.collect() < 100  # other threads leave things too, but not for each message
        for number in range(30):
            dispatcher.deliver_batch([Message(f"b{number}-{each}", f"b{number}-{each}") for each in "xy"])
        assert gc.collect() < 30
    finally:
        gc.enable()


def test_nothing_commits_after_a_claim_that_was_in_progress(engine: Engine) -> None:
    """Where a rival held the claim too long, there would be no marker."""
    sessions = sessionmaker(tables_on(engine))
    with UnitOfWork(sessions) as rival:
        assert rival.claim("m1", "h")
        with UnitOfWork(sessions, claim_timeout=0.1) as uow:
            with pytest.raises(InProgress):
                uow.claim("m1", "h")
            with pytest.raises(UnsafeSessionError):
                uow.commit()
