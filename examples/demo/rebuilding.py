"""Build a new generation of the read model beside live workers, all of which are killed; then ask what it lacks.

The old generation has applied most flights. Live workers deliver the others, and one of them runs old code, which does
not know the new generation. Meanwhile a rebuild reads the archive. The archive lacks some flights, and the new handler
fails on some. The comparison must name exactly these, and those that the old code applied alone. After a second
rebuild, from a whole archive, nothing may be lacking, and both generations must equal the totals of the data file.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import URL, BigInteger, String
from sqlalchemy.orm import Mapped, Session, mapped_column, sessionmaker

from projector_dedup import Dispatcher, on, projector
from projector_dedup.building import building
from projector_dedup.rebuild.lacking import lacking
from projector_dedup.rebuild.rebuild import end_rebuild, rebuild

from .flights import FlightScheduled, Totals
from .projectors import TABLES, Base, CarrierTotals, IdempotentCarriers
from .workers import open_engine

NEW = "demo-idempotent-2"
OLD = "demo-idempotent"
_SPAWN = multiprocessing.get_context("spawn")
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
_BATCH = 500


class CarrierTotals2(Base):
    """The row of one carrier in the new generation, which also knows the longest flight."""

    __tablename__ = "projector_dedup_demo_totals_2"
    carrier: Mapped[str] = mapped_column(String(2), primary_key=True)
    flights: Mapped[int] = mapped_column(default=0)
    miles: Mapped[int] = mapped_column(BigInteger, default=0)
    longest: Mapped[int] = mapped_column(default=0)


@projector(idempotent=True, name=NEW)
class Carriers2:
    """The new generation. It fails on flights that it is told to fail on: a handler with a mistake."""

    def __init__(self, fails_on: frozenset[str] = frozenset()) -> None:
        self._fails_on = fails_on

    @on(FlightScheduled, name="count")
    def count(self, event: FlightScheduled, session: Session) -> None:
        """Add the flight."""
        if event.message_id in self._fails_on:
            raise ValueError("the new handler does not understand this flight")
        totals = session.get_one(CarrierTotals2, event.carrier)
        totals.flights += 1
        totals.miles += event.miles
        totals.longest = max(totals.longest, event.miles)


@dataclass
class Story:
    """The result of a run."""

    history: int
    live: int
    kills: int
    seconds: float  #: that the first rebuild took, kills included
    planted: set[str]  #: ids that must be lacking after the first rebuild
    found: set[str]  #: ids that the comparison named
    lacking_in_the_end: int
    old: dict[str, Totals]
    new: dict[str, Totals]


def run(
    flights: Sequence[FlightScheduled], url: URL, *, workers: int, seed: int, kills: int, omissions: int = 100
) -> Story:
    """Tell the story with these flights at ``url``, whose tables are there; print each step, and return what came."""
    chance = random.Random(seed)  # noqa: S311  # a plan, not a secret
    number = max(len(flights) // 10, workers)
    history, live = list(flights[:-number]), list(flights[-number:])
    planted = chance.sample([flight.message_id for flight in history], min(omissions, len(history)))
    missing, failing = frozenset(planted[::2]), frozenset(planted[1::2])
    engine = open_engine(url)
    factory = sessionmaker(engine)
    before = Dispatcher(factory, IdempotentCarriers(), tables=TABLES)
    for first in range(0, len(history), _BATCH):
        before.deliver_batch(history[first : first + _BATCH])
    _say(f"The old generation has applied {len(history):,} flights. {len(live):,} more come live.")

    lanes = [live[worker::workers] for worker in range(workers)]
    crew = [_Process(_deliver_live, url, lane, worker < workers - 1) for worker, lane in enumerate(lanes)]
    crew.append(_Process(_rebuild, url, [each for each in history if each.message_id not in missing], failing))
    began = time.monotonic()
    killed = _run_and_kill(crew, kills, chance)
    seconds = crew[-1].ended_at - began
    read = len(history) - len(missing)
    _say(
        f"{workers} workers and the rebuild were killed {killed} times. The rebuild took {seconds:,.1f} s for {read:,} "
        f"flights, {read / seconds:,.0f} a second."
    )

    after = Dispatcher(factory, IdempotentCarriers(), Carriers2(), tables=TABLES)
    found = lacking(after, NEW, limit=len(flights))
    _say(
        f"The new generation has {found.old - found.number:,} of {found.old:,}. {found.number:,} are lacking: "
        f"{len(missing)} that the archive lacks, {len(failing)} on which the handler failed, and {len(lanes[-1]):,} of "
        "the worker with old code."
    )
    both = Dispatcher(factory, IdempotentCarriers(), building(Carriers2(), beside=OLD), tables=TABLES)
    again = rebuild(both, NEW, flights, batch_size=_BATCH)
    in_the_end = lacking(after, NEW)
    end_rebuild(after, NEW)
    _say(
        f"A second rebuild, with the mended handler and a whole archive: {again.applied:,} applied, "
        f"{again.duplicates:,} known already. {in_the_end.number:,} are lacking."
    )
    with Session(engine) as session:
        old = {row.carrier: Totals(row.flights, row.miles) for row in session.query(CarrierTotals)}
        new = {row.carrier: Totals(row.flights, row.miles) for row in session.query(CarrierTotals2)}
    engine.dispose()
    return Story(
        len(history),
        len(live),
        killed,
        seconds,
        {*planted, *(flight.message_id for flight in lanes[-1])},
        set(found.ids),
        in_the_end.number,
        old,
        new,
    )


def _say(text: str) -> None:
    print(textwrap.fill(text, 79), flush=True)


# Processes that are killed and started again -------------------------------------------------------------------------


class _Process:
    """A process that is started again until it has done its work. ``done``, which outlives it, counts flights."""

    def __init__(self, target: Any, url: URL, work: Sequence[FlightScheduled], extra: Any) -> None:
        self.done = _SPAWN.RawValue("q", 0)
        self.total = len(work)
        self.ended_at = 0.0
        self._target, self._arguments = target, (url, work, extra, self.done)
        self._start()

    def _start(self) -> None:
        self._process = _SPAWN.Process(target=self._target, args=self._arguments, daemon=True)
        self._process.start()

    def kill(self) -> None:
        """Kill it, wherever it is, and start it again."""
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, _KILL)
        self._process.join()
        self._start()

    def has_ended(self) -> bool:
        """True if its work is done; raise `SystemExit` if it failed."""
        if self._process.is_alive():
            return False
        if self._process.exitcode:
            raise SystemExit("A process failed; its traceback is above.")
        self.ended_at = self.ended_at or time.monotonic()
        return True

    def stop(self) -> None:
        """End it for good."""
        self._process.kill()
        self._process.join()


def _run_and_kill(crew: Sequence[_Process], kills: int, chance: random.Random) -> int:
    """Wait until every process has done its work; kill each at points of its progress. Return the number of kills."""
    points: list[list[float]] = [[] for _ in crew]
    for number in range(kills):
        points[number % len(crew)].append(chance.uniform(0.02, 0.98))
    killed = 0
    try:
        while sum(process.has_ended() for process in crew) < len(crew):  # each is asked, and notes when it ended
            for process, its in zip(crew, points, strict=True):
                if its and process.done.value >= min(its) * process.total and not process.has_ended():
                    its.remove(min(its))
                    process.kill()
                    killed += 1
            time.sleep(0.005)
    finally:
        for process in crew:
            process.stop()
    return killed


def _deliver_live(url: URL, flights: Sequence[FlightScheduled], knows_both: bool, done: Any) -> None:
    """Deliver one flight after the other, from the first that is not acknowledged."""
    factory = sessionmaker(open_engine(url))
    generations: list[Any] = [IdempotentCarriers()]
    if knows_both:
        generations.append(building(Carriers2(), beside=OLD))
    dispatcher = Dispatcher(factory, *generations, tables=TABLES)
    while done.value < len(flights):
        dispatcher.deliver(flights[done.value])
        done.value += 1  # the acknowledgement


def _rebuild(url: URL, archive: Sequence[FlightScheduled], failing: frozenset[str], done: Any) -> None:
    """Rebuild from an archive; a process that was killed is started again, and reads it from the first flight."""
    factory = sessionmaker(open_engine(url))
    new = building(Carriers2(failing), beside=OLD)
    dispatcher = Dispatcher(factory, IdempotentCarriers(), new, tables=TABLES)
    done.value = 0

    def read(more: int) -> None:
        done.value += more

    rebuild(dispatcher, NEW, archive, batch_size=_BATCH, on_batch=read, failed=lambda _delivery: None)
