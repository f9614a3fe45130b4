"""MariaDB's ways to lose a message: two ids that are one, and an INSERT that does not say what it did."""

from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from sqlalchemy import create_engine, delete, func, insert, literal, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session, sessionmaker

from databases import DRIVERS, Database, Driver, mariadb_connection
from projector_dedup import (
    Dispatcher,
    Message,
    MissingTableError,
    Outcome,
    ProcessedMessage,
    UnsafeSessionError,
    claim,
    on,
    projector,
)
from projector_dedup.maintenance.check import check
from projector_dedup.tables import default_tables
from projector_dedup.testing import contract
from projector_dedup.testing.contract import LOOK_ALIKES, ClaimContract, OnceContract
from projector_dedup.testing.kit import Added, Harness, Subject, add

MARIADB = [driver for driver in DRIVERS if driver.engine == "mariadb"]
MARKER = default_tables.marker

IDS = (
    *LOOK_ALIKES,
    *("a  ", "  a", "\t", "  ", "a\x01", "a\x1a", "a\x1ab", "a\x7f", "a\r", "a\r\n", "\x08"),
    *("'", "''", '"', '""', "`", "\\'", "\\\\'", "'\\", "x' or 1=1 -- ", "x\\' or 1=1 -- ", "/*", "*/", ";", "--", "#"),
    *("€'", "é'", "ソ'", "表'", "ソ\\", "表\\", "¿'", "\U0001f600'", "\U0001f600\\"),  # half a letter in gbk and sjis
    *("Ä", "A\u0308", "\u1e9e", "\u017f", "ﬁ", "fi", "Å", "\u212b", "ｱ", "ア", "か", "が", "は", "ば"),
    *("\U0001f469", "\U0001f469\u200d", "\U0001f468", "\ufe0f", "\u200b", "\u200c", "\ufeff", "\ufffd", "\U0010ffff"),
    *("y" * 511, "y" * 512, "y" * 511 + " ", "y" * 510 + "  ", " " * 511, " " * 512, "'" * 512, "\\" * 512),
    *("é" * 256, "é" * 255 + "è", "€" * 170 + "é", "€" * 170 + "è", "\U0001f600" * 128),
    "\U0001f600" * 127 + "\U0001f601",
)
"""Each of them is another message, to every server, connection and mode; none is longer than 512 bytes."""

ENGINES = "SELECT table_name, engine FROM information_schema.tables WHERE table_schema = database()"

SETTINGS = {  # database's collation, connection's character set, SQL mode
    "as the server says": ("latin1_swedish_ci", None, None),
    "not strict, latin1": ("latin1_swedish_ci", "latin1", ""),
    "ANSI, utf8mb4": ("utf8mb4_general_ci", "utf8mb4", "STRICT_ALL_TABLES,ANSI_QUOTES"),
    "no backslash escapes": ("utf8mb4_unicode_ci", "utf8mb4", "NO_BACKSLASH_ESCAPES"),
    "no backslash escapes, latin1": ("utf8mb4_general_ci", "latin1", "NO_BACKSLASH_ESCAPES,PAD_CHAR_TO_FULL_LENGTH"),
    "gbk": ("gbk_chinese_ci", "gbk", ""),
}


def subject(
    mariadb: Database, driver: Driver, *, collation: str | None = None, charset: str | None = None, **session: Any
) -> Subject:
    """The database through a driver, with its own collation, and a connection and a session of another kind."""
    if collation:
        with closing(mariadb_connection(mariadb.url())) as admin, admin.cursor() as cursor:
            cursor.execute(f"ALTER DATABASE COLLATE {collation}")
    url = mariadb.url(driver.drivername).update_query_dict({"charset": charset} if charset else {})
    assignments = ", ".join(f"SESSION {name} = {value!r}" for name, value in session.items() if value is not None)
    arguments = {"connect_args": {"init_command": f"SET {assignments}"}} if assignments else {}
    return Subject(url, engine_arguments=arguments)


