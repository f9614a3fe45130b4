"""Kafka: a consumer that settles each message before it stores the offset (docs/consumers/kafka.md)."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from operator import methodcaller
from typing import Any, Literal, TypeAlias

from .extras import needs

with needs("kafka"):
    from confluent_kafka import TIMESTAMP_CREATE_TIME, KafkaError, KafkaException, Message, Producer, TopicPartition
    from confluent_kafka import Consumer as Client

from ..dispatcher import Dispatcher
from ..errors import RefusedError
from ..verdict import Action
from .incoming import Convert, Incoming, json_event
from .settling import Settled, Settling, expect, logger

__all__ = ["Consumer", "begin", "replay"]

WAIT = 1.0
"""Seconds for which one poll waits: after that the consumer looks whether it was stopped, and what has become due."""
PASSING = frozenset({"_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_TIMED_OUT", "_MAX_POLL_EXCEEDED"})
"""Errors that librdkafka reports while it goes on by itself."""
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
KEPT = timedelta(hours=168)
"""The time for which markers are kept, if nobody says otherwise: what is older may have been replayed before."""

ATTEMPT = "projector-dedup-attempt"
"""The number that the next delivery of a copy has."""
NOT_BEFORE = "projector-dedup-not-before"
"""The moment before which a copy is not delivered, in milliseconds since 1970."""
OCCURRED = "projector-dedup-timestamp"
"""The timestamp of the original: a copy has its own, since its topic keeps it for a time from then on."""
CAME_FROM = "projector-dedup-origin"
"""The topic, partition and offset of the message that was copied first."""
REASON = "projector-dedup-reason"
"""The error, in short, for which a message was rejected."""
LEFT_OUT = "projector-dedup-left-out"
"""Marks a copy without the headers of its message. The id may be among them, so such a copy is rejected again."""
OURS = frozenset({ATTEMPT, NOT_BEFORE, OCCURRED, CAME_FROM, REASON, LEFT_OUT})
_NO_TEXT = b"\xff"  # an id that nobody can read: the message is rejected
_get_headers = methodcaller("headers")  # CPython 3.11 does not see that a quickened message.headers() has failed
_LARGEST = 1 << 64  # a number beyond it cannot be one that this library has written

Headers: TypeAlias = list[tuple[str, str | bytes | None]]


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
        self._settling = Settling(dispatcher, convert, max_attempts=max_attempts, max_delay=max_delay, broker="kafka")
        self._id_header, self._max_delay = id_header, max_delay
        self._retry = {topic: aside(topic, config, "retry") for topic in topics}
        self._dead = {topic: aside(topic, config, "dead") for topic in topics}
        for topic, retry in list(self._retry.items()):
            self._retry[retry], self._dead[retry] = retry, self._dead[topic]
        self._copied = set(self._retry.values())
        self._client = new_consumer(config)
        self._producer = new_producer(config)
        self._waiting: dict[tuple[str, int], deque[Received]] = {}
        self._resumed_at = 0.0
        self._stopped = False

    def run(self) -> None:
        """Consume until ``stop`` is called. Commits what is settled, and leaves the group, however it ends.

        Raises ``RefusedError`` where the group has no position, a topic is missing, or a topic does not take a copy
        because of its size. Raises ``KafkaException`` for an error that does not pass by itself: let the process end,
        and be started again.
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
            self._log_or_raise(error)
        elif message is not None:
            received = Received(message, copied=message.topic() in self._copied)
            if received.due > time.time() or (received.topic, received.partition) in self._waiting:
                self._hold_back(received)
            else:
                self._settle(received)
        self._settle_due()

    def _patience(self) -> float:
        """Return the seconds to wait for a message: until one of those that wait becomes due, and not for long."""
        now = time.time()
        return max(min([WAIT, *(line[0].due - now for line in self._waiting.values())]), 0.0)

    def _hold_back(self, received: Received) -> None:
        """Keep a message that is not due, and take no more from its partition; its offset is not stored.

        Its partition sends nothing more, but the consumer polls on, so that the group keeps it as a member.
        """
        received.due = min(received.due, time.time() + self._max_delay)  # whatever the clock of its sender says
        self._waiting.setdefault((received.topic, received.partition), deque()).append(received)
        self._client.pause([TopicPartition(received.topic, received.partition)])

    def _settle_due(self) -> None:
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
                self._resumed_at = 0.0
        if time.monotonic() - self._resumed_at >= WAIT:
            free = [each for each in self._client.assignment() if (each.topic, each.partition) not in self._waiting]
            self._client.resume(free)
            self._resumed_at = time.monotonic()

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
            self._publish_copy(received, settled, attempt)
        try:
            self._client.store_offsets(received.message)
        except KafkaException as error:
            if error.args[0].name() != "_STATE":  # the partition is somebody else's by now, who will see a duplicate
                raise

    def _publish_copy(self, received: Received, settled: Settled, attempt: int) -> None:
        """Put a copy into the retry topic, or into that of the dead letters if the message is rejected.

        Raises ``RefusedError`` for a copy that is too large for its topic, and ``KafkaException`` for every other copy
        that the cluster does not take. The message is then delivered again when the consumer is started again.
        """
        if settled.reject:
            topic = self._dead[received.topic]
            headers = received.copy_headers(attempt=attempt, reason=settled.reason)
        else:
            topic = self._retry[received.topic]
            not_before = round((time.time() + settled.delay) * 1000)
            headers = received.copy_headers(attempt=attempt + 1, not_before=not_before)
        try:
            put_copy(self._producer, received.message, topic, headers)
            self._settling.kept(settled)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.MSG_SIZE_TOO_LARGE:
                raise
            raise RefusedError(
                f"the copy of {received.origin} is too large for the topic {topic}: give that topic a larger "
                "max.message.bytes, and start the consumer again"
            ) from error

    def _log_or_raise(self, error: KafkaError) -> None:
        """Log a temporary error. Raises any other error."""
        if error.name() == "_AUTO_OFFSET_RESET":
            raise RefusedError(
                f"the group has no position in one of its topics ({error.str()}): begin(...) gives a new group its "
                "first positions; a group that had some has lost them, and must not go on without a decision"
            )
        if error.fatal() or not (error.retriable() or error.name() in PASSING):
            raise KafkaException(error)
        logger.warning("Kafka: %s; the consumer continues", error.str())


