"""What no guard sees, so that the documentation can say so: these tests hold today's behaviour, which is wrong.

Each handler has added 1 (10 follow), and something became of its transaction that the library was not told.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from sqlalchemy import literal_column, select, text
from sqlalchemy.orm import Session

from databases import DRIVERS, SERVERS, each_driver
from misbehaviour import execute_raw
from projector_dedup import Outcome
from projector_dedup.errors import RetriesExhaustedError, TransactionViolatedError
from projector_dedup.options import RetryPolicy
from rig import NOTHING, ONCE, Durable, Rig, Total, add


@dataclass(frozen=True)
class Unseen:
    """A misbehaviour that ends as `APPLIED`: what is durable then, and what is if `strict=True` finds it out."""

    do: Callable[[Session], object]
    drivers: tuple[str, ...]
    durable: Durable
    strict: Durable | None


def forgets_its_changes(session: Session) -> None:
    """`expunge_all()` drops what was not flushed."""
    total = session.get_one(Total, "a")
    total.amount += 10
    session.expunge_all()


def hidden(ends: str, then: str) -> Callable[[Session], None]:
    """A piece of SQL that SQLAlchemy compiles; these drivers send several statements as one."""

    def do(session: Session) -> None:
        session.execute(select(literal_column(f"1; {ends}; begin; select 1"))).all()
        session.execute(text(then))

    return do


def by_the_cursor_of_a_result(ends: str, then: str, *, begins: bool = True) -> Callable[[Session], None]:
    """The one way to the driver that does not go through `connection.connection`.

    Without BEGIN the other drivers see that no transaction is open; mysqlclient cannot tell.
    """

    def do(session: Session) -> None:
        connection = session.execute(text("select 1")).cursor.connection  # type: ignore[attr-defined]  # a CursorResult
        getattr(connection, ends)()
        if begins:
            connection.cursor().execute("BEGIN")
        session.execute(text(then))

    return do


INSERT, UPDATE = "insert into total values ('a', 10)", "update total set amount = amount + 10"
commit_by_the_cursor_of_a_result = by_the_cursor_of_a_result("commit", UPDATE)
SEVERAL_AS_ONE = ("psycopg", "psycopg2", "MySQLdb", "asyncmy", "aiomysql")
HAVE_CURSORS = ("psycopg", "psycopg2", "sqlite3", "pymysql", "MySQLdb")
BY_CURSOR = by_the_cursor_of_a_result
UNSEEN = {
    "forgets_its_changes": Unseen(forgets_its_changes, tuple(each.module for each in DRIVERS), ONCE, strict=None),
    # ROLLBACK or COMMIT inside a piece of SQL; a COMMIT matters if the handler fails later.
    "hidden_rollback": Unseen(hidden("rollback", INSERT), SEVERAL_AS_ONE, Durable(0, 10), strict=NOTHING),
    "hidden_commit": Unseen(hidden("commit", UPDATE), SEVERAL_AS_ONE, Durable(1, 11), strict=ONCE),
    "rollback_by_the_cursor_of_a_result": Unseen(
        BY_CURSOR("rollback", INSERT), HAVE_CURSORS, Durable(0, 10), strict=NOTHING
    ),
    "commit_by_the_cursor_of_a_result": Unseen(
        commit_by_the_cursor_of_a_result, HAVE_CURSORS, Durable(1, 11), strict=ONCE
    ),
    "rollback_alone_by_the_cursor_of_a_result": Unseen(
        BY_CURSOR("rollback", INSERT, begins=False), ("MySQLdb",), Durable(0, 10), strict=NOTHING
    ),
    "commit_alone_by_the_cursor_of_a_result": Unseen(
        BY_CURSOR("commit", UPDATE, begins=False), ("MySQLdb",), Durable(1, 11), strict=ONCE
    ),
}
CASES = [
    pytest.param(driver, unseen, id=f"{driver}-{name}")
    for name, unseen in UNSEEN.items()
    for driver in DRIVERS
    if driver.module in unseen.drivers and not (driver.is_async and "cursor" in name)  # its cursors are private there
]


def handler_of(unseen: Unseen) -> Callable[[Session], None]:
    """A handler that adds 1 and misbehaves."""

    def handler(session: Session) -> None:
        add(session)
        unseen.do(session)

    return handler


@pytest.mark.parametrize(("driver", "unseen"), CASES)
def test_it_is_not_seen(unseen: Unseen, rig: Rig) -> None:
    """The delivery says `APPLIED`, and what is durable is not what the handler was delivered for."""
    assert rig.deliver(handler_of(unseen)).outcome is Outcome.APPLIED
    rig.assert_settled(unseen.durable)


@pytest.mark.parametrize(("driver", "unseen"), CASES)
def test_strict_asks_the_server(unseen: Unseen, rig: Rig) -> None:
    """`strict=True` finds out that the transaction is another. Nobody asks what became of the claim's."""
    if unseen.strict is None:
        assert rig.deliver(handler_of(unseen), strict=True).outcome is Outcome.APPLIED
        assert rig.durable() == unseen.durable
    else:
        with pytest.raises(TransactionViolatedError) as raised:
            rig.deliver(handler_of(unseen), strict=True)
        assert raised.value.durable
        assert rig.durable() == unseen.strict
        again = rig.deliver(add, strict=True).outcome
        assert again is (Outcome.APPLIED if unseen.strict == NOTHING else Outcome.DUPLICATE)
        assert rig.durable() == ONCE
    rig.assert_nothing_is_left()


