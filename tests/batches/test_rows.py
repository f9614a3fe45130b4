"""Rows that a batch reads once and writes once: which those are, and what happens where the one UPDATE fails."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from typing import Any

import pytest
from sqlalchemy import (
    JSON,
    BigInteger,
    Connection,
    DateTime,
    Engine,
    FetchedValue,
    ForeignKey,
    Integer,
    Numeric,
    String,
    create_engine,
    event,
    insert,
    literal,
    select,
    text,
    update,
)
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    column_property,
    mapped_column,
    reconstructor,
    relationship,
    sessionmaker,
)
from sqlalchemy.orm.exc import FlushError, StaleDataError

from databases import Database, collation_of_any_case
from projector_dedup import BatchFailed, Delivery, Dispatcher, Message, Outcome, RetryPolicy, UnitOfWork, on, projector
from projector_dedup.dialects.postgresql.rows import PostgreSQLRows
from projector_dedup.tables import default_metadata

MESSAGES = 6


class Base(DeclarativeBase):
    """The read model."""


class Row(Base):
    """Two of them."""

    __tablename__ = "kept"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int]


class Bystander(Base):
    """Another table."""

    __tablename__ = "bystander"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    kept_id: Mapped[int | None] = mapped_column(ForeignKey(Row.id))
    price: Mapped[Decimal | None] = mapped_column(Numeric(6, 2))
    seen: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    at: Mapped[datetime | None] = mapped_column(DateTime)
    share: Mapped[float | None]
    name: Mapped[str | None] = mapped_column(String(4))
    big: Mapped[int | None] = mapped_column(BigInteger)
    variant: Mapped[str | None] = mapped_column(String().with_variant(Integer(), "mysql"))
    kept: Mapped[Row | None] = relationship()


@pytest.fixture
def engine(postgresql: Database) -> Iterator[Engine]:
    """The tables, and two rows."""
    engine = create_engine(postgresql.url())
    default_metadata.create_all(engine)
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO kept VALUES (0, 0), (1, 0)"))
        connection.execute(text("INSERT INTO bystander VALUES (0)"))
    yield engine
    engine.dispose()


def add(number: int, session: Session) -> None:
    """To rows 0 and 1 by turns."""
    session.get_one(Row, number % 2).number += number


def delivered(
    sessions: sessionmaker[Session],
    body: Callable[[int, Session], None] = add,
    messages: int = MESSAGES,
    settings: dict[str, Any] | None = None,
) -> Counter[str]:
    """Deliver a batch; the statements by their first word, of those that name the table."""
    sent: Counter[str] = Counter()

    @projector(idempotent=True, name="kept", **(settings or {}))
    @on(int)
    def handler(number: int, session: Session) -> None:
        body(number, session)

    def count(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if "kept" in statement.lower() and "pg_class" not in statement:
            sent[statement.split()[0]] += 1

    engine = sessions.kw["bind"]
    event.listen(engine, "before_cursor_execute", count)
    batch = [Message(f"m{number}", number) for number in range(messages)]
    dispatcher = Dispatcher(sessions, handler, retry=RetryPolicy(attempts=2))
    deliveries: list[Delivery] = dispatcher.deliver_batch(batch)
    event.remove(engine, "before_cursor_execute", count)
    assert {each.outcome for each in deliveries} == {Outcome.APPLIED}
    return sent


def numbers(engine: Engine) -> list[int]:
    """What is in the table."""
    with engine.connect() as connection:
        return list(connection.scalars(select(Row.number).order_by(Row.id)))


def test_a_row_is_read_once_and_all_are_written_at_once(engine: Engine) -> None:
    """Two rows, however many the messages: the one that is asked for first, and one that was seen coming."""
    assert delivered(sessionmaker(engine), messages=40) == {"SELECT": 1, "UPDATE": 1}
    assert numbers(engine) == [sum(range(0, 40, 2)), sum(range(1, 40, 2))]


class Stock(Base):
    """A key of two columns, of which one is a name."""

    __tablename__ = "kept_stock"
    shop: Mapped[str] = mapped_column(String(8), primary_key=True)
    article: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int]


SHOPS = ("a", "ä", "%s", "'", "{x}")


def test_rows_of_messages_to_come_are_read_with_the_first(engine: Engine) -> None:
    """By keys of any text, and by one that is not in the event as it is in the table."""
    with engine.begin() as connection:
        connection.execute(insert(Stock), [{"shop": shop, "article": 7, "number": 0} for shop in SHOPS])

    @projector(idempotent=True, name="stock")
    @on(dict)
    def handler(event: dict[str, Any], session: Session) -> None:
        session.get_one(Stock, (event["shop"], int(event["article"]))).number += event["amount"]

    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *arguments: sent.append(arguments[2].split()[0]))
    orders = [{"amount": number, "article": "7", "shop": shop} for number, shop in enumerate(SHOPS * 3)]
    Dispatcher(sessionmaker(engine), handler).deliver_batch([Message(str(order), order) for order in orders])
    assert sent == ["INSERT", "SELECT", "SELECT", "UPDATE"]  # the claim, the catalogue, all rows, all rows
    with engine.connect() as connection:
        found = {stock.shop: stock.number for stock in connection.execute(select(Stock.shop, Stock.number))}
    assert found == {shop: sum(range(place, 15, 5)) for place, shop in enumerate(SHOPS)}


def test_what_a_message_writes_is_found_by_those_whose_row_was_read_ahead(engine: Engine) -> None:
    """SQL, an upsert, a savepoint that is rolled back: rows that were read before them are read again."""

    def body(number: int, session: Session) -> None:
        row = session.get_one(Row, number % 2)
        row.number += 1
        if number == 2:
            session.execute(update(Row).values(number=Row.number + 100))
        if number == 3:
            with suppress(ZeroDivisionError), session.begin_nested():
                session.execute(update(Row).values(number=-1))
                raise ZeroDivisionError

    delivered(sessionmaker(engine), body)
    assert numbers(engine) == [103, 103]


def test_where_the_keys_are_found_more_and_more_are_read_at_once(engine: Engine) -> None:
    """Of the message at hand and the next 25, then of 1 + 100."""
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO kept SELECT n, 0 FROM generate_series(2, 126) n"))

    def body(number: int, session: Session) -> None:
        session.get_one(Row, number).number += number

    assert delivered(sessionmaker(engine), body, messages=127) == {"SELECT": 2, "UPDATE": 1}
    assert numbers(engine) == list(range(127))


def test_a_row_that_was_changed_is_not_read_again_with_others(engine: Engine) -> None:
    """The second row of a message leads to those of messages to come, one of which the first row has been."""
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO kept SELECT n, 0 FROM generate_series(2, 9) n"))
    transfers = [(0, 5), (2, 0), (0, 6), (6, 0)]

    @projector(idempotent=True, name="kept")
    @on(tuple)
    def handler(transfer: tuple[int, int], session: Session) -> None:
        giver, taker = transfer
        session.get_one(Row, giver).number -= 1
        session.get_one(Row, taker).number += 10

    deliveries = [Message(str(number), transfer) for number, transfer in enumerate(transfers)]
    Dispatcher(sessionmaker(engine), handler).deliver_batch(deliveries)
    assert numbers(engine) == [18, 0, -1, 0, 0, 10, 9, 0, 0, 0]


class Tagged(Base):
    """What can be changed in place."""

    __tablename__ = "kept_tagged"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    tags: Mapped[list[int]] = mapped_column(JSON)


def test_what_can_be_changed_in_place_is_everybodys_own(engine: Engine) -> None:
    """Nobody was told of the change, so it is written by nobody; and the next message does not see it."""
    with engine.begin() as connection:
        connection.execute(insert(Tagged), [{"id": number, "tags": []} for number in range(3)])
    seen: list[list[int]] = []

    @projector(idempotent=True, name="tagged")
    @on(int)
    def handler(number: int, session: Session) -> None:
        tags = session.get_one(Tagged, number % 3).tags
        seen.append(list(tags))
        tags.append(number)

    Dispatcher(sessionmaker(engine), handler).deliver_batch([Message(str(number), number) for number in range(6)])
    assert seen == [[]] * 6


def test_a_batch_handler_that_reads_row_by_row_reads_them_at_once(engine: Engine) -> None:
    """The events that it was given are those to come."""

    @projector(idempotent=True, name="kept")
    @on(int, batch=True)
    def handler(events: list[int], session: Session) -> None:
        for each in events:
            session.get_one(Row, each).number += each

    sent: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *arguments: sent.append(arguments[2]))
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO kept SELECT n, 0 FROM generate_series(2, 126) n"))
    Dispatcher(sessionmaker(engine), handler).deliver_batch([Message(f"m{number}", number) for number in range(127)])
    assert len([statement for statement in sent if statement.startswith("SELECT kept")]) == 2
    assert numbers(engine) == list(range(127))


def test_new_rows_do_not_stop_it(engine: Engine) -> None:
    """A row that a message creates is inserted at once, and read once by those after it."""

    def body(number: int, session: Session) -> None:
        row = session.get(Row, number % 4)
        if row is None:
            row = Row(id=number % 4, number=0)
            session.add(row)
        row.number += number

    sent = delivered(sessionmaker(engine), body, messages=40)
    assert sent == {"SELECT": 1 + 2 * 2, "INSERT": 2, "UPDATE": 1 + 1}  # an INSERT may read, by a constraint say
    assert numbers(engine) == [sum(range(first, 40, 4)) for first in range(4)]


FUNCTION = "CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'; "
NUMBER = "CREATE FUNCTION g() RETURNS int LANGUAGE sql AS 'SELECT max(id) FROM bystander'; "


@pytest.mark.parametrize(
    "ddl",
    {
        "a trigger": FUNCTION + "CREATE TRIGGER t BEFORE UPDATE ON kept FOR EACH ROW EXECUTE FUNCTION f()",
        "a trigger of statements": FUNCTION + "CREATE TRIGGER t AFTER UPDATE ON kept EXECUTE FUNCTION f()",
        "a rule": "CREATE RULE r AS ON UPDATE TO kept DO ALSO UPDATE bystander SET name = 'x'",
        "row security": "ALTER TABLE kept ENABLE ROW LEVEL SECURITY",
        "a check": "ALTER TABLE kept ADD CHECK (number >= 0)",
        "a check of whole rows": "ALTER TABLE kept ADD CHECK (kept IS NOT NULL)",
        "a foreign key": "INSERT INTO kept SELECT n, n FROM generate_series(2, 99) n; "
        "ALTER TABLE kept ADD FOREIGN KEY (number) REFERENCES kept (id)",
        "an index": "CREATE INDEX ON kept (number)",
        "an index of an expression": "CREATE INDEX ON kept ((1 / (id + 1)))",
        "a partial index": "CREATE INDEX ON kept (id) WHERE number > 5",
        "a computed column": "ALTER TABLE kept ADD twice int GENERATED ALWAYS AS (number * 2) STORED",
        "a table that inherits": "CREATE TABLE more () INHERITS (kept)",
        "a parent": "CREATE TABLE parent (number int NOT NULL); ALTER TABLE kept INHERIT parent",
        "a default that reads": NUMBER + "ALTER TABLE kept ALTER number SET DEFAULT g()",
        "another type": "ALTER TABLE kept ALTER number TYPE numeric",
        "a domain": "CREATE DOMAIN small AS int CHECK (VALUE < 99); ALTER TABLE kept ALTER number TYPE small",
    }.items(),
    ids=lambda item: item[0],
)
def test_what_an_update_may_do_besides_is_done_each_time(engine: Engine, ddl: tuple[str, str]) -> None:
    """Or refused for a value in between: such a table is written message by message."""
    with engine.begin() as connection:
        connection.exec_driver_sql(ddl[1])
    assert delivered(sessionmaker(engine))["UPDATE"] == MESSAGES - 1  # adding 0 is none
    assert numbers(engine)[:2] == [6, 9]


def plain(**more: Any) -> type[Any]:
    """An entity on the same table, with something more."""
    attributes = {
        "__tablename__": "kept",
        "id": mapped_column(Integer, primary_key=True),
        "number": mapped_column(Integer),
        **more,
    }
    return type("Kept", (type("Fresh", (DeclarativeBase,), {}),), attributes)


def listening(name: str) -> type[Any]:
    """The same, with somebody who listens."""
    entity = plain()
    event.listen(entity, name, lambda *_: None)
    return entity


class FlushingSession(Session):
    """A user's own."""

    def flush(self, objects: Any = None) -> None:
        """As ever."""
        super().flush(objects)


