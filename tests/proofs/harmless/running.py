"""Run a program: alone in plain sessions, which is the control, and by the library, in several ways."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from threading import Barrier, Lock
from typing import Any, Self

from sqlalchemy import Connection, Engine, create_engine, event, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.util import greenlet_spawn

from databases import DRIVERS, USUAL, Database, Driver
from projector_dedup import AsyncDispatcher, Dispatcher, Message, Outcome, on, projector
from projector_dedup.commands import AsyncCall, AsyncCommands, Call, Commands, command, default_command_tables
from projector_dedup.errors import BatchFailed, DeliveryFailed
from projector_dedup.outcome import Delivery
from projector_dedup.tables import default_metadata
from projector_dedup.verdict import Action, verdict_of
from rig import Outside, done

from . import tables
from .locks import LOCK_FUNCTION, release_own_locks
from .programs import MESSAGES, PoisonError, Program
from .turn import Event, pause, pause_on_the_loop

THREADS = 4
CHUNK = 6
CONTROLS = 3  # schedules in which a program must be right alone
CONFIRMED = 12  # and so many more, if it was wrong with the library
AGAIN = 3  # runs of a program that was wrong with the library
TRIES = 60  # of a transaction, alone
REDELIVERIES = 4  # of a message that the library has refused, unless the verdict is to reject it
GIVEN_UP = 8  # refused messages, after which no other one of the program is delivered again
HANGS = 120  # seconds
HANGS_ALONE = 30  # of locks by name and of rows, say, whose deadlock no server detects

# Errors after which everybody runs a transaction again: conflicts, deadlocks, lock timeouts, unique violations, and on
# MariaDB the missing savepoint, which a deadlock has taken away with the transaction.
RUN_AGAIN: set[object] = {"40001", "40P01", "55P03", "23505", 1213, 1205, 1020, 1062, 1305}
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
    code = _code(error.orig)
    return code in RUN_AGAIN or (
        type(error.orig).__module__ == "sqlite3" and any(word in str(error.orig) for word in SQLITE)
    )


def _code(error: Any) -> object:
    """Return the number or the SQLSTATE of a driver's error, or None."""
    number = next((each for each in getattr(error, "args", ()) if isinstance(each, int)), None)
    return number or getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)


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
        for each in (self.plain, inner):
            event.listen(each, "reset", release_own_locks)
        self._database = database
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
                self._at_once([partial(self.transact, program, share) for share in _shares(1)], HANGS_ALONE)
            except Exception as error:  # noqa: BLE001  # whatever a program does
                return f"raises {type(error).__name__} {_code(getattr(error, 'orig', None)) or ''}".rstrip()
            if self.difference(program, range(MESSAGES)):
                return "wrong"
        return None

    def transact(self, program: Program, numbers: Sequence[int]) -> None:
        """Run each handler with each of these messages in a plain session."""
        for number, handler in product(numbers, range(len(program.handlers))):
            for tries in range(TRIES):
                try:
                    with session_class(program)(self._alone) as session, session.begin():
                        program.run(handler, program.event(number), session, pause)
                    break
                except PoisonError:
                    break
                except Exception as error:
                    if not _runs_again(error) or tries == TRIES - 1:
                        raise
                    time.sleep(random.random() * min(0.001 * 2**tries, 0.05))

    def with_library(self, program: Program, way: str) -> Verdict:
        """Deliver each message twice in a way of `WAYS`, and return what came of it."""
        self._reset(program)
        run = _Run(self, program)
        deliver = WAYS[way](run)
        try:
            if self.driver.is_async:
                assert self._runner is not None
                self._runner.run(_all(deliver, _shares(2)))
            else:
                self._at_once([partial(deliver, share) for share in _shares(2)])
        except (EndlessRunError, TimeoutError) as error:
            return Verdict("loud", f"it does not end: {error}")
        return run.verdict()

    def _at_once(self, works: Sequence[Callable[[], None]], hangs: int = HANGS) -> None:
        barrier = Barrier(len(works))

        def started(work: Callable[[], None]) -> None:
            barrier.wait(HANGS)
            work()

        futures = [self._threads.submit(started, work) for work in works]
        deadline = time.monotonic() + hangs
        errors = []
        for future in futures:
            try:
                if error := future.exception(deadline - time.monotonic()):
                    errors.append(error)
            except TimeoutError:
                with contextlib.closing(Outside(self._database)) as outside:
                    outside.kill_others()  # so that the threads end
                self.plain.dispose()  # what it keeps was killed as well
                raise EndlessRunError(f"a program has run for {hangs} seconds") from None
        if errors:
            raise errors[0]

    def _reset(self, program: Program) -> None:
        with Session(self.plain) as session, session.begin():
            session.execute(default_metadata.tables["processed_message"].delete())
            session.execute(default_command_tables.marker.delete())
            tables.reset(session, program.slots)

    def difference(self, program: Program, numbers: Sequence[int]) -> str:
        """Return what the read models hold instead of what these messages are worth, or an empty text."""
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


