"""`verdict_of`: which error means "deliver it again", and which "to the dead letters"."""

import asyncio
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from asyncpg import ForeignKeyViolationError, UniqueViolationError  # type: ignore[import-untyped]
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm.exc import StaleDataError

from databases import Database
from projector_dedup import Defer, errors
from projector_dedup.commands import errors as errors_of_commands
from projector_dedup.commands.errors import (
    DuplicateCommandError,
    InvalidKeyError,
    KeyReusedError,
    Rejected,
    ResultError,
    ResultUnreadableError,
)
from projector_dedup.dialects import Failure
from projector_dedup.effects import errors as errors_of_effects
from projector_dedup.errors import (
    BatchFailed,
    CommitOutcomeUnknown,
    DeliveryFailed,
    HandlerDefinitionError,
    InProgress,
    InvalidMessageIdError,
    MissingTableError,
    OvertakenError,
    ProjectorDedupError,
    RetriesExhaustedError,
    TransactionViolatedError,
    UncopyableError,
    UnhandledMessage,
)
from projector_dedup.outcome import Delivery
from projector_dedup.verdict import FAILURES, NAMED, OTHERS, OURS, Action, Answer, Verdict, verdict_of
from provoked import PROVOKED

PAGE = Path(__file__).parents[2] / "docs" / "verdicts.md"


class NotYet(Defer):
    """A user's own, with a reason."""


NOW, LATER, REJECT = Action.RETRY_NOW, Action.RETRY_LATER, Action.REJECT
ANSWERS: list[tuple[BaseException, Action]] = [
    (Defer("not yet"), LATER),
    (NotYet("not yet"), LATER),
    (InProgress("held"), LATER),
    (RetriesExhaustedError("down"), LATER),
    (UncopyableError("changed"), LATER),
    (CommitOutcomeUnknown("cut"), LATER),
    (MissingTableError("create them"), LATER),
    (HandlerDefinitionError("sync"), LATER),
    (OvertakenError("taken"), NOW),
    (InvalidMessageIdError("no id"), REJECT),
    (UnhandledMessage("unknown"), REJECT),
    (TransactionViolatedError("COMMIT"), REJECT),
    (TransactionViolatedError("COMMIT", durable=True), REJECT),
    (KeyReusedError("other"), REJECT),
    (InvalidKeyError("none"), REJECT),
    (ResultError("too large"), REJECT),
    (ResultUnreadableError("codec"), LATER),
    (Rejected("no funds"), REJECT),
    (StaleDataError("changed"), NOW),
    (ValueError("amount"), REJECT),
    (KeyError("amount"), REJECT),
    (AssertionError(), REJECT),
    (TimeoutError(), LATER),
    (ConnectionResetError(), LATER),
    (OSError(28, "No space left on device"), LATER),
    (MemoryError(), LATER),
    (KeyboardInterrupt(), NOW),
    (SystemExit(), NOW),
    (asyncio.CancelledError(), NOW),
]


def raised_from(cause: BaseException, *, hidden: bool = False) -> Exception:
    """Return the error of a handler that has met ``cause``."""
    try:
        try:
            raise cause
        except BaseException:  # noqa: BLE001
            if hidden:
                raise ValueError("no rate") from None
            raise ValueError("no rate")  # noqa: B904  # as a user may write it
    except ValueError as error:
        return error


@pytest.mark.parametrize(("error", "action"), ANSWERS, ids=lambda value: type(value).__name__)
def test_an_error_has_one_answer(error: BaseException, action: Action) -> None:
    """On the first delivery; only `RETRY_LATER` has a delay."""
    verdict = verdict_of(error)
    assert (verdict.action, verdict.error) == (action, error)
    assert verdict.delay == (1.0 if action is Action.RETRY_LATER else 0.0)


def test_the_delay_grows_with_the_deliveries() -> None:
    """In fixed steps, and stays at the last."""
    assert [verdict_of(Defer(), attempts=count).delay for count in range(1, 7)] == [1, 5, 30, 300, 300, 300]


