"""Run a step of maintenance in a transaction of its own, and again while its errors may pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TypeVar

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from ..closing import connected
from ..dialects import Dialect, Failure
from ..errors import RetriesExhaustedError
from ..message import printable
from ..options import RetryPolicy

T = TypeVar("T")

PASSING = (Failure.TRANSIENT, Failure.READ_ONLY, Failure.LOCK_TIMEOUT)  #: kinds of errors after which to try again


def run_with_retries(
    step: Callable[[Connection], T],
    engine: Engine,
    dialect: Dialect,
    policy: RetryPolicy,
    passing: Collection[Failure] = PASSING,
) -> T:
    """Run ``step`` in a transaction of its own, commit, and return what ``step`` returned.

    After an error of the kinds ``passing``, and when no connection is to be had, ``step`` is run again as often and as
    long as ``policy`` allows, so it must be safe to run twice. The transaction is at the database's
    ``cleanup_isolation``, at which a step meets only the rows that it writes.

    Raises ``RetriesExhaustedError`` if the policy is used up; any other error is raised as it is.
    """
    level = dialect.cleanup_isolation
    bind = engine if level is None else engine.execution_options(isolation_level=level)
    deadline, attempt = None, 0
    while True:
        attempt, reached = attempt + 1, False
        try:
            with connected(bind) as connection:
                reached = True
                try:
                    result = step(connection)
                    connection.commit()
                except DBAPIError as error:
                    if dialect.classify(error) is Failure.READ_ONLY:
                        connection.invalidate()  # else its pool would stay with a server that is no primary
                    raise
                return result
        except (DBAPIError, OSError) as error:
            if reached and dialect.classify(error) not in passing:
                raise
            now, delay = time.monotonic(), policy.delay(attempt)
            deadline = deadline or now + policy.within
            if attempt >= policy.attempts or now + delay > deadline:
                words = printable(str(getattr(error, "orig", None) or error))[:300]
                raise RetriesExhaustedError(
                    f"{attempt} attempts failed ({words}); try again when that has passed"
                ) from error
        time.sleep(delay)