class GettingSession(Session):
    """A user's own."""

    def get(self, *arguments: Any, **options: Any) -> Any:
        """As ever."""
        return super().get(*arguments, **options)


def twice() -> Any:
    """A column, and an attribute that is computed from it."""
    number = mapped_column(Integer)
    return {"number": number, "twice": column_property(number * 2)}


def _as_it_is(context: Any) -> Any:
    return context.get_current_parameters()["number"]


ENTITIES: dict[str, Callable[[], type[Any]]] = {
    "a column that each UPDATE sets": lambda: plain(number=mapped_column(Integer, onupdate=_as_it_is)),
    "a column that the server sets": lambda: plain(number=mapped_column(Integer, server_onupdate=FetchedValue())),
    "a computed attribute": lambda: plain(**twice()),
    "a reconstructor": lambda: plain(restored=reconstructor(lambda _: None)),
    **{
        f"a listener of {name}": partial(listening, name)
        for name in ("before_update", "after_update", "before_insert", "load", "refresh", "expire")
    },
}


def test_a_version_counter_counts_each_change(engine: Engine) -> None:
    """An entity with one is written by each message for itself; message 0 adds nothing."""
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE kept ADD COLUMN version integer NOT NULL DEFAULT 1"))
    version = mapped_column(Integer, nullable=False)
    entity = plain(version=version, __mapper_args__={"version_id_col": version})

    def body(number: int, session: Session) -> None:
        session.get_one(entity, number % 2).number += number

    delivered(sessionmaker(engine), body)
    with engine.connect() as connection:
        assert connection.scalars(text("SELECT version FROM kept ORDER BY id")).all() == [3, 4]


