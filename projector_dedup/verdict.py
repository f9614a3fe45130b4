"""Decide what a consumer does with a message that failed: retry it now, retry it later, or reject it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm.exc import StaleDataError

from .dialects import Failure, failure_of

DELAYS = (1.0, 5.0, 30.0, 300.0)
"""Seconds before the second, third, fourth and every later delivery."""


class Action(StrEnum):
    """The action of a consumer after ``deliver`` or ``handle`` raised an error."""

    RETRY_NOW = "retry now"  #: let the broker redeliver the message at once
    RETRY_LATER = "retry later"  #: let the broker redeliver the message after ``Verdict.delay``
    REJECT = "reject"  #: move the message to the dead-letter queue, because another delivery would fail too
    ACKNOWLEDGE = "acknowledge"  #: acknowledge the message, because ``Commands.handle`` ran the command before


@dataclass(frozen=True)
class Verdict:
    """The result of ``verdict_of``: what to do, after how many seconds, and which exception decided.

    ``delay`` is in seconds, and 0.0 unless ``action`` is ``RETRY_LATER``. ``error`` is the exception that decided: the
    given one, its cause, or one of a group. Log ``error``.
    """

    action: Action
    delay: float
    error: BaseException


class Answer(NamedTuple):
    """One line of the table: the action, the reason, and ``unlimited``: True if ``max_attempts`` does not apply."""

    action: Action
    why: str
    unlimited: bool = False


NOW, LATER, REJECT, ACKNOWLEDGE = Action.RETRY_NOW, Action.RETRY_LATER, Action.REJECT, Action.ACKNOWLEDGE

OURS: dict[str, Answer] = {
    "ProjectorDedupError": Answer(LATER, "the message was not applied"),
    "RefusedError": Answer(
        LATER, "configuration or code must be corrected; the message is not the cause", unlimited=True
    ),
    "InvalidMessageError": Answer(REJECT, "the message itself is wrong"),
    "BeyondRetention": Answer(REJECT, "the message may have been applied before, and its marker deleted"),
    "OtherBodyError": Answer(REJECT, "a message with this id and another body was applied before"),
    "UnhandledMessage": Answer(REJECT, "no handler takes the message"),
    "Defer": Answer(LATER, "the handler postponed the message"),
    "OvertakenError": Answer(NOW, "another delivery committed a marker meanwhile"),
    "InProgress": Answer(LATER, "another delivery has claimed it, and may commit or roll back", unlimited=True),
    "TransactionViolatedError": Answer(REJECT, "the handler must be corrected, and a person must check the read model"),
    "RetriesExhaustedError": Answer(LATER, "the database error lasted longer than the library's own retries"),
    "UncopyableError": Answer(LATER, "a redelivery brings an event that no handler has changed"),
    "CommitOutcomeUnknown": Answer(LATER, "another delivery finds out whether it was applied", unlimited=True),
    "CleanupInterruptedError": Answer(LATER, "run the cleanup again"),
    # Errors of commands, which this file must not import.
    "InvalidKeyError": Answer(REJECT, "the command itself is wrong"),
    "KeyReusedError": Answer(REJECT, "the key belongs to another command"),
    "ResultError": Answer(REJECT, "the handler's result cannot be recorded"),
    "DuplicateCommandError": Answer(
        ACKNOWLEDGE, "the command ran before; reject if a projector's handler raises the error", unlimited=True
    ),
    "Rejected": Answer(REJECT, "the handler rejected the command, and the library has recorded that"),
    # Errors of effects, which this file must not import.
    "EffectUnknown": Answer(LATER, "settle finds out whether the effect was done", unlimited=True),
    "NotArmedError": Answer(LATER, "the transaction that arms the effect may not have committed yet"),
    "NotDone": Answer(LATER, "the effect was not sent"),
    "DoubleEffectError": Answer(REJECT, "the effect was done twice, and a person must decide"),
}
"""The library's errors by name. An error without a line has the answer of its base class."""

FAILURES: dict[Failure, Answer] = {
    Failure.TRANSIENT: Answer(NOW, "a conflict, a deadlock, a lost connection or a lost prepared statement"),
    Failure.READ_ONLY: Answer(LATER, "another server is becoming the primary"),
    Failure.LOCK_TIMEOUT: Answer(LATER, "another transaction holds a lock for long"),
    Failure.LATER: Answer(LATER, "a used-up resource, no login, a cancelled statement, a fault inside the database"),
    Failure.UNIQUE: Answer(REJECT, "the row exists, and the library has already retried"),
    Failure.NO_TABLE: Answer(REJECT, "the statement does not fit the tables"),
    Failure.PERMANENT: Answer(REJECT, "the database refuses what the handler writes"),
}
"""The database's errors (the driver's or SQLAlchemy's), by the class that the dialect gives them."""

NAMED: dict[str, Answer] = {
    "billiard.exceptions.SoftTimeLimitExceeded": Answer(LATER, "Celery interrupted the slow handler"),
    "billiard.exceptions.TimeLimitExceeded": Answer(LATER, "Celery killed the process of the handler"),
    "billiard.exceptions.WorkerLostError": Answer(LATER, "the process of the handler was killed"),
}
"""Errors of packages that this file must not import, by module and name."""

