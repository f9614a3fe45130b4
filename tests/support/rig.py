"""One read model behind a dispatcher, on any driver, and a view of it from outside.

The handlers that tests deliver are written once, as functions of a `Session`; under an asynchronous driver they run
through `AsyncSession.run_sync`. A handler that is `async def` gets the `AsyncSession` itself.
"""

import asyncio
import contextlib
import inspect
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, cast

import psycopg
import pytest
from sqlalchemy import URL, Engine, String, create_engine, event, func, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.util import await_only, greenlet_spawn

from databases import (
    Database,
    Driver,
    mariadb_connection,
    mariadb_database,
    postgresql_database,
    reached_by,
    sqlite_database,
)
from projector_dedup import AsyncDispatcher, Dispatcher, Message, on, projector
from projector_dedup.commands import default_command_tables
from projector_dedup.options import RetryPolicy
from projector_dedup.outcome import Delivery
from projector_dedup.tables import default_metadata, default_tables

Handler = Callable[[Session], object] | Callable[[AsyncSession], Awaitable[object]]
Body = Callable[[Any, Session], object]

HANDLER = "totals"
QUICK = RetryPolicy(base=0.0005)
ONE_ATTEMPT = RetryPolicy(attempts=1)
CONFLICT = {
    "postgresql": "do $$ begin raise exception 'conflict' using errcode = '40001'; end $$",
    "mariadb": "signal sqlstate '40001' set mysql_errno = 1213, message_text = 'conflict'",
}
"""Statements that the server answers as if another transaction were in the way."""


class Base(DeclarativeBase):
    """The user's own metadata."""


class Total(Base):
    """The read model: what was added, per account."""

    __tablename__ = "total"
    account: Mapped[str] = mapped_column(String(20), primary_key=True)
    amount: Mapped[int]


TOTAL = Base.metadata.tables["total"]
TABLES = ("total", "processed_message", "processed_command")


def add(session: Session, amount: int = 1) -> None:
    """A handler that does what it should: it adds to a total and flushes."""
    total = session.get(Total, "a")
    if total is None:
        total = Total(account="a", amount=0)
        session.add(total)
    total.amount += amount
    session.flush()


class Counting:
    """A good handler that counts its runs. The first run does something else, too, after it has added 1."""

    def __init__(self, first: Callable[[Session], object] = lambda _session: None) -> None:
        self.runs = 0
        self._first = first

    def __call__(self, session: Session) -> None:
        """Add 1."""
        self.runs += 1
        add(session)
        if self.runs == 1:
            self._first(session)


def done(result: Any) -> Any:
    """Return a result, or await it, in a handler that runs by `run_sync` or in `Rig.in_one_task`."""
    return await_only(result) if inspect.isawaitable(result) else result


@dataclass(frozen=True)
class Durable:
    """The state that every other connection sees: how many markers there are, and the total of account `a`."""

    markers: int
    amount: int


NOTHING = Durable(0, 0)
ONCE = Durable(1, 1)


