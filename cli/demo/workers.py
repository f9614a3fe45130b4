"""Worker processes that deliver, crash and are started again: at-least-once delivery as it is in production."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any

from sqlalchemy import Engine, MetaData, create_engine, event
from sqlalchemy.orm import Session, sessionmaker

from projector_dedup import Dispatcher, Outcome, configure_sqlite, make_tables

from ..errors import Failed, reason, without_secrets
from ..interrupts import not_for_children
from .carriers import IdempotentCarriers, NaiveCarriers, carriers_table, map_to
from .flights import FlightScheduled
from .plan import Crash, Lane

_SPAWN = multiprocessing.get_context("spawn")  # everywhere alike: nothing is inherited from the parent
_FAILED = 72  # exit code of a worker that gave up and said why
_REFUSALS = 20  # deliveries of one message that may fail before its worker gives up
_RESTARTS = 5  # deaths of a worker, without progress in between, before the parent gives up
_ACKNOWLEDGED, _DELIVERED, _DUPLICATES, _REFUSED = range(4)  # what a worker counts in shared memory


@dataclass(frozen=True)
class Target:
    """The place where a projector keeps its read model: the database, and the names of this run's tables."""

    url: str = field(repr=False)
    carriers: str
    markers: str
    idempotent: bool


@dataclass
class Tally:
    """The counts of one projector's run: deliveries, duplicates, crashes, and its time in seconds."""

    deliveries: int = 0
    duplicates: int = 0
    refused: int = 0  # deliveries that raised; the message was delivered again
    crashes_before_commit: int = 0
    crashes_after_commit: int = 0
    killed: int = 0  # by somebody else
    seconds: float = 0.0


def run_engine(url: str) -> Engine:
    """Return an engine for a run of the demo; SQLite is set to synchronous=NORMAL, which saves most fsyncs.

    Only a crash of the machine could lose something then, and the demo crashes processes.
    """
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":
        configure_sqlite(engine, busy_timeout=30)

        @event.listens_for(engine, "connect")
        def _no_fsync(dbapi_connection: Any, _record: Any) -> None:
            dbapi_connection.execute("PRAGMA synchronous = NORMAL").close()

    return engine


# In the worker's process -----------------------------------------------------------------------------------------


