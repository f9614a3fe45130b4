"""What the guards must leave alone: ordinary errors, retries and duplicates cost neither a reconnect nor a message."""

import contextlib
import gc
import threading
import time
from collections.abc import Callable
from contextvars import Context
from typing import Any

import pytest
from sqlalchemy import create_engine, event, insert, literal_column, select, text, update
from sqlalchemy.dialects import mysql
from sqlalchemy.exc import DBAPIError, IntegrityError, InvalidRequestError, ResourceClosedError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from databases import SERVERS, Driver, each_driver, mariadb_connection, spread
from misbehaviour import bad_flush, driver_of, execute_raw, fail, swallow
from projector_dedup import Defer, Outcome
from projector_dedup.errors import RetriesExhaustedError, TransactionViolatedError, UnsafeSessionError
from projector_dedup.guard import GuardedSession
from projector_dedup.options import RetryPolicy
from rig import CONFLICT, NOTHING, ONCE, Counting, Durable, Rig, RigOn, Total, add


def raises_value_error(session: Session) -> None:
    """A bug."""
    add(session)
    raise ValueError


def raises_integrity_error(session: Session) -> None:
    """The database says no, and will say it again."""
    session.execute(text("insert into total values ('b', null)"))


def raises_integrity_error_in_flush(session: Session) -> None:
    """The same, found by the ORM."""
    add(session)
    bad_flush(session)


def raises_defer(session: Session) -> None:
    """Not now."""
    add(session)
    raise Defer


def rolls_back_and_raises(session: Session) -> None:
    """The idiom of those who were taught to clean up."""
    try:
        raises_integrity_error(session)
    except Exception:
        session.rollback()
        raise


ERRORS: dict[Callable[[Session], None], type[Exception]] = {
    rolls_back_and_raises: IntegrityError,
    raises_value_error: ValueError,
    raises_integrity_error: IntegrityError,
    raises_integrity_error_in_flush: IntegrityError,
    raises_defer: Defer,
}


@spread("handler", list(ERRORS))
def test_a_handlers_own_error_is_what_the_caller_gets(handler: Callable[[Session], None], rig: Rig) -> None:
    """It surfaces as it is, nothing is durable, the connection is kept, and a redelivery applies."""
    with pytest.raises(ERRORS[handler]):
        rig.deliver(handler)
    rig.assert_settled(NOTHING)
    assert rig.deliver(add).outcome is Outcome.APPLIED
    assert rig.deliver(add).outcome is Outcome.DUPLICATE
    assert rig.durable() == ONCE
    assert rig.connects == 1


def overtaken(rig: Rig, then: Callable[[Session], object]) -> Callable[[Session], None]:
    """A handler that the first time changes a row which somebody else has changed since: 40001, or 1020 on MariaDB."""
    rig.outside.execute("insert into total values ('a', 0)")
    attempts = iter(range(100))

    def handler(session: Session) -> None:
        session.execute(text("select count(*) from total"))  # the snapshot
        if next(attempts) == 0:
            rig.outside.execute("update total set amount = amount + 1")
            rig.outside.execute("update total set amount = amount - 1")
            then(session)
        add(session)

    return handler


STALE = text("update total set amount = 5")


def is_swallowed_and_so_is_the_next(session: Session) -> None:
    """The second error, 25P02, says nothing of the first."""
    swallow(session.execute, STALE)
    swallow(session.execute, text("select 1"))


def is_swallowed_and_rolled_back(session: Session) -> None:
    """Whoever rolls back loses the marker too."""
    swallow(session.execute, STALE)
    session.rollback()


def made_another(do: Callable[[Session], object], session: Session) -> None:
    """Wrap its error, as handlers do."""
    try:
        do(session)
    except DBAPIError as error:
        raise ValueError("could not add") from error


MADE_OF_A_CONFLICT: dict[str, Callable[[Session], object]] = {
    "is_swallowed_and_so_is_the_next": is_swallowed_and_so_is_the_next,
    "surfaces": add,
    "is_swallowed": lambda session: swallow(session.execute, STALE),
    "is_swallowed_by_the_flush": lambda session: swallow(add, session),
    "is_swallowed_and_rolled_back": is_swallowed_and_rolled_back,
    "is_made_another": lambda session: made_another(add, session),
}


