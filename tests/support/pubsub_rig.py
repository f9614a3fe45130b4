"""A topic of Google Cloud Pub/Sub for one test, with a subscription and dead letters, in the emulator of Google's."""

import atexit
import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import grpc
from google.api_core.exceptions import DeadlineExceeded, NotFound
from google.cloud.pubsub_v1 import PublisherClient, SubscriberClient
from google.cloud.pubsub_v1.types import PublisherOptions, PubsubMessage
from google.pubsub_v1 import PublisherClient as Service
from google.pubsub_v1.services.publisher.transports import PublisherGrpcTransport
from google.pubsub_v1.services.subscriber.transports import SubscriberGrpcTransport

from consumer_rig import Sent
from own_server import OwnServer
from payments import payment
from projector_dedup.brokers.pubsub import replay

DEADLINE = 10  # seconds after which Pub/Sub delivers a message again whose consumer died; the least that it takes
PROJECT = "test"


@cache
def server() -> str:
    """Start the emulator of this process, and return its address; the test ends here if it is not installed."""
    sdk = Path(shutil.which("gcloud") or "gcloud").resolve().parents[1]
    program = sdk / "platform" / "pubsub-emulator" / "bin" / "cloud-pubsub-emulator"
    emulator = OwnServer("pubsub", str(program), Path(tempfile.mkdtemp()), "--host=127.0.0.1", "--port={port}")
    emulator.start()
    atexit.register(emulator.kill)
    return f"127.0.0.1:{emulator.port}"


class _Limits(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]  # grpc has no types
    """Google's limits for attributes, which the emulator does not have: it is asked what it refuses in the same way."""

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        """Publish an empty message in place of one that Google refuses."""
        if details.method.endswith("/Publish"):
            for message in request.messages:
                sizes = [(len(name.encode()), len(value.encode())) for name, value in message.attributes.items()]
                if (
                    len(sizes) > 100
                    or any(not 0 < name <= 256 or value > 1024 for name, value in sizes)
                    or any(name.startswith("goog") for name in message.attributes)
                ):
                    request = type(request)(topic=request.topic, messages=[PubsubMessage()])
        return continuation(details, request)


