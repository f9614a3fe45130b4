"""Consume one queue of RabbitMQ with aio-pika: acknowledge after the commit, retry, reject, replay the dead letters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Unpack

from ..extras import needs

with needs("aio-pika"):
    import aio_pika
    from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractIncomingMessage
    from aiormq.abc import AbstractChannel as Underlay
    from aiormq.exceptions import InvalidFrameError
    from pamqp.commands import Basic
    from yarl import URL

from ..dispatcher import AsyncDispatcher
from ..errors import RefusedError
from ..message import printable
from .dead_letters import Decide, Judge, Sifted, replay_each
from .incoming import Convert, json_event
from .rabbitmq import (
    CANCELLED,
    SETTLING,
    WITHOUT_ID,
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
from .settling import Settled, SettlingOptions, logger, new_settling

__all__ = ["Consumer", "replay"]

_BY_PIKA = (
    "run pika's consumer, projector_dedup.brokers.pika, on the queue until it has settled the message, or stops and "
    "says how to drop it, then start this consumer again"
)
_UNREADABLE = (
    "aio-pika cannot read a message of queue {queue}, or of another queue on this connection, and closes the "
    f"connection at each delivery of it: {_BY_PIKA}"
)


class Consumer(Runs):
    """Delivers the messages of a durable queue to a dispatcher, several of them at the same time.

    ``url`` is the URL of RabbitMQ. The queues and the other arguments are those of pika's ``Consumer``, except that
    the default of ``prefetch`` is 10, or twice the ``batch`` if that is more. ``prefetch / batch`` transactions run at
    the same time, and each uses one connection of the engine's pool: the pool must have as many.
    """

    def __init__(
        self,
        url: str,
        queue: str,
        dispatcher: AsyncDispatcher,
        convert: Convert = json_event,
        *,
        batch: int = 1,
        batch_wait: float = 0.0,
        prefetch: int | None = None,
        **options: Unpack[SettlingOptions],
    ) -> None:
        self._prefetch = prefetch_of(prefetch, 10, batch, batch_wait)
        self._batch, self._batch_wait = batch, batch_wait
        self._settling = new_settling(Consumer.__init__, dispatcher, convert, options, asynchronous=True, **SETTLING)
        self._url, self._queue = url, queue
        self._over = False  # True: no task takes another message
        self._why = ""  # the error, if an unreadable message closed the connection
        self._inbox: asyncio.Queue[AbstractIncomingMessage | None] = asyncio.Queue()  # None ends `run`

    def stop(self, *_: object) -> None:
        """Make ``run`` return after the current messages are settled. A signal handler of the loop may call this."""
        super().stop()
        self._ended()

    async def settle_dead_letters(self, decide: Decide) -> Sifted:
        """Keep, replay or drop each present dead letter, as ``decide`` says. ``replay`` explains when.

        RabbitMQ marks those that are kept as redelivered.
        """
        return await _sift(self._url, self._queue, self._settling.judge(decide))

    async def run(self) -> None:
        """Consume until ``stop`` is called, or until SIGTERM or Ctrl-C in the main thread.

        Raises ``ConnectionError`` if RabbitMQ cannot be reached. If the connection is lost, raises that or aio-pika's
        error, alone or in an ``ExceptionGroup``.
        Start the process again: RabbitMQ delivers every unacknowledged message again. Raises ``RefusedError`` in an
        ``ExceptionGroup`` for a message that aio-pika can read but not copy.
        """
        if not self._stopping:
            self._inbox = asyncio.Queue()  # messages of an earlier connection cannot be acknowledged on this one
            self._over = False
        with draining(partial(asyncio.get_running_loop().call_soon_threadsafe, self.stop)):
            await self._run()

    async def _run(self) -> None:
        async with await _connected(self._url) as connection:
            channel = await _open(await connection.channel(on_return_raises=True), self._queue)
            await channel.set_qos(prefetch_count=self._prefetch)
            self._log_start(f"queue {self._queue} of RabbitMQ at {_address(self._url)}")
            underlay = await channel.get_underlay_channel()
            underlay.on_consumer_cancel_callbacks.add(self._ended)
            channel.close_callbacks.add(self._closed)
            queue = await channel.get_queue(self._queue, ensure=False)
            tag = await queue.consume(self._inbox.put)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(self._prefetch // self._batch):
                    tasks.create_task(self._consume())
            if not self._stopping:
                raise ConnectionError(self._why or CANCELLED.format(queue=self._queue))
            await queue.cancel(tag)

    def _ended(self, *_: object) -> None:
        self._over = True
        self._inbox.put_nowait(None)

    def _closed(self, _: object, error: object) -> None:
        self._why = unreadable(error, self._queue)
        self._ended()

    async def _consume(self) -> None:
        """Settle messages until the end. None in the inbox wakes a task, which puts it back for the next."""
        while not self._over and (message := await self._inbox.get()) is not None:
            messages = [message, *self._waiting(self._batch - 1)]
            if self._batch_wait and len(messages) < self._batch and not self._over:
                await asyncio.sleep(self._batch_wait)
                messages += self._waiting(self._batch - len(messages))
            await self._settle(messages)
        self._ended()

    def _waiting(self, most: int) -> list[AbstractIncomingMessage]:
        found: list[AbstractIncomingMessage] = []
        while len(found) < most and not self._over and not self._inbox.empty():
            if (message := self._inbox.get_nowait()) is not None:
                found.append(message)
        return found

    async def _settle(self, messages: Sequence[AbstractIncomingMessage]) -> None:
        """Deliver messages, and acknowledge each by itself, because other tasks have earlier ones."""
        incoming = [incoming_of(each.body, each, self._queue) for each in messages]
        for message, settled in zip(messages, await self._settling.adeliver_batch(incoming), strict=True):
            if not settled.acknowledge:
                await copy(message, self._queue, settled)
                self._settling.kept(settled)
            await message.ack()


async def replay(url: str, queue: str) -> int:
    """Publish the present dead letters of ``queue`` again, and return their number.

    The ``replay`` of pika's module explains when, and how.
    """
    return (await _sift(url, queue, replay_each)).settled


async def _sift(url: str, queue: str, judge: Judge) -> Sifted:
    """Settle the present dead letters. RabbitMQ puts those that are kept back into their places."""
    async with await _connected(url) as connection:
        channel, settled = await _open(await connection.channel(on_return_raises=True), queue), 0
        dead = await channel.declare_queue(dead_letters(queue), passive=True)
        waiting = dead.declaration_result.message_count or 0
        for _ in range(waiting):
            message = await dead.get(fail=False)
            if message is None or (fate := judged(judge, message.body, message, queue)) == "stop":
                break
            if fate == "replay":
                await copy(message, queue, None)
            if fate != "keep":
                await message.ack()
                settled += 1
        return Sifted(waiting, settled)


def _address(url: str) -> str:
    return URL(url).authority.rpartition("@")[2]


async def _connected(url: str) -> AbstractConnection:
    """Return a connection to RabbitMQ. Raises ``ConnectionError``, which names the address, if there is none soon."""
    try:
        return await aio_pika.connect(url, timeout=CONNECT_TIMEOUT)
    except (aio_pika.exceptions.AMQPError, OSError) as error:
        raise cannot_reach("RabbitMQ", _address(url), error) from error


async def _open(channel: AbstractChannel, queue: str) -> AbstractChannel:
    try:
        await channel.declare_queue(queue, passive=True)  # keeps the arguments of an existing queue
    except aio_pika.exceptions.ChannelNotFoundEntity:
        await channel.reopen()
        await channel.declare_queue(queue, durable=True)
    for name, arguments in queues_beside(queue).items():
        await channel.declare_queue(name, durable=True, arguments=arguments)
    return channel


# Copies, published and confirmed on the channel of the message ------------------------------------------------------


async def copy(message: AbstractIncomingMessage, work: str, settled: Settled | None) -> None:
    """Copy a message into a wait queue or the dead-letter queue, and return after RabbitMQ has confirmed the copy.

    ``settled`` is None for a dead letter, which is copied into ``work``. The channel must use publisher confirms and
    ``on_return_raises=True``. Raises the errors of the channel, and ``RefusedError`` for headers that aio-pika can
    read but not write.
    """
    channel: Underlay = message.channel
    frame_max = channel.connection.connection_tune.frame_max

    def size(headers: Headers) -> int:
        return len(_properties(message, headers).marshal())

    headers = headers_of_copy(_encodable(message), settled, size, frame_max, work)
    properties = _properties(message, headers)
    try:
        await channel.basic_publish(
            message.body, routing_key=queue_after(work, settled), properties=properties, mandatory=True
        )
    except RecursionError as error:  # `headers_of_copy` has measured them with more room on Python's stack
        raise RefusedError(
            f"aio-pika cannot copy the message {printable(str(message.message_id))} of RabbitMQ's queue "
            f"{printable(work)} (delivery tag {message.delivery_tag}), because its headers are nested too deeply: "
            f"{_BY_PIKA}"
        ) from error


def unreadable(error: object, work: str) -> str:
    """Log and return what to do, if ``error`` says that aiormq cannot decode the properties of a message.

    Returns an empty text if another ``error`` closed the connection.
    """
    if not isinstance(error, (InvalidFrameError, RecursionError)):
        return ""
    what_to_do = _UNREADABLE.format(queue=printable(work))
    logger.error(what_to_do)
    return what_to_do


def _encodable(message: AbstractIncomingMessage) -> Headers:
    """Return headers of a copy that aiormq can encode, with ``WITHOUT_ID`` if the message has no id.

    aiormq decodes a text that is not UTF-8 to ``bytes``, but encodes only ``bytearray``. It publishes a copy without an
    id with a random one.
    """
    headers = {name: bytearray(value) if isinstance(value, bytes) else value for name, value in message.headers.items()}
    return headers if message.message_id else {**headers, WITHOUT_ID: True}


def _properties(message: AbstractIncomingMessage, headers: Headers) -> Basic.Properties:
    """Return the properties of a copy: persistent, without an expiration, and without the producer's user id."""
    properties = message.properties
    properties.headers, properties.delivery_mode = dict(headers), 2
    properties.expiration, properties.user_id = None, None
    return properties
