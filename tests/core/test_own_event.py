"""Handlers get events that nobody has changed: at each attempt, for each handler, and in each half of a batch."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import cached_property
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy.event import listen
from sqlalchemy.orm import Session

from databases import Driver, each_driver
from projector_dedup import Message, Outcome
from projector_dedup.errors import BatchFailed, DeliveryFailed, UncopyableError
from projector_dedup.options import RetryPolicy
from projector_dedup.own_event import Originals, is_immutable
from projector_dedup.verdict import Action, verdict_of
from rig import NOTHING, Durable, Rig, RigOn, add, added, dispatcher_on

Change = Callable[[Any, Session], None]


class Conflict(Exception):  # noqa: N818
    """A conflict on every database, by ``RetryPolicy(also=...)``."""


class Poison(Exception):  # noqa: N818
    """An error that no retry helps against."""


AGAIN = RetryPolicy(also=(Conflict,), base=0)


class Held:
    """An event that cannot be copied, and that handlers can change."""

    def __init__(self, amount: int) -> None:
        self.amount = amount
        self.lock = threading.Lock()


def one(rig: Rig, *changes: Change, **options: Any) -> Any:
    """A dispatcher with a projector for each of ``changes``."""
    return dispatcher_on(rig.factory, *changes, retry=AGAIN, **options)


def cents(event: Any, session: Session) -> None:
    """Add the amount in cents, converted in the event itself."""
    event["amount"] *= 100
    add(session, event["amount"])


def failing(error: type[Exception], change: Change, times: int = 1) -> Change:
    """``change``, which raises ``error`` after its first runs."""
    runs: list[object] = []

    def changed(event: Any, session: Session) -> None:
        change(event, session)
        runs.append(event)
        if len(runs) <= times:
            raise error

    return changed


def amounts(*numbers: int) -> list[Message]:
    """A message for each amount."""
    return [added(f"m{at}", {"amount": number}) for at, number in enumerate(numbers)]


@each_driver(usual=True)
@pytest.mark.parametrize("envelope", [False, True])
def test_the_second_attempt_gets_the_event_as_it_was(rig: Rig, envelope: bool) -> None:
    """After a conflict the handler runs again, with the event that the caller has delivered."""
    change: Change = (lambda message, session: cents(message.body, session)) if envelope else cents
    (message,) = amounts(3)
    rig.result(one(rig, failing(Conflict, change), envelope=envelope).deliver(message))
    assert rig.durable() == Durable(1, 300)
    assert message.body == {"amount": 3}


@each_driver(usual=True)
def test_the_next_handler_gets_the_event_as_it_was(rig: Rig) -> None:
    """What one handler changes in its event does not reach the other one."""
    rig.result(one(rig, cents, cents).deliver(amounts(3)[0]))
    assert rig.durable() == Durable(2, 600)


@each_driver(usual=True)
def test_each_handler_of_a_batch_gets_the_events_as_they_were(rig: Rig) -> None:
    """The second handler of a batch gets other objects than the first one."""
    rig.result(one(rig, cents, cents).deliver_batch(amounts(1, 2)))
    assert rig.durable() == Durable(4, 600)


@each_driver(usual=True)
@pytest.mark.parametrize("error", [Conflict, Poison])
def test_the_parts_of_a_batch_get_the_events_as_they_were(rig: Rig, error: type[Exception]) -> None:
    """A batch that runs again, whole or in parts, begins with the events of the caller."""

    def change(event: Any, session: Session) -> None:
        cents(event, session)
        if event["amount"] == 300:
            last(event, session)

    last = failing(error, lambda _event, _session: None)
    rig.result(one(rig, change).deliver_batch(amounts(1, 2, 3, 4)))
    assert rig.durable() == Durable(4, 1_000)


@each_driver(usual=True)
@pytest.mark.parametrize("error", [Conflict, Poison])
def test_a_list_of_events_is_new_at_each_try(rig: Rig, error: type[Exception]) -> None:
    """A handler with ``batch=True`` that changes its list and its events gets both as they were."""

    def change(events: Any, session: Session) -> None:
        for _ in range(len(events)):
            cents(events.pop(), session)

    rig.result(one(rig, failing(error, change), batch=True).deliver_batch(amounts(1, 2, 3)))
    assert rig.durable() == Durable(3, 600)


def test_the_event_inside_a_subclass_of_message_is_a_copy(sqlite_rig: Rig) -> None:
    """A ``Message`` of the user's own class is copied with everything in it."""

    @dataclass(frozen=True)
    class Traced(Message):
        trace: list[str] = field(default_factory=list)

    def change(message: Any, session: Session) -> None:
        message.trace.append("seen")
        add(session, len(message.trace))

    message = Traced("m1", {}, "added")
    one(sqlite_rig, failing(Conflict, change), envelope=True).deliver(message)
    assert sqlite_rig.durable() == Durable(1, 1)
    assert message.trace == []


