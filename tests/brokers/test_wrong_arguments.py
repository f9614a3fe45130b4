"""A consumer that is made with the wrong thing says what to give, and says it when it is made."""

import re
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import celery
import pika
import pytest
import redis.asyncio
from botocore.client import BaseClient
from faststream.nats import NatsBroker
from faststream.rabbit import RabbitBroker
from google.cloud.pubsub_v1 import PublisherClient, SubscriberClient

from projector_dedup import Dispatcher
from projector_dedup.brokers import aio_pika as of_aio_pika
from projector_dedup.brokers import celery as of_celery
from projector_dedup.brokers import kafka as of_kafka
from projector_dedup.brokers import nats as of_nats
from projector_dedup.brokers import pika as of_pika
from projector_dedup.brokers import pubsub as of_pubsub
from projector_dedup.brokers import redis as of_redis
from projector_dedup.brokers import sqs as of_sqs
from projector_dedup.brokers.faststream import nats as of_faststream_nats
from projector_dedup.brokers.faststream import rabbit as of_faststream_rabbit
from projector_dedup.brokers.settling import Settling

ANY: Any = None
CASES: dict[str, tuple[Callable[[], object], str]] = {
    "redis": (
        lambda: of_redis.Consumer("redis://r", "s", "g", ANY),  # type: ignore[arg-type]
        'client is a redis.Redis, as in redis.Redis.from_url("redis://..."), not str',
    ),
    "redis, awaited": (
        lambda: of_redis.Consumer(redis.asyncio.Redis(), "s", "g", ANY),  # type: ignore[arg-type]
        'client is a redis.Redis, as in redis.Redis.from_url("redis://..."), not redis.asyncio.client.Redis',
    ),
    "nats": (
        lambda: of_nats.Consumer(b"nats://n", "s", "d", ANY),  # type: ignore[arg-type]
        'connection is a URL, or what `await nats.connect("nats://...")` returns, not bytes',
    ),
    "sqs": (
        lambda: of_sqs.Consumer("https://q", "https://q", ANY),
        'client is what boto3.client("sqs") returns, not str',
    ),
    "sqs, lambda": (
        lambda: of_sqs.lambda_handler("https://q", ANY),
        'client is what boto3.client("sqs") returns, not str',
    ),
    "sqs, replay": (
        lambda: of_sqs.replay("https://q", "https://q"),
        'client is what boto3.client("sqs") returns, not str',
    ),
    "pubsub": (
        lambda: of_pubsub.Consumer("projects/p", ANY, "projects/p/subscriptions/s", ANY),
        "subscriber is a google.cloud.pubsub_v1.SubscriberClient, not str",
    ),
    "pubsub, replay": (
        lambda: of_pubsub.replay("projects/p", ANY, "s", "d"),
        "subscriber is a google.cloud.pubsub_v1.SubscriberClient, not str",
    ),
    "pika": (
        lambda: of_pika.Consumer("amqp://a", "q", ANY),
        'parameters are those of pika, as in pika.URLParameters("amqp://..."), not str',
    ),
    "pika, replay": (
        lambda: of_pika.replay("amqp://a", "q"),
        'parameters are those of pika, as in pika.URLParameters("amqp://..."), not str',
    ),
    "kafka": (
        lambda: of_kafka.Consumer("k:9092", ["t"], ANY),  # type: ignore[arg-type]
        'config is a dictionary, as in {"bootstrap.servers": ..., "group.id": ...}, not str',
    ),
}


@pytest.mark.parametrize(("make", "says"), CASES.values(), ids=CASES)
def test_an_address_in_place_of_a_client_is_refused(make: Callable[[], object], says: str) -> None:
    """By what to give instead; so is Redis' own client for asyncio, whose answers nobody would await."""
    with pytest.raises(TypeError, match=f"^{re.escape(says)}$"):
        make()


CONFIG = {"bootstrap.servers": "k:9092", "group.id": "g"}
SQS, PUBLISHER, SUBSCRIBER = Mock(BaseClient), Mock(PublisherClient), Mock(SubscriberClient)
MISSPELT: dict[str, tuple[Callable[[], object], str]] = {
    "pika": (
        lambda: of_pika.Consumer(pika.ConnectionParameters(), "q", ANY, max_attempt=3),  # type: ignore[call-arg]
        "Consumer.__init__",
    ),
    "aio-pika": (
        lambda: of_aio_pika.Consumer("amqp://a", "q", ANY, max_attempt=3),  # type: ignore[call-arg]
        "Consumer.__init__",
    ),
    "kafka": (
        lambda: of_kafka.Consumer(CONFIG, ["t"], ANY, max_attempt=3),  # type: ignore[call-arg]
        "Consumer.__init__",
    ),
    "nats": (
        lambda: of_nats.Consumer("nats://n", "s", "d", ANY, max_attempt=3),  # type: ignore[call-arg]
        "Consumer.__init__",
    ),
    "redis": (
        lambda: of_redis.Consumer(redis.Redis(), "s", "g", ANY, max_attempt=3),  # type: ignore[call-arg]
        "Consumer.__init__",
    ),
    "sqs": (
        lambda: of_sqs.Consumer(SQS, "https://q", ANY, max_attempt=3),  # type: ignore[call-arg]
        "Consumer.__init__",
    ),
    "sqs, lambda": (
        lambda: of_sqs.lambda_handler(SQS, ANY, max_attempt=3),  # type: ignore[call-arg]
        "lambda_handler",
    ),
    "pubsub": (
        lambda: of_pubsub.Consumer(SUBSCRIBER, PUBLISHER, "s", ANY, max_attempt=3),  # type: ignore[call-arg]
        "Consumer.__init__",
    ),
    "celery": (
        lambda: of_celery.delivering_task(celery.Celery(), "t", ANY, queue="q", max_attempt=3),  # type: ignore[call-arg]
        "delivering_task",
    ),
    "faststream, rabbit": (
        lambda: of_faststream_rabbit.subscribe(RabbitBroker(), "q", ANY, max_attempt=3),  # type: ignore[call-arg]
        "subscribe",
    ),
    "faststream, nats": (
        lambda: of_faststream_nats.subscribe(NatsBroker(), "s", "t", "d", ANY, max_attempt=3),  # type: ignore[call-arg]
        "subscribe",
    ),
    "settling": (
        lambda: Settling(ANY, max_attempt=3),  # type: ignore[call-arg]
        "Settling.__init__",
    ),
}
"""A type checker finds each of them too: otherwise its comment would be reported as unused."""


@pytest.mark.parametrize(("make", "called"), MISSPELT.values(), ids=MISSPELT)
def test_a_misspelt_option_names_what_the_user_has_called(make: Callable[[], object], called: str) -> None:
    """Python's own error would name ``Settling``, to which a consumer hands its options on."""
    with pytest.raises(TypeError, match=rf"^{re.escape(called)}\(\) got an unexpected keyword argument 'max_attempt'"):
        make()


def test_a_type_checker_finds_an_option_of_a_wrong_type() -> None:
    """And the consumer refuses it when it is made. A dictionary of sources is only for Kafka."""
    dispatcher: Any = Mock(Dispatcher, _observing=None, _is_building=False)
    with pytest.raises(TypeError, match=r"^max_delay is a number of seconds"):
        of_redis.Consumer(redis.Redis(), "s", "g", dispatcher, max_delay="5")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^source is text"):
        of_redis.Consumer(redis.Redis(), "s", "g", dispatcher, source={"s": "s"})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^retry_later is a tuple"):
        of_kafka.Consumer(CONFIG, ["t"], dispatcher, retry_later=ValueError)  # type: ignore[arg-type]