@pytest.mark.parametrize(
    "driver", [each for each in DRIVERS if each.module in HAVE_CURSORS and not each.is_async], ids=str
)
def test_strict_is_not_deceived_by_lending_the_driver_later(rig: Rig) -> None:
    """The mark was set behind the claim; a second one would vouch for the transaction that came after it."""

    def handler(session: Session) -> None:
        add(session)
        commit_by_the_cursor_of_a_result(session)
        execute_raw(session, "select 1")

    with pytest.raises(TransactionViolatedError) as raised:
        rig.deliver(handler, strict=True)
    assert raised.value.durable
    rig.assert_settled(ONCE)


@each_driver("mariadb")
def test_sql_text_into_a_table_without_transactions_is_not_looked_into(rig: Rig) -> None:
    """The ORM's and Core's writes to it are refused; what text writes there stays when the handler fails."""
    rig.outside.execute("create or replace table kept (id int) engine=MyISAM")

    def handler(session: Session) -> None:
        add(session)
        session.execute(text("insert into kept values (1)"))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rig.deliver(handler)
    assert rig.durable() == NOTHING
    assert rig.outside.execute("select count(*) from kept") == [(1,)]


@each_driver(*SERVERS)
def test_a_session_of_the_handlers_own_is_its_own(rig: Rig) -> None:
    """What a handler writes through a second session commits by itself: a failure does not take it back."""

    def handler(session: Session) -> None:
        add(session)
        with Session(session.get_bind()) as second:
            second.execute(text("insert into total values ('own', 5)"))
            second.commit()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rig.deliver(handler)
    assert rig.durable() == Durable(0, 5)


@each_driver("sqlite")
def test_a_session_of_the_handlers_own_waits_for_itself_on_sqlite(rig: Rig) -> None:
    """There is one writer, and it is the unit of work: the second session gets "locked", and nothing is lost."""

    def handler(session: Session) -> None:
        with Session(session.get_bind()) as second:
            second.execute(text("insert into total values ('own', 5)"))
            second.commit()

    with pytest.raises(
        RetriesExhaustedError, match=r"a second session of the handler.* locked.* write through the ses"
    ):
        rig.deliver(handler, retry=RetryPolicy(attempts=1))
    rig.assert_settled(Durable(0, 0))