@spread("then", MADE_OF_A_CONFLICT, *SERVERS)
def test_a_serialization_failure_is_retried_whatever_the_handler_makes_of_it(
    then: Callable[[Session], object], rig: Rig
) -> None:
    """The first error of the transaction decides: the whole unit runs again, on the connection that it had."""
    assert rig.deliver(overtaken(rig, then)).outcome is Outcome.APPLIED
    assert rig.connects == 1
    rig.assert_settled(ONCE)


CONFLICT_AT_500 = """
    create function pg_temp.conflict(n int) returns int language plpgsql as $$ begin
        if n = 500 then raise exception 'conflict' using errcode = '40001'; end if;
        return n;
    end $$"""


@each_driver("postgresql")
def test_a_serialization_failure_of_a_streamed_result_is_retried(driver: Driver, rig: Rig) -> None:
    """It comes while rows are fetched, past the guard; from asyncpg as the driver's own error, which is not wrapped."""

    def streams(session: Session) -> None:
        session.execute(text(CONFLICT_AT_500))
        rows = session.execute(
            text("select pg_temp.conflict(n) from generate_series(1, 2000) n"), execution_options={"yield_per": 10}
        )
        with pytest.raises(Exception, match="conflict") as failed:
            rows.all()
        assert isinstance(failed.value, DBAPIError) is (driver.module != "asyncpg")
        raise failed.value

    handler = Counting(streams)
    assert rig.deliver(handler).outcome is Outcome.APPLIED
    assert (handler.runs, rig.connects) == (2, 1)
    rig.assert_settled(ONCE)


@each_driver("postgresql")
def test_a_serialization_failure_of_the_drivers_cursor_is_retried(rig: Rig) -> None:
    """The driver's own error is known by its SQLSTATE too."""
    handler = Counting(lambda session: execute_raw(session, CONFLICT["postgresql"]))
    assert rig.deliver(handler).outcome is Outcome.APPLIED
    assert (handler.runs, rig.connects) == (2, 1)
    rig.assert_settled(ONCE)


@each_driver("mariadb")
def test_a_deadlock_of_the_drivers_cursor_is_retried(rig: Rig) -> None:
    """The server has ended the transaction, and no marker is there: the handler has not committed."""
    rival = Rival(rig)

    def meets(session: Session) -> None:
        with contextlib.closing(rival):
            rival.deadlocks(session, execute_raw)

    handler = Counting(meets)
    assert rig.deliver(handler).outcome is Outcome.APPLIED
    assert (handler.runs, rig.connects) == (2, 1)
    rig.assert_settled(ONCE)


def as_text(session: Session, sql: str) -> None:
    """By SQLAlchemy."""
    session.execute(text(sql))


class Rival:
    """Another transaction on MariaDB, which meets a handler on the rows `b` and `c`."""

    def __init__(self, rig: Rig) -> None:
        rig.outside.execute("insert into total values ('b', 0), ('c', 0)")
        self._connection = mariadb_connection(rig.outside.database.url())
        self._thread: threading.Thread | None = None
        # The deadlock's victim is who has written less.
        self.execute("begin", *(f"insert into total values ('rival {number}', 0)" for number in range(20)))
        self.execute("update total set amount = 5 where account = 'c'")

    def execute(self, *statements: str) -> None:
        """In one transaction, which stays open."""
        with self._connection.cursor() as cursor:
            for sql in statements:
                cursor.execute(sql)

    def deadlocks(self, session: Session, execute: Callable[[Session, str], object] = as_text) -> None:
        """1213: each has a row that the other waits for."""
        execute(session, "update total set amount = 7 where account = 'b'")
        self._thread = threading.Thread(target=self.execute, args=("update total set amount = 5 where account = 'b'",))
        self._thread.start()
        execute(session, "update total set amount = 7 where account = 'c'")

    def times_out(self, session: Session) -> None:
        """1205, at once."""
        session.execute(text("select amount from total where account = 'c' for update nowait"))

    def close(self) -> None:
        """Roll back and hang up."""
        if self._thread is not None:
            self._thread.join()
        self._connection.rollback()
        self._connection.close()


def and_more_is_written(collide: Callable[[Session], None], session: Session) -> None:
    """The server would go on, in another transaction: without the marker."""
    swallow(collide, session)
    swallow(session.execute, text("insert into total values ('late', 10)"))
    swallow(add, session, 10)


