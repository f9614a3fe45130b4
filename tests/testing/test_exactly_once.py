"""`exactly_once` finds mistakes of handlers, and has no complaint about right ones."""

import dataclasses
import os
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.orm import Session

from databases import Database
from kit_handlers import MISTAKES, PAYMENTS, RIGHT, Base, Case, Paid, Totals, add, check_of, sums
from projector_dedup import on, projector
from projector_dedup.message import by_path
from projector_dedup.testing.checking import Report, UnusableError, engine_on
from projector_dedup.testing.elsewhere import called_elsewhere
from projector_dedup.testing.exactly_once import is_async
from projector_dedup.testing.schedules import How, Turn, is_reordered

CASES = {str(case): case for case in (*MISTAKES, *RIGHT)}


@pytest.fixture(name="checked")
def checked_fixture(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Report | None]:
    """Check a case on a database: on SQLite, or on PostgreSQL where it needs a server."""

    def checked(case: Case, database: Database | None = None, **arguments: Any) -> Report | None:
        if database is None and case.server:
            database = request.getfixturevalue("postgresql")
        url = tmp_path / "kit.sqlite3" if database is None else database.url()
        engine = engine_on(url, asynchronous=is_async(case.make), **case.engine)
        settings = {"expected": case.expected, "read": case.read, "engine": engine, **case.options, **arguments}
        return check_of(case.make, **settings).run(seed=1, count=4)

    return checked


def told(report: Report | None) -> str:
    """The text of a report."""
    return "" if report is None else "\n".join(report.lines([each.message_id for each in PAYMENTS]))


@pytest.mark.by_turns
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")  # one of the mistakes
@pytest.mark.parametrize("case", MISTAKES, ids=str)
def test_a_mistake_is_found(case: Case, checked: Callable[..., Report | None]) -> None:
    """By one of the schedules."""
    assert checked(case) is not None


@pytest.mark.nightly
@pytest.mark.parametrize("case", RIGHT, ids=str)
def test_a_right_projector_passes(case: Case, checked: Callable[..., Report | None]) -> None:
    """No schedule makes its read model wrong."""
    assert told(checked(case)) == ""


def test_a_failure_is_told_as_the_smallest_schedule(checked: Callable[..., Report | None]) -> None:
    """One message is left of six, twice; and the values are those of that schedule."""
    naive = CASES["naive"]
    report = checked(naive)
    assert report is not None
    assert [turn.how for turn in report.schedule] == ["deliver", "deliver"]
    ((number,),) = {turn.messages for turn in report.schedule}
    paid = PAYMENTS[number]
    assert told(report).splitlines()[1:3] == [
        f"  expected {{'{paid.account}': {paid.amount}}}",
        f"  but got  {{'{paid.account}': {2 * paid.amount}}}",
    ]


