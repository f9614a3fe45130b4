"""Codecs: how the result of a command becomes bytes, and the same value again for everybody who asks."""

from __future__ import annotations

import dataclasses
import json as _json
import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any, Generic, TypeVar, Union, get_args, get_origin
from uuid import UUID

from ..errors import HandlerDefinitionError
from .errors import ResultError
from .handled import Rejection

R = TypeVar("R")
Step = Callable[[Any], Any]


@dataclass(frozen=True)
class Codec(Generic[R]):
    """Turns results into bytes and back. ``name`` is stored beside the bytes: it says who can read them.

    ``dumps`` raises what it likes for a value that it cannot store; ``loads`` for bytes that it cannot read. Of an
    ``exact`` codec, what is read must be equal to what was stored, or nothing is recorded.
    """

    name: str
    dumps: Callable[[R], bytes]
    loads: Callable[[bytes], R]
    exact: bool = False


def _strict(value: Any) -> Any:
    """Return ``value`` if JSON gives it back equal and of the same types; raise ``ResultError`` for any other."""
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
        f"JSON cannot give back {kind.__name__} as it was; return texts, numbers, lists and mappings of texts, or "
        "annotate the handler's result with a dataclass, or give @command(codec=...)"
    )


def _to_bytes(value: Any) -> bytes:
    return _json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


json: Codec[Any] = Codec("json", lambda value: _to_bytes(_strict(value)), _json.loads, exact=True)
"""JSON, for None, booleans, finite numbers, texts, lists, and mappings with texts for keys; nothing else."""


def _bytes(value: bytes) -> bytes:
    if type(value) is not bytes:
        raise ResultError(f"the result is {type(value).__name__}, and bytes are expected")
    return value


raw: Codec[bytes] = Codec("raw", _bytes, bytes, exact=True)
"""Bytes as they are."""


def typed_json(kind: Any) -> Codec[Any]:
    """Return a codec that stores values of the type ``kind`` as JSON, and gives back values of that type.

    ``kind`` is made of None, bool, int, float, str, UUID, Decimal, datetime (with a time zone), lists, mappings with
    texts for keys, and dataclasses of these. Raises ``HandlerDefinitionError`` for any other type.
    """
    encode, decode = _steps(kind)
    return Codec(
        "typed-json", lambda value: _to_bytes(encode(value)), lambda data: decode(_json.loads(data)), exact=True
    )


def _exactly(kind: type[Any]) -> Step:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise ResultError(f"the result has {type(value).__name__} where its annotation says {kind.__name__}")
        return value

    return check


def _float(value: Any) -> float:
    number = float(value) if type(value) is int else _exactly(float)(value)
    if not math.isfinite(number):
        raise ResultError(f"the result has {number}, which JSON cannot say")
    return float(number)


def _moment(value: Any) -> str:
    if _exactly(datetime)(value).tzinfo is None:
        raise ResultError("the result has a moment without a time zone; give it one, as in datetime.now(timezone.utc)")
    return str(value.isoformat())


_SIMPLE: dict[Any, tuple[Step, Step]] = {
    None: (_exactly(type(None)), _exactly(type(None))),
    type(None): (_exactly(type(None)), _exactly(type(None))),
    bool: (_exactly(bool), _exactly(bool)),
    int: (_exactly(int), _exactly(int)),
    str: (_exactly(str), _exactly(str)),
    float: (_float, _float),
    UUID: (lambda value: str(_exactly(UUID)(value)), UUID),
    Decimal: (lambda value: str(_exactly(Decimal)(value)), Decimal),
    datetime: (_moment, datetime.fromisoformat),
    Any: (_strict, _strict),
}


def _steps(kind: Any) -> tuple[Step, Step]:
    """Return how a value of ``kind`` becomes JSON, and how it is read again."""
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is list:
        return _each(*_steps(inner[0]))
    if origin in (dict, Mapping) and inner[0] is str:
        return _each_of_mapping(*_steps(inner[1]))
    if kind in (list, dict):
        return _SIMPLE[Any]
    if origin in (Union, types.UnionType) and len(inner) == 2 and type(None) in inner:
        return _or_none(*_steps(next(each for each in inner if each is not type(None))))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind)
    raise HandlerDefinitionError(
        f"there is no codec for {kind!r}: annotate the result with None, bool, int, float, str, UUID, Decimal, "
        "datetime, lists, mappings and dataclasses of these, or give @command(codec=...)"
    )


def _each(encode: Step, decode: Step) -> tuple[Step, Step]:
    return (
        lambda value: [encode(each) for each in _exactly(list)(value)],
        lambda data: [decode(each) for each in data],
    )


def _each_of_mapping(encode: Step, decode: Step) -> tuple[Step, Step]:
    text = _exactly(str)
    return (
        lambda value: {text(name): encode(each) for name, each in _exactly(dict)(value).items()},
        lambda data: {name: decode(each) for name, each in data.items()},
    )


def _or_none(encode: Step, decode: Step) -> tuple[Step, Step]:
    return (
        lambda value: None if value is None else encode(value),
        lambda data: None if data is None else decode(data),
    )


def _dataclass(kind: type[Any]) -> tuple[Step, Step]:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if not field.init:
            raise HandlerDefinitionError(f"{kind.__qualname__}.{field.name} is not given to __init__; give codec=")
    steps = {field.name: _steps(hints[field.name]) for field in dataclasses.fields(kind)}
    exactly = _exactly(kind)
    return (
        lambda value: {name: encode(getattr(exactly(value), name)) for name, (encode, _) in steps.items()},
        lambda data: kind(**{name: decode(data[name]) for name, (_, decode) in steps.items() if name in data}),
    )


def codec_for(annotation: Any, where: str) -> Codec[Any]:
    """Return the codec for what a handler is annotated to return; raise ``HandlerDefinitionError`` if there is none."""
    kind = _without_rejection(annotation)
    if kind is bytes:
        return raw
    if hasattr(kind, "model_validate_json"):  # a model of Pydantic's
        from .pydantic_codec import pydantic_json

        return pydantic_json(kind)
    try:
        return json if kind is Any else typed_json(kind)
    except HandlerDefinitionError as error:
        raise HandlerDefinitionError(f"{where}: {error}") from None


def _without_rejection(annotation: Any) -> Any:
    """Return the annotation without the ``Rejection`` that a handler may return instead of a result."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    rest = [each for each in get_args(annotation) if each is not Rejection]
    return Union[tuple(rest)] if rest else type(None)  # noqa: UP007  # made at run time
