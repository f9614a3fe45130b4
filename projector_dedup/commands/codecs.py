"""Codecs convert the result of a command to bytes, and back to the same value for every later caller."""

from __future__ import annotations

import dataclasses
import json as _json
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time
from decimal import Decimal
from enum import Enum
from itertools import zip_longest
from typing import Any, Generic, TypeVar
from uuid import UUID

from ..errors import HandlerDefinitionError, ProjectorDedupError
from .errors import ResultError, ResultUnreadableError

R = TypeVar("R")

_PYDANTIC = (2, 11)  # older versions cannot read a field with an alias by its own name


@dataclass(frozen=True)
class Codec(Generic[R]):
    """Converts results to bytes and back.

    - ``name``: 1 to 64 bytes of UTF-8. The library stores it with the bytes, to find the codec that can read them.
    - ``dumps``: returns the bytes of a value. It may raise any error for a value that it cannot store.
    - ``loads``: returns the value of the bytes. It may raise any error for bytes that it cannot read.
    - ``exact``: True refuses a result if ``loads`` returns another value than ``dumps`` got. The library calls
      ``loads`` once before it records a result.
    """

    name: str
    dumps: Callable[[R], bytes]
    loads: Callable[[bytes], R]
    exact: bool = False


def _strict(value: Any) -> Any:
    """Return ``value`` if JSON preserves its value and its types. Raises ``ResultError`` if not."""
    kind = type(value)
    if value is None or kind in (bool, int) or (kind is float and math.isfinite(value)):
        return value
    if kind is str:
        return value
    if kind is list:
        return [_strict(each) for each in value]
    if kind is dict and all(type(name) is str for name in value):
        return {name: _strict(each) for name, each in value.items()}
    raise ResultError(
        f"JSON cannot preserve {kind.__name__}; return texts, numbers, lists and mappings with text keys, annotate the "
        "handler's result with a dataclass, or give @command(codec=...)"
    )


def _to_bytes(value: Any) -> bytes:
    return _json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


json: Codec[Any] = Codec("json", lambda value: _to_bytes(_strict(value)), _json.loads, exact=True)
"""JSON, only for None, booleans, finite numbers, texts, lists, and mappings with text keys."""


def _bytes(value: bytes) -> bytes:
    if type(value) is not bytes:
        raise ResultError(f"the result must be bytes, not {type(value).__name__}; correct the annotation")
    return value


raw: Codec[bytes] = Codec("raw", _bytes, bytes, exact=True)
"""Bytes, stored unchanged."""


def _type_adapter() -> Any:
    """Return Pydantic's class ``TypeAdapter``, or None if Pydantic is not installed or too old."""
    try:
        from pydantic import VERSION, TypeAdapter
    except ImportError:
        return None
    return TypeAdapter if tuple(int(part) for part in VERSION.split(".")[:2]) >= _PYDANTIC else None


def typed_json(kind: Any) -> Codec[Any]:
    """Return a codec that stores values of the type ``kind`` as JSON and reads values of the same type.

    ``kind`` is any type that Pydantic's ``TypeAdapter`` can write and validate. Raises ``HandlerDefinitionError`` for
    any other type, and if the extra ``projector-dedup[commands]`` is not installed.
    """
    type_adapter = _type_adapter()
    if type_adapter is None:
        raise HandlerDefinitionError(
            f"a result of {kind!r} needs Pydantic 2.11 or newer, which is not installed; run "
            "pip install 'projector-dedup[commands]', or give @command(codec=...)"
        )
    try:
        adapter = type_adapter(kind)
        adapter.rebuild(raise_errors=True)  # for a type that is defined after its annotation
    except Exception as error:
        raise HandlerDefinitionError(
            f"there is no codec for {kind!r} ({type(error).__name__}: {str(error).splitlines()[0]}); annotate the "
            "result with types that Pydantic supports and that are defined before the handler, such as dataclasses and "
            "models, or give @command(codec=...)"
        ) from error

    def dump(value: Any, **options: Any) -> bytes:
        dumped: bytes = adapter.dump_json(value, by_alias=False, round_trip=True, warnings="error", **options)
        return dumped

    def read(data: bytes) -> Any:
        return adapter.validate_json(data, strict=True, by_alias=True, by_name=True)

    def load(data: bytes) -> Any:
        value = read(data)
        again = dump(value)
        if again != data:  # other code, whose type had other fields, may have written the record
            dumps = data, again, dump(value, exclude_defaults=True), dump(read(data))
            _refuse_renamed(*map(_json.loads, dumps))
        return value

    return Codec("typed-json", dump, load, exact=True)