# Positions that somebody sets by hand: of a new group, and of dead letters that are replayed -------------------------


def begin(config: Mapping[str, Any], topics: Sequence[str], *, at: Literal["earliest", "latest"] = "earliest") -> int:
    """Give a group its first positions, where it has none, and return the number of partitions that got one.

    Run it once for a new group, and for new partitions, while no consumer of the group runs. A consumer does not do it
    by itself: the positions that are missing may be lost ones, with messages older than the markers behind them. ``at``
    is the first message that each topic still has, or the next one that is published.
    """
    client, producer = new_consumer(config), new_producer(config)
    try:
        first: list[TopicPartition] = []
        for topic in topics:
            for each, earliest in ((topic, at == "earliest"), (aside(topic, config, "retry"), True)):
                for place in _committed(client, each, partitions_of(producer, each)):
                    if place.offset < 0:
                        bounds = client.get_watermark_offsets(place, timeout=TIMEOUT)
                        first.append(TopicPartition(each, place.partition, bounds[0 if earliest else 1]))
        if first:
            _commit(client, first)
        return len(first)
    finally:
        client.close()


def replay(config: Mapping[str, Any], topic: str, *, since: datetime | None = None) -> int:
    """Publish the dead letters of a group's topic for the group again, and return their number.

    Each is published once: ``<group>.replay`` keeps the position. Where that is missing, dead letters from before
    ``since`` are left out; without ``since`` it raises ``RefusedError`` if there are any from before the last 168
    hours: they may have been replayed, and their markers be gone.
    """
    dead, retry = aside(topic, config, "dead"), aside(topic, config, "retry")
    client = new_consumer({**config, "group.id": f"{config.get('group.id')}.replay", "enable.partition.eof": True})
    producer = new_producer(config)
    try:
        places = _committed(client, dead, partitions_of(producer, dead))
        unknown = {place.partition for place in places if place.offset < 0}
        oldest = datetime.now(UTC) - KEPT if since is None else since
        published = 0
        for message in _until_the_end(client, places):
            received = Received(message, copied=True)
            if received.partition in unknown and message.timestamp()[1] < oldest.timestamp() * 1000:
                if since is None:
                    raise RefusedError(
                        f"{received.origin} is older than the markers that are kept, and may have been replayed "
                        "before: pass since="
                    )
                continue
            put_copy(producer, message, retry, received.copy_headers(attempt=1))
            _commit(client, [TopicPartition(dead, received.partition, received.offset + 1)])
            published += 1
        return published
    finally:
        client.close()


