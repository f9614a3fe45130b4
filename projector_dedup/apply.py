"""Apply work once: claim, run the handler, commit; and again after a transient error.

Every delivery and every command passes through ``apply``, or through ``aapply`` under asyncio.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from sqlalchemy.orm import Session, sessionmaker

from .async_unit_of_work import AsyncUnitOfWork
from .asyncio_names import AsyncSession, async_sessionmaker
from .errors import ProjectorDedupError
from .handler import check_result
from .options import RetryPolicy, UnitOptions
from .reentry import Handling
from .retry import Attempts
from .row_source import ReadAheadError
from .unit_of_work import UnitOfWork

logger = logging.getLogger("projector_dedup")


class Work(Protocol):
    """The work that a unit of work is opened for: a chunk of messages, or a command. It keeps what became of it."""

    identity: str  #: of the handler, for texts of errors
    marked: bool  #: it claims a marker, so that a COMMIT whose outcome is unknown can be asked about
    many: bool  #: messages share the transaction, and are written one after the other
    reads_ahead: bool  #: rows may come with the claim; set to False where they could not be read
    connected: bool  #: set at each failure: a connection could be had

    def claim(self, uow: UnitOfWork) -> bool:
        """Begin with the claim; return True if there is something new, so that the handler must run."""

    def calls(self, session: Any) -> Iterator[Callable[[], Any]]:
        """Yield the calls of the handler, on the session of the claim."""

    def log_settled(self, attempts: Attempts) -> None:
        """Log what became of it; called if the level of the log is INFO or below."""

    def log_retry(self, error: Exception, attempts: Attempts) -> None:
        """Log that it is tried again after ``error``."""


def apply(work: Work, factory: sessionmaker[Session], options: UnitOptions, policy: RetryPolicy) -> bool:
    """Apply ``work`` once, which keeps what became of it; return True if that is durable, or raise."""
    attempts = Attempts(policy, marked=work.marked)
    while True:
        uow = UnitOfWork.opened(factory, options)
        try:
            with uow:
                if work.claim(uow):  # 1 claim first: a rival waits here
                    attempts.claimed()
                    with Handling(uow.session):
                        for call in work.calls(uow.session):  # 2 the handler, on the same session
                            check_result(work.identity, call(), asynchronous=False)
                            if work.many:
                                uow.next_message()
                        uow.commit()  # 3 marker and writes, together
            if logger.isEnabledFor(logging.INFO):
                work.log_settled(attempts)
            return uow.durable
        except ReadAheadError:
            work.reads_ahead = False  # and that was no attempt of its own
            continue
        except Exception as error:  # noqa: BLE001  # delay_after raises it, unless another attempt is due
            delay = _delay_after(work, error, attempts, uow)
        time.sleep(delay)


async def aapply(
    work: Work, factory: async_sessionmaker[AsyncSession], options: UnitOptions, policy: RetryPolicy
) -> bool:
    """Apply work as ``apply`` does, awaiting the database and the handler."""
    attempts = Attempts(policy, marked=work.marked)
    while True:
        uow = AsyncUnitOfWork.opened(factory, options)
        try:
            async with uow:
                if await uow.run(work.claim):
                    attempts.claimed()
                    with Handling(uow.unit.session):
                        for call in work.calls(uow.session):
                            awaitable = call()
                            check_result(work.identity, awaitable, asynchronous=True)
                            check_result(work.identity, await awaitable, asynchronous=False)
                            if work.many:
                                await uow.next_message()
                        await uow.commit_and_close()
            if logger.isEnabledFor(logging.INFO):
                work.log_settled(attempts)
            return uow.unit.durable
        except ReadAheadError:
            work.reads_ahead = False  # and that was no attempt of its own
            continue
        except Exception as error:  # noqa: BLE001  # delay_after raises it, unless another attempt is due
            delay = _delay_after(work, error, attempts, uow.unit)
        await asyncio.sleep(delay)


def _delay_after(work: Work, error: Exception, attempts: Attempts, uow: UnitOfWork) -> float:
    """Return the seconds to wait before the work is tried again, and log that; raise if it is not tried again.

    What is raised is ``error`` or a clearer one. Notes in ``work.connected`` whether a connection could be had.
    """
    work.connected = uow.dialect is not None
    if isinstance(error, ProjectorDedupError) and hasattr(error, "done"):
        error.done = False  # DuplicateCommandError, of a command that the handler asked for: this work is rolled back
    delay = attempts.delay_after(error, uow.cause_of(error), uow.dialect, commit_was_sent=uow.commit_was_sent)
    work.log_retry(error, attempts)
    return delay
