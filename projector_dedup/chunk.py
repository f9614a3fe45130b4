"""One message or several of a batch, as the work of one unit: what is claimed, which calls are made, what is logged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .delivery_log import log_outcomes, log_retry
from .handler import Handler
from .message import Message, valid_message_id
from .observer import Observing
from .outcome import Outcome
from .retry import Attempts
from .unit_of_work import UnitOfWork


class Chunk:
    """A message, or several of a batch, in the order of delivery, and what became of each."""

    def __init__(self, handler: Handler, messages: Sequence[Message], observing: Observing | None = None) -> None:
        self.handler = handler
        self.identity = handler.identity
        self.marked = handler.idempotent
        self.messages = messages
        self.outcomes: list[Outcome] = []
        self.at: int | None = None  # the message whose handler runs, if it has a call of its own
        self.many = len(messages) > 1
        self.connected = True  # at its last attempt
        self.reads_ahead = True  # until rows could not be read with its claim
        self.claimed = False  # its last claim was answered
        self.watch = None if observing is None else observing.watch(handler, messages)
        self._new: list[int] = []  # places of the messages that are handled
        self._events: list[Any] = []  # what the handler is given of those

    def claim(self, uow: UnitOfWork) -> bool:
        """Begin with the claim, if the handler is idempotent; return True if any message is new.

        Of messages that come twice in the chunk, the first is handled. Raises what ``UnitOfWork.claim`` raises.
        """
        self.at, self.claimed = None, False
        self._new = self._claim(uow)
        self.claimed = True
        self.outcomes = [Outcome.DUPLICATE] * len(self.messages)
        for index in self._new:
            self.outcomes[index] = Outcome.APPLIED
        self._events = self.handler.given([self.messages[index] for index in self._new])
        if self.many and self._events:
            bodies = [self.messages[index].body for index in self._new]
            uow.announce(bodies, one_by_one=not self.handler.on.batch)
        return bool(self._new)

    def _claim(self, uow: UnitOfWork) -> list[int]:
        """Return the places of messages that are new; all, whatever their ids, where nothing is claimed."""
        handler, first = self.handler, self.messages[0]
        if not handler.idempotent:
            uow.begin()
            return list(range(len(self.messages)))
        if not self.many:
            new = uow.claim_message(first, handler.identity, handler.formerly, reads_ahead=self.reads_ahead)
            return [0] if new else []
        keys = ((message.id, message.occurred_at) for message in self.messages)
        found = uow.claim_many(keys, handler.identity, formerly=handler.formerly)
        firsts = {valid_message_id(message.id): index for index, message in reversed([*enumerate(self.messages)])}
        return sorted(firsts[message_id] for message_id in found)

    def calls(self, session: Any) -> Iterator[Callable[[], Any]]:
        """Yield the handler's calls for the new messages, in their order; one for all if it takes batches."""
        calls = self.handler.calls(self._events, session)
        for index, call in zip(self._new, calls, strict=False):
            self.at = None if self.handler.on.batch else index
            yield call
        self.at = None

    def log_settled(self, attempts: Attempts) -> None:
        """Log the outcome of each message."""
        log_outcomes(self.handler, self.messages, self.outcomes, attempts)

    def log_retry(self, error: Exception, attempts: Attempts) -> None:
        """Log that the messages are tried again, after ``error``, and tell the observer."""
        log_retry(self.handler, self.messages, error, attempts)
        if self.watch is not None:
            self.watch.retried(error, attempts)
