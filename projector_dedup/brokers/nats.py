"""Consume a NATS JetStream stream: acknowledge after the commit, retry with a delay, keep the dead letters.

Needs the extra ``nats``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from types import EllipsisType
from typing import Unpack
from urllib.parse import urlsplit

from ..extras import needs

with needs("nats"):
    import nats
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.errors import Error
    from nats.js import JetStreamContext
    from nats.js.api import AckPolicy, ConsumerConfig, ConsumerInfo, DiscardPolicy, StreamConfig
    from nats.js.errors import APIError, NotFoundError
    from nats.protocol import parser

from ..dispatcher import AsyncDispatcher
from ..errors import RefusedError
from .dead_letters import Decide, Judge, Sifted, replay_each
from .incoming import MAX_TEXT_BYTES, Convert, Incoming, json_event
from .running import CONNECT_TIMEOUT, Runs, cannot_reach, draining
from .settling import RetryOptions, Settled, check_batch, expect, logger, named_in_log, new_settling, undeclared

__all__ = ["Consumer", "dead_stream", "replay"]

_NO_TEXT = b"\xff"  # is not UTF-8, and replaces an unreadable value: a message with this id is rejected
_TOO_LARGE = 300.0  # seconds before the retry of a rejected message that is too large for a dead letter
_AT_ONCE = 0.01  # seconds in which the server sends messages that are there
_POLL = 1.0  # seconds that one fetch waits; `stop` takes as long if no message comes
UNREADABLE = "\ufffd"
"""Replaces bytes that are not UTF-8 in the value of a header, and separates the values of a repeated header."""
_FROM_A_STREAM = b"$JS.ACK."  # prefix of the reply subject of a stream's message; status messages do not have it
_VERSION = b"NATS/1.0"
REJECTED_FOR = "x-rejected-for"
SUBJECT = "x-subject"
MESSAGE_ID = "x-message-id"  # the id in a dead letter and its replay: the server would drop a repeated Nats-Msg-Id
_IDS = (MESSAGE_ID, "Nats-Msg-Id")
_LEFT_OUT = (REJECTED_FOR, SUBJECT, "Nats-Msg-Id")  # headers of a dead letter that its replay does not have
_AROUND = 64  # bytes of the header block in addition to names and values, with a reserve
_NAME = re.compile(r"(?!nats-)[!#$%&'*+\-.^_`|~0-9A-Za-z]+", re.IGNORECASE)
"""The names of headers that the library copies. nats-py publishes no others. The server acts on names with the prefix
Nats-: for ``Nats-Rollup`` it deletes messages of the stream, for ``Nats-Expected-...`` it refuses the message."""
_SUBJECT = re.compile(r"\S+")
_OF_A_STREAM = re.compile(r"[^\s.*>/\\]+")
_PATIENCE = 5.0  # seconds that a replay waits for the next dead letter

Headers = dict[str, str]
_Receive = Callable[[bytes, bytes, bytes, bytes], None]
_Process = Callable[[int, bytes, bytes, bytes, bytes], Awaitable[None]]


class Consumer(Runs):
    """Consumes the messages of one stream, or of one ``subject`` in it, as the durable pull consumer ``durable``.

    ``connection`` is the URL of NATS, or a connection of nats-py. ``run`` opens and closes the connection to a URL.

    The consumer acknowledges a message after the commit, and returns a message to retry to the server with a delay. It
    publishes a rejected message to the stream of dead letters, and acknowledges it after that stream has confirmed it.
    Up to ``batch`` messages that are there share one transaction. If fewer are there, the consumer waits ``batch_wait``
    seconds for more. ``in_flight`` messages, or batches, are delivered at the same time; with 1 they are delivered in
    the order of the stream, except for retries. Start as many processes as you need, all with the same ``durable``.

    ``convert`` builds the event from an ``Incoming``. ``source`` is that of ``SettlingOptions``. For a stream that
    lists several subjects, declare it, or give one ``subject``. A subject with a wildcard counts as one. After
    ``ack_wait`` seconds, the server delivers the messages of a process that died to another one. While a handler runs,
    the consumer extends this time. The other options are ``RetryOptions``.
    """

    def __init__(
        self,
        connection: Client | str,
        stream: str,
        durable: str,
        dispatcher: AsyncDispatcher,
        convert: Convert = json_event,
        *,
        subject: str | None = None,
        batch: int = 1,
        batch_wait: float = 0.0,
        source: str | EllipsisType | None = ...,
        in_flight: int = 1,
        ack_wait: float = 30.0,
        **options: Unpack[RetryOptions],
    ) -> None:
        expect((Client, str), connection, 'connection is a URL, or what `await nats.connect("nats://...")` returns')
        for name in (stream, durable):
            if not _OF_A_STREAM.fullmatch(name):
                raise ValueError(f"a name of a stream or consumer has no white space and none of . * > / \\: {name!r}")
        if in_flight < 1 or ack_wait <= 0:
            raise ValueError(f"in_flight is at least 1, and ack_wait above 0 seconds: {in_flight=}, {ack_wait=}")
        self._url = connection if isinstance(connection, str) else ""
        self._use(Client() if isinstance(connection, str) else connection)
        of_nats = {"source": None if source is ... else source, "asynchronous": True, "broker": "nats"}
        self._settling = new_settling(Consumer.__init__, dispatcher, convert, options, **of_nats)
        self._stream, self._subject, self._durable = stream, subject, durable
        self._is_declared = source is not ...
        check_batch(batch, batch_wait)
        self._batch, self._batch_wait = batch, max(batch_wait, _AT_ONCE)
        self._in_flight, self._ack_wait = in_flight, ack_wait

    def _use(self, connection: Client) -> None:
        self._connection, self._streams = connection, connection.jetstream()

    async def settle_dead_letters(self, decide: Decide) -> Sifted:
        """Keep, replay or drop each present dead letter, as ``decide`` says. ``replay`` explains when."""
        async with self._connected() as connection:
            return await _sift(connection, self._stream, self._durable, self._settling.judge(decide))

    async def run(self) -> None:
        """Consume until ``stop`` is called, or until SIGTERM or Ctrl-C in the main thread.

        Raises ``ConnectionError`` if NATS cannot be reached, the errors of ``open``, and those of a failed connection.
        """
        with draining(partial(asyncio.get_running_loop().call_soon_threadsafe, self.stop)):
            async with self._connected() as connection:
                self._use(connection)
                await self.open()
                pull = Pull(self._connection, self._stream, self._durable)
                await pull.open()
                at = self._connection.connected_url
                self._log_start(f"stream {self._stream} of NATS at {at and at.netloc.rpartition('@')[2]}")
                try:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(self._in_flight):
                            group.create_task(self._consume(pull))
                finally:
                    await pull.unsubscribe()

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Client]:
        """Yield the consumer's connection, or one to its URL, for which nats-py itself would try two minutes."""
        if not self._url:
            yield self._connection
            return
        failed: list[Exception] = []
        connected = False

        async def note(error: Exception) -> None:
            failed.append(error)
            if connected:
                logger.warning("NATS: %s; the consumer continues", str(error) or type(error).__name__)

        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                connection = await nats.connect(self._url, error_cb=note)
        except (OSError, Error) as error:
            address = urlsplit(self._url).netloc.rpartition("@")[2]
            raise cannot_reach("NATS", address, failed[-1] if failed else error) from error
        connected = True
        async with connection:
            yield connection

    async def open(self) -> None:
        """Create the durable consumer and the stream of dead letters if they are missing.

        Raises ``RefusedError`` if one of them exists with settings that can lose messages or stop the deliveries, if
        the stream is missing, or if it has several subjects, and neither ``subject`` nor ``source`` is given.
        """
        subjects = (await _config_of(self._streams, self._stream)).subjects or ()
        if len(subjects) > 1 and self._subject is None and not self._is_declared:
            raise RefusedError(
                f"{undeclared('several subjects')}; or run one consumer for each, with its subject= and source="
            )
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
        """Raise ``RefusedError`` for an existing durable consumer that can lose messages or stop the deliveries."""
        config = found.config
        for flaw in (
            config.ack_policy != AckPolicy.EXPLICIT and "its ack_policy is not explicit: the server forgets messages",
            (config.max_deliver or -1) > 0 and "it has a max_deliver: the server then drops a message silently",
            (config.max_ack_pending or -1) > 0
            and "it has a max_ack_pending: if that many messages wait for a retry, the server delivers no other",
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
            if messages := await self.fetch(pull, 1):
                if self._batch > 1:
                    messages += await pull.fetch(self._batch - 1, self._batch_wait)
                await self.settle(messages)

    async def fetch(self, pull: Pull, batch: int) -> list[Msg]:
        """Return up to ``batch`` messages that arrive within a second.

        Raises ``NotFoundError`` if the durable consumer or its stream was deleted.
        """
        if not (messages := await pull.fetch(batch, _POLL)):
            try:
                await self._streams.consumer_info(self._stream, self._durable)
            except NotFoundError:
                raise
            except Error as error:
                logger.warning(  # nats-py reconnects by itself
                    "NATS does not answer for the consumer %s of the stream %s; the library asks again: %s",
                    *(self._durable, self._stream, type(error).__name__),
                )
        return messages

    async def settle(self, messages: Sequence[Msg]) -> None:
        """Deliver messages in one transaction, extend their ``ack_wait`` meanwhile, and settle each separately.

        If the server refuses an acknowledgement or a dead letter, raises the first error after settling the others.
        """
        failed: list[Exception] = []
        async with self._kept_alive(messages):
            answers = await self._settling.adeliver_batch([incoming_of(each, self._stream) for each in messages])
            for message, settled in zip(messages, answers, strict=True):
                try:
                    await self._answer(message, settled)
                except Exception as error:  # noqa: BLE001  # the server delivers this message again after ack_wait
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
                    with contextlib.suppress(Exception):  # another process then gets the message too: a duplicate
                        await message.in_progress()

        heart = asyncio.create_task(beat())
        try:
            yield
        finally:
            heart.cancel()


def incoming_of(message: Msg, stream: str) -> Incoming:
    """Return a message of JetStream for a converter."""
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
    """Return the name of the stream with the dead letters of the consumer ``durable`` of ``stream``."""
    return f"{stream}-{durable}-dead"


async def _config_of(streams: JetStreamContext, stream: str) -> StreamConfig:
    """Return the settings of the stream to consume. Raises ``RefusedError`` if it is missing."""
    try:
        return (await streams.stream_info(stream)).config
    except NotFoundError as error:
        raise RefusedError(f"NATS has no stream {stream}: create it (`nats stream add`) or correct its name") from error


async def open_dead_letters(streams: JetStreamContext, stream: str, durable: str) -> None:
    """Create the stream of dead letters, with the storage and the replicas of ``stream``.

    Raises ``RefusedError`` if it exists and belongs to another consumer, or discards old messages when it is full, and
    if ``stream`` is missing.
    """
    dead, subject = dead_stream(stream, durable), _dead_subject(stream, durable)
    try:
        found = (await streams.stream_info(dead)).config
    except NotFoundError:
        beside = await _config_of(streams, stream)
        await streams.add_stream(
            name=dead, subjects=[subject], storage=beside.storage, num_replicas=beside.num_replicas
        )
        return
    bounded = max(found.max_msgs or 0, found.max_bytes or 0, found.max_msgs_per_subject or 0) > 0
    if found.subjects != [subject] or (bounded and found.discard != DiscardPolicy.NEW):
        raise RefusedError(
            f"the stream {dead} cannot keep dead letters: its subjects are {found.subjects}, or it has a limit of size "
            f"and discards the oldest; give it only the subject {subject}, and no limit or discard=new"
        )


async def keep(connection: Client, message: Msg, stream: str, durable: str, reason: str) -> bool:
    """Publish a dead letter, and return True after the server has stored it. The server drops a second copy.

    The dead letter lacks the headers that nats-py cannot publish, and those for which the server's ``max_payload`` has
    no room; the log names them. Returns False, and logs an error, if it is too large with only the library's headers.
    """
    stamp = message.metadata.timestamp.isoformat()  # a stream that is created again restarts its numbers
    number = message.metadata.sequence.stream
    headers = message.headers or {}
    named = {SUBJECT: message.subject, "Nats-Msg-Id": f"{stream}:{number}:{stamp}"}
    if (found := id_beside(headers)) is not None:
        is_kept = found == found.strip() and len(found.encode()) <= MAX_TEXT_BYTES  # nats-py strips spaces
        named[MESSAGE_ID] = found if is_kept else UNREADABLE  # a replay is rejected again
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
                    *(number, stream, len(changed), named_in_log(changed)),
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
    """Publish the dead letters of a consumer to their subjects again, and return their number.

    Fix the handler or the data first. Every consumer of the subject gets the messages; where they were applied before,
    they are duplicates. ``replay`` deletes each dead letter after the stream has confirmed its copy, so another replay
    at the same time may publish it too, and one of them counts it. If nats-py cannot publish to the subject of a dead
    letter, ``replay`` skips the dead letter and logs an error.
    """
    return (await _sift(connection, stream, durable, replay_each)).settled


async def _sift(connection: Client, stream: str, durable: str, judge: Judge) -> Sifted:
    """Settle the present dead letters. Reading them changes nothing in their stream."""
    streams, dead = connection.jetstream(), dead_stream(stream, durable)
    await open_dead_letters(streams, stream, durable)
    state = (await streams.stream_info(dead)).state  # excludes messages that are rejected again meanwhile
    everything = ConsumerConfig(ack_policy=AckPolicy.NONE, inactive_threshold=60.0)
    letters = Pull(connection, dead, (await streams.add_consumer(dead, everything)).name)
    await letters.open()
    settled = 0
    try:
        for _ in range(state.messages):
            found = await letters.fetch(1, _PATIENCE)
            if not found or found[0].metadata.sequence.stream > state.last_seq:
                break  # another replay has published the rest
            (letter,) = found
            number, headers = letter.metadata.sequence.stream, letter.headers or {}
            headers.pop("Nats-Msg-Id", None)  # of the dead letter, not of its message
            if (fate := judge(incoming_of(letter, dead), headers.get(REJECTED_FOR), None)) == "stop":
                break
            if fate == "replay" and not _SUBJECT.fullmatch(headers.get(SUBJECT, "")):
                logger.error(
                    "message %d of stream %s is not replayed, because nats-py cannot publish to the subject in its "
                    "header %s",
                    *(number, dead, SUBJECT),
                )
                continue
            if fate == "replay":
                kept = {name: each for name, each in headers.items() if name not in _LEFT_OUT and _NAME.fullmatch(name)}
                await streams.publish(headers[SUBJECT], letter.data, headers=kept or None, stream=stream)
            if fate != "keep":
                settled += await _deleted(streams, dead, number)
        return Sifted(state.messages, settled)
    finally:
        await letters.unsubscribe()


async def _deleted(streams: JetStreamContext, dead: str, number: int) -> bool:
    """Delete a dead letter. Return False if another process has deleted it."""
    try:
        return await streams.delete_msg(dead, number)
    except APIError:
        try:
            await streams.get_msg(dead, number)
        except NotFoundError:
            return False
        raise


def id_beside(headers: Headers) -> str | None:
    """Return the message id in the headers; None if there is none."""
    return headers.get(MESSAGE_ID, headers.get("Nats-Msg-Id"))


def _dead_subject(stream: str, durable: str) -> str:
    return f"dead.{stream}.{durable}"


# Messages as the server sends them -----------------------------------------------------------------------------------
#
# A producer may write any bytes into a subject and into the header block, and the server stores them. nats-py mistakes
# a block with a status (``NATS/1.0 503``) for an answer of the server. It also stops reading its connection after a
# block or a subject that it cannot decode. So the library fetches and reads messages itself.


class Pull:
    """Fetches messages of a durable consumer. Several tasks may fetch at the same time."""

    def __init__(self, connection: Client, stream: str, durable: str) -> None:
        self._connection = connection
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._inbox = connection.new_inbox()
        self._came: asyncio.Queue[Msg] = asyncio.Queue()

    async def open(self) -> None:
        """Subscribe to the inbox to which the server sends the messages. nats-py subscribes again after a reconnect."""
        _split_at_spaces()
        self._subscription = await self._connection.subscribe(self._inbox)
        _routes(self._connection)[self._subscription._id] = self._receive

    async def fetch(self, batch: int, seconds: float) -> list[Msg]:
        """Return ``batch`` messages as soon as they are there; after ``seconds``, return those that arrived."""
        end = asyncio.get_running_loop().time() + seconds
        found: list[Msg] = []
        while len(found) < batch and not self._came.empty():  # messages that arrived after the last fetch
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
        """End the subscription. The server delivers unacknowledged messages again."""
        _routes(self._connection).pop(self._subscription._id, None)
        if not self._connection.is_closed:
            await self._subscription.unsubscribe()

    def _receive(self, subject: bytes, reply: bytes, data: bytes, block: bytes) -> None:
        if reply.startswith(_FROM_A_STREAM):  # otherwise a status of the server: `fetch` waits until its timeout
            texts = subject.decode(errors="replace"), reply.decode()
            self._came.put_nowait(Msg(self._connection, *texts, data, headers_of(block) if block else None))


class _Router:
    """Replaces ``Client._process_msg``: passes messages of our subscriptions to ``Pull``, and all others to nats-py."""

    def __init__(self, others: _Process) -> None:
        self.routes: dict[int, _Receive] = {}
        self._others = others

    async def __call__(self, sid: int, subject: bytes, reply: bytes, data: bytes, block: bytes) -> None:
        if (receive := self.routes.get(sid)) is not None:
            receive(subject, reply, data, block)
        else:
            await self._others(sid, subject, reply, data, block)


def _routes(connection: Client) -> dict[int, _Receive]:
    """Return the receivers that get messages of a connection before nats-py, by the number of the subscription."""
    router: object = connection._process_msg
    if not isinstance(router, _Router):
        router = _Router(connection._process_msg)
        connection._process_msg = router  # type: ignore[method-assign, assignment]
    return router.routes


def _split_at_spaces() -> None:
    """Make nats-py split the line before a message as the server does: at spaces and tabs only.

    nats-py also splits it at form feeds and vertical tabs. A subject may contain them, and nats-py then loses its
    connection at each delivery of the message.
    """
    for name in ("MSG_RE", "HMSG_RE"):
        pattern: bytes = getattr(parser, name).pattern
        pattern = pattern.replace(rb"[^\s]+", rb"[^ \t\r\n]+").replace(rb"\s+", rb"[ \t]+")
        setattr(parser, name, re.compile(pattern))


def headers_of(block: bytes) -> dict[str, str]:
    """Return the headers in a block of any bytes. Ignores a status in the first line.

    If a header is repeated or is not UTF-8, its value contains ``UNREADABLE``. Do not use such a value as an id: two
    different ids could become equal.
    """
    found: dict[str, str] = {}
    first, *lines = block.split(b"\r\n")
    for line in lines if first == _VERSION or first.startswith(_VERSION + b" ") else [first, *lines]:
        if line:
            raw, _, rest = line.partition(b":")
            name, value = raw.strip().decode(errors="backslashreplace"), rest.strip().decode(errors="replace")
            found[name] = f"{found[name]}{UNREADABLE}{value}" if name in found else value
    return found
