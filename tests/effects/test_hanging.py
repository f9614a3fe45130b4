"""A process that hangs does not stop the effects of others: `settle` passes over the row that it holds, and says so."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event, select, text, update
from sqlalchemy.orm import Session, sessionmaker

from databases import USUAL_DRIVERS, Driver, each_driver
from effect_rig import TABLE, Charge, Payment, Till, book, till_on, tills
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
from projector_dedup.maintenance.check import check
from projector_dedup.maintenance.effects import advise_effects, find_effect, find_effects
from projector_dedup.maintenance.stats import gauges
from projector_dedup.options import RetryPolicy

till = tills([driver for driver in USUAL_DRIVERS if driver.engine != "sqlite"])  # which has one writer
DAY = timedelta(days=1)
SERIALIZABLE = {
    "engine": {"engine_isolation": "SERIALIZABLE"},
    "option": {"option_isolation": "SERIALIZABLE"},
    "server": {},
}
"""Who chooses the level: ``create_engine``, ``execution_options``, or the server by its default."""


@contextmanager
def serializable(request: pytest.FixtureRequest, driver: Driver, chosen_by: str) -> Iterator[Till]:
    """Return a till on MariaDB at SERIALIZABLE, where a plain SELECT locks what it reads. It waits for a second."""
    variable = "transaction_isolation" if request.getfixturevalue("mariadb").is_mysql else "tx_isolation"
    level = f", {variable} = 'SERIALIZABLE'" if chosen_by == "server" else ""
    settings = {"connect_args": {"init_command": f"SET SESSION innodb_lock_wait_timeout = 1{level}"}}
    with till_on(request, driver, engine_arguments=settings, **SERIALIZABLE[chosen_by]) as till:
        yield till


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


@each_driver("mariadb")
@pytest.mark.parametrize("chosen_by", SERIALIZABLE)
def test_it_is_passed_over_at_serializable(
    request: pytest.FixtureRequest, driver: Driver, chosen_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The library reads the due rows at a level at which a SELECT locks nothing."""
    with serializable(request, driver, chosen_by) as till:
        caplog.clear()  # of what the driver says about the tables
        test_a_row_that_somebody_holds_is_passed_over(till, caplog)


@each_driver("mariadb", is_async=False, usual=True)
@pytest.mark.parametrize("chosen_by", SERIALIZABLE)
def test_nobody_who_looks_waits_for_it(request: pytest.FixtureRequest, driver: Driver, chosen_by: str) -> None:
    """`list`, `show`, `check --effects` and the gauges read the row while somebody holds it."""
    with serializable(request, driver, chosen_by) as till:
        _, hangs, attempt = hanging(till, lambda gate, _: gate.stop())
        engine, tables = till.harness.engine, default_effect_tables
        if chosen_by == "option":
            engine = engine.execution_options(isolation_level="SERIALIZABLE")
        assert [each.key for each in find_effects(engine)] == ["hangs"]
        assert find_effect(engine, "hangs").attempt == 1
        assert gauges(engine, tables=tables).unknown == 1
        assert [each.problem for each in advise_effects(engine)] == ["effects that may or may not have been done: 1"]
        assert [each for each in check(engine, tables=tables) if each.fatal] == []
        hangs.open()
        assert attempt.result() == "pi_1"


@each_driver("mariadb", usual=True)
def test_a_transaction_that_a_listener_began_keeps_its_level(request: pytest.FixtureRequest, driver: Driver) -> None:
    """The server refuses another level then: `settle` works as it did."""
    with till_on(request, driver, engine_isolation="SERIALIZABLE") as till:
        charge = till.effect()
        till.arm(charge)

        @event.listens_for(till.harness.engine, "engine_connect")
        def begin(connection: Any) -> None:
            connection.execute(select(Payment.number)).all()

        assert till.settle(charge) == "1 done"


def test_run_says_that_the_row_is_held_where_it_would_record_a_kept_value(till: Till) -> None:
    """It does not wait for a transaction that may hang."""
    if till.harness.subject.is_mysql:
        pytest.skip("at SERIALIZABLE it waits as long as the server permits")
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