@pytest.mark.parametrize(("name", "is_told"), [("order_assumed", True), ("naive", False)])
def test_an_order_that_nobody_declared_is_told(
    name: str, is_told: bool, checked: Callable[..., Report | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the messages of the smallest schedule come in another order than in the list."""
    monkeypatch.setattr("projector_dedup.testing.checking.SHRINKING", 60.0)  # else a busy machine stops before
    case = CASES[name]
    assert ("ordered=True, or ordered=lambda event:" in told(checked(case))) is is_told


def test_a_value_is_compared_after_all_messages(checked: Callable[..., Report | None]) -> None:
    """With a value instead of a function, the smallest schedule still has every message."""
    naive = CASES["naive"]
    report = checked(naive, expected=sums(PAYMENTS))
    assert report is not None
    numbers = [number for turn in report.schedule for number in turn.messages]
    assert len(numbers) == len(PAYMENTS) + 1
    assert {*numbers} == {*range(len(PAYMENTS))}


def test_a_value_that_cannot_be_read_is_a_failure(checked: Callable[..., Report | None]) -> None:
    """And not an error: the row that `read` looks for may be missing because of the mistake."""
    right = CASES["right_sums"]

    def read(session: Session) -> int:
        return session.get_one(Totals, "c").amount

    report = checked(dataclasses.replace(right, read=read))
    assert told(report).startswith("The value cannot be read or computed: NoResultFound: ")


def test_there_are_as_many_as_the_page_says() -> None:
    """More than 20 mistakes, and more than 20 right projectors."""
    assert min(len(MISTAKES), len(RIGHT)) > 20


def test_a_message_that_consumers_reject_is_a_failure(checked: Callable[..., Report | None]) -> None:
    """The report says what to raise instead; a test may say that its broker delivers again whatever the error is."""
    demanded = CASES["row_demanded"]
    report = checked(demanded)
    said = r"Message .* becomes a dead letter: NoResultFound: .*\nRaise Defer .* redelivers=True"
    assert re.match(said, told(report))
    assert report is not None
    assert [turn.how for turn in report.schedule] == ["deliver"]
    assert told(checked(demanded, redelivers=True)) == ""


def test_no_schedule_has_a_batch_if_the_user_has_none(checked: Callable[..., Report | None]) -> None:
    """A handler that keeps only the last of a batch is right then."""
    last = CASES["last_of_the_batch"]
    assert checked(last) is not None
    assert told(checked(last, batches=False)) == ""


@dataclass(frozen=True, slots=True)
class PaidTo:
    """A payment whose id is computed from the set of its accounts."""

    accounts: frozenset[str]
    amount: int = 5

    @property
    def message_id(self) -> str:
        """The id is the order of the set."""
        return ",".join(self.accounts)


def sorted_id(prefix: str) -> Callable[[PaidTo], str]:
    """An id that is the same in every process, made by a function that knows something else."""
    return lambda paid: f"{prefix}-{','.join(sorted(paid.accounts))}"


def ids_of(tmp_path: Path, *messages: object, **arguments: Any) -> Report | None:
    """Check a handler that counts messages of any class."""

    @projector(idempotent=True, name="counts")
    class Counts:
        @on(object, subclasses=True)
        def apply(self, _event: object, session: Session) -> None:
            add(Paid("", "a", 1), session)

    engine = engine_on(tmp_path / "kit.sqlite3", asynchronous=False)
    return check_of(Counts, messages, expected=lambda given: {"a": len(given)}, engine=engine, **arguments).run(1, 0)


def test_an_id_is_computed_in_another_process_too(tmp_path: Path) -> None:
    """There, a set has another order. A function that is the same everywhere passes, whether it has a name or not."""
    given = PaidTo(frozenset(f"account-{number}" for number in range(9)))
    said = r"The id of PaidTo\(.* is 'account-.*', and 'account-.*' in another process\. .* hash\(\), .*"
    assert re.fullmatch(said, told(ids_of(tmp_path, given)))
    assert told(ids_of(tmp_path, given, message_id=sorted_id("paid"))) == ""
    assert told(ids_of(tmp_path, {"head": {"id": "m1"}}, message_id=by_path("head.id"))) == ""

    def joined(event: PaidTo, *, by: str = "-") -> str:
        return by.join(sorted(event.accounts))

    assert told(ids_of(tmp_path, given, message_id=joined)) == ""


@pytest.mark.parametrize(("here", "there"), [(None, "1"), ("random", "1"), ("0", "1"), ("1", "2")])
def test_the_other_process_has_another_seed(here: str | None, there: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the seed of this process is fixed."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if here is not None:
        monkeypatch.setenv("PYTHONHASHSEED", here)
    assert called_elsewhere(partial(os.getenv, "PYTHONHASHSEED")) == there


def test_an_id_that_no_other_process_can_compute_is_refused(tmp_path: Path) -> None:
    """It would pass in one process; the text names the class. With an id in the message, nothing is computed."""

    class Local:
        message_id = "m1"

    with pytest.raises(UnusableError, match=r"<locals>\.Local.*; define the events and message_id= in a module"):
        ids_of(tmp_path, Local())
    assert ids_of(tmp_path, ("m1", Local())) is None


def test_an_error_of_the_other_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot import what this process has made by hand."""
    module = types.ModuleType("made_by_hand")
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    exec("def found(event): return event['id']", vars(module))
    with pytest.raises(UnusableError, match="ModuleNotFoundError: No module named 'made_by_hand'; define the events"):
        ids_of(tmp_path, {"id": "m1"}, message_id=vars(module)["found"])


def test_a_handler_may_change_its_event(tmp_path: Path) -> None:
    """Neither a redelivery, nor a retry, nor a part of a batch, nor the next handler gets the changes."""

    @projector(idempotent=True, name="pops")
    class Pops:
        @on(list)
        def apply(self, event: list[int], session: Session) -> None:
            add(Paid("", "a", event.pop()), session)

        @on(list)
        def apply_again(self, event: list[int], session: Session) -> None:
            add(Paid("", "b", event.pop()), session)

    engine = engine_on(tmp_path / "kit.sqlite3", asynchronous=False)
    check = check_of(Pops, [("m1", [1, 2]), ("m2", [1, 3])], expected={"a": 5, "b": 5}, engine=engine)
    assert check.run(1, 30) is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ordered": "account"}, "ordered= takes no 'account'; give True"),
        ({"metadata": Base}, "metadata= takes a MetaData"),
        ({"reset": 3}, "reset= takes no 3; give a plain function"),
        ({"read": None}, "read= takes no None"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], said: str, checked: Callable[..., Any]) -> None:
    """The text names the argument."""
    right = CASES["right_sums"]
    case = dataclasses.replace(right, read=arguments.pop("read", right.read))
    with pytest.raises(UnusableError, match=re.escape(said)):
        checked(case, **arguments)


@pytest.mark.parametrize(("how", "messages", "expected"), [("burst", (0, 1), True), ("burst", (0, 0), False)])
def test_messages_at_the_same_time_have_no_order(how: How, messages: tuple[int, ...], expected: bool) -> None:
    """The smallest schedule may be one of them: the hint is given, too."""
    assert is_reordered((Turn("deliver", (0,)), Turn(how, messages))) is expected
