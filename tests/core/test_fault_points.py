"""A fault at any step of a delivery leaves nothing behind, and every message counts once.

The steps are those of tests/core/fault_points.txt, recorded from what goes over the wire. After an intended change:
`APPROVE=1 python -m pytest -n 0 tests/core/test_fault_points.py -k written_down`, then read the difference.
"""

import asyncio
import contextlib
import gc
import os
import re
import signal
import traceback
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Self

import pytest

import costs
from databases import DRIVERS, SERVERS, USUAL_DRIVERS, Driver, each_driver
from fault_points import SCENARIOS, Fault, Point, RaisedError, Scenario, Told, Worker, number_of, totals_of
from projector_dedup import Outcome
from projector_dedup.errors import BatchFailed, CommitOutcomeUnknown
from reached import reached
from rig import Outside

pytestmark = pytest.mark.slow

PATH = Path(__file__).parent / "fault_points.txt"
TRIP = "> "
HEAD = """\
# The points at which a delivery meets faults in tests/core/test_fault_points.py

`>` is a round trip, which has a point before the server gets it, and one after it has answered; on SQLite a call of
sqlite3. `-` is a point between them. Statements are named by their tables. What SQLAlchemy sends to greet a new
connection is walked too, and not listed.
"""
MAY_HAVE_COMMITTED = (RaisedError, KeyboardInterrupt, asyncio.CancelledError, CommitOutcomeUnknown)
"""Errors after which the delivery may have committed; after all others it has not."""
ENOUGH = 5
"""A walk ends after so many points at which it failed: the reason is the same at most of them."""


@pytest.fixture
def outside(driver: Driver, outsides: dict[str, Outside | str]) -> Iterator[Outside]:
    """The database of the driver, seen from outside by a connection of this test's own, which a time limit may cut."""
    if not driver.installed:
        reached.give_up(driver.engine, str(driver), f"{driver.module} is not installed")
    shared = outsides[driver.engine]
    if isinstance(shared, str):
        reached.give_up(driver.engine, driver.engine, shared)
    with contextlib.closing(Outside(shared.database)) as own:
        yield own


def points_of(driver: Driver, outside: Outside, scenario: Scenario) -> list[Point]:
    """The points of a delivery that meets no fault."""
    outside.empty()
    with Worker(driver, outside.database, is_command=scenario.is_command) as dry:
        assert dry.deliver(scenario).error is None
    assert applied(outside, scenario) == scenario.input
    return dry.points.passed


def applied(outside: Outside, scenario: Scenario) -> set[int]:
    """The messages that are marked, of which each must count once in the read model, and no other.

    A record of a command must have its outcome: no row without one is ever committed.
    """
    ids = [row[0] for row in outside.execute(f"select message_id from {scenario.table}")]  # a name of ours
    if scenario.is_command:
        assert outside.execute("select message_id from processed_command where outcome is null or result is null") == []
    numbers = {number_of(message_id) for message_id in ids}
    assert len(numbers) == len(ids), f"a message has two markers: {ids}"
    totals = {str(account): int(amount) for account, amount in outside.execute("select account, amount from total")}
    assert totals == totals_of(numbers), f"marked: {numbers}"
    return numbers


def meet(workers: "Workers", scenario: Scenario, fault: Fault, at: int, committed: bool | None) -> None:
    """Deliver with a fault at one point, look, and deliver again; ``committed`` is None if that is open."""
    outside = workers.outside
    outside.empty()
    if fault is Fault.KILL:
        kill(workers.driver, outside, scenario, at)
        outside.assert_nothing_is_held()
        look(scenario, None, applied(outside, scenario), committed)
    else:
        worker = workers.struck
        told = worker.deliver(scenario, at, fault)
        assert worker.points.struck is not None, f"it did not come to this point: {told}"
        assert worker.engine.pool.checkedout() == 0, "a connection is out of the pool"  # type: ignore[attr-defined]
        outside.assert_nothing_is_held()
        marked = applied(outside, scenario)
        look(scenario, told, marked, committed)
        for number in scenario.messages:
            assert worker.redeliver(number) is (Outcome.DUPLICATE if number in marked else Outcome.APPLIED)
            marked.add(number)
    while True:
        everything, marked = sorted(scenario.input), applied(outside, scenario)
        expected = [Outcome.DUPLICATE if number in marked else Outcome.APPLIED for number in everything]
        assert workers.another.redeliver_all(everything) == expected
        if marked == scenario.input:
            break
    assert applied(outside, scenario) == scenario.input
    outside.assert_nothing_is_held()


