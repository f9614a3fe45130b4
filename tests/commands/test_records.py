"""The record of a command: written once, with its writes, by nobody but the library; on every driver."""

import pytest
from sqlalchemy import delete, event, insert, text, update
from sqlalchemy.exc import DBAPIError

from command_rig import Desk, Placed, PlaceOrder, desks, place
from databases import DRIVERS
from projector_dedup import Outcome
from projector_dedup.commands import Call, Rejected, default_command_tables
from projector_dedup.errors import TransactionViolatedError
from projector_dedup.maintenance.cleanup import cleanup

RECORD = default_command_tables.marker


desk = desks(DRIVERS)


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
        assert len(desk.records()) == 2
        cleanup(desk.harness.engine, retention_hours=168, tables=default_command_tables)
        assert [key for key, *_ in desk.records()] == ["0:young"]
        assert desk.handle(operation, key="young").replayed
        assert not desk.handle(operation, key="old").replayed