class PubSub:
    """One topic with a name of its own, a subscription of it, and its dead letters."""

    def __init__(self, *, ordered: bool = False, attempts: int = 100) -> None:
        self.address = server()
        self._channel = grpc.insecure_channel(self.address)
        limited = grpc.intercept_channel(self._channel, _Limits())
        self.publisher: Any = PublisherClient(
            transport=PublisherGrpcTransport(channel=limited),
            publisher_options=PublisherOptions(enable_message_ordering=ordered),
        )
        self._service = Service(transport=PublisherGrpcTransport(channel=self._channel))
        self.subscriber: Any = SubscriberClient(transport=SubscriberGrpcTransport(channel=self._channel))
        name = f"payments-{secrets.token_hex(6)}"
        self.topic, self.dead_topic = (f"projects/{PROJECT}/topics/{each}" for each in (name, f"{name}-dead"))
        self.subscription, self.dead_letters = (
            f"projects/{PROJECT}/subscriptions/{each}" for each in (name, f"{name}-dead")
        )
        for topic in (self.topic, self.dead_topic):
            self.publisher.create_topic(name=topic)
        self.subscriber.create_subscription(request={"name": self.dead_letters, "topic": self.dead_topic})
        policy = {"dead_letter_topic": self.dead_topic, "max_delivery_attempts": attempts}
        self.subscriber.create_subscription(
            request={
                "name": self.subscription,
                "topic": self.topic,
                "ack_deadline_seconds": DEADLINE,
                "dead_letter_policy": policy,
                "enable_message_ordering": ordered,
            }
        )

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process that consumes the subscription."""
        return {"PUBSUB_EMULATOR_HOST": self.address, "SUBSCRIPTION": self.subscription, "TOPIC": self.topic}

    def send(self, body: bytes, ordering_key: str = "", **attributes: str) -> None:
        """Publish one message with any attributes."""
        self.send_named(body, attributes, ordering_key)

    def send_named(self, body: bytes, attributes: Mapping[str, str], ordering_key: str = "") -> None:
        """Publish one message, with attributes of any name: also those that only Pub/Sub itself may set."""
        message = {"data": body, "attributes": attributes, "ordering_key": ordering_key}
        self._service.publish(request={"topic": self.topic, "messages": [message]})

    def publish(self, messages: Sequence[Sent]) -> None:
        """Publish, and return when Pub/Sub has it all."""
        for each in messages:
            beside = {"message_id": each.id, "type": each.type}
            self.send(each.body, **{name: value for name, value in beside.items() if value})

    def send_strange(self) -> int:
        """Publish attributes that no client should; return the number of messages."""
        strange: list[dict[str, str]] = [
            {},
            {"x-rejected-for": "?", "trace": "\N{SNOWMAN}"},
            {"type": "t" * 600},
            {"message_id": ""},
            {"message_id": "i" * 600},
            {"occurred_at": "yesterday"},
            {f"attribute-{number}": "x" for number in range(100)},
            dict.fromkeys(("self", "topic", "data", "ordering_key", "retry", "timeout"), "x"),
            {"googclient_schemaencoding": "JSON"},
        ]
        sent = 0
        for attributes in strange:
            for account in "abc":
                sent += 1
                self.send_named(payment(sent, account), attributes)
        return sent

    def _messages(self, subscription: str) -> list[Any]:
        """The messages that nobody has at the moment; they stay there."""
        found: list[Any] = []
        while True:
            try:
                asked = {"subscription": subscription, "max_messages": 100}
                received = self.subscriber.pull(request=asked, timeout=0.5).received_messages
            except DeadlineExceeded:
                received = []
            if not received:
                break
            found += received
        if found:
            ids = [each.ack_id for each in found]
            self.subscriber.modify_ack_deadline(
                request={"subscription": subscription, "ack_ids": ids, "ack_deadline_seconds": 0}
            )
        return [each.message for each in found]

    def dead_messages(self) -> list[Any]:
        """The dead letters that are there, which stay there."""
        return self._messages(self.dead_letters)

    def dead(self) -> list[Sent]:
        """The dead letters, as they were sent."""
        return [Sent(each.attributes.get("message_id"), each.data) for each in self.dead_messages()]

    def letters(self) -> dict[bytes, str]:
        """The body of each dead letter, and why it is one."""
        return {each.data: each.attributes.get("x-rejected-for", "") for each in self.dead_messages()}

    def replay(self) -> int:
        """Publish the dead letters again, by the library."""
        return replay(self.subscriber, self.publisher, self.subscription, self.dead_letters)

    def left(self) -> int:
        """How many messages wait to be delivered, without those that a consumer has, or that wait for a delay."""
        return len(self._messages(self.subscription))

    def make_dead(self) -> None:
        """Make the dead-letter topic again, after somebody has deleted it."""
        self.subscriber.delete_subscription(request={"subscription": self.dead_letters})
        self.publisher.create_topic(name=self.dead_topic)
        self.subscriber.create_subscription(request={"name": self.dead_letters, "topic": self.dead_topic})

    def close(self) -> None:
        """Delete the topics and the subscriptions."""
        for subscription in (self.subscription, self.dead_letters):
            with contextlib.suppress(NotFound):
                self.subscriber.delete_subscription(request={"subscription": subscription})
        for topic in (self.topic, self.dead_topic):
            with contextlib.suppress(NotFound):
                self.publisher.delete_topic(request={"topic": topic})
        self.publisher.stop()
        self._channel.close()


@contextlib.contextmanager
def pubsub(**options: Any) -> Iterator[PubSub]:
    """A topic of its own."""
    with contextlib.closing(PubSub(**options)) as opened:
        yield opened
