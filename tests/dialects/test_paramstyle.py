"""`create_engine(paramstyle=...)`: parameters may be written in each way that the driver takes."""

import sys
from typing import Any

import pytest

from command_rig import Balance, desk_on
from databases import DRIVERS, Database, Driver
from kit import Added, Total
from projector_dedup import Message, Outcome
from ready import ready

# From Python 3.14 on, sqlite3 refuses each statement that SQLAlchemy writes in a numeric style.
SQLITE = ("named",) if sys.version_info >= (3, 14) else ("named", "numeric", "numeric_dollar")
OTHERS = {
    "psycopg": ("format",),
    "psycopg2": ("format",),
    "asyncpg": (),  # SQLAlchemy itself cannot run a statement of another style there
    "pymysql": ("pyformat",),
    "MySQLdb": ("pyformat",),
    "asyncmy": ("pyformat",),
    "aiomysql": ("pyformat",),
    "sqlite3": SQLITE,
    "aiosqlite": SQLITE,
}
CASES = [(driver, style) for driver in DRIVERS for style in OTHERS[driver.module]]


@pytest.mark.parametrize(("driver", "style"), CASES, ids=str)
def test_messages_are_claimed_in_any_style(request: pytest.FixtureRequest, driver: Driver, style: str) -> None:
    """New ones, redeliveries and batches, and every option that changes the SQL of a claim."""
    if not driver.installed:
        pytest.skip(f"{driver.module} is not installed")
    database: Database = request.getfixturevalue(driver.engine)
    with ready(database.url(driver.name_in_url), engine_arguments={"paramstyle": style}) as harness:
        dispatchers = {
            "plain": harness.dispatcher(harness.handler(name="plain")),
            "strict": harness.dispatcher(harness.handler(name="strict"), strict=True),
            "bounded": harness.dispatcher(harness.handler(name="bounded"), claim_timeout=5),
            "locking": harness.dispatcher(harness.handler(name="locking", read_models=[Total])),
            "renamed": harness.dispatcher(harness.handler(name="renamed", formerly=["old.name"])),
        }
        for name, dispatcher in dispatchers.items():
            ids = [f"{name}-{number}" for number in range(2)]
            for expected in (Outcome.APPLIED, Outcome.DUPLICATE):
                for message_id in ids:
                    assert harness.deliver(dispatcher, message_id=message_id).outcome is expected
            batch = [Message(message_id, Added()) for message_id in (*ids, f"{name}-2", f"{name}-3")]
            found = harness.run(dispatcher.deliver_batch, batch)
            assert [each.outcome for each in found] == [Outcome.DUPLICATE] * 2 + [Outcome.APPLIED] * 2
        assert harness.totals() == {"a": 4 * len(dispatchers)}


@pytest.mark.parametrize(("driver", "style"), CASES, ids=str)
def test_commands_are_recorded_in_any_style(request: pytest.FixtureRequest, driver: Driver, style: str) -> None:
    """New ones and duplicates, with every option that changes the SQL of a claim, of a record or of a recall."""
    with desk_on(request, driver, engine_arguments={"paramstyle": style}) as desk:
        ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
            "plain": ({}, {}),
            "strict": ({}, {"strict": True}),
            "bounded": ({}, {"claim_timeout": 5}),
            "locking": ({"read_models": [Balance]}, {}),
            "renamed": ({"formerly": ["desk.former"]}, {}),
        }
        for name, (settings, options) in ways.items():
            operation, commands = desk.operation(name=f"desk.{name}", **settings), desk.commands(**options)
            answers = [desk.handle(operation, key=name, commands=commands) for _ in range(3)]
            assert [answer.replayed for answer in answers] == [False, True, True]
        assert desk.orders() == sorted(ways)
