"""Decide what a consumer does with a message that failed: deliver it again, now or later, or reject it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm.exc import StaleDataError

from .dialects import Failure, failure_of

DELAYS = (1.0, 5.0, 30.0, 300.0)
"""Seconds before the second, third, fourth and every later delivery."""


class Action(StrEnum):
    """Says what a consumer does with a message that was not applied."""

    RETRY_NOW = "retry now"  #: let the broker deliver it again at once
    RETRY_LATER = "retry later"  #: let the broker deliver it again after ``Verdict.delay``
    REJECT = "reject"  #: send it to the dead letters: another delivery would fail in the same way
    ACKNOWLEDGE = "acknowledge"  #: acknowledge it: ``Commands.handle`` says that the command was done before


@dataclass(frozen=True)
class Verdict:
    """The answer of ``verdict_of``: what to do, after how many seconds, and which exception decided.

    ``delay`` is 0.0 unless ``action`` is ``RETRY_LATER``. ``error`` is the exception that was given, or one inside of
    it: of a group, or the cause. Log it.
    """

    action: Action
    delay: float
    error: BaseException


class Answer(NamedTuple):
    """One line of the table: what is done, why, and True if it is done however often the message was delivered."""

    action: Action
    why: str
    unlimited: bool = False


NOW, LATER, REJECT, ACKNOWLEDGE = Action.RETRY_NOW, Action.RETRY_LATER, Action.REJECT, Action.ACKNOWLEDGE

OURS: dict[str, Answer] = {
    "ProjectorDedupError": Answer(LATER, "the message was not applied"),
    "RefusedError": Answer(LATER, "configuration or code has to be mended, and the message is innocent"),
    "InvalidMessageError": Answer(REJECT, "the message itself is wrong"),
    "UnhandledMessage": Answer(REJECT, "no handler wants the message"),
    "Defer": Answer(LATER, "the handler said so"),
    "OvertakenError": Answer(NOW, "another delivery has committed in between"),
    "InProgress": Answer(LATER, "another delivery has it, and may yet commit or roll back", unlimited=True),
    "TransactionViolatedError": Answer(REJECT, "the handler has to be mended, and somebody has to look"),
    "RetriesExhaustedError": Answer(LATER, "the database has trouble for longer than the library's own retries"),
    "CommitOutcomeUnknown": Answer(LATER, "another delivery finds out whether it was applied", unlimited=True),
    "CleanupInterruptedError": Answer(LATER, "run the cleanup again"),
    # Of commands, which this file must not import.
    "InvalidKeyError": Answer(REJECT, "the command itself is wrong"),
    "KeyReusedError": Answer(REJECT, "the key belongs to another command"),
    "ResultError": Answer(REJECT, "the handler's result cannot be recorded"),
    "DuplicateCommandError": Answer(
        ACKNOWLEDGE, "the command was done before; reject if a projector's handler lets the error out", unlimited=True
    ),
    "Rejected": Answer(REJECT, "the business has refused the command, and that is recorded"),
    # Of effects, likewise.
    "EffectUnknown": Answer(LATER, "settle finds out whether the effect was done", unlimited=True),
    "NotDone": Answer(LATER, "the effect was not sent"),
    "DoubleEffectError": Answer(REJECT, "the effect was done twice, and somebody has to look"),
}
"""The library's errors by name; an error that is not named is answered as its base class is."""

FAILURES: dict[Failure, Answer] = {
    Failure.TRANSIENT: Answer(NOW, "a conflict, a deadlock, a lost connection, a prepared statement that is gone"),
    Failure.READ_ONLY: Answer(LATER, "another server is becoming the primary"),
    Failure.LOCK_TIMEOUT: Answer(LATER, "somebody holds a lock for long"),
    Failure.LATER: Answer(LATER, "a used-up resource, no login, a cancelled statement, a fault inside the database"),
    Failure.UNIQUE: Answer(REJECT, "the row is there, and the library has tried again before"),
    Failure.NO_TABLE: Answer(REJECT, "the statement does not fit the tables"),
    Failure.PERMANENT: Answer(REJECT, "the database refuses what the handler wants to write"),
}
"""A database's errors, raw or SQLAlchemy's, by what its dialect says of them."""

NAMED: dict[str, Answer] = {
    "billiard.exceptions.SoftTimeLimitExceeded": Answer(LATER, "Celery has interrupted the handler, which was slow"),
    "billiard.exceptions.TimeLimitExceeded": Answer(LATER, "Celery has killed the process of the handler"),
    "billiard.exceptions.WorkerLostError": Answer(LATER, "somebody has killed the process of the handler"),
}
"""Errors of packages that this file must not import, by module and name."""

