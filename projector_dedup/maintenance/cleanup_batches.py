"""Send the DELETEs of a cleanup, each in a short transaction, which is run again while its errors may pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from ..dialects import Dialect, Expired, Failure, Route
from ..errors import CleanupInterruptedError, RetriesExhaustedError, UnsupportedDatabaseError
from ..options import RetryPolicy
from .retrying import run_with_retries

T = TypeVar("T")


class Batches:
    """One run of a cleanup: deletes batches, and counts batches and markers."""

    def __init__(self, engine: Engine, dialect: Dialect, retry: RetryPolicy) -> None:
        self.dialect, self.retry = dialect, retry
        self.deleted = self.number = 0
        self._held = False
        self._engine = engine

    def attempt(self, act: Callable[[Connection], T], isolation: str | None = None) -> T:
        """Run ``act`` in a transaction of its own, again while its errors may pass, and return what it returns.

        A batch whose COMMIT was not confirmed may be deleted all the same, and is not counted then.

        Raises ``CleanupInterruptedError`` if the retry policy is used up.
        """
        try:
            return run_with_retries(act, self._engine, self.dialect, self.retry, isolation=isolation)
        except RetriesExhaustedError as error:
            raise CleanupInterruptedError(
                f"at least {self.deleted:,} markers were deleted, then {error}", self.deleted
            ) from error.__cause__

    def delete(self, route: Route, parameters: Mapping[str, Any]) -> int:
        """Delete one batch and return the number of its markers.

        Returns 0 also where another transaction held some of them too long; ``left`` finds those later.

        Raises ``UnsupportedDatabaseError`` if the driver does not say how many rows were deleted.
        """

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
                "a batch was deleted, but the driver does not say how many markers it had, so nobody could tell which "
                "batch is the last; delete from the table by a statement of your own"
            )
        self.deleted += deleted
        self.number += deleted > 0
        return deleted

    def left(self, route: Route, expired: Expired) -> bool:
        """Ask whether an expired marker is left; False, without asking, if ``route`` can have left none.

        That is so if it visited every page, and no batch since the last call was held by another transaction. Raises
        ``CleanupInterruptedError``.
        """
        if not route.until_empty and not self._held:
            return False
        self._held = False
        return self.attempt(lambda connection: connection.execute(route.look, expired.bounds).first()) is not None