def and_more_is_written_in_a_savepoint(collide: Callable[[Session], None], session: Session) -> None:
    """A savepoint that was set after the rollback proves nothing."""
    swallow(collide, session)
    swallow(_nested, lambda inner: inner.execute(text("insert into total values ('late', 10)")), session)
    swallow(_nested, fail, session)


def and_more_is_written_below(collide: Callable[[Session], None], session: Session) -> None:
    """The driver's connection is not lent any more."""
    swallow(collide, session)
    swallow(execute_raw, session, "insert into total values ('late', 10)")
    swallow(execute_raw, session, "commit")


def and_is_swallowed_in_a_savepoint(collide: Callable[[Session], None], session: Session) -> None:
    """RELEASE finds no savepoint, 1305, which would hide the first error."""
    swallow(_nested, lambda inner: swallow(collide, inner), session)
    swallow(add, session, 10)


def and_its_savepoint_is_rolled_back(collide: Callable[[Session], None], session: Session) -> None:
    """As docs/handlers.md says; but a deadlock has taken the savepoint too."""
    swallow(_nested, collide, session)
    swallow(session.execute, text("update total set amount = 0 where account = 'b'"))


def and_it_is_rolled_back(collide: Callable[[Session], None], session: Session) -> None:
    """Whoever rolls back loses the marker too."""
    swallow(collide, session)
    session.rollback()


def _nested(do: Callable[[Session], object], session: Session) -> None:
    with session.begin_nested():
        do(session)


Collide = Callable[[Session], None]
MADE_OF_A_DEADLOCK: dict[str, Callable[[Collide, Session], object]] = {
    "and_more_is_written_below": and_more_is_written_below,
    "and_surfaces": lambda collide, session: collide(session),
    "and_is_swallowed": swallow,
    "and_more_is_written": and_more_is_written,
    "and_more_is_written_in_a_savepoint": and_more_is_written_in_a_savepoint,
    "and_is_swallowed_in_a_savepoint": and_is_swallowed_in_a_savepoint,
    "and_its_savepoint_is_rolled_back": and_its_savepoint_is_rolled_back,
    "and_it_is_rolled_back": and_it_is_rolled_back,
    "and_it_is_made_another": made_another,
}


@pytest.mark.parametrize("collide", [Rival.deadlocks, Rival.times_out])
@spread("then", MADE_OF_A_DEADLOCK, "mariadb")
def test_a_deadlock_is_retried_whatever_the_handler_makes_of_it(
    collide: Callable[[Rival, Session], None], then: Callable[[Collide, Session], object], rig: Rig
) -> None:
    """The whole unit runs again, and nothing that was written in between is kept; so after a lock timeout, too."""
    rival = Rival(rig)

    def meets(session: Session) -> None:
        with contextlib.closing(rival):
            then(lambda inner: collide(rival, inner), session)

    handler = Counting(meets)
    assert rig.deliver(handler).outcome is Outcome.APPLIED
    forgiven = collide is Rival.times_out and then is and_its_savepoint_is_rolled_back
    assert handler.runs == (1 if forgiven else 2)  # the server has rolled back to the savepoint: nothing is lost
    assert rig.connects == 1
    rig.assert_settled(ONCE)


@each_driver(*SERVERS)
@pytest.mark.parametrize("idempotent", [True, False])
def test_a_connection_that_was_killed_and_swallowed_is_retried(idempotent: bool, rig: Rig) -> None:
    """The handler goes on writing, and none of it is kept: the whole unit runs again, and counts once."""

    def is_killed_and_writes_on(session: Session) -> None:
        rig.outside.kill_others()
        swallow(add, session, 10)
        swallow(session.execute, text("insert into total values ('late', 10)"))

    handler = Counting(is_killed_and_writes_on)
    assert rig.deliver(handler, idempotent=idempotent).outcome is Outcome.APPLIED
    assert rig.connects == 2
    rig.assert_settled(Durable(int(idempotent), 1))


def leaves_a_stream(session: Session) -> object:
    """A result that is fetched as one goes, and is not fetched to its end."""
    result = session.execute(
        text("select seq, repeat('x', 1000) from seq_1_to_3000"), execution_options={"yield_per": 10}
    )
    next(iter(result))
    return result


