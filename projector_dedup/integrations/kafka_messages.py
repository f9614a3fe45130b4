"""Kafka messages: what of a message is handed on, and what is written into the headers of its copies."""

from __future__ import annotations

import time
from collections.abc import Mapping
from operator import methodcaller
from typing import TypeAlias

from confluent_kafka import TIMESTAMP_CREATE_TIME, Message

from .incoming import Incoming
from .settling import logger

ATTEMPT = "projector-dedup-attempt"
"""The number that the next delivery of a copy has."""
NOT_BEFORE = "projector-dedup-not-before"
"""The moment before which a copy is not delivered, in milliseconds since 1970."""
OCCURRED = "projector-dedup-timestamp"
"""The timestamp of the original: a copy has its own, since its topic keeps it for a time from then on."""
CAME_FROM = "projector-dedup-origin"
"""The topic, partition and offset of the message that was copied first."""
REASON = "projector-dedup-reason"
"""The error, in short, for which a message was rejected."""
LEFT_OUT = "projector-dedup-left-out"
"""The parts of the message that a copy is without. The id may be among them, so such a copy is rejected again."""
OURS = frozenset({ATTEMPT, NOT_BEFORE, OCCURRED, CAME_FROM, REASON, LEFT_OUT})
_NO_TEXT = b"\xff"  # an id that nobody can read: the message is rejected
_get_headers = methodcaller("headers")  # CPython 3.11 does not see that a quickened message.headers() has failed
_LARGEST = 1 << 64  # a number beyond it cannot be one that this library has written

Headers: TypeAlias = list[tuple[str, str | bytes | None]]


class Received:
    """One message from a topic. The headers of a copy are believed only if ``copied`` says that the topic is ours."""

    def __init__(self, message: Message, *, copied: bool) -> None:
        self.message = message
        self.topic, self.partition, self.offset = place_of(message)
        found = _headers(message)
        self._all: Headers = found or []
        ours = dict(self._all) if copied else {}
        if found is None:
            ours[LEFT_OUT] = "headers"
            logger.warning(
                "a header of %s has a name that is not UTF-8, so confluent-kafka gives none of its headers", self.origin
            )
        self._ours = {name: value for name, value in ours.items() if name in OURS}
        self.attempt = max(_number(self._ours.get(ATTEMPT), 1), 1)
        self.due = _number(self._ours.get(NOT_BEFORE), 0) / 1000
        """The time, as ``time.time()`` tells it, before which the message is not delivered."""

    @property
    def origin(self) -> str:
        """The place of the message, for log lines: topic, partition, offset."""
        return f"{self.topic} [{self.partition}] at offset {self.offset}"

    def incoming(self, id_header: str, attempt: int) -> Incoming:
        """Return the message for a converter. A header that came twice is a list, which no converter takes for text."""
        found: dict[str, object] = {}
        for name, value in self._all:
            if name not in OURS:
                found[name] = [found[name], value] if name in found else value
        return Incoming(
            self.message.value() or b"",
            message_id=_NO_TEXT if LEFT_OUT in self._ours else found.get(id_header),
            type=found.get("type"),
            occurred_at=self._occurred_at(),
            content_type=found.get("content-type"),
            headers=found,
            attempt=attempt,
            origin=self.origin,
        )

    def copy_headers(self, *, left_out: str = "", **added: str | int | None) -> Headers:
        """Return the headers for a copy: those of the message, where its original was, and the added ones of ours.

        ``attempt``, ``not_before`` and ``reason`` are the names that can be added. A copy of which something is
        ``left_out`` has none of the headers of the message.
        """
        kept = {name: value for name, value in self._ours.items() if name in (OCCURRED, CAME_FROM, LEFT_OUT)}
        if left_out:
            kept[LEFT_OUT] = left_out
        kept.setdefault(CAME_FROM, self.origin)
        if (occurred_at := self._occurred_at()) is not None:
            kept[OCCURRED] = str(round(occurred_at * 1000))
        for name, value in added.items():
            kept[f"projector-dedup-{name.replace('_', '-')}"] = None if value is None else str(value)
        return [(name, value) for name, value in self._all if name not in OURS and not left_out] + list(kept.items())

    def _occurred_at(self) -> float | None:
        """Return the seconds since 1970 that the producer of the original gave it; None if it gave none."""
        if OCCURRED in self._ours:
            return _number(self._ours[OCCURRED], 0) / 1000
        kind, milliseconds = self.message.timestamp()
        return milliseconds / 1000 if kind == TIMESTAMP_CREATE_TIME else None


def place_of(message: Message) -> tuple[str, int, int]:
    """Return the topic, the partition and the offset of a message that was consumed."""
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    if topic is None or partition is None or offset is None:
        raise ValueError("a message that was consumed has a topic, a partition and an offset")
    return topic, partition, offset


def milliseconds_from_now(seconds: float) -> int:
    """Return the moment so many seconds from now, in milliseconds since 1970."""
    return round((time.time() + seconds) * 1000)


def _headers(message: Message) -> Headers | None:
    """Return the headers of a message; None if confluent-kafka cannot read them."""
    try:
        found = _get_headers(message) or []
    except (SystemError, UnicodeDecodeError):  # the former is what CPython makes of the latter, raised beside a result
        return None
    return list(found.items() if isinstance(found, Mapping) else found)


def _number(value: str | bytes | None, default: int) -> int:
    """Return the number in a header; the default if there is none, because somebody else has written the header."""
    try:
        found = int(value or b"")
    except ValueError:
        return default
    return found if abs(found) < _LARGEST else default
