"""MariaDB: ids that it might take for one, INSERTs that do not say what they did, moments, and messages that meet.

Deadlocks and lock timeouts are routine there, and cost a retry, never a message.
"""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import Engine, create_engine, delete, event, func, insert, literal, select, text, update
from sqlalchemy.orm import Session, sessionmaker

from contract import LOOK_ALIKES, ClaimContract, ConcurrencyContract, OnceContract
from databases import DRIVERS, USUAL_DRIVERS, Database, Driver
from kit import PATIENCE, Added, Broken, Gate, Harness, Held, Subject, Total, add
from on_mariadb import run, subject
from projector_dedup import Dispatcher, Message, Outcome, on, projector
from projector_dedup.errors import InProgress, MissingTableError, RefusedError, UnsafeSessionError
from projector_dedup.maintenance.check import check
from projector_dedup.maintenance.cleanup import cleanup
from projector_dedup.markers import claim
from projector_dedup.options import RetryPolicy
from projector_dedup.tables import ProcessedMessage, default_metadata, default_tables
from ready import ready

MARIADB = [driver for driver in DRIVERS if driver.engine == "mariadb"]
ONE_OF_EACH_KIND = [driver for driver in MARIADB if driver in USUAL_DRIVERS]
USUAL = ONE_OF_EACH_KIND[0]
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
ESCAPED = ("no backslash escapes, latin1", "gbk")
"""What a driver that writes values into the text itself may get wrong."""


@pytest.fixture(name="harness", params=MARIADB, ids=str)
def harness_fixture(request: pytest.FixtureRequest, mariadb: Database) -> Iterator[Harness]:
    """The contract's tables, through each driver."""
    with ready(subject(mariadb, request.param)) as harness:
        yield harness


@pytest.fixture
def usual(mariadb: Database) -> Iterator[Harness]:
    """The same, for what the server does whichever driver asks."""
    with ready(subject(mariadb, USUAL)) as harness:
        yield harness


# I7 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("driver", "setting"),
    [(driver, setting) for driver in MARIADB for setting in (SETTINGS if driver is USUAL else ESCAPED)],
    ids=str,
)
def test_keys_compare_byte_for_byte(mariadb: Database, driver: Driver, setting: str) -> None:
    """Whatever the database, the connection and the SQL mode are: two ids are two, and come back as they were.

    One by one, and many at once by another statement, with and without a bound.
    """
    assert len(set(IDS)) == len(IDS)
    assert max(len(message_id.encode()) for message_id in IDS) == 512
    collation, charset, mode = SETTINGS[setting]
    at = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=2)))
    batch = [Message(each, Added(), occurred_at=at if len(each) > 1 else None) for each in IDS]
    names, many = ("h", "H", "h ", "h'", "h\\"), ("ö'", "ソ\\")
    with ready(subject(mariadb, driver, collation=collation, charset=charset, sql_mode=mode)) as harness:
        for name, options in zip(many, ({}, {"claim_timeout": 1.0}), strict=True):
            handler = harness.handler(lambda *_: None, name, batch=True)
            dispatcher = harness.dispatcher(handler, **options)
            for expected in (Outcome.APPLIED, Outcome.DUPLICATE):
                assert {each.outcome for each in harness.run(dispatcher.deliver_batch, batch)} == {expected}
        moments = select(func.coalesce(MARKER.c.occurred_at, "none"), func.count()).group_by(MARKER.c.occurred_at)
        stored = {str(moment): count for moment, count in harness.transact(lambda each: each.execute(moments).all())}
        short = sum(len(each) == 1 for each in IDS)
        assert stored == {"none": 2 * short, "2026-01-02 01:04:05.678901": 2 * (len(IDS) - short)}
        for new in (True, False):
            assert harness.transact(lambda session: [claim(session, each, "h") for each in IDS]) == [new] * len(IDS)
        assert harness.transact(lambda session: [claim(session, "m", each) for each in names])
        expected_markers = [(each, name) for each in IDS for name in ("h", *many)] + [("m", name) for name in names]
        assert harness.markers() == sorted(expected_markers)


