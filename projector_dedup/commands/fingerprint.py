"""Fingerprints: tell whether a key that comes again comes with the same command."""

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
"""A function of a command that returns what must be the same when its key comes again: anything ``canonical`` takes."""

_ALONE = (str, bool, int, type(None))
_MAX_EXPONENT = 1_000  # of a Decimal: written out, 1E+999999999 would take a gigabyte


def fields(*names: str) -> Fingerprint:
    """Return a fingerprint of these fields of a command only; the others may differ when the key comes again."""
    if not names or not all(isinstance(name, str) for name in names):
        raise InvalidKeyError("fields takes names of fields, as in fields('amount', 'currency')")

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
    """Return the whole command: the fingerprint of operations that choose none."""
    return command


def fingerprints(command: object) -> tuple[bytes, ...]:
    """Return the fingerprint that is recorded for a command, and behind it the one that older versions recorded.

    Raises ``InvalidKeyError`` for what has no canonical form.
    """
    # Until November 2026 names of types did not count. Drop the second one when every record of that time has expired.
    recorded = digest(command)
    try:
        older = digest(command, types=False)
    except InvalidKeyError:  # older versions refused the command, so no record has its fingerprint
        return (recorded,)
    return (recorded,) if older == recorded else (recorded, older)


def digest(command: object, *, types: bool = True) -> bytes:
    """Return 32 bytes that are the same for equal commands, in every process and on every version of Python.

    Without ``types`` the names of types do not count. Raises ``InvalidKeyError`` for what has no canonical form.
    """
    try:
        form = canonical(command, types=types)
        text = json.dumps(form, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except InvalidKeyError:
        raise
    except (AttributeError, TypeError) as error:
        raise InvalidKeyError(
            f"a command has no canonical form ({type(error).__name__}): a part of it cannot be read; mend the "
            "command, or give @command(fingerprint=...) a function that returns what is to be compared"
        ) from error
    except (OverflowError, RecursionError, ValueError) as error:
        raise UnusableKeyError(
            f"a command has no canonical form ({type(error).__name__}): it is nested too deeply, has a number of "
            "thousands of digits, or a moment outside the years 1 to 9999 in UTC"
        ) from error
    return sha256(text.encode()).digest()


def canonical(value: Any, *, types: bool = True) -> Any:
    """Return ``value`` in a form that JSON has, which is the same for equal values of the same type.

    A dataclass, a Pydantic model or a named tuple counts with the name of its class. Fields that equal their default
    are left out: a field that is added to a command with a default changes nothing. A discriminator always counts.
    """
    inner = partial(canonical, types=types)
    if isinstance(value, Enum):
        return inner(value.value)
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
        return sorted((inner(each) for each in value), key=lambda each: json.dumps(each, sort_keys=True))
    if isinstance(value, (list, tuple)) and not (types and _is_named_tuple(value)):
        form: Any = [inner(each) for each in value]
    elif _is_model(value):
        form = _of_model(value) if types else {name: inner(each) for name, each in _dumped(value).items()}
    else:
        form = {name: inner(each) for name, each in _members(value, types).items()}
    return {f"{_name(type(value))}()": form} if types and _has_class(value) else form


def _has_class(value: object) -> bool:
    """Return True if the class of ``value`` says what ``value`` is: a dataclass, a model, or a named tuple."""
    return _is_named_tuple(value) or dataclasses.is_dataclass(value) or _is_model(value)


def _is_named_tuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _name(kind: type[Any]) -> str:
    """Return the name by which a class counts: without its module, so that a class can move."""
    generic: Any = getattr(kind, "__pydantic_generic_metadata__", {}).get("origin") or kind  # of Box[int] it is Box
    name = vars(generic).get("__fingerprint_name__", generic.__name__)  # not inherited: subclasses are other types
    return f"{name}{kind.__name__.removeprefix(generic.__name__)}"


def _is_model(value: object) -> bool:
    return hasattr(value, "model_dump") and hasattr(type(value), "model_fields")  # of Pydantic, which is not imported


def _dumped(model: Any, **options: Any) -> Any:
    return model.model_dump(exclude_defaults=True, **options)


def _of_model(model: Any) -> Any:
    """Return the canonical form of a Pydantic model's fields."""
    if type(model).__pydantic_root_model__:
        return canonical(model.root)
    dumped = _dumped(model, by_alias=False)
    if not isinstance(dumped, dict):  # the model has a serializer of its own
        return canonical(dumped)
    kind: Any = type(model)
    held = vars(model) | (model.model_extra or {})  # to read a deprecated field as an attribute warns of it
    always = {name: held[name] for name in _discriminators(kind) if name in held}
    unlike = {name: each for name, each in _dumped_defaults(model, dumped).items() if not _is_like_default(model, name)}
    return {name: _of_field(held.get(name, each), each) for name, each in (always | unlike | dumped).items()}


def _dumped_defaults(model: Any, dumped: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that Pydantic left out of ``dumped`` because Python calls them equal to their default."""
    full = model.model_dump(by_alias=False)
    return {name: full[name] for name in type(model).model_fields if name in full and name not in dumped}


def _is_like_default(model: Any, name: str) -> bool:
    field = type(model).model_fields[name]
    return _is_like(vars(model)[name], field.get_default(call_default_factory=True, validated_data=vars(model)))


def _is_like(value: object, default: object) -> bool:
    """Return True if ``value``, which equals ``default``, has its canonical form too: ``[True]`` and ``[1]`` do not."""
    try:
        forms = [json.dumps(canonical(each), sort_keys=True) for each in (value, default)]
    except InvalidKeyError:  # only Python can compare the two
        return True
    return forms[0] == forms[1]


def _of_field(value: Any, dumped: Any) -> Any:
    """Return the canonical form of what Pydantic has ``dumped`` of ``value``, with the types that a dump leaves out."""
    if _has_class(value):
        return canonical(value)
    if isinstance(value, (list, tuple)) and isinstance(dumped, (list, tuple)) and len(value) == len(dumped):
        return [_of_field(*each) for each in zip(value, dumped, strict=True)]
    if isinstance(value, Mapping) and isinstance(dumped, Mapping) and value.keys() == dumped.keys():
        return {_key(name): _of_field(value[name], dumped[name]) for name in dumped}
    return canonical(dumped)


def _members(value: Any, types: bool) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return {_key(name): each for name, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind: Any = type(value)
        always = _discriminators(kind) if types else ()
        return {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.name in always or not _is_default(getattr(value, field.name), _default_of(field), types)
        }
    if _is_named_tuple(value):
        defaults = getattr(value, "_field_defaults", {})
        return {
            name: each
            for name, each in zip(value._fields, value, strict=True)
            if not _is_default(each, defaults.get(name, dataclasses.MISSING), types)
        }
    raise InvalidKeyError(
        f"{type(value).__name__} has no canonical form, so a key that comes again could not be compared; make the "
        "command of dataclasses, Pydantic models, mappings, lists, texts, numbers and moments, or give "
        "@command(fingerprint=...) a function that returns those"
    )


def _key(name: object) -> str:
    if not isinstance(name, str):
        raise InvalidKeyError("a command that is a mapping has texts for its keys, as JSON does")
    return name


@cache
def _discriminators(kind: type[Any]) -> frozenset[str]:
    """Return the fields that tell members of a union apart: those whose type is a ``Literal`` of one value."""
    if hasattr(kind, "model_fields"):
        hints = {name: field.annotation for name, field in kind.model_fields.items()}
    else:
        try:
            hints = get_type_hints(kind)
        except Exception:  # noqa: BLE001  # an annotation that only a type checker can read: the class's name counts
            return frozenset()
    return frozenset(name for name, hint in hints.items() if get_origin(hint) is Literal and len(get_args(hint)) == 1)


def _default_of(field: dataclasses.Field[Any]) -> object:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _is_default(value: object, default: object, types: bool) -> bool:
    return type(value) is type(default) and value == default and (not types or _is_like(value, default))


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
