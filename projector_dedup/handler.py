"""The handlers of a projector: the identity of each, the messages that it takes, and the checks at start-up."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

from sqlalchemy.orm import Session

from .asyncio_names import AsyncSession
from .errors import HandlerDefinitionError
from .message import Message, Route, logger_of, valid_formerly, valid_handler

logger = logger_of("projector_dedup")

ON = "__projector_dedup_on__"  #: the attribute of a function in which ``@on`` stores its arguments
PROJECTOR = "__projector_dedup_projector__"  #: the attribute of a class in which ``@projector`` stores its arguments

DeadLetter = Callable[[Message, Exception], None]
"""A function that takes a message and the error that a handler raised for it."""

_warned: set[str] = set()
"""Handlers for which the library has logged that they do not use their message ids."""

_warned_of_results: set[str] = set()
"""Handlers of which the log has warned that they return something."""


@dataclass(frozen=True)
class On:
    """The arguments of ``@on`` for one method or function; ``routes`` are its events."""

    routes: tuple[Route, ...]
    name: str | None
    subclasses: bool
    envelope: bool
    formerly: tuple[str, ...]
    batch: bool

    @property
    def former_parts(self) -> tuple[str, ...]:
        """The former names of the method, which have no dot."""
        return tuple(name for name in self.formerly if "." not in name)

    @property
    def former_identities(self) -> tuple[str, ...]:
        """The former identities of the whole handler, which have a dot, such as ``old-projector.method``."""
        return tuple(name for name in self.formerly if "." in name)


@dataclass(frozen=True)
class Settings:
    """The arguments of ``@projector`` for one class or function."""

    idempotent: bool
    name: str | None
    read_models: tuple[type[Any], ...]
    isolation: str | None
    formerly: tuple[str, ...] = ()


@dataclass(frozen=True)
class Handler:
    """One handler of one projector: its identity, the function to call, and the arguments of its two decorators."""

    identity: str
    function: Callable[[Any, Any], Any]
    on: On
    projector: Settings
    owner: str  #: the name of the projector
    formerly: tuple[str, ...] = ()  #: former identities, under which other versions of the code may apply a message
    beside: str | None = None  #: if the projector is ``building``: the name of the projector that it will replace
    dead: DeadLetter | None = None  #: if the projector is ``building``: called with each message on which it fails

    @property
    def names(self) -> frozenset[str]:
        """The present and former identities. Markers of the handler are stored under these names."""
        return frozenset({self.identity, *self.formerly})

    @cached_property
    def idempotent(self) -> bool:
        """True if the handler claims a marker for each message."""
        return self.projector.idempotent

    @property
    def is_async(self) -> bool:
        """True if the function is an ``async def``, whose result must be awaited."""
        return inspect.iscoroutinefunction(self.function)

    def takes(self, route: Route) -> bool:
        """True if the handler takes messages of the type ``route``, a class or a name."""
        if route in self.on.routes:
            return True
        return (
            self.on.subclasses
            and isinstance(route, type)
            and any(isinstance(wanted, type) and issubclass(route, wanted) for wanted in self.on.routes)
        )


def handlers_of(target: Any) -> list[Handler]:
    """Return the handlers of a function projector, or of an instance of a ``@projector`` class.

    Raises ``HandlerDefinitionError`` for anything else.
    """
    if isinstance(alone := getattr(target, "handler", None), Handler):  # that of a FunctionProjector
        return [alone]
    if isinstance(target, type):
        raise HandlerDefinitionError(
            f"give the dispatcher an instance, {target.__name__}(), not the class {target.__name__}"
        )
    cls = type(target)
    settings: Settings | None = getattr(cls, PROJECTOR, None)
    if settings is None:
        raise HandlerDefinitionError(
            f"{cls.__qualname__} is not a projector; decorate it with @projector(...). Pass several projectors one by "
            "one: Dispatcher(session_factory, First(), Second()), or Dispatcher(session_factory, *projectors)"
        )
    if PROJECTOR not in vars(cls):  # a subclass does not inherit the name and the former names
        settings = replace(settings, name=None, formerly=())
    marked: dict[str, On] = {
        name: _inherited(getattr(function, ON), base, cls)
        for base in reversed(cls.__mro__)
        for name, member in vars(base).items()
        for function in (member, getattr(member, "__func__", None))  # @on may be under @staticmethod or @classmethod
        if hasattr(function, ON)
    }
    if not marked:
        raise HandlerDefinitionError(f"{cls.__qualname__} has no handler; decorate its methods with @on(Event)")
    owner = owner_of(cls)
    _refuse_identities(owner, settings.formerly, {part for name, on in marked.items() for part in (name, on.name)})
    owners, pinned = [owner, *settings.formerly], is_pinned(cls, settings)
    return [
        handler_of(
            f"{owner}.{on.name or name}",
            joined(owners, [on.name or name, *on.former_parts]),
            getattr(target, name),
            on,
            settings,
            owner=owner,
            pinned=pinned,
        )
        for name, on in marked.items()
    ]


def owner_of(cls: type[Any]) -> str:
    """Return the name of a projector class. A class that inherits from one has a name of its own."""
    own: Settings | None = vars(cls).get(PROJECTOR)
    return (own.name if own is not None else None) or f"{cls.__module__}.{cls.__qualname__}"


def _inherited(on: On, base: type[Any], cls: type[Any]) -> On:
    """Return the arguments of a method's ``@on``, without former identities if ``cls`` inherits from a projector."""
    return replace(on, formerly=on.former_parts) if base is not cls and PROJECTOR in vars(base) else on