class Workers:
    """A worker that meets the faults, and another one that delivers again. Both are replaced after a failure."""

    def __init__(self, driver: Driver, outside: Outside, *, is_command: bool) -> None:
        self.driver, self.outside = driver, outside
        self._is_command = is_command
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self.another = self._stack.enter_context(self._worker(is_watched=False))
        self.struck = self._stack.enter_context(self._worker(is_watched=True))
        return self

    def _worker(self, *, is_watched: bool) -> Worker:
        return Worker(self.driver, self.outside.database, is_watched=is_watched, is_command=self._is_command)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def replace(self) -> None:
        """Make new ones, so that a failure at one point causes none at the next."""
        self._stack.close()
        gc.collect()  # a connection that was lost to its pool holds its locks
        if self.driver.engine != "sqlite":
            self.outside.kill_others()
        self.__enter__()


def kill(driver: Driver, outside: Outside, scenario: Scenario, at: int) -> None:
    """Deliver in a process that is killed at one point."""
    child = os.fork()
    if child == 0:
        try:
            with Worker(driver, outside.database, is_command=scenario.is_command) as worker:
                print("it was not killed:", worker.deliver(scenario, at, Fault.KILL))  # noqa: T201  # for the report
        except BaseException:  # noqa: BLE001  # a copy of pytest must not go on
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def look(scenario: Scenario, told: Told | None, marked: set[int], committed: bool | None) -> None:
    """Compare what is durable with what the worker said; of the delivery under test it is all or nothing."""
    warm, new = set(scenario.warm), set(scenario.messages) - set(scenario.warm)
    assert warm <= marked <= scenario.input
    if told is not None:
        assert told.settled <= marked, "what was acknowledged is lost"
        if told.error is None:
            assert told.settled == set(scenario.messages)
            return
        if isinstance(told.error, BatchFailed):
            return
        assert isinstance(told.error, MAY_HAVE_COMMITTED) or not new & marked, f"applied, in spite of {told.error!r}"
    assert new & marked in (set(), new), f"a part is applied: {new & marked}"
    assert committed is None or new & marked == (new if committed else set()), f"committed: {committed}; {told}"


def walks() -> Iterator[Any]:
    """Drivers, faults and scenarios. Each driver has the connection cut, and an error or a cancellation, in a delivery.

    The usual drivers meet both in a batch and a command, too, and the sync ones a cut in every scenario. A process is
    killed on SQLite: where the database is a server, tests/proofs/exploring kills a client at each of its messages.
    """
    for driver in DRIVERS:
        usual = driver in USUAL_DRIVERS
        main = ["new message", "batch", "command"] if usual else ["new message"]
        raised = Fault.CANCEL if driver.is_async else Fault.RAISE
        walked = [*product([Fault.CUT], SCENARIOS if usual and not driver.is_async else main), *product([raised], main)]
        if usual and not driver.is_async:
            rare = [Fault.INTERRUPT, Fault.KILL] if driver.engine == "sqlite" else [Fault.INTERRUPT]
            walked += product(rare, ["new message"])
        for fault, name in walked:
            marks = pytest.mark.nightly if driver.is_async and name != "new message" else ()
            yield pytest.param(driver, fault, name, id=f"{driver}-{fault.name.lower()}-{name}", marks=marks)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # the child starts threads, and uses no others