def _work(
    target: Target, deliveries: Sequence[FlightScheduled], crash: tuple[int, Crash] | None, counts: Any, last_words: Any
) -> None:
    """Run in a worker process: deliver and acknowledge; ``crash`` says at which of ``deliveries`` to die, and where."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it stops us
    try:
        _consume(target, deliveries, crash, counts)
    except Exception as error:  # noqa: BLE001  # handed to the parent, which raises it
        last_words.send(without_secrets(f"{type(error).__name__}: {reason(error)}"))
        sys.exit(_FAILED)


def _consume(
    target: Target, deliveries: Sequence[FlightScheduled], crash: tuple[int, Crash] | None, counts: Any
) -> None:
    map_to(carriers_table(MetaData(), target.carriers))
    factory = sessionmaker(run_engine(target.url))
    dispatcher = Dispatcher(
        factory,
        IdempotentCarriers() if target.idempotent else NaiveCarriers(),
        tables=make_tables(MetaData(), target.markers),
    )
    crash_at, crash_where = crash or (None, None)
    parent = multiprocessing.parent_process()
    doomed = False

    @event.listens_for(factory, "after_flush_postexec")
    def _flushed(_session: Session, _context: object) -> None:
        if doomed:
            os._exit(Crash.BEFORE_COMMIT.value)

    for position, flight in enumerate(deliveries):
        if position % 100 == 0 and parent is not None and not parent.is_alive():
            return
        doomed = position == crash_at and crash_where is Crash.BEFORE_COMMIT
        outcome = _deliver(dispatcher, flight, counts)
        if position == crash_at and crash_where is Crash.AFTER_COMMIT:
            os._exit(Crash.AFTER_COMMIT.value)
        counts[_DUPLICATES] += outcome is Outcome.DUPLICATE
        counts[_ACKNOWLEDGED] += 1


def _deliver(dispatcher: Dispatcher, flight: FlightScheduled, counts: Any) -> Outcome:
    """Deliver a message, again if that raises, as a broker would; the error of the last try is raised."""
    for refusals in range(1, _REFUSALS + 1):
        counts[_DELIVERED] += 1
        try:
            return dispatcher.deliver(flight).outcome
        except Exception:
            counts[_REFUSED] += 1
            if refusals == _REFUSALS:
                raise
    raise AssertionError("the last refusal was raised")


# In the parent's process -----------------------------------------------------------------------------------------


class _Worker:
    """The broker's side of one worker: the count of acknowledged deliveries, and the process that gets the rest."""

    def __init__(self, target: Target, lane: Lane) -> None:
        self.counts = _SPAWN.RawArray("q", 4)
        self._lane = lane
        self.crashes = lane.crashes.copy()
        self._target = target
        self._fruitless = 0
        self.process: SpawnProcess | None = None

    def start(self) -> None:
        """Start a process that delivers everything not yet acknowledged."""
        self._started_at = done = self.counts[_ACKNOWLEDGED]
        crash = (self.crashes[0][0] - done, self.crashes[0][1]) if self.crashes else None
        self._last_words, theirs = _SPAWN.Pipe(duplex=False)
        self.process = _SPAWN.Process(
            target=_work, args=(self._target, self._lane.deliveries[done:], crash, self.counts, theirs), daemon=True
        )
        with not_for_children():
            self.process.start()
        theirs.close()

    @property
    def sentinel(self) -> int:
        """The handle of the process, for ``multiprocessing.connection.wait``."""
        assert self.process is not None  # noqa: S101  # started before anybody waits
        return self.process.sentinel

    def ended(self, tally: Tally) -> bool:
        """Called when the process has ended: return True if everything is acknowledged; else start it again.

        Counts the crash in ``tally``. Raises `Failed` if the worker gave up, or died again and again.
        """
        assert self.process is not None  # noqa: S101  # as above
        self.process.join()
        code = self.process.exitcode
        if code == 0:
            return True
        if code == _FAILED:
            raise Failed(f"a worker could not deliver: {self._last_words.recv()}")
        if self.crashes and code == self.crashes[0][1].value:
            _, where = self.crashes.popleft()
            tally.crashes_before_commit += where is Crash.BEFORE_COMMIT
            tally.crashes_after_commit += where is Crash.AFTER_COMMIT
        else:
            tally.killed += 1
            self._fruitless = self._fruitless + 1 if self.counts[_ACKNOWLEDGED] == self._started_at else 0
            if self._fruitless == _RESTARTS:
                raise Failed(f"a worker died {_RESTARTS} times before it delivered anything (exit code {code})")
        self.start()
        return False

    def stop(self) -> None:
        """Kill the process if it runs."""
        if self.process is not None and self.process.is_alive():
            self.process.kill()
            self.process.join()


def deliver_all(target: Target, lanes: Sequence[Lane], on_progress: Callable[[int], None]) -> Tally:
    """Deliver every lane until all of it is acknowledged, and return the counts.

    ``on_progress`` is called again and again with the number of acknowledged deliveries.
    """
    tally = Tally()
    begun = time.monotonic()
    workers = [_Worker(target, lane) for lane in lanes]
    try:
        for worker in workers:
            worker.start()
        running = list(workers)
        while running:
            gone = wait([worker.sentinel for worker in running], timeout=0.1)
            on_progress(sum(worker.counts[_ACKNOWLEDGED] for worker in workers))
            running = [worker for worker in running if worker.sentinel not in gone or not worker.ended(tally)]
    finally:
        for worker in workers:
            worker.stop()
    tally.deliveries = sum(worker.counts[_DELIVERED] for worker in workers)
    tally.duplicates = sum(worker.counts[_DUPLICATES] for worker in workers)
    tally.refused = sum(worker.counts[_REFUSED] for worker in workers)
    tally.seconds = time.monotonic() - begun
    return tally
