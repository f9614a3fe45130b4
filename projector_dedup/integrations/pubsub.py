"""Consume a subscription of Google Cloud Pub/Sub: acknowledge after the commit, delay, reject, replay.

Needs the extra ``pubsub``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from .extras import needs

with needs("pubsub"):
    from google.api_core.exceptions import DeadlineExceeded
    from google.cloud.pubsub_v1 import PublisherClient, SubscriberClient

from ..dispatcher import Dispatcher
from ..errors import RefusedError
from .incoming import Convert, Incoming, json_event
from .ordered import deliver_in_order
from .settling import Settled, Settling, expect

__all__ = ["Consumer", "replay"]

_POLL = 5.0  # seconds that a request waits for messages, and in which `stop` is noticed
_MANY = 10  # messages of one request
_REJECTED_FOR = "x-rejected-for"
_BY_PUBSUB = "CloudPubSubDeadLetter"  # begins the attributes that Pub/Sub adds to the dead letters that it moves itself
_SUBSCRIBER = "subscriber is a google.cloud.pubsub_v1.SubscriberClient"
_PUBLISHER = "publisher is a google.cloud.pubsub_v1.PublisherClient"


class Consumer:
    """Consumes a subscription of Google Cloud Pub/Sub: up to ten messages of one request, then the next ten.

    ``subscription`` is its full name, ``projects/PROJECT/subscriptions/NAME``. A message is acknowledged after the
    commit of its read-model write. Pub/Sub delivers a message again after its delay: the consumer changes the
    acknowledgement deadline. A rejected message is published to the dead-letter topic of the subscription, with the
    error in the attribute ``x-rejected-for``, and is then acknowledged. Start as many processes as you need.

    Messages are delivered in one transaction, and settled one by one. Those of a subscription with message ordering
    are delivered one by one: while a message waits for its retry, those behind it with its ordering key wait too.

    ``convert`` makes the event of the data and of the attributes ``message_id``, ``type``, ``occurred_at`` and
    ``content_type``. A message is rejected after ``max_attempts`` deliveries; None sets no limit but that of the
    subscription's dead-letter policy. ``max_delay`` bounds the seconds of a delay.

    Raises ``HandlerDefinitionError`` for a dispatcher that is not a ``Dispatcher``, and ``TypeError`` for a client that
    is none.
    """

    def __init__(
        self,
        subscriber: SubscriberClient,
        publisher: PublisherClient,
        subscription: str,
        dispatcher: Dispatcher,
        convert: Convert = json_event,
        *,
        max_attempts: int | None = None,
        max_delay: float = 300.0,
    ) -> None:
        expect(SubscriberClient, subscriber, _SUBSCRIBER)
        expect(PublisherClient, publisher, _PUBLISHER)
        self._subscriber: Any = subscriber
        self._publisher: Any = publisher
        self._name = subscription
        self._settling = Settling(dispatcher, convert, max_attempts=max_attempts, max_delay=max_delay, broker="pubsub")
        self._stopping = False

    def run(self) -> None:
        """Consume until ``stop`` is called, or until Pub/Sub fails, which is raised.

        Raises ``RefusedError`` if the subscription has no dead-letter policy: a rejected message would have no place to
        go, and Pub/Sub would not count deliveries.
        """
        found = self._subscriber.get_subscription(request={"subscription": self._name})
        if not (dead := found.dead_letter_policy.dead_letter_topic):
            raise RefusedError(
                f"the subscription {self._name} has no dead-letter policy, so a rejected message has no place to go: "
                "give it one that names a topic"
            )
        while not self._stopping:
            received = _pull(self._subscriber, self._name)
            for each, settled in zip(received, self._deliver(received, found.enable_message_ordering), strict=True):
                self._settle(each, settled, dead)

    def stop(self, *_: object) -> None:
        """Let ``run`` return when the messages at hand are settled. Another thread or a signal handler may call it."""
        self._stopping = True

    def _deliver(self, received: Sequence[Any], ordered: bool) -> Sequence[Settled | None]:
        incoming = [_incoming(each, self._name) for each in received]
        if ordered:
            return deliver_in_order(self._settling, incoming, [each.message.ordering_key for each in received])
        return self._settling.deliver_batch(incoming)

    def _settle(self, received: Any, settled: Settled | None, dead: str) -> None:
        """Acknowledge a message, or publish it as a dead letter and acknowledge it, or have it delivered again."""
        if settled is None or not (settled.acknowledge or settled.reject):
            delay = 0 if settled is None else math.ceil(settled.delay)
            _delay(self._subscriber, self._name, received, delay)
            return
        if settled.reject:
            _publish(self._publisher, dead, received.message, {_REJECTED_FOR: settled.reason})
            self._settling.kept(settled)
        self._subscriber.acknowledge(request={"subscription": self._name, "ack_ids": [received.ack_id]})


def replay(subscriber: SubscriberClient, publisher: PublisherClient, subscription: str, dead_letters: str) -> int:
    """Publish the dead letters of a subscription to its topic again, those that are there now; return their number.

    ``dead_letters`` is the full name of a subscription of the dead-letter topic. Every subscription of the topic gets
    the messages; those that had applied them find duplicates. Call it after you have fixed the cause, and within the
    retention of the markers. It returns when no dead letter comes for five seconds.
    """
    expect(SubscriberClient, subscriber, _SUBSCRIBER)
    expect(PublisherClient, publisher, _PUBLISHER)
    client: Any = subscriber
    topic = client.get_subscription(request={"subscription": subscription}).topic
    began, count, newer = datetime.now(UTC), 0, list[Any]()
    while letters := _pull(client, dead_letters):
        for letter in letters:
            if letter.message.publish_time > began:  # rejected again meanwhile: it would never end
                newer.append(letter)
                continue
            _publish(publisher, topic, letter.message, {})
            client.acknowledge(request={"subscription": dead_letters, "ack_ids": [letter.ack_id]})
            count += 1
    for letter in newer:
        _delay(client, dead_letters, letter, 0)
    return count


def _pull(client: Any, subscription: str) -> Sequence[Any]:
    """Return up to ten messages as soon as there is one; after some seconds, none."""
    try:
        answer = client.pull(request={"subscription": subscription, "max_messages": _MANY}, timeout=_POLL)
    except DeadlineExceeded:
        return []
    found: Sequence[Any] = answer.received_messages
    return found


def _delay(client: Any, subscription: str, received: Any, seconds: int) -> None:
    client.modify_ack_deadline(
        request={"subscription": subscription, "ack_ids": [received.ack_id], "ack_deadline_seconds": seconds}
    )


def _publish(publisher: Any, topic: str, message: Any, marks: Mapping[str, str]) -> None:
    """Publish a copy of a message, and return when Pub/Sub has it."""
    attributes = {
        name: value
        for name, value in message.attributes.items()
        if name != _REJECTED_FOR and not name.startswith(_BY_PUBSUB)
    }
    publisher.publish(topic, message.data, **{**attributes, **marks}).result()


def _incoming(received: Any, subscription: str) -> Incoming:
    """Return a message for a converter: the data, and the attributes as its headers."""
    headers = dict(received.message.attributes)
    return Incoming(
        body=received.message.data,
        message_id=headers.get("message_id"),
        type=headers.get("type"),
        occurred_at=headers.get("occurred_at"),
        content_type=headers.get("content_type"),
        headers=headers,
        attempt=max(received.delivery_attempt, 1),
        origin=f"subscription {subscription.rpartition('/')[2]}",
        body_name="data of the message",
        id_name="attribute message_id",
    )
