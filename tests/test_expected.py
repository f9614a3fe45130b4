"""The look for the marker before the claim, where duplicates come close together: when, when not, and what it finds."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
from sqlalchemy import AssertionPool, Connection, Engine, NullPool, create_engine, event, func, select, text
from sqlalchemy.exc import InvalidRequestError, OperationalError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from cut_proxy import CutProxy
from databases import Database
from first_row_rig import (
    BOTH,
    SELECTED,
    WITH_CLAIM,
    Added,
    Delivered,
    add_awaited,
    engine_of,
    kinds_of,
    totals,
)
from projector_dedup import (
    AsyncDispatcher,
    MissingTableError,
    Outcome,
    ProjectorDedupError,
    RetriesExhaustedError,
    UnitOfWork,
)


@pytest.fixture
def engine(postgresql: Database) -> Iterator[Engine]:
    """The tables, and rows of zeros."""
    with engine_of(postgresql) as engine:
        yield engine


@pytest.mark.parametrize(("driver", "cheaper"), [("psycopg", "SELECT"), ("psycopg2", "INSERT")])
def test_where_duplicates_come_in_a_row_they_cost_less(
    engine: Engine, postgresql: Database, driver: str, cheaper: str
) -> None:
    """With psycopg 3 one looks first, in one round trip; what is new after all costs as many as without."""
    with CutProxy(postgresql.url()) as proxy:
        near = create_engine(proxy.through(postgresql.url(f"postgresql+{driver}")), pool_size=1, max_overflow=0)
        deliver = Delivered(near).learned()
        assert [deliver(Added(1), "m1") for _ in range(5)] == [[BOTH]] * 3 + [[cheaper]] * 2
        before = len(proxy.trips)
        deliver(Added(1), "m1")
        assert len(proxy.trips) - before == (1 if cheaper == "SELECT" else 3)
        for _ in range(2):  # then no three of the last four are
            assert deliver(Added(1)) == (["SELECT", *WITH_CLAIM] if cheaper == "SELECT" else SELECTED)
        assert deliver(Added(1)) == WITH_CLAIM
        near.dispose()
    assert totals(engine) == [2, 4, 0, 0]


def test_a_rival_between_the_look_and_the_claim_is_met_by_the_claim(engine: Engine) -> None:
    """The look found nothing, the claim does: a duplicate, and applied once."""
    another = create_engine(engine.url)
    deliver, rival = Delivered(engine).learned(), Delivered(another)
    deliver.redelivered()

    def overtake(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if kinds_of([statement]) == [BOTH]:
            rival.dispatcher.deliver(Added(2), message_id="both")

    event.listen(engine, "before_cursor_execute", overtake)
    assert deliver(Added(2), "both") == ["SELECT", BOTH]
    event.remove(engine, "before_cursor_execute", overtake)
    another.dispose()
    assert totals(engine) == [2, 1, 1, 0]


def _by_session(sessions: Any, _engine: Engine, choose: Callable[[Connection], None]) -> None:
    event.listen(sessions, "after_begin", lambda _session, _transaction, connection: choose(connection))


def _by_its_first_transaction(sessions: Any, _engine: Engine, choose: Callable[[Connection], None]) -> None:
    def begun(session: Session, transaction: Any) -> None:
        if transaction.parent is None:
            choose(session.connection())

    event.listen(sessions, "after_transaction_create", begun)


def _by_engine(_sessions: Any, engine: Engine, choose: Callable[[Connection], None]) -> None:
    event.listen(engine, "begin", choose)


def _by_pool(_sessions: Any, engine: Engine, choose: Callable[[Connection], None]) -> None:
    event.listen(engine, "engine_connect", choose)


def _by_a_class(sessions: Any, _engine: Engine, choose: Callable[[Connection], None]) -> None:
    class Chosen(Session):
        def connection(self, *args: Any, **options: Any) -> Connection:
            began, connection = self.in_transaction(), super().connection(*args, **options)
            if not began:
                choose(connection)
            return connection

    sessions.class_ = Chosen


def _by_options(_sessions: Any, engine: Engine, _choose: Callable[[Connection], None]) -> None:
    @event.listens_for(engine, "set_connection_execution_options")
    def choose_a_schema(_connection: Connection, options: dict[str, Any]) -> None:
        options["schema_translate_map"] = {None: "first_tenant"}


def _by_statement(_sessions: Any, engine: Engine, _choose: Callable[[Connection], None]) -> None:
    @event.listens_for(engine, "before_cursor_execute")
    def before(_connection: Connection, cursor: Any, *_: Any) -> None:
        cursor.execute("SET LOCAL search_path TO first_tenant")


def _by_execution(_sessions: Any, engine: Engine, choose: Callable[[Connection], None]) -> None:
    event.listen(engine, "before_execute", lambda connection, *_: choose(connection))


def _by_cursor(_sessions: Any, engine: Engine, _choose: Callable[[Connection], None]) -> None:
    @event.listens_for(engine, "before_execute")
    def before(connection: Connection, *_: Any) -> None:
        with closing(connection.connection.cursor()) as cursor:
            cursor.execute("SET LOCAL search_path TO first_tenant")


@pytest.mark.parametrize(
    ("how", "outcome"),
    [
        (_by_session, "applied"),
        (_by_engine, "applied"),
        (_by_a_class, "applied"),
        (_by_options, "applied"),
        (_by_statement, "applied"),
        (_by_execution, "applied"),
        (_by_cursor, "applied"),
        (_by_its_first_transaction, "UnsafeSessionError"),
        (_by_pool, "applied"),
    ],
)
@pytest.mark.filterwarnings("ignore:Connection is already established")
def test_a_look_finds_what_the_claim_would_find(engine: Engine, how: Callable[..., None], outcome: str) -> None:
    """Where something chooses a tenant's schema for some messages, another tenant's message is no duplicate."""
    tenant: list[str] = []

    def choose(connection: Connection) -> None:
        if tenant:
            connection.exec_driver_sql(f"SET LOCAL search_path TO {tenant[0]}")

    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA IF EXISTS first_tenant CASCADE"))
        connection.execute(text("CREATE SCHEMA first_tenant"))
        for table in ("first_total", "processed_message"):
            connection.execute(text(f"CREATE TABLE first_tenant.{table} (LIKE {table} INCLUDING ALL)"))
        connection.execute(text("INSERT INTO first_tenant.first_total SELECT * FROM first_total"))
    own = create_engine(engine.url)
    sessions = sessionmaker(own)
    deliver = Delivered(own, sessions=sessions)
    deliver(Added(1))
    deliver.redelivered()
    how(sessions, own, choose)
    tenant.append("first_tenant")
    try:
        found = deliver.dispatcher.deliver(Added(1), message_id="m1").outcome.value
    except (ProjectorDedupError, InvalidRequestError) as error:
        found = type(error).__name__
    assert found == outcome
    own.dispose()
    with engine.connect() as connection:
        amount = connection.scalar(text("SELECT amount FROM first_tenant.first_total WHERE id = 1"))
    assert amount == (1 if outcome == "applied" else 0)
    assert totals(engine) == [0, 1, 0, 0]


@pytest.mark.skipif(not hasattr(Session, "execution_options"), reason="sessions of SQLAlchemy 2.0 have no options")
def test_a_look_is_not_taken_for_a_session_with_options(engine: Engine) -> None:
    """They may say in which schema the markers are."""
    schemas = {"schema_translate_map": {None: "public"}}
    deliver = Delivered(engine, sessions=sessionmaker(engine, execution_options=schemas))
    deliver(Added(1))
    assert [deliver(Added(1), "m1") for _ in range(5)] == [["INSERT"]] * 5


def test_a_look_opens_no_connection_of_its_own(engine: Engine) -> None:
    """Where each is new, it would cost more than it spares."""
    unpooled = create_engine(engine.url, poolclass=NullPool)
    deliver = Delivered(unpooled).learned()
    connected: list[Any] = []
    event.listen(unpooled, "connect", lambda *given: connected.append(given))
    assert [deliver(Added(1), "m1") for _ in range(5)] == [[BOTH]] * 3 + [["INSERT"]] * 2
    assert len(connected) == 5


@pytest.mark.parametrize(
    "options",
    [{"pool_size": 1, "max_overflow": 0}, {"poolclass": AssertionPool}, {"pool_pre_ping": True}, {"pool_recycle": 0}],
    ids=str,
)
def test_a_look_whatever_the_pool(engine: Engine, options: dict[str, Any]) -> None:
    """Its connection goes back before the claim asks for one."""
    own = create_engine(engine.url, **options)
    deliver = Delivered(own).learned()
    deliver.redelivered()
    assert deliver(Added(1), "m1") == ["SELECT"]
    assert deliver(Added(1)) == ["SELECT", *WITH_CLAIM]
    own.dispose()
    assert totals(engine) == [2, 2, 0, 0]


def test_a_look_on_a_lost_connection_is_tried_again(engine: Engine) -> None:
    """As a claim would be; where no connection can be had, the error says just that."""
    own = create_engine(engine.url, pool_size=1, max_overflow=0)
    deliver = Delivered(own).learned()
    deliver.redelivered()
    with own.connect() as connection:
        backend = connection.scalar(text("SELECT pg_backend_pid()"))
    with engine.connect() as connection:
        connection.execute(select(func.pg_terminate_backend(backend)))
    assert deliver(Added(1), "m1") == ["SELECT", "SELECT"]

    def refuse(*_: Any) -> None:
        raise psycopg.OperationalError("nobody is there")

    own.dispose()
    event.listen(own, "do_connect", refuse)
    with pytest.raises(RetriesExhaustedError, match="no connection"):
        deliver.dispatcher.deliver(Added(1), message_id="m1")
    event.remove(own, "do_connect", refuse)
    assert deliver(Added(1), "m1") == ["SELECT"]
    own.dispose()


def test_a_look_that_fails_says_why(engine: Engine) -> None:
    """What would fail again is not tried again."""
    hasty = create_engine(engine.url, connect_args={"options": "-c statement_timeout=100"})
    deliver = Delivered(hasty).learned()
    deliver.redelivered()
    deliver.sent.clear()
    with engine.begin() as connection:
        connection.execute(text("LOCK TABLE processed_message"))
        with pytest.raises(OperationalError, match="statement timeout"):
            deliver.dispatcher.deliver(Added(1), message_id="m1")
    assert len(deliver.sent) == 1
    assert deliver(Added(1), "m1") == ["SELECT"]
    hasty.dispose()


def test_a_look_that_is_interrupted_raises_what_interrupted_it(engine: Engine) -> None:
    """A worker's time limit, by a signal, while it waits for the table: its connection is not used again."""

    class OutOfTimeError(Exception):
        pass

    def interrupt(*_: Any) -> None:
        raise OutOfTimeError

    own = create_engine(engine.url, pool_size=1, max_overflow=0)
    deliver = Delivered(own).learned()
    deliver.redelivered()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with engine.begin() as connection:
            connection.execute(text("LOCK TABLE processed_message"))
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(OutOfTimeError):
                deliver.dispatcher.deliver(Added(1), message_id="m1")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert deliver(Added(1), "m1") == ["SELECT"]
    own.dispose()


