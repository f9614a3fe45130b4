"""A delivery that is interrupted anywhere leaves nothing behind, and a redelivery ends at exactly once.

Asynchronous: the task is cancelled at its first await, at its second, and so on until the message gets through.
Synchronous: a signal raises an exception at every point that a timer can hit (`interrupted_worker.py`).
"""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker
from sqlalchemy.orm import Session

from cancellation import assert_others_can_write, cancel_at_every_await
from databases import USUAL_DRIVERS, Driver, each_driver
from projector_dedup.unit_of_work import AsyncUnitOfWork
from rig import NOTHING, ONCE, Durable, Rig, RigOn, add

pytestmark = pytest.mark.slow


@pytest.mark.by_turns
@each_driver(is_async=True)
@pytest.mark.filterwarnings("ignore:<psycopg.AsyncServerCursor:ResourceWarning")  # the stream that was cut off
@pytest.mark.parametrize(
    ("late", "warm"), [(False, True), (True, True), (False, False)], ids=["warm, early", "warm, late", "cold, early"]
)
def test_a_delivery_cancelled_at_any_await_leaves_nothing_behind(
    driver: Driver, late: bool, warm: bool, rig_on: RigOn
) -> None:
    """Whichever await is cancelled: either all is durable or nothing, no lock is held, and a redelivery is exact."""
    cancel_at_every_await(rig_on(driver), late=late, warm=warm)


@each_driver(is_async=True)
@pytest.mark.parametrize(("ends_by", "durable"), [("commit", ONCE), ("rollback", NOTHING)])
def test_a_cancellation_during_commit_or_rollback_waits_for_the_answer(
    ends_by: str, durable: Durable, rig: Rig
) -> None:
    """The delivery is cancelled, but only when the transaction has ended: nothing is unknown, no connection is lost."""
    rig.deliver(add, "warm")
    rig.outside.empty()

    async def deliver() -> None:
        task = asyncio.ensure_future(rig.adeliver(_fails if ends_by == "rollback" else add))
        event.listen(rig.sync_engine, ends_by, lambda _connection: task.cancel(), once=True)
        with pytest.raises(asyncio.CancelledError):
            await task

    rig.run(deliver())
    rig.assert_settled(durable)
    rig.deliver(add)
    assert rig.durable() == ONCE
    assert rig.connects == 1


def _fails(session: Session) -> None:
    add(session)
    raise ZeroDivisionError


@each_driver(is_async=True)
def test_a_cancelled_commit_of_the_callers_waits_for_the_answer(rig: Rig) -> None:
    """`AsyncUnitOfWork.commit` commits, closes the session, and only then is the task cancelled."""
    engine = rig.engine
    assert isinstance(engine, AsyncEngine)

    async def commit() -> None:
        async with AsyncUnitOfWork(async_sessionmaker(engine)) as uow:
            assert await uow.claim("m-1", "by hand")
            await uow.session.run_sync(add)
            await uow.commit()

    async def commit_and_cancel() -> None:
        task = asyncio.ensure_future(commit())
        event.listen(rig.sync_engine, "commit", lambda _connection: task.cancel(), once=True)
        with pytest.raises(asyncio.CancelledError):
            await task

    rig.deliver(add, "warm")
    rig.outside.empty()
    rig.run(commit_and_cancel())
    rig.assert_settled(ONCE)
    rig.deliver(add, "after")
    assert rig.connects == 1


@pytest.mark.by_turns
@each_driver(is_async=True)
def test_many_deliveries_cancelled_at_once_leave_nothing_behind(rig: Rig) -> None:
    """Deliveries that wait for each other's rows are cancelled in the midst; what was not durable is redelivered."""
    ids = [f"m-{number}" for number in range(12)]

    async def deliver_and_cancel(steps: int) -> None:
        tasks = [asyncio.create_task(rig.adeliver(add, message_id)) for message_id in ids]
        for _ in range(steps):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    for steps in range(0, 100, 10):
        rig.outside.empty()
        rig.run(deliver_and_cancel(steps))
        assert_others_can_write(rig)
        rig.assert_nothing_is_left()
        for message_id in ids:
            rig.deliver(add, message_id)
        assert rig.durable() == Durable(len(ids), len(ids))


@pytest.mark.parametrize(
    ("driver", "kind"),
    [
        *zip(
            [driver for driver in USUAL_DRIVERS if not driver.is_async],
            ["KeyboardInterrupt", "Exception", "BaseException"],
            strict=True,
        )
    ],
    ids=str,
)
def test_a_delivery_interrupted_by_a_signal_leaves_nothing_behind(driver: Driver, kind: str, rig: Rig) -> None:
    """Ctrl-C, or a SIGTERM that raises, at many points of a delivery: nothing is held, and each message counts once."""
    worker = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).parents[1] / "support" / "interrupted_worker.py"),
            driver.drivername,
            rig.outside.database.url(driver.drivername).render_as_string(hide_password=False),
            kind,
        ],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert worker.returncode == 0, worker.stdout + worker.stderr
    interrupted, lost, messages = map(int, worker.stdout.split()[-3:])
    assert interrupted > messages // 10
    assert lost <= messages // 10
    assert rig.durable() == Durable(messages, messages)
    rig.outside.assert_nothing_is_held()
