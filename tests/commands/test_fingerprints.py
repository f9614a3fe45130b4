"""A key that comes again with another command is refused; what counts as another one."""

import enum
import math
import uuid
from dataclasses import dataclass, field, make_dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import pydantic
import pytest

from command_rig import SQLITE, USUAL_ONES, Desk, Held, PlaceOrder, desks
from kit import PATIENCE
from projector_dedup.commands import Call, InvalidKeyError, KeyReusedError, fields
from projector_dedup.commands.fingerprint import digest

desk = desks(SQLITE)
every_desk = desks(USUAL_ONES, "every_desk")


class Orders:
    """Its commands are nested."""

    @dataclass
    class Create:
        """Of the same name as the other's."""

        number: int


class Refunds:
    """Its commands are nested, too."""

    @dataclass
    class Create:
        """Of the same name as the other's."""

        number: int


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
def test_another_command_waits_for_the_one_in_progress(every_desk: Desk, ends: str) -> None:
    """Nobody can read the first one before it has committed: the other is refused then, or runs if the first failed."""
    desk, held = every_desk, Held(every_desk, raises=ValueError("a bug") if ends == "fails" else None)
    first = desk.harness.start(desk.handle, desk.operation(held), PlaceOrder(30, note="first"))
    assert held.entered.wait(PATIENCE)
    other = desk.harness.start(desk.handle, desk.operation(), PlaceOrder(31, note="other"))
    desk.harness.waits()
    held.may_end.set()
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


@dataclass
class Deposit:
    """A command that has the same fields as another."""

    account: str
    amount: int


@dataclass
class Withdraw:
    """That other one."""

    account: str
    amount: int


def test_a_command_of_another_type_is_another_command(desk: Desk) -> None:
    """Although its fields are the same: to withdraw is not answered by what was deposited."""
    operation = desk.operation(_move)
    desk.handle(operation, Deposit("alice", 5))
    with pytest.raises(KeyReusedError):
        desk.handle(operation, Withdraw("alice", 5))
    assert desk.handle(operation, Deposit("alice", 5)).result == "Deposit"


def _move(asked: object, _call: Call) -> str:
    return type(asked).__name__


def test_a_class_that_was_renamed_counts_by_its_former_name() -> None:
    """The class says so itself, its subclasses do not inherit it, and a class may move to another module."""
    fields_of_deposit = [("account", str), ("amount", int)]
    renamed = make_dataclass("PayIn", fields_of_deposit, namespace={"__fingerprint_name__": "Deposit"})
    child = make_dataclass("Child", [], bases=(renamed,))
    assert digest(renamed("alice", 5)) == digest(Deposit("alice", 5)) != digest(child("alice", 5))


def test_a_field_that_a_command_lacks_is_named() -> None:
    """Whoever misspells it in ``fields`` hears which operation's argument to mend."""
    for command in (PlaceOrder(3), {"note": ""}):
        with pytest.raises(InvalidKeyError, match="amuont"):
            fields("amuont")(command)


class Colour(enum.Enum):
    """An enumeration, of which the value counts."""

    RED = "red"


class Model(pydantic.BaseModel):
    """A command of Pydantic's."""

    amount: int
    note: str = ""
    former: str = pydantic.Field(default="", deprecated=True)


class Written(pydantic.BaseModel):
    """A command that is written in a way of its own, with a field that is left out of it."""

    amount: int
    trace: str = pydantic.Field(default="", exclude=True)

    @pydantic.model_serializer
    def as_text(self) -> str:
        """Return a text that is the same for all amounts: the fields are compared, and not what is written."""
        return "amount"


class Ticket(pydantic.BaseModel, frozen=True):
    """A part of a set."""


class Tickets(pydantic.BaseModel):
    """A command that Pydantic cannot turn into a mapping."""

    parts: set[Ticket]


class Card(pydantic.BaseModel):
    """A way to pay, told by a discriminator that nobody writes."""

    kind: Literal["card"] = "card"
    note: str = ""


class Cash(pydantic.BaseModel):
    """Another, with the same fields."""

    kind: Literal["cash"] = "cash"
    note: str = ""


class Debit(pydantic.BaseModel):
    """A class that has the name of another, as if it were in another module; its discriminator tells it from that."""

    __fingerprint_name__ = "Card"
    kind: Literal["debit"] = "debit"
    note: str = ""


class Payment(pydantic.BaseModel):
    """A command with a part that is one of several types."""

    by: Card | Cash | Debit
    parts: list[Card | Cash] = []
    named: dict[str, Card | Cash] = {}


class Batch(pydantic.RootModel[list[Card | Cash]]):
    """A command without fields."""


