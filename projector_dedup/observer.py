"""Observers receive the outcome of each message, command, effect and broker delivery, for metrics and traces."""

from __future__ import annotations

import inspect
import time
import traceback
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Protocol

from .errors import BeyondRetention, Defer, InProgress, InvalidMessageError, OtherBodyError
from .handler import Handler
from .message import Message, Route, id_text, logger_of, moment_in_utc
from .outcome import Outcome
from .retry import Attempts

logger = logger_of("projector_dedup")

Kind = Literal["message", "command", "effect", "delivery"]

Observed = Literal[
    "applied", "duplicate", "other_body", "skipped", "deferred", "in_progress", "late", "failed", "retried",
    "rejected",
    "armed", "done", "not_done", "unknown", "stopped", "fenced", "double",
    "acknowledged", "dead_letter",
]  # fmt: skip
"""The outcomes of messages (up to ``retried``), of commands (also ``rejected``), of effects (from ``rejected`` to
``double``) and of deliveries (``acknowledged``, ``retried``, ``rejected``, ``dead_letter``).

Every outcome of a message except ``retried`` ends its delivery to the handler.
"""

Reason = Literal[
    "invalid_message", "invalid_id", "unhandled", "late", "other_body", "deferred", "in_progress",
    "refused", "database", "handler", "max_attempts",
]  # fmt: skip
"""Why a consumer did not acknowledge a delivery. The set is closed, so that it can be a label of a metric.

``invalid_message``: ``convert`` could not make an event of the body and the headers. ``invalid_id``: the message has no
id that can be used. ``unhandled``: no handler takes the type. ``late``: ``BeyondRetention``. ``other_body``:
``OtherBodyError``. ``deferred``: ``Defer``. ``in_progress``: another delivery holds the claim. ``refused``: any other
``RefusedError``, so configuration or code must change. ``database``: the database failed. ``handler``: the handler
raised anything else. ``max_attempts``: the message was delivered ``max_attempts`` times; each earlier delivery was
counted with its own reason.
"""


@dataclass(frozen=True)
class Observation:
    """The outcome of a message for one handler, of a command, of an effect, or of a delivery by a broker.

    An observation contains nothing of the body. The text of ``error`` may quote the body. Of a message:

    - ``outcome``: ``applied``, ``duplicate`` or ``skipped`` if the message may be acknowledged. ``other_body`` for a
      duplicate with another body, with an ``error`` if it was rejected. ``deferred`` after ``Defer``, ``in_progress``
      after ``InProgress``, ``late`` after ``BeyondRetention``, and ``failed`` after any other ``error``. ``retried``
      for each ``error`` after which the library retries by itself.
    - ``handler``: the handler's identity, or None if no handler got the message. With None, the outcome is ``skipped``,
      or ``failed`` because the message has no usable id, no usable type or no handler. With a handler, ``skipped``
      means that the message was late (``late="skip"``).
    - ``message_type``: the name, or the module and name of the class, by which the dispatcher finds handlers. None if
      it found none. If ``handler`` is None, do not trust the value: any producer may have invented it.
    - ``message_id``: the id of the message, or None if it has none.
    - ``duration``: seconds from before the first claim until now, including all waits. Messages of a batch that ran in
      one transaction all have the duration of that transaction.
    - ``attempts``: the number of attempts, including the first. For ``retried``, the number of the next attempt. 0 if
      no handler got the message.
    - ``age``: seconds since ``occurred_at``, by the clock of this machine. Negative if the producer's clock is ahead.
      None without ``occurred_at``.
    - ``error``: the error after ``deferred``, ``in_progress``, ``late``, ``failed`` and ``retried``.
    - ``batch_size``: how many messages ran in the same transaction.
    - ``after_unknown_commit``: True if this delivery itself applied the ``duplicate``, by a COMMIT without an answer.
    - ``kind``: ``message``, ``command``, ``effect`` or ``delivery``.
    - ``broker``, ``reason``: of a delivery alone.

    For a command or an effect, ``handler`` is its name and ``message_id`` its key (of an effect with the scope), and
    there is no type and no age. A command is ``applied``, ``duplicate`` (it got the recorded answer), ``rejected`` by
    its handler, ``deferred``, ``in_progress`` or ``failed``.

    An effect is ``armed`` when a process first takes the armed row, before the first attempt. It ends as ``done`` or
    ``rejected``. Before that, an attempt or a question may end as ``not_done``, ``unknown``, ``fenced`` (the result
    came after another process had taken over), ``double`` (two attempts were done) or ``failed`` (the result could not
    be stored or read). ``stopped`` means that a person must decide.

    A delivery is what a ready consumer, or ``Settling``, decided about one delivery of its ``broker``. It is
    ``acknowledged``, ``retried`` or ``rejected``. ``reason`` says why, and is None for ``acknowledged``. The consumer
    reports a rejected message again, as ``dead_letter``, when the broker has confirmed the copy in the dead-letter
    queue. ``attempts`` is the broker's count of deliveries. A delivery has no handler, no type and no age. A message
    that was rejected before any handler ran, such as a body that is not JSON, is observed as a delivery only.
    """

    outcome: Observed
    handler: str | None
    message_type: str | None
    message_id: str | None
    duration: float
    attempts: int
    age: float | None
    error: Exception | None = None
    batch_size: int = 1
    after_unknown_commit: bool = False
    kind: Kind = "message"
    broker: str | None = None
    reason: Reason | None = None


