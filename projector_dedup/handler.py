"""One handler of one message, applied once: open a unit of work, claim, apply, commit. Every delivery passes here."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session, sessionmaker

from .asyncio_names import AsyncSession, async_sessionmaker
from .errors import HandlerDefinitionError
from .message import Message, Route, printable
from .outcome import Outcome
from .retry import Attempts, RetryPolicy
from .sessions import UnitOptions
from .unit_of_work import AsyncUnitOfWork, UnitOfWork
from .work import Work

logger = logging.getLogger("projector_dedup")


@dataclass(frozen=True)
class On:
    """What ``@on`` says of a method."""

    routes: tuple[Route, ...]
    name: str | None
    subclasses: bool
    envelope: bool
    formerly: tuple[str, ...] = ()

    @property
    def former_parts(self) -> tuple[str, ...]:
        """What the method's part of the identity has been."""
        return tuple(name for name in self.formerly if "." not in name)

    @property
    def former_identities(self) -> tuple[str, ...]:
        """What the whole identity has been: the handler comes from another projector."""
        return tuple(name for name in self.formerly if "." in name)


@dataclass(frozen=True)
class Settings:
    """What ``@projector`` says of a class or function."""

    idempotent: bool
    name: str | None
    read_models: tuple[type[Any], ...]
    isolation: str | None
    formerly: tuple[str, ...] = ()


@dataclass(frozen=True)
class Handler:
    """One handler of one projector: what it is called, what it wants, how it is run."""

    identity: str
    function: Callable[[Any, Any], Any]
    on: On
    projector: Settings
    formerly: tuple[str, ...] = ()  #: identities under which other versions of it may have applied a message

    @property
    def idempotent(self) -> bool:
        """Whether it claims a marker."""
        return self.projector.idempotent

    @property
    def is_async(self) -> bool:
        """Whether calling it is known to give something to await."""
        return inspect.iscoroutinefunction(self.function)

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


def check_kind(handler: Handler, *, asynchronous: bool) -> None:
    """Refuse an async handler where nothing would await it, and the reverse."""
    if not handler.is_async and inspect.iscoroutinefunction(inspect.unwrap(handler.function)):
        return  # a plain wrapper of an async function returns its coroutine, or runs it: the result will tell
    if handler.is_async != asynchronous:
        has, wants = ("async def", "AsyncDispatcher") if handler.is_async else ("plain def", "Dispatcher")
        raise HandlerDefinitionError(f"{handler.identity} is {has}: deliver it through {wants}")


def refuse_shared_names(one: Handler, other: Handler) -> None:
    """Refuse two handlers that claim one message under one name: the second would find the first one's marker."""
    shared = {one.identity, *one.formerly} & {other.identity, *other.formerly}
    if not (shared and one.idempotent and other.idempotent):
        return
    if set(one.on.routes).isdisjoint(other.on.routes) and not (one.on.subclasses or other.on.subclasses):
        return  # a handler that was split by event: no message comes to both
    raise HandlerDefinitionError(
        f"{one.identity} and {other.identity} both claim messages as {min(shared)}, so that each would skip what the "
        "other applied; name it in the formerly=[...] of the one that goes on with its read model"
    )


def options_for(handler: Handler, options: UnitOptions | None = None) -> UnitOptions:
    """The dispatcher's options, with what the projector says of its own."""
    options = options or UnitOptions()
    own = handler.projector
    return dataclasses.replace(options, read_models=own.read_models, isolation=own.isolation or options.isolation)


def apply(
    handler: Handler,
    message: Message,
    factory: sessionmaker[Session],
    options: UnitOptions,
    policy: RetryPolicy,
) -> tuple[Outcome, bool]:
    """Apply one message by one handler, once. Returns what is settled, and whether it is durable; else raises."""
    attempts = Attempts(policy, marked=handler.idempotent)
    while True:
        uow = UnitOfWork.with_options(factory, options)
        try:
            with uow:
                if not handler.idempotent:
                    uow.begin()
                elif uow.claim(
                    message.id, handler.identity, formerly=handler.formerly, occurred_at=message.occurred_at
                ):
                    attempts.claimed()
                else:
                    return _settled(Outcome.DUPLICATE, handler, message, attempts, uow.work.durable)
                _check_result(handler, handler.call(message, uow.session), asynchronous=False)
                uow.commit()
            return _settled(Outcome.APPLIED, handler, message, attempts, uow.work.durable)
        except Exception as error:  # noqa: BLE001  # delay_after raises it, unless another attempt is due
            delay = _delay_after(error, attempts, uow.work)
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
                elif await uow.claim(
                    message.id, handler.identity, formerly=handler.formerly, occurred_at=message.occurred_at
                ):
                    attempts.claimed()
                else:
                    return _settled(Outcome.DUPLICATE, handler, message, attempts, uow.work.durable)
                awaitable = handler.call(message, uow.session)
                _check_result(handler, awaitable, asynchronous=True)
                _check_result(handler, await awaitable, asynchronous=False)
                await uow.commit()
            return _settled(Outcome.APPLIED, handler, message, attempts, uow.work.durable)
        except Exception as error:  # noqa: BLE001  # delay_after raises it, unless another attempt is due
            delay = _delay_after(error, attempts, uow.work)
            _log_retry(handler, message, attempts, error)
        await asyncio.sleep(delay)


def _delay_after(error: Exception, attempts: Attempts, work: Work) -> float:
    return attempts.delay_after(error, work.cause_of(error), work.dialect, commit_was_sent=work.commit_was_sent)


def _check_result(handler: Handler, result: object, *, asynchronous: bool) -> None:
    awaitable = inspect.isawaitable(result)
    if awaitable == asynchronous and not (inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return
    if inspect.iscoroutine(result):
        result.close()
    raise HandlerDefinitionError(
        f"{handler.identity} returned {type(result).__name__}, which "
        + (
            "was not awaited: its work was not done"
            if awaitable or inspect.isgenerator(result)
            else "cannot be awaited"
        )
    )


def _settled(
    outcome: Outcome, handler: Handler, message: Message, attempts: Attempts, durable: bool
) -> tuple[Outcome, bool]:
    duplicate = outcome is Outcome.DUPLICATE
    level = logging.INFO if duplicate else logging.DEBUG
    if not logger.isEnabledFor(level):  # what follows escapes texts, for every message
        return outcome, durable
    after_unknown = duplicate and attempts.unknown is not None
    logger.log(
        level,
        "%s%s: message %s, handler %s",
        outcome.value,
        " (after_unknown_commit)" if after_unknown else "",
        _log_id(message),
        printable(handler.identity),
        extra=_extra(handler, message, outcome.value, attempts) | {"after_unknown_commit": after_unknown},
    )
    return outcome, durable


def _log_retry(handler: Handler, message: Message, attempts: Attempts, error: Exception) -> None:
    logger.info(
        "retry after %s: message %s, handler %s",
        type(error).__name__,
        _log_id(message),
        printable(handler.identity),
        extra=_extra(handler, message, "retry", attempts),
    )


def _extra(handler: Handler, message: Message, outcome: str, attempts: Attempts) -> dict[str, Any]:
    return {
        "message_id": _log_id(message),
        "handler": printable(handler.identity),
        "outcome": outcome,
        "attempts": attempts.number,
    }


def _log_id(message: Message) -> str:
    return printable(str(message.id))[:600]
