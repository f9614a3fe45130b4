"""The row that comes with the claim: when, when not, and that a handler cannot tell but by the clock."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import date
from typing import Any
from uuid import UUID

import psycopg
import pytest
from sqlalchemy import (
    AssertionPool,
    Connection,
    Engine,
    NullPool,
    Uuid,
    create_engine,
    delete,
    event,
    func,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.exc import InvalidRequestError, OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from cut_proxy import CutProxy
from databases import Database, collation_of_any_case
from projector_dedup import (
    AsyncDispatcher,
    BatchFailed,
    Dispatcher,
    Message,
    MissingTableError,
    Outcome,
    ProjectorDedupError,
    RetriesExhaustedError,
    RetryPolicy,
    TransactionViolatedError,
    UnitOfWork,
    on,
    projector,
)
from projector_dedup.tables import default_metadata

ROWS = 4


class Base(DeclarativeBase):
    """The read model."""


class Total(Base):
    """What the messages change."""

    __tablename__ = "first_total"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    amount: Mapped[int]


class Other(Base):
    """Another table."""

    __tablename__ = "first_other"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    amount: Mapped[int]


class Named(Base):
    """A key of two columns."""

    __tablename__ = "first_named"
    shop: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[UUID] = mapped_column(Uuid, primary_key=True)
    amount: Mapped[int]


@dataclass(frozen=True)
class Added:
    """One more for a row."""

    row: int


@dataclass(frozen=True)
class Removed:
    """One less; the key has another name."""

    number: int


Body = Callable[[Any, Session], Any]


def add(change: Added, session: Session) -> None:
    """As most handlers are."""
    session.get_one(Total, change.row).amount += 1


@projector(idempotent=True, name="first")
@on(Added)
async def add_awaited(change: Added, session: AsyncSession) -> None:
    """The same under asyncio."""
    (await session.get_one(Total, change.row)).amount += 1


@pytest.fixture
def engine(postgresql: Database) -> Iterator[Engine]:
    """The tables, and rows of zeros."""
    engine = create_engine(postgresql.url())
    for metadata in (default_metadata, Base.metadata):
        metadata.create_all(engine)
    reset(engine)
    yield engine
    engine.dispose()


class Delivered:
    """A dispatcher of one handler; what it sends to its engine."""

    def __init__(
        self, engine: Engine, body: Body = add, sessions: Any = None, retry: RetryPolicy | None = None, **settings: Any
    ) -> None:
        @projector(idempotent=True, name="first", **settings)
        @on(Added, Removed, "added")
        def handler(change: Any, session: Session) -> None:
            self.body(change, session)

        self.body = body
        self.dispatcher = Dispatcher(
            sessions or sessionmaker(engine), handler, retry=retry or RetryPolicy(attempts=3, base=0)
        )
        self.sent: list[str] = []
        self._number = 0
        event.listen(engine, "before_cursor_execute", lambda *given: self.sent.append(given[2]))

    def __call__(self, change: Any, message_id: str | None = None, *, type: str | None = None) -> list[str]:  # noqa: A002
        """Apply one message; the statements that it took, by their first word."""
        self._number += 1
        self.sent.clear()
        message = Message(message_id or f"m{self._number}", change, type=type)
        assert self.dispatcher.deliver(message).outcome is (Outcome.DUPLICATE if message_id else Outcome.APPLIED)
        return [statement.split()[0] for statement in self.sent]

    def learned(self) -> "Delivered":
        """After two messages."""
        for _ in range(2):
            self(Added(0))
        assert self(Added(1)) == WITH_CLAIM
        return self

    def redelivered(self) -> None:
        """Four times: where one can look, the next message is looked for."""
        for _ in range(4):
            self(Added(1), "m1")


SELECTED = ["INSERT", "SELECT", "UPDATE"]
WITH_CLAIM = ["WITH", "UPDATE"]


def reset(engine: Engine) -> None:
    """Rows of zeros, and no others."""
    with Session(engine) as session, session.begin():
        for kind in (Total, Other):
            session.execute(delete(kind))
            session.add_all(kind(id=number, amount=0) for number in range(ROWS))


def totals(engine: Engine, kind: type[Any] = Total) -> list[int]:
    """By another connection."""
    with Session(engine) as session:
        return list(session.scalars(select(kind.amount).order_by(kind.id)))


def test_the_row_comes_with_the_claim(engine: Engine) -> None:
    """From the second message on; and the read model is right."""
    deliver = Delivered(engine)
    deliver(Added(3))
    for number in range(8):
        assert deliver(Added(number % ROWS)) == WITH_CLAIM
    assert totals(engine) == [2, 2, 2, 3]


@pytest.mark.parametrize(("driver", "trips"), [("psycopg", 3), ("psycopg2", 4)])
def test_it_is_a_round_trip_less(engine: Engine, postgresql: Database, driver: str, trips: int) -> None:
    """Less than the same handler takes without deduplication: four."""
    with CutProxy(postgresql.url()) as proxy:
        near = create_engine(proxy.through(postgresql.url(f"postgresql+{driver}")), pool_size=1, max_overflow=0)
        deliver = Delivered(near)
        for _ in range(8):
            deliver(Added(2))
        before = len(proxy.trips)
        deliver(Added(1))
        assert len(proxy.trips) - before == trips
        near.dispose()
    assert totals(engine) == [0, 1, 8, 0]


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_under_asyncio(engine: Engine, postgresql: Database, driver: str) -> None:
    """The same."""

    async def run() -> None:
        waiting = create_async_engine(postgresql.url(f"postgresql+{driver}"))
        dispatcher = AsyncDispatcher(async_sessionmaker(waiting), add_awaited)
        await dispatcher.deliver(Added(0), message_id="learned")
        event.listen(waiting.sync_engine, "before_cursor_execute", lambda *given: sent.append(given[2].split()[0]))
        await asyncio.gather(*(dispatcher.deliver(Added(1 + n % 3), message_id=f"m{n}") for n in range(30)))
        await waiting.dispose()

    sent: list[str] = []
    asyncio.run(run())
    assert totals(engine) == [1, 10, 10, 10]
    assert sent.count("WITH") > 0
    assert sent.count("SELECT") <= sent.count("INSERT")


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_keys_of_several_columns_and_kinds(engine: Engine, postgresql: Database, driver: str) -> None:
    """Found in an event of dictionaries, where a UUID is text."""

    def body(change: Any, session: Session) -> None:
        key = change["shop"], UUID(change["item"]["number"])
        found = session.get(Named, key)
        if found is None:
            session.add(Named(shop=key[0], number=key[1], amount=1))
        else:
            found.amount += 1

    items: list[dict[str, Any]] = [
        {"shop": shop, "item": {"number": str(UUID(int=n))}} for shop in ("a", "b'%%:x", "ü") for n in range(2)
    ]
    other = create_engine(postgresql.url(f"postgresql+{driver}"))
    deliver = Delivered(other, body)
    for item in items:
        deliver(item, type="added")
    for item in items:
        assert deliver(item, type="added") == WITH_CLAIM
    other.dispose()
    with Session(engine) as session:
        found = {(each.shop, str(each.number)): each.amount for each in session.scalars(select(Named))}
    assert found == {(each["shop"], each["item"]["number"]): 2 for each in items}


def test_a_row_that_is_not_there(engine: Engine) -> None:
    """That is known too: the handler creates it, and the next message finds it."""

    def body(change: Added, session: Session) -> None:
        total = session.get(Total, change.row)
        if total is None:
            total = Total(id=change.row, amount=0)
            session.add(total)
        total.amount += 1

    deliver = Delivered(engine, body).learned()
    assert deliver(Added(9)) == ["WITH", "INSERT"]
    assert deliver(Added(9)) == WITH_CLAIM
    assert totals(engine) == [2, 1, 0, 0, 2]


def test_each_kind_of_event_has_its_key_elsewhere(engine: Engine) -> None:
    """One handler of two."""

    def body(change: Added | Removed, session: Session) -> None:
        if isinstance(change, Added):
            session.get_one(Total, change.row).amount += 1
        else:
            session.get_one(Other, change.number).amount -= 1

    deliver = Delivered(engine, body)
    for change in (Added(0), Removed(1)):
        assert deliver(change) != WITH_CLAIM
    for number in range(3):
        assert deliver(Added(number)) == deliver(Removed(number)) == WITH_CLAIM
    assert (totals(engine), totals(engine, Other)) == ([2, 1, 1, 0], [-1, -2, -1, 0])


# What the handler does is what counts -------------------------------------------------------------------------------


def _other_row(change: Added, session: Session) -> None:
    session.get_one(Total, (change.row + 1) % ROWS).amount += 1


def _other_entity(change: Added, session: Session) -> None:
    session.get_one(Other, change.row).amount += 10
    session.get_one(Total, change.row).amount += 1


def _other_alone(change: Added, session: Session) -> None:
    session.get_one(Other, change.row).amount = 7


def _written_by_sql(change: Added, session: Session) -> None:
    session.execute(update(Total).where(Total.id == change.row).values(amount=Total.amount + 10))
    session.get_one(Total, change.row).amount += 1


def _written_by_text(change: Added, session: Session) -> None:
    session.connection().exec_driver_sql(f"UPDATE first_total SET amount = amount + 10 WHERE id = {change.row:d}")
    session.get_one(Total, change.row).amount += 1


def _written_below(change: Added, session: Session) -> None:
    driver: Any = session.connection().connection.driver_connection
    driver.execute("UPDATE first_total SET amount = amount + 10 WHERE id = %s", [change.row])
    session.get_one(Total, change.row).amount += 1


def _in_a_savepoint(change: Added, session: Session) -> None:
    savepoint = session.begin_nested()
    session.get_one(Total, change.row).amount += 10
    session.flush()
    savepoint.rollback()
    session.get_one(Total, change.row).amount += 1


def _under_lock(change: Added, session: Session) -> None:
    session.get_one(Total, change.row, with_for_update=True).amount += 1


def _by_query(change: Added, session: Session) -> None:
    session.scalars(select(Total).where(Total.id == change.row)).one().amount += 1


def _twice(change: Added, session: Session) -> None:
    first, second = session.get_one(Total, change.row), session.get_one(Total, change.row)
    assert first is second
    first.amount += 1
    session.refresh(second)
    second.amount += 1


def _expired(change: Added, session: Session) -> None:
    total = session.get_one(Total, change.row)
    total.amount += 10
    session.expire(total)
    total.amount += 1


def _after_another(change: Added, session: Session) -> None:
    session.add(Other(id=100 + change.row, amount=0))
    session.get_one(Total, change.row).amount += 1
    session.delete(session.get_one(Other, 100 + change.row))


def _deleted(change: Added, session: Session) -> None:
    session.delete(session.get_one(Total, change.row))
    session.flush()
    assert session.get(Total, change.row) is None
    session.add(Total(id=change.row, amount=5))


@pytest.mark.parametrize(
    "body",
    [
        _other_row,
        _other_entity,
        _written_by_sql,
        _written_by_text,
        _written_below,
        _in_a_savepoint,
        _under_lock,
        _by_query,
        _twice,
        _expired,
        _after_another,
        _deleted,
    ],
)
def test_a_handler_finds_what_a_session_of_its_own_would_give_it(engine: Engine, body: Body) -> None:
    """Whatever it did before it asked for the row, or instead of asking."""
    with sessionmaker(engine).begin() as session:
        body(Added(2), session)
    expected = totals(engine), totals(engine, Other)
    reset(engine)
    deliver = Delivered(engine).learned()
    reset(engine)
    deliver.body = body
    assert deliver(Added(2))[0] == "WITH"
    assert (totals(engine), totals(engine, Other)) == expected


def test_what_was_learned_is_forgotten_when_it_is_wrong(engine: Engine) -> None:
    """And learned anew, as long as that pays."""
    rows = {"at": 0}

    def body(change: Added, session: Session) -> None:
        session.get_one(Total, (change.row + rows["at"]) % ROWS).amount += 1

    deliver = Delivered(engine, body).learned()
    rows["at"] = 1
    read = [deliver(Added(number % ROWS))[0] for number in range(40)]
    assert read.count("WITH") == 1
    assert read[-1] == "INSERT"
    rows["at"] = 0
    assert totals(engine)[0] == 2 + 10


def test_guesses_come_to_an_end(engine: Engine) -> None:
    """A handler that asks for the row of its event every other time: some rows are read for nothing, then none."""
    turn = {"wrong": False}

    def body(change: Added, session: Session) -> None:
        wrong = turn["wrong"] = not turn["wrong"]
        session.get_one(Total, 3 if wrong else change.row).amount += 1

    deliver = Delivered(engine, body)
    read = [deliver(Added(number % 3))[0] for number in range(60)]
    assert read.count("WITH") < 20
    assert read[-10:] == ["INSERT"] * 10
    assert sum(totals(engine)) == 60


def test_who_begins_with_something_else_is_not_waited_for_for_ever(engine: Engine) -> None:
    """After eight such messages nothing is learned of their kind any more; of another kind it is."""
    begins = {"otherwise": True}

    def body(change: Added | Removed, session: Session) -> None:
        if begins["otherwise"] and isinstance(change, Added):
            session.execute(update(Total).where(Total.id == change.row).values(amount=Total.amount + 10))
        session.get_one(Total, change.row if isinstance(change, Added) else change.number).amount += 1

    deliver = Delivered(engine, body)
    for _ in range(8):
        assert deliver(Added(0))[-4:] == ["INSERT", "UPDATE", "SELECT", "UPDATE"]
    begins["otherwise"] = False
    for _ in range(3):
        assert deliver(Added(1)) == SELECTED
    deliver(Removed(2))
    assert deliver(Removed(3)) == WITH_CLAIM
    assert deliver(Added(1)) == SELECTED
    assert totals(engine) == [88, 4, 1, 1]


def test_a_few_that_begin_with_something_else_do_not_matter(engine: Engine) -> None:
    """Seven."""

    def body(change: Added, session: Session) -> None:
        session.execute(update(Total).where(Total.id == change.row).values(amount=Total.amount + 1))

    deliver = Delivered(engine, body)
    for _ in range(7):
        deliver(Added(0))
    deliver.body = add
    deliver(Added(1))
    assert deliver(Added(1)) == WITH_CLAIM
    assert totals(engine) == [7, 2, 0, 0]


def test_guesses_come_to_an_end_for_all_kinds_of_events_at_once(engine: Engine) -> None:
    """Twenty that were learned, and all are wrong by then."""
    kinds = [f"kind {number}" for number in range(20)]
    wrong = {"by": 0}

    @projector(idempotent=True, name="first")
    @on(*kinds)
    def handler(change: Any, session: Session) -> None:
        session.get_one(Total, (change["row"] + wrong["by"]) % ROWS).amount += 1

    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *given: sent.append(given[2].split()[0]))
    dispatcher = Dispatcher(sessionmaker(engine), handler)
    for again in range(3):
        wrong["by"] = int(again == 2)
        sent.clear()
        for kind in kinds:
            dispatcher.deliver(Message(f"{kind} {again}", {"row": 0}, type=kind))
        assert sent.count("WITH") == [0, 20, 8][again]
    assert totals(engine) == [40, 20, 0, 0]


# Levels, listeners, classes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["READ COMMITTED", "SERIALIZABLE"])
def test_not_where_a_later_select_could_give_another_row_or_reading_counts(engine: Engine, level: str) -> None:
    """There are no guesses."""
    deliver = Delivered(engine, isolation=level)
    for number in range(5):
        assert deliver(Added(number % ROWS)) != WITH_CLAIM
    assert totals(engine) == [2, 1, 1, 1]


def test_not_where_the_level_has_changed(engine: Engine) -> None:
    """A listener sets another one: what was read is not used, and nothing more is read."""
    deliver = Delivered(engine).learned()

    @event.listens_for(engine, "begin")
    def lower(connection: Connection) -> None:
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")

    assert deliver(Added(2))[-3:] == ["WITH", "SELECT", "UPDATE"]
    assert deliver(Added(2))[-3:] == SELECTED
    assert totals(engine) == [2, 1, 2, 0]


def test_not_on_another_engine(engine: Engine, postgresql: Database) -> None:
    """The session reads the entity elsewhere; that is an error, though its table has a namesake beside the markers."""
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA elsewhere"))
    other = create_engine(postgresql.url(), connect_args={"options": "-c search_path=elsewhere"})
    Base.metadata.create_all(other)
    read: list[Total | None] = []
    sessions = sessionmaker(engine, binds={Total: other})
    deliver = Delivered(engine, lambda change, session: read.append(session.get(Total, change.row)), sessions)
    for message_id in ("one", "two", "three"):
        with pytest.raises(TransactionViolatedError, match="second database connection"):
            deliver.dispatcher.deliver(Added(0), message_id=message_id)
    with pytest.raises(BatchFailed) as failed:
        deliver.dispatcher.deliver_batch([Message(f"b{row}", Added(row)) for row in range(3)])
    assert {each.outcome for each in failed.value.deliveries} == {Outcome.FAILED}
    assert read == []
    other.dispose()


@pytest.mark.parametrize("retval", [True, False])
def test_who_may_change_sql_is_asked_for_each_statement(engine: Engine, retval: bool) -> None:
    """It may look at something that the handler sets, to find another schema. Who only sees it, changes nothing."""

    def look(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> Any:
        return statement, parameters

    event.listen(engine, "before_cursor_execute", look, retval=retval)
    deliver = Delivered(engine)
    deliver(Added(1))
    assert deliver(Added(1)) == (SELECTED if retval else WITH_CLAIM)


COUNTS = """
    CREATE FUNCTION first_count() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN UPDATE first_total SET amount = amount + 100; RETURN NEW; END $$;
    CREATE TRIGGER first AFTER INSERT ON processed_message FOR EACH ROW EXECUTE FUNCTION first_count()"""


def test_not_where_the_marker_changes_the_read_model(engine: Engine) -> None:
    """By a trigger: the claim's snapshot does not have what it does itself."""
    with engine.begin() as connection:
        connection.execute(text(COUNTS))
    deliver = Delivered(engine)
    for _ in range(3):
        deliver(Added(1))
    assert totals(engine) == [300, 303, 300, 300]


