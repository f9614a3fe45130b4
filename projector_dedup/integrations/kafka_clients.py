"""How Kafka's clients are configured, so that an offset is committed after its message was settled, and never lost."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer

from ..errors import RefusedError
from .kafka_messages import Headers

CONSUMER = {
    "enable.auto.commit": True,  # of the offsets that were stored; also when partitions are handed over
    "enable.auto.offset.store": False,  # the loop stores an offset after its message was settled
    "auto.offset.reset": "error",  # a group that has lost its position says so, instead of skipping or repeating
}
PRODUCER = {
    "enable.idempotence": True,  # and with it acks=all: a copy that is confirmed survives the loss of a broker
    "linger.ms": 0,  # somebody waits for each copy
    "delivery.timeout.ms": 30_000,  # and must poll again before the group gives its partitions away
    "message.max.bytes": 1_000_000_000,  # the brokers' own limit decides
    "compression.type": "lz4",  # a message that came compressed may be too big without
}
OF_CONSUMERS = (
    *("group.", "session.", "heartbeat.", "max.poll.", "auto.", "enable.auto.", "enable.partition.", "fetch."),
    *("queued.", "isolation.", "partition.assignment.", "check.crcs", "on_commit", "allow.auto.create.topics"),
)
"""Beginnings of the settings that a producer does not know; librdkafka warns of each that it is given."""

TIMEOUT = 30.0
"""Seconds after which a question to the cluster is given up."""


def new_consumer(config: Mapping[str, Any]) -> Consumer:
    """Return a consumer with the user's settings and ours. Raises ``ValueError`` for one that contradicts ours."""
    for name, value in CONSUMER.items():
        if name in config and str(config[name]).lower() != str(value).lower():
            raise ValueError(f"{name} is {str(value).lower()} here: else messages could be lost; leave it out")
    if not config.get("group.id"):
        raise ValueError('the configuration needs a "group.id": under it the group keeps its position')
    return Consumer({**config, **CONSUMER})


def new_producer(config: Mapping[str, Any]) -> Producer:
    """Return a producer for the same cluster, whose confirmed messages are as durable as its topics."""
    shared = {name: value for name, value in config.items() if not name.startswith(OF_CONSUMERS)}
    return Producer({**shared, **PRODUCER})


def aside(topic: str, config: Mapping[str, Any], kind: Literal["retry", "dead"]) -> str:
    """Return the topic in which a group puts messages of ``topic`` aside. Raises ``ValueError`` if it cannot be one."""
    name = f"{topic}.{config.get('group.id')}.{kind}"
    if len(name) > 249 or re.search(r"[^a-zA-Z0-9._-]", name):
        raise ValueError(f"{name!r} cannot be the name of a topic: choose another group.id")
    return name


def partitions_of(client: Consumer | Producer, topic: str) -> list[int]:
    """Return the partitions of a topic. Raises ``RefusedError`` if there is no such topic.

    A cluster that creates topics by itself creates it, if a producer asks.
    """
    found = client.list_topics(topic, timeout=TIMEOUT).topics[topic]
    if found.error is not None and found.error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
        raise KafkaException(found.error)
    if not found.partitions:
        raise RefusedError(f"there is no topic {topic}, which this group needs: create it")
    return sorted(found.partitions)


class Copies:
    """Puts copies of messages into other topics, one at a time, and returns when the cluster has confirmed them."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    def put(self, message: Message, topic: str, headers: Headers, *, value: bool = True) -> None:
        """Return when all replicas in sync have the copy. Raises ``KafkaException`` or ``TimeoutError`` otherwise.

        A copy without its ``value`` is without its key, too.
        """
        outcome: list[KafkaError | None] = []
        self._producer.produce(
            topic,
            message.value() if value else None,
            message.key() if value else None,
            headers=headers,
            on_delivery=lambda error, _message: outcome.append(error),
        )
        self._producer.flush(2 * TIMEOUT)  # the producer's own limit comes before
        if not outcome:
            raise TimeoutError(f"nobody has confirmed a copy in {topic}; the original is delivered again")
        if (error := outcome[0]) is not None:
            raise KafkaException(error)
