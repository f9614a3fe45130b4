"""Consume a Redis stream: acknowledge after the commit, retry with a delay, keep the dead letters.

Needs the extra ``redis``, and Redis 6.2 or newer.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from ..extras import needs

with needs("redis"):
    import redis

from ..dispatcher import Dispatcher
from ..errors import RefusedError
from .dead_letters import Decide, Judge, Sifted, replay_each
from .incoming import Convert, Incoming, json_event, with_headers
from .running import Runs, cannot_reach, draining, try_address
from .settling import Settled, SettlingOptions, check_batch, expect, filled, logger, new_settling

__all__ = ["Consumer", "dead_stream", "replay"]

_POLL = 1.0  # seconds between two searches for entries that are due, and the longest wait for a new entry
_REJECTED_FOR = "x-rejected-for"
_LATER = "later-"  # and the seconds of the delay: the owner of entries that wait for a retry
_OWNER = re.compile(rb"later-(\d{1,3}(?:\.\d+)?(?:e-\d+)?)")  # the library never uses a delay above 999 seconds
_MANY = 100  # entries of one owner in one search
_LEAST_IDLE = 100  # milliseconds; keeps two processes that search at the same time from taking the same entry


@dataclass(frozen=True)
class _Entry:
    """An entry to deliver: its number, its fields, and the number of this delivery, from 1."""

    number: bytes
    fields: Mapping[bytes, bytes]
    attempt: int


@dataclass(frozen=True)
class _Due:
    """A pending entry of ``owner`` that any process may take over after ``idle`` milliseconds without a delivery."""

    number: bytes
    owner: bytes
    idle: int


class Consumer(Runs):
    """Consumes the entries of ``stream`` as a member of ``group``, one after the other or in batches.

    The consumer acknowledges an entry after the commit. An entry to retry stays pending until its delay ends. The
    consumer adds a rejected entry to the stream of dead letters, and then acknowledges it. Start as many processes as
    you need, all with the same ``group``. If the group is missing, the consumer creates it at the first entry.

    ``convert`` builds the event from the fields ``body``, ``message_id`` and ``type``; the headers are all fields. Up
    to ``batch`` entries that are there share one transaction and one acknowledgement. If fewer are there, the consumer
    waits ``batch_wait`` seconds for more. After ``abandoned_after`` seconds, another process takes over the entries of
    a process that died. Choose more than a batch takes; otherwise two processes deliver one entry, and one of them
    finds a duplicate. The other options are ``SettlingOptions``. Raises ``RefusedError`` for a client with
    ``decode_responses=True``.
    """

    # An entry that was read stays in its group's list of pending entries until it is acknowledged. The consumer assigns
    # an entry to retry to a member named after the delay, for example ``later-5``. After that many seconds, the first
    # process that finds the entry takes it over. No entry is copied, so none can be lost between two lists.

    def __init__(
        self,
        client: redis.Redis,
        stream: str,
        group: str,
        dispatcher: Dispatcher,
        convert: Convert = json_event,
        *,
        batch: int = 1,
        batch_wait: float = 0.0,
        abandoned_after: float = 60.0,
        **options: Unpack[SettlingOptions],
    ) -> None:
        expect(
            (redis.Redis, redis.RedisCluster),
            client,
            'client is a redis.Redis, as in redis.Redis.from_url("redis://...")',
        )
        if abandoned_after <= 0:
            raise ValueError(f"abandoned_after is a number of seconds above 0, not {abandoned_after}")
        if ":" in group:  # otherwise two pairs of a stream and a group could share one stream of dead letters
            raise ValueError(f"the name of a group has no colon: {group!r}")
        self._client: Any = client  # redis-py's types say that each answer may be awaitable
        if self._client.get_encoder().decode_responses:
            raise RefusedError(
                "the client has decode_responses=True, so one body that is not UTF-8 would stop every consumer: give "
                "a client without it"
            )
        self._settling = new_settling(Consumer.__init__, dispatcher, convert, options, broker="redis")
        check_batch(batch, batch_wait)
        self._stream, self._group, self._abandoned_after = stream, group, abandoned_after
        self._batch, self._batch_wait = batch, batch_wait
        self._member = f"{socket.gethostname()}-{os.getpid()}"
        self._looked = float("-inf")

    def settle_dead_letters(self, decide: Decide) -> Sifted:
        """Keep, replay or drop each present dead letter, as ``decide`` says. ``replay`` explains when."""
        return _sift(self._client, self._stream, self._group, self._settling.judge(decide))

    def run(self) -> None:
        """Consume until ``stop`` is called, or until SIGTERM or Ctrl-C in the main thread.

        Raises ``ConnectionError`` if Redis cannot be reached, and the error of redis-py if it fails later.
        """
        with draining(self.stop):
            self._open()
            while not self._stopping:
                again = self._again()
                while entries := [*itertools.islice(again, self._batch)]:
                    self._settle(entries)
                found = self._new(self._batch, round(_POLL * 1000))
                if entries := filled(found, self._batch, self._batch_wait, self._new):
                    self._settle(entries)

    def _open(self) -> None:
        """Create the group if it is missing; it then starts at the first entry of the stream."""
        address = _reached(self._client)
        try:
            self._client.xgroup_create(self._stream, self._group, id="0", mkstream=True)
        except redis.ResponseError:
            if all(each["name"] != self._group.encode() for each in self._client.xinfo_groups(self._stream)):
                raise
        self._log_start(f"stream {self._stream} of Redis at {address} as group {self._group}")

    def _new(self, most: int, wait: int | None = None) -> list[_Entry]:
        """Return up to ``most`` entries that no member of the group has read; wait ``wait`` milliseconds for one."""
        answer = self._client.xreadgroup(self._group, self._member, {self._stream: ">"}, count=most, block=wait)
        return [
            _Entry(number, fields, 1)
            for _, entries in (answer.items() if isinstance(answer, dict) else answer or ())
            for number, fields in (entries[0] if isinstance(entries[0], list) else entries)  # protocol=3 adds a list
        ]

    def _again(self) -> Iterator[_Entry]:
        """Yield, once a second, the entries whose delay has ended, and those of processes that died."""
        if time.monotonic() < self._looked + _POLL:
            return
        for due in self._due():
            if self._stopping:
                return
            if (entry := self._take(due)) is not None:
                yield entry
        self._looked = time.monotonic()  # set at the end, to give new entries a second too

    def _due(self) -> list[_Due]:
        found: list[_Due] = []
        for member in self._client.xinfo_consumers(self._stream, self._group):
            if member["pending"]:
                later = _OWNER.fullmatch(member["name"])
                idle = max(_LEAST_IDLE, round(1000 * (float(later[1]) if later else self._abandoned_after)))
                pending = self._pending("-", "+", _MANY, member["name"], idle)
                found += [_Due(each["message_id"], member["name"], idle) for each in pending]
        return found

    def _take(self, due: _Due) -> _Entry | None:
        """Take over an entry and return it; None if another process has it, or if it was deleted, which is logged."""
        pending = self._pending(due.number, due.number, 1, due.owner, due.idle)
        if not pending:  # the search may be minutes old: another process has taken over the entry or settled it
            return None
        for _, fields in self._client.xclaim(self._stream, self._group, self._member, due.idle, [due.number]):
            return _Entry(due.number, fields, pending[0]["times_delivered"] + 1)
        self._log_if_deleted(due.number)
        return None

    def _settle(self, entries: Sequence[_Entry]) -> None:
        """Deliver entries, and acknowledge together those that are applied."""
        answers = self._settling.deliver_batch([_incoming(each, self._stream) for each in entries])
        applied: list[bytes] = []
        for entry, settled in zip(entries, answers, strict=True):
            if settled.acknowledge:
                applied.append(entry.number)
            else:
                self._settle_failed(entry, settled)
        if applied:
            self._client.xack(self._stream, self._group, *applied)

    def _settle_failed(self, entry: _Entry, settled: Settled) -> None:
        """Add the entry to the dead letters, or assign it to the member of its delay."""
        if settled.reject:
            letter: dict[Any, Any] = {**entry.fields, _REJECTED_FOR: settled.reason}
            self._client.xadd(dead_stream(self._stream, self._group), letter)
            self._settling.kept(settled)
            self._client.xack(self._stream, self._group, entry.number)  # last: a crash may duplicate it, not lose it
        elif self._pending(entry.number, entry.number, 1, self._member):  # otherwise another process has taken it over
            owner = f"{_LATER}{settled.delay:g}"
            if not self._client.xclaim(self._stream, self._group, owner, 0, [entry.number], idle=0, justid=True):
                self._log_if_deleted(entry.number)

    def _pending(self, first: str | bytes, last: str | bytes, count: int, owner: str | bytes, idle: int = 0) -> Any:
        """Return pending entries of one owner that were not delivered for ``idle`` milliseconds."""
        return self._client.xpending_range(self._stream, self._group, first, last, count, owner, idle or None)

    def _log_if_deleted(self, number: bytes) -> None:
        """Log an error if an entry was deleted from the stream. XCLAIM then removes it from the pending entries too."""
        if not self._client.xrange(self._stream, number, number):
            logger.error(
                "entry %s of stream %s was deleted before group %s had applied it: it is lost",
                *(number.decode(), self._stream, self._group),
            )


def _reached(client: Any) -> str:
    """Return the address of Redis. Raises ``ConnectionError``, which names the address, if it does not answer."""
    given: dict[str, Any] = client.get_connection_kwargs()
    host, port = given.get("host"), int(given.get("port", 6379))
    address = f"{host}:{port}" if host else given.get("path", "its nodes")
    if host:
        try_address("Redis", host, port)
    try:
        client.ping()
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise cannot_reach("Redis", address, error) from error
    return str(address)


def dead_stream(stream: str, group: str) -> str:
    """Return the name of the stream with the dead letters of ``group`` from ``stream``."""
    return f"{stream}:{group}:dead"


def replay(client: redis.Redis, stream: str, group: str) -> int:
    """Move the dead letters of a group back to its stream, and return their number.

    Fix the handler or the data first. Every group of the stream gets the entries; where they were applied before, they
    are duplicates. Two replays at the same time may add an entry twice, and one of them counts it. Raises
    ``ConnectionError`` if Redis cannot be reached.
    """
    return _sift(client, stream, group, replay_each).settled


def _sift(client: Any, stream: str, group: str, judge: Judge) -> Sifted:
    """Settle the present dead letters, but not entries that are rejected again meanwhile."""
    dead, settled = dead_stream(stream, group), 0
    _reached(client)
    there, last = client.xlen(dead), client.xrevrange(dead, count=1)
    letters = client.xrange(dead, max=last[0][0], count=_MANY) if last else []
    while letters:
        for number, fields in letters:
            fate = judge(_incoming(_Entry(number, fields, 1), dead), fields.get(_REJECTED_FOR.encode()), None)
            if fate == "stop":
                return Sifted(there, settled)
            if fate == "replay":
                kept = {name: value for name, value in fields.items() if name != _REJECTED_FOR.encode()}
                client.xadd(stream, kept or fields)  # an entry needs a field
            if fate != "keep":
                settled += client.xdel(dead, number)  # 0 if another process has settled it
        letters = client.xrange(dead, min=b"(" + letters[-1][0], max=last[0][0], count=_MANY)
    return Sifted(there, settled)


def _incoming(entry: _Entry, stream: str) -> Incoming:
    """Return an entry for a converter: its body, its id, type and time, and all fields as headers."""
    headers = {name.decode(errors="backslashreplace"): value for name, value in entry.fields.items()}
    return with_headers(
        entry.fields.get(b"body", b""),
        headers,
        attempt=entry.attempt,
        origin=f"entry {entry.number.decode()} of stream {stream}",
        body_name='field "body" of the entry',
        id_name='field "message_id" of the entry',
    )
