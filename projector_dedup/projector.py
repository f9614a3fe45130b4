"""``@projector`` and ``@on``, the identity of a handler, and the wrapper: open, claim, apply, commit, once."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, overload

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from .errors import HandlerDefinitionError, UnhandledMessage
from .message import Message, Route, attribute_or_key, envelope, printable, valid_handler, valid_message_id
from .outcome import Delivery, Outcome
from .retry import Attempts, RetryPolicy
from .sessions import UnitOptions, check_session_factory
from .unit_of_work import AsyncUnitOfWork, UnitOfWork

logger = logging.getLogger("projector_dedup")

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type[Any])
P = ParamSpec("P")
R = TypeVar("R")

_ON = "__projector_dedup_on__"
_PROJECTOR = "__projector_dedup_projector__"


@dataclass(frozen=True)
class _On:
    routes: tuple[Route, ...]
    name: str | None
    subclasses: bool
    envelope: bool


@dataclass(frozen=True)
class _Projector:
    idempotent: bool
    name: str | None
    read_models: tuple[type[Any], ...]
    isolation: str | None


@dataclass(frozen=True)
class Handler:
    """One handler of one projector: what it is called, what it wants, how it is run."""

    identity: str
    function: Callable[[Any, Any], Any]
    on: _On
    projector: _Projector

    @property
    def idempotent(self) -> bool:
        """Whether it claims a marker."""
        return self.projector.idempotent

    @property
    def is_async(self) -> bool:
        """Whether calling it gives something to await."""
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(inspect.unwrap(self.function))

    def wants(self, message: Message) -> bool:
        """By the message's ``type`` if it names one, else by the class of its body."""
        route = type(message.body) if message.type is None else message.type
        if route in self.on.routes:
            return True
        return (
            self.on.subclasses
            and isinstance(route, type)
            and any(isinstance(wanted, type) and issubclass(route, wanted) for wanted in self.on.routes)
        )

    def call(self, message: Message, session: Any) -> Any:
        """Run the user's code."""
        return self.function(message if self.on.envelope else message.body, session)


# What the user writes --------------------------------------------------------------------------------------------


def on(
    *events: Route, name: str | None = None, subclasses: bool = False, envelope: bool = False
) -> Callable[[F], F]:
    """Mark a method, or a function, as the handler of events: classes (the exact type) or names.

    ``name`` pins the method's part of the identity, so that it can be renamed. ``subclasses`` also takes events of
    derived classes. ``envelope`` hands over the ``Message`` instead of its body. The handler is called
    ``(event, session)``; it must not commit.
    """
    if not events or not all(isinstance(event, (type, str)) for event in events):
        raise HandlerDefinitionError("@on takes the events it handles: classes or names, as in @on(PaymentReceived)")

    def mark(function: F) -> F:
        setattr(function, _ON, _On(events, name, subclasses, envelope))
        return function

    return mark


@overload
def projector(target: C, /) -> C: ...
@overload
def projector(target: Callable[P, R], /) -> FunctionProjector[P, R]: ...
@overload
def projector(
    *,
    idempotent: bool = ...,
    name: str | None = ...,
    read_models: Sequence[type[Any]] = ...,
    isolation: str | None = ...,
) -> _Decorator: ...
def projector(
    target: Any = None,
    /,
    *,
    idempotent: bool = False,
    name: str | None = None,
    read_models: Sequence[type[Any]] = (),
    isolation: str | None = None,
) -> Any:
    """Make a class with ``@on`` methods, or a function under ``@on``, a projector. Calling it stays what it was.

    ``idempotent=True``: each message is applied once, by a marker that commits with the handler's writes. Without
    it, handlers run in a unit of work all the same, but no marker is read or written and no table is needed.
    ``name`` pins the identity, so that the class can be moved; without it, it is ``module.Class``. ``read_models``
    names entities that many workers hit at once: they are read under lock (docs/adr/0003-lost-updates.md).
    ``isolation`` overrides the transaction's isolation level.
    """
    settings = _Projector(idempotent, name, tuple(read_models), isolation)
    decorate = _Decorator(settings)
    return decorate if target is None else decorate(target)


class _Decorator:
    def __init__(self, settings: _Projector) -> None:
        self._settings = settings

    @overload
    def __call__(self, target: C, /) -> C: ...
    @overload
    def __call__(self, target: Callable[P, R], /) -> FunctionProjector[P, R]: ...
    def __call__(self, target: Any, /) -> Any:
        if isinstance(target, type):
            setattr(target, _PROJECTOR, self._settings)
            return target
        return FunctionProjector(target, self._settings)


