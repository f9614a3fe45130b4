"""A handler: what it is called, what it wants, how it is run."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from .errors import HandlerDefinitionError
from .message import Message, Route
from .reads import DeclaredReads
from .sessions import UnitOptions


@dataclass(frozen=True)
class On:
    """What ``@on`` says of a method."""

    routes: tuple[Route, ...]
    name: str | None
    subclasses: bool
    envelope: bool
    formerly: tuple[str, ...]
    batch: bool
    reads: DeclaredReads | None

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

    @cached_property
    def idempotent(self) -> bool:
        """Whether it claims a marker."""
        return self.projector.idempotent

    @property
    def is_async(self) -> bool:
        """Whether calling it is known to give something to await."""
        return inspect.iscoroutinefunction(self.function)

    def wants(self, route: Route) -> bool:
        """Whether it handles messages that are routed by that."""
        if route in self.on.routes:
            return True
        return (
            self.on.subclasses
            and isinstance(route, type)
            and any(isinstance(wanted, type) and issubclass(route, wanted) for wanted in self.on.routes)
        )

    def given(self, messages: Sequence[Message]) -> list[Any]:
        """What the user's code gets of each."""
        return list(messages) if self.on.envelope else [message.body for message in messages]

    def calls(self, events: list[Any], session: Any) -> Iterator[Callable[[], Any]]:
        """The user's code, to be run for each of ``events`` in their order; once for all of them if it wants that."""
        for each in [list(events)] if self.on.batch else events:
            yield partial(self.function, each, session)


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


def options_for(handler: Handler, options: UnitOptions | None = None, *, read_ahead: bool = True) -> UnitOptions:
    """The dispatcher's options, with what the projector says of its own."""
    options, own = options or UnitOptions(), handler.projector
    ahead = None
    if read_ahead:
        from .read_ahead import ReadingAhead  # the only import of it: the library delivers without

        ahead = ReadingAhead(handler.identity, handler.on.reads, own.read_models, options.tables)
    isolation = own.isolation or options.isolation
    return dataclasses.replace(options, read_models=own.read_models, isolation=isolation, read_ahead=ahead)
