"""A result is recorded as it is, or not at all: the first caller and every later one get equal values."""

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Any, Generic, TypeVar
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import pydantic
import pytest

from command_rig import SQLITE, USUAL_ONES, Balance, Desk, PlaceOrder, desks, place
from projector_dedup.commands import (
    Call,
    Codec,
    Rejected,
    Rejection,
    ResultError,
    ResultUnreadableError,
    command,
    json,
)
from projector_dedup.errors import HandlerDefinitionError

desk = desks(SQLITE)
every_desk = desks(USUAL_ONES, "every_desk")


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


class Named(pydantic.BaseModel):
    """A result whose fields have other names outside, and which is told a computed field."""

    model_config = pydantic.ConfigDict(extra="forbid")
    order: str = pydantic.Field(alias="orderId")
    left: int = pydantic.Field(serialization_alias="rest", validation_alias="remaining")

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def twice(self) -> int:
        """What follows from the rest."""
        return self.left * 2


class Colour(Enum):
    """A part of a result."""

    RED = "red"


@dataclass(frozen=True)
class Tree:
    """A result that has parts of its own type."""

    days: tuple[date, ...] = ()
    colours: frozenset[Colour] = frozenset()
    parts: "tuple[Tree, ...]" = ()


T = TypeVar("T")


@dataclass(frozen=True)
class Page(Generic[T]):
    """A result of some type."""

    items: list[T]


@dataclass(frozen=True, eq=False)
class Moment:
    """A result that Python compares by identity, with a moment of an hour that comes twice."""

    at: datetime = datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin"))


class Ids(pydantic.RootModel[list[int]]):
    """A result without fields."""


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
        if isinstance(value, Rejected):
            raise value
        return value

    handler.__annotations__["return"] = annotation
    return handler


def check_answers(desk: Desk, value: Any, annotation: Any) -> None:
    """Ask twice; the first caller gets what was stored, too."""
    operation = desk.operation(returning(value, annotation))
    for _ in range(2):
        result = desk.handle(operation).result
        assert (result, type(result)) == (value, type(value))


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        (None, None),
        ({"a": [1, 2.5, None, True, "\0'\\"]}, dict),
        ([EVERYTHING], list[Everything]),
        (Receipt(number=1, at=datetime(2026, 1, 1, tzinfo=UTC)), Receipt),
        (Decimal("1E+3"), Decimal | Rejection),
        (Named.model_validate({"orderId": "o-77", "remaining": 3}), Named | None),
        ([Receipt(number=1, at=datetime(2026, 1, 1))], list[Receipt]),  # noqa: DTZ001  # no zone, and read without
        (Tree((date(2026, 1, 1),), frozenset({Colour.RED}), (Tree(),)), Tree),
        (Page([EVERYTHING]), Page[Everything]),
        (Ids([1, 2]), Ids),
    ],
    ids=["None", "dict", "list", "pydantic", "decimal", "aliases", "models", "recursive", "generic", "root model"],
)
def test_everybody_gets_an_equal_value_of_the_same_type(desk: Desk, value: Any, annotation: Any) -> None:
    """Also the first caller, who gets what was stored."""
    check_answers(desk, value, annotation)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [(EVERYTHING, Everything), (bytes(range(256)), bytes), (b"", bytes)],
    ids=["text", "bytes", ""],
)
def test_every_database_gives_back_all_bytes(every_desk: Desk, value: Any, annotation: Any) -> None:
    """None of them converts or cuts any."""
    check_answers(every_desk, value, annotation)


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        ((1, 2), list),
        ({1: 2}, dict),
        (float("nan"), float),
        ({"a": object()}, dict),
        (Balance(customer="b", amount=1), dict),
        (Everything(uuid4(), [], {"a": 1.0}, done=1), Everything),  # type: ignore[arg-type]
        ("text", int),
        (True, int),
        (Page([2**60 + 1]), Page[float]),
        (Page([(1, 2)]), Page[Any]),
        ("\ud800", str),
        (bytearray(b"x"), bytes),
        ("x" * 70_000, str),
        (Rejection("no", {"at": object()}), Line),
        (Rejected("no", {"at": object()}), Line),
    ],
    ids=[
        *("a tuple", "a number for a key", "nan", "an object", "an entity", "another type in it"),
        *("text for a number", "a boolean for a number", "too large a whole number", "a tuple in it"),
        "a lone surrogate",
        *("other bytes", "too long", "a detail that JSON cannot say", "such a detail, raised"),
    ],
)
def test_what_cannot_be_recorded_is_not_done(desk: Desk, value: Any, annotation: Any) -> None:
    """The error says so before anything commits, and the key stays free."""
    operation = desk.operation(returning(value, annotation))
    with pytest.raises(ResultError, match=r"nothing was applied|desk\.place"):
        desk.handle(operation)
    assert (desk.orders(), desk.records()) == ([], [])
    assert not desk.handle(desk.operation()).replayed


