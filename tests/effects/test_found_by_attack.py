"""What an attack on effects has found, each as one test."""

import contextvars
import time
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from databases import USUAL_DRIVERS, Database, Driver
from effect_rig import Charge, Lost, Till, tills
from kit import Gate, Harness, Subject
from projector_dedup.effects import (
    Attempt,
    EffectUnknown,
    LeaseLostError,
    NotDone,
    NotRecordedError,
    Rejected,
    StillUnknown,
    ask,
    effect,
    resend,
    stop,
)
from projector_dedup.effects.record import MAX_ERROR
from projector_dedup.errors import HandlerDefinitionError, UnsafeSessionError

till = tills()
HOUR = timedelta(hours=1)


class Killed(BaseException):
    """Is no Exception, as a cancellation is none."""


@pytest.mark.parametrize("records", [True, False], ids=["recorded", "kept"])
def test_a_sweep_does_not_take_what_has_ended_since_it_looked(till: Till, records: bool) -> None:
    """It has read 100 rows, and works on the first: an attempt at the second comes late, and in time."""
    late, sweeping = Gate(till.harness), Gate(till.harness)

    def body(request: Charge, attempt: Attempt) -> str:
        gate = sweeping if request.order == "first" else late
        if len(till.sent) < 2:
            till.plain(request, attempt)
            gate.stop()
            return request.order
        return till.plain(request, attempt)

    def recorded(request: Charge, _value: str, _session: Session) -> None:
        if request.order == "second" and not records:
            raise ZeroDivisionError

    charge = till.effect(body, resend(within=HOUR), recorded=recorded)
    attempt = till.harness.start(till.run, charge, Charge("second"), "second")
    late.arrival()
    till.pass_time(40)
    till.arm(charge, Charge("first"), key="first")
    till.change("first", next_at=1)
    sweep = till.harness.start(till.settle, charge)
    sweeping.arrival()
    late.open()
    ended = attempt.exception()
    assert isinstance(ended, NotRecordedError) is not records
    sweeping.open()
    assert sweep.result() == "1 done, 1 skipped"
    assert len(till.sent) == 2
    assert (till.row("second").outcome is not None) is records


@pytest.mark.parametrize("policy", ["resend", "ask", "stop"])
def test_a_sweep_does_not_touch_what_was_given_back_since_it_looked(till: Till, policy: str) -> None:
    """The lease had ended when the sweep read it; the end of an attempt that has sent nothing changes no token."""
    sweeping, slow = Gate(till.harness), Gate(till.harness)

    def body(request: Charge, attempt: Attempt) -> str:
        if request.order == "first":
            sweeping.stop()
            return till.plain(request, attempt)
        slow.stop()
        raise NotDone

    unknown: Any = {"resend": resend(within=HOUR), "ask": till.asks(NotDone(), after=300), "stop": stop}[policy]
    charge = till.effect(body, unknown)
    till.arm(charge, Charge("second"), key="second")
    attempt = till.harness.start(till.run, charge, None, "second")
    slow.arrival()
    till.pass_time(40)
    till.arm(charge, Charge("first"), key="first")
    till.change("first", next_at=1)
    sweep = till.harness.start(till.settle, charge)
    sweeping.arrival()
    slow.open()
    assert isinstance(attempt.exception(), NotDone)
    given_back = till.row("second")
    sweeping.open()
    assert sweep.result() == "1 done, 1 skipped"
    assert (till.row("second"), given_back.lease_until, len(till.sent)) == (given_back, None, 1)


@pytest.mark.parametrize("when", ["during", "after"])
def test_arming_what_run_has_made_counts(till: Till, when: str) -> None:
    """``NotDone`` does not delete a row that somebody has armed since."""
    ends: list[Exception] = [NotDone()] if when == "during" else [Lost(), NotDone()]

    def body(_request: Charge, _attempt: Attempt) -> str:
        if when == "during":
            thread = till.harness.start(till.arm, charge)
            till.harness.blocking(thread.result)
        if ends:
            raise ends.pop(0)
        return till.plain(_request, _attempt)

    charge = till.effect(body, till.asks(NotDone()))
    with pytest.raises((NotDone, EffectUnknown)):
        till.run(charge)
    if when == "after":
        till.arm(charge)
    for _ in range(5):
        till.pass_time(600)
        till.settle(charge)
    assert (till.row().outcome, till.payments()) == (1, [("o1", "pi_1")])