def leaves_a_stream_in_a_savepoint(session: Session) -> object:
    """RELEASE is the next statement."""
    with session.begin_nested():
        return leaves_a_stream(session)


def leaves_a_stream_and_takes_the_driver(session: Session) -> object:
    """The transaction is to be marked while rows are on their way."""
    result = leaves_a_stream(session)
    execute_raw(session, "select 1")
    return result


@each_driver("mariadb")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "leave", [leaves_a_stream, leaves_a_stream_in_a_savepoint, leaves_a_stream_and_takes_the_driver]
)
@pytest.mark.filterwarnings("ignore:Previous unbuffered result was left incomplete")
def test_a_result_that_is_left_unread_is_thrown_away_or_an_error_at_once(
    driver: Driver, leave: Callable[[Session], object], strict: bool, rig: Rig
) -> None:
    """The drivers in Python drop the rest, with a warning; mysqlclient says "commands out of sync", once."""
    kept: list[object] = []

    def handler(session: Session) -> None:
        add(session)
        kept.append(leave(session))

    if driver.module == "MySQLdb":
        with pytest.raises(Exception) as raised:  # noqa: PT011  # SQLAlchemy's or the driver's own
            rig.deliver(handler, strict=strict)
        assert getattr(raised.value, "orig", raised.value).args[0] == 2014
        assert rig.connects == 1
        assert rig.durable() == NOTHING
    else:
        assert rig.deliver(handler, strict=strict).outcome is Outcome.APPLIED
    kept.clear()
    rig.deliver(add, strict=strict)
    rig.assert_settled(ONCE)


@each_driver(module="MySQLdb")
def test_a_commit_that_mysqlclient_does_not_send_is_no_unknown_outcome(rig: Rig) -> None:
    """The second result of a statement that was two was left unread, so COMMIT was not sent: nothing is applied."""

    def handler(session: Session) -> None:
        add(session)
        session.execute(select(literal_column("1; select 1")))

    with pytest.raises(DBAPIError) as raised:
        rig.deliver(handler)
    assert raised.value.orig is not None
    assert raised.value.orig.args[0] == 2014
    assert rig.connects == 1
    assert rig.durable() == NOTHING
    assert rig.deliver(add).outcome is Outcome.APPLIED
    rig.assert_settled(ONCE)


class KeptBase(DeclarativeBase):
    """Metadata of its own: the table is made by its tests."""


class Kept(KeptBase):
    """A read model in a storage engine without transactions."""

    __tablename__ = "kept"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)


def orm_insert(session: Session) -> None:
    """By the unit of work of the ORM."""
    session.add(Kept(id=2))
    session.flush()


def orm_update(session: Session) -> None:
    """The same of a row that is there."""
    session.get_one(Kept, 1).amount = 5
    session.flush()


def orm_delete(session: Session) -> None:
    """The same."""
    session.delete(session.get_one(Kept, 1))
    session.flush()


UPSERT = mysql.insert(Kept).values(id=1).on_duplicate_key_update(amount=5)
WRITES: dict[str, Callable[[Session], object]] = {
    "orm_insert": orm_insert,
    "orm_update": orm_update,
    "orm_delete": orm_delete,
    "flushed_at_commit": lambda session: session.add(Kept(id=2)),
    "bulk_insert": lambda session: session.execute(insert(Kept), [{"id": 2}, {"id": 3}]),
    "core_insert": lambda session: session.connection().execute(insert(Kept).values(id=2)),
    "core_upsert": lambda session: session.execute(UPSERT),
    "insert_from_select": lambda session: session.execute(
        insert(Kept).from_select(["id"], select(literal_column("2")))
    ),
    "core_update": lambda session: session.execute(update(Kept).values(amount=5)),
    "query_delete": lambda session: session.query(Kept).delete(),
}