@pytest.mark.parametrize("make", ENTITIES.values(), ids=ENTITIES)
def test_what_the_orm_does_besides_is_done_each_time(engine: Engine, make: Callable[[], type[Any]]) -> None:
    """Where an UPDATE or a SELECT would be noticed by more than the row."""
    entity = make()

    def body(number: int, session: Session) -> None:
        session.get_one(entity, number % 2).number += number

    assert delivered(sessionmaker(engine), body)["UPDATE"] >= MESSAGES - 1
    assert numbers(engine) == [6, 9]


@pytest.mark.parametrize("session_class", [FlushingSession, GettingSession])
def test_a_session_that_does_more_is_called_each_time(engine: Engine, session_class: type[Session]) -> None:
    """It may count, or add what belongs to each."""
    assert delivered(sessionmaker(engine, class_=session_class))["UPDATE"] == MESSAGES - 1
    assert numbers(engine) == [6, 9]


@pytest.mark.parametrize(
    "name",
    ["before_flush", "after_flush", "do_orm_execute", "loaded_as_persistent", "detached_to_persistent", "after_begin"],
)
def test_listeners_of_a_session_are_called_each_time(engine: Engine, name: str) -> None:
    """The same."""
    sessions = sessionmaker(engine)
    event.listen(sessions, name, lambda *_: None)
    assert delivered(sessions)["UPDATE"] == MESSAGES - 1
    assert numbers(engine) == [6, 9]


