"""Consume one queue of RabbitMQ with pika: acknowledge after the commit, retry, reject, replay the dead letters."""

from __future__ import annotations

import copy
import struct
from typing import Any

from ..extras import needs

with needs("pika"):
    from pika import BasicProperties, BlockingConnection, SelectConnection
    from pika.adapters.blocking_connection import BlockingChannel
    from pika.connection import Parameters
    from pika.data import decode_value
    from pika.exceptions import ChannelClosedByBroker
    from pika.spec import FRAME_HEADER_SIZE

from ..dispatcher import Dispatcher
from .incoming import Convert, json_event
from .rabbitmq import (
    AROUND,
    CANCELLED,
    Headers,
    Size,
    dead_letters,
    headers_of_copy,
    incoming_of,
    new_settling,
    queue_after,
    queues_beside,
)
from .settling import Settled, expect

__all__ = ["Consumer", "replay"]

_LOOKS_UP_EVERY = 0.5  # seconds that `stop` takes if no message comes
_PARAMETERS = 'parameters are those of pika, as in pika.URLParameters("amqp://...")'
_UNREADABLE = (ValueError, OverflowError, OSError, RecursionError)  # pika raises them for years > 9999 or deep nesting
_READABLE_TYPES = {ord("T"): ord("l"), ord("F"): ord("x"), ord("A"): ord("x")}  # AMQP types of equal length


class Consumer:
    """Delivers the messages of a durable queue to a dispatcher, one after the other.

    The consumer acknowledges a message that is applied or is a duplicate. A message to retry waits in one of the queues
    ``<queue>.wait.1s``, ``.5s``, ``.30s`` and ``.300s``. A rejected message goes to ``<queue>.dead``, with the error in
    its header ``x-rejected-for``. The consumer declares all of these queues, and the work queue if it is missing.

    ``convert`` builds the event from an ``Incoming``. RabbitMQ sends up to ``prefetch`` messages in advance. The
    consumer rejects a message after ``max_attempts`` deliveries; None sets no limit. ``max_delay`` limits the seconds
    before a retry: to the longest delay of these queues that is not above it, or else to 1 second. Raises ``TypeError``
    if ``parameters`` are not those of pika.
    """

    def __init__(
        self,
        parameters: Parameters,
        queue: str,
        dispatcher: Dispatcher,
        convert: Convert = json_event,
        *,
        prefetch: int = 20,
        max_attempts: int | None = None,
        max_delay: float = 300.0,
    ) -> None:
        expect(Parameters, parameters, _PARAMETERS)
        self._settling = new_settling(
            dispatcher, convert, prefetch=prefetch, max_attempts=max_attempts, max_delay=max_delay
        )
        self._parameters, self._queue, self._prefetch = parameters, queue, prefetch
        self._stopping = False

    def stop(self, *_: object) -> None:
        """Make ``run`` return after the current message is settled. Any thread or signal handler may call this."""
        self._stopping = True

    def run(self) -> None:
        """Consume until ``stop`` is called. Raises pika's error, or ``ConnectionError``, if RabbitMQ is lost.

        Start the process again then: RabbitMQ delivers every unacknowledged message again.
        """
        with BlockingConnection(self._parameters, _impl_class=_Connection) as connection:
            channel = _open(connection, self._queue)
            channel.basic_qos(prefetch_count=self._prefetch)
            for method, properties, body in channel.consume(self._queue, inactivity_timeout=_LOOKS_UP_EVERY):
                if method is not None:
                    self._settle(channel, method.delivery_tag, properties, body)
                if self._stopping:
                    channel.cancel()
                    return
            raise ConnectionError(CANCELLED.format(queue=self._queue))

    def _settle(self, channel: BlockingChannel, tag: int, properties: BasicProperties, body: bytes) -> None:
        settled = self._settling.deliver(incoming_of(body, properties, self._queue))
        if not settled.acknowledge:
            _copy(channel, properties, body, self._queue, settled, self._parameters.frame_max)
            self._settling.kept(settled)
        channel.basic_ack(tag)


