"""A consumer of RabbitMQ by either client, in a thread of the test, and the read model that it keeps in SQLite."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

from sqlalchemy import create_engine, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from consumer_rig import wait_for
from databases import Database
from projector_dedup import AsyncDispatcher, Dispatcher, by_path, make_tables, on, projector
from projector_dedup.integrations import aio_pika as awaited
from projector_dedup.integrations import pika as plain
from rabbitmq_rig import RabbitMQ

Client = Literal["pika", "aio-pika"]


class Base(DeclarativeBase):
    """The read model, with the marker table beside it."""


class Seen(Base):
    """How often a name was seen."""

    __tablename__ = "seen"
    name: Mapped[str] = mapped_column(primary_key=True)
    times: Mapped[int]


make_tables(Base.metadata)

RULES: dict[str, Callable[[], object]] = {}
"""By name, what the handler does first: raise, wait. Tests fill it, and mend by taking a rule out."""


def see(event: Any, session: Session) -> None:
    """Count a name."""
    if (rule := RULES.get(event["name"])) is not None:
        rule()
    seen = session.get(Seen, event["name"])
    if seen is None:
        session.add(Seen(name=event["name"], times=1))
    else:
        seen.times += 1


@projector(idempotent=True, name="names")
class Names:
    """Counts names."""

    @on("seen")
    def see(self, event: Any, session: Session) -> None:
        """Count one."""
        see(event, session)


@projector(idempotent=True, name="names")
class AsyncNames:
    """Counts names, awaited."""

    @on("seen")
    async def see(self, event: Any, session: AsyncSession) -> None:
        """Count one."""
        await session.run_sync(lambda inner: see(event, inner))


def raises(error: BaseException) -> Callable[[], object]:
    """A rule that raises."""

    def rule() -> None:
        raise error

    return rule


def named(name: str) -> bytes:
    """The body of a message."""
    return json.dumps({"type": "seen", "name": name}).encode()


class Rig:
    """One queue, one client, and the read model behind it."""

    def __init__(self, client: Client, queue: RabbitMQ, database: Database) -> None:
        RULES.clear()
        self.client, self.queue = client, queue
        self.engine = create_engine(database.url(), connect_args={"timeout": 30})
        Base.metadata.create_all(self.engine)
        self._async_url = database.async_url

    def send(self, name: str, **properties: Any) -> None:
        """Publish a message that is right."""
        self.queue.send(named(name), **{"message_id": f"id-{name}", **properties})

    def seen(self) -> dict[str, int]:
        """The read model, from another connection."""
        with Session(self.engine) as session:
            return {each.name: each.times for each in session.scalars(select(Seen))}

    def markers(self) -> set[str]:
        """The ids of the messages that were applied."""
        marker = Base.metadata.tables["processed_message"]
        with self.engine.connect() as connection:
            return {str(each) for each in connection.scalars(select(marker.c.message_id))}

    def run_until(self, condition: Callable[[], bool], what: str, **options: Any) -> None:
        """Consume until something is so, then stop."""
        with self.running(**options):
            wait_for(condition, what, 30)

    @contextlib.contextmanager
    def running(self, **options: Any) -> Iterator[threading.Thread]:
        """A consumer in a thread, which is stopped in the end; its error, if it has one, is raised then."""
        errors: list[BaseException] = []
        started: list[Callable[[], object]] = []

        def run() -> None:
            try:
                if self.client == "pika":
                    dispatcher = Dispatcher(sessionmaker(self.engine), Names(), type=by_path("type"))
                    consumer = plain.Consumer(self.queue.parameters, self.queue.queue, dispatcher, **options)
                    started.append(consumer.stop)
                    consumer.run()
                else:
                    asyncio.run(self._arun(started, options))
            except BaseException as error:  # noqa: BLE001  # for the test
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            wait_for(lambda: bool(started or errors), "the consumer", 30)
            yield thread
        finally:
            for stop in started if thread.is_alive() else ():
                stop()
            thread.join(60)
        if errors:
            raise errors[0]

    async def _arun(self, started: list[Callable[[], object]], options: dict[str, Any]) -> None:
        engine = create_async_engine(self._async_url, connect_args={"timeout": 30})
        dispatcher = AsyncDispatcher(async_sessionmaker(engine), AsyncNames(), type=by_path("type"))
        consumer = awaited.Consumer(self.queue.url, self.queue.queue, dispatcher, **options)
        loop = asyncio.get_running_loop()
        started.append(lambda: loop.call_soon_threadsafe(consumer.stop))
        try:
            await consumer.run()
        finally:
            await engine.dispose()

    def failure(self, **options: Any) -> BaseException:
        """Consume until the consumer fails by itself, and return why."""
        try:
            with self.running(**options) as thread:
                thread.join(30)
                assert not thread.is_alive(), "the consumer goes on"
        except BaseException as error:  # noqa: BLE001  # whatever it is
            return error
        raise AssertionError("the consumer has ended as if it were told to")

    def replay(self) -> int:
        """Publish the dead letters again, by the client."""
        if self.client == "pika":
            return plain.replay(self.queue.parameters, self.queue.queue)
        return asyncio.run(awaited.replay(self.queue.url, self.queue.queue))