@pytest.mark.timeout(600)  # up to 62 points, with a transaction or more than ten at each
@pytest.mark.by_turns
@pytest.mark.parametrize(("driver", "fault", "name"), [*walks()])
def test_a_fault_at_any_point_leaves_nothing_behind(driver: Driver, fault: Fault, name: str, outside: Outside) -> None:
    """At every point: no connection, transaction or lock stays; what was acknowledged is durable; totals are exact."""
    scenario = SCENARIOS[name]
    points = points_of(driver, outside, scenario)
    failures = []
    with Workers(driver, outside, is_command=scenario.is_command) as workers:
        for at, point in enumerate(points):
            if not fault.can_happen(driver, point):
                continue
            try:
                meet(workers, scenario, fault, at, has_committed(scenario, points, at, fault))
            except Exception as error:  # noqa: BLE001  # told below, with the others
                failures.append(f"{at} {point}: {type(error).__name__}: {error}")
                if len(failures) == ENOUGH:
                    break
                workers.replace()
    if failures:
        pytest.fail("\n".join([f"{len(failures)} of {len(points)} points:", *failures]), pytrace=False)


def has_committed(scenario: Scenario, points: list[Point], at: int, fault: Fault) -> bool | None:
    """True if the delivery has committed when a fault at one of its points ends it; None if that is open."""
    commits = [index for index, point in enumerate(points) if point.is_sent and re.search(r"\bCOMMIT\b", point.step)]
    if not commits:
        return False
    sending, answered = commits[-2:]
    if at >= answered:
        return True
    handled = max((index for index, point in enumerate(points) if point.step == "the handler"), default=sending)
    if fault is Fault.CANCEL and at >= handled:  # from here on it waits for the end; a batch does from COMMIT on
        return None if scenario.is_batch and at < sending else True
    return None if at == sending and fault in (Fault.RAISE, Fault.INTERRUPT) else False


# What is walked ----------------------------------------------------------------------------------------------------


@each_driver()
def test_the_points_are_those_written_down(driver: Driver, outside: Outside) -> None:
    """A statement that is new, gone or elsewhere is seen in review."""
    found = {f"{driver}: {name}": lines_of(points_of(driver, outside, SCENARIOS[name])) for name in SCENARIOS}
    if os.environ.get("APPROVE"):
        PATH.write_text(rendered(written() | found))
    assert found == {title: lines for title, lines in written().items() if title.startswith(f"{driver}: ")}


def test_the_list_has_every_driver_and_scenario() -> None:
    """No driver without its points, no points left over."""
    assert list(written()) == [f"{driver}: {name}" for driver in DRIVERS for name in SCENARIOS]
    assert PATH.read_text() == rendered(written())


@each_driver(*SERVERS)
def test_deliveries_go_the_way_that_is_measured(driver: Driver) -> None:
    """They take the round trips of tests/core/costs.md; the handler here has one SELECT and one UPDATE more."""
    prepares = driver.module == "psycopg"  # the SELECT at its sixth use, by a round trip of its own
    for name, more in (("new message", 2 + prepares), ("redelivery", 0)):
        trips = [line for line in written()[f"{driver}: {name}"] if line.startswith(TRIP)]
        assert len(trips) == int(costs.written()[costs.column(driver)][name].split()[-1]) + more


def lines_of(points: list[Point]) -> list[str]:
    """A line for each round trip, which has two points, and for each other point.

    How SQLAlchemy greets a new connection is left out: another release may do it otherwise.
    """
    connected = next(at for at, point in enumerate(points) if not point.is_sent and point.where == "after")
    return [
        f"{TRIP}{point.step}" if point.is_sent else f"- {point}"
        for point in (points[0], *points[connected:])
        if not (point.is_sent and point.where == "after")
    ]


def written() -> dict[str, list[str]]:
    """Read the list: the lines of each driver and scenario."""
    _, *parts = PATH.read_text().split("## ") if PATH.exists() else [""]
    return {title: lines for title, *lines in (part.split("\n")[:-2] for part in parts)}


def rendered(found: dict[str, list[str]]) -> str:
    """Write the list, in the order of the drivers."""
    titles = [f"{driver}: {name}" for driver in DRIVERS for name in SCENARIOS]
    parts = ["\n".join([f"## {title}", *found[title], ""]) for title in titles if title in found]
    return "\n".join([HEAD, *parts]) + "\n"
