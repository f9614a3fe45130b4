"""``@projector`` and ``@on``: what the user writes, and the identity under which a handler's markers are kept."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, Generic, ParamSpec, TypeVar, overload

from sqlalchemy.orm import Session, sessionmaker

from .apply import Chunk, aapply, apply
from .asyncio_names import AsyncSession, async_sessionmaker
from .errors import HandlerDefinitionError, UnhandledMessage
from .extractors import attribute_or_key
from .handler import Handler, On, Settings, check_kind, options_for
from .message import Route, envelope, known_id, route_of, valid_formerly, valid_handler
from .outcome import Delivery
from .reads import DeclaredReads, Reads
from .retry import RetryPolicy
from .sessions import UnitOptions, check_session_factory

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type[Any])
P = ParamSpec("P")
R = TypeVar("R")

_ON = "__projector_dedup_on__"
_PROJECTOR = "__projector_dedup_projector__"


def on(
    *events: Route,
    name: str | None = None,
    formerly: Collection[str] = (),
    subclasses: bool = False,
    envelope: bool = False,
    batch: bool = False,
    reads: Reads | None = None,
) -> Callable[[F], F]:
    """Mark a method, or a function, as the handler of events: classes (the exact type) or names.

    ``name`` pins the method's part of the identity, so that it can be renamed; ``formerly`` lists what that part was
    before, or, with a dot in it, the whole identity of a handler that comes from another projector: while it is
    there, code of both names may run at once (README, "Renaming a projector"). ``subclasses`` also takes events of
    derived classes. ``envelope`` hands over the ``Message`` instead of its body. The handler is called
    ``(event, session)``; it must not commit. ``batch`` calls it ``(events, session)`` instead, with the list of all
    that ``deliver_batch`` found new, in their order, for work by sets; ``deliver`` gives a list of one.

    ``reads`` says which rows the handler will ask for by ``session.get``: for each entity a dotted path to its key in
    the event, a tuple of paths for a composite key, a list of these for several rows, or a function of the event that
    lists the keys. They then come with the claim, or together for a whole batch, which saves round trips. It is advice:
    a handler that asks for other rows gets them as ever, and one that asks for none loses nothing but time.
    """
    if not events or not all(isinstance(event, (type, str)) for event in events):
        raise HandlerDefinitionError("@on takes the events it handles: classes or names, as in @on(PaymentReceived)")

    former = valid_formerly(formerly, HandlerDefinitionError)
    declared = None if reads is None else DeclaredReads(reads)

    def mark(function: F) -> F:
        setattr(function, _ON, On(events, name, subclasses, envelope, former, batch, declared))
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
    """Make a class with ``@on`` methods, or a function under ``@on``, a projector. Calling it stays what it was.

    ``idempotent=True``: each message is applied once, by a marker that commits with the handler's writes. Without
    it, handlers run in a unit of work all the same, but no marker is read or written and no table is needed.
    ``name`` pins the identity, so that the class can be moved; without it, it is ``module.Class``. ``formerly``
    lists what it was before the class was renamed or moved (of a function, the whole identity): each message is then
    claimed under these names too, so that code of both names may run at once. ``read_models`` names entities that many
    workers hit at once: they are read under lock (docs/adr/0003-lost-updates.md). ``isolation`` overrides the
    transaction's isolation level.
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
    def __call__(self, target: C, /) -> C: ...  # type: ignore[overload-overlap]  # the same
    @overload
    def __call__(self, target: Callable[P, R], /) -> FunctionProjector[P, R]: ...
    def __call__(self, target: Any, /) -> Any:
        """A class is marked and returned; a function becomes a ``FunctionProjector``."""
        if isinstance(target, type):
            setattr(target, _PROJECTOR, self._settings)
            return target
        return FunctionProjector(target, self._settings)


