"""MariaDB's tables: moments in UTC whatever a connection's time zone is, and what `check` finds in tables not ours."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import Engine, create_engine, func, insert, select, text
from sqlalchemy.orm import Session

from databases import DRIVERS, Database
from projector_dedup import Message, MissingTableError, Outcome, ProcessedMessage, claim
from projector_dedup.maintenance.check import check, verify
from projector_dedup.maintenance.cleanup import cleanup
from projector_dedup.tables import default_metadata, default_tables
from projector_dedup.testing.kit import Added, Harness, Subject

MARIADB = [driver for driver in DRIVERS if driver.engine == "mariadb"]
MARKER = default_tables.marker
BERLIN = ZoneInfo("Europe/Berlin")
MOMENTS = [
    datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=5, minutes=30))),
    datetime(2026, 1, 1, 21, 34, 5, 678902, tzinfo=UTC),
    datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN),  # this hour comes twice
    datetime(2026, 10, 25, 2, 30, tzinfo=BERLIN, fold=1),
    datetime(2026, 3, 29, 1, 59, 59, 999999, tzinfo=BERLIN),  # the next is left out
    datetime(2026, 3, 29, 3, 0, tzinfo=BERLIN),
]


@pytest.fixture(name="harness", params=[(driver, zone) for driver in MARIADB for zone in ("+05:00", "-11:00")], ids=str)
def harness_fixture(request: pytest.FixtureRequest, mariadb: Database) -> Iterator[Harness]:
    """Through each driver, on connections far from UTC."""
    driver, zone = request.param
    arguments = {"connect_args": {"init_command": f"SET time_zone = '{zone}'"}}
    with Harness(Subject(mariadb.url(driver.drivername), engine_arguments=arguments)) as harness:
        harness.create_tables()
        yield harness


def test_occurred_at_is_the_same_moment(harness: Harness) -> None:
    """Given in any zone, it is kept in UTC to the microsecond; hours that daylight saving repeats stay two."""
    dispatcher = harness.dispatcher()
    for number, moment in enumerate(MOMENTS):
        message = Message(f"m{number}", Added(), occurred_at=moment)
        assert harness.run(dispatcher.deliver, message).outcome is Outcome.APPLIED
    query = select(MARKER.c.occurred_at).order_by(MARKER.c.message_id)
    stored = harness.transact(lambda session: list(session.scalars(query)))
    assert [moment.replace(tzinfo=UTC) for moment in stored] == [moment.astimezone(UTC) for moment in MOMENTS]
    assert len(set(stored)) == len(MOMENTS)


def test_queries_take_moments_of_any_zone(harness: Harness) -> None:
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

    harness.transact(body)


def test_processed_at_is_utc_to_the_microsecond(harness: Harness) -> None:
    """That of a claim and that of the column's default, by the database's clock."""
    names = [f"m{number}" for number in range(10)]
    harness.transact(lambda session: [claim(session, name, "h") for name in names])
    harness.transact(lambda session: session.execute(insert(MARKER), {"message_id": "default", "handler": "h"}))
    query = select(MARKER.c.processed_at)
    moments = harness.transact(lambda session: list(session.scalars(query)))
    now = harness.transact(lambda session: session.scalars(text("select utc_timestamp(6)")).one())
    assert len(moments) == 11
    assert all(timedelta(0) <= now - moment < timedelta(minutes=1) for moment in moments)
    assert any(moment.microsecond % 1000 for moment in moments)


@pytest.mark.parametrize("zone", ["+05:00", "-11:00", "SYSTEM"])
def test_retention_counts_right_in_any_zone(mariadb: Database, zone: str) -> None:
    """Neither a marker of this moment nor one of an hour ago is older than two, and one of three hours ago is."""
    engine = create_engine(mariadb.url(), connect_args={"init_command": f"SET time_zone = '{zone}'"})
    default_metadata.create_all(engine)
    now = datetime.now(UTC)
    with Session(engine) as session:
        assert claim(session, "now", "h")
        for hours in (1, 3):
            at = now - timedelta(hours=hours)
            session.execute(insert(MARKER).values(message_id=f"{hours} h", handler="h", processed_at=at))
        session.commit()
    assert cleanup(engine, retention_hours=2) == 1
    with engine.connect() as connection:
        assert set(connection.scalars(select(MARKER.c.message_id))) == {"now", "1 h"}
    assert cleanup(engine, retention_hours=0.5) == 1
    engine.dispose()


# check ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(name="engine", params=[driver for driver in MARIADB if not driver.is_async], ids=str)
def engine_fixture(request: pytest.FixtureRequest, mariadb: Database) -> Iterator[Engine]:
    """The tables of `make_tables`, through each synchronous driver."""
    engine = create_engine(mariadb.url(request.param.drivername))
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
            "takes different message ids for one",
            "make_tables",
        ),
        (
            "MODIFY message_id VARCHAR(512) COLLATE utf8mb4_bin NOT NULL",
            "takes different message ids for one",
            "make_tables",
        ),
        ("MODIFY message_id VARBINARY(511) NOT NULL", r"message_id takes 511 characters or bytes, not 512", "cut"),
        ("MODIFY handler VARBINARY(64) NOT NULL", r"handler takes 64 characters or bytes, not 255", "make_tables"),
        ("ADD UNIQUE cut (message_id(511), handler)", "takes different message ids for one", "byte for byte"),
        ("ADD tenant INT NOT NULL", "not the one this version expects", "make_tables"),
        (
            "MODIFY message_id VARBINARY(512) NOT NULL, ENGINE=Aria",
            "storage engine Aria, which has no transactions.*ENGINE=InnoDB",
            "make_tables",
        ),
        ("DROP PRIMARY KEY", r"has no unique index over \(message_id, handler\)", "a duplicate would be applied"),
    ],
)
def test_check_finds_what_loses_messages(engine: Engine, change: str, problem: str, remedy: str) -> None:
    """Fatal, with what is wrong and what mends it; `verify` raises it, so `cleanup` does not run either."""
    with engine.begin() as connection:
        connection.execute(text(f"ALTER TABLE processed_message {change}"))
    (finding,) = check(engine)
    assert finding.fatal
    with pytest.raises(MissingTableError, match=problem) as failure:
        verify(engine)
    assert remedy in str(failure.value)
    with pytest.raises(MissingTableError, match=problem):
        cleanup(engine)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM processed_message")) == 0


def test_check_advises_an_index(engine: Engine) -> None:
    """Without that on `processed_at` nothing is lost, but cleanup reads the whole table."""
    with engine.begin() as connection:
        connection.execute(text("DROP INDEX ix_processed_message_processed_at ON processed_message"))
    (finding,) = check(engine)
    assert (finding.problem, finding.fatal) == ("processed_message has no index on processed_at", False)