class Reason(StrEnum):
    """Codes of rejections."""

    NO_FUNDS = "no_funds"


@pytest.mark.parametrize("key", ["k1", None])
def test_the_detail_of_a_rejection_becomes_what_json_has(desk: Desk, key: str | None) -> None:
    """A Decimal, a UUID, a moment are told as their texts, to every caller alike, and with a key or without."""
    detail = {"missing": Decimal("1.50"), "of": (UUID(int=1), date(2026, 1, 1)), "why": Colour.RED}

    def refuse(_order: PlaceOrder, _call: Call) -> None:
        raise Rejected(Reason.NO_FUNDS, detail)

    for _ in range(2):
        told = desk.handle(desk.operation(refuse), key=key).rejection
        assert told == Rejection("no_funds", {"missing": "1.50", "of": [str(UUID(int=1)), "2026-01-01"], "why": "red"})


@pytest.mark.parametrize("value", [Moment(), [Moment().at]], ids=["in a dataclass", "in a list"])
def test_a_moment_of_the_hour_that_comes_twice_is_recorded(desk: Desk, value: Any) -> None:
    """Python calls two such moments of different zones unequal, even if they are the same."""
    operation = desk.operation(returning(value, Moment if isinstance(value, Moment) else list[datetime]))
    for _ in range(2):
        found = desk.handle(operation).result
        assert (found[0] if isinstance(found, list) else found.at).isoformat() == "2026-10-25T02:30:00+01:00"


def _fail(_value: object) -> Any:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("codec", "told"),
    [
        (Codec("mine", _fail, bytes.decode), "ZeroDivisionError"),
        (Codec[Any]("mine", repr, eval), "str"),  # type: ignore[arg-type]
        (Codec("mine", lambda _: b"x", _fail), "ZeroDivisionError"),
    ],
    ids=["stores nothing", "stores text", "reads nothing"],
)
def test_a_codec_that_fails_applies_nothing(desk: Desk, codec: Any, told: str) -> None:
    """Whatever it raises, and also if it only fails to read: what nobody can read is not committed."""
    with pytest.raises(ResultError, match=told):
        desk.handle(desk.operation(codec=codec))
    assert (desk.orders(), desk.records()) == ([], [])


@pytest.mark.parametrize("name", ["", "x" * 65, "\N{GREEK SMALL LETTER PI}" * 33, "a\0b", 1])
def test_a_codecs_name_is_one_that_can_be_stored(name: Any) -> None:
    """It is refused when the operation is made, not when its first result is recorded."""
    for settings in ({"codec": replace(json, name=name)}, {"older_codecs": [replace(json, name=name)]}):
        with pytest.raises(HandlerDefinitionError, match="1 to 64 bytes"):
            command(name="x", **settings)(returning(None, None))


def test_the_size_of_results_is_bounded_where_the_user_says(every_desk: Desk) -> None:
    """By default at 64 KiB; never is one cut."""
    desk, operation = every_desk, every_desk.operation(returning("x" * 70_000, str))
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


class Shipped(pydantic.BaseModel):
    """A result of Pydantic's with a field that was called ``number``, and says so."""

    order: str = pydantic.Field("", validation_alias=pydantic.AliasChoices("order", "number"))
    note: str = ""


class Renamed(pydantic.BaseModel):
    """A result of Pydantic's with a field that was called ``number``, and does not say so."""

    order: str = ""


class Drawn(pydantic.BaseModel):
    """The same, with a default that is another one for each reading."""

    order: str = pydantic.Field(default_factory=lambda: uuid4().hex)


class Aliased(pydantic.BaseModel):
    """Two fields that were renamed, of which one says so."""

    order: str = pydantic.Field("", validation_alias=pydantic.AliasChoices("order", "number"))
    at: int = 0


@dataclass(frozen=True)
class Sent:
    """The same as a dataclass."""

    order: str = ""
    lines: list[Line] = field(default_factory=list)
    part: "Sent | None" = None


