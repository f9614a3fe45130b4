"""`into` builds an event of the class of its type, for a dispatcher whose handlers take classes."""

import json
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Annotated, Any, Literal, cast
from uuid import UUID

import msgspec
import pytest
from pydantic import BaseModel, BeforeValidator, Field
from sqlalchemy.orm import Session, sessionmaker
from typing_extensions import TypedDict  # Pydantic takes that of `typing` from Python 3.12 on

from projector_dedup import Dispatcher, Message, on, projector
from projector_dedup.brokers.incoming import Incoming, cloudevent, json_of
from projector_dedup.brokers.settling import Settling
from projector_dedup.brokers.typed_events import into
from projector_dedup.errors import HandlerDefinitionError, InvalidMessageError, UnhandledMessage
from projector_dedup.message import by_path


@dataclass
class Paid:
    """A dataclass."""

    account: UUID
    amount: Decimal
    at: datetime
    note: str = ""


class Refunded(TypedDict):
    """A typed dictionary."""

    account: str
    amount: int


class Moved(BaseModel):
    """A model of Pydantic's."""

    source: str
    target: str


class Closed(msgspec.Struct):
    """A struct of msgspec's."""

    account: str
    left: int


TYPES: dict[str, type[Any]] = {"paid": Paid, "refunded": Refunded, "moved": Moved, "closed": Closed}
BODIES: dict[str, dict[str, Any]] = {
    "paid": {
        "account": "00000000-0000-0000-0000-000000000007",
        "amount": "1.10",
        "at": "2026-01-01T00:00:00Z",
        "since": "a field of a later version",
    },
    "refunded": {"account": "a", "amount": 5},
    "moved": {"source": "a", "target": "b"},
    "closed": {"account": "a", "left": 0},
}
BUILT: dict[str, object] = {
    "paid": Paid(UUID(int=7), Decimal("1.10"), datetime(2026, 1, 1, tzinfo=UTC)),
    "refunded": {"account": "a", "amount": 5},
    "moved": Moved(source="a", target="b"),
    "closed": Closed("a", 0),
}
SEEN: list[object] = []


@projector(idempotent=True, name="typed")
class Seen:
    """Notes what its handlers were given."""

    @on(Paid, Refunded, Moved, Closed)
    def see(self, event: Any, _session: Session) -> None:
        """Note the event."""
        SEEN.append(event)


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    SEEN.clear()


def incoming(kind: str, body: object, **properties: Any) -> Incoming:
    """A message as a broker delivers it."""
    return Incoming(json.dumps(body).encode(), type=kind, message_id=properties.pop("message_id", "m"), **properties)


@pytest.mark.parametrize("kind", TYPES)
def test_the_event_is_of_its_class(factory: sessionmaker[Session], kind: str) -> None:
    """A dataclass, a TypedDict, a model, a struct: the handler gets what its @on says, once."""
    settling = Settling(Dispatcher(factory, Seen()), into(TYPES))
    assert settling.deliver(incoming(kind, BODIES[kind])).acknowledge
    assert settling.deliver(incoming(kind, BODIES[kind])).acknowledge
    assert BUILT[kind] == SEEN[0]
    assert len(SEEN) == 1


def test_a_cloud_event_and_a_body_with_its_own_id_and_type() -> None:
    """What the message carries wins; else `type` and `message_id` look into the JSON."""
    event = {"specversion": "1.0", "id": "7", "source": "shop", "type": "moved", "data": BODIES["moved"]}
    typed = into(TYPES, cloudevent)(incoming("", event, content_type="application/cloudevents+json"))
    assert typed == Message("4:shop1:7", BUILT["moved"], Moved)
    body = {"id": "m7", "kind": "refunded", **BODIES["refunded"]}
    convert = into(TYPES, type=by_path("kind"), message_id=by_path("id"))
    typed = convert(Incoming(json.dumps(body).encode()))
    assert isinstance(typed, Message)
    assert (typed.id, typed.type) == ("m7", Refunded)
    with_its_own_id = into(TYPES)(Incoming(json.dumps({"message_id": "m8", **BODIES["moved"]}).encode(), type="moved"))
    assert with_its_own_id == Message("m8", BUILT["moved"], Moved)


