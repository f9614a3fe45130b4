"""The consumers of this library, each as the tests need it: publish, consume, look at what is left and at the dead."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import nats
import pika
import pytest
from celery.worker import state
from faststream.nats import NatsBroker
from faststream.rabbit import RabbitBroker
from nats.aio.client import Client
from sqlalchemy import create_engine

import payments
from amqp_fields import drawn, short
from celery_rig import TASK, CeleryQueue, celery_queue
from consumer_rig import Broker, Sent, wait_for
from databases import Database
from kafka_garbage import garbage as kafka_garbage
from kafka_garbage import produce
from kafka_rig import Cluster, Kafka
from nats_garbage import garbage, send
from nats_rig import DURABLE, JetStream, jet_stream
from payments import RULES, payment
from projector_dedup import AsyncDispatcher
from projector_dedup.brokers import aio_pika, celery, kafka, redis
from projector_dedup.brokers import nats as of_nats
from projector_dedup.brokers import pika as of_pika
from projector_dedup.brokers import pubsub as of_pubsub
from projector_dedup.brokers import sqs as of_sqs
from projector_dedup.brokers.faststream import nats as faststream_nats
from projector_dedup.brokers.faststream import rabbit as faststream_rabbit
from projector_dedup.brokers.rabbitmq import dead_letters
from pubsub_rig import PubSub, pubsub
from rabbitmq_rig import RabbitMQ, rabbitmq
from redis_rig import GROUP, RedisStream, redis_stream
from sqs_rig import Sqs, sqs

Started = Callable[[Callable[[], object]], None]
"""Called with the function that ends a consumer, as soon as there is one."""


class Adapter:
    """A queue of one broker, a consumer of it by one client, and the read model behind it."""

    queue: Broker
    client: str
    """The name of the client, in ``CLIENTS`` and for ``flights_consumer.py``."""
    program: ClassVar[str] = ""
    """The program of the page, in examples/consumers."""
    drivername: ClassVar[str] = "postgresql+psycopg"
    options: ClassVar[Mapping[str, Any]] = {}
    """Arguments of the consumer."""
    soon: ClassVar[Mapping[str, Any]] = {}
    """Arguments with which the messages of a consumer that died come again soon."""
    is_awaited: ClassVar[bool] = False
    """True if it takes an ``AsyncDispatcher``."""
    few: ClassVar[Mapping[str, Any]] = {}
    """Arguments with which few messages are in flight."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.batched: Mapping[str, Any] = {}
        self.engine = create_engine(database.url())
        payments.dispatcher(self.engine)  # makes the tables

    @property
    def settings(self) -> dict[str, str]:
        """The environment of a process that consumes the queue."""
        raise NotImplementedError

    def make(self, dispatcher: Any, **options: Any) -> object:
        """Make a consumer, which is not run. Raises for what it does not take."""
        raise NotImplementedError

    def run(self, started: Started, **options: Any) -> None:
        """Consume in this thread."""
        raise NotImplementedError

    def lose_letters(self) -> None:
        """Have the broker keep no dead letters from now on."""
        raise NotImplementedError

    def mend_letters(self) -> None:
        """Let it keep them again, as far as the consumer itself does not see to it."""

    def send_strange(self) -> int:
        """Publish what no client should: payments of a, b and c, and others; return how many messages."""
        raise NotImplementedError

    def pay(self, *payments: tuple[int, str]) -> None:
        """Publish payments, each with its id beside it."""
        self.queue.publish([Sent(f"p{number}", payment(number, account)) for number, account in payments])

    @property
    def applied(self) -> tuple[dict[str, int], int]:
        """The balances, and the number of markers."""
        return payments.applied(self.engine)

    def settled(self, balances: Mapping[str, int], markers: int | None = None) -> Callable[[], bool]:
        """True once these are the balances, and nothing is left to be delivered."""
        wanted = (balances, sum(balances.values()) if markers is None else markers)
        return lambda: self.applied == wanted and self.queue.left() == 0

    @contextlib.contextmanager
    def consuming(self, **options: Any) -> Iterator[threading.Thread]:
        """A consumer in a thread, which is stopped in the end; its error, if it has one, is raised then."""
        errors: list[BaseException] = []
        stops: list[Callable[[], object]] = []

        def run() -> None:
            try:
                self.run(stops.append, **{**self.options, **self.batched, **options})
            except BaseException as error:  # noqa: BLE001  # for the test
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            wait_for(lambda: bool(stops or errors), "the consumer", 30)
            yield thread
        finally:
            for stop in stops if thread.is_alive() else ():
                stop()
            thread.join(60)
            assert not thread.is_alive(), "the consumer goes on"
        if errors:
            raise errors[0]

    def consume_until(self, condition: Callable[[], object], **options: Any) -> None:
        """Consume until something is so, then stop; a consumer that ends before fails the test."""
        with self.consuming(**options) as thread:
            wait_for(lambda: condition() or not thread.is_alive(), "what the test waits for", 40)
            ended = not thread.is_alive()
        assert not ended, "the consumer has ended as if it were told to"

    def failure(self, condition: Callable[[], object] = lambda: False, **options: Any) -> BaseException | None:
        """Consume until the consumer fails by itself, and return why; or until something is so."""
        try:
            with self.consuming(**options) as thread:
                wait_for(lambda: condition() or not thread.is_alive(), "the consumer to fail", 40)
        except BaseException as error:  # noqa: BLE001  # whatever it is
            return error
        return None

    def close(self) -> None:
        """Close what the tests look through."""
        self.engine.dispose()