def test_the_last_attempt_is_rejected() -> None:
    """Also after `Defer`, but not where the message may be applied, the deployment is wrong, or the worker stops."""
    error: BaseException
    for error in (Defer(), RetriesExhaustedError()):
        assert verdict_of(error, attempts=4, max_attempts=5).action is Action.RETRY_LATER
        assert verdict_of(error, attempts=5, max_attempts=5).action is Action.REJECT
    for error in (CommitOutcomeUnknown(), InProgress(), MissingTableError(), asyncio.CancelledError()):
        assert verdict_of(error, attempts=5, max_attempts=5).action is Action.RETRY_LATER


def test_of_several_the_retry_wins() -> None:
    """A rejection would lose the retry of the other handler."""
    poison, later = ValueError("amount"), Defer()
    several = DeliveryFailed("two", [poison, later], Delivery("1"))
    assert verdict_of(several).action is Action.RETRY_LATER
    assert verdict_of(several).error is later
    assert verdict_of(DeliveryFailed("two", [poison, poison], Delivery("1"))).action is Action.REJECT
    unknown = CommitOutcomeUnknown()
    last = verdict_of(BatchFailed("two", [poison, later, unknown], []), attempts=9, max_attempts=9)
    assert (last.action, last.error) == (Action.RETRY_LATER, unknown)
    assert verdict_of(ExceptionGroup("of a TaskGroup", [ExceptionGroup("inner", [later]), poison])).error is later


def test_an_error_that_the_application_names_is_retried_where_it_would_be_rejected() -> None:
    """Wrapped, or one of several, too. What is retried anyway stays so: a name sets no limit that was not there."""
    named = (LookupError,)
    for error in (KeyError("rate"), raised_from(KeyError("rate"))):
        verdict = verdict_of(error, retry_later=named)
        assert (verdict.action, verdict.delay) == (LATER, 1.0)
        assert isinstance(verdict.error, KeyError)
        assert verdict_of(error, attempts=3, max_attempts=3, retry_later=named).action is REJECT
        assert verdict_of(error, retry_later=(ArithmeticError,)).action is REJECT
    several = DeliveryFailed("two", [ValueError("amount"), KeyError("rate")], Delivery("1"))
    assert verdict_of(several, retry_later=named).action is LATER
    assert verdict_of(several, retry_later=(ValueError,)).error is several.exceptions[0]
    everything = (Exception,)
    for error in (MissingTableError("create them"), InProgress("held"), raised_from(MissingTableError("create them"))):
        assert verdict_of(error, attempts=9, max_attempts=9, retry_later=everything).action is LATER
    assert verdict_of(OvertakenError(), retry_later=everything).action is NOW
    assert verdict_of(InvalidMessageIdError("no id"), retry_later=everything).action is LATER


def test_the_error_of_asyncpg_can_be_named(postgresql: Database) -> None:
    """SQLAlchemy has it behind an error of its own adapter."""

    async def violate() -> IntegrityError:
        engine = create_async_engine(postgresql.async_url.set(drivername="postgresql+asyncpg"))
        try:
            async with engine.begin() as connection:
                await connection.execute(text("CREATE TABLE parent (x int PRIMARY KEY)"))
                await connection.execute(text("CREATE TABLE child (x int REFERENCES parent)"))
                with pytest.raises(IntegrityError) as raised:
                    await connection.execute(text("INSERT INTO child VALUES (1)"))
                return raised.value
        finally:
            await engine.dispose()

    error = asyncio.run(violate())
    assert verdict_of(error, retry_later=(ForeignKeyViolationError,)).action is LATER
    assert verdict_of(error, retry_later=(UniqueViolationError,)).action is REJECT


def test_at_once_is_said_once() -> None:
    """A conflict that a second delivery meets again is given time."""
    assert verdict_of(OvertakenError()).action is Action.RETRY_NOW
    again = verdict_of(OvertakenError(), attempts=2)
    assert (again.action, again.delay) == (Action.RETRY_LATER, 5.0)


