"""The tools of the tests keep their promises: databases, commands in a fork, the proxy that counts and cuts."""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import URL, Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from command import importing
from cut_proxy import Cut, CutProxy
from databases import DRIVERS, Database, Driver, empty, until
from forked import PRELOADED, run_module
from private_postgres import PrivatePostgres

PSYCOPG = next(each for each in DRIVERS if each.drivername == "postgresql+psycopg")


@pytest.mark.parametrize("_turn", ["first", "second"])
def test_every_test_finds_its_database_empty(engine: Engine, _turn: str) -> None:
    """A table that one test leaves behind, even under an open transaction, is not there for the next."""
    connection = engine.connect()
    connection.execute(text("create table leftover (n integer)"))
    connection.commit()
    connection.execute(text("insert into leftover values (1)"))
    assert connection.scalar(text("select count(*) from leftover")) == 1
    connection.close()


def test_a_database_refuses_the_driver_of_another_engine(database: Database) -> None:
    """A test cannot believe that it ran on PostgreSQL while it ran on SQLite."""
    with pytest.raises(ValueError, match="does not reach"):
        database.url("mysql+pymysql")


def test_an_open_transaction_does_not_keep_the_next_test_waiting(postgresql: Database) -> None:
    """Emptying the database cuts off whoever holds a lock in it."""
    holder = psycopg.connect(postgresql.dsn)
    holder.execute("create table held (n integer)")
    empty(postgresql)
    with pytest.raises(psycopg.OperationalError):
        holder.execute("select 1")
    holder.close()


def test_a_private_server_survives_a_crash_on_its_port() -> None:
    """What was committed before a crash is there after it, under the same URL; what was not is gone."""
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,  # pytest's own is closed to other users
        PrivatePostgres(Path(folder) / "data") as server,
    ):
        url = server.url
        before = psycopg.connect(url)
        before.execute("create table survivor (n integer)")
        before.commit()
        before.execute("insert into survivor values (1)")
        server.restart()
        with pytest.raises(psycopg.OperationalError):
            before.commit()
        before.close()
        with psycopg.connect(url) as after:
            assert after.execute("select count(*) from survivor").fetchone() == (0,)