@pytest.mark.parametrize("storage", ["MyISAM", "Aria"])
@spread("write", WRITES, "mariadb")
def test_a_read_model_without_transactions_is_refused(
    storage: str, write: Callable[[Session], object], rig: Rig
) -> None:
    """Before it is written, for no rollback would take it back; swallowed or not, the table stays as it was."""
    rig.outside.execute(f"create or replace table kept (id int primary key, amount int default 0) engine={storage}")
    rig.outside.execute("insert into kept values (1, 0)")

    def surfaces(session: Session) -> None:
        add(session)
        write(session)

    def swallows(session: Session) -> None:
        add(session)
        swallow(write, session)

    with pytest.raises(UnsafeSessionError, match=rf"kept has the storage engine {storage}.*ENGINE=InnoDB"):
        rig.deliver(surfaces)
    assert rig.durable() == NOTHING
    with contextlib.suppress(TransactionViolatedError, UnsafeSessionError):
        rig.deliver(swallows)
    assert rig.outside.execute("select id, amount from kept") == [(1, 0)]
    rig.outside.execute("alter table kept engine=InnoDB")
    rig.deliver(surfaces, "m-2")
    assert rig.outside.execute("select id, amount from kept") != [(1, 0)]
    rig.assert_nothing_is_left()


@spread("handler", [rolls_back_and_raises, add, raises_integrity_error, raises_integrity_error_in_flush])
def test_nothing_is_marked_unless_the_driver_is_lent(handler: Callable[[Session], None], rig: Rig) -> None:
    """Neither a good handler nor a rollback pays for a savepoint, though SQLAlchemy takes the driver to roll back."""
    sent: list[str] = []
    event.listen(rig.sync_engine, "before_cursor_execute", lambda *arguments: sent.append(arguments[2]))
    with contextlib.suppress(IntegrityError):
        rig.deliver(handler)
    assert not [sql for sql in sent if "SAVEPOINT" in sql]


@each_driver(usual=True)
@pytest.mark.parametrize("strict", [False, True], ids=["usual", "strict"])
@pytest.mark.parametrize("name", ["info", "connection"])
def test_a_listener_to_statements_may_look_at_the_connection(
    driver: Driver, name: str, strict: bool, rig_on: RigOn
) -> None:
    """A recipe of SQLAlchemy's documentation keeps the time of a query's beginning in `conn.info`."""
    rig, seen = rig_on(driver), []
    event.listen(rig.sync_engine, "before_cursor_execute", lambda conn, *_: seen.append(getattr(conn, name)))
    assert rig.deliver(add, strict=strict).outcome is Outcome.APPLIED
    assert rig.deliver(add, strict=strict).outcome is Outcome.DUPLICATE
    assert seen
    rig.assert_settled(ONCE)


SWALLOWED: dict[str, tuple[Callable[[Session], object], str]] = {
    "flush": (lambda session: swallow(bad_flush, session), "begin_nested"),
    "begin": (lambda session: swallow(session.begin), r"called session\.begin\(\).*begin_nested\(\)"),
}


@each_driver(usual=True)
@pytest.mark.parametrize(("do", "remedy"), SWALLOWED.values(), ids=SWALLOWED)
def test_a_swallowed_error_names_the_remedy(do: Callable[[Session], object], remedy: str, rig: Rig) -> None:
    """A violation says what to write: SQLAlchemy says "pending rollback", and that a transaction is begun."""

    def handler(session: Session) -> None:
        add(session)
        do(session)

    with pytest.raises(TransactionViolatedError, match=remedy) as raised:
        rig.deliver(handler)
    assert (raised.value.durable, rig.durable()) == (False, NOTHING)


@each_driver("postgresql", "mariadb")
@pytest.mark.parametrize("begins", ["", "BEGIN"])
def test_a_conflict_after_a_commit_of_the_handlers_own_is_not_retried(driver: Driver, begins: str, rig: Rig) -> None:
    """A second attempt would find the committed marker, and call half of the work a duplicate."""
    attempts: list[int] = []

    def handler(session: Session) -> None:
        attempts.append(1)
        add(session)
        driver_of(session).commit()
        if begins:
            execute_raw(session, begins)
        execute_raw(session, CONFLICT[driver.engine])

    with pytest.raises(TransactionViolatedError, match="idempotency show") as raised:
        rig.deliver(handler)
    assert (raised.value.durable, len(attempts), rig.durable()) == (True, 1, ONCE)
    rig.assert_nothing_is_left()