class Observer(Protocol):
    """Your object that receives the outcome of each message, command, effect and delivery.

    Pass it to a dispatcher, ``Commands`` or ``Effects`` as ``observer=``. A consumer reports its deliveries to the
    observer of its dispatcher. The library calls ``observed`` after the
    transaction has ended, once for each message and handler, in the thread or event loop of the delivery. So
    ``observed`` must be fast, and safe to call from all threads that share the dispatcher. If it raises, the library
    logs the first error, and the delivery continues.
    """

    def observed(self, observation: Observation, /) -> None:
        """Receive an observation. The library ignores the result."""


class Observing:
    """Calls an observer, and protects the delivery from the observer's errors."""

    def __init__(self, observer: Observer, route_of: Callable[[object], Route] = type) -> None:
        observed = getattr(observer, "observed", None)
        if isinstance(observer, type) or not callable(observed) or inspect.iscoroutinefunction(observed):
            raise ValueError(
                f"observer must be an object with a plain method observed(observation) (no async def), not {observer!r}"
            )
        self._observed, self._route_of = observed, route_of
        self._said = False

    def report(
        self,
        outcome: Observed,
        event: object,
        handler: str | None = None,
        *,
        duration: float = 0.0,
        attempts: int = 0,
        error: Exception | None = None,
        batch_size: int = 1,
        after_unknown_commit: bool = False,
    ) -> None:
        """Call the observer with the outcome of a message."""

        def observation() -> Observation:
            message = event if isinstance(event, Message) else Message(None, event)
            return Observation(
                outcome,
                handler,
                self._type_of(message),
                id_text(message),
                duration,
                attempts,
                _age(message),
                error,
                batch_size,
                after_unknown_commit,
            )

        self._call(observation)

    def report_call(
        self,
        kind: Kind,
        outcome: Observed,
        name: str,
        key: str | None,
        began: float | None,
        attempts: int,
        error: Exception | None = None,
    ) -> None:
        """Call the observer with the outcome of a command or an effect. ``began`` is a time of ``time.monotonic``."""
        duration = 0.0 if began is None else time.monotonic() - began
        self._call(lambda: Observation(outcome, name, None, key, duration, attempts, None, error, kind=kind))

    def report_delivery(
        self,
        outcome: Observed,
        broker: str,
        reason: Reason | None = None,
        message_id: str | None = None,
        attempts: int = 0,
        error: BaseException | None = None,
    ) -> None:
        """Call the observer with what a consumer did with one delivery of its broker."""
        raised = error if isinstance(error, Exception) else None
        self._call(
            lambda: Observation(
                outcome,
                *(None, None, message_id, 0.0, attempts, None, raised),
                kind="delivery",
                broker=broker,
                reason=reason,
            )
        )

    def _call(self, observation: Callable[[], Observation]) -> None:
        """Call the observer. Log the first ``Exception`` that it raises, and ignore all of them.

        ``KeyboardInterrupt`` and other exceptions that do not derive from ``Exception`` are raised.
        """
        try:
            self._observed(observation())
        except Exception as failure:  # noqa: BLE001  # the outcome of the message is already decided
            if not self._said:
                self._said = True
                place = traceback.extract_tb(failure.__traceback__)[-1]
                logger.warning(  # without the error's text, which might contain the message's body
                    "the observer failed; deliveries continue, and later failures are not logged: %s in %s, line %s",
                    type(failure).__name__,
                    place.filename,
                    place.lineno,
                )

    def _type_of(self, message: Message) -> str | None:
        """Return the name by which the dispatcher finds handlers, or None if the message has no usable type."""
        try:
            route = self._route_of(message)
        except Exception:  # noqa: BLE001  # the delivery failed with the same error, which is observed
            return None
        return route if isinstance(route, str) else f"{route.__module__}.{route.__qualname__}"