def test_not_the_marker_itself(engine: Engine) -> None:
    """Mapped by the user, with its key in the event."""

    class Markers(DeclarativeBase):
        pass

    class Marker(Markers):
        __tablename__ = "processed_message"
        message_id: Mapped[str] = mapped_column(primary_key=True)
        handler: Mapped[str] = mapped_column(primary_key=True)

    def body(change: Any, session: Session) -> None:
        there.append(session.get(Marker, (change["id"], "first")) is not None)

    there: list[bool] = []
    deliver = Delivered(engine, body)
    for number in range(3):
        message = Message(f"n{number}", {"id": f"n{number}", "handler": "first"}, type="added")
        deliver.dispatcher.deliver(message)
    assert there == [True] * 3


def test_not_under_lock(engine: Engine) -> None:
    """read_models are."""
    deliver = Delivered(engine, read_models=[Total])
    deliver(Added(1))
    assert [deliver(Added(1)) for _ in range(4)] == [SELECTED] * 4


def test_listeners_that_come_later_are_told(engine: Engine) -> None:
    """Of an entity that is loaded."""
    deliver = Delivered(engine).learned()
    loaded: list[int] = []

    def load(total: Total, _context: Any) -> None:
        loaded.append(total.id)

    event.listen(Total, "load", load)
    assert deliver(Added(3)) == SELECTED
    event.remove(Total, "load", load)
    assert loaded == [3]
    assert deliver(Added(3)) == WITH_CLAIM