class _Plain(Adapter):
    """A consumer that does not await."""

    def consumer(self, **options: Any) -> Any:
        """A consumer with a dispatcher of its own, which is not run."""
        return self.make(payments.dispatcher(self.engine), **options)

    def run(self, started: Started, *, consumer: Any = None, **options: Any) -> None:
        """Consume in this thread, by the given consumer if there is one."""
        consumer = consumer or self.consumer(**options)
        started(consumer.stop)
        consumer.run()


class _Awaited(Adapter):
    """A consumer that awaits, in an event loop of its own."""

    is_awaited = True
    drivername = "postgresql+psycopg_async"

    def run(self, started: Started, **options: Any) -> None:
        """Consume in this thread."""

        async def main() -> None:
            loop = asyncio.get_running_loop()
            dispatcher, engine = payments.async_dispatcher(self.database.async_url)
            try:
                await self.consume(dispatcher, lambda stop: started(lambda: loop.call_soon_threadsafe(stop)), **options)
            finally:
                await engine.dispose()

        asyncio.run(main())

    async def consume(self, dispatcher: AsyncDispatcher, started: Started, **options: Any) -> None:
        """Consume in this event loop."""
        consumer: Any = self.make(dispatcher, **options)
        started(consumer.stop)
        await consumer.run()


class _OnRabbitMQ(Adapter):
    """A consumer of a queue of RabbitMQ."""

    few: ClassVar[Mapping[str, Any]] = {"prefetch": 6}
    reads_octets = False
    """True if the client can read texts that are not UTF-8."""

    def __init__(self, database: Database, queue: RabbitMQ) -> None:
        super().__init__(database)
        self.queue: RabbitMQ = queue

    @property
    def settings(self) -> dict[str, str]:
        """The environment of a process that consumes the queue."""
        return {"AMQP_URL": self.queue.url, "QUEUE": self.queue.queue}

    def lose_letters(self) -> None:
        """Delete their queue, which a consumer declares when it starts."""
        with pika.BlockingConnection(self.queue.parameters) as connection:
            connection.channel().queue_delete(dead_letters(self.queue.queue))

    def send_strange(self) -> int:
        """Publish headers of every type that AMQP has."""
        count = 0
        for properties in drawn(10, octets=self.reads_octets):
            for account in "abc":
                count += 1
                self.queue.send_octets(payment(count, account), message_id=short(b"p%d" % count), **properties)
        return count

    def replay(self) -> int:
        """Publish the dead letters again, by this client."""
        return self.queue.replay()


class Pika(_OnRabbitMQ, _Plain):
    """RabbitMQ, by pika."""

    program = "with_pika.py"
    reads_octets = True

    def make(self, dispatcher: Any, **options: Any) -> of_pika.Consumer:
        """Make a consumer."""
        return of_pika.Consumer(self.queue.parameters, self.queue.queue, dispatcher, **options)


