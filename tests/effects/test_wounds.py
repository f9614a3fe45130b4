"""The ways in which effects are repeated or forgotten elsewhere, each as one test (docs/effects.md)."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event

from effect_rig import SAID, Charge, Lost, Till, book, tills
from kit import Gate
from projector_dedup.effects import (
    Attempt,
    DoubleEffectError,
    EffectUnknown,
    LeaseLostError,
    NotDone,
    NotRecordedError,
    Policy,
    Rejected,
    StillUnknown,
    resend,
    stop,
)
from projector_dedup.effects.record import DONE, DOUBLE
from projector_dedup.errors import InProgress, RefusedError
from projector_dedup.maintenance.effects import find_effects, resolve

till = tills()

HOUR = timedelta(hours=1)

# The reply is lost --------------------------------------------------------------------------------------------------


def test_a_lost_reply_is_a_question_for_a_person_with_stop(till: Till) -> None:
    """Nothing is sent again, however long it takes; it is stopped, and no sweep looks at it any more."""
    charge = till.effect(till.loses_reply)
    till.run_unknown(charge)
    till.run_unknown(charge)
    till.pass_time(31)
    assert till.settle(charge) == "1 stopped"
    assert till.settle(charge) == ""
    till.pass_time(10**6)
    assert till.settle(charge) == ""
    till.run_unknown(charge)
    row = till.row()
    assert (len(till.sent), row.outcome, row.next_at, row.stopped_at is None) == (1, None, None, False)
    assert "Lost" in row.error


def test_a_lost_reply_is_sent_again_under_the_same_key_with_resend(till: Till) -> None:
    """At once, by whoever asks again; or by the sweep."""
    charge = till.effect(till.loses_reply, resend(within=HOUR))
    till.run_unknown(charge)
    assert till.run(charge) == "pi_2"
    assert till.sent == [till.row().provider_key] * 2
    assert till.payments() == [("o1", "pi_2")]


def test_the_client_gives_up_and_the_sweep_drives_on(till: Till) -> None:
    """The row that ``run`` made has the request; nobody has to call again."""
    charge = till.effect(till.loses_reply, resend(within=HOUR))
    till.run_unknown(charge)
    assert till.settle(charge) == ""
    till.pass_time(31)
    assert till.settle(charge) == "1 done"
    assert till.payments() == [("o1", "pi_2")]


@pytest.mark.parametrize("policy", [resend(within=HOUR), stop], ids=["resend", "stop"])
def test_a_process_that_was_killed_leaves_a_question_when_its_lease_ends(till: Till, policy: Policy) -> None:
    """What is no Exception passes through: nothing is written, as after a kill. With ``stop``, nobody sends again."""

    class Killed(BaseException):
        pass

    charge = till.effect(till.body(Killed()), policy)
    with pytest.raises(Killed):
        till.run(charge)
    with pytest.raises(InProgress) as told:
        till.run(charge)
    assert 0 < (told.value.retry_after or 0) <= 30
    assert till.settle(charge) == ""
    till.pass_time(31)
    if policy is stop:
        till.run_unknown(charge)
    assert till.settle(charge) == ("1 stopped" if policy is stop else "1 done")
    assert till.sent == [till.row().provider_key] * (1 if policy is stop else 2)


def test_a_caller_waits_for_an_attempt_that_is_under_way(till: Till) -> None:
    """With ``wait=`` it gets the value, and nothing is sent by it."""
    gate = Gate(till.harness)
    charge = till.effect(till.body(gate=gate))
    first = till.harness.start(till.run, charge)
    gate.arrival()
    second = till.harness.start(till.run, charge, wait=20)
    with pytest.raises(InProgress):
        till.run(charge)
    gate.open()
    assert (first.result(), second.result(), len(till.sent)) == ("pi_1", "pi_1", 1)


# The window of a resend -----------------------------------------------------------------------------------------------


def test_the_provider_has_forgotten_the_key(till: Till) -> None:
    """The window counts from the first sending, however often it was sent since, and a whole lease must fit."""
    charge = till.effect(till.body(Lost(), Lost(), Lost()), resend(within=timedelta(seconds=1000)), lease=300)
    till.run_unknown(charge)
    till.pass_time(350)
    assert till.settle(charge) == "1 unknown"
    till.pass_time(310)
    till.run_unknown(charge)
    assert len(till.sent) == 3
    till.pass_time(50)  # 710 s are over, and 290 are less than a lease
    assert till.settle(charge) == ""
    till.run_unknown(charge)
    assert len(till.sent) == 3
    till.pass_time(700)
    assert till.settle(charge) == "1 stopped"
    till.run_unknown(charge)
    assert len(till.sent) == 3


def test_after_the_window_the_next_policy_decides(till: Till) -> None:
    """``then=`` may ask."""
    unknown = resend(within=timedelta(seconds=40), then=till.asks("pi_found"))
    charge = till.effect(till.loses_reply, unknown)
    till.run_unknown(charge)
    till.pass_time(45)
    assert till.settle(charge) == "1 done"
    assert (len(till.sent), till.row().decided_by, till.payments()) == (1, "ask", [("o1", "pi_found")])


def test_an_attempt_that_was_not_sent_does_not_open_the_window_again(till: Till) -> None:
    """``NotDone`` counts only if the attempt is the first that may have sent something."""
    charge = till.effect(till.body(Lost(), NotDone(), NotDone()), resend(within=timedelta(seconds=100)))
    till.run_unknown(charge)
    first = till.row().first_sent_at
    till.run_unknown(charge)
    assert till.row().first_sent_at == first


def test_not_sent_after_not_sent_begins_anew(till: Till) -> None:
    """The attempt's number does not say whether something was sent: the second attempt may be the first to send."""
    charge = till.effect(till.body(NotDone(), Lost()), stop)
    till.arm(charge)
    assert till.settle(charge) == "1 not done"
    till.pass_time(31)
    assert till.settle(charge) == "1 unknown"
    till.pass_time(3_700)
    assert till.settle(charge) == "1 stopped"
    assert len(till.sent) == 1


