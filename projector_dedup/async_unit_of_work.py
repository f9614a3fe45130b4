"""The unit of work under asyncio: the same promises, awaited, and kept through cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from datetime import datetime
from typing import Any, Self, TypeVar, cast

from sqlalchemy.orm import Session

from .asyncio_names import AsyncSession, async_sessionmaker
from .guards import GuardedSession
from .options import UnitOptions, check_session_factory
from .sessions import new_async_session
from .tables import DedupTables, default_tables
from .unit_of_work import UnitOfWork

T = TypeVar("T")


class AsyncUnitOfWork:
    """``UnitOfWork`` on an ``AsyncSession``: the same promises, awaited, and kept through cancellation.

    A cancellation during COMMIT or ROLLBACK first waits for the database's answer; anywhere else it takes effect at
    once. Either way no connection, transaction or lock stays behind.
    """

    session: AsyncSession

    def __init__(
        self,
        session_factory: async_sessionmaker[Any],
        *,
        tables: DedupTables = default_tables,
        claim_timeout: float | None = None,
        isolation: str | None = None,
        read_models: Sequence[type[Any]] = (),
        strict: bool = False,
    ) -> None:
        check_session_factory(session_factory, asynchronous=True)
        self._prepare(
            session_factory, UnitOptions(tables, claim_timeout, isolation, tuple(read_models), strict, warn=False)
        )

    @classmethod
    def opened(cls, session_factory: async_sessionmaker[AsyncSession], options: UnitOptions) -> Self:
        """Return a unit of work; the caller has checked factory and options, once for many messages."""
        self = cls.__new__(cls)
        self._prepare(session_factory, options)
        return self

    def _prepare(self, session_factory: async_sessionmaker[AsyncSession], options: UnitOptions) -> None:
        self.session = new_async_session(session_factory, options)
        self.unit = UnitOfWork.on_session(cast(GuardedSession, self.session.sync_session), options)
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def run(self, step: Callable[[UnitOfWork], T]) -> T:
        """Call ``step`` with the synchronous unit of work, in which all that talks to the database is written once."""
        return await self.session.run_sync(lambda _: step(self.unit))

    async def claim(
        self,
        message_id: object,
        handler: str,
        *,
        formerly: Collection[str] = (),
        occurred_at: datetime | None = None,
    ) -> bool:
        """Claim the message: True if it is new, False if a duplicate. See ``UnitOfWork.claim``."""
        return await self.run(lambda unit: unit.claim(message_id, handler, formerly=formerly, occurred_at=occurred_at))

    async def claim_many(
        self,
        messages: Iterable[tuple[object, datetime | None]],
        handler: str,
        *,
        formerly: Collection[str] = (),
    ) -> set[str]:
        """Claim several messages at once and return the ids that are new. See ``UnitOfWork.claim_many``."""
        return await self.run(lambda unit: unit.claim_many(messages, handler, formerly=formerly))

    async def begin(self) -> None:
        """Open the transaction without a claim. See ``UnitOfWork.begin``."""
        await self.run(UnitOfWork.begin)

    async def next_message(self) -> None:
        """Write and forget what a message of a batch has changed, before the next. See ``UnitOfWork.next_message``."""
        await self.run(UnitOfWork.next_message)

    async def commit(self) -> None:
        """Commit marker and writes together. See ``UnitOfWork.commit``."""
        await _to_the_end(self.run(UnitOfWork.commit))

    async def commit_and_close(self) -> None:
        """Commit, and close the session, which its caller needs no more: one wait for the database instead of two."""
        await _to_the_end(self.session.run_sync(self._commit_and_close))

    def _commit_and_close(self, _session: Session) -> None:
        self._closed = True
        with self.unit:
            self.unit.commit()

    async def __aexit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if not self._closed:
            await _to_the_end(self.run(lambda unit: unit.close(error)))


async def _to_the_end(step: Coroutine[Any, Any, T]) -> T:
    """Await ``step`` to its end, even if this task is cancelled meanwhile, and only then be cancelled."""
    task = asyncio.ensure_future(step)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except Exception:  # noqa: BLE001  # it is the task's, and raised by its result below
            break
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # retrieved: the cancellation is what goes on
        raise cancelled
    return task.result()
