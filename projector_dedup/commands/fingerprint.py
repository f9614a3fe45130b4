"""Fingerprints: tell whether a key that comes again comes with the same command."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum
from hashlib import sha256
from typing import Any
from uuid import UUID

from .errors import InvalidKeyError, UnusableKeyError

Fingerprint = Callable[[Any], object]
"""A function of a command that returns what must be the same when its key comes again: anything ``canonical`` takes."""

_ALONE = (str, bool, int, type(None))
_MAX_EXPONENT = 1_000  # of a Decimal: written out, 1E+999999999 would take a gigabyte


def fields(*names: str) -> Fingerprint:
    """Return a fingerprint of these fields of a command only; the others may differ when the key comes again."""
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidKeyError("fields takes names of fields, as in fields('amount', 'currency')")

    def chosen(command: Any) -> object:
        get = command.__getitem__ if isinstance(command, Mapping) else command.__getattribute__
        return {name: get(name) for name in names}

    return chosen


def whole(command: Any) -> object:
    """Return the whole command: the fingerprint of operations that choose none."""
    return command


def digest(command: object) -> bytes:
    """Return 32 bytes that are the same for equal commands, in every process and on every version of Python.

    Raises ``InvalidKeyError`` for what has no canonical form.
    """
    try:
        text = json.dumps(canonical(command), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except InvalidKeyError:
        raise
    except (OverflowError, RecursionError, ValueError) as error:
        raise UnusableKeyError(
            f"a command has no canonical form ({type(error).__name__}): it is nested too deeply, has a number of "
            "thousands of digits, or a moment outside the years 1 to 9999 in UTC"
        ) from error
    return sha256(text.encode()).digest()


def canonical(value: Any) -> Any:
    """Return ``value`` in a form that JSON has, which is the same for equal values.

    Fields that equal their default are left out: a field that is added to a command with a default changes nothing.
    """
    if isinstance(value, Enum):
        return canonical(value.value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, _ALONE):
        return value
    if isinstance(value, Decimal):
        return _decimal(value)
    if isinstance(value, (UUID, date, time)):
        return _text(value)
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if isinstance(value, (list, tuple)):
        return [canonical(each) for each in value]
    if isinstance(value, (set, frozenset)):
        return sorted((canonical(each) for each in value), key=lambda each: json.dumps(each, sort_keys=True))
    return {name: canonical(each) for name, each in _members(value).items()}


def _members(value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise InvalidKeyError("a command that is a mapping has texts for its keys, as JSON does")
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if not _is_default(getattr(value, field.name), field)
        }
    if hasattr(value, "model_dump") and hasattr(type(value), "model_fields"):  # a model of Pydantic's
        dumped: dict[str, Any] = value.model_dump(exclude_defaults=True)
        return dumped
    raise InvalidKeyError(
        f"{type(value).__name__} has no canonical form, so a key that comes again could not be compared; make the "
        "command of dataclasses, Pydantic models, mappings, lists, texts, numbers and moments, or give "
        "@command(fingerprint=...) a function that returns those"
    )


def _is_default(value: object, field: dataclasses.Field[Any]) -> bool:
    if field.default is not dataclasses.MISSING:
        default = field.default
    elif field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    else:
        return False
    return type(value) is type(default) and value == default


def _number(value: float) -> int | float:
    if not math.isfinite(value):
        raise UnusableKeyError(f"a command with {value} cannot be compared, because that equals nothing")
    return int(value) if value.is_integer() else value  # 30.0 is 30, as in JSON


def _decimal(value: Decimal) -> str:
    if not value.is_finite():
        raise UnusableKeyError(f"a command with {value} cannot be compared, because that equals nothing")
    if value and not -_MAX_EXPONENT < value.adjusted() < _MAX_EXPONENT:
        raise UnusableKeyError(f"a command with a number of more than {_MAX_EXPONENT} digits cannot be compared")
    text = format(value if value else Decimal(0), "f")  # every digit: normalize() would round to those of the context
    return text.rstrip("0").rstrip(".") if "." in text else text


def _text(value: UUID | date | time) -> str:
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(UTC)
    return str(value) if isinstance(value, UUID) else value.isoformat()
