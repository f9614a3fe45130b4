"""`answered_once` finds mistakes of commands, and has no complaint about right ones."""

from pathlib import Path

import pytest

from kit_commands import MISTAKES, REQUESTS, RIGHT, Base, Case, PlaceOrder, read_spent, spent
from projector_dedup.commands import Call, Codec, command
from projector_dedup.testing.answered_once import CommandCheck
from projector_dedup.testing.checking import Report, UnusableError, engine_on, is_async


def checked(case: Case, where: Path | str) -> Report | None:
    """Check a case on a database."""
    engine = engine_on(where, asynchronous=is_async(case.operation), **case.engine)
    check = CommandCheck(
        case.operation,
        case.requests,
        expected=case.expected,
        read=case.read,
        engine=engine,
        metadata=Base.metadata,
        **case.options,
    )
    return check.run(seed=1, count=4)


def told(report: Report | None) -> str:
    """The text of a report."""
    return "" if report is None else "\n".join(report.lines([str(each) for each in range(20)]))


@pytest.mark.parametrize("case", MISTAKES, ids=str)
def test_a_mistake_is_found(case: Case, tmp_path: Path) -> None:
    """By one of a few schedules."""
    assert checked(case, tmp_path / "kit.sqlite3") is not None


@pytest.mark.nightly
@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_a_right_command_passes(case: Case, tmp_path: Path) -> None:
    """On SQLite."""
    assert told(checked(case, tmp_path / "kit.sqlite3")) == ""


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["postgresql", "mariadb"])
def test_a_right_command_passes_on_a_server(engine: str, request: pytest.FixtureRequest) -> None:
    """Where connections are lost, too."""
    database = request.getfixturevalue(engine)
    (right,) = [each for each in RIGHT if str(each) == "adds"]
    assert told(checked(right, database.url().render_as_string(hide_password=False))) == ""


def test_an_answer_that_changes_is_told(tmp_path: Path) -> None:
    """A codec that does not give back what it got: the second caller gets something else."""
    calls: list[int] = []

    def loads(data: bytes) -> int:
        calls.append(1)
        return int(data) + len(calls)

    @command(name="kit.changes", codec=Codec("changing", lambda value: str(value).encode(), loads))
    def changes(_order: PlaceOrder, _call: Call) -> int:
        return 0

    report = checked(Case(changes, expected=len, read=lambda _: 1, requests=REQUESTS[:1]), tmp_path / "kit.sqlite3")
    assert told(report).startswith("r0 was answered in two ways:\n  first ")


@pytest.mark.parametrize("given", [PlaceOrder("a", 1), (None, PlaceOrder("a", 1)), ("r0",)])
def test_a_request_without_a_key_is_refused(given: object, tmp_path: Path) -> None:
    """Nothing would be recorded for it."""
    engine = engine_on(tmp_path / "kit.sqlite3", asynchronous=False)
    with pytest.raises(UnusableError, match="is no request with a key; give"):
        CommandCheck(RIGHT[0].operation, [given], expected=spent, read=read_spent, engine=engine)
