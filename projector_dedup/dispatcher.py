"""Dispatchers: deliver a message or a batch to every handler that takes it, and collect the outcomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from sqlalchemy.orm import sessionmaker
from sqlalchemy.util import greenlet_spawn

from .asyncio_names import async_sessionmaker
from .batch import Result, deliver_batch
from .delivery import Chunk, deliver
from .errors import BatchFailed, DeliveryFailed, HandlerDefinitionError, RefusedError, UnhandledMessage
from .handler import (
    Handler,
    Instance,
    check_kind,
    handlers_of,
    refuse_shared_names,
    warn_of_unused_id,
)
from .message import (
    IdExtractor,
    Message,
    Route,
    TypeExtractor,
    attribute_or_key,
    envelope,
    id_text,
    known_id,
    printable,
    route_of,
)
from .observer import Observer, Observing
from .options import RetryPolicy, UnitOptions, check_session_factory
from .outcome import Delivery, Outcome
from .tables import DedupTables, default_tables
from .waiting import AWAITING, BLOCKING, Waiting

F = TypeVar("F")


class BaseDispatcher(Generic[F]):
    """The part that both dispatchers share: the settings, the handlers, and which handlers take a message."""

    _waiting: Waiting

    def __init__(
        self,
        session_factory: F,
        *projectors: Instance,
        message_id: IdExtractor = attribute_or_key,
        type: TypeExtractor | None = None,  # noqa: A002  # the word of Message.type
        unhandled: Literal["raise", "ignore"] = "raise",
        tables: DedupTables = default_tables,
        retry: RetryPolicy | None = None,
        claim_timeout: float | None = None,
        isolation: str | None = None,
        strict: bool = False,
        observer: Observer | None = None,
    ) -> None:
        check_session_factory(session_factory, asynchronous=self._waiting is AWAITING)
        if unhandled not in ("raise", "ignore"):
            raise ValueError(f"unhandled is 'raise' or 'ignore', not {unhandled!r}")
        if not all(callable(each) for each in (message_id, type or attribute_or_key)):
            raise ValueError("message_id and type take an extractor, such as by_path('headers.id')")
        self._factory = session_factory
        self._extractor, self._type = message_id, type
        self._ignore_unhandled = unhandled == "ignore"
        self._policy = retry or RetryPolicy()
        self._observing = None if observer is None else Observing(observer, partial(route_of, extractor=type))
        shared = UnitOptions(tables, claim_timeout, isolation, strict=strict)
        self._handlers: dict[str, Handler] = {}
        self._options: dict[str, UnitOptions] = {}
        for handler in (handler for target in projectors for handler in handlers_of(target)):
            if handler.identity in self._handlers:
                raise HandlerDefinitionError(
                    f"two handlers are called {handler.identity}: one would skip what the other applied; give one "
                    "of them a name of its own"
                )
            check_kind(handler, asynchronous=self._waiting is AWAITING)
            for other in self._handlers.values():
                refuse_shared_names(handler, other)
            self._handlers[handler.identity] = handler
            own = handler.projector
            self._options[handler.identity] = dataclasses.replace(
                shared,
                read_models=own.read_models,
                isolation=own.isolation or isolation,
                shared_session=own.shared_session,
            )
        if not self._handlers:
            raise HandlerDefinitionError("a dispatcher without projectors handles nothing: give it some")
        routes = {route for handler in self._handlers.values() for route in handler.on.routes}
        self._wanting = {route: self._who_wants(route) for route in routes}

    def _who_wants(self, route: Route) -> tuple[list[Handler], bool]:
        """Return the handlers that take messages of ``route``, and True if any of them needs an id."""
        handlers = [handler for handler in self._handlers.values() if handler.wants(route)]
        return handlers, any(handler.idempotent for handler in handlers)

    @property
    def identities(self) -> frozenset[str]:
        """The present and former names of all handlers. Their markers, if any, are stored under these names."""
        return frozenset(name for handler in self._handlers.values() for name in (handler.identity, *handler.formerly))

    def permit_external_transaction(self, permitted: bool) -> bool:
        """Permit or forbid an outer transaction, for ``testing.external_transaction``; return the setting before."""
        before = any(options.external for options in self._options.values())
        for identity, options in self._options.items():
            self._options[identity] = dataclasses.replace(options, external=permitted)
        return before

    def _resolve(self, event: object, message_id: object) -> tuple[Message, list[Handler], str | None]:
        """Return the message, its handlers and its id; report to the observer a message that goes to no handler."""
        try:
            message, handlers, known = self._route(event, message_id)
        except Exception as error:
            if self._observing is not None:
                self._observing.tell("failed", event, error=error)
            raise
        if not handlers and self._observing is not None:
            self._observing.tell("skipped", message)
        return message, handlers, known

    def _route(self, event: object, message_id: object) -> tuple[Message, list[Handler], str | None]:
        route = route_of(event, self._type)
        handlers, needed = self._wanting.get(route) or self._who_wants(route)
        message = envelope(event, message_id, self._extractor if needed else attribute_or_key, needed=needed)
        given = event.id if message_id is None and isinstance(event, Message) else message_id
        if given is not None and handlers and not needed:
            warn_of_unused_id(handlers[0])
        if not handlers and not self._ignore_unhandled:
            name = (route if isinstance(route, str) else f"{route.__module__}.{route.__qualname__}")[:200]
            raise UnhandledMessage(
                f"no handler for {printable(name)}; there is one for {self._known_routes()}. Register one with @on, or "
                "give unhandled='ignore'. A dictionary needs a type: Message(id, body, type=...), or "
                "Dispatcher(type=by_path('type')). For a list of messages, call deliver_batch"
            )
        return message, handlers, known_id(message, needed=needed)

    def _known_routes(self) -> str:
        names = sorted(route if isinstance(route, str) else route.__qualname__ for route in self._wanting)
        return ", ".join(printable(name[:80]) for name in names[:5]) + (", ..." if len(names) > 5 else "")

    def _deliver(self, event: object, message_id: object) -> Delivery:
        message, handlers, known = self._resolve(event, message_id)
        results = Results(known, alone=len(handlers) == 1)
        for handler in handlers:
            chunk = Chunk(handler, [message], self._observing)
            try:
                durable = deliver(chunk, self._factory, self._options[handler.identity], self._policy, self._waiting)
                results.settled(handler.identity, chunk.outcomes[0], durable)
                if chunk.watch is not None:
                    chunk.watch.settled(chunk.outcomes, chunk.in_doubt)
            except Exception as error:  # noqa: BLE001  # kept, and raised after every handler was tried
                results.failed(handler.identity, error)
                if chunk.watch is not None:
                    chunk.watch.failed(error)
        return results.settled_delivery()

    def _deliver_batch(self, events: Iterable[object]) -> list[Delivery]:
        batch = self._route_all(events)
        for handler in self._handlers.values():
            if messages := batch.messages_for(handler):
                options = self._options[handler.identity]
                became = deliver_batch(
                    handler, messages, self._factory, options, self._policy, self._waiting, self._observing
                )
                batch.handled(handler, *became)
        return batch.settled_deliveries()

    def _route_all(self, events: Iterable[object]) -> BatchResults:
        given: object = events
        if isinstance(given, (str, bytes, Mapping, Message)) or not isinstance(given, Iterable):
            raise RefusedError(
                f"deliver_batch takes messages, in a list say; this is one {type(events).__name__}: deliver(event)"
            )
        batch = BatchResults()
        for event in events:
            try:
                batch.routed(*self._resolve(event, None))
            except Exception as error:  # noqa: BLE001  # it concerns this message alone: its extractor failed, for example
                batch.not_routed(id_text(event) if isinstance(event, Message) else None, error)
        return batch


class Dispatcher(BaseDispatcher[sessionmaker[Any]]):
    """Delivers messages to the handlers of its projectors, each in a unit of work of its own.

    Threads may share a dispatcher. ``session_factory`` is a ``sessionmaker`` on one engine; every attempt takes a new
    session from it. Projectors are instances of ``@projector`` classes, or function projectors.

    ``message_id`` is the extractor that finds the id in an event; the default takes ``event.message_id``. ``type`` is
    the extractor that finds the type, for events that are dictionaries: ``type=by_path("type")``. With
    ``unhandled="ignore"`` a message that no handler takes is ``SKIPPED`` and raises nothing. ``tables`` is the result
    of ``make_tables``. ``retry`` limits the number of attempts and their time. ``claim_timeout`` is the longest wait,
    in seconds, for another delivery of the same message; after it, ``InProgress`` is raised. ``isolation`` overrides
    the isolation level. ``strict=True`` asks the server, for two round trips, whether the transaction is
    still that of the claim. ``observer`` receives the outcome of each message; see ``Observer``.

    Raises ``HandlerDefinitionError`` for projectors that cannot be delivered to, ``UnsafeSessionError`` for a session
    factory of another kind, ``ValueError`` for any other wrong argument.
    """

    _waiting = BLOCKING

    def deliver(self, event: object, *, message_id: object = None) -> Delivery:
        """Deliver one message. **It returns only if the message may be acknowledged**; otherwise it raises.

        ``message_id`` overrides the dispatcher's extractor. If several handlers take the message, all of them run, in
        the order of registration.

        If only one handler takes the message, its error is raised as it is. If several handlers take the message and
        any of them fails, ``DeliveryFailed`` is raised. Raises ``UnhandledMessage`` if no handler takes the message,
        and ``InvalidMessageError`` if the message has no usable id or type.
        """
        return self._deliver(event, message_id)

    def deliver_batch(self, events: Iterable[object]) -> list[Delivery]:
        """Deliver many messages at once: for each handler one claim, one transaction, one commit.

        Returns a ``Delivery`` for each event, in the order of ``events``, only if every message may be acknowledged.
        An event whose body does not carry its id is given as a ``Message``. Handlers are called in the order of
        ``events``; a message that comes twice is applied once.

        Otherwise raises ``BatchFailed``: the dispatcher retries with fewer messages until it has found the failing one,
        and applies all others. Handlers run again during that search, so keep side effects out of them. You can deliver
        the same batch again at any time. Raises ``RefusedError`` if ``events`` is a single message.
        """
        return self._deliver_batch(events)


class AsyncDispatcher(BaseDispatcher[async_sessionmaker[Any]]):
    """Delivers messages to ``async def`` handlers, each in a unit of work of its own, by an ``async_sessionmaker``.

    Tasks of one event loop may share a dispatcher. The arguments are those of ``Dispatcher``.
    """

    _waiting = AWAITING

    async def deliver(self, event: object, *, message_id: object = None) -> Delivery:
        """Deliver one message. **It returns only if the message may be acknowledged**; otherwise it raises.

        Takes, returns and raises what ``Dispatcher.deliver`` does. A cancellation leaves the message applied or not
        applied, and nothing in between.
        """
        return await greenlet_spawn(self._deliver, event, message_id)

    async def deliver_batch(self, events: Iterable[object]) -> list[Delivery]:
        """Deliver many messages at once: for each handler one claim, one transaction, one commit.

        Takes, returns and raises what ``Dispatcher.deliver_batch`` does.
        """
        return await greenlet_spawn(self._deliver_batch, events)


class Results:
    """The outcomes of one message, noted handler by handler."""

    def __init__(self, message_id: str | None, *, alone: bool) -> None:
        self._message_id = message_id
        self._alone = alone  # True: the error of the only handler is raised as it is
        self._outcomes: dict[str, Outcome] = {}
        self._errors: dict[str, Exception] = {}
        self._durable = True

    def settled(self, identity: str, outcome: Outcome, durable: bool) -> None:
        """Note that a handler has applied the message, or found that it was applied."""
        self._outcomes[identity] = outcome
        self._durable = self._durable and durable

    def failed(self, identity: str, error: Exception) -> None:
        """Note that a handler has failed; the error is raised after every other handler was tried."""
        self._outcomes[identity], self._errors[identity] = Outcome.FAILED, error

    def delivery(self) -> Delivery:
        """Return every outcome that was noted, failures included."""
        return Delivery(self._message_id, self._outcomes, self._durable, self._errors)

    def error(self) -> Exception | None:
        """Return the error to raise, or None if no handler failed.

        The error of the only handler is returned as it is; those of several handlers, in one ``DeliveryFailed``.
        """
        if not self._errors:
            return None
        failures = tuple(self._errors.values())
        if self._alone:
            return failures[0]
        causes = ", ".join(f"{name} ({type(error).__name__})" for name, error in self._errors.items())
        return DeliveryFailed(f"not applied by {causes}", failures, self.delivery())

    def settled_delivery(self) -> Delivery:
        """Return the delivery of a message that every handler has settled, or raise ``error()``."""
        if (error := self.error()) is not None:
            raise error
        return self.delivery()


class BatchResults:
    """The outcomes of many messages, in the order of the input, and the messages that each handler takes."""

    def __init__(self) -> None:
        self._all: list[Results] = []
        self._wanted: dict[str, list[tuple[Results, Message]]] = {}

    def routed(self, message: Message, handlers: list[Handler], known: str | None) -> None:
        """Note the next message of the input, and the handlers that take it."""
        results = Results(known, alone=len(handlers) == 1)
        self._all.append(results)
        for handler in handlers:
            self._wanted.setdefault(handler.identity, []).append((results, message))

    def not_routed(self, message_id: str | None, error: Exception) -> None:
        """Note the next message of the input, and the error for which it goes to no handler."""
        results = Results(message_id, alone=True)
        results.failed("(not routed)", error)
        self._all.append(results)

    def messages_for(self, handler: Handler) -> list[Message]:
        """Return the messages that a handler takes, in the order of the input."""
        return [message for _, message in self._wanted.get(handler.identity, ())]

    def handled(self, handler: Handler, became: list[Result], durable: bool) -> None:
        """Note an outcome or an error for each of ``messages_for(handler)``, in their order."""
        for (results, _), result in zip(self._wanted[handler.identity], became, strict=True):
            if isinstance(result, Exception):
                results.failed(handler.identity, result)
            else:
                results.settled(handler.identity, result, durable)

    def settled_deliveries(self) -> list[Delivery]:
        """Return the delivery of each message, in the order of the input; raise ``BatchFailed`` if any has failed."""
        deliveries = [results.delivery() for results in self._all]
        errors = [error for results in self._all if (error := results.error()) is not None]
        if errors:
            raise BatchFailed(
                f"{len(errors)} of {len(deliveries)} messages failed ({_ids(deliveries)}); acknowledge those in "
                ".deliveries whose outcome is not FAILED, and let the others be redelivered"
                + (
                    ", but first look at the TransactionViolatedError, whose handler has COMMITTED"
                    if any(getattr(error, "durable", False) for error in errors)
                    else ""
                ),
                list({id(error): error for error in errors}.values()),
                deliveries,
            )
        return deliveries


def _ids(deliveries: list[Delivery]) -> str:
    failed = [each.message_id for each in deliveries if each.outcome is Outcome.FAILED]
    names = ["one whose id is not known" if each is None else printable(each) for each in failed[:5]]
    return ", ".join(names) + (", ..." if len(failed) > 5 else "")
