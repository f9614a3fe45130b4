"""A topic for one test, and a look at it and at the topics beside it by other clients."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from confluent_kafka import Consumer, Message, Producer, TopicPartition

from consumer_rig import Sent
from projector_dedup.brokers import kafka as plug
from projector_dedup.brokers.kafka import aside

TIMEOUT = 30.0
PARTITIONS = 4

Headers = Mapping[str, str | bytes | None]


class Cluster(Protocol):
    """A server of Kafka's protocol: librdkafka's mock, or Tansu."""

    brokers: str

    def make_topic(self, name: str, partitions: int) -> None:
        """Create a topic."""


class Kafka:
    """One topic with a name of its own, and a group that has begun to consume it: its own, or that ``beside`` it."""

    def __init__(self, cluster: Cluster, beside: Kafka | None = None) -> None:
        self.topic = f"flights-{secrets.token_hex(3)}"
        self.config: dict[str, Any] = {
            "bootstrap.servers": cluster.brokers,
            "group.id": beside.config["group.id"] if beside else f"airlines-{secrets.token_hex(3)}",
            "session.timeout.ms": 2000,  # after which the server notices that a consumer was killed
            "heartbeat.interval.ms": 300,
            "auto.commit.interval.ms": 500,
            "fetch.wait.max.ms": 20,  # else each look at a topic takes half a second
            "log_level": 0,  # librdkafka logs on stderr, to the end of the run, that the cluster of a past test is gone
        }
        self.retry, self.dead_letters = aside(self.topic, self.config, "retry"), aside(self.topic, self.config, "dead")
        for topic in (self.topic, self.retry, self.dead_letters):
            cluster.make_topic(topic, PARTITIONS)
        alone = {"batch.num.messages": 1}  # of several, Tansu tells only the first when asked where a topic ends
        self._producer = Producer({"bootstrap.servers": cluster.brokers, "log_level": 0, **alone})
        self._replay = {**self.config, "group.id": f"{self.config['group.id']}.replay"}
        self._reader = Consumer({**self._replay, "enable.auto.commit": False})
        self._group = Consumer(self.config)
        plug.begin(self.config, [self.topic])

    def publish(self, messages: Sequence[Sent]) -> None:
        """Publish, and return when the cluster has it all."""
        for each in messages:
            beside = {"message_id": each.id, "type": each.type}
            headers: dict[str, Any] = {name: value for name, value in beside.items() if value is not None}
            self._producer.produce(self.topic, each.body, headers=headers)
        assert self._producer.flush(TIMEOUT) == 0

    def send(self, body: bytes | None, headers: Headers | None = None, *, topic: str = "", partition: int = 0) -> None:
        """Publish one message into a partition, with any headers."""
        self._producer.produce(topic or self.topic, body, b"key", partition, headers=[*(headers or {}).items()])
        assert self._producer.flush(TIMEOUT) == 0

    @property
    def settings(self) -> dict[str, str]:
        """The environment of a process that consumes the topic."""
        return {"KAFKA": json.dumps(self.config), "TOPIC": self.topic}

    def dead(self) -> list[Sent]:
        """The dead letters that were not replayed."""
        return [_sent(each) for each in self.messages(self.dead_letters)]

    def letters(self) -> dict[bytes, str]:
        """The body of each of them, and why it is one."""
        found = self.messages(self.dead_letters)
        return {each.value() or b"": headers_of(each)["projector-dedup-reason"].decode() for each in found}

    def messages(self, topic: str) -> list[Message]:
        """The messages of a topic; of the dead letters those that were not replayed."""
        return [*self._messages(topic)]

    def _messages(self, topic: str) -> Iterator[Message]:
        for place in self._positions(self._reader, topic):
            low, high = self._reader.get_watermark_offsets(place, timeout=TIMEOUT)
            place.offset = max(place.offset, low)
            if place.offset < high:
                self._reader.assign([place])
            for _ in range(place.offset, high):
                message = self._reader.poll(TIMEOUT)
                assert message is not None
                assert message.error() is None
                yield message

    def committed(self, topic: str) -> list[int]:
        """The position of the group in each partition of a topic."""
        return [place.offset for place in self._positions(self._group, topic)]

    def skip(self, topic: str) -> None:
        """Move the group's position behind the next message of a topic, as ``kafka-consumer-groups`` does.

        By a member of the group: the mock takes a position of an existing group from nobody else.
        """
        member = Consumer(self.config)
        member.subscribe([topic])
        message = member.poll(TIMEOUT)
        assert message is not None
        member.commit(message=message, asynchronous=False)
        member.close()

    def replay(self) -> int:
        """Publish the dead letters again, by the library."""
        return plug.replay(self.config, self.topic)

    def left(self) -> int:
        """How many messages lie behind the positions of the group."""
        return sum(
            self._group.get_watermark_offsets(place, timeout=TIMEOUT)[1] - max(place.offset, 0)
            for topic in (self.topic, self.retry)
            for place in self._positions(self._group, topic)
        )

    def close(self) -> None:
        """Close our own clients."""
        self._reader.close()
        self._group.close()

    @staticmethod
    def _positions(client: Consumer, topic: str) -> list[TopicPartition]:
        return client.committed([TopicPartition(topic, each) for each in range(PARTITIONS)], timeout=TIMEOUT)


def headers_of(message: Message) -> dict[str, Any]:
    """The headers of a message."""
    headers = message.headers()
    return dict(headers) if headers else {}


def _sent(message: Message) -> Sent:
    message_id = headers_of(message).get("message_id")
    return Sent(
        message_id.decode(errors="backslashreplace") if isinstance(message_id, bytes) else message_id,
        message.value() or b"",
    )
