"""A lease that is renewed while the body runs: it ends with the body, with ``at_most``, or when somebody takes over."""

import re
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import event

from databases import until
from effect_rig import Charge, Till, tills
from kit import Gate
from projector_dedup import HandlerDefinitionError
from projector_dedup.effects import Attempt, LeaseLostError, NotDone, ask, effect, resend, stop

till = tills()
RENEWED = {"lease": 30, "renew_every": 0.1, "at_most": 3600}


class Slow:
    """An effect whose body stops at a gate, and an attempt at it that is under way."""

    def __init__(self, till: Till, **settings: Any) -> None:
        self.gate = Gate(till.harness)

        def body(request: Charge, attempt: Attempt) -> str:
            self.gate.stop()
            return till.plain(request, attempt)

        self.effect = till.effect(body, **settings)
        self.attempt = till.harness.start(till.run, self.effect)
        self.gate.arrival()


def test_a_lease_is_renewed_while_the_body_runs(till: Till) -> None:
    """It had ended, and no sweep takes the effect once the lease has been renewed."""
    slow = Slow(till, **RENEWED)
    till.pass_time(40)
    over = till.row().lease_until
    until(lambda: till.row().lease_until > over)
    assert till.settle(slow.effect) == ""
    slow.gate.open()
    assert (slow.attempt.result(), till.payments()) == ("pi_1", [("o1", "pi_1")])


def test_an_attempt_that_hangs_loses_its_lease(till: Till) -> None:
    """It is a question when it has lasted ``at_most``."""
    slow = Slow(till, lease=0.4, renew_every=0.1, at_most=0.6)
    until(lambda: till.settle(slow.effect) == "1 stopped")
    slow.gate.open()
    assert slow.attempt.result() == "pi_1"


def test_what_another_process_has_taken_over_is_not_renewed(till: Till) -> None:
    """The lease is that of the other one."""
    slow, tried = Slow(till, **RENEWED), list[str]()
    engine = getattr(till.harness.engine, "sync_engine", till.harness.engine)

    @event.listens_for(engine, "after_cursor_execute")
    def _executed(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        tried.append(statement)

    till.change(lease_until=1)
    already = len(tried)
    until(lambda: any(re.match("UPDATE external_effect ", each) for each in tried[already:]))
    assert till.row().lease_until == 1
    slow.gate.open()
    with pytest.raises(LeaseLostError):
        slow.attempt.result()


@pytest.mark.parametrize("policy", ["resend", "ask", "stop"])
def test_a_sweep_does_not_touch_what_was_renewed_since_it_looked(till: Till, policy: str) -> None:
    """Its lease had ended when the sweep read it; a renewal changes no token."""
    sweeping, slow = Gate(till.harness), Gate(till.harness)

    def body(request: Charge, attempt: Attempt) -> str:
        (sweeping if request.order == "first" else slow).stop()
        return till.plain(request, attempt)

    def not_there(_request: Charge, _attempt: Attempt) -> str:
        raise NotDone

    hour = timedelta(hours=1)
    asks = ask(till.function(not_there), after=timedelta(minutes=5), within=hour)
    unknown: Any = {"resend": resend(within=hour), "ask": asks, "stop": stop}[policy]
    charge = till.effect(body, unknown)
    attempt = till.harness.start(till.run, charge, Charge("second"), "second")
    slow.arrival()
    renewed = till.row("second").lease_until
    till.pass_time(40)
    till.arm(charge, Charge("first"), key="first")
    till.change("first", next_at=1)
    sweep = till.harness.start(till.settle, charge)
    sweeping.arrival()
    till.change_times("second", lease_until=renewed)
    sweeping.open()
    assert sweep.result() == "1 done, 1 skipped"
    assert (till.row("second").lease_until, till.row("second").stopped_at) == (renewed, None)
    slow.open()
    assert (attempt.result(), len(till.sent)) == ("pi_2", 2)


def test_a_window_has_room_for_all_renewals(till: Till) -> None:
    """An attempt begins only if it ends within the window, even if it lasts ``at_most``."""
    ends = [ZeroDivisionError()]

    def body(request: Charge, attempt: Attempt) -> str:
        if ends:
            raise ends.pop()
        return till.plain(request, attempt)

    charge = till.effect(body, resend(within=timedelta(seconds=100)), lease=1, renew_every=0.5, at_most=60)
    with pytest.raises(Exception, match="without an answer"):
        till.run(charge)
    till.pass_time(50)
    assert (till.settle(charge), till.sent) == ("1 stopped", [])


def test_time_left_is_that_of_all_renewals() -> None:
    """``at_most`` bounds the call to the provider."""
    given = list[float]()

    @effect(name="x", lease=1, unknown=stop, renew_every=0.5, at_most=60)
    def body(_request: Charge, attempt: Attempt) -> None:
        given.append(attempt.time_left(100))

    attempt = Attempt("k", lease=body.lease.at_most)
    body(Charge(), attempt)
    assert 50 < given[0] < 60
    attempt.began -= 60
    attempt.called = False
    with pytest.raises(NotDone):
        body(Charge(), attempt)


@pytest.mark.parametrize(
    "said",
    [
        {"renew_every": 10},
        {"at_most": 100},
        {"renew_every": 16, "at_most": 100},
        {"renew_every": 0, "at_most": 100},
        {"renew_every": 10, "at_most": 30},
        {"renew_every": 10, "at_most": 86_401},
    ],
    ids=str,
)
def test_renewals_are_bounded(said: dict[str, float]) -> None:
    """Else an attempt that hangs would be renewed for ever, or not in time."""
    with pytest.raises(HandlerDefinitionError, match=r"renew_every|at_most"):
        effect(name="x", lease=30, unknown=stop, **said)
