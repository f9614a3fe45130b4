"""Callers with one key at the same time: one runs, all get its answer; on every driver, at every level."""

import threading
from collections import Counter
from typing import Any

import pytest

from command_rig import LEVELS, Balance, Desk, Held, PlaceOrder, desks
from databases import DRIVERS
from kit import PATIENCE
from projector_dedup import Outcome
from projector_dedup.commands import Rejected
from projector_dedup.errors import InProgress
from projector_dedup.options import RetryPolicy

RIVALS = 4
desk = desks(DRIVERS, levels=LEVELS)


def together(desk: Desk, held: Held, **said: Any) -> tuple[Any, list[Any]]:
    """Hold the first caller in its handler until all rivals wait; return its future and those of the rivals."""
    operation = desk.operation(held)
    first = desk.harness.start(desk.handle, operation, PlaceOrder(30), **said)
    assert held.entered.wait(PATIENCE)
    rivals = [desk.harness.start(desk.handle, operation, PlaceOrder(30), **said) for _ in range(RIVALS)]
    desk.harness.waits(1 if desk.harness.engine.dialect.name == "sqlite" else RIVALS)
    held.may_end.set()
    return first, rivals


def test_rivals_wait_and_get_the_one_answer(desk: Desk) -> None:
    """One handler runs; nobody is told anything before it has committed."""
    first, rivals = together(desk, Held(desk))
    answers = [future.result(PATIENCE) for future in (first, *rivals)]
    assert len({answer.result for answer in answers}) == 1
    assert Counter(answer.outcome for answer in answers) == {Outcome.APPLIED: 1, Outcome.DUPLICATE: RIVALS}
    assert (desk.orders(), desk.spent(), len(desk.records())) == (["k1"], 30, 1)


def test_when_the_first_fails_the_next_one_runs(desk: Desk) -> None:
    """Its writes are gone, and the answer is that of the one who committed."""
    first, rivals = together(desk, Held(desk, raises=ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        first.result(PATIENCE)
    answers = [future.result(PATIENCE) for future in rivals]
    assert len({answer.result for answer in answers}) == 1
    assert Counter(answer.outcome for answer in answers) == {Outcome.APPLIED: 1, Outcome.DUPLICATE: RIVALS - 1}
    assert (desk.orders(), desk.spent(), len(desk.records())) == (["k1"], 30, 1)


def test_when_the_first_rejects_there_is_one_outcome_all_the_same(desk: Desk) -> None:
    """Between its rollback and its record a rival may run, whose answer is then everybody's."""
    first, rivals = together(desk, Held(desk, raises=Rejected("no")))
    answers = [future.result(PATIENCE) for future in (first, *rivals)]
    assert len({(answer.value, answer.rejection) for answer in answers}) == 1
    assert Counter(answer.outcome for answer in answers)[Outcome.APPLIED] == 1
    placed = answers[0].rejection is None
    assert (desk.orders(), desk.spent(), len(desk.records())) == (["k1"] * placed, 30 * placed, 1)


def test_a_bounded_wait_ends_and_changes_nothing(desk: Desk) -> None:
    """Who will not wait hears that somebody is at it, and may ask again."""
    held = Held(desk)
    operation = desk.operation(held)
    first = desk.harness.start(desk.handle, operation)
    assert held.entered.wait(PATIENCE)
    with pytest.raises(InProgress, match="more than"):
        desk.handle(operation, commands=desk.commands(claim_timeout=0.3))
    held.may_end.set()
    assert not first.result(PATIENCE).replayed
    assert desk.handle(operation, commands=desk.commands(claim_timeout=0.3)).replayed
    assert (desk.ran, desk.orders()) == (["k1"], ["k1"])


def test_many_keys_on_one_hot_row_are_exact(desk: Desk) -> None:
    """Eight callers, six keys, each asked for eight times: every amount is spent once."""
    locked = [Balance] if desk.harness.subject.loses_updates else []
    operation, lock, waiting = desk.operation(read_models=locked), threading.Lock(), list(range(6)) * 8
    patient = desk.commands(retry=RetryPolicy(attempts=500, within=PATIENCE))

    def work() -> list[tuple[int, Any]]:
        answers: list[tuple[int, Any]] = []
        while True:
            with lock:
                if not waiting:
                    return answers
                number = waiting.pop(0)
            done = desk.handle(operation, PlaceOrder(number + 1), key=f"k{number}", commands=patient)
            answers.append((number, done.result))

    found = [
        answer for future in [desk.harness.start(work) for _ in range(8)] for answer in future.result(2 * PATIENCE)
    ]
    by_key: dict[int, set[Any]] = {}
    for number, result in found:
        by_key.setdefault(number, set()).add(result)
    assert {number: len(results) for number, results in by_key.items()} == dict.fromkeys(range(6), 1)
    assert (sorted(desk.orders()), desk.spent()) == ([f"k{number}" for number in range(6)], sum(range(1, 7)))