def test_the_private_postgres_does_not_outlive_a_killed_process() -> None:
    """No code of the process runs any more, so something beside it stops the server."""
    program = "import pathlib, sys, time; from private_postgres import embedded_postgres\n"
    program += "with embedded_postgres(pathlib.Path(sys.argv[1])) as url: print(url, flush=True); time.sleep(600)"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-c", program, str(Path(folder) / "data")]
        with subprocess.Popen(command, env=importing(), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url
            psycopg.connect(url).close()
            process.kill()
        until(lambda: not (Path(folder) / "data" / "postmaster.pid").exists())
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(url)


# A command in a fork is what it would be in a Python of its own ------------------------------------------------------

LOOKS = """
import atexit, os, signal, sys
atexit.register(print, "the end")
print(sys.argv[1:], __name__, os.getcwd(), sys.path[0], os.environ["MINE"], "é", sys.stdin.read(), sys.stdout.isatty())
print(sorted(name for name in sys.modules if name.startswith(("projector_dedup", "psycopg"))), sys.dont_write_bytecode)
print("alas", file=sys.stderr)
"""
ENDS = {
    "returns": "",
    "exits": "sys.exit(3)",
    "exits with words": "sys.exit('no')",
    "is killed": "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)",
    "is interrupted": "signal.raise_signal(signal.SIGINT)",
}


@pytest.mark.parametrize(("end", "safe_path"), [*((end, True) for end in ENDS), ("returns", False)])
def test_it_sees_and_says_the_same(end: str, safe_path: bool, tmp_path: Path) -> None:
    """Arguments, folder, path, environment, streams, what is imported, what it says last, and its exit code."""
    (tmp_path / "looks").mkdir()
    (tmp_path / "looks" / "__main__.py").write_text(LOOKS + ENDS[end])
    environment = {**os.environ, "MINE": "a b", "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    flags = ["-P"] if safe_path else []
    alone = subprocess.run(
        [sys.executable, *flags, "-m", "looks", "x", "y z"],
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    forked = run_module("looks", "x", "y z", safe_path=safe_path, env=environment, cwd=tmp_path)
    assert (forked.returncode, forked.stdout) == (alone.returncode, alone.stdout)
    assert forked.stderr.splitlines()[:1] == alone.stderr.splitlines()[:1] == ["alas"]
    assert forked.stderr.splitlines()[-1:] == alone.stderr.splitlines()[-1:]


def test_nothing_of_ours_is_imported_before() -> None:
    """Else a command could lack an import, and no test would see it."""
    assert not [name for name in PRELOADED if name.startswith("projector_dedup")]


# The proxy tells the truth about round trips, and cuts exactly where it says ----------------------------------------

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


async def insert_awaited(url: URL) -> None:
    """Insert a row and commit."""
    async with create_async_engine(url, poolclass=NullPool).begin() as connection:
        await connection.execute(INSERT, {"n": 1})


def insert(driver: Driver | None, url: URL) -> None:
    """Insert a row and commit: COMMIT as this driver sends it, or without one as psycopg does in a pipeline."""
    if driver is None:
        dsn = url.set(drivername="postgresql").render_as_string(hide_password=False)
        with psycopg.connect(dsn) as pipelined, pipelined.pipeline():
            pipelined.execute("insert into counted values (%s)", [1])
            pipelined.commit()
    elif driver.is_async:
        asyncio.run(insert_awaited(url.set(drivername=driver.drivername)))
    else:
        with create_engine(url.set(drivername=driver.drivername), poolclass=NullPool).begin() as connection:
            connection.execute(INSERT, {"n": 1})


@pytest.mark.parametrize("cut", [None, "before", "after"])
@pytest.mark.parametrize("driver", [*(each for each in DRIVERS if each.engine != "sqlite"), None], ids=str)
def test_commit_is_seen_and_cut_before_or_after_it_happens(
    driver: Driver | None, cut: Cut | None, request: pytest.FixtureRequest
) -> None:
    """Whether the server has committed or not, the client sees the same lost connection; uncut it is only a wire."""
    if driver is not None and not driver.installed:
        pytest.skip(f"{driver.module} is not installed")
    database: Database = request.getfixturevalue(driver.engine if driver else "postgresql")
    outside = create_engine(database.url(), poolclass=NullPool)
    seen: list[tuple[Cut, int]] = []

    def look(where: Cut, trip: list[str]) -> None:
        if any(re.search(r"\bCOMMIT\b", each) for each in trip):
            with outside.connect() as connection:
                seen.append((where, connection.scalar(text("select count(*) from counted")) or 0))

    with before(database) as proxy:
        proxy.at_trip = look
        if cut is None:
            insert(driver, proxy.through(database.url()))
            assert seen == [("before", 0), ("after", 1)]
        else:
            proxy.cut_commit(cut)
            with pytest.raises((DBAPIError, psycopg.OperationalError)) as lost:
                insert(driver, proxy.through(database.url()))
            assert getattr(lost.value, "connection_invalidated", True)
        assert proxy.cuts == (cut is not None)
        assert rows(database) == ([] if cut == "before" else [1])


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
            insert(PSYCOPG, proxy.through(postgresql.url()))
    insert(PSYCOPG, proxy.through(postgresql.url()))
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


def test_what_waits_for_one_answer_is_one_trip(through: Engine, proxy: CutProxy) -> None:
    """BEGIN, one statement, COMMIT are three, of however many messages; two statements in one simple Query are one."""
    with through.begin() as connection:
        connection.execute(INSERT, {"n": 1})
    statement = "insert into counted values ($1)"
    assert [trip[0] for trip in proxy.trips] == ["Query: BEGIN", f"Parse: {statement}", "Query: COMMIT"]
    assert proxy.trips[1][-2:] == [f"Execute: {statement}", "Sync"]
    proxy.trips.clear()
    with through.connect() as connection:
        connection.exec_driver_sql("select 1; select 2")
    assert proxy.trips == [["Query: BEGIN"], ["Query: select 1; select 2"], ["Query: ROLLBACK"]]


def test_a_pipeline_takes_one_trip_for_what_it_sends_together(proxy: CutProxy, postgresql: Database) -> None:
    """Statements that a client sends without waiting for answers are one trip."""
    dsn = proxy.through(postgresql.url()).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(dsn, autocommit=True) as connection, connection.pipeline():
        for _ in range(3):
            connection.execute("select %s::integer", [1])
    assert [trip.count("Sync") for trip in proxy.trips if trip != ["Flush"]] == [1]  # psycopg may ask again for answers
