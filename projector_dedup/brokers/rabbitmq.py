"""RabbitMQ, with any client: the wait queues and the dead-letter queue, and the headers of the copies in them.

A consumer copies a message to retry into a wait queue. After its time to live, RabbitMQ moves the copy back to the work
queue. The consumer copies a rejected message into the dead-letter queue. It acknowledges the original after RabbitMQ
has confirmed the copy, so a crash between the two can duplicate the message, but cannot lose it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

from ..verdict import DELAYS
from .dead_letters import Fate, Judge
from .incoming import Incoming
from .settling import Settled, check_batch, logger, named_in_log

DELIVERIES = "x-deliveries"
"""The header of a copy with the number of earlier deliveries."""
REJECTED_FOR = "x-rejected-for"
"""The header of a dead letter with the error, shortened."""
WITHOUT_ID = "x-without-message-id"
"""The header of a copy whose message has no id: aio-pika publishes each message with a random id if it has none."""

SETTLING: dict[str, Any] = {"broker": "rabbitmq", "delays": DELAYS}
"""The arguments of ``new_settling``. The queues beside a queue have these delays, and no others."""

_AROUND = 20  # bytes of a frame in addition to the properties: its start, its end, and the length of the body

_MOST = 65_535  # messages that AMQP can send in advance

CANCELLED = "RabbitMQ has ended the consumer of queue {queue}: was the queue deleted? Start it again"

Headers = Mapping[str, Any]

_DEATHS = {f"x-{which}-death-{part}" for which in ("first", "last") for part in ("exchange", "queue", "reason")}
_NOT_COPIED = {"CC", "BCC", "x-death", *_DEATHS, DELIVERIES, REJECTED_FOR}
"""Headers that RabbitMQ acts on (CC, BCC) or adds itself, and our own."""


def dead_letters(queue: str) -> str:
    """Return the name of the queue for the rejected messages of ``queue``."""
    return f"{queue}.dead"


def queues_beside(queue: str) -> dict[str, dict[str, Any]]:
    """Return the names and the arguments of the durable queues that a consumer of ``queue`` declares."""
    back = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": queue}
    waits = {_wait(queue, delay): {"x-message-ttl": int(delay * 1000), **back} for delay in DELAYS}
    return {**waits, dead_letters(queue): {}}


def prefetch_of(prefetch: int | None, default: int, batch: int = 1, batch_wait: float = 0.0) -> int:
    """Return how many messages RabbitMQ sends in advance: ``prefetch``, or else enough for two batches.

    Raises ``ValueError`` for a ``prefetch`` that AMQP does not have, and the errors of ``check_batch``.
    """
    if prefetch is not None and not 1 <= prefetch <= _MOST:
        raise ValueError(f"prefetch is at least 1 (with 0, RabbitMQ sends the whole queue at once), at most {_MOST:,}")
    check_batch(batch, batch_wait, most=prefetch or _MOST, limit="prefetch")
    return min(max(default, 2 * batch), _MOST) if prefetch is None else prefetch


def queue_after(queue: str, settled: Settled | None) -> str:
    """Return the queue for the copy of a message; ``settled`` is None for a dead letter that is replayed."""
    if settled is None:
        return queue
    if settled.reject:
        return dead_letters(queue)
    return _wait(queue, settled.delay) if settled.delay else queue


def incoming_of(body: bytes, properties: Any, queue: str) -> Incoming:
    """Return a message for a converter. ``properties`` are those of pika, or a message of aio-pika."""
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


def judged(judge: Judge, body: bytes, properties: Any, queue: str) -> Fate:
    """Return what becomes of a dead letter of ``queue``. RabbitMQ writes its own reason if it made the dead letter."""
    incoming = incoming_of(body, properties, dead_letters(queue))
    reason = incoming.headers.get(REJECTED_FOR) or incoming.headers.get("x-last-death-reason")
    return judge(incoming, reason, incoming.attempt - 1 or None)


Size = Callable[[Headers], int]
"""A function that returns the bytes of properties with these headers. It raises if the client cannot encode them."""


def headers_of_copy(
    headers: Headers | None, settled: Settled | None, size: Size, frame_max: int, queue: str
) -> dict[str, Any]:
    """Return the headers of a copy: those of the message, the number of its deliveries, and the reason of a rejection.

    ``settled`` is None for a dead letter that is replayed: its deliveries are counted from 0 again.

    Another client may send a header that this one cannot encode. Headers must also fit into one frame, or RabbitMQ
    closes the connection; a ``frame_max`` of 0 sets no limit. RabbitMQ delivers a message that cannot be copied again
    and again. So the copy lacks the headers that do not fit, and the log names them. A dead letter first loses the
    reason and the count, which are in the log, and then its largest headers.
    """
    theirs = {name: value for name, value in (headers or {}).items() if name not in _NOT_COPIED}
    needed = {WITHOUT_ID: True} if WITHOUT_ID in theirs else {}  # without it, a random id would count
    ours: dict[str, Any] = {}
    if settled is not None:
        ours = {DELIVERIES: _deliveries(headers or {}) + 1}
        if settled.reject:
            ours[REJECTED_FOR] = settled.reason
        else:
            needed |= ours  # without it, the message would never reach max_attempts
    everything, room = {**theirs, **ours, **needed}, (frame_max or math.inf) - _AROUND
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
        *(queue, len(left_out), named_in_log(left_out)),
    )
    return {name: value for name, value in everything.items() if name in kept}


def _fits(headers: Headers, size: Size, room: float) -> bool:
    try:
        return size(headers) <= room
    except Exception:  # noqa: BLE001  # clients raise various errors for headers that they cannot encode
        return False


def _deliveries(headers: Headers) -> int:
    """Return the number of earlier deliveries of a copy; 0 for an original, or if the header is not such a number."""
    count = headers.get(DELIVERIES)
    return count if type(count) is int and 0 < count < 1_000_000 else 0


def _wait(queue: str, delay: float) -> str:
    return f"{queue}.wait.{delay:g}s"