def test_what_a_listener_changes_after_a_flush_is_flushed_too(engine: Engine) -> None:
    """As by a COMMIT, which tries until nothing is left."""
    sessions = sessionmaker(engine)

    @event.listens_for(sessions, "after_flush_postexec")
    def count(session: Session, _context: Any) -> None:
        if session.info.pop("counts", None):
            session.get_one(Row, 1).number += 1

    def body(_number: int, session: Session) -> None:
        session.info["counts"] = True
        session.get_one(Row, 0).number += 1

    delivered(sessions, body)
    assert numbers(engine) == [MESSAGES, MESSAGES]


def test_a_listener_that_never_ends_is_an_error(engine: Engine) -> None:
    """The same as SQLAlchemy's, which a message by itself meets."""
    sessions = sessionmaker(engine)

    @event.listens_for(sessions, "after_flush_postexec")
    def count(session: Session, _context: Any) -> None:
        session.get_one(Row, 1).number += 1

    with pytest.raises(BatchFailed) as failed:
        delivered(sessions)
    assert {type(each) for each in failed.value.exceptions} == {FlushError}
    assert numbers(engine) == [0, 0]


@pytest.mark.parametrize("how", ["a listener", "a default", "a CTE", "a query"])
def test_an_insert_that_changes_other_rows_is_found(engine: Engine, how: str) -> None:
    """Not every INSERT within a flush is the flush's: an upsert changes a row that was read."""

    def change(connection: Connection) -> None:
        more = update(Row).where(Row.id == 0).values(number=Row.number + 100).returning(Row.id).cte()
        if how == "a CTE":
            connection.execute(insert(Row).add_cte(more).values(id=next(ids), number=0))
        elif how == "a query":
            connection.execute(insert(Row).from_select(["id", "number"], select(more.c.id + next(ids), literal(0))))
        else:
            upsert = postgresql_insert(Row).values(id=0, number=0)
            connection.execute(upsert.on_conflict_do_update(index_elements=["id"], set_={"number": Row.number + 100}))

    def default(context: Any) -> int:
        change(context.connection)
        return 0

    class Lines(DeclarativeBase):
        pass

    class Line(Lines):
        __tablename__ = "line"
        id: Mapped[int] = mapped_column(primary_key=True)
        number: Mapped[int] = mapped_column(default=default if how == "a default" else 0)

    ids = iter(range(100, 200))
    Lines.metadata.create_all(engine)
    if how != "a default":
        event.listen(Line, "before_insert", lambda _mapper, connection, _line: change(connection))

    def body(number: int, session: Session) -> None:
        if number % 2:
            session.add(Line())
        else:
            session.get_one(Row, 0).number += 1

    delivered(sessionmaker(engine), body)
    assert numbers(engine)[0] == 303