class Listening(Session):
    """The session of an application that reads something whenever a transaction begins."""


@event.listens_for(Listening, "after_begin")
def _read(_session: Session, _transaction: object, connection: Connection) -> None:
    connection.execute(select(tables.Other.id)).all()


def session_class(program: Program) -> type[Session]:
    """Return the class of a program's sessions."""
    return Listening if program.listens else Session


def _is_poison(error: Exception | None) -> bool:
    if isinstance(error, ExceptionGroup):
        return all(map(_is_poison, error.exceptions))
    return isinstance(error, PoisonError)


@dataclass
class _Run:
    """A program in the hands of the library: what was answered for each message and handler."""

    stage: Stage
    program: Program
    applied: Counter[tuple[int, str]] = field(default_factory=Counter)
    answered: set[int] = field(default_factory=set)
    refused: dict[int, Exception] = field(default_factory=dict)
    rejected: dict[int, Exception] = field(default_factory=dict)  # dead letters, though a plain session applies them
    raised: list[Exception] = field(default_factory=list)
    lock: Any = field(default_factory=Lock)

    @property
    def is_async(self) -> bool:
        return self.stage.driver.is_async

    @property
    def handlers(self) -> range:
        return range(len(self.program.handlers))

    def body(self, handler: int, event: Event, session: Session) -> None:
        self.program.run(handler, event, session, pause_on_the_loop if self.is_async else pause)

    def factory(self) -> Any:
        engine, kind = self.stage.engine, session_class(self.program)
        if isinstance(engine, AsyncEngine):
            return async_sessionmaker(engine, sync_session_class=kind)
        return sessionmaker(engine, class_=kind)

    def dispatcher(self) -> Any:
        kind: Any = AsyncDispatcher if self.is_async else Dispatcher
        return kind(self.factory(), *map(self._projector, self.handlers))

    def _projector(self, handler: int) -> Any:
        async def awaited(event: Event, session: AsyncSession) -> None:
            await session.run_sync(lambda inner: self.body(handler, event, inner))

        def direct(event: Event, session: Session) -> None:
            self.body(handler, event, session)

        function: Any = awaited if self.is_async else direct
        declared: Any = projector(idempotent=True, name=f"harmless-{handler}", isolation=self.stage.isolation)
        return declared(on("happened")(function))

    def message(self, number: int) -> Message:
        """Return a message as a broker hands it over: nobody has had its event before."""
        return Message(f"m{number}", self.program.event(number), type="happened")

    def settle(self, number: int, answer: Delivery) -> bool:
        """Note what came of a delivery, for each handler; return True if a consumer would not deliver it again."""
        with self.lock:
            self.applied.update((number, name) for name, each in answer.outcomes.items() if each is Outcome.APPLIED)
            if number in self.program.poison and _is_poison(answer.error):
                return True
            if answer.error is None:
                self.answered.add(number)
                self.refused.pop(number, None)
                return True
            self.raised.append(answer.error)
            if verdict_of(answer.error).action is Action.REJECT:
                self.rejected[number] = answer.error
                return True
            if number not in self.answered:
                self.refused[number] = answer.error
            return False

    @property
    def tries(self) -> range:
        """The deliveries of a message until it is refused for good; they are few where everything is refused."""
        return range(1 if len(self.refused) > GIVEN_UP else 1 + REDELIVERIES)

    def verdict(self) -> Verdict:
        errors, difference, refused = len(self.raised), "", {**self.refused, **self.rejected}
        if not refused or not self.program.second:  # of two handlers, one may have applied what the other refused
            difference = self.stage.difference(self.program, sorted(self.answered))
        if taken := self.answered.intersection(self.program.poison):
            difference += f"; answered as if they had not failed: {sorted(taken)}"
        if twice := sorted({number for (number, _), times in self.applied.items() if times > 1}):
            difference += f"; applied more than once: {twice}"
        if difference:
            return Verdict("silent", difference, errors)
        if refused:
            number, error = next(iter(refused.items()))
            words = " ".join(str(error).split())[:300]
            detail = (
                f"{len(refused)} refused ({len(self.rejected)} for good), m{number}: {type(error).__name__}: {words}"
            )
            return Verdict("loud", detail, errors)
        return Verdict("right", errors=errors)


