"""Where a batch looks for the keys of the rows that its messages will ask for, and what it leaves alone."""

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import pytest

from projector_dedup.read_ahead.batch_keys import KeysAhead

ONE, TWO, THREE = (UUID(int=number) for number in (1, 2, 3))


@dataclass(frozen=True, slots=True)
class Slotted:
    """An event without a dictionary."""

    kind: str
    account: Any


class Plain:
    """One with it."""

    def __init__(self, account: Any) -> None:
        self.account = account


class Named(NamedTuple):
    """A tuple."""

    kind: str
    account: Any


@pytest.mark.parametrize(
    "event",
    [
        lambda key: key,
        lambda key: {"kind": "added", "account": key},
        lambda key: {"data": {"lines": [{"account": {"id": key}}]}},
        lambda key: Slotted("added", key),
        Plain,
        lambda key: Named("added", key),
        lambda key: SimpleNamespace(body=Plain([0, key])),
        lambda key: defaultdict(list, account=key),
    ],
)
@pytest.mark.parametrize(
    ("form", "keys"), [(int, [7, 8, 9]), (str, ["a", "b", "c"]), (UUID, [ONE, TWO, THREE])], ids=["int", "str", "UUID"]
)
def test_keys_are_found_wherever_an_event_has_them(event: Callable[[Any], object], form: type, keys: list[Any]) -> None:
    """As attributes, items and positions, some levels deep."""
    assert all(type(key) is form for key in keys)
    assert KeysAhead([event(key) for key in keys]).of("entity", (keys[0],)) == [(keys[1],), (keys[2],)]


@pytest.mark.parametrize(
    ("given", "keys"),
    [
        (["1", "2"], [1, 2]),
        ([1, 2], ["1", "2"]),
        ([str(ONE), str(TWO)], [ONE, TWO]),
        ([ONE, TWO], [str(ONE), str(TWO)]),
    ],
)
def test_a_key_may_have_another_form_in_the_event(given: list[Any], keys: list[Any]) -> None:
    """JSON has no UUID."""
    assert KeysAhead([{"id": each} for each in given]).of("entity", (keys[0],)) == [(keys[1],)]


def test_a_key_of_several_columns() -> None:
    """Each of them is in the event."""
    ahead = KeysAhead([{"shop": "a", "number": 1}, {"shop": "a", "number": 2}, {"shop": "b"}])
    assert ahead.of("entity", ("a", 1)) == [("a", 2)]


def test_each_event_is_asked_once_for_the_same() -> None:
    """A row that is not there is not looked for again and again; another guess may be better."""
    ahead = KeysAhead([{"number": number, "account": 1 + number % 2} for number in range(1, 7)])
    ahead.next_message()
    assert ahead.of("entity", (2,)) == [(3,), (4,), (5,), (6,)]  # by the number, which was wrong
    ahead.next_message()
    assert ahead.of("entity", (2,)) == [(1,), (2,)]
    ahead.next_message()
    assert ahead.of("entity", (1,)) == []
    assert ahead.of("another", (1,)) == [(2,), (1,)]


def test_more_are_asked_for_where_a_guess_was_right_before() -> None:
    """Of the next 25 messages, and when these are done of 100, 400, 500 at last."""
    ahead, asked = KeysAhead(range(2_000)), list[int]()
    for number in range(2_000):
        found = ahead.of("entity", (number,))
        assert found == [(number + 1 + place,) for place in range(len(found))]
        asked += [len(found)] if found else []
        assert ahead.of("entity", (1 << 40,)) == []
        ahead.next_message()
    assert asked == [25, 100, 400, 500, 500, 469]


def test_guesses_end() -> None:
    """Where each message has its key at another place, there is nothing to be guessed."""
    ahead, asked = KeysAhead([{f"f{field}": 100 * field + number for field in range(50)} for number in range(50)]), 0
    for number in range(50):
        asked += len(ahead.of("entity", (101 * number,)))
        ahead.next_message()
    assert 25 < asked <= 4 * 25


