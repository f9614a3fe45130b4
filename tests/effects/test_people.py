"""What a person must see: effects that are overdue or done twice, and decisions of two persons."""

import shlex
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import MetaData, create_engine, event

from command import idempotency
from databases import USUAL_DRIVERS
from effect_rig import SAID, Charge, Till, tills
from kit import Gate
from projector_dedup.dialects import dialect_of
from projector_dedup.effects import (
    DoubleEffectError,
    NotDone,
    default_effect_tables,
    effect,
    make_effect_tables,
    resend,
    stop,
)
from projector_dedup.errors import RefusedError
from projector_dedup.maintenance.cleanup import prune
from projector_dedup.maintenance.effects import (
    advise_effects,
    count_overdue,
    find_effect,
    find_effects,
    mark_seen,
    resolve,
)
from projector_dedup.maintenance.rows import forget
from projector_dedup.maintenance.stats import gauges

till = tills([each for each in USUAL_DRIVERS if not each.is_async])
DAY = timedelta(days=1)


def url(till: Till) -> str:
    """Return the database's URL for the command."""
    return till.harness.subject.url.render_as_string(hide_password=False)


# Overdue --------------------------------------------------------------------------------------------------------------


def test_an_effect_that_nobody_sends_is_told(till: Till) -> None:
    """No process runs `settle`, or none knows the name: `list`, `check` and the gauge say so."""
    charge, engine = till.effect(), till.harness.engine
    till.arm(charge)
    till.pass_time(14 * 60)
    assert count_overdue(engine) == 0
    assert idempotency("effects", "list", "--database-url", url(till)).returncode == 0
    till.pass_time(2 * 60)
    assert gauges(engine, tables=default_effect_tables).overdue == 1
    for command in (["effects", "list"], ["check", "--effects"]):
        said = idempotency(*command, "--database-url", url(till))
        assert said.returncode == 1, said
        assert "armed or due for more than 15 minutes: 1" in said.stdout + said.stderr
        assert idempotency(*command, "--overdue", "1h", "--database-url", url(till)).returncode == 0
    till.settle(charge)
    assert idempotency("effects", "list", "--database-url", url(till)).returncode == 0


def test_an_effect_that_is_tried_again_and_again_and_never_sent_is_told(till: Till) -> None:
    """Its next attempt is not due, but it was armed long ago."""
    charge = till.effect(till.body(*[NotDone()] * 9))
    till.arm(charge)
    assert till.settle(charge) == "1 not done"
    till.pass_time(16 * 60)
    assert till.settle(charge) == "1 not done"
    assert count_overdue(till.harness.engine) == 1


def test_an_effect_that_a_person_has_cancelled_is_overdue_since_then_alone(till: Till) -> None:
    """`list` does not complain of what the next sweep records."""
    charge, engine = till.effect(), till.harness.engine
    till.arm(charge)
    till.pass_time(3_600)
    resolve(engine, "k1", attempt=0, outcome="rejected", code="void", **SAID)
    assert count_overdue(engine) == 0
    till.pass_time(16 * 60)
    assert count_overdue(engine) == 1


@pytest.mark.parametrize("outcome", ["rejected", "done"])
def test_a_decision_that_cannot_be_recorded_is_told(till: Till, outcome: Any) -> None:
    """The next try is not due, but the effect has waited for long: `list` and the alert must say so."""

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    charge, engine = till.effect(till.loses_reply, recorded=broken, refused=broken), till.harness.engine
    till.arm(charge)
    if outcome == "done":
        assert till.settle(charge) == "1 unknown"
    till.pass_time(3_600)
    code, value = ("void", None) if outcome == "rejected" else (None, '"pi_1"')
    resolve(engine, "k1", attempt=len(till.sent), outcome=outcome, code=code, value=value, **SAID)
    assert count_overdue(engine) == 0
    assert till.settle(charge) == "1 failed"
    assert count_overdue(engine) == 1
    till.pass_time(31)  # whether the next try is due, or not yet
    assert count_overdue(engine) == 1
    text, replace = show(till, "k1")
    assert ("replace the decision" in text, f" --instead-of {outcome} " in replace) == (True, True)
    assert "ZeroDivisionError" in str(find_effect(engine, "k1").error)


