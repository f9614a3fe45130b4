"""The unit of work: one transaction with one claim and one COMMIT for the marker and the handler's writes.

``AsyncUnitOfWork`` runs the methods of ``UnitOfWork`` in a greenlet (see ``waiting``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Self, TypeVar
from uuid import UUID

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.orm.exc import FlushError
from sqlalchemy.util import greenlet_spawn

from .asyncio_names import AsyncSession, async_sessionmaker
from .bodies import other_body, stored_digests
from .closing import drop
from .dialects import Dialect, Failure, LastStatement, Status, dialect_of, may_move
from .errors import CommitOutcomeUnknown, OvertakenError, TransactionViolatedError, UnsafeSessionError
from .guard import Guard, was_stopped
from .late import Instant
from .markers import (
    COMMITTED_AT_ONCE,
    bind_of_marker,
    bind_of_session,
    insert_marker,
    insert_markers,
    raise_in_progress,
    refuse_shared_markers,
    translate_map,
    valid_key,
    valid_keys,
)
from .message import logger_of, valid_formerly
from .opening import new_async_session, new_session, open_connection
from .options import UnitOptions, check_session_factory
from .reentry import refuse_within_handler
from .tables import DedupTables, default_tables
from .waiting import AWAITING, BLOCKING, Waiting

logger = logger_of("projector_dedup")

T = TypeVar("T")

_FLUSHES = 100  # the limit of SQLAlchemy's own COMMIT

_INTERRUPTED = (
    "the COMMIT was interrupted, for example because the connection was lost: the message may be applied or not. Do "
    "not acknowledge it; "
)
_REDELIVERY_TELLS = "a redelivery finds the marker if the message was applied"
_NO_MARKER_TELLS = "there is no marker, so a redelivery may apply it again: check the read model first"
_DUPLICATE = (
    "the message was applied before, and the COMMIT that waits for the synchronous standby was interrupted. Do not "
    "acknowledge it; a redelivery waits for the standby again"
)


class UnitOfWork:
    """Commits a marker and your writes in one transaction (invariants I1 to I5). Use it if you need no dispatcher.

    ::

        with UnitOfWork(session_factory) as uow:
            if uow.claim(message_id, "account-totals.add"):
                uow.session.add(...)
                uow.commit()

    If the block ends without ``commit()``, everything is rolled back, including the marker. A unit of work does not
    retry; ``Dispatcher`` does. ``projector_dedup.options`` describes the arguments that are not described here.

    - ``read_models``: entities whose rows the library reads under lock, as in ``@projector``.
    """

    session: Session

    def __init__(
        self,
        session_factory: sessionmaker[Any],
        *,
        tables: DedupTables = default_tables,
        claim_timeout: float | None = None,
        isolation: str | None = None,
        read_models: Sequence[type[Any]] = (),
        strict: bool = False,
    ) -> None:
        check_session_factory(session_factory, asynchronous=False)
        self._prepare(
            session_factory,
            UnitOptions(tables, claim_timeout, isolation, tuple(read_models), strict, warn=False, accepted=None),
            BLOCKING,
        )

    @classmethod
    def opened(cls, session_factory: Any, options: UnitOptions, waiting: Waiting) -> Self:
        """Return a unit of work without checking the factory and the options, which the caller has checked before."""
        self = cls.__new__(cls)
        self._prepare(session_factory, options, waiting)
        return self

    def _prepare(self, session_factory: Any, options: UnitOptions, waiting: Waiting) -> None:
        #: the session that the handler gets: ``session``, or the AsyncSession around it
        self.handlers_session: Any
        self._options = options
        self._waiting = waiting
        if waiting is BLOCKING:
            self.handlers_session = self._session = new_session(session_factory, options)
        else:
            self.handlers_session = new_async_session(session_factory, options)
            self._session = self.handlers_session.sync_session
        self.session = self._session
        self._session.building = options.building
        self.dialect: Dialect | None = None  # None until the first connection
        self.durable = True  # False: the transaction belongs to the caller, who has not committed it yet
        self.last: LastStatement | None = None  # a statement that ``commit`` runs after all others
        self.lateness = options.lateness  # for ``Chunk.claim``: the unit of work itself detects no late message
        self.other_body = options.other_body  # for ``Chunk.claim``, too
        self.claiming_digest = False  # True: a claim with a digest has begun, and was not answered
        self.others: dict[str, bytes | None] = {}  # by id: the stored digest of a duplicate, perhaps that of this body
        self._guard: Guard | None = None
        self._new = self._committed = self._closed = False

    def __enter__(self) -> Self:
        return self

    # 1 Claim first: a concurrent delivery waits here ----------------------------------------------------------------

    def claim(
        self,
        message_id: str | UUID | None,
        handler: str,
        *,
        formerly: Collection[str] = (),
        occurred_at: datetime | None = None,
    ) -> bool:
        """Insert the marker of the message. Return True if the message is new, False if it is a duplicate.

        The claim is the first statement of the transaction. A concurrent delivery of the same message waits in its own
        ``claim`` until this unit of work ends.

        - ``handler``: the name under which the marker is stored.
        - ``formerly``: former names of the handler. ``claim`` inserts a marker under each name, and the message is new
          only if it is new under every name. So code that knows only a former name may run at the same time.
        - ``occurred_at``: when the event occurred, with a time zone, or None. The marker stores it.

        Unlike a dispatcher, ``claim`` does not detect a late message: if its marker was deleted, the message is new.

        Raises ``RefusedError`` before it writes anything, and ``InProgress`` after ``claim_timeout``. Raises
        ``CommitOutcomeUnknown`` for a duplicate whose marker may not have reached a synchronous standby. Do not
        acknowledge the message then.
        """
        new = self.claim_key(valid_key(message_id, handler, occurred_at), formerly)
        self._read_on()
        return new

    def claim_many(
        self,
        messages: Iterable[tuple[str | UUID | None, datetime | None]],
        handler: str,
        *,
        formerly: Collection[str] = (),
    ) -> set[str]:
        """Insert the markers of several messages, and return the ids that are new.

        Each message is a pair of its id and its ``occurred_at`` (or None). An id with a marker under one of the names
        ``formerly`` is not new. If some ids are new, call ``commit()`` before you acknowledge any message, also the
        duplicates. Raises the errors of ``claim``, and ``OvertakenError`` if another delivery was faster: run the unit
        of work again.
        """
        new = self.claim_keys(valid_keys(messages, handler), formerly)
        self._read_on()
        return new

    def claim_keys(self, keys: dict[str, dict[str, Any]], formerly: Collection[str] = ()) -> set[str]:
        """Claim like ``claim_many``, with checked ``keys`` by message id, which all have a digest, or none."""
        names, tables, wait = valid_formerly(formerly), self._options.tables, self._options.claim_timeout
        first = next(iter(keys.values()))
        has_digest = "digest" in first
        new: list[str] = []

        def insert(guard: Guard) -> bool:
            connection = guard.connection
            self.claiming_digest = has_digest
            new.extend(insert_markers(connection, guard.dialect, tables, keys, names, wait))
            self.claiming_digest = False
            if has_digest:
                known = [keys[message_id] for message_id in keys.keys() - {*new}]
                self.others = stored_digests(connection, tables.marker, known, [first["handler"], *names])
            guard.claimed_several()
            if new:
                guard.key = keys[new[0]]
            return bool(new)

        self._claim(first, insert)
        return set(new)

    def claim_key(
        self,
        key: dict[str, Any],
        formerly: Collection[str] = (),
        *,
        first: Callable[[Connection, Dialect, float | None], None] | None = None,
        recall: LastStatement | None = None,
    ) -> bool:
        """Claim like ``claim``, with a ``key`` that was checked before.

        ``first`` runs before the claim, and gets the ``claim_timeout``. For a duplicate, ``recall`` runs as the last
        statement, and reads the result that a command has recorded. If ``key`` has a digest, the last statement reads
        the digest of the duplicate instead.
        """
        names, tables, wait = valid_formerly(formerly), self._options.tables, self._options.claim_timeout
        has_digest = "digest" in key
        if has_digest:
            recall = other_body(tables.marker, key, [key["handler"], *names])

        def insert(guard: Guard) -> bool:
            if first is not None:
                first(guard.connection, guard.dialect, wait)
            self.claiming_digest = has_digest
            new = insert_marker(guard.connection, guard.dialect, tables, key, names, wait=wait)
            self.claiming_digest = False
            return new

        new = self._claim(key, insert, one=first is None, recall=recall)
        if has_digest and recall is not None and recall.row is not None:
            self.others = {key["message_id"]: bytes(recall.row.digest)}
        return new

    def claim_by(self, key: dict[str, Any], claims: Callable[[Connection, Dialect], bool]) -> bool:
        """Claim a row with the caller's own statements. ``claims`` returns False if there is nothing to commit."""
        return self._claim(key, lambda guard: claims(guard.connection, guard.dialect))

    def begin(self) -> None:
        """Open the transaction without a claim, for a handler that is not idempotent (invariant I9)."""
        self._watch(self._open(bind_of_session(self.session), None, one=False), new=True)

    def _claim(
        self,
        key: dict[str, Any],
        insert: Callable[[Guard], bool],
        *,
        one: bool = False,
        recall: LastStatement | None = None,
    ) -> bool:
        guard, new = self._open(bind_of_marker(self.session, self._options.tables), key, one=one), False
        try:
            new = insert(guard)
        finally:
            self._watch(guard, new=new)
        if not new:
            self._end_duplicate(guard, recall)
        return new

    def _open(self, bind: Any, key: dict[str, Any] | None, *, one: bool) -> Guard:
        """Begin the transaction for the claim of ``key`` (None: without a claim) and return its guard."""
        refuse_within_handler(bind)
        self.durable = not isinstance(bind, Connection)
        options = self._options
        connection = open_connection(self._session, bind, options, marked=key is not None, one=one)
        self.dialect = dialect = dialect_of(connection)
        if key is not None:
            refuse_shared_markers(translate_map(connection), options.tables)
        try:
            dialect.begin(connection, options.tables.marker if key is not None else None, options.claim_timeout)
        except DBAPIError as error:
            raise_in_progress(error, dialect, options.claim_timeout)
            raise
        self._guard = Guard(self._session, connection, dialect, options.tables, key)
        return self._guard

    def _watch(self, guard: Guard, *, new: bool) -> None:
        """Watch the session from now on, also after a failed claim: no write may commit without a marker."""
        status = guard.watch()
        if not new:
            return
        if guard.key is not None and status is not Status.OPEN:
            raise UnsafeSessionError(COMMITTED_AT_ONCE)
        if self._options.strict:
            guard.mark()
        self._new = True  # only from now on there is something to commit

    def _end_duplicate(self, guard: Guard, recall: LastStatement | None) -> None:
        """Commit the transaction of a duplicate if the dialect ``commits_duplicates``. Otherwise ``close`` rolls back.

        On PostgreSQL a COMMIT waits for a synchronous standby, and a ROLLBACK does not. A ROLLBACK would also make
        psycopg discard its prepared statements. Raises ``CommitOutcomeUnknown`` if a failover may lose the marker.
        """
        commits = guard.dialect.commits_duplicates and self.durable
        if recall is not None:
            self._run_last(guard, recall, commits=commits)
        if not commits:
            return
        guard.watching = False
        try:
            guard.connection.commit()
        except (DBAPIError, OSError) as error:
            raise CommitOutcomeUnknown(_DUPLICATE) from error

    def _read_on(self) -> None:
        """After the COMMIT of a duplicate, begin a transaction in which the caller can read. It never commits."""
        guard = self._required_guard()
        if self._new or not (self.durable and guard.commit_was_answered):
            return
        guard.release()
        guard.connection.begin()
        self._guard = Guard(guard.session, guard.connection, guard.dialect, self._options.tables, guard.key)
        self._guard.watch()

    def late_moment(self, claimed: Instant) -> datetime | None:
        """Return the moment before which a message without a marker is late (``Lateness.moment``), or None.

        In the caller's own transaction (``testing.external_transaction``) no message is late.
        """
        bind = bind_of_marker(self.session, self._options.tables)
        if self.lateness is None or not isinstance(bind, Engine):
            return None
        connection = self._required_guard().connection
        return self.lateness.moment(connection, bind, claimed, moves=may_move(self.session, bind))

    # 2 The handler, on the same session -----------------------------------------------------------------------------

    def share(self) -> None:
        """Note that several messages share the transaction, so a setting of one message would affect the others.

        Save ``session.info`` and ``session.autoflush``; ``end_message`` restores them for the next message.
        """
        self._required_guard().several = True
        self._info, self._autoflush = dict(self._session.info), self._session.autoflush

    def end_message(self) -> None:
        """End a message of a batch: flush and empty the session, so that the next message reads from the database.

        Raises ``TransactionViolatedError`` if the claim's transaction has ended, and ``FlushError`` if a listener adds
        changes at every flush.
        """
        session, guard = self._session, self._required_guard()
        guard.verify()
        session.info.clear()
        session.info.update(self._info)
        session.autoflush = self._autoflush
        for _ in range(_FLUSHES):
            session.flush()
            if not (session.identity_map.check_modified() or session.new or session.deleted):
                break
        else:
            raise FlushError(
                f"after {_FLUSHES} flushes in a row the session still has changes; a listener to the flush adds "
                "changes each time: correct that listener"
            )
        if session.expire_on_commit:
            session.expire_all()
        session.expunge_all()
        guard.next_message()

    # 3 Marker and writes, together ----------------------------------------------------------------------------------

    def commit(self) -> None:
        """Commit the marker and the writes together. Call it once, and acknowledge the message after it returns.

        Raises ``TransactionViolatedError`` if the claim's transaction has ended before, ``CommitOutcomeUnknown`` if
        COMMIT was interrupted or a failover may lose it, and ``UnsafeSessionError`` if there is nothing to commit.
        """
        self._waiting.to_the_end(self._commit)

    def commit_and_close(self) -> None:
        """Commit, and close the session, in one step that a cancellation does not interrupt."""
        self._waiting.to_the_end(self._commit_and_close)

    def _commit_and_close(self) -> None:
        try:
            self._commit()
        except BaseException as error:
            self._close(error)
            raise
        self._close(None)

    def _commit(self) -> None:
        guard = self._required_guard()
        if self._committed:
            raise UnsafeSessionError("this unit of work has already committed; open a new one for the next message")
        if not self._new:
            raise UnsafeSessionError(
                "there is nothing to commit, because the message is a duplicate or its claim failed; call commit() "
                "only if claim() returned True"
            )
        guard.verify()
        guard.session.flush()
        asks_server = self._options.strict or guard.server_check_required
        if asks_server or not self.durable:
            guard.verify()  # otherwise only ``GuardedConnection`` verifies, right before COMMIT
        if asks_server:
            guard.verify_with_server()
        if self.last is not None:
            self._run_last(guard, self.last, commits=self.durable)
        guard.watching = False
        try:
            guard.session.commit()
        except Exception as error:
            if guard.commit_was_answered:
                logger.warning("a listener failed after the commit; the message is applied", exc_info=True)
            elif not guard.commit_was_sent or _was_refused(guard, error):
                raise
            else:
                tells = _REDELIVERY_TELLS if guard.key is not None else _NO_MARKER_TELLS
                raise CommitOutcomeUnknown(_INTERRUPTED + tells) from error
        if self.durable and not guard.commit_was_answered:
            raise guard.violate(
                "the session's commit() sent no COMMIT, for example because a Session class overrides commit()"
            )
        self._committed = True
        guard.watching = True  # the caller may still read; a second commit would have no marker

    def _run_last(self, guard: Guard, last: LastStatement, *, commits: bool) -> None:
        """Run the ``last`` statement now, unless the driver can send it together with the COMMIT that follows."""
        guard.last = last
        exposed = guard.driver_was_exposed or guard.server_check_required
        if not (commits and not exposed and guard.dialect.commit_goes_along(guard.connection, guard.driver)):
            guard.run_last()
            guard.last = None

    # The end --------------------------------------------------------------------------------------------------------

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Roll back unless ``commit`` was called. No lock and no open transaction remains, whatever the handler did.

        Raises ``TransactionViolatedError`` if the handler itself may have committed before it failed with ``error``. If
        the guard had to end the handler, raises the error that the handler has caught again and again.
        """
        if not self._closed:
            self._waiting.to_the_end(partial(self._close, error))
        if self._guard is not None and was_stopped(error):
            raise self._guard.overtaken or self._guard.violation or UnsafeSessionError(str(error)) from error

    def _close(self, error: BaseException | None) -> None:
        self._closed = True
        guard, violation = self._guard, None
        try:
            if guard is not None:
                violation = None if self._committed else guard.after_failure(error)
                guard.release()
                if not self._committed and self.durable:
                    cause = guard.aborted_by or error
                    if isinstance(cause, Exception) and guard.dialect.classify(cause) is Failure.READ_ONLY:
                        guard.must_disconnect = True  # the pool must not keep a server that is no primary
                    guard.leave_nothing_open()
        finally:
            failure = close_session(self._session, self._session.taken if self.durable else ())
            if failure is not None and self._committed:
                logger.warning("closing the session failed after the commit; the message is applied", exc_info=failure)
            elif failure is not None and (error is None or _is_loss(failure, error)):  # otherwise raise the first error
                raise failure
        if violation is not None and violation is not error:
            if error is None or isinstance(error, Exception):
                raise violation from error
            logger.error("%s", violation)

    # For a caller that retries --------------------------------------------------------------------------------------

    @property
    def commit_was_sent(self) -> bool:
        """True if an error may mean that the outcome of this unit's own COMMIT is unknown."""
        return self._guard is not None and self._guard.commit_was_sent

    @property
    def overtaken(self) -> OvertakenError | None:
        """The error by which the attempt was given up, also if the handler has caught it and raised another one."""
        return None if self._guard is None else self._guard.overtaken

    def cause_of(self, error: Exception) -> Exception:
        """Return the error that ended the attempt. The handler may have caught it and raised ``error``."""
        if isinstance(error, OvertakenError):  # more precise than the database's error
            return error
        return self.overtaken or (self._guard.aborted_by if self._guard is not None else None) or error

    def _required_guard(self) -> Guard:
        if self._guard is None:
            raise UnsafeSessionError("this unit of work has claimed nothing; call claim() before commit()")
        return self._guard