class Outside:
    """A connection that the library knows nothing of."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._postgresql = psycopg.connect(database.dsn, autocommit=True) if database.engine == "postgresql" else None
        self._mariadb = mariadb_connection(database.url()) if database.engine == "mariadb" else None

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        """Run one statement in a transaction of its own; no lock is waited for longer than half a second."""
        if self._postgresql is not None:
            with self._postgresql.transaction():
                self._postgresql.execute("set local lock_timeout = '500ms'")
                cursor = self._postgresql.execute(sql.encode())
                return cursor.fetchall() if cursor.description else []
        if self._mariadb is not None:
            with self._mariadb.cursor() as cursor:
                cursor.execute("set innodb_lock_wait_timeout = 1, lock_wait_timeout = 5")
                cursor.execute(sql)
                return list(cursor.fetchall())
        path = str(self.database.url().database)
        with contextlib.closing(sqlite3.connect(path, timeout=0.5)) as connection, connection:
            return connection.execute(sql).fetchall()

    def durable(self) -> Durable:
        """Return what is durable now."""
        ((markers, amount),) = self.execute(
            "select (select count(*) from processed_message), (select coalesce(sum(amount), 0) from total)"
        )
        return Durable(int(markers), int(amount))

    def assert_nothing_is_held(self) -> None:
        """No transaction that has touched the tables is open, once closed connections have been noticed."""
        if self._mariadb is not None:
            # It waits for whoever has read them; innodb_trx is a cache that is not renewed while others read it too.
            self.execute(f"lock tables {', '.join(f'{table} write' for table in TABLES)}")
            self.execute("unlock tables")
            return
        if self._postgresql is None:
            with contextlib.closing(
                sqlite3.connect(str(self.database.url().database), timeout=0.2, isolation_level=None)
            ) as connection:
                connection.execute("BEGIN IMMEDIATE")
            return
        deadline = time.monotonic() + 2
        while open_ones := self.execute(
            "select state, query from pg_stat_activity where datname = current_database() "
            "and pid <> pg_backend_pid() and backend_type = 'client backend' and state <> 'idle'"
        ):
            assert time.monotonic() < deadline, f"still open: {open_ones}"
        self.execute(f"lock table {', '.join(TABLES)} in access exclusive mode")

    def kill_others(self) -> None:
        """End every other connection to the database, and return when they are gone."""
        if self._mariadb is None:
            self.execute(
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity "
                "where datname = current_database() and pid <> pg_backend_pid()"
            )
            return
        others = "select id from information_schema.processlist where db = database() and id <> connection_id()"
        for (connection,) in self.execute(others):
            with contextlib.suppress(Exception):  # it has gone by itself
                self.execute(f"kill {connection}")
        while self.execute(others):
            pass

    def empty(self) -> None:
        """Forget all messages and totals."""
        for table in TABLES:
            self.execute(f"delete from {table}")

    def close(self) -> None:
        """Hang up."""
        if self._mariadb is not None:
            self._mariadb.close()
        if self._postgresql is not None:
            self._postgresql.close()


def added(message_id: str, body: Any = None) -> Message:
    """A message for the handlers of a rig."""
    return Message(message_id, {"account": "a"} if body is None else body, type="added")


def handler_of(factory: Any, body: Body, name: str, takes: str = "added", **options: Any) -> Any:
    """A projector of the factory's kind, whose handler is `body`; the options are those of `on`."""

    async def awaited(event: Any, session: AsyncSession) -> None:
        await session.run_sync(partial(body, event))

    def direct(event: Any, session: Session) -> None:
        body(event, session)

    function: Any = awaited if isinstance(factory, async_sessionmaker) else direct
    return projector(idempotent=True, name=name)(on(takes, **options)(function))


def dispatcher_on(factory: Any, *bodies: Body, retry: RetryPolicy = ONE_ATTEMPT, **options: Any) -> Any:
    """A dispatcher of the factory's kind, with a projector for each of `bodies`. By default it tries once."""
    kind: Any = AsyncDispatcher if isinstance(factory, async_sessionmaker) else Dispatcher
    handlers = [handler_of(factory, body, f"other-{number}", **options) for number, body in enumerate(bodies)]
    return kind(factory, *handlers, retry=retry)


def tables_on(engine: Engine) -> Engine:
    """Create the marker table, the record table and the read model; return the engine."""
    for metadata in (default_metadata, default_command_tables.marker.metadata, Base.metadata):
        metadata.create_all(engine)
    return engine


def create_tables(url: URL) -> None:
    """The same, in the database of a URL."""
    tables_on(create_engine(url)).dispose()


def state(engine: Engine) -> Durable:
    """Return what is durable, as another session of an engine sees it."""
    with Session(engine) as session:
        markers = session.scalar(select(func.count()).select_from(default_tables.marker)) or 0
        return Durable(markers, session.scalar(select(func.sum(Total.amount))) or 0)


