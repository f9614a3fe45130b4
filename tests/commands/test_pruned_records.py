"""Records are pruned while their keys are asked for: a command is answered from its record, or is new; nothing else."""

import threading
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import create_engine, event

from command_rig import SYNC_ONES, Balance, Desk, Held, PlaceOrder, desks
from kit import PATIENCE
from projector_dedup import Outcome
from projector_dedup.commands import default_command_tables
from projector_dedup.maintenance.cleanup import prune
from projector_dedup.maintenance.rows import forget_record
from projector_dedup.options import RetryPolicy

AT_ONCE = 1e-9  # hours: whatever is committed has expired


desk = desks(SYNC_ONES)


def test_two_cleaners_beside_callers(desk: Desk) -> None:
    """Every answer is that of a run that committed; every run that committed was told to one caller, as applied."""
    operation = desk.operation(read_models=[Balance])
    patient = desk.commands(retry=RetryPolicy(attempts=500, within=PATIENCE))
    numbers, enough = range(6), threading.Event()

    def clean() -> int:
        deleted = 0
        while not enough.is_set():
            deleted += prune(
                desk.harness.engine, retention_hours=AT_ONCE, batch_size=2, tables=default_command_tables
            ).deleted
        return deleted

    def ask() -> list[tuple[str, Any]]:
        answers = []
        for _ in range(6):
            for number in numbers:
                key = f"k{number}"
                answers.append((key, desk.handle(operation, PlaceOrder(number + 1), key=key, commands=patient)))
        return answers

    cleaners = [desk.harness.start(clean) for _ in range(2)]
    try:
        told = [each for future in [desk.harness.start(ask) for _ in range(3)] for each in future.result(3 * PATIENCE)]
    finally:
        enough.set()
    deleted = sum(future.result(PATIENCE) for future in cleaners)
    ran = Counter(key for key, answer in told if answer.outcome is Outcome.APPLIED)
    assert ran == Counter(desk.orders())
    results = {(key, answer.result) for key, answer in told if answer.outcome is Outcome.APPLIED}
    assert {(key, answer.result) for key, answer in told} == results
    assert desk.spent() == sum((int(key[1:]) + 1) * times for key, times in ran.items())
    assert deleted + len(desk.records()) == ran.total()
    assert all(outcome == 1 for *_, outcome in desk.records())


def test_a_record_that_is_not_finished_is_never_pruned(desk: Desk) -> None:
    """Nobody sees it before its COMMIT, whatever the retention; then it is there, and is pruned as any other."""
    held = Held(desk)
    first = desk.harness.start(desk.handle, desk.operation(held))
    assert held.entered.wait(PATIENCE)
    if desk.harness.engine.dialect.name == "sqlite":  # one writer: the cleaner waits until the command has ended
        held.may_end.set()
        first.result(PATIENCE)
    pruned = prune(desk.harness.engine, retention_hours=168, tables=default_command_tables)
    assert pruned.deleted == 0
    held.may_end.set()
    first.result(PATIENCE)
    assert len(desk.records()) == 1
    desk.age()
    assert prune(desk.harness.engine, retention_hours=168, tables=default_command_tables).deleted == 1


@pytest.mark.parametrize(("level", "replayed"), [("READ COMMITTED", False), ("REPEATABLE READ", True)])
def test_a_record_that_is_pruned_between_claim_and_recall(desk: Desk, level: str, replayed: bool) -> None:
    """It is answered by who can still see it, and the command is new to who cannot; nobody is told anything else."""
    if desk.harness.engine.dialect.name != "postgresql":
        pytest.skip("the claim that has met a record keeps it locked")
    operation, commands = desk.operation(), desk.commands(isolation=level)
    first, pruned = desk.handle(operation), list[int]()

    def prune_it(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "INSERT INTO processed_command" in statement and not pruned:
            pruned.append(forget_record(outside, "k1", operation="desk.place"))

    outside = create_engine(desk.harness.subject.url)
    event.listen(desk.harness.engine, "after_cursor_execute", prune_it)
    answer = desk.handle(operation, commands=commands)
    outside.dispose()
    assert pruned == [1]
    assert answer.replayed == (answer.result == first.result) == replayed
    assert desk.orders() == ["k1"] * (1 if replayed else 2)