def replay(parameters: Parameters, queue: str) -> int:
    """Publish the present dead letters of ``queue`` again, and return their number.

    Fix the cause first. Replay while the markers are kept: a message that was applied before is then a duplicate.
    ``replay`` acknowledges each dead letter after RabbitMQ has confirmed its copy in the queue.
    """
    expect(Parameters, parameters, _PARAMETERS)
    with BlockingConnection(parameters, _impl_class=_Connection) as connection:
        channel = _open(connection, queue)
        waiting = channel.queue_declare(dead_letters(queue), passive=True).method.message_count
        for number in range(waiting):
            method, properties, body = channel.basic_get(dead_letters(queue))
            if method is None:
                return number
            _copy(channel, properties, body, queue, None, parameters.frame_max)
            channel.basic_ack(method.delivery_tag)
        return int(waiting)


def _open(connection: BlockingConnection, queue: str) -> BlockingChannel:
    """Declare the queues, and return a channel with publisher confirms."""
    try:
        connection.channel().queue_declare(queue, passive=True)  # keeps the arguments of an existing queue
    except ChannelClosedByBroker as error:
        if error.reply_code != 404:
            raise
        connection.channel().queue_declare(queue, durable=True)
    channel = connection.channel()
    for name, arguments in queues_beside(queue).items():
        channel.queue_declare(name, durable=True, arguments=arguments)
    channel.confirm_delivery()
    return channel


def _copy(
    channel: BlockingChannel,
    properties: BasicProperties,
    body: bytes,
    work: str,
    settled: Settled | None,
    frame_max: int,
) -> None:
    """Copy a message into a wait queue or the dead-letter queue, and return after RabbitMQ has confirmed the copy.

    ``settled`` is None for a dead letter, which is copied into ``work``. Raises pika's error without a confirmation.
    """
    headers = headers_of_copy(properties.headers, settled, _size_of(properties), frame_max, work)
    channel.basic_publish("", queue_after(work, settled), body, _copied(properties, headers), mandatory=True)


def _copied(properties: BasicProperties, headers: Headers) -> BasicProperties:
    """Return the properties of a copy: persistent, without an expiration, and without the producer's user id."""
    copied = copy.copy(properties)
    copied.headers, copied.delivery_mode, copied.expiration, copied.user_id = dict(headers), 2, None, None
    return copied


def _size_of(properties: BasicProperties) -> Size:
    """Return a function that returns the size of a copy with given headers."""
    return lambda headers: sum(map(len, _copied(properties, headers).encode())) + AROUND


class _Connection(SelectConnection):  # type: ignore[misc]  # pika has no types
    """Reads headers that pika cannot decode. Without it, pika closes every connection that receives one."""

    _frame_buffer: bytes

    def _read_frame(self) -> Any:
        try:
            return super()._read_frame()
        except _UNREADABLE:
            self._frame_buffer = _readable(self._frame_buffer)
            return super()._read_frame()


def _readable(frame: bytes) -> bytes:
    """Return a frame of the same length whose headers pika can decode, for a frame with the properties of a message.

    Timestamps become integers; tables and arrays become bytes. Only the octet with the type of such a value changes, so
    a copy of the message keeps all other octets.
    """
    readable = bytearray(frame)
    at = FRAME_HEADER_SIZE + 12  # skip the class, the weight and the length of the body
    (flags,) = struct.unpack_from(">H", frame, at)
    at += 2
    for flag in (BasicProperties.FLAG_CONTENT_TYPE, BasicProperties.FLAG_CONTENT_ENCODING):
        if flags & flag:
            at += 1 + frame[at]
    (length,) = struct.unpack_from(">I", frame, at)
    at += 4
    end = at + length
    while at < end:
        at += 1 + frame[at]  # the name of the header
        readable[at] = _READABLE_TYPES.get(frame[at], frame[at])
        _, at = decode_value(readable, at)
    return bytes(readable)