@pytest.mark.parametrize("settings", [{"isolation": "READ COMMITTED"}, {"read_models": [Row]}], ids=str)
def test_where_others_may_change_a_row_meanwhile_it_is_read_each_time(engine: Engine, settings: dict[str, Any]) -> None:
    """At READ COMMITTED each message finds what rivals have committed by then."""
    assert delivered(sessionmaker(engine), settings=settings)["UPDATE"] == MESSAGES - 1
    assert numbers(engine) == [6, 9]


def test_at_serializable_nobody_may(engine: Engine) -> None:
    """Not only at the default level. But what was read counts there: nothing is read before it is asked for."""
    sent = delivered(sessionmaker(engine), settings={"isolation": "SERIALIZABLE"})
    assert sent == {"SELECT": 2, "UPDATE": 1}
    assert numbers(engine) == [6, 9]


def test_a_rivals_change_runs_the_batch_again(engine: Engine) -> None:
    """It is met where the rows are written, at the end; nothing is lost."""
    rival = iter([True])

    def body(number: int, session: Session) -> None:
        add(number, session)
        if number == MESSAGES - 1 and next(rival, False):
            with engine.begin() as other:
                other.execute(update(Row).values(number=Row.number + 100))

    assert delivered(sessionmaker(engine), body)["UPDATE"] == 1 + 2  # the rival's, one that failed, one that did not
    assert numbers(engine) == [106, 109]


