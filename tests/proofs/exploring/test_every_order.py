"""Two clients keep the promises in every order of their round trips, with at most one fault.

actors.py and asking.py have the cases. docs/project/proofs.md says what is explored, what is not, and what
exploration finds. To run one order alone, paste the test that a failure prints.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

import actors
import asking
from actors import Case, Round, Stage, Work, Worker, more_tables
from algorithms import (
    CachedAfterTheCommit,
    DeletedOnAnyError,
    Faulty,
    HandlerOnAnotherConnection,
    InProgressUntilItExpires,
    KeyWithoutItsScope,
    LockStore,
    MillisecondsTakenForSeconds,
)
from asking import ask_of, check_asked, with_customer
from databases import DRIVERS, USUAL, USUAL_ASYNC, Driver
from reached import reached
from scheduler import Choice, Explored, Order, Step, WrongOrderError, explore

CASES = actors.CASES | asking.CASES
SECONDS = float(os.environ.get("PROJECTOR_DEDUP_TEST_EXPLORE", "0"))
"""Seconds for each case and driver, in `make explore`; 0 in the usual tests, which run few cases to their end."""
SEED = int(os.environ.get("PROJECTOR_DEDUP_TEST_SEED", "1"))
EVERYWHERE = ("one message", "two messages, one row")
"""The cases that the usual tests run on each database, sync and async; the others run with psycopg."""
AT_LENGTH = ("a command that is forgotten",)
"""The cases that only `make explore` runs: `forget` takes the same steps for a message."""
SERVED = [driver for driver in DRIVERS if driver.engine != "sqlite"]


def _is_usual(driver: Driver, case: Case) -> bool:
    usual = (USUAL_ASYNC if driver.is_async else USUAL)[driver.engine] == driver.drivername
    chosen = case.name in EVERYWHERE or driver.drivername == "postgresql+psycopg"
    return usual and chosen and case.name not in AT_LENGTH


def _bounded(driver: Driver, case: Case) -> Case:
    """Return the case as it is run: without a bound in `make explore`, and of the usual tests only with psycopg."""
    if SECONDS:
        return replace(case, surprises=None, faults=1)
    return case if str(driver) == "postgresql+psycopg" else replace(case, surprises=1)


ALL = [
    pytest.param(
        driver,
        _bounded(driver, case),
        id=f"{case.name}-{driver}",
        marks=pytest.mark.nightly if case.is_long and not SECONDS else (),
    )
    for case in CASES.values()
    for driver in SERVED
    if not (case.is_sync and driver.is_async) and (SECONDS or _is_usual(driver, case))
]


@pytest.fixture
def stage_on(request: pytest.FixtureRequest) -> Iterator[Callable[..., Stage]]:
    """Make a stage on a driver, given by its name or as one of `DRIVERS`."""
    with ExitStack() as stack:

        def make(given: str | Driver, clients: int = 2) -> Stage:
            driver = next(each for each in DRIVERS if given in (each, str(each)))
            if not driver.installed:
                reached.give_up(driver.engine, str(driver), f"{driver.module} is not installed")
            outside = request.getfixturevalue("outsides")[driver.engine]
            if isinstance(outside, str):
                reached.give_up(driver.engine, driver.engine, outside)
            more_tables(outside.database)
            return stack.enter_context(Stage(driver, outside, clients))

        yield make


def explored(stage: Stage, case: Case) -> Explored:
    """Run the orders of a case. A failure is printed as a test that runs that order alone."""

    def run(order: Order) -> list[Step]:
        try:
            return stage.run(case, order)
        except (AssertionError, WrongOrderError) as error:
            raise AssertionError("\n".join(_report(stage, case, order, error))) from None

    found = explore(run, surprises=case.surprises, seconds=SECONDS or None, seed=SEED)
    reached.explored(f"{case.name}, {stage.driver}{'' if found.complete else ', not all'}", found.orders)
    return found


def _report(stage: Stage, case: Case, order: Order, error: Exception) -> Iterator[str]:
    yield f"{case.name}, {stage.driver}: {error}"
    yield "The order, up to its last surprise, and what follows:"
    for number, step in enumerate(stage.scheduler.steps):
        follows = "" if number < len(order) else "  (follows)"
        fault = "" if step.choice.branch == "go" else f"  <- {step.choice.branch}"
        yield f"  client {step.choice.client}: {step.trip}{fault}{follows}"
    yield "A test that runs this order alone:"
    yield ""
    yield "def test_this_order(stage_on):"
    yield '    """Once, it failed."""'
    yield f"    order = {', '.join(map(_written, order))},"
    yield f"    stage_on({str(stage.driver)!r}, {len(case.work)}).run(CASES[{case.name!r}], order)"


def _written(choice: Choice) -> str:
    return f"Choice({choice.client})" if choice.branch == "go" else f'Choice({choice.client}, "{choice.branch}")'


@pytest.mark.by_turns
@pytest.mark.parametrize(("driver", "case"), ALL)
@pytest.mark.timeout(SECONDS + 300)
def test_every_order(stage_on: Callable[..., Stage], driver: Driver, case: Case) -> None:
    """What must be true afterwards is true after each order, and the search has come to its end."""
    found = explored(stage_on(driver, len(case.work)), case)
    assert SECONDS or (found.complete and found.orders > 10)


def test_the_pasted_test_runs_one_order(stage_on: Callable[..., Stage]) -> None:
    """The form in which a failure is printed."""
    order = Choice(0), Choice(0), Choice(1), Choice(0, "kill")
    steps = stage_on("postgresql+psycopg", 2).run(CASES["one message"], order)
    assert tuple(step.choice for step in steps[:4]) == order


def _update(*names: str) -> Work:
    def work(at: Round, worker: Worker) -> None:
        with worker.engine.begin() as connection:
            for name in names:
                connection.exec_driver_sql(f"update total set amount = 1 where account = '{at.name}{name}'")

    return work


def _with_two_rows(stage: Stage, at: Round) -> None:
    stage.outside.execute(f"insert into total values ('{at.name}a', 0), ('{at.name}b', 0)")


def test_a_deadlock_is_found(stage_on: Callable[..., Stage]) -> None:
    """Two clients lock two rows in different orders."""
    case = Case("a deadlock", (_update("a", "b"), _update("b", "a")), _with_two_rows, lambda _stage, _round: None)
    with pytest.raises(AssertionError, match="clients wait for each other's locks"):
        explored(stage_on("postgresql+psycopg"), case)


PUBLISHED = (
    CachedAfterTheCommit,
    DeletedOnAnyError,
    HandlerOnAnotherConnection,
    InProgressUntilItExpires,
    LockStore,
    MillisecondsTakenForSeconds,
)


@pytest.mark.parametrize("algorithm", PUBLISHED)
def test_the_faults_of_published_algorithms_are_found(
    stage_on: Callable[..., Stage], algorithm: type[Faulty], tmp_path: Path
) -> None:
    """Nobody has told the search where to look."""
    work = ask_of(algorithm, tmp_path / "store.sqlite3")
    case = Case(algorithm.__name__, (work, work), with_customer, check_asked(work, 0))
    with pytest.raises(AssertionError, match="A test that runs this order alone"):
        explored(stage_on("postgresql+psycopg"), case)


def test_the_fault_of_a_key_without_its_scope_is_found(stage_on: Callable[..., Stage], tmp_path: Path) -> None:
    """Two clients ask in two scopes, with one key."""
    work = ask_of(KeyWithoutItsScope, tmp_path / "store.sqlite3", scopes=2)
    case = Case("one key in two scopes", (work, work), with_customer, check_asked(work, 0, 1))
    with pytest.raises(AssertionError, match="A test that runs this order alone"):
        explored(stage_on("postgresql+psycopg"), case)
