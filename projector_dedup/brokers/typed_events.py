"""``into``: a converter for consumers that builds typed events of JSON bodies, each of the class of its type."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any, cast

from ..extras import needs

with needs("events"):
    from pydantic import TypeAdapter, ValidationError

from ..errors import HandlerDefinitionError, InvalidMessageError
from ..json_numbers import exact
from ..message import IdExtractor, Message, TypeExtractor, attribute_or_key, printable
from .incoming import Convert, Incoming, check_convert, json_event

Build = Callable[[Any, bool], Any]

_CLASSES = "a dataclass, a TypedDict, a Pydantic model or a msgspec struct"


def into(
    types: Mapping[str, type[Any]],
    convert: Convert = json_event,
    *,
    type: TypeExtractor | None = None,  # noqa: A002  # the word of Message.type
    message_id: IdExtractor = attribute_or_key,
) -> Convert:
    """Return a converter that makes an event of a class of each message whose type is in ``types``.

    ::

        Consumer(parameters, "payments", dispatcher, convert=into({"payment.received": PaymentReceived}))

    ``types`` maps the type that a message carries to a dataclass, a ``TypedDict``, a Pydantic model, a msgspec struct,
    or ``dict``. ``convert`` reads the message first: ``json_event``, ``cloudevent``, or a function of your own that
    returns a ``Message``. Where that finds no type or no id, ``type`` and ``message_id`` look into the JSON. A message
    of another type is passed on as it is, under its name.

    The JSON must fit the class: "30" is no number. Fields that the class does not have are ignored. A ``Decimal`` gets
    every digit of a JSON number that ``json_of`` has read. The converter raises ``InvalidMessageError`` for a body that
    does not fit. The error names each field that does not fit; of a msgspec struct, the first one.

    Raises ``HandlerDefinitionError`` for a class that cannot be built of JSON. Pydantic builds all but structs; the
    extra is ``projector-dedup[events]``.
    """
    given: object = types
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise HandlerDefinitionError(
            'into() takes a mapping of types to classes, as in into({"payment.received": PaymentReceived})'
        )
    check_convert(convert)
    builders = {name: _builder(name, kind) for name, kind in types.items()}

    def converted(incoming: Incoming) -> Message:
        rounded: list[str] = []

        def parse_float(text: str) -> float:
            if not isinstance(exact(text), float):
                rounded.append(text)
            return float(text)

        message = convert(replace(incoming, parse_float=parse_float))
        if not isinstance(message, Message):
            raise HandlerDefinitionError(f"convert= of into() returns a Message, not {message.__class__.__name__}")
        name = message.type if message.type is not None or type is None else type(message.body)
        found = message.id if message.id is not None else message_id(message.body)
        if name is None:
            raise InvalidMessageError(
                "the message has no type, so into() cannot choose a class; the producer must set the type, or pass "
                "type=by_path(...) if the body has it"
            )
        if not isinstance(name, str) or name not in builders:
            return replace(message, id=found)
        body = _with_exact_numbers(convert, incoming, message.body) if rounded else message.body
        return replace(message, id=found, type=types[name], body=builders[name](body, bool(rounded)))

    return converted


class _Rounded(float):
    """A number of a JSON body that no float is, as the nearest float."""

    written: Decimal
    mark: str  # a NaN of its own


def _with_exact_numbers(convert: Convert, incoming: Incoming, plain: Any) -> Any:
    """Return the body with a ``_Rounded`` for each rounded number, or ``plain`` if the converter cannot use those."""
    count = itertools.count(1)

    def parse_float(text: str) -> float:
        number = exact(text)
        if isinstance(number, float):
            return number
        rounded = _Rounded(number)
        rounded.written, rounded.mark = number, f"NaN{next(count)}"
        return rounded

    try:
        return cast(Message, convert(replace(incoming, parse_float=parse_float))).body
    except Exception:  # noqa: BLE001  # of a converter that takes floats only; the first call has succeeded
        return plain


def _with(body: Any, change: Callable[[_Rounded], object]) -> Any:
    """Return a copy of a JSON value with each rounded number changed."""
    if isinstance(body, dict):
        return {name: _with(each, change) for name, each in body.items()}
    if isinstance(body, list):
        return [_with(each, change) for each in body]
    return change(body) if isinstance(body, _Rounded) else body


def _builder(name: str, kind: type[Any]) -> Build:
    given: object = kind
    if not isinstance(given, type):
        raise HandlerDefinitionError(f"into() maps the type {printable(name)} to a class, not to {given!r}")
    if kind.__module__ == "builtins" and kind is not dict:
        raise HandlerDefinitionError(
            f"into() maps the type {printable(name)} to {kind.__name__}, which has no fields; give {_CLASSES}"
        )
    return _struct(name, kind) if hasattr(kind, "__struct_fields__") else _by_pydantic(name, kind)


def _by_pydantic(name: str, kind: type[Any]) -> Build:
    try:
        adapter = TypeAdapter(kind)
        adapter.rebuild(raise_errors=True)  # of a class that was not yet defined when an annotation was read
    except Exception as error:
        raise HandlerDefinitionError(
            f"Pydantic cannot build {kind.__qualname__} from JSON ({error.__class__.__name__}: "
            f"{str(error).splitlines()[0]}); give {_CLASSES}"
        ) from error

    def with_digits(body: Any) -> Any:
        """Make texts of the rounded numbers that become Decimals: Pydantic reads a number in JSON as a float."""
        try:
            adapter.validate_json(json.dumps(_with(body, lambda number: number.mark)), strict=True)
        except ValidationError as error:  # a Decimal refuses a NaN in a text as not finite, a float as no number
            refused = {(each["type"], str(each["input"])) for each in error.errors(include_url=False)}
            only = {mark for kind, mark in refused if kind == "finite_number" and ("float_type", mark) not in refused}
            return _with(body, lambda number: str(number.written) if number.mark in only else number)
        except Exception:  # noqa: BLE001  # of a validator of the user's, which must not be given a text
            return body
        return body

    def build(body: Any, rounded: bool) -> Any:
        try:  # as JSON: a moment is a text there, and a text is no number
            return adapter.validate_json(json.dumps(with_digits(body) if rounded else body), strict=True)
        except ValidationError as error:
            flaws = error.errors(include_input=False, include_url=False)
            places = (".".join(str(part) for part in each["loc"]) or "the whole" for each in flaws)
            said = "; ".join(f"{place}: {each['msg']}" for place, each in zip(places, flaws, strict=True))
            raise _unfit(name, kind, said) from error

    return build


def _struct(name: str, kind: type[Any]) -> Build:
    import msgspec

    encoder = msgspec.json.Encoder(decimal_format="number")

    def build(body: Any, rounded: bool) -> Any:
        try:
            if rounded:
                return msgspec.json.decode(encoder.encode(_with(body, lambda number: number.written)), type=kind)
            return msgspec.convert(body, kind)
        except (msgspec.ValidationError, UnicodeEncodeError) as error:  # a lone surrogate, which Python's JSON has
            raise _unfit(name, kind, str(error)) from error

    return build


def _unfit(name: str, kind: type[Any], flaw: str) -> InvalidMessageError:
    return InvalidMessageError(
        f"a message of the type {printable(name)} does not fit {kind.__qualname__} ({printable(flaw)[:800]}); correct "
        "the producer, or the class"
    )
