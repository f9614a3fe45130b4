"""Messages applied once by one handler: open a unit of work, claim, apply, commit. Every delivery passes here."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sqlalchemy.orm import Session, sessionmaker

from .asyncio_names import AsyncSession, async_sessionmaker
from .errors import HandlerDefinitionError
from .handler import Handler
from .message import Message, id_text, printable, valid_message_id
from .outcome import Outcome
from .reentry import Handling
from .retry import Attempts, RetryPolicy
from .row_source import ReadAheadError
from .sessions import UnitOptions
from .unit_of_work import AsyncUnitOfWork, UnitOfWork
from .work import Work

logger = logging.getLogger("projector_dedup")


class Chunk:
    """What one unit of work applies: a message, or several of a batch, by one handler, in the order of delivery."""

    def __init__(self, handler: Handler, messages: Sequence[Message]) -> None:
        self.handler = handler
        self.messages = messages
        self.outcomes: list[Outcome] = []
        self.at: int | None = None  # the message whose handler runs, if it has a call of its own
        self.many = len(messages) > 1
        self.connected = True  # at its last attempt
        self.reads_ahead = True  # until rows could not be read with its claim
        self.opened = False  # by a claim that was answered
        self._entering: list[int] = []
        self._events: list[Any] = []  # theirs

    def open(self, work: Work) -> bool:
        """Begin with the claim, if there is to be one; whether anything is new.

        Of messages that come twice in here, the first is handled.
        """
        self.at, self.opened = None, False
        self._entering = self._claim(work)
        self.opened = True
        self.outcomes = [Outcome.DUPLICATE] * len(self.messages)
        for index in self._entering:
            self.outcomes[index] = Outcome.APPLIED
        self._events = self.handler.given([self.messages[index] for index in self._entering])
        if self.many and self._events:
            bodies = [self.messages[index].body for index in self._entering]
            work.foresee(bodies, one_by_one=not self.handler.on.batch)
        if not self._entering:
            work.end_duplicate()
        return bool(self._entering)

    def open_in(self, _session: Session, work: Work) -> bool:
        """``open``, as ``AsyncSession.run_sync`` calls it."""
        return self.open(work)

    def _claim(self, work: Work) -> list[int]:
        """Those that are new; all, whatever their ids, where nothing is claimed."""
        handler, first = self.handler, self.messages[0]
        if not handler.idempotent:
            work.begin()
            return list(range(len(self.messages)))
        if not self.many:
            about = first if self.reads_ahead else None
            new = work.claim(first.id, handler.identity, handler.formerly, first.occurred_at, about=about)
            return [0] if new else []
        keys = ((message.id, message.occurred_at) for message in self.messages)
        found = work.claim_many(keys, handler.identity, handler.formerly)
        firsts = {valid_message_id(message.id): index for index, message in reversed([*enumerate(self.messages)])}
        return sorted(firsts[message_id] for message_id in found)

    def calls(self, session: Any) -> Iterator[Callable[[], Any]]:
        """The handler's calls, one after the other."""
        calls = self.handler.calls(self._events, session)
        for index, call in zip(self._entering, calls, strict=False):
            self.at = None if self.handler.on.batch else index
            yield call
        self.at = None


def apply(chunk: Chunk, factory: sessionmaker[Session], options: UnitOptions, policy: RetryPolicy) -> bool:
    """Apply a chunk once: put what is settled into ``chunk.outcomes`` and return whether it is durable, or raise."""
    handler, attempts = chunk.handler, Attempts(policy, marked=chunk.handler.idempotent)
    while True:
        uow = UnitOfWork.with_options(factory, options)
        try:
            with uow:
                if chunk.open(uow.work):
                    attempts.claimed()
                    with Handling(uow.work.session):
                        for call in chunk.calls(uow.session):
                            _check_result(handler, call(), asynchronous=False)
                            if chunk.many:
                                uow.next_message()
                        uow.commit()
            return _settled(chunk, attempts, uow.work.durable)
        except ReadAheadError:
            chunk.reads_ahead = False  # and that was no attempt of the message's
            continue
        except Exception as error:  # noqa: BLE001  # delay_after raises it, unless another attempt is due
            delay = _delay_after(chunk, error, attempts, uow.work)
            _log_retry(chunk, attempts, error)
        time.sleep(delay)