def test_a_session_class_of_ones_own_keeps_its_get(engine: Engine) -> None:
    """It is called."""
    asked: list[Any] = []

    class Own(Session):
        def get(self, entity: Any, ident: Any, **options: Any) -> Any:
            asked.append(ident)
            return super().get(entity, ident, **options)

    deliver = Delivered(engine, sessions=sessionmaker(engine, class_=Own))
    deliver(Added(2))
    assert [deliver(Added(2)) for _ in range(4)] == [SELECTED] * 4
    assert asked == [2] * 5


@pytest.mark.parametrize("when", ["after_begin", "after_transaction_create"])
def test_not_where_a_listener_may_keep_a_cursor(engine: Engine, when: str) -> None:
    """By which somebody could write past us."""
    sessions = sessionmaker(create_engine(engine.url, isolation_level="REPEATABLE READ"))

    def take(session: Session, *given: Any) -> None:
        if not session.in_nested_transaction():
            connection = given[1] if when == "after_begin" else session.connection()
            session.info["cursor"] = connection.connection.cursor()

    event.listen(sessions, when, take)

    def body(change: Added, session: Session) -> None:
        session.info["cursor"].execute("UPDATE first_total SET amount = amount + 100 WHERE id = 1")
        add(change, session)

    deliver = Delivered(sessions.kw["bind"], body, sessions=sessions)
    for _ in range(5):
        deliver(Added(1))
    assert totals(engine) == [0, 505, 0, 0]
    sessions.kw["bind"].dispose()


