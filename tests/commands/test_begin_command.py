"""A command in a transaction that the caller owns: recorded with what else the caller writes, and committed by it."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from command_rig import SQLITE, START, Balance, Desk, Placed, PlaceOrder, desks, place
from databases import DRIVERS, Database
from projector_dedup import Message, on, projector
from projector_dedup.commands import (
    AsyncBegun,
    AsyncCall,
    Begun,
    Call,
    Commands,
    Handled,
    InvalidKeyError,
    KeyReusedError,
    Rejection,
    ResultError,
    ResultUnreadableError,
    abegin_command,
    begin_command,
    command,
    derived_key,
)
from projector_dedup.errors import HandlerDefinitionError

placing = command(name="desk.place")(place)


desk = desks([driver for driver in DRIVERS if not driver.is_async])
later_desk = desks([driver for driver in DRIVERS if driver.is_async], "later_desk")
on_sqlite = desks(SQLITE, "on_sqlite")


def ask(session: Session, order: PlaceOrder, **said: Any) -> Handled[Placed]:
    """Begin, do it if it is new, and record."""
    begun = begin_command(session, placing, order, **said)
    if isinstance(begun, Handled):
        return begun
    placed = placing(order, begun.call)
    assert not isinstance(placed, Rejection)
    return begun.record(placed)


def test_it_commits_with_the_callers_transaction(desk: Desk) -> None:
    """And rolls back with it: the next one is new."""
    answers = []
    for commits in (False, True, True):
        with desk.harness.factory() as session:
            answers.append(ask(session, PlaceOrder(3), key="k1"))
            if commits:
                session.commit()
    assert [answer.replayed for answer in answers] == [False, False, True]
    assert {answer.result.left for answer in answers} == {START - 3}
    assert desk.orders() == ["k1"]


def test_it_and_commands_know_each_others_records(desk: Desk) -> None:
    """One record, whoever made it."""
    commands = Commands(desk.harness.factory)
    first = commands.handle(placing, PlaceOrder(3), key="k1", scope="t")
    with desk.harness.factory() as session:
        assert ask(session, PlaceOrder(3), key="k1", scope="t").result == first.result
        assert not ask(session, PlaceOrder(4), key="k2", scope="t").replayed
        session.commit()
    assert commands.handle(placing, PlaceOrder(4), key="k2", scope="t").replayed
    assert sorted(desk.orders()) == ["k1", "k2"]


def test_what_cannot_be_recorded_leaves_the_caller_to_roll_back(desk: Desk) -> None:
    """A result of the wrong type, say."""
    with desk.harness.factory() as session:
        begun = begin_command(session, placing, PlaceOrder(), key="k1")
        assert isinstance(begun, Begun)
        with pytest.raises(ResultError):
            begun.record("no order")
    with desk.harness.factory() as session:
        assert isinstance(begin_command(session, placing, PlaceOrder(), key="k1"), Begun)


def test_a_command_without_a_record_is_not_committed_as_done(desk: Desk) -> None:
    """Whoever forgets to record has claimed a key that nobody can answer: the next caller is told to look."""
    with desk.harness.factory() as session:
        assert isinstance(begin_command(session, placing, PlaceOrder(), key="k1"), Begun)
        session.commit()
    with desk.harness.factory() as session, pytest.raises(ResultUnreadableError, match="without an outcome"):
        begin_command(session, placing, PlaceOrder(), key="k1")


def test_another_command_and_no_key_are_refused(desk: Desk) -> None:
    """As by ``Commands``."""
    with desk.harness.factory() as session:
        ask(session, PlaceOrder(1), key="k1")
        with pytest.raises(KeyReusedError):
            ask(session, PlaceOrder(2), key="k1")
        with pytest.raises(InvalidKeyError):
            ask(session, PlaceOrder(2), key=None)


def _left(order: PlaceOrder, call: Call) -> int:
    return call.session.get_one(Balance, order.customer).amount


@command(name="desk.now", default=_left)
def now(order: PlaceOrder, call: Call) -> int:
    """Place an order whose answer is what is left now."""
    return place(order, call).left


def test_who_asks_again_gets_the_present_answer(on_sqlite: Desk) -> None:
    """An operation with ``default=`` stores no result: the caller's transaction sees how things stand."""
    answers = []
    for key in ("k1", "k2", "k1"):
        with on_sqlite.harness.factory() as session:
            begun = begin_command(session, now, PlaceOrder(3), key=key)
            if isinstance(begun, Begun):
                begun = begun.record(now(PlaceOrder(3), begun.call))
            answers.append((begun.result, begun.replayed))
            session.commit()
    assert answers == [(START - 3, False), (START - 6, False), (START - 6, True)]


async def _placing_later(order: PlaceOrder, call: AsyncCall) -> Placed:
    return await call.session.run_sync(lambda session: place(order, Call(session, call.key)))


async def _left_later(order: PlaceOrder, call: AsyncCall) -> Placed:
    return Placed(0, (await call.session.get_one(Balance, order.customer)).amount)


placing_later = command(name="desk.place")(_placing_later)
now_later = command(name="desk.now", default=_left_later)(_placing_later)


@projector(idempotent=True, name="desk.manager")
class Manager:
    """A process manager: each event leads to one command, and two events may lead to the same."""

    def __init__(self, operation: Any) -> None:
        self.operation = operation
        self.answers: list[Placed] = []

    @on("paid")
    async def paid(self, event: str, session: AsyncSession) -> None:
        """Issue the command in the transaction of the event."""
        order = PlaceOrder(3)
        begun = await abegin_command(session, self.operation, order, key=derived_key("ship", event))
        if isinstance(begun, AsyncBegun):
            begun = await begun.record(await self.operation(order, begun.call))
        self.answers.append(begun.result)


@pytest.mark.parametrize("operation", [placing_later, now_later], ids=["result", "default"])
def test_an_async_process_manager_issues_a_command_once(later_desk: Desk, operation: Any) -> None:
    """In the transaction of its event, with the record; another event that leads to it gets the answer."""
    harness, manager = later_desk.harness, Manager(operation)
    harness.create_tables()
    dispatcher = harness.dispatcher(manager)
    for message_id in ("m1", "m1", "m2"):
        harness.run(dispatcher.deliver, Message(message_id, "o-77", "paid"))
    assert len(later_desk.orders()) == 1
    assert [placed.left for placed in manager.answers] == [START - 3, START - 3]


def test_each_form_takes_operations_of_its_own_kind(sqlite: Database) -> None:
    """A plain def for ``begin_command``, an async def for ``abegin_command``, and a method of an object for both."""

    class Shop:
        @command(name="shop.place")
        def place(self, order: PlaceOrder, call: Call) -> Placed:
            return place(order, call)

    given: Any
    with Session(create_engine(sqlite.url())) as session:
        for given in (placing_later, Shop.place, place):
            with pytest.raises(HandlerDefinitionError):
                begin_command(session, given, PlaceOrder(), key="k1")
        given = placing
        with pytest.raises(HandlerDefinitionError, match="begin_command"):
            asyncio.run(abegin_command(AsyncSession(), given, PlaceOrder(), key="k1"))
