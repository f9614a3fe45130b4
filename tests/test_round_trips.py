"""What a message costs on the wire: counted by a proxy before the server, by statements on SQLite."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import untried  # noqa: F401  # registers its names
from cut_proxy import CutProxy
from databases import Database
from projector_dedup import AsyncDispatcher, Delivery, Dispatcher, Outcome, on, projector
from projector_dedup.tables import default_metadata
from projector_dedup.testing.subject import Added, Base, Total

WARM = 8
"""Messages after which drivers have prepared their statements (psycopg after five uses)."""


def add(_event: Added, session: Session) -> None:
    """Ordinary ORM code: one SELECT, one UPDATE."""
    session.get_one(Total, "a").amount += 1


async def add_async(_event: Added, session: AsyncSession) -> None:
    """The same, awaited."""
    (await session.get_one(Total, "a")).amount += 1


@pytest.fixture
def proxy(postgresql: Database) -> Iterator[CutProxy]:
    """Counts the round trips to a database with the tables and one row."""
    prepare(create_engine(postgresql.url()))
    with CutProxy(postgresql.url()) as proxy:
        yield proxy


def prepare(engine: Engine) -> None:
    """The tables, and one row."""
    for metadata in (default_metadata, Base.metadata):
        metadata.create_all(engine)
    with Session(engine) as session:
        session.add(Total(key="a", amount=0))
        session.commit()
    engine.dispose()


def trips_of(proxy: CutProxy, deliver: Callable[[int], object]) -> int:
    """The round trips of one call, once everything is warm; three calls must agree."""
    for number in range(WARM):
        deliver(number)
    counts = []
    for number in range(WARM, WARM + 3):
        before = len(proxy.trips)
        deliver(number)
        counts.append(len(proxy.trips) - before)
    assert len(set(counts)) == 1, proxy.trips[-10:]
    return counts[0]


async def async_trips_of(proxy: CutProxy, deliver: Callable[[int], Awaitable[object]]) -> int:
    """The same, awaited."""
    for number in range(WARM):
        await deliver(number)
    before = len(proxy.trips)
    for number in range(WARM, WARM + 3):
        await deliver(number)
    trips, rest = divmod(len(proxy.trips) - before, 3)
    assert rest == 0, proxy.trips[-10:]
    return trips


@pytest.mark.parametrize("driver", ["postgresql+psycopg", "postgresql+psycopg2"])
def test_sync(postgresql: Database, proxy: CutProxy, driver: str) -> None:
    """A new message costs one trip more than the same code without dedup; a redelivery three in all."""
    engine = create_engine(proxy.through(postgresql.url(driver)))
    sessions = sessionmaker(engine)

    def plain(_number: int) -> None:
        with sessions.begin() as session:
            add(Added(), session)

    assert trips_of(proxy, plain) == 4
    dispatcher = Dispatcher(sessions, projector(idempotent=True, name="totals")(on(Added)(add)))
    assert trips_of(proxy, lambda number: dispatcher.deliver(Added(), message_id=f"m{number}")) <= 5
    assert trips_of(proxy, lambda _: dispatcher.deliver(Added(), message_id="m1")) == 3
    assert dispatcher.deliver(Added(), message_id="m1").outcome is Outcome.DUPLICATE
    engine.dispose()


def test_psycopg_with_options(postgresql: Database, proxy: CutProxy) -> None:
    """`claim_timeout` and `read_models` ride along for nothing; `strict` costs the one trip that it says it costs."""
    engine = create_engine(proxy.through(postgresql.url()))
    sessions = sessionmaker(engine)
    options: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "plain": ({}, {}),
        "bounded": ({}, {"claim_timeout": 1.0}),
        "locking": ({"read_models": [Total]}, {}),
        "strict": ({}, {"strict": True}),
        "off": ({"idempotent": False}, {}),
    }
    costs = {}
    for name, (of_the_projector, of_the_dispatcher) in options.items():
        settings = {"idempotent": True, "name": name, **of_the_projector}
        dispatcher = Dispatcher(sessions, projector(**settings)(on(Added)(add)), **of_the_dispatcher)
        costs[name] = trips_of(proxy, partial(_deliver, dispatcher))
    assert costs == {"plain": 5, "bounded": 5, "locking": 5, "strict": 6, "off": 4}
    engine.dispose()


def _deliver(dispatcher: Dispatcher, number: int) -> Delivery:
    return dispatcher.deliver(Added(), message_id=f"m{number}")


@pytest.mark.parametrize(
    ("driver", "plain_trips", "new_trips", "duplicate_trips"),
    [("postgresql+psycopg", 4, 5, 3), ("postgresql+asyncpg", 4, 5, 3)],
)
def test_asyncio(
    postgresql: Database, proxy: CutProxy, driver: str, plain_trips: int, new_trips: int, duplicate_trips: int
) -> None:
    """The same counts under asyncio, by psycopg and by asyncpg."""

    async def count() -> tuple[int, int, int]:
        engine = create_async_engine(proxy.through(postgresql.url(driver)))
        sessions = async_sessionmaker(engine)

        async def plain(_number: int) -> None:
            async with sessions.begin() as session:
                await add_async(Added(), session)

        dispatcher = AsyncDispatcher(sessions, projector(idempotent=True, name="totals")(on(Added)(add_async)))
        counts = (
            await async_trips_of(proxy, plain),
            await async_trips_of(proxy, lambda number: dispatcher.deliver(Added(), message_id=f"m{number}")),
            await async_trips_of(proxy, lambda _: dispatcher.deliver(Added(), message_id="m1")),
        )
        await engine.dispose()
        return counts

    assert asyncio.run(count()) == (plain_trips, new_trips, duplicate_trips)


@pytest.mark.parametrize("driver", ["mariadb+pymysql", "mariadb+mysqldb"])
def test_mariadb(mariadb: Database, driver: str) -> None:
    """A new message costs one trip more than the same code without dedup, `strict` two more, a savepoint's.

    A redelivery asks why its INSERT failed. BEGIN is never sent, and the pool sends a ROLLBACK of its own after each.
    """
    prepare(create_engine(mariadb.url()))
    with CutProxy(mariadb.url()) as proxy:
        engine = create_engine(proxy.through(mariadb.url(driver)))
        sessions = sessionmaker(engine)

        def plain(_number: int) -> None:
            with sessions.begin() as session:
                add(Added(), session)

        costs = {"no dedup": trips_of(proxy, plain)}
        cases: dict[str, dict[str, Any]] = {"bounded": {"claim_timeout": 1.0}, "strict": {"strict": True}}
        for name in ("plain", "bounded", "strict", "off"):
            target = projector(idempotent=name != "off", name=name)(on(Added)(add))
            costs[name] = trips_of(proxy, partial(_deliver, Dispatcher(sessions, target, **cases.get(name, {}))))
        dispatcher = Dispatcher(sessions, projector(idempotent=True, name="plain")(on(Added)(add)))
        costs["redelivery"] = trips_of(proxy, lambda _: dispatcher.deliver(Added(), message_id="m1"))
        engine.dispose()
    assert costs == {"no dedup": 4, "plain": 5, "bounded": 5, "strict": 7, "off": 4, "redelivery": 4}


def test_sqlite(sqlite: Database) -> None:
    """BEGIN and claim before what the handler sends; a redelivery sends these two, and no more."""
    engine = create_engine(sqlite.url())
    prepare(engine)
    sent: list[str] = []
    dispatcher = Dispatcher(sessionmaker(engine), projector(idempotent=True, name="totals")(on(Added)(add)))
    dispatcher.deliver(Added(), message_id="m0")
    event.listen(engine, "before_cursor_execute", lambda *arguments: sent.append(arguments[2].split()[0]))
    dispatcher.deliver(Added(), message_id="m1")
    assert sent == ["BEGIN", "INSERT", "SELECT", "UPDATE"]
    sent.clear()
    dispatcher.deliver(Added(), message_id="m1")
    assert sent == ["BEGIN", "INSERT"]
    engine.dispose()


def test_a_database_that_was_not_tried(postgresql: Database, proxy: CutProxy) -> None:
    """Four trips more than without dedup: a write that makes the driver begin, a savepoint, the claim, the question."""
    engine = create_engine(proxy.through(postgresql.url()).set(drivername="untried_postgresql+psycopg"))
    dispatcher = Dispatcher(sessionmaker(engine), projector(idempotent=True, name="totals")(on(Added)(add)))
    assert trips_of(proxy, lambda number: dispatcher.deliver(Added(), message_id=f"m{number}")) == 8
    assert trips_of(proxy, lambda _: dispatcher.deliver(Added(), message_id="m1")) == 7
    engine.dispose()