@pytest.mark.parametrize("step", ["rollback", "commit", "close"])
def test_nothing_is_given_out_after_a_violation(engine: Engine, step: str) -> None:
    """A handler that swallowed it is stopped at its next look at the database, as it would be without."""
    seen: list[Any] = []

    def body(change: Added, session: Session) -> None:
        with suppress(TransactionViolatedError):
            getattr(session, step)()
        seen.append(session.get(Total, change.row))

    deliver = Delivered(engine).learned()
    deliver.body = body
    with pytest.raises(TransactionViolatedError):
        deliver.dispatcher.deliver(Added(1), message_id="violating")
    assert seen == []


def test_a_text_that_a_collation_takes_for_another(engine: Engine) -> None:
    """The key that was read is not the key that was asked for: it goes the usual way."""
    with engine.begin() as connection:
        collation = collation_of_any_case(connection)
        connection.execute(text("CREATE TABLE first_word (word text PRIMARY KEY, amount integer)"))
        connection.execute(text("INSERT INTO first_word VALUES ('abc', 0)"))

    class Words(DeclarativeBase):
        pass

    class Word(Words):
        __tablename__ = "first_word"
        word: Mapped[str] = mapped_column(primary_key=True)
        amount: Mapped[int]

    def body(change: Any, session: Session) -> None:
        found = session.get_one(Word, change["word"])
        assert inspect(found).identity == (found.word,)
        found.amount += 1

    deliver = Delivered(engine, body)
    deliver({"word": "abc"}, type="added")
    assert deliver({"word": "abc"}, type="added") == WITH_CLAIM
    with engine.begin() as connection:
        connection.execute(text(f"ALTER TABLE first_word ALTER word TYPE text COLLATE {collation}"))
    deliver({"word": "ABC"}, type="added")
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT amount FROM first_word")) == 3


