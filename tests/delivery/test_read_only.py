"""A pool that has met a server that takes no writes goes on to the one that does, without anybody's help.

A standby, or a primary that became one, answers 25006 on PostgreSQL and 1290 on MariaDB; its address leads elsewhere
soon.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from sqlalchemy import event, text
from sqlalchemy.ext.asyncio import AsyncEngine

from databases import DRIVERS, Database, Driver, mariadb_database
from private_mariadb import NotInstalledError, private_mariadb
from projector_dedup import MissingTableError, Outcome, RetriesExhaustedError, RetryPolicy
from projector_dedup.dialects.postgresql import Psycopg
from projector_dedup.maintenance.cleanup import cleanup
from projector_dedup.maintenance.running import run_with_retries
from reached import reached
from rig import Durable, Outside, Rig, add, create_tables, outsides_fixture, rig_on_fixture  # noqa: F401  # fixtures

POSTGRESQL = [driver for driver in DRIVERS if driver.engine == "postgresql"]
MARIADB = [driver for driver in DRIVERS if driver.engine == "mariadb"]
POOL = 5
FEW = RetryPolicy(attempts=2, base=0)
AT_ONCE = RetryPolicy(base=0)
ROLE = "reader_that_writes"


def fill(rig: Rig) -> None:
    """Have the pool open all its connections."""
    if not isinstance(rig.engine, AsyncEngine):
        connections = [rig.engine.connect() for _ in range(POOL)]
        for connection in connections:
            connection.close()
        return

    async def fill_async(engine: AsyncEngine) -> None:
        connections = [await engine.connect() for _ in range(POOL)]
        for connection in connections:
            await connection.close()

    rig.run(fill_async(rig.engine))


def assert_the_pool_moves_on(rig: Rig, move: Callable[[], object]) -> None:
    """While there is no other server the message is not applied; then each delivery is, at the first try."""
    fill(rig)
    for _ in range(2):
        with pytest.raises(RetriesExhaustedError, match="read-only transaction"):
            rig.deliver(add, retry=FEW)
        assert rig.sync_engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
    move()
    for number in range(POOL + 2):
        assert rig.deliver(add, f"m{number}", retry=AT_ONCE).outcome is Outcome.APPLIED
    assert rig.durable() == Durable(POOL + 2, POOL + 2)
    rig.assert_nothing_is_left()


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
def standby_fixture(rig_on: Callable[..., Rig]) -> Callable[[Driver], tuple[Rig, Standby]]:
    """A rig on PostgreSQL, whose first connections are to a standby."""

    def make(driver: Driver) -> tuple[Rig, Standby]:
        rig = rig_on(driver, pool_size=POOL, max_overflow=0)
        return rig, Standby(rig)

    return make


@pytest.mark.parametrize("driver", POSTGRESQL, ids=str)
def test_deliveries_reach_the_new_primary(driver: Driver, standby: Callable[[Driver], tuple[Rig, Standby]]) -> None:
    """A connection that met a standby is not used again, and the message is tried on another."""
    rig, server = standby(driver)
    assert_the_pool_moves_on(rig, server.move)


@pytest.mark.parametrize("driver", POSTGRESQL, ids=str)
def test_an_address_that_moves_between_two_attempts(
    driver: Driver, standby: Callable[[Driver], tuple[Rig, Standby]]
) -> None:
    """The message itself is applied, however many connections of the pool led to the standby."""
    rig, server = standby(driver)
    fill(rig)
    server.move()
    assert rig.deliver(add, retry=AT_ONCE).outcome is Outcome.APPLIED
    assert rig.durable() == Durable(1, 1)


@pytest.mark.parametrize("driver", [driver for driver in POSTGRESQL if not driver.is_async], ids=str)
def test_a_cleanup_reaches_the_new_primary(driver: Driver, standby: Callable[[Driver], tuple[Rig, Standby]]) -> None:
    """Each try drops its connection, and says what kept it."""
    rig, server = standby(driver)
    rig.outside.execute("insert into processed_message values ('m', 'h', '2000-01-01', null)")
    fill(rig)
    server.move()
    for _ in range(POOL):
        with pytest.raises(MissingTableError, match="takes no writes now"):
            cleanup(rig.sync_engine, retention_hours=1)
    assert cleanup(rig.sync_engine, retention_hours=1) == 1


@pytest.mark.parametrize("driver", [driver for driver in POSTGRESQL if not driver.is_async], ids=str)
def test_a_step_of_a_cleanup_is_tried_again_on_another_connection(
    driver: Driver, standby: Callable[[Driver], tuple[Rig, Standby]]
) -> None:
    """The server may become a standby while it runs."""
    rig, server = standby(driver)
    rig.outside.execute("insert into processed_message values ('m', 'h', '2000-01-01', null)")
    fill(rig)
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


@pytest.mark.parametrize("driver", MARIADB, ids=str)
def test_deliveries_reach_a_mariadb_that_takes_writes(
    driver: Driver, reader: tuple[Outside, Callable[[bool], object]]
) -> None:
    """1290 is transient, and its connection is dropped: there the address may lead elsewhere by now."""
    outside, read_only = reader
    url = outside.database.url().set(username=ROLE)
    with Rig(driver, outside, url=url, pool_size=POOL, max_overflow=0) as rig:
        read_only(True)
        fill(rig)
        before = rig.connects
        with pytest.raises(RetriesExhaustedError, match="1290"):
            rig.deliver(add, retry=FEW)
        assert rig.sync_engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # a QueuePool
        read_only(False)
        for number in range(POOL):
            assert rig.deliver(add, f"m{number}", retry=AT_ONCE).outcome is Outcome.APPLIED
        assert rig.connects == before + 2  # those of the two attempts
        assert rig.durable() == Durable(POOL, POOL)
        rig.assert_nothing_is_left()