# Events that cannot be copied ----------------------------------------------------------------------------------------


def held(event: Held, session: Session) -> None:
    """Add the amount in cents, converted in the event itself."""
    event.amount *= 100
    add(session, event.amount)


@each_driver(usual=True)
def test_an_event_that_cannot_be_copied_is_run_once(rig: Rig) -> None:
    """The library hands out the event itself, and applies it like any other."""
    rig.result(one(rig, held).deliver(added("m1", Held(3))))
    assert rig.durable() == Durable(1, 300)


@each_driver(usual=True)
def test_an_event_that_cannot_be_copied_is_not_run_again(rig: Rig) -> None:
    """After a conflict an error says why, nothing is applied, and a consumer lets the broker redeliver the message."""
    dispatcher = one(rig, failing(Conflict, held))
    with pytest.raises(
        UncopyableError, match=r"the Held was not handed out again: .* TypeError: cannot pickle .*__deepcopy__"
    ) as raised:
        rig.result(dispatcher.deliver(added("m1", Held(3))))
    assert rig.durable() == NOTHING
    assert verdict_of(raised.value).action is Action.RETRY_LATER
    rig.result(dispatcher.deliver(added("m1", Held(3))))  # decoded again by the consumer
    assert rig.durable() == Durable(1, 300)


@each_driver(usual=True)
def test_the_next_handler_does_not_get_what_cannot_be_copied(rig: Rig) -> None:
    """The first handler has applied the message, so the redelivery gives the event to the second one."""
    dispatcher = one(rig, held, held)
    with pytest.raises(DeliveryFailed) as raised:
        rig.result(dispatcher.deliver(added("m1", Held(3))))
    assert [type(error) for error in raised.value.exceptions] == [UncopyableError]
    assert verdict_of(raised.value).action is Action.RETRY_LATER
    assert rig.durable() == Durable(1, 300)
    delivery = rig.result(dispatcher.deliver(added("m1", Held(3))))
    assert [*delivery.outcomes.values()] == [Outcome.DUPLICATE, Outcome.APPLIED]
    assert rig.durable() == Durable(2, 600)


@each_driver(usual=True)
def test_a_batch_that_cannot_be_copied_is_not_split(rig: Rig) -> None:
    """The failing message keeps its error, those that ran before it wait for a redelivery, others are applied."""

    def change(event: Held, session: Session) -> None:
        held(event, session)
        if event.amount == 300:
            raise Poison

    batch = [added(f"m{amount}", Held(amount)) for amount in (1, 2, 3, 4, 5)]
    with pytest.raises(BatchFailed) as raised:
        rig.result(one(rig, change).deliver_batch(batch))
    errors = [type(delivery.error) for delivery in raised.value.deliveries]
    assert errors == [UncopyableError, UncopyableError, Poison, type(None), type(None)]
    assert rig.durable() == Durable(2, 900)


@each_driver(usual=True)
def test_a_list_that_cannot_be_copied_is_not_split(rig: Rig) -> None:
    """A handler with ``batch=True`` gets such events once. All of them wait for a redelivery."""

    def change(events: list[Held], session: Session) -> None:
        for event in events:
            held(event, session)

    batch = [added(f"m{amount}", Held(amount)) for amount in (1, 2, 3)]
    with pytest.raises(BatchFailed) as raised:
        rig.result(one(rig, failing(Poison, change), batch=True).deliver_batch(batch))
    assert {type(delivery.error) for delivery in raised.value.deliveries} == {UncopyableError}
    assert rig.durable() == NOTHING


def test_a_claim_that_fails_hands_out_nothing(sqlite_rig: Rig) -> None:
    """A retry before the handler's first run does not count as handing the event out."""
    failures = [Conflict()]

    def fail(*_: object) -> None:
        if failures:
            raise failures.pop()

    listen(sqlite_rig.sync_engine, "before_cursor_execute", fail)
    one(sqlite_rig, held).deliver(added("m1", Held(3)))
    assert not failures
    assert sqlite_rig.durable() == Durable(1, 300)


# What needs no copy --------------------------------------------------------------------------------------------------


class Color(Enum):
    """An enumeration."""

    RED = "red"


class Text(str):
    """Text that may carry more."""

    __slots__ = ("more",)


@dataclass(frozen=True)
class Money:
    """A frozen dataclass of immutable values."""

    amount: Decimal
    currency: str = "EUR"