OTHERS: dict[type[BaseException], Answer] = {
    StaleDataError: Answer(NOW, "another transaction has changed the row in between"),
    PoolTimeoutError: Answer(LATER, "all connections of the pool are in use"),
    OSError: Answer(LATER, "a network, a file or a time limit: ConnectionError and TimeoutError are among them"),
    MemoryError: Answer(LATER, "another worker may have more"),
    Exception: Answer(REJECT, "the handler fails on this message, and would again"),
    BaseException: Answer(NOW, "the worker is told to stop, and the message is innocent", unlimited=True),
}
"""All other errors, by class; of several that fit, the first in the order of inheritance."""


def verdict_of(error: BaseException, *, attempts: int = 1, max_attempts: int | None = None) -> Verdict:
    """Return what a consumer does with a message whose delivery raised ``error``: deliver it again, or reject it.

    ``attempts`` is the broker's count of deliveries, 1 for the first. ``RETRY_LATER`` comes with a delay of 1, 5, 30
    and, from the fourth delivery on, 300 seconds. ``RETRY_NOW`` is said of the first delivery only, and becomes
    ``RETRY_LATER`` after it. From ``max_attempts`` on a message is rejected that else would be delivered again, also
    after ``Defer``; but never after ``CommitOutcomeUnknown``, ``InProgress`` or ``EffectUnknown``, or if the worker was
    told to stop.
    ``ACKNOWLEDGE`` is said of ``DuplicateCommandError`` alone, as ``Commands.handle`` raises it.

    Of several errors (``DeliveryFailed``, ``BatchFailed``, any ``ExceptionGroup``) those that are to be retried
    win, since a rejection would lose their retry, and among them the longer delay. Of a batch ask for each message:
    ``verdict_of(delivery.error)``. Raises ``ValueError`` for a count below 1.
    """
    if attempts < 1 or (max_attempts is not None and max_attempts < 1):
        raise ValueError(f"attempts count from 1, the first delivery: {attempts=}, {max_attempts=}")
    decided, decisive = _decided(error)
    action = decided.action
    if max_attempts is not None and attempts >= max_attempts and not decided.unlimited:
        action = REJECT
    elif action is NOW and attempts > 1:
        action = LATER
    return Verdict(action, DELAYS[min(attempts, len(DELAYS)) - 1] if action is LATER else 0.0, decisive)


_RANK = {ACKNOWLEDGE: -1, REJECT: 0, NOW: 1, LATER: 2}


def _decided(error: BaseException) -> tuple[Answer, BaseException]:
    """Return the answer to an error, and the exception that decided: the error, one of its group, or its cause.

    A handler may wrap what a database or a network raised in an error of its own; a traceback shows that cause too.
    Each exception is looked at once: causes may be shared, go round, and lie deeper than Python's stack.
    """
    unknown = OTHERS[Exception]
    answers: list[tuple[Answer, BaseException]] = []
    seen: set[int] = set()
    # An exception, the one that decides if nothing is known of the first and its causes, and what its group came from.
    waiting: list[tuple[BaseException, BaseException, Exception | None]] = [(error, error, None)]
    while waiting:
        each, outer, beyond = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        cause = _cause(each) or beyond
        if isinstance(each, BaseExceptionGroup):
            alone = outer is each  # and not the cause of an error, which then decides for all that it was raised from
            waiting += [(inner, inner if alone else outer, cause) for inner in reversed(each.exceptions)]
            continue
        answer = _answer_without_cause(each)
        if answer.action is ACKNOWLEDGE and not (each is error and getattr(each, "done", False)):
            answer = unknown  # a handler, or an error around this one, has failed although the command was done
        if answer is unknown and cause is not None and id(cause) not in seen:
            waiting.append((cause, outer, beyond))
        else:
            answers.append((answer, outer if answer is unknown else each))
    decided, decisive = max(
        answers, key=lambda found: (_RANK[found[0].action], found[0].unlimited), default=(unknown, error)
    )
    return Answer(decided.action, decided.why, any(answer.unlimited for answer, _ in answers)), decisive


def _cause(error: BaseException) -> Exception | None:
    """Return what an error was raised from, as a traceback shows it; None if that is not an ``Exception``."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return cause if isinstance(cause, Exception) else None


def _answer_without_cause(error: BaseException) -> Answer:
    """Return retry, reject or acknowledge for the error alone, without its ``__cause__``."""
    if isinstance(error, Exception) and (failure := failure_of(error)) is not None:
        return FAILURES[failure]
    for each in type(error).__mro__:
        if str(each.__module__).partition(".")[0] == __name__.partition(".")[0] and each.__name__ in OURS:
            return OURS[each.__name__]
        if (name := f"{each.__module__}.{each.__name__}") in NAMED:
            return NAMED[name]
        if each in OTHERS:
            return OTHERS[each]
    return OTHERS[BaseException]
