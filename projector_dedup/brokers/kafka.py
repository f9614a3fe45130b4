"""Kafka: store an offset after the commit, retry with a delay, replay the dead letters. Needs the extra ``kafka``."""

from __future__ import annotations

import itertools
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from operator import methodcaller
from types import EllipsisType
from typing import Any, Literal, TypeAlias, Unpack

from ..extras import needs

with needs("kafka"):
    from confluent_kafka import TIMESTAMP_CREATE_TIME, KafkaError, KafkaException, Message, Producer, TopicPartition
    from confluent_kafka import Consumer as Client

from ..dispatcher import Dispatcher
from ..errors import RefusedError
from ..verdict import Action
from .dead_letters import Decide, Judge, Sifted, replay_each
from .incoming import Convert, Incoming, check_convert, json_event
from .running import CONNECT_TIMEOUT, Runs, cannot_reach, draining
from .settling import (
    RetryOptions,
    Settled,
    check_batch,
    check_source,
    completed,
    expect,
    logger,
    new_settling,
    undeclared,
)

__all__ = ["Consumer", "begin", "replay"]

WAIT = 1.0
"""The seconds that one poll waits. Between two polls the consumer checks for ``stop`` and for messages that are due."""
PASSING = frozenset({"_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_TIMED_OUT", "_MAX_POLL_EXCEEDED"})
"""Errors from which librdkafka recovers by itself."""
CONSUMER = {
    "enable.auto.commit": True,  # commits the stored offsets, also before a rebalance
    "enable.auto.offset.store": False,  # the loop stores an offset after it has settled the message
    "auto.offset.reset": "error",  # fail if the group has lost its position: do not skip or repeat messages
}
PRODUCER = {
    "enable.idempotence": True,  # implies acks=all: a confirmed copy survives the loss of a broker
    "linger.ms": 0,  # the consumer waits for each copy
    "delivery.timeout.ms": 30_000,  # the consumer must poll again before the group reassigns its partitions
    "message.max.bytes": 1_000_000_000,  # the brokers' own limit decides
    "compression.type": "lz4",  # a message that came compressed may be too large uncompressed
}
OF_CONSUMERS = (
    *("group.", "session.", "heartbeat.", "max.poll.", "auto.", "enable.auto.", "enable.partition.", "fetch."),
    *("queued.", "isolation.", "partition.assignment.", "check.crcs", "on_commit", "allow.auto.create.topics"),
)
"""Prefixes of the settings that only consumers have. librdkafka logs a warning for each one that a producer gets."""

TIMEOUT = 30.0
"""The seconds after which a request to the cluster fails."""
KEPT = timedelta(hours=168)
"""How long markers are kept by default. An older dead letter may have been replayed before."""

ATTEMPT = "projector-dedup-attempt"
"""The header with the number of a copy's next delivery, from 1."""
NOT_BEFORE = "projector-dedup-not-before"
"""The header with the time before which a copy is not delivered, in milliseconds since 1970."""
OCCURRED = "projector-dedup-timestamp"
"""The header with the timestamp of the original. The copy needs a new one: Kafka counts its retention from there."""
CAME_FROM = "projector-dedup-origin"
"""The header with the topic, the partition and the offset of the original."""
REASON = "projector-dedup-reason"
"""The header of a dead letter with the error, shortened."""
OURS = frozenset({ATTEMPT, NOT_BEFORE, OCCURRED, CAME_FROM, REASON})
_get_headers = methodcaller("headers")  # CPython 3.11 does not detect that a quickened message.headers() has failed
_LARGEST = 1 << 64  # the library never writes a larger number

Headers: TypeAlias = list[tuple[str, str | bytes | None]]


