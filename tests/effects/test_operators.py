"""What a person on call sees and does, with the command, on each database."""

import json
from pathlib import Path
from typing import Any

import pytest

from command import idempotency, importing
from databases import USUAL_DRIVERS
from effect_rig import SAID, Till, tills
from kit import Gate
from projector_dedup.commands import default_command_tables
from projector_dedup.effects import Attempt, LeaseLostError, Rejected, default_effect_tables
from projector_dedup.errors import RefusedError
from projector_dedup.maintenance.cleanup import cleanup, prune
from projector_dedup.maintenance.effects import advise_effects, find_effect, find_effects, resolve
from projector_dedup.maintenance.rows import forget

till = tills([each for each in USUAL_DRIVERS if not each.is_async])


def test_a_person_says_that_it_was_done(till: Till) -> None:
    """The next sweep records it, with the payment; who said so is kept."""
    charge, engine = till.stopped(), till.harness.engine
    assert [each.state for each in find_effects(engine)] == ["needs a person"]
    assert "need a person" in advise_effects(engine)[0].problem
    assert resolve(engine, "k1", attempt=1, outcome="done", value='"pi_77"', **SAID).state == "decided"
    assert till.settle(charge) == "1 done"
    assert (till.run(charge), till.payments(), len(till.sent)) == ("pi_77", [("o1", "pi_77")], 1)
    found = find_effect(engine, "k1")
    assert (found.state, found.decided_by, found.decisions[0]["who"]) == ("done", "person", "ada")
    assert (find_effects(engine), advise_effects(engine)) == ([], [])


def test_a_person_says_that_it_was_not_done(till: Till) -> None:
    """It is sent again, as if it were the first time."""
    charge = till.stopped()
    resolve(till.harness.engine, "k1", attempt=1, outcome="not done", **SAID)
    assert till.settle(charge) == "1 not done"
    assert till.settle(charge) == "1 done"
    assert (len(till.sent), till.payments()) == (2, [("o1", "pi_2")])


def test_a_person_cancels_what_was_never_sent(till: Till) -> None:
    """``refused`` hears of it."""
    charge = till.effect()
    till.arm(charge)
    resolve(till.harness.engine, "k1", attempt=0, outcome="rejected", code="cancelled", **SAID)
    assert till.settle(charge) == "1 rejected"
    assert (till.sent, till.payments()) == ([], [("o1", "refused: cancelled")])


def test_a_decision_on_a_state_that_has_moved_is_refused(till: Till) -> None:
    """Another attempt, an attempt that is running, an outcome: nothing is written."""
    charge, engine, gate = till.stopped(), till.harness.engine, Gate(till.harness)
    resolve(engine, "k1", attempt=1, outcome="not done", **SAID)
    assert till.settle(charge) == "1 not done"

    def slow(request: Any, attempt: Attempt) -> str:
        gate.stop()
        return till.plain(request, attempt)

    sweep = till.harness.start(till.settle, till.effect(slow))
    gate.arrival()
    for attempt, why in ((1, "has changed: 2 attempts"), (2, "is running until")):
        with pytest.raises(RefusedError, match=why):
            resolve(engine, "k1", attempt=attempt, outcome="done", value="null", **SAID)
    gate.open()
    assert sweep.result() == "1 done"
    with pytest.raises(RefusedError, match="is already done"):
        resolve(engine, "k1", attempt=2, outcome="rejected", code="late", **SAID)
    assert till.row().decision is None