def _until_the_end(client: Client, places: Sequence[TopicPartition]) -> Iterator[Message]:
    """Yield the messages from each place to what is the end of its partition now."""
    ends: dict[int | None, int] = {}
    for place in places:
        low, high = client.get_watermark_offsets(place, timeout=TIMEOUT)
        place.offset = max(place.offset, low)
        if place.offset < high:
            ends[place.partition] = high
    client.assign([place for place in places if place.partition in ends])
    while ends:
        message = client.poll(TIMEOUT)
        if message is None:
            raise TimeoutError(f"nothing comes from {places[0].topic}; run it again")
        if (error := message.error()) is None:
            _, partition, offset = place_of(message)
            if offset < ends.get(partition, 0):
                yield message
            done = offset + 1 >= ends.get(partition, 0)
        elif error.name() == "_PARTITION_EOF":
            done = True
        else:
            raise KafkaException(error)
        if done:
            ends.pop(message.partition(), None)


def _committed(client: Client, topic: str, partitions: Sequence[int]) -> list[TopicPartition]:
    """Return the positions of the client's group; the offset of one that is missing is negative."""
    found = client.committed([TopicPartition(topic, each) for each in partitions], timeout=TIMEOUT)
    return _checked(found)


def _commit(client: Client, positions: list[TopicPartition]) -> None:
    _checked(client.commit(offsets=positions, asynchronous=False) or [])


def _checked(places: list[TopicPartition]) -> list[TopicPartition]:
    for place in places:
        if place.error is not None:
            raise KafkaException(place.error)
    return places


# Messages: what is handed on, and what is written into the headers of copies -----------------------------------------


class Received:
    """One message from a topic. The headers of a copy are believed only if ``copied`` says that the topic is ours."""

    def __init__(self, message: Message, *, copied: bool) -> None:
        self.message = message
        self.topic, self.partition, self.offset = place_of(message)
        found = _headers(message)
        self._all: Headers = found or []
        ours = dict(self._all) if copied else {}
        if found is None:
            ours[LEFT_OUT] = "headers"
            logger.warning(
                "a header of %s has a name that is not UTF-8, so confluent-kafka gives none of its headers", self.origin
            )
        self._ours = {name: value for name, value in ours.items() if name in OURS}
        self.attempt = max(_number(self._ours.get(ATTEMPT), 1), 1)
        self.due = _number(self._ours.get(NOT_BEFORE), 0) / 1000
        """The time, as ``time.time()`` tells it, before which the message is not delivered."""

    @property
    def origin(self) -> str:
        """The place of the message, for log lines: topic, partition, offset."""
        return f"{self.topic} [{self.partition}] at offset {self.offset}"

    def incoming(self, id_header: str, attempt: int) -> Incoming:
        """Return the message for a converter. A header that came twice is a list, which no converter takes for text."""
        found: dict[str, object] = {}
        for name, value in self._all:
            if name not in OURS:
                found[name] = [found[name], value] if name in found else value
        return Incoming(
            self.message.value() or b"",
            message_id=_NO_TEXT if LEFT_OUT in self._ours else found.get(id_header),
            type=found.get("type"),
            occurred_at=self._occurred_at(),
            content_type=found.get("content-type"),
            headers=found,
            attempt=attempt,
            origin=self.origin,
            id_name=f"header {id_header}",
        )

    def copy_headers(self, **added: str | int) -> Headers:
        """Return the headers for a copy: those of the message, where its original was, and the added ones of ours.

        ``attempt``, ``not_before`` and ``reason`` are the names that can be added.
        """
        kept = {name: value for name, value in self._ours.items() if name in (OCCURRED, CAME_FROM, LEFT_OUT)}
        kept.setdefault(CAME_FROM, self.origin)
        if (occurred_at := self._occurred_at()) is not None:
            kept[OCCURRED] = str(round(occurred_at * 1000))
        for name, value in added.items():
            kept[f"projector-dedup-{name.replace('_', '-')}"] = str(value)
        return [(name, value) for name, value in self._all if name not in OURS] + list(kept.items())

    def _occurred_at(self) -> float | None:
        """Return the seconds since 1970 that the producer of the original gave it; None if it gave none."""
        if OCCURRED in self._ours:
            return _number(self._ours[OCCURRED], 0) / 1000
        kind, milliseconds = self.message.timestamp()
        return milliseconds / 1000 if kind == TIMESTAMP_CREATE_TIME else None


