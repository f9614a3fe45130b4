"""A job queue that enqueues on the handler's own connection: the job commits with the marker, or not at all."""

from typing import Any

import procrastinate
import pytest
from procrastinate.exceptions import AlreadyEnqueued
from procrastinate.schema import SchemaManager
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from databases import Driver, each_driver
from projector_dedup import Outcome
from rig import NOTHING, ONCE, Outside, Rig, RigOn, add

# The connectors are never opened: each job is enqueued on a connection that is given.
QUEUE = procrastinate.App(connector=procrastinate.SyncPsycopgConnector())
ASYNC_QUEUE = procrastinate.App(connector=procrastinate.PsycopgConnector())
LOCK = "receipt of a"


def enqueue(session: Session) -> None:
    """Enqueue a job on the driver's connection of the session."""
    connection = session.connection().connection.driver_connection
    QUEUE.configure_task("send", queueing_lock=LOCK, connection=connection).defer(account="a")


async def enqueue_async(session: AsyncSession) -> None:
    """The same on an ``AsyncSession``."""
    connection = (await (await session.connection()).get_raw_connection()).driver_connection
    await ASYNC_QUEUE.configure_task("send", queueing_lock=LOCK, connection=connection).defer_async(account="a")


def handler_of(rig: Rig, times: int = 1, *, fails: bool = False) -> Any:
    """A handler that adds 1 and enqueues a job so many times."""

    def handler(session: Session) -> None:
        add(session)
        for _ in range(times):
            enqueue(session)
        if fails:
            raise ZeroDivisionError

    async def handler_async(session: AsyncSession) -> None:
        await session.run_sync(add)
        for _ in range(times):
            await enqueue_async(session)
        if fails:
            raise ZeroDivisionError

    return handler_async if rig.driver.is_async else handler


@pytest.fixture(scope="module")
def _queue(outsides: dict[str, Outside | str]) -> None:
    """The tables of the queue."""
    if isinstance(outside := outsides["postgresql"], Outside):
        outside.execute(SchemaManager.get_schema())


@pytest.fixture
def rig(driver: Driver, rig_on: RigOn, _queue: None) -> Rig:
    """A database without messages and jobs."""
    made = rig_on(driver)
    made.outside.execute("truncate procrastinate_jobs cascade")
    return made


def jobs(rig: Rig) -> list[Any]:
    """Return the arguments of the jobs that another connection sees."""
    return [args for (args,) in rig.outside.execute("select args from procrastinate_jobs")]


@each_driver(module="psycopg")
def test_a_job_is_enqueued_once(rig: Rig) -> None:
    """The job is there after ``APPLIED``, and a redelivery enqueues no second one."""
    outcomes = [rig.deliver(handler_of(rig)).outcome for _ in range(2)]
    assert outcomes == [Outcome.APPLIED, Outcome.DUPLICATE]
    assert (jobs(rig), rig.durable()) == ([{"account": "a"}], ONCE)
    rig.assert_nothing_is_left()


@each_driver(module="psycopg")
def test_a_handler_that_fails_enqueues_nothing(rig: Rig) -> None:
    """The job goes with the rollback, and the redelivery enqueues it."""
    with pytest.raises(ZeroDivisionError):
        rig.deliver(handler_of(rig, fails=True))
    assert (jobs(rig), rig.durable()) == ([], NOTHING)
    assert rig.deliver(handler_of(rig)).outcome is Outcome.APPLIED
    assert (jobs(rig), rig.durable()) == ([{"account": "a"}], ONCE)
    rig.assert_nothing_is_left()


@each_driver(module="psycopg")
def test_an_error_of_the_queue_is_the_handlers_own(rig: Rig) -> None:
    """The server aborts the transaction of a second job with the same lock: nobody takes that for a commit."""
    with pytest.raises(AlreadyEnqueued):
        rig.deliver(handler_of(rig, times=2))
    assert (jobs(rig), rig.durable(), rig.connects) == ([], NOTHING, 1)
    rig.assert_nothing_is_left()