class Consumer(Runs):
    """Delivers the messages of topics to a dispatcher, and stores the offset of each message after it is settled.

    The consumer publishes a copy of a message to retry to ``<topic>.<group>.retry``, and of a rejected message to
    ``<topic>.<group>.dead``. It stores the offset after the commit, or after Kafka has confirmed the copy.

    ``config`` is the configuration of confluent-kafka, with a ``group.id``. ``convert`` builds the event from an
    ``Incoming``. ``id_header`` names the header with the message id. **An offset is never used as the id**: an outbox
    that publishes an event again creates another offset. Up to ``batch`` messages that are there share one transaction.
    If fewer are there, the consumer waits ``batch_wait`` seconds for more. ``source`` is that of ``SettlingOptions``:
    one text for all topics, or a dictionary with a text or None for each. If there are several topics, declare it. The
    other options are ``RetryOptions``. During a delay, later copies in the same partition wait too.

    Raises ``ValueError`` for settings that could lose messages, and ``TypeError`` if ``config`` is not a dictionary.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        topics: Sequence[str],
        dispatcher: Dispatcher,
        convert: Convert = json_event,
        *,
        id_header: str = "message_id",
        batch: int = 1,
        batch_wait: float = 0.0,
        source: Mapping[str, str | None] | str | EllipsisType | None = ...,
        **options: Unpack[RetryOptions],
    ) -> None:
        expect(Mapping, config, 'config is a dictionary, as in {"bootstrap.servers": ..., "group.id": ...}')
        if isinstance(topics, str) or not topics:
            raise ValueError('topics is a list of names, as in ["payments"]')
        check_convert(convert)
        sources = _sources(source, topics)
        convert = completed(convert, lambda incoming: sources[str(incoming.topic)])
        self._settling = new_settling(Consumer.__init__, dispatcher, convert, options, broker="kafka")
        check_batch(batch, batch_wait, most=1_000_000, limit="the limit of confluent-kafka")
        self._batch, self._batch_wait = batch, batch_wait
        self._config, self._topics = config, topics
        self._id_header = id_header
        self._copied = {aside(topic, config, "retry"): topic for topic in topics}
        self._first = {topic: topic for topic in topics} | self._copied  # by topic: that of the originals
        self._client = new_consumer(config)
        self._producer = new_producer(config)
        self._gathered: list[Message] = []
        self._waiting: dict[tuple[str, int], deque[Received]] = {}
        self._resumed_at = 0.0
        self._servers = str(config.get("bootstrap.servers") or config.get("metadata.broker.list"))

    def settle_dead_letters(self, decide: Decide) -> Sifted:
        """Keep or replay each dead letter that was not replayed yet, as ``decide`` says. ``replay`` explains when.

        Raises ``RefusedError`` for ``"drop"``, and for ``"replay"`` after ``"keep"`` in one partition: a group has a
        position in a partition, and Kafka cannot remove one message. Also raises the errors of ``replay``.
        """
        judge = self._settling.judge(decide)
        each = [_sift(self._config, topic, judge, None, self._id_header) for topic in self._topics]
        return Sifted(None, sum(each))

    def run(self) -> None:
        """Consume until ``stop`` is called, or until SIGTERM or Ctrl-C in the main thread.

        At the end, commit the offsets of settled messages and leave the group. Raises ``ConnectionError`` if Kafka
        cannot be reached. Raises ``RefusedError`` if the group has no position, a topic is missing, a copy is too large
        for its topic, or confluent-kafka cannot decode a message. Raises ``KafkaException`` for an error from which
        librdkafka does not recover: start the process again.
        """
        with draining(self.stop):
            try:
                _reach(self._producer, self._servers)
                for topic in {*self._first, *(aside(topic, self._config, "dead") for topic in self._topics)}:
                    partitions_of(self._producer, topic)
                self._client.subscribe(list(self._first), on_revoke=self._forget, on_lost=self._forget)
                self._log_start(f"topics {', '.join(self._topics)} of Kafka at {self._servers}")
                while not self._stopping:
                    self._step()
            finally:
                self._client.close()

    def _step(self) -> None:
        """Poll messages, and settle those that are due, with the waiting messages that are due."""
        self._gathered = self._client.consume(1, self._patience())
        if self._gathered and self._batch > 1:
            more = self._client.consume(self._batch - 1, self._batch_wait)  # `_forget` may be called meanwhile
            self._gathered += more
        ready: list[Received] = []
        try:
            for message in self._gathered:
                if (error := message.error()) is not None:
                    self._log_or_raise(error)
                    continue
                received = Received(message, copied=message.topic() in self._copied)
                if received.due > time.time() or (received.topic, received.partition) in self._waiting:
                    self._hold_back(received)
                else:
                    ready.append(received)
        finally:
            self._settle(ready)  # also in front of a message that ends the consumer, which may be dropped by hand
        self._settle_due()

    def _patience(self) -> float:
        """Return the seconds to poll: until the first waiting message is due, at most ``WAIT``."""
        now = time.time()
        return max(min([WAIT, *(line[0].due - now for line in self._waiting.values())]), 0.0)

    def _hold_back(self, received: Received) -> None:
        """Keep a message that is not due, do not store its offset, and pause its partition.

        The consumer continues to poll, because the group removes a member that does not.
        """
        received.due = min(received.due, time.time() + self._settling.max_delay)  # the sender's clock may be wrong
        self._waiting.setdefault((received.topic, received.partition), deque()).append(received)
        self._client.pause([TopicPartition(received.topic, received.partition)])

    def _settle_due(self) -> None:
        """Settle the messages that are due, and resume the partitions in which no message waits.

        librdkafka loses a resume during a pause or a rebalance. So the consumer resumes all of these partitions every
        second. Resuming a partition that is not paused has no effect.
        """
        for place, line in list(self._waiting.items()):
            while not self._stopping and (due := _first_due(line, self._batch)):
                self._settle(due)
                for _ in due:
                    line.popleft()
            if not line:
                del self._waiting[place]
                self._resumed_at = 0.0
        if time.monotonic() - self._resumed_at >= WAIT:
            free = [each for each in self._client.assignment() if (each.topic, each.partition) not in self._waiting]
            self._client.resume(free)
            self._resumed_at = time.monotonic()

    def _forget(self, _client: Client, partitions: list[TopicPartition]) -> None:
        """Drop the messages of partitions that another member takes over: that member gets them again."""
        lost = {(each.topic, each.partition) for each in partitions}
        self._gathered = [each for each in self._gathered if (each.topic(), each.partition()) not in lost]
        for place in lost:
            self._waiting.pop(place, None)

    def _settle(self, messages: Sequence[Received]) -> None:
        """Deliver messages in their order, publish a copy of each that is not applied, and store each offset then."""
        rest = deque(messages)
        while rest:
            incoming = [each.incoming(self._id_header, self._first[each.topic]) for each in rest]
            for settled in self._settling.deliver_in_order(incoming):
                if settled.verdict is not None and settled.verdict.action is Action.RETRY_NOW and not self._stopping:
                    rest[0].attempt += 1  # and it is the first again
                    continue
                received = rest.popleft()
                if not settled.acknowledge:
                    self._publish_copy(received, settled)
                self._store_offset(received)
            if self._stopping:
                return  # the others come again

    def _store_offset(self, received: Received) -> None:
        try:
            self._client.store_offsets(received.message)
        except KafkaException as error:
            if error.args[0].name() != "_STATE":  # another member has the partition now, and detects a duplicate
                raise

    def _publish_copy(self, received: Received, settled: Settled) -> None:
        """Publish a copy to the retry topic, or to the dead-letter topic if the message is rejected.

        Raises ``RefusedError`` for a copy that is too large for its topic, and ``KafkaException`` if Kafka refuses
        the copy for another reason. Kafka delivers the message again after the consumer is started again.
        """
        topic = aside(self._first[received.topic], self._config, "dead" if settled.reject else "retry")
        if settled.reject:
            headers = received.copy_headers(attempt=received.attempt, reason=settled.reason)
        else:
            not_before = round((time.time() + settled.delay) * 1000)
            headers = received.copy_headers(attempt=received.attempt + 1, not_before=not_before)
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
        if error.name() == "_AUTO_OFFSET_RESET":
            raise RefusedError(
                f"the group has no position in one of its topics ({error.str()}): for a new group, call begin(...). "
                "An old group has lost its position: decide from where it continues before you start it again"
            )
        if error.fatal() or not (error.retriable() or error.name() in PASSING):
            raise KafkaException(error)
        logger.warning("Kafka: %s; the consumer continues", error.str())


def _sources(declared: Any, topics: Sequence[str]) -> Mapping[str, str | None]:
    """Return the source of each topic. Raises ``ValueError`` if it is not declared, ``TypeError`` for a wrong type."""
    if declared is ...:
        if len({*topics}) > 1:
            raise ValueError(
                f'{undeclared("several topics")}; source={{"payments": "payments", "refunds": "refunds"}} '
                "gives each topic its own"
            )
        declared = None
    sources = dict(declared) if isinstance(declared, Mapping) else dict.fromkeys(topics, declared)
    if {*sources} != {*topics}:
        raise ValueError(f"source has a source or None for each topic, for {[*topics]}, and not for {[*sources]}")
    for source in sources.values():
        check_source(source)
    return sources


def _first_due(line: Sequence[Received], most: int) -> list[Received]:
    """Return up to ``most`` messages at the beginning of a line that are due."""
    now = time.time()
    return [*itertools.takewhile(lambda each: each.due <= now, itertools.islice(line, most))]


# Positions that you set by hand: of a new group, and of dead letters to replay ---------------------------------------


def begin(config: Mapping[str, Any], topics: Sequence[str], *, at: Literal["earliest", "latest"] = "earliest") -> int:
    """Give a group a first position in each partition in which it has none, and return the number of these partitions.

    Call it once for a new group, and after you add partitions, while no consumer of the group runs. A consumer never
    does this: a missing position may be a lost one, and older messages may no longer have markers. ``at="earliest"``
    starts at the oldest message of each topic, ``at="latest"`` at the next one.
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
    """Publish the dead letters of a topic to the group's retry topic, and return their number.

    The group ``<group>.replay`` stores the position, so each dead letter is published once. If that group has no
    position, ``replay`` skips the dead letters from before ``since``. Without ``since``, it raises ``RefusedError`` for
    a dead letter older than 168 hours: it may have been replayed before, and its marker may be deleted.
    """
    return _sift(config, topic, replay_each, since)


