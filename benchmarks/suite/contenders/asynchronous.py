"""32 tasks of asyncio on as many connections, with this library and without deduplication."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from sqlalchemy import URL
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from projector_dedup import AsyncDispatcher, on, projector

from ..harness import Contender, Item
from ..servers import Place
from .orm import IDENTITY, TABLES, Added, Given, Total, create_tables, events

TASKS = 32


class AsyncPlain(Contender):
    """The handler's code in a transaction, without deduplication."""

    tasks = TASKS

    def __init__(self, name: str, driver: str) -> None:
        self.name = name
        self.drivers = {"postgresql": driver}  # type: ignore[misc]  # its own

    def create(self, place: Place) -> None:
        """The tables of everybody."""
        create_tables(place)

    def connect(self, url: URL) -> None:
        """A loop, and a pool with a connection for each task."""
        self._loop = asyncio.new_event_loop()
        self.engine: AsyncEngine = create_async_engine(url, pool_size=TASKS)
        self.sessions = async_sessionmaker(self.engine)

    def messages(self, items: Sequence[Item]) -> Sequence[Any]:
        """Events, and their ids beside them."""
        return events(items)

    def disconnect(self) -> None:
        """Close both."""
        self._loop.run_until_complete(self.engine.dispose())
        self._loop.close()

    def deliver(self, messages: Sequence[Any]) -> None:
        """Each task takes the next message as soon as it has done one."""
        self._loop.run_until_complete(self._all(messages))

    async def _all(self, messages: Sequence[Any]) -> None:
        waiting = iter(messages)

        async def work() -> None:
            for message in waiting:
                await self.one(message)

        async with asyncio.TaskGroup() as group:
            for _ in range(TASKS):
                group.create_task(work())

    async def one(self, message: Given) -> None:
        """BEGIN, the change, COMMIT."""
        async with self.sessions.begin() as session:
            await add(message[0], session)


async def add(event: Added, session: AsyncSession) -> None:
    """What people write."""
    (await session.get_one(Total, event.row)).amount += 1


class AsyncDeliver(AsyncPlain):
    """``AsyncDispatcher.deliver``."""

    markers = TABLES.marker.name

    def connect(self, url: URL) -> None:
        """And a dispatcher that the tasks share."""
        super().connect(url)
        self._dispatcher = AsyncDispatcher(
            self.sessions, projector(idempotent=True, name=IDENTITY)(on(Added)(add)), tables=TABLES
        )

    async def one(self, message: Given) -> None:
        """That it returns means that it may be acknowledged."""
        await self._dispatcher.deliver(message[0], message_id=message[1])


def contenders() -> list[Contender]:
    """With each driver."""
    drivers = ("psycopg", "asyncpg")
    return [
        *(AsyncPlain(f"no dedup, async {driver}", f"postgresql+{driver}") for driver in drivers),
        *(AsyncDeliver(f"AsyncDispatcher, {driver}", f"postgresql+{driver}") for driver in drivers),
    ]
