"""Why there is no subscriber for FastStream with Kafka: what it does to offsets, which a subscriber could not mend.

Once one of these tests fails, FastStream has changed, and docs/consumers/faststream.md and ADR 37 are to be read again.
The cluster is librdkafka's mock: see `kafka_cluster.py` for what it is not.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from faststream import AckPolicy, BaseMiddleware, FastStream
from faststream.confluent import KafkaBroker, KafkaMessage

from kafka_cluster import KafkaCluster, kafka_cluster

TOPIC, GROUP = "flights", "airlines"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KafkaCluster]:
    """A cluster with a topic of one partition, in which two messages are."""
    with kafka_cluster(tmp_path) as opened:
        opened.make_topic(TOPIC, 1)
        producer = Producer({"bootstrap.servers": opened.brokers, "log_level": 0})
        for body in (b"first", b"second"):
            producer.produce(TOPIC, body)
        assert producer.flush(30) == 0
        yield opened


def _position(cluster: KafkaCluster) -> int:
    """Return the position that the group has committed; it is negative if it has none."""
    client = Consumer({"bootstrap.servers": cluster.brokers, "group.id": GROUP, "log_level": 0})
    try:
        (place,) = client.committed([TopicPartition(TOPIC, 0)], timeout=30)
        return place.offset
    finally:
        client.close()


class First(BaseMiddleware):
    """A middleware of the application that fails at the first message."""

    async def on_receive(self) -> None:
        """Fail before any handler is called."""
        if self.msg is not None and self.msg.value() == b"first":
            raise ConnectionError("the application's own")


def _consume(
    cluster: KafkaCluster, wanted: Callable[[list[bytes]], bool], first: str, *middlewares: Any
) -> list[bytes]:
    """Run a FastStream application until its handler has what is wanted; return what it got.

    It acknowledges the second message, and with the first it does what ``first`` says: ``nack``, or nothing.
    """
    seen: list[bytes] = []
    done = asyncio.Event()

    async def handler(message: KafkaMessage) -> None:
        seen.append(message.body)
        if message.body == b"second":
            await message.ack()
        elif first == "nack":
            await message.nack()
        if wanted(seen):
            done.set()

    async def run() -> None:
        broker = KafkaBroker(cluster.brokers, logger=None, middlewares=middlewares, allow_auto_create_topics=False)
        broker.subscriber(TOPIC, group_id=GROUP, ack_policy=AckPolicy.MANUAL, auto_offset_reset="earliest")(handler)
        application = FastStream(broker, logger=None)
        running = asyncio.create_task(application.run())
        try:
            await asyncio.wait_for(done.wait(), 30)
        finally:
            application.exit()
            await running

    asyncio.run(run())
    return seen


def test_a_message_that_is_left_for_later_is_committed_with_the_next(cluster: KafkaCluster) -> None:
    """FastStream commits what was read, and not the message that is acknowledged."""
    assert _consume(cluster, lambda seen: b"second" in seen, "") == [b"first", b"second"]
    assert _position(cluster) == 2


def test_a_message_that_no_handler_got_is_committed_with_the_next(cluster: KafkaCluster) -> None:
    """Kafka never delivers it again: it is lost, where RabbitMQ, NATS and Redis keep it."""
    assert _consume(cluster, lambda seen: b"second" in seen, "", First) == [b"second"]
    assert _position(cluster) == 2


def test_a_message_that_is_given_back_holds_up_those_behind_it(cluster: KafkaCluster) -> None:
    """FastStream seeks back to it at once: what it waits for may lie behind it, and never comes."""
    assert set(_consume(cluster, lambda seen: len(seen) >= 5, "nack")) == {b"first"}
    assert _position(cluster) < 0