@dataclass(frozen=True)
class Paid:
    """A frozen dataclass of all kinds of values, by what the test gives it."""

    inside: Any


@dataclass(frozen=True, slots=True)
class Slotted:
    """A frozen dataclass with slots."""

    inside: Any


@dataclass(frozen=True)
class Remembers:
    """A frozen dataclass with an attribute that is no field."""

    amount: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", [self.amount])


@dataclass(frozen=True)
class Computes:
    """A frozen dataclass that stores a list on the first use of a property."""

    amount: int

    @cached_property
    def lines(self) -> list[int]:
        """A list that a handler may change."""
        return [self.amount]


class Derived(Money):
    """A subclass, to whose instances anything can be added."""


@dataclass
class Plain:
    """A dataclass that is not frozen."""

    amount: int = 0


@dataclass(frozen=True)
class Listed(list):  # type: ignore[type-arg]
    """A frozen dataclass that is a list."""


NOW = datetime(2026, 11, 27, tzinfo=UTC)
IMMUTABLE = [
    *("text", b"bytes", 1, 1.5, True, 1j, None, Decimal(1), Fraction(1, 2), UUID(int=1), Color.RED),
    *(NOW, NOW.date(), NOW.timetz(), NOW.replace(tzinfo=ZoneInfo("Europe/Berlin")), NOW - NOW, date.min, time.min),
    *((), (1, ("a", None)), frozenset({1}), Money(Decimal(1)), Paid(Money(Decimal(1))), Slotted((1, Color.RED))),
]
CHANGEABLE = [
    *([], {}, set(), bytearray(), Text("a"), Plain(), Listed(), Remembers(1), Computes(1)),
    *(
        Derived(Decimal(1)),
        ([],),
        Paid([]),
        Paid(({},)),
        Paid(Paid([])),
        Slotted([]),
        Slotted(Plain()),
        Paid(Text("a")),
    ),
]


@pytest.mark.parametrize("value", IMMUTABLE, ids=repr)
def test_an_immutable_event_is_not_copied(value: Any) -> None:
    """Text, numbers, moments, enumerations, and frozen dataclasses and tuples of these, are handed out as they are."""
    assert is_immutable(value)
    assert Originals().copy_of(value) is value


@pytest.mark.parametrize("value", CHANGEABLE, ids=lambda value: f"{type(value).__name__}")
def test_an_event_with_something_changeable_inside_is_copied(value: Any) -> None:
    """A list anywhere inside, also in an attribute that is no field, makes the library copy the event."""
    assert not is_immutable(value)
    assert Originals().copy_of(value) is not value


def test_a_frozen_dataclass_that_holds_a_list_is_copied(sqlite_rig: Rig) -> None:
    """The second attempt gets the list as it was."""

    def change(event: Paid, session: Session) -> None:
        event.inside.append(1)
        add(session, len(event.inside))

    one(sqlite_rig, failing(Conflict, change)).deliver(added("m1", Paid([])))
    assert sqlite_rig.durable() == Durable(1, 1)


def test_a_class_says_how_it_is_copied(sqlite_rig: Rig) -> None:
    """An event that defines ``__deepcopy__`` runs again."""

    class Copied(Held):
        def __deepcopy__(self, memo: object) -> "Copied":
            return Copied(self.amount)

    one(sqlite_rig, failing(Conflict, held)).deliver(added("m1", Copied(3)))
    assert sqlite_rig.durable() == Durable(1, 300)


@pytest.fixture(name="sqlite_rig")
def _sqlite_rig(rig_on: RigOn) -> Rig:
    """A rig on SQLite, for what does not depend on the database."""
    return rig_on(Driver("sqlite+pysqlite", "sqlite3"))


UNSET = object()


class Unset:
    """A sentinel with a class of its own."""


NOT_GIVEN = Unset()


@dataclass
class Patch:
    """An event that says by sentinels which values it does not change."""

    name: object = UNSET
    price: object = NOT_GIVEN
    tags: list[str] = field(default_factory=list)
    inner: Any = None


def test_a_sentinel_stays_the_same_object() -> None:
    """Handlers recognise it by ``is``. Everything else is copied."""
    given: dict[str, Any] = {"patch": Patch(inner=Patch()), "name": UNSET}
    copied = Originals().copy_of(given)
    for patch in (copied["patch"], copied["patch"].inner):
        assert patch is not given["patch"]
        assert patch.name is UNSET
        assert patch.price is NOT_GIVEN
    assert copied["name"] is UNSET
    assert copied["patch"].tags is not given["patch"].tags