# Duplicates, failures, rivals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("driver", "cheaper"), [("psycopg", "SELECT"), ("psycopg2", "INSERT")])
def test_where_duplicates_come_in_a_row_they_cost_less(
    engine: Engine, postgresql: Database, driver: str, cheaper: str
) -> None:
    """With psycopg 3 one looks first, in one round trip; what is new after all costs as many as without."""
    with CutProxy(postgresql.url()) as proxy:
        near = create_engine(proxy.through(postgresql.url(f"postgresql+{driver}")), pool_size=1, max_overflow=0)
        deliver = Delivered(near).learned()
        assert [deliver(Added(1), "m1") for _ in range(5)] == [["WITH"]] * 3 + [[cheaper]] * 2
        before = len(proxy.trips)
        deliver(Added(1), "m1")
        assert len(proxy.trips) - before == (1 if cheaper == "SELECT" else 3)
        for _ in range(2):  # then no three of the last four are
            assert deliver(Added(1)) == (["SELECT", *WITH_CLAIM] if cheaper == "SELECT" else SELECTED)
        assert deliver(Added(1)) == WITH_CLAIM
        near.dispose()
    assert totals(engine) == [2, 4, 0, 0]


def test_a_rival_between_the_look_and_the_claim_is_met_by_the_claim(engine: Engine) -> None:
    """The look found nothing, the claim does: a duplicate, and applied once."""
    another = create_engine(engine.url)
    deliver, rival = Delivered(engine).learned(), Delivered(another)
    deliver.redelivered()

    def overtake(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("WITH"):
            rival.dispatcher.deliver(Added(2), message_id="both")

    event.listen(engine, "before_cursor_execute", overtake)
    assert deliver(Added(2), "both") == ["SELECT", "WITH"]
    event.remove(engine, "before_cursor_execute", overtake)
    another.dispose()
    assert totals(engine) == [2, 1, 1, 0]


def _by_session(sessions: Any, _engine: Engine, choose: Callable[[Connection], None]) -> None:
    event.listen(sessions, "after_begin", lambda _session, _transaction, connection: choose(connection))


def _by_its_first_transaction(sessions: Any, _engine: Engine, choose: Callable[[Connection], None]) -> None:
    def begun(session: Session, transaction: Any) -> None:
        if transaction.parent is None:
            choose(session.connection())

    event.listen(sessions, "after_transaction_create", begun)


def _by_engine(_sessions: Any, engine: Engine, choose: Callable[[Connection], None]) -> None:
    event.listen(engine, "begin", choose)


def _by_pool(_sessions: Any, engine: Engine, choose: Callable[[Connection], None]) -> None:
    event.listen(engine, "engine_connect", choose)


def _by_a_class(sessions: Any, _engine: Engine, choose: Callable[[Connection], None]) -> None:
    class Chosen(Session):
        def connection(self, *args: Any, **options: Any) -> Connection:
            began, connection = self.in_transaction(), super().connection(*args, **options)
            if not began:
                choose(connection)
            return connection

    sessions.class_ = Chosen


def _by_options(_sessions: Any, engine: Engine, _choose: Callable[[Connection], None]) -> None:
    @event.listens_for(engine, "set_connection_execution_options")
    def choose_a_schema(_connection: Connection, options: dict[str, Any]) -> None:
        options["schema_translate_map"] = {None: "first_tenant"}


def _by_statement(_sessions: Any, engine: Engine, _choose: Callable[[Connection], None]) -> None:
    @event.listens_for(engine, "before_cursor_execute")
    def before(_connection: Connection, cursor: Any, *_: Any) -> None:
        cursor.execute("SET LOCAL search_path TO first_tenant")


def _by_execution(_sessions: Any, engine: Engine, choose: Callable[[Connection], None]) -> None:
    event.listen(engine, "before_execute", lambda connection, *_: choose(connection))


def _by_cursor(_sessions: Any, engine: Engine, _choose: Callable[[Connection], None]) -> None:
    @event.listens_for(engine, "before_execute")
    def before(connection: Connection, *_: Any) -> None:
        with closing(connection.connection.cursor()) as cursor:
            cursor.execute("SET LOCAL search_path TO first_tenant")


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        (_by_session, "applied"),
        (_by_engine, "applied"),
        (_by_a_class, "applied"),
        (_by_options, "applied"),
        (_by_statement, "applied"),
        (_by_execution, "applied"),
        (_by_cursor, "applied"),
        (_by_its_first_transaction, "UnsafeSessionError"),
        (_by_pool, "InvalidRequestError"),
    ],
)
@pytest.mark.filterwarnings("ignore:Connection is already established")
def test_a_look_finds_what_the_claim_would_find(engine: Engine, how: Callable[..., None], outcome: str) -> None:
    """Where something chooses a tenant's schema for some messages, another tenant's message is no duplicate."""
    tenant: list[str] = []

    def choose(connection: Connection) -> None:
        if tenant:
            connection.exec_driver_sql(f"SET LOCAL search_path TO {tenant[0]}")

    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA IF EXISTS first_tenant CASCADE"))
        connection.execute(text("CREATE SCHEMA first_tenant"))
        for table in ("first_total", "processed_message"):
            connection.execute(text(f"CREATE TABLE first_tenant.{table} (LIKE {table} INCLUDING ALL)"))
        connection.execute(text("INSERT INTO first_tenant.first_total SELECT * FROM first_total"))
    own = create_engine(engine.url)
    sessions = sessionmaker(own)
    deliver = Delivered(own, sessions=sessions)
    deliver(Added(1))
    deliver.redelivered()
    how(sessions, own, choose)
    tenant.append("first_tenant")
    try:
        found = deliver.dispatcher.deliver(Added(1), message_id="m1").outcome.value
    except (ProjectorDedupError, InvalidRequestError) as error:
        found = type(error).__name__
    assert found == outcome
    own.dispose()
    with engine.connect() as connection:
        amount = connection.scalar(text("SELECT amount FROM first_tenant.first_total WHERE id = 1"))
    assert amount == (1 if outcome == "applied" else 0)
    assert totals(engine) == [0, 1, 0, 0]


