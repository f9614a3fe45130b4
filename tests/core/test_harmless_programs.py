"""A handler that is right in a plain session, at the database's own level and under rivals, is right with the library.

Handlers are drawn by lot: `make harmless` draws thousands.
"""

from dataclasses import replace

import pytest

from databases import DRIVERS, USUAL_DRIVERS, Driver
from harmless.programs import Group, Part, Program, draw, each
from harmless.running import WAYS, Judged, Stage, judge, quiet
from harmless.turn import FREE, LOCKS, UNDER_LOCK, Lock, Turn, Work
from reached import reached

EACH = 4  # programs of a test
USUAL = [driver for driver in USUAL_DRIVERS if not driver.is_async]
OTHERS = [driver for driver in DRIVERS if driver not in USUAL]


def _stage(request: pytest.FixtureRequest, driver: Driver, **levels: str) -> Stage:
    if not driver.installed:
        reached.give_up(driver.engine, str(driver), f"{driver.module} is not installed")
    return Stage(request.getfixturevalue(driver.engine), driver, **levels)


def _judged(request: pytest.FixtureRequest, driver: Driver, seeds: range, *ways: str) -> list[Judged]:
    with quiet(), _stage(request, driver) as stage:
        return [judge(stage, draw(driver.engine, seed), ways, controls=2) for seed in seeds]


def _harm(judged: list[Judged]) -> list[str]:
    return [
        f"{verdict.kind} by {way}: program {one.program}: {verdict.detail}"
        for one in judged
        for way, verdict in one.verdicts.items()
        if verdict.kind != "right"
    ]


@pytest.mark.by_turns
@pytest.mark.parametrize("first", range(1, 13, EACH))
@pytest.mark.parametrize("driver", USUAL, ids=str)
def test_programs_that_are_right_alone_are_right_with_the_library(
    request: pytest.FixtureRequest, driver: Driver, first: int
) -> None:
    """The read models are those of the input, by single deliveries and by batches, and no message is refused."""
    judged = _judged(request, driver, range(first, first + EACH), "single", "batch")
    assert not _harm(judged)
    assert sum(one.left_out is None for one in judged) >= EACH / 2  # else the draw is of little use


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("driver", OTHERS, ids=str)
def test_on_other_drivers(request: pytest.FixtureRequest, driver: Driver) -> None:
    """The same on every other driver, asynchronous ones included."""
    assert not _harm(_judged(request, driver, range(101, 104), *WAYS))


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("driver", USUAL, ids=str)
def test_many_programs(request: pytest.FixtureRequest, driver: Driver) -> None:
    """The same for many programs, also as commands, and beside a service that has no library."""
    assert not _harm(_judged(request, driver, range(201, 221), *WAYS))


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("driver", USUAL, ids=str)
def test_each_lock_and_each_work(request: pytest.FixtureRequest, driver: Driver) -> None:
    """Each of them is right alone in a program of its own, and right with the library."""
    with quiet(), _stage(request, driver) as stage:
        judged = [judge(stage, program, ["single", "batch"], controls=1) for program in each(driver.engine)]
    assert not _harm(judged)
    assert [str(one.program) for one in judged if one.left_out and not one.program.remains] == []


# The judge itself -----------------------------------------------------------------------------------------------------

POSTGRESQL = USUAL[0]


def _called(register: list[Work], name: str) -> Part:
    return Part(next(each for each in register if each.name == name), 0)


def _lock(name: str) -> Lock:
    return next(each for each in LOCKS if each.name == name)


def _program(driver: Driver, *groups: Group) -> Program:
    return Program(0, driver.engine, groups, "dict", 1)


@pytest.mark.parametrize("driver", USUAL, ids=str)
@pytest.mark.parametrize("name", ["ledger", "running_number", "adds", "reads_and_writes_by_core"])
def test_what_is_wrong_alone_does_not_count(request: pytest.FixtureRequest, driver: Driver, name: str) -> None:
    """Without its lock a read and a write are wrong in plain sessions, and the program is left out."""
    program = _program(driver, Group((_called(UNDER_LOCK, name),)))
    with quiet(), _stage(request, driver) as stage:
        assert judge(stage, program, ["single"]).left_out == "alone: wrong"


@pytest.mark.parametrize("way", ["single", "batch", "command"])
def test_what_is_wrong_with_the_library_is_seen(request: pytest.FixtureRequest, way: str) -> None:
    """A level at which a lock protects nothing that is read later, chosen by the handler, makes its ledger wrong."""
    program = _program(POSTGRESQL, Group((_called(UNDER_LOCK, "ledger"),), _lock("select_for_update")))
    with quiet(), _stage(request, POSTGRESQL, isolation="REPEATABLE READ") as stage:
        verdict = judge(stage, program, [way]).verdicts[way]
    assert verdict.kind == "silent"
    assert "broken at line" in verdict.detail


def test_what_is_refused_is_loud(request: pytest.FixtureRequest) -> None:
    """An error that stays is loud, and what was applied meanwhile is still compared."""

    work = _called(FREE, "upserts").work

    def refuses(turn: Turn) -> None:
        if turn.event["number"] % 2:
            raise KeyError("odd")
        work.run(turn)

    program = _program(POSTGRESQL, Group((Part(Work("refuses", refuses, work.models), 0),)))
    with quiet(), _stage(request, POSTGRESQL) as stage:
        assert judge(stage, program, ["single"]).left_out == "alone: raises KeyError"
        verdict = stage.with_library(program, "single")
    assert verdict.kind == "loud"
    assert "12 refused" in verdict.detail


@pytest.mark.parametrize("way", ["single", "batch"])
def test_a_handler_that_fails_anyway_does_no_harm(request: pytest.FixtureRequest, way: str) -> None:
    """Messages at which the handler fails, alone as well, are dead letters that are worth nothing."""
    program = replace(_program(POSTGRESQL, Group((_called(FREE, "updates"),))), poison=(3, 4))
    with quiet(), _stage(request, POSTGRESQL) as stage:
        assert judge(stage, program, [way]).verdicts[way].kind == "right"


@pytest.mark.parametrize("driver", USUAL, ids=str)
def test_a_seed_draws_the_same_program(driver: Driver) -> None:
    """What is printed with a seed can be drawn again; and every register is drawn from."""
    drawn = [draw(driver.engine, seed) for seed in range(400)]
    assert [str(each) for each in drawn] == [str(draw(driver.engine, seed)) for seed in range(400)]
    drawn_from = {part.work.name for each in drawn for part in each.parts}
    drawn_from |= {group.lock.name for each in drawn for group in each.groups if group.lock}
    assert {each.name for each in LOCKS if driver.engine in each.engines} <= drawn_from
    assert {each.name for each in (*UNDER_LOCK, *FREE) if driver.engine in each.engines} <= drawn_from
