"""Consume one queue of RabbitMQ with aio-pika: acknowledge after the commit, delay, reject, replay the dead letters."""

from __future__ import annotations

import asyncio

from .extras import needs

with needs("aio-pika"):
    import aio_pika
    from aio_pika.abc import AbstractChannel, AbstractIncomingMessage

from ..dispatcher import AsyncDispatcher
from .aio_pika_copies import copy, copy_back, unreadable
from .incoming import Convert, json_event
from .rabbitmq import CANCELLED, dead_letters, incoming_of, new_settling, queues_beside

__all__ = ["Consumer", "replay"]


class Consumer:
    """Takes messages from a durable queue and gives them to a dispatcher, ``prefetch`` of them at a time.

    A message is acknowledged when it is applied, or was applied before. One that is to come again waits in one of the
    queues ``<queue>.wait.1s``, ``.5s``, ``.30s`` and ``.300s``; a rejected one goes to ``<queue>.dead``, with the
    error in its header ``x-rejected-for``. All of them are declared here, and the work queue too if it is missing.

    ``url`` is that of RabbitMQ. ``convert`` makes the event of a message. Each message of ``prefetch`` takes a
    connection of the engine's pool: let it be no more than the pool has. A message is rejected after ``max_attempts``
    deliveries; None sets no limit. It waits in the longest of the queues that does not exceed ``max_delay`` seconds,
    or else in the shortest.
    """

    def __init__(
        self,
        url: str,
        queue: str,
        dispatcher: AsyncDispatcher,
        convert: Convert = json_event,
        *,
        prefetch: int = 10,
        max_attempts: int | None = None,
        max_delay: float = 300.0,
    ) -> None:
        self._settling = new_settling(
            dispatcher,
            convert,
            prefetch=prefetch,
            max_attempts=max_attempts,
            max_delay=max_delay,
            asynchronous=True,
        )
        self._url, self._queue, self._prefetch = url, queue, prefetch
        self._stopping = False
        self._why = ""  # the connection was closed, if it was over a message that cannot be read
        self._inbox: asyncio.Queue[AbstractIncomingMessage | None] = asyncio.Queue()  # None: there is nothing more

    def stop(self) -> None:
        """Let ``run`` return when the messages at hand are settled. A signal handler of the event loop may call it."""
        self._stopping = True
        self._inbox.put_nowait(None)

    async def run(self) -> None:
        """Consume until ``stop`` is called. Raises the errors of a lost RabbitMQ: a group, or ``ConnectionError``.

        Nothing is lost then: start the process again, and RabbitMQ delivers what was not acknowledged.
        """
        if not self._stopping:
            self._inbox = asyncio.Queue()  # what a connection before has left there cannot be settled on this one
        async with await aio_pika.connect(self._url) as connection:
            channel = await _open(await connection.channel(on_return_raises=True), self._queue)
            await channel.set_qos(prefetch_count=self._prefetch)
            underlay = await channel.get_underlay_channel()
            underlay.on_consumer_cancel_callbacks.add(self._ended)
            channel.close_callbacks.add(self._closed)
            queue = await channel.get_queue(self._queue, ensure=False)
            tag = await queue.consume(self._inbox.put)
            async with asyncio.TaskGroup() as tasks:
                while (message := await self._inbox.get()) is not None:
                    tasks.create_task(self._settle(message))
            if not self._stopping:
                raise ConnectionError(self._why or CANCELLED.format(queue=self._queue))
            await queue.cancel(tag)

    def _ended(self, *_: object) -> None:
        self._inbox.put_nowait(None)

    def _closed(self, _: object, error: object) -> None:
        self._why = unreadable(error, self._queue)
        self._ended()

    async def _settle(self, message: AbstractIncomingMessage) -> None:
        settled = await self._settling.adeliver(incoming_of(message.body, message, self._queue))
        if not settled.acknowledge:
            await copy(message, self._queue, settled)
        await message.ack()


async def replay(url: str, queue: str) -> int:
    """Publish the dead letters of ``queue`` again, those that are there now; return how many there were.

    Each is acknowledged when RabbitMQ has confirmed that it is back in the queue. Replay after the cause was mended,
    and within the retention of the markers: until then a message that was applied after all is a duplicate.
    """
    async with await aio_pika.connect(url) as connection:
        channel = await _open(await connection.channel(on_return_raises=True), queue)
        dead = await channel.declare_queue(dead_letters(queue), passive=True)
        waiting = dead.declaration_result.message_count or 0
        for number in range(waiting):
            message = await dead.get(fail=False)
            if message is None:
                return number
            await copy_back(message, queue)
            await message.ack()
        return waiting


async def _open(channel: AbstractChannel, queue: str) -> AbstractChannel:
    """Return the channel after the queues were declared."""
    try:
        await channel.declare_queue(queue, passive=True)  # it may have arguments of its own
    except aio_pika.exceptions.ChannelNotFoundEntity:
        await channel.reopen()
        await channel.declare_queue(queue, durable=True)
    for name, arguments in queues_beside(queue).items():
        await channel.declare_queue(name, durable=True, arguments=arguments)
    return channel