class Rig:
    """A dispatcher's surroundings on one driver: deliver with it, then ask what came of it."""

    def __init__(self, driver: Driver, outside: Outside, *, url: URL | None = None, **options: Any) -> None:
        self.driver = driver
        self.outside = outside
        self.connects = 0
        self.session_class: type[Session] = Session
        self._runner = asyncio.Runner() if driver.is_async else None
        url = reached_by(url or outside.database.url(), driver.drivername)
        if driver.engine == "sqlite":
            options.setdefault("connect_args", {"timeout": 0.3})
        self.engine: Engine | AsyncEngine = (
            create_async_engine(url, **options) if driver.is_async else create_engine(url, **options)
        )
        event.listen(self.sync_engine, "connect", self._connected)

    @property
    def sync_engine(self) -> Engine:
        """The engine, or the one inside the AsyncEngine."""
        return self.engine.sync_engine if isinstance(self.engine, AsyncEngine) else self.engine

    def _connected(self, *_: object) -> None:
        self.connects += 1

    def deliver(self, handler: Handler, message_id: str = "m-1", **options: Any) -> Delivery:
        """Deliver one message to `handler`; the options are those of projector and dispatcher, idempotent and quick."""
        if isinstance(self.engine, AsyncEngine):
            return cast(Delivery, self.run(self.adeliver(handler, message_id, **options)))
        return cast(Delivery, self._dispatcher(handler, **options).deliver(added(message_id)))

    async def adeliver(self, handler: Handler, message_id: str = "m-1", **options: Any) -> Delivery:
        """The same, inside the event loop."""
        assert isinstance(self.engine, AsyncEngine)
        return cast(Delivery, await self._dispatcher(handler, **options).deliver(added(message_id)))

    def _dispatcher(self, handler: Any, *, idempotent: bool = True, retry: RetryPolicy = QUICK, **options: Any) -> Any:
        async def run_awaited(_event: object, session: AsyncSession) -> None:
            await (handler(session) if inspect.iscoroutinefunction(handler) else session.run_sync(handler))

        def run(_event: object, session: Session) -> None:
            handler(session)

        declared = projector(idempotent=idempotent, name=HANDLER)
        if self.driver.is_async:
            return AsyncDispatcher(self.factory, declared(on("added")(run_awaited)), retry=retry, **options)
        return Dispatcher(self.factory, declared(on("added")(run)), retry=retry, **options)

    def result(self, delivered: Any) -> Any:
        """Return what a dispatcher of this rig returned, awaited if it is asynchronous."""
        return self.run(delivered) if self.driver.is_async else delivered

    def run(self, work: Any) -> Any:
        """Run a coroutine in the loop that this rig's connections live in."""
        assert self._runner is not None
        return self._runner.run(work)

    def in_one_task(self, work: Callable[[], Any]) -> Any:
        """Run a function that gets by `done` what has to be awaited."""
        return self.run(greenlet_spawn(work)) if self.driver.is_async else work()

    def fill(self, size: int, use: Callable[[Any], object] = lambda _connection: None) -> None:
        """Have the pool open so many connections, and use each."""

        def opened() -> None:
            connections = [done(self.engine.connect()) for _ in range(size)]
            for connection in connections:
                use(connection)
                done(connection.close())

        self.in_one_task(opened)

    def dispose(self) -> None:
        """Have the pool close its connections."""
        self.in_one_task(lambda: done(self.engine.dispose()))

    @property
    def factory(self) -> Any:
        """Sessions on the engine, of the session class."""
        if isinstance(self.engine, AsyncEngine):
            return async_sessionmaker(self.engine, sync_session_class=self.session_class)
        return sessionmaker(self.engine, class_=self.session_class)

    def durable(self) -> Durable:
        """Return what is durable, as another connection sees it."""
        return self.outside.durable()

    def assert_settled(self, durable: Durable) -> None:
        """Others see this state, and nothing of a delivery is left: no connection, transaction or lock."""
        assert (found := self.durable()) == durable, found
        self.assert_nothing_is_left()

    def assert_nothing_is_left(self) -> None:
        """No connection is out of the pool, and nothing is open or locked in the database."""
        assert self.sync_engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
        self.outside.assert_nothing_is_held()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self.engine, AsyncEngine):
            self.run(self.engine.dispose())
            assert self._runner is not None
            self._runner.close()
        else:
            self.engine.dispose()


RigOn = Callable[..., Rig]


# Fixtures, which conftest.py imports ------------------------------------------------------------------------------


@pytest.fixture(name="outsides", scope="module")
def outsides_fixture(
    _postgresql_for_the_session: Database | str,
    _mariadb_for_the_session: Database | str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Outside | str]]:
    """A database with tables for each engine, kept for all tests of a module: only its rows are swept away."""
    with contextlib.ExitStack() as stack:
        found: dict[str, Outside | str] = {}
        databases: list[Database] = [sqlite_database(tmp_path_factory.mktemp("sqlite"))]
        if isinstance(_postgresql_for_the_session, str):
            found["postgresql"] = _postgresql_for_the_session
        else:
            server = _postgresql_for_the_session.url().set(drivername="postgresql", database="postgres")
            databases.append(stack.enter_context(postgresql_database(server)))
        if isinstance(_mariadb_for_the_session, str):
            found["mariadb"] = _mariadb_for_the_session
        else:
            databases.append(stack.enter_context(mariadb_database(_mariadb_for_the_session.url())))
        for database in databases:
            create_tables(database.url())
            found[database.engine] = outside = Outside(database)
            stack.callback(outside.close)
        yield found


@pytest.fixture(name="rig_on")
def rig_on_fixture(request: pytest.FixtureRequest) -> Iterator[RigOn]:
    """Make a rig on the given driver, on empty tables."""
    with contextlib.ExitStack() as stack:

        def make(driver: Driver, **options: Any) -> Rig:
            if not driver.installed:
                pytest.skip(f"{driver.module} is not installed")
            outside = request.getfixturevalue("outsides")[driver.engine]
            if isinstance(outside, str):
                pytest.skip(outside)
            outside.empty()
            return stack.enter_context(Rig(driver, outside, **options))

        yield make


@pytest.fixture(name="rig")
def rig_fixture(driver: Driver, rig_on: RigOn) -> Rig:
    """A rig on the driver of the test, on empty tables."""
    return rig_on(driver)
