"""RabbitMQ, by any client: the queues beside a work queue, and the headers of the copies that go into them.

A consumer copies a message to retry into a wait queue, from which RabbitMQ moves it back to the work queue when its
time to live ends. It copies a rejected message into the dead-letter queue. RabbitMQ confirms the copy before the
consumer acknowledges the original, so a crash between the two can leave the message twice, but cannot lose it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

from ..dispatcher import AsyncDispatcher, Dispatcher
from ..message import printable
from ..verdict import DELAYS
from .incoming import Convert, Incoming
from .settling import Settled, Settling, logger, named_in_log

DELIVERIES = "x-deliveries"
"""The header in which copies carry the number of deliveries before them."""
REJECTED_FOR = "x-rejected-for"
"""The header in which dead letters carry the error, in short."""
WITHOUT_ID = "x-without-message-id"
"""The header of a copy whose message had no id: aio-pika gives each message that it publishes one, drawn by lot."""

AROUND = 20
"""Bytes of a frame around the properties of a message: its own beginning and end, and the length of the body."""

CANCELLED = "RabbitMQ has ended the consumer of queue {queue}: was the queue deleted? Start it again"

Headers = Mapping[str, Any]

_DEATHS = {f"x-{which}-death-{part}" for which in ("first", "last") for part in ("exchange", "queue", "reason")}
_NOT_COPIED = {"CC", "BCC", "x-death", *_DEATHS, DELIVERIES, REJECTED_FOR}
"""Headers of which RabbitMQ makes deliveries or decisions of its own, those that it adds, and ours."""


def dead_letters(queue: str) -> str:
    """Return the name of the queue in which the rejected messages of ``queue`` are kept."""
    return f"{queue}.dead"


def queues_beside(queue: str) -> dict[str, dict[str, Any]]:
    """Return the names and the arguments of the durable queues that a consumer of ``queue`` declares."""
    back = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": queue}
    waits = {_wait(queue, delay): {"x-message-ttl": int(delay * 1000), **back} for delay in DELAYS}
    return {**waits, dead_letters(queue): {}}


def new_settling(
    dispatcher: Dispatcher | AsyncDispatcher,
    convert: Convert,
    *,
    prefetch: int,
    max_attempts: int | None,
    max_delay: float,
    asynchronous: bool = False,
) -> Settling:
    """Make the settling of a consumer, which knows the delays of the wait queues and no others.

    Raises ``ValueError`` for a ``prefetch`` below 1, and what ``Settling`` raises.
    """
    if prefetch < 1:
        raise ValueError("prefetch is at least 1: 0 would have RabbitMQ send the whole queue")
    return Settling(
        dispatcher,
        convert,
        max_attempts=max_attempts,
        max_delay=max_delay,
        delays=DELAYS,
        asynchronous=asynchronous,
        broker="rabbitmq",
    )


def queue_after(queue: str, settled: Settled | None) -> str:
    """Return the queue into which a message is copied; ``settled`` is None for a dead letter that goes back."""
    if settled is None:
        return queue
    if settled.reject:
        return dead_letters(queue)
    return _wait(queue, settled.delay) if settled.delay else queue


def incoming_of(body: bytes, properties: Any, queue: str) -> Incoming:
    """Return what came in. ``properties`` are those of pika, or a message of aio-pika, which has them too."""
    headers = properties.headers or {}
    return Incoming(
        body,
        None if WITHOUT_ID in headers else properties.message_id,
        properties.type,
        properties.timestamp,
        properties.content_type,
        headers,
        attempt=_deliveries(headers) + 1,
        origin=f"queue {queue}",
        id_name="property message_id",
    )


Size = Callable[[Headers], int]
"""A function that returns the bytes of a frame with these headers, and raises if the client cannot encode them."""


def headers_of_copy(
    headers: Headers | None, settled: Settled | None, size: Size, frame_max: int, queue: str
) -> dict[str, Any]:
    """Return the headers of a copy: those of the message, the count of its deliveries, and why it was rejected.

    ``settled`` is None for a dead letter that is published again, as if for the first time.

    Another client may send a header that this one cannot encode. Headers must also fit into one frame of the
    connection, or RabbitMQ closes it; a ``frame_max`` of 0 sets no limit. A consumer that failed over the copy would
    get the message again for ever, so it makes the copy without these headers, and logs their names: first of a dead
    letter the reason and the count, which are in the log, and then the largest.
    """
    theirs = {name: value for name, value in (headers or {}).items() if name not in _NOT_COPIED}
    needed = {WITHOUT_ID: True} if WITHOUT_ID in theirs else {}  # it decides on the id
    ours: dict[str, Any] = {}
    if settled is not None:
        ours = {DELIVERIES: _deliveries(headers or {}) + 1}
        if settled.reject:
            ours[REJECTED_FOR] = settled.reason
        else:
            needed |= ours  # without it, max_attempts would never be reached
    everything, room = {**theirs, **ours, **needed}, frame_max or math.inf
    if _fits(everything, size, room):
        return everything
    alone = size(needed)
    sizes: dict[str, int] = {}
    for name in everything.keys() - needed.keys():
        with contextlib.suppress(Exception):  # clients raise TypeError, OverflowError, struct.error, RecursionError
            sizes[name] = size({**needed, name: everything[name]}) - alone
    room -= alone
    kept = {*needed}
    for name in sorted(sizes, key=lambda each: (each in ours, sizes[each])):
        if (room := room - sizes[name]) >= 0:
            kept.add(name)
    left_out = [name for name in everything if name not in kept]
    logger.warning(
        "a message from queue %s is copied without %d of its headers, which cannot be encoded or have no room: %s",
        *(printable(queue), len(left_out), named_in_log(left_out)),
    )
    return {name: value for name, value in everything.items() if name in kept}


def _fits(headers: Headers, size: Size, room: float) -> bool:
    try:
        return size(headers) <= room
    except Exception:  # noqa: BLE001  # a client raises what it likes for what it cannot encode
        return False


def _deliveries(headers: Headers) -> int:
    """Return the count that a copy carries; 0 for a message that is no copy, or whose producer put garbage there."""
    count = headers.get(DELIVERIES)
    return count if type(count) is int and 0 < count < 1_000_000 else 0


def _wait(queue: str, delay: float) -> str:
    return f"{queue}.wait.{delay:g}s"
