"""A message: its id and its type, how they are found in an event, and whether every database can store them."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from .errors import InvalidMessageError, InvalidMessageIdError, RefusedError

MAX_MESSAGE_ID_BYTES = 512
MAX_HANDLER_BYTES = 255

Route = type | str
"""A class or a name by which the handlers of a message are found."""

IdExtractor = Callable[[Any], object]
"""A function that takes an event, or the body of a ``Message``, and returns its id, or None if it has none."""

TypeExtractor = Callable[[Any], object]
"""A function that takes an event, or the body of a ``Message``, and returns its type, or None if it has none."""


@dataclass(frozen=True)
class Message:
    """A small envelope for an event whose body does not carry its own id.

    Handlers are found by ``type`` (a class or a name); if there is none, by the type that the dispatcher's ``type=``
    finds in ``body``, or by the class of ``body``. ``occurred_at`` must have a time zone; it is stored beside the
    marker. If ``id`` is None it is given to ``deliver``, or found in ``body`` by the dispatcher's ``message_id=``.

    Raises ``InvalidMessageError`` for an ``id``, ``type`` or ``occurred_at`` that no delivery could use: here, before
    the message is in a batch with others.
    """

    id: object
    body: Any
    type: Route | None = None
    occurred_at: datetime | None = None

    def __post_init__(self) -> None:
        if self.id is not None:
            valid_message_id(self.id)
        if self.type is not None:
            valid_route(self.type)
        if self.occurred_at is not None:
            moment_in_utc(self.occurred_at)


def valid_message_id(value: object) -> str:
    """Return the text under which ``value`` is claimed. Raises ``InvalidMessageIdError`` if ``value`` is no id.

    Any text of 1 to 512 bytes of UTF-8 is an id, without NUL (PostgreSQL cannot store it) and without lone
    surrogates (nobody can). White space and case count. A ``uuid.UUID`` becomes its canonical text. Everything
    else is refused, because databases disagree on how a number, a bool or bytes becomes text.
    """
    if type(value) is str and value.isascii() and 0 < len(value) <= MAX_MESSAGE_ID_BYTES and "\0" not in value:
        return value  # the usual case, without the checks below
    if isinstance(value, uuid.UUID):
        return uuid.UUID.__str__(value)
    if value is None:
        raise InvalidMessageIdError(
            "the message has no id, so a redelivery could not be recognised; pass message_id=, give the event a "
            "message_id, or give the dispatcher an extractor (message_id=by_path(...))"
        )
    if not isinstance(value, str):
        raise InvalidMessageIdError(
            f"a message id is text, not {type(value).__name__}; convert it where its format is known: bytes by "
            "value.decode(), a number by str(value)"
        )
    return _bounded(str.__str__(value), "a message id", MAX_MESSAGE_ID_BYTES, InvalidMessageIdError)


def valid_route(value: object) -> Route:
    """Return ``value`` if it is a class, or a name as plain text. Raises ``InvalidMessageError`` for anything else."""
    if isinstance(value, str):
        return value if type(value) is str else str.__str__(value)  # a subclass may compare or hash as it likes
    if not isinstance(value, type):
        raise InvalidMessageError(
            f"the type of a message is a class or a name, not {type(value).__name__}; give one that a handler has "
            "in its @on(...)"
        )
    try:
        hash(value)
    except Exception as error:
        raise InvalidMessageError(
            "the class of the message cannot be hashed, so no handler can be found by it; name the message's type, "
            "Message(id, body, type=...)"
        ) from error
    return value


def moment_in_utc(value: object) -> datetime:
    """Return the moment as a plain datetime in UTC, which every database can store.

    Raises ``InvalidMessageError`` for anything else, and for a moment without a time zone.
    """
    if not isinstance(value, datetime):
        raise InvalidMessageError(f"occurred_at is a datetime, not {type(value).__name__}; parse it where it comes in")
    try:
        offset = datetime.utcoffset(value)
        if offset is not None:  # by methods of the base class: those of a subclass may do anything
            return (datetime.combine(datetime.date(value), datetime.time(value)) - offset).replace(tzinfo=UTC)
    except Exception as error:
        raise InvalidMessageError(
            "occurred_at cannot be converted to UTC: it is outside the years 1 to 9999 there, or its time zone fails; "
            "leave it out, or give a moment that a database can store"
        ) from error
    raise InvalidMessageError(
        "occurred_at has no time zone; give an aware datetime, such as datetime.now(timezone.utc)"
    )


@lru_cache
def valid_handler(identity: str) -> str:
    """Return a handler's identity as it is. Raises ``RefusedError`` if a database could not store it as a key."""
    return _bounded(identity, "a handler's identity", MAX_HANDLER_BYTES, RefusedError)


