"""Settle a broker's message: convert it, deliver it, and return whether to acknowledge, retry or reject it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, TypedDict, TypeVar, get_args

from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm.exc import StaleDataError
from sqlalchemy.util import await_only, greenlet_spawn

from ..dialects import failure_of
from ..dispatcher import AsyncDispatcher, Dispatcher
from ..errors import (
    BatchFailed,
    BeyondRetention,
    CommitOutcomeUnknown,
    Defer,
    HandlerDefinitionError,
    InProgress,
    InvalidMessageError,
    InvalidMessageIdError,
    OtherBodyError,
    OvertakenError,
    ProjectorDedupError,
    RefusedError,
    RetriesExhaustedError,
    UnhandledMessage,
)
from ..message import Message, envelope, id_text, logger_of, printable, valid_source
from ..observer import Reason
from ..outcome import Delivery
from ..verdict import Action, Verdict, verdict_of
from .dead_letters import DeadLetter, Decide, Fate, Judge
from .incoming import Convert, Incoming, check_convert, json_event

__all__ = ["RetryOptions", "Settled", "Settling", "SettlingOptions"]

M = TypeVar("M")  # a message, as the broker's client has it

logger = logger_of("projector_dedup.consumers")

MAX_REASON = 1_000  # bytes of an error in a log line and in a header; an attribute of Pub/Sub has at most 1,024
MAX_NAMES = 10  # headers that one log line names
_LONGEST_WAIT = 10.0  # seconds that a consumer may wait for more messages: it looks whether it is stopped in between

_REASONS: tuple[tuple[tuple[type[BaseException], ...], Reason], ...] = (  # the first match counts
    ((InvalidMessageIdError,), "invalid_id"),
    ((InvalidMessageError,), "invalid_message"),
    ((UnhandledMessage,), "unhandled"),
    ((BeyondRetention,), "late"),
    ((OtherBodyError,), "other_body"),
    ((Defer,), "deferred"),
    ((InProgress,), "in_progress"),
    ((RefusedError,), "refused"),
    (
        (RetriesExhaustedError, CommitOutcomeUnknown, OvertakenError, StaleDataError, PoolTimeoutError),
        "database",
    ),
)


_UNREAD = object()  # the event of a message for which ``convert`` has not returned


@dataclass(frozen=True)
class Settled:
    """The decision about one message: the consumer acknowledges it if ``verdict`` is None, else follows the verdict.

    ``reason`` is the error, shortened and printable; put it into the dead letter of a rejected message. ``label`` is
    the reason in metrics; None if the message is acknowledged. ``delivery`` is what the dispatcher returned
    for an acknowledged message; ``==`` ignores it.
    """

    verdict: Verdict | None = None
    reason: str = ""
    label: Reason | None = None
    delivery: Delivery | None = field(default=None, compare=False, repr=False)

    @property
    def acknowledge(self) -> bool:
        """True if the message was applied, is a duplicate, or was skipped."""
        return self.verdict is None

    @property
    def reject(self) -> bool:
        """True if the message is a dead letter: another delivery would fail too, or ``max_attempts`` is reached."""
        return self.verdict is not None and self.verdict.action is Action.REJECT

    @property
    def delay(self) -> float:
        """The seconds before the message must be delivered again; 0 means at once."""
        return 0.0 if self.verdict is None else self.verdict.delay


class RetryOptions(TypedDict, total=False):
    """The options of all consumers that decide how often, and how soon, a message is delivered again.

    - ``max_attempts``: the consumer rejects a message at this number of deliveries. None, the default, sets no limit. A
      number below 1 raises ``ValueError``.
    - ``retry_later``: classes of errors, of SQLAlchemy or of the driver, after which the consumer retries a message
      that it would reject. The default is none. Anything else raises ``TypeError``. Without ``max_attempts``, which
      limits these retries, it raises ``ValueError``.
    - ``max_delay``: the longest time before a retry, in seconds. The default is 300. Anything but a number raises
      ``TypeError``, and a number that is not above 0 ``ValueError``.

    Every consumer also raises ``HandlerDefinitionError`` for a dispatcher of the other kind (``Dispatcher`` or
    ``AsyncDispatcher``). The consumers of pika, NATS, Redis, SQS and Pub/Sub raise ``TypeError`` for a wrong client.
    """

    max_attempts: int | None
    retry_later: Sequence[type[Exception]]
    max_delay: float


class SettlingOptions(RetryOptions, total=False):
    """The options of most consumers: those of ``RetryOptions``, and the source of the ids.

    - ``source``: a text that becomes a part of each message id, so that other queues may contain the same ids. None,
      the default, takes the ids as they are. Anything but text raises ``TypeError``, and a text that an id cannot
      contain ``ValueError``.
    """

    source: str | None


class Settling:
    """Delivers incoming messages to a dispatcher, and turns every failure into a verdict and a log line.

    This class never calls the broker: the consumer acknowledges, retries or rejects as ``Settled`` says. ``convert``
    builds the event from an ``Incoming``. If the broker supports only certain delays, pass them as ``delays`` in
    ascending order: no delay is then above the longest of them up to ``max_delay``, or else the shortest. With
    ``asynchronous=True``, pass an ``AsyncDispatcher`` and await ``adeliver`` and ``adeliver_batch``. With
    ``digest=False``, the body of a duplicate may differ. The other options are ``SettlingOptions``.

    The dispatcher's observer receives each result as an observation of the kind ``delivery``, with the name of the
    ``broker``. Call ``kept`` after the broker has confirmed a dead letter.

    Raises ``HandlerDefinitionError`` if the class of the dispatcher does not match ``asynchronous``, and the errors of
    its options.
    """

    def __init__(
        self,
        dispatcher: Dispatcher | AsyncDispatcher,
        convert: Convert = json_event,
        *,
        max_attempts: int | None = None,
        retry_later: Sequence[type[Exception]] = (),
        source: str | None = None,
        max_delay: float = 300.0,
        delays: Sequence[float] = (),
        asynchronous: bool = False,
        broker: str = "other",
        digest: bool = True,
    ) -> None:
        wanted = AsyncDispatcher if asynchronous else Dispatcher
        if not isinstance(dispatcher, wanted):
            raise HandlerDefinitionError(f"this consumer takes {wanted.__name__}, not {type(dispatcher).__name__}")
        check_convert(convert)
        if max_attempts is not None and max_attempts < 1:
            raise ValueError("max_attempts is at least 1; None sets no limit")
        _check_retry_later(retry_later, max_attempts)
        expect((int, float), max_delay, "max_delay is a number of seconds, as in max_delay=5")
        if not max_delay > 0:
            raise ValueError(f"max_delay is a number of seconds above 0, not {max_delay}")
        self._dispatcher: Any = dispatcher
        self._observing, self._broker = dispatcher._observing, broker
        self._asynchronous = asynchronous
        self._one_by_one = dispatcher._is_building  # what must keep its order, see `deliver_batch`
        check_source(source)
        self._convert = completed(convert, lambda _: source, digest=digest)
        self._max_attempts, self._retry_later = max_attempts, retry_later
        within = [each for each in delays if each <= max_delay] or delays[:1]
        self.max_delay = max(within, default=max_delay)

    @property
    def dispatcher(self) -> Dispatcher | AsyncDispatcher:
        """The dispatcher that gets the messages."""
        found: Dispatcher | AsyncDispatcher = self._dispatcher
        return found

    def deliver(self, incoming: Incoming) -> Settled:
        """Deliver one message. Never raises an ``Exception``: the result and the log contain every error."""
        event: object = _UNREAD
        try:
            event = self._convert(incoming)
            delivery = self._wait(self._dispatcher.deliver(event))
        except (Exception, asyncio.CancelledError) as error:
            if self._ends_this_task(error):
                raise
            return self._failed(incoming, event, error)
        return self._acknowledged(incoming, event, delivery)

    async def adeliver(self, incoming: Incoming) -> Settled:
        """Like ``deliver``, for an ``AsyncDispatcher``."""
        return await greenlet_spawn(self.deliver, incoming)

    def deliver_batch(self, incoming: Sequence[Incoming]) -> list[Settled]:
        """Deliver messages in one transaction; return a result for each, in their order. Never raises an ``Exception``.

        If the transaction fails with an error of no particular message, the library delivers the messages one by one.
        """
        if len(incoming) == 1:
            return [self.deliver(incoming[0])]
        settled, events = self._converted(incoming)
        if events:
            try:
                deliveries = self._wait(self._dispatcher.deliver_batch(list(events.values())))
            except BatchFailed as error:
                deliveries = error.deliveries
            except (Exception, asyncio.CancelledError) as error:
                if self._ends_this_task(error):
                    raise
                for position in events:  # only the message that causes the error fails again
                    settled[position] = self.deliver(incoming[position])
                return settled
            for (position, event), delivery in zip(events.items(), deliveries, strict=True):
                settled[position] = self._settled(incoming[position], event, delivery)
        return settled

    async def adeliver_batch(self, incoming: Sequence[Incoming]) -> list[Settled]:
        """Like ``deliver_batch``, for an ``AsyncDispatcher``."""
        return await greenlet_spawn(self.deliver_batch, incoming)

    def deliver_in_order(self, incoming: Sequence[Incoming]) -> list[Settled]:
        """Deliver messages in one transaction, as far as they succeed. Never raises an ``Exception``.

        Returns a result for each message up to the first that is not acknowledged, or for fewer. The others are still
        to be delivered, after that one.
        """
        events: list[object] = []
        if len(incoming) > 1 and not self._one_by_one:
            with contextlib.suppress(Exception):  # ``convert`` raises it again when that message is the first
                for each in incoming:
                    events.append(self._convert(each))
        if not events:
            return [self.deliver(incoming[0])]
        try:
            deliveries = self._wait(self._dispatcher.deliver_batch(events, in_order=True))
        except BatchFailed as error:
            deliveries = error.deliveries
        except (Exception, asyncio.CancelledError) as error:
            if self._ends_this_task(error):
                raise
            return [self.deliver(incoming[0])]
        settled: list[Settled] = []
        for each, event, delivery in zip(incoming, events, deliveries, strict=False):
            settled.append(self._settled(each, event, delivery))
            if not settled[-1].acknowledge:
                break
        return settled

    def kept(self, settled: Settled) -> None:
        """Report to the observer that the broker has confirmed the dead letter of a rejected message."""
        if self._observing is not None and settled.reject:
            self._observing.report_delivery("dead_letter", self._broker, settled.label)

    def unread(self, error: BaseException) -> Settled:
        """Reject a message that the broker's client could not read."""
        settled = Settled(Verdict(Action.REJECT, 0.0, error), reason_of(error), "invalid_message")
        if self._observing is not None:
            self._observing.report_delivery("rejected", self._broker, settled.label, error=error)
        return settled

    def judge(self, decide: Decide) -> Judge:
        """Return a function that builds a ``DeadLetter`` from a message, and returns what ``decide`` says about it."""

        def judge(incoming: Incoming, reason: object, deliveries: int | None) -> Fate:
            event: object = _UNREAD
            with contextlib.suppress(Exception):  # it may be a dead letter because ``convert`` fails
                event = self._convert(incoming)
            found = None
            with contextlib.suppress(UnicodeDecodeError):  # escaped, it could be the id of another message
                found = self._id_of(incoming, event, "strict")
            found = found or f"sha256:{hashlib.sha256(incoming.body).hexdigest()[:16]}"
            occurred_at = event.occurred_at if isinstance(event, Message) else None
            text = reason.decode(errors="backslashreplace") if isinstance(reason, bytes) else str(reason or "")
            fate = decide(DeadLetter(found, text, occurred_at, deliveries, incoming.body, incoming.headers))
            if fate not in get_args(Fate):
                raise ValueError(f'decide returns "keep", "replay", "drop" or "stop" for a dead letter, not {fate!r}')
            return fate

        return judge

    def _acknowledged(self, incoming: Incoming, event: object, delivery: Delivery) -> Settled:
        if self._observing is not None:
            self._observing.report_delivery(
                "acknowledged", self._broker, None, self._id_of(incoming, event), incoming.attempt
            )
        return Settled(delivery=delivery)

    def _wait(self, returned: Any) -> Any:
        """Return the result of a call of the dispatcher. An ``AsyncDispatcher`` returns a coroutine."""
        return await_only(returned) if self._asynchronous else returned

    def _ends_this_task(self, error: BaseException) -> bool:
        """Return True if the current task was cancelled, and not only something that the handler awaited."""
        if not isinstance(error, asyncio.CancelledError):
            return False
        task = asyncio.current_task() if self._asynchronous else None
        return task is None or task.cancelling() > 0

    def _converted(self, incoming: Sequence[Incoming]) -> tuple[list[Settled], dict[int, object]]:
        """Return a result for each message, and the converted events by their position."""
        settled, events = [Settled()] * len(incoming), {}
        for position, each in enumerate(incoming):
            try:
                events[position] = self._convert(each)
            except Exception as error:  # noqa: BLE001  # concerns this message only
                settled[position] = self._failed(each, _UNREAD, error)
        return settled, events

    def _settled(self, incoming: Incoming, event: object, delivery: Delivery) -> Settled:
        failed = delivery.error
        if failed is None:
            return self._acknowledged(incoming, event, delivery)
        return self._failed(incoming, event, failed)

    def _failed(self, incoming: Incoming, event: object, error: BaseException) -> Settled:
        if isinstance(error, InvalidMessageIdError) and self._has_no_id(event):
            error = InvalidMessageIdError(  # the dispatcher's own text addresses callers of ``deliver``
                "the message has no id, so a redelivery could not be detected; the producer must set the "
                f"{incoming.id_name}. If the body contains the id, give the dispatcher message_id=by_path(...)"
            )
        verdict = verdict_of(
            error,
            attempts=max(incoming.attempt, 1),
            max_attempts=self._max_attempts,
            retry_later=self._retry_later,
        )
        verdict = replace(verdict, delay=min(verdict.delay, self.max_delay))
        if verdict.action is Action.ACKNOWLEDGE:  # of a command in convert: the event was not delivered
            verdict = replace(verdict, action=Action.REJECT)
        settled = Settled(verdict, reason_of(error), self._label(error, verdict, read=event is not _UNREAD))
        found = self._id_of(incoming, event)
        if self._observing is not None:
            self._observing.report_delivery(
                "rejected" if settled.reject else "retried",
                self._broker,
                settled.label,
                found,
                incoming.attempt,
                verdict.error,
            )
        name = "(without an id)" if found is None else printable(found[:80])
        named = (name, printable(incoming.origin), incoming.attempt)
        if settled.reject:
            ours = isinstance(verdict.error, ProjectorDedupError)  # needs no traceback
            logger.error(
                "message %s from %s is rejected at delivery %d: %s",
                *named,
                settled.reason,
                exc_info=None if ours else error,
            )
        else:
            level = logging.INFO if isinstance(verdict.error, (Defer, InProgress)) else logging.WARNING
            logger.log(
                level,
                "message %s from %s will be delivered again in %.1f s, after delivery %d: %s",
                *(*named[:2], settled.delay, named[2], settled.reason),
            )
        return settled

    def _label(self, error: BaseException, verdict: Verdict, *, read: bool) -> Reason:
        """Return the reason for metrics. ``read`` is False if ``convert`` raised the error."""
        if verdict.action is Action.REJECT and verdict_of(error, retry_later=self._retry_later).action in (
            Action.RETRY_NOW,
            Action.RETRY_LATER,
        ):
            return "max_attempts"
        decisive = verdict.error
        for classes, reason in _REASONS:
            if isinstance(decisive, classes):
                return reason
        if not read:
            return "invalid_message"
        return "database" if isinstance(decisive, Exception) and failure_of(decisive) is not None else "handler"

    def _has_no_id(self, event: object) -> bool:
        """True if the dispatcher finds no id in the event, not even an invalid one."""
        try:
            return event is not _UNREAD and envelope(event, None, self._dispatcher._extractor, needed=True).id is None
        except Exception:  # noqa: BLE001  # raised by the user's extractor, or for an invalid id
            return False

    def _id_of(self, incoming: Incoming, event: object, errors: str = "backslashreplace") -> str | None:
        """Return the message's id from the broker, or else the one that the dispatcher finds; None if there is none.

        Of a message with a source, return the stored id. ``errors`` is about an id that is not UTF-8.
        """
        value = incoming.message_id
        has_source = isinstance(event, Message) and event.source is not None
        if has_source or (value is None and event is not _UNREAD):
            with contextlib.suppress(Exception):  # raised by the user's extractor, or for an invalid id
                value = id_text(envelope(event, None, self._dispatcher._extractor, needed=False)) or value
        text = value.decode(errors=errors) if isinstance(value, bytes) else value
        return text if isinstance(text, str) else None


