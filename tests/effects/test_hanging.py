"""A process that hangs does not stop the effects of others: `settle` passes over the row that it holds, and says so."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event, select, text, update
from sqlalchemy.orm import Session, sessionmaker

from databases import USUAL_DRIVERS
from effect_rig import TABLE, Charge, Payment, Till, book, tills
from kit import Gate
from projector_dedup.dialects import postgresql
from projector_dedup.effects import (
    Attempt,
    Effects,
    LeaseLostError,
    NotRecordedError,
    arm,
    default_effect_tables,
    effect,
    resend,
    stop,
)
from projector_dedup.errors import InProgress
from projector_dedup.options import RetryPolicy

till = tills([driver for driver in USUAL_DRIVERS if driver.engine != "sqlite"])  # which has one writer
DAY = timedelta(days=1)


def hanging(till: Till, recorded: Callable[[Gate, Session], None]) -> tuple[Any, Gate, Future[Any]]:
    """Return an effect whose process hangs in ``recorded`` past its lease, the gate that ends this, and its result."""
    sending, hangs = Gate(till.harness), Gate(till.harness)

    def body(request: Charge, attempt: Any) -> str:
        value = till.plain(request, attempt)
        if request.order == "hangs":
            sending.stop()
        return value

    def record(request: Charge, value: str, session: Session) -> None:
        if request.order == "hangs":
            recorded(hangs, session)
        book(request, value, session)

    charge = till.effect(body, resend(within=DAY), recorded=record)
    attempt = till.harness.start(till.run, charge, Charge("hangs"), "hangs")
    sending.arrival()
    till.pass_time(40)
    sending.open()
    hangs.arrival()
    return charge, hangs, attempt


def test_a_row_that_somebody_holds_is_passed_over(till: Till, caplog: pytest.LogCaptureFixture) -> None:
    """The others are sent, and the limit counts them alone; afterwards the effect is recorded once."""
    charge, hangs, attempt = hanging(till, lambda gate, _: gate.stop())
    for number in range(5):
        till.arm(charge, Charge(f"o{number}"), key=f"o{number}")
    caplog.set_level(logging.WARNING, "projector_dedup")
    assert till.settle(charge, limit=5) == "5 done, 1 held"
    assert [record.getMessage() for record in caplog.records] == [
        "effect till.charge, key hangs: passed over, because another transaction holds its row"
    ]
    hangs.open()
    assert attempt.result() == "pi_1"
    assert till.settle(charge) == ""
    assert (len(till.sent), len(till.payments())) == (6, 6)


def test_run_says_that_the_row_is_held_where_it_would_record_a_kept_value(till: Till) -> None:
    """It does not wait for a transaction that may hang."""
    broken = [True]

    def recorded(request: Charge, value: str, session: Session) -> None:
        if broken:
            raise ZeroDivisionError
        book(request, value, session)

    charge = till.effect(recorded=recorded)
    with pytest.raises(NotRecordedError):
        till.run(charge)
    broken.clear()
    gate = Gate(till.harness)

    def hold(session: Session) -> None:
        session.execute(select(TABLE).with_for_update())
        gate.stop()

    holder = till.harness.start(till.harness.transact, hold)
    gate.arrival()
    with pytest.raises(InProgress, match="another transaction holds the row of effect"):
        till.run(charge, None)
    gate.open()
    holder.result()
    assert till.run(charge) == "pi_1"
    assert (len(till.sent), till.payments()) == (1, [("o1", "pi_1")])


def test_a_row_of_the_user_that_somebody_holds_ends_in_a_named_line(
    till: Till, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two effects write one row of the user: the second waits as long as the server's limit, and the rest is sent."""
    monkeypatch.setattr(postgresql, "_LIMIT_WAITS", text("SELECT set_config('lock_timeout', '1s', true)"))

    def limited(connection: Any, *_: object) -> None:
        cursor = connection.cursor()
        cursor.execute("SET innodb_lock_wait_timeout = 1")
        cursor.close()

    if till.harness.engine.dialect.name != "postgresql":
        event.listen(till.harness.engine, "connect", limited)
    till.harness.transact(lambda session: session.add(Payment(number=1, order="shared", what="")))

    def write_shared(session: Session) -> None:
        session.execute(update(Payment).where(Payment.number == 1).values(what="written"))

    def hang(gate: Gate, session: Session) -> None:
        write_shared(session)
        gate.stop()

    charge, hangs, attempt = hanging(till, hang)

    def both(request: Charge, value: str, session: Session) -> None:
        if request.order == "both":
            write_shared(session)
        book(request, value, session)

    other = till.effect(name="till.other", recorded=both)
    for order in ("both", "o1", "o2"):
        till.arm(other, Charge(order), key=order)
    caplog.set_level(logging.WARNING, "projector_dedup")
    assert till.settle(charge, other) == "2 done, 1 failed, 1 held"
    assert "effect till.other, key both: could not be settled" in caplog.text
    hangs.open()
    assert attempt.result() == "pi_1"
    till.pass_time(31)
    assert till.settle(charge, other) == "1 done"
    assert (len(till.sent), len(till.payments())) == (4, 5)


def test_a_process_that_hangs_in_its_function_holds_nothing(till: Till) -> None:
    """Its effect is taken over, and the rest is sent."""
    gate = Gate(till.harness)

    def body(request: Charge, attempt: Any) -> str:
        till.sent.append(attempt.key)
        if len(till.sent) == 1:
            gate.stop()
        return request.order

    charge = till.effect(body, resend(within=DAY))
    attempt = till.overdue(charge, gate)
    till.arm(charge, Charge("o2"), key="o2")
    assert till.settle(charge) == "2 done"
    gate.open()
    assert isinstance(attempt.exception(), LeaseLostError)
    assert till.payments() == [("o1", "o1"), ("o2", "o2")]


def test_on_sqlite_a_process_that_hangs_ends_in_a_named_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has one writer: nothing is sent until its transaction ends, and nothing is lost."""
    engine = create_engine(f"sqlite:///{tmp_path}/till.db", connect_args={"timeout": 0.1})
    charge = effect(name="charge", lease=30, unknown=stop)(_number)
    default_effect_tables.marker.metadata.create_all(engine)
    factory = sessionmaker(engine)
    effects = Effects(factory, [charge], retry=RetryPolicy(attempts=2))
    with factory.begin() as session:
        arm(session, charge, "o1", key="k1")
    with engine.connect() as hanging:
        hanging.exec_driver_sql("BEGIN IMMEDIATE")
        assert effects.settle().failed == 1
    assert "effect charge, key k1: could not be settled" in caplog.text
    assert "database is locked" in caplog.text
    assert effects.settle().done == 1
    engine.dispose()


def _number(_order: str, _attempt: Attempt) -> int:
    return 1
