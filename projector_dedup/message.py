"""Messages: the id, the type and the time of an event, the functions that find them, and the checks of each."""

from __future__ import annotations

import hashlib
import logging
import traceback
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from .errors import InvalidMessageError, InvalidMessageIdError, RefusedError

MAX_MESSAGE_ID_BYTES = 512
MAX_HANDLER_BYTES = 255
DIGEST_BYTES = 16

Route = type | str
"""The type of a message, a class or a name. The dispatcher finds the handlers of the message by it."""

IdExtractor = Callable[[Any], Any]
"""A function that takes an event, or the body of a ``Message``, and returns its id, or None if it has none."""

TypeExtractor = Callable[[Any], object]
"""A function that takes an event, or the body of a ``Message``, and returns its type, or None if it has none."""


TimeExtractor = Callable[["Message"], datetime | None]
"""A function that takes a message without ``occurred_at`` and returns when it occurred, or None if that is unknown."""


@dataclass(frozen=True)
class Message:
    """An envelope for an event whose body does not contain its id.

    - ``id``: the message id, text or a UUID. If it is None, give ``message_id`` to ``deliver``, or let the dispatcher
      find the id in ``body`` with its ``message_id=``.
    - ``body``: the event that the handler gets.
    - ``type``: a class or a name, by which the dispatcher finds the handlers. If it is None, the dispatcher uses the
      type that its ``type=`` finds in ``body``, else the class of ``body``.
    - ``occurred_at``: when the event occurred, with a time zone. The library stores it in the marker.
    - ``source``: the name of what gave the id, such as a topic, if other sources may give the same id. The library
      stores it with the id (``stored_id``). With None, a consumer adds the source that it declares.
    - ``digest``: a hash of the bytes of the body, such as ``hashlib.sha256(raw).digest()``, of at least 16 bytes. The
      library stores the first 16 bytes in the marker. A duplicate with another digest has another body
      (``Dispatcher(other_body=...)``). None compares nothing.
    - ``has_source``: True if the id contains a source, as that of ``cloudevent`` does. A consumer adds no other then.

    Raises ``InvalidMessageError`` if an argument cannot be used. Reject the message then.
    """

    id: str | uuid.UUID | None
    body: Any
    type: Route | None = None
    occurred_at: datetime | None = None
    source: str | None = None
    digest: bytes | None = None
    has_source: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.id is not None:
            stored_id(self.id, self.source)
        elif self.source is not None:
            valid_source(self.source)
        if self.type is not None:
            valid_route(self.type)
        if self.occurred_at is not None:
            moment_in_utc(self.occurred_at)
        if self.digest is not None:
            valid_digest(self.digest)


def valid_message_id(value: object) -> str:
    """Return ``value`` as the text of a message id, or raise ``InvalidMessageIdError``.

    An id is text of 1 to 512 bytes of UTF-8, without NUL (PostgreSQL cannot store it) and without lone surrogates (no
    database can). White space and case count. A ``uuid.UUID`` becomes its canonical text. The library refuses numbers,
    booleans and bytes, because databases convert them to text in different ways.
    """
    if type(value) is str and value.isascii() and 0 < len(value) <= MAX_MESSAGE_ID_BYTES and "\0" not in value:
        return value  # the usual case, without the checks below
    if isinstance(value, uuid.UUID):
        return uuid.UUID.__str__(value)
    if value is None:
        raise InvalidMessageIdError(
            "the message has no id, so a redelivery could not be detected; pass deliver(..., message_id=...), give "
            "the event a message_id, or give the dispatcher an extractor (message_id=by_path(...))"
        )
    if not isinstance(value, str):
        raise InvalidMessageIdError(
            f"a message id must be text, not {type(value).__name__}; convert it before you deliver the message: bytes "
            "by value.decode(), a number by str(value)"
        )
    remedy = "hashed(extractor) shortens long ids"
    return _bounded(str.__str__(value), "a message id", MAX_MESSAGE_ID_BYTES, InvalidMessageIdError, remedy)


