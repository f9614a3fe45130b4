"""The row that comes with the claim: when, when not, and that a handler cannot tell but by the clock."""

import asyncio
import itertools
import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from datetime import date
from types import FrameType
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import (
    Connection,
    Engine,
    MetaData,
    Uuid,
    create_engine,
    event,
    func,
    inspect,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from cut_proxy import CutProxy
from databases import Database, collation_of_any_case
from first_row_rig import (
    BOTH,
    ROWS,
    SELECTED,
    WITH_CLAIM,
    Added,
    Base,
    Body,
    Delivered,
    Named,
    Other,
    Removed,
    Total,
    add,
    add_awaited,
    engine_of,
    kinds_of,
    reset,
    totals,
)
from projector_dedup import (
    AsyncDispatcher,
    BatchFailed,
    Dispatcher,
    Message,
    MissingTableError,
    Outcome,
    RetriesExhaustedError,
    RetryPolicy,
    TransactionViolatedError,
    UnitOfWork,
    make_tables,
    on,
    projector,
)
from projector_dedup.dialects.mariadb.rows import MariaDBRows
from projector_dedup.tables import default_tables


@pytest.fixture(params=["postgresql", "mariadb", "sqlite"])
def database(request: pytest.FixtureRequest) -> Any:
    """Where a claim can read a row."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    """The tables, and rows of zeros."""
    with engine_of(database) as engine:
        yield engine


def one_of(engine: Engine, **each: Any) -> Any:
    """What the database has."""
    return each[engine.dialect.name]


ASKED = ["SELECT", "INSERT", "SELECT", "SELECT", "UPDATE"]
"""As ``SELECTED``, where MariaDB is asked again whether both tables are fit."""

on_servers = pytest.mark.parametrize("database", ["postgresql", "mariadb"], indirect=True)


def test_the_row_comes_with_the_claim(engine: Engine) -> None:
    """From the first message on; and the read model is right."""
    deliver = Delivered(engine)
    assert BOTH in deliver(Added(3)), "behind a look into the catalogue"
    for number in range(8):
        assert deliver(Added(number % ROWS)) == WITH_CLAIM
    assert totals(engine) == [2, 2, 2, 3]


@pytest.mark.parametrize(
    ("database", "driver", "trips"),
    [
        ("postgresql", "psycopg", 3),
        ("postgresql", "psycopg2", 4),
        ("mariadb", "pymysql", 3),
        ("mariadb", "mysqldb", 4),
    ],
    indirect=["database"],
)
def test_it_is_a_round_trip_less(engine: Engine, database: Database, driver: str, trips: int) -> None:
    """Less than the same handler takes without deduplication: four, with its ROLLBACK on MariaDB."""
    with CutProxy(database.url()) as proxy:
        near = create_engine(proxy.through(database.url(f"{database.engine}+{driver}")), pool_size=1, max_overflow=0)
        deliver = Delivered(near)
        for _ in range(8):
            deliver(Added(2))
        before = len(proxy.trips)
        deliver(Added(1))
        assert len(proxy.trips) - before == trips
        near.dispose()
    assert totals(engine) == [0, 1, 8, 0]


@pytest.mark.parametrize(
    ("database", "driver"),
    [
        ("postgresql", "psycopg"),
        ("postgresql", "asyncpg"),
        ("mariadb", "asyncmy"),
        ("mariadb", "aiomysql"),
        ("sqlite", "aiosqlite"),
    ],
    indirect=["database"],
)
def test_under_asyncio(engine: Engine, database: Database, driver: str) -> None:
    """The same."""

    async def run() -> None:
        waiting = create_async_engine(database.url(f"{database.engine}+{driver}"))
        dispatcher = AsyncDispatcher(async_sessionmaker(waiting), add_awaited)
        await dispatcher.deliver(Added(0), message_id="learned")
        event.listen(waiting.sync_engine, "before_cursor_execute", lambda *given: sent.append(given[2]))
        await asyncio.gather(*(dispatcher.deliver(Added(1 + n % 3), message_id=f"m{n}") for n in range(30)))
        await waiting.dispose()

    sent: list[str] = []
    asyncio.run(run())
    assert totals(engine) == [1, 10, 10, 10]
    assert sum("claimed" in statement for statement in sent) > 0


@pytest.mark.parametrize(
    ("database", "driver"),
    [
        ("postgresql", "psycopg"),
        ("postgresql", "psycopg2"),
        ("mariadb", "pymysql"),
        ("mariadb", "mysqldb"),
        ("sqlite", "pysqlite"),
    ],
    indirect=["database"],
)
def test_keys_of_several_columns_and_kinds(engine: Engine, database: Database, driver: str) -> None:
    """A tuple of paths, into an event of dictionaries."""

    def body(change: Any, session: Session) -> None:
        key = change["shop"], change["item"]["number"]
        found = session.get(Named, key)
        if found is None:
            session.add(Named(shop=key[0], number=key[1], amount=1))
        else:
            found.amount += 1

    items: list[dict[str, Any]] = [
        {"shop": shop, "item": {"number": UUID(int=n)}} for shop in ("a", "b'%%:x", "ü") for n in range(2)
    ]
    other = create_engine(database.url(f"{database.engine}+{driver}"))
    deliver = Delivered(other, body, reads={Named: ("shop", "item.number")})
    for item in items:
        assert BOTH in deliver(item, type="added")
    for item in items:
        assert deliver(item, type="added") == WITH_CLAIM
    other.dispose()
    with Session(engine) as session:
        found = {(each.shop, each.number): each.amount for each in session.scalars(select(Named))}
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
    assert deliver(Added(9)) == [BOTH, "INSERT"]
    assert deliver(Added(9)) == WITH_CLAIM
    assert totals(engine) == [2, 1, 0, 0, 2]


def test_each_kind_of_event_has_its_key_elsewhere(engine: Engine) -> None:
    """One handler of two."""

    def body(change: Added | Removed, session: Session) -> None:
        if isinstance(change, Added):
            session.get_one(Total, change.row).amount += 1
        else:
            session.get_one(Other, change.number).amount -= 1

    def key(change: Added | Removed) -> list[int]:
        return [change.row] if isinstance(change, Added) else []

    def other_key(change: Added | Removed) -> list[int]:
        return [] if isinstance(change, Added) else [change.number]

    deliver = Delivered(engine, body, reads={Total: key, Other: other_key})
    deliver(Added(3))
    deliver(Removed(3))
    for number in range(3):
        assert deliver(Added(number)) == deliver(Removed(number)) == WITH_CLAIM
    assert (totals(engine), totals(engine, Other)) == ([1] * 4, [-1] * 4)


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
    with closing(driver.cursor()) as cursor:
        cursor.execute(f"UPDATE first_total SET amount = amount + 10 WHERE id = {change.row:d}")
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
    assert deliver(Added(2))[0] == BOTH
    assert (totals(engine), totals(engine, Other)) == expected


# Levels, listeners, classes -----------------------------------------------------------------------------------------


@on_servers
@pytest.mark.parametrize("level", ["READ COMMITTED", "SERIALIZABLE"])
def test_not_where_a_later_select_could_give_another_row_or_reading_counts(engine: Engine, level: str) -> None:
    """There are no guesses."""
    deliver = Delivered(engine, isolation=level)
    for number in range(5):
        assert deliver(Added(number % ROWS)) != WITH_CLAIM
    assert totals(engine) == [2, 1, 1, 1]


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_not_where_the_level_has_changed(engine: Engine) -> None:
    """A listener sets another one: what was read is not used."""
    deliver = Delivered(engine).learned()

    @event.listens_for(engine, "begin")
    def lower(connection: Connection) -> None:
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")

    for _ in range(2):
        assert deliver(Added(2))[-3:] == [BOTH, "SELECT", "UPDATE"]
    assert totals(engine) == [2, 1, 2, 0]


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
@pytest.mark.parametrize("when", ["begin", "checkout"])
def test_not_where_the_level_may_have_changed_unseen(engine: Engine, when: str) -> None:
    """MariaDB does not tell which level was chosen for one transaction."""
    deliver = Delivered(engine).learned()

    def lower(connection: Any, *_: Any) -> None:
        driver = connection.connection.driver_connection if when == "begin" else connection
        with closing(driver.cursor()) as cursor:
            cursor.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")

    event.listen(engine, when, lower)
    assert deliver(Added(2)) == ASKED, "the listener may have chosen another database, too"
    event.remove(engine, when, lower)
    assert deliver(Added(2)) == WITH_CLAIM


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_not_where_the_session_has_another_level(engine: Engine) -> None:
    """By the user's own code, on a connection that was right as it was found, and is not set again."""
    right = {"init_command": "SET SESSION innodb_snapshot_isolation = ON"}
    lowered = create_engine(engine.url, pool_size=1, max_overflow=0, connect_args=right)
    deliver = Delivered(lowered).learned()
    with lowered.connect() as connection:
        connection.exec_driver_sql("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
    for _ in range(2):
        assert deliver(Added(2)) == [BOTH, "SELECT", "UPDATE"]
    lowered.dispose()


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
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


TRIGGER = "CREATE TRIGGER first AFTER INSERT ON processed_message FOR EACH ROW"
COUNT = "UPDATE first_total SET amount = amount + 100"
COUNTS = {
    "postgresql": f"""CREATE FUNCTION first_count() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN {COUNT}; RETURN NEW; END $$;
        {TRIGGER} EXECUTE FUNCTION first_count()""",
    "mariadb": f"{TRIGGER} {COUNT}",
    "sqlite": f"{TRIGGER} BEGIN {COUNT}; END",
}


def test_where_the_marker_changes_the_read_model(engine: Engine) -> None:
    """By a trigger: that is seen, though the snapshot of PostgreSQL's claim does not have what it does itself."""
    with engine.begin() as connection:
        connection.execute(text(one_of(engine, **COUNTS)))
    deliver = Delivered(engine)
    for _ in range(3):
        deliver(Added(1))
    assert totals(engine) == [300, 303, 300, 300]


on_postgresql = pytest.mark.parametrize("database", ["postgresql"], indirect=True)


@on_postgresql
def test_a_trigger_on_the_markers_that_comes_later(engine: Engine) -> None:
    """A dispatcher that has read rows with its claims sees at once that it no longer may."""
    deliver = Delivered(engine).learned()
    with engine.begin() as connection:
        connection.execute(text(COUNTS["postgresql"]))
    for _ in range(3):
        deliver(Added(1))
    assert totals(engine) == [302, 304, 300, 300]


@on_postgresql
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_a_trigger_for_which_a_claim_has_waited(engine: Engine, database: Database, driver: str) -> None:
    """Its snapshot is older than the trigger, which runs nevertheless: what the trigger wrote is not overwritten."""
    own = create_engine(database.url(f"postgresql+{driver}"))
    deliver = Delivered(own).learned()
    waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'processed_message'::regclass")
    with engine.connect() as connection, engine.connect() as outside:
        connection.execute(text(COUNTS["postgresql"]))
        claim = threading.Thread(target=deliver, args=(Added(1),))
        claim.start()
        while claim.is_alive() and not outside.scalar(waiting):
            outside.rollback()
        connection.commit()
        claim.join()
    own.dispose()
    assert BOTH in kinds_of(deliver.sent), "the claim was one that reads a row"
    assert totals(engine) == [102, 102, 100, 100]


PARTITIONED = """
    DROP TABLE processed_message;
    CREATE TABLE processed_message (message_id text COLLATE "C", handler text COLLATE "C", occurred_at timestamptz,
        processed_at timestamptz NOT NULL DEFAULT CURRENT_TIMESTAMP, PRIMARY KEY (message_id, handler))
        PARTITION BY HASH (message_id);
    CREATE TABLE part PARTITION OF processed_message FOR VALUES WITH (MODULUS 1, REMAINDER 0);
"""


@on_postgresql
def test_with_markers_in_partitions_rows_are_read_again(engine: Engine) -> None:
    """A trigger of statements is the parent's, and no partition knows of it: what came with the claim is not used."""
    of_statements = COUNTS["postgresql"].replace("FOR EACH ROW", "FOR EACH STATEMENT")
    deliver = Delivered(engine).learned()
    with engine.begin() as connection:
        connection.execute(text(PARTITIONED + of_statements))
    deliver(Added(1))
    with engine.begin() as connection:
        connection.execute(text("DROP TRIGGER first ON processed_message"))
    later = Delivered(engine)
    assert [later(Added(1)) for _ in range(3)] == [[BOTH, "SELECT", "UPDATE"]] * 3
    assert totals(engine) == [102, 105, 100, 100]


VIEW = "CREATE VIEW first_other AS SELECT id, amount FROM first_total"
NOT_PLAIN = {
    "a view": ("DROP TABLE first_other", VIEW),
    "a computed column": ("ALTER TABLE first_other ADD twice integer AS (amount * 2) VIRTUAL",),
    "no transactions": ("ALTER TABLE first_other ENGINE=Aria",),
    "a virtual table": ("DROP TABLE first_other", "CREATE VIRTUAL TABLE first_other USING fts5(id, amount)"),
}


@pytest.mark.parametrize(
    ("database", "table"),
    [
        ("postgresql", "a view"),
        ("mariadb", "a view"),
        ("mariadb", "a computed column"),
        ("mariadb", "no transactions"),
        ("sqlite", "a view"),
        ("sqlite", "a virtual table"),
    ],
    indirect=["database"],
)
def test_not_what_is_no_plain_table(engine: Engine, table: str) -> None:
    """Which may give something else a moment later, or do something."""
    with engine.begin() as connection:
        for statement in NOT_PLAIN[table]:
            connection.execute(text(statement))
    body: Body = lambda change, session: session.get(Other, change.row)  # noqa: E731
    deliver = Delivered(engine, body, reads={Other: "row"})
    assert [BOTH in deliver(Added(1)) for _ in range(4)] == [False] * 4


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_not_what_a_temporary_table_hides(engine: Engine) -> None:
    """It is another table in each connection."""
    own = create_engine(engine.url)

    @event.listens_for(own, "connect")
    def hide(driver: Any, _record: object) -> None:
        driver.execute("CREATE TEMPORARY TABLE first_total AS SELECT * FROM main.first_total")

    deliver = Delivered(own)
    assert [BOTH in deliver(Added(1)) for _ in range(4)] == [False] * 4
    own.dispose()


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_not_over_a_connection_that_lacks_letters(engine: Engine) -> None:
    """A text that a driver cannot send would fail the claim."""
    narrow = create_engine(engine.url.update_query_dict({"charset": "latin1"}))
    deliver = Delivered(narrow)
    assert [BOTH in deliver(Added(1)) for _ in range(4)] == [False] * 4
    narrow.dispose()


def test_each_dispatcher_claims_in_its_own_table(engine: Engine) -> None:
    """Though they send the same SQL but for that, on one engine."""
    metadata = MetaData()
    second = make_tables(metadata, name="first_inbox")
    metadata.create_all(engine)

    @projector(idempotent=True, name="first")
    @on(Added, reads={Total: "row"})
    def handler(change: Added, session: Session) -> None:
        add(change, session)

    for number in range(4):
        for tables in (default_tables, second):
            dispatcher = Dispatcher(sessionmaker(engine), handler, tables=tables)
            for part in "ab":
                message_id = f"{part}{number} of {tables.marker.name}"
                assert dispatcher.deliver(Added(number), message_id=message_id).outcome is Outcome.APPLIED
    with engine.connect() as connection:
        assert [
            connection.scalar(select(func.count()).select_from(each.marker)) for each in (default_tables, second)
        ] == [8, 8]
    assert totals(engine) == [4, 4, 4, 4]


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
    deliver = Delivered(engine, body, reads={Marker: ("id", "handler")})
    for number in range(3):
        message = Message(f"n{number}", {"id": f"n{number}", "handler": "first"}, type="added")
        deliver.dispatcher.deliver(message)
    assert there == [True] * 3


def test_under_lock_too(engine: Engine) -> None:
    """Of read_models; rows of other entities are read when they are asked for: at READ COMMITTED they may change."""

    def body(change: Added, session: Session) -> None:
        session.get_one(Total, change.row).amount += 1
        session.get_one(Other, change.row).amount += 1

    deliver = Delivered(engine, read_models=[Total], reads={Total: "row", Other: "row"})
    assert BOTH in deliver(Added(1))
    assert [deliver(Added(1)) for _ in range(3)] == [WITH_CLAIM] * 3
    deliver.body = body
    assert "SELECT" in deliver(Added(1)), "of the other entity"
    assert totals(engine) == [0, 5, 0, 0]


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
    level = {"isolation_level": "REPEATABLE READ"} if engine.dialect.name != "sqlite" else {}
    sessions = sessionmaker(create_engine(engine.url, **level))

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

    def make(collation: str, amount: int) -> None:
        with engine.begin() as connection:
            connection.execute(text("DROP TABLE IF EXISTS first_word"))
            word = f"word varchar(20) COLLATE {collation} PRIMARY KEY"
            connection.execute(text(f"CREATE TABLE first_word ({word}, amount integer)"))
            connection.execute(text(f"INSERT INTO first_word VALUES ('abc', {amount})"))

    of_any_case = {"mariadb": "utf8mb4_general_ci", "sqlite": "NOCASE"}
    if engine.dialect.name == "postgresql":
        with engine.begin() as connection:
            of_any_case["postgresql"] = collation_of_any_case(connection)
    make(one_of(engine, postgresql='"C"', mariadb="utf8mb4_bin", sqlite="BINARY"), 0)

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

    deliver = Delivered(engine, body, reads={Word: "word"})
    deliver({"word": "abc"}, type="added")
    assert deliver({"word": "abc"}, type="added") == WITH_CLAIM
    make(one_of(engine, **of_any_case), 2)
    deliver({"word": "ABC"}, type="added")
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT amount FROM first_word")) == 3


# Failures, rivals ---------------------------------------------------------------------------------------------------


def test_a_row_that_cannot_be_read_does_not_keep_a_message(engine: Engine) -> None:
    """Its table was dropped, and its handler does not ask for it any more."""
    deliver = Delivered(engine).learned()
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE first_total"))
    deliver.body = _other_alone
    assert deliver(Added(1))[:2] == [BOTH, "INSERT"]
    assert deliver(Added(2)) == SELECTED, "and is not tried again"
    assert totals(engine, Other) == [0, 7, 7, 0]


def test_a_value_that_cannot_be_read_is_met_by_who_asks_for_it(engine: Engine) -> None:
    """Not by another: the message is applied."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE first_code (id integer PRIMARY KEY, code varchar(32))"))
        connection.execute(text("INSERT INTO first_code VALUES (0, NULL), (1, 'unreadable')"))

    class Codes(DeclarativeBase):
        pass

    class Code(Codes):
        __tablename__ = "first_code"
        id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
        code: Mapped[UUID | None] = mapped_column(Uuid(native_uuid=False))

    def body(change: Added, session: Session) -> None:
        if change.row == 0:
            session.get_one(Code, 0).code = UUID(int=1)
        else:
            add(change, session)

    deliver = Delivered(engine, body, reads={Code: "row"})
    assert BOTH in deliver(Added(0))
    asked = one_of(engine, postgresql=[], mariadb=["SELECT"], sqlite=[])  # whether a new connection's table is fit
    assert deliver(Added(1))[: 2 + len(asked)] == [BOTH, *asked, "INSERT"]
    assert totals(engine) == [0, 1, 0, 0]


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_a_table_that_is_broken_does_not_keep_messages(engine: Engine) -> None:
    """By an error that nobody has thought of."""
    deliver = Delivered(engine).learned()
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE first_total DISCARD TABLESPACE"))
    deliver.body = _other_alone
    assert deliver(Added(1))[:2] == [BOTH, "INSERT"]
    assert deliver(Added(2)) == SELECTED, "and is not tried again"
    assert totals(engine, Other) == [0, 7, 7, 0]


@on_servers
def test_a_marker_table_that_has_changed_is_named(engine: Engine) -> None:
    """As by the claim alone."""
    deliver = Delivered(engine).learned()
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM processed_message"))
        connection.execute(text("ALTER TABLE processed_message ADD more integer NOT NULL"))
    with pytest.raises(MissingTableError):
        deliver.dispatcher.deliver(Added(1), message_id="m")


class Dates(DeclarativeBase):
    """Of a table whose dates Python cannot read."""


class Dated(Dates):
    """One of them."""

    __tablename__ = "first_date"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    day: Mapped[date | None]


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_a_value_that_its_driver_cannot_read_is_met_by_who_asks_for_it(postgresql: Database, driver: str) -> None:
    """Also where the driver reads it before anybody fetches."""

    @projector(idempotent=True, name="first")
    @on(Added, reads={Dated: "row"})
    async def handler(change: Added, session: AsyncSession) -> None:
        if change.row == 2:
            await session.execute(text("UPDATE first_date SET day = '2026-01-01' WHERE id = 2"))
        else:
            await session.get_one(Dated, change.row)

    async def run() -> None:
        engine = create_async_engine(postgresql.url(f"postgresql+{driver}"))
        async with engine.begin() as connection:
            await connection.run_sync(Dates.metadata.create_all)
            await connection.run_sync(default_tables.marker.metadata.create_all)
            await connection.execute(text("INSERT INTO first_date VALUES (1, NULL), (2, '12000-01-01')"))
        dispatcher = AsyncDispatcher(async_sessionmaker(engine), handler, retry=RetryPolicy(attempts=3, base=0))
        for number, row in enumerate((1, 1, 2)):
            assert (await dispatcher.deliver(Added(row), message_id=f"m{number}")).outcome is Outcome.APPLIED
        await engine.dispose()

    asyncio.run(run())


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_not_in_another_file_than_the_marker(engine: Engine) -> None:
    """Which the claim has not locked; here with a namesake beside the marker."""

    class Elsewhere(DeclarativeBase):
        pass

    class Far(Elsewhere):
        __tablename__ = Total.__tablename__
        __table_args__ = {"schema": "far"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)

    own = create_engine(engine.url)
    event.listen(own, "connect", lambda driver, _: driver.execute(f"ATTACH '{engine.url.database}.far' AS far"))
    Elsewhere.metadata.create_all(own)
    body: Body = lambda change, session: session.get(Far, change.row)  # noqa: E731
    deliver = Delivered(own, body, reads={Far: "row"})
    assert [BOTH in deliver(Added(1)) for _ in range(4)] == [False] * 4
    own.dispose()


@pytest.mark.parametrize("database", ["sqlite"], indirect=True)
def test_not_where_the_catalogue_may_not_be_read(engine: Engine) -> None:
    """By an authorizer: nothing is learned, and nobody hears of it."""

    def authorize(_action: int, table: str | None, *_: object) -> int:
        return sqlite3.SQLITE_DENY if table == "sqlite_master" else sqlite3.SQLITE_OK

    own = create_engine(engine.url)
    event.listen(own, "connect", lambda driver, _: driver.set_authorizer(authorize))
    deliver = Delivered(own)
    assert [BOTH in deliver(Added(1)) for _ in range(4)] == [False] * 4
    own.dispose()


def test_a_row_that_cannot_be_read_is_no_attempt(engine: Engine) -> None:
    """The message is claimed again without it, also where it has one attempt; and a warning says so, once."""

    @projector(idempotent=True, name="first attempt")
    @on(Added, reads={Total: "row"})
    def handler(change: Added, session: Session) -> None:
        if change.row == 0:
            add(change, session)

    dispatcher = Dispatcher(sessionmaker(engine), handler, retry=RetryPolicy(attempts=1))
    dispatcher.deliver(Added(0), message_id="one")
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE first_total"))
    for message_id in ("two", "three"):
        assert dispatcher.deliver(Added(1), message_id=message_id).outcome is Outcome.APPLIED
        assert dispatcher.deliver(Added(1), message_id=message_id).outcome is Outcome.DUPLICATE


def test_a_bug_in_a_listener_stays_what_it_is(engine: Engine) -> None:
    """It is not tried again, and reading goes on."""
    deliver = Delivered(engine).learned()
    bugs = [RuntimeError("a bug")]

    @event.listens_for(engine, "before_cursor_execute")
    def fail(*_: Any) -> None:
        if bugs:
            raise bugs.pop()

    with pytest.raises(RuntimeError, match="a bug"):
        deliver.dispatcher.deliver(Added(2), message_id="buggy")
    assert deliver(Added(2))[-2:] == WITH_CLAIM or engine.dialect.name == "mariadb", "there a new connection is asked"
    assert deliver(Added(2)) == WITH_CLAIM


@pytest.mark.parametrize(
    ("database", "hasten", "error"),
    [
        ("postgresql", "SET LOCAL statement_timeout = 100", "statement timeout"),
        ("mariadb", "SET SESSION max_statement_time = 0.1", "max_statement_time exceeded"),
    ],
    indirect=["database"],
)
def test_the_servers_end_of_patience_is_met_as_by_any_claim(engine: Engine, hasten: str, error: str) -> None:
    """And nothing is lost."""
    deliver, rival = Delivered(engine, retry=RetryPolicy(attempts=1)).learned(), create_engine(engine.url)
    with UnitOfWork(sessionmaker(rival)) as uow:
        assert uow.claim("held", "first")
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(hasten))
        with pytest.raises((OperationalError, RetriesExhaustedError), match=error):
            deliver.dispatcher.deliver(Added(2), message_id="held")
    rival.dispose()
    assert deliver.dispatcher.deliver(Added(2), message_id="held").outcome is Outcome.APPLIED
    assert totals(engine) == [2, 1, 1, 0]


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_redeliveries_do_not_wait_for_the_table_of_a_migration(engine: Engine) -> None:
    """A duplicate reads nothing; on PostgreSQL it waits, since the statement names the table that it would read."""
    hasty = create_engine(engine.url, connect_args={"init_command": "SET lock_wait_timeout=1"})
    deliver = Delivered(hasty).learned()
    with engine.begin() as connection:
        connection.execute(text("LOCK TABLE first_total WRITE"))
        assert [deliver(Added(1), "m1") for _ in range(4)] == [[BOTH, "SELECT"]] * 4
    hasty.dispose()


@pytest.mark.parametrize(
    ("database", "options"),
    [
        ("postgresql", {"server_side_cursors": True}),
        ("mariadb", {"server_side_cursors": True}),
        ("mariadb", {"execution_options": {"stream_results": True}}),
        ("mariadb", {"execution_options": {"yield_per": 10}}),
    ],
    indirect=["database"],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:The create_engine.server_side_cursors")
def test_what_an_engine_asks_for_of_every_select_does_not_concern_the_claim(
    engine: Engine, options: dict[str, Any]
) -> None:
    """A cursor on PostgreSQL's side cannot insert, and on MariaDB a block's answers would be left unread."""
    streaming = create_engine(engine.url, **options)
    streamed: list[object] = []

    def look(_c: Any, _cursor: Any, statement: str, _parameters: Any, context: Any, _many: bool) -> None:
        if "claimed" in statement:
            streamed.append((context.execution_options["stream_results"], context.execution_options["yield_per"]))

    deliver = Delivered(streaming)
    event.listen(streaming, "after_cursor_execute", look)
    assert BOTH in deliver(Added(1))
    assert BOTH in deliver(Added(1))
    assert streamed == [(False, None)] * 2
    streaming.dispose()
    assert totals(engine) == [0, 2, 0, 0]


@on_servers
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


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_the_statement_reads_the_row_only_if_the_marker_is_new(engine: Engine) -> None:
    """By the plan that was executed: for a duplicate, the read model is not looked into."""
    sent: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        sent.append((statement, parameters))

    deliver = Delivered(engine).learned()
    event.listen(engine, "before_cursor_execute", note)
    deliver(Added(1))
    event.remove(engine, "before_cursor_execute", note)
    statement, parameters = next(each for each in sent if kinds_of([each[0]]) == [BOTH])
    with engine.begin() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, COSTS off, TIMING off) {statement}", parameters)
        lines = plan.scalars().all()
    assert any("first_total" in line and "never executed" in line for line in lines), lines


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_a_block_ends_at_a_marker_that_is_there(engine: Engine) -> None:
    """Without the table from which it would read, a redelivery is a duplicate at once."""
    deliver = Delivered(engine).learned()
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE first_total"))
    assert deliver(Added(1), "m1") == [BOTH, "SELECT"]


EVERY = 11  # lines; after a change, each is worth it


class Interruption(BaseException):
    """What a signal handler raises."""


class InterruptedAtLine:
    """Raises at the nth line that runs between the first and the last line of a function, here or below.

    Python swallows what is raised in a finaliser or in the callback of a weak reference, and when one of them runs is
    for the garbage collector to say: it is raised again at the next line then.
    """

    def __init__(self, function: Any, nth: int) -> None:
        self.left = nth
        self._code = function.__code__
        self._inside = False
        self._report = sys.unraisablehook

    def __enter__(self) -> "InterruptedAtLine":
        sys.unraisablehook = self._raise_again
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        sys.unraisablehook = self._report

    def _raise_again(self, swallowed: Any) -> None:
        if swallowed.exc_type is not Interruption:
            self._report(swallowed)
            return
        self.left, self._inside = 1, True
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code is self._code and event in ("call", "return"):
            self._inside = event == "call"
        if self._inside and event == "line":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise Interruption
        return self._trace


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what PyMySQL had half made
@pytest.mark.parametrize(
    ("database", "driver"), [("mariadb", "pymysql"), ("mariadb", "mysqldb")], indirect=["database"]
)
def test_interrupted_between_the_answers_of_a_block(engine: Engine, database: Database, driver: str) -> None:
    """Wherever: it is heard of, and no connection goes back to the pool on which an answer is taken for another's."""

    @projector(idempotent=True, name="first")
    @on(Added, reads={Total: "row"})
    def handler(change: Added, session: Session) -> None:
        add(change, session)

    own = create_engine(database.url(f"mariadb+{driver}"))
    for turn, nth in enumerate(itertools.count(1, EVERY), 1):
        dispatcher = Dispatcher(sessionmaker(own), handler)
        dispatcher.deliver(Added(1), message_id=f"learned-{nth}")
        heard = False
        with InterruptedAtLine(MariaDBRows.claim, nth) as interruption:
            try:
                dispatcher.deliver(Added(2), message_id=f"cut-{nth}")
            except Interruption:
                heard = True
        if interruption.left > 0:
            break
        assert heard, nth
        with own.connect() as connection:
            assert [connection.scalar(select(literal_column(str(number)))) for number in range(3)] == [0, 1, 2]
        dispatcher.deliver(Added(2), message_id=f"cut-{nth}")
        assert totals(engine) == [0, turn, turn, 0]
    own.dispose()
    assert nth > 100
