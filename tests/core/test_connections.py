"""Connections that a server refuses, moves, ends or keeps: none is lost to its pool, and the message is tried again."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from sqlalchemy import AssertionPool, NullPool, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker

from cut_proxy import CutProxy
from databases import DRIVERS, SERVERS, Database, Driver, each_driver, mariadb_database
from private_mariadb import NotInstalledError, private_mariadb
from projector_dedup import AsyncDispatcher, Dispatcher, Message, Outcome, on, projector
from projector_dedup.closing import connected
from projector_dedup.dialects.postgresql import Psycopg
from projector_dedup.errors import CleanupInterruptedError, RetriesExhaustedError, UnsafeSessionError
from projector_dedup.maintenance.cleanup import cleanup
from projector_dedup.maintenance.running import run_with_retries
from projector_dedup.options import RetryPolicy
from projector_dedup.unit_of_work import UnitOfWork
from reached import reached
from rig import NOTHING, ONCE, Counting, Durable, Outside, Rig, RigOn, add, create_tables, handler_of

FEW = RetryPolicy(attempts=2, base=0)
AT_ONCE = RetryPolicy(base=0)
POOL = 5


# A server that refuses ROLLBACK too -----------------------------------------------------------------------------------

ALL_BUT_SET = r"^(?!\s*(set|show)\b)"  # what a node of Galera refuses by 1047 when it has lost the others
Refusing = Callable[[Driver], tuple[Rig, CutProxy]]


@pytest.fixture(name="refusing")
def refusing_fixture(rig_on: RigOn) -> Iterator[Refusing]:
    """A rig whose pool has two connections, behind a proxy that can refuse statements."""
    proxies: list[CutProxy] = []

    def make(driver: Driver) -> tuple[Rig, CutProxy]:
        rig = rig_on(driver)
        proxy = CutProxy(rig.sync_engine.url).__enter__()
        proxies.append(proxy)
        url = proxy.through(rig.sync_engine.url)
        rig = rig_on(driver, url=url, pool_size=2, max_overflow=0, pool_timeout=1)
        rig.fill(1)  # SQLAlchemy asks each engine's first connection for this and that
        return rig, proxy

    yield make
    for proxy in proxies:
        proxy.__exit__(None, None, None)


def checked_out(rig: Rig) -> int:
    """How many connections the pool misses."""
    pool: Any = rig.sync_engine.pool
    return int(pool.checkedout())


def assert_all_is_well(rig: Rig) -> None:
    """Nothing was applied, and all is there to apply it."""
    rig.assert_settled(NOTHING)
    assert rig.deliver(add).outcome is Outcome.APPLIED
    assert rig.durable() == ONCE


@each_driver(*SERVERS)
def test_the_handlers_error_is_raised_and_no_connection_is_lost(driver: Driver, refusing: Refusing) -> None:
    """The first error is the one to know; a second and a third delivery find a connection too.

    On PostgreSQL there is but one: each new connection is asked for a pooler, in a transaction that ROLLBACK ends.
    """
    rig, proxy = refusing(driver)

    def fail(session: Session) -> None:
        add(session)
        raise ZeroDivisionError

    rig.deliver(_nothing, idempotent=False)
    with proxy.refusing("rollback"):
        for number in range(1 if driver.engine == "postgresql" else 4):
            with pytest.raises(ZeroDivisionError):
                rig.deliver(fail, f"m{number}")
            assert checked_out(rig) == 0
    assert_all_is_well(rig)


@each_driver("mariadb")
def test_a_refused_commit_is_no_exception(driver: Driver, refusing: Refusing) -> None:
    """Where COMMIT is refused before ROLLBACK is, the transaction ends with its connection."""
    rig, proxy = refusing(driver)
    rig.deliver(_nothing, idempotent=False)
    with proxy.refusing("commit|rollback"):
        for number in range(3):
            with pytest.raises(Exception, match=r"refused|1047|COMMIT was interrupted"):
                rig.deliver(add, f"m{number}", retry=FEW)
            assert checked_out(rig) == 0
    assert_all_is_well(rig)


@each_driver("mariadb")
@pytest.mark.parametrize("known", [True, False], ids=["known engine", "new engine"])
def test_a_claim_on_a_node_that_refuses_everything(known: bool, driver: Driver, refusing: Refusing) -> None:
    """1047 is transient: retries find a connection each time, and so does the next message."""
    rig, proxy = refusing(driver)
    if known:
        rig.deliver(_nothing, "m0", idempotent=False)
    with proxy.refusing(ALL_BUT_SET):
        for number in range(3):
            with pytest.raises(RetriesExhaustedError) as exhausted:
                rig.deliver(add, f"m{number}", retry=FEW)
            assert _errno(exhausted.value) == 1047
            assert checked_out(rig) == 0
    assert_all_is_well(rig)


@each_driver("mariadb")
def test_a_node_that_refuses_everything_from_the_handler_on(driver: Driver, refusing: Refusing) -> None:
    """The connection on which the claim was answered is lost neither."""
    rig, proxy = refusing(driver)
    for number in range(3):
        with contextlib.ExitStack() as lost:

            def lose(session: Session, lost: contextlib.ExitStack = lost) -> None:
                lost.enter_context(proxy.refusing(ALL_BUT_SET))
                add(session)

            with pytest.raises(RetriesExhaustedError) as exhausted:
                rig.deliver(lose, f"m{number}", retry=FEW)
        assert _errno(exhausted.value) == 1047
        assert checked_out(rig) == 0
    assert_all_is_well(rig)


@each_driver("mariadb")
def test_a_duplicate_loses_no_connection(driver: Driver, refusing: Refusing) -> None:
    """Its transaction ends by ROLLBACK."""
    rig, proxy = refusing(driver)
    rig.deliver(add)
    with proxy.refusing("rollback"):
        for _ in range(3):
            with suppress(RetriesExhaustedError):
                rig.deliver(add, retry=FEW)
            assert checked_out(rig) == 0
    assert rig.deliver(add).outcome is Outcome.DUPLICATE
    rig.assert_settled(ONCE)


@each_driver(*SERVERS, is_async=False)
def test_a_unit_of_work_raises_what_its_rollback_met(driver: Driver, refusing: Refusing) -> None:
    """Where nothing else was raised, that is the first error."""
    rig, proxy = refusing(driver)
    rig.deliver(_nothing, "m0")
    with proxy.refusing("rollback"), pytest.raises(DBAPIError):
        _claim_and_leave(rig)
    rig.assert_nothing_is_left()
    rig.outside.execute("delete from processed_message")
    assert_all_is_well(rig)


@each_driver(*SERVERS, is_async=False)
def test_a_cleanup_loses_no_connection(driver: Driver, refusing: Refusing) -> None:
    """It is tried again, on a connection of its own each time."""
    rig, proxy = refusing(driver)
    rig.deliver(_nothing, "m0")
    rig.outside.execute("update processed_message set processed_at = '2000-01-01'")
    with proxy.refusing("rollback|delete|commit"):
        for _ in range(3):
            with pytest.raises((CleanupInterruptedError, DBAPIError)):
                cleanup(rig.sync_engine, retention_hours=1, retry=FEW)
            assert checked_out(rig) == 0
    assert cleanup(rig.sync_engine, retention_hours=1) == 1
    rig.assert_nothing_is_left()


@each_driver(*SERVERS, is_async=False)
def test_a_connection_of_ours_is_given_back(driver: Driver, refusing: Refusing) -> None:
    """With the error of the block. That of its ROLLBACK is no error: what the block has done is done."""
    rig, proxy = refusing(driver)
    with proxy.refusing("rollback"):
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                _read(rig, ZeroDivisionError())
            _read(rig)
            assert checked_out(rig) == 0
    rig.assert_nothing_is_left()


@each_driver(*SERVERS)
def test_a_look_loses_no_connection(driver: Driver, refusing: Refusing) -> None:
    """``applied`` has its answer before the ROLLBACK that is refused, and asks on another connection the next time."""
    rig, proxy = refusing(driver)
    rig.deliver(add)
    kind: Any = AsyncDispatcher if driver.is_async else Dispatcher
    dispatcher = kind(rig.factory, handler_of(rig.factory, lambda _event, _session: None, "totals"))
    assert rig.result(dispatcher.applied("m-1", by="totals"))
    with proxy.refusing("rollback"):
        for _ in range(1 if driver.engine == "postgresql" else 3):
            assert rig.result(dispatcher.applied("m-1", by="totals"))
            assert checked_out(rig) == 0
    assert rig.result(dispatcher.applied("m-1", by="totals"))
    rig.assert_settled(ONCE)


def _nothing(_session: Session) -> None:
    pass


def _errno(error: BaseException) -> Any:
    cause: Any = error.__cause__
    return cause.orig.args[0]


def _claim_and_leave(rig: Rig) -> None:
    with UnitOfWork(sessionmaker(rig.sync_engine)) as uow:
        uow.claim("m1", "totals")
        add(uow.session)


def _read(rig: Rig, error: Exception | None = None) -> None:
    with connected(rig.sync_engine) as connection:
        connection.execute(text("select 1"))
        if error is not None:
            raise error


# A server that takes no writes: a standby answers 25006 on PostgreSQL, and 1290 on MariaDB --------------------------

ROLE = "reader_that_writes"


class Standby:
    """Makes the connections of an engine be those to a PostgreSQL that takes no writes, until it is moved."""

    def __init__(self, rig: Rig) -> None:
        self.here = True
        event.listen(rig.sync_engine, "do_connect", self._connect)

    def _connect(self, dialect: Any, _record: Any, _arguments: Any, options: dict[str, Any]) -> None:
        if not self.here:
            return
        if dialect.driver == "asyncpg":
            options["server_settings"] = {"default_transaction_read_only": "on"}
        else:
            options["options"] = "-c default_transaction_read_only=on"

    def move(self) -> None:
        """Let the address lead to the primary."""
        self.here = False


@pytest.fixture(name="standby")
def standby_fixture(rig_on: RigOn) -> Callable[[Driver], tuple[Rig, Standby]]:
    """A rig on PostgreSQL, whose first connections are to a standby."""

    def make(driver: Driver) -> tuple[Rig, Standby]:
        rig = rig_on(driver, pool_size=POOL, max_overflow=0)
        return rig, Standby(rig)

    return make


@each_driver("postgresql")
def test_deliveries_reach_the_new_primary(driver: Driver, standby: Callable[[Driver], tuple[Rig, Standby]]) -> None:
    """While there is no other server the message is not applied; then each delivery is, at the first try."""
    rig, server = standby(driver)
    rig.fill(POOL)
    for _ in range(2):
        with pytest.raises(RetriesExhaustedError, match="read-only transaction"):
            rig.deliver(add, retry=FEW)
        assert rig.sync_engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
    server.move()
    for number in range(POOL + 2):
        assert rig.deliver(add, f"m{number}", retry=AT_ONCE).outcome is Outcome.APPLIED
    rig.assert_settled(Durable(POOL + 2, POOL + 2))


@each_driver("postgresql")
def test_an_address_that_moves_between_two_attempts(
    driver: Driver, standby: Callable[[Driver], tuple[Rig, Standby]]
) -> None:
    """The message itself is applied, however many connections of the pool led to the standby."""
    rig, server = standby(driver)
    rig.fill(POOL)
    server.move()
    assert rig.deliver(add, retry=AT_ONCE).outcome is Outcome.APPLIED
    assert rig.durable() == Durable(1, 1)


@each_driver("postgresql", is_async=False)
def test_a_cleanup_reaches_the_new_primary(driver: Driver, standby: Callable[[Driver], tuple[Rig, Standby]]) -> None:
    """In one run: it drops each connection of the pool that is to the old primary."""
    rig, server = standby(driver)
    rig.outside.execute("insert into processed_message values ('m', 'h', '2000-01-01', null)")
    rig.fill(POOL)
    server.move()
    assert cleanup(rig.sync_engine, retention_hours=1) == 1


@each_driver("postgresql", is_async=False)
def test_a_step_of_a_cleanup_is_tried_again_on_another_connection(
    driver: Driver, standby: Callable[[Driver], tuple[Rig, Standby]]
) -> None:
    """The server may become a standby while it runs."""
    rig, server = standby(driver)
    rig.outside.execute("insert into processed_message values ('m', 'h', '2000-01-01', null)")
    rig.fill(POOL)
    delete = text("delete from processed_message")
    step: Any = partial(run_with_retries, lambda on: on.execute(delete).rowcount, rig.sync_engine, Psycopg())
    with pytest.raises(RetriesExhaustedError, match="read-only"):
        step(FEW)
    server.move()
    assert step(AT_ONCE) == 1


@pytest.fixture(name="own_mariadb", scope="module")
def own_mariadb_fixture() -> Iterator[Database]:
    """A database on a MariaDB server of one's own, which may be made read-only."""
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(private_mariadb())
        except NotInstalledError as missing:
            reached.give_up("mariadb", "mariadb", str(missing))
        yield stack.enter_context(mariadb_database(server))