@pytest.mark.parametrize(
    ("stored", "annotation", "read"),
    [
        (b'{"price":"1.5","at":"2026-01-01T12:00:00+02:00","gone":1}', Line, None),
        (b'{"price":"1.5"}', Line, Line(Decimal("1.5"))),
        (b'{"number":"o-77"}', Shipped, Shipped(order="o-77")),
        (
            b'{"order":"00000000-0000-0000-0000-000000000007","lines":[{"price":"1E+3","at":"2026-01-01T12:00:00+00:00"}'
            b'],"names":{"a":1.0},"done":true,"note":null}',
            Everything,
            Everything(UUID(int=7), [Line(Decimal("1E+3"), datetime(2026, 1, 1, 12, tzinfo=UTC))], {"a": 1.0}),
        ),
        (b"5", int, 5),
        (b'[{"price":"1.5","at":null}]', list[Line], [Line(Decimal("1.5"))]),
    ],
    ids=["a field is gone", "a field is new", "a field is renamed and says so", "all types", "no dataclass", "a list"],
)
def test_a_record_of_older_code_is_read(desk: Desk, stored: bytes, annotation: Any, read: Any) -> None:
    """A new field has its default, one that is gone is left out; the bytes are those of November 2026."""
    older: Any = Codec("typed-json", lambda value: value, bytes)
    desk.handle(desk.operation(returning(stored, bytes), codec=older))
    read = Line(Decimal("1.5"), datetime(2026, 1, 1, 10, tzinfo=UTC)) if read is None else read
    assert desk.handle(desk.operation(returning(None, annotation))).result == read


@pytest.mark.parametrize(
    ("stored", "annotation"),
    [
        (b'{"number":"o-77"}', Sent),
        (b'[{"number":"o-77"}]', list[Renamed]),
        (b'{"order":"o","lines":[{"price":"1","when":null}]}', Sent),
        (b'{"order":"o","lines":[],"part":{"number":"o-77"}}', Sent),
        (b'{"number":"o-77"}', Drawn),
        (b'{"number":"o-77","left":70}', Aliased),
    ],
    ids=["dataclass", "pydantic", "in a list", "in a part", "a default that is drawn anew", "beside one that says so"],
)
def test_a_field_that_was_renamed_is_not_replayed_as_its_default(desk: Desk, stored: bytes, annotation: Any) -> None:
    """The answer was "o-77" and not ""; an older codec of the same name reads it."""
    older: Any = Codec("typed-json", lambda value: value, bytes)
    desk.handle(desk.operation(returning(stored, bytes), codec=older))
    with pytest.raises(ResultUnreadableError, match=r"(number|when|left).*(order|at)") as told:
        desk.handle(desk.operation(returning(None, annotation)))
    assert told.value.raw == stored
    assert desk.handle(desk.operation(returning(None, annotation), older_codecs=[older])).result == stored


# When an operation is made ------------------------------------------------------------------------------------------

WITHOUT_PYDANTIC = """
import sys
sys.modules["pydantic"] = None
from typing import Any
from projector_dedup.commands import command, json
@command(name="a")
def nothing(order, call) -> None: ...
@command(name="b")
def anything(order, call) -> Any: ...
@command(name="c", codec=json)
def chosen(order, call) -> int: ...
@command(name="x")
def place(order, call) -> int: ...
"""


def test_a_type_without_pydantic_names_the_extra() -> None:
    """As a line to run, when the operation is made; without a type to keep, or with a codec, nothing is missing."""
    run = subprocess.run([sys.executable, "-c", WITHOUT_PYDANTIC], capture_output=True, text=True, check=False)
    assert "HandlerDefinitionError: x: " in run.stderr
    assert "pip install 'projector-dedup[commands]'" in run.stderr


class Unknown:
    """A class that says nothing of its fields."""


@dataclass
class Broken:
    """A result with an annotation that leads nowhere."""

    part: "Nowhere"  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize("annotation", [Unknown, list[Unknown], Balance, Broken, Iterator[int]])
def test_a_result_without_a_codec_is_refused_at_the_decoration(annotation: Any) -> None:
    """Not when the first customer calls."""
    with pytest.raises(HandlerDefinitionError, match="codec"):
        command(name="x")(returning(None, annotation))


def test_a_handler_says_what_it_returns() -> None:
    """Without an annotation nobody knows how to record it."""

    def handler(_order, _call):  # type: ignore[no-untyped-def]
        return None

    with pytest.raises(HandlerDefinitionError, match="no annotation of its result"):
        command(name="x")(handler)
    assert command(name="x", codec=json)(handler).codec is json