def _sift(
    config: Mapping[str, Any], topic: str, judge: Judge, since: datetime | None, id_header: str = "message_id"
) -> int:
    """Settle the dead letters behind the position of the group ``<group>.replay``; return the number of replayed."""
    dead, retry = aside(topic, config, "dead"), aside(topic, config, "retry")
    client = new_consumer({**config, "group.id": f"{config.get('group.id')}.replay", "enable.partition.eof": True})
    producer = new_producer(config)
    try:
        places = _committed(client, dead, partitions_of(producer, dead))
        unknown = {place.partition for place in places if place.offset < 0}
        oldest = datetime.now(UTC) - KEPT if since is None else since
        settled, kept = 0, set[int]()
        for message in _until_the_end(client, places):
            received = Received(message, copied=True)
            fate = judge(received.incoming(id_header, topic), received.reason, received.attempt)
            if fate == "stop":
                break
            if fate == "keep":
                kept.add(received.partition)
                continue
            if fate == "drop" or received.partition in kept:
                raise RefusedError(
                    f"Kafka cannot remove one message from {dead}, nor replay one behind another that is kept: replay "
                    "all of them, with a handler that ignores those that you do not want"
                )
            if received.partition in unknown and message.timestamp()[1] < oldest.timestamp() * 1000:
                if since is None:
                    raise RefusedError(
                        f"{received.origin} is older than the markers that are kept, and may have been replayed "
                        "before: call replay(config, topic, since=...) of projector_dedup.brokers.kafka"
                    )
                continue
            put_copy(producer, message, retry, received.copy_headers(attempt=1))
            _commit(client, [TopicPartition(dead, received.partition, received.offset + 1)])
            settled += 1
        return settled
    finally:
        client.close()


