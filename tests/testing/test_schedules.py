"""Schedules are those that an at-least-once broker can produce; smaller ones are, too."""

import pytest

from projector_dedup.testing.fault_points import ERRORS, KILLS, LOSSES
from projector_dedup.testing.schedules import HOWS, Schedule, Turn, is_allowed, schedules, smaller, smallest

FAULTS = (*ERRORS, *KILLS, *LOSSES)
KEYS = ["a", "a", "b", "a", "b", "b"]


@pytest.mark.parametrize("keys", [None, KEYS, ["a"] * 6], ids=["no order", "order of each key", "one order"])
def test_generated_schedules_deliver_every_message_in_an_allowed_order(keys: list[str] | None) -> None:
    """Each schedule delivers each message at least once; every fault point is tried, bursts and batches, too."""
    found = [*schedules(6, keys, HOWS, FAULTS, 1, 50)]
    for schedule in found:
        assert {number for turn in schedule for number in turn.messages} == {*range(6)}
        assert is_allowed(schedule, keys)
    assert {turn.fault for schedule in found for turn in schedule} == {None, *FAULTS}
    at_once = set() if keys == ["a"] * 6 else {"burst", "beside"}
    assert {turn.how for schedule in found for turn in schedule} == {"deliver", "batch"} | at_once
    assert any(sum(len(turn.messages) for turn in schedule) > 6 for schedule in found[2:])


def test_a_seed_repeats_its_schedules() -> None:
    """Another seed gives others."""

    def made(seed: int) -> list[Schedule]:
        return [*schedules(6, KEYS, HOWS, FAULTS, seed, 20)]

    assert made(1) == made(1) != made(2)


def test_what_has_no_batches_gets_none() -> None:
    """Commands and effects come one by one, or at the same time."""
    found = [*schedules(6, None, ("deliver", "burst"), FAULTS, 1, 50)]
    assert {turn.how for schedule in found for turn in schedule} == {"deliver", "burst"}


@pytest.mark.parametrize(
    ("stream", "allowed"),
    [
        ([0, 1, 2], True),
        ([0, 1, 0, 1, 2], True),
        ([0, 0, 1, 2], True),
        ([1, 0, 2], False),
        ([0, 2, 1, 2], False),
        ([0, 1, 2, 0], False),
        ([0, 1, 2, 0, 2], False),
        ([1, 2], False),
        ([0, 1, 0, 1], True),
    ],
    ids=str,
)
def test_a_broker_that_keeps_the_order_may_go_back_but_skips_nothing(stream: list[int], allowed: bool) -> None:
    """The last delivery is that of the last message that has come. Later ones may be missing, earlier ones not."""
    schedule = tuple(Turn("deliver", (number,)) for number in stream)
    assert is_allowed(schedule, ["a", "a", "a"]) is allowed
    assert is_allowed(schedule, None)


def test_messages_of_one_key_are_not_delivered_at_the_same_time() -> None:
    """Messages of two keys may be."""
    assert not is_allowed((Turn("burst", (0, 1)),), ["a", "a"])
    assert is_allowed((Turn("burst", (0, 1)),), ["a", "b"])
    assert not is_allowed((Turn("beside", (0, 1)),), ["a", "a"])
    assert is_allowed((Turn("beside", (0, 1)),), ["a", "b"])


@pytest.mark.parametrize("may_drop", [True, False])
def test_the_smallest_schedule_has_what_the_failure_needs(may_drop: bool) -> None:
    """Here two deliveries of message 3, the first with a fault, wherever they are."""
    schedule = (Turn("batch", (0, 3, 1), "after COMMIT"), Turn("burst", (2, 3)), Turn("deliver", (4,), "before COMMIT"))

    def fails(candidate: tuple[Turn, ...]) -> bool:
        twice = sum(turn.messages.count(3) for turn in candidate) > 1
        return twice and any(turn.fault and 3 in turn.messages for turn in candidate)

    found = smallest(schedule, lambda each: smaller(each, may_drop=may_drop), fails)
    if may_drop:
        assert found == (Turn("deliver", (3,), "after COMMIT"), Turn("deliver", (3,)))
    else:
        assert sorted(number for turn in found for number in turn.messages) == [0, 1, 2, 3, 3, 4]
        assert [turn.fault for turn in found if turn.fault] == ["after COMMIT"]
