"""A database or driver that was not tried: what every database has is used, or it is refused."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from databases import Database, mariadb_connection
from endings import assert_found_out, fails, returns, writes_on
from misbehaviour import BELOW, COMMITS, ROLLBACKS, SAVEPOINTS, SWALLOWED, Misbehaviour, Verdict
from projector_dedup import (
    Dispatcher,
    MissingTableError,
    Outcome,
    RefusedError,
    RetryPolicy,
    TransactionViolatedError,
    UnsupportedDatabaseError,
    claim,
    on,
    projector,
)
from projector_dedup.dialects import _DIALECTS, Failure, Status, dialect_of, register
from projector_dedup.dialects.mariadb.dialect import MariaDB
from projector_dedup.dialects.portable import Portable
from projector_dedup.dialects.postgresql.dialect import PostgreSQL
from projector_dedup.dialects.sqlite.dialect import SQLite
from projector_dedup.maintenance.check import check
from projector_dedup.maintenance.cleanup import cleanup
from projector_dedup.tables import default_metadata
from projector_dedup.testing.contract import ProjectorContract, Subject
from projector_dedup.testing.kit import Added, Harness, Total, add
from rig import outsides_fixture, rig_on_fixture  # noqa: F401  # fixtures
from untried import PG8000, UNTRIED, UntriedDriver, registered

pytestmark = pytest.mark.slow

totals = projector(idempotent=True, name="totals")(on(Added)(add))
SYNC = [driver for driver in UNTRIED if not driver.is_async]


def reach(request: pytest.FixtureRequest, driver: UntriedDriver, **arguments: Any) -> Subject:
    """The database of this test, under a name that is not known."""
    pytest.importorskip(driver.module)
    database: Database = request.getfixturevalue(driver.engine)
    url = database.url().set(drivername=driver.drivername)
    if driver.engine == "mariadb":
        compare_bytes(database)
    return Subject(url, prepare=registered, one_writer=driver.engine == "sqlite", **arguments)


def compare_bytes(database: Database) -> None:
    """Its own default takes "a", "A" and "a " for one, and our column types help only where we know the database."""
    with mariadb_connection(database.url()) as connection, connection.cursor() as cursor:
        cursor.execute("ALTER DATABASE CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin")


class TestContract(ProjectorContract):
    """The whole contract, as somebody would run it on a database of theirs."""

    note = "portable path"

    @pytest.fixture(params=[*UNTRIED, PG8000], ids=str)
    def subject(self, request: pytest.FixtureRequest) -> Subject:
        """Databases that are known, under names that are not, and a driver that is not."""
        return reach(request, request.param)


class TestContractWithoutRelease(ProjectorContract):
    """The same where SQL has no RELEASE SAVEPOINT."""

    note = "portable path"

    @pytest.fixture
    def subject(self, postgresql: Database) -> Subject:
        """As SQL Server and Oracle are."""
        return Subject(postgresql.url().set(drivername="untried_norelease+psycopg"), prepare=registered)


@pytest.fixture(params=SYNC, ids=str)
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """The contract's tables, through each synchronous driver."""
    with Harness(reach(request, request.param)) as harness:
        harness.create_tables()
        yield harness