class AioPika(_OnRabbitMQ, _Awaited):
    """RabbitMQ, by aio-pika."""

    program = "with_aio_pika.py"

    def make(self, dispatcher: Any, **options: Any) -> aio_pika.Consumer:
        """Make a consumer."""
        return aio_pika.Consumer(self.queue.url, self.queue.queue, dispatcher, **options)

    def replay(self) -> int:
        """Publish the dead letters again, by this client."""
        return asyncio.run(aio_pika.replay(self.queue.url, self.queue.queue))


class FastStreamRabbit(_OnRabbitMQ, _Awaited):
    """RabbitMQ, by FastStream."""

    program = "with_faststream.py"
    drivername = "postgresql+psycopg"

    def make(self, dispatcher: Any, *, broker: Any = None, given: Any = None, **options: Any) -> RabbitBroker:
        """Make a broker with one subscriber; ``broker`` are arguments of its own, ``given`` is a queue of its own."""
        made = RabbitBroker(self.queue.url, graceful_timeout=0.1, **(broker or {}))
        faststream_rabbit.subscribe(made, given or self.queue.queue, dispatcher, **options)
        return made

    async def consume(self, dispatcher: AsyncDispatcher, started: Started, **options: Any) -> None:
        """Consume in this event loop."""
        await _serve(self.make(dispatcher, **options), started)


async def _serve(broker: Any, started: Started) -> None:
    """Run a broker of FastStream's until it is told to end. Its application would take the signals of the tests."""
    over = asyncio.Event()
    async with broker:
        await broker.start()
        started(over.set)
        await over.wait()


class _OnNats(_Awaited):
    """A consumer of a stream of NATS JetStream."""

    soon: ClassVar[Mapping[str, Any]] = {"ack_wait": 1.5}

    def __init__(self, database: Database, queue: JetStream) -> None:
        super().__init__(database)
        self.queue: JetStream = queue

    @property
    def settings(self) -> dict[str, str]:
        """The environment of a process that consumes the queue."""
        return {"NATS_URL": self.queue.url, "STREAM": self.queue.stream}

    def lose_letters(self) -> None:
        """Delete their stream, which a consumer makes when it starts."""
        self.queue.ask(lambda streams: streams.delete_stream(self.queue.dead_stream))

    def send_strange(self) -> int:
        """Publish headers and subjects that no client writes; the server itself refuses some."""

        async def publish() -> None:
            async with await nats.connect(self.queue.url) as connection:
                for end, block, body in garbage(seed=20130101, count=60):
                    await send(connection, self.queue.stream.encode() + b"." + end, block, body)

        asyncio.run(publish())
        self.queue.subject = f"{self.queue.stream}.>"
        sent = self.queue.ask(lambda streams: streams.stream_info(self.queue.stream)).state.messages
        assert sent > 40
        return sent


class Nats(_OnNats):
    """NATS JetStream, by nats-py."""

    program = "with_nats.py"
    few: ClassVar[Mapping[str, Any]] = {"in_flight": 2}

    def make(self, dispatcher: Any, *, connection: Any = None, **options: Any) -> of_nats.Consumer:
        """Make a consumer."""
        options = {"subject": self.queue.subject, **options}
        return of_nats.Consumer(connection or Client(), self.queue.stream, DURABLE, dispatcher, **options)

    async def consume(self, dispatcher: AsyncDispatcher, started: Started, **options: Any) -> None:
        """Consume in this event loop."""
        async with await nats.connect(self.queue.url, reconnect_time_wait=0.1) as connection:
            await super().consume(dispatcher, started, connection=connection, **options)


class FastStreamNats(_OnNats):
    """NATS JetStream, by FastStream."""

    program = "with_faststream_nats.py"
    drivername = "postgresql+psycopg"
    few: ClassVar[Mapping[str, Any]] = {"in_flight": 2}

    def make(self, dispatcher: Any, **options: Any) -> NatsBroker:
        """Make a broker with one subscriber."""
        broker = NatsBroker(self.queue.url, graceful_timeout=0.1)
        faststream_nats.subscribe(
            broker, self.queue.stream, self.queue.subject, DURABLE, dispatcher, **{**self.options, **options}
        )
        return broker

    async def consume(self, dispatcher: AsyncDispatcher, started: Started, **options: Any) -> None:
        """Consume in this event loop."""
        await _serve(self.make(dispatcher, **options), started)


