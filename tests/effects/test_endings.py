"""Endings that are easy to get wrong: a lease that ran out, a COMMIT without a reply, an ask that came to nothing."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.orm import Session, sessionmaker

from databases import USUAL_DRIVERS, Driver, each_driver
from effect_rig import Charge, Till, till_on, tills
from kit import Added, Gate
from projector_dedup.effects import (
    Attempt,
    DoubleEffectError,
    Effects,
    LeaseLostError,
    NotDone,
    NotRecordedError,
    ask,
    effect,
    resend,
    stop,
)
from projector_dedup.effects.record import DONE, DOUBLE
from projector_dedup.errors import HandlerDefinitionError, UnsafeSessionError
from projector_dedup.options import RetryPolicy
from projector_dedup.tables import default_tables

till = tills()

HOUR = timedelta(hours=1)
BLOCKING = [each for each in USUAL_DRIVERS if not each.is_async]


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


class Killed(BaseException):
    """Ends an attempt as a kill does: it is no Exception."""


@contextmanager
def killed_after_commit(till: Till, number: int) -> Iterator[list[int]]:
    """Kill whoever sends the COMMIT with this number, from 1, when the database has committed."""
    dialect: Any = till.harness.engine.dialect
    left, commit = [number], dialect.do_commit

    def committed(connection: Any) -> None:
        commit(connection)
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    dialect.do_commit = committed
    try:
        yield left
    finally:
        del dialect.do_commit


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


@pytest.mark.parametrize("fails", ["recorded", "COMMIT"])
def test_a_value_is_kept_though_a_commit_has_no_reply(till: Till, fails: str) -> None:
    """Either the COMMIT that keeps the value, or that which recorded it, and which nobody may ask about again."""

    def broken(_request: Charge, _value: str, _session: Session) -> None:
        raise ZeroDivisionError

    charge = till.effect(recorded=broken if fails == "recorded" else None)
    retry = RetryPolicy(attempts=2 if fails == "recorded" else 1)
    run = till.effects(charge, retry=retry).run
    with lost_reply_of_commit(till, 2), pytest.raises(NotRecordedError, match="the row keeps the outcome"):
        till.harness.run(run, charge, Charge(), key="k1")
    row = till.row()
    assert (row.outcome is None, row.evidence is None) == ((True, False) if fails == "recorded" else (False, True))


@pytest.mark.parametrize("till", BLOCKING, indirect=True, ids=str)
def test_a_late_value_is_kept_though_its_commit_has_no_reply(till: Till) -> None:
    """The error says that the row keeps it."""
    first = 2 if till.harness.engine.dialect.name == "postgresql" else 1  # on PostgreSQL, what changes nothing commits

    with ExitStack() as stack:

        def overtaken(request: Charge, attempt: Attempt) -> str:
            till.change(stopped_at=None)  # another process has taken over
            stack.enter_context(lost_reply_of_commit(till, first))
            return till.plain(request, attempt)

        charge = till.effect(overtaken)
        with pytest.raises(LeaseLostError, match="the row keeps the outcome"):
            till.run(charge)
    assert till.row().evidence_attempt == 1


@pytest.mark.parametrize("till", BLOCKING, indirect=True, ids=str)
def test_a_removal_that_was_not_committed_is_no_removal(till: Till) -> None:
    """The COMMIT of the removal fails, and the effect is armed before the next try: it is not forgotten."""
    dialect: Any = till.harness.engine.dialect
    commits, commit = [0], dialect.do_commit

    def lost(connection: Any) -> None:
        commits[0] += 1
        if commits[0] != 2:
            commit(connection)
            return
        connection.rollback()
        till.harness.start(till.arm, charge).result()
        raise dialect.loaded_dbapi.OperationalError("the server went away")

    charge = till.effect(till.body(NotDone()))
    dialect.do_commit = lost
    with pytest.raises(NotDone):
        till.run(charge)
    del dialect.do_commit
    row = till.row()
    assert (row.armed, row.attempt, row.first_sent_at, row.lease_until) == (True, 1, None, None)


def test_an_ask_function_without_time_knows_nothing(till: Till) -> None:
    """``time_left`` in an ask function does not say that the effect was not done."""

    def suspended(_request: Charge, attempt: Attempt) -> str:
        attempt.began -= 100
        attempt.time_left(5)
        raise NotDone

    after = timedelta(seconds=60)
    charge = till.effect(till.loses_reply, ask(till.function(suspended), after=after, within=timedelta(hours=1)))
    till.run_unknown(charge)
    till.pass_time(61)
    assert till.settle(charge) == "1 unknown"
    till.pass_time(300)
    assert till.settle(charge) == "1 unknown"
    assert len(till.sent) == 1


def _waiting(till: Till, gates: list[Gate]) -> Callable[[Charge, Attempt], str]:
    """Return a body that does the deed; each attempt waits at its own gate, and returns a value of its own."""

    def body(request: Charge, attempt: Attempt) -> str:
        till.plain(request, attempt)
        gates[attempt.number - 1].stop()
        return f"pi_{attempt.number}"

    return body


def test_an_attempt_that_was_taken_over_writes_nothing(till: Till) -> None:
    """Its successor is under way: the late value is kept beside, and the successor hears of it."""
    gates = [Gate(till.harness), Gate(till.harness)]
    charge = till.effect(_waiting(till, gates), resend(within=HOUR))
    first = till.overdue(charge, gates[0])
    second = till.harness.start(till.run, charge)
    gates[1].arrival()
    gates[0].open()
    with pytest.raises(LeaseLostError):
        first.result()
    row = till.row()
    assert (row.outcome, row.evidence_attempt, till.payments()) == (None, 1, [])
    gates[1].open()
    with pytest.raises(DoubleEffectError):
        second.result()
    assert till.payments() == [("o1", "pi_2")]


def test_a_handler_does_not_send_by_way_of_another_database(till: Till, tmp_path: Path) -> None:
    """What was sent would stay sent when the handler is rolled back, wherever its row is."""
    till.harness.transact(lambda session: default_tables.marker.metadata.create_all(session.connection()))
    engine = create_engine(f"sqlite:///{tmp_path}/other.db")
    refused: list[str] = []

    @effect(name="other.charge", lease=30, unknown=stop)
    def charge(request: Charge, attempt: Attempt) -> str:
        return till.plain(request, attempt)

    def apply(_happened: Added, _session: Session) -> None:
        with pytest.raises(UnsafeSessionError, match="arm"):
            Effects(sessionmaker(engine), [charge]).run(charge, Charge(), key="k1")
        refused.append("refused")

    till.harness.deliver(till.harness.dispatcher(till.harness.handler(apply)))
    engine.dispose()
    assert (refused, till.sent) == (["refused"], [])


def test_two_values_of_which_none_could_be_recorded_are_heard_of(till: Till) -> None:
    """The first value stays in the row; the second attempt tells that there were two."""
    gates = [Gate(till.harness), Gate(till.harness)]

    def broken(_request: Charge, _value: str, _session: Session) -> None:
        raise ZeroDivisionError

    charge = till.effect(_waiting(till, gates), resend(within=HOUR), recorded=broken)
    first = till.overdue(charge, gates[0])
    second = till.harness.start(till.run, charge)
    gates[1].arrival()
    for gate in gates:
        gate.open()
    raised = [each.exception() for each in (first, second)]
    assert DoubleEffectError in {type(each) for each in raised}, raised
    assert (len(till.sent), till.row().evidence is None) == (2, False)


@pytest.mark.parametrize(
    ("dies", "other"),
    [(1, "pi_other"), (2, "pi_other"), (1, object())],
    ids=["the first", "the second", "the first, beside a value that cannot be stored"],
)
def test_a_second_value_and_its_mark_are_stored_together(till: Till, dies: int, other: Any) -> None:
    """Whichever COMMIT is the last one before a kill, no row has a second value that no list shows."""
    for number in count(1):
        key, gates = f"k{number}", {1: Gate(till.harness), 2: Gate(till.harness)}

        def body(request: Charge, attempt: Attempt, gates: dict[int, Gate] = gates) -> Any:
            till.plain(request, attempt)
            gates[attempt.number].stop()
            return "pi_late" if attempt.number == dies else other

        charge = till.effect(body, till.asks(NotDone()))
        attempts = {1: till.harness.start(till.run, charge, Charge(), key)}
        gates[1].arrival()
        till.pass_time(40)
        till.settle(charge)  # asks: it was not done
        attempts[2] = till.harness.start(till.run, charge, None, key)
        gates[2].arrival()
        gates[3 - dies].open()
        attempts[3 - dies].exception()
        with killed_after_commit(till, number) as left:
            gates[dies].open()
            ended = attempts[dies].exception()
        row = till.row(key)
        if b'"pi_late"' in (row.evidence, row.result):
            assert (row.evidence_outcome, row.processed_at) == (DOUBLE, None)
            assert row.error.startswith(f"two attempts at effect till.charge, key {key} were done: attempt ")
        if left[0] > 0:  # no COMMIT was left to die after
            assert (type(ended), row.evidence_outcome) == (DoubleEffectError, DOUBLE)
            return
        assert isinstance(ended, Killed)


@pytest.mark.parametrize("till", BLOCKING, indirect=True, ids=str)
@pytest.mark.parametrize("late", ["pi_late", "pi_2"])
def test_a_late_value_that_cannot_be_written_is_told(till: Till, late: str, caplog: pytest.LogCaptureFixture) -> None:
    """As a double if it is one, and in the log, because no list can have it."""
    gate, updates = Gate(till.harness), list[str]()
    charge = till.effect(till.body(late, "pi_2", gate=gate), resend(within=HOUR))
    first = till.overdue(charge, gate)
    assert till.settle(charge) == "1 done"

    @event.listens_for(till.harness.engine, "before_cursor_execute", retval=True)
    def fail(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> tuple[str, Any]:
        updates.extend([statement] if statement.startswith("UPDATE") else [])
        return (statement, parameters) if len(updates) < 2 else ("UPDATE no_such_table SET a = 1", ())

    gate.open()
    error = first.exception()
    event.remove(till.harness.engine, "before_cursor_execute", fail)
    double = late == "pi_late"
    assert type(error) is (DoubleEffectError if double else NotRecordedError), error
    said = "the row could not be marked, so no list may have it" if double else "could not keep the outcome either"
    assert said in str(error)
    assert "ERROR" in {each.levelname for each in caplog.records}
    assert (till.row().outcome, till.row().evidence) == (DONE, None)


@each_driver("postgresql", "mariadb", is_async=False, usual=True)
def test_an_outcome_between_look_and_write_is_seen(request: pytest.FixtureRequest, driver: Driver) -> None:
    """A late value is compared with the outcome that comes while it is kept, also at READ COMMITTED."""
    with till_on(request, driver, engine_isolation="READ COMMITTED") as till:
        gates = [Gate(till.harness), Gate(till.harness)]
        charge, both = till.effect(_waiting(till, gates), resend(within=HOUR)), [True]
        first = till.overdue(charge, gates[0])
        second = till.harness.start(till.run, charge)
        gates[1].arrival()

        @event.listens_for(till.harness.engine, "before_cursor_execute")
        def finish_first(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
            if statement.startswith("UPDATE") and "evidence=" in statement.replace("`", "") and both:
                both.clear()
                gates[1].open()
                assert second.result() == "pi_2"

        gates[0].open()
        assert isinstance(first.exception(), DoubleEffectError)
        assert (both, till.row().evidence_outcome) == ([], DOUBLE)


def test_a_late_attempt_that_sent_nothing_takes_the_question_back(till: Till) -> None:
    """Nobody has to decide any more: the effect is armed again."""
    gate = Gate(till.harness)
    charge = till.effect(till.body(NotDone(), gate=gate))
    till.arm(charge)
    first = till.overdue(charge, gate, None)
    assert till.settle(charge) == "1 stopped"
    gate.open()
    assert isinstance(first.exception(), NotDone)
    assert (till.row().stopped_at, till.row().first_sent_at) == (None, None)


def test_an_ask_that_would_never_ask_is_refused() -> None:
    """It is a fault of the program, and is told at once."""
    with pytest.raises(HandlerDefinitionError, match="never ask"):
        ask(lambda *_: None, after=HOUR, within=HOUR)
