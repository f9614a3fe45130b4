"""One group of a Redis stream: which entries are to come again, and how an entry is settled.

Written once for both clients of redis-py. A method here is a generator of steps: it calls the client, yields what the
client returned, and is sent the answer. ``at_once`` runs the steps of a ``redis.Redis``, whose methods return the
answer; ``awaited`` those of a ``redis.asyncio.Redis``, whose methods return something to be awaited.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from redis.exceptions import ResponseError

from ..errors import RefusedError
from .incoming import Incoming
from .settling import Settled, logger

__all__ = [
    "POLL",
    "REJECTED_FOR",
    "Due",
    "Entry",
    "Group",
    "Steps",
    "at_once",
    "awaited",
    "dead_stream",
    "incoming_of",
]

POLL = 1.0
"""Seconds between two looks for entries that are due, and the longest wait for one that is new."""
REJECTED_FOR = "x-rejected-for"
_LATER = "later-"  # and the seconds: owners of entries that are to come again
_OWNER = re.compile(rb"later-(\d{1,3}(?:\.\d+)?(?:e-\d+)?)")  # a longer delay than 999 seconds is not one of ours
_MANY = 100  # entries of one owner that are found at one look
_LEAST_IDLE = 100  # milliseconds in which two processes that look at once do not take one entry both

T = TypeVar("T")
Steps = Generator[Any, Any, T]


@dataclass(frozen=True)
class Entry:
    """An entry to be delivered: its number, its fields, and which delivery this is, from 1."""

    number: bytes
    fields: Mapping[bytes, bytes]
    attempt: int


@dataclass(frozen=True)
class Due:
    """A pending entry that may be taken over: its delay is over, or its process has died."""

    number: bytes
    owner: bytes
    """The consumer to which it belongs."""
    idle: int
    """The milliseconds for which nobody must have touched it."""


class Group:
    """The pending entries of one group, and the stream of its dead letters.

    An entry that was read stays in its group's list of pending entries until it is acknowledged. One that is to come
    again is given to a consumer named after the delay, ``later-5`` say; when it has been idle for that long, whichever
    process looks first takes it over. Nothing is copied, so nothing can be lost between two lists.
    """

    def __init__(self, client: Any, stream: str, name: str, abandoned_after: float) -> None:
        if abandoned_after <= 0:
            raise ValueError(f"abandoned_after is a number of seconds above 0, not {abandoned_after}")
        if ":" in name:  # two pairs of a stream and a group would share their dead letters
            raise ValueError(f"the name of a group has no colon: {name!r}")
        self.client, self.stream, self.name = client, stream, name
        self.member = f"{socket.gethostname()}-{os.getpid()}"
        self._abandoned_after = abandoned_after

    def check(self) -> None:
        """Raise ``RefusedError`` for a client that decodes."""
        if self.client.get_encoder().decode_responses:
            raise RefusedError(
                "the client has decode_responses=True, so one body that is not UTF-8 would stop every consumer: give "
                "a client without it"
            )

    def open(self) -> Steps[None]:
        """Make the group if it is missing; it then begins with the first entry of the stream."""
        try:
            yield self.client.xgroup_create(self.stream, self.name, id="0", mkstream=True)
        except ResponseError:
            groups = yield self.client.xinfo_groups(self.stream)
            if all(each["name"] != self.name.encode() for each in groups):
                raise

    def due(self) -> Steps[list[Due]]:
        """Return the entries that are to come again by now, and those of processes that died."""
        found: list[Due] = []
        members = yield self.client.xinfo_consumers(self.stream, self.name)
        for member in members:
            if member["pending"]:
                later = _OWNER.fullmatch(member["name"])
                idle = max(_LEAST_IDLE, round(1000 * (float(later[1]) if later else self._abandoned_after)))
                pending = yield self.client.xpending_range(
                    self.stream, self.name, "-", "+", _MANY, member["name"], idle
                )
                found += [Due(each["message_id"], member["name"], idle) for each in pending]
        return found

    def take(self, due: Due) -> Steps[Entry | None]:
        """Take an entry over, and return it; None if somebody was quicker, or if it was deleted, which is logged."""
        pending = yield self.client.xpending_range(
            self.stream, self.name, due.number, due.number, 1, due.owner, due.idle
        )
        if not pending:  # the look that found it may be minutes old: another process handles it now, or has settled it
            return None
        claimed = yield self.client.xclaim(self.stream, self.name, self.member, due.idle, [due.number])
        for _, fields in claimed:
            return Entry(due.number, fields, pending[0]["times_delivered"] + 1)
        yield from self._tell_if_deleted(due.number)
        return None

    def settle(self, entry: Entry, settled: Settled) -> Steps[None]:
        """Acknowledge the entry, or keep it as a dead letter, or let it come again after its delay."""
        if settled.acknowledge:
            yield self.client.xack(self.stream, self.name, entry.number)
        elif settled.reject:
            letter: dict[Any, Any] = {**entry.fields, REJECTED_FOR: settled.reason}
            yield self.client.xadd(dead_stream(self.stream, self.name), letter)
            yield self.client.xack(self.stream, self.name, entry.number)  # behind it: kept twice perhaps, but not lost
        else:
            pending = yield self.client.xpending_range(
                self.stream, self.name, entry.number, entry.number, 1, self.member
            )
            if pending:  # else another process has taken it over meanwhile, and settles it
                owner = f"{_LATER}{settled.delay:g}"
                kept = yield self.client.xclaim(self.stream, self.name, owner, 0, [entry.number], idle=0, justid=True)
                if not kept:
                    yield from self._tell_if_deleted(entry.number)

    def _tell_if_deleted(self, number: bytes) -> Steps[None]:
        """Log that an entry which could not be claimed is lost, if it is: Redis forgets such an entry by the claim."""
        there = yield self.client.xrange(self.stream, number, number)
        if not there:
            logger.error(
                "entry %s of stream %s was deleted before group %s had applied it: it is lost",
                *(number.decode(), self.stream, self.name),
            )


def at_once(steps: Steps[T]) -> T:
    """Run steps on a client whose methods return the answer, and return their result."""
    try:
        answer = next(steps)
        while True:
            answer = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


async def awaited(steps: Steps[T]) -> T:
    """Run steps on a client whose methods are awaited, and return their result."""
    try:
        waiting = next(steps)
        while True:
            try:
                answer = await waiting
            except Exception as error:  # noqa: BLE001  # for the steps, as if the call had raised it
                waiting = steps.throw(error)
            else:
                waiting = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result


def dead_stream(stream: str, group: str) -> str:
    """Return the name of the stream that keeps what ``group`` has rejected of ``stream``."""
    return f"{stream}:{group}:dead"


def incoming_of(entry: Entry, stream: str) -> Incoming:
    """Return an entry for a converter: the field ``body``, those beside it, and all of them as its headers."""
    headers = {name.decode(errors="backslashreplace"): value for name, value in entry.fields.items()}
    return Incoming(
        body=entry.fields.get(b"body", b""),
        message_id=headers.get("message_id"),
        type=headers.get("type"),
        occurred_at=headers.get("occurred_at"),
        content_type=headers.get("content_type"),
        headers=headers,
        attempt=entry.attempt,
        origin=f"entry {entry.number.decode()} of stream {stream}",
        body_name='field "body" of the entry',
    )