def stored_id(message_id: object, source: object = None) -> str:
    """Return the text under which the library stores a message id: the id itself, or the source and the id together.

    With a source, each of the two follows its number of characters and a colon: the id ``7`` of the source ``payments``
    is stored as ``8:payments1:7``. ``cloudevents`` makes its ids in the same way. Two different pairs of a source and
    an id never have one text. An id without a source can equal such a text only if it is written in this form itself.

    Use it to call ``claim``, ``find`` or ``forget`` for a message of a consumer with a ``source``. Raises
    ``InvalidMessageIdError`` if either cannot be used, or if both together have more than 512 bytes.
    """
    text = valid_message_id(message_id)
    if source is None:
        return text
    remedy = "choose a shorter source; hashed(extractor) shortens long ids"
    both = _joined(valid_source(source), text)
    return _bounded(both, "a message id with its source", MAX_MESSAGE_ID_BYTES, InvalidMessageIdError, remedy)


def valid_source(value: object) -> str:
    """Return the source of an id as text. Raises ``InvalidMessageIdError`` for what cannot be a part of an id."""
    if not isinstance(value, str):
        raise InvalidMessageIdError(f"the source of a message id must be text, not {type(value).__name__}")
    text = str.__str__(value)
    return _bounded(text, "the source of a message id", MAX_MESSAGE_ID_BYTES, InvalidMessageIdError, "shorten it")


def _joined(*parts: str) -> str:
    return "".join(f"{len(part)}:{part}" for part in parts)  # a bare delimiter could occur inside a part


def valid_route(value: object) -> Route:
    """Return ``value`` if it is a class or a name. Raises ``InvalidMessageError`` for anything else."""
    if isinstance(value, str):
        return value if type(value) is str else str.__str__(value)  # a subclass may compare or hash as it likes
    if not isinstance(value, type):
        raise InvalidMessageError(
            f"the type of a message must be a class or a name, not {type(value).__name__}; give one that is in the "
            "@on(...) of a handler"
        )
    try:
        hash(value)
    except Exception as error:
        raise InvalidMessageError(
            "the class of the message is not hashable, so the dispatcher cannot find its handlers; give the message a "
            "type: Message(id, body, type=...)"
        ) from error
    return value


def moment_in_utc(value: object) -> datetime:
    """Return the moment as a plain datetime in UTC, which every database can store.

    Raises ``InvalidMessageError`` if ``value`` is no datetime, or has no time zone.
    """
    if not isinstance(value, datetime):
        raise InvalidMessageError(
            f"occurred_at must be a datetime, not {type(value).__name__}; parse it before you deliver the message"
        )
    try:
        offset = datetime.utcoffset(value)
        if offset is not None:  # by methods of the base class: those of a subclass may do anything
            return (datetime.combine(datetime.date(value), datetime.time(value)) - offset).replace(tzinfo=UTC)
    except Exception as error:
        raise InvalidMessageError(
            "occurred_at cannot be converted to UTC: in UTC it is outside the years 1 to 9999, or its time zone raises "
            "an error; leave occurred_at out, or give a time that a database can store"
        ) from error
    raise InvalidMessageError(
        "occurred_at has no time zone; give an aware datetime, such as datetime.now(timezone.utc)"
    )


def valid_digest(value: object) -> bytes:
    """Return the bytes of a digest that a marker stores. Raises ``InvalidMessageError`` for anything but a hash."""
    if not isinstance(value, bytes) or len(value) < DIGEST_BYTES:
        raise InvalidMessageError(
            f"the digest of a message must be at least {DIGEST_BYTES} bytes, such as hashlib.sha256(raw).digest()"
        )
    return value[:DIGEST_BYTES]


@lru_cache
def valid_handler(identity: str) -> str:
    """Return a handler's identity unchanged. Raises ``RefusedError`` if a database could not store it as a key."""
    return _bounded(identity, "a handler's identity", MAX_HANDLER_BYTES, RefusedError, "give it a shorter name")