@pytest.fixture(name="reader")
def reader_fixture(own_mariadb: Database) -> Iterator[tuple[Outside, Callable[[bool], object]]]:
    """Look at its tables from outside, and make it read-only or not."""
    create_tables(own_mariadb.url())
    outside = Outside(own_mariadb)
    outside.empty()
    outside.execute(f"create or replace user {ROLE}@'%'")
    outside.execute(f"grant all on *.* to {ROLE}@'%'")
    outside.execute(f"revoke super, read only admin on *.* from {ROLE}@'%'")

    yield outside, lambda only: outside.execute(f"set global read_only = {int(only)}")
    outside.execute("set global read_only = 0")
    outside.close()


@each_driver("mariadb")
def test_deliveries_reach_a_mariadb_that_takes_writes(
    driver: Driver, reader: tuple[Outside, Callable[[bool], object]]
) -> None:
    """1290 is transient, and its connection is dropped: there the address may lead elsewhere by now."""
    outside, read_only = reader
    url = outside.database.url().set(username=ROLE)
    with Rig(driver, outside, url=url, pool_size=POOL, max_overflow=0) as rig:
        read_only(True)
        rig.fill(POOL)
        before = rig.connects
        with pytest.raises(RetriesExhaustedError, match="1290"):
            rig.deliver(add, retry=FEW)
        assert rig.sync_engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
        read_only(False)
        for number in range(POOL):
            assert rig.deliver(add, f"m{number}", retry=AT_ONCE).outcome is Outcome.APPLIED
        assert rig.connects == before + 2  # those of the two attempts
        rig.assert_settled(Durable(POOL, POOL))