def test_a_cause_decides_for_an_error_that_nobody_knows() -> None:
    """Whether the handler wrote `from` or not; `from None` hides the cause, and a stopped worker is no cause."""

    assert verdict_of(raised_from(ConnectionRefusedError())).action is Action.RETRY_LATER
    assert verdict_of(raised_from(KeyError("rate"))).action is Action.REJECT
    assert verdict_of(raised_from(ConnectionRefusedError(), hidden=True)).action is Action.REJECT
    assert verdict_of(raised_from(asyncio.CancelledError())).action is Action.REJECT
    several = ExceptionGroup("of two tasks", [KeyError("rate"), ConnectionRefusedError()])
    assert verdict_of(raised_from(several)).action is Action.RETRY_LATER
    assert verdict_of(ExceptionGroup("", [raised_from(KeyError("rate")), raised_from(several)])).delay == 1.0
    assert verdict_of(type("Odd", (Exception,), {"__module__": None})()).action is Action.REJECT
    circle = ValueError("no rate")
    circle.__cause__ = KeyError("rate")
    circle.__cause__.__cause__ = circle
    assert verdict_of(circle).action is Action.REJECT
    circle.__cause__ = ExceptionGroup("of itself", [circle, Defer()])
    assert verdict_of(circle).action is Action.RETRY_LATER


def test_the_cause_of_a_group_decides_for_those_in_it_that_nobody_knows() -> None:
    """As for an error alone: one that is known needs no cause, and one with a cause of its own has that."""

    def raised_from(cause: BaseException, *errors: Exception, hidden: bool = False) -> Exception:
        group = ExceptionGroup("of the mirrors", errors)
        group.__context__, group.__suppress_context__ = cause, hidden
        return group

    refused = ConnectionRefusedError()
    verdict = verdict_of(raised_from(refused, ValueError("mirror 1"), KeyError("mirror 2")))
    assert (verdict.action, verdict.error) == (Action.RETRY_LATER, refused)
    assert verdict_of(ExceptionGroup("outer", [raised_from(refused, ValueError())])).error is refused
    assert verdict_of(raised_from(refused, ExceptionGroup("inner", [ValueError()]))).error is refused
    assert verdict_of(raised_from(refused, UnhandledMessage("unknown"))).action is Action.REJECT
    assert verdict_of(raised_from(refused, ValueError(), hidden=True)).action is Action.REJECT
    assert verdict_of(raised_from(asyncio.CancelledError(), ValueError())).action is Action.REJECT
    poison = ValueError("mirror 1")
    verdict = verdict_of(raised_from(KeyError("rate"), poison))
    assert (verdict.action, verdict.error) == (Action.REJECT, poison)
    circle = raised_from(refused, ValueError())
    refused.__cause__ = circle
    assert verdict_of(circle).action is Action.RETRY_LATER


def test_beside_a_task_that_was_cancelled_the_longer_delay_wins() -> None:
    """Whatever the order; and the message is not rejected, since the cancelled task says nothing about it."""
    early, cancelled = Defer("not before noon"), asyncio.CancelledError()
    for both in ([early, cancelled], [cancelled, early]):
        verdict = verdict_of(BaseExceptionGroup("of a TaskGroup", both))
        assert (verdict.action, verdict.delay, verdict.error) == (Action.RETRY_LATER, 1.0, early)
        last = verdict_of(BaseExceptionGroup("of a TaskGroup", both), attempts=9, max_attempts=9)
        assert last.action is Action.RETRY_LATER
    several = BaseExceptionGroup("of a TaskGroup", [ValueError("amount"), cancelled])
    assert verdict_of(several).action is Action.RETRY_NOW


def test_any_number_of_causes_and_groups_is_looked_at() -> None:
    """Deeper than Python's stack: a handler that wraps each error of a loop, a TaskGroup in a TaskGroup."""
    refused = ConnectionRefusedError()
    chain: Exception = ValueError("no rate")
    chain.__cause__ = refused
    nested: Exception = refused
    for number in range(2000):
        chain, inner = ValueError(number), chain
        chain.__cause__ = inner
        nested = ExceptionGroup(str(number), [ValueError(number), nested])
    for error in (chain, nested):
        assert verdict_of(error) == Verdict(Action.RETRY_LATER, 1.0, refused)
    refused.__cause__ = chain  # and round
    assert verdict_of(chain).error is refused


@pytest.mark.parametrize(("last", "action"), [(Defer(), Action.RETRY_LATER), (KeyError("rate"), Action.REJECT)])
def test_causes_that_are_shared_are_looked_at_once(last: Exception, action: Action) -> None:
    """Two errors of a group have one cause, a group of two with one cause: the ways to the last are 2 to the 60."""
    cause, first = last, last
    for _ in range(60):
        pair = [ValueError("one"), ValueError("other")]
        for each in pair:
            each.__cause__ = cause
        cause, first = ExceptionGroup("both", pair), pair[0]
    verdict = verdict_of(cause)
    assert verdict.action is action
    assert verdict.error is (last if action is Action.RETRY_LATER else first)


