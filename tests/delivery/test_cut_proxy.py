"""The proxy tells the truth about round trips, and cuts exactly where it says."""

import asyncio
import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest
from sqlalchemy import URL, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from cut_proxy import Cut, CutProxy
from databases import DRIVERS, Database

INSERT = text("insert into counted values (:n)")


@pytest.fixture
def proxy(postgresql: Database) -> Iterator[CutProxy]:
    """A proxy before a database with one empty table."""
    with before(postgresql) as proxy:
        yield proxy


@contextmanager
def before(database: Database) -> Iterator[CutProxy]:
    """The same, of any engine."""
    engine = create_engine(database.url(), poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("create table counted (n integer primary key)"))
    with CutProxy(database.url()) as proxy:
        yield proxy


@pytest.fixture
def through(proxy: CutProxy, postgresql: Database) -> Iterator[Engine]:
    """A pool of connections through the proxy, warmed up, with the trips of its beginnings forgotten."""
    engine = create_engine(proxy.through(postgresql.url()))
    engine.connect().close()
    proxy.trips.clear()
    yield engine
    engine.dispose()


LOCK = {"postgresql": "lock table counted", "mariadb": "lock tables counted read"}


def rows(database: Database) -> list[int]:
    """What is durable, seen past the proxy, once every transaction that was cut off has ended."""
    with create_engine(database.url(), poolclass=NullPool).begin() as connection:
        connection.execute(text(LOCK[database.engine]))
        return list(connection.scalars(text("select n from counted order by n")))


def with_psycopg(url: URL) -> None:
    """COMMIT as a simple Query."""
    with create_engine(url, poolclass=NullPool).begin() as connection:
        connection.execute(INSERT, {"n": 1})


def with_psycopg_pipeline(url: URL) -> None:
    """COMMIT as Parse, Bind, Execute."""
    dsn = url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(dsn) as connection, connection.pipeline():
        connection.execute("insert into counted values (%s)", [1])
        connection.commit()


def with_asyncpg(url: URL) -> None:
    """COMMIT as asyncpg sends it."""

    async def insert() -> None:
        engine = create_async_engine(url.set(drivername="postgresql+asyncpg"), poolclass=NullPool)
        async with engine.begin() as connection:
            await connection.execute(INSERT, {"n": 1})

    asyncio.run(insert())


def missing(module: str) -> pytest.MarkDecorator:
    """Skip a client whose module is not installed."""
    return pytest.mark.skipif(not importlib.util.find_spec(module), reason=f"{module} is not installed")


def with_mariadb_driver(module: str) -> Callable[[URL], None]:
    """COMMIT as COM_QUERY, which every driver sends."""
    driver = next(driver for driver in DRIVERS if driver.engine == "mariadb" and driver.module == module)

    def insert(url: URL) -> None:
        url = url.set(drivername=driver.drivername)
        if not driver.is_async:
            with_psycopg(url)
            return

        async def insert() -> None:
            async with create_async_engine(url, poolclass=NullPool).begin() as connection:
                await connection.execute(INSERT, {"n": 1})

        asyncio.run(insert())

    return insert


Client = Callable[[URL], None]
CLIENTS = [
    pytest.param("postgresql", client, id=client.__name__)
    for client in (with_psycopg, with_psycopg_pipeline, with_asyncpg)
] + [
    pytest.param("mariadb", with_mariadb_driver(module), id=module, marks=missing(module))
    for module in ("pymysql", "MySQLdb", "asyncmy", "aiomysql")
]
with_each_client = pytest.mark.parametrize(("engine", "client"), CLIENTS)


@with_each_client
def test_uncut_it_is_only_a_wire(engine: str, client: Client, request: pytest.FixtureRequest) -> None:
    """Without an order to cut, what is committed through the proxy is committed."""
    database: Database = request.getfixturevalue(engine)
    with before(database) as proxy:
        client(proxy.through(database.url()))
        assert rows(database) == [1]
        assert proxy.cuts == 0


@with_each_client
@pytest.mark.parametrize(("cut", "durable"), [("before", []), ("after", [1])])
def test_commit_is_cut_before_or_after_it_happens(
    engine: str, client: Client, cut: Cut, durable: list[int], request: pytest.FixtureRequest
) -> None:
    """The client sees the same lost connection, whether the server has committed or not."""
    database: Database = request.getfixturevalue(engine)
    with before(database) as proxy:
        proxy.cut_commit(cut)
        with pytest.raises((DBAPIError, psycopg.OperationalError)) as lost:
            client(proxy.through(database.url()))
        assert proxy.cuts == 1
        if isinstance(lost.value, DBAPIError):
            assert lost.value.connection_invalidated
        assert rows(database) == durable