class FunctionProjector(Generic[P, R]):
    """A function that is a projector. It is called as before; ``deliver`` applies one event once."""

    def __init__(self, function: Callable[P, R], settings: _Projector) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        marked = getattr(function, _ON, None)
        if marked is None:
            raise HandlerDefinitionError(
                f"{function.__qualname__} is not under @on: write @projector(...) above @on(Event) above the function"
            )
        identity = settings.name or f"{function.__module__}.{function.__qualname__}"
        if marked.name is not None:
            identity = f"{settings.name or function.__module__}.{marked.name}"
        self.handler = _handler(identity, function, marked, settings, pinned=_pinned(function, settings))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._function(*args, **kwargs)

    def deliver(
        self, event: object, *, message_id: object = None, session_factory: sessionmaker[Session]
    ) -> Delivery:
        """Apply the event once, in a unit of work of its own. It returns only if the message may be acknowledged."""
        check_session_factory(session_factory, asynchronous=False)
        check_kind(self.handler, asynchronous=False)
        message = self._message(event, message_id)
        outcome, durable = apply(self.handler, message, session_factory, options_for(self.handler), RetryPolicy())
        return Delivery(known_id(message, [self.handler]), {self.handler.identity: outcome}, durable)

    async def adeliver(
        self, event: object, *, message_id: object = None, session_factory: async_sessionmaker[AsyncSession]
    ) -> Delivery:
        """``deliver`` for an ``async def`` function."""
        check_session_factory(session_factory, asynchronous=True)
        check_kind(self.handler, asynchronous=True)
        message = self._message(event, message_id)
        outcome, durable = await aapply(self.handler, message, session_factory, options_for(self.handler), RetryPolicy())
        return Delivery(known_id(message, [self.handler]), {self.handler.identity: outcome}, durable)

    def _message(self, event: object, message_id: object) -> Message:
        message = envelope(event, message_id, attribute_or_key)
        if not self.handler.wants(message):
            raise UnhandledMessage(f"{self.handler.identity} does not handle {type(message.body).__name__}")
        return message


# Identity --------------------------------------------------------------------------------------------------------


def handlers_of(target: Any) -> list[Handler]:
    """The handlers of an instance of a ``@projector`` class, or of a function projector, as they were written."""
    if isinstance(target, FunctionProjector):
        return [target.handler]
    if isinstance(target, type):
        raise HandlerDefinitionError(f"give the dispatcher an instance, {target.__name__}(), not the class")
    cls = type(target)
    settings: _Projector | None = getattr(cls, _PROJECTOR, None)
    if settings is None:
        raise HandlerDefinitionError(f"{cls.__qualname__} is not a projector; decorate it with @projector(...)")
    if _PROJECTOR not in vars(cls):  # inherited: a pinned name stays with the class that pinned it
        settings = _Projector(settings.idempotent, None, settings.read_models, settings.isolation)
    marked = {
        name: getattr(member, _ON) for base in reversed(cls.__mro__) for name, member in vars(base).items()
        if hasattr(member, _ON)
    }
    if not marked:
        raise HandlerDefinitionError(f"{cls.__qualname__} has no handler; mark its methods with @on(Event)")
    owner = settings.name or f"{cls.__module__}.{cls.__qualname__}"
    return [
        _handler(f"{owner}.{on.name or name}", getattr(target, name), on, settings, pinned=_pinned(cls, settings))
        for name, on in marked.items()
    ]


def _pinned(target: Any, settings: _Projector) -> bool:
    return settings.name is not None or not (target.__module__ == "__main__" or "<" in target.__qualname__)


def _handler(identity: str, function: Callable[..., Any], on: _On, settings: _Projector, *, pinned: bool) -> Handler:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise HandlerDefinitionError(f"{identity} is a generator: calling it would run nothing; do not yield in it")
    if settings.idempotent and not pinned:
        raise HandlerDefinitionError(
            f"{identity} would have another identity when it runs from another place, and messages would be applied "
            'again; pin it with @projector(idempotent=True, name="...")'
        )
    return Handler(valid_handler(identity), function, on, settings)


def check_kind(handler: Handler, *, asynchronous: bool) -> None:
    """Refuse an async handler where nothing would await it, and the reverse."""
    if handler.is_async != asynchronous:
        has, wants = ("async def", "AsyncDispatcher") if handler.is_async else ("plain def", "Dispatcher")
        raise HandlerDefinitionError(f"{handler.identity} is {has}: deliver it through {wants}")