@pytest.fixture(name="harness", params=MARIADB, ids=str)
def harness_fixture(request: pytest.FixtureRequest, mariadb: Database) -> Iterator[Harness]:
    """The contract's tables, through each driver."""
    with Harness(subject(mariadb, request.param)) as harness:
        harness.create_tables()
        yield harness


def run(harness: Harness, *statements: str) -> None:
    """Each in a transaction of its own."""
    for statement in statements:
        harness.transact(lambda session, statement=statement: session.execute(text(statement)))  # type: ignore[misc]


# I7 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("driver", MARIADB, ids=str)
def test_keys_compare_byte_for_byte(mariadb: Database, driver: Driver, setting: str) -> None:
    """Whatever the database, the connection and the SQL mode are: two ids are two, and come back as they were."""
    assert len(set(IDS)) == len(IDS)
    assert max(len(message_id.encode()) for message_id in IDS) == 512
    collation, charset, mode = SETTINGS[setting]
    with Harness(subject(mariadb, driver, collation=collation, charset=charset, sql_mode=mode)) as harness:
        harness.create_tables()
        assert harness.transact(lambda session: [claim(session, each, "h") for each in IDS]) == [True] * len(IDS)
        assert harness.transact(lambda session: [claim(session, each, "h") for each in IDS]) == [False] * len(IDS)
        assert harness.transact(lambda session: [claim(session, "m", each) for each in ("h", "H", "h ", "h'", "h\\")])
        assert harness.markers() == sorted(
            [*((i, "h") for i in IDS), *(("m", h) for h in ("h", "H", "h ", "h'", "h\\"))]
        )


@pytest.mark.parametrize("first", MARIADB, ids=str)
def test_an_id_is_the_same_through_every_driver_and_connection(mariadb: Database, first: Driver) -> None:
    """What a driver claimed on a latin1 connection is a duplicate to every other, on any connection."""
    with Harness(subject(mariadb, first, charset="latin1")) as harness:
        harness.create_tables()
        assert all(harness.transact(lambda session: [claim(session, each, "h") for each in IDS]))
    for second, charset in zip(MARIADB, ("utf8mb4", "gbk", None, "latin1"), strict=True):
        with Harness(subject(mariadb, second, charset=charset, sql_mode="")) as harness:
            assert not any(harness.transact(lambda session: [claim(session, each, "h") for each in IDS]))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("driver", MARIADB, ids=str)
def test_keys_of_a_batch_compare_byte_for_byte(mariadb: Database, driver: Driver, setting: str) -> None:
    """Many are claimed by another statement; what it stores is the same, with and without a bound."""
    collation, charset, mode = SETTINGS[setting]
    at = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=2)))
    batch = [Message(each, Added(), occurred_at=at if len(each) > 1 else None) for each in IDS]
    with Harness(subject(mariadb, driver, collation=collation, charset=charset, sql_mode=mode)) as harness:
        harness.create_tables()
        for name, options in (("h'", {}), ("ソ\\", {"claim_timeout": 1.0})):
            handler = harness.handler(lambda *_: None, name, batch=True)
            dispatcher = harness.dispatcher(handler, **options)
            for expected in (Outcome.APPLIED, Outcome.DUPLICATE):
                assert {each.outcome for each in harness.run(dispatcher.deliver_batch, batch)} == {expected}
        assert harness.markers() == sorted((message_id, name) for message_id in IDS for name in ("h'", "ソ\\"))
        moments = select(func.coalesce(MARKER.c.occurred_at, "none"), func.count()).group_by(MARKER.c.occurred_at)
        stored = {str(moment): count for moment, count in harness.transact(lambda each: each.execute(moments).all())}
        short = sum(len(each) == 1 for each in IDS)
        assert stored == {"none": 2 * short, "2026-01-02 01:04:05.678901": 2 * (len(IDS) - short)}


class TestNotStrict(OnceContract, ClaimContract):
    """The contract where the server would rather change a value than refuse it, on a connection of few letters."""

    @pytest.fixture(params=MARIADB, ids=str)
    def harness(self, request: pytest.FixtureRequest, mariadb: Database) -> Iterator[Harness]:
        """Not the server's own settings, any of them."""
        given = subject(
            mariadb, request.param, collation="utf8mb4_unicode_ci", charset="latin1", sql_mode="ANSI_QUOTES"
        )
        with Harness(given) as harness:
            harness.create_tables()
            yield harness


