"""The work of one unit: a transaction on a private session, from its first statement to its one commit."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import Any

from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, UnboundExecutionError

from .closing import close_session, is_loss
from .dialects import Dialect, Failure, Status, dialect_of
from .duplicates import commit_duplicate, watch_next
from .errors import CommitOutcomeUnknown, OvertakenError, UnsafeSessionError
from .guards import ClaimedMarker, Guard, GuardedSession
from .markers import (
    COMMIT_INTERRUPTED,
    COMMITTED_AT_ONCE,
    bind_of_marker,
    insert_marker,
    insert_markers,
    marker_key,
    raise_in_progress,
    refuse_shared_markers,
    translate_map,
)
from .message import Message, valid_formerly, valid_handler, valid_message_id
from .reentry import outside_handlers
from .sessions import UnitOptions, open_connection

logger = logging.getLogger("projector_dedup")


class Work:
    """One transaction on one private session, from its first statement to its end."""

    def __init__(self, session: GuardedSession, options: UnitOptions) -> None:
        self.session = session
        self.dialect: Dialect | None = None  # None until there was a connection
        self.durable = True
        self.committed = False
        self._options = options
        self._new = False  # until a claim, or begin(), says so
        self._guard: Guard | None = None

    def claim(
        self,
        message_id: object,
        handler: str,
        formerly: Collection[str] = (),
        occurred_at: datetime | None = None,
        about: Message | None = None,
    ) -> bool:
        """Claim first: the row of the marker is the lock on which a concurrent delivery waits.

        The message that it is ``about`` tells which rows its handler will ask for.
        """
        former_names = valid_formerly(formerly)
        key = marker_key(valid_message_id(message_id), valid_handler(handler), occurred_at)
        tables, wait = self._options.tables, self._options.claim_timeout
        bind = outside_handlers(bind_of_marker(self.session, tables))
        dialect = dialect_of(bind)
        ahead = None if about is None or wait is not None or former_names else self._options.read_ahead
        guard = self._begin(bind, dialect, key, one=True)
        try:
            insert = partial(insert_marker, guard.connection, dialect, tables, key, former_names, wait=wait)
            self._new = insert() if ahead is None or not self.durable else ahead.claim(guard, key, about, insert)
        finally:
            self._watch(guard)
        return self._new

    def claim_many(
        self, messages: Iterable[tuple[object, datetime | None]], handler: str, formerly: Collection[str] = ()
    ) -> set[str]:
        """Claim several messages, given with the time at which they occurred; which of them are new.

        One that is known by a former name is not; that it may be marked by its new name then is as true.
        """
        names = [valid_handler(handler), *valid_formerly(formerly)]
        keys: dict[str, dict[str, Any]] = {}
        for message_id, occurred_at in messages:
            key = marker_key(valid_message_id(message_id), names[0], occurred_at)
            keys.setdefault(key["message_id"], key)
        if not keys:
            raise UnsafeSessionError("claim_many() of no message: there would be nothing to commit")
        others = [{**key, "handler": name} for key in keys.values() for name in names[1:]]
        tables, wait = self._options.tables, self._options.claim_timeout
        bind = outside_handlers(bind_of_marker(self.session, tables))
        guard = self._begin(bind, dialect_of(bind), next(iter(keys.values())))
        try:
            inserted = insert_markers(guard.connection, guard.dialect, tables, [*keys.values(), *others], wait)
            new = [message_id for message_id in keys if all((message_id, name) in inserted for name in names)]
            if new:
                self._new, guard.marker.key = True, keys[new[0]]
        finally:
            self._watch(guard)
        return set(new)

    def foresee(self, events: Sequence[object], *, one_by_one: bool) -> None:
        """Tell what a handler will be given, ``one_by_one`` or all at once: their rows may be read together."""
        guard = self._begun()
        guard.several = one_by_one and len(events) > 1
        if self._options.read_ahead is not None:
            guard.rows = self._options.read_ahead.batch(guard, events)

    def end_duplicate(self, *, read_on: bool = False) -> None:
        """After a claim that found nothing new; the session may ``read_on``, in a transaction that nobody commits."""
        if self._guard is not None and self.durable:
            commit_duplicate(self._guard)
            self._guard = watch_next(self._guard) if read_on else self._guard

    def begin(self) -> None:
        """A transaction without a marker, for a handler that is not idempotent (invariant I9)."""
        try:
            bind = outside_handlers(self.session.get_bind())
        except UnboundExecutionError:
            raise UnsafeSessionError("the session has no engine to begin with: give the sessionmaker bind=") from None
        guard = self._begin(bind, dialect_of(bind), None)
        self._new = True
        self._watch(guard)

    def next_message(self) -> None:
        """Between two messages of a batch: what the next one finds is what is in the database, as after a COMMIT."""
        guard = self._begun()
        guard.verify()
        if guard.rows is not None:
            guard.rows.end_message()
            return
        self.session.flush()
        if self.session.expire_on_commit:
            self.session.expire_all()
        self.session.expunge_all()

    def commit(self) -> None:
        """Flush, look whether this is still the transaction that was begun, commit once."""
        guard = self._begun()
        if self.committed:
            raise UnsafeSessionError("this unit of work has committed; the next message needs one of its own")
        if not self._new:
            raise UnsafeSessionError("the message is a duplicate, or its claim failed: there is nothing to commit")
        guard.verify()
        self.session.flush()
        if guard.rows is not None:
            guard.rows.stop()
        if not self.durable or self._options.strict or guard.must_ask:
            guard.verify()  # else right before COMMIT
        if self._options.strict or guard.must_ask:
            guard.ask()
        guard.watching = False
        try:
            self.session.commit()
        except Exception as error:
            if guard.commit_was_answered:
                logger.warning("what follows the commit failed (a listener?); the message is applied", exc_info=True)
            elif not guard.commit_was_sent or (isinstance(error, DBAPIError) and guard.dialect.commit_refused(error)):
                raise
            else:
                raise CommitOutcomeUnknown(COMMIT_INTERRUPTED) from error
        if self.durable and not guard.commit_was_answered:
            raise guard.violate("the session's commit() sent no COMMIT; a Session class that overrides it, perhaps")
        self.committed = True
        guard.watching = True  # reading goes on; another commit would be without a marker

    @property
    def commit_was_sent(self) -> bool:
        """Whether an error may mean that the outcome of this unit's own COMMIT is unknown."""
        return self._guard is not None and self._guard.commit_was_sent

    def cause_of(self, error: Exception) -> Exception:
        """What aborted the transaction, where that came before the error that the handler made of it."""
        if isinstance(error, OvertakenError):  # which we made of it
            return error
        return (self._guard.aborted_by if self._guard is not None else None) or error

    def close(self, error: BaseException | None = None) -> None:
        """Roll back unless committed, and leave no lock and no open transaction, whatever the handler did.

        Raises ``TransactionViolatedError`` if the handler had committed before it failed with ``error``.
        """
        guard, violation = self._guard, None
        try:
            if guard is not None:
                violation = None if self.committed else guard.made_durable()
                guard.release()
                if not self.committed and self.durable:
                    cause = guard.aborted_by or error
                    if isinstance(cause, Exception) and guard.dialect.classify(cause) is Failure.READ_ONLY:
                        guard.must_disconnect = True  # or its pool would go on with a server that is no primary
                    guard.leave_nothing_open()
        finally:
            failure = close_session(self.session, self.session.taken if self.durable else ())
            if failure is not None and self.committed:
                logger.warning("closing the session failed after the commit; the message is applied", exc_info=failure)
            elif failure is not None and (error is None or is_loss(failure, error)):  # else the first is raised
                raise failure
        if violation is not None and violation is not error:
            if error is None or isinstance(error, Exception):
                raise violation from error
            logger.error("%s", violation)

    def _watch(self, guard: Guard) -> None:
        """Also where the claim failed: what is written then must not commit without a marker."""
        status = guard.watch()
        if not self._new:
            return
        if guard.marker.key is not None and status is not Status.OPEN:
            self._new = False
            raise UnsafeSessionError(COMMITTED_AT_ONCE)
        if self._options.strict:
            guard.savepoints.mark()
        if guard.dialect.untried:
            guard.distrust()  # its driver cannot be asked what happens there; the server will be

    def _begun(self) -> Guard:
        if self._guard is None:
            raise UnsafeSessionError("nothing was claimed in this unit of work; claim() comes before commit()")
        return self._guard

    def _begin(self, bind: Any, dialect: Dialect, key: dict[str, Any] | None, *, one: bool = False) -> Guard:
        options, marked = self._options, key is not None
        self.durable = not isinstance(bind, Connection)
        connection = open_connection(self.session, bind, dialect, options, marked=marked, one=one)
        schemas = translate_map(connection)
        if marked:
            refuse_shared_markers(schemas, options.tables)
        self.dialect = dialect
        try:
            dialect.begin(connection, options.tables.marker if marked else None, options.claim_timeout)
        except DBAPIError as error:
            raise_in_progress(error, dialect, options.claim_timeout)
            raise
        driver = connection.connection.driver_connection
        marker = ClaimedMarker(connection, driver, dialect, options.tables, schemas, key)
        self._guard = Guard(self.session, connection, driver, dialect, marker)
        return self._guard