@pytest.mark.parametrize(
    ("kind", "changed", "words"),
    [
        ("paid", {"amount": "much"}, "the type paid does not fit Paid (amount: "),
        ("paid", {"note": 7}, "the type paid does not fit Paid (note: Input should be a valid string)"),
        ("paid", {"at": 7, "note": 7}, "be a valid datetime; note: Input should be a valid string); correct"),
        (
            "refunded",
            {"amount": "5"},
            "the type refunded does not fit Refunded (amount: Input should be a valid integer",
        ),
        ("moved", {"target": None}, "the type moved does not fit Moved (target: "),
        ("closed", {"left": "0"}, "the type closed does not fit Closed (Expected `int`, got `str` - at `$.left`)"),
    ],
)
def test_the_field_that_does_not_fit_is_named(
    factory: sessionmaker[Session], kind: str, changed: dict[str, object], words: str
) -> None:
    """The message goes to the dead letters, and the value, which may be a secret, is not in the text."""
    with pytest.raises(InvalidMessageError) as raised:
        into(TYPES)(incoming(kind, BODIES[kind] | changed))
    assert words in str(raised.value)
    assert "much" not in str(raised.value)
    settled = Settling(Dispatcher(factory, Seen()), into(TYPES)).deliver(incoming(kind, BODIES[kind] | changed))
    assert not settled.acknowledge
    with pytest.raises(InvalidMessageError, match="the whole: "):
        into(TYPES)(incoming("paid", [1]))
    assert SEEN == []


@dataclass
class Line:
    """A part of what was priced."""

    amount: Decimal
    weight: float = 0


@dataclass
class Priced:
    """A dataclass with Decimals and floats in many places."""

    amount: Decimal
    rate: float
    free: Any
    either: str | float = 0.0
    maybe: Decimal | None = None
    number: Decimal | int | None = None
    lines: list[Line] = field(default_factory=list)
    named: dict[str, Decimal] = field(default_factory=dict)
    bounded: Annotated[Decimal, Field(gt=0, max_digits=20, decimal_places=4)] = Decimal(1)
    own: Annotated[Decimal, BeforeValidator(lambda given: Decimal(str(given)))] = Decimal(1)


class PricedDict(TypedDict):
    """A typed dictionary."""

    amount: Decimal
    rate: float
    free: Any


class PricedModel(BaseModel):
    """A model."""

    cost: Decimal = Field(alias="amount")
    rate: float
    free: Any


class PricedStruct(msgspec.Struct):
    """A struct."""

    amount: Decimal
    rate: float
    free: Any


LONG = "1234567890123.4567"
EXACT, ROUNDED = Decimal(LONG), float(LONG)
PRICED = f'{{"amount": {LONG}, "rate": {LONG}, "free": {LONG}}}'
PRICES: dict[str, type[Any]] = {
    "Priced": Priced,
    "PricedDict": PricedDict,
    "PricedModel": PricedModel,
    "PricedStruct": PricedStruct,
}


@pytest.mark.parametrize("kind", PRICES)
def test_a_decimal_has_every_digit_of_its_number(kind: str) -> None:
    """No float comes between; a field that is no Decimal has the float, as without `into`."""
    message = cast(Message, into(PRICES)(Incoming(PRICED.encode(), type=kind, message_id="m")))
    body: Any = message.body
    held = body if isinstance(body, dict) else {name: getattr(body, name) for name in kind_fields(body)}
    amount = held.pop("cost", None) or held.pop("amount")
    assert (amount, held["rate"], held["free"]) == (EXACT, ROUNDED, ROUNDED)
    assert {type(held["rate"]), type(held["free"])} == {float}


