"""From a queue to the read model: the consumers of this library, and the same clients by hand without deduplication."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import nats
import pika
import redis
from sqlalchemy import URL
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from projector_dedup import AsyncDispatcher, Dispatcher, on, projector
from projector_dedup.brokers.incoming import Incoming
from projector_dedup.brokers.nats import Consumer as NatsConsumer
from projector_dedup.brokers.pika import Consumer as PikaConsumer
from projector_dedup.brokers.rabbitmq import queues_beside
from projector_dedup.brokers.redis import Consumer as RedisConsumer
from projector_dedup.brokers.typed_events import into

from ..harness import Contender, Item
from ..servers import Place
from .orm import IDENTITY, TABLES, Added, ByORM, add, create_tables, rows_once

AHEAD = 20  # messages that a loop by hand takes ahead
BATCH = 200
CONVERT = into({"added": Added})
BY_HAND, SINGLE = "by hand, no dedup", "Consumer"
BATCHED, WHOLE = f"Consumer, batch={BATCH}", "the same, batch=True"

AMQP_URL = os.environ.get("PROJECTOR_DEDUP_TEST_RABBITMQ_URL", "amqp://guest:guest@localhost")
NATS_URL = os.environ.get("PROJECTOR_DEDUP_TEST_NATS_URL", "nats://localhost:4222")
REDIS_URL = os.environ.get("PROJECTOR_DEDUP_TEST_REDIS_URL", "redis://localhost:6379/0")


def body_of(item: Item) -> bytes:
    """The message's body."""
    return json.dumps({"row": item.row}).encode()


def event_of(body: bytes) -> Added:
    """The event, as one reads it by hand."""
    return Added(**json.loads(body))


class Counter:
    """A converter that stops the consumer when it has read so many messages."""

    def __init__(self) -> None:
        self.left = 0
        self.stop: Callable[[], object] = lambda: None

    def __call__(self, incoming: Incoming) -> object:
        """Convert as ``into`` does."""
        self.left -= 1
        if not self.left:
            self.stop()
        return CONVERT(incoming)


class Consumed(ByORM):
    """What all have in common: messages are published before the time is taken, and a turn consumes all of them."""

    batch = 1_000  # of one turn, at least: each connects anew
    broker: ClassVar[str]

    def __init__(self, kind: str) -> None:
        self.name, self.kind = f"{self.broker}: {kind}", kind
        self.queue = f"projector-dedup-bench-{uuid.uuid4().hex[:8]}"
        self.counter = Counter()
        self.options: dict[str, Any] = {"batch": 1 if kind == SINGLE else BATCH}
        self.markers = "" if kind == BY_HAND else TABLES.marker.name

    def connect(self, url: URL) -> None:
        """The engine, the dispatcher and the queue."""
        super().connect(url)
        self.dispatcher = Dispatcher(self.sessions, declared(self.kind), tables=TABLES)
        self.open()

    def open(self) -> None:
        """Make the queue."""
        raise NotImplementedError

    def messages(self, items: Sequence[Item]) -> Sequence[Any]:
        """Publish them."""
        self.publish(items)
        return items

    def publish(self, items: Sequence[Item]) -> None:
        """Put them into the queue."""
        raise NotImplementedError

    def deliver(self, messages: Sequence[Any]) -> None:
        """Take them from there."""
        if self.kind == BY_HAND:
            self.by_hand(len(messages))
        else:
            self.counter.left = len(messages)
            self.consume()

    def by_hand(self, count: int) -> None:
        """Apply so many messages, each in a transaction, and acknowledge it."""
        raise NotImplementedError

    def consume(self) -> None:
        """Run the consumer of this library until the counter stops it."""
        raise NotImplementedError


def declared(kind: str) -> Any:
    """The handler."""
    whole = kind == WHOLE
    return projector(idempotent=True, name=IDENTITY)(on(Added, batch=whole)(rows_once if whole else add))


class RabbitMQ(Consumed):
    """By pika."""

    broker = "RabbitMQ"

    def open(self) -> None:
        """A durable queue."""
        self._parameters = pika.URLParameters(AMQP_URL)
        self._connection = pika.BlockingConnection(self._parameters)
        self._channel = self._connection.channel()
        self._channel.queue_declare(self.queue, durable=True)

    def disconnect(self) -> None:
        """Delete it."""
        for queue in (self.queue, *queues_beside(self.queue)):
            self._channel.queue_delete(queue)
        self._connection.close()
        super().disconnect()

    def publish(self, items: Sequence[Item]) -> None:
        """Persistent messages, which are in the queue when the last one is confirmed."""
        with pika.BlockingConnection(self._parameters) as connection:
            channel = connection.channel()
            for number, item in enumerate(items, 1):
                if number == len(items):
                    channel.confirm_delivery()
                properties = pika.BasicProperties(message_id=item.id, type="added", delivery_mode=2)
                channel.basic_publish("", self.queue, body_of(item), properties)

    def by_hand(self, count: int) -> None:
        """A loop over pika's generator."""
        with pika.BlockingConnection(self._parameters) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=AHEAD)
            for method, _, body in channel.consume(self.queue):
                with self.sessions.begin() as session:
                    add(event_of(body), session)
                channel.basic_ack(method.delivery_tag)
                count -= 1
                if not count:
                    channel.cancel()
                    return

    def consume(self) -> None:
        """``projector_dedup.brokers.pika``."""
        consumer = PikaConsumer(self._parameters, self.queue, self.dispatcher, self.counter, **self.options)
        self.counter.stop = consumer.stop
        consumer.run()


