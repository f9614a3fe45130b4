"""innodb_snapshot_isolation: on where a projector runs, and nowhere else; without it no update is lost either."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import NullPool, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session

from databases import DRIVERS, Database, Driver
from projector_dedup import Outcome, RetriesExhaustedError, RetryPolicy, TransactionViolatedError
from projector_dedup.dialects import mariadb as mysql_snapshots
from projector_dedup.testing import contract
from projector_dedup.testing.kit import Harness, Total
from projector_dedup.testing.races import LostUpdateContract, RaceContract
from rig import NOTHING, Rig, add, outsides_fixture, rig_on_fixture  # noqa: F401  # fixtures

MARIADB = [driver for driver in DRIVERS if driver.engine == "mariadb"]
POOLS: dict[str, dict[str, Any]] = {
    "a pool": {},
    "a pool of one": {"pool_size": 1, "max_overflow": 0},
    "a pool that asks first": {"pool_size": 1, "max_overflow": 0, "pool_pre_ping": True},
    "no pool": {"poolclass": NullPool},
}
ASKS = text("SELECT @@innodb_snapshot_isolation, connection_id()")

pytestmark = pytest.mark.parametrize("driver", MARIADB, ids=str)


def users_own(rig: Rig, *, breaks: bool = False) -> int:
    """What a transaction of the user's own, on a connection of the same engine, has the setting at."""

    def ask(connection: Any) -> int:
        if breaks:
            connection.execute(text("SELECT nothing"))
        return int(connection.execute(ASKS).one()[0])

    if isinstance(rig.engine, AsyncEngine):
        engine = rig.engine

        async def awaited() -> int:
            async with engine.begin() as connection:
                return await connection.run_sync(ask)

        found: int = rig.run(awaited())
        return found
    with rig.engine.begin() as connection:
        return ask(connection)


class Handler:
    """Adds one, and remembers the setting that it ran at and the connection that it ran on."""

    def __init__(self) -> None:
        self.settings: list[int] = []
        self.connections: list[int] = []

    def __call__(self, session: Session) -> None:
        """What a good handler does."""
        setting, connection = session.execute(ASKS).one()
        self.settings.append(setting)
        self.connections.append(connection)
        add(session)


@pytest.mark.parametrize("pool", POOLS)
def test_the_setting_is_the_projectors_alone(rig_on: Callable[..., Rig], driver: Driver, pool: str) -> None:
    """On in every delivery; off for the user before, between and after, also where both take the same connection."""
    rig, handler = rig_on(driver, **POOLS[pool]), Handler()
    for number in range(3):
        assert users_own(rig) == 0
        assert rig.deliver(handler, f"m{number}").outcome is Outcome.APPLIED
        assert users_own(rig) == 0
        assert rig.deliver(handler, f"m{number}").outcome is Outcome.DUPLICATE
        rig.deliver(handler, idempotent=False)
    assert handler.settings == [1, 0] * 3, "a handler that is not idempotent has no conflict detected, as before"
    if pool != "no pool":
        assert len(set(handler.connections)) == 1
        assert rig.connects == 1
    assert rig.durable().amount == 6


def test_one_round_trip_for_each_connection(rig_on: Callable[..., Rig], driver: Driver) -> None:
    """Where only projectors use an engine, the setting is not touched again after the first delivery."""
    rig, handler = rig_on(driver, pool_size=1, max_overflow=0), Handler()
    counts: list[int] = []

    def count(session: Session) -> None:
        handler(session)
        counts.append(int(session.execute(text("SHOW SESSION STATUS LIKE 'Com_set_option'")).one()[1]))

    for number in range(5):
        rig.deliver(count, f"m{number}")
    assert handler.settings == [1] * 5
    assert counts == [counts[0]] * 5


def test_after_a_failure(rig_on: Callable[..., Rig], driver: Driver) -> None:
    """A handler that raises, a user's statement that fails: the next on that connection has the setting as it was."""
    rig, handler = rig_on(driver, pool_size=1, max_overflow=0), Handler()

    def broken(session: Session) -> None:
        handler(session)
        raise ZeroDivisionError

    for number in range(2):
        with pytest.raises(ZeroDivisionError):
            rig.deliver(broken, f"m{number}")
        with pytest.raises(DBAPIError):
            users_own(rig, breaks=True)
        assert users_own(rig) == 0
        with pytest.raises(DBAPIError):
            users_own(rig, breaks=True)
        assert rig.deliver(handler, f"m{number}").outcome is Outcome.APPLIED
    assert handler.settings == [1] * 4
    assert rig.connects == 1


