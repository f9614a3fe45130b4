"""A key that comes again with another command is refused; what counts as another one."""

import enum
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from command_rig import Desk, Placed, PlaceOrder, desk_on, place
from databases import DRIVERS, USUAL, USUAL_ASYNC
from projector_dedup.commands import Call, InvalidKeyError, KeyReusedError, fields
from projector_dedup.commands.fingerprint import canonical, digest
from projector_dedup.testing.subject import PATIENCE


@pytest.fixture(
    params=[driver for driver in DRIVERS if driver.drivername in {*USUAL.values(), *USUAL_ASYNC.values()}], ids=str
)
def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
    """A desk on each database, sync and async."""
    with desk_on(request, request.param) as desk:
        yield desk


def test_another_command_under_the_same_key_is_refused(desk: Desk) -> None:
    """Nothing runs, and nothing of the record is told."""
    operation = desk.operation()
    desk.handle(operation, PlaceOrder(30, note="for a secret customer"))
    with pytest.raises(KeyReusedError) as told:
        desk.handle(operation, PlaceOrder(31, note="for me"))
    assert "secret" not in str(told.value)
    assert (desk.ran, desk.orders()) == (["k1"], ["for a secret customer"])
    assert desk.handle(operation, PlaceOrder(30, note="for a secret customer")).replayed


@pytest.mark.parametrize("ends", ["commits", "fails"])
def test_another_command_waits_for_the_one_in_progress(desk: Desk, ends: str) -> None:
    """Nobody can read the first one before it has committed: the other is refused then, or runs if the first failed."""
    entered, may_end = threading.Event(), threading.Event()

    def held(order: PlaceOrder, call: Call) -> Placed:
        placed = place(order, call)
        entered.set()
        assert desk.harness.blocking(may_end.wait, PATIENCE)
        if ends == "fails":
            raise ValueError("a bug")
        return placed

    first = desk.harness.start(desk.handle, desk.operation(held), PlaceOrder(30, note="first"))
    assert entered.wait(PATIENCE)
    other = desk.harness.start(desk.handle, desk.operation(), PlaceOrder(31, note="other"))
    desk.harness.waits()
    may_end.set()
    if ends == "commits":
        assert not first.result(PATIENCE).replayed
        with pytest.raises(KeyReusedError):
            other.result(PATIENCE)
        assert desk.orders() == ["first"]
    else:
        with pytest.raises(ValueError, match="a bug"):
            first.result(PATIENCE)
        assert not other.result(PATIENCE).replayed
        assert desk.orders() == ["other"]


def test_chosen_fields_are_compared_and_others_not(desk: Desk) -> None:
    """Of this operation the note may change."""
    operation = desk.operation(fingerprint=fields("amount", "customer"))
    desk.handle(operation, PlaceOrder(30, note="one"))
    assert desk.handle(operation, PlaceOrder(30, note="two")).replayed
    with pytest.raises(KeyReusedError):
        desk.handle(operation, PlaceOrder(31, note="one"))


def test_a_field_that_is_new_and_has_its_default_makes_no_other_command(desk: Desk) -> None:
    """Old and new code run at once in a rolling deploy."""
    newer = make_dataclass("PlaceOrder", [("urgent", bool, field(default=False))], bases=(PlaceOrder,), frozen=True)
    operation = desk.operation()
    desk.handle(operation, PlaceOrder(30))
    assert desk.handle(operation, newer(30)).replayed
    with pytest.raises(KeyReusedError):
        desk.handle(operation, newer(30, urgent=True))


def test_what_cannot_be_compared_is_refused_before_any_sql(desk: Desk) -> None:
    """Rather than taken for equal, or for different."""
    with pytest.raises(InvalidKeyError, match="canonical form"):
        desk.handle(desk.operation(), object())
    assert (desk.ran, desk.records()) == ([], [])


class Colour(enum.Enum):
    """An enumeration, of which the value counts."""

    RED = "red"


class Model(pydantic.BaseModel):
    """A command of Pydantic's."""

    amount: int
    note: str = ""


@dataclass
class Nested:
    """A command with everything in it."""

    inner: list[PlaceOrder]
    extra: dict[str, Any]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PlaceOrder(3), {"amount": 3}),
        (Model(amount=3), {"amount": 3}),
        (Decimal("1.50"), Decimal("1.5")),
        (Decimal("1E+3"), Decimal("1000.00")),
        (Decimal("-0.0"), Decimal(0)),
        (30.0, 30),
        (datetime(2026, 1, 1, 12, tzinfo=UTC), datetime(2026, 1, 1, 13, tzinfo=timezone(timedelta(hours=1)))),
        ((1, 2), [1, 2]),
        ({2, 1}, {1, 2}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Colour.RED, "red"),
        (uuid.UUID(int=1), str(uuid.UUID(int=1))),
        (Nested([PlaceOrder(1)], {"x": None}), {"inner": [{}], "extra": {"x": None}}),
    ],
)
def test_equal_commands_have_equal_fingerprints(one: object, other: object) -> None:
    """However they came: by HTTP, by a queue, or from code."""
    assert digest(one) == digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PlaceOrder(3), PlaceOrder(4)),
        (1, True),
        (1, "1"),
        (None, "None"),
        ([1, [2]], [1, 2]),
        (date(2026, 1, 1), date(2026, 1, 2)),
        (0.1, 0.2),
        (Decimal("1.0000000000000000000000000000000001"), Decimal(1)),
        (b"a", b"b"),
        ({"a": 1}, {"a": 2}),
    ],
)
def test_different_commands_have_different_fingerprints(one: object, other: object) -> None:
    """None is taken for another."""
    assert digest(one) != digest(other)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), Decimal("NaN"), {1: 2}, object(), PlaceOrder])
def test_what_equals_nothing_is_refused(value: object) -> None:
    """A key with it could never come again."""
    with pytest.raises(InvalidKeyError):
        digest(value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON, JSON)
def test_fingerprints_are_equal_for_equal_values_only(one: Any, other: Any) -> None:
    """By the canonical form, whose text is hashed."""
    assert (digest(one) == digest(other)) == (repr(_sorted(canonical(one))) == repr(_sorted(canonical(other))))


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _sorted(value[name]) for name in sorted(value)}
    return [_sorted(each) for each in value] if isinstance(value, list) else value
