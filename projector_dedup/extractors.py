"""Extractors: functions that find the id of a message in its event."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from typing import Any

from .errors import InvalidMessageIdError
from .message import IdExtractor, valid_message_id


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
