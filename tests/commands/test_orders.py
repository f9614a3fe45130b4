"""One key has one outcome, in whatever order its callers run, reject, return a rejection, fail, and ask again."""

import threading
from itertools import combinations_with_replacement, product
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.orm import sessionmaker

from command_rig import USUAL_ONES, Desk, Placed, PlaceOrder, desks, place
from kit import PATIENCE
from projector_dedup import Outcome
from projector_dedup.commands import Call, Rejected, Rejection

ENDINGS = ("run", "reject", "return a rejection", "fail")
CODES = {"run": None, "reject": "raised", "return a rejection": "returned"}
"""The code of the rejection that everybody is told after each ending."""

desk = desks(USUAL_ONES)


class Caller:
    """A handler that ends in one way, and is held before it does so if it is the first of its key to be entered."""

    def __init__(self, desk: Desk, ending: str) -> None:
        self.entered, self.may_end = threading.Event(), threading.Event()
        self._desk, self._ending = desk, ending

    def __call__(self, order: PlaceOrder, call: Call) -> Placed | Rejection:
        """Place the order, and end as it was told; whatever was written is committed or rolled back by that."""
        placed = place(order, call)
        self.entered.set()
        assert self._desk.harness.blocking(self.may_end.wait, PATIENCE)
        if self._ending == "fail":
            raise ValueError("a bug")
        if self._ending == "reject":
            raise Rejected("raised")
        return Rejection("returned") if self._ending == "return a rejection" else placed


def told(desk: Desk, endings: tuple[str, ...], key: str) -> list[Any]:
    """Hold the first caller until all others wait for it, let all go; ask again; return every answer that was given."""
    first, *rivals = callers = [Caller(desk, ending) for ending in endings]
    futures = [desk.harness.start(desk.handle, desk.operation(first), PlaceOrder(1), key=key)]
    assert first.entered.wait(PATIENCE)
    futures += [desk.harness.start(desk.handle, desk.operation(each), PlaceOrder(1), key=key) for each in rivals]
    desk.harness.waits(1 if desk.harness.engine.dialect.name == "sqlite" else len(rivals))
    for each in callers:
        each.may_end.set()
    answers = []
    for future in futures:
        try:
            answers.append(future.result(PATIENCE))
        except ValueError:
            continue  # it failed, and may ask again
    answers += [desk.handle(desk.operation(), PlaceOrder(1), key=key) for _ in range(2)]
    return answers


def check(desk: Desk, endings: tuple[str, ...]) -> None:
    """One outcome, of an ending that was there; its writes, and no others; everybody who was told was told that."""
    key = "-".join(endings)
    answers = told(desk, endings, key)
    assert len({(answer.value, answer.rejection) for answer in answers}) == 1, endings
    assert [answer.outcome for answer in answers].count(Outcome.APPLIED) == 1, endings
    code = None if answers[0].rejection is None else answers[0].rejection.code
    settled = {CODES[each] for each in endings if each != "fail"}
    assert code in (settled or {None}), endings  # where all have failed, who asked again has run
    assert desk.orders().count(key) == (0 if code == "raised" else 1), endings


def test_two_callers_in_every_order(desk: Desk) -> None:
    """The second waits for the first, whatever that does."""
    for endings in product(ENDINGS, repeat=2):
        check(desk, endings)
    assert {outcome for *_, outcome in desk.records()} == {1, 2}
    assert len(desk.records()) == len(ENDINGS) ** 2


def test_three_callers_of_whom_the_first_rolls_back(desk: Desk) -> None:
    """Two wait for the first; which of them is next, the database decides."""
    if desk.harness.asynchronous:
        pytest.skip("what differs from two callers is in the database")
    cases = [(first, *rivals) for first in ("reject", "fail") for rivals in combinations_with_replacement(ENDINGS, 2)]
    for endings in cases:
        check(desk, endings)
    assert len(desk.records()) == len(cases)


def test_a_rival_may_run_before_a_rejection_is_recorded(desk: Desk) -> None:
    """Its answer is everybody's then, the first caller's too, whose own attempt has left nothing behind."""
    if desk.harness.asynchronous:
        pytest.skip("a listener on the event loop cannot wait for a rival there")
    factory, begun, rivals = sessionmaker(desk.harness.engine), list[object](), list[Any]()

    def overtake(*transaction: object) -> None:
        begun.append(transaction)
        if len(begun) == 2:  # that of the rejection, before it claims
            rivals.append(desk.handle(desk.operation()))

    def refuse(order: PlaceOrder, call: Call) -> Placed:
        place(order, call)
        raise Rejected("too_late")

    event.listen(factory, "after_begin", overtake)
    answer = desk.handle(desk.operation(refuse), commands=desk.commands(factory))
    assert (answer.rejection, answer.replayed) == (None, True)
    assert answer.result == rivals[0].result
    assert (desk.orders(), [outcome for *_, outcome in desk.records()]) == (["k1"], [1])
