"""A result is recorded as it is, or not at all: the first caller and every later one get equal values."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_rig import Balance, Desk, PlaceOrder, desk_on, place
from databases import DRIVERS, USUAL, USUAL_ASYNC
from projector_dedup import HandlerDefinitionError
from projector_dedup.commands import (
    Call,
    Codec,
    Rejected,
    Rejection,
    ResultError,
    ResultUnreadableError,
    command,
    json,
    raw,
    typed_json,
)


@pytest.fixture(
    params=[driver for driver in DRIVERS if driver.drivername in {*USUAL.values(), *USUAL_ASYNC.values()}], ids=str
)
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    """A desk on each database, sync and async."""
    with desk_on(request, request.param) as desk:
        yield desk


@dataclass(frozen=True)
class Line:
    """A part of a result."""

    price: Decimal
    at: datetime | None = None


@dataclass(frozen=True)
class Everything:
    """A result of all types that are stored."""

    order: UUID
    lines: list[Line]
    names: dict[str, float]
    done: bool = True
    note: str | None = None


class Receipt(pydantic.BaseModel):
    """A result of Pydantic's."""

    number: int
    at: datetime


EVERYTHING = Everything(
    uuid4(),
    [
        Line(Decimal("1.50"), datetime(2026, 1, 1, 12, 0, 0, 5, tzinfo=timezone(timedelta(hours=2)))),
        Line(Decimal("0.1")),
    ],
    {"\N{GREEK SMALL LETTER PI}'\"\\\0": math.pi, "": -0.5},
)


def returning(value: Any, annotation: Any) -> Callable[[PlaceOrder, Call], Any]:
    """Return a handler that places an order and returns the value."""

    def handler(order: PlaceOrder, call: Call) -> Any:
        place(order, call)
        return value

    handler.__annotations__["return"] = annotation
    return handler


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (EVERYTHING, Everything),
        (None, None),
        ({"a": [1, 2.5, None, True, "\0'\\"]}, dict),
        ([EVERYTHING], list[Everything]),
        (bytes(range(256)), bytes),
        (b"", bytes),
        (Receipt(number=1, at=datetime(2026, 1, 1, tzinfo=UTC)), Receipt),
        (Decimal("1E+3"), Decimal | Rejection),
    ],
    ids=["dataclass", "None", "dict", "list", "bytes", "no bytes", "pydantic", "decimal"],
)
def test_everybody_gets_an_equal_value_of_the_same_type(desk: Desk, value: Any, annotation: Any) -> None:
    """Also the first caller, who gets what was stored."""
    operation = desk.operation(returning(value, annotation))
    for _ in range(2):
        result = desk.handle(operation).result
        assert (result, type(result)) == (value, type(value))


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        ((1, 2), list),
        ({1: 2}, dict),
        (float("nan"), float),
        ({"a": object()}, dict),
        (Balance(customer="b", amount=1), dict),
        (Line(Decimal(1), datetime(2026, 1, 1)), Line),  # noqa: DTZ001  # without a zone
        (Everything(uuid4(), [], {"a": 1.0}, done=1), Everything),  # type: ignore[arg-type]
        ("text", int),
        (True, int),
        (2**60 + 1, float),
        ("\ud800", str),
        (bytearray(b"x"), bytes),
        ("x" * 70_000, str),
        (Rejection("no", {"at": datetime.now(UTC)}), Line),
    ],
    ids=[
        *("a tuple", "a number for a key", "nan", "an object", "an entity", "no time zone", "another type in it"),
        *("text for a number", "a boolean for a number", "too large a whole number", "a lone surrogate"),
        *("other bytes", "too long", "a detail that JSON cannot say"),
    ],
)
def test_what_cannot_be_recorded_is_not_done(desk: Desk, value: Any, annotation: Any) -> None:
    """The error says so before anything commits, and the key stays free."""
    operation = desk.operation(returning(value, annotation))
    with pytest.raises(ResultError, match=r"nothing was applied|desk\.place"):
        desk.handle(operation)
    assert (desk.orders(), desk.records()) == ([], [])
    assert not desk.handle(desk.operation()).replayed


