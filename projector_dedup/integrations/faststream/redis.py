"""FastStream with Redis streams: a stream whose entries go to a dispatcher, and are acknowledged after the commit."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from faststream import FastStream
from faststream.asgi import AsgiFastStream
from faststream.message import StreamMessage
from faststream.redis import RedisBroker, StreamSub
from redis.exceptions import RedisError, ResponseError

from ...dispatcher import AsyncDispatcher
from ...errors import InvalidMessageError
from ...message import printable
from ..incoming import Convert, Incoming, json_event
from ..redis_group import POLL, Due, Entry, Group, awaited, incoming_of
from ..settling import Settling, logger
from .raw import AS_IT_CAME

__all__ = ["subscribe"]

Application: TypeAlias = FastStream | AsgiFastStream

_CONTENT = b"__data__"  # the one field of an entry that FastStream has published, with headers and body in it
_BINARY = b"\x89BIN\r\n\x1a\n\x00\x01"  # how its binary form of that field begins
_BEFORE_HEADERS = len(_BINARY) + 4 + 4 + 2  # bytes: behind that beginning two offsets, and the number of the headers


class _Broken(Incoming):
    """An entry in an envelope of FastStream's whose headers cannot be trusted, the id among them."""


def subscribe(
    application: Application,
    broker: RedisBroker,
    stream: str,
    group: str,
    dispatcher: AsyncDispatcher,
    convert: Convert = json_event,
    *,
    batch: int | None = None,
    max_attempts: int | None = None,
    max_delay: float = 300.0,
    abandoned_after: float = 60.0,
) -> None:
    """Give the entries of a stream to a dispatcher, as long as the application runs. Call it before it is started.

    Entries are read by a subscriber of ``broker``, as a member of ``group``, and settled as
    ``projector_dedup.integrations.redis.Consumer`` settles them: acknowledged after the commit, kept pending until
    their delay is over, or added to the stream of dead letters. ``application`` runs the broker: at its start a group
    that is not there is made, and begins with the first entry; from then on it takes over what is to come again.

    ``convert`` makes the event of an entry, of those that FastStream has published too; FastStream decodes nothing.
    Entries are delivered one by one, those that come again beside the new ones. With ``batch`` up to so many of them
    are delivered in one transaction; each is settled by itself, and one that fails takes no other with it. Entries of
    a process that died are taken over after ``abandoned_after`` seconds: let it be longer than a handler, or a batch,
    takes. An entry is rejected after ``max_attempts`` deliveries; None sets no limit. ``max_delay`` bounds the seconds
    before it comes again.

    Raises ``HandlerDefinitionError`` for a dispatcher that is not an ``AsyncDispatcher``; the application does not
    start with a broker that has ``decode_responses=True``.
    """
    if batch is not None and batch < 1:
        raise ValueError(f"batch is a number of entries, at least 1, not {batch}")

    def convert_whole(incoming: Incoming) -> object:
        if isinstance(incoming, _Broken):
            raise InvalidMessageError(
                "the headers of the entry do not end where FastStream says that its body begins, so its id may be cut "
                "short: FastStream counts characters where it writes bytes; publish it with headers in ASCII"
            )
        return convert(incoming)

    settling = Settling(dispatcher, convert_whole, max_attempts=max_attempts, max_delay=max_delay, asynchronous=True)
    subscription = _Subscription(broker, Group(None, stream, group, abandoned_after), settling, batch)
    application.on_startup(subscription.open)
    application.after_startup(subscription.begin_to_take_over)