# Asking ---------------------------------------------------------------------------------------------------------------


def test_the_provider_is_not_asked_before_its_index_can_know(till: Till) -> None:
    """``after`` counts from the end of the last attempt; a sweep that runs often does not move it."""
    charge = till.effect(till.loses_reply, till.asks(NotDone(), after=300))
    till.run_unknown(charge)
    for _ in range(4):
        till.pass_time(60)
        till.settle(charge)
        till.run_unknown(charge)
    assert (till.asked, len(till.sent)) == ([], 1)
    till.pass_time(61)
    assert till.settle(charge) == "1 not done"
    assert (till.asked, len(till.sent)) == ([till.row().provider_key], 1)
    assert till.settle(charge) == "1 done"
    assert (len(till.sent), till.payments()) == (2, [("o1", "pi_2")])


def test_an_ask_that_cannot_tell_is_repeated_until_its_window_ends(till: Till) -> None:
    """At a growing distance; then a person decides."""
    charge = till.effect(till.loses_reply, till.asks(StillUnknown(), after=60, within=400))
    till.run_unknown(charge)
    ended = till.row().ended_at
    till.pass_time(61)
    assert till.settle(charge) == "1 unknown"
    assert till.settle(charge) == ""
    till.pass_time(70)
    assert till.settle(charge) == "1 unknown"
    assert till.row().ended_at == ended - 131_000
    till.pass_time(300)
    assert till.settle(charge) == "1 stopped"
    assert (len(till.asked), len(till.sent)) == (2, 1)


def test_an_ask_that_finds_a_refusal_records_it(till: Till) -> None:
    """It is the provider's answer."""
    charge = till.effect(till.loses_reply, till.asks(Rejected("card_declined"), after=60))
    till.run_unknown(charge)
    till.pass_time(61)
    assert till.settle(charge) == "1 rejected"
    assert till.payments() == [("o1", "refused: card_declined")]


# What an attempt was told is stronger than every policy ---------------------------------------------------------------


def test_a_value_that_could_not_be_recorded_is_kept_and_never_sent_again(till: Till) -> None:
    """The rows of ``recorded`` come later."""
    broken = [True]

    def recorded(request: Charge, value: str, session: Any) -> None:
        if broken:
            raise ZeroDivisionError
        book(request, value, session)

    charge = till.effect(unknown=resend(within=HOUR), recorded=recorded)
    with pytest.raises(NotRecordedError) as told:
        till.run(charge)
    assert told.value.value == "pi_1"
    till.pass_time(31)
    assert till.settle(charge) == "1 failed"
    assert till.settle(charge) == ""
    with pytest.raises(NotRecordedError):  # also for who calls ``run`` meanwhile
        till.run(charge)
    broken.clear()
    till.pass_time(3_700)
    assert till.settle(charge) == "1 done"
    assert till.run(charge) == "pi_1"
    assert (len(till.sent), till.payments()) == (1, [("o1", "pi_1")])


