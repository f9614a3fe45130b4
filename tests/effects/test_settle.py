"""The sweep: several at once, fair, bounded, by an index, and never ended by one effect."""

import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import update

from effect_rig import TABLE, Charge, Till, tills
from kit import Gate
from projector_dedup.effects import Attempt, NotDone, resend
from projector_dedup.maintenance.effects import find_effects

till = tills()


def _arm(till: Till, charge: Any, number: int) -> None:
    for count in range(number):
        till.arm(charge, Charge(f"o{count}"), key=f"k{count:03}")


def test_two_sweeps_at_once_send_each_effect_once(till: Till) -> None:
    """Both find the same rows; each row is taken by one of them, right before it is sent."""
    both = threading.Barrier(2, timeout=30)
    met: list[str] = []

    def body(request: Charge, attempt: Attempt) -> str:
        if len(met) < 2:  # the first effect of each sweep: both have looked by now
            met.append(request.order)
            till.harness.blocking(both.wait)
        return till.plain(request, attempt)

    charge = till.effect(body)
    _arm(till, charge, 20)
    counts = [each.result() for each in [till.harness.start(till.settle, charge) for _ in range(2)]]
    assert set(Counter(till.sent).values()) == {1}
    assert (len(till.sent), len(set(met))) == (20, 2)
    assert sorted(order for order, _ in till.payments()) == sorted(f"o{count}" for count in range(20))
    done = [int(part.split()[0]) for count in counts for part in count.split(", ") if part.endswith(" done")]
    assert sum(done) == 20


def test_a_sweep_looks_at_so_many_and_at_each_of_them_once(till: Till) -> None:
    """The oldest first; what is due again meanwhile is for the next run."""
    seen: list[str] = []

    def body(request: Charge, _attempt: Attempt) -> str:
        seen.append(request.order)
        raise NotDone

    charge = till.effect(body)
    _arm(till, charge, 5)
    assert till.settle(charge, limit=3) == "3 not done"
    assert seen == ["o0", "o1", "o2"]
    assert till.settle(charge) == "2 not done"
    assert till.settle(charge) == ""
    till.pass_time(31)
    assert till.settle(charge) == "5 not done"


def test_what_one_effect_does_never_ends_the_sweep(till: Till) -> None:
    """A request that cannot be read, and an effect that this process does not know: the others are sent."""
    charge, other = till.effect(), till.effect(name="till.other")
    _arm(till, charge, 3)
    till.arm(other, key="x")
    till.change("k001", request=b"no JSON")
    assert till.settle(charge) == "2 done, 1 failed"
    assert till.row("k001").first_sent_at is None
    assert till.row("x").attempt == 0
    assert till.settle(charge) == ""
    till.pass_time(31)
    assert till.settle(charge) == "1 failed"
    assert till.settle(other) == "1 done"


def test_names_that_nobody_seems_to_know_are_logged(till: Till, caplog: pytest.LogCaptureFixture) -> None:
    """Once each, when they have been due for an hour; and neither those that are known nor those that are finished."""
    charge, old, done = till.effect(), till.effect(name="till.old"), till.effect(name="till.done")
    till.run(done, key="done")
    for number in range(2):
        till.arm(old, key=f"old {number}")
    effects = till.effects(charge)

    def told(seconds: float) -> list[str]:
        caplog.clear()
        till.pass_time(seconds)
        till.harness.run(effects.settle)
        return caplog.messages

    assert told(3500) == []
    till.arm(charge)
    till.arm(old, key="old, and not yet due")
    assert [line.partition(" have been due")[0] for line in told(101)] == ["2 effects with the name till.old"]
    assert told(3600) == []


def test_evidence_beside_a_running_attempt_holds_nobody_up(till: Till) -> None:
    """The row is due at once and cannot be recorded yet: with ``limit=1``, each sweep would find it first."""
    late, running = Gate(till.harness), Gate(till.harness)

    def body(request: Charge, attempt: Attempt) -> str:
        value = till.plain(request, attempt)
        if request.order == "o1":
            (late if attempt.number == 1 else running).stop()
        return value

    charge = till.effect(body, resend(within=timedelta(days=1)))
    first = till.overdue(charge, late)
    second = till.harness.start(till.settle, charge)
    running.arrival()
    late.open()
    assert first.exception() is not None
    till.arm(charge, Charge("o2"), key="k2")
    assert [till.settle(charge, limit=1), till.settle(charge, limit=1)] == ["1 skipped", "1 done"]
    running.open()
    second.result()
    assert sorted(till.payments()) == [("o1", "pi_2"), ("o2", "pi_3")]


def test_a_row_of_somebody_else_stops_no_other_effect(till: Till) -> None:
    """Its id is not of our making: it is told as it stands, and the rest is sent."""
    charge = till.effect(till.loses_reply)
    till.arm(charge)
    till.harness.transact(lambda session: session.execute(update(TABLE).values(message_id="k1")))
    till.arm(charge, key="k2")
    assert till.settle(charge) == "1 done, 1 unknown"
    if not till.harness.asynchronous:
        assert [(each.key, each.scope) for each in find_effects(till.harness.engine)] == [("k1", None)]
