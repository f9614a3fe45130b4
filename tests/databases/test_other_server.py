"""One engine, and behind its address one server after another: what the first connection said, the next may not.

A second server is played by what its sessions begin with: an `init_command` that only some physical connections get.
"""

import asyncio
import logging
from collections.abc import Callable
from contextvars import Context
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from databases import DRIVERS, Driver
from projector_dedup import (
    AsyncDispatcher,
    Delivery,
    Dispatcher,
    Message,
    MissingTableError,
    Outcome,
    RetryPolicy,
    on,
    projector,
)
from projector_dedup.dialects import mariadb as mysql_snapshots
from rig import Durable, Rig, Total, add, outsides_fixture, rig_on_fixture  # noqa: F401  # fixtures

MARIADB = [driver for driver in DRIVERS if driver.engine == "mariadb"]
RigOn = Callable[..., Rig]
SETTINGS = text("SELECT @@innodb_snapshot_isolation, replace(@@tx_isolation, '-', ' ')")
ON, OFF = "SET SESSION innodb_snapshot_isolation = ON", "SET SESSION innodb_snapshot_isolation = OFF"
WEAK = "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED"
USUAL = "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ"
STRONG = "SET SESSION TRANSACTION ISOLATION LEVEL SERIALIZABLE"

pytestmark = pytest.mark.parametrize("driver", MARIADB, ids=str)


def begin_with(rig: Rig, *commands: str) -> None:
    """Let each new physical connection begin with the next of the commands; the last one is for all that follow."""
    left = list(commands)

    @event.listens_for(rig.sync_engine, "do_connect")
    def _connect(_dialect: Any, _record: Any, _arguments: Any, parameters: dict[str, Any]) -> None:
        parameters["init_command"] = left.pop(0) if len(left) > 1 else left[0]


def hold_a_connection(rig: Rig) -> Any:
    """Take a connection from the pool, so that the next one is another; returns what gives it back."""
    if isinstance(rig.engine, AsyncEngine):
        held = rig.engine.connect()
        rig.run(held.start())
        return lambda: rig.run(held.close())
    return rig.engine.connect().close


def users_own(rig: Rig) -> tuple[int, str]:
    """What a transaction of the user's own, on a connection of the same engine, has the settings at."""

    async def awaited(engine: AsyncEngine) -> Any:
        async with engine.begin() as connection:
            return (await connection.execute(SETTINGS)).one()

    if isinstance(rig.engine, AsyncEngine):
        found = rig.run(awaited(rig.engine))
    else:
        with rig.engine.begin() as connection:
            found = connection.execute(SETTINGS).one()
    return int(found[0]), str(found[1])


def race(rig: Rig) -> int:
    """Two messages on one row, the second from its beginning to its end between what the first reads and writes.

    The second has a context of its own, as by another worker. Returns how often the first one's handler ran.
    """
    runs = 0

    def slow(session: Session) -> None:
        nonlocal runs
        runs += 1
        total = session.get_one(Total, "a")
        if runs == 1:
            assert Context().run(rig.deliver, add, "fast").outcome is Outcome.APPLIED
        total.amount += 1

    async def slow_awaited(session: AsyncSession) -> None:
        nonlocal runs
        runs += 1
        total = await session.get_one(Total, "a")
        if runs == 1:
            fast = asyncio.create_task(rig.adeliver(add, "fast"), context=Context())
            assert (await fast).outcome is Outcome.APPLIED
        total.amount += 1

    slow_one: Any = slow_awaited if rig.driver.is_async else slow
    assert rig.deliver(slow_one, "slow").outcome is Outcome.APPLIED
    return runs


@pytest.mark.parametrize(
    ("first", "later"),
    [(ON, OFF), (USUAL, WEAK), (STRONG, USUAL), (STRONG, WEAK), (f"{ON}, SESSION tx_isolation = 'SERIALIZABLE'", OFF)],
    ids=["setting", "level", "serializable", "weak", "both"],
)
def test_two_messages_on_one_row_both_count(rig_on: RigOn, driver: Driver, first: str, later: str) -> None:
    """I6 on connections that are set otherwise than the first one of their engine."""
    rig = rig_on(driver)
    begin_with(rig, first, later)
    rig.deliver(add, "m1")
    release = hold_a_connection(rig)
    runs = race(rig)
    release()
    assert rig.durable() == Durable(3, 3)
    assert runs == 2, "the second writer was refused"


