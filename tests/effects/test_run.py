"""An effect is done, rejected, or unknown; on every driver."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from databases import DRIVERS
from effect_rig import Charge, Till, tills
from projector_dedup.commands import KeyReusedError
from projector_dedup.effects import (
    AsyncEffects,
    Attempt,
    Effects,
    EffectUnknown,
    NotArmedError,
    NotDone,
    Rejected,
    arm,
    resend,
)
from projector_dedup.errors import UnsafeSessionError
from projector_dedup.testing import external_transaction

till = tills(DRIVERS)


def test_a_test_takes_everything_back(till: Till) -> None:
    """In an outer transaction that is rolled back, ``run`` and ``settle`` work as usual."""
    charge = till.effect(till.loses_reply, resend(within=timedelta(hours=1)))
    kind: Any = AsyncEffects if till.harness.asynchronous else Effects
    with till.harness.outer_transaction() as factory:
        with external_transaction(kind(factory, [charge])) as effects:
            with pytest.raises(EffectUnknown):
                till.harness.run(effects.run, charge, Charge(), key="k1")
            assert till.harness.run(effects.run, charge, key="k1") == "pi_2"
            till.harness.transact(lambda session: arm(session, charge, Charge(), key="k2"), factory)
            assert str(till.harness.run(effects.settle)).startswith("1 done")
        with pytest.raises(UnsafeSessionError, match="external_transaction"):
            till.harness.run(effects.run, charge, key="k1")
    assert (till.row(), till.row("k2"), till.payments()) == (None, None, [])


def test_an_effect_is_sent_once_and_answered_as_often_as_it_is_asked(till: Till) -> None:
    """Value, payment and outcome are of one transaction."""
    charge = till.effect()
    assert [till.run(charge) for _ in range(3)] == ["pi_1"] * 3
    assert till.run(charge, None) == "pi_1"
    assert (len(till.sent), till.payments()) == (1, [("o1", "pi_1")])
    row = till.row()
    assert (row.outcome, row.decided_by, row.attempt, row.processed_at is None) == (1, "attempt", 1, False)


def test_a_rejection_is_recorded_and_replayed(till: Till) -> None:
    """The provider said no, and is not asked again."""
    charge = till.effect(till.body(Rejected("card_declined", {"of": 30})))
    for replayed in (False, True):
        with pytest.raises(Rejected, match="card_declined") as told:
            till.run(charge)
        assert (told.value.detail, told.value.replayed) == ({"of": 30}, replayed)
    assert (len(till.sent), till.payments()) == (1, [("o1", "refused: card_declined")])


def test_what_surely_was_not_sent_leaves_nothing(till: Till) -> None:
    """Nobody asked for the row to be driven: it is deleted, and the next call begins anew."""
    with pytest.raises(NotDone):
        till.run(till.effect(till.body(NotDone())))
    assert till.row() is None
    assert till.run(till.effect()) == "pi_1"


def test_an_armed_effect_that_was_not_sent_stays_armed(till: Till) -> None:
    """It is sent again later, under the same key for the provider."""
    attempts: list[str] = []

    def not_now(_request: Charge, attempt: Attempt) -> str:
        attempts.append(attempt.key)
        raise NotDone

    till.arm(till.effect())
    assert till.settle(till.effect(not_now)) == "1 not done"
    row = till.row()
    assert (row.attempt, row.first_sent_at, row.lease_until) == (1, None, None)
    assert till.settle(till.effect()) == ""
    till.pass_time(31)
    assert till.settle(till.effect()) == "1 done"
    assert till.sent == attempts


def test_another_request_under_the_same_key_is_refused_before_anything_else(till: Till) -> None:
    """Whether it is armed, unknown or done."""
    charge = till.effect(till.loses_reply)
    till.run_unknown(charge)
    with pytest.raises(KeyReusedError):
        till.run(charge, Charge(amount=31))
    with pytest.raises(KeyReusedError):
        till.arm(charge, Charge(amount=31))
    assert len(till.sent) == 1


def test_a_key_alone_needs_an_armed_effect(till: Till) -> None:
    """There is no request to send."""
    with pytest.raises(NotArmedError):
        till.run(till.effect(), None)


def test_an_armed_effect_is_sent_after_the_commit_and_never_after_a_rollback(till: Till) -> None:
    """And arming again changes nothing."""
    charge = till.effect()

    class Stop(Exception):  # noqa: N818
        pass

    def roll_back(session: Session) -> None:
        arm(session, charge, Charge(), key="k1")
        raise Stop

    with pytest.raises(Stop):
        till.harness.transact(roll_back)
    assert (till.row(), till.settle(charge)) == (None, "")
    till.arm(charge)
    till.arm(charge)
    assert till.sent == []
    assert till.settle(charge) == "1 done"
    till.arm(charge)
    assert till.settle(charge) == ""
    assert (len(till.sent), till.payments()) == (1, [("o1", "pi_1")])
