"""Consume a subscription of Google Cloud Pub/Sub: acknowledge after the commit, retry, reject, replay the dead letters.

Needs the extra ``pubsub``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Unpack

from ..extras import needs

with needs("pubsub"):
    from google.api_core.exceptions import DeadlineExceeded, InvalidArgument, ServiceUnavailable
    from google.cloud.pubsub_v1 import PublisherClient, SubscriberClient
    from google.pubsub_v1 import PublisherClient as _Service

from ..dispatcher import Dispatcher
from ..errors import RefusedError
from .dead_letters import Decide, Judge, Sifted, replay_each, sift_older
from .incoming import Convert, Incoming, json_event, with_headers
from .running import CONNECT_TIMEOUT, Runs, cannot_reach, draining
from .settling import Settled, SettlingOptions, check_batch, deliver_in_groups, expect, new_settling

__all__ = ["Consumer", "replay"]

_POLL = 5.0  # seconds that a request waits for messages; `stop` takes as long if no message comes
_MANY = 10  # messages of one request, if the user does not say
_MOST = 1_000  # messages of one request: the limit of Pub/Sub
_REJECTED_FOR = "x-rejected-for"
_BY_PUBSUB = ("CloudPubSubDeadLetter", "goog")
"""Prefixes of the attributes that Pub/Sub adds: to a dead letter that it moves itself, and to any message."""
_SUBSCRIBER = "subscriber is a google.cloud.pubsub_v1.SubscriberClient"
_PUBLISHER = "publisher is a google.cloud.pubsub_v1.PublisherClient"


class Consumer(Runs):
    """Consumes a subscription of Google Cloud Pub/Sub, in batches.

    ``subscription`` is its full name, ``projects/PROJECT/subscriptions/NAME``. The consumer acknowledges a message
    after the commit. To retry a message after a delay, it changes the acknowledgement deadline. It publishes a rejected
    message to the dead-letter topic of the subscription, with the error in the attribute ``x-rejected-for``, and then
    acknowledges it. Start as many processes as you need.

    The consumer delivers a batch in one transaction, and settles each message separately. If the subscription has
    message ordering, then while a message waits for its retry, the later messages with its ordering key wait too.

    ``convert`` builds the event from the data and the attributes ``message_id``, ``type``, ``occurred_at`` and
    ``content_type``. Up to ``batch`` messages, at most 1,000, share one transaction; Pub/Sub decides how many it
    returns. The other options are ``SettlingOptions``. The dead-letter policy of the subscription limits the deliveries
    too.
    """

    def __init__(
        self,
        subscriber: SubscriberClient,
        publisher: PublisherClient,
        subscription: str,
        dispatcher: Dispatcher,
        convert: Convert = json_event,
        *,
        batch: int = _MANY,
        **options: Unpack[SettlingOptions],
    ) -> None:
        check_batch(batch, most=_MOST, limit="the limit of a request")
        self._batch = batch
        expect(SubscriberClient, subscriber, _SUBSCRIBER)
        expect(PublisherClient, publisher, _PUBLISHER)
        self._subscriber: Any = subscriber
        self._publisher: Any = publisher
        self._name = subscription
        self._settling = new_settling(Consumer.__init__, dispatcher, convert, options, broker="pubsub")

    def run(self) -> None:
        """Consume until ``stop`` is called, or until SIGTERM or Ctrl-C in the main thread.

        Raises ``ConnectionError`` if Pub/Sub cannot be reached, and the error of the client if it fails later. Raises
        ``RefusedError`` if the subscription has no dead-letter policy: there is no topic for rejected messages then,
        and Pub/Sub does not count deliveries.
        """
        with draining(self.stop):
            found, dead = self._opened()
            self._log_start(f"{self._name} of Pub/Sub at {self._subscriber.transport.host}")
            while not self._stopping:
                received = _pull(self._subscriber, self._name, self._batch)
                for each, settled in zip(received, self._deliver(received, found.enable_message_ordering), strict=True):
                    self._settle(each, settled, dead)

    def settle_dead_letters(self, decide: Decide) -> Sifted:
        """Keep, replay or drop each present dead letter, as ``decide`` says. ``replay`` explains when.

        Raises ``RefusedError`` unless the dead-letter topic has exactly one subscription. If the process is killed,
        Pub/Sub hides the letters that it had for ten minutes.
        """
        _, topic = self._opened()
        found = [*self._publisher.list_topic_subscriptions(request={"topic": topic})]
        if len(found) != 1:
            raise RefusedError(
                f"the dead-letter topic {topic} must have one subscription, which keeps the dead letters, but has "
                f"{', '.join(found) or 'none'}: create it, or call replay(...) of projector_dedup.brokers.pubsub with "
                "the one to use"
            )
        return _sift(self._subscriber, self._publisher, self._name, found[0], self._settling.judge(decide))

    def _opened(self) -> tuple[Any, str]:
        """Return the subscription, and the name of its dead-letter topic. Raises ``ConnectionError``."""
        request = {"subscription": self._name}
        try:
            found = self._subscriber.get_subscription(request=request, timeout=CONNECT_TIMEOUT, retry=None)
        except (ServiceUnavailable, DeadlineExceeded) as error:
            raise cannot_reach("Pub/Sub", self._subscriber.transport.host, error) from error
        if not (dead := found.dead_letter_policy.dead_letter_topic):
            raise RefusedError(
                f"the subscription {self._name} has no dead-letter policy, so there is no topic for rejected messages: "
                "give it a dead-letter policy that names a topic"
            )
        return found, dead

    def _deliver(self, received: Sequence[Any], ordered: bool) -> Sequence[Settled | None]:
        incoming = [_incoming(each, self._name) for each in received]
        if ordered:
            return deliver_in_groups(self._settling, incoming, [each.message.ordering_key for each in received])
        return self._settling.deliver_batch(incoming)

    def _settle(self, received: Any, settled: Settled | None, dead: str) -> None:
        """Acknowledge a message, or publish it as a dead letter and acknowledge it, or let Pub/Sub deliver it again."""
        if settled is None or not (settled.acknowledge or settled.reject):
            delay = 0 if settled is None else math.ceil(settled.delay)
            _delay(self._subscriber, self._name, received, delay)
            return
        if settled.reject:
            try:
                _publish(self._publisher, dead, received.message, {_REJECTED_FOR: settled.reason})
            except InvalidArgument:  # the reason may be an attribute too many; any other error occurs again
                _publish(self._publisher, dead, received.message, {})
            self._settling.kept(settled)
        self._subscriber.acknowledge(request={"subscription": self._name, "ack_ids": [received.ack_id]})


def replay(subscriber: SubscriberClient, publisher: PublisherClient, subscription: str, dead_letters: str) -> int:
    """Publish the present dead letters of a subscription to its topic again, and return their number.

    ``dead_letters`` is the full name of a subscription of the dead-letter topic. Fix the cause first, and replay while
    the markers are kept. Every subscription of the topic gets the messages; where they were applied before, they are
    duplicates. ``replay`` returns after five seconds without a dead letter from before its start.
    """
    expect(SubscriberClient, subscriber, _SUBSCRIBER)
    expect(PublisherClient, publisher, _PUBLISHER)
    return _sift(subscriber, publisher, subscription, dead_letters, replay_each).settled


def _sift(client: Any, publisher: Any, subscription: str, dead_letters: str, judge: Judge) -> Sifted:
    """Settle the present dead letters that nobody else is receiving. Pub/Sub does not count them."""
    topic = client.get_subscription(request={"subscription": subscription}).topic
    began = datetime.now(UTC)
    settled = sift_older(
        lambda: _pull(client, dead_letters),
        lambda letter: judge(_incoming(letter, dead_letters), letter.message.attributes.get(_REJECTED_FOR), None),
        lambda letter: _publish(publisher, topic, letter.message, {}),
        lambda letter: client.acknowledge(request={"subscription": dead_letters, "ack_ids": [letter.ack_id]}),
        is_newer=lambda letter: letter.message.publish_time > began,
        delay=lambda letter, seconds: _delay(client, dead_letters, letter, seconds),
    )
    return Sifted(None, settled)


def _pull(client: Any, subscription: str, most: int = _MANY) -> list[Any]:
    """Return up to ``most`` messages as soon as there is one; none after ``_POLL`` seconds."""
    try:
        answer = client.pull(request={"subscription": subscription, "max_messages": most}, timeout=_POLL)
    except DeadlineExceeded:
        return []
    return list(answer.received_messages)


def _delay(client: Any, subscription: str, received: Any, seconds: int) -> None:
    client.modify_ack_deadline(
        request={"subscription": subscription, "ack_ids": [received.ack_id], "ack_deadline_seconds": seconds}
    )


def _publish(publisher: Any, topic: str, message: Any, marks: Mapping[str, str]) -> None:
    """Publish a copy of a message, and return after Pub/Sub has confirmed it."""
    attributes = {
        name: value
        for name, value in message.attributes.items()
        if name != _REJECTED_FOR and not name.startswith(_BY_PUBSUB)
    }
    copy = {"data": message.data, "attributes": {**attributes, **marks}}
    if not (message.data or copy["attributes"]):  # Pub/Sub refuses a message without both
        copy["attributes"] = dict(message.attributes)
    # Not publisher.publish(topic, data, **attributes): an attribute may have the name of an argument.
    _Service.publish(publisher, request={"topic": topic, "messages": [copy]})


def _incoming(received: Any, subscription: str) -> Incoming:
    """Return a message for a converter: its data, and its attributes as headers."""
    headers = dict(received.message.attributes)
    return with_headers(
        received.message.data,
        headers,
        attempt=max(received.delivery_attempt, 1),
        origin=f"subscription {subscription.rpartition('/')[2]}",
        body_name="data of the message",
        id_name="attribute message_id",
    )
