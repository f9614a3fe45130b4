"""Options: how often a message is tried, how a unit of work is opened, and the factory that its sessions come from."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import sessionmaker

from .asyncio_names import async_sessionmaker
from .errors import UnsafeSessionError
from .tables import DedupTables, default_tables


@dataclass(frozen=True)
class RetryPolicy:
    """How often, and for how long, a transient failure is tried again before it surfaces.

    ``attempts`` counts the first one too; no attempt starts later than ``within`` seconds after the first failure.
    One and the same unique violation in the read model, which a rival or a bug may have caused, is tried again
    ``unique_violations`` times at most. ``also`` lists errors of the application's that are tried again like conflicts
    of the database, such as that of an event store whose stream has a later version than was expected. Between
    attempts: a random time up to ``base * 2 ** n`` seconds, at most ``cap`` (Brooker, "Exponential Backoff And Jitter",
    2015: full jitter). No connection is held meanwhile.
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
            raise ValueError("RetryPolicy: also is a tuple of exception classes, as in also=(ExpectedVersionError,)")
        if self.attempts < 1 or self.within < 0 or self.unique_violations < 0 or self.base < 0 or self.cap < 0:
            raise ValueError("RetryPolicy: attempts must be at least 1, and no other value negative")

    def delay(self, number: int) -> float:
        """Return the seconds to wait after an attempt: random, at most ``base * 2 ** number`` and at most ``cap``."""
        return random.uniform(0, min(self.cap, self.base * 2 ** min(number, 30)))  # noqa: S311  # no secret


@dataclass(frozen=True)
class UnitOptions:
    """How a unit of work is opened; the same for every message of one handler.

    ``claim_timeout`` (seconds) bounds the wait for another delivery of the same message; None waits as long as the
    database does. ``isolation`` overrides the level that invariant I6 asks for; entities in ``read_models`` are read
    under lock instead. ``strict`` spends one or two round trips more to ask the database, before COMMIT,
    whether the marker is in *this* transaction: that finds what a handler did on the driver's own connection.
    ``external`` permits a transaction that somebody else commits. ``warn`` logs a level that loses updates, once for
    each engine. ``shared_session`` keeps the rows of a batch in the session until the COMMIT.
    """

    tables: DedupTables = default_tables
    claim_timeout: float | None = None
    isolation: str | None = None
    read_models: tuple[type[Any], ...] = ()
    strict: bool = False
    external: bool = False
    warn: bool = True
    shared_session: bool = False

    def __post_init__(self) -> None:
        if self.claim_timeout is not None and self.claim_timeout <= 0:
            raise ValueError("claim_timeout is in seconds and must be positive; None waits without a bound")


def check_session_factory(factory: object, *, asynchronous: bool) -> None:
    """Raise ``UnsafeSessionError`` for what is not a factory of new sessions; the error names what to give instead."""
    wanted, name = (async_sessionmaker, "async_sessionmaker") if asynchronous else (sessionmaker, "sessionmaker")
    if isinstance(factory, wanted):
        if factory.kw.get("twophase"):
            raise UnsafeSessionError(f"{name}(twophase=True) is not supported: marker and read model need one database")
        if type(factory).__call__ is not wanted.__call__:
            raise UnsafeSessionError(
                f"{type(factory).__name__}.__call__ would not be called: sessions here are of a private class; give a "
                f"plain {name} and put what it does into the class_ or the arguments of the {name}"
            )
        return
    raise UnsafeSessionError(
        f"{type(factory).__name__} is no {name}: give {name}(engine) or the like, because every attempt needs "
        "a new session. AsyncDispatcher takes an async_sessionmaker, Dispatcher a sessionmaker"
    )
