"""The record of a command: written once, with its writes, by nobody but the library; on every driver."""

from collections.abc import Callable

import pytest
from sqlalchemy import create_engine, delete, event, insert, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from command_rig import Balance, Base, Desk, Placed, PlaceOrder, desks, place
from databases import DRIVERS, USUAL
from misbehaviour import execute_raw
from projector_dedup import Outcome, TransactionViolatedError
from projector_dedup.commands import Call, Rejected, default_command_tables
from projector_dedup.maintenance.cleanup import cleanup
from projector_dedup.maintenance.stats import stats

RECORD = default_command_tables.marker


desk = desks(DRIVERS)
on_postgresql = desks([driver for driver in DRIVERS if driver.engine == "postgresql"], "on_postgresql")


def test_a_finished_record_is_never_written(desk: Desk) -> None:
    """Neither by those who ask again, nor by a rejection that comes late; a trigger on every desk refuses it."""
    desk.handle(desk.operation(), key="k0")
    with pytest.raises(DBAPIError, match="a finished record was written"):  # or the trigger would prove nothing
        desk.harness.transact(lambda session: session.execute(update(RECORD).values(codec="x")))

    def refuse(order: PlaceOrder, call: Call) -> Placed:
        place(order, call)
        if order.amount == 2:
            raise Rejected("no")
        return Placed(0, 0)

    operation = desk.operation(refuse)
    for amount, key in ((1, "k1"), (2, "k2"), (1, "k1"), (2, "k2")):
        desk.handle(operation, PlaceOrder(amount), key=key)
    assert [(key, outcome) for key, _, outcome in desk.records()] == [("0:k0", 1), ("0:k1", 1), ("0:k2", 2)]


@pytest.mark.parametrize("attack", ["delete", "outcome"])
def test_a_handler_that_touches_its_own_record_is_found_out(desk: Desk, attack: str) -> None:
    """Nothing commits: a caller would get no answer, or the handler's own."""

    def tamper(order: PlaceOrder, call: Call) -> Placed:
        placed = place(order, call)
        call.session.execute(delete(RECORD) if attack == "delete" else update(RECORD).values(outcome=1))
        return placed

    with pytest.raises(TransactionViolatedError, match="row of the claim"):
        desk.handle(desk.operation(tamper))
    assert (desk.orders(), desk.records()) == ([], [])
    assert not desk.handle(desk.operation()).replayed


def test_the_record_goes_where_the_claim_was_made(desk: Desk) -> None:
    """Whatever schema map the handler gives its connection."""

    def move(order: PlaceOrder, call: Call) -> Placed:
        placed = place(order, call)
        call.session.flush()
        call.session.connection().execution_options(schema_translate_map={None: "elsewhere"})
        return placed

    operation = desk.operation(move)
    assert desk.handle(operation).result == desk.handle(operation).result
    assert (desk.orders(), len(desk.records())) == (["k1"], 1)


def as_text(session: Session, sql: str) -> None:
    """By SQLAlchemy."""
    session.execute(text(sql))


@pytest.mark.parametrize(
    ("execute", "schema", "strict"),
    [
        pytest.param(as_text, "nothing", False, id="by SQLAlchemy"),
        pytest.param(execute_raw, "nothing", True, id="by the driver, strict"),
        pytest.param(as_text, "elsewhere", True, id="elsewhere, strict"),
        pytest.param(execute_raw, "elsewhere", False, id="elsewhere, by the driver"),
    ],
)
def test_a_handler_that_chooses_another_schema_for_the_rest(
    on_postgresql: Desk, execute: Callable[[Session, str], object], schema: str, strict: bool
) -> None:
    """The record is written behind it, and would go elsewhere: refused with words, and nothing is applied anywhere."""
    desk = on_postgresql
    owner = create_engine(desk.harness.subject.url.set(drivername=USUAL["postgresql"]))
    with owner.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {schema}"))
        if schema == "elsewhere":
            mapped = connection.execution_options(schema_translate_map={None: schema})
            for metadata in (Base.metadata, RECORD.metadata):
                metadata.create_all(mapped)
            mapped.execute(insert(Balance).values(customer="alice", amount=5))

    def choose(order: PlaceOrder, call: Call) -> Placed:
        placed = place(order, call)
        execute(call.session, f"SET LOCAL search_path TO {schema}")
        return placed

    with pytest.raises(TransactionViolatedError, match="chose another schema"):
        desk.handle(desk.operation(choose), commands=desk.commands(strict=strict))
    if schema == "elsewhere":
        with owner.connect() as connection:
            assert not connection.scalar(text("SELECT count(*) FROM elsewhere.processed_command WHERE outcome = 1"))
            assert connection.scalar(text("SELECT amount FROM elsewhere.desk_balance")) == 5
    owner.dispose()
    assert (desk.orders(), desk.records(), desk.spent()) == ([], [], 0)
    assert not desk.handle(desk.operation()).replayed


