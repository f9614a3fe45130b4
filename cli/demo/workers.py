"""Worker processes that deliver, crash and are started again: at-least-once delivery as it is in production."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from sqlalchemy import Engine, create_engine, event
from sqlalchemy.orm import Session, sessionmaker

from projector_dedup import configure_sqlite

from ..errors import Failed, reason, without_secrets
from ..interrupts import not_for_children
from .plan import Crash, Lane
from .scene import Delivered, Sums, Target

M = TypeVar("M")

_SPAWN = multiprocessing.get_context("spawn")  # everywhere alike: nothing is inherited from the parent
_FAILED = 72  # exit code of a worker that gave up and said why
_REFUSALS = 20  # deliveries of one message that may fail before its worker gives up
_RESTARTS = 5  # deaths of a worker, without progress in between, before the parent gives up
_ACKNOWLEDGED, _DELIVERED, _DUPLICATES, _REFUSED, _CRASHED = range(5)  # what a worker writes into shared memory
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # on Windows SIGTERM ends a process as abruptly


@dataclass
class Tally:
    """The counts of one side's run: deliveries, duplicates, crashes, its time in seconds, and the answers."""

    deliveries: int = 0
    duplicates: int = 0
    refused: int = 0  # deliveries that raised; the message was delivered again
    crashes_before_commit: int = 0
    crashes_after_commit: int = 0
    killed: int = 0  # by somebody else
    seconds: float = 0.0
    answers: dict[Any, list[Sums]] = field(default_factory=dict)  # of each message, one for each delivery


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
    target: Target[M],
    deliveries: Sequence[M],
    crash: tuple[int, Crash] | None,
    counts: Any,
    answers: Any,
    last_words: Any,
) -> None:
    """Run in a worker process: deliver and acknowledge; ``crash`` says at which delivery to die, and where."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle; it stops us
    try:
        _consume(target, deliveries, crash, counts, answers)
    except Exception as error:  # noqa: BLE001  # handed to the parent, which raises it
        last_words.send(without_secrets(f"{type(error).__name__}: {reason(error)}"))
        sys.exit(_FAILED)


def _consume(
    target: Target[M], deliveries: Sequence[M], crash: tuple[int, Crash] | None, counts: Any, answers: Any
) -> None:
    factory = sessionmaker(run_engine(target.url))
    handle = target.open(factory)
    crash_at, crash_where = crash or (None, None)
    parent = multiprocessing.parent_process()
    doomed = False

    @event.listens_for(factory, "after_flush_postexec")
    def _flushed(_session: Session, _context: object) -> None:
        if doomed:
            _die(Crash.BEFORE_COMMIT, counts)

    for position, message in enumerate(deliveries):
        if position % 100 == 0 and parent is not None and not parent.is_alive():
            return
        doomed = position == crash_at and crash_where is Crash.BEFORE_COMMIT
        delivered = _deliver(handle, message, counts)
        if position == crash_at:  # also if it was a duplicate, which has nothing to commit
            _die(Crash.AFTER_COMMIT, counts)
        counts[_DUPLICATES] += delivered.duplicate
        if delivered.answer is not None:
            place = 2 * counts[_ACKNOWLEDGED]
            answers[place : place + 2] = delivered.answer
        counts[_ACKNOWLEDGED] += 1


def _die(where: Crash, counts: Any) -> None:
    """Leave word of where it was, and kill this process as an operating system would."""
    counts[_CRASHED] = where
    os.kill(os.getpid(), _KILL)


def _deliver(handle: Callable[[M], Delivered], message: M, counts: Any) -> Delivered:
    """Deliver a message, again if that raises, as a broker would; the error of the last try is raised."""
    for refusals in range(1, _REFUSALS + 1):
        counts[_DELIVERED] += 1
        try:
            return handle(message)
        except Exception:
            counts[_REFUSED] += 1
            if refusals == _REFUSALS:
                raise
    raise AssertionError("the last refusal was raised")


# In the parent's process -----------------------------------------------------------------------------------------


class _Worker:
    """The broker's side of one worker: the count of acknowledged deliveries, and the process that gets the rest."""

    def __init__(self, target: Target[Any], lane: Lane[Any]) -> None:
        self.counts = _SPAWN.RawArray("q", 5)
        self._answers = _SPAWN.RawArray("q", 2 * len(lane.deliveries))
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
        rest = self._lane.deliveries[done:]
        self.process = _SPAWN.Process(
            target=_work, args=(self._target, rest, crash, self.counts, self._answers, theirs), daemon=True
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
        where, self.counts[_CRASHED] = self.counts[_CRASHED], 0
        if where:
            self.crashes.popleft()
            tally.crashes_before_commit += where == Crash.BEFORE_COMMIT
            tally.crashes_after_commit += where == Crash.AFTER_COMMIT
        else:
            tally.killed += 1
            self._fruitless = self._fruitless + 1 if self.counts[_ACKNOWLEDGED] == self._started_at else 0
            if self._fruitless == _RESTARTS:
                raise Failed(f"a worker died {_RESTARTS} times before it delivered anything (exit code {code})")
        self.start()
        return False

    def answers(self) -> Iterator[tuple[Any, Sums]]:
        """Yield each message with the answer to its delivery; an answer of zeros is none."""
        for place, message in enumerate(self._lane.deliveries):
            if any(answer := tuple(self._answers[2 * place : 2 * place + 2])):
                yield message, answer

    def stop(self) -> None:
        """Kill the process if it runs."""
        if self.process is not None and self.process.is_alive():
            self.process.kill()
            self.process.join()


def deliver_all(target: Target[M], lanes: Sequence[Lane[M]], on_progress: Callable[[int], None]) -> Tally:
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
    for worker in workers:
        for message, answer in worker.answers():
            tally.answers.setdefault(message, []).append(answer)
    tally.seconds = time.monotonic() - begun
    return tally
