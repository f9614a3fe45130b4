"""What many callers of `applied` cost: `python benchmarks/waiters.py URL`, with `--tasks` in asyncio, else in threads.

First each waiter waits for a message that nobody delivers. Then each waits for a message of its own, which is delivered
meanwhile on another engine. The program creates its marker table in the database of the URL, and drops it.
"""

import argparse
import asyncio
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import MetaData, create_engine, event
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from projector_dedup import AsyncDispatcher, Dispatcher, Message, make_tables, on, projector

METADATA = MetaData()
TABLES = make_tables(METADATA, name="waiters_bench_marker")


@projector(idempotent=True, name="bench")
@on("paid")
def paid(_event: Any, _session: Session) -> None:
    """Leave only a marker."""


@projector(idempotent=True, name="bench")
@on("paid")
async def paid_async(_event: Any, _session: AsyncSession) -> None:
    """Leave only a marker."""


class Waiters:
    """The waiters, on an engine of their own."""

    def __init__(self, url: str, pool: int, *, tasks: bool) -> None:
        create: Any = create_async_engine if tasks else create_engine
        self._engine = create(url, pool_size=pool, max_overflow=0)
        self._tasks = tasks
        self.looks = 0
        event.listen(self._engine.sync_engine if tasks else self._engine, "checkout", self._looked)

    def _looked(self, *_: object) -> None:
        self.looks += 1

    def wait_for(self, ids: list[str], timeout: float, beside: Callable[[], None]) -> list[tuple[bool, float]]:
        """Wait for each id; return what each waiter got, and when. ``beside`` runs in a thread meanwhile."""
        thread = threading.Thread(target=beside)
        if self._tasks:
            return asyncio.run(self._in_tasks(ids, timeout, thread))
        dispatcher = Dispatcher(sessionmaker(self._engine), paid, tables=TABLES)
        found: list[tuple[bool, float]] = [(False, 0.0)] * len(ids)

        def wait(place: int) -> None:
            found[place] = dispatcher.applied(ids[place], by=paid, timeout=timeout), time.perf_counter()

        waiters = [threading.Thread(target=wait, args=(place,)) for place in range(len(ids))]
        for each in (*waiters, thread):
            each.start()
        for each in (*waiters, thread):
            each.join()
        return found

    async def _in_tasks(self, ids: list[str], longest: float, thread: threading.Thread) -> list[tuple[bool, float]]:
        dispatcher = AsyncDispatcher(async_sessionmaker(self._engine), paid_async, tables=TABLES)

        async def wait(message_id: str) -> tuple[bool, float]:
            return await dispatcher.applied(message_id, by=paid_async, timeout=longest), time.perf_counter()

        thread.start()
        found = await asyncio.gather(*map(wait, ids))
        thread.join()
        await self._engine.dispose()
        return list(found)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--tasks", action="store_true")
    parser.add_argument("--delivering", help="the URL of the deliveries, by default the same", default=None)
    parser.add_argument("--waiters", type=int, default=100)
    parser.add_argument("--pool", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    engine = create_engine(given.delivering or given.url)
    METADATA.create_all(engine)
    try:
        _vain(given)
        _served(given, Dispatcher(sessionmaker(engine), paid, tables=TABLES))
    finally:
        METADATA.drop_all(engine)
        engine.dispose()


def _vain(given: argparse.Namespace) -> None:
    waiters = Waiters(given.url, given.pool, tasks=given.tasks)
    begun, used = time.perf_counter(), time.process_time()
    found = waiters.wait_for([f"never-{n}" for n in range(given.waiters)], given.seconds, lambda: None)
    took, used = time.perf_counter() - begun, time.process_time() - used
    assert not any(answer for answer, _ in found)
    print(
        f"{given.waiters} waiters in vain for {given.seconds} s: {waiters.looks / took:.0f} looks a second, "
        f"{used / took:.0%} of a processor in this process, the last one returned after {took:.2f} s"
    )


def _served(given: argparse.Namespace, dispatcher: Dispatcher) -> None:
    waiters = Waiters(given.url, given.pool, tasks=given.tasks)
    ids = [f"paid-{n}" for n in range(given.waiters)]
    committed: list[float] = []

    def deliver() -> None:
        time.sleep(1)  # seconds; meanwhile the pauses of the waiters grow
        for each in ids:
            dispatcher.deliver(Message(each, {}, type="paid"))
            committed.append(time.perf_counter())
            time.sleep(0.01)

    found = waiters.wait_for(ids, 30.0, deliver)
    assert all(answer for answer, _ in found)
    late = sorted(1000 * (at - before) for (_, at), before in zip(found, committed, strict=True))
    print(
        f"{given.waiters} waiters, each for its own message: True {statistics.median(late):.0f} ms after the COMMIT "
        f"(median), {late[int(0.95 * len(late))]:.0f} ms (95 of 100)"
    )


if __name__ == "__main__":
    main()