def _was_refused(guard: Guard, error: Exception) -> bool:
    """True if the server has reported that it did not commit, because the last statement or the COMMIT failed."""
    if isinstance(error, TransactionViolatedError):
        return True
    return isinstance(error, DBAPIError) and guard.dialect.commit_refused(error)


def close_session(session: Session, taken: Iterable[Connection]) -> Exception | None:
    """Close a session. If that fails, drop the connections that it has ``taken``, and return the error."""
    try:
        session.close()
    except BaseException as error:
        drop(taken)
        if not isinstance(error, Exception):
            raise
        return error
    return None


def _is_loss(failure: Exception, error: BaseException) -> bool:
    """True if closing failed because the connection was lost, so that ``error`` may be a consequence of the loss."""
    lost = isinstance(failure, DBAPIError) and failure.connection_invalidated
    return lost and isinstance(error, Exception) and not isinstance(error, TransactionViolatedError)


class AsyncUnitOfWork:
    """``UnitOfWork`` with an ``AsyncSession``. The guarantees are the same, also if the task is cancelled.

    A cancellation during COMMIT or ROLLBACK waits until the database has answered. At any other point it takes effect
    at once. It never leaves a connection, a transaction or a lock open.
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
        options = UnitOptions(tables, claim_timeout, isolation, tuple(read_models), strict, warn=False, accepted=None)
        self.unit = UnitOfWork.opened(session_factory, options, AWAITING)
        self.session = self.unit.handlers_session

    async def __aenter__(self) -> Self:
        return self

    async def claim(
        self,
        message_id: str | UUID | None,
        handler: str,
        *,
        formerly: Collection[str] = (),
        occurred_at: datetime | None = None,
    ) -> bool:
        """Insert the marker of the message. Return True if the message is new. See ``UnitOfWork.claim``."""
        return await greenlet_spawn(self.unit.claim, message_id, handler, formerly=formerly, occurred_at=occurred_at)

    async def claim_many(
        self,
        messages: Iterable[tuple[str | UUID | None, datetime | None]],
        handler: str,
        *,
        formerly: Collection[str] = (),
    ) -> set[str]:
        """Insert the markers of several messages, and return the ids that are new. See ``UnitOfWork.claim_many``."""
        return await greenlet_spawn(self.unit.claim_many, messages, handler, formerly=formerly)

    async def begin(self) -> None:
        """Open the transaction without a claim. See ``UnitOfWork.begin``."""
        await greenlet_spawn(self.unit.begin)

    async def commit(self) -> None:
        """Commit the marker and the writes together. See ``UnitOfWork.commit``."""
        await greenlet_spawn(self.unit.commit)

    async def __aexit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        await greenlet_spawn(self.unit.close, error)
