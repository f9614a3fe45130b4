"""The settings of a MariaDB session: on where a projector runs, and nowhere else, on whatever server comes next.

innodb_snapshot_isolation and the isolation level belong to a session. Behind one address there may be one server after
another: such a server is played by what its sessions begin with, an `init_command` of some physical connections.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from contextvars import Context
from functools import partial
from typing import Any

import pytest
from sqlalchemy import NullPool, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from databases import DRIVERS, USUAL_DRIVERS, Database, Driver
from kit import Harness, Total
from projector_dedup import Outcome
from projector_dedup.dialects import mariadb
from projector_dedup.errors import MissingTableError, RetriesExhaustedError, TransactionViolatedError
from projector_dedup.options import RetryPolicy
from races import LostUpdateContract, RaceContract
from ready import ready
from rig import NOTHING, Durable, Rig, RigOn, add, done
from rig import Total as Row

MARIADB = [driver for driver in DRIVERS if driver.engine == "mariadb"]
ONE: dict[str, Any] = {"pool_size": 1, "max_overflow": 0}
SETTINGS = text("SELECT @@innodb_snapshot_isolation, replace(@@tx_isolation, '-', ' '), connection_id()")
ON, OFF = "SET SESSION innodb_snapshot_isolation = ON", "SET SESSION innodb_snapshot_isolation = OFF"
WEAK = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
USUAL = "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ"
STRONG = "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE"
POOLS: dict[str, tuple[dict[str, Any], str]] = {  # and what its sessions begin with
    "a pool": ({}, USUAL),
    "a pool of one": (ONE, USUAL),
    "a pool that asks first": ({**ONE, "pool_pre_ping": True}, USUAL),
    "no pool": ({"poolclass": NullPool}, USUAL),
    "a weaker level": (ONE, WEAK),
}

every_driver = pytest.mark.parametrize("driver", MARIADB, ids=str)
usual_drivers = pytest.mark.parametrize("driver", [each for each in MARIADB if each in USUAL_DRIVERS], ids=str)
"""Statements that the library sends are the same through each driver."""


def begin_with(rig: Rig, *commands: str) -> None:
    """Let each new physical connection begin with the next of the commands; the last one is for all that follow."""
    left = list(commands)

    @event.listens_for(rig.sync_engine, "do_connect")
    def _connect(_dialect: Any, _record: Any, _arguments: Any, parameters: dict[str, Any]) -> None:
        parameters["init_command"] = left.pop(0) if len(left) > 1 else left[0]


def hold_a_connection(rig: Rig) -> Any:
    """Take a connection from the pool, so that the next one is another; returns what gives it back."""
    held = rig.in_one_task(lambda: done(rig.engine.connect()))
    return lambda: rig.in_one_task(lambda: done(held.close()))


def users_own(rig: Rig, *, breaks: bool = False) -> tuple[int, str]:
    """What a transaction of the user's own, on a connection of the same engine, has the settings at."""

    def ask() -> tuple[int, str]:
        connection = done(rig.engine.connect())
        try:
            if breaks:
                done(connection.execute(text("SELECT nothing")))
            found = done(connection.execute(SETTINGS)).one()
            done(connection.commit())
        finally:
            done(connection.close())
        return int(found[0]), str(found[1])

    asked: tuple[int, str] = rig.in_one_task(ask)
    return asked


class Handler:
    """Adds one, and remembers the settings that it ran at and the connections that it ran on."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []
        self.connections: list[int] = []

    def __call__(self, session: Session) -> None:
        """What a good handler does."""
        setting, level, connection = session.execute(SETTINGS).one()
        self.found.append((int(setting), str(level)))
        self.connections.append(connection)
        add(session)

    @property
    def settings(self) -> list[int]:
        """What innodb_snapshot_isolation was."""
        return [setting for setting, _ in self.found]

    @property
    def levels(self) -> list[str]:
        """The isolation levels."""
        return [level for _, level in self.found]


@pytest.mark.parametrize(
    ("pool", "driver"),
    [(pool, each) for each in MARIADB for pool in (POOLS if each in USUAL_DRIVERS else ["a pool of one"])],
    ids=str,
)
def test_the_settings_are_the_projectors_alone(rig_on: RigOn, driver: Driver, pool: str) -> None:
    """On in every delivery; the user's own before, between and after, also where both take the same connection."""
    arguments, begins = POOLS[pool]
    rig, handler, usual = rig_on(driver, **arguments), Handler(), begins.partition("LEVEL ")[2]
    begin_with(rig, begins)
    for number in range(3):
        assert users_own(rig) == (0, usual)
        assert rig.deliver(handler, f"m{number}").outcome is Outcome.APPLIED
        assert users_own(rig) == (0, usual)
        assert rig.deliver(handler, f"m{number}").outcome is Outcome.DUPLICATE
        rig.deliver(handler, idempotent=False)
    assert users_own(rig) == (0, usual)
    assert handler.found == [(1, "REPEATABLE READ"), (0, usual)] * 3, "who is not idempotent has no conflict detected"
    if pool != "no pool":
        assert len(set(handler.connections)) == 1
        assert rig.connects == 1
    assert rig.durable().amount == 6


