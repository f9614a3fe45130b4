"""The transactions of a cleanup: each is short, and run again while its errors may pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from .dialects import Dialect, Expired, Failure, Route
from .errors import CleanupInterruptedError, RetriesExhaustedError, UnsupportedDatabaseError
from .retry import RetryPolicy
from .retrying import persistently

T = TypeVar("T")


class Batches:
    """What one run has deleted so far, and how it deletes more."""

    def __init__(self, engine: Engine, dialect: Dialect, retry: RetryPolicy) -> None:
        self.dialect, self.retry = dialect, retry
        self.deleted = self.number = 0
        self._held = False
        self._engine = engine

    def attempt(self, act: Callable[[Connection], T], isolation: str | None = None) -> T:
        """What ``act`` gives, in a transaction of its own; a batch that was deleted but not confirmed is not counted.

        Raises ``CleanupInterruptedError`` if the retry policy is used up.
        """
        try:
            return persistently(act, self._engine, self.dialect, self.retry, isolation=isolation)
        except RetriesExhaustedError as error:
            raise CleanupInterruptedError(
                f"at least {self.deleted:,} markers were deleted, then {error}", self.deleted
            ) from error.__cause__

    def delete(self, route: Route, parameters: Mapping[str, Any]) -> int:
        """One batch; 0 if somebody holds markers of it for too long: a look will find them."""

        def batch(connection: Connection) -> int:
            try:
                return connection.execute(route.statement, parameters).rowcount
            except DBAPIError as error:
                if not self.dialect.locks_rows or self.dialect.classify(error) is not Failure.LOCK_TIMEOUT:
                    raise
                connection.rollback()
                self._held = True
                return 0

        deleted = self.attempt(batch, route.isolation)
        if deleted < 0:
            raise UnsupportedDatabaseError(
                "a batch was deleted, but the driver does not say of how many markers, so the last one would not be "
                "known; delete from the table by a statement of your own"
            )
        self.deleted += deleted
        self.number += deleted > 0
        return deleted

    def left(self, route: Route, expired: Expired) -> bool:
        """Whether an expired marker is left: 0 deleted may mean that another cleaner holds the batch.

        Where each page was visited, and waited for, it is known.
        """
        if not route.until_empty and not self._held:
            return False
        self._held = False
        return self.attempt(lambda connection: connection.execute(route.look, expired.bounds).first()) is not None
