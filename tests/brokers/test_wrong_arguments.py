"""A consumer that is made with the wrong thing says what to give, and says it when it is made."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import redis.asyncio

from projector_dedup.brokers import kafka as of_kafka
from projector_dedup.brokers import nats as of_nats
from projector_dedup.brokers import pika as of_pika
from projector_dedup.brokers import pubsub as of_pubsub
from projector_dedup.brokers import redis as of_redis
from projector_dedup.brokers import sqs as of_sqs

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
