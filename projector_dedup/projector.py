"""``@projector`` and ``@on``, the decorators of a user, and the projector that is made of one function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

from sqlalchemy.orm import Session, sessionmaker

from .apply import aapply, apply
from .asyncio_names import AsyncSession, async_sessionmaker
from .chunk import Chunk
from .errors import HandlerDefinitionError, UnhandledMessage
from .extractors import attribute_or_key
from .handler import On, Settings, check_kind, options_for, refuse_second_of_one_name, warn_of_unused_id
from .identity import ON, PROJECTOR, handler_of, is_pinned, joined
from .message import Route, envelope, known_id, route_of, valid_formerly
from .options import RetryPolicy, UnitOptions, check_session_factory
from .outcome import Delivery
from .reads import DeclaredReads, Reads

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type[Any])
P = ParamSpec("P")
R = TypeVar("R")


def on(
    *events: Route,
    name: str | None = None,
    formerly: Collection[str] = (),
    subclasses: bool = False,
    envelope: bool = False,
    batch: bool = False,
    reads: Reads | None = None,
) -> Callable[[F], F]:
    """Mark a method or a function as the handler of ``events``, each a class (the exact type) or a name.

    The handler is called with ``(event, session)``; it must not commit. ``name`` pins the method's part of the
    identity, so that it can be renamed; ``formerly`` lists former names of that part or, with a dot, former identities
    of the whole handler: code of both names may run at once (README, "Renaming a projector"). ``subclasses`` also takes
    events of derived classes. ``envelope`` passes the ``Message`` instead of its body. ``batch`` passes the list of
    all events that ``deliver_batch`` found new, in their order; ``deliver`` passes a list of one then.

    ``reads`` says which rows the handler will ``session.get``: for each entity a dotted path to its key in the event, a
    tuple of paths for a composite key, a list of these for several rows, or a function of the event that lists the
    keys. They come with the claim, or together for a batch, which saves round trips. It is advice, and never changes
    what a handler sees. Raises ``HandlerDefinitionError`` for a wrong argument.
    """
    if not events or not all(isinstance(event, (type, str)) for event in events):
        raise HandlerDefinitionError("@on takes the events it handles: classes or names, as in @on(PaymentReceived)")

    former = valid_formerly(formerly, HandlerDefinitionError)
    declared = None if reads is None else DeclaredReads(reads)

    def mark(function: F) -> F:
        refuse_second_of_one_name(function, ON)
        setattr(function, ON, On(events, name, subclasses, envelope, former, batch, declared))
        return function

    return mark


@overload
def projector(target: C, /) -> C: ...  # type: ignore[overload-overlap]  # a class can be called as well
@overload
def projector(target: Callable[P, R], /) -> FunctionProjector[P, R]: ...
@overload
def projector(
    *,
    idempotent: bool = ...,
    name: str | None = ...,
    formerly: Collection[str] = ...,
    read_models: Sequence[type[Any]] = ...,
    isolation: str | None = ...,
) -> _Decorator: ...
def projector(
    target: Any = None,
    /,
    *,
    idempotent: bool = False,
    name: str | None = None,
    formerly: Collection[str] = (),
    read_models: Sequence[type[Any]] = (),
    isolation: str | None = None,
) -> Any:
    """Make a projector of a class with ``@on`` methods, or of a function under ``@on``; both can be called as before.

    With ``idempotent=True`` each message is applied once, by a marker that commits with the handler's writes. Without
    it, handlers run in a unit of work all the same, but no marker is read or written and no table is needed. ``name``
    pins the identity, which else is ``module.Class``, so that the class can be moved. ``formerly`` lists its names from
    before (of a function, whole identities): each message is claimed under these too, so that code of both names may
    run at once. ``read_models`` lists entities that many workers write at once: they are read under lock
    (docs/adr/0003-lost-updates.md). ``isolation`` overrides the isolation level. Raises ``HandlerDefinitionError``.
    """
    given: object = read_models
    if not isinstance(given, Sequence) or not all(hasattr(model, "__mapper__") for model in given):
        raise HandlerDefinitionError("read_models is a list of mapped classes, as in read_models=[Totals]")
    former = valid_formerly(formerly, HandlerDefinitionError)
    settings = Settings(idempotent, name, tuple(read_models), isolation, former)
    decorate = _Decorator(settings)
    return decorate if target is None else decorate(target)


class _Decorator:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @overload
    def __call__(self, target: C, /) -> C: ...  # type: ignore[overload-overlap]  # a class can be called as well
    @overload
    def __call__(self, target: Callable[P, R], /) -> FunctionProjector[P, R]: ...
    def __call__(self, target: Any, /) -> Any:
        """Mark a class and return it; make a ``FunctionProjector`` of a function."""
        if isinstance(target, type):
            setattr(target, PROJECTOR, self._settings)
            return target
        return FunctionProjector(target, self._settings)


class FunctionProjector(Generic[P, R]):
    """A projector made of one function, which can be called as before; ``deliver`` applies one event once."""

    def __init__(self, function: Callable[P, R], settings: Settings) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        marked = getattr(function, ON, None)
        if marked is None:
            raise HandlerDefinitionError(
                f"{function.__qualname__} is not under @on: write @projector(...) above @on(Event) above the function"
            )
        owner = settings.name or function.__module__
        identity = settings.name or f"{function.__module__}.{function.__qualname__}"
        if marked.name is not None:
            identity = f"{owner}.{marked.name}"
        former = {*settings.formerly, *joined([owner], marked.former_parts)}
        self.handler = handler_of(identity, former, function, marked, settings, pinned=is_pinned(function, settings))

    @functools.cached_property
    def _options(self) -> UnitOptions:
        return options_for(self.handler)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function as it was written: without a claim, in whatever transaction the caller has."""
        return self._function(*args, **kwargs)

    def deliver(self, event: object, *, message_id: object = None, session_factory: sessionmaker[Session]) -> Delivery:
        """Apply the event once, in a unit of work of its own; return only if the message may be acknowledged.

        ``message_id`` wins over the event's own. Raises what ``Dispatcher.deliver`` raises with one handler.
        """
        check_session_factory(session_factory, asynchronous=False)
        check_kind(self.handler, asynchronous=False)
        chunk = self._chunk(event, message_id)
        return self._delivery(chunk, apply(chunk, session_factory, self._options, RetryPolicy()))

    async def adeliver(
        self, event: object, *, message_id: object = None, session_factory: async_sessionmaker[AsyncSession]
    ) -> Delivery:
        """Apply the event once, by an ``async def`` function; returns and raises what ``deliver`` does."""
        check_session_factory(session_factory, asynchronous=True)
        check_kind(self.handler, asynchronous=True)
        chunk = self._chunk(event, message_id)
        return self._delivery(chunk, await aapply(chunk, session_factory, self._options, RetryPolicy()))

    def _chunk(self, event: object, message_id: object) -> Chunk:
        message = envelope(event, message_id, attribute_or_key, needed=self.handler.idempotent)
        if not self.handler.wants(route_of(message)):
            raise UnhandledMessage(f"{self.handler.identity} does not handle {type(message.body).__name__}")
        if message_id is not None and not self.handler.idempotent:
            warn_of_unused_id(self.handler)
        return Chunk(self.handler, [message])

    def _delivery(self, chunk: Chunk, durable: bool) -> Delivery:
        known = known_id(chunk.messages[0], needed=self.handler.idempotent)
        return Delivery(known, {self.handler.identity: chunk.outcomes[0]}, durable)