# The ways -------------------------------------------------------------------------------------------------------------

Share = Sequence[int]


def _each(run: _Run, size: int, call: Callable[[list[int]], Any]) -> Any:
    """Return what delivers a share of the messages by `call`, so many at a time, and again what has failed."""

    def left(numbers: list[int], answers: Sequence[Delivery]) -> list[int]:
        return [number for number, answer in zip(numbers, answers, strict=True) if not run.settle(number, answer)]

    def direct(share: Share) -> None:
        for start in range(0, len(share), size):
            numbers = list(share[start : start + size])
            for _ in run.tries:
                if numbers:
                    numbers = left(numbers, _answers(numbers, call))

    async def awaited(share: Share) -> None:
        await greenlet_spawn(direct, share)

    return awaited if run.is_async else direct


def _answers(numbers: list[int], call: Callable[[list[int]], Any]) -> Sequence[Delivery]:
    """Return a delivery for each message, whether the call returns or raises."""
    try:
        answer = done(call(numbers))
    except BatchFailed as failed:
        return failed.deliveries
    except DeliveryFailed as failed:
        return [failed.delivery]
    except Exception as error:  # noqa: BLE001  # kept: it is loud
        return [Delivery(f"m{number}", {"": Outcome.FAILED}, errors={"": error}) for number in numbers]
    return answer if isinstance(answer, list) else [answer]


def _single(run: _Run) -> Any:
    dispatcher = run.dispatcher()
    return _each(run, 1, lambda numbers: dispatcher.deliver(run.message(numbers[0])))


def _batch(run: _Run) -> Any:
    dispatcher = run.dispatcher()
    return _each(run, CHUNK, lambda numbers: dispatcher.deliver_batch([run.message(each) for each in numbers]))


def _command(run: _Run) -> Any:
    """Each handler is a command, and a message has its keys."""
    operations = [_operation(run, handler) for handler in run.handlers]
    commands: Any = (AsyncCommands if run.is_async else Commands)(run.factory())

    def handled(numbers: list[int]) -> Any:
        (number,) = numbers
        calls = [done(commands.handle(each, run.program.event(number), key=f"m{number}")) for each in operations]
        return Delivery(
            f"m{number}", {each.identity: call.outcome for each, call in zip(operations, calls, strict=True)}
        )

    return _each(run, 1, handled)


def _operation(run: _Run, handler: int) -> Any:
    async def awaited(asked: Any, call: AsyncCall) -> None:
        await call.session.run_sync(lambda inner: run.body(handler, asked, inner))

    def direct(asked: Any, call: Call) -> None:
        run.body(handler, asked, call.session)

    function: Any = awaited if run.is_async else direct
    return command(name=f"harmless-{handler}", isolation=run.stage.isolation)(function)


def _mixed(run: _Run) -> Any:
    """Deliver the odd messages; the even ones are those of a service without the library, once each."""
    deliver = _single(run)

    def alone(number: int) -> None:
        with run.lock:
            if number in run.answered:
                return
            if number not in run.program.poison:
                run.answered.add(number)
        try:
            run.stage.transact(run.program, [number])
        except Exception as error:  # noqa: BLE001  # kept: it is loud
            run.answered.discard(number)
            run.rejected[number] = error

    def direct(share: Share) -> None:
        for number in share:
            deliver([number]) if number % 2 else alone(number)

    async def awaited(share: Share) -> None:
        for number in share:
            await (deliver([number]) if number % 2 else asyncio.to_thread(alone, number))

    return awaited if run.is_async else direct


WAYS: dict[str, Callable[[_Run], Any]] = {"single": _single, "batch": _batch, "command": _command, "mixed": _mixed}


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
    silent = [way for way, verdict in verdicts.items() if verdict.kind == "silent"]
    if silent and (wrong := stage.alone(program, CONFIRMED)):
        return Judged(program, f"alone, in a later schedule: {wrong}")
    for way in silent:
        again = sum(stage.with_library(program, way).kind == "silent" for _ in range(AGAIN))
        detail = f"{verdicts[way].detail} (again in {again} of {AGAIN} runs)"
        verdicts[way] = replace(verdicts[way], detail=detail)
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