def kind_fields(event: Any) -> list[str]:
    """The names of the fields of an event."""
    names = getattr(event, "__struct_fields__", None) or getattr(type(event), "model_fields", None)
    return list(names or event.__dataclass_fields__)


def test_a_decimal_is_exact_wherever_it_is(factory: sessionmaker[Session]) -> None:
    """In a list, a mapping, a union, under bounds or a validator of one's own: the handler gets what was sent."""
    more = (
        f'"either": {LONG}, "maybe": {LONG}, "number": 100000000000000000.01, "named": {{"a": {LONG}}}, '
        f'"lines": [{{"amount": {LONG}, "weight": {LONG}}}, {{"amount": 0.1, "weight": 2}}], '
        f'"bounded": {LONG}, "own": {LONG}'
    )
    event = {"specversion": "1.0", "id": "7", "source": "shop", "type": "priced"}
    body = json.dumps(event)[:-1] + f', "data": {PRICED[:-1]}, {more}}}}}'
    incoming = Incoming(body.encode(), content_type="application/cloudevents+json")

    @projector(idempotent=True, name="priced")
    class Prices:
        @on(Priced)
        def see(self, event: Priced, _session: Session) -> None:
            SEEN.append(event)

    assert Settling(Dispatcher(factory, Prices()), into({"priced": Priced}, cloudevent)).deliver(incoming).acknowledge
    number = Decimal("100000000000000000.01")
    lines = [Line(EXACT, ROUNDED), Line(Decimal("0.1"), 2.0)]
    [seen] = SEEN
    assert seen == Priced(EXACT, ROUNDED, ROUNDED, ROUNDED, EXACT, number, lines, {"a": EXACT}, EXACT, EXACT)


def test_a_validator_that_computes_gets_a_float() -> None:
    """What runs before Pydantic's own check is given a number, as without a Decimal in the class."""

    @dataclass
    class Placed:
        at: Annotated[float, BeforeValidator(lambda given: given * 2)]
        cut: Annotated[float, BeforeValidator(lambda given: round(given, 2))]

    message = into({"placed": Placed})(
        Incoming(b'{"at": 0.10000000000000001, "cut": 0.10000000000000001}', "m", "placed")
    )
    assert message == Message("m", Placed(0.2, 0.1), Placed)


def test_a_converter_of_ones_own_may_compute_with_what_json_of_reads() -> None:
    """It gets floats, and a Decimal field has every digit all the same; another type has plain floats."""

    def convert(incoming: Incoming) -> Message:
        body = json_of(incoming)
        return Message(str(int(body["amount"] / 2.0)), body, cast(str, incoming.type))

    read = into({"line": Line}, convert)
    assert read(Incoming(f'{{"amount": {LONG}}}'.encode(), type="line")) == Message("617283945061", Line(EXACT), Line)
    other = cast(Message, read(Incoming(f'{{"amount": {LONG}}}'.encode(), type="other")))
    assert [type(each) for each in cast("dict[str, float]", other.body).values()] == [float]


@pytest.mark.parametrize("number", ["1e999", "-1E400"])
def test_a_number_that_no_float_holds_is_refused(number: str) -> None:
    """It would be Infinity in a float, and a gigabyte when a Decimal is written out."""
    for kind in PRICES:
        with pytest.raises(InvalidMessageError, match="beyond the range of a float"):
            into(PRICES)(Incoming(PRICED.replace(LONG, number).encode(), type=kind))


def test_another_type_is_passed_on_under_its_name(factory: sessionmaker[Session]) -> None:
    """Other handlers may take it by its name; if none does, the error tells a name from a class."""
    typed = into({"paid": Paid})(incoming("moved", BODIES["moved"]))
    assert typed == Message("m", BODIES["moved"], "moved")
    with pytest.raises(UnhandledMessage) as raised:
        Dispatcher(factory, Seen()).deliver(Message("m", BODIES["paid"], "Paid"))
    assert "no handler for the name 'Paid'; there is one for the class " in str(raised.value)
    assert f"the class {__name__}.Paid" in str(raised.value)
    assert "add the name to into({...})" in str(raised.value)


