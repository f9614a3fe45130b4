"""A message, where its id is found, and which ids can be told apart on every database."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from typing import Any

from .errors import InvalidMessageIdError, RefusedError

MAX_MESSAGE_ID_BYTES = 512
MAX_HANDLER_BYTES = 255

Route = type | str
"""What a message is routed by: a class, or a name."""

IdExtractor = Callable[[Any], object]
"""Takes the event that was given to ``deliver``; returns its id, or None where there is none."""


@dataclass(frozen=True)
class Message:
    """A small envelope for an event whose body does not carry its own id.

    ``type`` routes the message (a class or a name); without it, the class of ``body`` does. ``occurred_at`` must be
    aware of its time zone; it is stored beside the marker.
    """

    id: object
    body: Any
    type: Route | None = None
    occurred_at: datetime | None = None

    def __post_init__(self) -> None:
        if self.occurred_at is not None and self.occurred_at.tzinfo is None:
            raise RefusedError(
                "Message.occurred_at has no time zone; give an aware datetime, such as datetime.now(timezone.utc)"
            )


def valid_message_id(value: object) -> str:
    """The text under which ``value`` is claimed, or ``InvalidMessageIdError``.

    Any text of 1 to 512 bytes of UTF-8 is an id, without NUL (PostgreSQL cannot store it) and without lone
    surrogates (nobody can). White space and case count. A ``uuid.UUID`` is its canonical text. Everything else is
    refused, because databases disagree on how a number, a bool or bytes becomes text.
    """
    if type(value) is str and value.isascii() and 0 < len(value) <= MAX_MESSAGE_ID_BYTES and "\0" not in value:
        return value  # as nearly always
    if isinstance(value, uuid.UUID):
        return uuid.UUID.__str__(value)
    if value is None:
        raise InvalidMessageIdError(
            "the message has no id, so a redelivery could not be recognised; pass message_id=, give the event a "
            "message_id, or give the dispatcher an extractor (message_id=by_path(...))"
        )
    if not isinstance(value, str):
        raise InvalidMessageIdError(
            f"a message id is text, not {type(value).__name__}; convert it where its format is known, as in str(...)"
        )
    return _bounded(str.__str__(value), "a message id", MAX_MESSAGE_ID_BYTES, InvalidMessageIdError)


@lru_cache
def valid_handler(identity: str) -> str:
    """The identity itself, or ``RefusedError`` if it could not be a key."""
    return _bounded(identity, "a handler's identity", MAX_HANDLER_BYTES, RefusedError)


def valid_formerly(names: object, error: type[RefusedError] = RefusedError) -> tuple[str, ...]:
    """Former names, each once and in the order of code points, in which every claim takes them; or ``error``."""
    if names == ():
        return ()
    if isinstance(names, str) or not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise error('formerly is a list of names, as in formerly=["billing.projections.Totals"]')
    return tuple(sorted({_bounded(name, "a former name", MAX_HANDLER_BYTES, error) for name in names}))


def _bounded(text: str, what: str, limit: int, error: type[RefusedError]) -> str:
    if not text:
        raise error(f"{what} must not be empty")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise error(f"{what} has a lone surrogate, which no database can store: {printable(text)[:80]}") from None
    if "\0" in text:
        raise error(f"{what} has a NUL character, which PostgreSQL cannot store: {printable(text)[:80]}")
    if size > limit:
        raise error(
            f"{what} is limited to {limit} bytes of UTF-8, this one has {size}: {printable(text[:40])}...; "
            "hashed(extractor) makes long ids short"
        )
    return text


def printable(text: str) -> str:
    """The text with control and other unprintable characters escaped: an id must not forge a line in a log."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def envelope(event: Any, message_id: object, extractor: IdExtractor) -> Message:
    """The event in its envelope: a given id wins over the envelope's own, and that over the extractor's."""
    if isinstance(event, Message):
        return event if message_id is None else replace(event, id=message_id)
    return Message(extractor(event) if message_id is None else message_id, event)


def route_of(event: object) -> Route:
    """By what it is routed: the ``type`` of a message that names one, else the class of its body."""
    if not isinstance(event, Message):
        return type(event)
    return type(event.body) if event.type is None else event.type


def known_id(message: Message, *, needed: bool) -> str | None:
    """The id under which the message is claimed; if nothing claims it, its text or None."""
    if needed:
        return valid_message_id(message.id)
    return str(message.id) if isinstance(message.id, (str, uuid.UUID)) else None


def attribute_or_key(event: Any) -> object:
    """The default extractor: the event's ``message_id``, as attribute or key."""
    return _step(event, "message_id")


def by_path(path: str) -> IdExtractor:
    """An extractor that follows a dotted path of attributes and keys: ``by_path("metadata.headers.id")``."""
    steps = path.split(".")

    def extract(event: Any) -> object:
        for step in steps:
            event = _step(event, step)
            if event is None:
                return None
        return event

    return extract


def cloudevents(event: Any) -> object:
    """An extractor for CloudEvents 1.0, where ``source`` and ``id`` *together* are unique (section 3.1.1)."""
    return _composite("cloudevents", event, {"source": str, "id": str})


def kafka(event: Any) -> object:
    """An extractor for Kafka records: topic, partition and offset, as attributes, methods or keys."""
    return _composite("kafka", event, {"topic": str, "partition": int, "offset": int})


def hashed(extractor: IdExtractor) -> IdExtractor:
    """An extractor that hides or shortens what another finds: the SHA-256 of its text, in hexadecimal.

    For ids over 512 bytes, and for personal ones (ids are stored and logged).
    """

    def extract(event: Any) -> object:
        value = extractor(event)
        if value is None or value == "":
            return value
        text = str.__str__(value) if isinstance(value, str) else valid_message_id(value)
        try:
            return hashlib.sha256(text.encode()).hexdigest()
        except UnicodeEncodeError:
            return valid_message_id(text)  # refuses it, and says why

    return extract


def _step(event: Any, name: str) -> Any:
    if isinstance(event, Mapping):
        return event.get(name)
    return getattr(event, name, None)


def _composite(kind: str, event: Any, parts: Mapping[str, type[str | int]]) -> str:
    texts = []
    for name, kind_of_part in parts.items():
        value = _step(event, name)
        if callable(value):
            value = value()
        if isinstance(value, uuid.UUID):
            value = valid_message_id(value)
        if value is None or value == "":
            raise InvalidMessageIdError(f"the {kind} id needs {' and '.join(parts)}; this event has no {name}")
        if not isinstance(value, kind_of_part) or isinstance(value, bool):  # else 1 and "1" would be one message
            raise InvalidMessageIdError(
                f"the {name} of a {kind} id is {kind_of_part.__name__}, not {type(value).__name__}"
            )
        text = str.__str__(value) if isinstance(value, str) else int.__repr__(value)
        texts.append(f"{len(text)}:{text}")  # a bare delimiter could occur inside a part
    return "".join(texts)
