"""The unit of work by itself: it commits once, and nobody else commits in it."""

import gc
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, String, event, func, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from projector_dedup import (
    Dispatcher,
    Message,
    Outcome,
    TransactionViolatedError,
    UnitOfWork,
    UnsafeSessionError,
    make_tables,
    on,
    projector,
)


class Base(DeclarativeBase):
    """The read model of these tests."""


class Total(Base):
    """A row."""

    __tablename__ = "total"
    id: Mapped[str] = mapped_column(String(20), primary_key=True)
    amount: Mapped[int]


tables = make_tables(Base.metadata)


@pytest.fixture
def factory(engine: Engine) -> Iterator[sessionmaker[Session]]:
    """On an engine with the tables, for each driver in turn."""
    Base.metadata.create_all(engine)
    yield sessionmaker(engine)
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool


def _state(factory: sessionmaker[Session]) -> tuple[int, int]:
    with factory() as session:
        markers = session.scalar(select(func.count()).select_from(tables.marker)) or 0
        return markers, session.scalar(select(func.sum(Total.amount))) or 0


def test_it_rolls_back_unless_committed(factory: sessionmaker[Session]) -> None:
    """Leaving the block takes the marker back, so the next one may claim again."""
    for _ in range(2):
        with UnitOfWork(factory) as uow:
            assert uow.claim("1", "h")
            uow.session.add(Total(id="a", amount=1))
    assert _state(factory) == (0, 0)


def test_it_commits_marker_and_write_together(factory: sessionmaker[Session]) -> None:
    """And the next claim of the same message is a duplicate, which cannot be committed."""
    with UnitOfWork(factory) as uow:
        assert uow.claim("1", "h")
        uow.session.add(Total(id="a", amount=1))
        uow.commit()
    with UnitOfWork(factory) as uow:
        assert not uow.claim("1", "h")
        with pytest.raises(UnsafeSessionError, match="duplicate"):
            uow.commit()
    assert _state(factory) == (1, 1)


def test_a_duplicate_cannot_be_written_past_it(factory: sessionmaker[Session]) -> None:
    """The session of a duplicate does not commit either."""
    with UnitOfWork(factory) as uow:
        uow.claim("1", "h")
        uow.commit()
    with UnitOfWork(factory) as uow:
        assert not uow.claim("1", "h")
        uow.session.add(Total(id="a", amount=1))
        with pytest.raises(TransactionViolatedError):
            uow.session.commit()
    assert _state(factory) == (1, 0)


def test_after_the_commit_reading_goes_on_and_writing_does_not(factory: sessionmaker[Session]) -> None:
    """What was committed can be read; a second commit would be without a marker."""
    with UnitOfWork(factory) as uow:
        uow.claim("1", "h")
        total = Total(id="a", amount=1)
        uow.session.add(total)
        uow.commit()
        assert total.amount == 1
        total.amount = 2
        with pytest.raises(TransactionViolatedError):
            uow.session.commit()
        with pytest.raises(UnsafeSessionError, match="has committed"):
            uow.commit()
    assert _state(factory) == (1, 1)


def test_the_claim_comes_first_and_once(factory: sessionmaker[Session]) -> None:
    """A session that was used, or that has claimed, is refused; so is a commit without a claim."""
    with UnitOfWork(factory) as uow, pytest.raises(UnsafeSessionError, match="nothing was claimed"):
        uow.commit()
    with UnitOfWork(factory) as uow:
        uow.session.add(Total(id="a", amount=1))
        with pytest.raises(UnsafeSessionError, match="first statement"):
            uow.claim("1", "h")
    with UnitOfWork(factory) as uow:
        assert uow.claim("1", "h")
        with pytest.raises(UnsafeSessionError, match="first statement"):
            uow.claim("2", "h")
    assert _state(factory) == (0, 0)


def _handler(_event: str, session: Session) -> None:
    session.add(Total(id="a", amount=1))


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
        assert _state(factory) == (1, 1)
        return
    with pytest.raises(TransactionViolatedError):
        dispatcher.deliver("e", message_id="1")
    event.remove(factory, "before_commit", _audit)
    assert _state(factory) == (0, 0)
    assert dispatcher.deliver("e", message_id="1").outcome is Outcome.APPLIED
    assert _state(factory) == (1, 1)


class NeverCommits(Session):
    """What some test kits do."""

    def commit(self) -> None:
        """Flush only."""
        self.flush()


def test_a_session_class_that_does_not_commit_is_noticed(engine: Engine) -> None:
    """`APPLIED` means that a COMMIT was answered, not that `commit()` returned."""
    Base.metadata.create_all(engine)
    with pytest.raises(TransactionViolatedError, match="sent no COMMIT"):
        Dispatcher(sessionmaker(engine, class_=NeverCommits), handler).deliver("e", message_id="1")
    assert _state(sessionmaker(engine)) == (0, 0)


def test_the_first_deliveries_of_an_engine_may_come_together(engine: Engine) -> None:
    """What an engine is asked once is not asked wrongly when threads meet there."""
    Base.metadata.create_all(engine)
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
    assert _state(sessionmaker(engine)) == (1, 1)


def test_a_delivery_leaves_nothing_to_the_garbage_collector(factory: sessionmaker[Session]) -> None:
    """Session, connection and guard go when the message is done; what points in a circle would wait, and add up."""

    @projector(idempotent=True, name="totals")
    @on(str)
    def add(key: str, session: Session) -> None:
        session.add(Total(id=key, amount=1))

    dispatcher = Dispatcher(factory, add, tables=tables)
    for key in ("warm-1", "warm-2", "warm-2"):
        dispatcher.deliver(key, message_id=key)
    gc.collect()
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
