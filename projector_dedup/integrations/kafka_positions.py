"""Positions that somebody sets by hand: the first ones of a new group, and those of dead letters that are replayed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from ..errors import RefusedError
from .kafka_clients import TIMEOUT, Copies, aside, new_consumer, new_producer, partitions_of
from .kafka_messages import Received, place_of

KEPT = timedelta(hours=168)
"""The time for which markers are kept, if nobody says otherwise: what is older may have been replayed before."""


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
        copies, published = Copies(producer), 0
        for message in _until_the_end(client, places):
            received = Received(message, copied=True)
            if received.partition in unknown and message.timestamp()[1] < oldest.timestamp() * 1000:
                if since is None:
                    raise RefusedError(
                        f"{received.origin} is older than the markers that are kept, and nobody knows whether it was "
                        "replayed before: say since="
                    )
                continue
            copies.put(message, retry, received.copy_headers(attempt=1))
            _commit(client, [TopicPartition(dead, received.partition, received.offset + 1)])
            published += 1
        return published
    finally:
        client.close()


def _until_the_end(client: Consumer, places: Sequence[TopicPartition]) -> Iterator[Message]:
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


def _committed(client: Consumer, topic: str, partitions: Sequence[int]) -> list[TopicPartition]:
    """Return the positions of the client's group; the offset of one that is missing is negative."""
    found = client.committed([TopicPartition(topic, each) for each in partitions], timeout=TIMEOUT)
    return _checked(found)


def _commit(client: Consumer, positions: list[TopicPartition]) -> None:
    _checked(client.commit(offsets=positions, asynchronous=False) or [])


def _checked(places: list[TopicPartition]) -> list[TopicPartition]:
    for place in places:
        if place.error is not None:
            raise KafkaException(place.error)
    return places
