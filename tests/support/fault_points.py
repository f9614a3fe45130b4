"""Fault points: every step of a delivery, as it goes over the wire, and the faults that a worker can meet just there.

    with Worker(driver, database) as worker:
        worker.deliver(SCENARIOS["new message"])                 # no fault happens; the points are listed
        worker.points.passed                                     # [..., before COMMIT, after COMMIT, ...]
        worker.deliver(SCENARIOS["new message"], 7, Fault.CUT)   # the connection is cut at point 7

A round trip has two points. `before`: the server has not seen it. `after`: the server has answered, and the client has
not heard. They come from a proxy, so whatever a driver or the library sends has its points, and nothing that is sent
can be forgotten. SQLite has no wire: there each call of sqlite3 that does something has two points. The other points
lie where the library calls something else: the pool, the handler, the log.

The library has no code for this, and no listener of SQLAlchemy's is attached, so the points are those of production.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import sqlite3
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, Self

from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import PoolProxiedConnection

from cut_proxy import CutProxy
from databases import Database, Driver
from projector_dedup import AsyncDispatcher, Dispatcher, Message, Outcome, on, projector
from projector_dedup.commands import AsyncCall, AsyncCommands, Call, Commands, Handled, command, json
from projector_dedup.errors import BatchFailed
from projector_dedup.inherited import leave_to_parent
from projector_dedup.options import RetryPolicy
from projector_dedup.outcome import Delivery
from rig import HANDLER, Total

BLOCK_IN_C = {"psycopg2", "MySQLdb"}
"""Drivers that return to Python, and so to a signal's handler, when the server has answered."""
PATIENCE = 10.0
_TABLES = re.compile(r"\b(INSERT INTO|(?<!DO )(?<!FOR )(?<!KEY )UPDATE|DELETE FROM|(?<!DELETE )FROM|JOIN) ([\w.]+)")


class Fault(Enum):
    """The faults that a worker can meet."""

    RAISE = "an Exception is raised, by a signal handler where the worker waits for the server"
    INTERRUPT = "the same, a KeyboardInterrupt"
    KILL = "kill -9"
    CUT = "the connection is cut; SQLite has none, there the call ends in an I/O error"
    CANCEL = "the task is cancelled, while the server's answer is on its way"

    def can_happen(self, driver: Driver, point: "Point") -> bool:
        """True if a worker with that driver can meet this fault at the point."""
        match self:
            case Fault.RAISE | Fault.INTERRUPT:  # an exception that is raised in an event loop ends the loop
                return not (driver.is_async and point.is_sent)
            case Fault.CUT:
                return driver.engine != "sqlite" or point.is_sent
            case Fault.CANCEL:
                return driver.is_async
            case Fault.KILL:
                return True


class RaisedError(Exception):
    """The Exception of `Fault.RAISE`, of a kind that nobody else raises."""


class Point(NamedTuple):
    """A step of a delivery, and whether it was reached before or after it."""

    where: str
    step: str
    is_sent: bool = False

    def __str__(self) -> str:
        return f"{self.where} {self.step}"


class Points:
    """The points that a delivery passes, in order; at one of them `strike` is called, once."""

    def __init__(self, at: int | None, strike: Callable[[Point], None]) -> None:
        self.passed: list[Point] = []
        self.struck: Point | None = None
        self.counting = False
        self._at = at
        self._strike = strike

    def reach(self, where: str, step: str, *, is_sent: bool = False) -> None:
        """Record that the delivery has reached a point, and make the fault happen if this is its point."""
        if not self.counting:
            return
        point = Point(where, step, is_sent)
        self.passed.append(point)
        if self._at == len(self.passed) - 1:
            self.counting = False
            self.struck = point
            self._strike(point)


# What is delivered --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """Messages that are delivered first, one by one and without a fault; then those of the delivery under test."""

    warm: tuple[int, ...]
    messages: tuple[int, ...]
    is_batch: bool = False
    is_command: bool = False

    @property
    def table(self) -> str:
        """The table that has a row for each message that was handled."""
        return "processed_command" if self.is_command else "processed_message"

    @property
    def input(self) -> set[int]:
        """All messages of both kinds; each must count once."""
        return {*self.warm, *self.messages}


SCENARIOS = {
    "first message": Scenario((), (1,)),  # of a new engine, on an empty read model
    "new message": Scenario((1, 2), (3,)),
    "redelivery": Scenario((1, 2), (2,)),
    "batch": Scenario((1,), (2, 1, 7), is_batch=True),  # one is a redelivery, one creates its row
    "command": Scenario((1, 2), (3,), is_command=True),
    "command, again": Scenario((1, 2), (2,), is_command=True),
}


def message(number: int) -> Message:
    """Message `number`, which adds that number to one of three accounts, and to the sum of all."""
    return Message(f"m-{number}", {"account": "b" if number == 7 else "a", "amount": number}, type="added")