async def aapply(
    chunk: Chunk, factory: async_sessionmaker[AsyncSession], options: UnitOptions, policy: RetryPolicy
) -> bool:
    """``apply``, awaited."""
    handler, attempts = chunk.handler, Attempts(policy, marked=chunk.handler.idempotent)
    while True:
        uow = AsyncUnitOfWork.with_options(factory, options)
        try:
            async with uow:
                if await uow.session.run_sync(chunk.open_in, uow.work):
                    attempts.claimed()
                    with Handling(uow.work.session):
                        for call in chunk.calls(uow.session):
                            awaitable = call()
                            _check_result(handler, awaitable, asynchronous=True)
                            _check_result(handler, await awaitable, asynchronous=False)
                            if chunk.many:
                                await uow.next_message()
                        await uow.commit_and_close()
            return _settled(chunk, attempts, uow.work.durable)
        except ReadAheadError:
            chunk.reads_ahead = False  # and that was no attempt of the message's
            continue
        except Exception as error:  # noqa: BLE001  # delay_after raises it, unless another attempt is due
            delay = _delay_after(chunk, error, attempts, uow.work)
            _log_retry(chunk, attempts, error)
        await asyncio.sleep(delay)


def _delay_after(chunk: Chunk, error: Exception, attempts: Attempts, work: Work) -> float:
    chunk.connected = work.dialect is not None
    return attempts.delay_after(error, work.cause_of(error), work.dialect, commit_was_sent=work.commit_was_sent)


def _check_result(handler: Handler, result: object, *, asynchronous: bool) -> None:
    if result is None and not asynchronous:
        return  # as nearly always
    awaitable = inspect.isawaitable(result)
    if awaitable == asynchronous and not (inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return
    if inspect.iscoroutine(result):
        result.close()
    raise HandlerDefinitionError(
        f"{handler.identity} returned {type(result).__name__}, which "
        + (
            "was not awaited: its work was not done"
            if awaitable or inspect.isgenerator(result)
            else "cannot be awaited"
        )
    )


def _settled(chunk: Chunk, attempts: Attempts, durable: bool) -> bool:
    for message, outcome in zip(chunk.messages, chunk.outcomes, strict=True):
        duplicate = outcome is Outcome.DUPLICATE
        level = logging.INFO if duplicate else logging.DEBUG
        if not logger.isEnabledFor(level):  # what follows escapes texts, for every message
            continue
        after_unknown = duplicate and attempts.unknown is not None
        logger.log(
            level,
            "%s%s: message %s, handler %s",
            outcome.value,
            " (after_unknown_commit)" if after_unknown else "",
            _log_id(message),
            printable(chunk.handler.identity),
            extra=_extra(chunk.handler, message, outcome.value, attempts) | {"after_unknown_commit": after_unknown},
        )
    return durable


def _log_retry(chunk: Chunk, attempts: Attempts, error: Exception) -> None:
    others = f" and {len(chunk.messages) - 1} more" if chunk.many else ""
    logger.info(
        "retry after %s: message %s%s, handler %s",
        type(error).__name__,
        _log_id(chunk.messages[0]),
        others,
        printable(chunk.handler.identity),
        extra=_extra(chunk.handler, chunk.messages[0], "retry", attempts),
    )


def _extra(handler: Handler, message: Message, outcome: str, attempts: Attempts) -> dict[str, Any]:
    return {
        "message_id": _log_id(message),
        "handler": printable(handler.identity),
        "outcome": outcome,
        "attempts": attempts.number,
    }


def _log_id(message: Message) -> str:
    return printable(str(id_text(message)))[:600]