def test_a_driver_that_connects_anew_by_itself_is_asked_again(rig_on: RigOn, driver: Driver) -> None:
    """A listener of the user's lets PyMySQL reconnect: the pool has the same connection, the server another session."""
    rig, found = rig_on(driver), []

    @event.listens_for(rig.sync_engine, "checkout")
    def reconnect(connection: Any, _record: object, _proxy: object) -> None:
        if driver.module == "pymysql":  # the others make a new connection object
            connection.close()
            connection.connect()

    def handler(session: Session) -> None:
        found.append(int(session.execute(SETTINGS).one()[0]))
        add(session)

    for number in range(3):
        rig.deliver(handler, f"m{number}")
    assert found == [1, 1, 1], "each session refuses stale writes"
    assert rig.durable() == Durable(3, 3)


def test_a_server_that_is_not_dependable_behind_the_same_address(
    rig_on: RigOn, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection goes by its own server's release: SERIALIZABLE where the next one is too old, and back."""
    found: list[str] = []

    def handler(session: Session) -> None:
        found.append(str(session.execute(SETTINGS).one()[1]))
        add(session)

    rig = rig_on(driver)
    rig.deliver(handler, "m1")
    release = hold_a_connection(rig)
    with monkeypatch.context() as older:
        older.setattr(mysql_snapshots, "DEPENDABLE", {(10, 11): 1000, (13, 0): 0})
        rig.deliver(handler, "m2")
        release_older = hold_a_connection(rig)
    rig.deliver(handler, "m3")
    release_older()
    release()
    assert found == ["REPEATABLE READ", "SERIALIZABLE", "REPEATABLE READ"]
    assert rig.durable() == Durable(3, 3)


def test_what_is_set_is_given_back(rig_on: RigOn, driver: Driver) -> None:
    """The user's own transactions have the level that they had, between and after, on the same connection."""
    rig, found = rig_on(driver, pool_size=1, max_overflow=0), []
    begin_with(rig, WEAK)

    def handler(session: Session) -> None:
        found.append(tuple(session.execute(SETTINGS).one()))
        add(session)

    for number in range(3):
        assert users_own(rig) == (0, "READ COMMITTED")
        rig.deliver(handler, f"m{number}")
        rig.deliver(handler, idempotent=False)
    assert users_own(rig) == (0, "READ COMMITTED")
    assert found == [(1, "REPEATABLE READ"), (0, "READ COMMITTED")] * 3
    assert rig.connects == 1


def test_it_is_set_once_for_each_connection(rig_on: RigOn, driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only projectors use an engine, no message pays for its level, also where that is SERIALIZABLE."""
    monkeypatch.setattr(mysql_snapshots, "DEPENDABLE", {(13, 0): 0})
    rig, counts = rig_on(driver, pool_size=1, max_overflow=0), []

    def handler(session: Session) -> None:
        assert session.execute(SETTINGS).one()[1] == "SERIALIZABLE"
        counts.append(session.execute(text("SHOW SESSION STATUS LIKE 'Com_set_option'")).one()[1])

    for number in range(4):
        rig.deliver(handler, f"m{number}")
    assert counts == [counts[0]] * 4


def test_who_chooses_a_level_leaves_none_behind(rig_on: RigOn, driver: Driver) -> None:
    """SQLAlchemy resets a chosen level to that of the engine's first connection, which may be weaker."""
    rig, found = rig_on(driver, pool_size=2, max_overflow=0), []
    begin_with(rig, WEAK, USUAL)

    def handler(session: Session) -> None:
        found.append(str(session.execute(SETTINGS).one()[1]))
        add(session)

    release = hold_a_connection(rig)
    rig.deliver(handler, "m1")
    rig.deliver(handler, "m2", isolation="SERIALIZABLE")
    assert users_own(rig)[1] == "READ COMMITTED"
    rig.deliver(handler, "m3")
    release()
    assert found == ["REPEATABLE READ", "SERIALIZABLE", "REPEATABLE READ"]


def test_a_listener_that_sets_the_level_is_overruled(rig_on: RigOn, driver: Driver) -> None:
    """Nobody chose it for projectors: each unit of work gets its own level, whatever comes from the pool."""
    rig, found = rig_on(driver, pool_size=1, max_overflow=0), []

    def weaken(dbapi_connection: Any, _record: Any, _proxy: Any) -> None:
        cursor = dbapi_connection.cursor()
        cursor.execute(WEAK)
        cursor.execute("SELECT * FROM total")  # which begins a transaction at that level
        cursor.fetchall()
        cursor.close()

    def handler(session: Session) -> None:
        found.append(str(session.execute(SETTINGS).one()[1]))
        add(session)

    event.listen(rig.sync_engine, "checkout", weaken)
    for number in range(3):
        rig.deliver(handler, f"m{number}")
    assert found == ["REPEATABLE READ"] * 3


def test_a_chosen_level_is_warned_of_where_the_next_server_loses_updates(
    rig_on: RigOn, driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """REPEATABLE READ, chosen, was right on the first connection and is not on the second: the log says so."""
    rig = rig_on(driver, isolation_level="REPEATABLE READ")
    with caplog.at_level(logging.WARNING, "projector_dedup"):
        rig.deliver(add, "m1")
        assert not caplog.records
        release = hold_a_connection(rig)
        monkeypatch.setattr(mysql_snapshots, "DEPENDABLE", {(13, 0): 0})
        rig.deliver(add, "m2")
        release()
    assert [record.getMessage()[:42] for record in caplog.records] == ["isolation level REPEATABLE READ was chosen"]


# Two databases on one connection --------------------------------------------------------------------------------------


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


def delivering(rig: Rig, session_class: Any) -> Callable[[str], Delivery]:
    """Deliver a message by its id, with sessions of this class."""
    declared, once = projector(idempotent=True, name="adding"), RetryPolicy(attempts=1)

    async def add_awaited(_event: object, session: AsyncSession) -> None:
        await session.run_sync(add)

    def add_one(_event: object, session: Session) -> None:
        add(session)

    if isinstance(rig.engine, AsyncEngine):
        awaited = async_sessionmaker(rig.engine, sync_session_class=session_class)
        waiting = AsyncDispatcher(awaited, declared(on("added")(add_awaited)), retry=once)
        return lambda message_id: rig.run(waiting.deliver(Message(message_id, {}, type="added")))
    dispatcher = Dispatcher(sessionmaker(rig.engine, class_=session_class), declared(on("added")(add_one)), retry=once)
    return lambda message_id: dispatcher.deliver(Message(message_id, {}, type="added"))


@pytest.mark.parametrize("hook", ["checkout", "engine_connect", "begin", "after_begin"])
def test_a_tenant_without_the_key_is_refused(rig_on: RigOn, driver: Driver, hook: str) -> None:
    """A listener chooses the database: the marker table of one says nothing of another's, on the same connection."""
    rig = rig_on(driver, pool_size=1, max_overflow=0)
    first = str(rig.outside.database.url().database)
    second = f"{first}_b"
    rig.outside.execute(f"CREATE DATABASE {second}")
    try:
        for table in ("total", "processed_message"):
            rig.outside.execute(f"CREATE TABLE {second}.{table} LIKE {table}")
        rig.outside.execute(f"ALTER TABLE {second}.processed_message DROP PRIMARY KEY")
        tenant = first
        session_class = leads_elsewhere(rig, hook, lambda: tenant)
        deliver = delivering(rig, session_class)
        assert deliver("m1").outcome is Outcome.APPLIED
        tenant = second
        with pytest.raises(MissingTableError, match="unique index"):
            deliver("m1")
        assert rig.outside.execute(f"SELECT count(*) FROM {second}.total") == [(0,)]
        tenant = first
        assert deliver("m1").outcome is Outcome.DUPLICATE
    finally:
        rig.outside.execute(f"DROP DATABASE {second}")


def test_a_server_without_the_key_behind_the_same_address(rig_on: RigOn, driver: Driver) -> None:
    """Each physical connection is asked for its marker table; here the next one leads to another database."""
    rig = rig_on(driver, pool_size=2, max_overflow=0)
    second = f"{rig.outside.database.url().database}_b"
    rig.outside.execute(f"CREATE DATABASE {second}")
    try:
        for table in ("total", "processed_message"):
            rig.outside.execute(f"CREATE TABLE {second}.{table} LIKE {table}")
        rig.outside.execute(f"ALTER TABLE {second}.processed_message DROP PRIMARY KEY")
        begin_with(rig, "SELECT 1", f"USE {second}")
        rig.deliver(add, "m1")
        release = hold_a_connection(rig)
        with pytest.raises(MissingTableError, match="unique index"):
            rig.deliver(add, "m1", retry=RetryPolicy(attempts=1))
        release()
        assert rig.durable() == Durable(1, 1)
    finally:
        rig.outside.execute(f"DROP DATABASE {second}")
