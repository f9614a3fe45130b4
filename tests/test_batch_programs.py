"""Whatever handlers do with their session, nobody can tell what was read early or written late: programs by lot."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from sqlalchemy import (
    create_engine,
)
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import programs
from databases import Database
from projector_dedup import (
    AsyncDispatcher,
    BatchFailed,
    Dispatcher,
    Message,
    Outcome,
    RetryPolicy,
    on,
    projector,
)
from projector_dedup.tables import default_metadata


@dataclass(frozen=True)
class Order:
    """Which part of a program to run, and which rows that is about: a batch may look at it, and read them ahead."""

    number: int
    rows: tuple[int, ...]


PLAINLY = "each by a dispatcher of its own"  # so that nothing is known of any row
ONE_BY_ONE = "one by one"  # so that the first row of each may have come with its claim
TOGETHER = "together"
WAYS = (PLAINLY, ONE_BY_ONE, TOGETHER)


class Replay:
    """Runs a program in one of ``WAYS``: the outcomes, what those that were applied saw, the database."""

    def __init__(self, driver: str, database: Database, *, is_async: bool) -> None:
        self._is_async = is_async
        self._engine = create_engine(database.url())
        with self._engine.begin() as connection:
            programs.prepare(connection)
            default_metadata.create_all(connection)
        self._sessions = sessionmaker(self._engine)
        self._runner = asyncio.Runner()
        self._async_engine = create_async_engine(database.url(driver)) if is_async else None
        self._sync_engine = create_engine(database.url(driver))

    def close(self) -> None:
        """Let go of the database."""
        if self._async_engine is not None:
            self._runner.run(self._async_engine.dispose())
        self._runner.close()
        self._engine.dispose()
        self._sync_engine.dispose()

    def check(self, name: object, program: programs.Program) -> None:
        """All must be the same."""
        plainly, *others = (self.run(f"{name}, {way}", program, way) for way in WAYS)
        for way, other in zip(WAYS[1:], others, strict=True):
            assert other == plainly, f"program {name}, {way}"

    def run(self, name: str, program: programs.Program, way: str) -> tuple[Any, ...]:
        """In this way."""
        seen: dict[int, list[Any]] = {}
        programs.HELD.clear()
        with self._sessions.begin() as session:
            programs.reset(session)

        def body(number: int, session: Session) -> None:
            programs.REACHED.clear()
            seen[number] = []
            for step, ident, argument in program[number]:
                step(session, ident, argument, seen[number])

        batch = [
            Message(f"{name}, {number}", Order(number, tuple(ident for _, ident, _ in steps)))
            for number, steps in enumerate(program)
        ]
        deliver, deliver_batch = self._deliveries(body)
        if way == TOGETHER:
            outcomes = _outcomes_of(deliver_batch, batch)
        elif way == ONE_BY_ONE:
            outcomes = [_outcome_of(deliver, each) for each in batch]
        else:
            outcomes = [_outcome_of(self._deliveries(body)[0], each) for each in batch]
        with self._sessions() as session:
            left = programs.state(session)
        return outcomes, [seen[n] for n, outcome in enumerate(outcomes) if outcome is Outcome.APPLIED], left

    def _deliveries(self, body: Callable[[int, Session], None]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        policy = RetryPolicy(attempts=2)
        if self._async_engine is None:

            @projector(idempotent=True, name="program")
            @on(Order)
            def handler(order: Order, session: Session) -> None:
                body(order.number, session)

            dispatcher = Dispatcher(sessionmaker(self._sync_engine), handler, retry=policy)
            return dispatcher.deliver, dispatcher.deliver_batch

        @projector(idempotent=True, name="program")
        @on(Order)
        async def awaited(order: Order, session: AsyncSession) -> None:
            await session.run_sync(lambda inner: body(order.number, inner))

        waiting = AsyncDispatcher(async_sessionmaker(self._async_engine), awaited, retry=policy)
        return (
            lambda message: self._runner.run(waiting.deliver(message)),
            lambda batch: self._runner.run(waiting.deliver_batch(batch)),
        )


def _outcome_of(deliver: Callable[..., Any], message: Message) -> Outcome:
    try:
        outcome: Outcome = deliver(message).outcome
    except Exception:  # noqa: BLE001  # whatever a program provokes
        return Outcome.FAILED
    return outcome


def _outcomes_of(deliver_batch: Callable[..., Any], batch: list[Message]) -> list[Outcome]:
    try:
        return [delivery.outcome for delivery in deliver_batch(batch)]
    except BatchFailed as failed:
        return [delivery.outcome for delivery in failed.deliveries]


@pytest.mark.filterwarnings("ignore")  # programs do what SQLAlchemy warns of
@pytest.mark.parametrize(
    ("driver", "is_async", "drawn"),  # how many; after a change thousands are worth running
    [
        ("postgresql+psycopg", False, 12),
        ("postgresql+psycopg2", False, 3),
        ("postgresql+psycopg", True, 3),
        ("postgresql+asyncpg", True, 3),
        ("mariadb+pymysql", False, 6),
        ("mariadb+mysqldb", False, 3),
        ("mariadb+asyncmy", True, 3),
        ("mariadb+aiomysql", True, 3),
        ("sqlite+pysqlite", False, 12),
        ("sqlite+aiosqlite", True, 3),
    ],
    ids=lambda value: {True: "async", False: "sync"}.get(value, str(value)),
)
def test_whatever_handlers_do_nobody_can_tell_how_rows_were_read(
    request: pytest.FixtureRequest, driver: str, is_async: bool, drawn: int
) -> None:
    """Outcomes, what every applied message saw, and what is in every table in the end."""
    replay = Replay(driver, request.getfixturevalue(driver.partition("+")[0]), is_async=is_async)
    for name, program in programs.FOUND.items():
        replay.check(name, program)
    for seed in range(drawn):
        replay.check(seed, programs.draw(seed))
    replay.close()