class Redis(Consumed):
    """By redis-py."""

    broker = "Redis"

    def open(self) -> None:
        """A stream and its group."""
        self._client: Any = redis.Redis.from_url(REDIS_URL)
        self._client.xgroup_create(self.queue, "group", id="0", mkstream=True)

    def disconnect(self) -> None:
        """Delete it."""
        self._client.delete(self.queue)
        self._client.close()
        super().disconnect()

    def publish(self, items: Sequence[Item]) -> None:
        """In one pipeline."""
        pipeline = self._client.pipeline(transaction=False)
        for item in items:
            pipeline.xadd(self.queue, {"message_id": item.id, "type": "added", "body": body_of(item)})
        pipeline.execute()

    def by_hand(self, count: int) -> None:
        """A loop over what one request returns."""
        while count:
            ((_, entries),) = self._client.xreadgroup("group", "hand", {self.queue: ">"}, count=AHEAD, block=1_000)
            for number, fields in entries:
                with self.sessions.begin() as session:
                    add(event_of(fields[b"body"]), session)
                self._client.xack(self.queue, "group", number)
                count -= 1

    def consume(self) -> None:
        """``projector_dedup.brokers.redis``."""
        consumer = RedisConsumer(self._client, self.queue, "group", self.dispatcher, self.counter, **self.options)
        self.counter.stop = consumer.stop
        consumer.run()


def _apply(event: Added, session: Session) -> None:
    add(event, session)


class Nats(Contender):
    """By nats-py, in one event loop."""

    batch, engines = Consumed.batch, ByORM.engines
    drivers: ClassVar[dict[str, str]] = {"postgresql": "postgresql+psycopg_async", "mariadb": "mariadb+asyncmy"}

    def __init__(self, kind: str) -> None:
        self.name, self.kind = f"NATS: {kind}", kind
        self._stream, self._counter = f"bench-{uuid.uuid4().hex[:8]}", Counter()
        self._options: dict[str, Any] = {"batch": 1 if kind == SINGLE else BATCH}
        self.markers = "" if kind == BY_HAND else TABLES.marker.name

    def create(self, place: Place) -> None:
        """The tables of everybody."""
        create_tables(place)

    def connect(self, url: URL) -> None:
        """A loop, an engine, a dispatcher and a stream."""
        self._loop = asyncio.new_event_loop()
        self._engine = create_async_engine(url)
        self._sessions = async_sessionmaker(self._engine)
        whole = self.kind == WHOLE

        async def one(event: Added, session: AsyncSession) -> None:
            await session.run_sync(lambda plain: add(event, plain))

        async def several(events: list[Added], session: AsyncSession) -> None:
            await session.run_sync(lambda plain: rows_once(events, plain))

        handler = projector(idempotent=True, name=IDENTITY)(on(Added, batch=whole)(several if whole else one))
        self._dispatcher = AsyncDispatcher(self._sessions, handler, tables=TABLES)
        self._loop.run_until_complete(self._open())

    async def _open(self) -> None:
        self._connection = await nats.connect(NATS_URL)
        self._streams = self._connection.jetstream()
        await self._streams.add_stream(name=self._stream, subjects=[f"{self._stream}.>"])

    def disconnect(self) -> None:
        """Delete it, and close."""
        self._loop.run_until_complete(self._close())
        self._loop.close()

    async def _close(self) -> None:
        for name in (self._stream, *([] if self.kind == BY_HAND else [f"{self._stream}-worker-dead"])):
            await self._streams.delete_stream(name)
        await self._connection.close()
        await self._engine.dispose()

    def messages(self, items: Sequence[Item]) -> Sequence[Any]:
        """Publish them."""
        self._loop.run_until_complete(self._publish(items))
        return items

    async def _publish(self, items: Sequence[Item]) -> None:
        for start in range(0, len(items), 100):
            await asyncio.gather(
                *(
                    self._streams.publish(
                        f"{self._stream}.x", body_of(item), headers={"Nats-Msg-Id": item.id, "type": "added"}
                    )
                    for item in items[start : start + 100]
                )
            )

    def deliver(self, messages: Sequence[Any]) -> None:
        """Take them from there."""
        self._counter.left = len(messages)
        self._loop.run_until_complete(self._by_hand(len(messages)) if self.kind == BY_HAND else self._consume())

    async def _by_hand(self, count: int) -> None:
        pull = await self._streams.pull_subscribe(f"{self._stream}.>", "hand")
        while count:
            for message in await pull.fetch(min(AHEAD, count)):
                async with self._sessions.begin() as session:
                    await session.run_sync(partial(_apply, event_of(message.data)))
                await message.ack()
                count -= 1
        await pull.unsubscribe()

    async def _consume(self) -> None:
        consumer = NatsConsumer(
            self._connection, self._stream, "worker", self._dispatcher, self._counter, **self._options
        )
        self._counter.stop = consumer.stop
        await consumer.run()


BROKERS: dict[str, tuple[type[Contender], int]] = {
    "RabbitMQ": (RabbitMQ, 5672),
    "NATS": (Nats, 4222),
    "Redis": (Redis, 6379),
}


def of(broker: str) -> list[Contender]:
    """The loop by hand, and the consumer of this library in three ways."""
    kind: Any = BROKERS[broker][0]
    return [kind(each) for each in (BY_HAND, SINGLE, BATCHED, WHOLE)]
