"""Kafka: a consumer that settles each message before it stores the offset (docs/consumers/kafka.md)."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from .extras import needs

with needs("kafka"):
    from confluent_kafka import Consumer as Client
    from confluent_kafka import KafkaError, KafkaException, TopicPartition

from ..dispatcher import Dispatcher
from ..errors import RefusedError
from ..verdict import Action
from .incoming import Convert, json_event
from .kafka_clients import Copies, aside, new_consumer, new_producer, partitions_of
from .kafka_messages import Headers, Received, milliseconds_from_now
from .kafka_positions import begin, replay
from .settling import Settled, Settling, expect

__all__ = ["Consumer", "begin", "replay"]

logger = logging.getLogger("projector_dedup.consumers")

WAIT = 1.0
"""Seconds for which one poll waits: after that the consumer looks whether it was stopped, and what has become due."""
PASSING = frozenset({"_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_TIMED_OUT", "_MAX_POLL_EXCEEDED"})
"""Errors that librdkafka reports while it goes on by itself."""


class Consumer:
    """Delivers the messages of topics to a dispatcher, and stores the offset of each when it is settled.

    Settled is a message that was applied, or whose copy is confirmed: in ``<topic>.<group>.retry``, to come again after
    a delay, or in ``<topic>.<group>.dead``. ``config`` is the configuration of confluent-kafka, with a ``group.id``.
    ``convert`` makes the event of an ``Incoming``, whose ``message_id`` is the header that ``id_header`` names. **No id
    is made of an offset**: an event that an outbox publishes again has another one. A message is rejected after
    ``max_attempts`` deliveries; None sets no limit. ``max_delay`` bounds the seconds for which a message waits to come
    again, and with it those behind it in its partition.

    Raises ``ValueError`` for settings with which messages could be lost, and ``TypeError`` for an address in place of
    the configuration.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        topics: Sequence[str],
        dispatcher: Dispatcher,
        convert: Convert = json_event,
        *,
        id_header: str = "message_id",
        max_attempts: int | None = None,
        max_delay: float = 300.0,
    ) -> None:
        expect(Mapping, config, 'config is a dictionary, as in {"bootstrap.servers": ..., "group.id": ...}')
        if isinstance(topics, str) or not topics:
            raise ValueError('topics is a list of names, as in ["payments"]')
        self._settling = Settling(dispatcher, convert, max_attempts=max_attempts, max_delay=max_delay)
        self._id_header, self._max_delay = id_header, max_delay
        self._retry = {topic: aside(topic, config, "retry") for topic in topics}
        self._dead = {topic: aside(topic, config, "dead") for topic in topics}
        for topic, retry in list(self._retry.items()):
            self._retry[retry], self._dead[retry] = retry, self._dead[topic]
        self._copied = set(self._retry.values())
        self._client = new_consumer(config)
        self._producer = new_producer(config)
        self._copies = Copies(self._producer)
        self._waiting: dict[tuple[str, int], deque[Received]] = {}
        self._looked = 0.0
        self._stopped = False

    def run(self) -> None:
        """Consume until ``stop`` is called. Commits what is settled, and leaves the group, however it ends.

        Raises ``RefusedError`` where the group has no position, or a topic is missing, and ``KafkaException`` for an
        error that does not pass by itself: let the process end, and be started again.
        """
        try:
            for topic in {*self._retry, *self._dead.values()}:
                partitions_of(self._producer, topic)
            self._client.subscribe(list(self._retry), on_revoke=self._forget, on_lost=self._forget)
            while not self._stopped:
                self._step()
        finally:
            self._client.close()

    def stop(self, *_: object) -> None:
        """Let ``run`` return when the message at hand is settled. Another thread or a signal handler may call it."""
        self._stopped = True

    def _step(self) -> None:
        """Take one message, and those that have become due."""
        message = self._client.poll(self._patience())
        if message is not None and (error := message.error()) is not None:
            self._troubled(error)
        elif message is not None:
            received = Received(message, copied=message.topic() in self._copied)
            if received.due > time.time() or (received.topic, received.partition) in self._waiting:
                self._let_wait(received)
            else:
                self._settle(received)
        self._look_at_the_waiting()

    def _patience(self) -> float:
        """Return the seconds to wait for a message: until one of those that wait becomes due, and not for long."""
        now = time.time()
        return max(min([WAIT, *(line[0].due - now for line in self._waiting.values())]), 0.0)

    def _let_wait(self, received: Received) -> None:
        """Keep a message that is not due, and take no more from its partition; its offset is not stored.

        Its partition sends nothing more, but the consumer polls on, so that the group keeps it as a member.
        """
        received.due = min(received.due, time.time() + self._max_delay)  # whatever the clock of its sender says
        self._waiting.setdefault((received.topic, received.partition), deque()).append(received)
        self._client.pause([TopicPartition(received.topic, received.partition)])

    def _look_at_the_waiting(self) -> None:
        """Settle the messages that have become due, and let partitions send again where none waits.

        Every second all of those are resumed, because librdkafka forgets a resume that comes while a pause, or a
        change of the assignment, is still under way; to one that is not paused it is nothing.
        """
        for place, line in list(self._waiting.items()):
            while line and line[0].due <= time.time() and not self._stopped:
                self._settle(line[0])
                line.popleft()
            if not line:
                del self._waiting[place]
                self._looked = 0.0
        if time.monotonic() - self._looked >= WAIT:
            free = [each for each in self._client.assignment() if (each.topic, each.partition) not in self._waiting]
            self._client.resume(free)
            self._looked = time.monotonic()

    def _forget(self, _client: Client, partitions: list[TopicPartition]) -> None:
        """Called when partitions go to somebody else, who will get what waits here: nothing of it is stored."""
        for each in partitions:
            self._waiting.pop((each.topic, each.partition), None)

    def _settle(self, received: Received) -> None:
        """Deliver a message, put a copy aside if it is not applied, and only then store its offset."""
        attempt = received.attempt
        settled = self._settling.deliver(received.incoming(self._id_header, attempt))
        while settled.verdict is not None and settled.verdict.action is Action.RETRY_NOW and not self._stopped:
            attempt += 1
            settled = self._settling.deliver(received.incoming(self._id_header, attempt))
        if not settled.acknowledge:
            self._put_aside(received, settled, attempt)
        try:
            self._client.store_offsets(received.message)
        except KafkaException as error:
            if error.args[0].name() != "_STATE":  # the partition is somebody else's by now, who will see a duplicate
                raise

    def _put_aside(self, received: Received, settled: Settled, attempt: int) -> None:
        """Put a copy into the retry topic, or into that of the dead letters, where its message is rejected.

        A message that is too large for the retry topic becomes a dead letter, which is made without what makes it too
        large. Raises ``KafkaException`` for every other copy that the cluster does not take.
        """
        if not settled.reject:
            headers = received.copy_headers(attempt=attempt + 1, not_before=milliseconds_from_now(settled.delay))
            if self._put(received, self._retry[received.topic], headers):
                return
            logger.error(
                "%s cannot come again and becomes a dead letter, because its copy is too large: give the topic %s a "
                "larger max.message.bytes",
                *(received.origin, self._retry[received.topic]),
            )
        dead = self._dead[received.topic]
        headers = received.copy_headers(attempt=attempt, reason=settled.reason)
        if self._put(received, dead, headers):
            return
        for left_out in ("headers", "headers, key and value"):
            headers = received.copy_headers(attempt=attempt, reason=settled.reason, left_out=left_out)
            if self._put(received, dead, headers, value="value" not in left_out):
                logger.error(
                    "the dead letter of %s is without its %s, because it is too large: give the topic %s a larger "
                    "max.message.bytes",
                    *(received.origin, left_out, dead),
                )
                return
        raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))

    def _put(self, received: Received, topic: str, headers: Headers, *, value: bool = True) -> bool:
        """Put a copy into a topic. Return False if the cluster takes no message so large."""
        try:
            self._copies.put(received.message, topic, headers, value=value)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.MSG_SIZE_TOO_LARGE:
                raise
            return False
        return True

    def _troubled(self, error: KafkaError) -> None:
        """Log an error that passes. Raises for any other."""
        if error.name() == "_AUTO_OFFSET_RESET":
            raise RefusedError(
                f"the group has no position in one of its topics ({error.str()}): begin(...) gives a new group its "
                "first positions; a group that had some has lost them, and must not go on without a decision"
            )
        if error.fatal() or not (error.retriable() or error.name() in PASSING):
            raise KafkaException(error)
        logger.warning("Kafka: %s; the consumer goes on by itself", error.str())
