"""Incoming messages: what a broker delivered, unchecked, and the converters that make events for a dispatcher of it."""

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
from ..message import Message, cloudevents, printable

__all__ = ["Convert", "Incoming", "cloudevent", "json_event", "json_of", "moment_of", "text_of"]

MAX_TEXT_BYTES = 512
"""The longest text that is taken from a header or a property."""

_CLOUDEVENT_PREFIXES = ("ce-", "ce_", "cloudevents:", "cloudevents_")  # HTTP and NATS, Kafka, AMQP, AMQP with JMS


@dataclass(frozen=True)
class Incoming:
    """One message as its broker delivered it. Nothing in it has been checked: converters do that.

    ``message_id``, ``type``, ``occurred_at`` and ``content_type`` are the broker's own properties of a message, or
    headers that stand for them; None if the message has none. ``occurred_at`` is a datetime, or seconds since 1970.
    ``attempt`` is the number of this delivery, from 1, by the broker's count; leave it at 1 where the broker does not
    count. ``origin`` says where the message was taken from, as in "queue flights", ``body_name`` where in it its body
    was, and ``id_name`` where the producer sets the id: for log lines and texts of errors.
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


Convert = Callable[[Incoming], object]
"""A function that makes the event for ``Dispatcher.deliver`` of what came in; often a ``Message``."""


def check_convert(convert: object) -> None:
    """Raise ``ValueError`` for a ``convert`` that is not a plain function, and so would fail on every message."""
    if isinstance(convert, type):
        raise ValueError(
            f"convert takes a function, not the class {convert.__name__}; write "
            f'convert=into({{"payment.received": {convert.__name__}}}), with the type of your messages in place of '
            '"payment.received" (into is in projector_dedup.integrations.typed_events)'
        )
    if not callable(convert):
        raise ValueError("convert takes a function, such as json_event")
    if inspect.iscoroutinefunction(convert):
        raise ValueError("convert is an async def, which the consumer does not await: give a plain function")


def json_event(incoming: Incoming) -> Message:
    """Return a JSON body under the id, the type and the time that the broker carried beside it.

    Where the broker carried no id or no type, the dispatcher looks into the body, by its ``message_id=`` and ``type=``.
    Raises ``InvalidMessageError`` for a body that is not JSON, and for any part that cannot be used.
    """
    return Message(
        text_of(incoming.message_id, "message id", InvalidMessageIdError),
        json_of(incoming),
        text_of(incoming.type, "type"),
        moment_of(incoming.occurred_at),
    )


def cloudevent(incoming: Incoming) -> Message:
    """Return the data of a CloudEvents 1.0 event under its ``type`` and ``time``; the id is ``source`` and ``id``.

    An event in structured mode has the content type ``application/cloudevents+json``; any other message is in binary
    mode, with the attributes in its headers. Data of a JSON content type, or of none, is parsed. Raises
    ``InvalidMessageError`` for a message that is no such event.
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
    return Message(cloudevents(attributes), data, kind, moment_of(attributes.get("time")))


def json_of(incoming: Incoming) -> Any:
    """Return the value of a body that is JSON, in UTF-8. Raises ``InvalidMessageError`` for any other body.

    NaN and Infinity are refused: they are not JSON, and databases store them in different ways or not at all.
    """
    try:
        return json.loads(bytes(incoming.body).decode(), parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # no text, no JSON, a number of a million digits, a million brackets
        flaw = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
        if not incoming.body:
            flaw = (
                "it is missing, or empty; send JSON there, or give the consumer a convert= that builds the event from "
                "incoming.headers"
            )
        raise InvalidMessageError(f"the {incoming.body_name} is not JSON: {printable(flaw[:200])}") from error


def text_of(value: object, name: str, error: type[InvalidMessageError] = InvalidMessageError) -> str | None:
    """Return the text of a header or a property, which may come as bytes in UTF-8; None if it is None.

    Raises ``error`` for a value that is neither, and for one of more than 512 bytes. ``str(value)`` would be wrong for
    bytes: ``str(b"7")`` is the text ``b'7'``, another id than "7".
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
    """Return a moment that came as a datetime, as text of RFC 3339, or as seconds since 1970; None if it is None.

    Raises ``InvalidMessageError`` for anything else. A ``Message`` refuses a datetime without a time zone.
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
    """Return the attributes of an event in binary mode: the headers with one of the prefixes, without the prefix."""
    found: dict[str, str | None] = {}
    for name_of_header, value in headers.items():
        header = str(name_of_header)  # pika gives a name that is not UTF-8 as bytes, which are no attribute
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