def test_what_settle_could_not_send_is_not_forgotten(till: Till) -> None:
    """``run`` made the row, and its caller was told that ``settle`` drives the effect, or was killed."""
    charge = till.effect(till.body(Lost(), NotDone(), "pi_1"), till.asks(NotDone()))
    till.run_unknown(charge)
    settled = list[str]()
    for _ in range(3):
        till.pass_time(600 * 2 ** len(settled))
        settled.append(till.settle(charge))
    assert settled == ["1 not done", "1 not done", "1 done"]
    assert till.payments() == [("o1", "pi_1")]


@pytest.mark.parametrize("raised", [Rejected("account_closed"), NotDone(), EffectUnknown()], ids=repr)
def test_what_recorded_raises_says_nothing_of_the_effect(till: Till, raised: Exception) -> None:
    """It was done: it is neither rejected nor not done; and the sweep goes on to others."""

    def recorded(request: Charge, _value: str, _session: Session) -> None:
        if request.order == "o1":
            raise raised

    charge = till.effect(recorded=recorded)
    for _ in range(2):
        with pytest.raises(NotRecordedError):
            till.run(charge)
    till.pass_time(61)
    till.arm(charge, Charge("o2"), key="k2")
    assert till.settle(charge, limit=1) == "1 failed"
    assert till.settle(charge, limit=1) == "1 done"
    assert len(till.sent) == 2


def test_what_an_attempt_returned_is_not_overruled(till: Till) -> None:
    """A second attempt is refused; the first one was done, and that is recorded."""
    first, second = Gate(till.harness), Gate(till.harness)

    def body(request: Charge, attempt: Attempt) -> str:
        (first if attempt.number == 1 else second).stop()
        if attempt.number == 2:
            raise Rejected("card_declined")
        return till.plain(request, attempt)

    charge = till.effect(body, resend(within=HOUR))
    one = till.harness.start(till.run, charge)
    first.arrival()
    till.pass_time(40)
    two = till.harness.start(till.run, charge)
    second.arrival()
    first.open()
    assert isinstance(one.exception(), LeaseLostError)
    second.open()
    assert two.exception() is not None
    till.settle(charge)
    assert (till.row().outcome, till.payments()) == (1, [("o1", "pi_1")])


@pytest.mark.parametrize("later", [True, False], ids=["a later attempt", "an ask"])
def test_a_late_rejection_says_nothing_of_a_later_attempt(till: Till, later: bool) -> None:
    """The later one is unknown, and may have been done. If there is none, the rejection is recorded."""
    gate, asked = Gate(till.harness), Gate(till.harness)

    body = till.body(Rejected("card_declined"), Lost(), gate=gate)
    charge = till.effect(body, resend(within=HOUR) if later else till.asks(StillUnknown(), gate=asked))
    first = till.overdue(charge, gate)
    sweep = till.harness.start(till.settle, charge)
    if not later:
        asked.arrival()
    else:
        assert sweep.result() == "1 unknown"
    gate.open()
    assert isinstance(first.exception(), LeaseLostError)
    asked.open()
    assert sweep.result() == "1 unknown"
    if later:
        assert (till.row().evidence, till.row().outcome) == (None, None)
    else:
        till.pass_time(40)
        assert till.settle(charge) == "1 rejected"


def test_a_late_value_is_stronger_than_a_rejection_that_is_kept(till: Till) -> None:
    """The second attempt's rejection could not be recorded; then the first one returns."""
    gate = Gate(till.harness)

    def refused(_request: Charge, _why: Rejected, _session: Session) -> None:
        raise ZeroDivisionError

    body = till.body("pi_1", Rejected("card_declined"), gate=gate)
    charge = till.effect(body, resend(within=HOUR), refused=refused)
    first = till.overdue(charge, gate)
    assert till.settle(charge) == "1 failed"
    gate.open()
    assert isinstance(first.exception(), LeaseLostError)
    till.pass_time(40)
    assert (till.settle(charge), till.payments()) == ("1 done", [("o1", "pi_1")])


def test_a_late_answer_of_an_ask_is_no_second_deed(till: Till, caplog: pytest.LogCaptureFixture) -> None:
    """It may have found what the later attempt has done."""
    gate, answers = Gate(till.harness), [True, False]

    def listed(_request: Charge, _attempt: Attempt) -> str:
        if answers.pop(0):
            gate.stop()
            return "pi_2"
        raise NotDone

    charge = till.effect(till.loses_reply, ask(till.function(listed), after=timedelta(seconds=5), within=HOUR))
    till.run_unknown(charge)
    till.pass_time(40)
    slow = till.harness.start(till.settle, charge)
    gate.arrival()
    till.pass_time(40)
    assert till.settle(charge) == "1 not done"
    assert till.settle(charge) == "1 done"
    gate.open()
    assert slow.result() == "1 failed"
    assert "two attempts" not in caplog.text
    row = till.row()
    assert (row.decided_by, row.evidence_attempt, till.payments()) == ("attempt", None, [("o1", "pi_2")])