class Secret:
    """A value that no codec can store; its ``repr`` must appear nowhere."""

    def __repr__(self) -> str:
        return "pi_secret"


@pytest.mark.parametrize("policy", ["resend", "ask", "stop"])
def test_a_value_that_cannot_be_stored_is_a_question(till: Till, policy: str, caplog: pytest.LogCaptureFixture) -> None:
    """It was done outside: it is not sent again, whatever the policy is, and a person decides."""
    unknown = {"resend": resend(within=HOUR), "ask": till.asks(NotDone()), "stop": stop}[policy]
    charge = till.effect(till.body(Secret()), unknown)
    with pytest.raises(NotRecordedError) as told:
        till.run(charge)
    assert isinstance(told.value.value, Secret)
    with pytest.raises(EffectUnknown):
        till.run(charge)
    till.pass_time(3_700)
    assert till.settle(charge) == ""
    row = till.row()
    assert (len(till.sent), row.evidence_outcome, row.evidence, row.next_at) == (1, DONE, None, None)
    assert row.error.startswith("it was done, but its value cannot be stored: ResultError: till.charge returned Secret")
    assert "a person must decide" in caplog.text
    assert "pi_secret" not in f"{caplog.text}{told.value}{row.error}"


def test_a_late_value_that_cannot_be_stored_is_evidence(till: Till) -> None:
    """The effect was taken over, and the second attempt sent nothing: it is not sent a third time."""
    gate = Gate(till.harness)
    charge = till.effect(till.body(Secret(), NotDone(), gate=gate), resend(within=HOUR))
    first = till.overdue(charge, gate)
    assert till.settle(charge) == "1 unknown"
    gate.open()
    assert isinstance(first.exception(), LeaseLostError)
    assert till.settle(charge) == "1 stopped"
    till.pass_time(1_800)
    assert till.settle(charge) == ""
    assert (len(till.sent), till.row().evidence_attempt) == (1, 1)


@pytest.mark.parametrize("answer", ["done", "not done"])
def test_a_person_decides_about_a_value_that_cannot_be_stored(till: Till, answer: Any) -> None:
    """With the value of the provider's page, or that it was not done after all."""
    if till.harness.asynchronous:
        pytest.skip("the person's tool is synchronous")
    charge = till.effect(till.body(Secret()))
    with pytest.raises(NotRecordedError):
        till.run(charge)
    value = '"pi_1"' if answer == "done" else None
    resolve(till.harness.engine, "k1", attempt=1, outcome=answer, value=value, why="seen", who="ada")
    assert till.settle(charge) == ("1 done" if answer == "done" else "1 not done")
    till.settle(charge)
    assert till.payments() == [("o1", "pi_1" if answer == "done" else "pi_2")]


def test_a_second_value_that_cannot_be_stored_is_a_question_again(till: Till) -> None:
    """A person has decided "not done" of the first one: the effect is not sent a third time."""
    if till.harness.asynchronous:
        pytest.skip("the person's tool is synchronous")
    charge, gate, first = _decided_between_two(till)
    gate.open()
    assert isinstance(first.exception(), DoubleEffectError)
    assert till.settle(charge) == "1 unknown"
    row = till.row()
    assert (len(till.sent), row.evidence_outcome, row.decision, row.stopped_at is None) == (2, DOUBLE, None, False)
    assert row.error.startswith("two attempts at")
    engine = till.harness.engine
    with pytest.raises(RefusedError, match="not done is no answer"):
        resolve(engine, "k1", attempt=2, outcome="not done", **SAID)
    resolve(engine, "k1", attempt=2, outcome="done", value='"pi_1"', **SAID)
    assert till.settle(charge) == "1 done"
    assert find_effects(engine)[0].state == "done twice"