def new_settling(
    called: Callable[..., object],
    dispatcher: Dispatcher | AsyncDispatcher,
    convert: Convert,
    options: RetryOptions,
    **more: Any,
) -> Settling:
    """Return the ``Settling`` of a consumer, with the ``options`` of the function that the user has ``called``.

    Raises Python's ``TypeError`` for an option that does not exist: it names ``called``, and not ``Settling``.
    """
    for name in options:
        if name not in SettlingOptions.__optional_keys__:
            raise TypeError(f"{called.__qualname__}() got an unexpected keyword argument {name!r}")
    return Settling(dispatcher, convert, **options, **more)


def named_in_log(headers: Sequence[object]) -> str:
    """Return the names of the first ``MAX_NAMES`` headers for one log line."""
    return ", ".join(printable(str(name)[:80]) for name in headers[:MAX_NAMES])


def expect(kind: type | tuple[type, ...], value: object, said: str) -> None:
    """Raise ``TypeError`` if an argument of a consumer is not of this ``kind``. ``said`` says what to pass."""
    if not isinstance(value, kind):
        given = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise TypeError(f"{said}, not {given}")


def check_source(source: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` for a ``source`` that is neither None nor a text that an id can contain."""
    expect((str, NoneType), source, 'source is text, as in source="payments", or None to take the ids as they are')
    if source is not None:
        valid_source(source)


def completed(convert: Convert, source_of: Callable[[Incoming], str | None], *, digest: bool = True) -> Convert:
    """Return ``convert`` with a source and, with ``digest``, with that of the body for each message that has none.

    Only here does a consumer add them. An empty body has no digest: of a tombstone, the key is the content.
    """

    def converted(incoming: Incoming) -> object:
        event = convert(incoming)
        message = event if isinstance(event, Message) else Message(None, event)
        lacking: dict[str, Any] = {}
        if message.source is None and not message.has_source:
            lacking["source"] = source_of(incoming)
        if digest and message.digest is None and incoming.body:
            lacking["digest"] = hashlib.sha256(incoming.body).digest()
        return replace(message, **lacking) if any(lacking.values()) else event

    return converted


def undeclared(several: str) -> str:
    """Return the error for a consumer of ``several`` whose ``source`` is not declared."""
    return (
        f"a consumer of {several} needs source=, because two of them may contain the same id, and then the second "
        "message would be lost as a duplicate. source=None takes the ids as they are, if no two contain the same; "
        'source="payments" makes one source a part of all ids'
    )


def _check_retry_later(classes: object, max_attempts: int | None) -> None:
    """Raise ``TypeError`` if ``retry_later`` has anything but classes of errors, ``ValueError`` without a limit."""
    if not isinstance(classes, (list, tuple)) or not all(
        isinstance(each, type) and issubclass(each, Exception) for each in classes
    ):
        raise TypeError(f"retry_later is a tuple of classes of errors, as in (IntegrityError,), not {classes!r}")
    if classes and max_attempts is None:
        raise ValueError(
            "retry_later needs max_attempts, as in max_attempts=10: without it, a message whose error stays would be "
            "retried for ever"
        )


def reason_of(error: BaseException) -> str:
    """Return the error's class, text and notes. A note says what to do before the message is delivered again."""
    try:
        parts = error.exceptions if isinstance(error, BaseExceptionGroup) else ()  # of several handlers
        text = "; ".join([str(error), *map(str, parts), *getattr(error, "__notes__", ())])
    except Exception:  # noqa: BLE001  # a failing __str__ of the user's error must not stop the consumer
        text = "(its text cannot be read)"
    whole = printable(f"{type(error).__name__}: {text}"[:MAX_REASON])
    return whole.encode()[:MAX_REASON].decode(errors="ignore")  # a character has up to ten bytes, escaped or not


def deliver_in_groups(settling: Settling, incoming: Sequence[Incoming], groups: Sequence[str]) -> list[Settled | None]:
    """Deliver messages, and return a ``Settled`` for each; None if it must wait for one of its group.

    Messages with the group "" are in no group. A rejected message does not delay its group.
    """
    answers: list[Settled | None] = [None] * len(incoming)
    rest = [*range(len(incoming))]
    while rest:
        settled = settling.deliver_in_order([incoming[number] for number in rest])
        for number, answer in zip(rest, settled, strict=False):
            answers[number] = answer
        last, rest = rest[len(settled) - 1], rest[len(settled) :]
        if groups[last] and not settled[-1].acknowledge and not settled[-1].reject:
            rest = [number for number in rest if groups[number] != groups[last]]
    return answers


def check_batch(batch: object, batch_wait: object = 0.0, *, most: int | None = None, limit: str = "") -> None:
    """Raise ``TypeError`` or ``ValueError`` for a ``batch`` that is no number from 1 to ``most``, which is a ``limit``.

    The same for a ``batch_wait`` that is no number of seconds.
    """
    if type(batch) is not int:
        raise TypeError(f"batch is a whole number of messages, as in batch=100, not {batch!r}")
    if batch < 1 or (most is not None and batch > most):
        raise ValueError(f"batch is at least 1{f', and at most {limit}, {most}' if most else ''}: not {batch}")
    if not isinstance(batch_wait, (int, float)) or isinstance(batch_wait, bool):
        raise TypeError(f"batch_wait is a number of seconds, as in batch_wait=0.1, not {batch_wait!r}")
    if not 0 <= batch_wait <= _LONGEST_WAIT:
        raise ValueError(f"batch_wait is a number of seconds from 0 to {_LONGEST_WAIT:g}, not {batch_wait}")
    if batch_wait and batch == 1:
        raise ValueError("batch_wait needs a batch of more than one message, as in batch=100")


def filled(found: list[M], batch: int, batch_wait: float, receive: Callable[[int], Sequence[M]]) -> list[M]:
    """Return the messages ``found``, and what has come ``batch_wait`` seconds later, at most ``batch`` in all.

    ``receive`` returns up to so many messages that are there.
    """
    if batch_wait and 0 < len(found) < batch:
        time.sleep(batch_wait)
        found += receive(batch - len(found))
    return found
