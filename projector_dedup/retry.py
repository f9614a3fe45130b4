"""Decide whether a whole unit of work is run again: which errors are transient, and how long to wait before."""

from __future__ import annotations

import time

from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm.exc import StaleDataError

from .dialects import Dialect, Failure
from .errors import (
    CommitOutcomeUnknown,
    Defer,
    InProgress,
    OvertakenError,
    ProjectorDedupError,
    RefusedError,
    RetriesExhaustedError,
)
from .message import printable
from .options import RetryPolicy


class Attempts:
    """The attempts at one chunk of messages by one handler: what happened so far decides what an error means now."""

    def __init__(self, policy: RetryPolicy, *, marked: bool) -> None:
        self.number = 1
        self.unknown: CommitOutcomeUnknown | None = None
        self._policy = policy
        self._marked = marked
        self._violations: dict[str, int] = {}
        self._deadline: float | None = None  # from the first failure on: a slow handler must not cost the retries

    def claimed(self) -> None:
        """Note that the claim was free: a commit whose outcome was unknown did not happen.

        Until this is called, the unknown outcome is what surfaces, whatever keeps the claim from being made.
        """
        self.unknown = None

    def delay_after(
        self, error: Exception, cause: Exception, dialect: Dialect | None, *, commit_was_sent: bool
    ) -> float:
        """Return the seconds to wait before the next attempt, or raise the error that surfaces if there is to be none.

        ``cause`` is what aborted the transaction, which may be older than the ``error`` that the handler made of it.
        ``dialect`` is None if no connection could be had: then nothing ran, and trying again is safe.
        """
        if self._deadline is None:
            self._deadline = time.monotonic() + self._policy.within
        if isinstance(error, CommitOutcomeUnknown) and commit_was_sent:
            if not self._marked or not isinstance(error.__cause__, (DBAPIError, OSError)):
                raise error  # there is no marker to ask, or it was not the database that interrupted
            self.unknown = error
        elif isinstance(error, (RefusedError, Defer, InProgress)) or getattr(error, "durable", False):
            raise self.unknown or error
        else:
            failure = _failure(cause, dialect)
            if failure in (Failure.PERMANENT, Failure.NO_TABLE):
                raise self.unknown or error
            if failure is Failure.UNIQUE:
                # A rival's row is there next time; a bug meets the same violation again, to the letter, though what
                # it tried to write may be another each time: so the driver's words, without SQL and parameters.
                violation = _words(cause)
                self._violations[violation] = self._violations.get(violation, 0) + 1
                if self._violations[violation] > self._policy.unique_violations:
                    raise error
        delay = self._policy.delay(self.number)
        if self.number >= self._policy.attempts or time.monotonic() + delay > self._deadline:
            if self.unknown is not None:
                raise self.unknown
            if self._violations.get(_words(cause), 0) == self.number:
                raise error  # nothing else has happened: the attempts were the violation's own
            words = printable(_words(cause))[:300]
            if dialect is None:
                what = "no connection could be had"
                then = "look whether the server runs, and whether host, port, user, password and database are right"
            else:
                what, then = "still failing", "let the message be redelivered"
            raise RetriesExhaustedError(
                f"{what} after {self.number} attempts ({type(cause).__name__}: {words}); nothing was applied; {then}"
            ) from cause
        self.number += 1
        return delay


def _words(cause: Exception) -> str:
    """Return the driver's own words, without SQL and parameters."""
    return str(getattr(cause, "orig", None) or cause)


def _failure(cause: Exception, dialect: Dialect | None) -> Failure:
    if isinstance(cause, (OvertakenError, StaleDataError)):  # the latter by version_id_col of the user's ORM
        return Failure.TRANSIENT
    if isinstance(cause, ProjectorDedupError):
        return Failure.PERMANENT
    if dialect is None:
        # asyncpg's errors of connecting are not wrapped; they have an SQLSTATE if the server sent them.
        unreachable = isinstance(cause, (DBAPIError, OSError)) or hasattr(cause, "sqlstate")
        return Failure.TRANSIENT if unreachable else Failure.PERMANENT
    return dialect.classify(cause)  # a result that is streamed raises the driver's own errors, unwrapped