def number_of(message_id: object) -> int:
    """The number of a message, by its id as a driver gives it."""
    text = message_id.decode() if isinstance(message_id, bytes) else str(message_id)
    return int(text.rpartition("m-")[2])


def totals_of(numbers: Iterable[int]) -> dict[str, int]:
    """The read model after messages, computed from the messages."""
    totals: Counter[str] = Counter()
    for number in numbers:
        totals.update({("b" if number == 7 else "a"): number, "all": number})
    return dict(totals)


def add(happened: Any, session: Session) -> None:
    """A handler of ordinary ORM code: read the account, create it if missing, add."""
    total = session.get(Total, happened["account"])
    if total is None:
        total = Total(account=happened["account"], amount=0)
        session.add(total)
    total.amount += happened["amount"]


def _apply(happened: dict[str, Any], session: Session) -> None:
    """Change two rows: the first is flushed here, the second by the COMMIT."""
    add(happened, session)
    session.flush()
    add(happened | {"account": "all"}, session)


class Desk:
    """Handles commands as a dispatcher delivers messages, and believes no answer but the right one."""

    def __init__(self, commands: Any, operation: Any) -> None:
        self._commands, self._operation = commands, operation

    def deliver(self, asked: Message) -> Any:
        """Handle the message as a command, under its id as the key."""
        answer = self._commands.handle(self._operation, asked.body, key=asked.id)
        return self._awaited(asked, answer) if asyncio.iscoroutine(answer) else self._checked(asked, answer)

    async def _awaited(self, asked: Message, answer: Any) -> Delivery:
        return self._checked(asked, await answer)

    def _checked(self, asked: Message, answer: Handled[Any]) -> Delivery:
        assert answer.result == answer_to(asked.body), "another answer than the one that was recorded"
        return Delivery(str(asked.id), {HANDLER: answer.outcome})


def answer_to(happened: dict[str, Any]) -> dict[str, Any]:
    """The result of a command, computed from the command."""
    return {"account": happened["account"], "twice": 2 * happened["amount"]}


# Who delivers it ----------------------------------------------------------------------------------------------------