def _until_the_end(client: Client, places: Sequence[TopicPartition]) -> Iterator[Message]:
    """Yield the messages of each partition, from its place to the end that the partition has at the call."""
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
    """Return the positions of the client's group. A missing position has a negative offset."""
    found = client.committed([TopicPartition(topic, each) for each in partitions], timeout=TIMEOUT)
    return _checked(found)


def _commit(client: Client, positions: list[TopicPartition]) -> None:
    _checked(client.commit(offsets=positions, asynchronous=False) or [])


def _checked(places: list[TopicPartition]) -> list[TopicPartition]:
    for place in places:
        if place.error is not None:
            raise KafkaException(place.error)
    return places


# Messages as the dispatcher gets them, and the headers of copies -----------------------------------------------------


class Received:
    """One message from a topic. It reads the library's own headers only if the topic is one of copies (``copied``).

    Raises ``RefusedError`` if confluent-kafka cannot decode the headers: the id may be among them.
    """

    def __init__(self, message: Message, *, copied: bool) -> None:
        self.message = message
        self.topic, self.partition, self.offset = place_of(message)
        try:
            self._all: Headers = _get_headers(message) or []
        except (SystemError, UnicodeDecodeError) as error:  # SystemError, if an error is set beside a result
            raise RefusedError(
                f"confluent-kafka cannot decode the headers of a message of Kafka, {self.origin}: the name of one is "
                f"not UTF-8. To drop the message, stop the group and move its position from {self.offset} to "
                f"{self.offset + 1}: kafka-consumer-groups --reset-offsets --topic {self.topic}:{self.partition} "
                f"--to-offset {self.offset + 1}"
            ) from error
        ours = dict(self._all) if copied else {}
        self._ours = {name: value for name, value in ours.items() if name in OURS}
        self.reason = self._ours.get(REASON)
        self.attempt = max(_number(self._ours.get(ATTEMPT), 1), 1)
        self.due = _number(self._ours.get(NOT_BEFORE), 0) / 1000
        """The time before which the message is not delivered, in seconds since 1970."""

    @property
    def origin(self) -> str:
        """The topic, the partition and the offset of the message, for log lines."""
        return f"{self.topic} [{self.partition}] at offset {self.offset}"

    def incoming(self, id_header: str, topic: str) -> Incoming:
        """Return the message for a converter. A header that appears twice is a list, so a converter rejects it.

        ``topic`` is the topic of the original.
        """
        found: dict[str, object] = {}
        for name, value in self._all:
            if name not in OURS:
                found[name] = [found[name], value] if name in found else value
        return Incoming(
            self.message.value() or b"",
            message_id=found.get(id_header),
            type=found.get("type"),
            occurred_at=self._occurred_at(),
            content_type=found.get("content-type"),
            headers=found,
            attempt=self.attempt,
            origin=self.origin,
            id_name=f"header {id_header}",
            key=self.message.key(),
            topic=topic,
        )

    def copy_headers(self, **added: str | int) -> Headers:
        """Return the headers of a copy: those of the message, the place of the original, and ``added``.

        The names in ``added`` are ``attempt``, ``not_before`` and ``reason``.
        """
        kept = {name: value for name, value in self._ours.items() if name in (OCCURRED, CAME_FROM)}
        kept.setdefault(CAME_FROM, self.origin)
        if (occurred_at := self._occurred_at()) is not None:
            kept[OCCURRED] = str(round(occurred_at * 1000))
        for name, value in added.items():
            kept[f"projector-dedup-{name.replace('_', '-')}"] = str(value)
        return [(name, value) for name, value in self._all if name not in OURS] + list(kept.items())

    def _occurred_at(self) -> float | None:
        """Return the time that the producer gave the original, in seconds since 1970; None if there is none."""
        if OCCURRED in self._ours:
            return _number(self._ours[OCCURRED], 0) / 1000
        kind, milliseconds = self.message.timestamp()
        return milliseconds / 1000 if kind == TIMESTAMP_CREATE_TIME else None