def test_a_large_event_is_not_searched_to_its_end() -> None:
    """Of 200 parts something may be told; a row of a list is one."""
    fields: dict[str, Any] = {f"f{number}": -number for number in range(300)}
    assert KeysAhead([fields | {"f150": 7}, {"f150": 8}]).of("entity", (7,)) == [(8,)]
    assert KeysAhead([fields | {"f250": 7}, {"f250": 8}]).of("entity", (7,)) == []
    lines = [{"number": number, "id": number + 1_000} for number in range(90)]
    assert KeysAhead([{"lines": lines}, {"lines": lines[1:]}]).of("entity", (1_000,)) == [(1_001,)]
    assert KeysAhead([{"lines": lines}, {"lines": lines[1:]}]).of("entity", (1_089,)) == []


ran: list[str] = []
"""What must not be run."""


def runs(name: str) -> Any:
    """A method that says so, and fails."""

    def method(*_: Any) -> Any:
        ran.append(name)
        raise LookupError(name)

    return method


class Touchy:
    """It has nothing but code."""

    __slots__ = ("unset",)
    __getattr__ = runs("__getattr__")
    account = property(runs("a property"))


class Slot:
    """For a property to hide."""

    __slots__ = ("account",)


TOUCHY: dict[str, Any] = {
    "attributes that are computed": Touchy(),
    "any attribute": type("Any", (), {"__getattribute__": runs("__getattribute__")})(),
    "another class": type("Proxy", (), {"__class__": property(runs("__class__"))})(),
    "a dictionary that is computed": type("Computed", (), {"__dict__": property(runs("__dict__"))})(),
    "a slot that is computed": type("Hiding", (Slot,), {"__slots__": (), "account": property(runs("a slot"))})(),
    "a class of an odd class": type("Meta", (type,), {"__eq__": runs("__eq__"), "__hash__": runs("__hash__")})(
        "C", (), {}
    )(),
    **{
        f"{name} of a {kind.__name__}": type("Odd", (kind,), {name: runs(name)})(given)
        for kind, names, given in (
            (dict, ("__missing__", "__getitem__", "get", "items", "__iter__", "__contains__", "__len__"), {"other": 5}),
            (list, ("__getitem__", "__iter__", "__len__", "__contains__"), [5, 6]),
            (tuple, ("__getitem__", "__iter__", "__len__", "__contains__"), (5, 6)),
        )
        for name in names
    },
}


CIRCLE: dict[str, Any] = {"other": 1}
CIRCLE["self"] = CIRCLE


ODD = {
    "nothing": None,
    "bytes": b"{}",
    "a circle": CIRCLE,
    "a class": object,
    "a module": pytest,
    "a float": 3.5,
    "a bool": True,
    "text": "no number",
    "many digits": {"account": "1" * 9_999},
}


@pytest.mark.parametrize("name", [*ODD, *TOUCHY])
def test_whatever_an_event_is_nothing_of_it_is_run(name: str) -> None:
    """It has no key that we can see, so nothing is read ahead."""
    ran.clear()
    event = (ODD | TOUCHY)[name]
    ahead = KeysAhead([event, event])
    assert ahead.of("entity", (1 << 40,)) == []
    assert ahead.of("entity", ("a",)) == []
    assert KeysAhead([{"account": 1}, event]).of("entity", (1,)) == []
    assert KeysAhead([[Plain(1)], [event]]).of("entity", (1,)) == []
    assert KeysAhead([[1, 2], event]).of("entity", (2,)) in ([], [(6,)])
    assert ran == []


def test_what_cannot_be_looked_at_is_no_guess() -> None:
    """A proxy of what is gone fails whatever is asked of it."""

    class Target:
        """Soon gone."""

    events = [{"account": 1}, {"account": weakref.proxy(Target())}, {"account": 3}]
    assert KeysAhead(events).of("entity", (1,)) == [(3,)]
    assert KeysAhead(events[1:]).of("entity", (1,)) == []
