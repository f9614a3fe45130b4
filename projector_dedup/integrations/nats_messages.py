"""Messages of a NATS stream as the server sends them: fetched and read here, because nats-py fails at some of them.

A producer may write anything into a subject and into the block of headers, and the server keeps it. nats-py takes a
block that begins with a status (``NATS/1.0 503``) for an answer of the server, and it reads nothing more from its
connection after a block or a subject that it cannot decode.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Awaitable, Callable

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.protocol import parser

__all__ = ["UNREADABLE", "Pull", "headers_of"]

UNREADABLE = "\ufffd"
"""Stands in the value of a header for bytes that are not UTF-8, and between the values of a header that comes twice."""
_FROM_A_STREAM = b"$JS.ACK."  # how the reply of a message begins; an answer of the server has no such reply
_VERSION = b"NATS/1.0"

_Receive = Callable[[bytes, bytes, bytes, bytes], None]
_Process = Callable[[int, bytes, bytes, bytes, bytes], Awaitable[None]]


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