@pytest.mark.parametrize("first", MARIADB, ids=str)
def test_an_id_is_the_same_through_every_driver_and_connection(mariadb: Database, first: Driver) -> None:
    """What a driver claimed on a latin1 connection is a duplicate to every other, on any connection."""
    with ready(subject(mariadb, first, charset="latin1")) as harness:
        assert all(harness.transact(lambda session: [claim(session, each, "h") for each in IDS]))
    for second, charset in zip(MARIADB, ("utf8mb4", "gbk", None, "latin1"), strict=True):
        with Harness(subject(mariadb, second, charset=charset, sql_mode="")) as harness:
            assert not any(harness.transact(lambda session: [claim(session, each, "h") for each in IDS]))


class TestNotStrict(OnceContract, ClaimContract):
    """The contract where the server would rather change a value than refuse it, on a connection of few letters."""

    @pytest.fixture(params=ONE_OF_EACH_KIND, ids=str)
    def harness(self, request: pytest.FixtureRequest, mariadb: Database) -> Iterator[Harness]:
        """Not the server's own settings, any of them."""
        given = subject(
            mariadb, request.param, collation="utf8mb4_unicode_ci", charset="latin1", sql_mode="ANSI_QUOTES"
        )
        with ready(given) as harness:
            yield harness


@pytest.mark.parametrize("charset", ["latin1", "utf8mb4", "gbk"])
@pytest.mark.parametrize("driver", ONE_OF_EACH_KIND, ids=str)
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

    with ready(subject(mariadb, driver, charset=charset, sql_mode="NO_BACKSLASH_ESCAPES")) as harness:
        harness.transact(core)
        harness.transact(orm)
        assert harness.markers() == sorted([("a", "ö"), ("ソ'", "h"), ("ソ\\", "h")])


# The claim fails, or it is new, or it was there -----------------------------------------------------------------------


def test_a_violation_elsewhere_is_no_duplicate(harness: Harness) -> None:
    """1062 of another unique index, and of a trigger, is an error: the message was not applied."""
    run(harness, "CREATE UNIQUE INDEX one_at_a_time ON processed_message (handler)")
    assert harness.deliver(harness.dispatcher(), message_id="m1").outcome is Outcome.APPLIED
    with pytest.raises(RefusedError, match="one_at_a_time"):
        harness.deliver(harness.dispatcher(), message_id="m2")
    assert harness.deliver(harness.dispatcher(), message_id="m1").outcome is Outcome.DUPLICATE
    run(
        harness,
        "DROP INDEX one_at_a_time ON processed_message",
        "CREATE TABLE log (entry INT PRIMARY KEY)",
        "CREATE TRIGGER logs AFTER INSERT ON processed_message FOR EACH ROW INSERT INTO log VALUES (1)",
    )
    assert harness.deliver(harness.dispatcher(), message_id="m3").outcome is Outcome.APPLIED
    with pytest.raises(RefusedError, match="Duplicate entry '1'"):
        harness.deliver(harness.dispatcher(), message_id="m4")
    assert harness.deliver(harness.dispatcher(), message_id="m3").outcome is Outcome.DUPLICATE
    assert (harness.totals(), harness.markers()) == ({"a": 2}, [("m1", "totals"), ("m3", "totals")])


def test_a_trigger_that_refuses_is_heard(usual: Harness) -> None:
    """SIGNAL, a foreign key and a CHECK are errors of the claim: none is swallowed, as IGNORE would."""
    run(
        usual,
        "CREATE TRIGGER refuses BEFORE INSERT ON processed_message FOR EACH ROW "
        "IF NEW.message_id = 'no' THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'refused'; END IF",
        "ALTER TABLE processed_message ADD CHECK (message_id <> 'check')",
    )
    for message_id in ("no", "check"):
        with pytest.raises(RefusedError, match="The message is not the cause"):
            usual.deliver(usual.dispatcher(), message_id=message_id)
    assert usual.deliver(usual.dispatcher(), message_id="yes").outcome is Outcome.APPLIED
    assert (usual.totals(), usual.markers()) == ({"a": 1}, [("yes", "totals")])


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
        "ALTER TABLE processed_message DROP PRIMARY KEY, ADD UNIQUE (message_id, handler, processed_at) "
        "COMMENT '(`message_id`,`handler`)'",
    ],
)
def test_a_table_that_is_not_ours_is_named(usual: Harness, change: str) -> None:
    """Missing, without a column, with one that has no default or is too short, without the index: it is said."""
    run(usual, change)
    with pytest.raises(MissingTableError, match="idempotency check"):
        usual.deliver(usual.dispatcher(), message_id="long enough")
    assert usual.totals() == {}


