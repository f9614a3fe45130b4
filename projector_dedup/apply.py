"""Messages applied once by one handler: claim, run the handler, commit; and again after a transient error.

Every delivery passes through ``apply``, or through ``aapply`` under asyncio.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sqlalchemy.orm import Session, sessionmaker

from .async_unit_of_work import AsyncUnitOfWork
from .asyncio_names import AsyncSession, async_sessionmaker
from .delivery_log import log_outcomes, log_retry
from .handler import Handler, check_result
from .message import Message, valid_message_id
from .options import RetryPolicy, UnitOptions
from .outcome import Outcome
from .reentry import Handling
from .retry import Attempts
from .row_source import ReadAheadError
from .unit_of_work import UnitOfWork

logger = logging.getLogger("projector_dedup")


def apply(chunk: Chunk, factory: sessionmaker[Session], options: UnitOptions, policy: RetryPolicy) -> bool:
    """Apply a chunk once: put what is settled into ``chunk.outcomes`` and return True if it is durable, or raise."""
    attempts = Attempts(policy, marked=chunk.handler.idempotent)
    while True:
        uow = UnitOfWork.opened(factory, options)
        try:
            with uow:
                if chunk.claim(uow):  # 1 claim first: a rival waits here
                    attempts.claimed()
                    with Handling(uow.session):
                        for call in chunk.calls(uow.session):  # 2 the handler, on the same session
                            check_result(chunk.handler, call(), asynchronous=False)
                            if chunk.many:
                                uow.next_message()
                        uow.commit()  # 3 marker and writes, together
            if logger.isEnabledFor(logging.INFO):
                log_outcomes(chunk.handler, chunk.messages, chunk.outcomes, attempts)
            return uow.durable
        except ReadAheadError:
            chunk.reads_ahead = False  # and that was no attempt of the message's
            continue
        except Exception as error:  # noqa: BLE001  # delay_after raises it, unless another attempt is due
            delay = _delay_after(chunk, error, attempts, uow)
        time.sleep(delay)


async def aapply(
    chunk: Chunk, factory: async_sessionmaker[AsyncSession], options: UnitOptions, policy: RetryPolicy
) -> bool:
    """Apply a chunk as ``apply`` does, awaiting the database and the handler."""
    attempts = Attempts(policy, marked=chunk.handler.idempotent)
    while True:
        uow = AsyncUnitOfWork.opened(factory, options)
        try:
            async with uow:
                if await uow.run(chunk.claim):
                    attempts.claimed()
                    with Handling(uow.unit.session):
                        for call in chunk.calls(uow.session):
                            awaitable = call()
                            check_result(chunk.handler, awaitable, asynchronous=True)
                            check_result(chunk.handler, await awaitable, asynchronous=False)
                            if chunk.many:
                                await uow.next_message()
                        await uow.commit_and_close()
            if logger.isEnabledFor(logging.INFO):
                log_outcomes(chunk.handler, chunk.messages, chunk.outcomes, attempts)
            return uow.unit.durable
        except ReadAheadError:
            chunk.reads_ahead = False  # and that was no attempt of the message's
            continue
        except Exception as error:  # noqa: BLE001  # delay_after raises it, unless another attempt is due
            delay = _delay_after(chunk, error, attempts, uow.unit)
        await asyncio.sleep(delay)


def _delay_after(chunk: Chunk, error: Exception, attempts: Attempts, uow: UnitOfWork) -> float:
    """Return the seconds to wait before the chunk is tried again, and log that; raise if it is not tried again.

    What is raised is ``error`` or a clearer one. Notes in ``chunk.connected`` whether a connection could be had.
    """
    chunk.connected = uow.dialect is not None
    delay = attempts.delay_after(error, uow.cause_of(error), uow.dialect, commit_was_sent=uow.commit_was_sent)
    log_retry(chunk.handler, chunk.messages, error, attempts)
    return delay


class Chunk:
    """A message, or several of a batch, in the order of delivery, and what became of each."""

    def __init__(self, handler: Handler, messages: Sequence[Message]) -> None:
        self.handler = handler
        self.messages = messages
        self.outcomes: list[Outcome] = []
        self.at: int | None = None  # the message whose handler runs, if it has a call of its own
        self.many = len(messages) > 1
        self.connected = True  # at its last attempt
        self.reads_ahead = True  # until rows could not be read with its claim
        self.claimed = False  # its last claim was answered
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
