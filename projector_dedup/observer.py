"""Observers: an application is told what became of each message, for metrics and traces, at no risk for a delivery."""

from __future__ import annotations

import inspect
import logging
import time
import traceback
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, Protocol

from .errors import Defer, InProgress, InvalidMessageError
from .handler import Handler
from .message import Message, Route, id_text, moment_in_utc, printable
from .outcome import Outcome
from .retry import Attempts

logger = logging.getLogger("projector_dedup")

Observed = Literal["applied", "duplicate", "skipped", "deferred", "in_progress", "failed", "retried"]
"""The outcome of an observation. All but ``retried`` end the delivery to a handler."""


@dataclass(frozen=True)
class Observation:
    """The outcome of one message for one handler, or that the handler is tried again. It has nothing of the body.

    ``outcome`` is ``applied``, ``duplicate`` or ``skipped`` for what may be acknowledged; ``deferred`` after ``Defer``,
    ``in_progress`` after ``InProgress`` and ``failed`` after any other ``error``; ``retried`` for each ``error`` after
    which the library itself tries again, with the number of the attempt to come in ``attempts``.

    ``handler`` is the handler's identity; None for a message that went to none: ``skipped``, or ``failed`` because it
    has no usable id or type, or no handler wants it. ``message_type`` is the name, or the module and name of the class,
    by which handlers are found; with no ``handler`` anybody may have made it up. ``message_id`` and ``message_type``
    are None if none was found.

    ``duration`` is in seconds, from before the claim of the first attempt, waits included; messages of a batch that
    were tried in one transaction, ``batch_size`` of them, have the duration of all. ``attempts`` counts the first one
    too, and is 0 for a message that went to no handler. ``age`` is in seconds since ``occurred_at``, by this machine's
    clock: it is negative if the producer's is ahead, and None if the message has no ``occurred_at``.

    ``after_unknown_commit`` is True for a ``duplicate`` that this very delivery applied, by a COMMIT whose answer was
    lost.
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


class Observer(Protocol):
    """An object that is told what became of messages: ``Dispatcher(observer=...)``.

    ``observed`` is called when the transaction has ended, in the thread or event loop that delivers, one call for each
    message and handler, so it must be quick, and safe to call from the threads that share the dispatcher. What it
    raises is logged once, and changes no delivery.
    """

    def observed(self, observation: Observation, /) -> None:
        """Note an observation. The result is ignored."""


class Observing:
    """Calls an observer, and keeps what the observer raises away from the delivery."""

    def __init__(self, observer: Observer, route_of: Callable[[object], Route]) -> None:
        observed = getattr(observer, "observed", None)
        if isinstance(observer, type) or not callable(observed) or inspect.iscoroutinefunction(observed):
            raise ValueError(
                f"observer takes an object with a method observed(observation), which is no async def; not {observer!r}"
            )
        self._observed, self._route_of = observed, route_of
        self._said = False

    def tell(
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
        """Call the observer. Of what it raises, the first ``Exception`` is logged and all are dropped.

        ``KeyboardInterrupt`` and its like pass: they are not the observer's.
        """
        try:
            message = event if isinstance(event, Message) else Message(None, event)
            self._observed(
                Observation(
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
            )
        except Exception as failure:  # noqa: BLE001  # nobody else's affair: what became of the message is decided
            if not self._said:
                self._said = True
                place = traceback.extract_tb(failure.__traceback__)[-1]
                logger.warning(  # its text might have the message's body in it
                    "the observer failed, which changes no delivery and is logged once: %s in %s, line %s",
                    type(failure).__name__,
                    printable(place.filename),
                    place.lineno,
                )

    def _type_of(self, message: Message) -> str | None:
        """Return the name by which handlers are found; None if the message's type is none, which is why it failed."""
        try:
            route = self._route_of(message)
        except Exception:  # noqa: BLE001  # as the delivery has, and told of
            return None
        return route if isinstance(route, str) else f"{route.__module__}.{route.__qualname__}"


class Watch:
    """The watch over messages that are tried in one transaction by one handler; over several attempts, if need be."""

    def __init__(self, observing: Observing, handler: Handler, messages: Sequence[Message]) -> None:
        self._observing, self._handler, self._messages = observing, handler.identity, messages
        self._attempts: Attempts | None = None  # if there was more than one
        self._began = time.monotonic()

    def settled(self, outcomes: Sequence[Outcome], in_doubt: Container[int]) -> None:
        """Report the outcome of each message. A COMMIT without an answer may have applied those ``in_doubt``."""
        for index, (message, outcome) in enumerate(zip(self._messages, outcomes, strict=True)):
            duplicate = outcome is Outcome.DUPLICATE
            after_unknown = duplicate and index in in_doubt
            self._tell("duplicate" if duplicate else "applied", message, after_unknown_commit=after_unknown)

    def failed(self, error: Exception, messages: Sequence[Message] | None = None) -> None:
        """Tell that messages have failed for good: all, or those that are given."""
        outcome: Observed = "failed"
        if isinstance(error, Defer):
            outcome = "deferred"
        elif isinstance(error, InProgress):
            outcome = "in_progress"
        for message in self._messages if messages is None else messages:
            self._tell(outcome, message, error)

    def retried(self, error: Exception, attempts: Attempts) -> None:
        """Tell that the messages are tried again."""
        self._attempts = attempts
        for message in self._messages:
            self._tell("retried", message, error)

    def _tell(
        self, outcome: Observed, message: Message, error: Exception | None = None, *, after_unknown_commit: bool = False
    ) -> None:
        self._observing.tell(
            outcome,
            message,
            self._handler,
            duration=time.monotonic() - self._began,
            attempts=1 if self._attempts is None else self._attempts.number,
            error=error,
            batch_size=len(self._messages),
            after_unknown_commit=after_unknown_commit,
        )


def _age(message: Message) -> float | None:
    try:
        return (datetime.now(UTC) - moment_in_utc(message.occurred_at)).total_seconds()
    except InvalidMessageError:  # there is none, or the delivery has failed by it
        return None
