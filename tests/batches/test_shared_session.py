"""`@projector(shared_session=True)`: the messages of a batch leave in one session what they leave one by one."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, delete, func, select, text, update
from sqlalchemy.orm import Session, sessionmaker

from few_rows import Total, engine_of, sent_by, totals
from projector_dedup import BatchFailed, Dispatcher, Message, Outcome, on, projector

ADD = "UPDATE few_total SET amount = amount + 10 WHERE id = 1"
SUM = "SELECT SUM(amount) FROM few_total"
TABLE: Any = Total.__table__

Body = Callable[[Session], object]


@pytest.fixture(name="engine", params=["sqlite", "postgresql", "mariadb"])
def engine_fixture(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The tables, and rows of zeros."""
    with engine_of(request.getfixturevalue(request.param)) as engine:
        yield engine


@pytest.fixture(name="dispatcher")
def dispatcher_fixture(engine: Engine) -> Dispatcher:
    """Calls functions of a session, the bodies of messages, in a session that they share."""

    @projector(idempotent=True, name="sharing", shared_session=True)
    @on("call")
    def call(body: Body, session: Session) -> None:
        body(session)

    return Dispatcher(sessionmaker(engine), call)


def batch(*bodies: Body) -> list[Message]:
    """A message for each."""
    return [Message(f"m{number}", body, "call") for number, body in enumerate(bodies)]


def add(session: Session) -> None:
    """One more for row 1."""
    session.get_one(Total, 1).amount += 1


def _fetched(session: Session, sql: str) -> int:
    cursor: Any = session.connection().connection.cursor()
    cursor.execute(sql)
    return int(cursor.fetchone()[0])


READING: dict[str, Callable[[Session], Any]] = {
    "text": lambda session: session.scalar(text(SUM)),
    "core": lambda session: session.connection().scalar(select(func.sum(TABLE.c.amount))),
    "driver": lambda session: _fetched(session, SUM),
}
WRITING: dict[str, Body] = {
    "text": lambda session: session.execute(text(ADD)),
    "core": lambda session: session.connection().execute(
        update(TABLE).where(TABLE.c.id == 1).values(amount=TABLE.c.amount + 10)
    ),
    "driver": lambda session: session.connection().connection.cursor().execute(ADD),
}


def test_rows_stay_and_are_written_once(engine: Engine, dispatcher: Dispatcher) -> None:
    """One SELECT and one UPDATE for many messages on a row, also if the first of them change nothing."""

    def look(session: Session) -> None:
        session.get_one(Total, 1)

    with sent_by(engine) as sent:
        dispatcher.deliver_batch(batch(look, look, *[add] * 5))
    assert [each.split()[0] for each in sent if "few_total" in each] == ["SELECT", "UPDATE"]
    assert totals(engine) == [0, 5, 0, 0]


@pytest.mark.parametrize("how", READING)
def test_a_statement_sees_what_earlier_messages_have_changed(engine: Engine, dispatcher: Dispatcher, how: str) -> None:
    """SQL text, Core and the driver's cursor find changes that nothing has flushed yet."""
    found: list[int] = []
    dispatcher.deliver_batch(batch(add, add, lambda session: found.append(READING[how](session)), add))
    assert found == [2]
    assert totals(engine) == [0, 3, 0, 0]


@pytest.mark.parametrize("how", WRITING)
def test_what_a_statement_writes_is_seen_by_later_messages(engine: Engine, dispatcher: Dispatcher, how: str) -> None:
    """No message overwrites what SQL text, Core or the driver's cursor has written."""
    dispatcher.deliver_batch(batch(add, WRITING[how], add))
    assert totals(engine) == [0, 12, 0, 0]


def test_a_deletion_is_seen_by_the_next_message(engine: Engine, dispatcher: Dispatcher) -> None:
    """The next message does not get the deleted instance, and may add the row again."""

    def remove(session: Session) -> None:
        session.delete(session.get_one(Total, 1))

    def add_anew(session: Session) -> None:
        if session.get(Total, 1) is None:
            session.add(Total(id=1, amount=50))

    dispatcher.deliver_batch(batch(add, remove, add_anew, add))
    assert totals(engine) == [0, 51, 0, 0]


