"""Invariant I4: a handler that ends or breaks its transaction is prevented, or found out, and never `APPLIED`."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session

from databases import DRIVERS, USUAL_DRIVERS
from misbehaviour import (
    BELOW,
    COMMITS,
    OTHERS,
    ROLLBACKS,
    SAVEPOINTS,
    SWALLOWED,
    TEXTS,
    Misbehaviour,
    Verdict,
    told_apart,
)
from projector_dedup import Outcome
from projector_dedup.errors import TransactionViolatedError
from rig import NOTHING, ONCE, Durable, Outside, Rig, add


class BugError(Exception):
    """An error that a handler raises by itself."""


def returns(do: Callable[[], object], _session: Session) -> None:
    """Misbehave and return."""
    do()


def fails(do: Callable[[], object], _session: Session) -> None:
    """Misbehave, then raise the handler's own error, whatever happened."""
    try:
        do()
    finally:
        raise BugError


def swallows(do: Callable[[], object], _session: Session) -> None:
    """Misbehave, and return normally, whatever happened."""
    with contextlib.suppress(Exception):
        do()


def writes_on(do: Callable[[], object], session: Session) -> None:
    """Misbehave, go on writing whatever happened, and swallow the errors of that too."""
    swallows(do, session)
    swallows(lambda: add(session, 10), session)


Ending = Callable[[Callable[[], object], Session], None]

ENDINGS = [returns, fails, swallows, writes_on]
TABLE = [(cases, ENDINGS) for cases in (COMMITS, ROLLBACKS, SAVEPOINTS, SWALLOWED, OTHERS, BELOW)]
# What follows a text that was prevented is the same whichever text it was.
TABLE += [(TEXTS[:1], [returns, swallows]), (TEXTS[1:], [returns])]


def _cases() -> Iterator[Any]:
    """Everything on one driver of each database; on the others what may depend on the driver, with one ending."""
    for driver in DRIVERS:
        usual = driver in USUAL_DRIVERS and not driver.is_async
        for cases, endings in TABLE:
            for case in cases if usual or cases is BELOW else told_apart(cases, driver):
                if (verdict := case.verdict(driver)) is not None:
                    for ending in endings if usual or verdict is Verdict.BREAKS else endings[:1]:
                        marks = [] if ending is endings[0] else [pytest.mark.slow]
                        name = f"{driver}-{case}-{ending.__name__}"
                        yield pytest.param(driver, case, verdict, ending, id=name, marks=marks)


@pytest.fixture(scope="module")
def _procedures(outsides: dict[str, Outside | str]) -> None:
    """What MariaDB's handlers call."""
    if isinstance(mariadb := outsides["mariadb"], Outside):
        mariadb.execute("create procedure harmless() select 1")
        mariadb.execute("create procedure commits() commit")
        mariadb.execute("create procedure commits_and_begins() begin commit; start transaction; end")


@pytest.mark.by_turns
@pytest.mark.usefixtures("_procedures")
@pytest.mark.parametrize(("driver", "case", "verdict", "ending"), list(_cases()))
def test_what_becomes_of_a_misbehaviour(case: Misbehaviour, verdict: Verdict, ending: Ending, rig: Rig) -> None:
    """It is prevented, found out or harmless, as `misbehaviour.py` says; nothing stays open; a redelivery is right."""
    raised_at_once: list[BaseException] = []

    def handler(session: Session) -> None:
        add(session, 1)

        def do() -> None:
            try:
                case.do(session)
            except Exception as error:
                raised_at_once.append(error)
                raise

        ending(do, session)

    expected: type[Exception] | None
    match verdict, ending.__name__:
        case Verdict.DURABLE, _:
            expected, durable = TransactionViolatedError, ONCE
        case Verdict.ENDED, _:
            expected, durable = TransactionViolatedError, NOTHING
        case _, "fails":
            expected, durable = BugError, NOTHING
        case ((Verdict.PREVENTED | Verdict.DETECTED), _):
            expected, durable = TransactionViolatedError, NOTHING
        case ((Verdict.REFUSED | Verdict.BREAKS), "returns"):
            expected, durable = Exception, NOTHING
        case Verdict.BREAKS, _:
            expected, durable = TransactionViolatedError, NOTHING
        case _, "writes_on":
            expected, durable = None, Durable(1, 11)
        case _:
            expected, durable = None, ONCE

    if expected is None:
        assert rig.deliver(handler).outcome is Outcome.APPLIED
    else:
        with pytest.raises(expected) as raised:
            rig.deliver(handler)
        is_violation = isinstance(raised.value, TransactionViolatedError)
        assert is_violation == (expected is TransactionViolatedError)
        assert getattr(raised.value, "durable", False) == (verdict in (Verdict.DURABLE, Verdict.ENDED))
        if expected is Exception:
            assert raised.value is raised_at_once[-1]
    rig.assert_settled(durable)
    assert any(isinstance(error, TransactionViolatedError) for error in raised_at_once) == (
        verdict is Verdict.PREVENTED
    )
    if verdict in (Verdict.HARMLESS, Verdict.REFUSED, Verdict.BREAKS):
        assert rig.connects == 1
    again = rig.deliver(add)
    assert again.outcome is (Outcome.APPLIED if durable == NOTHING else Outcome.DUPLICATE)
    rig.assert_settled(ONCE if durable == NOTHING else durable)
