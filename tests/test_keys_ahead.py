"""Where a batch looks for the keys of the rows that its messages will ask for, and what it leaves alone."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import pytest

from projector_dedup.keys_ahead import KeysAhead

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


def test_many_are_asked_for_by_parts() -> None:
    """Of the next 500 messages, and again when these are done."""
    ahead = KeysAhead(range(1_000))
    assert ahead.of("entity", (0,)) == [(number,) for number in range(1, 501)]
    for _ in range(500):
        ahead.next_message()
        assert ahead.of("entity", (1 << 40,)) == []
    ahead.next_message()
    assert ahead.of("entity", (501,)) == [(number,) for number in range(502, 1_000)]


class Touchy:
    """Whoever runs its code hears of it."""

    __slots__ = ("unset",)

    def __getattr__(self, name: str) -> Any:
        pytest.fail(f"{name} was asked for")

    @property
    def account(self) -> int:
        """Computed."""
        pytest.fail("it was computed")


class Factory(defaultdict[str, Any]):
    """Makes what is not there."""

    def __missing__(self, key: str) -> Any:
        pytest.fail(f"{key} was made")


CIRCLE: dict[str, Any] = {"other": 1}
CIRCLE["self"] = CIRCLE


ODD = {
    "nothing": None,
    "bytes": b"{}",
    "attributes that are computed": Touchy(),
    "items that are made when asked for": Factory(),
    "a circle": CIRCLE,
    "a class": object,
    "a module": pytest,
    "a float": 3.5,
    "a bool": True,
    "text": "no number",
    "many digits": {"account": "1" * 9_999},
}


@pytest.mark.parametrize("name", ODD)
def test_whatever_an_event_is_nothing_of_it_is_run(name: str) -> None:
    """It has no key that we can see, so nothing is read ahead."""
    event = ODD[name]
    ahead = KeysAhead([event, event])
    assert ahead.of("entity", (1 << 40,)) == []
    assert ahead.of("entity", ("a",)) == []
    assert KeysAhead([{"account": 1}, event]).of("entity", (1,)) == []
    assert KeysAhead([[Plain(1)], [event]]).of("entity", (1,)) == []
