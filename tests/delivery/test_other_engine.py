"""One handler, given one database after another: what it was on the first says nothing of the second."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import permutations

import pytest
from sqlalchemy import Engine, create_engine, func, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from databases import DRIVERS, Database, Driver
from few_rows import Added, Total, engine_of, totals
from projector_dedup import Dispatcher, Outcome, ProcessedMessage, on, projector
from reached import reached

MESSAGES = [f"m{number}" for number in range(4)]
EXPECTED = [Outcome.APPLIED] * len(MESSAGES) + [Outcome.DUPLICATE] * len(MESSAGES)

Deliver = Callable[[str], Outcome]


def pairs(*, is_async: bool) -> pytest.MarkDecorator:
    """Every driver after every driver of another engine."""
    drivers = [driver for driver in DRIVERS if driver.is_async is is_async]
    found = [pair for pair in permutations(drivers, 2) if pair[0].engine != pair[1].engine]
    return pytest.mark.parametrize(("first", "second"), found, ids=lambda driver: driver.drivername.partition("+")[2])


@pytest.fixture(name="database_of")
def database_of_fixture(request: pytest.FixtureRequest) -> Iterator[Callable[[Driver], tuple[Database, Engine]]]:
    """An empty database with tables for a driver, and an engine of another driver to look into it."""
    with ExitStack() as stack:

        def make(driver: Driver) -> tuple[Database, Engine]:
            if not driver.installed:
                reached.give_up(driver.engine, str(driver), f"{driver.module} is not installed")
            database = request.getfixturevalue(driver.engine)
            return database, stack.enter_context(engine_of(database))

        yield make


def assert_each_counted_once(engine: Engine) -> None:
    """As many as there were messages, and a marker for each."""
    assert totals(engine) == [len(MESSAGES), 0, 0, 0]
    with Session(engine) as session:
        assert session.scalar(select(func.count()).select_from(ProcessedMessage)) == len(MESSAGES)


@projector(idempotent=True, name="wandering")
@on(Added, reads={Total: "row"})
def add(change: Added, session: Session) -> None:
    """As most handlers are."""
    session.get_one(Total, change.row).amount += 1


@projector(idempotent=True, name="wandering")
@on(Added, reads={Total: "row"})
async def add_awaited(change: Added, session: AsyncSession) -> None:
    """The same under asyncio."""
    (await session.get_one(Total, change.row)).amount += 1


@pairs(is_async=False)
def test_a_function_projector_given_one_database_after_another(
    first: Driver, second: Driver, database_of: Callable[[Driver], tuple[Database, Engine]]
) -> None:
    """Each message is applied once in each database, and there is a marker of it."""
    for driver in (first, second):
        database, outside = database_of(driver)
        engine = create_engine(database.url(driver.drivername))
        factory = sessionmaker(engine)
        outcomes = [add.deliver(Added(0), message_id=each, session_factory=factory).outcome for each in MESSAGES * 2]
        engine.dispose()
        assert outcomes == EXPECTED
        assert_each_counted_once(outside)


@pairs(is_async=True)
def test_the_same_under_asyncio(
    first: Driver, second: Driver, database_of: Callable[[Driver], tuple[Database, Engine]]
) -> None:
    """Each message is applied once in each database, and there is a marker of it."""

    async def run(database: Database, driver: Driver) -> list[Outcome]:
        engine = create_async_engine(database.url(driver.drivername))
        factory = async_sessionmaker(engine)
        found = [
            (await add_awaited.adeliver(Added(0), message_id=each, session_factory=factory)).outcome
            for each in MESSAGES * 2
        ]
        await engine.dispose()
        return found

    for driver in (first, second):
        database, outside = database_of(driver)
        assert asyncio.run(run(database, driver)) == EXPECTED
        assert_each_counted_once(outside)


@pairs(is_async=False)
def test_a_factory_that_is_bound_anew_under_a_dispatcher(
    first: Driver, second: Driver, database_of: Callable[[Driver], tuple[Database, Engine]]
) -> None:
    """`sessionmaker.configure(bind=...)` moves a living dispatcher to another database, where it does what is right."""
    factory = sessionmaker()
    dispatcher = Dispatcher(factory, add)
    for driver in (first, second):
        database, outside = database_of(driver)
        engine = create_engine(database.url(driver.drivername))
        factory.configure(bind=engine)
        assert [dispatcher.deliver(Added(0), message_id=each).outcome for each in MESSAGES * 2] == EXPECTED
        engine.dispose()
        assert_each_counted_once(outside)