def test_a_conflict_that_a_handler_swallows_runs_the_batch_again_too(engine: Engine) -> None:
    """What those before it changed is written before its SELECT, in the midst of its `try`."""
    rival = iter([True])

    def body(number: int, session: Session) -> None:
        if number == 3 and next(rival, False):
            with engine.begin() as other:
                other.execute(update(Row).values(number=Row.number + 100))
            with suppress(Exception):  # as people do
                session.execute(text("SELECT 1"))
        add(number, session)

    sent = delivered(sessionmaker(engine), body)
    assert sent["UPDATE"] == 1 + 2  # in parts, as after an error of a message's own, it would be more
    assert numbers(engine) == [106, 109]


def test_who_holds_the_drivers_connection_finds_everything(engine: Engine) -> None:
    """It is asked for once, and used behind the back of the session by messages that come later."""
    held: list[Any] = []
    found: list[Any] = []

    def body(number: int, session: Session) -> None:
        if not held:
            held.append(session.connection().connection.cursor())
        found.append(held[0].execute("SELECT sum(number) FROM kept").fetchone()[0])
        add(number, session)

    delivered(sessionmaker(engine), body)
    assert found == [0, 0, 1, 3, 6, 10]


@pytest.mark.parametrize("taken", ["by the first message", "after_begin", "after_transaction_create"])
def test_so_does_who_took_it_early(engine: Engine, taken: str) -> None:
    """In a unit of work of one's own; or from a listener that was there before us."""
    sessions = sessionmaker(engine.execution_options(isolation_level="REPEATABLE READ"))

    def take(session: Session, *given: Any) -> None:
        if not session.in_nested_transaction():
            connection = given[1] if taken == "after_begin" else session.connection()
            session.info["cursor"] = connection.connection.cursor()

    if taken.startswith("after"):
        event.listen(sessions, taken, take)
    found: list[int] = []
    with UnitOfWork(sessions) as uow:
        for number in sorted(uow.claim_many([(str(number), None) for number in range(MESSAGES)], "kept")):
            if "cursor" not in uow.session.info:
                uow.session.info["cursor"] = uow.session.connection().connection.cursor()
            uow.session.info["cursor"].execute("UPDATE kept SET number = number + 10 WHERE id = 0 RETURNING number")
            found.append(uow.session.info["cursor"].fetchone()[0])
            add(int(number) * 2, uow.session)
            uow.next_message()
        uow.commit()
    assert found == [10, 20, 32, 46, 62, 80]
    assert numbers(engine) == [90, 0]


def test_a_row_that_cannot_be_read_is_met_by_who_asks_for_it(engine: Engine) -> None:
    """And by nobody who reads ahead: Python has no infinite moment."""
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO bystander (id, at) SELECT n, NULL FROM generate_series(1, 10) n"))
        connection.execute(text("UPDATE bystander SET at = 'infinity' WHERE id = 5"))
    entered: list[int] = []

    @projector(idempotent=True, name="bystander")
    @on(int)
    def handler(number: int, session: Session) -> None:
        entered.append(number)
        session.get_one(Bystander, 2 * number).big = number

    Dispatcher(sessionmaker(engine), handler).deliver_batch([Message(str(number), number) for number in range(6)])
    assert entered == [0, 1, 2, 3, 4, 5]
    with engine.connect() as connection:
        assert connection.scalars(text("SELECT big FROM bystander WHERE big IS NOT NULL ORDER BY id")).all() == entered


