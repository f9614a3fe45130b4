"""Incoming messages as a broker delivered them, unchecked, and the converters that build events from them."""

from __future__ import annotations

import base64
import binascii
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NoReturn

from ..errors import InvalidMessageError, InvalidMessageIdError
from ..json_numbers import finite
from ..message import Message, cloudevents, printable

__all__ = ["Convert", "Incoming", "cloudevent", "json_event", "json_of", "moment_of", "text_of"]

MAX_TEXT_BYTES = 512
"""The longest text that the library takes from a header or a property, in bytes of UTF-8."""

_CLOUDEVENT_PREFIXES = ("ce-", "ce_", "cloudevents:", "cloudevents_")  # HTTP and NATS, Kafka, AMQP, AMQP with JMS


@dataclass(frozen=True)
class Incoming:
    """One message as its broker delivered it. The values are not checked: converters check them.

    ``message_id``, ``type``, ``occurred_at`` and ``content_type`` are the broker's properties of the message, or the
    headers in their place; None if there are none. ``occurred_at`` is a datetime, text of RFC 3339, or seconds since
    1970. ``attempt`` is the broker's number of this delivery, from 1; leave it at 1 if the broker does not count.
    ``key`` is the key of a message of Kafka, else None: a tombstone (a null value) has an empty body, and only its key.
    ``topic`` is Kafka's topic, else None; of a copy in a retry topic, it is the topic of the original.
    Log lines and errors contain ``origin``, the source of the message, as in "queue flights"; ``body_name``, the part
    of the message with the body; and ``id_name``, the place in which the producer sets the id. ``json_of`` reads JSON
    numbers with a fraction or an exponent by ``parse_float``.
    """

    body: bytes
    message_id: object = None
    type: object = None
    occurred_at: object = None
    content_type: object = None
    headers: Mapping[str, object] = field(default_factory=dict)
    attempt: int = 1
    origin: str = "a queue"
    body_name: str = "body of the message"
    id_name: str = "message id"
    key: bytes | None = None
    topic: str | None = None
    parse_float: Callable[[str], float] = finite


def with_headers(body: bytes, headers: Mapping[str, object], **more: Any) -> Incoming:
    """Return a message whose id, type, time and content type are in its headers."""
    found: dict[str, Any] = {name: headers.get(name) for name in ("message_id", "type", "occurred_at", "content_type")}
    return Incoming(body, headers=headers, **found, **more)


Convert = Callable[[Incoming], object]
"""A function that builds the event for ``Dispatcher.deliver`` from an ``Incoming``. It often returns a ``Message``."""


def check_convert(convert: object) -> None:
    """Raise ``ValueError`` if ``convert`` is not a plain function: it would fail for every message."""
    if isinstance(convert, type):
        raise ValueError(
            f"convert takes a function, not the class {convert.__name__}; write "
            f'convert=into({{"payment.received": {convert.__name__}}}), with the type of your messages in place of '
            '"payment.received" (into is in projector_dedup.brokers.typed_events)'
        )
    if not callable(convert):
        raise ValueError("convert takes a function, such as json_event")
    if inspect.iscoroutinefunction(convert):
        raise ValueError("convert is an async def, which the consumer does not await: give a plain function")


def json_event(incoming: Incoming) -> Message:
    """Return a ``Message`` with the decoded JSON body, and the id, the type and the time from the broker.

    If the broker has no id or no type, the dispatcher finds it in the body, with its ``message_id=`` and ``type=``.
    Raises ``InvalidMessageError`` if the body is not JSON, or if the id, the type or the time is invalid.
    """
    return Message(
        text_of(incoming.message_id, "message id", InvalidMessageIdError),
        json_of(incoming),
        text_of(incoming.type, "type"),
        moment_of(incoming.occurred_at),
    )


def cloudevent(incoming: Incoming) -> Message:
    """Return a ``Message`` with the data, the ``type`` and the ``time`` of a CloudEvents 1.0 event.

    The message id is made of ``source`` and ``id``. A message with the content type ``application/cloudevents+json`` is
    in structured mode. Any other message is in binary mode, with the attributes in its headers. Data with a JSON
    content type, or with none, is decoded. Raises ``InvalidMessageError`` for a message that is not such an event.
    """
    content_type = (text_of(incoming.content_type, "content type") or "").partition(";")[0].strip().lower()
    if content_type.startswith("application/cloudevents-batch"):
        raise InvalidMessageError("a batch of CloudEvents is not one message: publish its events one by one")
    structured = content_type.startswith("application/cloudevents")
    if structured and content_type != "application/cloudevents+json":
        raise InvalidMessageError(f"CloudEvents are read as JSON, not as {printable(content_type)}")
    attributes = _json_object(incoming) if structured else _attributes(incoming.headers)
    if attributes.get("specversion") != "1.0":
        raise InvalidMessageError("a CloudEvents event has the specversion 1.0; this message has another, or none")
    kind = text_of(attributes.get("type"), "type of a CloudEvents event")
    if not kind:
        raise InvalidMessageError("a CloudEvents event has a type; this one has none")
    data = _structured_data(attributes) if structured else _binary_data(incoming, content_type)
    return Message(cloudevents(attributes), data, kind, moment_of(attributes.get("time")), has_source=True)