@pytest.mark.parametrize("column", ["VARCHAR(512) COLLATE utf8mb4_general_ci", "VARCHAR(512) COLLATE utf8mb4_bin"])
def test_a_collation_that_merges_ids_loses_no_message(usual: Harness, column: str) -> None:
    """In a table that somebody else made, an id that looks like another's is an error, never a duplicate."""
    run(usual, f"ALTER TABLE processed_message MODIFY message_id {column} NOT NULL")
    assert usual.deliver(usual.dispatcher(), message_id="é").outcome is Outcome.APPLIED
    assert usual.deliver(usual.dispatcher(), message_id="é").outcome is Outcome.DUPLICATE
    with pytest.raises(
        MissingTableError, match=r"treats different message ids or handlers as equal.*idempotency check"
    ):
        usual.deliver(usual.dispatcher(), message_id="é ")
    assert usual.totals() == {"a": 1}
    assert any("treats different message ids or handlers as equal" in finding.problem for finding in check_of(usual))


def test_a_column_that_cuts_ids_loses_no_message(mariadb: Database) -> None:
    """Where the mode is not strict, a short column keeps a part of the id: one that begins alike is no duplicate."""
    with ready(subject(mariadb, MARIADB[0], sql_mode="")) as harness:
        run(harness, "ALTER TABLE processed_message MODIFY message_id VARBINARY(3) NOT NULL")
        harness.deliver(harness.dispatcher(), message_id="abcd")
        for message_id in ("abce", "abcd"):
            with pytest.raises(RefusedError, match="Duplicate entry"):
                harness.deliver(harness.dispatcher(), message_id=message_id)
        assert harness.totals() == {"a": 1}
        assert any(finding.fatal for finding in check_of(harness))


def test_a_rollback_is_spared_only_where_there_is_nothing_to_roll_back(usual: Harness) -> None:
    """Right behind a COMMIT, as the pool sends it; whoever shares the engine rolls back what there is."""
    engine = create_engine(usual.subject.url.set(drivername="mariadb+pymysql"), pool_size=1, max_overflow=0)
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
    assert usual.totals() == {"a": 1}


def check_of(harness: Harness) -> list[Any]:
    """What `check` finds in the harness's database."""
    engine = create_engine(harness.subject.url.set(drivername="mariadb+pymysql"))
    try:
        return check(engine)
    finally:
        engine.dispose()


@pytest.mark.parametrize("storage", ["MyISAM", "Aria", "MEMORY"])
def test_a_marker_table_without_transactions_is_refused(usual: Harness, storage: str) -> None:
    """Before anything is written; a table in such an engine would keep the marker of a message that failed."""
    short = "MODIFY message_id VARBINARY(255) NOT NULL, MODIFY handler VARBINARY(100) NOT NULL, DROP COLUMN digest"
    run(usual, f"ALTER TABLE processed_message {short}, ENGINE={storage}")
    for _ in range(2):
        with pytest.raises(UnsafeSessionError, match=f"{storage}.*ENGINE=InnoDB"):
            usual.deliver(usual.dispatcher())
        with pytest.raises(UnsafeSessionError, match=storage):
            usual.transact(lambda session: claim(session, "m1", "h"))
    assert (usual.totals(), usual.markers()) == ({}, [])


