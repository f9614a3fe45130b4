"""Cancel a delivery at every await, and see that all of it is durable, or nothing."""

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from projector_dedup import Outcome
from projector_dedup.outcome import Delivery
from rig import NOTHING, ONCE, Rig, add


class CancelledAtAwait:
    """Awaits a coroutine, and cancels the task that does so when it suspends for the `nth` time.

    `early`: as it suspends, before what it waits for can begin or go on. `late`: when what it waits for is there,
    but before it has been told, so that the result is lost on the way.
    """

    def __init__(self, work: Coroutine[Any, Any, Any], nth: int, *, late: bool) -> None:
        self.work = work
        self.nth = nth
        self.late = late
        self.suspended = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self.work.__await__()
        answer: Any = None
        error: BaseException | None = None
        while True:
            try:
                future = steps.send(answer) if error is None else steps.throw(error)
            except StopIteration as end:
                return end.value
            if self.suspended == self.nth:
                self._cancel(future)
            self.suspended += 1
            answer, error = None, None
            try:
                answer = yield future
            except BaseException as raised:  # noqa: BLE001  # it is the coroutine's to handle
                error = raised

    def _cancel(self, future: asyncio.Future[Any] | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self.late and future is not None:
            future.add_done_callback(lambda _: task.cancel())  # called before the task's own, which is added later
        else:
            task.cancel()


async def _several_statements(session: AsyncSession) -> None:
    await session.run_sync(add)
    await asyncio.sleep(0)
    async with session.begin_nested():
        await session.execute(text("update total set amount = amount"))
    async for _ in await session.stream(text("select * from total")):
        pass


def assert_others_can_write(rig: Rig) -> None:
    """Another connection can write the same rows, and a marker, at once."""
    rig.outside.execute("update total set amount = amount")
    rig.outside.execute("insert into processed_message (message_id, handler) values ('m-1', 'other')")
    rig.outside.execute("delete from processed_message where handler = 'other'")


def cancel_at_every_await(rig: Rig, *, late: bool, warm: bool) -> None:
    """Cancel a delivery at its first await, then one at its second, and so on, until one gets through."""
    rig.deliver(add, "first")
    for nth in range(500):
        if not warm:
            rig.run(rig.engine.dispose())
        else:
            rig.deliver(add, "warm")
        rig.outside.empty()
        cut = CancelledAtAwait(rig.adeliver(_several_statements), nth, late=late)

        async def deliver(cut: CancelledAtAwait = cut) -> Outcome | None:
            try:
                delivery: Delivery = await cut
                return delivery.outcome
            except asyncio.CancelledError:
                return None

        outcome = rig.run(deliver())
        if outcome is None:
            assert_others_can_write(rig)
            rig.assert_nothing_is_left()
        durable = rig.durable()
        assert durable in ((NOTHING, ONCE) if outcome is None else (ONCE,))
        again = rig.deliver(_several_statements).outcome
        assert again is (Outcome.APPLIED if durable == NOTHING else Outcome.DUPLICATE)
        assert rig.durable() == ONCE
        rig.assert_nothing_is_left()
        if cut.suspended <= nth:
            break
    else:
        pytest.fail("the message never got through")
    assert nth > 5
    assert outcome is Outcome.APPLIED
