"""RabbitMQ, by any client: the queues beside a work queue, and the headers of the copies that go into them.

A message that is to come again is copied into a wait queue, whose time to live leads it back to the work queue; one
that is rejected is copied into the dead letters. The copy is confirmed before the original is acknowledged: between the
two, a crash leaves the message twice and never not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..dispatcher import AsyncDispatcher, Dispatcher
from ..verdict import DELAYS
from .incoming import Convert, Incoming
from .settling import Settled, Settling, copyable

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
        dispatcher, convert, max_attempts=max_attempts, max_delay=max_delay, delays=DELAYS, asynchronous=asynchronous
    )


def queue_after(queue: str, settled: Settled) -> str:
    """Return the queue into which a message is copied that was not applied."""
    if settled.reject:
        return dead_letters(queue)
    if not settled.delay:
        return queue
    return _wait(queue, settled.delay)


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
    )


Size = Callable[[Headers], int]
"""A function that returns the bytes of a frame with these headers, and raises if the client cannot encode them."""


def headers_of_copy(headers: Headers | None, settled: Settled, size: Size, frame_max: int, queue: str) -> Headers:
    """Return the headers of a copy: those of the message, the count of its deliveries, and why it was rejected.

    Headers must fit into one frame of the connection, or RabbitMQ closes it; a ``frame_max`` of 0 sets no limit. Those
    of the message fill the frame alone where somebody wants to harm, or where they came by AMQP 1.0. A dead letter then
    goes without the reason and the count, which are in the log; else the copy goes without the largest headers.
    """
    theirs = _kept(headers)
    count = {DELIVERIES: _deliveries(headers or {}) + 1}  # without it, max_attempts would never be reached
    ours = {**count, REJECTED_FOR: settled.reason} if settled.reject else count
    for added in (ours, count, {}) if settled.reject else (ours,):
        if _fits({**theirs, **added}, size, frame_max):
            return {**theirs, **added}
    shortest = ours if _fits(ours, size, frame_max) else count
    return _without_what_hinders(theirs, shortest, size, frame_max, queue)


def headers_of_replay(headers: Headers | None, size: Size, frame_max: int, queue: str) -> Headers:
    """Return the headers with which a dead letter is published again, as if for the first time."""
    theirs = _kept(headers)
    return theirs if _fits(theirs, size, frame_max) else _without_what_hinders(theirs, {}, size, frame_max, queue)


def _fits(headers: Headers, size: Size, frame_max: int) -> bool:
    try:
        return size(headers) <= (frame_max or math.inf)
    except Exception:  # noqa: BLE001  # a client raises what it likes for what it cannot encode
        return False


def _without_what_hinders(theirs: Headers, ours: Headers, size: Size, frame_max: int, queue: str) -> Headers:
    if WITHOUT_ID in theirs:
        ours = {**ours, WITHOUT_ID: True}  # it decides on the id: it is not left out, whatever its value
    others = {name: value for name, value in theirs.items() if name not in ours}
    return {
        **copyable(others, lambda each: size({**each, **ours}), frame_max or math.inf, f"queue {queue}"),
        **ours,
    }


def _kept(headers: Headers | None) -> dict[str, Any]:
    return {name: value for name, value in (headers or {}).items() if name not in _NOT_COPIED}


def _deliveries(headers: Headers) -> int:
    """Return the count that a copy carries; 0 for a message that is no copy, or whose producer put garbage there."""
    count = headers.get(DELIVERIES)
    return count if type(count) is int and 0 < count < 1_000_000 else 0


def _wait(queue: str, delay: float) -> str:
    return f"{queue}.wait.{delay:g}s"
