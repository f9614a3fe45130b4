"""A connection is lost where nobody speaks to the server, or where SQLAlchemy does not see it: it is tried again."""

import asyncio
from collections.abc import Callable

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from databases import DRIVERS, Driver
from projector_dedup import Outcome, RetriesExhaustedError, RetryPolicy
from rig import ONCE, Rig, add, outsides_fixture, rig_on_fixture  # noqa: F401  # fixtures

SERVERS = [driver for driver in DRIVERS if driver.engine != "sqlite"]
STREAMS = [driver for driver in SERVERS if driver.module != "pymysql"]  # whose cursor fails when it is collected
ASYNC = [driver for driver in SERVERS if driver.is_async]
SERIES = "(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < 900) SELECT n FROM s)"
ROWS = f"SELECT a.n FROM {SERIES} a, {SERIES} b"  # more than the line holds


@pytest.mark.parametrize("driver", ASYNC, ids=str)
def test_a_connection_that_is_lost_while_the_handler_awaits_something_else(
    driver: Driver, rig_on: Callable[..., Rig]
) -> None:
    """asyncpg knows of that before anything is sent; the handler has not closed it, and is run again."""
    rig = rig_on(driver)
    runs: list[int] = []

    async def handler(session: AsyncSession) -> None:
        runs.append(1)
        await session.run_sync(add)
        if len(runs) == 1:
            await asyncio.to_thread(rig.outside.kill_others)
            for _ in range(20):  # the loop reads what came
                await asyncio.sleep(0.01)

    assert rig.deliver(handler).outcome is Outcome.APPLIED
    assert len(runs) == 2
    assert rig.durable() == ONCE
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("where", ["when it is new", "in the pool", "in a transaction"])
@pytest.mark.parametrize("driver", [driver for driver in SERVERS if driver.engine == "postgresql"], ids=str)
def test_a_connection_that_the_server_ends_because_it_is_idle_is_named(
    driver: Driver, where: str, rig_on: Callable[..., Rig]
) -> None:
    """The text says that the server ended the connection, and what to compare; nothing was applied."""
    rig = rig_on(driver, pool_size=1, max_overflow=0)

    def idle(_session: Session) -> None:
        """Do nothing."""

    def work(session: Session) -> None:
        add(session)
        if where == "in a transaction":
            rig.outside.kill_others()
            session.execute(text("SELECT 1"))

    rig.deliver(idle, "before")
    if where == "when it is new":
        event.listen(rig.sync_engine, "connect", lambda *_: rig.outside.kill_others())
        rig.sync_engine.pool.dispose()
    if where == "in the pool":
        event.listen(rig.sync_engine, "engine_connect", lambda connection: connection.exec_driver_sql("SELECT 1"))
        rig.outside.kill_others()
    with pytest.raises(RetriesExhaustedError, match=r"connection was lost|server ended it at once") as exhausted:
        rig.deliver(work, retry=RetryPolicy(attempts=1))
    assert "idle connections" in str(exhausted.value)
    assert rig.durable().amount == 0


@pytest.mark.parametrize("driver", STREAMS, ids=str)
def test_a_connection_that_is_lost_while_a_result_is_streamed(driver: Driver, rig_on: Callable[..., Rig]) -> None:
    """The driver's own error comes unwrapped there."""
    rig = rig_on(driver)
    runs: list[int] = []

    def handler(session: Session) -> None:
        runs.append(1)
        add(session)
        if len(runs) == 1:
            result = session.execute(text(ROWS), execution_options={"stream_results": True, "yield_per": 10})
            result.fetchone()
            rig.outside.kill_others()
            result.fetchall()

    assert rig.deliver(handler).outcome is Outcome.APPLIED
    assert len(runs) == 2
    assert rig.durable() == ONCE
    rig.assert_nothing_is_left()
