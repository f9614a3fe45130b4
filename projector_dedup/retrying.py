"""A transaction of its own for a step that may be run twice: again while its errors may pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TypeVar

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from .closing import connected
from .dialects import Dialect, Failure
from .errors import RetriesExhaustedError
from .message import printable
from .retry import RetryPolicy

T = TypeVar("T")

PASSING = (Failure.TRANSIENT, Failure.READ_ONLY, Failure.LOCK_TIMEOUT)


def persistently(
    step: Callable[[Connection], T],
    engine: Engine,
    dialect: Dialect,
    policy: RetryPolicy,
    passing: Collection[Failure] = PASSING,
    isolation: str | None = None,
) -> T:
    """What ``step`` gives; ``RetriesExhaustedError`` if what kept it from committing outlived the ``policy``.

    It runs at ``isolation``, by default the level at which it meets only the rows that it writes. A connection that
    cannot be had is waited for.
    """
    level = isolation or dialect.pruning_isolation
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
                        connection.invalidate()  # or its pool would go on with a server that is no primary
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