@pytest.mark.parametrize("policy", ["resend", "ask"])
def test_a_value_that_comes_after_a_decision_is_a_question_again(till: Till, policy: str) -> None:
    """Though it is no double: with ``resend`` it may be the same deed, and an ask has no deed of its own."""
    if till.harness.asynchronous:
        pytest.skip("the person's tool is synchronous")
    gate = Gate(till.harness)
    unknown = resend(within=HOUR) if policy == "resend" else till.asks(Secret())
    ends = [Secret()] * (2 if policy == "resend" else 1)
    charge = till.effect(till.body(*ends, gate=gate), unknown)
    first = till.overdue(charge, gate)
    assert till.settle(charge) == "1 failed"
    made = till.row().attempt
    resolve(till.harness.engine, "k1", attempt=made, outcome="not done", **SAID)
    gate.open()
    assert type(first.exception()) is LeaseLostError
    assert till.settle(charge) == "1 unknown"
    assert (len(till.sent), till.row().evidence_attempt, till.row().decision) == (made, 1, None)
    resolve(till.harness.engine, "k1", attempt=made, outcome="not done", **SAID)
    assert (till.settle(charge), till.settle(charge)) == ("1 not done", "1 done")


def test_a_second_value_that_comes_while_a_decision_is_recorded_is_a_question_again(till: Till) -> None:
    """`settle` has read the decision, and has not locked the row yet."""
    if till.harness.asynchronous:
        pytest.skip("the person's tool is synchronous")
    charge, gate, first = _decided_between_two(till)
    looked: list[str] = []

    @event.listens_for(till.harness.engine, "after_cursor_execute")
    def look(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if not looked and "ORDER BY" in statement:
            looked.append(statement)

    @event.listens_for(till.harness.engine, "checkout")
    def come_late(*_: Any) -> None:
        if len(looked) == 1:
            looked.append("and late")
            gate.open()
            assert isinstance(first.exception(), DoubleEffectError)

    till.settle(charge)
    assert (looked[1:], till.row().evidence_outcome) == (["and late"], DOUBLE)
    assert till.settle(charge) == "1 unknown"
    assert len(till.sent) == 2


def _decided_between_two(till: Till) -> tuple[Any, Gate, Any]:
    """Return an effect of which two attempts return values that cannot be stored, and the first attempt, which is late.

    Before it ends, a person decides that the other one was not done.
    """
    gate = Gate(till.harness)
    charge = till.effect(till.body(Secret(), Secret(), gate=gate), till.asks(NotDone()))
    first = till.overdue(charge, gate)
    assert till.settle(charge) == "1 not done"
    assert till.settle(charge) == "1 failed"
    resolve(till.harness.engine, "k1", attempt=2, outcome="not done", why="not there", who="ada")
    return charge, gate, first


@pytest.mark.parametrize("same", [True, False], ids=["same value", "other value"])
@pytest.mark.parametrize("policy", ["resend", "ask", "ask, then resend"])
def test_two_attempts_that_were_done_are_heard_of(till: Till, policy: str, same: bool) -> None:
    """Unless the provider gave the same answer to the same key, which makes them one."""
    gate = Gate(till.harness)
    values = ("pi", "pi") if same else ("pi_1", "pi_2")
    unknown = resend(within=HOUR) if policy == "resend" else till.asks(NotDone())
    if policy == "ask, then resend":
        unknown = replace(unknown, then=resend(within=2 * HOUR))
    charge = till.effect(till.body(*values, gate=gate), unknown)
    first = till.overdue(charge, gate)
    if policy != "resend":
        assert till.settle(charge) == "1 not done"
    assert till.settle(charge) == "1 done"
    gate.open()
    with pytest.raises(LeaseLostError) as told:
        first.result()
    assert isinstance(told.value, DoubleEffectError) is not (policy == "resend" and same)
    row = till.row()
    assert (len(till.sent), row.evidence_attempt, row.attempt) == (2, 1, 2)
    assert till.payments() == [("o1", "pi" if same else "pi_2")]


def test_late_but_not_taken_over_is_in_time(till: Till) -> None:
    """The lease has ended, and nobody has taken the effect since."""
    gate = Gate(till.harness)
    charge = till.effect(till.body(gate=gate))
    first = till.overdue(charge, gate)
    assert till.settle(charge) == "1 stopped"
    gate.open()
    assert (first.result(), till.payments()) == ("pi_1", [("o1", "pi_1")])


def test_a_late_value_is_recorded_by_the_sweep_if_nothing_else_is(till: Till) -> None:
    """An ask had the row when the value came: the value is kept beside, and no ``NotDone`` can undo it."""
    gate, asked = Gate(till.harness), Gate(till.harness)
    charge = till.effect(till.body(gate=gate), till.asks(NotDone(), gate=asked))
    first = till.overdue(charge, gate)
    sweep = till.harness.start(till.settle, charge)
    asked.arrival()
    gate.open()
    with pytest.raises(LeaseLostError):
        first.result()
    asked.open()
    assert sweep.result() == "1 not done"
    till.pass_time(40)
    assert till.settle(charge) == "1 done"
    assert (len(till.sent), till.payments(), till.row().decided_by) == (1, [("o1", "pi_1")], "attempt")


# The time of one attempt ----------------------------------------------------------------------------------------------


def test_an_attempt_knows_how_long_a_call_may_take() -> None:
    """The first call says that nothing was sent, if too little is left; a later one does not."""
    assert Attempt("k", lease=30).time_left(20) == 20
    assert 0 < Attempt("k", lease=10).time_left(20) <= 9
    late = Attempt("k", lease=10)
    late.began -= 5
    with pytest.raises(NotDone):
        late.time_left(20, at_least=6)
    with pytest.raises(TimeoutError):
        late.time_left(20, at_least=6)
    over = Attempt("k", lease=10)
    over.time_left(1)
    over.began -= 20
    with pytest.raises(TimeoutError):
        over.time_left(1)


def _late_secret(till: Till, *more: Any) -> tuple[Any, Gate, Any]:
    """Return an effect whose first attempt returns, after its lease, a value that cannot be stored; ``more`` follow."""
    gate = Gate(till.harness)
    charge = till.effect(till.body(Secret(), *more, gate=gate), resend(within=HOUR) if more else stop)
    return charge, gate, till.overdue(charge, gate)


@pytest.mark.parametrize("answer", ["not done", "rejected"])
def test_a_decision_before_such_a_value_is_asked_again(till: Till, answer: Any) -> None:
    """The person could not know: nothing is sent, and nothing is recorded as rejected."""
    if till.harness.asynchronous:
        pytest.skip("the person's tool is synchronous")
    charge, gate, first = _late_secret(till)
    code = "void" if answer == "rejected" else None
    said: dict[str, Any] = {"why": "not there", "who": "ada", "attempt": 1}
    resolve(till.harness.engine, "k1", outcome=answer, code=code, **said)
    gate.open()
    assert isinstance(first.exception(), LeaseLostError)
    assert till.settle(charge) == "1 unknown"
    row = till.row()
    assert (len(till.sent), row.outcome, row.decision, row.stopped_at is None) == (1, None, None, False)
    assert "it came after ada had decided" in row.error
    resolve(till.harness.engine, "k1", outcome=answer, code=code, **said)  # now that it is known
    assert till.settle(charge) == ("1 not done" if answer == "not done" else "1 rejected")


def test_a_value_that_can_be_stored_takes_the_place_of_one_that_cannot(till: Till) -> None:
    """With ``resend`` they are one effect, and the value is recorded."""
    gate = Gate(till.harness)
    charge = till.effect(till.body("pi_1", Secret(), gate=gate), resend(within=HOUR))
    first = till.overdue(charge, gate)
    assert till.settle(charge) == "1 failed"
    gate.open()
    assert isinstance(first.exception(), LeaseLostError)
    assert till.settle(charge) == "1 done"
    assert (len(till.sent), till.payments()) == (2, [("o1", "pi_1")])


def test_an_ask_that_agrees_with_such_a_value_is_recorded(till: Till) -> None:
    """The provider has the value that could not be stored."""
    late, asking = Gate(till.harness), Gate(till.harness)
    charge = till.effect(till.body(Secret(), gate=late), till.asks("pi_1", gate=asking))
    first = till.overdue(charge, late)
    asked = till.harness.start(till.settle, charge)
    asking.arrival()
    late.open()
    assert isinstance(first.exception(), LeaseLostError)
    asking.open()
    assert asked.result() == "1 done"
    assert (len(till.sent), till.payments()) == (1, [("o1", "pi_1")])