# A connection that is lost where nobody speaks to the server, or where SQLAlchemy does not see it -----------------
STREAMS = [each for each in DRIVERS if each.module not in ("sqlite3", "aiosqlite", "pymysql")]  # pymysql fails later
SERIES = "(WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < 900) SELECT n FROM s)"
ROWS = f"SELECT a.n FROM {SERIES} a, {SERIES} b"  # more than the line holds


@each_driver(*SERVERS, is_async=True)
def test_a_connection_that_is_lost_while_the_handler_awaits_something_else(rig: Rig) -> None:
    """asyncpg knows of that before anything is sent; the handler has not closed it, and is run again."""
    runs: list[int] = []

    async def handler(session: AsyncSession) -> None:
        runs.append(1)
        await session.run_sync(add)
        if len(runs) == 1:
            await asyncio.to_thread(rig.outside.kill_others)
            for _ in range(20):  # the loop reads what came
                await asyncio.sleep(0.01)

    assert rig.deliver(handler).outcome is Outcome.APPLIED
    assert len(runs) == 2
    rig.assert_settled(ONCE)


@pytest.mark.parametrize("where", ["when it is new", "in the pool", "in a transaction"])
@each_driver("postgresql")
def test_a_connection_that_the_server_ends_because_it_is_idle_is_named(
    driver: Driver, where: str, rig_on: RigOn
) -> None:
    """The text says that the server ended the connection, and what to compare; nothing was applied."""
    rig = rig_on(driver, pool_size=1, max_overflow=0)

    def idle(_session: Session) -> None:
        """Do nothing."""

    def work(session: Session) -> None:
        add(session)
        if where == "in a transaction":
            rig.outside.kill_others()
            session.execute(text("SELECT 1"))

    rig.deliver(idle, "before")
    if where == "when it is new":
        event.listen(rig.sync_engine, "connect", lambda *_: rig.outside.kill_others())
        rig.sync_engine.pool.dispose()
    if where == "in the pool":
        event.listen(rig.sync_engine, "engine_connect", lambda connection: connection.exec_driver_sql("SELECT 1"))
        rig.outside.kill_others()
    with pytest.raises(RetriesExhaustedError, match=r"connection was lost|server closed it at once") as exhausted:
        rig.deliver(work, retry=RetryPolicy(attempts=1))
    assert "idle connections" in str(exhausted.value)
    assert rig.durable().amount == 0