def _refuse_renamed(stored: Any, read: Any, chosen: Any, once_more: Any) -> None:
    """Raise ``ResultUnreadableError`` if a field of the record was dropped, and another got its default instead.

    ``stored`` is the record's JSON. ``read`` is the JSON of the value that was read, ``chosen`` the same without
    defaults, and ``once_more`` the JSON of a second reading. If a field reads the former name by an alias or a
    validator, the rename is safe: the field is in ``chosen``, and equal in ``once_more``. A default that is computed
    each time, such as a random id, is not equal.
    """
    if isinstance(stored, list) and isinstance(read, list) and isinstance(once_more, list):
        for each in zip_longest(stored, read, chosen if isinstance(chosen, list) else [], once_more):
            _refuse_renamed(*each)
    if isinstance(stored, dict) and isinstance(read, dict) and isinstance(once_more, dict):
        found = chosen if isinstance(chosen, dict) else {}
        dropped, new = sorted(stored.keys() - read.keys()), sorted(read.keys() - stored.keys())
        kept = [stored[name] for name in dropped if stored[name] is not None]
        is_chosen = {name: name in found and read[name] == once_more.get(name) for name in new}
        defaults = [name for name in new if not is_chosen[name] and read[name] not in kept]
        if defaults and len(dropped) > len(new) - len(defaults):
            raise ResultUnreadableError(
                f"the record has {', '.join(dropped)}, which its type does not have, and lacks {', '.join(defaults)}; "
                "if a field was renamed, let the type read the former name too, for example by an alias"
            )
        for name in stored.keys() & read.keys():
            _refuse_renamed(stored[name], read[name], found.get(name), once_more.get(name))


def encoded(codec: Codec[Any], value: Any, said: str) -> bytes:
    """Return ``value`` as the codec stores it. Raises ``ResultError`` if it cannot be stored and read again.

    ``said`` begins the error's text, with the origin and the type of the value: "shop.place returned Placed".
    """
    try:
        stored = codec.dumps(value)
        if not isinstance(stored, (bytes, bytearray, memoryview)):
            raise ResultError(
                f"dumps of the codec {codec.name} returned {type(stored).__name__}, and not bytes; correct the codec"
            )
        data = bytes(stored)
        read = codec.loads(data)  # also for a codec that is not exact: never commit a result that cannot be read
        same = not codec.exact or is_same(read, value)
    except ProjectorDedupError as error:
        raise ResultError(f"{said}: {error}") from error
    except Exception as error:
        raise ResultError(
            f"{said}, which the codec {codec.name} cannot store and read again ({type(error).__name__})"
        ) from error
    if not same:
        raise ResultError(
            f"{said}, and the codec {codec.name} reads another value than it stored, so later callers would get "
            "another answer; correct the codec"
        )
    return data


# Comparing ------------------------------------------------------------------------------------------------


def is_same(one: Any, other: Any) -> bool:
    """Return True if the value that was read equals the value that was stored.

    Two datetimes are the same if their ISO text is equal, because Python's ``==`` is False for a repeated hour in
    different zones. Dataclasses and Pydantic models are the same if all their fields are.
    """
    if isinstance(one, datetime) and isinstance(other, datetime):
        return one == other or one.isoformat() == other.isoformat()
    if type(one) is not type(other):
        return bool(one == other) and bool not in (type(one), type(other))  # True and 1 are different
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(is_same(*each) for each in zip(one, other, strict=True))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[name], other[name]) for name in one)
    if dataclasses.is_dataclass(one):
        return all(is_same(getattr(one, each.name), getattr(other, each.name)) for each in dataclasses.fields(one))
    if hasattr(one, "model_fields_set") and not one == other:  # noqa: SIM201  # a model, whose != may be its own
        rest = one.model_extra == other.model_extra and one.__pydantic_private__ == other.__pydantic_private__
        return rest and is_same(vars(one), vars(other))
    return bool(one == other)


def as_json(value: Any) -> Any:
    """Return the detail of a rejection as a JSON value. A Decimal, a UUID, a date or a time becomes its text."""
    if isinstance(value, Enum):
        return as_json(value.value)
    if isinstance(value, (Decimal, UUID)):
        return str(value)
    if isinstance(value, (date, time)):
        return value.isoformat()
    if isinstance(value, (list, tuple)):
        return [as_json(each) for each in value]
    return {name: as_json(each) for name, each in value.items()} if isinstance(value, dict) else value
