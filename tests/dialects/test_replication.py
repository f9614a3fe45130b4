"""`idempotency check` on PostgreSQL tells if a failover would lose messages: its standby is asynchronous."""

from collections.abc import Iterator

import psycopg
import pytest
from sqlalchemy import Engine, MetaData, create_engine, make_url

from command import idempotency
from databases import DRIVERS, Driver, until
from kit import Base, Harness, Subject
from private_postgres import PrivatePostgres
from projector_dedup import Outcome, RetriesExhaustedError, RetryPolicy, make_tables
from projector_dedup.maintenance.check import check
from projector_dedup.maintenance.databases import Finding
from reached import reached
from standby import Primary, Standby, either, own_primary, standby_of

pytestmark = pytest.mark.slow

TABLES = make_tables(MetaData())
WORDS = ("standby", "asynchronous", "synchronous_commit")


@pytest.fixture(scope="module")
def primary() -> Iterator[Primary]:
    """A server that nobody else uses, with our tables."""
    with own_primary() as server:
        server.execute("create role watcher login")
        server.execute("grant all on all tables in schema public to watcher")
        server.execute("alter default privileges grant all on tables to watcher")
        yield server


@pytest.fixture(scope="module")
def standby(primary: Primary) -> Iterator[Standby]:
    """One that streams."""
    with standby_of(primary) as server:
        yield server


@pytest.fixture
def engine(primary: Primary) -> Iterator[Engine]:
    """The primary, which asks for no standby when the test begins."""
    primary.answer()
    engine = create_engine(url_for(primary))
    for metadata in (TABLES.marker.metadata, Base.metadata):
        metadata.create_all(engine)
    yield engine
    engine.dispose()
    primary.execute("alter role postgres reset synchronous_commit")
    primary.answer()


def url_for(server: PrivatePostgres, role: str = "postgres") -> str:
    """The address of the server for a role."""
    return make_url(server.url).set(drivername="postgresql+psycopg", username=role).render_as_string()


def about(server: PrivatePostgres, role: str = "postgres") -> list[Finding]:
    """What check says of replication to a role, by a connection of its own."""
    engine = create_engine(url_for(server, role))
    try:
        return [finding for finding in check(engine, TABLES) if any(word in finding.problem for word in WORDS)]
    finally:
        engine.dispose()


def streams(primary: Primary, standby: Standby) -> None:
    """Wait until the standby is there."""
    until(lambda: primary.execute("select 1 from pg_stat_replication where application_name = %s", standby.name))


@pytest.mark.usefixtures("engine")
def test_a_server_alone_is_nothing_to_speak_of(primary: Primary) -> None:
    """Nothing would be lost, and nothing is asked for."""
    assert about(primary) == []


@pytest.mark.usefixtures("engine")
def test_an_asynchronous_standby_is_advice(primary: Primary, standby: Standby) -> None:
    """A failover loses what was acknowledged just before, and check is the only one to say so; the deploy goes on."""
    streams(primary, standby)
    (found,) = about(primary)
    assert not found.fatal
    assert found.problem.startswith(
        "replication is asynchronous (synchronous_standby_names is empty), so a failover loses"
    )
    done = idempotency("check", "--database-url", url_for(primary))
    assert (done.returncode, "advice: replication is asynchronous" in done.stdout) == (0, True)


@pytest.mark.usefixtures("engine")
def test_a_synchronous_standby_is_nothing_to_speak_of(primary: Primary, standby: Standby) -> None:
    """A failover to it keeps what was acknowledged."""
    primary.wait_for(standby)
    assert about(primary) == []


@pytest.mark.usefixtures("engine")
def test_a_standby_for_which_this_role_does_not_wait_is_asynchronous(primary: Primary, standby: Standby) -> None:
    """`synchronous_commit` is the role's: with `local` its COMMIT waits for nobody, whatever the server asks for."""
    primary.wait_for(standby)
    primary.execute("alter role postgres set synchronous_commit = local")
    (found,) = about(primary)
    assert found.problem.startswith("replication is asynchronous (synchronous_commit = local), so a failover loses")


@pytest.mark.usefixtures("engine")
def test_a_commit_that_does_not_wait_for_the_disk_is_advice(primary: Primary, standby: Standby) -> None:
    """With `off` a crash loses what was acknowledged, with or without a standby."""
    streams(primary, standby)
    primary.execute("alter role postgres set synchronous_commit = off")
    off, asynchronous = about(primary)
    assert off.problem.startswith("synchronous_commit is off for postgres, so a crash loses the last")
    assert asynchronous.problem.startswith("replication is asynchronous")
    assert not off.fatal


@pytest.mark.usefixtures("engine")
def test_a_role_that_may_not_see_it_knows_that_nobody_is_waited_for(primary: Primary, standby: Standby) -> None:
    """That somebody streams is shown to everybody, and the settings too: it is asynchronous."""
    streams(primary, standby)
    (found,) = about(primary, "watcher")
    assert found.problem.startswith("replication is asynchronous")


def test_a_subscriber_of_logical_replication_is_no_standby(primary: Primary, engine: Engine) -> None:
    """Nobody fails over to a consumer of the log, such as Debezium."""
    if primary.execute("show wal_level") != [("logical",)]:
        primary.execute("alter system set wal_level = logical")
        primary.restart()
    engine.dispose()
    subscriber = psycopg.pq.PGconn.connect(f"{primary.url}?replication=database&application_name=debezium".encode())
    subscriber.exec_(b"CREATE_REPLICATION_SLOT follower TEMPORARY LOGICAL pgoutput")
    primary.execute("create publication everything for all tables")
    try:
        start = b"START_REPLICATION SLOT follower LOGICAL 0/0 (proto_version '1', publication_names 'everything')"
        subscriber.exec_(start)
        assert primary.execute("select application_name from pg_stat_replication") == [("debezium",)]
        assert about(primary) == []
    finally:
        subscriber.finish()
        primary.execute("drop publication everything")


# The other server ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("driver", [each for each in DRIVERS if each.engine == "postgresql"], ids=str)
def test_a_url_of_both_servers_leads_to_the_one_that_takes_writes(
    primary: Primary, standby: Standby, driver: Driver
) -> None:
    """With `target_session_attrs=read-write`, whichever stands first; without it, a standby is refused as read-only."""
    if not driver.installed:
        reached.give_up("postgresql", str(driver), f"{driver.module} is not installed")
    for number, servers in enumerate(((primary, standby), (standby, primary))):
        with Harness(Subject(either(*servers).set(drivername=driver.name_in_url))) as harness:
            assert harness.deliver(harness.dispatcher(), message_id=f"{driver} {number}").outcome is Outcome.APPLIED
    only = either(standby, standby).difference_update_query(["target_session_attrs"])
    with Harness(Subject(only.set(drivername=driver.name_in_url))) as harness:
        dispatcher = harness.dispatcher(retry=RetryPolicy(attempts=2))
        with pytest.raises(RetriesExhaustedError, match="read-only"):
            harness.deliver(dispatcher, message_id="m3")
