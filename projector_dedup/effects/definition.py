"""``@effect`` makes an effect of a function, and ``Attempt`` is the second argument of the function."""

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
_MARGIN = 0.1  # the part of the lease (at most a second) that is reserved for writing the outcome


@dataclass(frozen=True)
class Lease:
    """How long an attempt may take, in seconds. Raises ``HandlerDefinitionError`` for more than a day."""

    seconds: float

    def __post_init__(self) -> None:
        given: Any = self.seconds  # a caller without a type checker may pass anything
        if isinstance(given, bool) or not isinstance(given, int | float) or not 0.1 <= given <= MAX_LEASE:
            raise HandlerDefinitionError(f"lease must be 0.1 to {MAX_LEASE:,} seconds (a day), not {given!r}")

    @property
    def ms(self) -> int:
        """The length of the lease, in milliseconds."""
        return int(self.seconds * 1000)


@dataclass
class Attempt:
    """One attempt at an effect: the second argument of the effect's function and of the ask function.

    ``key`` is the idempotency key for the provider, the same in all attempts at one effect. ``number`` counts the
    attempts from 1. ``lease`` is the longest time of the attempt in seconds. In a unit test, create one yourself:
    ``Attempt("key")``.
    """

    key: str
    number: int = 1
    lease: float = 30.0
    began: float = field(default_factory=time.monotonic, repr=False)
    called: bool = field(default=False, repr=False)  #: ``time_left`` was called before, or in an ask function

    def time_left(self, wanted: float, *, at_least: float = 0.0) -> float:
        """Return the timeout for a call to the provider in seconds: ``wanted``, or less if the lease ends earlier.

        Call it before you send anything. If less than ``at_least`` is left, the first call raises ``NotDone``, because
        nothing was sent yet. A later call in the same attempt raises ``TimeoutError``, and the effect is unknown then.
        Every call in an ask function raises ``TimeoutError`` too.
        """
        left = self.lease - min(1.0, self.lease * _MARGIN) - (time.monotonic() - self.began)
        first, self.called = not self.called, True
        if left <= 0 or left < at_least:
            text = f"{max(left, 0):.1f} s of the lease are left, and {at_least:g} s are needed"
            raise NotDone(text) if first else TimeoutError(text)
        return min(wanted, left)


class Definition(Generic[I, R]):
    """A function with ``@effect``: its name, its policy, and the codecs of its request and its value."""

    asynchronous: bool

    def __init__(self, function: Callable[..., Any], name: str, lease: Lease, unknown: Policy) -> None:
        self.function = function
        self.identity = name
        self.lease = lease
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
        """Decorate ``function(request, value, session)``, which runs in the transaction that records the value.

        Write your own rows in this function. It must not commit. If it raises, the row keeps the value, and ``settle``
        calls the function again.
        """
        if self.on_recorded is not None:
            raise HandlerDefinitionError(
                f"{self.identity} already has a @recorded function; write all rows in one function"
            )
        self.on_recorded = self._check("recorded", function, "(request, value, session)", 3)
        return function

    def refused(self, function: F) -> F:
        """Decorate ``function(request, rejected, session)``, which runs in the transaction of a rejection."""
        if self.on_refused is not None:
            raise HandlerDefinitionError(
                f"{self.identity} already has a @refused function; write all rows in one function"
            )
        self.on_refused = self._check("refused", function, "(request, rejected, session)", 3)
        return function

    def _check(self, what: str, function: Any, arguments: str, number: int) -> Callable[..., Any]:
        try:
            inspect.signature(function).bind(*[None] * number)
        except (TypeError, ValueError) as error:
            raise HandlerDefinitionError(f"{what} of {self.identity} must take {arguments} ({error})") from error
        if inspect.iscoroutinefunction(function) != self.asynchronous:
            needed = "an async def" if self.asynchronous else "a plain def"
            raise HandlerDefinitionError(f"{self.identity} is {needed}, so {what} must be {needed} too")
        return cast("Callable[..., Any]", function)


class Effect(Definition[I, R]):
    """An effect for ``Effects``. A direct call runs the function, and records nothing."""

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
    def __init__(self, name: str, lease: Lease, unknown: Policy) -> None:
        self._arguments = name, lease, unknown

    @overload
    def __call__(self, function: Callable[[I, Attempt], Coroutine[Any, Any, R]], /) -> AsyncEffect[I, R]: ...  # type: ignore[overload-overlap]  # the first one wins
    @overload
    def __call__(self, function: Callable[[I, Attempt], R], /) -> Effect[I, R]: ...
    def __call__(self, function: Any, /) -> Any:
        """Make an effect of the function. Raises ``HandlerDefinitionError``."""
        if not inspect.isfunction(function):
            raise HandlerDefinitionError(f"write @effect(...) above a function, not above {function!r}")
        try:
            inspect.signature(function).bind(None, None)
        except TypeError as error:
            raise HandlerDefinitionError(
                f"the library calls {self._arguments[0]} with two arguments, (request, attempt), but it takes "
                f"{inspect.signature(function)}"
            ) from error
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise HandlerDefinitionError(
                f"{function.__qualname__} is a generator function, so a call would not run its code; remove the yield"
            )
        return (AsyncEffect if inspect.iscoroutinefunction(function) else Effect)(function, *self._arguments)


def effect(*misplaced: Never, name: str, lease: float, unknown: Policy) -> _Decorator:
    """Make an effect of a function that calls another system, such as a payment provider.

    The library calls the function with ``(request, attempt)``. The function sends the request with the idempotency key
    ``attempt.key``, and returns the provider's answer. It raises ``Rejected`` if the provider rejects the request, and
    ``NotDone`` if it certainly sent nothing. After any other exception the effect is *unknown*. The library stores
    request and answer as JSON, by their annotations.

    - ``name``: identifies the effect permanently. Rename it only with ``idempotency rename``.
    - ``lease``: how long an attempt may take, in seconds: at most 86,400, a day.
    - ``unknown``: the policy after an attempt without an answer: ``resend(...)``, ``ask(...)`` or ``stop``.

    Raises ``HandlerDefinitionError`` for a wrong argument, and if request or answer cannot be stored.
    """
    if misplaced:
        raise HandlerDefinitionError('@effect takes named arguments: @effect(name="billing.charge", lease=30, ...)')
    valid_handler(name)
    length = Lease(lease)
    if not isinstance(unknown, Resend | Ask | Stop):
        raise HandlerDefinitionError(f"unknown must be a policy (resend(...), ask(...) or stop), not {unknown!r}")
    return _Decorator(name, length, unknown)


def _request_codec(name: str, function: Callable[..., Any]) -> Codec[Any]:
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise HandlerDefinitionError(
            f"{name}: the annotation of its request cannot be evaluated ({error}); define the type before the function"
        ) from error
    first = next(iter(inspect.signature(function).parameters))
    if first not in hints:
        raise HandlerDefinitionError(
            f"{name} has no annotation of its request, so the library does not know how to store it; annotate {first}"
        )
    return typed_json(hints[first])
