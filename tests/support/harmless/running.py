"""Run a program: alone in plain sessions, which is the control, and by the library, in several ways."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from threading import Barrier
from typing import Any, Self

from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.orm.exc import StaleDataError

from databases import DRIVERS, USUAL, Database, Driver
from projector_dedup import AsyncDispatcher, BatchFailed, Dispatcher, Message, Outcome, on, projector
from projector_dedup.commands import AsyncCall, AsyncCommands, Call, Commands, command, default_command_tables
from projector_dedup.tables import default_metadata

from . import tables
from .locks import LOCK_FUNCTION, release_named_locks
from .programs import MESSAGES, Program
from .turn import Event, pause, pause_on_the_loop

THREADS = 4
CHUNK = 6
CONTROLS = 3  # schedules in which a program must be right alone
CONFIRMED = 12  # and so many more, if it was wrong with the library
TRIES = 60  # of a transaction, alone
REDELIVERIES = 4  # of a message that the library has refused
GIVEN_UP = 8  # refused messages, after which no other one of the program is delivered again
HANGS = 120  # seconds

# Errors after which everybody runs a transaction again: conflicts, deadlocks, lock timeouts, unique violations, and on
# MariaDB the missing savepoint, which a deadlock has taken away with the transaction.
SQLSTATES = {"40001", "40P01", "55P03", "23505"}
ERRNOS = {1213, 1205, 1020, 1062, 1305}
SQLITE = ("locked", "busy", "UNIQUE")


class EndlessRunError(Exception):
    """A program does not end."""


@dataclass(frozen=True)
class Verdict:
    """What came of a program: `right`, `loud` (an error that stays), or `silent` (wrong, and nobody was told)."""

    kind: str
    detail: str = ""
    errors: int = 0  # that were raised meanwhile


def _runs_again(error: Exception) -> bool:
    if isinstance(error, StaleDataError | TimeoutError):
        return True
    if not isinstance(error, DBAPIError):
        return False
    orig: Any = error.orig
    if any(getattr(orig, name, None) in SQLSTATES for name in ("sqlstate", "pgcode")):
        return True
    if orig.args and orig.args[0] in ERRNOS:
        return True
    return type(orig).__module__ == "sqlite3" and any(word in str(orig) for word in SQLITE)


class Stage:
    """A database with the tables, an engine on it for each side, and four workers.

    `isolation` is declared for the handlers. `alone` is the level of plain sessions, by default that of the database.
    """

    def __init__(
        self, database: Database, driver: Driver, *, isolation: str | None = None, alone: str | None = None
    ) -> None:
        self.driver, self.isolation = driver, isolation
        arguments: dict[str, Any] = {"pool_size": 12}
        if driver.engine == "sqlite":
            arguments["connect_args"] = {"timeout": 5}
        if driver.engine == "mariadb":  # a deadlock with GET_LOCK ends by time
            arguments["connect_args"] = {"init_command": "SET SESSION innodb_lock_wait_timeout = 5"}
        plain = USUAL[driver.engine] if driver.is_async else driver.drivername
        self.plain: Engine = create_engine(database.url(plain), **arguments)
        create: Any = create_async_engine if driver.is_async else create_engine
        self.engine: Engine | AsyncEngine = create(database.url(driver.drivername), **arguments)
        inner = self.engine.sync_engine if isinstance(self.engine, AsyncEngine) else self.engine
        if driver.engine == "mariadb":
            for each in (self.plain, inner):
                event.listen(each, "reset", release_named_locks)
        self._alone = self.plain.execution_options(isolation_level=alone) if alone else self.plain
        self._threads = ThreadPoolExecutor(THREADS)
        self._runner = asyncio.Runner() if driver.is_async else None
        self._create_tables(database)

    def _create_tables(self, database: Database) -> None:
        for metadata in (default_metadata, default_command_tables.marker.metadata, tables.Base.metadata):
            metadata.create_all(self.plain)
        if self.driver.engine == "postgresql":
            with self.plain.begin() as connection:
                connection.execute(text(LOCK_FUNCTION))
                # Deadlocks, which some programs are made of, are found soon; no COMMIT waits for a disk.
                for setting in ("deadlock_timeout = '20ms'", "synchronous_commit = off"):
                    connection.execute(text(f"ALTER DATABASE {database.url().database} SET {setting}"))
            self.plain.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        if isinstance(self.engine, AsyncEngine):
            assert self._runner is not None
            self._runner.run(self.engine.dispose())
            self._runner.close()
        else:
            self.engine.dispose()
        self.plain.dispose()

    # One program ------------------------------------------------------------------------------------------------------

    def alone(self, program: Program, rounds: int = CONTROLS) -> str | None:
        """Return why a program is wrong in plain sessions, or None if it is right in every round."""
        for _ in range(rounds):
            self._reset(program)
            try:
                self._at_once([partial(self._transact, program, share) for share in _shares(1)])
            except EndlessRunError:
                raise
            except Exception as error:  # noqa: BLE001  # whatever a program does
                return f"raises {type(error).__name__}"
            if self._difference(program, range(MESSAGES)):
                return "wrong"
        return None

    def _transact(self, program: Program, numbers: Sequence[int]) -> None:
        for each in numbers:
            for number in range(TRIES):
                try:
                    with Session(self._alone) as session, session.begin():
                        program.run(program.event(each), session, pause)
                    break
                except Exception as error:
                    if not _runs_again(error) or number == TRIES - 1:
                        raise
                    time.sleep(random.random() * min(0.001 * 2**number, 0.05))

    def with_library(self, program: Program, way: str) -> Verdict:
        """Deliver each message twice in a way of `WAYS`, and return what came of it."""
        self._reset(program)
        run = _Run(self, program)
        deliver = WAYS[way](run)
        if self.driver.is_async:
            assert self._runner is not None
            self._runner.run(_all(deliver, _shares(2)))
        else:
            self._at_once([partial(deliver, share) for share in _shares(2)])
        return run.verdict()

    def _at_once(self, works: Sequence[Callable[[], None]]) -> None:
        barrier = Barrier(len(works))

        def started(work: Callable[[], None]) -> None:
            barrier.wait(HANGS)
            work()

        futures = [self._threads.submit(started, work) for work in works]
        deadline = time.monotonic() + HANGS
        errors = []
        for future in futures:
            try:
                if error := future.exception(deadline - time.monotonic()):
                    errors.append(error)
            except TimeoutError:
                raise EndlessRunError(f"a program has run for {HANGS} seconds") from None
        if errors:
            raise errors[0]

    def _reset(self, program: Program) -> None:
        with Session(self.plain) as session, session.begin():
            session.execute(default_metadata.tables["processed_message"].delete())
            session.execute(default_command_tables.marker.delete())
            tables.reset(session, program.slots, program.seats)

    def _difference(self, program: Program, numbers: Sequence[int]) -> str:
        expected = program.expected(numbers)
        with Session(self.plain) as session:
            found = program.found(session)
        names = {part.slot: part.work.name for part in program.parts}
        return "; ".join(
            f"{names[slot]}: {model} {_short(found[slot, model])} instead of {_short(wanted)}"
            for (slot, model), wanted in expected.items()
            if found[slot, model] != wanted
        )


def _short(held: Any) -> str:
    return str(sorted(held.items()) if isinstance(held, dict) else held)[:120]


def _shares(times: int) -> list[list[int]]:
    """Deal each message so many times, nearly in order: neighbours meet, and a redelivery comes soon."""
    dealt = [number + random.random() * 4 * (1 + 3 * again) for again in range(times) for number in range(MESSAGES)]
    order = sorted(range(len(dealt)), key=dealt.__getitem__)
    return [[place % MESSAGES for place in order[share::THREADS]] for share in range(THREADS)]


async def _all(deliver: Any, shares: Sequence[Sequence[int]]) -> None:
    async with asyncio.timeout(HANGS):
        await asyncio.gather(*(deliver(share) for share in shares))


@dataclass
class _Run:
    """A program in the hands of the library: what was answered for each message."""

    stage: Stage
    program: Program
    answers: list[tuple[int, Outcome]] = field(default_factory=list)
    refused: dict[int, Exception] = field(default_factory=dict)
    raised: list[Exception] = field(default_factory=list)

    @property
    def is_async(self) -> bool:
        return self.stage.driver.is_async

    def body(self, event: Event, session: Session) -> None:
        self.program.run(event, session, pause_on_the_loop if self.is_async else pause)

    def factory(self) -> Any:
        engine = self.stage.engine
        return async_sessionmaker(engine) if isinstance(engine, AsyncEngine) else sessionmaker(engine)

    def dispatcher(self) -> Any:
        async def awaited(event: Event, session: AsyncSession) -> None:
            await session.run_sync(lambda inner: self.body(event, inner))

        def direct(event: Event, session: Session) -> None:
            self.body(event, session)

        declared = projector(idempotent=True, name="harmless", isolation=self.stage.isolation)
        if self.is_async:
            return AsyncDispatcher(self.factory(), declared(on("happened")(awaited)))
        return Dispatcher(self.factory(), declared(on("happened")(direct)))

    def message(self, number: int) -> Message:
        """The message, as a broker would hand it over: nobody has seen its event before."""
        return Message(f"m{number}", self.program.event(number), type="happened")

    def answered(self, number: int, outcome: Outcome) -> None:
        self.answers.append((number, outcome))
        self.refused.pop(number, None)

    def failed(self, number: int, error: Exception) -> None:
        self.raised.append(error)
        if not any(number == answered for answered, _ in self.answers):
            self.refused[number] = error

    @property
    def tries(self) -> range:
        """The deliveries of a message until it is refused for good; they are few where everything is refused."""
        return range(1 if len(self.refused) > GIVEN_UP else 1 + REDELIVERIES)

    def verdict(self) -> Verdict:
        applied = Counter(number for number, outcome in self.answers if outcome is Outcome.APPLIED)
        answered = sorted({number for number, _ in self.answers})
        difference = self.stage._difference(self.program, answered)
        if twice := [number for number in answered if applied[number] != 1]:
            difference += f"; not APPLIED once: {twice}"
        errors = len(self.raised)
        if difference:
            return Verdict("silent", difference, errors)
        if self.refused:
            number, error = next(iter(self.refused.items()))
            words = " ".join(str(error).split())[:300]
            return Verdict("loud", f"{len(self.refused)} refused, m{number}: {type(error).__name__}: {words}", errors)
        return Verdict("right", errors=errors)


# The ways -------------------------------------------------------------------------------------------------------------


def _single(run: _Run) -> Any:
    dispatcher = run.dispatcher()
    return _one_by_one(run, lambda number: dispatcher.deliver(run.message(number)))


def _one_by_one(run: _Run, call: Callable[[int], Any]) -> Any:
    """Return what delivers a share by `call`, whose result has an outcome."""

    def direct(numbers: Sequence[int]) -> None:
        for number in numbers:
            for _ in run.tries:
                try:
                    run.answered(number, call(number).outcome)
                except Exception as error:  # noqa: BLE001  # kept: it is loud
                    run.failed(number, error)
                    pause()
                else:
                    break

    async def awaited(numbers: Sequence[int]) -> None:
        for number in numbers:
            for _ in run.tries:
                try:
                    run.answered(number, (await call(number)).outcome)
                except Exception as error:  # noqa: BLE001  # kept: it is loud
                    run.failed(number, error)
                    await asyncio.sleep(0)
                else:
                    break

    return awaited if run.is_async else direct


def _batch(run: _Run) -> Any:
    dispatcher = run.dispatcher()

    def settle(numbers: Sequence[int], deliveries: Sequence[Any]) -> list[int]:
        failed = []
        for number, delivery in zip(numbers, deliveries, strict=True):
            if delivery.outcome is Outcome.FAILED:
                run.failed(number, delivery.error)
                failed.append(number)
            else:
                run.answered(number, delivery.outcome)
        return failed

    def chunks(numbers: Sequence[int]) -> Iterator[list[int]]:
        for start in range(0, len(numbers), CHUNK):
            yield list(numbers[start : start + CHUNK])

    def direct(numbers: Sequence[int]) -> None:
        for chunk in chunks(numbers):
            for _ in run.tries:
                try:
                    deliveries = dispatcher.deliver_batch([run.message(number) for number in chunk])
                except BatchFailed as failure:
                    deliveries = failure.deliveries
                if not (chunk := settle(chunk, deliveries)):
                    break
                pause()

    async def awaited(numbers: Sequence[int]) -> None:
        for chunk in chunks(numbers):
            for _ in run.tries:
                try:
                    deliveries = await dispatcher.deliver_batch([run.message(number) for number in chunk])
                except BatchFailed as failure:
                    deliveries = failure.deliveries
                if not (chunk := settle(chunk, deliveries)):
                    break

    return awaited if run.is_async else direct


def _command(run: _Run) -> Any:
    async def awaited(asked: Any, call: AsyncCall) -> None:
        await call.session.run_sync(lambda inner: run.body(asked, inner))

    def direct(asked: Any, call: Call) -> None:
        run.body(asked, call.session)

    declared = command(name="harmless", isolation=run.stage.isolation)
    if run.is_async:
        later, awaited_operation = AsyncCommands(run.factory()), declared(awaited)
        return _one_by_one(
            run, lambda number: later.handle(awaited_operation, run.program.event(number), key=f"m{number}")
        )
    commands, operation = Commands(run.factory()), declared(direct)
    return _one_by_one(run, lambda number: commands.handle(operation, run.program.event(number), key=f"m{number}"))


WAYS: dict[str, Callable[[_Run], Any]] = {"single": _single, "batch": _batch, "command": _command}


# Judging --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judged:
    """A program: why it was left out, or a verdict for each way."""

    program: Program
    left_out: str | None
    verdicts: dict[str, Verdict] = field(default_factory=dict)


def judge(
    stage: Stage,
    program: Program,
    ways: Sequence[str],
    *,
    controls: int = CONTROLS,
    flagged: bool = False,
    events: bool = True,
) -> Judged:
    """Run a program alone and, if it counts, by the library.

    `controls`: the schedules in which it must be right alone. `flagged`: also programs for which the library promises
    nothing. `events`: also programs that change their event.
    """
    if program.remains and not flagged:
        return Judged(program, program.remains)
    if program.changes_event and not events:
        return Judged(program, "changes its event")
    if wrong := stage.alone(program, controls):
        return Judged(program, f"alone: {wrong}")
    verdicts = {way: stage.with_library(program, way) for way in ways}
    if any(verdict.kind == "silent" for verdict in verdicts.values()) and (wrong := stage.alone(program, CONFIRMED)):
        return Judged(program, f"alone, in a later schedule: {wrong}")
    return Judged(program, None, verdicts)


def driver_called(name: str) -> Driver:
    """Return the driver called `postgresql+psycopg2`, say, or `postgresql+asyncpg`."""
    for driver in DRIVERS:
        if name in (driver.drivername, driver.name_in_url):
            return driver
    raise ValueError(f"there is no driver {name}")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of programs that do what SQLAlchemy or the library warn of."""
    import logging
    import warnings

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(before)