@pytest.mark.skipif(not hasattr(Session, "execution_options"), reason="sessions of SQLAlchemy 2.0 have no options")
def test_a_look_is_not_taken_for_a_session_with_options(engine: Engine) -> None:
    """They may say in which schema the markers are."""
    schemas = {"schema_translate_map": {None: "public"}}
    deliver = Delivered(engine, sessions=sessionmaker(engine, execution_options=schemas))
    deliver(Added(1))
    assert [deliver(Added(1), "m1") for _ in range(5)] == [["INSERT"]] * 5


def test_a_look_opens_no_connection_of_its_own(engine: Engine) -> None:
    """Where each is new, it would cost more than it spares."""
    unpooled = create_engine(engine.url, poolclass=NullPool)
    deliver = Delivered(unpooled).learned()
    connected: list[Any] = []
    event.listen(unpooled, "connect", lambda *given: connected.append(given))
    assert [deliver(Added(1), "m1") for _ in range(5)] == [["WITH"]] * 3 + [["INSERT"]] * 2
    assert len(connected) == 5


@pytest.mark.parametrize(
    "options",
    [{"pool_size": 1, "max_overflow": 0}, {"poolclass": AssertionPool}, {"pool_pre_ping": True}, {"pool_recycle": 0}],
    ids=str,
)
def test_a_look_whatever_the_pool(engine: Engine, options: dict[str, Any]) -> None:
    """Its connection goes back before the claim asks for one."""
    own = create_engine(engine.url, **options)
    deliver = Delivered(own).learned()
    deliver.redelivered()
    assert deliver(Added(1), "m1") == ["SELECT"]
    assert deliver(Added(1)) == ["SELECT", *WITH_CLAIM]
    own.dispose()
    assert totals(engine) == [2, 2, 0, 0]


def test_a_look_on_a_lost_connection_is_tried_again(engine: Engine) -> None:
    """As a claim would be; where no connection can be had, the error says just that."""
    own = create_engine(engine.url, pool_size=1, max_overflow=0)
    deliver = Delivered(own).learned()
    deliver.redelivered()
    with own.connect() as connection:
        backend = connection.scalar(text("SELECT pg_backend_pid()"))
    with engine.connect() as connection:
        connection.execute(select(func.pg_terminate_backend(backend)))
    assert deliver(Added(1), "m1") == ["SELECT", "SELECT"]

    def refuse(*_: Any) -> None:
        raise psycopg.OperationalError("nobody is there")

    own.dispose()
    event.listen(own, "do_connect", refuse)
    with pytest.raises(RetriesExhaustedError, match="no connection"):
        deliver.dispatcher.deliver(Added(1), message_id="m1")
    event.remove(own, "do_connect", refuse)
    assert deliver(Added(1), "m1") == ["SELECT"]
    own.dispose()


