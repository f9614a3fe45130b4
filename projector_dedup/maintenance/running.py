"""The common parts of maintenance: a connection that names missing tables, and retries after transient errors."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from ..closing import connected
from ..dialects import Dialect, Failure, dialect_of
from ..errors import MissingTableError, RetriesExhaustedError
from ..message import printable
from ..options import RetryPolicy
from ..tables import DedupTables
from .databases import database_of

T = TypeVar("T")

PASSING = (Failure.TRANSIENT, Failure.READ_ONLY, Failure.LOCK_TIMEOUT)  #: kinds of errors after which to retry


@contextmanager
def connected_to(engine: Engine, tables: DedupTables) -> Iterator[Connection]:
    """Yield a connection of ``engine`` to read, and roll back at the end. Its first transaction locks nothing.

    Raises ``MissingTableError`` if a statement of the block finds no table. Other errors are raised unchanged.
    """
    dialect = dialect_of(engine)
    dialect.prepare(engine)
    with connected(engine) as connection:
        dialect.lock_nothing(connection)
        try:
            yield connection
        except DBAPIError as error:
            if dialect.classify(error) is Failure.NO_TABLE:
                raise MissingTableError(tables.missing(connection)) from error
            raise


def run_with_retries(
    step: Callable[[Connection], T],
    engine: Engine,
    dialect: Dialect,
    policy: RetryPolicy,
    passing: Collection[Failure] = PASSING,
) -> T:
    """Run ``step`` in its own transaction, commit, and return the result of ``step``.

    After an error of the kinds ``passing``, or if no connection could be opened, the function retries ``step`` as often
    and as long as ``policy`` allows. So ``step`` must be safe to run twice. The transaction has the level
    ``cleanup_isolation`` of the database, at which a step locks only the rows that it writes.

    Raises ``RetriesExhaustedError`` if the policy permits no more attempts. Other errors are raised unchanged.
    """
    level = database_of(engine).cleanup_isolation
    bind = engine if level is None else engine.execution_options(isolation_level=level)
    deadline, attempt = None, 0
    errors = (DBAPIError, OSError, engine.dialect.loaded_dbapi.Error)  # the last: SQLAlchemy could not set the level
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
                        connection.invalidate()  # otherwise the pool would keep a server that is no primary
                    raise
                return result
        except errors as error:
            if reached and dialect.classify(error) not in passing:
                raise
            now, delay = time.monotonic(), policy.delay(attempt)
            deadline = deadline or now + policy.within
            if attempt >= policy.attempts or now + delay > deadline:
                words = printable(str(getattr(error, "orig", None) or error))[:300]
                raise RetriesExhaustedError(f"{attempt} attempts failed ({words}); try again later") from error
        time.sleep(delay)