# The wrapper -----------------------------------------------------------------------------------------------------


def options_for(handler: Handler, options: UnitOptions | None = None) -> UnitOptions:
    """The dispatcher's options, with what the projector says of its own."""
    options = options or UnitOptions()
    own = handler.projector
    return dataclasses.replace(
        options, read_models=own.read_models, isolation=own.isolation or options.isolation
    )


def apply(
    handler: Handler, message: Message, factory: sessionmaker[Session], options: UnitOptions, policy: RetryPolicy
) -> tuple[Outcome, bool]:
    """Apply one message by one handler, once. Returns what is settled, and whether it is durable; else raises."""
    attempts = Attempts(policy, marked=handler.idempotent)
    while True:
        uow = UnitOfWork.with_options(factory, options)
        try:
            with uow:
                if not handler.idempotent:
                    uow.begin()
                elif uow.claim(message.id, handler.identity, occurred_at=message.occurred_at):
                    attempts.claimed()
                else:
                    return _settled(Outcome.DUPLICATE, handler, message, attempts, uow.work.durable)
                _check_result(handler, handler.call(message, uow.session), asynchronous=False)
                uow.commit()
            return _settled(Outcome.APPLIED, handler, message, attempts, uow.work.durable)
        except Exception as error:
            delay = attempts.delay_after(error, uow.work.cause_of(error), uow.work.dialect)
            _log_retry(handler, message, attempts, error)
        time.sleep(delay)


async def aapply(
    handler: Handler,
    message: Message,
    factory: async_sessionmaker[AsyncSession],
    options: UnitOptions,
    policy: RetryPolicy,
) -> tuple[Outcome, bool]:
    """``apply``, awaited."""
    attempts = Attempts(policy, marked=handler.idempotent)
    while True:
        uow = AsyncUnitOfWork.with_options(factory, options)
        try:
            async with uow:
                if not handler.idempotent:
                    await uow.begin()
                elif await uow.claim(message.id, handler.identity, occurred_at=message.occurred_at):
                    attempts.claimed()
                else:
                    return _settled(Outcome.DUPLICATE, handler, message, attempts, uow.work.durable)
                awaitable = handler.call(message, uow.session)
                _check_result(handler, awaitable, asynchronous=True)
                await awaitable
                await uow.commit()
            return _settled(Outcome.APPLIED, handler, message, attempts, uow.work.durable)
        except Exception as error:
            delay = attempts.delay_after(error, uow.work.cause_of(error), uow.work.dialect)
            _log_retry(handler, message, attempts, error)
        await asyncio.sleep(delay)


def _check_result(handler: Handler, result: object, *, asynchronous: bool) -> None:
    awaitable = inspect.isawaitable(result)
    if awaitable == asynchronous and not inspect.isgenerator(result):
        return
    if inspect.iscoroutine(result):
        result.close()
    raise HandlerDefinitionError(
        f"{handler.identity} returned {type(result).__name__}, which "
        + ("was not awaited: its work was not done" if awaitable or inspect.isgenerator(result) else "cannot be awaited")
    )


def known_id(message: Message, handlers: Sequence[Handler]) -> str | None:
    """The id under which the message is claimed; None if no handler claims it and it has none."""
    if message.id is None and not any(handler.idempotent for handler in handlers):
        return None
    return valid_message_id(message.id)


def _settled(
    outcome: Outcome, handler: Handler, message: Message, attempts: Attempts, durable: bool
) -> tuple[Outcome, bool]:
    duplicate = outcome is Outcome.DUPLICATE
    after_unknown = duplicate and attempts.unknown is not None
    logger.log(
        logging.INFO if duplicate else logging.DEBUG,
        "%s%s: message %s, handler %s",
        outcome.value,
        " (after_unknown_commit)" if after_unknown else "",
        _log_id(message),
        handler.identity,
        extra=_extra(handler, message, outcome.value, attempts) | {"after_unknown_commit": after_unknown},
    )
    return outcome, durable


def _log_retry(handler: Handler, message: Message, attempts: Attempts, error: Exception) -> None:
    logger.info(
        "retry after %s: message %s, handler %s",
        type(error).__name__,
        _log_id(message),
        handler.identity,
        extra=_extra(handler, message, "retry", attempts),
    )


def _extra(handler: Handler, message: Message, outcome: str, attempts: Attempts) -> dict[str, Any]:
    return {
        "message_id": _log_id(message),
        "handler": handler.identity,
        "outcome": outcome,
        "attempts": attempts.number,
    }


def _log_id(message: Message) -> str:
    return printable(str(message.id))[:600]
