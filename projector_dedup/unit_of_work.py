"""The unit of work: a session, one claim in it, and the only commit. It rolls back unless committed.

What talks to the database is written once, in ``Work``; under asyncio it runs through ``AsyncSession.run_sync``.
What is asyncio's own, cancellation, is in ``AsyncUnitOfWork``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar

from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from .dialects import Dialect, dialect_of
from .errors import CommitOutcomeUnknown, UnsafeSessionError
from .guards import Guard
from .markers import bind_of_marker, insert_marker, marker_exists, marker_key, owns_marker, raise_in_progress
from .message import valid_handler, valid_message_id
from .sessions import UnitOptions, check_session_factory, new_async_session, new_session, open_connection
from .tables import DedupTables, default_tables

logger = logging.getLogger("projector_dedup")
T = TypeVar("T")


class Work:
    """One transaction on one private session, from its first statement to its end."""

    def __init__(self, session: Session, options: UnitOptions) -> None:
        self.session = session
        self.dialect: Dialect | None = None  # None until there was a connection
        self.durable = True
        self.committed = False
        self._options = options
        self._key: dict[str, Any] | None = None
        self._new = True
        self._guard: Guard | None = None

    def claim(self, message_id: object, handler: str, occurred_at: datetime | None = None) -> bool:
        """Claim first: the row of the marker is the lock on which a concurrent delivery waits."""
        self._key = marker_key(valid_message_id(message_id), valid_handler(handler), occurred_at)
        guard = self._begin(bind_of_marker(self.session, self._options.tables))
        self._new = insert_marker(
            guard.connection, guard.dialect, self._options.tables, self._key, self._options.claim_timeout
        )
        return self._new

    def begin(self) -> None:
        """A transaction without a marker, for a handler that is not idempotent (invariant I9)."""
        self._begin(self.session.get_bind())

    def commit(self) -> None:
        """Flush, look whether this is still the transaction that was begun, commit once."""
        guard = self._guard
        if guard is None:
            raise UnsafeSessionError("nothing was claimed in this unit of work; claim() comes before commit()")
        if not self._new:
            raise UnsafeSessionError("the message is a duplicate, so there is nothing to commit")
        guard.verify()
        self.session.flush()
        guard.verify()
        if self._options.strict and not self._owns_marker(guard):
            raise guard.ended_below()
        guard.allow_end()
        try:
            self.session.commit()
        except DBAPIError as error:
            if guard.dialect.commit_refused(error):
                raise
            raise CommitOutcomeUnknown(
                "the connection was lost during COMMIT: the message may be applied or not. Do not acknowledge it; "
                "a redelivery finds out"
            ) from error
        self.committed = True

    def cause_of(self, error: Exception) -> Exception:
        """What doomed the transaction, where that came before the error that the handler made of it."""
        return (self._guard.doomed_by if self._guard is not None else None) or error

    def close(self) -> None:
        """Roll back unless committed, and leave no lock and no open transaction, whatever the handler did."""
        guard = self._guard
        try:
            if guard is not None:
                guard.release()
                if not self.committed and self.durable and guard.must_disconnect():
                    guard.disconnect()
        finally:
            try:
                self.session.close()
            except Exception:
                if not self.committed:
                    raise
                logger.warning("closing the session failed after the commit; the message is applied", exc_info=True)

    def _begin(self, bind: Any) -> Guard:
        dialect, options = dialect_of(bind), self._options
        connection = open_connection(self.session, bind, options, marked=self._key is not None)
        self.dialect = dialect
        self.durable = not isinstance(bind, Connection)
        try:
            dialect.begin(connection, options.claim_timeout)
        except DBAPIError as error:
            raise_in_progress(error, dialect, options.claim_timeout)
            raise
        self._guard = Guard(self.session, connection, dialect, self._marker_is_committed)
        return self._guard

    def _owns_marker(self, guard: Guard) -> bool:
        key = self._key
        return key is None or owns_marker(guard.connection, guard.dialect, self._options.tables, key)

    def _marker_is_committed(self) -> bool:
        """For the text of an error, after the transaction was ended behind our back."""
        guard, key = self._guard, self._key
        return guard is not None and key is not None and marker_exists(guard.connection, self._options.tables, key)


class UnitOfWork:
    """One transaction for a marker and a handler's writes (invariants I1 to I5).

    ::

        with UnitOfWork(session_factory) as uow:
            if uow.claim(message_id, "account-totals.add"):
                uow.session.add(...)
                uow.commit()

    Leaving the block without ``commit()`` rolls everything back, the marker too. Nothing is retried here: that is
    what ``Dispatcher`` does. The options are those of ``UnitOptions``.
    """

    session: Session
    work: Work

    def __init__(
        self,
        session_factory: sessionmaker[Session],
        *,
        tables: DedupTables = default_tables,
        claim_timeout: float | None = None,
        isolation: str | None = None,
        read_models: Sequence[type[Any]] = (),
        strict: bool = False,
    ) -> None:
        check_session_factory(session_factory, asynchronous=False)
        self._prepare(session_factory, UnitOptions(tables, claim_timeout, isolation, tuple(read_models), strict))

    @classmethod
    def with_options(cls, session_factory: sessionmaker[Session], options: UnitOptions) -> Self:
        """The same, for a caller that has checked both once for many messages."""
        self = cls.__new__(cls)
        self._prepare(session_factory, options)
        return self

    def _prepare(self, session_factory: sessionmaker[Session], options: UnitOptions) -> None:
        self.session = new_session(session_factory, options)
        self.work = Work(self.session, options)

    def __enter__(self) -> Self:
        return self

    def claim(self, message_id: object, handler: str, *, occurred_at: datetime | None = None) -> bool:
        """Claim the message, as the transaction's first statement: True if it is new, False if a duplicate.

        A concurrent delivery of the same message waits here until this one ends. Raises ``RefusedError`` before
        anything is written, and ``InProgress`` after ``claim_timeout``.
        """
        return self.work.claim(message_id, handler, occurred_at)

    def begin(self) -> None:
        """Open the transaction without a claim, for a handler that may run twice."""
        self.work.begin()

    def commit(self) -> None:
        """Commit marker and writes together.

        Raises ``TransactionViolatedError`` if the transaction is not the claim's any more, and
        ``CommitOutcomeUnknown`` if the connection was lost before the database answered.
        """
        self.work.commit()

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.work.close()


class AsyncUnitOfWork:
    """``UnitOfWork`` on an ``AsyncSession``: the same promises, awaited, and kept through cancellation.

    A cancellation during COMMIT or ROLLBACK first waits for the database's answer; anywhere else it takes effect at
    once. Either way no connection, transaction or lock stays behind.
    """

    session: AsyncSession
    work: Work

    def __init__(
        self,
        session_factory: async_sessionmaker[AsyncSession],
        *,
        tables: DedupTables = default_tables,
        claim_timeout: float | None = None,
        isolation: str | None = None,
        read_models: Sequence[type[Any]] = (),
        strict: bool = False,
    ) -> None:
        check_session_factory(session_factory, asynchronous=True)
        self._prepare(session_factory, UnitOptions(tables, claim_timeout, isolation, tuple(read_models), strict))

    @classmethod
    def with_options(cls, session_factory: async_sessionmaker[AsyncSession], options: UnitOptions) -> Self:
        """The same, for a caller that has checked both once for many messages."""
        self = cls.__new__(cls)
        self._prepare(session_factory, options)
        return self

    def _prepare(self, session_factory: async_sessionmaker[AsyncSession], options: UnitOptions) -> None:
        self.session = new_async_session(session_factory, options)
        self.work = Work(self.session.sync_session, options)

    async def __aenter__(self) -> Self:
        return self

    async def claim(self, message_id: object, handler: str, *, occurred_at: datetime | None = None) -> bool:
        """As ``UnitOfWork.claim``."""
        return await self.session.run_sync(lambda _: self.work.claim(message_id, handler, occurred_at))

    async def begin(self) -> None:
        """As ``UnitOfWork.begin``."""
        await self.session.run_sync(lambda _: self.work.begin())

    async def commit(self) -> None:
        """As ``UnitOfWork.commit``."""
        await _to_the_end(self.session.run_sync(lambda _: self.work.commit()))

    async def __aexit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        await _to_the_end(self.session.run_sync(lambda _: self.work.close()))


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