def until_somebody_waits(connection: Connection, goes_on: Callable[[], bool]) -> None:
    """For a lock; or until what should wait has not."""
    while goes_on() and not connection.scalar(text("SELECT count(*) FROM pg_locks WHERE NOT granted")):
        pass


def test_a_look_that_is_cancelled_leaves_nothing(engine: Engine, postgresql: Database) -> None:
    """Under asyncio, while it waits for the table: its connection is back in the pool, and the next delivery looks."""

    async def run() -> None:
        own = create_async_engine(postgresql.url(), pool_size=1, max_overflow=0)
        dispatcher = AsyncDispatcher(async_sessionmaker(own), add_awaited)
        outcomes = [(await dispatcher.deliver(Added(1), message_id="m1")).outcome for _ in range(6)]
        assert outcomes == [Outcome.APPLIED] + [Outcome.DUPLICATE] * 5
        with engine.begin() as connection:
            connection.execute(text("LOCK TABLE processed_message"))
            waiting = asyncio.create_task(dispatcher.deliver(Added(1), message_id="m1"))
            await asyncio.to_thread(until_somebody_waits, connection, lambda: not waiting.done())
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        assert own.sync_engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
        assert (await dispatcher.deliver(Added(1), message_id="m1")).outcome is Outcome.DUPLICATE
        await own.dispose()

    asyncio.run(run())
    assert totals(engine) == [0, 1, 0, 0]


def test_a_look_at_a_table_that_is_gone_says_so(engine: Engine) -> None:
    """As the claim does."""
    deliver = Delivered(engine).learned()
    deliver.redelivered()
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE processed_message"))
    with pytest.raises(MissingTableError):
        deliver.dispatcher.deliver(Added(1), message_id="m1")
    assert deliver.sent[0].startswith("SELECT")


def test_a_marker_that_is_not_committed_is_not_taken_for_a_duplicates(engine: Engine) -> None:
    """The look does not see it, and the claim waits for it; here it is rolled back, so the message is applied."""
    deliver = Delivered(engine).learned()
    deliver.redelivered()
    rival = create_engine(engine.url)
    with UnitOfWork(sessionmaker(rival)) as uow:
        assert uow.claim("held", "first")
        found: list[Outcome] = []
        thread = threading.Thread(
            target=lambda: found.append(deliver.dispatcher.deliver(Added(3), message_id="held").outcome)
        )
        thread.start()
        with rival.connect() as connection:
            until_somebody_waits(connection, thread.is_alive)
        assert found == []
    thread.join()
    assert found == [Outcome.APPLIED]
    assert totals(engine) == [2, 1, 0, 1]
    rival.dispose()
