"""How a handler ends after it has misbehaved, and what must become of its message."""

import contextlib
from collections.abc import Callable

import pytest
from sqlalchemy.orm import Session

from misbehaviour import Misbehaviour, Verdict
from projector_dedup import Outcome, TransactionViolatedError
from rig import NOTHING, ONCE, Durable, Rig, add


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


def assert_found_out(rig: Rig, case: Misbehaviour, verdict: Verdict, ending: Ending) -> None:
    """Deliver to a handler that does ``case`` and ends by ``ending``: the outcome is that of ``verdict``."""
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
        assert getattr(raised.value, "durable", False) == (verdict is Verdict.DURABLE)
        if expected is Exception:
            assert raised.value is raised_at_once[-1]
    assert rig.durable() == durable
    rig.assert_nothing_is_left()
    assert any(isinstance(error, TransactionViolatedError) for error in raised_at_once) == (
        verdict is Verdict.PREVENTED
    )
    if verdict in (Verdict.HARMLESS, Verdict.REFUSED, Verdict.BREAKS):
        assert rig.connects == 1
    again = rig.deliver(add)
    assert again.outcome is (Outcome.APPLIED if durable == NOTHING else Outcome.DUPLICATE)
    assert rig.durable() == (ONCE if durable == NOTHING else durable)
    rig.assert_nothing_is_left()