def test_a_rejection_that_cannot_be_recorded_is_an_error(desk: Desk) -> None:
    """Its detail is what JSON can say."""

    def refuse(order: PlaceOrder, call: Call) -> None:
        place(order, call)
        raise Rejected("no", {"at": datetime.now(UTC)})

    with pytest.raises(ResultError):
        desk.handle(desk.operation(refuse))
    assert (desk.orders(), desk.records()) == ([], [])


def test_a_codec_that_raises_applies_nothing(desk: Desk) -> None:
    """Whatever it raises."""

    def fail(_value: object) -> bytes:
        raise ZeroDivisionError

    with pytest.raises(ResultError, match="ZeroDivisionError"):
        desk.handle(desk.operation(codec=Codec("mine", fail, bytes.decode)))
    assert (desk.orders(), desk.records()) == ([], [])


def test_the_size_of_results_is_bounded_where_the_user_says(desk: Desk) -> None:
    """By default at 64 KiB; never is one cut."""
    operation = desk.operation(returning("x" * 70_000, str))
    assert desk.handle(operation, commands=desk.commands(max_result_bytes=80_000)).result == "x" * 70_000
    assert desk.handle(operation).result == "x" * 70_000


def test_a_record_that_this_code_cannot_read_is_told_and_never_run_again(desk: Desk) -> None:
    """By its codec's name, or because the bytes do not fit any more; an older codec is kept for it."""
    text = Codec("text", str.encode, bytes.decode)
    desk.handle(desk.operation(returning("five", str), codec=text))
    for newer in (json, Codec[Any]("text", str.encode, int)):
        with pytest.raises(ResultUnreadableError, match="older_codecs") as told:
            desk.handle(desk.operation(returning("six", str), codec=newer))
        assert told.value.raw == b"five"
    kept = desk.operation(returning("six", str), codec=json, older_codecs=[text])
    assert desk.handle(kept).result == "five"
    assert len(desk.orders()) == 1


def test_a_record_of_older_code_is_read_where_a_field_has_a_default(desk: Desk) -> None:
    """A field that is new in the result has its default in old records; one that is gone is left out."""
    older = Codec("typed-json", lambda value: value, bytes)
    desk.handle(desk.operation(returning(b'{"price":"1.5","gone":1}', bytes), codec=older))
    assert desk.handle(desk.operation(returning(None, Line))).result == Line(Decimal("1.5"))


# The codecs alone --------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
)


@given(VALUES)
def test_json_gives_back_what_it_took(value: Any) -> None:
    """Equal, and of the same types all the way down."""
    assert repr(json.loads(json.dumps(value))) == repr(value)


@given(
    st.builds(
        Everything,
        st.uuids(),
        st.lists(st.builds(Line, st.decimals(allow_nan=False, allow_infinity=False), st.none())),
        st.dictionaries(st.text(st.characters(codec="utf-8")), st.floats(allow_nan=False, allow_infinity=False)),
        st.booleans(),
        st.none() | st.text(st.characters(codec="utf-8")),
    )
)
def test_dataclasses_come_back_as_they_were(value: Everything) -> None:
    """Equal, and of the same types all the way down."""
    codec = typed_json(Everything)
    assert repr(codec.loads(codec.dumps(value))) == repr(value)


def test_raw_bytes_are_stored_as_they_are() -> None:
    """No encoding is made of them."""
    assert raw.dumps(b"\0\xff") == raw.loads(b"\0\xff") == b"\0\xff"


@dataclass
class Derived:
    """A result whose field cannot be given."""

    number: int = field(init=False, default=1)


@pytest.mark.parametrize("annotation", [set, object, Derived, complex, list[object], dict[int, str], int | str])
def test_a_result_without_a_codec_is_refused_at_the_decoration(annotation: Any) -> None:
    """Not when the first customer calls."""
    with pytest.raises(HandlerDefinitionError, match="codec"):
        command(name="x")(returning(None, annotation))


def test_a_handler_says_what_it_returns() -> None:
    """Without an annotation nobody knows how to record it."""

    def handler(_order, _call):  # type: ignore[no-untyped-def]
        return None

    with pytest.raises(HandlerDefinitionError, match="annotate its result"):
        command(name="x")(handler)
    assert command(name="x", codec=json)(handler).codec is json