def test_a_poison_message_is_found_and_takes_no_other_with_it(engine: Engine, dispatcher: Dispatcher) -> None:
    """Neither a handler that fails, nor one whose change the database refuses when it is written."""

    def fails(session: Session) -> None:
        add(session)
        raise ValueError

    def writes_nonsense(session: Session) -> None:
        session.get_one(Total, 1).amount = None  # type: ignore[assignment]  # which the column refuses

    with pytest.raises(BatchFailed) as failed:
        dispatcher.deliver_batch(batch(add, add, fails, add, writes_nonsense, add))
    poisoned = [each.outcome is Outcome.FAILED for each in failed.value.deliveries]
    assert poisoned == [False, False, True, False, True, False]
    assert totals(engine) == [0, 4, 0, 0]


# What `deliver` and (a) do, too ------------------------------------------------------------------------------------


def test_a_single_message_has_a_session_like_any_other(engine: Engine, dispatcher: Dispatcher) -> None:
    """A row that nobody refers to any more is read again behind a statement that writes."""

    def adds_by_text(session: Session) -> None:
        add(session)
        session.flush()
        WRITING["text"](session)
        add(session)

    dispatcher.deliver_batch(batch(adds_by_text))
    dispatcher.deliver(Message("alone", adds_by_text, "call"))
    assert totals(engine) == [0, 24, 0, 0]


def test_a_cursor_that_was_taken_before_the_row_was_read(engine: Engine, dispatcher: Dispatcher) -> None:
    """Later messages read again what the driver's cursor may have written meanwhile."""

    def writes_late(session: Session) -> None:
        cursor: Any = session.connection().connection.cursor()
        session.get_one(Total, 1)
        cursor.execute(ADD)

    dispatcher.deliver_batch(batch(add, writes_late, add))
    assert totals(engine) == [0, 12, 0, 0]


def test_a_row_that_is_deleted_by_a_statement_and_added_again(engine: Engine, dispatcher: Dispatcher) -> None:
    """Later messages get the instance of the new row, not that of the deleted one."""

    def replace(session: Session) -> None:
        session.execute(delete(Total).where(Total.id == 1))
        session.add(Total(id=1, amount=50))

    dispatcher.deliver_batch(batch(add, replace, add))
    assert totals(engine) == [0, 51, 0, 0]


DROPPING: dict[str, Body] = {
    "expire": lambda session: session.expire(session.get_one(Total, 1)),
    "expire_all": lambda session: session.expire_all(),
    "refresh": lambda session: session.refresh(session.get_one(Total, 1)),
    "expunge": lambda session: session.expunge(session.get_one(Total, 1)),
    "expunge_all": lambda session: session.expunge_all(),
}


@pytest.mark.parametrize("how", DROPPING)
def test_what_drops_changes_is_applied_alone(engine: Engine, dispatcher: Dispatcher, how: str) -> None:
    """The handler drops its own changes, as it wants, and not those of earlier messages."""

    def drop(session: Session) -> None:
        add(session)
        DROPPING[how](session)

    dispatcher.deliver_batch(batch(add, drop, add))
    assert totals(engine) == [0, 2, 0, 0]


def test_a_row_that_was_read_in_a_savepoint_that_was_rolled_back(engine: Engine, dispatcher: Dispatcher) -> None:
    """Later messages read it again, as the savepoint has left it."""

    def read_and_roll_back(session: Session) -> None:
        with session.connection().begin_nested() as savepoint:
            WRITING["core"](session)
            session.get_one(Total, 1)
            savepoint.rollback()

    dispatcher.deliver_batch(batch(add, read_and_roll_back, add))
    assert totals(engine) == [0, 2, 0, 0]


def test_statements_see_earlier_messages_without_autoflush(engine: Engine) -> None:
    """With `no_autoflush` too: SQLAlchemy would not flush, and the sum would lack what earlier messages added."""
    sums: list[int] = []

    def look(session: Session) -> None:
        with session.no_autoflush:
            sums.append(int(session.scalar(select(func.sum(Total.amount))) or 0))

    @projector(idempotent=True, name="unflushed", shared_session=True)
    @on("call")
    def call(body: Body, session: Session) -> None:
        body(session)

    Dispatcher(sessionmaker(engine, autoflush=False), call).deliver_batch(batch(add, look, add, look))
    assert sums == [1, 2]
