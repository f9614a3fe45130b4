"""A queue of RabbitMQ for one test, and a look at it and at the queues beside it from another connection."""

import contextlib
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from amqp_fields import Raw
from brokers import broker
from consumer_rig import Sent
from projector_dedup.brokers import pika as plug
from projector_dedup.brokers.rabbitmq import REJECTED_FOR, WITHOUT_ID, dead_letters, queues_beside
from reached import reached


class RabbitMQ:
    """One work queue with a name of its own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.parameters = pika.URLParameters(url)
        self.queue = f"projector-dedup-test-{secrets.token_hex(6)}"
        self._connection = pika.BlockingConnection(self.parameters)
        self.channel: BlockingChannel = self._connection.channel()
        self.channel.queue_declare(self.queue, durable=True)
        self.channel.confirm_delivery()

    def send(self, body: bytes, **properties: Any) -> None:
        """Publish one message with any properties."""
        self.channel.basic_publish("", self.queue, body, pika.BasicProperties(**properties))

    def send_octets(self, body: bytes, queue: str | None = None, /, **properties: bytes) -> None:
        """Publish one message with properties in octets."""
        self.channel.basic_publish("", queue or self.queue, body, Raw(**properties))

    def publish(self, messages: Sequence[Sent]) -> None:
        """Publish, and return when RabbitMQ has it all."""
        for each in messages:
            self.send(each.body, message_id=each.id, type=each.type, delivery_mode=2)

    def drop_first(self, queue: str | None = None) -> None:
        """Drop the first message, which pika cannot decode, as a person does by ``rabbitmqadmin get``."""
        with pytest.raises(pika.exceptions.StreamLostError), pika.BlockingConnection(self.parameters) as connection:
            connection.channel().basic_get(queue or self.queue, auto_ack=True)

    def count(self, queue: str | None = None) -> int:
        """How many messages a queue has that are not in flight; 0 if there is no such queue."""
        channel = self._connection.channel()
        try:
            found = int(channel.queue_declare(queue or self.queue, passive=True).method.message_count)
        except pika.exceptions.ChannelClosedByBroker:
            return 0
        channel.close()
        return found

    def dead_letters(self) -> list[tuple[pika.BasicProperties, bytes]]:
        """The dead letters that are there, which stay there."""
        found = []
        channel = self._connection.channel()
        for _ in range(self.count(dead_letters(self.queue))):
            _, properties, body = channel.basic_get(dead_letters(self.queue))
            if properties is not None:
                found.append((properties, body))
        channel.close()  # what was not acknowledged goes back
        return found

    def dead(self) -> list[Sent]:
        """The dead letters, as they were sent."""
        return [
            Sent(None if WITHOUT_ID in properties.headers else properties.message_id, body)
            for properties, body in self.dead_letters()
        ]

    def letters(self) -> dict[bytes, str]:
        """The body of each dead letter, and why it is one; nothing where its headers leave no room for that."""
        return {body: (properties.headers or {}).get(REJECTED_FOR, "") for properties, body in self.dead_letters()}

    def replay(self) -> int:
        """Publish the dead letters again, by the library."""
        return plug.replay(self.parameters, self.queue)

    def left(self) -> int:
        """How many messages wait to be delivered."""
        return sum(
            self.count(queue) for queue in (self.queue, *queues_beside(self.queue)) if queue != dead_letters(self.queue)
        )

    def close(self) -> None:
        """Delete the queues."""
        for queue in (self.queue, *queues_beside(self.queue)):
            self.channel.queue_delete(queue)
        self._connection.close()


@contextlib.contextmanager
def rabbitmq() -> Iterator[RabbitMQ]:
    """A queue of its own on the RabbitMQ of this run; the test ends here if there is none."""
    opened = RabbitMQ(broker("rabbitmq"))
    server: Any = opened.channel.connection
    reached.saw("rabbitmq", _version(server))
    try:
        yield opened
    finally:
        opened.close()


def _version(connection: Any) -> str:
    return str(connection._impl.server_properties["version"])