def valid_formerly(names: object, error: type[RefusedError] = RefusedError) -> tuple[str, ...]:
    """Return the former names without repetition, in the order of code points. Raises ``error`` for a wrong value.

    Every claim inserts the names in this order, so that two claims cannot deadlock.
    """
    if names == ():
        return ()
    if isinstance(names, str) or not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise error('formerly must be a list of names, as in formerly=["billing.projections.Totals"]')
    remedy = "no marker can have it, so remove it"
    return tuple(sorted({_bounded(name, "a former name", MAX_HANDLER_BYTES, error, remedy) for name in names}))


def _bounded(text: str, what: str, limit: int, error: type[RefusedError], remedy: str) -> str:
    if not text:
        raise error(f"{what} must not be empty")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise error(f"{what} contains a lone surrogate, which no database can store: {printable(text)[:80]}") from None
    if "\0" in text:
        raise error(f"{what} contains a NUL character, which PostgreSQL cannot store: {printable(text)[:80]}")
    if size > limit:
        raise error(
            f"{what} must have at most {limit} bytes of UTF-8, and this one has {size}: {printable(text[:40])}...; "
            f"{remedy}"
        )
    return text


def printable(text: str) -> str:
    """Return the text with unprintable characters escaped, so that an id cannot forge a line in a log."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def traced(error: BaseException) -> str:
    """Return the traceback of an error in indented lines of printable text, so that no text in it can forge a line."""
    lines = "".join(traceback.format_exception(error)).rstrip("\n").split("\n")
    return "\n".join(f"  {printable(line)}" for line in lines)


class _Harmless(logging.Filter):
    """Makes the texts of a record printable, because a message, a handler or a producer may have written them."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True, after each argument that is no number is printable text, and the traceback is indented."""
        if not record.args:
            record.msg = printable(str(record.msg))
        elif isinstance(record.args, tuple):
            record.args = tuple(
                each if isinstance(each, (int, float)) else printable(str(each)) for each in record.args
            )
        if record.exc_info and record.exc_info[1] is not None:
            record.exc_text = traced(record.exc_info[1])  # a formatter takes it in place of its own
        return True


_HARMLESS = _Harmless()


def logger_of(name: str) -> logging.Logger:
    """Return the logger of this name. No text in its lines can forge a line or act on a terminal."""
    logger = logging.getLogger(name)
    logger.addFilter(_HARMLESS)
    return logger


def envelope(event: Any, message_id: Any, extractor: IdExtractor, *, needed: bool) -> Message:
    """Return the event as a ``Message`` with its id.

    The id is ``message_id``, else the id of the ``Message``, else the one that the extractor finds in the body. If no
    id is ``needed`` and the extractor finds a value that is no id, the message has no id.
    """
    if isinstance(event, Message) and event.id is not None:
        return event if message_id is None else replace(event, id=message_id)
    if message_id is None:
        message_id = extractor(event.body if isinstance(event, Message) else event)
        if not needed and not _is_message_id(message_id, event.source if isinstance(event, Message) else None):
            message_id = None
    return replace(event, id=message_id) if isinstance(event, Message) else Message(message_id, event)


def _is_message_id(value: object, source: str | None) -> bool:
    try:
        stored_id(value, source)
    except InvalidMessageIdError:
        return False
    return True


def route_of(event: object, extractor: TypeExtractor | None = None) -> Route:
    """Return the type by which the dispatcher finds the event's handlers.

    The type is the ``type`` of a ``Message``, else what the ``extractor`` finds in the body, else the class of the body
    itself.
    """
    if isinstance(event, Message):
        if event.type is not None:
            return valid_route(event.type)
        event = event.body
    found = None if extractor is None else extractor(event)
    return valid_route(type(event) if found is None else found)


def known_id(message: Message, *, needed: bool) -> str | None:
    """Return the id under which the library claims the message. If no id is ``needed``, return its text or None."""
    return stored_id(message.id, message.source) if needed else id_text(message)


