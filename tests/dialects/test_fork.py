"""A connection that was opened before a fork is the parent's: no child uses it, or ends the parent's session."""

import gc
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import QueuePool

from databases import DRIVERS, SERVERS, USUAL_DRIVERS, Database, Driver
from forking import CHILDREN, MESSAGES, Adding, Base
from projector_dedup import Dispatcher, Message

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")

PROGRAM = Path(__file__).parents[1] / "support" / "forking.py"
WAYS = [  # by whom the parent has used the engine; how the children start; the pool
    ("by the library", "fork", "QueuePool"),
    ("by others", "fork", "QueuePool"),
    ("by others", "multiprocessing", "QueuePool"),
    ("by the library", "fork", "NullPool"),
]
USUAL_WAYS = [("by others, with a ping", "fork", "QueuePool"), ("by others", "claims by hand", "QueuePool")]
CASES = [
    pytest.param(driver, *way, id=f"{driver}-{', '.join(way)}", marks=() if way in WAYS[:2] else pytest.mark.nightly)
    for driver in DRIVERS
    if driver.engine in SERVERS and not driver.is_async
    for way in (*WAYS, *(USUAL_WAYS if driver in USUAL_DRIVERS else ()))
]


@pytest.mark.by_turns
@pytest.mark.parametrize(("driver", "used", "start", "pool"), CASES)
def test_children_deliver_beside_the_parents_open_transactions(
    driver: Driver, used: str, start: str, pool: str, request: pytest.FixtureRequest
) -> None:
    """Read model and markers are the totals of the input, and the transactions commit when the children have exited."""
    if not driver.installed:
        pytest.skip(f"{driver.module} is not installed")
    database: Database = request.getfixturevalue(driver.engine)
    url = database.url(driver.drivername).render_as_string(hide_password=False)
    ran = subprocess.run(
        [sys.executable, PROGRAM, url, pool, used, start], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    engine = create_engine(database.url())
    with engine.connect() as connection:
        added = connection.scalars(text("SELECT number FROM added ORDER BY number")).all()
        markers = connection.scalar(text("SELECT count(*) FROM processed_message"))
    engine.dispose()
    assert added == [-2, -1, *range(CHILDREN * MESSAGES)]
    assert markers == CHILDREN * MESSAGES


class Referable(sqlite3.Connection):
    """A connection that takes weak references."""


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # the child starts no thread, and ends at once
@pytest.mark.parametrize("used", ["by the library", "by others"])
def test_a_child_opens_its_own_connection_to_sqlite(used: str, sqlite: Database) -> None:
    """SQLite forbids to use or close a connection that was opened before a fork, so the parent's stays as it is."""
    engine = create_engine(sqlite.url(), poolclass=QueuePool, connect_args={"factory": Referable})
    Base.metadata.create_all(engine)
    dispatcher = Dispatcher(sessionmaker(engine), Adding())

    def deliver(number: int) -> None:
        dispatcher.deliver(Message(f"m-{number}", {"number": number}, type="add"))

    def connection() -> ref[Any]:
        with engine.connect() as taken:
            return ref(taken.connection.dbapi_connection)

    if used == "by the library":
        deliver(0)
    ours = connection()
    if (child := os.fork()) == 0:
        code = 1
        try:
            deliver(1)
            gc.collect()
            still: Any = ours()
            code = int(still.total_changes is None or connection() == ours)  # raises if it is closed, or gone
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert connection() == ours
    deliver(2)
    with engine.connect() as found:
        added = found.scalars(text("SELECT number FROM added ORDER BY number")).all()
        assert found.scalar(text("SELECT count(*) FROM processed_message")) == len(added)
    assert added == ([0, 1, 2] if used == "by the library" else [1, 2])
    engine.dispose()