@with_each_client
def test_it_stops_before_and_after_a_trip(engine: str, client: Client, request: pytest.FixtureRequest) -> None:
    """At the first stop the server has not seen COMMIT, at the second it has committed; the client waits meanwhile."""
    database: Database = request.getfixturevalue(engine)
    seen: list[tuple[Cut, int]] = []
    outside = create_engine(database.url(), poolclass=NullPool)

    def look(where: Cut, trip: list[str]) -> None:
        if any(re.search(r"\bCOMMIT\b", each) for each in trip):
            with outside.connect() as connection:
                seen.append((where, connection.scalar(text("select count(*) from counted")) or 0))

    with before(database) as proxy:
        proxy.at_trip = look
        client(proxy.through(database.url()))
    assert seen == [("before", 0), ("after", 1)]


def test_on_mariadb_every_command_is_a_trip(mariadb: Database) -> None:
    """There is no BEGIN to send, and statements sent as one are one trip; a login is none."""
    with before(mariadb) as proxy:
        engine = create_engine(proxy.through(mariadb.url()))
        engine.connect().close()
        proxy.trips.clear()
        with engine.begin() as connection:
            connection.execute(INSERT, {"n": 1})
        assert proxy.trips == [["Query: insert into counted values (1)"], ["Query: COMMIT"], ["Query: ROLLBACK"]]
        engine.dispose()


def test_only_the_ordered_number_of_commits_is_cut(proxy: CutProxy, postgresql: Database) -> None:
    """After the ordered cuts, commits go through again."""
    proxy.cut_commit("before", times=2)
    for _ in range(2):
        with pytest.raises(DBAPIError):
            with_psycopg(proxy.through(postgresql.url()))
    with_psycopg(proxy.through(postgresql.url()))
    assert rows(postgresql) == [1]


def test_a_rollback_is_not_a_commit(through: Engine, proxy: CutProxy) -> None:
    """A cut waits for a COMMIT; a rollback, a savepoint and a column of that name do not set it off."""
    proxy.cut_commit("before")
    with through.connect() as connection:
        connection.execute(text("select 1 as \"commit\", 'commit'"))
        with connection.begin_nested():
            connection.execute(INSERT, {"n": 1})
        connection.rollback()
    assert proxy.cuts == 0


def test_a_plain_transaction_takes_three_trips(through: Engine, proxy: CutProxy) -> None:
    """BEGIN, one statement, COMMIT: each waits for its answer, however many messages it is made of."""
    with through.begin() as connection:
        connection.execute(INSERT, {"n": 1})
    statement = "insert into counted values ($1)"
    assert [trip[0] for trip in proxy.trips] == ["Query: BEGIN", f"Parse: {statement}", "Query: COMMIT"]
    assert proxy.trips[1][-2:] == [f"Execute: {statement}", "Sync"]


def test_statements_sent_as_one_message_take_one_trip(through: Engine, proxy: CutProxy) -> None:
    """Two statements in one simple Query are one trip."""
    with through.connect() as connection:
        connection.exec_driver_sql("select 1; select 2")
    assert proxy.trips == [["Query: BEGIN"], ["Query: select 1; select 2"], ["Query: ROLLBACK"]]


def test_a_pipeline_takes_one_trip_for_what_it_sends_together(proxy: CutProxy, postgresql: Database) -> None:
    """Statements that a client sends without waiting for answers are one trip."""
    dsn = proxy.through(postgresql.url()).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(dsn, autocommit=True) as connection, connection.pipeline():
        for _ in range(3):
            connection.execute("select %s::integer", [1])
    assert len(proxy.trips) == 1
    assert proxy.trips[0].count("Sync") == 1


def test_asyncpg_pays_a_trip_to_prepare(proxy: CutProxy, postgresql: Database) -> None:
    """asyncpg asks for the types of a new statement before it executes it: a trip that ends with Flush."""

    async def twice() -> tuple[int, int]:
        engine = create_async_engine(proxy.through(postgresql.async_url))
        async with engine.connect():
            proxy.trips.clear()
        counts = []
        for n in (1, 2):
            proxy.trips.clear()
            async with engine.begin() as connection:
                await connection.execute(INSERT, {"n": n})
            counts.append(len(proxy.trips))
        await engine.dispose()
        return counts[0], counts[1]

    assert asyncio.run(twice()) == (4, 3)