def test_a_message_without_a_type_is_refused() -> None:
    """It is rejected with the reason; a type in the body is found where somebody says that."""
    without = incoming("paid", {**BODIES["paid"], "kind": "paid"})
    without = replace(without, type=None)
    with pytest.raises(InvalidMessageError, match="the message has no type, so into"):
        into(TYPES)(without)
    assert cast(Message, into(TYPES, type=by_path("kind"))(without)).type is Paid


def test_a_wrong_argument_is_refused_at_start_up(factory: sessionmaker[Session]) -> None:
    """What is no class, a class that nothing can be built of, and a converter that nobody would await."""

    class Opaque:
        def __init__(self, handle: Any) -> None:
            self.handle = handle

    for wrong in (Paid, {Paid: "paid"}):
        with pytest.raises(HandlerDefinitionError, match="takes a mapping of types to classes"):
            into(wrong)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(HandlerDefinitionError, match="maps the type paid to a class, not to 'Paid'"):
        into({"paid": "Paid"})  # type: ignore[dict-item]  # that is the point
    with pytest.raises(HandlerDefinitionError, match=r"Pydantic cannot build .*Opaque from JSON"):
        into({"opaque": Opaque})
    for builtin in (str, int, list, object):
        with pytest.raises(HandlerDefinitionError, match=f"maps the type t to {builtin.__name__}, which has no fields"):
            into({"t": builtin})
    assert cast(Message, into({"paid": dict})(incoming("paid", {"amount": 1}))).body == {"amount": 1}
    event: Any = Paid
    for make in (partial(Settling, Dispatcher(factory, Seen())), partial(into, TYPES)):
        with pytest.raises(ValueError, match=r'write convert=into\({"payment.received": Paid}\), with the type of'):
            make(event)
    with pytest.raises(HandlerDefinitionError, match=r"convert= of into\(\) returns a Message, not dict"):
        into(TYPES, lambda _incoming: {})(incoming("paid", {}))

    async def convert(_incoming: Incoming) -> object:
        return None

    with pytest.raises(ValueError, match="does not await: give a plain function"):
        Settling(Dispatcher(factory, Seen()), convert)


class Cash(BaseModel):
    """Has a Decimal."""

    kind: Literal["cash"]
    amount: Decimal


class Meter(BaseModel):
    """Has a float."""

    kind: Literal["meter"]
    amount: float


class Measured(BaseModel):
    """Has either."""

    item: Cash | Meter


@pytest.mark.parametrize("kind", [Cash, Meter])
def test_the_digits_of_a_number_choose_no_class(kind: type[Cash | Meter]) -> None:
    """In a union whose places may be a float or a Decimal, a long number is a float, as a short one is."""
    name = kind.__name__.lower()
    for number in ("1.5", "0.30000000000000001"):
        body = b'{"item": {"kind": "%s", "amount": %s}}' % (name.encode(), number.encode())
        event = into({"measured": Measured})(Incoming(body, type="measured", message_id="m1"))
        assert isinstance(event, Message)
        assert type(event.body.item) is kind


def test_a_converter_that_encodes_gets_floats() -> None:
    """It may compute an id of the whole body: a number of many digits is a float of Python's own there."""

    def convert(incoming: Incoming) -> Message:
        body = json_of(incoming)
        return Message(msgspec.json.encode(body).decode(), body, type="priced")

    number = "1234567890123.4567"
    event = into({"priced": PricedOnce}, convert)(Incoming(b'{"price": %s}' % number.encode()))
    assert isinstance(event, Message)
    assert (event.id, event.body) == ('{"price":1234567890123.4568}', PricedOnce(Decimal("1234567890123.4568")))


@dataclass(frozen=True)
class PricedOnce:
    """Has a Decimal, and nothing else."""

    price: Decimal