@usual_drivers
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_they_are_set_once_for_each_connection(
    rig_on: RigOn, driver: Driver, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only projectors use an engine, no message but the first pays for its level, whichever that is."""
    if level == "SERIALIZABLE":
        monkeypatch.setattr(mariadb, "DEPENDABLE", {(13, 0): 0})
    rig, handler = rig_on(driver, **ONE), Handler()
    counts: list[int] = []

    def count(session: Session) -> None:
        handler(session)
        counts.append(int(session.execute(text("SHOW SESSION STATUS LIKE 'Com_set_option'")).one()[1]))

    for number in range(5):
        rig.deliver(count, f"m{number}")
    assert handler.found == [(1, level)] * 5
    assert counts == [counts[0]] * 5


@usual_drivers
def test_after_a_failure(rig_on: RigOn, driver: Driver) -> None:
    """A handler that raises, a user's statement that fails: the next on that connection has the setting as it was."""
    rig, handler = rig_on(driver, **ONE), Handler()

    def broken(session: Session) -> None:
        handler(session)
        raise ZeroDivisionError

    for number in range(2):
        with pytest.raises(ZeroDivisionError):
            rig.deliver(broken, f"m{number}")
        with pytest.raises(DBAPIError):
            users_own(rig, breaks=True)
        assert users_own(rig)[0] == 0
        with pytest.raises(DBAPIError):
            users_own(rig, breaks=True)
        assert rig.deliver(handler, f"m{number}").outcome is Outcome.APPLIED
    assert handler.settings == [1] * 4
    assert rig.connects == 1


@usual_drivers
def test_after_an_invalidation(rig_on: RigOn, driver: Driver) -> None:
    """A connection that replaces an invalidated one, or one of a disposed pool, is a new one in this too."""
    rig, handler = rig_on(driver, **ONE), Handler()

    def invalidates(session: Session) -> None:
        handler(session)
        if len(handler.settings) == 1:
            session.invalidate()

    with pytest.raises(TransactionViolatedError):
        rig.deliver(invalidates, "m1")
    assert users_own(rig)[0] == 0
    assert rig.deliver(handler, "m1").outcome is Outcome.APPLIED
    rig.dispose()
    assert rig.deliver(handler, "m2").outcome is Outcome.APPLIED
    assert users_own(rig)[0] == 0
    assert handler.settings == [1] * 3
    assert len(set(handler.connections)) == 3


@every_driver
def test_a_dead_connection_is_replaced(rig_on: RigOn, driver: Driver) -> None:
    """The switch is the first statement on a pooled connection: if it has died there, it is not the delivery's loss."""
    rig, handler = rig_on(driver, **ONE), Handler()
    rig.deliver(handler, "m1")
    for number in range(2, 5):
        assert users_own(rig)[0] == 0
        rig.outside.execute(f"KILL {handler.connections[-1]}")
        once = RetryPolicy(attempts=1)
        assert rig.deliver(handler, f"m{number}", retry=once).outcome is Outcome.APPLIED
    rig.outside.execute(f"KILL {handler.connections[-1]}")
    assert users_own(rig)[0] == 0
    assert handler.settings == [1] * 4
    assert len(set(handler.connections)) == 4
    rig.assert_nothing_is_left()


@usual_drivers
def test_a_refused_switch_is_heard(rig_on: RigOn, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the server does not let itself be set, its own words say so, and nothing is applied."""
    rig, handler = rig_on(driver, poolclass=NullPool), Handler()
    monkeypatch.setattr(mariadb, "SETTING", "version_comment")  # which is there, and cannot be set
    with pytest.raises(RetriesExhaustedError) as failure:
        rig.deliver(handler, "m1", retry=RetryPolicy(attempts=1))
    assert "version_comment" in str(failure.value.__cause__)
    assert (handler.settings, rig.durable()) == ([], NOTHING)


@usual_drivers
def test_clones_of_an_engine_share_it(rig_on: RigOn, driver: Driver) -> None:
    """`engine.execution_options()` is the same pool: the user's clone has the setting off, the projector's on."""
    rig, handler = rig_on(driver, **ONE), Handler()
    whole = rig.engine
    for number in range(3):
        rig.engine = whole.execution_options(isolation_level="REPEATABLE READ")
        rig.deliver(handler, f"m{number}")
        rig.engine = whole.execution_options(isolation_level="READ COMMITTED") if number else whole
        assert users_own(rig)[0] == 0
    rig.engine = whole
    assert handler.settings == [1] * 3
    assert rig.connects == 1


@usual_drivers
def test_a_session_that_has_it_keeps_it(rig_on: RigOn, driver: Driver) -> None:
    """Where the server, or the user, has it on already, nothing is switched: on for the user too."""
    rig, handler = rig_on(driver), Handler()
    begin_with(rig, ON)
    for number in range(2):
        assert users_own(rig)[0] == 1
        rig.deliver(handler, f"m{number}")
        rig.deliver(handler, idempotent=False)
        assert users_own(rig)[0] == 1
    assert handler.settings == [1] * 4


@usual_drivers
def test_a_handlers_own_second_connection_is_the_users(rig_on: RigOn, driver: Driver) -> None:
    """Whatever else is taken from the pool while a projector runs is as the user left it."""
    rig, handler = rig_on(driver), Handler()
    found = []

    def meanwhile(session: Session) -> None:
        handler(session)
        engine = session.get_bind().engine
        with engine.connect() as connection:
            found.append(connection.execute(SETTINGS).one()[0])

    rig.deliver(meanwhile)
    assert (handler.settings, found) == ([1], [0])


@usual_drivers
def test_it_needs_no_privilege(rig: Rig, driver: Driver) -> None:
    """A user who may read and write their own tables and nothing else can have it."""
    name = str(rig.outside.database.url().database)
    rig.outside.execute(f"CREATE USER IF NOT EXISTS {name}@'%' IDENTIFIED BY 'pw'")
    try:
        rig.outside.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {name}.* TO {name}@'%'")
        with Rig(driver, rig.outside, url=rig.outside.database.url().set(username=name, password="pw")) as plain:
            handler = Handler()
            assert plain.deliver(handler).outcome is Outcome.APPLIED
            assert plain.deliver(handler).outcome is Outcome.DUPLICATE
            assert (handler.settings, users_own(plain)[0]) == ([1], 0)
    finally:
        rig.outside.execute(f"DROP USER {name}@'%'")


# Another server ------------------------------------------------------------------------------------------------------


def race(rig: Rig) -> int:
    """Two messages on one row, the second from its beginning to its end between what the first reads and writes.

    The second has a context of its own, as by another worker. Returns how often the first one's handler ran.
    """
    runs = 0

    def fast() -> Any:
        if rig.driver.is_async:
            return asyncio.create_task(rig.adeliver(add, "fast"), context=Context())
        return Context().run(rig.deliver, add, "fast")

    def slow(session: Session) -> None:
        nonlocal runs
        runs += 1
        total = session.get_one(Row, "a")
        if runs == 1:
            assert done(fast()).outcome is Outcome.APPLIED
        total.amount += 1

    assert rig.deliver(slow, "slow").outcome is Outcome.APPLIED
    return runs


@usual_drivers
@pytest.mark.parametrize(
    ("first", "later"),
    [(ON, OFF), (USUAL, WEAK), (STRONG, USUAL), (STRONG, WEAK), (f"{ON}, SESSION tx_isolation = 'SERIALIZABLE'", OFF)],
    ids=["setting", "level", "serializable", "weak", "both"],
)
def test_two_messages_on_one_row_both_count(rig: Rig, first: str, later: str) -> None:
    """I6 on connections that are set otherwise than the first one of their engine."""
    begin_with(rig, first, later)
    rig.deliver(add, "m1")
    release = hold_a_connection(rig)
    runs = race(rig)
    release()
    assert rig.durable() == Durable(3, 3)
    assert runs == 2, "the second writer was refused"


@usual_drivers
def test_a_driver_that_connects_anew_by_itself_is_asked_again(rig_on: RigOn, driver: Driver) -> None:
    """A listener of the user's lets PyMySQL reconnect: the pool has the same connection, the server another session."""
    rig, handler = rig_on(driver), Handler()

    @event.listens_for(rig.sync_engine, "checkout")
    def reconnect(connection: Any, _record: object, _proxy: object) -> None:
        if driver.module == "pymysql":  # the others make a new connection object
            connection.close()
            connection.connect()

    for number in range(3):
        rig.deliver(handler, f"m{number}")
    assert handler.settings == [1, 1, 1], "each session refuses stale writes"
    assert rig.durable() == Durable(3, 3)


@usual_drivers
def test_a_server_that_is_not_dependable_behind_the_same_address(
    rig_on: RigOn, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MDEV-39263: each connection goes by its server's release, at SERIALIZABLE before the one that mended it."""
    rig, handler = rig_on(driver), Handler()
    rig.deliver(handler, "m1")
    release = hold_a_connection(rig)
    with monkeypatch.context() as older:
        older.setattr(mariadb, "DEPENDABLE", {(10, 11): 1000, (13, 0): 0})
        rig.deliver(handler, "m2")
        release_older = hold_a_connection(rig)
    rig.deliver(handler, "m3")
    release_older()
    release()
    assert handler.levels == ["REPEATABLE READ", "SERIALIZABLE", "REPEATABLE READ"]
    assert rig.durable() == Durable(3, 3)


@usual_drivers
def test_who_chooses_a_level_leaves_none_behind(rig_on: RigOn, driver: Driver) -> None:
    """SQLAlchemy resets a chosen level to that of the engine's first connection, which may be weaker."""
    rig, handler = rig_on(driver, pool_size=2, max_overflow=0), Handler()
    begin_with(rig, WEAK, USUAL)
    release = hold_a_connection(rig)
    rig.deliver(handler, "m1")
    rig.deliver(handler, "m2", isolation="SERIALIZABLE")
    assert users_own(rig)[1] == "READ COMMITTED"
    rig.deliver(handler, "m3")
    release()
    assert handler.levels == ["REPEATABLE READ", "SERIALIZABLE", "REPEATABLE READ"]


@usual_drivers
def test_a_listener_that_sets_the_level_is_overruled(rig_on: RigOn, driver: Driver) -> None:
    """Nobody chose it for projectors: each unit of work gets its own level, whatever comes from the pool."""
    rig, handler = rig_on(driver, **ONE), Handler()

    def weaken(dbapi_connection: Any, _record: Any, _proxy: Any) -> None:
        cursor = dbapi_connection.cursor()
        cursor.execute(WEAK)
        cursor.execute("SELECT * FROM total")  # which begins a transaction at that level
        cursor.fetchall()
        cursor.close()

    event.listen(rig.sync_engine, "checkout", weaken)
    for number in range(3):
        rig.deliver(handler, f"m{number}")
    assert handler.levels == ["REPEATABLE READ"] * 3


@usual_drivers
@pytest.mark.parametrize(
    "server", [("DEPENDABLE", {(13, 0): 0}), ("SETTING", "innodb_no_such_setting")], ids=["old", "without"]
)
def test_a_chosen_level_is_warned_of_where_the_next_server_loses_updates(
    rig_on: RigOn, driver: Driver, server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """REPEATABLE READ, chosen, was right on the first connection and is not on the second: the log says so, once."""
    rig = rig_on(driver, isolation_level="REPEATABLE READ")
    with caplog.at_level(logging.WARNING, "projector_dedup"):
        rig.deliver(add, "m1")
        assert not caplog.records
        release = hold_a_connection(rig)
        monkeypatch.setattr(mariadb, *server)
        for message_id in ("m2", "m3", "m4"):
            rig.deliver(add, message_id)
        release()
    assert [record.getMessage()[:42] for record in caplog.records] == ["isolation level REPEATABLE READ was chosen"]


@pytest.fixture(name="older")
def older_fixture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server without the setting, which we do not have: nothing is found by this name, and nothing is set by it."""
    monkeypatch.setattr(mariadb, "SETTING", "innodb_no_such_setting")


@usual_drivers
@pytest.mark.usefixtures("older")
class TestWithoutSnapshotIsolation(RaceContract, LostUpdateContract):
    """The same races, and none is lost, where every read locks."""

    @pytest.fixture
    def harness(self, driver: Driver, mariadb: Database) -> Iterator[Harness]:
        """As `create_engine` makes it."""
        with ready(mariadb.url(driver.drivername)) as harness:
            yield harness

    def test_projectors_run_at_serializable(self, harness: Harness) -> None:
        """With `read_models` at READ COMMITTED, as everywhere; a handler that may run twice at the server's default."""
        found = []

        def body(_happened: object, session: Session) -> None:
            found.append(tuple(session.execute(SETTINGS).one()[:2]))

        every: list[dict[str, Any]] = [{}, {"read_models": [Total]}, {"idempotent": False}]
        for number, settings in enumerate(every):
            harness.deliver(harness.dispatcher(harness.handler(body, **settings)), message_id=f"m{number}")
        assert found == [(0, "SERIALIZABLE"), (0, "READ COMMITTED"), (0, "REPEATABLE READ")]


# Two databases on one connection --------------------------------------------------------------------------------------


@contextlib.contextmanager
def without_the_key(rig: Rig) -> Iterator[str]:
    """A second database, whose marker table has no unique index; yields its name."""
    second = f"{rig.outside.database.url().database}_b"
    rig.outside.execute(f"CREATE DATABASE {second}")
    try:
        for table in ("total", "processed_message"):
            rig.outside.execute(f"CREATE TABLE {second}.{table} LIKE {table}")
        rig.outside.execute(f"ALTER TABLE {second}.processed_message DROP PRIMARY KEY")
        yield second
    finally:
        rig.outside.execute(f"DROP DATABASE {second}")


def leads_elsewhere(rig: Rig, hook: str, use: Callable[[], str]) -> Any:
    """Let a listener of the user's choose the database of each transaction; returns the class of sessions to take."""

    def at_checkout(dbapi_connection: Any, _record: Any, _proxy: Any) -> None:
        cursor = dbapi_connection.cursor()
        cursor.execute(f"USE {use()}")
        cursor.close()

    def at_begin(connection: Any) -> None:
        connection.exec_driver_sql(f"USE {use()}")

    class Tenant(Session):
        """Of one tenant."""

    def after_begin(_session: Any, _transaction: Any, connection: Any) -> None:
        at_begin(connection)

    if hook == "after_begin":
        event.listen(Tenant, hook, after_begin)
    else:
        event.listen(rig.sync_engine, hook, at_checkout if hook == "checkout" else at_begin)
    return Tenant


@usual_drivers
@pytest.mark.parametrize("hook", ["checkout", "engine_connect", "begin", "after_begin"])
def test_a_tenant_without_the_key_is_refused(rig_on: RigOn, driver: Driver, hook: str) -> None:
    """A listener chooses the database: the marker table of one says nothing of another's, on the same connection."""
    rig = rig_on(driver, **ONE)
    tenant = first = str(rig.outside.database.url().database)
    with without_the_key(rig) as second:
        rig.session_class = leads_elsewhere(rig, hook, lambda: tenant)
        deliver = partial(rig.deliver, add, retry=RetryPolicy(attempts=1))
        assert deliver(message_id="m1").outcome is Outcome.APPLIED
        tenant = second
        with pytest.raises(MissingTableError, match="unique index"):
            deliver(message_id="m1")
        assert rig.outside.execute(f"SELECT count(*) FROM {second}.total") == [(0,)]
        tenant = first
        assert deliver(message_id="m1").outcome is Outcome.DUPLICATE


@usual_drivers
def test_a_server_without_the_key_behind_the_same_address(rig_on: RigOn, driver: Driver) -> None:
    """Each physical connection is asked for its marker table; here the next one leads to another database."""
    rig = rig_on(driver, pool_size=2, max_overflow=0)
    with without_the_key(rig) as second:
        begin_with(rig, "SELECT 1", f"USE {second}")
        rig.deliver(add, "m1")
        release = hold_a_connection(rig)
        with pytest.raises(MissingTableError, match="unique index"):
            rig.deliver(add, "m1", retry=RetryPolicy(attempts=1))
        release()
        assert rig.durable() == Durable(1, 1)