class Worker:
    """An engine and a dispatcher, which can meet a fault while they deliver. Make it in the main thread.

    One that is not ``is_watched`` has no proxy before its server, and so no points there.
    """

    def __init__(
        self, driver: Driver, database: Database, *, is_watched: bool = True, is_command: bool = False
    ) -> None:
        self.driver = driver
        self._is_command = is_command
        self._is_watched = is_watched and driver.engine != "sqlite"
        self.points = Points(None, self._strike)
        self._database = database
        self._open = contextlib.ExitStack()
        self._heard = True  # the signal, by the main thread
        self._sending = False

    def __enter__(self) -> Self:
        self._url = self._database.url(self.driver.drivername)
        if self._is_watched:
            self._proxy = self._open.enter_context(CutProxy(self._url))
            self._proxy.at_trip = lambda where, trip: self.points.reach(where, shown(trip), is_sent=True)
            self._url = self._proxy.through(self._url)
        self._runner = self._open.enter_context(asyncio.Runner()) if self.driver.is_async else None
        self._open.enter_context(self._log_stops())
        self._open.enter_context(self._signals_raise())
        self._new_engine()
        self._open.callback(lambda: self._run(self._engine.dispose))
        self._new_dispatcher()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @property
    def engine(self) -> Engine:
        """The engine, or the one inside the AsyncEngine."""
        return self._engine.sync_engine if isinstance(self._engine, AsyncEngine) else self._engine

    def _new_engine(self) -> None:
        arguments = {"factory": _Connection, "timeout": 1.0} if self.driver.engine == "sqlite" else {}
        create: Callable[..., Any] = create_async_engine if self.driver.is_async else create_engine
        self._engine: Engine | AsyncEngine = create(self._url, connect_args=arguments)

    def _new_dispatcher(self) -> None:
        leave_to_parent(self.engine)  # a forked process gets a new pool anyway, at its first delivery
        self.engine.pool.connect = partial(self._take, self.engine.pool.connect)  # type: ignore[method-assign]  # a listener would be heard
        self._dispatcher = self._dispatcher_on(self._engine)

    def _take(self, take: Callable[[], PoolProxiedConnection]) -> PoolProxiedConnection:
        connection = take()
        try:
            self.points.reach("after", "the connection is taken")
        except BaseException:
            connection.close()  # as SQLAlchemy does where a listener raises
            raise
        return connection

    def _dispatcher_on(self, engine: Engine | AsyncEngine) -> Any:
        declared, retry = projector(idempotent=True, name=HANDLER), RetryPolicy(base=0.0005)
        added = on("added")

        def handler(happened: dict[str, Any], session: Session) -> None:
            self.points.reach("before", "the handler")
            _apply(happened, session)
            self.points.reach("after", "the handler")

        async def awaited(happened: dict[str, Any], session: AsyncSession) -> None:
            await session.run_sync(lambda inner: handler(happened, inner))

        if self._is_command:
            return self._desk_on(engine, handler, retry)
        if isinstance(engine, AsyncEngine):
            return AsyncDispatcher(async_sessionmaker(engine), declared(added(awaited)), retry=retry)
        return Dispatcher(sessionmaker(engine), declared(added(handler)), retry=retry)

    def _desk_on(self, engine: Engine | AsyncEngine, handler: Callable[..., None], retry: RetryPolicy) -> Desk:
        def direct(happened: dict[str, Any], call: Call) -> dict[str, Any]:
            handler(happened, call.session)
            return answer_to(happened)

        async def awaited(happened: dict[str, Any], call: AsyncCall) -> dict[str, Any]:
            await call.session.run_sync(lambda inner: handler(happened, inner))
            return answer_to(happened)

        declared = command(name=HANDLER, codec=json)
        if isinstance(engine, AsyncEngine):
            return Desk(AsyncCommands(async_sessionmaker(engine), retry=retry), declared(awaited))
        return Desk(Commands(sessionmaker(engine), retry=retry), declared(direct))

    @contextlib.contextmanager
    def _log_stops(self) -> Iterator[None]:
        """Put a point where the outcome is logged, which is right before the caller gets it."""

        def look(record: logging.LogRecord) -> bool:
            if getattr(record, "outcome", None) in (Outcome.APPLIED.value, Outcome.DUPLICATE.value):
                self.points.reach("before", "the answer is given")
            return True

        logger = logging.getLogger("projector_dedup")
        level = logger.level
        logger.addFilter(look)
        logger.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            logger.setLevel(level)
            logger.removeFilter(look)

    def deliver(self, scenario: Scenario, at: int | None = None, fault: Fault | None = None) -> "Told":
        """Deliver the messages of the scenario, the last delivery through all points; the fault happens at point `at`.

        Connections and dispatcher are new each time. The engine is new only for a scenario without earlier messages.
        """
        self.points, self._fault = Points(at, self._strike), fault
        self._heard = False
        self._run(self._engine.dispose)
        if not scenario.warm:
            self._new_engine()
        self._new_dispatcher()
        _Connection.points = self.points
        for number in scenario.warm:
            self.redeliver(number)
        batch = [message(number) for number in scenario.messages]
        try:
            if self._runner:
                deliveries = self._runner.run(self._adeliver(batch, scenario.is_batch))
            else:
                self.points.counting = True
                self.points.reach("before", "the connection is taken")
                deliver = self._dispatcher.deliver_batch if scenario.is_batch else self._dispatcher.deliver
                deliveries = deliver(batch if scenario.is_batch else batch[0])
        except BatchFailed as failed:
            return Told(_settled(failed.deliveries), failed)
        except (KeyboardInterrupt, asyncio.CancelledError, Exception) as error:  # noqa: BLE001  # for the test to judge
            return Told(set(), error.with_traceback(None))
        finally:
            self.points.counting = False
            while self._sending:  # no signal comes after this delivery
                time.sleep(0.001)
            self._let_loop_run()
        return Told(_settled(deliveries if scenario.is_batch else [deliveries]), None)

    async def _adeliver(self, batch: list[Message], is_batch: bool) -> Any:
        self._task, self._loop = asyncio.current_task(), asyncio.get_running_loop()
        self.points.counting = True
        self.points.reach("before", "the connection is taken")
        if is_batch:
            return await self._dispatcher.deliver_batch(batch)
        return await self._dispatcher.deliver(batch[0])

    def _let_loop_run(self) -> None:
        """An event loop that has stopped closes no connection: a transport closes its socket when the loop runs on."""
        for _ in range(3 if self._runner else 0):
            self._run(asyncio.sleep, 0)

    def redeliver(self, number: int) -> Outcome:
        """Deliver one message without any points."""
        outcome: Outcome = self._run(self._dispatcher.deliver, message(number)).outcome
        return outcome

    def redeliver_all(self, numbers: Iterable[int]) -> list[Outcome]:
        """Deliver messages in one batch without any points; a desk handles its commands one by one."""
        if self._is_command:
            return list(map(self.redeliver, numbers))
        deliveries = self._run(self._dispatcher.deliver_batch, list(map(message, numbers)))
        return [delivery.outcome for delivery in deliveries]

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        result = function(*arguments)
        return self._runner.run(result) if self._runner else result

    # The faults ----------------------------------------------------------------------------------------------------

    def _strike(self, point: Point) -> None:
        """Make the fault happen.

        Called in the worker's main thread, or in a thread whose answer the main thread or its event loop waits for.
        """
        here = threading.current_thread() is threading.main_thread()
        match self._fault:
            case Fault.KILL:
                os.kill(os.getpid(), signal.SIGKILL)
            case Fault.RAISE if here:
                raise RaisedError
            case Fault.INTERRUPT if here:
                raise KeyboardInterrupt
            case Fault.RAISE | Fault.INTERRUPT:
                self._raise_in_main_thread(RaisedError if self._fault is Fault.RAISE else KeyboardInterrupt)
            case Fault.CUT if self.driver.engine == "sqlite":
                raise _io_error()
            case Fault.CUT if point.is_sent:
                raise EOFError  # tells the proxy to cut the connection
            case Fault.CUT:
                self._proxy.hang_up()
            case Fault.CANCEL if here:
                self._cancel()
            case Fault.CANCEL:
                told = threading.Event()
                self._loop.call_soon_threadsafe(self._cancel_and_tell, told)
                assert told.wait(PATIENCE)

    def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()

    def _cancel_and_tell(self, told: threading.Event) -> None:
        self._cancel()
        self._loop.call_soon(told.set)  # when the task knows of it; by then the loop cannot have stopped

    def _raise_in_main_thread(self, kind: type[BaseException]) -> None:
        self._kind, self._sending = kind, True
        main, deadline = threading.main_thread().ident or 0, time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            signal.pthread_kill(main, signal.SIGUSR1)  # again, if the first came just before it began to wait
            if self._is_heard_within(0.5):  # psycopg looks at signals ten times a second, if none comes meanwhile
                break
        self._sending = False

    def _is_heard_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not (self._heard or self.driver.module in BLOCK_IN_C) and time.monotonic() < until:
            time.sleep(0.001)
        return self._heard or self.driver.module in BLOCK_IN_C

    @contextlib.contextmanager
    def _signals_raise(self) -> Iterator[None]:
        """Let a signal raise an exception in the main thread, wherever it waits. A lock could be left held by that."""

        def handle(_signal: int, frame: FrameType | None) -> None:
            if frame is not None and frame.f_code.co_filename == weakref.__file__:
                # Python swallows what is raised in the callback of a weak reference: come again, when it has ended.
                signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            elif not self._heard:
                self._heard = True
                raise self._kind

        before = signal.signal(signal.SIGUSR1, handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, before)