def joined(owners: Iterable[str], parts: Iterable[str]) -> set[str]:
    """Return every identity ``owner.part``."""
    return {f"{owner}.{part}" for owner, part in product(owners, parts)}


def _refuse_identities(owner: str, formerly: Iterable[str], parts: Collection[str | None]) -> None:
    """Raise ``HandlerDefinitionError`` if a former name of a projector class is the identity of a handler.

    No marker has the name ``old-projector.method.method``, so every message would be applied again.
    """
    for name in formerly:
        former, _, part = name.rpartition(".")
        if former and part in parts:
            raise HandlerDefinitionError(
                f"{owner} has @projector(formerly=[{name!r}]), but that is the name of a handler: write the former "
                f"name of the projector there, {former!r}, or write {name!r} in the formerly=[...] of its @on"
            )


def is_pinned(target: Any, settings: Settings) -> bool:
    """True if the identity is the same in every process: the projector has a name, or is in an imported module."""
    return settings.name is not None or not (target.__module__ == "__main__" or "<" in target.__qualname__)


def handler_of(
    identity: str,
    former: set[str],
    function: Callable[..., Any],
    on: On,
    settings: Settings,
    *,
    owner: str,
    pinned: bool,
) -> Handler:
    """Return the handler of a function. Raises ``HandlerDefinitionError`` if it would lose or repeat messages."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise HandlerDefinitionError(
            f"{identity} is a generator function, so a call would not run its code; remove the yield"
        )
    check_parameters(identity, function)
    check_session(identity, function)
    if settings.idempotent and not pinned:
        raise HandlerDefinitionError(
            f"{identity} is defined in __main__ or inside a function, so its identity may change, and messages would "
            'then be applied again; give it a fixed name: @projector(idempotent=True, name="...")'
        )
    if (settings.formerly or on.formerly) and not settings.idempotent:
        raise HandlerDefinitionError(
            f"{identity} has formerly=[...], but is not idempotent, so it has no markers; write "
            "@projector(idempotent=True), or remove formerly"
        )
    former_identities = valid_formerly({*former, *on.former_identities} - {identity}, HandlerDefinitionError)
    return Handler(valid_handler(identity), function, on, settings, owner, former_identities)


# Checks ---------------------------------------------------------------------------------------------------------------


def check_parameters(identity: str, function: Callable[..., Any]) -> None:
    """Raise ``HandlerDefinitionError`` for a function that cannot be called with an event and a session."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function written in C has no signature
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise HandlerDefinitionError(
            f"the library calls {identity} with two arguments, (event, session), but it takes {signature}: {error}"
        ) from None