def test_a_look_that_fails_says_why(engine: Engine) -> None:
    """What would fail again is not tried again."""
    hasty = create_engine(engine.url, connect_args={"options": "-c statement_timeout=100"})
    deliver = Delivered(hasty).learned()
    deliver.redelivered()
    deliver.sent.clear()
    with engine.begin() as connection:
        connection.execute(text("LOCK TABLE processed_message"))
        with pytest.raises(OperationalError, match="statement timeout"):
            deliver.dispatcher.deliver(Added(1), message_id="m1")
    assert len(deliver.sent) == 1
    assert deliver(Added(1), "m1") == ["SELECT"]
    hasty.dispose()


def test_a_look_that_is_interrupted_raises_what_interrupted_it(engine: Engine) -> None:
    """A worker's time limit, by a signal, while it waits for the table: its connection is not used again."""

    class OutOfTimeError(Exception):
        pass

    def interrupt(*_: Any) -> None:
        raise OutOfTimeError

    own = create_engine(engine.url, pool_size=1, max_overflow=0)
    deliver = Delivered(own).learned()
    deliver.redelivered()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with engine.begin() as connection:
            connection.execute(text("LOCK TABLE processed_message"))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(OutOfTimeError):
                deliver.dispatcher.deliver(Added(1), message_id="m1")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert deliver(Added(1), "m1") == ["SELECT"]
    own.dispose()


def until_somebody_waits(connection: Connection, goes_on: Callable[[], bool]) -> None:
    """For a lock; or until what should wait has not."""
    while goes_on() and not connection.scalar(text("SELECT count(*) FROM pg_locks WHERE NOT granted")):
        pass


def test_a_look_that_is_cancelled_leaves_nothing(engine: Engine, postgresql: Database) -> None:
    """Under asyncio, while it waits for the table: its connection is back in the pool, and the next delivery looks."""

    async def run() -> None:
        own = create_async_engine(postgresql.url(), pool_size=1, max_overflow=0)
        dispatcher = AsyncDispatcher(async_sessionmaker(own), add_awaited)
        outcomes = [(await dispatcher.deliver(Added(1), message_id="m1")).outcome for _ in range(6)]
        assert outcomes == [Outcome.APPLIED] + [Outcome.DUPLICATE] * 5
        with engine.begin() as connection:
            connection.execute(text("LOCK TABLE processed_message"))
            waiting = asyncio.create_task(dispatcher.deliver(Added(1), message_id="m1"))
            await asyncio.to_thread(until_somebody_waits, connection, lambda: not waiting.done())
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert own.sync_engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
        assert (await dispatcher.deliver(Added(1), message_id="m1")).outcome is Outcome.DUPLICATE
        await own.dispose()

    asyncio.run(run())
    assert totals(engine) == [0, 1, 0, 0]


def test_a_look_at_a_table_that_is_gone_says_so(engine: Engine) -> None:
    """As the claim does."""
    deliver = Delivered(engine).learned()
    deliver.redelivered()
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE processed_message"))
    with pytest.raises(MissingTableError):
        deliver.dispatcher.deliver(Added(1), message_id="m1")
    assert deliver.sent[0].startswith("SELECT")


def test_a_marker_that_is_not_committed_is_not_taken_for_a_duplicates(engine: Engine) -> None:
    """The look does not see it, and the claim waits for it; here it is rolled back, so the message is applied."""
    deliver = Delivered(engine).learned()
    deliver.redelivered()
    rival = create_engine(engine.url)
    with UnitOfWork(sessionmaker(rival)) as uow:
        assert uow.claim("held", "first")
        found: list[Outcome] = []
        thread = threading.Thread(
            target=lambda: found.append(deliver.dispatcher.deliver(Added(3), message_id="held").outcome)
        )
        thread.start()
        with rival.connect() as connection:
            until_somebody_waits(connection, thread.is_alive)
        assert found == []
    thread.join()
    assert found == [Outcome.APPLIED]
    assert totals(engine) == [2, 1, 0, 1]
    rival.dispose()


def test_a_row_that_cannot_be_read_does_not_keep_a_message(engine: Engine) -> None:
    """Its table was dropped, and its handler does not ask for it any more."""
    deliver = Delivered(engine).learned()
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE first_total"))
    deliver.body = _other_alone
    assert deliver(Added(1))[:2] == ["WITH", "INSERT"]
    assert deliver(Added(2)) == WITH_CLAIM
    assert totals(engine, Other) == [0, 7, 7, 0]