class FastStreamNatsBatches(FastStreamNats):
    """NATS JetStream, by FastStream, many messages in one transaction."""

    program = ""
    options: ClassVar[Mapping[str, Any]] = {"batch": 6}


class Redis(_Plain):
    """A stream of Redis."""

    program = "with_redis.py"
    soon: ClassVar[Mapping[str, Any]] = {"abandoned_after": 0.3}

    def __init__(self, database: Database, queue: RedisStream) -> None:
        super().__init__(database)
        self.queue: RedisStream = queue

    @property
    def settings(self) -> dict[str, str]:
        """The environment of a process that consumes the queue."""
        return {"REDIS_URL": self.queue.address, "STREAM": self.queue.stream}

    def make(self, dispatcher: Any, **options: Any) -> redis.Consumer:
        """Make a consumer."""
        return redis.Consumer(self.queue.client, self.queue.stream, GROUP, dispatcher, **options)

    def lose_letters(self) -> None:
        """Let something else have their name."""
        self.queue.client.set(self.queue.dead_letters, "no stream")

    def mend_letters(self) -> None:
        """Take it away."""
        self.queue.client.delete(self.queue.dead_letters)

    def send_strange(self) -> int:
        """Add fields that no client writes."""
        return self.queue.add_garbage(seed=2013)


class SqsQueue(_Plain):
    """A queue of Amazon SQS."""

    program = "with_sqs.py"

    def __init__(self, database: Database, queue: Sqs) -> None:
        super().__init__(database)
        self.queue: Sqs = queue

    @property
    def settings(self) -> dict[str, str]:
        """The environment of a process that consumes the queue."""
        return {**self.queue.environment, "QUEUE_URL": self.queue.url}

    def make(self, dispatcher: Any, **options: Any) -> of_sqs.Consumer:
        """Make a consumer."""
        return of_sqs.Consumer(self.queue.client, self.queue.url, dispatcher, **options)

    def lose_letters(self) -> None:
        """Delete their queue."""
        self.queue.client.delete_queue(QueueUrl=self.queue.dead_url)

    def mend_letters(self) -> None:
        """Make it again."""
        self.queue.make_dead()

    def send_strange(self) -> int:
        """Send attributes that no client should."""
        return self.queue.send_strange()


class SqsFifoQueue(SqsQueue):
    """A FIFO queue of Amazon SQS, in which each message has a group of its own."""

    program = ""


class PubSubSubscription(_Plain):
    """A subscription of Google Cloud Pub/Sub."""

    program = "with_pubsub.py"

    def __init__(self, database: Database, queue: PubSub) -> None:
        super().__init__(database)
        self.queue: PubSub = queue

    @property
    def settings(self) -> dict[str, str]:
        """The environment of a process that consumes the subscription."""
        return self.queue.environment

    def make(self, dispatcher: Any, **options: Any) -> of_pubsub.Consumer:
        """Make a consumer."""
        queue = self.queue
        return of_pubsub.Consumer(queue.subscriber, queue.publisher, queue.subscription, dispatcher, **options)

    def lose_letters(self) -> None:
        """Delete their topic."""
        self.queue.publisher.delete_topic(request={"topic": self.queue.dead_topic})

    def mend_letters(self) -> None:
        """Make it again."""
        self.queue.make_dead()

    def send_strange(self) -> int:
        """Publish attributes that no client should."""
        return self.queue.send_strange()


class KafkaTopic(_Plain):
    """A topic of Kafka."""

    program = "with_kafka.py"
    options: ClassVar[Mapping[str, Any]] = {"max_delay": 0.2}

    def __init__(self, database: Database, queue: Kafka) -> None:
        super().__init__(database)
        self.queue: Kafka = queue

    @property
    def settings(self) -> dict[str, str]:
        """The environment of a process that consumes the queue."""
        return self.queue.settings

    def make(self, dispatcher: Any, *, topics: Sequence[str] = (), **options: Any) -> kafka.Consumer:
        """Make a consumer, of one topic or of these."""
        return kafka.Consumer(self.queue.config, topics or [self.queue.topic], dispatcher, **options)

    def send_strange(self, topic: str = "") -> int:
        """Publish headers, values and timestamps that no client writes."""
        messages = list(kafka_garbage(seed=20130101, count=50))
        produce(self.queue.config["bootstrap.servers"], topic or self.queue.topic, messages)
        return len(messages)


