"""A check delivers a user's messages by many schedules, and compares the result with what the user computed from them.

`Check` has what the checks of projectors, commands and effects share: the database, the schedules and the report. Each
of `exactly_once`, `answered_once` and `settled` beside this file is a check. The pytest plugin `pytest_projector_dedup`
calls them.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import signal
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from sqlalchemy import URL, MetaData, Table, create_engine, delete, make_url, select
from sqlalchemy import inspect as inspect_database
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.schema import sort_tables_and_constraints

from ..commands.record import RecordKey
from ..errors import BatchFailed, ProjectorDedupError
from ..message import Message, id_text
from ..options import RetryPolicy
from ..tables import DedupTables
from ..verdict import Action, verdict_of
from .fault_points import (
    AFTER_COMMIT,
    BEFORE_ACKNOWLEDGEMENT,
    KILLED,
    FaultPoints,
    end_with_parent,
    faults_on,
    kill_this_process,
    told,
)
from .schedules import How, Schedule, Turn, is_allowed, is_reordered, schedules, smaller, smallest, split

SHRINKING = 3.0
"""Seconds after which no smaller schedule is tried."""
STUCK = 2.0
"""Seconds without any acknowledgement after which a message counts as one that cannot be applied."""
LIFETIME = 10.0
"""Seconds after which a process that was forked to be killed counts as one that hangs."""


class UnusableError(Exception):
    """Raised if the arguments of a check do not fit. The text says what to change."""


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
    ordered: bool  #: True if the user has declared an order, or cannot declare one

    def lines(self, names: Sequence[str]) -> Iterator[str]:
        """Yield the report, with the names of the messages, line by line."""
        yield self.failure.text
        if not self.ordered and is_reordered(self.schedule):
            yield "These messages do not come in the order of your list. If your broker keeps their order, declare it:"
            yield "ordered=True, or ordered=lambda event: event.account_id for the order of each account."
        if not self.schedule:  # every schedule passes
            return
        yield "The smallest schedule that fails:"
        for number, turn in enumerate(self.schedule, 1):
            yield f"  {number}. {_line_of(turn, names)}"


def _line_of(turn: Turn, names: Sequence[str]) -> str:
    at_once = "deliver at the same time"
    how = {"burst": at_once, "batch": "deliver as one batch", "beside": f"{at_once}, every other one in a batch"}
    text = f"{how.get(turn.how, 'deliver')}: {', '.join(names[number] for number in turn.messages)}"
    return text if turn.fault is None else f"{text}; {told(turn.fault)}"


class Check(ABC):
    """A subject, the messages for it, and the value that ``read`` must return after them.

    ``engine`` is an Engine or an AsyncEngine. The other arguments are those of the fixtures. Raises ``UnusableError``
    if they do not fit.
    """

    name: ClassVar[str]  #: of the fixture
    hows: tuple[How, ...] = ("deliver", "burst")

    def __init__(
        self,
        messages: Sequence[Any],
        default_tables: DedupTables,
        *,
        kills: bool = True,
        redelivers: bool = False,
        expected: Any,
        read: Callable[[Session], Any],
        engine: Engine | AsyncEngine,
        metadata: MetaData | None = None,
        ordered: bool | Callable[[Any], Hashable] = False,
        reset: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        self._given = list(messages)
        self._check_arguments(metadata=metadata, ordered=ordered, functions={"read": read, "reset": reset})
        self.messages = [self.message_of(each) for each in self._given]
        self._expected, self._read, self._reset = expected, read, reset
        self.keys = None if ordered is False else [_key(each, ordered) for each in self.messages]
        self.engine = engine
        self.sync_engine = engine.sync_engine if isinstance(engine, AsyncEngine) else engine
        if self.sync_engine.dialect.name == "sqlite" and self.sync_engine.url.database in (None, "", ":memory:"):
            raise UnusableError(f"{self.name} needs a database with several connections; give an SQLite file")
        self._metadata = metadata
        self._kills, self.redelivers = kills, redelivers
        self.tables: DedupTables = options.get("tables", default_tables)
        self.options = {"retry": RetryPolicy(base=0.001, within=0.3), **options}
        self.points = FaultPoints(self.sync_engine)
        self.session_factory: Any = (
            async_sessionmaker(engine) if isinstance(engine, AsyncEngine) else sessionmaker(engine)
        )

    def _check_arguments(self, *, metadata: Any, ordered: Any, functions: Mapping[str, Any]) -> None:
        if not self._given:
            raise UnusableError(f"{self.name}: there are no messages; give at least one")
        if not isinstance(metadata, MetaData | None):
            raise UnusableError(f"{self.name}: metadata= takes a MetaData, not {metadata!r}; give Base.metadata")
        if not isinstance(ordered, bool) and not callable(ordered):
            raise UnusableError(f"{self.name}: ordered= takes no {ordered!r}; give True, or a function of the event")
        for name, function in functions.items():
            is_left_out = function is None and name == "reset"
            if not is_left_out and (not callable(function) or inspect.iscoroutinefunction(function)):
                raise UnusableError(f"{self.name}: {name}= takes no {function!r}; give a plain function")

    # What a check has of its own -------------------------------------------------------------------------------------

    @abstractmethod
    def message_of(self, given: Any) -> Any:
        """Return the message that a worker gets, for one that the user gave."""

    def name_of(self, message: Any) -> str:
        """Return the name of a message in a report: the id of a ``Message``, otherwise a shortened ``repr``."""
        return str(id_text(message) if isinstance(message, Message) else repr(message)[:80])

    @abstractmethod
    def worker(self) -> Any:
        """Return what delivers, as a new worker has it: ``deliver(message)``, a coroutine if the engine is async."""

    @property
    def faults(self) -> tuple[str, ...]:
        """The faults of the schedules."""
        return tuple(each for each in self.all_faults() if self._kills or not each.startswith(KILLED))

    def all_faults(self) -> Sequence[str]:
        """Return the faults that can be made here."""
        return faults_on(self.sync_engine)

    def difference(self) -> Failure | None:
        """Return what differs in another process although the read model is right."""
        return None

    def begin(self) -> None:
        """Forget what the last schedule has left outside the database."""
        if self._reset is not None:
            self._reset()

    async def before_again(self) -> None:  # noqa: B027  # effects have something to do
        """Do what happens before messages are delivered again."""

    async def complaint(self, delivered: Sequence[int]) -> Failure | None:  # noqa: ARG002  # by those that have one
        """Return what is wrong although the read model may be right."""
        return None

    def unended(self, number: int, error: Exception | None) -> Failure | None:
        """Return what is wrong with a message that was never acknowledged."""
        kind = f"not acknowledged: {type(error).__name__}"
        return Failure(kind, f"Message {self.names[number]} is never acknowledged: {type(error).__name__}: {error}")

    def counted(self, delivered: Sequence[int]) -> list[Any]:
        """Return the messages, as the user gave them, from which the expected value is computed."""
        return [self._given[number] for number in delivered]

    # Running ---------------------------------------------------------------------------------------------------------

    @property
    def ordered(self) -> bool:
        """True if the user has declared an order, or cannot declare one."""
        return self.keys is not None

    @property
    def names(self) -> list[str]:
        """The names of the messages in a report."""
        return [self.name_of(each) for each in self.messages]

    def run(self, seed: int, count: int) -> Report | None:
        """Run ``count`` generated schedules, after the usual ones; return a report of the first that fails."""
        if count < 0:
            raise UnusableError(f"{self.name}: schedules= takes no {count}; give 0 or more")
        generated = schedules(len(self.messages), self.keys, self.hows, self.faults, seed, count)
        with self._ready() as fails:
            for tried, schedule in enumerate(generated, 1):
                if (failure := fails(schedule)) is not None:
                    return self._shrunk(schedule, failure, fails, tried)
        failure = self.difference()
        return None if failure is None else Report(failure, (), tried, ordered=True)

    def run_one(self, schedule: Sequence[Any]) -> Report | None:
        """Run one schedule, given as tuples ``(how, positions of messages, fault or None)``."""
        try:
            given = tuple(Turn(how, tuple(numbers), fault) for how, numbers, fault in schedule)
        except (TypeError, ValueError) as error:
            raise UnusableError(
                f"{self.name}: schedule= takes no {schedule!r}; give tuples (how, positions of messages, fault or None)"
            ) from error
        for turn in given:
            known = turn.how in self.hows and turn.fault in (None, *self.faults)
            if not known or not turn.messages or not {*turn.messages} <= {*range(len(self.messages))}:
                raise UnusableError(
                    f"{self.name}: {tuple(turn)} is no step of a schedule on this database; give "
                    f"{', '.join(self.hows)}, the positions of messages in the list, and None or one of "
                    f"{', '.join(self.faults)}"
                )
        with self._ready() as fails:
            failure = fails(given)
        return None if failure is None else Report(failure, given, 1, self.ordered)

    def _shrunk(
        self, schedule: Schedule, failure: Failure, fails: Callable[[Schedule], Failure | None], tried: int
    ) -> Report:
        until = time.monotonic() + SHRINKING
        may_drop = callable(self._expected)

        def candidates(schedule: Schedule) -> Iterator[Schedule]:
            return (
                each
                for each in smaller(schedule, may_drop=may_drop)
                if is_allowed(each, self.keys) and time.monotonic() < until
            )

        def fails_alike(candidate: Schedule) -> bool:
            nonlocal failure
            found = fails(candidate)
            if found is None or found.kind != failure.kind:
                return False
            failure = found
            return True

        schedule = smallest(schedule, candidates, fails_alike)
        return Report(failure, schedule, tried, self.ordered)

    # The database ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _ready(self) -> Iterator[Callable[[Schedule], Failure | None]]:
        """Create the tables, and yield the function that runs a schedule; drop in the end what was created."""
        with asyncio.Runner() as runner:
            missing: list[Table] = []
            try:
                missing = runner.run(self.on_connection(self._missing))
                runner.run(self.on_connection(lambda connection: _each(missing, MetaData.create_all, connection)))
                try:
                    with self.points.watching():
                        yield lambda schedule: runner.run(self._run(schedule))
                finally:
                    runner.run(self.on_connection(self._empty))
            finally:  # also if only some of them could be created
                runner.run(self.on_connection(lambda connection: _each(missing, MetaData.drop_all, connection)))
                runner.run(self.dispose())

    def _missing(self, connection: Connection) -> list[Table]:
        """Return the tables that are not there. Raises ``UnusableError`` if one that is there has rows."""
        markers = self.tables.marker.metadata
        if self._metadata is None:
            self._metadata = MetaData()
            self._metadata.reflect(connection)
            if not {*self._metadata.tables} - {*markers.tables}:
                raise UnusableError(
                    f"{self.name}: the database has no table of a read model; give metadata=Base.metadata, or create "
                    "the tables in the fixture projector_dedup_engine"
                )
        named = {table.fullname: table for metadata in (markers, self._metadata) for table in metadata.sorted_tables}
        self._refuse_cycles(connection, [*named.values()])
        missing = [each for each in named.values() if not _is_there(connection, each)]
        state = self.tables.state.fullname
        self._emptied = [each for each in named.values() if each.fullname not in (state, "alembic_version")]
        for table in (each for each in self._emptied if each not in missing):
            if connection.execute(select(table).limit(1)).first() is not None:
                raise UnusableError(
                    f"{self.name} deletes all rows of the table {table.fullname}, which is not empty; give "
                    "it an empty database"
                )
        return missing

    def _refuse_cycles(self, connection: Connection, tables: Sequence[Table]) -> None:
        *_, (_, later) = sort_tables_and_constraints(tables)  # type: ignore[no-untyped-call]
        if later and connection.dialect.name == "postgresql":
            names = ", ".join(sorted({each.table.fullname for each in later}))
            raise UnusableError(
                f"{self.name} cannot delete the rows of {names}, whose foreign keys form a cycle or have use_alter; "
                "prove the handler with SQLite or MariaDB"
            )

    def _empty(self, connection: Connection) -> None:
        is_mariadb = connection.dialect.name in ("mysql", "mariadb")
        if is_mariadb:  # which otherwise refuses to delete a row before those of the same table that refer to it
            connection.exec_driver_sql("SET SESSION foreign_key_checks = 0")
        for table in reversed(self._emptied):
            connection.execute(delete(table))
        if is_mariadb:
            connection.exec_driver_sql("SET SESSION foreign_key_checks = 1")

    async def on_connection(self, work: Callable[[Connection], Any]) -> Any:
        """Call ``work`` in a transaction of its own."""
        if isinstance(self.engine, AsyncEngine):
            async with self.engine.begin() as connection:
                return await connection.run_sync(work)
        with self.engine.begin() as connection:
            return work(connection)

    async def _value(self) -> Any:
        """Read the read model, by a connection that was opened after the last COMMIT."""
        await self.dispose()
        if isinstance(self.engine, AsyncEngine):
            async with AsyncSession(self.engine) as session:
                return await session.run_sync(self._read)
        with Session(self.engine) as session:
            return self._read(session)

    async def dispose(self) -> None:
        """Close the connections of the pool."""
        if isinstance(self.engine, AsyncEngine):
            await self.engine.dispose()
        else:
            self.engine.dispose()

    # One schedule ----------------------------------------------------------------------------------------------------

    async def _run(self, schedule: Schedule) -> Failure | None:
        await self.on_connection(self._empty)
        self.begin()
        workers = Workers(self)
        for turn in schedule:
            if not workers.is_stuck:
                await workers.take(turn)
        while workers.waiting and not workers.is_stuck:
            await workers.again()
        if workers.rejected is not None:
            number, error = workers.rejected
            said = f"Message {self.names[number]} becomes a dead letter: {type(error).__name__}: {error}"
            if not isinstance(error, ProjectorDedupError):  # whose text says what to do
                said += (
                    "\nRaise Defer to wait for another message, or give redelivers=True if your broker repeats each."
                )
            return Failure(f"rejected: {type(error).__name__}", said)
        if workers.waiting and (failure := self.unended(workers.waiting[0], workers.error)) is not None:
            return failure
        delivered = sorted({number for turn in schedule for number in turn.messages})
        if (complaint := await self.complaint(delivered)) is not None:
            return complaint
        try:
            value, expected = await self._value(), self._expected
            if callable(expected):
                expected = expected(self.counted(delivered))
        except Exception as error:  # noqa: BLE001  # reported: a message whose write is missing may be the cause
            kind = f"read or expected raised {type(error).__name__}"
            return Failure(kind, f"The value cannot be read or computed: {type(error).__name__}: {error}")
        if value == expected:
            return None
        return Failure("wrong", f"The read model is wrong:\n  expected {expected!r}\n  but got  {value!r}")


class Request(NamedTuple):
    """One request of a caller, for a command or an effect."""

    key: Any
    body: Any
    scope: Any = None


class KeyedCheck(Check):
    """A check whose messages are requests with a key."""

    def message_of(self, given: Any) -> Request:
        """Return the request of a tuple. Raises ``UnusableError`` for anything else, and if there is no key."""
        if not isinstance(given, tuple) or not 2 <= len(given) <= 3 or given[0] is None:
            raise UnusableError(f"{self.name}: {given!r} is no request with a key; give (key, request, scope if any)")
        return Request(*given)

    def name_of(self, message: Request) -> str:
        """Return the key."""
        return str(message.key)

    def counted(self, delivered: Sequence[int]) -> list[Any]:
        """Return one request for each key."""
        first: dict[str, int] = {}
        for number in delivered:
            first.setdefault(self.stored_key(number), number)
        return super().counted([*first.values()])

    def stored_key(self, number: int) -> str:
        """Return the scope and the key of a request as the table has them."""
        request: Request = self.messages[number]
        return RecordKey.of(request.key, request.scope).stored


class Workers:
    """Deliver the messages of a schedule, and deliver again what was not acknowledged, as a broker does."""

    def __init__(self, check: Check) -> None:
        self._check, self._points = check, check.points
        self._messages, self._keys = check.messages, check.keys
        self._worker = check.worker()
        self.waiting: list[int] = []  # what was not acknowledged, by position
        self.error: Exception | None = None  # the last one
        self.rejected: tuple[int, Exception] | None = None  # the first message that a consumer rejects, by position
        self._failures = 0  # in a row
        self._progressed = time.monotonic()

    @property
    def is_stuck(self) -> bool:
        """True if a message was rejected, or all that wait have failed several times since the last acknowledgement."""
        too_long = self._failures > 2 and time.monotonic() - self._progressed > STUCK
        return self.rejected is not None or too_long or self._failures > 3 * len(self.waiting) + 3

    async def take(self, turn: Turn) -> None:
        """Deliver the messages of a turn; if its fault has ended a worker, start a new one and deliver them again."""
        held = self._held(turn.messages)
        numbers = [number for number in turn.messages if number not in held]
        self.waiting += held
        if not numbers:
            return
        batch, alone = split(turn.how, numbers)
        self._points.arm(turn.fault, {*batch[:1], *alone})
        killed = turn.fault is not None and turn.fault.startswith(KILLED)
        if killed:
            failed = numbers if await self._dies(batch, alone) else []
        else:
            failed = await self._at_once(batch, alone)
        stops = self._points.takes(BEFORE_ACKNOWLEDGEMENT)
        self._points.arm(None)
        if turn.fault is not None:
            self.rejected = None  # the fault may be the reason
            if killed or turn.fault in (AFTER_COMMIT, BEFORE_ACKNOWLEDGEMENT):
                self._worker = self._check.worker()
            failed = [number for number in (numbers if stops else failed) if await self._together([number])]
        self.waiting += failed

    async def _dies(self, batch: Sequence[int], alone: Sequence[int]) -> bool:
        """Deliver in a process of its own. Return True if it was killed, or did not acknowledge all messages."""
        await self._check.dispose()  # the process must not inherit connections
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: the waiting threads of a pool
            process = os.fork()
        if not process:
            left: Sequence[int] = [*batch, *alone]
            try:
                end_with_parent()
                left = asyncio.run(self._at_once(batch, alone))
                if self._points.takes(KILLED + BEFORE_ACKNOWLEDGEMENT):
                    kill_this_process()
            finally:
                os._exit(1 if left else 0)
        end = time.monotonic() + LIFETIME
        while (ended := os.waitpid(process, os.WNOHANG)) == (0, 0):  # noqa: ASYNC222  # WNOHANG: it does not wait
            if time.monotonic() > end:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)  # noqa: ASYNC222  # it was killed
                raise UnusableError(
                    f"{self._check.name}: a fork of this process has not delivered within {LIFETIME:g} s; perhaps a "
                    "thread of this process holds a lock that the handler needs; give kills=False"
                )
            await asyncio.sleep(0.002)
        return ended[1] != 0

    async def again(self) -> None:
        """Deliver what waits once more, in its order."""
        await self._check.before_again()
        waiting, self.waiting = self.waiting, []
        for number in waiting:
            self.waiting += self._held([number]) or await self._together([number])

    def _held(self, numbers: Sequence[int]) -> list[int]:
        """Return the messages that come after one of the same key that waits."""
        if self._keys is None:
            return []
        waiting = {self._keys[number] for number in self.waiting}
        return [number for number in numbers if self._keys[number] in waiting]

    async def _at_once(self, batch: Sequence[int], alone: Sequence[int]) -> list[int]:
        """Deliver a batch, and other messages at the same time; return those that were not acknowledged."""
        parts = [each(part) for each, part in ((self._batch, batch), (self._together, alone)) if part]
        return [number for failed in await asyncio.gather(*parts) for number in failed]

    async def _together(self, numbers: Sequence[int]) -> list[int]:
        errors = await asyncio.gather(*(self._deliver(number) for number in numbers))
        return self._noted(numbers, errors)

    async def _batch(self, numbers: Sequence[int]) -> list[int]:
        try:
            given = [_decoded(self._messages[each]) for each in numbers]
            await self._call(numbers[0], self._worker.deliver_batch, given)
        except BatchFailed as failed:
            return self._noted(numbers, [each.error for each in failed.deliveries])
        except Exception as error:  # noqa: BLE001  # reported if the messages are never acknowledged
            return self._noted(numbers, [error] * len(numbers), judged=False)  # consumers deliver one by one then
        return self._noted(numbers, [None] * len(numbers))

    async def _deliver(self, number: int) -> Exception | None:
        try:
            await self._call(number, self._worker.deliver, _decoded(self._messages[number]))
        except Exception as error:  # noqa: BLE001  # reported if the message is never acknowledged
            return error
        return None

    async def _call(self, number: int, deliver: Callable[..., Any], given: Any) -> None:
        with self._points.delivery(number):
            if self._check.sync_engine.dialect.is_async:
                await deliver(given)
            else:
                await asyncio.to_thread(deliver, given)

    def _noted(self, numbers: Sequence[int], errors: Sequence[Any], *, judged: bool = True) -> list[int]:
        for number, error in zip(numbers, errors, strict=True):
            if error is not None and self.rejected is None and judged and not self._check.redelivers:
                self.rejected = (number, error) if verdict_of(error).action is Action.REJECT else None
        failed = [number for number, error in zip(numbers, errors, strict=True) if error is not None]
        if len(failed) < len(numbers):
            self._failures, self._progressed = 0, time.monotonic()
        else:
            self._failures += 1
        self.error = next((error for error in errors if error is not None), self.error)
        return failed


def is_async(subject: Any) -> bool:
    """True if a command or an effect is an ``async def``."""
    return bool(getattr(subject, "asynchronous", False))


def engine_on(url: str | URL | Path, *, asynchronous: bool, **arguments: Any) -> Engine | AsyncEngine:
    """Return an Engine or an AsyncEngine. ``url`` is a URL, or the path of an SQLite file.

    The other arguments are those of ``create_engine``.
    """
    if isinstance(url, Path):
        url = URL.create("sqlite+aiosqlite" if asynchronous else "sqlite", database=str(url))
    if make_url(url).get_backend_name() == "sqlite":
        arguments.setdefault("connect_args", {"timeout": 0.2})
    return create_async_engine(url, **arguments) if asynchronous else create_engine(url, **arguments)


def _key(message: Any, ordered: bool | Callable[[Any], Hashable]) -> Hashable:
    body = message.body if isinstance(message, Message) else message
    return ordered(body) if callable(ordered) else None


def _decoded(message: Any) -> Any:
    """Return a copy of the message, as each delivery of a broker is decoded anew; itself if it cannot be copied."""
    try:
        return copy.deepcopy(message)
    except Exception:  # noqa: BLE001  # whatever the user's class raises
        return message


def _is_there(connection: Connection, table: Table) -> bool:
    schema = connection.schema_for_object(table)  # after the schema_translate_map
    return bool(inspect_database(connection).has_table(table.name, schema))


def _each(tables: Sequence[Table], call: Callable[..., None], connection: Connection) -> None:
    """Call ``create_all`` or ``drop_all`` of the metadata of these tables."""
    for metadata in {table.metadata: None for table in tables}:
        call(metadata, connection, [table for table in tables if table.metadata is metadata])
