"""A command in a transaction that the caller owns: recorded with what else the caller writes, and committed by it."""

from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, select
from sqlalchemy.orm import Session, sessionmaker

from command_rig import START, Balance, Base, Order, Placed, PlaceOrder, place
from projector_dedup.commands import (
    Begun,
    Commands,
    Handled,
    InvalidKeyError,
    KeyReusedError,
    Rejection,
    ResultError,
    ResultUnreadableError,
    begin_command,
    command,
    default_command_tables,
)

placing = command(name="desk.place")(place)


@pytest.fixture
def desk(engine: Engine) -> Engine:
    """The tables, on each synchronous driver."""
    for metadata in (Base.metadata, default_command_tables.marker.metadata):
        metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(Balance(customer="alice", amount=START))
    return engine


def orders(engine: Engine) -> list[str]:
    """The orders that were placed, as another connection sees them."""
    with create_engine(engine.url).connect() as connection:
        return list(connection.scalars(select(Order.note)))


def ask(session: Session, order: PlaceOrder, **said: Any) -> Handled[Placed]:
    """Begin, do it if it is new, and record."""
    begun = begin_command(session, placing, order, **said)
    if isinstance(begun, Handled):
        return begun
    placed = placing(order, begun.call)
    assert not isinstance(placed, Rejection)
    return begun.record(placed)


def test_it_commits_with_the_callers_transaction(desk: Engine) -> None:
    """And rolls back with it: the next one is new."""
    answers = []
    for commits in (False, True, True):
        with Session(desk) as session:
            answers.append(ask(session, PlaceOrder(3), key="k1"))
            if commits:
                session.commit()
    assert [answer.replayed for answer in answers] == [False, False, True]
    assert {answer.result.left for answer in answers} == {START - 3}
    assert orders(desk) == ["k1"]


def test_it_and_commands_know_each_others_records(desk: Engine) -> None:
    """One record, whoever made it."""
    commands = Commands(sessionmaker(desk))
    first = commands.handle(placing, PlaceOrder(3), key="k1", scope="t")
    with Session(desk) as session:
        assert ask(session, PlaceOrder(3), key="k1", scope="t").result == first.result
        assert not ask(session, PlaceOrder(4), key="k2", scope="t").replayed
        session.commit()
    assert commands.handle(placing, PlaceOrder(4), key="k2", scope="t").replayed
    assert sorted(orders(desk)) == ["k1", "k2"]


def test_what_cannot_be_recorded_leaves_the_caller_to_roll_back(desk: Engine) -> None:
    """A result of the wrong type, say."""
    with Session(desk) as session:
        begun = begin_command(session, placing, PlaceOrder(), key="k1")
        assert isinstance(begun, Begun)
        with pytest.raises(ResultError):
            begun.record("no order")
    with Session(desk) as session:
        assert isinstance(begin_command(session, placing, PlaceOrder(), key="k1"), Begun)


def test_a_command_without_a_record_is_not_committed_as_done(desk: Engine) -> None:
    """Whoever forgets to record has claimed a key that nobody can answer: the next caller is told to look."""
    with Session(desk) as session:
        assert isinstance(begin_command(session, placing, PlaceOrder(), key="k1"), Begun)
        session.commit()
    with Session(desk) as session, pytest.raises(ResultUnreadableError, match="without an outcome"):
        begin_command(session, placing, PlaceOrder(), key="k1")


def test_another_command_and_no_key_are_refused(desk: Engine) -> None:
    """As by ``Commands``."""
    with Session(desk) as session:
        ask(session, PlaceOrder(1), key="k1")
        with pytest.raises(KeyReusedError):
            ask(session, PlaceOrder(2), key="k1")
        with pytest.raises(InvalidKeyError):
            ask(session, PlaceOrder(2), key=None)