def test_after_an_invalidation(rig_on: Callable[..., Rig], driver: Driver) -> None:
    """A connection that replaces an invalidated one, or one of a disposed pool, is a new one in this too."""
    rig, handler = rig_on(driver, pool_size=1, max_overflow=0), Handler()

    def invalidates(session: Session) -> None:
        handler(session)
        if len(handler.settings) == 1:
            session.invalidate()

    with pytest.raises(TransactionViolatedError):
        rig.deliver(invalidates, "m1")
    assert users_own(rig) == 0
    assert rig.deliver(handler, "m1").outcome is Outcome.APPLIED
    if isinstance(rig.engine, AsyncEngine):
        rig.run(rig.engine.dispose())
    else:
        rig.engine.dispose()
    assert rig.deliver(handler, "m2").outcome is Outcome.APPLIED
    assert users_own(rig) == 0
    assert handler.settings == [1] * 3
    assert len(set(handler.connections)) == 3


def test_a_dead_connection_is_replaced(rig_on: Callable[..., Rig], driver: Driver) -> None:
    """The switch is the first statement on a pooled connection: if it has died there, it is not the delivery's loss."""
    rig, handler = rig_on(driver, pool_size=1, max_overflow=0), Handler()
    rig.deliver(handler, "m1")
    for number in range(2, 5):
        assert users_own(rig) == 0
        rig.outside.execute(f"KILL {handler.connections[-1]}")
        once = RetryPolicy(attempts=1)
        assert rig.deliver(handler, f"m{number}", retry=once).outcome is Outcome.APPLIED
    rig.outside.execute(f"KILL {handler.connections[-1]}")
    assert users_own(rig) == 0
    assert handler.settings == [1] * 4
    assert len(set(handler.connections)) == 4
    rig.assert_nothing_is_left()


