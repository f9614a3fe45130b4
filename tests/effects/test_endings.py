"""Endings that are easy to get wrong: a lease that ran out, a COMMIT without a reply, an ask that came to nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest

from effect_rig import Charge, Till, tills
from projector_dedup.effects import Attempt, EffectUnknown, NotDone, ask

till = tills()


@contextmanager
def lost_reply_of_commit(till: Till, number: int) -> Iterator[None]:
    """Let the database commit, and lose its reply: that of the COMMIT with this number, from 1."""
    dialect: Any = till.harness.engine.dialect
    left, commit = [number], dialect.do_commit

    def committed(connection: Any) -> None:
        commit(connection)
        left[0] -= 1
        if left[0] == 0:
            raise dialect.loaded_dbapi.OperationalError("the reply was lost")

    dialect.do_commit = committed
    try:
        yield
    finally:
        del dialect.do_commit
    assert left[0] <= 0


@pytest.mark.parametrize("lost", [1, 2], ids=["of the attempt", "of the outcome"])
@pytest.mark.parametrize("call", ["run", "settle"])
def test_a_commit_without_a_reply_is_asked_about(till: Till, call: str, lost: int) -> None:
    """The row says whether it came through: nothing is sent again, and ``recorded`` is not called again."""
    charge = till.effect()
    if call == "settle":
        till.arm(charge)
    with lost_reply_of_commit(till, lost):
        assert till.run(charge) == "pi_1" if call == "run" else till.settle(charge) == "1 done"
    assert till.run(charge) == "pi_1"
    assert (len(till.sent), till.payments(), till.row().attempt) == (1, [("o1", "pi_1")], 1)


def test_a_lease_that_ran_out_is_no_permission(till: Till) -> None:
    """A process was killed in the middle of its attempt: with ``stop``, nobody sends it again."""

    class Killed(BaseException):
        pass

    def killed(request: Charge, attempt: Attempt) -> str:
        till.plain(request, attempt)
        raise Killed

    charge = till.effect(killed)
    with pytest.raises(Killed):
        till.run(charge)
    till.pass_time(31)
    with pytest.raises(EffectUnknown):
        till.run(charge)
    assert till.settle(charge) == "1 stopped"
    assert len(till.sent) == 1


def test_an_ask_function_without_time_knows_nothing(till: Till) -> None:
    """``time_left`` in an ask function does not say that the effect was not done."""

    def suspended(_request: Charge, attempt: Attempt) -> str:
        attempt.began -= 100
        attempt.time_left(5)
        raise NotDone

    after = timedelta(seconds=60)
    charge = till.effect(till.loses_reply, ask(till.function(suspended), after=after, within=timedelta(hours=1)))
    with pytest.raises(EffectUnknown):
        till.run(charge)
    till.pass_time(61)
    assert till.settle(charge) == "1 unknown"
    till.pass_time(300)
    assert till.settle(charge) == "1 unknown"
    assert len(till.sent) == 1
