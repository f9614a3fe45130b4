"""A command in a transaction that the caller owns: recorded with what else the caller writes, and committed by it."""

import asyncio
from typing import Any

import pytest
from sqlalchemy import URL, Engine, create_engine, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from command_rig import START, Balance, Base, Order, Placed, PlaceOrder, place
from databases import Database
from projector_dedup import AsyncDispatcher, Message, on, projector
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
    default_command_tables,
    derived_key,
)
from projector_dedup.errors import HandlerDefinitionError
from projector_dedup.tables import default_tables

placing = command(name="desk.place")(place)


@pytest.fixture
def desk(engine: Engine) -> Engine:
    """The tables, on each synchronous driver."""
    create_tables(engine)
    return engine


def create_tables(engine: Engine) -> None:
    """Create the tables, and give the customer an account."""
    for metadata in (Base.metadata, default_command_tables.marker.metadata, default_tables.marker.metadata):
        metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(Balance(customer="alice", amount=START))


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


def _left(order: PlaceOrder, call: Call) -> int:
    return call.session.get_one(Balance, order.customer).amount


@command(name="desk.now", default=_left)
def now(order: PlaceOrder, call: Call) -> int:
    """Place an order whose answer is what is left now."""
    return place(order, call).left


def test_who_asks_again_gets_the_present_answer(sqlite: Database) -> None:
    """An operation with ``default=`` stores no result: the caller's transaction sees how things stand."""
    engine = create_engine(sqlite.url())
    create_tables(engine)
    answers = []
    for key in ("k1", "k2", "k1"):
        with Session(engine) as session:
            begun = begin_command(session, now, PlaceOrder(3), key=key)
            if isinstance(begun, Begun):
                begun = begun.record(now(PlaceOrder(3), begun.call))
            answers.append((begun.result, begun.replayed))
            session.commit()
    assert answers == [(START - 3, False), (START - 6, False), (START - 6, True)]
    engine.dispose()


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
def test_an_async_process_manager_issues_a_command_once(async_url: URL, operation: Any) -> None:
    """In the transaction of its event, with the record; another event that leads to it gets the answer."""

    async def main() -> None:
        engine = create_async_engine(async_url)
        async with engine.connect() as connection:
            await connection.run_sync(lambda sync: create_tables(sync.engine))
        manager = Manager(operation)
        dispatcher = AsyncDispatcher(async_sessionmaker(engine), manager)
        for message_id in ("m1", "m1", "m2"):
            await dispatcher.deliver(Message(message_id, "o-77", "paid"))
        async with AsyncSession(engine) as session:
            assert len((await session.scalars(select(Order.note))).all()) == 1
        left = [placed.left for placed in manager.answers]
        assert left == [START - 3, START - 3]
        await engine.dispose()

    asyncio.run(main())


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