@dataclass(frozen=True)
class Told:
    """The answer of a delivery: the messages that are settled, and the error that was raised."""

    settled: set[int]
    error: BaseException | None


def _settled(deliveries: Sequence[Delivery]) -> set[int]:
    done = (each for each in deliveries if each.outcome in (Outcome.APPLIED, Outcome.DUPLICATE))
    return {number_of(each.message_id) for each in done}


def shown(trip: Sequence[str]) -> str:
    """Return the statements of a trip: their first words, and their table."""
    statements = [statement for each in trip if (statement := each.partition(": ")[2])] or trip
    return "; ".join(dict.fromkeys(map(_short, statements)))


def _short(statement: str) -> str:
    words = " ".join(statement.strip(";").split())
    tables = [" ".join(found) for found in _TABLES.findall(words)][:3]
    if not tables:
        return words[:60]
    return " ".join(dict.fromkeys(["SELECT"] * words.startswith("SELECT") + tables))


# Where there is no wire ---------------------------------------------------------------------------------------------


def _io_error() -> sqlite3.OperationalError:
    """An error as sqlite3 raises it when the disk fails."""
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode, error.sqlite_errorname = sqlite3.SQLITE_IOERR, "SQLITE_IOERR"
    return error


class _Cursor(sqlite3.Cursor):
    def execute(self, sql: str, *parameters: Any) -> Any:
        with _step(sql):
            return super().execute(sql, *parameters)

    def executemany(self, sql: str, *parameters: Any) -> Any:
        with _step(sql):
            return super().executemany(sql, *parameters)

    def executescript(self, sql: str) -> Any:
        with _step(sql):
            return super().executescript(sql)


class _Connection(sqlite3.Connection):
    points: Points
    """The points of the worker that delivered last."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        sqlite3.Connection.execute(self, "PRAGMA synchronous = OFF")  # no machine fails here, only processes do

    def cursor(self, *_: Any) -> Any:
        return super().cursor(_Cursor)

    def commit(self) -> None:
        with _step("COMMIT") if self.in_transaction else contextlib.nullcontext():
            super().commit()

    def rollback(self) -> None:
        with _step("ROLLBACK") if self.in_transaction else contextlib.nullcontext():
            super().rollback()


@contextlib.contextmanager
def _step(sql: str) -> Iterator[None]:
    _Connection.points.reach("before", _short(sql), is_sent=True)
    yield
    _Connection.points.reach("after", _short(sql), is_sent=True)
