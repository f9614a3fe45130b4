"""A server that refuses ROLLBACK too must not keep a connection from its pool, nor hide the first error.

A node of a Galera cluster that has lost the others answers every statement by 1047, ROLLBACK not excepted.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.orm import Session, sessionmaker

from cut_proxy import CutProxy
from databases import DRIVERS, Driver
from projector_dedup import (
    CleanupInterruptedError,
    Outcome,
    RetriesExhaustedError,
    RetryPolicy,
    UnitOfWork,
)
from projector_dedup.closing import connected
from projector_dedup.maintenance.cleanup import cleanup
from rig import NOTHING, ONCE, Rig, add, outsides_fixture, rig_on_fixture  # noqa: F401  # fixtures

SERVERS = [driver for driver in DRIVERS if driver.engine != "sqlite"]
MARIADB = [driver for driver in SERVERS if driver.engine == "mariadb"]
SYNC = [driver for driver in SERVERS if not driver.is_async]
ALL_BUT_SET = r"^(?!\s*(set|show)\b)"  # what such a node refuses
FEW = RetryPolicy(attempts=3, base=0)
Refusing = Callable[[Driver], tuple[Rig, CutProxy]]


@pytest.fixture(name="refusing")
def refusing_fixture(rig_on: Callable[..., Rig]) -> Iterator[Refusing]:
    """A rig whose pool has two connections, behind a proxy that can refuse statements."""
    proxies: list[CutProxy] = []

    def make(driver: Driver) -> tuple[Rig, CutProxy]:
        rig = rig_on(driver)
        proxy = CutProxy(rig.sync_engine.url).__enter__()
        proxies.append(proxy)
        url = proxy.through(rig.sync_engine.url)
        rig = rig_on(driver, url=url, pool_size=2, max_overflow=0, pool_timeout=1)
        _connect(rig)
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
    rig.assert_nothing_is_left()
    assert rig.durable() == NOTHING
    assert rig.deliver(add).outcome is Outcome.APPLIED
    assert rig.durable() == ONCE


@pytest.mark.parametrize("driver", SERVERS, ids=str)
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


@pytest.mark.parametrize("driver", MARIADB, ids=str)
def test_a_refused_commit_is_no_exception(driver: Driver, refusing: Refusing) -> None:
    """Where COMMIT is refused before ROLLBACK is, the transaction ends with its connection."""
    rig, proxy = refusing(driver)
    rig.deliver(_nothing, idempotent=False)
    with proxy.refusing("commit|rollback"):
        for number in range(3):
            with pytest.raises(Exception, match=r"refused|1047|interrupted during COMMIT"):
                rig.deliver(add, f"m{number}", retry=FEW)
            assert checked_out(rig) == 0
    assert_all_is_well(rig)


@pytest.mark.parametrize("driver", MARIADB, ids=str)
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


@pytest.mark.parametrize("driver", MARIADB, ids=str)
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


@pytest.mark.parametrize("driver", MARIADB, ids=str)
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
    assert rig.durable() == ONCE
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("driver", SYNC, ids=str)
def test_a_unit_of_work_raises_what_its_rollback_met(driver: Driver, refusing: Refusing) -> None:
    """Where nothing else was raised, that is the first error."""
    rig, proxy = refusing(driver)
    rig.deliver(_nothing, "m0")
    with proxy.refusing("rollback"), pytest.raises(DBAPIError):
        _claim_and_leave(rig)
    rig.assert_nothing_is_left()
    rig.outside.execute("delete from processed_message")
    assert_all_is_well(rig)


@pytest.mark.parametrize("driver", SYNC, ids=str)
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


@pytest.mark.parametrize("driver", SYNC, ids=str)
def test_a_connection_of_ours_is_given_back(driver: Driver, refusing: Refusing) -> None:
    """With the first error, or with that of its ROLLBACK."""
    rig, proxy = refusing(driver)
    with proxy.refusing("rollback"):
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                _read(rig, ZeroDivisionError())
            with pytest.raises(DBAPIError):
                _read(rig)
            assert checked_out(rig) == 0
    rig.assert_nothing_is_left()


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


def _connect(rig: Rig) -> None:
    """SQLAlchemy asks each engine's first connection for this and that."""

    async def connect(engine: AsyncEngine) -> None:
        async with engine.connect():
            pass

    if isinstance(rig.engine, AsyncEngine):
        rig.run(connect(rig.engine))
    else:
        rig.engine.connect().close()