def valid_formerly(names: object, error: type[RefusedError] = RefusedError) -> tuple[str, ...]:
    """Return former names, each once and in the order of code points. Raises ``error`` if they are no names.

    Every claim takes them in this order.
    """
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
    """Return the text with unprintable characters escaped: an id must not forge a line in a log."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def envelope(event: Any, message_id: object, extractor: IdExtractor, *, needed: bool) -> Message:
    """Return the event in its envelope, which it may have already.

    A ``message_id`` that is given wins over the envelope's own, and that one over the extractor's, which looks into the
    body. If no id is ``needed``, the extractor may find something that is no id: the message has none then.
    """
    if isinstance(event, Message) and event.id is not None:
        return event if message_id is None else replace(event, id=message_id)
    if message_id is None:
        message_id = extractor(event.body if isinstance(event, Message) else event)
        if not needed and not _is_message_id(message_id):
            message_id = None
    return replace(event, id=message_id) if isinstance(event, Message) else Message(message_id, event)


def _is_message_id(value: object) -> bool:
    try:
        valid_message_id(value)
    except InvalidMessageIdError:
        return False
    return True


def route_of(event: object, extractor: TypeExtractor | None = None) -> Route:
    """Return how the event's handlers are found: by the ``type`` of a message that has one, else by its body.

    The type of a body is what the ``extractor`` finds in it, else its class.
    """
    if isinstance(event, Message):
        if event.type is not None:
            return valid_route(event.type)
        event = event.body
    found = None if extractor is None else extractor(event)
    return valid_route(type(event) if found is None else found)


def known_id(message: Message, *, needed: bool) -> str | None:
    """Return the id under which the message is claimed; if no id is ``needed``, the text of its id, or None."""
    return valid_message_id(message.id) if needed else id_text(message)


def id_text(message: Message) -> str | None:
    """Return the text of the message's id, for deliveries and logs; None if it is neither text nor a UUID.

    No method of a subclass is called: it might raise.
    """
    if isinstance(message.id, str):
        return str.__str__(message.id)
    return uuid.UUID.__str__(message.id) if isinstance(message.id, uuid.UUID) else None


# Extractors: functions that find the id of a message in its event -----------------------------------------------------


def attribute_or_key(event: Any) -> object:
    """Return the event's ``message_id``, an attribute or a key; None if it has none. This is the default extractor."""
    return _step(event, "message_id")


def by_path(path: str) -> IdExtractor:
    """Return an extractor that follows a dotted path of attributes and keys, as in ``by_path("metadata.headers.id")``.

    The extractor returns None where a step of the path leads nowhere.
    """
    steps = path.split(".")

    def extract(event: Any) -> object:
        for step in steps:
            event = _step(event, step)
            if event is None:
                return None
        return event

    return extract


def cloudevents(event: Any) -> object:
    """Return the id of a CloudEvents 1.0 event, made of ``source`` and ``id``: only *together* they are unique (3.1.1).

    Raises ``InvalidMessageIdError`` if one of them is missing, or is not text.
    """
    return _composite("cloudevents", event, {"source": str, "id": str})


def kafka(event: Any) -> object:
    """Return the id of a Kafka record, made of its topic, partition and offset: attributes, methods or keys.

    An event that is published again has another offset, and would be applied again: use it only where each event is
    written to its topic once. Raises ``InvalidMessageIdError`` if one of them is missing, or of another type.
    """
    return _composite("kafka", event, {"topic": str, "partition": int, "offset": int})


def hashed(extractor: IdExtractor) -> IdExtractor:
    """Return an extractor that gives the SHA-256, in hexadecimal, of the id that ``extractor`` finds.

    Use it for ids over 512 bytes, and for personal ones: ids are stored and logged.
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