@pytest.mark.parametrize("ends", ["done", "rejected"])
@pytest.mark.parametrize(
    "said",
    [{"outcome": "done", "value": '"pi_1"'}, {"outcome": "rejected", "code": "lost"}, {"outcome": "not done"}],
    ids=["said done", "said rejected", "said not done"],
)
def test_a_decision_gives_way_to_the_attempt_and_is_not_forgotten_in_silence(
    till: Till, said: dict[str, Any], ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its lease had ended when somebody decided, and it returned before the decision was recorded."""
    gate = Gate(till.harness)
    charge = till.effect(till.body(Rejected("card_declined") if ends == "rejected" else "pi_1", gate=gate))
    attempt = till.overdue(charge, gate)
    resolve(till.harness.engine, "k1", attempt=1, **said, **SAID)
    gate.open()
    assert isinstance(attempt.exception(), LeaseLostError)
    assert till.settle(charge) == f"1 {ends}"
    assert ("ignored the decision of a person" in caplog.text) is (said["outcome"] != ends)


def test_a_value_that_does_not_fit_stays_listed(till: Till) -> None:
    """It is checked against the type before it is recorded; another decision replaces it."""
    charge, engine = till.stopped(), till.harness.engine
    for value in ("pi_77", "NaN", "[1e999]"):
        with pytest.raises(RefusedError, match="not JSON"):
            resolve(engine, "k1", attempt=1, outcome="done", value=value, **SAID)
    resolve(engine, "k1", attempt=1, outcome="done", value="77", **SAID)
    assert till.settle(charge) == "1 failed"
    assert [each.state for each in find_effects(engine)] == ["decided"]
    resolve(engine, "k1", attempt=1, outcome="done", instead_of="done", value='"pi_77"', **SAID)
    assert till.settle(charge) == "1 done"


def test_what_is_not_finished_is_neither_pruned_nor_forgotten(till: Till) -> None:
    """However old it is. What is finished is pruned by its age."""
    charge, engine = till.stopped(), till.harness.engine
    assert prune(engine, retention_hours=0.0001, tables=default_effect_tables).deleted == 0
    with pytest.raises(RefusedError):
        forget(engine, "0:k1", tables=default_effect_tables)
    assert till.row() is not None
    resolve(engine, "k1", attempt=1, outcome="done", value='"pi_77"', **SAID)
    assert till.settle(charge) == "1 done"
    assert till.row().processed_at is not None


APP = """
import os
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from projector_dedup.effects import Effects, effect, stop
from effect_rig import Charge, book

@effect(name="till.charge", lease=30, unknown=stop)
def charge(request: Charge, attempt) -> str:
    raise AssertionError

charge.recorded(book)
effects = Effects(sessionmaker(create_engine(os.environ["PROJECTOR_DEDUP_DATABASE_URL"])), [charge])
"""


def test_the_command(till: Till, tmp_path: Path) -> None:
    """List says by its exit code that somebody is needed; show says what to do; resolve and settle do it."""
    till.stopped()
    (tmp_path / "shop_of_test.py").write_text(APP)
    url = till.harness.subject.url.render_as_string(hide_password=False)

    def effects(*arguments: str) -> tuple[int, str, str]:
        surrounded = {"PROJECTOR_DEDUP_DATABASE_URL": url, "PYTHONPATH": importing()["PYTHONPATH"]}
        done = idempotency("effects", *arguments, cwd=str(tmp_path), **surrounded)
        return done.returncode, done.stdout, done.stderr

    code, listed, wrong = effects("list", "--unknown", "--json")
    found = json.loads(listed)["effects"][0]
    assert (code, found["state"], found["attempt"], "request" in found) == (1, "needs a person", 1, False)
    assert "effects that need a person: 1" in wrong
    code, shown, _ = effects("show", "k1")
    assert (code, "\n  idempotency effects resolve --attempt 1 --not-done --reason TEXT k1\n" in shown) == (0, True)
    assert max(map(len, effects("list")[1].splitlines())) <= 80
    assert effects("list", "--older-than", "1d")[1].endswith(": no unfinished effect matches the options.\n")
    assert "write a number and s, m, h or d, for example 15m" in effects("list", "--older-than", "1 day")[2]
    assert effects("resolve", "k1", "--attempt", "1", "--done", '"pi_77"', "--reason", "it shows pi_77")[0] == 0
    code, settled, wrong = effects("settle", "--app", "shop_of_test:effects")
    assert (code, settled.split(",")[0]) == (0, "1 done"), wrong
    code, listed, _ = effects("list")
    assert (code, listed.endswith(": no unfinished effect.\n")) == (0, True)  # it is there, and done
    assert till.payments() == [("o1", "pi_77")]


@pytest.mark.parametrize(("effects", "commands", "told"), [(10, 20, True), (20, 10, False), (20, 20, False)])
def test_effects_are_kept_longer_than_what_arms_them(till: Till, effects: int, commands: int, told: bool) -> None:
    """Else a command that is handled again arms a key whose row is gone."""
    till.harness.transact(lambda session: default_command_tables.marker.metadata.create_all(session.connection()))
    engine = till.harness.engine
    assert advise_effects(engine) == []
    cleanup(engine, retention_hours=commands, tables=default_command_tables)
    assert advise_effects(engine) == []
    cleanup(engine, retention_hours=effects, tables=default_effect_tables)
    found = [finding.problem for finding in advise_effects(engine)]
    assert [f"deletes effects after {effects} hours, but records after {commands}" in each for each in found] == [
        True
    ] * told
