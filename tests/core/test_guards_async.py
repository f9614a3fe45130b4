"""Invariant I4 where asyncio's sessions and connections have an interface of their own."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncSession

from databases import DRIVERS, USUAL_DRIVERS, each_driver
from misbehaviour import Misbehaviour, Verdict, told_apart
from projector_dedup import Outcome
from projector_dedup.errors import TransactionViolatedError
from rig import NOTHING, ONCE, Rig, add

H, R, B, P, C, D, E = Verdict
SLOW = {
    "postgresql": "select pg_sleep(30)",
    "mariadb": "select sleep(1)",  # the server looks for a client that has gone every five seconds
    "sqlite": "with recursive c(x) as (select 1 union all select x + 1 from c limit 2000000) select count(*) from c",
}


Do = Callable[[AsyncSession], Awaitable[object]]


async def driver_of(session: AsyncSession) -> Any:
    """The driver's own connection, asynchronous as the driver made it."""
    return (await (await session.connection()).get_raw_connection()).driver_connection


async def execute_below(session: AsyncSession, sql: str) -> None:
    """Run SQL text on it."""
    connection = await driver_of(session)
    if hasattr(connection, "execute"):
        await connection.execute(sql)
        return
    async with connection.cursor() as cursor:
        await cursor.execute(sql)


def connections(method: str, *arguments: Any) -> Do:
    """Call a method of the session's AsyncConnection."""

    async def do(session: AsyncSession) -> None:
        await getattr(await session.connection(), method)(*arguments)

    return do


def below(*statements: str) -> Do:
    """Run SQL text, one after the other, on the driver's own connection."""

    async def do(session: AsyncSession) -> None:
        for sql in statements:
            await execute_below(session, sql)

    return do


async def _transaction_commit(session: AsyncSession) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    await transaction.commit()


async def _begin(session: AsyncSession) -> None:
    async with session.begin():
        pass


async def _savepoint(session: AsyncSession) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async with session.begin_nested():
            await session.execute(text("update total set amount = 1000"))
            raise ZeroDivisionError


async def _stream(session: AsyncSession) -> None:
    async for _ in await session.stream(text("select 1")):
        pass


async def _driver_error_swallowed(session: AsyncSession) -> None:
    with contextlib.suppress(Exception):
        await execute_below(session, "insert into total values ('a', 0)")


MISBEHAVIOURS = [
    Misbehaviour("commit", AsyncSession.commit, P),
    Misbehaviour("rollback", AsyncSession.rollback, C),
    Misbehaviour("close", AsyncSession.close, C),
    Misbehaviour("reset", AsyncSession.reset, C),
    Misbehaviour("invalidate", AsyncSession.invalidate, C),
    Misbehaviour("connection_commit", connections("commit"), P),
    Misbehaviour("connection_rollback", connections("rollback"), C),
    Misbehaviour("connection_close", connections("close"), C),
    Misbehaviour("exec_driver_sql", connections("exec_driver_sql", "COMMIT"), P),
    Misbehaviour("connection_stream", connections("stream", text("COMMIT")), P),
    Misbehaviour("transaction_commit", _transaction_commit, P),
    Misbehaviour("run_sync_commit", lambda session: session.run_sync(lambda inner: inner.commit()), P),
    Misbehaviour("begin", _begin, P),
    Misbehaviour("savepoint", _savepoint, H),
    Misbehaviour("stream", _stream, H),
    Misbehaviour("driver_reads", below("select 1"), H),
    Misbehaviour("driver_commit", below("COMMIT"), D),
    Misbehaviour("driver_rollback", below("ROLLBACK"), E),
    Misbehaviour("driver_commit_begin", below("COMMIT", "BEGIN"), D),
    Misbehaviour("driver_rollback_begin", below("ROLLBACK", "BEGIN"), E),
    Misbehaviour("driver_error_swallowed", _driver_error_swallowed, H, postgresql=C),
]


def _cases() -> Iterator[Any]:
    """Everything on one driver of each database; on the others what may depend on the driver. Endings on one driver."""
    for driver in (each for each in DRIVERS if each.is_async):
        for case in MISBEHAVIOURS if driver in USUAL_DRIVERS else told_apart(MISBEHAVIOURS, driver):
            if (verdict := case.verdict(driver)) is not None:
                for ending in ("returns", "swallows", "fails") if driver.module == "asyncpg" else ("returns",):
                    yield pytest.param(driver, case.do, verdict, ending, id=f"{driver}-{case}-{ending}")


@pytest.mark.parametrize(("driver", "do", "verdict", "ending"), [*_cases()])
def test_what_becomes_of_an_asynchronous_misbehaviour(do: Do, verdict: Verdict, ending: str, rig: Rig) -> None:
    """What is awaited is prevented or found out as what is called is; nothing stays open; a redelivery is right."""

    async def handler(session: AsyncSession) -> None:
        await session.run_sync(add)
        try:
            await do(session)
        except Exception:
            if ending == "returns":
                raise
        if ending == "fails":
            raise ZeroDivisionError

    fails = ending == "fails" or (verdict is R and ending == "returns")
    durable = ONCE if verdict is D or (verdict in (H, R) and not fails) else NOTHING
    if verdict in (H, R) and not fails:
        assert rig.deliver(handler).outcome is Outcome.APPLIED
    else:
        with pytest.raises(Exception) as raised:  # noqa: PT011  # which one is said below
            rig.deliver(handler)
        assert isinstance(raised.value, TransactionViolatedError) == (verdict in (D, E) or not fails)
        assert getattr(raised.value, "durable", False) == (verdict in (D, E))
    rig.assert_settled(durable)
    assert rig.deliver(add).outcome is (Outcome.APPLIED if durable == NOTHING else Outcome.DUPLICATE)
    rig.assert_settled(ONCE)


@each_driver(is_async=True)
def test_a_query_that_a_timeout_ends_runs_the_handler_again(rig: Rig) -> None:
    """The timeout ends the connection, which the handler cannot know: it swallows the timeout and goes on."""
    runs: list[int] = []

    async def handler(session: AsyncSession) -> None:
        runs.append(len(runs))
        if len(runs) == 1:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await session.execute(text(SLOW[session.get_bind().dialect.name]))
        await session.run_sync(add)

    assert rig.deliver(handler).outcome is Outcome.APPLIED
    assert (len(runs), rig.durable()) == (2, ONCE)
    rig.assert_nothing_is_left()


@each_driver(is_async=True, usual=True)
def test_a_call_without_await_is_left_to_pythons_warning(rig: Rig) -> None:
    """Its statement is not sent, and the message is applied without it (docs/handlers.md)."""

    async def handler(session: AsyncSession) -> None:
        await session.run_sync(add)
        session.execute(text("update total set amount = 1000"))  # type: ignore[unused-coroutine]

    with pytest.warns(RuntimeWarning, match="never awaited"):
        assert rig.deliver(handler).outcome is Outcome.APPLIED
    assert rig.durable() == ONCE


@each_driver(module="asyncpg")
def test_an_error_of_a_streamed_result_is_not_missed(rig: Rig) -> None:
    """It comes while rows are fetched, past every statement; asyncpg would not tell, so the server is asked."""

    async def handler(session: AsyncSession) -> None:
        await session.run_sync(add)
        await session.flush()
        with contextlib.suppress(Exception):
            result = await session.stream(
                text("select 1 / (500 - n) from generate_series(1, 2000) n"), execution_options={"yield_per": 10}
            )
            async for _ in result:
                pass

    with pytest.raises(TransactionViolatedError):
        rig.deliver(handler)
    rig.assert_settled(NOTHING)
