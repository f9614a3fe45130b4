"""The database's clock was ahead by an hour when a row was written, and was then set right."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import select

from databases import USUAL_DRIVERS
from effect_rig import SAID, Till, book, tills
from kit import Gate
from projector_dedup.dialects.columns import now_ms
from projector_dedup.effects import EffectUnknown, NotDone, resend, stop
from projector_dedup.errors import InProgress
from projector_dedup.maintenance.effects import advise_effects, find_effect, find_effects, resolve

till = tills([each for each in USUAL_DRIVERS if not each.is_async])
HOUR = timedelta(hours=1)


def set_right(till: Till) -> None:
    """Shift every row into the future, as if the clock had been ahead by an hour when it was written."""
    till.pass_time(-3_600)


def problems(till: Till) -> list[str]:
    """Return the problems that `check --effects` has."""
    return [each.problem for each in advise_effects(till.harness.engine) if each.fatal]


def test_an_effect_that_was_armed_ahead_is_listed_and_sent_at_once(till: Till) -> None:
    """Nothing was sent before, so nothing can be sent twice."""
    charge = till.effect()
    till.arm(charge)
    set_right(till)
    assert [each.key for each in find_effects(till.harness.engine)] == ["k1"]
    assert problems(till) == ["effects with times in the future: 1; the database's clock was ahead"]
    assert till.settle(charge) == "1 done"
    assert (till.payments(), problems(till)) == ([("o1", "pi_1")], [])


def test_a_person_may_cancel_what_was_armed_ahead(till: Till) -> None:
    """The times of the row do not matter."""
    charge = till.effect()
    till.arm(charge)
    set_right(till)
    resolve(till.harness.engine, "k1", attempt=0, outcome="rejected", code="void", **SAID)
    assert till.settle(charge) == "1 rejected"
    assert till.sent == []


@pytest.mark.parametrize("policy", ["resend", "ask", "stop"])
def test_an_attempt_of_the_time_ahead_is_a_question_to_a_person(till: Till, policy: str) -> None:
    """The provider may have forgotten the key before the window ends that counts from then: nothing is sent again."""
    unknown = {"resend": resend(within=HOUR), "ask": till.asks(NotDone()), "stop": stop}[policy]
    charge = till.effect(till.loses_reply, unknown)
    till.run_unknown(charge)
    set_right(till)
    assert till.settle(charge) == "1 stopped"
    assert [each.state for each in find_effects(till.harness.engine)] == ["needs a person"]
    till.pass_time(7_200)
    assert till.settle(charge) == ""
    resolve(till.harness.engine, "k1", attempt=1, outcome="done", value='"pi_1"', **SAID)
    assert till.settle(charge) == "1 done"
    assert (len(till.sent), till.asked, till.payments()) == (1, [], [("o1", "pi_1")])


@pytest.mark.parametrize("known", ["value", "decision"])
def test_a_known_outcome_of_the_time_ahead_is_recorded(till: Till, known: str) -> None:
    """Nothing is sent for that, and its next try would be a day away."""
    fails = [1]

    def recorded(*given: Any) -> None:
        if fails:
            raise ZeroDivisionError
        book(*given)

    charge = till.effect(till.loses_reply if known == "decision" else None, recorded=recorded)
    till.arm(charge)
    till.settle(charge)
    if known == "decision":
        till.pass_time(31)
        assert till.settle(charge) == "1 stopped"
        resolve(till.harness.engine, "k1", attempt=1, outcome="done", value='"pi_1"', **SAID)
    till.pass_time(-24 * 3_600)
    fails.clear()
    assert till.settle(charge) == "1 done"
    assert (len(till.sent), till.payments()) == (1, [("o1", "pi_1")])


def test_an_attempt_that_runs_meanwhile_still_records_its_outcome(till: Till) -> None:
    """Its lease would end in an hour; a person may decide when a lease has passed since the question."""
    gate = Gate(till.harness)
    charge = till.effect(till.body(gate=gate), resend(within=HOUR))
    attempt = till.harness.start(till.run, charge)
    gate.arrival()
    set_right(till)
    assert till.settle(charge) == "1 stopped"
    row = till.row()
    now = till.harness.transact(lambda session: session.execute(select(now_ms())).scalar_one())
    assert row.lease_until <= now + 30_000
    gate.open()
    assert attempt.result() == "pi_1"
    assert (len(till.sent), till.payments()) == (1, [("o1", "pi_1")])


def test_run_does_not_send_what_was_attempted_ahead(till: Till) -> None:
    """The same question, for who calls ``run``."""
    charge = till.effect(till.loses_reply, resend(within=HOUR))
    till.run_unknown(charge)
    set_right(till)
    with pytest.raises((EffectUnknown, InProgress)):
        till.run(charge)
    assert len(till.sent) == 1


def test_an_effect_that_was_armed_ahead_keeps_its_pace(till: Till) -> None:
    """It is due at once until its first attempt; then as any other."""
    charge = till.effect(till.body(*[NotDone()] * 9))
    till.arm(charge)
    set_right(till)
    assert [till.settle(charge) for _ in range(3)] == ["1 not done", "", ""]


def test_run_does_not_send_what_was_left_to_a_person(till: Till) -> None:
    """Also when the clock has reached the times of the row, and the window of the policy is open by them."""
    charge = till.effect(till.loses_reply, resend(within=timedelta(hours=23)))
    till.run_unknown(charge)
    till.pass_time(-3 * 3_600)
    assert till.settle(charge) == "1 stopped"
    till.pass_time(24.5 * 3_600)
    till.run_unknown(charge)
    assert len(till.sent) == 1


@pytest.mark.parametrize("column", ["armed_at", "first_sent_at", "ended_at", "stopped_at"])
def test_each_time_of_what_has_happened_is_looked_at(till: Till, column: str) -> None:
    """Less than a minute ahead is the difference between two clocks."""
    charge = till.effect(till.loses_reply)
    till.run_unknown(charge)
    till.pass_time(31)
    assert till.settle(charge) == "1 stopped"
    now = till.harness.transact(lambda session: session.execute(select(now_ms())).scalar_one())
    till.change_times("k1", **{column: now + 30_000})
    assert problems(till) == []
    till.change_times("k1", **{column: now + 120_000})
    assert problems(till) == ["effects with times in the future: 1; the database's clock was ahead"]


def test_leases_and_waits_lie_in_the_future_by_right(till: Till) -> None:
    """They are no finding."""
    till.run_unknown(till.effect(till.loses_reply, lease=86_400))
    assert (problems(till), find_effect(till.harness.engine, "k1").state) == ([], "unknown")