def check_session(identity: str, function: Callable[..., Any]) -> None:
    """Raise ``HandlerDefinitionError`` if an async handler declares a ``Session``, or a plain one an ``AsyncSession``.

    With the wrong session the handler would get coroutines instead of rows, or await plain values. The function ignores
    an annotation that it cannot evaluate, for example because its name is imported for type checkers only.
    """
    asynchronous = inspect.iscoroutinefunction(function)
    if asynchronous != inspect.iscoroutinefunction(inspect.unwrap(function)):
        return  # a wrapper of the other kind may give the function below it another session
    try:
        declared = list(inspect.signature(function, eval_str=True).parameters.values())[1].annotation
    except Exception:  # noqa: BLE001  # an annotation may raise anything
        return
    given, other = (AsyncSession, Session) if asynchronous else (Session, AsyncSession)
    if isinstance(declared, type) and issubclass(declared, other):
        kind = "async def" if asynchronous else "plain def"
        raise HandlerDefinitionError(
            f"{identity} is {kind} and declares a session of the class {declared.__name__}, but gets one of the class "
            f"{given.__name__}; correct the annotation, or change the kind of function"
        )


def warn_of_unused_id(handler: Handler) -> None:
    """Log, once for each handler, that it is not idempotent and therefore ignores the given message id."""
    if handler.identity not in _warned:
        _warned.add(handler.identity)
        logger.warning(
            "handler %s was given a message_id, but is not idempotent, so a redelivery is applied again; write "
            "@projector(idempotent=True), or give no message_id",
            handler.identity,
        )


def warn_of_result(identity: str, result: object) -> None:
    """Log once for each handler that it returned something, which nobody gets."""
    if result is not None and identity not in _warned_of_results:
        _warned_of_results.add(identity)
        logger.warning(
            "handler %s returned %s, and the library ignores what a handler returns",
            identity,
            type(result).__name__,
        )


def check_kind(handler: Handler, *, asynchronous: bool) -> None:
    """Raise ``HandlerDefinitionError`` if the dispatcher is of the wrong kind for an async or a plain handler."""
    if not handler.is_async and inspect.iscoroutinefunction(inspect.unwrap(handler.function)):
        return  # a plain wrapper of an async function may return its coroutine, or run it: check_result decides
    if handler.is_async != asynchronous:
        has, wants = ("async def", "AsyncDispatcher") if handler.is_async else ("plain def", "Dispatcher")
        raise HandlerDefinitionError(f"{handler.identity} is {has}: use {wants} for it")


def check_result(identity: str, result: object, *, asynchronous: bool) -> None:
    """Raise ``HandlerDefinitionError`` if the result shows that the handler's code did not run.

    The result of a call of an async handler (``asynchronous``) must be awaitable. Any other result must not be.
    """
    if result is None and not asynchronous:
        return  # the usual case, without the checks below
    awaitable = inspect.isawaitable(result)
    if awaitable == asynchronous and not (inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return
    if inspect.iscoroutine(result):
        result.close()
    raise HandlerDefinitionError(
        f"{identity} returned {type(result).__name__}, which "
        + (
            "was not awaited, so its code did not run; correct the handler"
            if awaitable or inspect.isgenerator(result)
            else "cannot be awaited; correct the handler"
        )
    )


def may_share_messages(one: Handler, other: Handler) -> bool:
    """True if there may be a message that both handlers take."""
    return not set(one.on.routes).isdisjoint(other.on.routes) or one.on.subclasses or other.on.subclasses


def refuse_shared_names(one: Handler, other: Handler) -> None:
    """Raise ``HandlerDefinitionError`` if two handlers claim the same message under the same name.

    The second handler would find the marker of the first one, and skip the message.
    """
    shared = one.names & other.names
    if not (shared and one.idempotent and other.idempotent):
        return
    if not may_share_messages(one, other):
        return  # one handler was split by event
    raise HandlerDefinitionError(
        f"{one.identity} and {other.identity} both claim messages under the name {min(shared)}, so each would skip the "
        "messages that the other applied; write it only in the formerly=[...] of the one that continues its read model"
    )