def test_a_value_beside_a_running_attempt_is_not_overdue(till: Till) -> None:
    """It is recorded when that attempt has ended, and nobody can do anything before."""
    gates = {1: Gate(till.harness), 2: Gate(till.harness)}

    def body(request: Charge, attempt: Any) -> str:
        gates[attempt.number].stop()
        return till.plain(request, attempt)

    charge = till.effect(body, resend(within=DAY), lease=3_600)
    till.arm(charge)
    first = till.harness.start(till.settle, charge)
    gates[1].arrival()
    till.pass_time(3_700)
    second = till.harness.start(till.settle, charge)
    gates[2].arrival()
    gates[1].open()
    assert (first.result(), till.settle(charge)) == ("1 failed", "1 skipped")
    assert count_overdue(till.harness.engine) == 0
    gates[2].open()
    assert second.result() == "1 failed"


def test_a_value_that_cannot_be_recorded_is_told(till: Till) -> None:
    """As soon as its attempt has ended 15 minutes ago, however often `settle` has tried since."""

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    charge, engine = till.effect(recorded=broken), till.harness.engine
    till.arm(charge)
    assert till.settle(charge) == "1 failed"
    till.pass_time(14 * 60)
    assert till.settle(charge) == "1 failed"
    assert count_overdue(engine) == 0
    till.pass_time(2 * 60)
    assert count_overdue(engine) == 1


# What to type ---------------------------------------------------------------------------------------------------------


def show(till: Till, *options: str) -> list[str]:
    """What `effects show` says comes next, and the commands under it."""
    said = idempotency("effects", "show", "--database-url", url(till), *options).stdout.splitlines()
    return said[next(number for number, line in enumerate(said) if line.startswith("Next:")) :]


def test_show_has_the_command_that_comes_next(till: Till) -> None:
    """With key, scope and attempt, so that a person who knows no option can type it; the log names the key so."""
    charge = till.effect(till.loses_reply, stop)
    till.arm(charge, key="o 1", scope="north")
    resolve_it = "  idempotency effects resolve --database-url URL --scope north"
    cancel = f"{resolve_it} --attempt 0 --rejected cancelled --reason TEXT 'o 1'"
    assert show(till, "o 1", "--scope", "north")[1:] == [cancel]
    assert till.settle(charge) == "1 unknown"
    till.pass_time(31)
    assert till.settle(charge) == "1 stopped"
    decide = [f"{resolve_it} --attempt 1 {each} --reason TEXT 'o 1'" for each in ("--done JSON", "--not-done")]
    assert show(till, "o 1", "--scope", "north")[1:] == decide


def test_the_command_that_show_prints_is_accepted(till: Till) -> None:
    """Also after an attempt that sent nothing, for a key like an option, in other tables, and for one effect of two."""
    tables = make_effect_tables(MetaData(), "other_effect")
    till.harness.transact(lambda session: tables.marker.metadata.create_all(session.connection()))
    charge, other = till.effect(till.body(NotDone()), name="till.one"), till.effect(name="till.two")
    for each in (charge, other):
        till.arm(each, key="--key", tables=tables)
    till.harness.run(till.effects(charge, tables=tables).settle)
    (line,) = show(till, "--table", "other_effect", "--effect", "till.one", "--", "--key")[1:]
    assert "--table other_effect --effect till.one --attempt 1 --rejected cancelled" in line
    _, *words = shlex.split(line)
    words[words.index("URL")] = url(till)
    said = idempotency(*words)
    assert (said.returncode, "till.one, key --key: decided" in said.stdout) == (0, True), said


def test_a_key_that_no_terminal_shows_is_not_printed_as_something_else(till: Till) -> None:
    """What the person would copy would name another effect."""
    till.arm(till.effect(), key="o\x1b1")
    assert show(till, "o\x1b1")[1].endswith(" --reason TEXT <key>")


def test_show_says_which_of_two_deeds_to_keep(till: Till) -> None:
    """That of the recorded value; none, if a rejection is recorded."""
    doubled(till)
    text, command = show(till, "k1")
    assert "undo each deed that is not the recorded value (`show --values`)" in text
    assert command == "  idempotency effects resolve --database-url URL --seen --reason TEXT k1"