def json_of(incoming: Incoming) -> Any:
    """Return the value of a body that is JSON in UTF-8. Raises ``InvalidMessageError`` for any other body.

    NaN and Infinity are refused: they are not JSON, and databases store them differently or not at all. So is a number
    that a float reads as Infinity, such as 1e999.
    """
    try:
        text = bytes(incoming.body).decode()
        return json.loads(text, parse_float=incoming.parse_float, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number of a million digits, or deep nesting
        flaw = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
        if not incoming.body:
            flaw = (
                "it is missing, or empty; send JSON there, or give the consumer a convert= that builds the event from "
                f"incoming.{'headers' if incoming.key is None else 'key'}"
            )
        raise InvalidMessageError(f"the {incoming.body_name} is not JSON: {printable(flaw[:200])}") from error


def text_of(value: object, name: str, error: type[InvalidMessageError] = InvalidMessageError) -> str | None:
    """Return the text of a header or a property that is text, or bytes in UTF-8; None for None.

    Raises ``error`` for any other value, and for one of more than 512 bytes. Never use ``str(value)`` for bytes:
    ``str(b"7")`` is the text ``b'7'``, which is another id than ``7``.
    """
    if value is None:
        return None
    if not isinstance(value, (str, bytes, bytearray, memoryview)):
        raise error(f"the {name} is {type(value).__name__}; the producer has to send it as text")
    encoded = str.__str__(value).encode("utf-8", "surrogatepass") if isinstance(value, str) else bytes(value)
    if len(encoded) > MAX_TEXT_BYTES:
        raise error(f"the {name} is limited to {MAX_TEXT_BYTES} bytes of UTF-8, this one has {len(encoded)}")
    try:
        return encoded.decode()
    except UnicodeDecodeError:
        raise error(f"the {name} is not UTF-8, so no text can be made of it; the producer has to send text") from None


def moment_of(value: object) -> datetime | None:
    """Return the datetime of a value that is a datetime, text of RFC 3339, or seconds since 1970; None for None.

    Raises ``InvalidMessageError`` for any other value. ``Message`` refuses a datetime without a time zone.
    """
    if value is None or isinstance(value, datetime):
        return value
    try:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, UTC)
        if text := text_of(value, "time"):
            return datetime.fromisoformat(text)
    except (ValueError, OverflowError, OSError) as error:
        if isinstance(error, InvalidMessageError):
            raise
    raise InvalidMessageError("the time of the message cannot be read: send RFC 3339, as in 2013-01-01T05:00:00Z")


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _json_object(incoming: Incoming) -> Mapping[str, Any]:
    found = json_of(incoming)
    if not isinstance(found, dict):
        raise InvalidMessageError(f"a CloudEvents event is a JSON object, not {type(found).__name__}")
    return found


def _attributes(headers: Mapping[str, object]) -> Mapping[str, str | None]:
    """Return the attributes of an event in binary mode: the headers with a prefix of CloudEvents, without it."""
    found: dict[str, str | None] = {}
    for name_of_header, value in headers.items():
        header = str(name_of_header)  # pika returns a name that is not UTF-8 as bytes: it is no attribute
        for prefix in _CLOUDEVENT_PREFIXES:
            if header.lower().startswith(prefix):
                name = header[len(prefix) :].lower()
                text = text_of(value, f"header {printable(header[:80])}")
                if found.setdefault(name, text) != text:
                    raise InvalidMessageError(f"the headers give two values for {printable(name[:80])}: send one")
    return found


def _structured_data(attributes: Mapping[str, Any]) -> Any:
    if "data_base64" not in attributes:
        return attributes.get("data")
    if "data" in attributes:
        raise InvalidMessageError("a CloudEvents event has data or data_base64; this one has both")
    try:
        return base64.b64decode(attributes["data_base64"], validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise InvalidMessageError("the data_base64 of a CloudEvents event is not base64") from error


def _binary_data(incoming: Incoming, content_type: str) -> Any:
    if content_type in ("", "application/json", "text/json") or content_type.endswith("+json"):
        return json_of(incoming)
    return bytes(incoming.body)