def place_of(message: Message) -> tuple[str, int, int]:
    """Return the topic, the partition and the offset of a message that was consumed."""
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    if topic is None or partition is None or offset is None:
        raise ValueError("a message that was consumed has a topic, a partition and an offset")
    return topic, partition, offset


def _headers(message: Message) -> Headers | None:
    """Return the headers of a message; None if confluent-kafka cannot read them."""
    try:
        found = _get_headers(message) or []
    except (SystemError, UnicodeDecodeError):  # the former is what CPython makes of the latter, raised beside a result
        return None
    return list(found.items() if isinstance(found, Mapping) else found)


def _number(value: str | bytes | None, default: int) -> int:
    """Return the number in a header; the default if there is none, because somebody else has written the header."""
    try:
        found = int(value or b"")
    except ValueError:
        return default
    return found if abs(found) < _LARGEST else default


# Clients: configured so that an offset is committed after its message was settled ------------------------------------


def new_consumer(config: Mapping[str, Any]) -> Client:
    """Return a consumer with the user's settings and ours. Raises ``ValueError`` for one that contradicts ours."""
    for name, value in CONSUMER.items():
        if name in config and str(config[name]).lower() != str(value).lower():
            raise ValueError(f"{name} is {str(value).lower()} here: else messages could be lost; leave it out")
    if not config.get("group.id"):
        raise ValueError('the configuration needs a "group.id": under it the group keeps its position')
    return Client({**config, **CONSUMER})


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


def partitions_of(client: Client | Producer, topic: str) -> list[int]:
    """Return the partitions of a topic. Raises ``RefusedError`` if there is no such topic.

    A cluster that creates topics by itself creates it, if a producer asks.
    """
    found = client.list_topics(topic, timeout=TIMEOUT).topics[topic]
    if found.error is not None and found.error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
        raise KafkaException(found.error)
    if not found.partitions:
        raise RefusedError(f"there is no topic {topic}, which this group needs: create it")
    return sorted(found.partitions)


def put_copy(producer: Producer, message: Message, topic: str, headers: Headers) -> None:
    """Copy a message into another topic; return when all replicas in sync have the copy.

    Raises ``KafkaException`` or ``TimeoutError`` otherwise.
    """
    outcome: list[KafkaError | None] = []
    producer.produce(
        topic,
        message.value(),
        message.key(),
        headers=headers,
        on_delivery=lambda error, _message: outcome.append(error),
    )
    producer.flush(2 * TIMEOUT)  # the producer's own limit comes before
    if not outcome:
        raise TimeoutError(f"Kafka has not confirmed a copy in {topic}; the original is delivered again")
    if (error := outcome[0]) is not None:
        raise KafkaException(error)