# Done twice -----------------------------------------------------------------------------------------------------------


def doubled(till: Till) -> Any:
    """Return an effect of which two attempts returned different values."""
    gate = Gate(till.harness)
    charge = till.effect(till.body("pi_1", "pi_2", gate=gate), resend(within=DAY))
    first = till.overdue(charge, gate)
    assert till.settle(charge) == "1 done"
    gate.open()
    error = first.exception()
    assert isinstance(error, DoubleEffectError)
    for word in ("attempt 1 (sha256:", "attempt 2 (sha256:", " UTC)"):
        assert word in str(error)
    return charge


def test_what_was_done_twice_is_listed_until_a_person_has_seen_it(till: Till) -> None:
    """Also by `show`, `check` and the gauge; cleanup keeps it meanwhile, and ``run`` returns the recorded value."""
    charge, engine = doubled(till), till.harness.engine
    found = find_effects(engine)[0]
    assert (found.state, "two attempts at" in str(found.error)) == ("done twice", True)
    assert gauges(engine, tables=default_effect_tables).person == 1
    assert "effects that need a person: 1" in [each.problem for each in advise_effects(engine)]
    assert idempotency("effects", "list", "--database-url", url(till)).returncode == 1
    assert till.row().processed_at is None  # so no cleanup deletes it
    assert prune(engine, tables=default_effect_tables, retention_hours=1).deleted == 0
    assert till.run(charge) == "pi_2"
    said = idempotency(
        "effects", "resolve", "k1", "--seen", "--reason", "refunded", "--by", "ada", "--database-url", url(till)
    )
    assert (said.returncode, "done, and seen by ada" in said.stdout) == (0, True), said
    assert (find_effects(engine), advise_effects(engine)) == ([], [])
    seen = find_effect(engine, "k1")
    assert (seen.state, [each["outcome"] for each in seen.decisions]) == ("done", ["seen"])
    assert "refunded" in idempotency("effects", "show", "k1", "--database-url", url(till)).stdout
    with pytest.raises(RefusedError, match="there is nothing to see"):
        mark_seen(engine, "k1", **SAID)


def test_the_log_says_once_that_two_attempts_were_done(till: Till, caplog: pytest.LogCaptureFixture) -> None:
    """The ERROR line is the text of the error: what happened, the values, and what to do."""
    doubled(till)
    (line,) = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert line.startswith("two attempts at effect till.charge, key k1 were done: attempt 2 (")
    assert line.count("two attempts") == 1
    assert line.endswith("; at the provider, undo each deed that is not the recorded value")


def test_an_effect_that_was_done_twice_is_not_forgotten(till: Till) -> None:
    """The refusal names the command that ends it, and after that the row may go."""
    doubled(till)
    engine, tables = till.harness.engine, default_effect_tables
    with pytest.raises(RefusedError, match="`--seen` if it was done twice"):
        forget(engine, "0:k1", handler="till.charge", tables=tables)
    mark_seen(engine, "k1", **SAID)
    assert forget(engine, "0:k1", handler="till.charge", tables=tables) == 1


def test_two_values_of_which_the_first_is_recorded_later_are_done_twice(till: Till) -> None:
    """``recorded`` failed for the second attempt; when `settle` records it, the row stays listed."""
    gate, broken = Gate(till.harness), [True]

    def recorded(_request: Charge, _value: str, _session: Any) -> None:
        if broken:
            raise ZeroDivisionError

    charge = till.effect(till.body("pi_1", "pi_2", gate=gate), resend(within=DAY), recorded=recorded)
    first = till.overdue(charge, gate)
    assert till.settle(charge) == "1 failed"
    gate.open()
    assert isinstance(first.exception(), DoubleEffectError)
    broken.clear()
    till.pass_time(3_600)
    assert till.settle(charge) == "1 done"
    assert [each.state for each in find_effects(till.harness.engine)] == ["done twice"]