class Aliased(pydantic.BaseModel):
    """A command whose fields have other names outside."""

    model_config = pydantic.ConfigDict(serialize_by_alias=True)
    order: Card = pydantic.Field(alias="orderBy")


@dataclass(frozen=True)
class Paid:
    """A command of dataclasses in which a discriminator has a default."""

    by: object
    kind: Literal["paid"] = "paid"


class In(NamedTuple):
    """A command that is a named tuple."""

    amount: int


class Out(NamedTuple):
    """Another."""

    amount: int


class Longer(NamedTuple):
    """The named tuple ``In`` after two fields were added."""

    amount: int
    note: str = ""
    tip: int = 0


Longer.__fingerprint_name__ = "In"  # type: ignore[attr-defined]  # mypy takes it for a field in the body


class Open(pydantic.BaseModel, extra="allow"):
    """A command that takes more than its fields."""


@dataclass(frozen=True)
class Money:
    """An amount that Python compares without its currency."""

    amount: int
    currency: str = field(default="EUR", compare=False)


@dataclass(frozen=True)
class Fee:
    """A dataclass whose defaults are equal to other values."""

    money: Money = Money(1)
    limits: list[Any] = field(default_factory=lambda: [1])


class Charge(pydantic.BaseModel):
    """The same as a model."""

    money: Money = Money(1)
    limits: dict[str, Any] = {"limit": 1}


T = TypeVar("T")


class Box(pydantic.BaseModel, Generic[T]):
    """A generic model under its former name."""

    __fingerprint_name__ = "Crate"
    inner: T


class Crate(pydantic.BaseModel, Generic[T]):
    """What it was before."""

    inner: T


@dataclass
class Nested:
    """A command with everything in it."""

    inner: list[PlaceOrder]
    extra: dict[str, Any]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (PlaceOrder(3), PlaceOrder(3, note="")),
        (Model(amount=3), Model(amount=3, note="")),
        (Payment(by=Card(note="")), Payment(by=Card(), parts=[])),
        (Batch([Card()]), Batch([Card(note="")])),
        (Written(amount=3), Written(amount=3, trace="t")),
        (Tickets(parts={Ticket()}), Tickets(parts={Ticket()})),
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
        (Nested([PlaceOrder(1)], {"x": None}), Nested([PlaceOrder()], {"x": None})),
        (In(5), Longer(5)),
        (Fee(), Fee(Money(1, "EUR"), [1])),
        (Charge(), Charge(money=Money(1, "EUR"), limits={"limit": 1})),
        (Box[int](inner=1), Crate[int](inner=1)),
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
        (Deposit("alice", 5), Withdraw("alice", 5)),
        (PlaceOrder(3), {"amount": 3}),
        (Payment(by=Card()), Payment(by=Cash())),
        (Payment(by=Card()), Payment(by=Debit())),
        (Payment(by=Card(), parts=[Card()]), Payment(by=Card(), parts=[Cash()])),
        (Payment(by=Card(), named={"a": Card()}), Payment(by=Card(), named={"a": Cash()})),
        (Batch([Card()]), Batch([Cash()])),
        (Written(amount=3), Written(amount=4)),
        (Model(amount=3, former="x"), Model(amount=3)),
        (Aliased(orderBy=Card()), Aliased(orderBy=Card(note="x"))),
        (Paid(Card()), Paid(Cash())),
        (Paid(Card()), make_dataclass("Paid", [("by", object), ("kind", Literal["due"], "due")])(Card())),
        (In(5), Out(5)),
        (In(5), [5]),
        (Longer(5, tip=1), Longer(5, note="1")),
        (Open.model_validate({"by": Card()}), Open.model_validate({"by": Debit()})),
        (Open.model_validate({"by": [Deposit("alice", 5)]}), Open.model_validate({"by": [Withdraw("alice", 5)]})),
        (Ticket(), Open()),
        (Open.model_validate({"by": Ticket()}), Open.model_validate({"by": Open()})),
        (Fee(Money(1, "USD")), Fee()),
        (Fee(limits=[True]), Fee()),
        (Charge(money=Money(1, "USD")), Charge()),
        (Charge(limits={"limit": True}), Charge()),
        (Box[int](inner=1), Box[str](inner="1")),
        (Orders.Create(5), Refunds.Create(5)),
    ],
)
def test_different_commands_have_different_fingerprints(one: object, other: object) -> None:
    """None is taken for another."""
    assert digest(one) != digest(other)


@pytest.mark.parametrize("value", [math.nan, math.inf, Decimal("NaN"), {1: 2}, object(), PlaceOrder])
def test_what_equals_nothing_is_refused(value: object) -> None:
    """A key with it could never come again."""
    with pytest.raises(InvalidKeyError):
        digest(value)
