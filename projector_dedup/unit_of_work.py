"""The unit of work: a session, one claim in it, and the only commit. It rolls back unless committed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, Self

from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session, sessionmaker

from .dialects import Dialect, LastStatement, dialect_of
from .ending import close, commit, commit_duplicate, watch_next
from .errors import OvertakenError, UnsafeSessionError
from .guards import Guard, GuardedSession, end_message
from .markers import bind_of_marker, bind_of_session, insert_marker, insert_markers, valid_key, valid_keys
from .message import Message, valid_formerly
from .options import UnitOptions, check_session_factory
from .reentry import refuse_within_handler
from .sessions import guard_for, new_session, open_connection, watch
from .tables import DedupTables, default_tables


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
        options = UnitOptions(tables, claim_timeout, isolation, tuple(read_models), strict, warn=False)
        self._prepare(new_session(session_factory, options), options)

    @classmethod
    def opened(cls, session_factory: sessionmaker[Session], options: UnitOptions) -> Self:
        """Return a unit of work; the caller has checked factory and options, once for many messages."""
        return cls.on_session(new_session(session_factory, options), options)

    @classmethod
    def on_session(cls, session: GuardedSession, options: UnitOptions) -> Self:
        """Return a unit of work on a private session that was made for it alone."""
        self = cls.__new__(cls)
        self._prepare(session, options)
        return self

    def _prepare(self, session: GuardedSession, options: UnitOptions) -> None:
        self.session = self._session = session
        self.dialect: Dialect | None = None  # None until there was a connection
        self.durable = True  # False: the COMMIT is somebody else's, and has not come yet
        self._options = options
        self._new = False  # until a claim, or begin(), says so
        self._committed = False
        self.last: LastStatement | None = None  # which ``commit`` runs behind everything else
        self._guard: Guard | None = None

    def __enter__(self) -> Self:
        return self

    # 1 Claim first: a rival waits here ------------------------------------------------------------------------------

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

        A concurrent delivery of the same message waits here until this one ends. Raises ``RefusedError``,
        ``InProgress`` after ``claim_timeout``, and ``CommitOutcomeUnknown`` for a duplicate that a synchronous standby
        may not know.
        """
        new = self._claim(valid_key(message_id, handler, occurred_at), formerly)
        self._end_duplicate(read_on=True)
        return new

    def claim_message(self, message: Message, handler: str, formerly: Collection[str], *, reads_ahead: bool) -> bool:
        """Claim a message for a dispatcher, as ``claim`` does. A session that found a duplicate is not used again.

        With ``reads_ahead`` the rows that the handler declares may come with the claim; raises ``ReadAheadError``
        if they could not be read, after which the whole unit of work is run again without them.
        """
        key = valid_key(message.id, handler, message.occurred_at)
        new = self._claim(key, formerly, message if reads_ahead else None)
        self._end_duplicate()
        return new

    def claim_or_recall(self, key: dict[str, Any], formerly: Collection[str], recall: LastStatement) -> bool:
        """Claim a command: True if it is new, False if ``recall`` was run, as the last statement of a duplicate."""
        new = self._claim(key, formerly)
        self._end_duplicate(last=recall)
        return new

    def claim_many(
        self,
        messages: Iterable[tuple[object, datetime | None]],
        handler: str,
        *,
        formerly: Collection[str] = (),
    ) -> set[str]:
        """Claim several messages at once, each an id and when it occurred, or None; returns the ids that are new.

        An id that is known under one of the names ``formerly`` is not new. Raises what ``claim`` raises, and
        ``OvertakenError`` where another delivery was faster: run the unit of work again. If some are new, the others
        may be acknowledged after ``commit()``, as those are.
        """
        former_names, keys = valid_formerly(formerly), valid_keys(messages, handler)
        tables, wait = self._options.tables, self._options.claim_timeout
        guard = self._begin(bind_of_marker(self.session, tables), next(iter(keys.values())))
        new: list[str] = []
        try:
            new = insert_markers(guard.connection, guard.dialect, tables, keys, former_names, wait)
            if new:
                guard.claim_transaction.key = keys[new[0]]
        finally:
            watch(guard, self._options, new=bool(new))
        self._new = bool(new)
        self._end_duplicate(read_on=True)
        return set(new)

    def _claim(self, key: dict[str, Any], formerly: Collection[str], about: Message | None = None) -> bool:
        """Claim, with the rows that the handler of the message ``about`` will ask for, if there is one."""
        former_names, tables, wait = valid_formerly(formerly), self._options.tables, self._options.claim_timeout
        bind = bind_of_marker(self.session, tables)
        ahead = None if about is None or isinstance(bind, Connection) else self._options.reads_with_claim(former_names)
        guard = self._begin(bind, key, one=True, ahead=ahead)
        new = False
        try:
            insert = partial(insert_marker, guard.connection, guard.dialect, tables, key, former_names, wait=wait)
            new = insert() if ahead is None else ahead.claim(guard, key, about, insert)
        finally:
            watch(guard, self._options, new=new)
        self._new = new
        return new

    def begin(self) -> None:
        """Open the transaction without a claim, for a handler that may run twice (invariant I9)."""
        watch(self._begin(bind_of_session(self.session), None), self._options, new=True)
        self._new = True

    def _begin(self, bind: Any, key: dict[str, Any] | None, *, one: bool = False, ahead: Any = None) -> Guard:
        refuse_within_handler(bind)
        self.durable = not isinstance(bind, Connection)
        connection = open_connection(self._session, bind, self._options, ahead, marked=key is not None, one=one)
        self.dialect = dialect_of(connection)
        self._guard = guard_for(self._session, connection, self._options, key)
        return self._guard

    def _end_duplicate(self, *, read_on: bool = False, last: LastStatement | None = None) -> None:
        """Commit after a claim that found nothing new, where the dialect wants that; elsewhere ``close`` rolls back."""
        if not self._new:
            commit_duplicate(self._begun(), last, external=not self.durable)
            if read_on and self.durable:  # in a transaction that nobody commits
                self._guard = watch_next(self._begun())

    # 2 The handler, on the same session -----------------------------------------------------------------------------

    def announce(self, events: Sequence[object], *, one_by_one: bool) -> None:
        """Say which events the handler is given, ``one_by_one`` or all at once: their rows may be read together."""
        guard = self._begun()
        guard.several = one_by_one and len(events) > 1
        if self._options.read_ahead is not None:
            guard.rows = self._options.read_ahead.batch(guard, events)

    def next_message(self) -> None:
        """Write what a message of a batch has changed, and forget it, before the next message is handled.

        That one finds what is in the database, as after a COMMIT. Raises ``TransactionViolatedError`` if the
        transaction is not the claim's any more.
        """
        guard = self._begun()
        guard.verify()
        if guard.rows is not None:
            guard.rows.end_message()
        else:
            end_message(self._session, self._session.flush)

    # 3 Marker and writes, together ----------------------------------------------------------------------------------

    def commit(self) -> None:
        """Commit marker and writes together, once.

        Raises ``TransactionViolatedError`` if the transaction is not the claim's any more, ``CommitOutcomeUnknown`` if
        COMMIT was interrupted or a failover may lose it, ``UnsafeSessionError`` if there is nothing to commit.
        """
        guard = self._begun()
        if self._committed:
            raise UnsafeSessionError("this unit of work has committed; the next message needs one of its own")
        if not self._new:
            raise UnsafeSessionError("the message is a duplicate, or its claim failed: there is nothing to commit")
        commit(guard, self.last, strict=self._options.strict, external=not self.durable)
        self._committed = True
        guard.watching = True  # reading goes on; another commit would be without a marker

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Roll back unless committed, and leave no lock and no open transaction, whatever the handler did.

        Raises ``TransactionViolatedError`` if the handler had committed before it failed with ``error``.
        """
        close(self._session, self._guard, error, committed=self._committed, external=not self.durable)

    # What a caller that retries asks --------------------------------------------------------------------------------

    @property
    def commit_was_sent(self) -> bool:
        """True if an error may mean that the outcome of this unit's own COMMIT is unknown."""
        return self._guard is not None and self._guard.commit_was_sent

    def cause_of(self, error: Exception) -> Exception:
        """Return what aborted the transaction, where that came before the ``error`` that the handler made of it."""
        if isinstance(error, OvertakenError):  # which we made of it
            return error
        return (self._guard.aborted_by if self._guard is not None else None) or error

    def _begun(self) -> Guard:
        if self._guard is None:
            raise UnsafeSessionError("nothing was claimed in this unit of work; claim() comes before commit()")
        return self._guard
