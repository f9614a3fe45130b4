"""Settle what a broker delivered: convert it, hand it to a dispatcher, say what its consumer has to do with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy.util import await_only, greenlet_spawn

from ..dispatcher import AsyncDispatcher, Dispatcher
from ..errors import BatchFailed, Defer, HandlerDefinitionError, InProgress, ProjectorDedupError
from ..message import envelope, id_text, printable
from ..outcome import Outcome
from ..verdict import Action, Verdict, verdict_of
from .incoming import Convert, Incoming, json_event

__all__ = ["Settled", "Settling"]

logger = logging.getLogger("projector_dedup.consumers")

MAX_REASON = 500  # characters of an error that are logged and put into a header
MAX_NAMES = 10  # headers that one log line names


@dataclass(frozen=True)
class Settled:
    """The answer to one delivery: acknowledge it if ``verdict`` is None, else do what the verdict says.

    ``reason`` is the error in short, printable: for the dead letter, where the message is rejected.
    """

    verdict: Verdict | None = None
    reason: str = ""

    @property
    def acknowledge(self) -> bool:
        """True if the message is applied, or was applied before, or nobody is to want it."""
        return self.verdict is None

    @property
    def reject(self) -> bool:
        """True if the message belongs to the dead letters: another delivery would fail like this one."""
        return self.verdict is not None and self.verdict.action is Action.REJECT

    @property
    def delay(self) -> float:
        """The seconds to wait before the message is delivered again; 0 to deliver it at once."""
        return 0.0 if self.verdict is None else self.verdict.delay


class Settling:
    """Gives what came in to a dispatcher, and turns every failure into a verdict and a log line.

    The consumer of a broker acknowledges, delays or rejects as ``Settled`` says: this class touches no broker.
    ``convert`` makes the event of an ``Incoming``. A message is rejected after ``max_attempts`` deliveries; None sets
    no limit. ``max_delay`` bounds the seconds of a delay; for a broker that knows certain ``delays`` only, given in
    ascending order, the bound is the longest of them within it, or else the shortest. The methods whose names begin
    with an ``a`` are for an ``AsyncDispatcher``.

    Raises ``HandlerDefinitionError`` if the dispatcher is not of the kind that ``asynchronous`` says, ``TypeError`` for
    a ``max_delay`` that is no number, and ``ValueError`` for an argument that is out of its range.
    """

    def __init__(
        self,
        dispatcher: Dispatcher | AsyncDispatcher,
        convert: Convert = json_event,
        *,
        max_attempts: int | None = None,
        max_delay: float = 300.0,
        delays: Sequence[float] = (),
        asynchronous: bool = False,
    ) -> None:
        wanted = AsyncDispatcher if asynchronous else Dispatcher
        if not isinstance(dispatcher, wanted):
            raise HandlerDefinitionError(f"this consumer takes {wanted.__name__}, not {type(dispatcher).__name__}")
        if not callable(convert):
            raise ValueError("convert takes a function, such as json_event")
        if max_attempts is not None and max_attempts < 1:
            raise ValueError("max_attempts is at least 1; None sets no limit")
        expect((int, float), max_delay, "max_delay is a number of seconds, as in max_delay=5")
        if not max_delay > 0:
            raise ValueError(f"max_delay is a number of seconds above 0, not {max_delay}")
        self._dispatcher: Any = dispatcher
        self._asynchronous = asynchronous
        self._convert = convert
        self._max_attempts = max_attempts
        within = [each for each in delays if each <= max_delay] or delays[:1]
        self._max_delay = max(within, default=max_delay)

    def deliver(self, incoming: Incoming) -> Settled:
        """Deliver one message. Never raises an ``Exception``: whatever is wrong is in the answer and in the log."""
        event = None
        try:
            event = self._convert(incoming)
            self._wait(self._dispatcher.deliver(event))
        except (Exception, asyncio.CancelledError) as error:
            if self._ends_this_task(error):
                raise
            return self._failed(incoming, event, error)  # the verdict tells the consumer what becomes of the message
        return Settled()

    async def adeliver(self, incoming: Incoming) -> Settled:
        """``deliver``, awaited."""
        return await greenlet_spawn(self.deliver, incoming)

    def deliver_batch(self, incoming: Sequence[Incoming]) -> list[Settled]:
        """Deliver many messages in one transaction; return an answer to each, in their order. Never raises.

        They are delivered one by one if the transaction ends by an error that does not say whose it is.
        """
        settled, events = self._converted(incoming)
        if events:
            try:
                self._wait(self._dispatcher.deliver_batch(list(events.values())))
            except BatchFailed as error:
                self._batch_failed(incoming, settled, events, error)
            except (Exception, asyncio.CancelledError) as error:
                if self._ends_this_task(error):
                    raise
                for position in events:  # the one whose it is meets it again alone
                    settled[position] = self.deliver(incoming[position])
        return settled

    async def adeliver_batch(self, incoming: Sequence[Incoming]) -> list[Settled]:
        """``deliver_batch``, awaited."""
        return await greenlet_spawn(self.deliver_batch, incoming)

    def _wait(self, returned: Any) -> None:
        """Wait for the end of a delivery; an ``AsyncDispatcher`` has returned a coroutine."""
        if self._asynchronous:
            await_only(returned)

    def _ends_this_task(self, error: BaseException) -> bool:
        """Return True if somebody has cancelled the task that runs now, and not only what the handler awaited."""
        if not isinstance(error, asyncio.CancelledError):
            return False
        task = asyncio.current_task() if self._asynchronous else None
        return task is None or task.cancelling() > 0

    def _converted(self, incoming: Sequence[Incoming]) -> tuple[list[Settled], dict[int, object]]:
        """Return an answer for each message, and the events of those that could be converted, by their position."""
        settled, events = [Settled()] * len(incoming), {}
        for position, each in enumerate(incoming):
            try:
                events[position] = self._convert(each)
            except Exception as error:  # noqa: BLE001  # of this message alone
                settled[position] = self._failed(each, None, error)
        return settled, events

    def _batch_failed(
        self, incoming: Sequence[Incoming], settled: list[Settled], events: dict[int, object], error: BatchFailed
    ) -> None:
        for (position, event), delivery in zip(events.items(), error.deliveries, strict=True):
            if delivery.outcome is Outcome.FAILED:
                settled[position] = self._failed(incoming[position], event, delivery.error or error)

    def _failed(self, incoming: Incoming, event: object, error: BaseException) -> Settled:
        verdict = verdict_of(error, attempts=max(incoming.attempt, 1), max_attempts=self._max_attempts)
        verdict = replace(verdict, delay=min(verdict.delay, self._max_delay))
        if verdict.action is Action.ACKNOWLEDGE:  # convert asked for a command; the event itself was not delivered
            verdict = replace(verdict, action=Action.REJECT)
        settled = Settled(verdict, _reason(error))
        told = (self._name(incoming, event), printable(incoming.origin), incoming.attempt)
        if settled.reject:
            ours = isinstance(verdict.error, ProjectorDedupError)  # its text says all
            logger.error(
                "message %s from %s is rejected at delivery %d: %s",
                *told,
                settled.reason,
                exc_info=None if ours else error,
            )
        else:
            level = logging.INFO if isinstance(verdict.error, (Defer, InProgress)) else logging.WARNING
            logger.log(
                level,
                "message %s from %s is to come again in %.1f s after delivery %d: %s",
                *(*told[:2], settled.delay, told[2], settled.reason),
            )
        return settled

    def _name(self, incoming: Incoming, event: object) -> str:
        """Return the id of a message, for log lines: the broker's, or that in the event, where the dispatcher looks."""
        value = incoming.message_id
        if value is None:
            try:
                value = id_text(envelope(event, None, self._dispatcher._extractor, needed=False))
            except Exception:  # noqa: BLE001  # of somebody's extractor, or of an id that is none
                value = None
        text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else value
        return printable(text[:80]) if isinstance(text, str) else "(without an id)"


def named_in_log(headers: Sequence[object]) -> str:
    """Return the names of the first ``MAX_NAMES`` headers, as one log line has room for them."""
    return ", ".join(printable(str(name)[:80]) for name in headers[:MAX_NAMES])


def expect(kind: type | tuple[type, ...], value: object, said: str) -> None:
    """Raise ``TypeError`` for an argument of a consumer that is not of this ``kind``: ``said`` is what to give."""
    if not isinstance(value, kind):
        given = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        raise TypeError(f"{said}, not {given}")


def _reason(error: BaseException) -> str:
    """Return the error's class, text and notes: a note says what to do before the message is delivered again."""
    try:
        text = "; ".join([str(error), *getattr(error, "__notes__", ())])
    except Exception:  # noqa: BLE001  # somebody's own __str__ must not stop the consumer
        text = "(its text cannot be had)"
    return printable(f"{type(error).__name__}: {text}"[:MAX_REASON])