def test_a_refused_switch_is_heard(rig_on: Callable[..., Rig], driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the server does not let itself be set, its own words say so, and nothing is applied."""
    rig, handler = rig_on(driver, poolclass=NullPool), Handler()
    monkeypatch.setattr(mysql_snapshots, "SETTING", "version_comment")  # which is there, and cannot be set
    with pytest.raises(RetriesExhaustedError) as failure:
        rig.deliver(handler, "m1", retry=RetryPolicy(attempts=1))
    assert "version_comment" in str(failure.value.__cause__)
    assert (handler.settings, rig.durable()) == ([], NOTHING)


def test_clones_of_an_engine_share_it(rig_on: Callable[..., Rig], driver: Driver) -> None:
    """`engine.execution_options()` is the same pool: the user's clone has the setting off, the projector's on."""
    rig, handler = rig_on(driver, pool_size=1, max_overflow=0), Handler()
    whole = rig.engine
    for number in range(3):
        rig.engine = whole.execution_options(isolation_level="REPEATABLE READ")
        rig.deliver(handler, f"m{number}")
        rig.engine = whole.execution_options(isolation_level="READ COMMITTED") if number else whole
        assert users_own(rig) == 0
    rig.engine = whole
    assert handler.settings == [1] * 3
    assert rig.connects == 1


def test_a_session_that_has_it_keeps_it(rig_on: Callable[..., Rig], driver: Driver) -> None:
    """Where the server, or the user, has it on already, nothing is switched: on for the user too."""
    rig = rig_on(driver, connect_args={"init_command": "SET SESSION innodb_snapshot_isolation = ON"})
    handler = Handler()
    for number in range(2):
        assert users_own(rig) == 1
        rig.deliver(handler, f"m{number}")
        rig.deliver(handler, idempotent=False)
        assert users_own(rig) == 1
    assert handler.settings == [1] * 4


def test_a_handlers_own_second_connection_is_the_users(rig_on: Callable[..., Rig], driver: Driver) -> None:
    """Whatever else is taken from the pool while a projector runs is as the user left it."""
    rig, handler = rig_on(driver), Handler()
    found = []

    def meanwhile(session: Session) -> None:
        handler(session)
        engine = session.get_bind().engine
        with engine.connect() as connection:
            found.append(connection.execute(ASKS).one()[0])

    rig.deliver(meanwhile)
    assert (handler.settings, found) == ([1], [0])


def test_it_needs_no_privilege(rig_on: Callable[..., Rig], driver: Driver) -> None:
    """A user who may read and write their own tables and nothing else can have it."""
    rig = rig_on(driver)
    name = str(rig.outside.database.url().database)
    rig.outside.execute(f"CREATE USER IF NOT EXISTS {name}@'%' IDENTIFIED BY 'pw'")
    try:
        rig.outside.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {name}.* TO {name}@'%'")
        with Rig(driver, rig.outside, url=rig.outside.database.url().set(username=name, password="pw")) as plain:
            handler = Handler()
            assert plain.deliver(handler).outcome is Outcome.APPLIED
            assert plain.deliver(handler).outcome is Outcome.DUPLICATE
            assert (handler.settings, users_own(plain)) == ([1], 0)
    finally:
        rig.outside.execute(f"DROP USER {name}@'%'")


# A server without it -------------------------------------------------------------------------------------------------


@pytest.fixture(name="older")
def older_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """We have no such server: nothing is found by this name, and nothing is set by it."""
    monkeypatch.setattr(mysql_snapshots, "SETTING", "innodb_no_such_setting")


def test_a_server_that_lets_some_updates_slip_through_is_not_relied_on(
    rig_on: Callable[..., Rig], driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MDEV-39263: before the release that mended it, projectors run at SERIALIZABLE."""
    found: list[tuple[str, int]] = []

    def handler(session: Session) -> None:
        found.append(tuple(session.execute(ISOLATION).one()))

    monkeypatch.setattr(mysql_snapshots, "DEPENDABLE", {(10, 11): 1000, (13, 0): 0})
    rig = rig_on(driver)
    rig.deliver(handler, "m1")
    monkeypatch.undo()
    rig_on(driver).deliver(handler, "m2")
    assert [level for level, _ in found] == ["SERIALIZABLE", "REPEATABLE-READ"]


ISOLATION = text("SELECT @@tx_isolation, @@innodb_snapshot_isolation")


@pytest.mark.usefixtures("older")
class TestWithoutSnapshotIsolation(RaceContract, LostUpdateContract):
    """The same races, and none is lost, where every read locks."""

    @pytest.fixture
    def harness(self, driver: Driver, mariadb: Database) -> Iterator[Harness]:
        """As `create_engine` makes it."""
        with Harness(contract.Subject(mariadb.url(driver.drivername))) as harness:
            harness.create_tables()
            yield harness

    def test_projectors_run_at_serializable(self, harness: Harness) -> None:
        """With `read_models` at READ COMMITTED, as everywhere; a handler that may run twice at the server's default."""
        found = []

        def body(_happened: object, session: Session) -> None:
            found.append(tuple(session.execute(ISOLATION).one()))

        every: list[dict[str, Any]] = [{}, {"read_models": [Total]}, {"idempotent": False}]
        for number, settings in enumerate(every):
            harness.deliver(harness.dispatcher(harness.handler(body, **settings)), message_id=f"m{number}")
        assert found == [("SERIALIZABLE", 0), ("READ-COMMITTED", 0), ("REPEATABLE-READ", 0)]

    def test_a_weaker_level_is_warned_of(self, harness: Harness, caplog: pytest.LogCaptureFixture) -> None:
        """REPEATABLE READ, which is right on a newer server, loses updates there: it is said, once."""
        with caplog.at_level(logging.WARNING, "projector_dedup"):
            dispatcher = harness.dispatcher(isolation="REPEATABLE READ")
            for number in range(3):
                harness.deliver(dispatcher, message_id=f"m{number}")
        assert [record.getMessage()[:67] for record in caplog.records] == [
            "isolation level REPEATABLE READ was chosen: two messages that change"[:67]
        ]


def test_a_newer_server_is_not_warned_of(
    rig_on: Callable[..., Rig], driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """REPEATABLE READ chosen where conflicts are detected is what would have been chosen anyway."""
    rig = rig_on(driver, isolation_level="REPEATABLE READ")
    with caplog.at_level(logging.WARNING, "projector_dedup"):
        rig.deliver(Handler())
    assert not [record for record in caplog.records if record.name == "projector_dedup"]