def place_of(message: Message) -> tuple[str, int, int]:
    """Return the topic, the partition and the offset of a consumed message."""
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    if topic is None or partition is None or offset is None:
        raise ValueError("a message that was consumed has a topic, a partition and an offset")
    return topic, partition, offset


def _number(value: str | bytes | None, default: int) -> int:
    """Return the number in a header; the default if the header has none, as in one that another program wrote."""
    try:
        found = int(value or b"")
    except ValueError:
        return default
    return found if abs(found) < _LARGEST else default


# Clients, configured to commit an offset after its message is settled ------------------------------------------------


def new_consumer(config: Mapping[str, Any]) -> Client:
    """Return a consumer with the user's settings and ours. Raises ``ValueError`` if they contradict each other."""
    for name, value in CONSUMER.items():
        if name in config and str(config[name]).lower() != str(value).lower():
            raise ValueError(f"{name} must be {str(value).lower()}, or messages could be lost; leave it out")
    if not config.get("group.id"):
        raise ValueError('the configuration needs a "group.id": Kafka stores the position of the group under it')
    return Client({**config, **CONSUMER})


def new_producer(config: Mapping[str, Any]) -> Producer:
    """Return a producer for the same cluster. A message that it confirms is on all replicas in sync."""
    shared = {name: value for name, value in config.items() if not name.startswith(OF_CONSUMERS)}
    return Producer({**shared, **PRODUCER})


