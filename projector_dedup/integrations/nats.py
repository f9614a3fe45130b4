"""Consume a NATS JetStream stream: acknowledge after the commit, retry with a delay, keep the dead letters.

Needs the extra ``nats``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

from .extras import needs

with needs("nats"):
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.errors import Error
    from nats.js import JetStreamContext
    from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DiscardPolicy
    from nats.js.errors import NotFoundError
    from nats.protocol import parser

from ..dispatcher import AsyncDispatcher
from ..errors import RefusedError
from ..message import printable
from .incoming import MAX_TEXT_BYTES, Convert, Incoming, json_event
from .settling import Settled, Settling, expect, logger, named_in_log

__all__ = ["Consumer", "dead_stream", "replay"]

_NO_TEXT = b"\xff"  # what could not be read is given on as what nobody can read: a message with such an id is rejected
_TOO_LARGE = 300.0  # seconds after which a message comes again for which no dead letter can be made
_POLL = 1.0  # seconds that one fetch waits, and so the longest that stop() takes while nothing comes
UNREADABLE = "\ufffd"
"""Stands in the value of a header for bytes that are not UTF-8, and between the values of a header that comes twice."""
_FROM_A_STREAM = b"$JS.ACK."  # how the reply of a message begins; an answer of the server has no such reply
_VERSION = b"NATS/1.0"
REJECTED_FOR = "x-rejected-for"
SUBJECT = "x-subject"
MESSAGE_ID = "x-message-id"  # of a dead letter and its replay, whose Nats-Msg-Id the server would call a duplicate's
_IDS = (MESSAGE_ID, "Nats-Msg-Id")
_LEFT_OUT = (REJECTED_FOR, SUBJECT, "Nats-Msg-Id")  # headers of a dead letter that its replay is published without
_AROUND = 64  # bytes of a message's headers beside their names and values, and some to spare
_NAME = re.compile(r"(?!nats-)[!#$%&'*+\-.^_`|~0-9A-Za-z]+", re.IGNORECASE)
"""A name of a header that can be copied. nats-py publishes no other, and the server obeys those that begin with Nats-:
for ``Nats-Rollup`` it deletes what is in the stream, for ``Nats-Expected-...`` it refuses the message."""
_SUBJECT = re.compile(r"\S+")
_PATIENCE = 5.0  # seconds that a replay waits for the next dead letter

Headers = dict[str, str]
_Receive = Callable[[bytes, bytes, bytes, bytes], None]
_Process = Callable[[int, bytes, bytes, bytes, bytes], Awaitable[None]]


class Consumer:
    """Consumes the messages of one stream, as the durable pull consumer ``durable``; or those of one ``subject`` in it.

    The consumer acknowledges a message after the commit, and returns a message to retry to the server with a delay. It
    publishes a rejected message to the stream of dead letters, and acknowledges it after that stream has confirmed it.
    ``in_flight`` messages are delivered at the same time; with 1 they are delivered in the order of the stream, except
    for retries. Start as many processes as you need, all with the same ``durable``.

    ``convert`` makes the event of a message. The consumer rejects a message after ``max_attempts`` deliveries; None
    sets no limit. ``max_delay`` limits the seconds before a retry. After ``ack_wait`` seconds, the server delivers the
    messages of a process that died to another one. While a handler runs, the consumer extends this time.

    Raises ``HandlerDefinitionError`` for a dispatcher that is not an ``AsyncDispatcher``, and ``TypeError`` for
    anything but a connection.
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
            dispatcher, convert, max_attempts=max_attempts, max_delay=max_delay, asynchronous=True, broker="nats"
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
                    "NATS does not answer for the consumer %s of the stream %s; the library asks again: %s",
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
                self._settling.kept(settled)
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
        id_name="header Nats-Msg-Id",
    )


# Dead letters --------------------------------------------------------------------------------------------------------


def dead_stream(stream: str, durable: str) -> str:
    """Return the name of the stream that keeps what the consumer ``durable`` of ``stream`` has rejected."""
    return f"{stream}-{durable}-dead"


