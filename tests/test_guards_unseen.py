"""What no guard sees, so that the documentation can say so: these tests hold today's behaviour, which is wrong.

Each handler has added 1 (10 follow), and something became of its transaction that the library was not told.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from sqlalchemy import literal_column, select, text
from sqlalchemy.orm import Session

from databases import DRIVERS, Driver
from misbehaviour import execute_raw
from projector_dedup import Outcome, TransactionViolatedError
from rig import Durable, Rig, Total, add, outsides_fixture, rig_on_fixture  # noqa: F401  # fixtures


@dataclass(frozen=True)
class Unseen:
    """A misbehaviour that ends as `APPLIED`: what is durable then, and whether `strict=True` finds it out."""

    do: Callable[[Session], object]
    drivers: tuple[str, ...]
    durable: Durable
    strict_sees_it: bool


def forgets_its_changes(session: Session) -> None:
    """`expunge_all()` drops what was not flushed."""
    total = session.get_one(Total, "a")
    total.amount += 10
    session.expunge_all()


def hidden_rollback(session: Session) -> None:
    """COMMIT inside a piece of SQL that SQLAlchemy compiles; psycopg sends several statements as one."""
    session.execute(select(literal_column("1; rollback; begin; select 1")))
    session.execute(text("insert into total values ('a', 10)"))


def rollback_by_the_cursor_of_a_result(session: Session) -> None:
    """The one way to the driver that does not go through `connection.connection`."""
    cursor = session.execute(text("select 1")).cursor  # type: ignore[attr-defined]  # a CursorResult
    cursor.connection.rollback()
    cursor.connection.execute("BEGIN")
    session.execute(text("insert into total values ('a', 10)"))


def commit_by_the_cursor_of_a_result(session: Session) -> None:
    """The same way with a commit, which SQLite cannot tell from the transaction of the claim."""
    cursor = session.execute(text("select 1")).cursor  # type: ignore[attr-defined]  # a CursorResult
    cursor.connection.commit()
    cursor.connection.execute("BEGIN")
    session.execute(text("update total set amount = amount + 10"))


def commit_and_begin_below(session: Session) -> None:
    """SQLite cannot tell which transaction wrote a row. It matters if the handler fails later."""
    execute_raw(session, "COMMIT")
    execute_raw(session, "BEGIN")
    add(session, 10)


UNSEEN = [
    Unseen(forgets_its_changes, ("psycopg", "asyncpg", "sqlite3", "aiosqlite"), Durable(1, 1), strict_sees_it=False),
    Unseen(hidden_rollback, ("psycopg",), Durable(0, 10), strict_sees_it=True),
    Unseen(rollback_by_the_cursor_of_a_result, ("psycopg", "sqlite3"), Durable(0, 10), strict_sees_it=True),
    Unseen(commit_by_the_cursor_of_a_result, ("sqlite3",), Durable(1, 11), strict_sees_it=False),
    Unseen(commit_and_begin_below, ("sqlite3", "aiosqlite"), Durable(1, 11), strict_sees_it=False),
]
CASES = [
    pytest.param(driver, unseen, id=f"{driver}-{unseen.do.__name__}")
    for unseen in UNSEEN
    for driver in DRIVERS
    if driver.module in unseen.drivers
    and not (driver.is_async and unseen.do is rollback_by_the_cursor_of_a_result)  # its cursors are private there
]


@pytest.mark.parametrize(("driver", "unseen"), CASES)
def test_it_is_not_seen(driver: Driver, unseen: Unseen, rig_on: Callable[[Driver], Rig]) -> None:
    """The delivery says `APPLIED`, and what is durable is not what the handler was delivered for."""
    rig = rig_on(driver)

    def handler(session: Session) -> None:
        add(session)
        unseen.do(session)

    assert rig.deliver(handler).outcome is Outcome.APPLIED
    assert rig.durable() == unseen.durable
    rig.assert_nothing_is_left()


@pytest.mark.parametrize(("driver", "unseen"), CASES)
def test_strict_asks_the_server(driver: Driver, unseen: Unseen, rig_on: Callable[[Driver], Rig]) -> None:
    """`strict=True` finds out what lost the marker; what kept it, it cannot tell from a good handler."""
    rig = rig_on(driver)

    def handler(session: Session) -> None:
        add(session)
        unseen.do(session)

    if unseen.strict_sees_it:
        with pytest.raises(TransactionViolatedError):
            rig.deliver(handler, strict=True)
        assert rig.durable() == Durable(0, 0)
        assert rig.deliver(add, strict=True).outcome is Outcome.APPLIED
        assert rig.durable() == Durable(1, 1)
    else:
        assert rig.deliver(handler, strict=True).outcome is Outcome.APPLIED
        assert rig.durable() == unseen.durable
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("driver", [driver for driver in DRIVERS if driver.engine == "sqlite"], ids=str)
def test_a_commit_below_then_a_failure_reads_as_rolled_back_on_sqlite(
    driver: Driver, rig_on: Callable[[Driver], Rig]
) -> None:
    """After COMMIT and BEGIN on the driver the handler's error surfaces alone, and a redelivery is skipped."""
    rig = rig_on(driver)

    def handler(session: Session) -> None:
        add(session)
        commit_and_begin_below(session)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rig.deliver(handler)
    assert rig.durable() == Durable(1, 1)
    assert rig.deliver(add).outcome is Outcome.DUPLICATE


@pytest.mark.parametrize("driver", [driver for driver in DRIVERS if driver.engine == "postgresql"], ids=str)
def test_a_session_of_the_handlers_own_is_its_own(driver: Driver, rig_on: Callable[[Driver], Rig]) -> None:
    """What a handler writes through a second session commits by itself: a failure does not take it back."""
    rig = rig_on(driver)

    def handler(session: Session) -> None:
        add(session)
        with Session(session.get_bind()) as second:
            second.execute(text("insert into total values ('own', 5)"))
            second.commit()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rig.deliver(handler)
    assert rig.durable() == Durable(0, 5)


@pytest.mark.parametrize("driver", [driver for driver in DRIVERS if driver.engine == "sqlite"], ids=str)
def test_a_session_of_the_handlers_own_waits_for_itself_on_sqlite(
    driver: Driver, rig_on: Callable[[Driver], Rig]
) -> None:
    """There is one writer, and it is the unit of work: the second session gets "locked", and nothing is lost."""
    rig = rig_on(driver)

    def handler(session: Session) -> None:
        with Session(session.get_bind()) as second:
            second.execute(text("insert into total values ('own', 5)"))
            second.commit()

    with pytest.raises(Exception, match=r"locked|failing"):
        rig.deliver(handler)
    assert rig.durable() == Durable(0, 0)
    rig.assert_nothing_is_left()