@each_driver()
@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_a_connection_that_the_handler_closes_below_may_be_committed(ends: str, rig: Rig) -> None:
    """Nobody can be asked any more, so the error does not say that everything was rolled back."""

    def handler(session: Session) -> None:
        add(session)
        connection = driver_of(session)
        getattr(connection, ends)()
        connection.dbapi_connection.close()

    with pytest.raises(TransactionViolatedError) as raised:
        rig.deliver(handler)
    assert raised.value.durable
    rig.assert_settled(ONCE if ends == "commit" else NOTHING)


@each_driver(usual=True)
@pytest.mark.parametrize("name", ["begin", "commit"])
def test_a_call_that_is_prevented_hides_no_commit(name: str, rig: Rig) -> None:
    """A marker that was committed on the driver's connection before is reported as such."""

    def commits(session: Session) -> None:
        add(session)
        driver_of(session).commit()
        getattr(session, name)()

    with pytest.raises(TransactionViolatedError, match="COMMITTED") as raised:
        rig.deliver(commits)
    assert (raised.value.durable, rig.durable()) == (True, ONCE)


@each_driver(usual=True)
def test_a_prevented_commit_is_remembered_to_the_end(rig: Rig) -> None:
    """After it was swallowed no statement runs any more, and the last word is the first violation."""
    later: list[BaseException] = []

    def handler(session: Session) -> None:
        swallow(session.commit)
        for _ in range(2):
            try:
                add(session)
            except TransactionViolatedError as error:
                later.append(error)

    with pytest.raises(TransactionViolatedError, match=r"session\.commit\(\)") as raised:
        rig.deliver(handler)
    assert later == [raised.value] * 2
    rig.assert_settled(NOTHING)


@each_driver(usual=True)
def test_a_session_kept_after_its_message_is_dead(rig: Rig) -> None:
    """Whoever stores the session, or its connection, and uses it later gets an error, and writes nothing."""
    kept: list[Session] = []

    def handler(session: Session) -> None:
        kept.append(session)
        add(session)

    rig.deliver(handler)
    session = kept[0]

    def use(_other: Session) -> None:
        with pytest.raises(InvalidRequestError):
            add(session, 100)
        with pytest.raises(InvalidRequestError):
            session.commit()

    rig.deliver(use, "m-2")
    rig.assert_settled(Durable(2, 1))


@each_driver()
def test_a_connection_kept_after_its_message_is_closed(rig: Rig) -> None:
    """The connection is an ordinary, closed one again."""
    kept = []

    def handler(session: Session) -> None:
        kept.append(session.connection())

    rig.deliver(handler)

    def use(_other: Session) -> None:
        with pytest.raises(ResourceClosedError):
            kept[0].execute(text("select 1"))

    rig.deliver(use, "m-2")
    rig.assert_nothing_is_left()


@each_driver()
def test_a_lost_connection_that_was_swallowed_is_retried(rig: Rig) -> None:
    """The whole unit runs again on a new connection, and counts once."""

    def closes_it(session: Session) -> None:
        session.connection().connection.dbapi_connection.close()  # type: ignore[union-attr]  # it is open
        swallow(fail, session)

    assert rig.deliver(Counting(closes_it)).outcome is Outcome.APPLIED
    rig.assert_settled(ONCE)


@each_driver()
def test_without_a_marker_the_transaction_is_guarded_too(rig: Rig) -> None:
    """A projector that is not idempotent gets invariant I4; what it committed below is never called rolled back."""

    def commits(session: Session) -> None:
        add(session)
        session.commit()

    def commits_below(session: Session) -> None:
        add(session)
        session.connection().connection.commit()
        raise ValueError

    with pytest.raises(TransactionViolatedError) as raised:
        rig.deliver(commits, idempotent=False)
    assert not raised.value.durable
    assert rig.durable() == NOTHING

    def only_below(session: Session) -> None:
        execute_raw(session, "update total set amount = amount + 1")
        driver_of(session).commit()
        raise ValueError

    for total, handler in enumerate((commits_below, only_below), 1):
        with pytest.raises(TransactionViolatedError, match="may be COMMITTED") as raised:
            rig.deliver(handler, idempotent=False)
        assert raised.value.durable
        assert rig.durable() == Durable(0, total)
    rig.assert_nothing_is_left()


