"""A process that counts flights with the consumer of one client: `prove` starts it, kills it and starts it again.

``python flights_consumer.py pika`` consumes the queue that the environment names, ``pika-batches`` in batches.
"""

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from flights import MAX_DELAY, async_dispatcher, dispatcher

SETTINGS = os.environ
QUEUE, STREAM = SETTINGS.get("QUEUE", ""), SETTINGS.get("STREAM", "flights")
OPTIONS: dict[str, Any] = {"max_delay": MAX_DELAY}


def pika(dispatcher: Any, **options: Any) -> Any:
    """Return a consumer of a queue of RabbitMQ."""
    from pika import URLParameters

    from projector_dedup.brokers.pika import Consumer

    return Consumer(URLParameters(SETTINGS["AMQP_URL"]), QUEUE, dispatcher, **options)


def aio_pika(dispatcher: Any, **options: Any) -> Any:
    """Return a consumer of a queue of RabbitMQ."""
    from projector_dedup.brokers.aio_pika import Consumer

    return Consumer(SETTINGS["AMQP_URL"], QUEUE, dispatcher, **options)


def nats(dispatcher: Any, **options: Any) -> Any:
    """Return a consumer of a stream of NATS JetStream."""
    from projector_dedup.brokers.nats import Consumer

    return Consumer(SETTINGS["NATS_URL"], STREAM, "airlines", dispatcher, **options)


def redis(dispatcher: Any, **options: Any) -> Any:
    """Return a consumer of a stream of Redis."""
    from redis import Redis

    from projector_dedup.brokers.redis import Consumer

    return Consumer(Redis.from_url(SETTINGS["REDIS_URL"]), STREAM, "airlines", dispatcher, **options)


def kafka(dispatcher: Any, **options: Any) -> Any:
    """Return a consumer of a topic of Kafka."""
    from projector_dedup.brokers.kafka import Consumer

    return Consumer(json.loads(SETTINGS["KAFKA"]), [SETTINGS["TOPIC"]], dispatcher, **options)


def sqs(dispatcher: Any, **options: Any) -> Any:
    """Return a consumer of a queue of Amazon SQS."""
    from boto3 import client

    from projector_dedup.brokers.sqs import Consumer

    return Consumer(client("sqs"), SETTINGS["QUEUE_URL"], dispatcher, **options)


def pubsub(dispatcher: Any, **options: Any) -> Any:
    """Return a consumer of a subscription of Google Cloud Pub/Sub."""
    from google.cloud.pubsub_v1 import PublisherClient, SubscriberClient

    from projector_dedup.brokers.pubsub import Consumer

    return Consumer(SubscriberClient(), PublisherClient(), SETTINGS["SUBSCRIPTION"], dispatcher, **options)


OURS: Mapping[str, Callable[..., Any]] = {
    "pika": pika,
    "aio-pika": aio_pika,
    "nats": nats,
    "redis": redis,
    "kafka": kafka,
    "sqs": sqs,
    "sqs-fifo": sqs,
    "pubsub": pubsub,
}
"""By the name of its client, a function that makes a consumer of the queue that the environment names."""
AWAITED = ("aio-pika", "nats")
"""The clients whose consumers take an ``AsyncDispatcher``."""
MORE: Mapping[str, Mapping[str, Any]] = {"nats": {"in_flight": 4, "ack_wait": 10}, "redis": {"abandoned_after": 10}}
"""Further arguments, by client."""


def run(consumer: Any) -> None:
    """Run a consumer in this thread."""
    if inspect.iscoroutinefunction(consumer.run):
        asyncio.run(consumer.run())
    else:
        consumer.run()


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


OTHERS: Mapping[str, Callable[[], None]] = {
    "celery": celery,
    "faststream-rabbit": faststream_rabbit,
    "faststream-nats": faststream_nats,
    "faststream-nats-batches": lambda: faststream_nats(batch=20),
}

if __name__ == "__main__":
    client = sys.argv[1]
    if client in OTHERS:
        OTHERS[client]()
    else:
        name = client.removesuffix("-batches")
        made = async_dispatcher() if name in AWAITED else dispatcher()
        batch = {} if name == client else {"batch": 20}
        run(OURS[name](made, **OPTIONS, **MORE.get(name, {}), **batch))
