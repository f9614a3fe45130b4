"""Routing: which handlers want a message, and what their outcomes come to together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from sqlalchemy.orm import Session, sessionmaker

from .apply import Chunk, aapply, apply
from .asyncio_names import AsyncSession, async_sessionmaker
from .batch import aapply_batch, apply_batch
from .errors import HandlerDefinitionError, RefusedError, UnhandledMessage
from .extractors import attribute_or_key
from .handler import Handler, check_kind, options_for, refuse_shared_names
from .message import IdExtractor, Message, Route, envelope, id_text, known_id, printable, route_of
from .outcome import Delivery
from .projector import handlers_of
from .results import BatchResults, Results
from .retry import RetryPolicy
from .sessions import UnitOptions, check_session_factory
from .tables import DedupTables, default_tables


class _Routing:
    """What a dispatcher knows before a message comes; nothing of it changes while messages are delivered."""

    _asynchronous: bool

    def __init__(
        self,
        session_factory: Any,
        *projectors: object,
        message_id: IdExtractor = attribute_or_key,
        unhandled: Literal["raise", "ignore"] = "raise",
        tables: DedupTables = default_tables,
        retry: RetryPolicy | None = None,
        claim_timeout: float | None = None,
        isolation: str | None = None,
        strict: bool = False,
        read_ahead: bool = True,
    ) -> None:
        check_session_factory(session_factory, asynchronous=self._asynchronous)
        if unhandled not in ("raise", "ignore"):
            raise ValueError(f"unhandled is 'raise' or 'ignore', not {unhandled!r}")
        if not callable(message_id):
            raise ValueError("message_id takes an extractor, such as by_path('headers.id')")
        self._factory = session_factory
        self._extractor = message_id
        self._ignore_unhandled = unhandled == "ignore"
        self._policy = retry or RetryPolicy()
        shared = UnitOptions(tables, claim_timeout, isolation, strict=strict)
        self._handlers: dict[str, Handler] = {}
        self._options: dict[str, UnitOptions] = {}
        for handler in (handler for target in projectors for handler in handlers_of(target)):
            if handler.identity in self._handlers:
                raise HandlerDefinitionError(
                    f"two handlers are called {handler.identity}: one would skip what the other applied; give one "
                    "of them a name of its own"
                )
            check_kind(handler, asynchronous=self._asynchronous)
            for other in self._handlers.values():
                refuse_shared_names(handler, other)
            self._handlers[handler.identity] = handler
            self._options[handler.identity] = options_for(handler, shared, read_ahead=read_ahead)
        if not self._handlers:
            raise HandlerDefinitionError("a dispatcher without projectors handles nothing: give it some")
        routes = {route for handler in self._handlers.values() for route in handler.on.routes}
        self._wanting = {route: self._who_wants(route) for route in routes}

    def _who_wants(self, route: Route) -> tuple[list[Handler], bool]:
        """The handlers for it, and whether any of them needs an id."""
        handlers = [handler for handler in self._handlers.values() if handler.wants(route)]
        return handlers, any(handler.idempotent for handler in handlers)

    @property
    def identities(self) -> frozenset[str]:
        """What its handlers are, or were, called in the marker table, were they to claim."""
        return frozenset(name for handler in self._handlers.values() for name in (handler.identity, *handler.formerly))

    def permit_external_transaction(self, permitted: bool) -> bool:
        """For ``testing.external_transaction``. Returns what was permitted before."""
        before = any(options.external for options in self._options.values())
        for options in self._options.values():
            options.external = permitted
        return before

    def _route(self, event: object, message_id: object) -> tuple[Message, list[Handler], str | None]:
        route = route_of(event)
        handlers, needed = self._wanting.get(route) or self._who_wants(route)
        message = envelope(event, message_id, self._extractor if needed else attribute_or_key, needed=needed)
        if not handlers and not self._ignore_unhandled:
            name = route if isinstance(route, str) else f"{route.__module__}.{route.__qualname__}"
            raise UnhandledMessage(
                f"no handler for {printable(name)}; register one with @on, name the message's type if it has one, "
                "Message(id, body, type=...), or say unhandled='ignore' if that is meant"
            )
        return message, handlers, known_id(message, needed=needed)

    def _route_all(self, events: Iterable[object]) -> BatchResults:
        if isinstance(events, (str, bytes, Mapping, Message)):
            raise RefusedError(
                f"deliver_batch takes messages, in a list say; this is one {type(events).__name__}: deliver(event)"
            )
        batch = BatchResults()
        for event in events:
            try:
                batch.routed(*self._route(event, None))
            except Exception as error:  # noqa: BLE001  # this message's own, its id's extractor's say
                batch.not_routed(id_text(event) if isinstance(event, Message) else None, error)
        return batch


class Dispatcher(_Routing):
    """Delivers messages to the handlers of its projectors, each in a unit of work of its own.

    ``session_factory`` is a ``sessionmaker`` on one engine; every attempt takes a new session from it. The
    dispatcher may be shared by threads. ``message_id`` finds the id in an event; ``unhandled="ignore"`` settles
    messages that no handler wants as ``SKIPPED``; ``tables`` are those of ``make_tables``; ``retry`` bounds what is
    tried again; ``claim_timeout`` (seconds), ``isolation`` and ``strict`` are those of ``UnitOptions``.
    ``read_ahead=False`` reads no row before a handler asks for it: neither those that ``@on(reads=...)`` declares, nor
    those of a batch together. Handlers see the same either way.
    """

    _asynchronous = False
    _factory: sessionmaker[Session]

    def deliver(self, event: object, *, message_id: object = None) -> Delivery:
        """Deliver one message. **That it returns means that the message may be acknowledged**; else it raises.

        ``message_id`` wins over the dispatcher's extractor. With several handlers all are tried, in the order of
        registration, and failures are raised together as ``DeliveryFailed``.
        """
        message, handlers, known = self._route(event, message_id)
        results = Results(known, handlers)
        for handler in handlers:
            chunk = Chunk(handler, [message])
            try:
                durable = apply(chunk, self._factory, self._options[handler.identity], self._policy)
                results.settled(handler, chunk.outcomes[0], durable)
            except Exception as error:  # noqa: BLE001  # kept, and raised when every handler was tried
                results.failed(handler, error)
        return results.settled_delivery()

    def deliver_batch(self, events: Iterable[object]) -> list[Delivery]:
        """Deliver many messages at once: for each handler one claim, one transaction, one commit.

        An event whose body does not carry its id comes as a ``Message``. Handlers are called in the order of
        ``events``; a message that comes twice is applied once. It returns, in that order, only if every message may be
        acknowledged. Else it raises ``BatchFailed``: a message that fails is found by trying fewer at a time, and
        every other one is applied. Handlers run again for that, so the advice on side effects counts double. To
        deliver the same batch again is safe at any time.
        """
        batch = self._route_all(events)
        for handler in self._handlers.values():
            if messages := batch.messages_for(handler):
                options = self._options[handler.identity]
                batch.handled(handler, *apply_batch(handler, messages, self._factory, options, self._policy))
        return batch.settled_deliveries()


class AsyncDispatcher(_Routing):
    """``Dispatcher`` for ``async def`` handlers, on an ``async_sessionmaker``. Tasks may share it."""

    _asynchronous = True
    _factory: async_sessionmaker[AsyncSession]

    async def deliver(self, event: object, *, message_id: object = None) -> Delivery:
        """As ``Dispatcher.deliver``; a cancellation leaves the message applied or not, and nothing in between."""
        message, handlers, known = self._route(event, message_id)
        results = Results(known, handlers)
        for handler in handlers:
            chunk = Chunk(handler, [message])
            try:
                durable = await aapply(chunk, self._factory, self._options[handler.identity], self._policy)
                results.settled(handler, chunk.outcomes[0], durable)
            except Exception as error:  # noqa: BLE001  # kept, and raised when every handler was tried
                results.failed(handler, error)
        return results.settled_delivery()

    async def deliver_batch(self, events: Iterable[object]) -> list[Delivery]:
        """As ``Dispatcher.deliver_batch``."""
        batch = self._route_all(events)
        for handler in self._handlers.values():
            if messages := batch.messages_for(handler):
                options = self._options[handler.identity]
                batch.handled(handler, *await aapply_batch(handler, messages, self._factory, options, self._policy))
        return batch.settled_deliveries()
