"""``@effect`` makes an effect of a function; ``Attempt`` is what the function is given beside its request."""

from __future__ import annotations

import inspect
import time
import typing
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Generic, Never, TypeVar, cast, overload

from ..commands.codecs import Codec, typed_json
from ..commands.operation import codec_of
from ..errors import HandlerDefinitionError
from ..message import valid_handler
from .errors import NotDone
from .policy import Ask, Policy, Resend, Stop

I = TypeVar("I")  # noqa: E741  # the request
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

MAX_LEASE = 86_400  # seconds
_MARGIN = 0.1  # of the lease, and at most a second: what writing the outcome may take


@dataclass
class Attempt:
    """One attempt at an effect: what the body and the ask function are given beside the request.

    ``key`` is the key for the provider: the same for all attempts at one effect. ``number`` counts the attempts. A test
    makes one by hand: ``Attempt("key")``.
    """

    key: str
    number: int = 1
    lease: float = 30.0
    began: float = field(default_factory=time.monotonic, repr=False)
    called: bool = field(default=False, repr=False)  #: ``time_left`` was called before, or in an ask function

    def time_left(self, wanted: float, *, at_least: float = 0.0) -> float:
        """Return the seconds that a call to the provider may take: ``wanted``, or what is left of the lease.

        If less than ``at_least`` is left, the first call raises ``NotDone``, because nothing was sent yet; so call it
        before anything is sent. A later call of the same attempt raises ``TimeoutError``: the effect is unknown then.
        So does every call in an ask function.
        """
        left = self.lease - min(1.0, self.lease * _MARGIN) - (time.monotonic() - self.began)
        first, self.called = not self.called, True
        if left <= 0 or left < at_least:
            told = f"{max(left, 0):.1f} s of the lease are left, and {at_least:g} s are needed"
            raise NotDone(told) if first else TimeoutError(told)
        return min(wanted, left)


class Definition(Generic[I, R]):
    """A function under ``@effect``: its name, its policy, and how its request and its values are stored."""

    asynchronous: bool

    def __init__(self, function: Callable[..., Any], name: str, lease: float, unknown: Policy) -> None:
        self.function = function
        self.identity = name
        self.lease, self.lease_ms = lease, int(lease * 1000)
        self.unknown = unknown
        self.request_codec = _request_codec(name, function)
        self.codec: Codec[Any] = codec_of(name, function)
        self.on_recorded: Callable[..., Any] | None = None
        self.on_refused: Callable[..., Any] | None = None
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__
        policy: Policy = unknown
        while not isinstance(policy, Stop):
            if isinstance(policy, Ask):
                self._check("the ask function", policy.function, "(request, attempt)", 2)
            policy = policy.then

    def recorded(self, function: F) -> F:
        """Call ``function(request, value, session)`` in the transaction that records the value.

        Write your rows there. It must not commit. If it raises, the value is kept, and ``settle`` calls it again.
        """
        if self.on_recorded is not None:
            raise HandlerDefinitionError(f"{self.identity} has recorded already; write all its rows in one function")
        self.on_recorded = self._check("recorded", function, "(request, value, session)", 3)
        return function

    def refused(self, function: F) -> F:
        """Call ``function(request, rejected, session)`` in the transaction that records a ``Rejected``."""
        if self.on_refused is not None:
            raise HandlerDefinitionError(f"{self.identity} has refused already; write all its rows in one function")
        self.on_refused = self._check("refused", function, "(request, rejected, session)", 3)
        return function

    def _check(self, what: str, function: Any, arguments: str, number: int) -> Callable[..., Any]:
        try:
            inspect.signature(function).bind(*[None] * number)
        except (TypeError, ValueError) as error:
            raise HandlerDefinitionError(f"{what} of {self.identity} is called with {arguments} ({error})") from error
        if inspect.iscoroutinefunction(function) != self.asynchronous:
            needed = "an async def" if self.asynchronous else "a plain def"
            raise HandlerDefinitionError(f"{self.identity} is {needed}, so {what} must be {needed}, too")
        return cast("Callable[..., Any]", function)


class Effect(Definition[I, R]):
    """An effect for ``Effects``. Calling it calls the function: nothing is recorded."""

    asynchronous = False

    def __call__(self, request: I, attempt: Attempt) -> R:
        """Call the function as it was written."""
        return cast("R", self.function(request, attempt))


class AsyncEffect(Definition[I, R]):
    """An effect for ``AsyncEffects``: an ``async def``. See ``Effect``."""

    asynchronous = True

    async def __call__(self, request: I, attempt: Attempt) -> R:
        """Call the function as it was written."""
        return cast("R", await self.function(request, attempt))


class _Decorator:
    def __init__(self, name: str, lease: float, unknown: Policy) -> None:
        self._arguments = name, lease, unknown

    @overload
    def __call__(self, function: Callable[[I, Attempt], Coroutine[Any, Any, R]], /) -> AsyncEffect[I, R]: ...  # type: ignore[overload-overlap]  # the first one wins
    @overload
    def __call__(self, function: Callable[[I, Attempt], R], /) -> Effect[I, R]: ...
    def __call__(self, function: Any, /) -> Any:
        """Make an effect of the function. Raises ``HandlerDefinitionError``."""
        if not inspect.isfunction(function):
            raise HandlerDefinitionError(f"@effect makes an effect of a function, not of {function!r}")
        try:
            inspect.signature(function).bind(None, None)
        except TypeError as error:
            raise HandlerDefinitionError(
                f"{self._arguments[0]} is called with two arguments, (request, attempt), and takes "
                f"{inspect.signature(function)}"
            ) from error
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise HandlerDefinitionError(f"{function.__qualname__} is a generator: calling it would do nothing")
        return (AsyncEffect if inspect.iscoroutinefunction(function) else Effect)(function, *self._arguments)


def effect(*misplaced: Never, name: str, lease: float, unknown: Policy) -> _Decorator:
    """Make an effect of a function that is called with ``(request, attempt)`` and does something outside the database.

    The function sends with ``attempt.key``, and returns what the provider said. It raises ``Rejected`` if the provider
    said no, and ``NotDone`` if it surely sent nothing. After any other exception the effect is *unknown*.

    ``name`` identifies the effect for ever: rename it by ``idempotency rename`` only. ``lease`` (seconds) is how long
    an attempt may take. ``unknown`` says what to do with an attempt that ended without an answer, and has no default:
    ``resend(...)``, ``ask(...)`` or ``stop``. Input and result are stored as JSON by their annotations.

    Raises ``HandlerDefinitionError`` for a wrong argument, and for an request or a result that cannot be stored.
    """
    if misplaced:
        raise HandlerDefinitionError('@effect takes arguments by name: @effect(name="billing.charge", lease=30, ...)')
    valid_handler(name)
    seconds: object = lease
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.1 <= seconds <= MAX_LEASE:
        raise HandlerDefinitionError(f"lease is in seconds, from 0.1 to {MAX_LEASE:,}, not {lease!r}")
    if not isinstance(unknown, Resend | Ask | Stop):
        raise HandlerDefinitionError(f"unknown is a policy: resend(...), ask(...) or stop, not {unknown!r}")
    return _Decorator(name, float(lease), unknown)


def _request_codec(name: str, function: Callable[..., Any]) -> Codec[Any]:
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise HandlerDefinitionError(
            f"{name}: the annotation of its request cannot be read ({error}); define the type before the function"
        ) from error
    first = next(iter(inspect.signature(function).parameters))
    if first not in hints:
        raise HandlerDefinitionError(
            f"{name} does not say what its request is, so nobody knows how to store it: annotate {first}"
        )
    return typed_json(hints[first])