class FunctionProjector(Generic[P, R]):
    """A function that is a projector. It is called as before; ``deliver`` applies one event once."""

    def __init__(self, function: Callable[P, R], settings: Settings) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        marked = getattr(function, _ON, None)
        if marked is None:
            raise HandlerDefinitionError(
                f"{function.__qualname__} is not under @on: write @projector(...) above @on(Event) above the function"
            )
        owner = settings.name or function.__module__
        identity = settings.name or f"{function.__module__}.{function.__qualname__}"
        if marked.name is not None:
            identity = f"{owner}.{marked.name}"
        former = {*settings.formerly, *_joined([owner], marked.former_parts)}
        self.handler = _handler(identity, former, function, marked, settings, pinned=_pinned(function, settings))

    @functools.cached_property
    def _options(self) -> UnitOptions:
        return options_for(self.handler)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """The function, as it was."""
        return self._function(*args, **kwargs)

    def deliver(self, event: object, *, message_id: object = None, session_factory: sessionmaker[Session]) -> Delivery:
        """Apply the event once, in a unit of work of its own. It returns only if the message may be acknowledged."""
        check_session_factory(session_factory, asynchronous=False)
        check_kind(self.handler, asynchronous=False)
        chunk = self._chunk(event, message_id)
        return self._delivery(chunk, apply(chunk, session_factory, self._options, RetryPolicy()))

    async def adeliver(
        self, event: object, *, message_id: object = None, session_factory: async_sessionmaker[AsyncSession]
    ) -> Delivery:
        """``deliver`` for an ``async def`` function."""
        check_session_factory(session_factory, asynchronous=True)
        check_kind(self.handler, asynchronous=True)
        chunk = self._chunk(event, message_id)
        return self._delivery(chunk, await aapply(chunk, session_factory, self._options, RetryPolicy()))

    def _chunk(self, event: object, message_id: object) -> Chunk:
        message = envelope(event, message_id, attribute_or_key, needed=self.handler.idempotent)
        if not self.handler.wants(route_of(message)):
            raise UnhandledMessage(f"{self.handler.identity} does not handle {type(message.body).__name__}")
        return Chunk(self.handler, [message])

    def _delivery(self, chunk: Chunk, durable: bool) -> Delivery:
        known = known_id(chunk.messages[0], needed=self.handler.idempotent)
        return Delivery(known, {self.handler.identity: chunk.outcomes[0]}, durable)


# Identity --------------------------------------------------------------------------------------------------------


def handlers_of(target: Any) -> list[Handler]:
    """The handlers of an instance of a ``@projector`` class, or of a function projector, as they were written."""
    if isinstance(target, FunctionProjector):
        return [target.handler]
    if isinstance(target, type):
        raise HandlerDefinitionError(f"give the dispatcher an instance, {target.__name__}(), not the class")
    cls = type(target)
    settings: Settings | None = getattr(cls, _PROJECTOR, None)
    if settings is None:
        raise HandlerDefinitionError(f"{cls.__qualname__} is not a projector; decorate it with @projector(...)")
    if _PROJECTOR not in vars(cls):  # inherited: names, former ones too, stay with the class that they were given to
        settings = replace(settings, name=None, formerly=())
    marked: dict[str, On] = {
        name: _inherited(getattr(function, _ON), base, cls)
        for base in reversed(cls.__mro__)
        for name, member in vars(base).items()
        for function in (member, getattr(member, "__func__", None))  # @on may be under @staticmethod or @classmethod
        if hasattr(function, _ON)
    }
    if not marked:
        raise HandlerDefinitionError(f"{cls.__qualname__} has no handler; mark its methods with @on(Event)")
    owner = settings.name or f"{cls.__module__}.{cls.__qualname__}"
    owners, pinned = [owner, *settings.formerly], _pinned(cls, settings)
    return [
        _handler(
            f"{owner}.{on.name or name}",
            _joined(owners, [on.name or name, *on.former_parts]),
            getattr(target, name),
            on,
            settings,
            pinned=pinned,
        )
        for name, on in marked.items()
    ]


def _inherited(on: On, base: type[Any], cls: type[Any]) -> On:
    """Whose messages a handler of another projector applied is for the projector to say that says so, not its heirs."""
    return replace(on, formerly=on.former_parts) if base is not cls and _PROJECTOR in vars(base) else on


def _joined(owners: Iterable[str], parts: Iterable[str]) -> set[str]:
    return {f"{owner}.{part}" for owner, part in product(owners, parts)}


def _pinned(target: Any, settings: Settings) -> bool:
    return settings.name is not None or not (target.__module__ == "__main__" or "<" in target.__qualname__)


def _handler(
    identity: str, former: set[str], function: Callable[..., Any], on: On, settings: Settings, *, pinned: bool
) -> Handler:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise HandlerDefinitionError(f"{identity} is a generator: calling it would run nothing; do not yield in it")
    if settings.idempotent and not pinned:
        raise HandlerDefinitionError(
            f"{identity} would have another identity when it runs from another place, and messages would be applied "
            'again; pin it with @projector(idempotent=True, name="...")'
        )
    if (settings.formerly or on.formerly) and not settings.idempotent:
        raise HandlerDefinitionError(
            f"{identity} has former names, but no markers under any name: formerly=[...] needs "
            "@projector(idempotent=True)"
        )
    former_identities = valid_formerly({*former, *on.former_identities} - {identity}, HandlerDefinitionError)
    return Handler(valid_handler(identity), function, on, settings, former_identities)