def test_our_tables_are_innodb_whatever_the_servers_default_is(mariadb: Database) -> None:
    """`make_tables` says so; a read model that leaves it to a default of MyISAM is refused before it is written."""
    given = subject(mariadb, USUAL, default_storage_engine="MyISAM")
    with ready(given) as harness:
        engines = harness.transact(
            lambda session: {row.table_name: row.engine for row in session.execute(text(ENGINES))}
        )
        assert engines["processed_message"] == engines["processed_message_state"] == "InnoDB"
        assert engines["contract_total"] == "MyISAM"
        with pytest.raises(UnsafeSessionError, match="contract_total has the storage engine MyISAM"):
            harness.deliver(harness.dispatcher())
        assert (harness.totals(), harness.markers()) == ({}, [])


class TestCalledMySQL(ConcurrencyContract):
    """`mysql+pymysql://` is what most URLs of MariaDB say."""

    note = "as mysql+..."

    @pytest.fixture
    def subject(self, mariadb: Database) -> Subject:
        """By that name."""
        return Subject(mariadb.url().set(drivername="mysql+pymysql"))


# Moments ---------------------------------------------------------------------------------------------------------

BERLIN = ZoneInfo("Europe/Berlin")
MOMENTS = [
    datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=5, minutes=30))),
    datetime(2026, 1, 1, 21, 34, 5, 678902, tzinfo=UTC),
    datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN),  # this hour comes twice
    datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1),
    datetime(2026, 3, 29, 1, 59, 59, 999999, tzinfo=BERLIN),  # the next is left out
    datetime(2026, 3, 29, 3, 0, tzinfo=BERLIN),
]


@pytest.fixture(params=[*zip(MARIADB, ("+05:00", "-11:00") * 2, strict=True)], ids=str)
def far_from_utc(request: pytest.FixtureRequest, mariadb: Database) -> Iterator[Harness]:
    """Through each driver, on connections of another time zone."""
    driver, zone = request.param
    with ready(subject(mariadb, driver, time_zone=zone)) as harness:
        yield harness


def test_occurred_at_is_the_same_moment(far_from_utc: Harness) -> None:
    """Given in any zone, it is kept in UTC to the microsecond; hours that daylight saving repeats stay two."""
    dispatcher = far_from_utc.dispatcher()
    for number, moment in enumerate(MOMENTS):
        message = Message(f"m{number}", Added(), occurred_at=moment)
        assert far_from_utc.run(dispatcher.deliver, message).outcome is Outcome.APPLIED
    query = select(MARKER.c.occurred_at).order_by(MARKER.c.message_id)
    stored = far_from_utc.transact(lambda session: list(session.scalars(query)))
    assert [moment.replace(tzinfo=UTC) for moment in stored] == [moment.astimezone(UTC) for moment in MOMENTS]
    assert len(set(stored)) == len(MOMENTS)


def test_queries_take_moments_of_any_zone(far_from_utc: Harness) -> None:
    """A driver drops the zone; the column's type does not let it come so far, in Core, ORM and literals."""

    def body(session: Session) -> None:
        for number, moment in enumerate(MOMENTS):
            session.execute(insert(MARKER).values(message_id=f"m{number}", handler="h", occurred_at=moment))
            same = moment.astimezone(timezone(timedelta(hours=-8)))
            query = select(ProcessedMessage.message_id).where(ProcessedMessage.occurred_at == same)
            assert session.scalars(query).all() == [f"m{number}"]
            literally = str(query.compile(session.connection(), compile_kwargs={"literal_binds": True}))
            assert session.connection().exec_driver_sql(literally).scalars().one() == f"m{number}".encode()
        first = session.get_one(ProcessedMessage, ("m0", "h"))
        first.occurred_at = MOMENTS[3]
        session.flush()
        session.expire(first)
        assert first.occurred_at == MOMENTS[3].astimezone(UTC).replace(tzinfo=None)

    far_from_utc.transact(body)