def test_a_value_that_cannot_be_read_is_met_by_who_asks_for_it(engine: Engine) -> None:
    """Not by another: the message is applied."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE first_day (id integer PRIMARY KEY, day date)"))
        connection.execute(text("INSERT INTO first_day VALUES (0, '2026-01-01'), (1, 'infinity')"))

    class Days(DeclarativeBase):
        pass

    class Day(Days):
        __tablename__ = "first_day"
        id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
        day: Mapped[date | None]

    def body(change: Added, session: Session) -> None:
        if change.row == 0:
            session.get_one(Day, 0).day = date(2026, 1, 2)
        else:
            add(change, session)

    deliver = Delivered(engine, body)
    deliver(Added(0))
    assert deliver(Added(0))[0] == "WITH"
    assert deliver(Added(1))[:2] == ["WITH", "INSERT"]
    assert totals(engine) == [0, 1, 0, 0]


def test_without_retries_the_redelivery_is_applied(engine: Engine) -> None:
    """The row cannot be read, and the one attempt is used up: the message is not acknowledged, and nothing is lost."""

    @projector(idempotent=True, name="first")
    @on(Added)
    def handler(change: Added, session: Session) -> None:
        if change.row == 0:
            add(change, session)

    dispatcher = Dispatcher(sessionmaker(engine), handler, retry=RetryPolicy(attempts=1))
    dispatcher.deliver(Added(0), message_id="one")
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE first_total"))
    with pytest.raises(RetriesExhaustedError, match="could not be read with its claim"):
        dispatcher.deliver(Added(1), message_id="two")
    assert dispatcher.deliver(Added(1), message_id="two").outcome is Outcome.APPLIED
    assert dispatcher.deliver(Added(1), message_id="two").outcome is Outcome.DUPLICATE


def test_an_error_of_the_claim_itself_stays_what_it_is(engine: Engine) -> None:
    """A bug in a listener, and the server's own end of patience: neither is tried again, and reading goes on."""
    deliver = Delivered(engine).learned()
    bugs = [RuntimeError("a bug")]

    @event.listens_for(engine, "before_cursor_execute")
    def fail(*_: Any) -> None:
        if bugs:
            raise bugs.pop()

    with pytest.raises(RuntimeError, match="a bug"):
        deliver.dispatcher.deliver(Added(2), message_id="buggy")
    rival = create_engine(engine.url)

    def hasten(connection: Connection) -> None:
        connection.exec_driver_sql("SET LOCAL statement_timeout = 100")

    with UnitOfWork(sessionmaker(rival)) as uow:
        assert uow.claim("held", "first")
        event.listen(engine, "begin", hasten)
        with pytest.raises(OperationalError, match="statement timeout"):
            deliver.dispatcher.deliver(Added(2), message_id="held")
        event.remove(engine, "begin", hasten)
    rival.dispose()
    assert deliver(Added(2)) == WITH_CLAIM


def test_redeliveries_do_not_wait_for_the_table_of_a_migration(engine: Engine) -> None:
    """With a bound for locks: the first that waited in vain is claimed without, and so are those that follow."""
    hasty = create_engine(engine.url, connect_args={"options": "-c lock_timeout=100"})
    deliver = Delivered(hasty).learned()
    with engine.begin() as connection:
        connection.execute(text("LOCK TABLE first_total"))
        assert [deliver(Added(1), "m1")[-1] for _ in range(4)] == ["INSERT"] * 3 + ["SELECT"]
    hasty.dispose()


@pytest.mark.filterwarnings("ignore:The create_engine.server_side_cursors")
def test_what_an_engine_asks_for_of_every_select_does_not_concern_the_claim(engine: Engine) -> None:
    """A cursor on the server's side cannot insert."""
    streaming = create_engine(engine.url, server_side_cursors=True)
    deliver = Delivered(streaming)
    deliver(Added(1))
    assert deliver(Added(1)) == WITH_CLAIM
    streaming.dispose()
    assert totals(engine) == [0, 2, 0, 0]


def test_a_rival_between_the_claim_and_the_write_is_noticed(engine: Engine) -> None:
    """Invariant I6: the row that came with the claim is old by then, and the database refuses to write it."""
    rival = create_engine(engine.url)
    read: list[int] = []

    def body(change: Added, session: Session) -> None:
        if not read:
            with rival.begin() as connection:
                connection.execute(text("UPDATE first_total SET amount = amount + 100 WHERE id = 3"))
        total = session.get_one(Total, change.row)
        read.append(total.amount)
        total.amount += 1

    deliver = Delivered(engine).learned()
    deliver.body = body
    assert deliver(Added(3)) == [*WITH_CLAIM, *WITH_CLAIM]
    assert read == [0, 100]
    assert totals(engine) == [2, 1, 0, 101]
    rival.dispose()


def test_threads_that_share_a_dispatcher_lose_nothing(engine: Engine) -> None:
    """On one row; expected from the input."""
    deliver = Delivered(engine, retry=RetryPolicy(attempts=100, within=60)).learned()  # four on one row
    barrier = threading.Barrier(4)

    def work(worker: int) -> None:
        barrier.wait()
        for number in range(25):
            deliver.dispatcher.deliver(Added(3), message_id=f"w{worker}-{number}")

    threads = [threading.Thread(target=work, args=[worker]) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert totals(engine) == [2, 1, 0, 100]


def test_the_statement_reads_the_row_only_if_the_marker_is_new(engine: Engine) -> None:
    """By the plan that was executed: for a duplicate, the read model is not looked into."""
    sent: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        sent.append((statement, parameters))

    deliver = Delivered(engine).learned()
    event.listen(engine, "before_cursor_execute", note)
    deliver(Added(1))
    event.remove(engine, "before_cursor_execute", note)
    statement, parameters = next(each for each in sent if each[0].startswith("WITH"))
    with engine.begin() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, COSTS off, TIMING off) {statement}", parameters)
        lines = plan.scalars().all()
    assert any("first_total" in line and "never executed" in line for line in lines), lines
