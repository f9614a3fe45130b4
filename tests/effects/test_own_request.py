"""An effect's functions get the request and its outcome as they are stored, whatever an earlier run has changed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session
from sqlalchemy.orm.exc import StaleDataError

from effect_rig import Payment, Till, tills
from projector_dedup.effects import Attempt, Rejected, effect, resend

till = tills()


@dataclass
class Cart:
    """A request that functions can change."""

    items: list[str] = field(default_factory=lambda: ["book"])


def charging(till: Till, body: Callable[..., Any], after: Callable[..., Any]) -> Any:
    """An effect of ``body``; ``after`` runs in the transaction of its outcome."""
    function = till.function(body, dict[str, int])
    function.__annotations__["request"] = Cart
    made = effect(name="till.charge", lease=30, unknown=resend(within=timedelta(hours=1)))(function)
    made.recorded(till.function(after))
    made.refused(till.function(after))
    return made


def failing_once(after: Callable[..., Any]) -> Callable[..., Any]:
    """``after``, which meets a conflict after its first run."""
    failures = [StaleDataError("somebody was faster")]

    def function(request: Cart, outcome: Any, session: Session) -> None:
        after(request, outcome, session)
        if failures:
            raise failures.pop()

    return function


def test_each_attempt_gets_the_request_that_was_armed(till: Till) -> None:
    """Neither the caller nor an earlier attempt changes what the function gets."""
    seen: list[list[str]] = []

    def body(request: Cart, _attempt: Attempt) -> dict[str, int]:
        request.items.append("pen")
        seen.append(request.items)
        if len(seen) == 1:
            raise TimeoutError
        return {"paid": 1}

    charge, cart = charging(till, body, lambda *_: None), Cart()
    till.arm(charge, cart)  # type: ignore[arg-type]
    cart.items.clear()
    assert till.settle(charge) == "1 unknown"
    till.pass_time(3600 / 2)
    assert till.settle(charge) == "1 done"
    assert seen == [["book", "pen"], ["book", "pen"]]


def test_each_run_of_recorded_gets_request_and_value_as_they_are_stored(till: Till) -> None:
    """The changes of the effect's function, and of a run of ``recorded`` that met a conflict, do not reach it."""

    def body(request: Cart, _attempt: Attempt) -> dict[str, int]:
        request.items.append("pen")
        return {"paid": 1}

    def book(request: Cart, value: dict[str, int], session: Session) -> None:
        request.items.append("ink")
        value["paid"] *= 100
        session.add(Payment(order=",".join(request.items), what=str(value["paid"])))

    charge = charging(till, body, failing_once(book))
    assert till.run(charge, Cart()) == {"paid": 1}  # type: ignore[arg-type]
    assert till.payments() == [("book,ink", "100")]


def test_each_run_of_refused_gets_request_and_rejection_as_they_are_stored(till: Till) -> None:
    """A ``refused`` that changes the detail of the rejection gets it as it was after a conflict."""

    def body(request: Cart, _attempt: Attempt) -> dict[str, int]:
        request.items.append("pen")
        raise Rejected("declined", ["no money"])

    def note(request: Cart, why: Rejected, session: Session) -> None:
        request.items.append("ink")
        why.detail.append("seen")
        session.add(Payment(order=",".join(request.items), what=",".join(why.detail)))

    with pytest.raises(Rejected) as raised:
        till.run(charging(till, body, failing_once(note)), Cart())  # type: ignore[arg-type]
    assert till.payments() == [("book,ink", "no money,seen")]
    assert raised.value.detail == ["no money"]