class _Subscription:
    """A subscriber of FastStream's that settles its entries, and is given those that are due beside the new ones."""

    def __init__(self, broker: RedisBroker, group: Group, settling: Settling, batch: int | None) -> None:
        self._broker, self._group, self._settling = broker, group, settling
        self._in_batches, self._size = batch is not None, batch or 1
        new = StreamSub(
            *(group.stream, round(POLL * 1000), group.name, group.member),
            batch=self._in_batches,
            max_records=self._size,  # more would be pending here, and look abandoned, while they wait for their turn
        )
        self._subscriber = broker.subscriber(stream=new, **{**AS_IT_CAME, "parser": self._parse})
        self._subscriber(self._settle)

    async def open(self) -> None:
        """Make the group before the broker starts: FastStream's would begin with what is published from then on."""
        self._group.client = await self._broker.connect()
        self._group.check()
        await awaited(self._group.open())

    async def begin_to_take_over(self) -> None:
        """Look for what is due, beside FastStream's reader, until the subscriber stops."""
        self._subscriber.add_task(self._take_over)

    async def _parse(self, message: Any) -> StreamMessage[Any]:
        """Return what middlewares see; FastStream's own parser fails at fields that are not UTF-8."""
        body, headers = self._content(_entries(message)[0])
        correlation = headers.get("correlation_id")
        if not isinstance(correlation, str):  # an old envelope may have a number, at which FastStream's log fails
            correlation = None  # FastStream makes one up
        return StreamMessage(message, body, headers=headers, correlation_id=correlation)

    async def _settle(self, message: Any) -> None:
        if self._group.client is None:
            logger.error(
                "the subscriber of stream %s ends, for nothing would come again to it: its broker was started without "
                "the application that subscribe was given",
                printable(self._group.stream),
            )
            raise SystemExit(1)
        entries = _entries(message.raw_message)
        incoming = [self._incoming(each) for each in entries]
        if self._in_batches:
            answers = await self._settling.adeliver_batch(incoming)
        else:
            answers = [await self._settling.adeliver(each) for each in incoming]
        refused: list[ResponseError] = []
        for entry, settled in zip(entries, answers, strict=True):
            try:
                await awaited(self._group.settle(entry, settled))
            except ResponseError as error:  # of this entry alone: its dead letter cannot be added, say
                refused.append(error)
        if refused:
            raise refused[0]

    async def _take_over(self) -> None:
        while self._subscriber.running:
            try:
                due = await awaited(self._group.due())
                while due and self._subscriber.running:
                    await self._deliver_again(due[: self._size])
                    del due[: self._size]
            except RedisError as error:
                logger.warning(
                    "the entries of stream %s that are due could not be looked for, which is tried again: %s",
                    printable(self._group.stream),
                    printable(f"{type(error).__name__}: {error}"[:500]),
                )
            await asyncio.sleep(POLL)

    async def _deliver_again(self, due: Sequence[Due]) -> None:
        """Take entries over, and give them to FastStream as its reader does."""
        taken = [await awaited(self._group.take(each)) for each in due]
        if entries := [each for each in taken if each is not None]:
            fields = [each.fields for each in entries]
            message: Any = {
                "type": "bstream" if self._in_batches else "stream",
                "channel": self._group.stream,
                "message_ids": [each.number for each in entries],
                "data": fields if self._in_batches else fields[0],
                "delivery_counts": [each.attempt - 1 for each in entries],
            }
            await self._subscriber.consume(message)

    def _incoming(self, entry: Entry) -> Incoming:
        """Return an entry for a converter, with FastStream's headers beside its body if FastStream has published it."""
        incoming = incoming_of(entry, self._group.stream)
        if _CONTENT not in entry.fields:
            return incoming
        body, headers = self._content(entry)
        if _is_broken(entry.fields[_CONTENT], body, headers):
            return _Broken(body, headers=incoming.headers, attempt=incoming.attempt, origin=incoming.origin)
        return replace(
            incoming,
            body=body,
            message_id=headers.get("message_id"),
            type=headers.get("type"),
            occurred_at=headers.get("occurred_at"),
            content_type=headers.get("content-type"),
            headers=headers,
        )

    def _content(self, entry: Entry) -> tuple[bytes, dict[str, Any]]:
        """Return the body and the headers of an entry that FastStream has published; both are empty for any other."""
        body, headers = self._subscriber.config.message_format.parse(entry.fields.get(_CONTENT, b""))
        return body, headers if isinstance(headers, dict) else {}  # an old envelope may have anything there


def _is_broken(content: bytes, body: bytes, headers: dict[str, Any]) -> bool:
    """Return True for a binary envelope that holds more, or less, than these headers and this body."""
    if not content.startswith(_BINARY):
        return False  # JSON, whose headers may be of any type
    held = sum(2 + len(text.encode()) for header in headers.items() for text in header)
    return len(content) != _BEFORE_HEADERS + held + len(body)


def _entries(raw: Any) -> list[Entry]:
    """Return the entries of a message of FastStream's, each with the number of its delivery."""
    fields = raw["data"] if isinstance(raw["data"], list) else [raw["data"]]
    before = raw.get("delivery_counts") or [0] * len(fields)
    entries = zip(raw["message_ids"], fields, before, strict=True)
    return [Entry(number, each, deliveries + 1) for number, each, deliveries in entries]
