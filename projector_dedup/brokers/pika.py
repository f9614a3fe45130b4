"""Consume one queue of RabbitMQ with pika: acknowledge after the commit, retry, reject, replay the dead letters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Unpack

from ..extras import needs

with needs("pika"):
    from pika import BasicProperties, BlockingConnection
    from pika.adapters.blocking_connection import BlockingChannel
    from pika.adapters.utils.connection_workflow import AMQPConnectorException
    from pika.connection import Parameters
    from pika.exceptions import AMQPConnectionError, ChannelClosedByBroker, StreamLostError

from ..dispatcher import Dispatcher
from ..message import printable
from .dead_letters import Decide, Judge, Sifted, replay_each
from .incoming import Convert, json_event
from .rabbitmq import (
    CANCELLED,
    SETTLING,
    Headers,
    dead_letters,
    headers_of_copy,
    incoming_of,
    judged,
    prefetch_of,
    queue_after,
    queues_beside,
)
from .running import CONNECT_TIMEOUT, Runs, cannot_reach, draining
from .settling import Settled, SettlingOptions, expect, filled, new_settling

__all__ = ["Consumer", "replay"]

_Message = tuple[int, BasicProperties, bytes]  # the delivery tag, the properties and the body
_LOOKS_UP_EVERY = 0.5  # seconds that `stop` takes if no message comes
_PARAMETERS = 'parameters are those of pika, as in pika.URLParameters("amqp://...")'
_LOST = (
    "the connection to RabbitMQ was lost at queue {queue}: {error}. Start again: RabbitMQ sends every unacknowledged "
    "message again. But if this names a ValueError, an OverflowError, a RecursionError or a value that is too large, "
    "pika cannot decode a message among the first {prefetch} of the queue, and stops at it each time. A consumer with "
    "prefetch=1 stops when that message is the first one: drop it with `rabbitmqadmin get`, with ack_requeue_false"
)


class Consumer(Runs):
    """Delivers the messages of a durable queue to a dispatcher, one after the other or in batches.

    The consumer acknowledges a message that is applied or is a duplicate. A message to retry waits in one of the queues
    ``<queue>.wait.1s``, ``.5s``, ``.30s`` and ``.300s``. A rejected message goes to ``<queue>.dead``, with the error in
    its header ``x-rejected-for``. The consumer declares all of these queues, and the work queue if it is missing.

    ``convert`` builds the event from an ``Incoming``. Up to ``batch`` messages that are there share one transaction and
    one acknowledgement. If fewer are there, the consumer waits ``batch_wait`` seconds for more. RabbitMQ sends up to
    ``prefetch`` messages in advance; the default is 20, or twice the ``batch`` if that is more. The other options are
    ``SettlingOptions``; the longest delay is that of these queues up to ``max_delay``, or else 1 second.
    """

    def __init__(
        self,
        parameters: Parameters,
        queue: str,
        dispatcher: Dispatcher,
        convert: Convert = json_event,
        *,
        batch: int = 1,
        batch_wait: float = 0.0,
        prefetch: int | None = None,
        **options: Unpack[SettlingOptions],
    ) -> None:
        expect(Parameters, parameters, _PARAMETERS)
        self._prefetch = prefetch_of(prefetch, 20, batch, batch_wait)
        self._batch, self._batch_wait = batch, batch_wait
        self._settling = new_settling(Consumer.__init__, dispatcher, convert, options, **SETTLING)
        self._parameters, self._queue = parameters, queue

    def settle_dead_letters(self, decide: Decide) -> Sifted:
        """Keep, replay or drop each present dead letter, as ``decide`` says. ``replay`` explains when, and the errors.

        RabbitMQ marks those that are kept as redelivered.
        """
        return _sift(self._parameters, self._queue, self._settling.judge(decide))

    def run(self) -> None:
        """Consume until ``stop`` is called, or until SIGTERM or Ctrl-C in the main thread.

        Raises ``ConnectionError`` if RabbitMQ cannot be reached, and that or pika's error if it is lost. Start the
        process again then: RabbitMQ delivers every unacknowledged message again. If pika cannot decode a
        message, it closes the connection at each delivery of that message. The error says how to find and drop it.
        """
        with (
            draining(self.stop),
            _losing(self._queue, self._prefetch),
            _connected(self._parameters) as connection,
        ):
            channel = _open(connection, self._queue)
            channel.basic_qos(prefetch_count=self._prefetch)
            self._log_start(f"queue {self._queue} of RabbitMQ at {_address(self._parameters)}")
            while not self._stopping:
                found = self._received(channel, self._batch, _LOOKS_UP_EVERY)
                if messages := filled(found, self._batch, self._batch_wait, partial(self._received, channel)):
                    self._settle(channel, messages)
            channel.cancel()

    def _received(self, channel: BlockingChannel, most: int, seconds: float = 0.0) -> list[_Message]:
        """Return up to ``most`` messages that are there; wait ``seconds`` for the first."""
        found: list[_Message] = []
        while len(found) < most:
            came = next(channel.consume(self._queue, inactivity_timeout=0 if found else seconds), None)
            if came is None:
                raise ConnectionError(CANCELLED.format(queue=self._queue))
            method, properties, body = came
            if method is None:
                break
            found.append((method.delivery_tag, properties, body))
        return found

    def _settle(self, channel: BlockingChannel, messages: Sequence[_Message]) -> None:
        """Deliver messages, copy those that are not applied, and acknowledge."""
        answers = self._settling.deliver_batch([incoming_of(body, each, self._queue) for _, each, body in messages])
        applied = []
        for (tag, properties, body), settled in zip(messages, answers, strict=True):
            if settled.acknowledge:
                applied.append(tag)
                continue
            _copy(channel, properties, body, self._queue, settled, self._parameters.frame_max)
            self._settling.kept(settled)
            channel.basic_ack(tag)  # at once: if a later copy fails, this one is not made again
        if applied:  # every earlier message of the channel is acknowledged, or applied too
            channel.basic_ack(applied[-1], multiple=True)


def replay(parameters: Parameters, queue: str) -> int:
    """Publish the present dead letters of ``queue`` again, and return their number.

    Fix the cause first. Replay while the markers are kept: a message that was applied before is then a duplicate.
    ``replay`` acknowledges each dead letter after RabbitMQ has confirmed its copy in the queue. Raises
    ``ConnectionError`` if the connection is lost, as it is at a dead letter that pika cannot decode.
    """
    return _sift(parameters, queue, replay_each).settled


def _sift(parameters: Parameters, queue: str, judge: Judge) -> Sifted:
    """Settle the present dead letters. RabbitMQ puts those that are kept back into their places."""
    expect(Parameters, parameters, _PARAMETERS)
    with _losing(dead_letters(queue), 1), _connected(parameters) as connection:
        channel, settled = _open(connection, queue), 0
        waiting = channel.queue_declare(dead_letters(queue), passive=True).method.message_count
        for _ in range(waiting):
            method, properties, body = channel.basic_get(dead_letters(queue))
            if method is None or (fate := judged(judge, body, properties, queue)) == "stop":
                break
            if fate == "replay":
                _copy(channel, properties, body, queue, None, parameters.frame_max)
            if fate != "keep":
                channel.basic_ack(method.delivery_tag)
                settled += 1
        return Sifted(int(waiting), settled)


def _address(parameters: Parameters) -> str:
    return f"{parameters.host}:{parameters.port}"


def _connected(parameters: Parameters) -> BlockingConnection:
    """Return a connection to RabbitMQ. Raises ``ConnectionError``, which names the address, if there is none soon."""
    soon = copy.copy(parameters)  # None is no limit
    soon.socket_timeout = min(parameters.socket_timeout or CONNECT_TIMEOUT, CONNECT_TIMEOUT)
    soon.stack_timeout = min(parameters.stack_timeout or CONNECT_TIMEOUT, CONNECT_TIMEOUT)
    try:
        return BlockingConnection(soon)
    except (AMQPConnectionError, AMQPConnectorException, OSError) as error:
        why = str(error) or ", ".join(map(repr, error.args))  # the arguments of pika's have no text, but say why
        raise cannot_reach("RabbitMQ", _address(parameters), why) from error


@contextlib.contextmanager
def _losing(queue: str, prefetch: int) -> Iterator[None]:
    """Raise ``ConnectionError``, which names the queue, if the connection is lost while messages of ``queue`` arrive.

    pika has one error for a lost connection and for a message that it cannot decode.
    """
    try:
        yield
    except StreamLostError as error:
        raise ConnectionError(_LOST.format(queue=printable(queue), error=error, prefetch=prefetch)) from error


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

    def size(headers: Headers) -> int:
        return sum(map(len, _copied(properties, headers).encode()))

    headers = headers_of_copy(properties.headers, settled, size, frame_max, work)
    channel.basic_publish("", queue_after(work, settled), body, _copied(properties, headers), mandatory=True)


def _copied(properties: BasicProperties, headers: Headers) -> BasicProperties:
    """Return the properties of a copy: persistent, without an expiration, and without the producer's user id."""
    copied = copy.copy(properties)
    copied.headers, copied.delivery_mode, copied.expiration, copied.user_id = dict(headers), 2, None, None
    return copied