def test_an_error_that_nobody_knows_decides_for_what_it_was_raised_from() -> None:
    """The outermost, whose traceback shows the others; of a group the first. A cause that is known decides itself."""
    outer, inner, unhandled = ValueError("outer"), KeyError("inner"), UnhandledMessage("nobody")
    outer.__cause__ = inner
    assert verdict_of(outer).error is outer
    outer.__cause__ = ExceptionGroup("of two tasks", [inner, KeyError("other")])
    assert verdict_of(outer).error is outer
    assert verdict_of(ExceptionGroup("of two", [outer, unhandled])).error is outer
    outer.__cause__ = unhandled
    assert verdict_of(outer).error is unhandled
    inner.__cause__ = ExceptionGroup("of itself", [inner])
    assert verdict_of(inner).error is inner


def test_a_duplicate_command_is_acknowledged() -> None:
    """However often it was delivered; but not an error that was raised behind it, or beside it in a group."""
    done = DuplicateCommandError("done", None)  # type: ignore[arg-type]
    assert verdict_of(done, attempts=9, max_attempts=9) == Verdict(Action.ACKNOWLEDGE, 0.0, done)
    behind = ValueError("no amount")
    behind.__context__ = done
    for error in (behind, ExceptionGroup("two", [done, behind]), ExceptionGroup("one", [done])):
        assert verdict_of(error).action is Action.REJECT


@pytest.mark.parametrize(("attempts", "max_attempts"), [(0, None), (-1, 3), (1, 0)])
def test_deliveries_are_counted_from_one(attempts: int, max_attempts: int | None) -> None:
    """A broker that counts from 0 is noticed at once, and not by a delay that is never reached."""
    with pytest.raises(ValueError, match="must be at least 1"):
        verdict_of(Defer(), attempts=attempts, max_attempts=max_attempts)


# The page -------------------------------------------------------------------------------------------------------------


def _errors() -> list[type[ProjectorDedupError]]:
    """Every error of the library, its commands and its effects, groups left out, which have no answer of their own."""
    found = [*vars(errors).values(), *vars(errors_of_commands).values(), *vars(errors_of_effects).values()]
    classes = [each for each in found if isinstance(each, type) and issubclass(each, ProjectorDedupError)]
    return [each for each in dict.fromkeys(classes) if not issubclass(each, BaseExceptionGroup)]


def _row(names: list[str], answer: Answer) -> str:
    said = {NOW: "now, then later", LATER: "later"}.get(answer.action, answer.action.value)
    limit = ", unlimited" if answer.unlimited else ""
    return f"| {', '.join(f'`{name}`' for name in names)} | {said}{limit} | {answer.why} |"


def rendered() -> Iterator[str]:
    """The lines of the page's table, made of the tables that `verdict_of` looks into."""
    yield "| raised | answer | why |"
    yield "|---|---|---|"
    for name, answer in OURS.items():
        named = [
            each.__name__
            for each in _errors()
            if next(base.__name__ for base in each.__mro__ if base.__name__ in OURS) == name
        ]
        yield _row(named, answer)
    codes: dict[Failure, dict[str, None]] = {}
    for provoked in PROVOKED.values():
        for each in provoked:
            codes.setdefault(each.means, {})[each.code] = None
    for failure, answer in FAILURES.items():
        yield _row(list(codes[failure]), answer)
    for path, answer in NAMED.items():
        yield _row([path], answer)
    for kind, answer in OTHERS.items():
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        yield _row([f"{module}{kind.__name__}"], answer)


def test_the_page_has_the_table() -> None:
    """Line for line. After an intended change: APPROVE=1, then read the difference."""
    table = "\n".join(rendered())
    text = PAGE.read_text(encoding="utf-8")
    if os.environ.get("APPROVE"):
        text = re.sub(r"\| raised \| answer(.*\n\|)*.*", lambda _: table, text)
        PAGE.write_text(text, encoding="utf-8")
    assert f"\n\n{table}\n\n" in text


def test_every_name_of_the_table_is_an_error() -> None:
    """A class that is renamed takes its answer along."""
    assert OURS.keys() <= {each.__name__ for each in _errors()}