def test_processed_at_is_utc_to_the_microsecond(far_from_utc: Harness) -> None:
    """That of a claim and that of the column's default, by the database's clock."""
    names = [f"m{number}" for number in range(10)]
    far_from_utc.transact(lambda session: [claim(session, name, "h") for name in names])
    far_from_utc.transact(lambda session: session.execute(insert(MARKER), {"message_id": "default", "handler": "h"}))
    query = select(MARKER.c.processed_at)
    moments = far_from_utc.transact(lambda session: list(session.scalars(query)))
    now = far_from_utc.transact(lambda session: session.scalars(text("select utc_timestamp(6)")).one())
    assert len(moments) == 11
    assert all(timedelta(0) <= now - moment < timedelta(minutes=1) for moment in moments)
    assert any(moment.microsecond % 1000 for moment in moments)


@pytest.mark.parametrize("zone", ["+05:00", "-11:00", "SYSTEM"])
def test_retention_counts_right_in_any_zone(mariadb: Database, zone: str) -> None:
    """Neither a marker of this moment nor one of an hour ago is older than two and the margin; one of four hours is."""
    engine = create_engine(mariadb.url(), connect_args={"init_command": f"SET time_zone = '{zone}'"})
    default_metadata.create_all(engine)
    now = datetime.now(UTC)
    with Session(engine) as session:
        assert claim(session, "now", "h")
        for hours in (1, 4):
            at = now - timedelta(hours=hours)
            session.execute(insert(MARKER).values(message_id=f"{hours} h", handler="h", processed_at=at))
        session.commit()
    assert cleanup(engine, retention_hours=2) == 1
    with engine.connect() as connection:
        assert set(connection.scalars(select(MARKER.c.message_id))) == {"now", "1 h"}
    engine.dispose()


# check ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(name="engine")
def engine_fixture(mariadb: Database) -> Iterator[Engine]:
    """The tables of `make_tables`."""
    engine = create_engine(mariadb.url())
    default_metadata.create_all(engine)
    yield engine
    engine.dispose()


def test_check_finds_nothing_in_our_tables(engine: Engine) -> None:
    """Nothing at all, whatever database they were created in, and it leaves nothing behind."""
    assert check(engine) == []
    with engine.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(MARKER)) == 0


@pytest.mark.parametrize(
    ("change", "problem", "remedy"),
    [
        (
            "MODIFY message_id VARCHAR(512) COLLATE utf8mb4_general_ci NOT NULL",
            "treats different message ids or handlers as equal",
            "make_tables",
        ),
        (
            "MODIFY message_id VARCHAR(512) COLLATE utf8mb4_bin NOT NULL",
            "treats different message ids or handlers as equal",
            "make_tables",
        ),
        ("MODIFY message_id VARBINARY(511) NOT NULL", r"message_id takes 511 characters or bytes, not 512", "cut"),
        ("MODIFY handler VARBINARY(64) NOT NULL", r"handler takes 64 characters or bytes, not 255", "make_tables"),
        (
            "ADD UNIQUE cut (message_id(511), handler)",
            "treats different message ids or handlers as equal",
            "byte for byte",
        ),
        ("ADD tenant INT NOT NULL", "does not have the columns that this version expects", "make_tables"),
        (
            "MODIFY message_id VARBINARY(512) NOT NULL, ENGINE=Aria",
            "storage engine Aria, which has no transactions.*ENGINE=InnoDB",
            "make_tables",
        ),
        ("DROP PRIMARY KEY", r"has no unique index over \(message_id, handler\)", "a duplicate would be applied"),
    ],
)
def test_check_finds_what_loses_messages(engine: Engine, change: str, problem: str, remedy: str) -> None:
    """Fatal, with what is wrong and what mends it; nothing of the trial is left."""
    with engine.begin() as connection:
        connection.execute(text(f"ALTER TABLE processed_message {change}"))
    (finding,) = check(engine)
    assert finding.fatal
    told = f"{finding.problem}; {finding.remedy}"
    assert re.search(problem, told)
    assert remedy in told
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM processed_message")) == 0


def test_check_advises_an_index(engine: Engine) -> None:
    """Without that on `processed_at` nothing is lost, but cleanup reads the whole table."""
    with engine.begin() as connection:
        connection.execute(text("DROP INDEX ix_processed_message_processed_at ON processed_message"))
    (finding,) = check(engine)
    assert (finding.problem, finding.fatal) == ("processed_message has no index on processed_at", False)