class Celery(Adapter):
    """Celery, with a worker in a thread; `test_celery.py` has one whose children are processes."""

    program = "with_celery.py"

    def __init__(self, database: Database, queue: CeleryQueue) -> None:
        super().__init__(database)
        self.queue: CeleryQueue = queue

    @property
    def settings(self) -> dict[str, str]:
        """The environment of a process that consumes the queue."""
        return {"AMQP_URL": self.queue.url, "QUEUE": self.queue.queue}

    def make(self, dispatcher: Any, **options: Any) -> Any:
        """Register a task in an application of its own."""
        app = self.queue.new_app()
        celery.delivering_task(app, TASK, dispatcher, queue=self.queue.queue, **options)
        return app

    def run(self, started: Started, **options: Any) -> None:
        """Consume in this thread."""
        app = self.make(payments.dispatcher(self.engine), **options)
        app.set_current()  # in this thread
        self.engine.dispose()  # a worker leaves what is in the pool to its parent
        quiet = {"without_heartbeat": True, "without_mingle": True, "without_gossip": True}
        worker = app.WorkController(app=app, hostname=self.queue.queue, concurrency=1, pool="solo", **quiet)
        worker.timer.call_repeatedly(0.1, lambda: None)  # it looks whether it was stopped when something wakes it
        started(_stop_celery)
        try:
            worker.start()
        finally:
            state.should_terminate = None


def _stop_celery() -> None:
    state.should_terminate = 0


CLIENTS: Mapping[str, tuple[type[Any], Callable[[], contextlib.AbstractContextManager[Any]]]] = {
    "pika": (Pika, rabbitmq),
    "aio-pika": (AioPika, rabbitmq),
    "nats": (Nats, jet_stream),
    "redis": (Redis, redis_stream),
    "sqs": (SqsQueue, sqs),
    "sqs-fifo": (SqsFifoQueue, lambda: sqs(fifo=True)),
    "pubsub": (PubSubSubscription, pubsub),
    "celery": (Celery, celery_queue),
    "faststream-rabbit": (FastStreamRabbit, rabbitmq),
    "faststream-nats": (FastStreamNats, jet_stream),
    "faststream-nats-batches": (FastStreamNatsBatches, jet_stream),
}
"""By name, the adapter of a client, and the queue that it is given; Kafka's has a cluster."""
KAFKA = "kafka"
BATCHED = ("pika", "aio-pika", "nats", "redis", KAFKA)
"""Clients whose consumers take one message at a time; as ``pika-batches``, they take several."""
POLLS = ((of_nats, "_POLL"), (redis, "_POLL"), (kafka, "WAIT"), (of_pika, "_LOOKS_UP_EVERY"), (of_pubsub, "_POLL"))
"""The seconds that a consumer waits for a message before it looks whether it was stopped."""


@contextlib.contextmanager
def adapter(client: str, database: Database, cluster: Cluster | None = None) -> Iterator[Any]:
    """The adapter of a client on a queue of its own, with a read model in which nothing is; no account fails."""
    RULES.clear()
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for module, name in POLLS:
            patch.setattr(module, name, 0.2)
        patch.setattr(of_sqs, "_POLL", 1)  # SQS takes whole seconds
        name = client if client in CLIENTS else client.removesuffix("-batches")
        if name == KAFKA:
            assert cluster is not None
            made: Adapter = KafkaTopic(database, stack.enter_context(contextlib.closing(Kafka(cluster))))
        else:
            kind, opened = CLIENTS[name]
            made = kind(database, stack.enter_context(opened()))
        if client != name:
            made.batched = {"batch": 6}
        made.client = client
        try:
            yield made
        finally:
            RULES.clear()
            made.close()
