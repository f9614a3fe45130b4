"""Whatever handlers do with their session, a batch leaves what its messages leave one by one: programs by lot."""

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
from databases import USUAL, Database
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
from projector_dedup.reads import Reads
from projector_dedup.tables import default_metadata

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Order:
    """Which part of a program to run, and which rows that is about: a batch may look at it, and read them ahead."""

    number: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Way:
    """How a program is delivered: together or one by one, and what is declared of the rows that it asks for."""

    name: str
    reads: Reads | None = None
    together: bool = False
    shared: bool = False

    def __str__(self) -> str:
        return self.name


def _rows(order: Order) -> list[int]:
    return list(dict.fromkeys(order.rows))[:3]


def _others(order: Order) -> list[int]:
    return [row + 1 for row in _rows(order)]


def _absent(order: Order) -> list[int]:
    return [row + 1000 for row in _rows(order)]


RIGHT: Reads = {programs.Plain: _rows, programs.Simple: _rows}
PLAINLY = Way("one by one")
WAYS = (
    Way("one by one, declared", RIGHT),
    Way("one by one, declared wrongly", {programs.Plain: _others, programs.Rich: _rows}),
    Way("one by one, declared of rows that are not there", {programs.Simple: _absent, programs.Plain: _rows}),
    Way("together", together=True),
    Way("together, declared", RIGHT, together=True),
    Way("together, declared wrongly", {programs.Plain: _others, programs.Simple: _absent}, together=True),
)


SHARED = (
    Way("together, shared", together=True, shared=True),
    Way("together, shared, declared", RIGHT, together=True, shared=True),
    Way("one by one, shared", shared=True),
    Way("together, nothing shared", together=True),
)


class Replay:
    """Runs a program in one of the ways: the outcomes, what those that were applied saw, the database."""

    def __init__(self, driver: str, database: Database, *, is_async: bool, isolation: str | None = None) -> None:
        self._is_async = is_async
        self._isolation = isolation
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

    def check(self, name: object, program: programs.Program, ways: tuple[Way, ...] = WAYS) -> None:
        """All must be the same."""
        plainly = self.run(f"{name}, {PLAINLY}", program, PLAINLY)
        ordered = any(step.__name__ in programs.ORDERED for message in program for step, _, _ in message)
        for way in ways:
            if ordered and way.reads is not None:
                continue  # a `get` of a declared row does not flush (docs/handlers.md)
            assert self.run(f"{name}, {way}", program, way) == plainly, f"program {name}, {way}"

    def run(self, name: str, program: programs.Program, way: Way) -> tuple[Any, ...]:
        """Deliver a program in one way."""
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
        deliver, deliver_batch = self._deliveries(body, way)
        outcomes = (
            _outcomes_of(deliver_batch, batch) if way.together else [_outcome_of(deliver, each) for each in batch]
        )
        with self._sessions() as session:
            left = programs.state(session)
        return outcomes, [seen[n] for n, outcome in enumerate(outcomes) if outcome is Outcome.APPLIED], left

    def _deliveries(
        self, body: Callable[[int, Session], None], way: Way
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        options: Any = {
            "retry": RetryPolicy(attempts=2),
            "isolation": self._isolation,
        }
        if self._async_engine is None:

            @projector(idempotent=True, name="program", shared_session=way.shared)
            @on(Order, reads=way.reads)
            def handler(order: Order, session: Session) -> None:
                body(order.number, session)

            dispatcher = Dispatcher(sessionmaker(self._sync_engine), handler, **options)
            return dispatcher.deliver, dispatcher.deliver_batch

        @projector(idempotent=True, name="program", shared_session=way.shared)
        @on(Order, reads=way.reads)
        async def awaited(order: Order, session: AsyncSession) -> None:
            await session.run_sync(lambda inner: body(order.number, inner))

        waiting = AsyncDispatcher(async_sessionmaker(self._async_engine), awaited, **options)
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


@pytest.mark.filterwarnings("ignore")  # the same
@pytest.mark.parametrize("engine", ["postgresql", "mariadb"])
@pytest.mark.parametrize("isolation", ["READ COMMITTED", "SERIALIZABLE"])
def test_nor_at_another_level(request: pytest.FixtureRequest, engine: str, isolation: str) -> None:
    """Where rows do not last, or reading them counts, what is declared changes nothing either."""
    replay = Replay(USUAL[engine], request.getfixturevalue(engine), is_async=False, isolation=isolation)
    for seed in range(100, 103):
        replay.check(seed, programs.draw(seed))
    replay.close()


@pytest.mark.filterwarnings("ignore")  # the same
@pytest.mark.parametrize(
    ("driver", "is_async"),
    [
        ("postgresql+psycopg", False),
        ("postgresql+asyncpg", True),
        ("mariadb+pymysql", False),
        ("mariadb+asyncmy", True),
        ("sqlite+pysqlite", False),
        ("sqlite+aiosqlite", True),
    ],
    ids=lambda value: {True: "async", False: "sync"}.get(value, str(value)),
)
def test_a_shared_session_leaves_what_the_messages_leave_one_by_one(
    request: pytest.FixtureRequest, driver: str, is_async: bool
) -> None:
    """Outcomes, what every applied message saw, and every row: for handlers that do only what the docs allow."""
    replay = Replay(driver, request.getfixturevalue(driver.partition("+")[0]), is_async=is_async)
    for seed in range(12):
        replay.check(f"shared {seed}", programs.draw_shared(seed), SHARED)
    replay.close()
