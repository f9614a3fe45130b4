"""What the fixtures of `conftest.py` promise to the tests that lean on them."""

import asyncio
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import URL, Engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from databases import Database, empty
from projector_dedup.testing.postgres import PrivatePostgres


@pytest.mark.parametrize("_turn", ["first", "second"])
def test_every_test_finds_its_database_empty(engine: Engine, _turn: str) -> None:
    """A table that one test leaves behind, even under an open transaction, is not there for the next."""
    connection = engine.connect()
    connection.execute(text("create table leftover (n integer)"))
    connection.commit()
    connection.execute(text("insert into leftover values (1)"))
    assert connection.scalar(text("select count(*) from leftover")) == 1
    connection.close()


def test_async_drivers_reach_their_database(async_url: URL) -> None:
    """Every asynchronous driver that is installed executes a statement."""

    async def one() -> object:
        async with create_async_engine(async_url, poolclass=NullPool).connect() as connection:
            return await connection.scalar(text("select 1"))

    assert asyncio.run(one()) == 1


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


def test_an_engine_that_is_required_and_not_reached_is_a_failure() -> None:
    """In CI a run that silently left out PostgreSQL does not pass."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-k", "finds_its_database_empty and sqlite"],
        check=False,
        env={**os.environ, "PROJECTOR_DEDUP_TEST_REQUIRE": "postgresql,sqlite,pgbouncer"},
        capture_output=True,
        text=True,
    )
    assert "2 passed" in run.stdout
    for part in ("postgresql+psycopg", "pgbouncer"):
        assert f"REQUIRED, but not tested: {part} (no test asked for it)" in run.stdout
    assert run.returncode == 1


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