@pytest.mark.parametrize("driver", STREAMS, ids=str)
def test_a_connection_that_is_lost_while_a_result_is_streamed(rig: Rig) -> None:
    """The driver's own error comes unwrapped there."""

    def streams(session: Session) -> None:
        result = session.execute(text(ROWS), execution_options={"stream_results": True, "yield_per": 10})
        result.fetchone()
        rig.outside.kill_others()
        result.fetchall()

    handler = Counting(streams)
    assert rig.deliver(handler).outcome is Outcome.APPLIED
    assert handler.runs == 2
    rig.assert_settled(ONCE)


# Other pools than the usual one -------------------------------------------------------------------------------------

POOLS: dict[str, dict[str, Any]] = {
    "no pool": {"poolclass": NullPool},
    "a pool of one": {"pool_size": 1, "max_overflow": 0},
    "a pool that asserts": {"poolclass": AssertionPool},
    "a pool that asks first": {"pool_pre_ping": True},
    "a pool that resets nothing": {"pool_reset_on_return": None},
    "a pool that ages": {"pool_recycle": 0},
}


@each_driver(usual=True)
@pytest.mark.parametrize("pool", POOLS)
def test_whatever_the_pool_a_message_is_applied_once(rig_on: RigOn, driver: Driver, pool: str) -> None:
    """The first delivery of an engine looks at the database before it claims; with NullPool on a connection more."""
    rig = rig_on(driver, **POOLS[pool])
    outcomes = [rig.deliver(add, "m1").outcome for _ in range(3)]
    assert outcomes == [Outcome.APPLIED, Outcome.DUPLICATE, Outcome.DUPLICATE]
    assert rig.durable() == ONCE


