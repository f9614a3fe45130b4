"""Worker processes that deliver, are killed and are started again: at-least-once delivery as it is in production."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.orm import Session, sessionmaker

from projector_dedup import Dispatcher, Outcome
from projector_dedup.dialects import configure_sqlite

from .flights import FlightScheduled
from .projectors import TABLES, IdempotentCarriers, NaiveCarriers

WINDOW = 500  # messages over which order is lost; two workers may get the copies of a message at the same time
REFUSALS = 20  # deliveries of one message that may fail before its worker gives up
ACKNOWLEDGED, DELIVERED, DUPLICATES, BEFORE_COMMIT, AFTER_COMMIT = range(5)  # the counts that processes share
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # on Windows SIGTERM ends a process as abruptly
_SPAWN = multiprocessing.get_context("spawn")  # everywhere alike: a process inherits nothing from its parent


@dataclass
class Lane:
    """The deliveries of one worker, and where it is killed: the position of a delivery, and one of two points."""

    deliveries: list[FlightScheduled]
    kills: list[tuple[int, int]]


@dataclass
class Tally:
    """The counts of one projector's run."""

    deliveries: int
    duplicates: int
    before_commit: int  # workers that were killed when the rows were written and not committed
    after_commit: int  # workers that were killed before they acknowledged what was committed
    by_others: int  # workers that somebody else killed


def plan(flights: Sequence[FlightScheduled], *, workers: int, seed: int, redelivered: float, kills: int) -> list[Lane]:
    """Return the lane of each worker. The same seed makes the same lanes, so both projectors meet the same faults.

    ``redelivered`` is the share of flights that come twice. Workers are killed ``kills`` times at each point.
    """
    chance = random.Random(seed)  # noqa: S311  # a plan, not a secret
    again = chance.sample(range(len(flights)), round(len(flights) * redelivered))
    numbers = sorted([*range(len(flights)), *again], key=lambda number: number + chance.uniform(0, WINDOW))
    copies = Counter(numbers)
    # The second copy of a flight may be a duplicate, which has no commit to be killed before.
    places = [place for place, number in enumerate(numbers) if copies[number] == 1]
    chosen = chance.sample(places, min(2 * kills, len(places)))
    lanes = [Lane([flights[number] for number in numbers[worker::workers]], []) for worker in range(workers)]
    for count, place in enumerate(chosen):
        lanes[place % workers].kills.append((place // workers, AFTER_COMMIT if count % 2 else BEFORE_COMMIT))
    for lane in lanes:
        lane.kills.sort()
    return lanes


def open_engine(url: URL) -> Engine:
    """Return an engine for a run of the demo; SQLite is set to synchronous=NORMAL, which saves most fsyncs.

    Only a crash of the machine could lose something then, and the demo kills processes.
    """
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":
        configure_sqlite(engine, busy_timeout=30)

        @event.listens_for(engine, "connect")
        def _no_fsync(dbapi_connection: Any, _record: Any) -> None:
            dbapi_connection.execute("PRAGMA synchronous = NORMAL").close()

    return engine


# In the worker's process ---------------------------------------------------------------------------------------------


def _work(url: URL, idempotent: bool, lane: Lane, counts: Any) -> None:
    """Deliver and acknowledge what is left of the lane."""
    factory = sessionmaker(open_engine(url))
    dispatcher = Dispatcher(factory, IdempotentCarriers() if idempotent else NaiveCarriers(), tables=TABLES)
    parent = multiprocessing.parent_process()
    so_far = counts[BEFORE_COMMIT] + counts[AFTER_COMMIT]
    at, where = lane.kills[so_far] if so_far < len(lane.kills) else (None, None)
    position = 0

    def die(point: int) -> None:
        counts[point] += 1
        os.kill(os.getpid(), _KILL)

    @event.listens_for(factory, "after_flush_postexec")
    def _flushed(_session: Session, _context: object) -> None:
        if position == at and where == BEFORE_COMMIT:
            die(BEFORE_COMMIT)

    for position in range(counts[ACKNOWLEDGED], len(lane.deliveries)):  # the listener reads it
        if position % 100 == 0 and parent is not None and not parent.is_alive():
            return
        outcome = _deliver(dispatcher, lane.deliveries[position], counts)
        if position == at:
            die(AFTER_COMMIT)
        counts[DUPLICATES] += outcome is Outcome.DUPLICATE
        counts[ACKNOWLEDGED] += 1


def _deliver(dispatcher: Dispatcher, flight: FlightScheduled, counts: Any) -> Outcome:
    """Deliver a flight, and again if that raises, as a broker would."""
    refusals = 0
    while True:
        counts[DELIVERED] += 1
        try:
            return dispatcher.deliver(flight).outcome
        except Exception:
            refusals += 1
            if refusals == REFUSALS:
                raise


# In the parent's process ---------------------------------------------------------------------------------------------


class _Worker:
    """The broker's side of one worker: what is acknowledged, and the process that gets the rest."""

    def __init__(self, url: URL, idempotent: bool, lane: Lane) -> None:
        self.counts = _SPAWN.RawArray("q", 5)
        self.by_others = 0
        self._arguments = (url, idempotent, lane, self.counts)
        self._start()

    def _start(self) -> None:
        self._kills = self._planned_kills()
        self.process = _SPAWN.Process(target=_work, args=self._arguments, daemon=True)
        usual = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is for this process, which stops all
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, usual)

    def _planned_kills(self) -> int:
        return int(self.counts[BEFORE_COMMIT] + self.counts[AFTER_COMMIT])

    def finished(self) -> bool:
        """Called when the process has ended: return True if all is acknowledged; else start another one."""
        self.process.join()
        if self.process.exitcode == 0:
            return True
        if self._planned_kills() == self._kills:
            if (self.process.exitcode or 0) > 0:
                raise SystemExit("A worker failed; its traceback is above.")
            self.by_others += 1
        self._start()
        return False


def deliver_all(url: URL, lanes: Sequence[Lane], *, idempotent: bool, on_progress: Callable[[int], None]) -> Tally:
    """Deliver every lane until all of it is acknowledged, and return the counts.

    ``on_progress`` is called again and again with the number of acknowledged deliveries.
    """
    workers: list[_Worker] = []
    try:
        for lane in lanes:
            workers.append(_Worker(url, idempotent, lane))
        running = list(workers)
        while running:
            ended = wait([worker.process.sentinel for worker in running], timeout=0.1)
            on_progress(sum(worker.counts[ACKNOWLEDGED] for worker in workers))
            running = [each for each in running if each.process.sentinel not in ended or not each.finished()]
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()
    counts = [sum(column) for column in zip(*(worker.counts for worker in workers), strict=True)]
    delivered, duplicates, before_commit, after_commit = counts[DELIVERED:]
    by_others = sum(worker.by_others for worker in workers)
    return Tally(delivered, duplicates, before_commit, after_commit, by_others)