# Messages that meet -----------------------------------------------------------------------------------------------

PATIENT = RetryPolicy(attempts=100, within=PATIENCE)

WAYS: dict[str, tuple[str | None, dict[str, Any]]] = {  # the dispatcher's isolation, what the projector declares
    "by default": (None, {}),
    "read_models": (None, {"read_models": [Total]}),
    "REPEATABLE READ": ("REPEATABLE READ", {}),
    "read_models at REPEATABLE READ": ("REPEATABLE READ", {"read_models": [Total]}),
    "read_models at READ COMMITTED": ("READ COMMITTED", {"read_models": [Total]}),
    "SERIALIZABLE": ("SERIALIZABLE", {}),
    "read_models at SERIALIZABLE": ("SERIALIZABLE", {"read_models": [Total]}),
}


each_way = pytest.mark.parametrize(
    ("driver", "way"),
    [(driver, way) for driver in ONE_OF_EACH_KIND for way in (WAYS if driver is USUAL else ["by default"])],
    ids=str,
)
"""All ways on one driver: the library does the same with the other."""


class Seen:
    """The errors that the server sent, by number, and when each came."""

    def __init__(self, harness: Harness) -> None:
        self.numbers: Counter[int] = Counter()
        self._came = threading.Condition()
        event.listen(harness.engine, "handle_error", self._error)

    def _error(self, context: Any) -> None:
        with self._came:
            self.numbers[context.original_exception.args[0]] += 1
            self._came.notify_all()

    def wait_for(self, number: int) -> None:
        """Until there was one."""
        with self._came:
            assert self._came.wait_for(lambda: self.numbers[number], PATIENCE)


@pytest.fixture(params=ONE_OF_EACH_KIND, ids=str)
def of_each_kind(request: pytest.FixtureRequest, mariadb: Database) -> Iterator[Harness]:
    """One synchronous driver, one asynchronous."""
    with ready(subject(mariadb, request.param)) as harness:
        yield harness


@each_way
def test_the_rollback_storm(mariadb: Database, driver: Driver, way: str) -> None:
    """When the winner rolls back, several of those who wait get a deadlock (1213): one applies, the rest skip."""
    isolation, settings = WAYS[way]
    rivals = 6
    with ready(subject(mariadb, driver, isolation=isolation)) as harness:
        seen, held = Seen(harness), Held(harness, fails=True)
        dispatcher = harness.dispatcher(harness.handler(held, **settings), retry=PATIENT)
        winner = harness.start(harness.deliver, dispatcher)
        held.gate.arrival()
        losers = [harness.start(harness.deliver, dispatcher) for _ in range(rivals)]
        harness.waits(rivals)
        held.gate.open()
        assert isinstance(winner.exception(), Broken)
        outcomes = Counter(loser.result().outcome for loser in losers)
        assert outcomes == {Outcome.APPLIED: 1, Outcome.DUPLICATE: rivals - 1}
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [("m1", "totals")])
        assert seen.numbers[1213] > 0, "this was no storm"


@each_way
def test_neighbouring_rows_are_both_created(mariadb: Database, driver: Driver, way: str) -> None:
    """Both messages look for a row that is not there, in one gap, before either inserts; both count."""
    isolation, settings = WAYS[way]
    with ready(subject(mariadb, driver, isolation=isolation)) as harness:
        harness.transact(lambda session: session.add_all([Total(key="a", amount=0), Total(key="z", amount=0)]))
        gate = Gate(harness)

        def body(happened: Added, session: Session) -> None:
            assert session.get(Total, happened.keys[0]) is None
            gate.stop()
            session.add(Total(key=happened.keys[0], amount=happened.amount))

        dispatcher = harness.dispatcher(harness.handler(body, **settings), retry=PATIENT)
        keys = ("m1", "m2", "m3")
        deliveries = []
        for key in keys:
            deliveries.append(delivery := harness.start(harness.deliver, dispatcher, Added((key,)), key))
            gate.arrival(delivery.done)
        gate.open()
        assert [delivery.result().outcome for delivery in deliveries] == [Outcome.APPLIED] * len(keys)
        assert harness.totals() == {"a": 0, "z": 0, "m1": 1, "m2": 1, "m3": 1}
        assert harness.markers() == [(key, "totals") for key in keys]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("driver", ONE_OF_EACH_KIND, ids=str)
