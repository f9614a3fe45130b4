"""The unit of work: a session, one claim in it, and the only commit. It rolls back unless committed.

What talks to the database is written once, in ``Work``; under asyncio it runs through ``AsyncSession.run_sync``.
What is asyncio's own, cancellation, is in ``AsyncUnitOfWork``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar, cast

from sqlalchemy.orm import Session, sessionmaker

from .asyncio_names import AsyncSession, async_sessionmaker
from .guards import GuardedSession
from .sessions import UnitOptions, check_session_factory, new_async_session, new_session
from .tables import DedupTables, default_tables
from .work import Work

T = TypeVar("T")
F = TypeVar("F", sessionmaker[Session], async_sessionmaker[AsyncSession])


class _Opening(Generic[F]):
    """How both kinds are made: from a factory of sessions, and options that are those of ``UnitOptions``."""

    _asynchronous: ClassVar[bool]
    work: Work

    def __init__(
        self,
        session_factory: F,
        *,
        tables: DedupTables = default_tables,
        claim_timeout: float | None = None,
        isolation: str | None = None,
        read_models: Sequence[type[Any]] = (),
        strict: bool = False,
    ) -> None:
        check_session_factory(session_factory, asynchronous=self._asynchronous)
        self._prepare(
            session_factory, UnitOptions(tables, claim_timeout, isolation, tuple(read_models), strict, warned=True)
        )

    @classmethod
    def with_options(cls, session_factory: F, options: UnitOptions) -> Self:
        """The same, for a caller that has checked both once for many messages."""
        self = cls.__new__(cls)
        self._prepare(session_factory, options)
        return self

    def _prepare(self, session_factory: F, options: UnitOptions) -> None:
        raise NotImplementedError

    def _settled(self, new: T) -> T:
        """End the transaction of a duplicate, before the caller hears of it."""
        if not new:
            self.work.end_duplicate(read_on=True)
        return new


class UnitOfWork(_Opening[sessionmaker[Session]]):
    """One transaction for a marker and a handler's writes (invariants I1 to I5).

    ::

        with UnitOfWork(session_factory) as uow:
            if uow.claim(message_id, "account-totals.add"):
                uow.session.add(...)
                uow.commit()

    Leaving the block without ``commit()`` rolls everything back, the marker too. Nothing is retried here: that is
    what ``Dispatcher`` does. The options are those of ``UnitOptions``.
    """

    _asynchronous = False
    session: Session

    def _prepare(self, session_factory: sessionmaker[Session], options: UnitOptions) -> None:
        self.session = session = new_session(session_factory, options)
        self.work = Work(session, options)

    def __enter__(self) -> Self:
        return self

    def claim(
        self,
        message_id: object,
        handler: str,
        *,
        formerly: Collection[str] = (),
        occurred_at: datetime | None = None,
    ) -> bool:
        """Claim the message, as the transaction's first statement: True if it is new, False if a duplicate.

        With ``formerly``, names that the handler had before, it is claimed under these too, and new only if it is
        new under each: code that knows the old name only may run beside this one.

        A concurrent delivery of the same message waits here until this one ends. Raises ``RefusedError`` before
        anything is written, ``InProgress`` after ``claim_timeout``, and ``CommitOutcomeUnknown`` for a duplicate of
        which a synchronous standby may know nothing.
        """
        return self._settled(self.work.claim(message_id, handler, formerly, occurred_at))

    def claim_many(
        self,
        messages: Iterable[tuple[object, datetime | None]],
        handler: str,
        *,
        formerly: Collection[str] = (),
    ) -> set[str]:
        """Claim several messages at once, each an id and when it occurred, or None; returns the ids that are new.

        As ``claim``; where another delivery was faster it may raise ``OvertakenError``: run the unit of work again.
        If some are new, the others may be acknowledged after ``commit()``, as those are.
        """
        return self._settled(self.work.claim_many(messages, handler, formerly))

    def begin(self) -> None:
        """Open the transaction without a claim, for a handler that may run twice."""
        self.work.begin()

    def next_message(self) -> None:
        """Of several that were claimed together: look whether all is well, write what there is, and forget it."""
        self.work.next_message()

    def commit(self) -> None:
        """Commit marker and writes together.

        Raises ``TransactionViolatedError`` if the transaction is not the claim's any more, and
        ``CommitOutcomeUnknown`` if the connection was lost before the database answered.
        """
        self.work.commit()

    def __exit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.work.close(error)


class AsyncUnitOfWork(_Opening[async_sessionmaker[AsyncSession]]):
    """``UnitOfWork`` on an ``AsyncSession``: the same promises, awaited, and kept through cancellation.

    A cancellation during COMMIT or ROLLBACK first waits for the database's answer; anywhere else it takes effect at
    once. Either way no connection, transaction or lock stays behind.
    """

    _asynchronous = True
    session: AsyncSession

    def _prepare(self, session_factory: async_sessionmaker[AsyncSession], options: UnitOptions) -> None:
        self.session = new_async_session(session_factory, options)
        self.work = Work(cast(GuardedSession, self.session.sync_session), options)
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def claim(
        self,
        message_id: object,
        handler: str,
        *,
        formerly: Collection[str] = (),
        occurred_at: datetime | None = None,
    ) -> bool:
        """As ``UnitOfWork.claim``."""
        return await self.session.run_sync(
            lambda _: self._settled(self.work.claim(message_id, handler, formerly, occurred_at))
        )

    async def claim_many(
        self,
        messages: Iterable[tuple[object, datetime | None]],
        handler: str,
        *,
        formerly: Collection[str] = (),
    ) -> set[str]:
        """As ``UnitOfWork.claim_many``."""
        return await self.session.run_sync(lambda _: self._settled(self.work.claim_many(messages, handler, formerly)))

    async def begin(self) -> None:
        """As ``UnitOfWork.begin``."""
        await self.session.run_sync(lambda _: self.work.begin())

    async def next_message(self) -> None:
        """As ``UnitOfWork.next_message``."""
        await self.session.run_sync(lambda _: self.work.next_message())

    async def commit(self) -> None:
        """As ``UnitOfWork.commit``."""
        await _to_the_end(self.session.run_sync(lambda _: self.work.commit()))

    async def commit_and_close(self) -> None:
        """For who needs the session no more: the end of the block has nothing left to wait for."""
        await _to_the_end(self.session.run_sync(self._commit_and_close))

    def _commit_and_close(self, _session: Session) -> None:
        self._closed = True
        try:
            self.work.commit()
        except BaseException as error:
            self.work.close(error)
            raise
        self.work.close()

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        if not self._closed:
            await _to_the_end(self.session.run_sync(lambda _: self.work.close(error)))


async def _to_the_end(step: Coroutine[Any, Any, T]) -> T:
    """Await ``step`` even if this task is cancelled meanwhile, and only then be cancelled."""
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