@pytest.mark.parametrize("charset", ["latin1", "utf8mb4", "gbk"])
@pytest.mark.parametrize("driver", MARIADB, ids=str)
def test_the_marker_is_text_to_queries(mariadb: Database, driver: Driver, charset: str) -> None:
    """Core and ORM take and give `str`, though the columns are VARBINARY: the user need not know."""
    ids = ["a", "A", "é€\U0001f600'\\", "ソ'"]
    at = literal("2026-01-02 03:04:05.678901")

    def core(session: Session) -> None:
        session.execute(insert(MARKER).values(message_id=ids[0], handler="h", processed_at=at))
        session.execute(insert(MARKER), [{"message_id": each, "handler": "h"} for each in ids[1:]])
        for each in ids:
            one = select(MARKER.c.message_id).where(MARKER.c.message_id == each)
            assert session.scalars(one).all() == [each]
            assert (
                session.scalars(select(MARKER.c.message_id).where(MARKER.c.message_id.in_([each, "no"]))).one() == each
            )
            assert (
                session.scalars(select(MARKER.c.message_id).where(MARKER.c.message_id.startswith(each))).one() == each
            )
            literally = str(one.compile(session.connection(), compile_kwargs={"literal_binds": True}))
            assert session.connection().exec_driver_sql(literally.replace("%", "%%")).scalars().one() == each.encode()
        assert session.scalars(select(MARKER.c.message_id).where(MARKER.c.message_id.not_in(ids))).all() == []
        assert session.scalar(select(func.length(MARKER.c.message_id)).where(MARKER.c.message_id == ids[2])) == 11
        assert sorted(session.scalars(select(func.max(MARKER.c.message_id)))) == [max(ids)]
        assert session.execute(update(MARKER).where(MARKER.c.message_id == "a").values(handler="ö")).rowcount == 1  # type: ignore[attr-defined]
        assert session.scalars(select(MARKER.c.message_id).where(MARKER.c.handler == "ö")).all() == ["a"]
        assert session.execute(delete(MARKER).where(MARKER.c.message_id == "A")).rowcount == 1  # type: ignore[attr-defined]

    def orm(session: Session) -> None:
        found = session.get_one(ProcessedMessage, (ids[2], "h"))
        assert (found.message_id, found.handler) == (ids[2], "h")
        found.handler = "ü"
        session.flush()
        session.expire_all()
        query = (
            select(ProcessedMessage).where(ProcessedMessage.handler.in_(["ü", "x"])).order_by(ProcessedMessage.handler)
        )
        assert session.scalars(query).one().message_id == ids[2]
        session.delete(found)
        session.flush()
        mine = ProcessedMessage()
        mine.message_id, mine.handler = "ソ\\", "h"
        session.add(mine)
        session.flush()
        session.refresh(mine)
        assert (mine.message_id, mine.processed_at.microsecond >= 0) == ("ソ\\", True)

    with Harness(subject(mariadb, driver, charset=charset, sql_mode="NO_BACKSLASH_ESCAPES")) as harness:
        harness.create_tables()
        harness.transact(core)
        harness.transact(orm)
        assert harness.markers() == sorted([("a", "ö"), ("ソ'", "h"), ("ソ\\", "h")])


# The claim fails, or it is new, or it was there -----------------------------------------------------------------------


