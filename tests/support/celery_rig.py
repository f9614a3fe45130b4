"""A queue of Celery's on RabbitMQ for one test, and a look at it and at its dead letters from another connection."""

import contextlib
import json
import secrets
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import celery
import kombu

from brokers import broker
from consumer_rig import Sent
from projector_dedup.brokers import celery as plug
from reached import reached

TASK = "flights.count"


class CeleryQueue:
    """One queue with a name of its own, and an application that publishes into it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.queue = f"projector-dedup-test-{secrets.token_hex(6)}"
        self.app = celery.Celery("publisher", broker=url, set_as_current=False)
        self.app.conf.update(broker_transport_options={"confirm_publish": True}, task_default_queue=self.queue)
        self._connection = self.app.connection_for_write()
        self._declare(self.queue)

    def publish(self, messages: Sequence[Sent]) -> None:
        """Publish, and return when RabbitMQ has it all: an event as a task's, anything else as its raw body."""
        for each in messages:
            try:
                event = json.loads(each.body)
            except ValueError:
                self.publish_raw(each.body, sent=each.id)
            else:
                self.app.send_task(TASK, [event], {"message_id": each.id, "type": each.type}, queue=self.queue)

    def publish_raw(self, body: bytes, **headers: Any) -> None:
        """Publish a message that says that it is a task, with any body."""
        task = {"lang": "py", "task": TASK, "id": str(uuid.uuid4()), "retries": 0, **headers}
        properties = {"content_type": "application/json", "content_encoding": "utf-8", "delivery_mode": 2}
        with self.app.producer_pool.acquire(block=True) as producer:
            producer.publish(body, exchange="", routing_key=self.queue, headers=task, **properties)

    def dead_messages(self) -> list[Any]:
        """The dead letters that are there, which stay there."""
        with contextlib.closing(self._connection.channel()) as channel:
            queue = self._declare(f"{self.queue}.dead")(channel)
            found = []
            while (message := queue.get()) is not None:
                found.append(message)
            return found

    def dead(self) -> list[Sent]:
        """The dead letters, as they were sent."""
        return [_sent(each) for each in self.dead_messages()]

    def letters(self) -> dict[bytes, str]:
        """The body of each dead letter, and why it is one."""
        return {_sent(each).body: each.headers[plug.REASON] for each in self.dead_messages()}

    def new_app(self) -> celery.Celery:
        """An application for a worker in this process."""
        app = celery.Celery("worker", broker=self.url, set_as_current=False)
        app.conf.update(
            broker_connection_retry_on_startup=True,  # without it Celery 5.4 warns, which is an error here
            broker_transport_options={"confirm_publish": True},
            task_default_queue=self.queue,
            worker_hijack_root_logger=False,
        )
        return app

    def replay(self) -> int:
        """Publish the dead letters again, by the library."""
        return plug.replay(self.app, self.queue)

    def left(self) -> int:
        """How many messages wait to be delivered."""
        with contextlib.closing(self._connection.channel()) as channel:
            return int(channel.queue_declare(self.queue, passive=True).message_count)

    def close(self) -> None:
        """Delete the queues."""
        with contextlib.closing(self._connection.channel()) as channel:
            for queue in (self.queue, f"{self.queue}.dead"):
                channel.queue_delete(queue)
        self._connection.release()
        self.app.close()

    def _declare(self, name: str) -> kombu.Queue:
        queue = kombu.Queue(name, routing_key=name, durable=True)
        with contextlib.closing(self._connection.channel()) as channel:
            queue(channel).queue_declare()
        return queue


def _sent(message: Any) -> Sent:
    try:
        (event,), kwargs, _ = message.payload
    except kombu.exceptions.DecodeError:
        raw = message.body.encode() if isinstance(message.body, str) else bytes(message.body)
        return Sent(message.headers["sent"], raw)
    return Sent(kwargs["message_id"], json.dumps(event).encode())


@contextlib.contextmanager
def celery_queue() -> Iterator[CeleryQueue]:
    """A queue of its own on the RabbitMQ of this run; the test ends here if there is none."""
    opened = CeleryQueue(broker("rabbitmq"))
    version = opened._connection.connection.server_properties["version"]
    reached.saw("rabbitmq", version.decode() if isinstance(version, bytes) else str(version))
    try:
        yield opened
    finally:
        opened.close()