async def open_dead_letters(streams: JetStreamContext, stream: str, durable: str) -> None:
    """Make the stream of dead letters, as safe as the stream that it stands beside.

    Raises ``RefusedError`` for one that is there and belongs to another consumer, or discards what it is full of.
    """
    dead, subject = dead_stream(stream, durable), _dead_subject(stream, durable)
    try:
        found = (await streams.stream_info(dead)).config
    except NotFoundError:
        beside = (await streams.stream_info(stream)).config
        await streams.add_stream(
            name=dead, subjects=[subject], storage=beside.storage, num_replicas=beside.num_replicas
        )
        return
    bounded = max(found.max_msgs or 0, found.max_bytes or 0, found.max_msgs_per_subject or 0) > 0
    if found.subjects != [subject] or (bounded and found.discard != DiscardPolicy.NEW):
        raise RefusedError(
            f"the stream {dead} cannot keep dead letters: its subjects are {found.subjects}, or it has a limit of size "
            f"and discards the oldest; let it have the subject {subject} alone, and no limit or discard=new"
        )


async def keep(connection: Client, message: Msg, stream: str, durable: str, reason: str) -> bool:
    """Publish a dead letter, and return True when the server has stored it; what is published twice is stored once.

    The letter is without the headers that cannot be published again, and without those that make it too large for the
    server; the log names them. Returns False, and logs that, if the letter is too large without any header but its own.
    """
    stamp = message.metadata.timestamp.isoformat()  # numbers begin again in a stream that was made anew
    number = message.metadata.sequence.stream
    headers = message.headers or {}
    named = {SUBJECT: message.subject, "Nats-Msg-Id": f"{stream}:{number}:{stamp}"}
    if (found := id_beside(headers)) is not None:
        is_kept = found == found.strip() and len(found.encode()) <= MAX_TEXT_BYTES  # nats-py cuts blanks off
        named[MESSAGE_ID] = found if is_kept else UNREADABLE  # to be rejected again
    for kept in _shorter_and_shorter(headers, named, reason):
        size = len(message.data) + sum(len(name) + len(value.encode()) + 4 for name, value in kept.items())
        if size + _AROUND <= connection.max_payload:
            await connection.jetstream().publish(
                _dead_subject(stream, durable), message.data, stream=dead_stream(stream, durable), headers=kept
            )
            changed = [name for name in headers if name not in _IDS and kept.get(name) != headers[name]]
            differs = [name for name, value in headers.items() if UNREADABLE in value or value != value.strip()]
            changed += [name for name in differs if name not in changed]
            if changed:
                logger.warning(
                    "the dead letter of message %d of stream %s lacks or changes %d of its headers: %s",
                    *(number, printable(stream), len(changed), named_in_log(changed)),
                )
            return True
    logger.error(
        "message %d of stream %s is too large for a dead letter, so NATS delivers it again: raise its max_payload",
        *(number, stream),
    )
    return False


def _shorter_and_shorter(headers: Headers, named: Headers, reason: str) -> Iterator[Headers]:
    copied = {name: value for name, value in headers.items() if _NAME.fullmatch(name)}
    yield {**copied, **named, REJECTED_FOR: reason.encode("ascii", "backslashreplace").decode()}
    yield {**copied, **named}
    yield named


async def replay(connection: Client, stream: str, durable: str) -> int:
    """Publish the dead letters of a consumer again, to the subject that each came from; return their number.

    Correct the handler or the data first. Every consumer of that subject gets the messages; for those that had applied
    them, they are duplicates. Each dead letter is deleted after the stream has confirmed its copy. A dead letter
    without a subject to which nats-py can publish is not replayed, and the library logs it.
    """
    streams, dead = connection.jetstream(), dead_stream(stream, durable)
    state = (await streams.stream_info(dead)).state  # what is rejected anew while this runs stays
    everything = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, max_ack_pending=-1, inactive_threshold=60.0)
    letters = Pull(connection, dead, (await streams.add_consumer(dead, everything)).name)
    await letters.open()
    count = 0
    try:
        for _ in range(state.messages):
            found = await letters.fetch(1, _PATIENCE)
            if not found or found[0].metadata.sequence.stream > state.last_seq:
                break  # another replay was quicker
            (letter,) = found
            number, headers = letter.metadata.sequence.stream, letter.headers or {}
            if not _SUBJECT.fullmatch(headers.get(SUBJECT, "")):
                await letter.ack()
                logger.error(
                    "message %d of stream %s is not replayed, because nats-py cannot publish to the subject in its "
                    "header %s",
                    *(number, printable(dead), SUBJECT),
                )
                continue
            kept = {name: value for name, value in headers.items() if name not in _LEFT_OUT and _NAME.fullmatch(name)}
            await streams.publish(headers[SUBJECT], letter.data, headers=kept or None, stream=stream)
            await letter.ack_sync()
            await streams.delete_msg(dead, number)
            count += 1
        return count
    finally:
        await letters.unsubscribe()


