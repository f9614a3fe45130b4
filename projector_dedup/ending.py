"""How a unit of work ends: COMMIT of marker and writes, COMMIT of a duplicate, or ROLLBACK; and what an error means."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from .closing import drop
from .dialects import Failure, LastStatement
from .errors import CommitOutcomeUnknown, TransactionViolatedError
from .guards import Guard, GuardedSession

logger = logging.getLogger("projector_dedup")

INTERRUPTED = (
    "interrupted during COMMIT, by the loss of the connection or otherwise: the message may be applied or not. Do not "
    "acknowledge it; a redelivery finds out"
)


def commit(guard: Guard, last: LastStatement | None = None, *, strict: bool, external: bool) -> None:
    """Flush the session, check that its transaction is still the claim's, run the ``last`` statement, and commit once.

    With ``external`` the COMMIT is somebody else's, and none is sent here. Raises ``TransactionViolatedError`` if the
    transaction is not the claim's any more, ``CommitOutcomeUnknown`` if COMMIT was sent and interrupted, or a failover
    may lose it, and the error of the database if it did not commit.
    """
    guard.verify()
    guard.session.flush()
    if guard.rows is not None:
        guard.rows.stop()
    asks_server = strict or guard.server_check_required
    if external or asks_server:
        guard.verify()  # else only ``GuardedConnection`` does, right before COMMIT
    if asks_server:
        guard.verify_with_server()
    if last is not None:
        _run_last(guard, last, commits=not external)
    guard.watching = False
    try:
        guard.session.commit()
    except Exception as error:
        if guard.commit_was_answered:
            logger.warning("what follows the commit failed (a listener?); the message is applied", exc_info=True)
        elif not guard.commit_was_sent or _was_refused(guard, error):
            raise
        else:
            raise CommitOutcomeUnknown(INTERRUPTED) from error
    if not (external or guard.commit_was_answered):
        raise guard.violate("the session's commit() sent no COMMIT; a Session class that overrides it, perhaps")


def _was_refused(guard: Guard, error: Exception) -> bool:
    """True if the server has answered that it did not commit: the last statement failed, or COMMIT did."""
    if isinstance(error, TransactionViolatedError):
        return True
    return isinstance(error, DBAPIError) and guard.dialect.commit_refused(error)


def _run_last(guard: Guard, last: LastStatement, *, commits: bool) -> None:
    """Run the ``last`` statement now, unless a COMMIT follows here that it can be sent with."""
    exposed = guard.driver_was_exposed or guard.server_check_required
    if commits and not exposed and guard.dialect.commit_goes_along(guard.connection, guard.driver):
        guard.last = last
    else:
        last.run(guard.claim_transaction.where_claimed())


def commit_duplicate(guard: Guard, last: LastStatement | None = None, *, external: bool = False) -> None:
    """Commit the transaction of a claim that found nothing new, if the dialect ``commits_duplicates``.

    The ``last`` statement is run in any case. With ``external`` no COMMIT is sent here. On PostgreSQL a COMMIT waits
    for a synchronous standby, which a ROLLBACK does not, and after a ROLLBACK psycopg has the server forget what it has
    prepared. Raises ``CommitOutcomeUnknown`` if the marker that was found may be lost.
    """
    commits = guard.dialect.commits_duplicates and not external
    if last is not None:
        _run_last(guard, last, commits=commits)
    if not commits:
        return
    guard.watching = False
    try:
        guard.connection.commit()
    except (DBAPIError, OSError) as error:
        raise CommitOutcomeUnknown(INTERRUPTED) from error


def watch_next(guard: Guard) -> Guard:
    """Return the guard of the session's next transaction, in which a caller may read, and which is never committed.

    It is the same guard if the transaction of the duplicate was not committed.
    """
    if not guard.commit_was_answered:
        return guard
    guard.release()
    guard.connection.begin()
    following = Guard(guard.session, guard.claim_transaction)
    following.watch()
    return following


def close(
    session: GuardedSession, guard: Guard | None, error: BaseException | None, *, committed: bool, external: bool
) -> None:
    """Roll back unless ``committed``, and leave no lock and no open transaction, whatever the handler did.

    ``guard`` is None if no transaction was begun. Raises ``TransactionViolatedError`` if the handler had committed
    before it failed with ``error``, and the error of closing if there is no other.
    """
    violation: TransactionViolatedError | None = None
    try:
        if guard is not None:
            violation = None if committed else guard.made_durable()
            guard.release()
            if not (committed or external):
                cause = guard.aborted_by or error
                if isinstance(cause, Exception) and guard.dialect.classify(cause) is Failure.READ_ONLY:
                    guard.must_disconnect = True  # or its pool would go on with a server that is no primary
                guard.leave_nothing_open()
    finally:
        failure = _close_session(session, () if external else session.taken)
        if failure is not None and committed:
            logger.warning("closing the session failed after the commit; the message is applied", exc_info=failure)
        elif failure is not None and (error is None or _is_loss(failure, error)):  # else the first is raised
            raise failure
    if violation is not None and violation is not error:
        if error is None or isinstance(error, Exception):
            raise violation from error
        logger.error("%s", violation)


def _close_session(session: Session, connections: Iterable[Connection]) -> Exception | None:
    """Close the session and return None. If that fails, drop its ``connections`` and return the error.

    An error that is no ``Exception``, such as a cancellation, is raised instead.
    """
    try:
        session.close()
    except BaseException as error:
        drop(connections)
        if not isinstance(error, Exception):
            raise
        return error
    return None


def _is_loss(failure: Exception, error: BaseException) -> bool:
    """True if ``failure``, met while closing, says that the connection was lost, and ``error`` may follow from that."""
    return isinstance(failure, DBAPIError) and failure.connection_invalidated and isinstance(error, Exception)
