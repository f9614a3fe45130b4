"""Check that a projector applies each message exactly once, whatever happens between the broker and the database.

`Check` delivers the user's messages by the real dispatcher to a real database, by many schedules. After each schedule
it compares the read model with the value that the user has computed from the messages. The pytest plugin
`pytest_projector_dedup` calls it.
"""

from __future__ import annotations

import asyncio
import copy
import time
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

from sqlalchemy import URL, MetaData, Table, create_engine, delete, inspect, make_url, select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from ..building import handlers_of_all
from ..dispatcher import AsyncDispatcher, Dispatcher
from ..errors import BatchFailed
from ..message import Message, id_text
from ..options import RetryPolicy
from ..tables import default_tables
from .fault_points import AFTER_COMMIT, BEFORE_ACKNOWLEDGEMENT, FAULT_POINTS, FaultPoints
from .schedules import HOWS, Schedule, Turn, is_allowed, schedules, smaller, smallest

SHRINKING = 3.0
"""Seconds after which no smaller schedule is tried."""
STUCK = 2.0
"""Seconds without any acknowledgement after which a message counts as one that cannot be applied."""


class ExactlyOnce(Protocol):
    """The type of the fixture ``exactly_once``."""

    def __call__(
        self,
        projector: Any,
        messages: Sequence[Any],
        *,
        expected: Any,
        read: Callable[[Session], Any],
        metadata: MetaData | None = None,
        ordered: bool | Callable[[Any], Hashable] = False,
        reset: Callable[[], None] | None = None,
        seed: int | None = None,
        schedules: int = 30,
        schedule: Sequence[Any] | None = None,
        **options: Any,
    ) -> None:
        """Deliver ``messages`` to ``projector`` by many schedules, and fail the test if the read model is ever wrong.

        ``projector`` is a projector, a list of projectors, or a class or function that makes one. ``messages`` are
        events, pairs ``(message_id, event)`` or ``Message`` objects. ``expected`` is the value that ``read`` must
        return after all messages, or a function that computes it from the messages that were delivered. ``read`` gets
        a plain ``Session``, also for async projectors. ``metadata`` has the tables of the read model; without it, the
        tables must exist. All rows of these tables are deleted before each schedule.

        ``ordered=True`` keeps the order of the messages; a function of the event keeps the order of each key that the
        function returns. ``reset`` undoes, before each schedule, what handlers have changed outside the database.
        ``schedules`` is the number of generated schedules, ``seed`` their seed. ``schedule`` runs this one alone. The
        other arguments are those of ``Dispatcher``.

        Raises ``UnusableError`` if the arguments do not fit, for example if a table is not empty.
        """


class UnusableError(Exception):
    """Raised if the arguments of ``exactly_once`` do not fit. The text says what to change."""


@dataclass(frozen=True)
class Failure:
    """A schedule after which the read model is wrong, or in which a message was never acknowledged."""

    kind: str  #: two failures of one kind have the same cause, as far as can be seen
    text: str


@dataclass(frozen=True)
class Report:
    """The smallest schedule that failed, and how."""

    failure: Failure
    schedule: Schedule
    tried: int

    def lines(self, names: Sequence[str]) -> Iterator[str]:
        """Yield the report, with the names of the messages, line by line."""
        yield self.failure.text
        yield "The smallest schedule that fails:"
        for number, turn in enumerate(self.schedule, 1):
            yield f"  {number}. {_line_of(turn, names)}"


def _line_of(turn: Turn, names: Sequence[str]) -> str:
    what = {"deliver": "deliver", "burst": "deliver at the same time", "batch": "deliver as one batch"}[turn.how]
    text = f"{what}: {', '.join(names[number] for number in turn.messages)}"
    return text if turn.fault is None else f"{text}; an error is raised {turn.fault}"