def id_beside(headers: Headers) -> str | None:
    """Return the id that a message has in its headers; None if it has none."""
    return headers.get(MESSAGE_ID, headers.get("Nats-Msg-Id"))


def _dead_subject(stream: str, durable: str) -> str:
    return f"dead.{stream}.{durable}"


# Messages as the server sends them -----------------------------------------------------------------------------------
#
# A producer may write anything into a subject and into the block of headers, and the server keeps it. nats-py takes a
# block that begins with a status (``NATS/1.0 503``) for an answer of the server, and it reads nothing more from its
# connection after a block or a subject that it cannot decode. So the library fetches and reads messages itself.


class Pull:
    """Fetches messages of a durable consumer. Several tasks may fetch at the same time."""

    def __init__(self, connection: Client, stream: str, durable: str) -> None:
        self._connection = connection
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._inbox = connection.new_inbox()
        self._came: asyncio.Queue[Msg] = asyncio.Queue()

    async def open(self) -> None:
        """Subscribe to the inbox to which the server sends the messages; nats-py does that again when it reconnects."""
        _split_at_spaces()
        self._subscription = await self._connection.subscribe(self._inbox)
        _routes(self._connection)[self._subscription._id] = self._receive

    async def fetch(self, batch: int, seconds: float) -> list[Msg]:
        """Return ``batch`` messages as soon as there are so many; after ``seconds`` return those that came."""
        end = asyncio.get_running_loop().time() + seconds
        found: list[Msg] = []
        while len(found) < batch and not self._came.empty():  # what came when the last fetch was over
            found.append(self._came.get_nowait())
        if len(found) < batch:
            request = {"batch": batch - len(found), "expires": round(seconds * 1e9)}
            await self._connection.publish(self._next, json.dumps(request).encode(), self._inbox)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(end):
                while len(found) < batch:
                    found.append(await self._came.get())
        return found

    async def unsubscribe(self) -> None:
        """End the subscription. The server delivers again what came and was not acknowledged."""
        _routes(self._connection).pop(self._subscription._id, None)
        if not self._connection.is_closed:
            await self._subscription.unsubscribe()

    def _receive(self, subject: bytes, reply: bytes, data: bytes, block: bytes) -> None:
        if reply.startswith(_FROM_A_STREAM):  # else the server says that nothing comes: `fetch` waits for its time
            texts = subject.decode(errors="replace"), reply.decode()
            self._came.put_nowait(Msg(self._connection, *texts, data, headers_of(block) if block else None))


class _Router:
    """Stands in for ``Client._process_msg``: gives messages of our subscriptions to ``Pull``, and others to nats-py."""

    def __init__(self, others: _Process) -> None:
        self.routes: dict[int, _Receive] = {}
        self._others = others

    async def __call__(self, sid: int, subject: bytes, reply: bytes, data: bytes, block: bytes) -> None:
        if (receive := self.routes.get(sid)) is not None:
            receive(subject, reply, data, block)
        else:
            await self._others(sid, subject, reply, data, block)


def _routes(connection: Client) -> dict[int, _Receive]:
    """Return who receives the messages of a connection before nats-py reads them, by the number of the subscription."""
    router: object = connection._process_msg
    if not isinstance(router, _Router):
        router = _Router(connection._process_msg)
        connection._process_msg = router  # type: ignore[method-assign, assignment]
    return router.routes


def _split_at_spaces() -> None:
    """Let nats-py split the line before a message where the server does: at spaces and tabs only.

    nats-py splits it at form feeds and vertical tabs as well, which a subject may have. It then loses its connection at
    each delivery of that message.
    """
    for name in ("MSG_RE", "HMSG_RE"):
        pattern: bytes = getattr(parser, name).pattern
        pattern = pattern.replace(rb"[^\s]+", rb"[^ \t\r\n]+").replace(rb"\s+", rb"[ \t]+")
        setattr(parser, name, re.compile(pattern))


def headers_of(block: bytes) -> dict[str, str]:
    """Return the headers in a block, whatever is in it. A status in its first line is ignored.

    The value of a header that comes twice, or that is not UTF-8, has ``UNREADABLE`` in it: it must not be taken for an
    id, because two ids could look alike.
    """
    found: dict[str, str] = {}
    first, *lines = block.split(b"\r\n")
    for line in lines if first == _VERSION or first.startswith(_VERSION + b" ") else [first, *lines]:
        if line:
            raw, _, rest = line.partition(b":")
            name, value = raw.strip().decode(errors="backslashreplace"), rest.strip().decode(errors="replace")
            found[name] = f"{found[name]}{UNREADABLE}{value}" if name in found else value
    return found
