"""Races and crashes that break published algorithms for idempotent commands, and leave ours whole.

Each is made by construction: a handler that is held, a process that is killed, a COMMIT that is cut, a clock that is
put forward. It runs against the algorithms that it breaks, which shows that it can fail, and against `Commands` and
`AsyncCommands` on every engine.
"""

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from algorithms import (
    DONE,
    REQUEST,
    CachedAfterTheCommit,
    Clock,
    DeletedOnAnyError,
    Faulty,
    Handler,
    HandlerOnAnotherConnection,
    InProgressError,
    InProgressUntilItExpires,
    KeyWithoutItsScope,
    LockStore,
    MillisecondsTakenForSeconds,
    Store,
)
from command_rig import Desk, Placed, PlaceOrder, desk_on, place
from cut_proxy import CutProxy
from databases import DRIVERS, USUAL, USUAL_ASYNC
from kit import PATIENCE, Harness
from projector_dedup.commands import Call

OURS = [driver for driver in DRIVERS if driver.drivername == (USUAL_ASYNC if driver.is_async else USUAL)[driver.engine]]
BROKEN: set[type[Faulty]] = set()
"""The algorithms that some race here is written for."""


def against(*algorithms: type[Faulty], engines: tuple[str, ...] = tuple(USUAL)) -> pytest.MarkDecorator:
    """Run a race against algorithms that it breaks, and against ours on each engine, sync and async."""
    BROKEN.update(algorithms)
    faulty = [
        pytest.param((driver, algorithm), id=f"{algorithm.__name__}-{driver}")
        for algorithm in algorithms
        for driver in OURS
        if not driver.is_async and driver.engine in engines and driver.engine in algorithm.engines
    ]
    ours = [pytest.param((driver, None), id=f"ours-{driver}") for driver in OURS if driver.engine in engines]
    return pytest.mark.parametrize("race", [*faulty, *ours], indirect=True)


class Race:
    """One algorithm, faulty or ours, on a desk; and what was placed there."""

    def __init__(self, desk: Desk, algorithm: type[Faulty] | None, store: Store, clock: Clock) -> None:
        self.desk, self.clock = desk, clock
        self.is_faulty = algorithm is not None
        self._algorithm, self._store = algorithm, store

    def handle(self, handler: Handler = place, scope: str | None = None, factory: Any = None) -> Placed:
        """Ask for the one command of every race."""
        order = PlaceOrder(3)
        if self._algorithm is not None:
            return self._algorithm(factory or self.desk.harness.factory, self._store).handle(
                handler, order, "k1", scope
            )
        commands = self.desk.commands(factory)
        answer: Placed = self.desk.handle(
            self.desk.operation(handler), order, key="k1", commands=commands, scope=scope
        ).result
        return answer

    def start(self, handler: Handler) -> Any:
        """Ask for it in a thread; return the future."""
        return self.desk.harness.start(self.handle, handler)

    def dies(self, handler: Handler = place, *, behind_the_first_commit: bool = False) -> None:
        """Ask for it in a process that is killed, by its handler or behind the first COMMIT of whatever it commits."""
        child = os.fork()
        if child == 0:
            try:
                with Harness(self.desk.harness.subject) as harness:
                    if behind_the_first_commit:
                        event.listen(Session, "after_commit", die)
                    Race(Desk(harness), self._algorithm, self._store, self.clock).handle(handler)
            except BaseException:  # noqa: BLE001  # a copy of pytest must not go on
                traceback.print_exc()
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    @property
    def placed(self) -> int:
        """How many orders there are, as another connection sees them."""
        return len(self.desk.orders())


def die(*_: object) -> None:
    """End the process as the power does."""
    os.kill(os.getpid(), signal.SIGKILL)


class Held:
    """A handler that is held before it does anything, and then places the order, or fails."""

    def __init__(self, race: Race, *, fails: bool = False) -> None:
        self.entered, self.may_go_on = threading.Event(), threading.Event()
        self._race, self._fails = race, fails

    def __call__(self, order: PlaceOrder, call: Call) -> Placed:
        """Wait, then place the order."""
        self.entered.set()
        assert self._race.desk.harness.blocking(self.may_go_on.wait, PATIENCE)
        if self._fails:
            raise ValueError("a bug")
        return place(order, call)

    def comes(self) -> None:
        """Return when the handler has been entered."""
        assert self.entered.wait(PATIENCE)


@pytest.fixture
def race(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Race]:
    """The algorithm on an empty desk."""
    driver, algorithm = request.param
    with desk_on(request, driver) as desk:
        desk.harness.transact(lambda session: REQUEST.create(session.connection()))
        clock = Clock()
        yield Race(desk, algorithm, Store(tmp_path / "store.sqlite3", clock), clock)


forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # the child uses no threads of ours


# A process dies -----------------------------------------------------------------------------------------------------


@forks
@against(CachedAfterTheCommit, HandlerOnAnotherConnection)
def test_a_death_behind_the_first_commit(race: Race) -> None:
    """What is durable then must be the whole: a record that comes later never comes, and the retry does it again."""
    race.dies(behind_the_first_commit=True)
    assert race.placed == 1
    race.handle()
    assert race.placed == (2 if race.is_faulty else 1)


@forks
@against(InProgressUntilItExpires, MillisecondsTakenForSeconds)
def test_a_death_in_the_handler(race: Race) -> None:
    """The next caller does it: nobody is there who could still finish it, or take back that somebody is at it."""
    race.dies(lambda _order, _call: die())  # type: ignore[arg-type,return-value]
    race.clock.now += 2 * LockStore.lock
    with contextlib.suppress(InProgressError):
        race.handle()
    assert race.placed == (0 if race.is_faulty else 1)


