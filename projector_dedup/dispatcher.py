"""Dispatchers deliver a message or a batch to every handler that takes it, and collect the outcomes."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Literal, Self, TypeVar
from uuid import UUID

from sqlalchemy.engine import Engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.util import greenlet_spawn

from .applied import Named, names_to_find, valid_timeout, wait_until_applied
from .asyncio_names import async_sessionmaker
from .batch import NOT_TRIED, Result, deliver_batch
from .building import handlers_of_all, may_fail, report_failure
from .delivery import Chunk, deliver
from .errors import (
    BatchFailed,
    DeliveryFailed,
    HandlerDefinitionError,
    RefusedError,
    RetriesExhaustedError,
    UnhandledMessage,
    UnsafeSessionError,
)
from .handler import (
    Handler,
    check_kind,
    refuse_shared_names,
    warn_of_unused_id,
)
from .late import Lateness
from .markers import bind_of_marker
from .message import (
    IdExtractor,
    Message,
    Route,
    TimeExtractor,
    TypeExtractor,
    attribute_or_key,
    envelope,
    from_uuid7,
    id_text,
    known_id,
    printable,
    route_of,
    stored_id,
)
from .observer import Observer, Observing
from .options import NamedInErrors, RetryPolicy, UnitOptions, check_session_factory
from .outcome import Delivery, Outcome
from .own_event import Originals
from .tables import DedupTables, default_tables
from .waiting import AWAITING, BLOCKING, Waiting

F = TypeVar("F")


class BaseDispatcher(NamedInErrors, Generic[F]):
    """The part that both dispatchers share. It checks the settings and finds the handlers of a message."""

    _waiting: Waiting

    def __init__(
        self,
        session_factory: F,
        *projectors: object,
        message_id: IdExtractor = attribute_or_key,
        type: TypeExtractor | None = None,  # noqa: A002  # the word of Message.type
        unhandled: Literal["raise", "ignore"] = "raise",
        tables: DedupTables = default_tables,
        retry: RetryPolicy | None = None,
        claim_timeout: float | None = None,
        isolation: str | None = None,
        strict: bool = False,
        observer: Observer | None = None,
        late: Literal["raise", "skip", "apply"] = "raise",
        occurred_at: TimeExtractor | None = None,
        other_body: Literal["log", "reject", "ignore"] = "log",
    ) -> None:
        check_session_factory(session_factory, asynchronous=self._waiting is AWAITING)
        if unhandled not in ("raise", "ignore"):
            raise ValueError(f"unhandled must be 'raise' or 'ignore', not {unhandled!r}")
        if late not in ("raise", "skip", "apply"):
            raise ValueError(f"late must be 'raise', 'skip' or 'apply', not {late!r}")
        if other_body not in ("log", "reject", "ignore"):
            raise ValueError(f"other_body must be 'log', 'reject' or 'ignore', not {other_body!r}")
        if not all(callable(each) for each in (message_id, type or attribute_or_key, occurred_at or from_uuid7)):
            raise ValueError(
                "message_id, type and occurred_at must be extractors (functions), such as by_path('headers.id')"
            )
        self.session_factory, self.tables = session_factory, tables
        self._extractor, self._type, self._occurred_at = message_id, type, occurred_at
        self._ignore_unhandled = unhandled == "ignore"
        self._policy = retry or RetryPolicy()
        self._observing = None if observer is None else Observing(observer, partial(route_of, extractor=type))
        lateness = None if late == "apply" else Lateness(tables, skip=late == "skip")
        shared = UnitOptions(tables, claim_timeout, isolation, strict=strict, lateness=lateness, other_body=other_body)
        self._handlers: dict[str, Handler] = {}
        self._options: dict[str, UnitOptions] = {}
        for handler in handlers_of_all(projectors):
            if handler.identity in self._handlers:
                raise HandlerDefinitionError(
                    f"two handlers have the identity {handler.identity}, so each would skip the messages that the "
                    "other one applied; give one of them another name"
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
                building=handler.beside is not None,
            )
        if not self._handlers:
            raise HandlerDefinitionError(
                "the dispatcher has no projector; pass at least one: Dispatcher(session_factory, AccountTotals())"
            )
        self._index_handlers()

    def _index_handlers(self) -> None:
        routes = {route for handler in self._handlers.values() for route in handler.on.routes}
        self._by_route = {route: self._handlers_for(route) for route in routes}

    def _handlers_for(self, route: Route) -> tuple[list[Handler], bool]:
        """Return the handlers that take messages of ``route``, and True if any of them needs an id."""
        handlers = [handler for handler in self._handlers.values() if handler.takes(route)]
        return handlers, any(handler.idempotent for handler in handlers)

    @property
    def identities(self) -> frozenset[str]:
        """The present and former names of all handlers. Markers of these handlers are stored under these names."""
        return frozenset().union(*(handler.names for handler in self._handlers.values()))

    @property
    def handlers(self) -> tuple[Handler, ...]:
        """The handlers of all projectors, in the order of registration."""
        return tuple(self._handlers.values())

    @property
    def markers_engine(self) -> Engine:
        """The engine on which the dispatcher writes markers. ``AsyncDispatcher`` returns its ``sync_engine``.

        Raises ``UnsafeSessionError`` if the session factory is bound to a connection, or has no engine for the marker
        table.
        """
        factory: Any = self.session_factory
        session = factory()
        bind = bind_of_marker(session if isinstance(session, Session) else session.sync_session, self.tables)
        if not isinstance(bind, Engine):
            raise UnsafeSessionError("the session factory is bound to a connection; bind it to an engine")
        return bind

    def skipping_unhandled(self) -> Self:
        """Return this dispatcher with ``unhandled="ignore"``."""
        skipping = copy.copy(self)
        skipping._ignore_unhandled = True
        return skipping

    def replaying(self, projector: str) -> Self:
        """Return a dispatcher that delivers to one projector, named ``projector``, and skips all other messages.

        The handlers cannot arm effects, the dispatcher raises their failures, and it applies late messages.
        """
        its = {name: handler for name, handler in self._handlers.items() if handler.owner == projector}
        only = self.skipping_unhandled()
        only._handlers = {name: dataclasses.replace(handler, beside=None) for name, handler in its.items()}
        only._options = {name: dataclasses.replace(self._options[name], building=True, lateness=None) for name in its}
        only._index_handlers()
        return only

    def permit_external_transaction(self, permitted: bool) -> bool:
        """Permit or forbid an outer transaction, and return the previous setting. For ``external_transaction``."""
        before = any(options.external for options in self._options.values())
        for identity, options in self._options.items():
            self._options[identity] = dataclasses.replace(options, external=permitted)
        return before

    def _resolve(self, event: object, message_id: object) -> tuple[Message, list[Handler], str | None]:
        """Return the message, its handlers and its id. Report a message without a handler to the observer."""
        try:
            message, handlers, known = self._route(event, message_id)
        except Exception as error:
            if self._observing is not None:
                self._observing.report("failed", event, error=error)
            raise
        if not handlers and self._observing is not None:
            self._observing.report("skipped", message)
        return message, handlers, known

    def _route(self, event: object, message_id: object) -> tuple[Message, list[Handler], str | None]:
        route = route_of(event, self._type)
        handlers, needed = self._by_route.get(route) or self._handlers_for(route)
        message = envelope(event, message_id, self._extractor if needed else attribute_or_key, needed=needed)
        if needed and message.occurred_at is None and self._occurred_at is not None:
            message = dataclasses.replace(message, occurred_at=self._occurred_at(message))
        given = event.id if message_id is None and isinstance(event, Message) else message_id
        if given is not None and handlers and not needed:
            warn_of_unused_id(handlers[0])
        if not handlers and not self._ignore_unhandled:
            raise UnhandledMessage(
                f"no handler for {_shown(route)}; there is one for {self._known_routes()}. {_remedy(route)}, or pass "
                "unhandled='ignore'"
            )
        return message, handlers, known_id(message, needed=needed)

    def _known_routes(self) -> str:
        names = sorted(map(_shown, self._by_route))
        return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")

    def _deliver(self, event: object, message_id: object) -> Delivery:
        message, handlers, known = self._resolve(event, message_id)
        results, originals = Results(known, handlers), Originals()
        for handler in handlers:
            chunk = Chunk(handler, [message], originals, self._observing)
            try:
                durable = deliver(
                    chunk, self.session_factory, self._options[handler.identity], self._policy, self._waiting
                )
                results.settled(handler.identity, chunk.outcomes[0], durable)
                if chunk.watch is not None:
                    chunk.watch.settled(chunk.outcomes, chunk.in_doubt, chunk.others)
            except Exception as error:  # noqa: BLE001  # kept, and raised after every handler was tried
                results.failed(handler, message, error)
                if chunk.watch is not None:
                    chunk.watch.failed(error)
        return results.settled_delivery()

    @property
    def _is_building(self) -> bool:
        """True if a new generation of a projector is ``building`` beside an old one."""
        return any(each.beside is not None for each in self._handlers.values())

    def _deliver_batch(self, events: Iterable[object], in_order: bool) -> list[Delivery]:
        if in_order and self._is_building:
            raise RefusedError(
                "while a new generation is building, deliver_batch keeps no order: it must get a message behind one on "
                "which it fails, but not if the old one fails too. Deliver the messages one by one"
            )
        batch, originals = self._route_all(events, in_order), Originals()
        for handler in self._handlers.values():
            if messages := batch.messages_for(handler):
                options = self._options[handler.identity]
                became = deliver_batch(
                    handler,
                    messages,
                    originals,
                    self.session_factory,
                    options,
                    self._policy,
                    self._waiting,
                    self._observing,
                    in_order=in_order,
                )
                batch.handled(handler, *became)
        return batch.settled_deliveries()

    def _route_all(self, events: Iterable[object], in_order: bool) -> BatchResults:
        given: object = events
        if isinstance(given, (str, bytes, Mapping, Message)) or not isinstance(given, Iterable):
            raise RefusedError(
                f"deliver_batch takes a list of messages, not one {type(events).__name__}; for one message call "
                "deliver(event)"
            )
        batch, stopped = BatchResults(), False
        for event in events:
            try:
                if stopped:
                    raise RetriesExhaustedError(NOT_TRIED)
                batch.routed(*self._resolve(event, None))
            except Exception as error:  # noqa: BLE001  # it concerns this message alone: its extractor failed, for example
                batch.not_routed(id_text(event) if isinstance(event, Message) else None, error)
                stopped = in_order
        return batch

    def _applied(self, message_id: object, by: Named | Sequence[Named], timeout: object, source: object) -> bool:
        wanted, stored, wait = names_to_find(self.handlers, by), stored_id(message_id, source), valid_timeout(timeout)
        return wait_until_applied(self.session_factory, self.tables, self._waiting, stored, wanted, wait)


class Dispatcher(BaseDispatcher[sessionmaker[Any]]):
    """Delivers each message to the handlers of its projectors. Each handler runs in its own transaction.

    Threads may share a dispatcher. ``projector_dedup.options`` describes the arguments that are not described here.

    - ``projectors``: instances of ``@projector`` classes, or function projectors.
    - ``message_id``: the extractor that finds the id in an event. The default reads ``event.message_id``.
    - ``type``: the extractor that finds the type of events that are dictionaries: ``type=by_path("type")``.
    - ``unhandled``: ``"raise"`` raises ``UnhandledMessage`` for a message without a handler. ``"ignore"`` returns
      ``SKIPPED``.
    - ``late``: decides about a new message that is so old that its marker may be deleted. ``"raise"`` raises
      ``BeyondRetention``, ``"skip"`` skips the message, ``"apply"`` applies it, possibly for the second time. Only a
      message with an ``occurred_at`` can be late.
    - ``occurred_at``: the extractor of the time for messages without an ``occurred_at``, such as ``from_uuid7``.
    - ``other_body``: decides about a duplicate whose ``Message.digest`` is not the one in the marker, so it may be
      another message with the same id. ``"log"`` logs a warning, and the observer gets ``other_body``. ``"reject"``
      raises ``OtherBodyError``. ``"ignore"`` stores and compares no digest.

    Raises ``HandlerDefinitionError`` for a projector that the dispatcher cannot call, ``UnsafeSessionError`` for a
    wrong session factory, and ``ValueError`` for any other wrong argument, all at start-up. Correct the code then.
    """

    _waiting = BLOCKING

    def deliver(self, event: object, *, message_id: str | UUID | None = None) -> Delivery:
        """Deliver one message. **If it returns, acknowledge the message; if it raises, do not**.

        ``event`` is the event, or a ``Message`` around it. ``message_id`` overrides the id that the dispatcher's
        extractor finds. If several handlers take the message, all of them run, in the order of registration.

        Returns a ``Delivery`` with the outcome of each handler.

        If one handler takes the message, its error is raised unchanged. If several handlers take the message and any
        of them fails, the dispatcher raises ``DeliveryFailed``. It raises ``UnhandledMessage`` if no handler takes the
        message, and ``InvalidMessageError`` if the id or the type cannot be used. ``verdict_of(error)`` returns
        whether to retry or to reject the message.
        """
        return self._deliver(event, message_id)

    def deliver_batch(self, events: Iterable[object], *, in_order: bool = False) -> list[Delivery]:
        """Deliver many messages together: each handler runs with one claim, one transaction and one COMMIT.

        If the body of an event does not contain its id, pass a ``Message``. Each handler gets its messages in the order
        of ``events``; the first handler gets all of its messages before the next one begins. A message that is in
        ``events`` twice is applied once.

        Returns a ``Delivery`` for each event, in the order of ``events``. Then acknowledge all of them.

        Raises ``BatchFailed`` if any message failed. The dispatcher first retries with fewer messages until it has
        found the failing one, and applies all others. Handlers run again during this search, so keep side effects out
        of them. You can deliver the same batch again at any time. Raises ``RefusedError`` if ``events`` is a single
        message.

        With ``in_order``, a handler gets no message after the first one on which it fails. These messages fail too,
        with ``RetriesExhaustedError``: deliver them again after the first one. It is refused while a new generation is
        ``building``.
        """
        return self._deliver_batch(events, in_order)

    def applied(
        self,
        message_id: str | UUID,
        *,
        by: Named | Sequence[Named],
        timeout: float = 2.0,
        source: str | None = None,
    ) -> bool:
        """Wait until handlers of this dispatcher have applied a message, so that a client can read its own writes.

        - ``by``: the handlers to wait for, one entry or a list: a projector class, a function projector, the name of a
          projector, or the identity of a handler. The name of a projector stands for that of its handlers which takes
          the message. The dispatcher waits until every entry has applied the message.
        - ``timeout``: the longest wait in seconds. With 0 the dispatcher looks once. The wait for a connection and the
          SELECT itself are not part of it.
        - ``source``: the source of the id, if the consumer that delivers the message has one.

        Returns True if the message has a committed marker of every entry, under a present or a former name. Returns
        False if no such marker was seen: the message is not delivered yet, has failed, was skipped, is a dead letter,
        or its marker is older than the retention and was deleted.

        The dispatcher looks on the engine of its session factory. On the engine of a replica, True means that this
        replica shows the message's writes. The dispatcher looks after growing pauses of at most 0.25 seconds, and holds
        no connection between two looks.

        Raises ``HandlerDefinitionError`` for a wrong ``by``: a handler that the dispatcher does not have, a handler
        without markers, or a projector of which several handlers may take one message. Raises
        ``InvalidMessageIdError``, ``ValueError`` or ``TypeError`` for another wrong argument, ``UnsafeSessionError``
        inside a handler, ``MissingTableError``, or the database's error.
        """
        return self._applied(message_id, by, timeout, source)


class AsyncDispatcher(BaseDispatcher[async_sessionmaker[Any]]):
    """Delivers each message to ``async def`` handlers. Each handler runs in its own transaction.

    Tasks of one event loop may share a dispatcher. The arguments are those of ``Dispatcher``.
    """

    _waiting = AWAITING

    async def deliver(self, event: object, *, message_id: str | UUID | None = None) -> Delivery:
        """Deliver one message. **If it returns, acknowledge the message; if it raises, do not**.

        The arguments, the result and the errors are those of ``Dispatcher.deliver``. If the task is cancelled, the
        message is applied completely or not at all.
        """
        return await greenlet_spawn(self._deliver, event, message_id)

    async def deliver_batch(self, events: Iterable[object], *, in_order: bool = False) -> list[Delivery]:
        """Deliver many messages together: each handler runs with one claim, one transaction and one COMMIT.

        The arguments, the result and the errors are those of ``Dispatcher.deliver_batch``.
        """
        return await greenlet_spawn(self._deliver_batch, events, in_order)

    async def applied(
        self,
        message_id: str | UUID,
        *,
        by: Named | Sequence[Named],
        timeout: float = 2.0,  # noqa: ASYNC109  # as in Dispatcher: the result is False, not TimeoutError
        source: str | None = None,
    ) -> bool:
        """Wait until handlers of this dispatcher have applied a message, so that a client can read its own writes.

        The arguments, the result and the errors are those of ``Dispatcher.applied``. You can cancel it at any time.
        """
        return await greenlet_spawn(self._applied, message_id, by, timeout, source)


def _shown(route: Route) -> str:
    """Return the route for an error message: a name in quotes, or the module and the name of a class."""
    if isinstance(route, str):
        return f"the name '{printable(route[:200])}'"
    return f"the class {printable(f'{route.__module__}.{route.__qualname__}'[:200])}"


def _remedy(route: Route) -> str:
    """Return what the user should write to get a handler for the route."""
    if isinstance(route, str):
        return "If a handler takes its class, add the name to into({...}); otherwise write a handler with @on"
    if route is dict:
        return "Give the dictionary a type: Message(id, body, type=...) or Dispatcher(type=by_path('type'))"
    return "For a list of messages, call deliver_batch" if route is list else "Write a handler with @on"


class Results:
    """The outcomes of one message, collected handler by handler.

    If a new generation (``building``) fails and the old generation takes the message too, the failure is not collected.
    """

    def __init__(self, message_id: str | None, handlers: Sequence[Handler]) -> None:
        self._message_id = message_id
        self._may_fail = {each.identity for each in handlers if may_fail(each, handlers)}
        self._alone = len(handlers) - len(self._may_fail) == 1  # True: the error of the only handler is raised as it is
        self._outcomes: dict[str, Outcome] = {}
        self._errors: dict[str, Exception] = {}
        self._durable = True

    def settled(self, identity: str, outcome: Outcome, durable: bool) -> None:
        """Note that a handler has applied the message, or that the message is a duplicate."""
        self._outcomes[identity] = outcome
        self._durable = self._durable and durable

    def failed(self, handler: Handler, message: Message, error: Exception) -> None:
        """Note that a handler has failed. The dispatcher raises the error after it has called every other handler."""
        if handler.identity in self._may_fail:
            report_failure(handler, message, error)
        else:
            self._outcomes[handler.identity], self._errors[handler.identity] = Outcome.FAILED, error

    def not_routed(self, error: Exception) -> None:
        """Note the error because of which no handler gets the message."""
        self._outcomes["(not routed)"], self._errors["(not routed)"] = Outcome.FAILED, error
        self._alone = True

    def delivery(self) -> Delivery:
        """Return all collected outcomes, including failures."""
        return Delivery(self._message_id, self._outcomes, self._durable, self._errors)

    def error(self) -> Exception | None:
        """Return the error to raise, or None if no handler failed.

        A message with one handler returns that handler's error. A message with several returns a ``DeliveryFailed``.
        """
        if not self._errors:
            return None
        failures = tuple(self._errors.values())
        if self._alone:
            return failures[0]
        causes = ", ".join(f"{name} ({type(error).__name__})" for name, error in self._errors.items())
        return DeliveryFailed(f"the message was not applied by {causes}", failures, self.delivery())

    def settled_delivery(self) -> Delivery:
        """Return the delivery if no handler failed. Otherwise raise ``error()``."""
        if (error := self.error()) is not None:
            raise error
        return self.delivery()


class BatchResults:
    """The outcomes of many messages, in the order of the input, and the messages that each handler takes."""

    def __init__(self) -> None:
        self._all: list[Results] = []
        self._by_handler: dict[str, list[tuple[Results, Message]]] = {}

    def routed(self, message: Message, handlers: list[Handler], known: str | None) -> None:
        """Note the next message of the input, and the handlers that take it."""
        results = Results(known, handlers)
        self._all.append(results)
        for handler in handlers:
            self._by_handler.setdefault(handler.identity, []).append((results, message))

    def not_routed(self, message_id: str | None, error: Exception) -> None:
        """Note the next message of the input, and the error because of which no handler gets it."""
        results = Results(message_id, ())
        results.not_routed(error)
        self._all.append(results)

    def messages_for(self, handler: Handler) -> list[Message]:
        """Return the messages that a handler takes, in the order of the input."""
        return [message for _, message in self._by_handler.get(handler.identity, ())]

    def handled(self, handler: Handler, became: list[Result], durable: bool) -> None:
        """Note an outcome or an error for each of ``messages_for(handler)``, in their order."""
        for (results, message), result in zip(self._by_handler[handler.identity], became, strict=True):
            if isinstance(result, Exception):
                results.failed(handler, message, result)
            else:
                results.settled(handler.identity, result, durable)

    def settled_deliveries(self) -> list[Delivery]:
        """Return the delivery of each message, in the order of the input; raise ``BatchFailed`` if any has failed."""
        deliveries = [results.delivery() for results in self._all]
        errors = [error for results in self._all if (error := results.error()) is not None]
        if errors:
            raise BatchFailed(
                f"{len(errors)} of {len(deliveries)} messages failed ({_ids(deliveries)}); acknowledge each message in "
                ".deliveries whose outcome is not FAILED, and let the broker redeliver the others"
                + (
                    ", but first read the TransactionViolatedError, whose handler has COMMITTED"
                    if any(getattr(error, "durable", False) for error in errors)
                    else ""
                ),
                list({id(error): error for error in errors}.values()),
                deliveries,
            )
        return deliveries


def _ids(deliveries: list[Delivery]) -> str:
    failed = [(place, each.message_id) for place, each in enumerate(deliveries) if each.outcome is Outcome.FAILED]
    names = [
        f"deliveries[{place}] without a known id" if known is None else printable(known) for place, known in failed[:5]
    ]
    return ", ".join(names) + (", ..." if len(failed) > 5 else "")