def test_a_column_of_the_records_that_gets_another_type(on_postgresql: Desk) -> None:
    """What a driver has prepared is outdated then, and nothing is lost: the recorded answers are given."""
    desk = on_postgresql
    operation, alter = desk.operation(), 'ALTER TABLE processed_command ALTER COLUMN codec TYPE varchar(80) COLLATE "C"'
    first, *_ = [desk.handle(operation, key="k1") for _ in range(7)]  # drivers prepare what comes again
    desk.harness.transact(lambda session: session.execute(text(alter)))
    assert [desk.handle(operation, key="k1").result for _ in range(3)] == [first.result] * 3
    assert not desk.handle(operation, key="k2").replayed
    assert desk.orders() == ["k1", "k2"]


def test_a_listener_that_writes_before_the_commit_writes_with_it(desk: Desk) -> None:
    """Its statement is in the transaction of the record, which then takes no COMMIT along."""
    engine = desk.harness.engine
    noted = insert(default_command_tables.state).values(key="noted", value="by a listener")
    operation = desk.operation()

    def note(connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "processed_command SET" in statement:
            connection.execute(noted)  # type: ignore[attr-defined]

    event.listen(engine, "after_cursor_execute", note)
    try:
        assert desk.handle(operation).outcome is Outcome.APPLIED
    finally:
        event.remove(engine, "after_cursor_execute", note)
    state = desk.harness.transact(lambda session: session.execute(default_command_tables.state.select()).all())
    assert [tuple(row) for row in state] == [("noted", "by a listener")]
    assert (desk.orders(), len(desk.records())) == (["k1"], 1)


def test_a_commit_that_the_database_refuses_is_none(desk: Desk) -> None:
    """A constraint that is deferred to COMMIT fails the command, and nothing is recorded."""
    if desk.harness.engine.dialect.name != "postgresql":
        pytest.skip("constraints are not deferred to COMMIT here, or only foreign keys are")
    desk.harness.transact(
        lambda session: session.execute(
            text("ALTER TABLE desk_order ADD CONSTRAINT one_note UNIQUE (note) DEFERRABLE INITIALLY DEFERRED")
        )
    )
    operation = desk.operation()
    desk.handle(operation, PlaceOrder(note="x"), key="k1")
    with pytest.raises(DBAPIError, match="one_note"):
        desk.handle(operation, PlaceOrder(note="x"), key="k2")
    assert (desk.orders(), [key for key, *_ in desk.records()]) == (["x"], ["0:k1"])


def test_records_are_cleaned_up_as_markers_are(desk: Desk) -> None:
    """A key that comes again after that is a new command; until then it is answered."""
    operation = desk.operation()
    desk.handle(operation, key="old")
    desk.age()
    assert desk.handle(operation, key="old").replayed
    desk.handle(operation, key="young")
    if not desk.harness.asynchronous:
        assert stats(desk.harness.engine, tables=default_command_tables).markers == 2
        cleanup(desk.harness.engine, retention_hours=168, tables=default_command_tables)
        assert [key for key, *_ in desk.records()] == ["0:young"]
        assert desk.handle(operation, key="young").replayed
        assert not desk.handle(operation, key="old").replayed
