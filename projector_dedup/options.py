"""The arguments that ``UnitOfWork``, ``Dispatcher``, ``Commands`` and ``Effects`` share.

The async classes have the same arguments. ``UnitOfWork`` has no ``retry`` and no ``observer``. ``Effects`` has no
``claim_timeout``, ``isolation`` or ``strict``. Only ``Commands`` and ``Effects`` have ``scope`` and
``max_result_bytes``.

- ``session_factory``: a ``sessionmaker`` with one engine; for an async class, an ``async_sessionmaker``. The library
  opens a new session with it for every attempt. For anything else the class raises ``UnsafeSessionError``.
- ``tables``: where the library stores markers (the result of ``make_tables``), the records of commands
  (``make_command_tables``) or effects (``make_effect_tables``). The default is the tables with the default names. For
  tables of another kind ``Commands`` and ``Effects`` raise ``ValueError``. If the tables are missing, the first claim
  raises ``MissingTableError``.
- ``retry``: a ``RetryPolicy``: how often, and for how long, the library retries a transaction after a transient error.
  The default is ``RetryPolicy()``: at most 20 attempts, none later than 5 seconds after the first failure. After the
  last attempt the library raises ``RetriesExhaustedError``.
- ``claim_timeout``: the longest wait, in seconds, for another transaction that has claimed the same message or the same
  key. After that the library raises ``InProgress``. With None, the default, only the database limits the wait. MySQL
  waits for whole seconds, rounded up. A value that is not positive raises ``ValueError``.
- ``isolation``: the isolation level of each transaction, such as ``"READ COMMITTED"``. A level that ``@projector`` or
  ``@command`` declares has precedence. With None, the default, the library uses the level that the engine was given, or
  else one at which no update is lost. A level that the database does not have raises ``UnsafeSessionError`` at the
  first claim.
- ``strict``: True asks the server before COMMIT whether the claim's transaction is still open, which costs one or two
  round trips. If it is not, the library raises ``TransactionViolatedError``. The default is False: the library asks
  only after the handler has used the driver's own connection, or SQL such as CALL that may hide a COMMIT.
- ``observer``: an ``Observer``, which receives the outcome of each message, command or effect. The default is None.
- ``scope``: ``"required"`` refuses each call without a ``scope=`` with ``HandlerDefinitionError``, so that two tenants
  never share a key. The default is ``"optional"``. Any other value raises ``ValueError``.
- ``max_result_bytes``: the largest result of a command, or value of an effect, that the library records, in bytes. The
  default is 65,536. MariaDB stores values of at most half of its ``max_allowed_packet``. After a larger result the
  command is rolled back and raises ``ResultError``. After a larger value the effect is unknown.
"""

from __future__ import annotations

import functools
import inspect
import random
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

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
    """The settings of a unit of work, the same for every message of one handler: shared arguments, and the following.

    - ``read_models``: entities whose rows the library reads under lock.
    - ``external``: permits a transaction that the caller commits.
    - ``warn``: logs an isolation level that loses updates, once for each engine.
    - ``building``: forbids the handler to arm effects.
    - ``lateness``: detects late messages. None applies them.
    - ``other_body``: what to do about a duplicate with another body. ``"ignore"`` stores and compares no digest.
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
    other_body: Literal["log", "reject", "ignore"] = "ignore"
    lowered: bool = False
    accepted: frozenset[str] | None = frozenset()

    def __post_init__(self) -> None:
        if self.claim_timeout is not None and self.claim_timeout <= 0:
            raise ValueError("claim_timeout (seconds) must be positive; None waits without a limit")


class NamedInErrors:
    """A base of which Python's error for a misspelt argument names the derived class that the user has called.

    Otherwise the error would name the private class that defines ``__init__``.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" not in vars(cls):
            inherited: Any = inspect.getattr_static(cls, "__init__")
            own = FunctionType(inherited.__code__, inherited.__globals__, closure=inherited.__closure__)
            functools.update_wrapper(own, inherited)
            own.__defaults__, own.__kwdefaults__ = inherited.__defaults__, inherited.__kwdefaults__
            own.__qualname__ = f"{cls.__qualname__}.__init__"
            cls.__init__ = own  # type: ignore[method-assign]


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
