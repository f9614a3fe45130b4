"""A process that counts flights with the consumer of one client: `prove` starts it, kills it and starts it again.

``python flights_consumer.py pika`` consumes the queue that the environment names, ``pika-batches`` in batches.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from flights import MAX_DELAY, async_dispatcher, dispatcher

SETTINGS = os.environ
QUEUE, STREAM = SETTINGS.get("QUEUE", ""), SETTINGS.get("STREAM", "")
OPTIONS: dict[str, Any] = {"max_delay": MAX_DELAY}


def _run(consumer: Any) -> None:
    signal.signal(signal.SIGTERM, consumer.stop)
    consumer.run()


async def _run_awaited(consumer: Any) -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.stop)
    await consumer.run()


def pika() -> None:
    """Consume a queue of RabbitMQ."""
    from pika import URLParameters

    from projector_dedup.brokers.pika import Consumer

    _run(Consumer(URLParameters(SETTINGS["AMQP_URL"]), QUEUE, dispatcher(), **OPTIONS))


def aio_pika() -> None:
    """Consume a queue of RabbitMQ."""
    from projector_dedup.brokers.aio_pika import Consumer

    asyncio.run(_run_awaited(Consumer(SETTINGS["AMQP_URL"], QUEUE, async_dispatcher(), **OPTIONS)))


def nats() -> None:
    """Consume a stream of NATS JetStream, four messages side by side."""
    from nats import connect

    from projector_dedup.brokers.nats import Consumer

    async def main() -> None:
        async with await connect(SETTINGS["NATS_URL"]) as connection:
            options = {"in_flight": 4, "ack_wait": 10, **OPTIONS}
            await _run_awaited(Consumer(connection, STREAM, "airlines", async_dispatcher(), **options))

    asyncio.run(main())


def redis() -> None:
    """Consume a stream of Redis."""
    from redis import Redis

    from projector_dedup.brokers.redis import Consumer

    client = Redis.from_url(SETTINGS["REDIS_URL"])
    _run(Consumer(client, STREAM, "airlines", dispatcher(), abandoned_after=10, **OPTIONS))


def kafka() -> None:
    """Consume a topic of Kafka."""
    import json

    from projector_dedup.brokers.kafka import Consumer

    _run(Consumer(json.loads(SETTINGS["KAFKA"]), [SETTINGS["TOPIC"]], dispatcher(), **OPTIONS))


def sqs() -> None:
    """Consume a queue of Amazon SQS."""
    from boto3 import client

    from projector_dedup.brokers.sqs import Consumer

    _run(Consumer(client("sqs"), SETTINGS["QUEUE_URL"], dispatcher(), max_delay=MAX_DELAY))


def pubsub() -> None:
    """Consume a subscription of Google Cloud Pub/Sub."""
    from google.cloud.pubsub_v1 import PublisherClient, SubscriberClient

    from projector_dedup.brokers.pubsub import Consumer

    clients = SubscriberClient(), PublisherClient()
    _run(Consumer(*clients, SETTINGS["SUBSCRIPTION"], dispatcher(), max_delay=MAX_DELAY))


def celery() -> None:
    """Consume a queue of Celery, with two children."""
    from celery import Celery

    from projector_dedup.brokers.celery import delivering_task

    app = Celery("flights", broker=SETTINGS["AMQP_URL"])
    app.conf.update(task_default_queue=QUEUE, broker_transport_options={"confirm_publish": True})
    delivering_task(app, "flights.count", dispatcher(), queue=QUEUE, max_delay=MAX_DELAY)
    options = ["--concurrency", "2", "--loglevel", "WARNING", "--without-mingle", "--without-gossip"]
    app.worker_main(["worker", "-n", f"{os.getpid()}@%h", *options])


def faststream_rabbit() -> None:
    """Consume a queue of RabbitMQ in an application of FastStream's."""
    from faststream import FastStream
    from faststream.rabbit import RabbitBroker

    from projector_dedup.brokers.faststream.rabbit import subscribe

    broker = RabbitBroker(SETTINGS["AMQP_URL"])
    subscribe(broker, QUEUE, async_dispatcher(), max_delay=MAX_DELAY)
    asyncio.run(FastStream(broker).run())


def faststream_nats(batch: Any = None) -> None:
    """Consume a stream of NATS JetStream in an application of FastStream's."""
    from faststream import FastStream
    from faststream.nats import NatsBroker

    from projector_dedup.brokers.faststream.nats import subscribe

    broker, options = NatsBroker(SETTINGS["NATS_URL"]), {"batch": batch, "max_delay": MAX_DELAY, "ack_wait": 10}
    subscribe(broker, STREAM, f"{STREAM}.>", "airlines", async_dispatcher(), **options)
    asyncio.run(FastStream(broker).run())


CONSUMERS: Mapping[str, Callable[[], None]] = {
    "pika": pika,
    "aio-pika": aio_pika,
    "nats": nats,
    "redis": redis,
    "kafka": kafka,
    "sqs": sqs,
    "sqs-fifo": sqs,
    "pubsub": pubsub,
    "celery": celery,
    "faststream-rabbit": faststream_rabbit,
    "faststream-nats": faststream_nats,
    "faststream-nats-batches": lambda: faststream_nats(batch=20),
}

if __name__ == "__main__":
    client = sys.argv[1]
    if client not in CONSUMERS:
        client = client.removesuffix("-batches")
        OPTIONS["batch"] = 20
    CONSUMERS[client]()
