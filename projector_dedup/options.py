"""Options: the retry policy, the settings of a unit of work, and the check of the session factory."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import sessionmaker

from .asyncio_names import async_sessionmaker
from .errors import UnsafeSessionError
from .late import Lateness
from .tables import DedupTables, default_tables


@dataclass(frozen=True)
class RetryPolicy:
    """How often, and for how long, the library retries after a transient error before it raises the error.

    - ``attempts``: the largest number of attempts, including the first.
    - ``within``: seconds after the first failure. No attempt starts later.
    - ``unique_violations``: how often the library retries after the same unique violation in the read model. Either a
      concurrent message inserted the row, or the handler has a bug.
    - ``base``, ``cap``: seconds. Before each retry the library waits a random time of at most ``base * 2 ** n``, and at
      most ``cap`` (full jitter: Brooker, "Exponential Backoff And Jitter", 2015). Meanwhile it holds no connection.
    - ``also``: exception classes of your application that the library retries like conflicts of the database, such as
      the error of an event store when a stream has another version than expected.
    """

    attempts: int = 20
    within: float = 5.0
    unique_violations: int = 2
    base: float = 0.01
    cap: float = 0.5
    also: tuple[type[Exception], ...] = ()

    def __post_init__(self) -> None:
        given: object = self.also
        if not isinstance(given, tuple) or not all(isinstance(e, type) and issubclass(e, Exception) for e in given):
            raise ValueError(
                "RetryPolicy: also must be a tuple of exception classes, as in also=(ExpectedVersionError,)"
            )
        if self.attempts < 1 or self.within < 0 or self.unique_violations < 0 or self.base < 0 or self.cap < 0:
            raise ValueError("RetryPolicy: attempts must be at least 1, and no other value may be negative")

    def delay(self, number: int) -> float:
        """Return how many seconds to wait after attempt ``number``: random, within the bounds above."""
        return random.uniform(0, min(self.cap, self.base * 2 ** min(number, 30)))  # noqa: S311  # no secret


@dataclass(frozen=True)
class UnitOptions:
    """The settings of a unit of work, the same for every message of one handler.

    - ``claim_timeout``: the longest wait, in seconds, for another delivery of the same message. With None, only
      the database limits the wait.
    - ``isolation``: overrides the isolation level that invariant I6 requires.
    - ``read_models``: entities whose rows the library reads under lock.
    - ``strict``: before COMMIT, ask the server whether the claim's transaction is still open. This detects a COMMIT on
      the driver's own connection, and costs one or two round trips.
    - ``external``: permits a transaction that the caller commits.
    - ``warn``: logs an isolation level that loses updates, once for each engine.
    - ``building``: forbids the handler to arm effects.
    - ``lateness``: detects late messages. None applies them.
    - ``lowered``: runs the handler at READ COMMITTED, after an attempt in which its lock was younger than its snapshot.
    - ``accepted``: texts of unique violations for which an earlier attempt was given up. None accepts all: nobody runs
      the unit of work again.
    """

    tables: DedupTables = default_tables
    claim_timeout: float | None = None
    isolation: str | None = None
    read_models: tuple[type[Any], ...] = ()
    strict: bool = False
    external: bool = False
    warn: bool = True
    building: bool = False
    lateness: Lateness | None = None
    lowered: bool = False
    accepted: frozenset[str] | None = frozenset()

    def __post_init__(self) -> None:
        if self.claim_timeout is not None and self.claim_timeout <= 0:
            raise ValueError("claim_timeout (seconds) must be positive; None waits without a limit")


def check_session_factory(factory: object, *, asynchronous: bool) -> None:
    """Raise ``UnsafeSessionError`` unless ``factory`` is a ``sessionmaker`` (or ``async_sessionmaker``)."""
    wanted, name = (async_sessionmaker, "async_sessionmaker") if asynchronous else (sessionmaker, "sessionmaker")
    if isinstance(factory, wanted):
        if factory.kw.get("twophase"):
            raise UnsafeSessionError(
                f"{name}(twophase=True) is not supported: marker and read model must be in one database; remove it"
            )
        if type(factory).__call__ is not wanted.__call__:
            raise UnsafeSessionError(
                f"the library does not call {type(factory).__name__}.__call__, because its sessions have a private "
                f"class; give a plain {name}, and move that code into the {name}'s class_ or arguments"
            )
        return
    raise UnsafeSessionError(
        f"{type(factory).__name__} is no {name}; every attempt needs a new session, so give {name}(engine). "
        "Dispatcher takes a sessionmaker, and AsyncDispatcher takes an async_sessionmaker"
    )