def test_a_violation_elsewhere_is_no_duplicate(harness: Harness) -> None:
    """1062 of another unique index, and of a trigger, is an error: the message was not applied."""
    run(harness, "CREATE UNIQUE INDEX one_at_a_time ON processed_message (handler)")
    assert harness.deliver(harness.dispatcher(), message_id="m1").outcome is Outcome.APPLIED
    with pytest.raises(IntegrityError, match="one_at_a_time"):
        harness.deliver(harness.dispatcher(), message_id="m2")
    assert harness.deliver(harness.dispatcher(), message_id="m1").outcome is Outcome.DUPLICATE
    run(
        harness,
        "DROP INDEX one_at_a_time ON processed_message",
        "CREATE TABLE log (entry INT PRIMARY KEY)",
        "CREATE TRIGGER logs AFTER INSERT ON processed_message FOR EACH ROW INSERT INTO log VALUES (1)",
    )
    assert harness.deliver(harness.dispatcher(), message_id="m3").outcome is Outcome.APPLIED
    with pytest.raises(IntegrityError, match="Duplicate entry '1'"):
        harness.deliver(harness.dispatcher(), message_id="m4")
    assert harness.deliver(harness.dispatcher(), message_id="m3").outcome is Outcome.DUPLICATE
    assert (harness.totals(), harness.markers()) == ({"a": 2}, [("m1", "totals"), ("m3", "totals")])


def test_a_trigger_that_refuses_is_heard(harness: Harness) -> None:
    """SIGNAL, a foreign key and a CHECK are errors of the claim: none is swallowed, as IGNORE would."""
    run(
        harness,
        "CREATE TRIGGER refuses BEFORE INSERT ON processed_message FOR EACH ROW "
        "IF NEW.message_id = 'no' THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'refused'; END IF",
        "ALTER TABLE processed_message ADD CHECK (message_id <> 'check')",
    )
    for message_id in ("no", "check"):
        with pytest.raises(DBAPIError):
            harness.deliver(harness.dispatcher(), message_id=message_id)
    assert harness.deliver(harness.dispatcher(), message_id="yes").outcome is Outcome.APPLIED
    assert (harness.totals(), harness.markers()) == ({"a": 1}, [("yes", "totals")])


@pytest.mark.parametrize(
    "change",
    [
        "RENAME TABLE processed_message TO other",
        "ALTER TABLE processed_message DROP occurred_at",
        "ALTER TABLE processed_message CHANGE handler consumer VARBINARY(255) NOT NULL",
        "ALTER TABLE processed_message ADD tenant INT NOT NULL",
        "ALTER TABLE processed_message MODIFY occurred_at DATETIME(6) NOT NULL",
        "ALTER TABLE processed_message MODIFY message_id VARBINARY(3) NOT NULL",
        "ALTER TABLE processed_message DROP PRIMARY KEY",
        "ALTER TABLE processed_message DROP PRIMARY KEY, ADD UNIQUE (message_id(100), handler(100))",
    ],
)
def test_a_table_that_is_not_ours_is_named(harness: Harness, change: str) -> None:
    """Missing, without a column, with one that has no default or is too short, without the index: it is said."""
    run(harness, change)
    with pytest.raises(MissingTableError, match="idempotency check"):
        harness.deliver(harness.dispatcher(), message_id="long enough")
    assert harness.totals() == {}


@pytest.mark.parametrize("column", ["VARCHAR(512) COLLATE utf8mb4_general_ci", "VARCHAR(512) COLLATE utf8mb4_bin"])
def test_a_collation_that_merges_ids_loses_no_message(harness: Harness, column: str) -> None:
    """In a table that somebody else made, an id that looks like another's is an error, never a duplicate."""
    run(harness, f"ALTER TABLE processed_message MODIFY message_id {column} NOT NULL")
    assert harness.deliver(harness.dispatcher(), message_id="é").outcome is Outcome.APPLIED
    assert harness.deliver(harness.dispatcher(), message_id="é").outcome is Outcome.DUPLICATE
    with pytest.raises(MissingTableError, match=r"takes different message ids for one.*idempotency check"):
        harness.deliver(harness.dispatcher(), message_id="é ")
    assert harness.totals() == {"a": 1}
    assert any("takes different message ids for one" in finding.problem for finding in check_of(harness))