OTHERS: dict[type[BaseException], Answer] = {
    StaleDataError: Answer(NOW, "another transaction changed the row meanwhile"),
    PoolTimeoutError: Answer(LATER, "all connections of the pool are in use"),
    OSError: Answer(LATER, "the network, a file or a time limit, such as ConnectionError and TimeoutError"),
    MemoryError: Answer(LATER, "another worker may have more memory"),
    Exception: Answer(REJECT, "the handler fails on this message, and would fail again"),
    BaseException: Answer(NOW, "the worker was told to stop; the message is not the cause", unlimited=True),
}
"""All other errors, by class. If several classes fit, the most derived one decides."""


def verdict_of(
    error: BaseException,
    *,
    attempts: int = 1,
    max_attempts: int | None = None,
    retry_later: Sequence[type[Exception]] = (),
) -> Verdict:
    """Return what a consumer does with a message whose delivery raised ``error``: retry, reject or acknowledge.

    - ``error``: the exception that ``deliver`` or ``handle`` raised. After ``BatchFailed``, call ``verdict_of`` once
      for each message that failed: ``verdict_of(delivery.error)``.
    - ``attempts``: how often the broker has delivered the message, 1 for the first delivery.
    - ``max_attempts``: reject the message at this delivery instead of retrying it. None retries without a limit.
    - ``retry_later``: classes of errors after which the message is retried later where it would be rejected. A class of
      the driver counts too, such as ``psycopg.errors.ForeignKeyViolation``. Set ``max_attempts`` with it.

    Returns a ``Verdict``. The delay of ``RETRY_LATER`` is 1 second after the first delivery, then 5 and 30, and 300
    from the fourth delivery on. ``RETRY_NOW`` is for the first delivery only; later ones get ``RETRY_LATER``.
    ``max_attempts`` never rejects after ``RefusedError`` (a wrong configuration or deployment),
    ``CommitOutcomeUnknown``, ``InProgress`` or ``EffectUnknown``, and never if the worker was told to stop.
    ``ACKNOWLEDGE`` is only for a ``DuplicateCommandError`` of ``Commands.handle``.

    If ``error`` is a group (``DeliveryFailed``, any ``ExceptionGroup``), one error to retry is enough for a retry, with
    the longest delay. Raises ``ValueError`` if ``attempts`` or ``max_attempts`` is less than 1.
    """
    if attempts < 1 or (max_attempts is not None and max_attempts < 1):
        raise ValueError(f"attempts and max_attempts must be at least 1, not {attempts=}, {max_attempts=}")
    decided, decisive = _decided(error, tuple(retry_later))
    action = decided.action
    if max_attempts is not None and attempts >= max_attempts and not decided.unlimited:
        action = REJECT
    elif action is NOW and attempts > 1:
        action = LATER
    return Verdict(action, DELAYS[min(attempts, len(DELAYS)) - 1] if action is LATER else 0.0, decisive)


_RANK = {ACKNOWLEDGE: -1, REJECT: 0, NOW: 1, LATER: 2}
_NAMED_LATER = Answer(LATER, "the application names the error in retry_later")


def _decided(error: BaseException, named: tuple[type[Exception], ...]) -> tuple[Answer, BaseException]:
    """Return the answer to an error, and the exception that decided: the error, one of its group, or its cause.

    A handler may wrap the error of a database or a network in its own error, so the function also follows the causes.
    It visits each exception once, without recursion: causes may be shared, cyclic, or deeper than Python's stack.
    """
    unknown = OTHERS[Exception]
    answers: list[tuple[Answer, BaseException]] = []
    seen: set[int] = set()
    # An exception; the exception to return if neither the first nor its causes are known; the cause of its group.
    waiting: list[tuple[BaseException, BaseException, Exception | None]] = [(error, error, None)]
    while waiting:
        each, outer, beyond = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        cause = _cause(each) or beyond
        if isinstance(each, BaseExceptionGroup):
            alone = outer is each  # False: the group is the cause of ``outer``, which then is the exception to return
            waiting += [(inner, inner if alone else outer, cause) for inner in reversed(each.exceptions)]
            continue
        answer = _answer_without_cause(each)
        if answer.action is REJECT and _is_named(each, named):
            answers.append((_NAMED_LATER, each))
        if answer.action is ACKNOWLEDGE and not (each is error and getattr(each, "done", False)):
            answer = unknown  # the command ran before, but the handler that asked for it failed
        if answer is unknown and cause is not None and id(cause) not in seen:
            waiting.append((cause, outer, beyond))
        else:
            answers.append((answer, outer if answer is unknown else each))
    decided, decisive = max(
        answers, key=lambda found: (_RANK[found[0].action], found[0].unlimited), default=(unknown, error)
    )
    return Answer(decided.action, decided.why, any(answer.unlimited for answer, _ in answers)), decisive


def _is_named(error: BaseException, named: tuple[type[Exception], ...]) -> bool:
    """True if the error, or the driver's error inside it, is of one of the classes."""
    of_driver = error.orig if isinstance(error, DBAPIError) else None
    return any(isinstance(each, named) for each in (error, of_driver, getattr(of_driver, "__cause__", None)))


def _cause(error: BaseException) -> Exception | None:
    """Return the cause of an error, as a traceback shows it, or None if it is not an ``Exception``."""
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return cause if isinstance(cause, Exception) else None


def _answer_without_cause(error: BaseException) -> Answer:
    """Return the answer to the error itself, without its ``__cause__``."""
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