@pytest.fixture
def on_mariadb(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """The contract's tables on MariaDB."""
    with Harness(reach(request, UNTRIED[2])) as harness:
        harness.create_tables()
        yield harness


@pytest.fixture
def on_postgresql(request: pytest.FixtureRequest) -> Iterator[Harness]:
    """The contract's tables on PostgreSQL."""
    with Harness(reach(request, UNTRIED[0])) as harness:
        harness.create_tables()
        yield harness


def never(_happened: Added, _session: Session) -> None:
    """A handler that must not be entered."""
    raise AssertionError("entered")


# What a handler does to its transaction ---------------------------------------------------------------------------


# asyncpg commits by itself what follows a raw COMMIT: found out too, but what was written after it stays.
STAYS = {"driver cursor COMMIT", "driver cursor ROLLBACK"}


def _cases() -> Iterator[Any]:
    for driver in (UNTRIED[0], UNTRIED[1], UNTRIED[3], PG8000):
        for case in (*BELOW, *SWALLOWED, *COMMITS, *ROLLBACKS, *SAVEPOINTS):
            endings: list[Any] = [returns, fails]
            if case in BELOW and not (driver.module == "asyncpg" and case.name in STAYS):
                endings.append(writes_on)
            if (verdict := case.verdict(driver)) is not None:
                for ending in endings:
                    yield pytest.param(driver, case, verdict, ending, id=f"{driver}-{case}-{ending.__name__}")


@pytest.mark.filterwarnings("ignore:DB-API extension")  # pg8000 would rather not be asked for cursor.connection
@pytest.mark.parametrize(("driver", "case", "verdict", "ending"), list(_cases()))
def test_what_becomes_of_a_misbehaviour(
    driver: UntriedDriver, case: Misbehaviour, verdict: Verdict, ending: Any, rig_on: Any
) -> None:
    """As on the drivers that are known: the server is asked, since the driver cannot be."""
    assert_found_out(rig_on(driver), case, verdict, ending)


def test_an_implicit_commit_is_reported(on_mariadb: Harness) -> None:
    """DDL that commits is not recognised, so the marker is durable; the delivery says so."""

    def creates(happened: Added, session: Session) -> None:
        add(happened, session)
        session.flush()
        session.execute(text("CREATE TABLE mine (id INTEGER)"))

    with pytest.raises(TransactionViolatedError) as violation:
        on_mariadb.deliver(on_mariadb.dispatcher(on_mariadb.handler(creates)))
    assert violation.value.durable
    assert (on_mariadb.totals(), on_mariadb.markers()) == ({"a": 1}, [("m1", "totals")])


def test_a_rivals_marker_is_not_taken_for_ones_own(on_postgresql: Harness) -> None:
    """A conflict rolls a delivery back, its rival applies the message meanwhile: a duplicate, and no violation."""
    harness = on_postgresql
    harness.deliver(harness.dispatcher(), message_id="m0")
    entered: list[str] = []

    def conflicts(happened: Added, session: Session) -> None:
        entered.append("")
        if len(entered) > 1:
            return add(happened, session)
        session.scalars(select(Total)).all()
        harness.transact(lambda outside: outside.execute(update(Total).values(amount=Total.amount + 10)))
        rival = harness.start(harness.deliver, dispatcher)
        harness.waits()
        try:
            session.execute(update(Total).values(amount=Total.amount + 1))
        except DBAPIError:
            assert rival.result().outcome is Outcome.APPLIED
            raise
        raise AssertionError("no conflict")

    dispatcher = harness.dispatcher(harness.handler(conflicts, isolation="REPEATABLE READ"))
    assert harness.deliver(dispatcher).outcome is Outcome.DUPLICATE
    assert (harness.totals(), len(entered)) == ({"a": 12}, 2)


def test_a_deadlock_that_is_swallowed_runs_the_unit_again(on_mariadb: Harness) -> None:
    """The server rolled back and went on: what was written later does not count, and nothing reconnects."""
    connects: list[object] = []
    event.listen(on_mariadb.engine, "connect", lambda *_: connects.append(1))
    runs: list[int] = []

    def swallows(happened: Added, session: Session) -> None:
        runs.append(1)
        add(happened, session)
        session.flush()
        if len(runs) == 1:
            with pytest.raises(DBAPIError):
                session.execute(text("SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213"))
            session.execute(text("UPDATE contract_total SET amount = 100"))

    before = len(connects)
    assert on_mariadb.deliver(on_mariadb.dispatcher(on_mariadb.handler(swallows))).outcome is Outcome.APPLIED
    assert (len(runs), on_mariadb.totals()) == (2, {"a": 1})
    assert len(connects) - before <= 1


def test_an_error_that_rolled_everything_back_costs_no_reconnect(request: pytest.FixtureRequest) -> None:
    """The transaction is gone and nothing was committed, so the connection goes on to the retries."""
    with Harness(reach(request, UNTRIED[3], engine_arguments={"pool_size": 1})) as harness:
        harness.create_tables()
        harness.transact(lambda session: add(Added(), session))
        harness.deliver(harness.dispatcher(), message_id="first")
        connects: list[object] = []
        event.listen(harness.engine, "connect", lambda *_: connects.append(1))

        def violates(_happened: Added, session: Session) -> None:
            session.execute(text("INSERT OR ROLLBACK INTO contract_total VALUES ('a', 0)"))

        with pytest.raises(DBAPIError, match="UNIQUE"):
            harness.deliver(harness.dispatcher(harness.handler(violates)))
        assert connects == []
        assert harness.markers() == [("first", "totals")]


def test_without_release_a_rollback_below_is_found(postgresql: Database) -> None:
    """There the marker is looked for, which a commit below SQLAlchemy leaves: that is not seen, and is said."""
    url = postgresql.url().set(drivername="untried_norelease+psycopg")
    with Harness(Subject(url)) as harness:
        harness.create_tables()

        def rolls_back(happened: Added, session: Session) -> None:
            session.connection().connection.rollback()
            add(happened, session)

        with pytest.raises(TransactionViolatedError):
            harness.deliver(harness.dispatcher(harness.handler(rolls_back)))
        assert (harness.totals(), harness.markers()) == ({}, [])


# Refused ----------------------------------------------------------------------------------------------------------

SPELLINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "create_engine": ({"isolation_level": "AUTOCOMMIT"}, {}, {}),
    "execution_options": ({}, {"isolation_level": "AUTOCOMMIT"}, {}),
    "dispatcher": ({}, {}, {"isolation": "AUTOCOMMIT"}),
    "connect_args": ({"connect_args": {"autocommit": True}}, {}, {}),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_autocommit_is_refused(harness: Harness, spelling: str) -> None:
    """Though SQLAlchemy cannot tell: by the probe, where it was not asked for; nothing stays in the table."""
    arguments, options, of_the_dispatcher = SPELLINGS[spelling]
    if spelling == "connect_args" and harness.subject.one_writer:
        arguments = {"connect_args": {"isolation_level": None}}  # sqlite3 before Python 3.12
    engine = create_engine(harness.subject.url, **arguments).execution_options(**options)
    handler = projector(idempotent=True, name="totals")(on(Added)(never))
    with pytest.raises(RefusedError, match=r"AUTOCOMMIT|ends in|told from another"):
        Dispatcher(sessionmaker(engine), handler, **of_the_dispatcher).deliver(Added(), message_id="m1")
    if spelling != "dispatcher":
        with Session(engine) as session:
            assert _is_refused_or_held(session)
    assert harness.markers() == []
    engine.dispose()


def _is_refused_or_held(session: Session) -> bool:
    """sqlite3 without a BEGIN of its own begins with the savepoint, so a caller's claim is right all the same."""
    try:
        claim(session, "m1", "h")
    except RefusedError:
        return True
    session.rollback()
    return session.get_bind().dialect.name == "untried_sqlite"


MARKER = (
    "CREATE TABLE processed_message (message_id {type} {collation} NOT NULL, handler VARCHAR(255) NOT NULL, "
    "processed_at TIMESTAMP {precision} NOT NULL, occurred_at TIMESTAMP {precision} NULL {key}) {options}"
)
MYISAM = "ENGINE=MyISAM CHARACTER SET latin1 COLLATE latin1_nopad_bin"
KEY = ", PRIMARY KEY (message_id, handler)"
BAD_TABLES: dict[str, tuple[str, dict[str, str], str]] = {
    "PostgreSQL without the index": ("postgresql", {"key": ""}, "no unique index"),
    "MariaDB without the index": ("mariadb", {"key": ""}, "no unique index"),
    "SQLite without the index": ("sqlite", {"key": ""}, "no unique index"),
    "an index over the id alone": ("postgresql", {"key": ", PRIMARY KEY (handler)"}, "different ids"),
    "MyISAM": ("mariadb", {"key": KEY, "options": MYISAM}, "what was rolled back stays"),
    "a case-insensitive collation": ("mariadb", {"key": KEY, "collation": "COLLATE utf8mb4_general_ci"}, "different"),
    "a padded collation": ("mariadb", {"key": KEY, "collation": "COLLATE utf8mb4_bin"}, "such as ..a .."),
    "NOCASE": ("sqlite", {"key": KEY, "collation": "COLLATE NOCASE"}, "such as ..A.."),
    "a numeric column": ("sqlite", {"key": KEY, "type": "NUMERIC"}, "such as"),
}


@pytest.mark.parametrize("bad", BAD_TABLES)
def test_a_table_that_would_lose_messages_is_refused(request: pytest.FixtureRequest, bad: str) -> None:
    """By dispatcher, claim and check, before anything is durable; no handler is entered."""
    engine_name, parts, why = BAD_TABLES[bad]
    driver = next(driver for driver in SYNC if driver.engine == engine_name)
    parts = {
        "type": "VARCHAR(512)",
        "collation": "",
        "precision": "(6)" if engine_name == "mariadb" else "",
        "options": "",
        **parts,
    }
    with Harness(reach(request, driver)) as harness:
        harness.create_tables()
        with harness.engine.begin() as connection:
            connection.execute(text("DROP TABLE processed_message"))
            connection.execute(text(MARKER.format(**parts)))
        for _ in range(2):
            with pytest.raises(UnsupportedDatabaseError, match=why):
                harness.deliver(harness.dispatcher(harness.handler(never)))
            with pytest.raises(UnsupportedDatabaseError, match=why):
                harness.transact(lambda session: claim(session, "m1", "h"))
        assert any(finding.fatal for finding in check(harness.engine))
        assert harness.markers() == []


def test_another_violation_is_no_duplicate(on_postgresql: Harness) -> None:
    """An integrity error is a duplicate only if the marker is there."""
    on_postgresql.deliver(on_postgresql.dispatcher(), message_id="first")  # the probe has passed
    with on_postgresql.engine.begin() as connection:
        connection.execute(text("ALTER TABLE processed_message ADD CHECK (message_id <> 'm1')"))
    with pytest.raises(DBAPIError):
        on_postgresql.deliver(on_postgresql.dispatcher())
    assert on_postgresql.markers() == [("first", "totals")]


def test_a_collation_that_changes_later_does_not_lose_a_message(on_mariadb: Harness) -> None:
    """Two ids that the database takes for one end in its error, never in `DUPLICATE`."""
    on_mariadb.deliver(on_mariadb.dispatcher(), message_id="m1")
    with on_mariadb.engine.begin() as connection:
        connection.execute(text("ALTER TABLE processed_message CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"))
        connection.execute(text("ALTER TABLE processed_message MODIFY handler VARCHAR(255) COLLATE utf8mb4_general_ci"))
    with pytest.raises(DBAPIError):
        on_mariadb.deliver(on_mariadb.dispatcher(), message_id="m1 ")
    assert on_mariadb.markers() == [("m1", "totals")]


def test_a_missing_table_is_named_whoever_claims(harness: Harness) -> None:
    """Also to `claim`, before it sends anything else."""
    with harness.engine.begin() as connection:
        connection.execute(text("DROP TABLE processed_message"))
    with pytest.raises(MissingTableError, match="processed_message is missing"):
        harness.transact(lambda session: claim(session, "m1", "h"))


# What it does -----------------------------------------------------------------------------------------------------


def test_it_is_said_once(on_postgresql: Harness, caplog: pytest.LogCaptureFixture) -> None:
    """One warning for an engine: what it is, and where the suite is."""
    engine = create_engine(on_postgresql.subject.url)
    with caplog.at_level(logging.WARNING, "projector_dedup"):
        for message_id in ("m1", "m2"):
            Dispatcher(sessionmaker(engine), totals).deliver(Added(), message_id=message_id)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "untried_postgresql with the driver psycopg was not tried" in said
    assert "docs/bring-your-database.md" in said
    engine.dispose()


def test_the_probe_runs_once_and_leaves_nothing(harness: Harness) -> None:
    """A second dispatcher on the engine does not try it out again."""
    sent: list[str] = []
    event.listen(harness.engine, "before_cursor_execute", lambda *arguments: sent.append(str(arguments[3])))
    for message_id in ("m1", "m2"):
        harness.deliver(harness.dispatcher(), message_id=message_id)
    assert len([parameters for parameters in sent if "probe" in parameters and "xxx1" in parameters]) == 1
    assert harness.markers() == [("m1", "totals"), ("m2", "totals")]


def test_the_table_of_another_tenant_is_tried_out_too(on_mariadb: Harness) -> None:
    """Where a listener chooses the database, one connection leads to several tables of one name."""
    first = on_mariadb.subject.url.database
    engine = create_engine(on_mariadb.subject.url, pool_size=1, max_overflow=0)
    tenant = first

    @event.listens_for(engine, "checkout")
    def _use(dbapi_connection: Any, _record: Any, _proxy: Any) -> None:
        dbapi_connection.cursor().execute(f"USE {tenant}")

    dispatcher = Dispatcher(sessionmaker(engine), totals, retry=RetryPolicy(attempts=1))
    with on_mariadb.engine.begin() as connection:
        connection.execute(text(f"CREATE DATABASE {first}_b"))
        connection.execute(text(f"CREATE TABLE {first}_b.processed_message LIKE processed_message"))
        connection.execute(text(f"ALTER TABLE {first}_b.processed_message DROP PRIMARY KEY"))
    try:
        dispatcher.deliver(Added(), message_id="m1")
        tenant = f"{first}_b"
        with pytest.raises(UnsupportedDatabaseError, match="accepts one marker twice"):
            dispatcher.deliver(Added(), message_id="m1")
    finally:
        engine.dispose()
        with on_mariadb.engine.begin() as connection:
            connection.execute(text(f"DROP DATABASE {first}_b"))


def test_it_runs_at_serializable(on_postgresql: Harness) -> None:
    """The one level at which the standard rules lost updates out; with `read_models` too."""
    levels: list[str] = []

    def looks(_happened: Added, session: Session) -> None:
        levels.append(session.scalars(text("SHOW transaction_isolation")).one())

    chosen: list[dict[str, Any]] = [{}, {"read_models": [Total]}]
    for number, settings in enumerate(chosen):
        on_postgresql.deliver(on_postgresql.dispatcher(on_postgresql.handler(looks, f"h{number}", **settings)))
    assert levels == ["serializable", "serializable"]


def test_a_level_that_cannot_be_set_is_said(postgresql: Database, caplog: pytest.LogCaptureFixture) -> None:
    """Then lost updates are up to the database: the log says so once, and the contract suite finds out."""
    with Harness(Subject(postgresql.url().set(drivername="untried_nolevels+psycopg"))) as harness:
        harness.create_tables()
        with caplog.at_level(logging.WARNING, "projector_dedup"):
            for message_id in ("m1", "m2"):
                assert harness.deliver(harness.dispatcher(), message_id=message_id).outcome is Outcome.APPLIED
        assert len([1 for record in caplog.records if "cannot set SERIALIZABLE" in record.getMessage()]) == 1


def test_cleanup_prunes_by_the_clock_of_the_claims(harness: Harness) -> None:
    """A marker goes when it is older than the retention, in batches."""
    for message_id in ("m1", "m2", "m3"):
        harness.deliver(harness.dispatcher(), message_id=message_id)
    assert cleanup(harness.engine, retention_hours=1) == 0
    with harness.engine.begin() as connection:
        connection.execute(text("UPDATE processed_message SET processed_at = '2020-01-01' WHERE message_id <> 'm3'"))
    batches: list[int] = []
    assert cleanup(harness.engine, retention_hours=1, batch_size=1, on_batch=batches.append) == 2
    assert (batches, harness.markers()) == ([1, 1], [("m3", "totals")])


def test_cleanup_stops_if_the_driver_does_not_count(harness: Harness) -> None:
    """Else it would not know when to stop."""

    class Forgetful(harness.engine.dialect.execution_ctx_cls):  # type: ignore[misc, name-defined]  # it is a class
        """Its rowcount is unknown."""

        rowcount = -1

    harness.engine.dialect.execution_ctx_cls = Forgetful
    with pytest.raises(UnsupportedDatabaseError, match="does not say"):
        cleanup(harness.engine)


CODES: dict[str, tuple[Any, Failure]] = {
    "sqlstate, psycopg": (SimpleNamespace(sqlstate="40001", args=()), Failure.TRANSIENT),
    "pgcode, psycopg2": (SimpleNamespace(sqlstate=None, pgcode="23505", args=()), Failure.UNIQUE),
    "first argument, pyodbc": (SimpleNamespace(args=("42S02", "[42S02] no such table")), Failure.NO_TABLE),
    "fields of the protocol, pg8000": (SimpleNamespace(args=({"C": "08006"},)), Failure.TRANSIENT),
    "check constraint": (SimpleNamespace(sqlstate="23514", args=()), Failure.PERMANENT),
    "internal error": (SimpleNamespace(sqlstate="XX000", args=()), Failure.LATER),
    "syntax": (SimpleNamespace(sqlstate="42000", args=()), Failure.PERMANENT),
    "no code, five letters": (type("DataError", (Exception,), {})("ERROR"), Failure.PERMANENT),
    "no code, a conflict": (type("IntegrityError", (Exception,), {})("no"), Failure.UNIQUE),
    "no code, locked": (type("OperationalError", (Exception,), {})("no"), Failure.TRANSIENT),
    "HY000, locked": (type("OperationalError", (Exception,), {"sqlstate": "HY000"})("no"), Failure.TRANSIENT),
}


@pytest.mark.parametrize("case", CODES)
def test_errors_are_told_apart_wherever_the_driver_keeps_their_code(case: str) -> None:
    """By SQLSTATE; by the class that PEP 249 asks for, where there is none."""
    original, failure = CODES[case]
    assert Portable().classify(DBAPIError("insert", {}, original)) is failure
    assert Portable().classify(original) is failure


def test_a_dialect_of_somebodys_own_is_used(postgresql: Database) -> None:
    """`register` puts it in place of the portable one, for its names and drivers."""

    class OnPg8000(PostgreSQL):
        """PostgreSQL by another driver, whose status is not read."""

        drivers = frozenset({"pg8000"})

        def status(self, driver_connection: Any) -> Status:  # noqa: ARG002  # its signature
            """Not known."""
            return Status.OPEN

    engine: Engine = create_engine(postgresql.url().set(drivername=PG8000.drivername))
    default_metadata.create_all(engine)
    assert isinstance(dialect_of(engine), Portable)
    register(ours := OnPg8000())
    try:
        assert dialect_of(engine) is ours
        assert isinstance(dialect_of(create_engine(postgresql.url())), PostgreSQL)
    finally:
        del _DIALECTS["postgresql", "pg8000"]
    engine.dispose()


@pytest.mark.parametrize("database", [SQLite, PostgreSQL, MariaDB])
def test_a_subclass_that_does_not_say_what_its_driver_tells_cannot_be_made(database: type[Any]) -> None:
    """It would guess how a transaction stands, or whether a COMMIT has an effect."""
    mine = type("Mine", (database,), {"drivers": frozenset({"mine"})})
    with pytest.raises(TypeError, match="abstract"):
        mine()