def aside(topic: str, config: Mapping[str, Any], kind: Literal["retry", "dead"]) -> str:
    """Return the topic for a group's copies of messages of ``topic``. Raises ``ValueError`` for an impossible name."""
    name = f"{topic}.{config.get('group.id')}.{kind}"
    if len(name) > 249 or re.search(r"[^a-zA-Z0-9._-]", name):
        raise ValueError(f"{name!r} cannot be the name of a topic: choose another group.id")
    return name


def _reach(client: Client | Producer, servers: str) -> None:
    """Ask a broker for an answer. Raises ``ConnectionError``, which names ``servers``, if none comes soon."""
    try:
        client.list_topics("", timeout=CONNECT_TIMEOUT)
    except KafkaException as error:
        raise cannot_reach("Kafka", servers, error.args[0].str()) from error


def partitions_of(client: Client | Producer, topic: str) -> list[int]:
    """Return the partitions of a topic. Raises ``RefusedError`` if the topic does not exist.

    If the cluster creates topics automatically, the request of a producer creates it.
    """
    found = client.list_topics(topic, timeout=TIMEOUT).topics[topic]
    if found.error is not None and found.error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
        raise KafkaException(found.error)
    if not found.partitions:
        raise RefusedError(f"there is no topic {topic}, which this group needs: create it")
    return sorted(found.partitions)


def put_copy(producer: Producer, message: Message, topic: str, headers: Headers) -> None:
    """Copy a message into another topic, and return after all replicas in sync have the copy.

    Raises ``KafkaException`` or ``TimeoutError`` if Kafka does not confirm the copy.
    """
    outcome: list[KafkaError | None] = []
    producer.produce(
        topic,
        message.value(),
        message.key(),
        headers=headers,
        on_delivery=lambda error, _message: outcome.append(error),
    )
    producer.flush(2 * TIMEOUT)  # delivery.timeout.ms ends first
    if not outcome:
        raise TimeoutError(f"Kafka has not confirmed a copy in {topic}; the original is delivered again")
    if (error := outcome[0]) is not None:
        raise KafkaException(error)