@each_driver(is_async=False)
def test_a_detached_connection_still_commits(rig: Rig) -> None:
    """It has left the pool, and marker and writes are in it all the same."""

    def handler(session: Session) -> None:
        session.connection().detach()
        add(session)

    assert rig.deliver(handler).outcome is Outcome.APPLIED
    rig.assert_settled(ONCE)


@each_driver(usual=True)
def test_a_sessionmaker_that_is_dropped_is_forgotten(rig: Rig) -> None:
    """Whoever makes a sessionmaker for every message leaves no class behind for each of them."""

    def classes() -> int:
        gc.collect()
        return len(GuardedSession.__subclasses__())

    rig.deliver(add, "m-0")
    before = classes()
    for number in range(20):
        rig.deliver(add, f"m-{number}")
    assert classes() <= before + 1


# Errors of which the handler is not told -----------------------------------------------------------------------------


@each_driver("mariadb")
@pytest.mark.parametrize("swallows", [False, True])
def test_an_error_that_a_driver_tells_nobody_cannot_happen(swallows: bool, rig: Rig) -> None:
    """The second statement of one text may fail, or roll everything back, in silence: such texts are refused."""

    def handler(session: Session) -> None:
        add(session)
        both = text("update total set amount = amount + 1; insert into total values ('a', 5)")
        if swallows:
            swallow(session.execute, both)
        else:
            session.execute(both)

    if swallows:
        assert rig.deliver(handler).outcome is Outcome.APPLIED
        assert rig.durable() == ONCE
    else:
        with pytest.raises(UnsafeSessionError, match="one by one"):
            rig.deliver(handler)
        assert rig.durable() == NOTHING


@each_driver("mariadb", is_async=False)
def test_a_deadlock_while_a_result_is_streamed_is_not_forgotten(driver: Driver, rig_on: RigOn) -> None:
    """The fetch rolls the transaction back and a rival applies the message: what is written then does not commit."""
    rig, rival = rig_on(driver), rig_on(driver)
    rig.outside.execute("insert into total values " + ", ".join(f"('r{n:04}', 0)" for n in range(2000)))
    other = create_engine(rig.sync_engine.url)
    failed: list[Exception] = []

    def handler(session: Session) -> None:
        if failed:
            return
        with other.connect() as connection:
            # Much to roll back: of the two, the server will choose the other, whose fetch is told.
            connection.execute(text("update total set amount = 7 where account > 'r1000'"))
            stream = select(Total.account).where(Total.account > "r").order_by(Total.account).with_for_update()
            blocked = threading.Thread(target=swallow, args=(_waits_for_all, connection, rig))
            blocked.start()
            result = session.execute(stream, execution_options={"stream_results": True, "yield_per": 1})
            try:
                result.all()
            except Exception as error:  # noqa: BLE001  # the disease
                failed.append(error)
            blocked.join()
            connection.rollback()
        if failed:
            Context().run(rival.deliver, add)  # as another worker: a handler may not deliver
            session.execute(text("update total set amount = amount + 10 where account = 'a'"))

    with pytest.raises(TransactionViolatedError):
        rig.deliver(handler)
    assert failed
    assert rig.durable() == ONCE
    other.dispose()


def _waits_for_all(connection: Any, rig: Rig) -> None:
    """Once somebody waits for what it holds, in this database: other tests may wait in theirs."""
    waits = (
        "select 1 from information_schema.innodb_trx join information_schema.processlist on id = trx_mysql_thread_id "
        "where trx_state = 'LOCK WAIT' and db = database()"
    )
    while not rig.outside.execute(waits):
        time.sleep(0.15)  # the catalogue is a copy that is not made anew more often
    connection.execute(text("update total set amount = 0 where account >= 'r' order by account desc"))


@each_driver("mariadb")
@pytest.mark.parametrize("number", [1206, 1213, 1020])
def test_an_error_by_which_the_server_rolls_back_is_remembered(number: int, rig: Rig) -> None:
    """A full lock table, 1206, too: swallowed, it is a reason to run the whole unit again, never `APPLIED`."""

    def handler(session: Session) -> None:
        add(session)
        swallow(session.execute, text(f"signal sqlstate 'HY000' set mysql_errno = {number}, message_text = 'x'"))

    with pytest.raises(RetriesExhaustedError):
        rig.deliver(handler, retry=RetryPolicy(attempts=2, base=0))
    assert rig.durable() == NOTHING