@pytest.mark.parametrize("driver", [driver for driver in USUAL_DRIVERS if driver.engine == "mariadb"], ids=str)
def test_letters_that_a_connection_does_not_know_hinder_nothing(driver: Driver, mariadb: Database) -> None:
    """A value is kept, and what was not sent is not sent, whatever the text of the error."""
    url = mariadb.url(driver.name_in_url).update_query_dict({"charset": "latin1"})
    with Harness(Subject(url)) as harness:
        till = Till(harness)
        till.create_tables()

        def recorded(_request: Charge, _value: str, _session: Session) -> None:
            raise ValueError("\N{RIGHTWARDS ARROW}")

        def ends(made: Any, key: str) -> Any:
            till.arm(made, key=key)
            return type(till.harness.start(till.run, made, key=key).exception())

        assert ends(till.effect(recorded=recorded), "k1") is NotRecordedError
        assert (till.row("k1").evidence, till.row("k1").error) == (b'"pi_1"', r"ValueError: \u2192")
        not_sent = till.body(NotDone("\N{RIGHTWARDS ARROW} " + "ä" * MAX_ERROR))
        assert ends(till.effect(not_sent), "k2") is NotDone
        assert (till.row("k2").first_sent_at, len(till.row("k2").error)) == (None, MAX_ERROR)


@pytest.mark.parametrize("till", [driver for driver in USUAL_DRIVERS if not driver.is_async], indirect=True, ids=str)
def test_a_thread_that_a_body_has_started_may_run_effects_when_the_body_has_ended(till: Till) -> None:
    """It has a copy of the body's context."""
    copies = list[contextvars.Context]()

    def body(request: Charge, attempt: Attempt) -> str:
        if request.order == "o1":
            copies.append(contextvars.copy_context())
            with pytest.raises(UnsafeSessionError):
                till.run(charge, Charge("o2"), key="k2")
        return till.plain(request, attempt)

    charge = till.effect(body)
    till.run(charge)
    assert copies[0].run(till.run, charge, Charge("o2"), key="k2") == "pi_2"


def test_an_interruption_while_recording_keeps_the_value(till: Till) -> None:
    """It is not sent again; the next sweep records it."""
    interrupted: list[BaseException] = [Killed()]

    def recorded(_request: Charge, _value: str, _session: Session) -> None:
        if interrupted:
            raise interrupted.pop()

    charge = till.effect(unknown=resend(within=HOUR), recorded=recorded)
    with pytest.raises(Killed):
        till.run(charge)
    assert till.row().evidence is not None
    assert (till.run(charge), len(till.sent)) == ("pi_1", 1)


def test_an_ask_is_not_taken_after_its_window(till: Till) -> None:
    """The sweep was slow: the provider may have forgotten by now."""
    gate = Gate(till.harness)

    def body(request: Charge, attempt: Attempt) -> str:
        if request.order == "slow":
            gate.stop()
            return "slow"
        till.plain(request, attempt)
        raise Lost

    charge = till.effect(body, till.asks(NotDone(), within=60))
    till.run_unknown(charge)
    till.pass_time(31)
    till.arm(charge, Charge("slow"), key="slow")
    till.change("slow", next_at=1)
    till.change_times(first_sent_at=till.row().first_sent_at - 28_000)  # its window ends in a second
    sweep = till.harness.start(till.settle, charge)
    gate.arrival()
    time.sleep(1.2)
    gate.open()
    assert sweep.result() == "1 done, 1 skipped"
    assert (till.asked, len(till.sent)) == ([], 1)


@pytest.mark.parametrize("lease", [0.0004, float("inf"), float("nan"), 86_401, True, "a day"])
def test_a_lease_is_at_most_a_day(lease: Any) -> None:
    """A lease that makes no sense would end every sweep."""
    with pytest.raises(HandlerDefinitionError, match=r"lease must be 0\.1 to 86,400 seconds \(a day\), not"):
        effect(name="x", lease=lease, unknown=stop)


def test_an_attempt_may_take_a_day(till: Till) -> None:
    """No sweep takes the effect before that, and the value is recorded."""
    gate = Gate(till.harness)
    charge = till.effect(till.body(gate=gate), lease=86_400)
    attempt = till.harness.start(till.run, charge)
    gate.arrival()
    till.pass_time(86_300)
    assert till.settle(charge) == ""
    gate.open()
    assert (attempt.result(), till.payments()) == ("pi_1", [("o1", "pi_1")])