# A level that a listener sets, or is in the way of --------------------------------------------------------------------


@each_driver("mariadb", is_async=False)
def test_a_level_that_a_listener_sets_is_not_taken_for_the_servers(rig: Rig) -> None:
    """READ COMMITTED set on connecting, after SQLAlchemy has asked for the level, would lose updates."""

    @event.listens_for(rig.sync_engine, "connect")
    def _set(dbapi_connection: Any, _record: object) -> None:
        cursor = dbapi_connection.cursor()
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.close()

    found: list[str] = []
    rig.deliver(lambda session: found.append(session.execute(text("select @@tx_isolation")).scalar_one()))
    assert found == ["REPEATABLE-READ"]


@each_driver(*SERVERS, is_async=False)
@pytest.mark.parametrize(
    ("engine_level", "level", "sufficient"),
    [
        (None, "SERIALIZABLE", False),
        ("READ COMMITTED", "REPEATABLE READ", False),
        ("SERIALIZABLE", "REPEATABLE READ", True),
        ("REPEATABLE READ", "REPEATABLE READ", True),
    ],
)
@pytest.mark.filterwarnings("ignore:Connection is already established")
def test_a_connection_that_a_listener_takes_before_its_level_is_set_is_refused(
    driver: Driver, engine_level: str | None, level: str, sufficient: bool, rig_on: RigOn
) -> None:
    """Unless its level will do. SQLAlchemy only warns, and goes on at READ COMMITTED, say, which loses updates."""
    rig = rig_on(driver, **({} if engine_level is None else {"isolation_level": engine_level}))
    sessions = sessionmaker(rig.sync_engine)

    @event.listens_for(sessions, "after_transaction_create")
    def take(session: Session, transaction: Any) -> None:
        if transaction.parent is None:
            session.connection()

    @projector(idempotent=True, name="totals")
    @on("added")
    def handler(_event: None, session: Session) -> None:
        add(session)

    dispatcher = Dispatcher(sessions, handler, isolation=level)
    if sufficient:
        assert dispatcher.deliver(Message("m-1", None, type="added")).outcome is Outcome.APPLIED
    else:
        with pytest.raises(UnsafeSessionError, match="after_begin"):
            dispatcher.deliver(Message("m-1", None, type="added"))
    rig.assert_settled(ONCE if sufficient else NOTHING)
