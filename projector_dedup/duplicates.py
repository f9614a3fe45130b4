"""The end of a claim that found nothing new: COMMIT, which waits for a synchronous standby as a ROLLBACK does not."""

from __future__ import annotations

from sqlalchemy.exc import DBAPIError

from .errors import CommitOutcomeUnknown
from .guards import Guard
from .markers import COMMIT_INTERRUPTED


def commit_duplicate(guard: Guard) -> None:
    """Commit the transaction of a claim that wrote nothing, where the database does that better than a rollback.

    Raises ``CommitOutcomeUnknown`` if the marker that was found may yet be lost.
    """
    if not guard.dialect.commits_duplicates:
        return
    guard.watching = False
    try:
        guard.connection.commit()
    except (DBAPIError, OSError) as error:
        raise CommitOutcomeUnknown(COMMIT_INTERRUPTED) from error


def watch_next(guard: Guard) -> Guard:
    """The guard of the session's next transaction, in which a caller may read, and which is never committed."""
    if not guard.commit_was_answered:
        return guard  # it is still the first
    guard.release()
    guard.connection.begin()
    following = Guard(guard.session, guard.connection, guard.driver, guard.dialect, guard.marker)
    following.watch()
    return following
