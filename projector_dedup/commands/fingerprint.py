"""Fingerprints detect that a key is used again with another command."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum
from functools import cache, partial
from hashlib import sha256
from typing import Any, Literal, get_args, get_origin, get_type_hints
from uuid import UUID

from .errors import InvalidKeyError, UnusableKeyError

Fingerprint = Callable[[Any], object]
"""A function of a command that returns the values to compare when a key is used again (see ``canonical``)."""

_ALONE = (str, bool, int, type(None))
_MAX_EXPONENT = 1_000  # of a Decimal: written out, 1E+999999999 would take a gigabyte


def fields(*names: str) -> Fingerprint:
    """Return a fingerprint of these fields of a command. The other fields may differ when a key is used again."""
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidKeyError("fields() takes names of fields, as in fields('amount', 'currency')")

    def chosen(command: Any) -> object:
        get = command.__getitem__ if isinstance(command, Mapping) else partial(getattr, command)
        try:
            return {name: get(name) for name in names}
        except (AttributeError, KeyError) as error:
            raise InvalidKeyError(
                f"{type(command).__name__} lacks one of the fields that @command(fingerprint=fields(...)) names: "
                f"{', '.join(names)}; write fields(...) with names that every command of this operation has"
            ) from error

    return chosen


def whole(command: Any) -> object:
    """Return the whole command, so that a fingerprint compares every field. This is the default of ``@command``."""
    return command


def digest(command: object) -> bytes:
    """Return 32 bytes that are the same for equal commands, in every process and with every version of Python.

    Raises ``InvalidKeyError`` for a command without a canonical form.
    """
    try:
        text = json.dumps(canonical(command), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except InvalidKeyError:
        raise
    except (AttributeError, TypeError) as error:
        raise InvalidKeyError(
            f"a command has no canonical form ({type(error).__name__}): a part of it cannot be read; correct the "
            "command, or give @command(fingerprint=...) a function that returns the values to compare"
        ) from error
    except (OverflowError, RecursionError, ValueError) as error:
        raise UnusableKeyError(
            f"a command has no canonical form ({type(error).__name__}): it is nested too deeply, has a number of "
            "thousands of digits, or a time outside the years 1 to 9999 in UTC; send other values"
        ) from error
    return sha256(text.encode()).digest()


def canonical(value: Any) -> Any:
    """Return ``value`` as a JSON value that is the same for equal values of the same type.

    The form of a dataclass, a Pydantic model or a named tuple contains the name of its class. It omits fields that
    equal their default, so a new field with a default changes no fingerprint. It always contains a discriminator.
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
    if isinstance(value, (set, frozenset)):
        return sorted((canonical(each) for each in value), key=lambda each: json.dumps(each, sort_keys=True))
    if isinstance(value, (list, tuple)) and not _is_named_tuple(value):
        form: Any = [canonical(each) for each in value]
    elif isinstance(value, Mapping):
        form = {_key(name): canonical(each) for name, each in value.items()}
    elif _is_model(value) and type(value).__pydantic_root_model__:
        form = canonical(value.root)
    else:
        form = {name: canonical(each) for name, each in _members(value).items()}
    has_class = _is_named_tuple(value) or dataclasses.is_dataclass(value) or _is_model(value)
    return {f"{_name(type(value))}()": form} if has_class else form


def _is_named_tuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _name(kind: type[Any]) -> str:
    """Return the name of a class in the canonical form: without its module, so that you can move the class.

    The name of a nested class begins with that of the outer class.
    """
    generic: Any = getattr(kind, "__pydantic_generic_metadata__", {}).get("origin") or kind  # for Box[int], Box
    qualified = generic.__qualname__.rpartition("<locals>.")[2]
    name = vars(generic).get("__fingerprint_name__", qualified)  # not inherited, because subclasses are other types
    return f"{name}{kind.__name__.removeprefix(generic.__name__)}"


def _is_model(value: object) -> bool:
    return hasattr(value, "model_dump") and hasattr(type(value), "model_fields")  # of Pydantic, which is not imported


def _members(value: Any) -> dict[str, Any]:
    """Return the discriminators of a dataclass, model or named tuple, and the fields that differ from their default."""
    kind: Any = type(value)
    if _is_model(value):
        given = vars(value)  # getattr would warn of a deprecated field
        known = {name: field for name, field in kind.model_fields.items() if name in given and not field.exclude}
        defaults = {
            name: field.get_default(call_default_factory=True, validated_data=given) for name, field in known.items()
        }
        held = {name: given[name] for name in known}
        held |= value.model_extra or {}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        defaults = {field.name: _default_of(field) for field in dataclasses.fields(value)}
    elif _is_named_tuple(value):
        held, defaults = dict(zip(value._fields, value, strict=True)), getattr(value, "_field_defaults", {})
    else:
        raise InvalidKeyError(
            f"{kind.__name__} has no canonical form, so the library could not compare two commands with the same key; "
            "build the command from dataclasses, Pydantic models, mappings, lists, texts, numbers, dates and times, or "
            "give @command(fingerprint=...) a function that returns these"
        )
    always = _discriminators(kind)
    return {
        name: each
        for name, each in held.items()
        if name in always or name not in defaults or not _is_default(each, defaults[name])
    }


def _key(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidKeyError("a mapping in a command must have text keys, as in JSON; correct the command")
    return name


@cache
def _discriminators(kind: type[Any]) -> frozenset[str]:
    """Return the fields that distinguish the members of a union: those whose type is a ``Literal`` of one value."""
    if hasattr(kind, "model_fields"):
        hints = {name: field.annotation for name, field in kind.model_fields.items()}
    else:
        try:
            hints = get_type_hints(kind)
        except Exception:  # noqa: BLE001  # an annotation for type checkers only; the form has the class's name
            return frozenset()
    return frozenset(name for name, hint in hints.items() if get_origin(hint) is Literal and len(get_args(hint)) == 1)


def _default_of(field: dataclasses.Field[Any]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _is_default(value: object, default: object) -> bool:
    """Return True if ``value`` equals ``default`` in Python and in its canonical form (``[True]`` is not ``[1]``)."""
    if value != default:
        return False
    try:
        forms = [json.dumps(canonical(each), sort_keys=True) for each in (value, default)]
    except InvalidKeyError:  # only Python can compare the two
        return True
    return forms[0] == forms[1]


def _number(value: float) -> int | float:
    if not math.isfinite(value):
        raise UnusableKeyError(f"a command with {value} cannot be compared; send a finite number")
    return int(value) if value.is_integer() else value  # 30.0 is 30, as in JSON


def _decimal(value: Decimal) -> str:
    if not value.is_finite():
        raise UnusableKeyError(f"a command with {value} cannot be compared; send a finite number")
    if value and not -_MAX_EXPONENT < value.adjusted() < _MAX_EXPONENT:
        raise UnusableKeyError(
            f"a command with a number of more than {_MAX_EXPONENT} digits cannot be compared; send a shorter number"
        )
    text = format(value if value else Decimal(0), "f")  # with every digit; normalize() would round
    return text.rstrip("0").rstrip(".") if "." in text else text


def _text(value: UUID | date | time) -> str:
    if isinstance(value, datetime) and value.tzinfo is not None:
        value = value.astimezone(UTC)
    return str(value) if isinstance(value, UUID) else value.isoformat()