def id_text(message: Message) -> str | None:
    """Return the stored text of the message's id, for deliveries and logs, or None if it is neither text nor a UUID.

    The function calls no method of a subclass, because that method might raise.
    """
    if isinstance(message.id, str):
        text = str.__str__(message.id)
    elif isinstance(message.id, uuid.UUID):
        text = uuid.UUID.__str__(message.id)
    else:
        return None
    return text if message.source is None else _joined(str.__str__(message.source), text)


def logged_id(message: Message) -> str:
    """Return the id of the message for a log line: printable, and at most 600 characters."""
    return printable(str(id_text(message)))[:600]


# Extractors: functions that find the id of a message in its event -----------------------------------------------------


def attribute_or_key(event: Any) -> object:
    """Return the event's ``message_id`` (attribute or key), or None if it has none. This is the default extractor."""
    return _step(event, "message_id")


def by_path(path: str) -> IdExtractor:
    """Return an extractor that follows a dotted path of attributes and keys, as in ``by_path("metadata.headers.id")``.

    The extractor returns None if the event has no such attribute or key.
    """
    steps = path.split(".")

    def extract(event: Any) -> object:
        for step in steps:
            event = _step(event, step)
            if event is None:
                return None
        return event

    return extract


def cloudevents(event: Any) -> str:
    """Return the id of a CloudEvents 1.0 event: its ``source`` and ``id``, which are unique only *together* (3.1.1).

    Raises ``InvalidMessageIdError`` if one of them is missing or is not text.
    """
    return _composite("cloudevents", event, {"source": str, "id": str})


def kafka(event: Any) -> object:
    """Return the id of a Kafka record: its topic, partition and offset (attributes, methods or keys).

    Use it only if the producer writes each event to its topic once: an event that is published again has another
    offset, so it would be applied again. Raises ``InvalidMessageIdError`` if a part is missing or has another type.
    """
    return _composite("kafka", event, {"topic": str, "partition": int, "offset": int})


def hashed(extractor: IdExtractor) -> IdExtractor:
    """Return an extractor that returns the SHA-256, in hexadecimal, of the id that ``extractor`` finds.

    Use it for ids of more than 512 bytes, and for ids that are personal data, because the library stores and logs ids.
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


# Extractors of the time at which a message occurred: ``Dispatcher(occurred_at=...)`` ----------------------------------


def from_uuid7(message: Message) -> datetime | None:
    """Return the time in the message's id, to the millisecond, if the id is a UUID of version 7; else None.

    No other id, such as a UUID of version 4, contains a time. Such a message has no ``occurred_at``.
    """
    try:
        found = message.id if isinstance(message.id, uuid.UUID) else uuid.UUID(str(message.id))
    except ValueError:
        return None
    written = isinstance(message.id, uuid.UUID) or str(found) == str(message.id).lower()  # not "{...}", for example
    return _since_1970(found.int >> 80) if written and found.variant == uuid.RFC_4122 and found.version == 7 else None


def from_ulid(message: Message) -> datetime | None:
    """Return the time in the message's id, to the millisecond, if the id is a ULID; else None."""
    text = message.id.upper() if isinstance(message.id, str) else ""
    if len(text) != _ULID_LENGTH or text[0] > "7" or not all(digit in _CROCKFORD for digit in text):
        return None
    milliseconds = 0
    for digit in text[:10]:
        milliseconds = milliseconds * 32 + _CROCKFORD.index(digit)
    return _since_1970(milliseconds)


_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ULID_LENGTH = 26


def _since_1970(milliseconds: int) -> datetime | None:
    try:
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds)
    except OverflowError:  # after the year 9999, so the id does not contain a time
        return None


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
            raise InvalidMessageIdError(
                f"the {kind} id needs {' and '.join(parts)}, and this event has no {name}; correct the producer, or "
                "use another extractor"
            )
        if not isinstance(value, kind_of_part) or isinstance(value, bool):  # else 1 and "1" would be one message
            raise InvalidMessageIdError(
                f"the {name} of a {kind} id must be {kind_of_part.__name__}, not {type(value).__name__}; correct the "
                "producer, or use another extractor"
            )
        texts.append(str.__str__(value) if isinstance(value, str) else int.__repr__(value))
    return _joined(*texts)
