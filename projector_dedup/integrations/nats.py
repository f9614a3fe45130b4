"""Consume a NATS JetStream stream: acknowledge after the commit, delay what comes too early, keep what is rejected.

Needs the extra ``nats``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from .extras import needs

with needs("nats"):
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.errors import Error
    from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo
    from nats.js.errors import NotFoundError

from ..dispatcher import AsyncDispatcher
from ..errors import RefusedError
from .incoming import Convert, Incoming, json_event
from .nats_letters import dead_stream, id_beside, keep, open_dead_letters, replay
from .nats_messages import UNREADABLE, Pull
from .settling import Settled, Settling, expect, logger

__all__ = ["Consumer", "dead_stream", "replay"]

_NO_TEXT = b"\xff"  # what could not be read is given on as what nobody can read: a message with such an id is rejected
_TOO_LARGE = 300.0  # seconds after which a message comes again for which no dead letter can be made
_POLL = 1.0  # seconds that one fetch waits, and so the longest that stop() takes while nothing comes


class Consumer:
    """Consumes the messages of one stream, as the durable pull consumer ``durable``; or those of one ``subject`` in it.

    A message is acknowledged after the commit of its read-model write. What is to come again is returned to the
    server with a delay; a rejected message goes to the stream of dead letters, and is acknowledged after that stream
    has confirmed it. ``in_flight`` messages are delivered side by side: with 1 they are delivered in the order of the
    stream, but for those that come again. Start as many processes as are wanted, all with the same ``durable``.

    ``convert`` makes the event of a message, which is rejected after ``max_attempts`` deliveries; None sets no limit.
    ``max_delay`` bounds the seconds before it comes again. ``ack_wait`` is the number of seconds after which the
    messages of a process that died are delivered to another; those of a handler that takes longer are kept alive.

    Raises ``HandlerDefinitionError`` for a dispatcher that is not an ``AsyncDispatcher``, and ``TypeError`` for what
    is no connection.
    """

    def __init__(
        self,
        connection: Client,
        stream: str,
        durable: str,
        dispatcher: AsyncDispatcher,
        convert: Convert = json_event,
        *,
        subject: str | None = None,
        max_attempts: int | None = None,
        max_delay: float = 300.0,
        in_flight: int = 1,
        ack_wait: float = 30.0,
    ) -> None:
        expect(Client, connection, 'connection is what `await nats.connect("nats://...")` returns')
        if in_flight < 1 or ack_wait <= 0:
            raise ValueError(f"in_flight is at least 1, and ack_wait above 0 seconds: {in_flight=}, {ack_wait=}")
        self._connection, self._streams = connection, connection.jetstream()
        self._settling = Settling(
            dispatcher, convert, max_attempts=max_attempts, max_delay=max_delay, asynchronous=True
        )
        self._stream, self._subject, self._durable = stream, subject, durable
        self._in_flight, self._ack_wait = in_flight, ack_wait
        self._stopping = False

    async def run(self) -> None:
        """Consume until ``stop`` is called. Raises what ``open`` does, and the errors of a connection that fails."""
        await self.open()
        pull = Pull(self._connection, self._stream, self._durable)
        await pull.open()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._in_flight):
                    group.create_task(self._consume(pull))
        finally:
            await pull.unsubscribe()

    def stop(self, *_: object) -> None:
        """Let ``run`` return when the messages at hand are settled; a signal handler may call it."""
        self._stopping = True

    async def open(self) -> None:
        """Make the durable consumer and the stream of dead letters where they are missing.

        Raises ``RefusedError`` for a durable consumer that is there and would lose messages, or keep them for ever.
        """
        await open_dead_letters(self._streams, self._stream, self._durable)
        try:
            found = await self._streams.consumer_info(self._stream, self._durable)
        except NotFoundError:
            found = await self._streams.add_consumer(
                self._stream,
                ConsumerConfig(
                    durable_name=self._durable,
                    filter_subject=self._subject,
                    ack_policy=AckPolicy.EXPLICIT,
                    ack_wait=self._ack_wait,
                    max_deliver=-1,
                    max_ack_pending=-1,
                ),
            )
        self._check(found)

    def _check(self, found: ConsumerInfo) -> None:
        """Refuse a consumer that somebody else has made in a way that loses messages or stands still."""
        config = found.config
        for flaw in (
            config.ack_policy != AckPolicy.EXPLICIT and "its ack_policy is not explicit: the server forgets messages",
            (config.max_deliver or -1) > 0 and "it has a max_deliver: the server then drops a message unheard",
            (config.max_ack_pending or -1) > 0
            and "it has a max_ack_pending: once that many messages wait to come again, no other is delivered",
            config.deliver_subject is not None and "it is a push consumer",
            config.filter_subject != self._subject and f"its filter_subject is {config.filter_subject}",
        ):
            if flaw:
                raise RefusedError(
                    f"the consumer {self._durable} of the stream {self._stream} cannot be used: {flaw}; give another "
                    "durable=, or delete that consumer once it has nothing left to deliver"
                )
        self._ack_wait = config.ack_wait or self._ack_wait

    async def _consume(self, pull: Pull) -> None:
        while not self._stopping:
            for message in await self.fetch(pull, 1):
                await self.settle(message)

    async def fetch(self, pull: Pull, batch: int) -> list[Msg]:
        """Return up to ``batch`` messages, those that come within a second.

        Raises ``NotFoundError`` if nothing comes because somebody has deleted the durable consumer, or its stream.
        """
        if not (messages := await pull.fetch(batch, _POLL)):
            try:
                await self._streams.consumer_info(self._stream, self._durable)
            except NotFoundError:
                raise
            except Error as error:
                logger.warning(  # nats-py connects again by itself
                    "NATS does not answer for the consumer %s of the stream %s, which is asked again: %s",
                    *(self._durable, self._stream, type(error).__name__),
                )
        return messages

    async def settle(self, message: Msg) -> None:
        """Deliver one message, which is kept alive meanwhile, and tell the server what became of it."""
        async with self._kept_alive([message]):
            await self._answer(message, await self._settling.adeliver(_incoming(message, self._stream)))

    async def settle_batch(self, messages: Sequence[Msg]) -> None:
        """Deliver messages in one transaction, keep all of them alive meanwhile, and answer each by itself.

        Raises the error of the first answer that failed, a dead letter that cannot be kept say, when all are given.
        """
        failed: list[Exception] = []
        async with self._kept_alive(messages):
            answers = await self._settling.adeliver_batch([_incoming(each, self._stream) for each in messages])
            for message, settled in zip(messages, answers, strict=True):
                try:
                    await self._answer(message, settled)
                except Exception as error:  # noqa: BLE001  # of this message, which comes again after ack_wait
                    failed.append(error)
        if failed:
            raise failed[0]

    async def _answer(self, message: Msg, settled: Settled) -> None:
        if settled.acknowledge:
            await message.ack()
        elif settled.reject:
            if await keep(self._connection, message, self._stream, self._durable, settled.reason):
                await message.ack()
            else:
                await message.nak(delay=_TOO_LARGE)
        else:
            await message.nak(delay=settled.delay)

    @contextlib.asynccontextmanager
    async def _kept_alive(self, messages: Sequence[Msg]) -> AsyncIterator[None]:
        async def beat() -> None:
            while True:
                await asyncio.sleep(self._ack_wait / 3)
                for message in messages:
                    with contextlib.suppress(Exception):  # another process gets it too then, and finds a duplicate
                        await message.in_progress()

        heart = asyncio.create_task(beat())
        try:
            yield
        finally:
            heart.cancel()


def _incoming(message: Msg, stream: str) -> Incoming:
    found = message.headers or {}
    headers = {name: _NO_TEXT if UNREADABLE in value else value for name, value in found.items()}
    message_id = id_beside(found)
    return Incoming(
        body=message.data,
        message_id=_NO_TEXT if UNREADABLE in (message_id or "") else message_id,
        type=headers.get("type"),
        content_type=headers.get("content-type"),
        headers=headers,
        attempt=message.metadata.num_delivered or 1,
        origin=f"message {message.metadata.sequence.stream} of stream {stream}",
    )