# The first one fails ------------------------------------------------------------------------------------------------


def fail(order: PlaceOrder, call: Call) -> Placed:
    """Place the order, and then fail."""
    place(order, call)
    raise ValueError("a bug")


@against(InProgressUntilItExpires)
def test_a_failure_leaves_the_key_free(race: Race) -> None:
    """A failure is no answer, and no reason to refuse the next caller for a day."""
    with pytest.raises(ValueError, match="a bug"):
        race.handle(fail)
    with contextlib.suppress(InProgressError):
        race.handle()
    assert race.placed == (0 if race.is_faulty else 1)


@against(LockStore)
def test_done_is_said_of_what_is_done(race: Race) -> None:
    """A rival is answered after the first has committed; where the first fails, the rival does it."""
    held = Held(race, fails=True)
    first = race.start(held)
    held.comes()
    rival = race.start(place)
    if race.is_faulty:
        assert rival.result(PATIENCE) == DONE  # by now nothing is
    else:
        race.desk.harness.waits()
    held.may_go_on.set()
    with pytest.raises(ValueError, match="a bug"):
        first.result(PATIENCE)
    rival.result(PATIENCE)
    assert race.placed == (0 if race.is_faulty else 1)


@against(DeletedOnAnyError, engines=("postgresql", "mariadb"))
def test_a_commit_whose_answer_is_lost(race: Race) -> None:
    """It has happened: an error that the caller sees does not mean that nothing was done."""
    url = race.desk.harness.subject.url
    with CutProxy(url) as proxy:
        create: Callable[..., Any] = create_async_engine if race.desk.harness.asynchronous else create_engine
        engine = create(proxy.through(url))
        proxy.cut_commit("after")
        with contextlib.suppress(DBAPIError):
            race.handle(factory=race.desk.harness.factory_for(engine))
            assert not race.is_faulty
        assert proxy.cuts == 1
        race.desk.harness.run(engine.dispose)
    assert race.placed == 1
    race.handle()
    assert race.placed == (2 if race.is_faulty else 1)


# Two at the same time -----------------------------------------------------------------------------------------------


@against(CachedAfterTheCommit, LockStore)
def test_a_rival_does_not_run(race: Race) -> None:
    """However long the first one takes: there is no lock that expires under a handler."""
    held, other = Held(race), Held(race)
    first = race.start(held)
    held.comes()
    race.clock.now += 2 * LockStore.lock
    rival = race.start(other)
    if race.is_faulty:
        other.comes()
    else:
        race.desk.harness.waits()
    assert other.entered.is_set() == race.is_faulty
    for each in (held, other):
        each.may_go_on.set()
    answers = [future.result(PATIENCE) for future in (first, rival)]
    assert race.placed == len(set(answers)) == (2 if race.is_faulty else 1)


@against(HandlerOnAnotherConnection)
def test_a_rival_gets_the_answer(race: Race) -> None:
    """Not an error of the database, of which nobody can tell that the command was done."""
    held = Held(race)
    first = race.start(held)
    held.comes()
    rival = race.start(place)
    race.desk.harness.waits()
    held.may_go_on.set()
    answer = first.result(PATIENCE)
    if race.is_faulty:
        with pytest.raises(IntegrityError):
            rival.result(PATIENCE)
    else:
        assert rival.result(PATIENCE) == answer
    assert race.placed == 1


@against(LockStore)
def test_a_failure_does_not_let_a_third_one_in(race: Race) -> None:
    """Whoever fails late must not take back the claim of the one who has come meanwhile."""
    late, second, third = Held(race, fails=True), Held(race), Held(race)
    first = race.start(late)
    late.comes()
    race.clock.now += 2 * LockStore.lock
    futures = [race.start(second)]
    if race.is_faulty:
        second.comes()
    else:
        race.desk.harness.waits()
    late.may_go_on.set()
    with pytest.raises(ValueError, match="a bug"):
        first.result(PATIENCE)
    second.comes()
    futures.append(race.start(third))
    if race.is_faulty:
        third.comes()
    else:
        race.desk.harness.waits()
    assert third.entered.is_set() == race.is_faulty  # while the second one is at it
    for each in (second, third):
        each.may_go_on.set()
    for future in futures:
        future.result(PATIENCE)
    assert race.placed == (2 if race.is_faulty else 1)


# One after the other ------------------------------------------------------------------------------------------------


@against(LockStore)
def test_what_is_done_late_is_remembered(race: Race) -> None:
    """Whoever was told "done" has done it for good, also where the handler took longer than any lock."""

    def linger(order: PlaceOrder, call: Call) -> Placed:
        race.clock.now += 2 * LockStore.lock
        return place(order, call)

    race.handle(linger)
    race.handle()
    assert race.placed == (2 if race.is_faulty else 1)


@against(KeyWithoutItsScope)
def test_two_tenants_use_one_key(race: Race) -> None:
    """Each has its command done, and gets its own answer."""
    answers = [race.handle(scope="a")]
    if race.is_faulty:
        with pytest.raises(IntegrityError):
            race.handle(scope="b")
    else:
        answers.append(race.handle(scope="b"))
    assert race.placed == len(set(answers)) == (1 if race.is_faulty else 2)


def test_every_algorithm_is_broken() -> None:
    """None of them is there without a race."""
    assert set(_algorithms(Faulty)) == BROKEN


def _algorithms(kind: type[Faulty]) -> Iterator[type[Faulty]]:
    for each in kind.__subclasses__():
        yield each
        yield from _algorithms(each)