_SETTLED: dict[Outcome, Observed] = {
    Outcome.APPLIED: "applied",
    Outcome.DUPLICATE: "duplicate",
    Outcome.SKIPPED: "skipped",
}


class Watch:
    """Reports to an observer the messages that one handler gets in one transaction, over all attempts."""

    def __init__(self, observing: Observing, handler: Handler, messages: Sequence[Message]) -> None:
        self._observing, self._handler, self._messages = observing, handler.identity, messages
        self._attempts: Attempts | None = None  # if there was more than one
        self._began = time.monotonic()

    def settled(self, outcomes: Sequence[Outcome], in_doubt: Container[int], others: Container[int]) -> None:
        """Report the outcome of each message. A COMMIT without an answer may have applied those ``in_doubt``.

        The ``others`` are duplicates with another body.
        """
        for index, (message, outcome) in enumerate(zip(self._messages, outcomes, strict=True)):
            after_unknown = outcome is Outcome.DUPLICATE and index in in_doubt
            observed = "other_body" if index in others else _SETTLED[outcome]
            self._report(observed, message, after_unknown_commit=after_unknown and index not in others)

    def failed(self, error: Exception, messages: Sequence[Message] | None = None) -> None:
        """Report that messages have failed after all retries: ``messages``, or all."""
        for message in self._messages if messages is None else messages:
            self._report(outcome_of(error), message, error)

    def retried(self, error: Exception, attempts: Attempts) -> None:
        """Report that the library retries the messages."""
        self._attempts = attempts
        for message in self._messages:
            self._report("retried", message, error)

    def _report(
        self, outcome: Observed, message: Message, error: Exception | None = None, *, after_unknown_commit: bool = False
    ) -> None:
        self._observing.report(
            outcome,
            message,
            self._handler,
            duration=time.monotonic() - self._began,
            attempts=1 if self._attempts is None else self._attempts.number,
            error=error,
            batch_size=len(self._messages),
            after_unknown_commit=after_unknown_commit,
        )


def outcome_of(error: Exception) -> Observed:
    """Return the outcome of a message or a command that failed after all retries."""
    if isinstance(error, Defer):
        return "deferred"
    if isinstance(error, BeyondRetention):
        return "late"
    if isinstance(error, OtherBodyError):
        return "other_body"
    return "in_progress" if isinstance(error, InProgress) else "failed"


def _age(message: Message) -> float | None:
    try:
        return (datetime.now(UTC) - moment_in_utc(message.occurred_at)).total_seconds()
    except InvalidMessageError:  # the message has no ``occurred_at``, or a wrong one
        return None
