"""Consume a Redis stream: acknowledge after the commit, delay what comes too early, keep what is rejected.

Needs the extra ``redis``, and Redis 6.2 or newer.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

from .extras import needs

with needs("redis"):
    import redis

from ..dispatcher import Dispatcher
from .incoming import Convert, json_event
from .redis_group import POLL, REJECTED_FOR, Entry, Group, at_once, dead_stream, incoming_of
from .settling import Settling, expect

__all__ = ["Consumer", "dead_stream", "replay"]


class Consumer:
    """Consumes the entries of ``stream`` as a member of ``group``, one after the other.

    An entry is acknowledged after the commit of its read-model write. What is to come again stays pending until its
    delay is over; a rejected entry is added to the stream of dead letters, and then acknowledged. Start as many
    processes as are wanted, all with the same ``group``. A group that is not there begins with the first entry.

    The event is made by ``convert`` of the fields ``body``, ``message_id`` and ``type``; all fields are its headers.
    An entry is rejected after ``max_attempts`` deliveries; None sets no limit. ``max_delay`` bounds the seconds before
    it comes again. Entries of a process that died are taken over after ``abandoned_after`` seconds; let that be longer
    than a handler takes, or two processes work on one entry, of which one then finds a duplicate.

    Raises ``HandlerDefinitionError`` for a dispatcher that is not a ``Dispatcher``, ``TypeError`` for an address in
    place of the client, and ``RefusedError`` for a client with ``decode_responses=True``.
    """

    def __init__(
        self,
        client: redis.Redis,
        stream: str,
        group: str,
        dispatcher: Dispatcher,
        convert: Convert = json_event,
        *,
        max_attempts: int | None = None,
        max_delay: float = 300.0,
        abandoned_after: float = 60.0,
    ) -> None:
        expect(
            (redis.Redis, redis.RedisCluster),
            client,
            'client is a redis.Redis, as in redis.Redis.from_url("redis://...")',
        )
        self._group = Group(client, stream, group, abandoned_after)
        self._group.check()
        self._settling = Settling(dispatcher, convert, max_attempts=max_attempts, max_delay=max_delay)
        self._client = client
        self._looked = float("-inf")
        self._stopping = False

    def run(self) -> None:
        """Consume until ``stop`` is called, or until Redis fails, which is raised."""
        at_once(self._group.open())
        while not self._stopping:
            for entry in itertools.chain(self._due(), self._new()):
                settled = self._settling.deliver(incoming_of(entry, self._group.stream))
                at_once(self._group.settle(entry, settled))

    def stop(self, *_: object) -> None:
        """Let ``run`` return when the entry at hand is settled. Another thread or a signal handler may call it."""
        self._stopping = True

    def _new(self) -> Iterator[Entry]:
        """Yield the next entry that no member of the group has read, if there is one within a second."""
        group = self._group
        streams: Any = {group.stream: ">"}
        answer: Any = self._client.xreadgroup(group.name, group.member, streams, count=1, block=round(POLL * 1000))
        for _, entries in answer.items() if isinstance(answer, dict) else answer or ():
            for number, fields in entries[0] if isinstance(entries[0], list) else entries:  # in a list with protocol=3
                yield Entry(number, fields, 1)

    def _due(self) -> Iterator[Entry]:
        """Yield, once a second, the entries that are to come again by now, and those of processes that died."""
        if time.monotonic() < self._looked + POLL:
            return
        for due in at_once(self._group.due()):
            if self._stopping:
                return
            if (entry := at_once(self._group.take(due))) is not None:
                yield entry
        self._looked = time.monotonic()  # behind them, so that new entries have their second too


def replay(client: redis.Redis, stream: str, group: str) -> int:
    """Add the dead letters of a group to its stream again, and delete them there; return their number.

    Call it after the handler or the data was mended. Every group of the stream gets the entries: those that had
    applied them find duplicates, by the id in the message.
    """
    dead = dead_stream(stream, group)
    letters: Any = client.xrange(dead)  # what is rejected anew while this runs stays
    for number, fields in letters:
        kept = {name: value for name, value in fields.items() if name != REJECTED_FOR.encode()}
        client.xadd(stream, kept or fields)  # an entry has one field at least
        client.xdel(dead, number)
    return len(letters)