def _adds_or_swallows(number: int, session: Session) -> None:
    """Messages 1 and 3 change a row; the SELECT of the message behind each writes that, and swallows the error."""
    if number in (1, 3):
        add(number, session)
        return
    with suppress(Exception):
        session.execute(text("SELECT 1"))


@pytest.mark.parametrize(("body", "failing"), [(add, 5), (_adds_or_swallows, 2)])
def test_a_row_that_is_not_there_any_more_is_missed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, body: Callable[[int, Session], None], failing: int
) -> None:
    """As the ORM would: the UPDATE counts its rows. A handler that swallows the error is not rid of it."""
    look = PostgreSQLRows.look
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE RULE r AS ON UPDATE TO kept DO INSTEAD NOTHING")
        connection.exec_driver_sql("CREATE TABLE innocent (id int PRIMARY KEY, number int)")
    innocent = plain(__tablename__="innocent").__table__
    monkeypatch.setattr(PostgreSQLRows, "look", lambda self, connection, _: look(self, connection, innocent))
    with pytest.raises(BatchFailed, match=f"{failing} of 6") as failed:
        delivered(sessionmaker(engine), body)
    assert {type(error.__cause__) for error in failed.value.exceptions} == {StaleDataError}


def columns(engine: Engine, entity: type[Any]) -> dict[str, Any]:
    """What is known of its table."""
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        table = PostgreSQLRows().look(connection, entity.__table__)
    assert table is not None
    return dict(table.columns)


NOON = datetime(2024, 2, 3, 12, 0)  # noqa: DTZ001  # as it is stored


@pytest.mark.parametrize(
    ("name", "taken", "refused"),
    [
        ("id", [0, 2**31 - 1, -(2**31)], [None, 2**31, 1.0, True, "1"]),
        ("big", [None, 2**63 - 1], [2**63]),
        ("price", [Decimal("1.50"), Decimal("-9999.99"), None], [Decimal("1.5"), Decimal("1.505"), Decimal(1), 1.5]),
        ("price", [Decimal("0.00")], [Decimal("-0.00"), Decimal("NaN"), Decimal("10000.00")]),
        ("at", [NOON, None], [NOON.replace(fold=1), NOON.replace(tzinfo=UTC), "2024-02-03"]),
        ("share", [0.0, 1.5, None], [-0.0, float("nan"), 1]),
        ("name", ["äöü€", "", None], ["abcde", "a\0", "\udc80", 4]),
    ],
)
def test_values_that_come_back_as_they_were(engine: Engine, name: str, taken: list[Any], refused: list[Any]) -> None:
    """And that are stored without an error: others are written at once, so that the message meets the error itself."""
    column = columns(engine, Bystander)[name]
    assert [value for value in taken if not column.accepts(value)] == []
    assert [value for value in refused if column.accepts(value)] == []


def test_columns_that_may_change(engine: Engine) -> None:
    """Not the key, nor what refers to another row, has a type for each database, or comes back in another time zone."""
    found = columns(engine, Bystander)
    assert {name for name, column in found.items() if column.can_change} == {"price", "at", "share", "name", "big"}
    assert set(found) == {"id", "kept_id", "price", "at", "share", "name", "big"}


def test_a_key_that_other_letters_find_too_is_not_known(engine: Engine) -> None:
    """By a collation for which two texts that differ are equal."""
    with engine.begin() as connection:
        collation = collation_of_any_case(connection)
        connection.exec_driver_sql(f"ALTER TABLE bystander ALTER name TYPE varchar(4) COLLATE {collation}")
    assert "name" not in columns(engine, Bystander)