def test_a_column_that_cuts_ids_loses_no_message(mariadb: Database) -> None:
    """Where the mode is not strict, a short column keeps a part of the id: one that begins alike is no duplicate."""
    with Harness(subject(mariadb, MARIADB[0], sql_mode="")) as harness:
        harness.create_tables()
        run(harness, "ALTER TABLE processed_message MODIFY message_id VARBINARY(3) NOT NULL")
        harness.deliver(harness.dispatcher(), message_id="abcd")
        for message_id in ("abce", "abcd"):
            with pytest.raises(IntegrityError):
                harness.deliver(harness.dispatcher(), message_id=message_id)
        assert harness.totals() == {"a": 1}
        assert any(finding.fatal for finding in check_of(harness))


def test_a_rollback_is_spared_only_where_there_is_nothing_to_roll_back(harness: Harness) -> None:
    """Right behind a COMMIT, as the pool sends it; whoever shares the engine rolls back what there is."""
    engine = create_engine(harness.subject.url.set(drivername="mariadb+pymysql"), pool_size=1, max_overflow=0)
    handler = projector(idempotent=True, name="totals")(on(Added)(add))
    Dispatcher(sessionmaker(engine), handler).deliver(Added(), message_id="m1")
    write = "UPDATE contract_total SET amount = amount + 10"
    with engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        cursor = driver.cursor()

        def sent(*steps: Callable[[], object]) -> int:
            """How many ROLLBACKs, so far, with one behind a COMMIT and these steps."""
            for step in (driver.commit, *steps, driver.rollback):
                step()
            cursor.execute("SHOW SESSION STATUS LIKE 'Com_rollback'")
            return int(cursor.fetchone()[1])

        before = sent()
        assert sent() == before
        assert sent(lambda: cursor.execute(write)) == before + 1
        assert sent(driver.begin) == before + 2
        assert sent(lambda: cursor.execute("SELECT 1")) == before + 3  # perhaps for nothing: nobody looks into it
    engine.dispose()
    assert harness.totals() == {"a": 1}


def check_of(harness: Harness) -> list[Any]:
    """What `check` finds in the harness's database."""
    engine = create_engine(harness.subject.url.set(drivername="mariadb+pymysql"))
    try:
        return check(engine)
    finally:
        engine.dispose()


@pytest.mark.parametrize("storage", ["MyISAM", "Aria", "MEMORY"])
def test_a_marker_table_without_transactions_is_refused(harness: Harness, storage: str) -> None:
    """Before anything is written; a table in such an engine would keep the marker of a message that failed."""
    short = "MODIFY message_id VARBINARY(255) NOT NULL, MODIFY handler VARBINARY(100) NOT NULL"
    run(harness, f"ALTER TABLE processed_message {short}, ENGINE={storage}")
    for _ in range(2):
        with pytest.raises(UnsafeSessionError, match=f"{storage}.*ENGINE=InnoDB"):
            harness.deliver(harness.dispatcher())
        with pytest.raises(UnsafeSessionError, match=storage):
            harness.transact(lambda session: claim(session, "m1", "h"))
    assert (harness.totals(), harness.markers()) == ({}, [])


@pytest.mark.parametrize("driver", MARIADB, ids=str)
def test_our_tables_are_innodb_whatever_the_servers_default_is(mariadb: Database, driver: Driver) -> None:
    """`make_tables` says so; a read model that leaves it to a default of MyISAM is refused before it is written."""
    given = subject(mariadb, driver, default_storage_engine="MyISAM")
    with Harness(given) as harness:
        harness.create_tables()
        engines = harness.transact(
            lambda session: {row.table_name: row.engine for row in session.execute(text(ENGINES))}
        )
        assert engines["processed_message"] == engines["processed_message_state"] == "InnoDB"
        assert engines["contract_total"] == "MyISAM"
        with pytest.raises(UnsafeSessionError, match="contract_total is in the storage engine MyISAM"):
            harness.deliver(harness.dispatcher())
        assert (harness.totals(), harness.markers()) == ({}, [])


class TestCalledMySQL(contract.ProjectorContract):
    """`mysql+pymysql://` is what most URLs of MariaDB say."""

    note = "as mysql+..."

    @pytest.fixture
    def subject(self, mariadb: Database) -> Subject:
        """By that name."""
        return Subject(mariadb.url().set(drivername="mysql+pymysql"))