@pytest.mark.parametrize("returns", [dict[str, int], set[int]], ids=["order", "set"])
def test_equal_answers_that_are_written_differently_are_one_effect(till: Till, returns: Any) -> None:
    """With ``resend``: the values are compared as they are read, and not by their bytes."""
    gate = Gate(till.harness)
    values = [{"a": 1, "b": 2}, {"b": 2, "a": 1}] if returns == dict[str, int] else [{1, 9, 17}, {17, 9, 1}]
    body = till.body(*values, gate=gate)
    charge = effect(name="till.charge", lease=30, unknown=resend(within=DAY))(till.function(body, returns))
    first = till.overdue(charge, gate)
    assert till.settle(charge) == "1 done"
    gate.open()
    assert not isinstance(first.exception(), DoubleEffectError)
    assert find_effects(till.harness.engine) == []


# Two persons ----------------------------------------------------------------------------------------------------------


def test_a_second_decision_names_the_first(till: Till) -> None:
    """Otherwise it is refused; both stay in the row, in their order."""
    charge, engine = till.stopped(), till.harness.engine
    resolve(engine, "k1", attempt=1, outcome="not done", why="not there", who="ada")
    second: Callable[..., Any] = lambda **more: resolve(  # noqa: E731
        engine, "k1", attempt=1, outcome="done", value='"pi_1"', why="it is", who="bob", **more
    )
    for wrong in (None, "done", "rejected"):
        with pytest.raises(RefusedError, match=r"ada has decided that .* is not done"):
            second(instead_of=wrong)
    found = second(instead_of="not done")
    assert [(each["who"], each["outcome"]) for each in found.decisions] == [("ada", "not done"), ("bob", "done")]
    assert till.settle(charge) == "1 done"
    assert (till.payments(), len(till.sent)) == ([("o1", "pi_1")], 1)
    said = idempotency("effects", "show", "k1", "--database-url", url(till)).stdout
    assert said.index("who ada") < said.index("who bob")


def test_of_two_decisions_at_the_same_moment_one_wins(till: Till) -> None:
    """The other person is told, and writes nothing."""
    till.stopped()
    both = [
        till.harness.start(resolve, till.harness.engine, "k1", attempt=1, outcome="not done", why="no", who=who)
        for who in ("ada", "bob")
    ]
    errors = [each.exception() for each in both]
    assert sorted(isinstance(each, RefusedError) for each in errors) == [False, True], errors
    assert "earlier" not in till.row().decision


def test_a_decision_between_look_and_write_wins(till: Till) -> None:
    """The row is as the second person has read it, but for the decision."""
    till.stopped()
    engine = till.harness.engine
    if not dialect_of(engine).locks_rows:
        pytest.skip("SQLite has one writer, who begins before it reads")
    first = create_engine(engine.url)

    @event.listens_for(engine, "before_cursor_execute")
    def decide_first(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("UPDATE"):
            resolve(first, "k1", attempt=1, outcome="not done", why="no", who="ada")

    with pytest.raises(RefusedError, match="another person has decided at the same moment"):
        resolve(engine, "k1", attempt=1, outcome="not done", why="no", who="bob")
    event.remove(engine, "before_cursor_execute", decide_first)
    assert [each["who"] for each in find_effect(engine, "k1").decisions] == ["ada"]
    first.dispose()


# Names ----------------------------------------------------------------------------------------------------------------


def test_check_with_a_wrong_application_shows_what_it_needs(till: Till) -> None:
    """It takes effects, and for markers a dispatcher."""
    for options, example in ((["--effects"], "myapp.shop:effects"), ([], "myapp.consumer:dispatcher")):
        said = idempotency("check", *options, "--app", "no_such_shop:it", "--database-url", url(till))
        assert (said.returncode, f"write it like {example}," in " ".join(said.stderr.split())) == (1, True), said


def test_check_with_the_application_tells_names_that_it_does_not_have(till: Till) -> None:
    """No process sends these."""
    till.arm(till.effect(name="till.removed"))
    findings = advise_effects(till.harness.engine, known={"till.charge"})
    assert [each.problem for each in findings if each.fatal] == ["effects that the application does not have: 1"]
    assert advise_effects(till.harness.engine, known={"till.removed"}) == []
