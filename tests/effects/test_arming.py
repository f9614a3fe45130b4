"""``arm`` is a row of the caller's transaction, in whatever handler; sending inside a handler is refused."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session, sessionmaker

from databases import Database
from effect_rig import TABLE, Charge, Payment, Till, tills
from kit import Added
from projector_dedup.commands import Call, command, default_command_tables
from projector_dedup.commands.runner import AsyncCommands, Commands
from projector_dedup.effects import Attempt, arm, effect, stop
from projector_dedup.errors import UnsafeSessionError
from projector_dedup.tables import default_tables

till = tills()


def _keys(till: Till) -> list[str]:
    rows = select(TABLE.c.message_id).order_by(TABLE.c.message_id)
    return list(till.harness.transact(lambda session: session.scalars(rows).all()))


def _create(till: Till, tables: Any) -> None:
    till.harness.transact(lambda session: tables.marker.metadata.create_all(session.connection()))


@pytest.mark.parametrize("fails", [False, True], ids=["applied", "rolled back"])
def test_a_projector_arms_once_however_often_it_is_delivered(till: Till, fails: bool) -> None:
    """Its marker keeps it from running again; a rollback takes the row with it."""
    _create(till, default_tables)
    charge = till.effect()
    ends = [ZeroDivisionError()] if fails else []

    def apply(_happened: Added, session: Session) -> None:
        arm(session, charge, Charge(), key="k1")
        session.add(Payment(order="o1", what="asked for"))
        if ends:
            raise ends.pop()

    dispatcher = till.harness.dispatcher(till.harness.handler(apply))
    if fails:
        with pytest.raises(ZeroDivisionError):
            till.harness.deliver(dispatcher)
        assert _keys(till) == []
    for _ in range(3):
        till.harness.deliver(dispatcher)
    assert (_keys(till), till.sent) == (["0:k1"], [])
    assert till.settle(charge) == "1 done"
    assert till.payments() == [("o1", "asked for"), ("o1", "pi_1")]


def test_a_command_arms_under_a_key_of_its_own(till: Till) -> None:
    """Whoever asks again gets the recorded answer, and nothing is armed again."""
    _create(till, default_command_tables)
    charge = till.effect()

    def place(order: Charge, call: Call) -> str:
        session = getattr(call.session, "sync_session", call.session)
        arm(session, charge, order, key=call.key_for("charge"))
        return call.key_for("charge")

    operation = command(name="till.order")(till.function(place))
    commands: Any = (AsyncCommands if till.harness.asynchronous else Commands)(till.harness.factory)
    answers = [till.harness.run(commands.handle, operation, Charge(), key="c1").result for _ in range(3)]
    assert _keys(till) == [f"0:{answers[0]}"]
    assert till.settle(charge) == "1 done"


def test_what_follows_is_armed_in_recorded(till: Till) -> None:
    """The receipt is armed together with the payment, once."""
    receipt = till.effect(name="till.receipt")

    def recorded(request: Charge, value: str, session: Session) -> None:
        session.add(Payment(order=request.order, what=value))
        arm(session, receipt, request, key=f"receipt:{request.order}")

    charge = till.effect(recorded=recorded)
    till.run(charge)
    till.run(charge)
    assert _keys(till) == ["0:k1", "0:receipt:o1"]
    assert till.settle(charge, receipt) == "1 done"
    assert till.payments() == [("o1", "pi_1"), ("o1", "pi_2")]


@pytest.mark.parametrize("where", ["projector", "recorded", "body"])
@pytest.mark.parametrize("call", ["run", "settle"])
def test_sending_inside_a_handler_is_refused(till: Till, where: str, call: str) -> None:
    """What was sent would stay sent when the handler is rolled back."""
    _create(till, default_tables)
    inner = till.effect(name="till.inner")
    effects: Any = till.effects(inner)
    refused: list[str] = []

    def send() -> None:
        arguments = (inner, Charge(), "k2", None, 0) if call == "run" else (1,)
        with pytest.raises(UnsafeSessionError, match="inside a handler") as told:
            getattr(effects, f"_{call}")(*arguments)
        refused.append(str(told.value))

    def body(request: Charge, attempt: Attempt) -> str:
        if where == "body":
            send()
        return till.plain(request, attempt)

    def recorded(_request: Charge, _value: str, _session: Session) -> None:
        if where == "recorded":
            send()

    if where == "projector":
        dispatcher = till.harness.dispatcher(till.harness.handler(lambda *_: send()))
        till.harness.deliver(dispatcher)
    else:
        till.run(till.effect(body, recorded=recorded))
    assert (len(refused), _keys(till)) == (1, [] if where == "projector" else ["0:k1"])


def test_no_connection_is_held_while_the_effect_runs(till: Till) -> None:
    """With a pool of one connection, the body and the ask function can use it."""
    seen: list[int] = []
    pool: Any = till.harness.engine.pool

    def body(request: Charge, attempt: Attempt) -> str:
        seen.append(pool.checkedout())
        return till.plain(request, attempt)

    charge = till.effect(body)
    till.arm(charge)
    till.run(charge, key="k2")
    till.settle(charge)
    assert seen == [0, 0]


def test_a_session_of_another_transaction_arms_nothing_inside_a_handler(till: Till) -> None:
    """What it wrote would stay when the handler is rolled back."""
    _create(till, default_tables)
    charge = till.effect()
    other = sessionmaker(till.harness.engine)

    def apply(_happened: Added, _session: Session) -> None:
        with other() as session, pytest.raises(UnsafeSessionError, match="inside a handler"):
            arm(session, charge, Charge(), key="k1")

    till.harness.deliver(till.harness.dispatcher(till.harness.handler(apply)))
    assert _keys(till) == []


def test_a_table_on_another_engine_is_refused(sqlite: Database, tmp_path: Path) -> None:
    """The row could not commit together with the writes of the session."""
    engine, other = create_engine(sqlite.url()), create_engine(f"sqlite:///{tmp_path / 'other.db'}")
    TABLE.metadata.create_all(other)

    @effect(name="till.charge", lease=30, unknown=stop)
    def charge(_request: Charge, _attempt: Attempt) -> None: ...

    with (
        Session(engine, binds={TABLE: other}) as session,
        pytest.raises(UnsafeSessionError, match="effect table is bound to another engine"),
    ):
        arm(session, charge, Charge(), key="k1")