def test_the_servers_own_lock_timeout_is_no_duplicate(mariadb: Database, driver: Driver, fails: bool) -> None:
    """1205 on a claim, after `innodb_lock_wait_timeout`, is retried until the winner's end says what is true."""
    with ready(subject(mariadb, driver, innodb_lock_wait_timeout=1)) as harness:
        seen, held = Seen(harness), Held(harness, fails=fails)
        dispatcher = harness.dispatcher(harness.handler(held), retry=PATIENT)
        winner = harness.start(harness.deliver, dispatcher)
        held.gate.arrival()
        loser = harness.start(harness.deliver, dispatcher)
        seen.wait_for(1205)
        held.gate.open()
        assert isinstance(winner.exception(), Broken) is fails
        assert loser.result().outcome is (Outcome.APPLIED if fails else Outcome.DUPLICATE)
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [("m1", "totals")])


@pytest.mark.parametrize(("driver", "bound"), [*((driver, 0.25) for driver in MARIADB), (USUAL, 1.5)], ids=str)
def test_claim_timeout_is_precise(mariadb: Database, driver: Driver, bound: float) -> None:
    """It is ended by its own bound (1969), which knows milliseconds; the server's own for locks is 1 s here (1205)."""
    with ready(subject(mariadb, driver, innodb_lock_wait_timeout=1)) as harness:
        held = Held(harness)
        handler = harness.handler(held)
        winner = harness.start(harness.deliver, harness.dispatcher(handler))
        held.gate.arrival()
        hasty = harness.dispatcher(handler, claim_timeout=bound)
        began = time.monotonic()
        with pytest.raises(InProgress, match=f"{bound} s") as refused:
            harness.deliver(hasty)
        assert time.monotonic() - began >= bound
        cause: Any = refused.value.__cause__
        assert cause.orig.args[0] == 1969
        held.gate.open()
        assert winner.result().outcome is Outcome.APPLIED
        assert harness.deliver(hasty).outcome is Outcome.DUPLICATE


def test_claim_timeout_ends_with_the_claim(of_each_kind: Harness) -> None:
    """What the handler runs may take longer, and the session's variables are as they were."""
    variables = "select @@max_statement_time, @@innodb_lock_wait_timeout"
    before = of_each_kind.transact(lambda session: tuple(session.execute(text(variables)).one()))
    found: list[Any] = []

    def body(happened: Added, session: Session) -> None:
        found.append(tuple(session.execute(text(variables)).one()))
        found.append(session.scalar(select(func.sleep(0.3))))
        add(happened, session)

    dispatcher = of_each_kind.dispatcher(of_each_kind.handler(body), claim_timeout=0.1)
    assert of_each_kind.deliver(dispatcher).outcome is Outcome.APPLIED
    assert found == [before, 0]


def test_the_handlers_own_locks_wait_as_long_as_the_server_does(of_each_kind: Harness) -> None:
    """A row that somebody holds for longer than `claim_timeout` is waited for: the bound is the claim's alone."""
    of_each_kind.transact(lambda session: session.add(Total(key="a", amount=5)))
    gate = Gate(of_each_kind)

    def hold(session: Session) -> None:
        session.get(Total, "a", with_for_update=True)
        gate.stop()

    holder = of_each_kind.start(of_each_kind.transact, hold)
    gate.arrival()
    dispatcher = of_each_kind.dispatcher(of_each_kind.handler(read_models=[Total]), claim_timeout=0.1)
    delivery = of_each_kind.start(of_each_kind.deliver, dispatcher)
    of_each_kind.waits()
    time.sleep(0.3)  # not to win a race: for the bound to pass
    assert not delivery.done()
    gate.open()
    holder.result()
    assert delivery.result().outcome is Outcome.APPLIED
    assert of_each_kind.totals() == {"a": 6}