class Check:
    """One projector, its messages, and the value that the read model must have after them.

    ``engine`` is an Engine or an AsyncEngine, as the projector needs. The other arguments are those of the fixture
    ``exactly_once``. Raises ``UnusableError`` if they do not fit.
    """

    def __init__(
        self,
        projector: Any,
        messages: Sequence[Any],
        *,
        expected: Any,
        read: Callable[[Session], Any],
        engine: Engine | AsyncEngine,
        metadata: MetaData | None = None,
        ordered: bool | Callable[[Any], Hashable] = False,
        reset: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        if not messages:
            raise UnusableError("exactly_once: there are no messages; give at least one")
        self._make = maker_of(projector)
        self._given = list(messages)
        self._messages = [_message(each) for each in messages]
        self._expected, self._read, self._reset = expected, read, reset
        self._keys = None if ordered is False else [_key(each, ordered) for each in self._messages]
        self._engine = engine
        self._sync_engine = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
        if self._sync_engine.dialect.name == "sqlite" and self._sync_engine.url.database in (None, "", ":memory:"):
            raise UnusableError("exactly_once needs a database with several connections; give an SQLite file")
        self._metadata = metadata
        self._options = {"retry": RetryPolicy(base=0.001, within=0.3), **options}
        self._marker_tables = options.get("tables", default_tables)
        self._points = FaultPoints(self._sync_engine)

    @property
    def names(self) -> list[str]:
        """The names of the messages in a report: the id of a ``Message``, otherwise a shortened ``repr``."""
        return [str(id_text(each) if isinstance(each, Message) else repr(each)[:80]) for each in self._messages]

    def run(self, seed: int, count: int) -> Report | None:
        """Run ``count`` generated schedules, after the usual ones; return a report of the first that fails."""
        with self._ready() as fails:
            for tried, schedule in enumerate(schedules(len(self._messages), self._keys, seed, count), 1):
                if (failure := fails(schedule)) is not None:
                    return self._shrunk(schedule, failure, fails, tried)
        return None

    def run_one(self, schedule: Sequence[Any]) -> Report | None:
        """Run one schedule, given as tuples ``(how, positions of messages, fault point or None)``."""
        given = tuple(Turn(how, tuple(numbers), fault) for how, numbers, fault in schedule)
        for turn in given:
            known = turn.how in HOWS and turn.fault in (None, *FAULT_POINTS)
            if not known or not {*turn.messages} <= {*range(len(self._messages))}:
                raise UnusableError(
                    f"exactly_once: {tuple(turn)} is no step of a schedule; give {', '.join(HOWS)}, the positions of "
                    f"messages in the list, and None or one of {', '.join(FAULT_POINTS)}"
                )
        with self._ready() as fails:
            failure = fails(given)
        return None if failure is None else Report(failure, given, 1)

    def _shrunk(
        self, schedule: Schedule, failure: Failure, fails: Callable[[Schedule], Failure | None], tried: int
    ) -> Report:
        until = time.monotonic() + SHRINKING
        may_drop = callable(self._expected)

        def candidates(schedule: Schedule) -> Iterator[Schedule]:
            return (
                each
                for each in smaller(schedule, may_drop=may_drop)
                if is_allowed(each, self._keys) and time.monotonic() < until
            )

        def fails_alike(candidate: Schedule) -> bool:
            nonlocal failure
            found = fails(candidate)
            if found is None or found.kind != failure.kind:
                return False
            failure = found
            return True

        schedule = smallest(schedule, candidates, fails_alike)
        return Report(failure, schedule, tried)

    # The database ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _ready(self) -> Iterator[Callable[[Schedule], Failure | None]]:
        """Create the tables, and yield the function that runs a schedule; drop in the end what was created."""
        with asyncio.Runner() as runner:
            created = runner.run(self._on_connection(self._create))
            try:
                with self._points.watching():
                    yield lambda schedule: runner.run(self._run(schedule))
            finally:
                runner.run(self._on_connection(lambda connection: _drop(connection, created)))
                runner.run(self._dispose())

    def _create(self, connection: Connection) -> list[Table]:
        """Create the tables that are not there; return them. Raises ``UnusableError`` if a table has rows."""
        markers = self._marker_tables.marker.metadata
        if self._metadata is None:
            self._metadata = MetaData()
            self._metadata.reflect(connection)
        named = {table.fullname: table for metadata in (markers, self._metadata) for table in metadata.sorted_tables}
        missing = [each for each in named.values() if not inspect(connection).has_table(each.name, each.schema)]
        for metadata in (markers, self._metadata):
            metadata.create_all(connection, [each for each in missing if each.metadata is metadata])
        state = self._marker_tables.state.fullname
        self._emptied = [each for each in named.values() if each.fullname not in (state, "alembic_version")]
        for table in self._emptied:
            if connection.execute(select(table).limit(1)).first() is not None:
                raise UnusableError(
                    f"exactly_once deletes all rows of the table {table.fullname}, which is not empty; give "
                    "it an empty database"
                )
        return missing

    def _empty(self, connection: Connection) -> None:
        for table in reversed(self._emptied):
            connection.execute(delete(table))

    async def _on_connection(self, work: Callable[[Connection], Any]) -> Any:
        if isinstance(self._engine, AsyncEngine):
            async with self._engine.begin() as connection:
                return await connection.run_sync(work)
        with self._engine.begin() as connection:
            return work(connection)

    async def _value(self) -> Any:
        """Read the read model, by a connection that was opened after the last COMMIT."""
        await self._dispose()
        if isinstance(self._engine, AsyncEngine):
            async with AsyncSession(self._engine) as session:
                return await session.run_sync(self._read)
        with Session(self._engine) as session:
            return self._read(session)

    async def _dispose(self) -> None:
        if isinstance(self._engine, AsyncEngine):
            await self._engine.dispose()
        else:
            self._engine.dispose()

    # One schedule ----------------------------------------------------------------------------------------------------

    async def _run(self, schedule: Schedule) -> Failure | None:
        await self._on_connection(self._empty)
        if self._reset is not None:
            self._reset()
        workers = Workers(self)
        for turn in schedule:
            if not workers.is_stuck:
                await workers.take(turn)
        while workers.waiting and not workers.is_stuck:
            await workers.again()
        if workers.waiting:
            name, error = self.names[workers.waiting[0]], workers.error
            kind = f"not acknowledged: {type(error).__name__}"
            return Failure(kind, f"Message {name} is never acknowledged: {type(error).__name__}: {error}")
        delivered = sorted({number for turn in schedule for number in turn.messages})
        try:
            value, expected = await self._value(), self._expected
            if callable(expected):
                expected = expected([self._given[number] for number in delivered])
        except Exception as error:  # noqa: BLE001  # reported: a message whose write is missing may be the cause
            kind = f"read or expected raised {type(error).__name__}"
            return Failure(kind, f"The value cannot be read or computed: {type(error).__name__}: {error}")
        if value == expected:
            return None
        return Failure("wrong", f"The read model is wrong:\n  expected {expected!r}\n  but got  {value!r}")

    def dispatcher(self) -> Any:
        """Return a dispatcher as a new worker has it, with a projector of its own."""
        projectors = self._make()
        if isinstance(self._engine, AsyncEngine):
            dispatcher: Any = AsyncDispatcher(async_sessionmaker(self._engine), *projectors, **self._options)
        else:
            dispatcher = Dispatcher(sessionmaker(self._engine), *projectors, **self._options)
        self._points.watch(dispatcher)
        return dispatcher


class Workers:
    """Deliver the messages of a schedule, and deliver again what was not acknowledged, as a broker does."""

    def __init__(self, check: Check) -> None:
        self._check, self._points = check, check._points
        self._messages, self._keys = check._messages, check._keys
        self._dispatcher = check.dispatcher()
        self.waiting: list[int] = []  # what was not acknowledged, by position
        self.error: Exception | None = None  # the last one
        self._failures = 0  # in a row
        self._progressed = time.monotonic()

    @property
    def is_stuck(self) -> bool:
        """True if each waiting message has failed several times since the last acknowledgement."""
        too_long = self._failures > 2 and time.monotonic() - self._progressed > STUCK
        return too_long or self._failures > 3 * len(self.waiting) + 3

    async def take(self, turn: Turn) -> None:
        """Deliver the messages of a turn; if its fault has ended a worker, start a new one and deliver them again."""
        held = self._held(turn.messages)
        numbers = [number for number in turn.messages if number not in held]
        self.waiting += held
        if not numbers:
            return
        self._points.arm(turn.fault, {*numbers} if turn.how == "burst" else ())
        failed = await (self._batch(numbers) if turn.how == "batch" else self._together(numbers))
        stops = self._points.takes(BEFORE_ACKNOWLEDGEMENT)
        self._points.arm(None)
        if turn.fault is not None:
            if turn.fault in (AFTER_COMMIT, BEFORE_ACKNOWLEDGEMENT):
                self._dispatcher = self._check.dispatcher()
            failed = [number for number in (numbers if stops else failed) if await self._together([number])]
        self.waiting += failed

    async def again(self) -> None:
        """Deliver what waits once more, in its order."""
        waiting, self.waiting = self.waiting, []
        for number in waiting:
            self.waiting += self._held([number]) or await self._together([number])

    def _held(self, numbers: Sequence[int]) -> list[int]:
        """Return the messages that come after one of the same key that waits."""
        if self._keys is None:
            return []
        waiting = {self._keys[number] for number in self.waiting}
        return [number for number in numbers if self._keys[number] in waiting]

    async def _together(self, numbers: Sequence[int]) -> list[int]:
        errors = await asyncio.gather(*(self._deliver(number) for number in numbers))
        return self._noted(numbers, errors)

    async def _batch(self, numbers: Sequence[int]) -> list[int]:
        try:
            await self._call(None, self._dispatcher.deliver_batch, [self._messages[number] for number in numbers])
        except BatchFailed as failed:
            return self._noted(numbers, [each.error for each in failed.deliveries])
        except Exception as error:  # noqa: BLE001  # reported if the messages are never acknowledged
            return self._noted(numbers, [error] * len(numbers))
        return self._noted(numbers, [None] * len(numbers))

    async def _deliver(self, number: int) -> Exception | None:
        try:
            await self._call(number, self._dispatcher.deliver, self._messages[number])
        except Exception as error:  # noqa: BLE001  # reported if the message is never acknowledged
            return error
        return None

    async def _call(self, number: int | None, deliver: Callable[..., Any], given: Any) -> None:
        with self._points.delivery(number):
            if self._check._sync_engine.dialect.is_async:
                await deliver(given)
            else:
                await asyncio.to_thread(deliver, given)

    def _noted(self, numbers: Sequence[int], errors: Sequence[Any]) -> list[int]:
        failed = [number for number, error in zip(numbers, errors, strict=True) if error is not None]
        if len(failed) < len(numbers):
            self._failures, self._progressed = 0, time.monotonic()
        else:
            self._failures += 1
        self.error = next((error for error in errors if error is not None), self.error)
        return failed


def maker_of(given: Any) -> Callable[[], list[Any]]:
    """Return a function that makes the projectors of a new worker: of a projector, or of what makes one."""
    several = list(given) if isinstance(given, (list, tuple)) else [given]

    def made(each: Any) -> Any:
        if isinstance(each, (type, types.FunctionType, partial)):
            return each()
        try:
            return copy.deepcopy(each)
        except Exception as error:
            raise UnusableError(
                f"exactly_once makes a new projector for each worker, and cannot copy this one ({error}); give a "
                "function without arguments that makes it, or its class"
            ) from error

    return lambda: [made(each) for each in several]


def create_engine_for(projector: Any, url: str | URL | Path, **arguments: Any) -> Engine | AsyncEngine:
    """Return an engine for the projectors: an AsyncEngine if their handlers are ``async def``.

    ``url`` is a URL, or the path of an SQLite file. The other arguments are those of ``create_engine``.
    """
    asynchronous = any(handler.is_async for handler in handlers_of_all(maker_of(projector)()))
    if isinstance(url, Path):
        url = URL.create("sqlite+aiosqlite" if asynchronous else "sqlite", database=str(url))
    if make_url(url).get_backend_name() == "sqlite":
        arguments.setdefault("connect_args", {"timeout": 0.2})
    return create_async_engine(url, **arguments) if asynchronous else create_engine(url, **arguments)


def _message(given: Any) -> Any:
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], (str, UUID)):
        return Message(*given)
    return given


def _key(message: Any, ordered: bool | Callable[[Any], Hashable]) -> Hashable:
    body = message.body if isinstance(message, Message) else message
    return ordered(body) if callable(ordered) else None


def _drop(connection: Connection, tables: Sequence[Table]) -> None:
    for table in reversed(tables):
        table.drop(connection)
