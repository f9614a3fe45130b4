"""Whatever handlers do with their session, a batch of messages does as its messages one by one: programs by lot."""

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


class Replay:
    """Runs a program as a batch or message by message: the outcomes, what those that were applied saw, the database."""

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
        """Both must be the same."""
        together = self.run(f"{name}, together", program, as_batch=True)
        one_by_one = self.run(f"{name}, one by one", program, as_batch=False)
        assert together == one_by_one, f"program {name}"

    def run(self, name: str, program: programs.Program, *, as_batch: bool) -> tuple[Any, ...]:
        """In one of the two ways."""
        seen: dict[int, list[Any]] = {}
        programs.HELD.clear()
        with self._sessions.begin() as session:
            programs.reset(session)

        def body(number: int, session: Session) -> None:
            programs.REACHED.clear()
            seen[number] = []
            for step, ident, argument in program[number]:
                step(session, ident, argument, seen[number])

        deliver, deliver_batch = self._deliveries(body)
        batch = [
            Message(f"{name}, {number}", Order(number, tuple(ident for _, ident, _ in steps)))
            for number, steps in enumerate(program)
        ]
        outcomes = _outcomes_of(deliver_batch, batch) if as_batch else [_outcome_of(deliver, each) for each in batch]
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
    [("psycopg", False, 12), ("psycopg2", False, 3), ("psycopg", True, 3), ("asyncpg", True, 3)],
    ids=["psycopg", "psycopg2", "psycopg async", "asyncpg"],
)
def test_whatever_handlers_do_a_batch_is_as_its_messages_one_by_one(
    postgresql: Database, driver: str, is_async: bool, drawn: int
) -> None:
    """Outcomes, what every applied message saw, and what is in every table in the end."""
    replay = Replay(f"postgresql+{driver}", postgresql, is_async=is_async)
    for name, program in programs.FOUND.items():
        replay.check(name, program)
    for seed in range(drawn):
        replay.check(seed, programs.draw(seed))
    replay.close()
