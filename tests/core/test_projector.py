"""What `@projector` and `@on` make of a class or function: its identity, what it is called for, and what is refused."""

import asyncio
import copy
import functools
import hashlib
import inspect
import pickle
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import projector_dedup
from projector_dedup import AsyncDispatcher, Dispatcher, Message, Outcome, on, projector
from projector_dedup import errors as public_errors
from projector_dedup.commands import AsyncCommands, Commands
from projector_dedup.effects import AsyncEffects, Effects
from projector_dedup.errors import (
    BatchFailed,
    CleanupInterruptedError,
    DeliveryFailed,
    HandlerDefinitionError,
    InvalidMessageError,
    InvalidMessageIdError,
    RefusedError,
    TransactionViolatedError,
    UnhandledMessage,
    UnsafeSessionError,
)
from projector_dedup.message import by_path, cloudevents, hashed, kafka
from projector_dedup.outcome import Delivery
from projector_dedup.testing import external_transaction
from projector_dedup.unit_of_work import AsyncUnitOfWork, UnitOfWork

FACTORY = sessionmaker(create_engine("sqlite://"))  # nothing connects where a definition is refused
ASYNC_FACTORY = async_sessionmaker(create_async_engine("sqlite+aiosqlite://"))


@dataclass(frozen=True)
class Paid:
    """An event."""

    message_id: object = "m1"


class PaidTwice(Paid):
    """An event of a derived class."""


@projector(idempotent=True)
class Totals:
    """Remembers what it was called with."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    @on(Paid)
    def add(self, event: Paid, session: Session) -> None:
        """Remember the event."""
        assert isinstance(session, Session)
        self.seen.append(event)


class Inherits(Totals):
    """A projector by inheritance."""


@projector(name="pinned", idempotent=True)
class Pinned:
    """Names of its own."""

    @on(Paid, name="pay")
    def whatever(self, event: Paid, session: Session) -> None:
        """Do nothing."""


class InheritsPinned(Pinned):
    """Must not pass for its parent."""


@projector(idempotent=True)
@on(Paid)
def count(event: Paid, session: Session) -> Any:
    """A function that is a projector."""
    return event, session


def identities(*targets: object) -> list[str]:
    """The handlers that a dispatcher finds, in order."""
    return list(Dispatcher(FACTORY, *targets)._handlers)


# Identity --------------------------------------------------------------------------------------------------------


def test_an_identity_is_where_the_handler_is_defined() -> None:
    """Module, class and method; for a function, module and name."""
    module = __name__
    assert identities(Totals(), count) == [f"{module}.Totals.add", f"{module}.count"]


def test_an_inherited_handler_has_the_identity_of_its_own_class() -> None:
    """Two classes that share a method are two projectors, also where the parent's name is pinned."""
    module = __name__
    assert identities(Inherits(), Totals(), InheritsPinned(), Pinned()) == [
        f"{module}.Inherits.add",
        f"{module}.Totals.add",
        f"{module}.InheritsPinned.pay",
        "pinned.pay",
    ]


def test_static_and_class_methods_are_handlers_in_both_orders() -> None:
    """`@staticmethod` and `@classmethod` above `@on` or below it: the handler is registered."""

    @projector(name="static")
    class Static:
        above = staticmethod(on(Paid)(lambda _event, _session: None))
        below = on(Paid)(staticmethod(lambda _event, _session: None))
        class_above = classmethod(on(Paid)(lambda _cls, _event, _session: None))
        class_below = on(Paid)(classmethod(lambda _cls, _event, _session: None))  # type: ignore[call-overload]  # mypy: not callable yet

    assert identities(Static()) == ["static.above", "static.below", "static.class_above", "static.class_below"]
    for handler in Dispatcher(FACTORY, Static())._handlers.values():
        handler.function(Paid(), None)


def test_both_parts_of_an_identity_can_be_pinned() -> None:
    """A pinned identity survives moving and renaming."""
    pinned = projector(name="totals", idempotent=True)(on(Paid)(lambda _event, _session: None))
    both = projector(name="totals", idempotent=True)(on(Paid, name="add")(lambda _event, _session: None))
    assert identities(pinned, both) == ["totals", "totals.add"]


def test_two_handlers_of_one_identity_are_refused() -> None:
    """One would skip what the other had applied."""
    with pytest.raises(HandlerDefinitionError, match="two handlers have the identity"):
        Dispatcher(FACTORY, Totals(), Totals())


@pytest.mark.parametrize("module", ["here", "__main__"])
def test_an_identity_that_changes_with_the_way_of_starting_is_refused(module: str) -> None:
    """A local class, or one of `__main__`, needs a name, if it is idempotent."""

    class Local:
        @on(Paid)
        def add(self, event: Paid, session: Session) -> None: ...

    if module == "__main__":
        Local.__module__, Local.__qualname__ = "__main__", "Local"
    with pytest.raises(HandlerDefinitionError, match="name="):
        Dispatcher(FACTORY, projector(idempotent=True)(Local)())
    Dispatcher(FACTORY, projector(Local)())
    Dispatcher(FACTORY, projector(idempotent=True, name="local")(Local)())


@pytest.mark.parametrize("name", ["x" * 256, "a\0b", "\ud800"], ids=ascii)
def test_an_identity_that_cannot_be_a_key_is_refused(name: str) -> None:
    """At start-up, not at the first message."""
    with pytest.raises(RefusedError, match="identity"):
        Dispatcher(FACTORY, projector(idempotent=True, name=name)(on(Paid)(lambda _event, _session: None)))


def test_an_identity_that_is_too_long_says_how_long_it_may_be() -> None:
    """And what to do, which is not to hash it: that is advice for message ids."""
    with pytest.raises(RefusedError) as refused:
        Dispatcher(FACTORY, projector(idempotent=True, name="x" * 300)(on(Paid)(lambda _event, _session: None)))
    assert str(refused.value) == (
        "a handler's identity must have at most 255 bytes of UTF-8, and this one has 300: "
        f"{'x' * 40}...; give it a shorter name"
    )


# Definitions -----------------------------------------------------------------------------------------------------


def test_calling_stays_what_it_was() -> None:
    """A decorated method or function is called in a unit test as if it were not decorated."""
    with Session() as session:
        totals = Totals()
        totals.add(Paid(), session)
        assert totals.seen == [Paid()]
        assert count(Paid(), session) == (Paid(), session)
    assert count.__doc__ == "A function that is a projector."


def _generator(_event: object, _session: Session) -> Iterator[None]:
    yield


async def _async_generator(_event: object, _session: AsyncSession) -> Any:
    yield


async def _async(_event: object, _session: AsyncSession) -> None: ...


def _plain(_event: object, _session: Session) -> None: ...


def _named(function: Callable[..., Any]) -> Any:
    return projector(name="x", idempotent=True)(on(Paid)(function))


@pytest.mark.parametrize(
    ("define", "why"),
    [
        (on, "the events of the handler"),
        (lambda: on(Paid()), "the events of the handler"),  # type: ignore[call-overload]  # that is the mistake
        (lambda: projector(idempotent=True)(lambda _event, _session: None), "has no @on"),  # nobody has given it one
        (lambda: projector(read_models=["totals"]), "list of mapped classes"),  # type: ignore[list-item]
        (lambda: projector(read_models=Totals), "list of mapped classes"),  # type: ignore[call-overload]
        (lambda: Dispatcher(FACTORY), "has no projector"),
        (lambda: Dispatcher(FACTORY, Totals), "give the dispatcher an instance"),
        (lambda: Dispatcher(FACTORY, object()), "not a projector"),
        (lambda: Dispatcher(FACTORY, [Totals()]), r"list is not a projector; .* one by one: .*, \*projectors\)$"),
        (lambda: Dispatcher(FACTORY, projector(type("Empty", (), {}))()), "no handler"),
        (lambda: projector("totals"), "above a class or a function; it was called with 'totals'"),  # type: ignore[call-overload]
        (lambda: _named(_generator), "generator"),
        (lambda: _named(_async_generator), "generator"),
        (lambda: Dispatcher(FACTORY, _named(_async)), "AsyncDispatcher"),
        (lambda: Dispatcher(FACTORY, _named(functools.partial(_async))), "AsyncDispatcher"),
        (lambda: AsyncDispatcher(ASYNC_FACTORY, _named(_plain)), "plain def: use Dispatcher for it"),
        (lambda: _named(_async).deliver(Paid(), session_factory=FACTORY), "AsyncDispatcher"),
    ],
)
def test_a_definition_that_would_lose_events_is_refused(define: Callable[[], Any], why: str) -> None:
    """Before any message comes, with the remedy in the text."""
    with pytest.raises(HandlerDefinitionError, match=why):
        define()


@pytest.mark.parametrize(("returned", "why"), [(_async, "not awaited"), (_async_generator, None)])
def test_a_function_that_returns_a_coroutine_is_refused(
    factory: sessionmaker[Session], returned: Callable[..., Any], why: str | None
) -> None:
    """Its work was not done; nothing is durable, and a redelivery is refused again. So with an async generator."""

    def sneaky_function(event: Paid, session: Any) -> Any:
        return returned(event, session)

    sneaky = _named(sneaky_function)
    for _ in range(2):
        with pytest.raises(HandlerDefinitionError, match=why):
            sneaky.deliver(Paid(), session_factory=factory)


async def _returns_a_coroutine(event: Paid, session: AsyncSession) -> Any:
    return _async(event, session)


async def _returns_an_async_generator(event: Paid, session: AsyncSession) -> Any:
    return _async_generator(event, session)


@functools.wraps(_async)
def _runs_it(_event: object, _session: Session) -> None: ...


@functools.wraps(_async)
def _returns_it(event: object, session: AsyncSession) -> Any:
    return _async(event, session)


@pytest.mark.parametrize("handler", [_returns_a_coroutine, _returns_an_async_generator, _runs_it])
def test_an_async_handler_that_leaves_its_work_undone_is_refused(sqlite: Any, factory: Any, handler: Any) -> None:
    """What it returns would have to be awaited, or was no coroutine at all: nothing is durable."""
    with pytest.raises(HandlerDefinitionError):
        asyncio.run(adelivered(sqlite, handler))
    assert Dispatcher(factory, _named(_plain)).deliver(Paid()).outcome is Outcome.APPLIED


def test_a_plain_wrapper_of_an_async_function_is_judged_by_what_it_returns(sqlite: Any, factory: Any) -> None:
    """It may run the coroutine, or hand it on to be awaited; only calling it tells."""
    assert Dispatcher(factory, _named(_runs_it)).deliver(Paid("m1")).outcome is Outcome.APPLIED
    with pytest.raises(HandlerDefinitionError, match="not awaited"):
        Dispatcher(factory, _named(_returns_it)).deliver(Paid("m2"))
    assert asyncio.run(adelivered(sqlite, _returns_it, Paid("m2"))).outcome is Outcome.APPLIED


async def adelivered(sqlite: Any, handler: Any, event: object = Paid(), **options: Any) -> Delivery:
    """The delivery by an `AsyncDispatcher` on an engine of its own."""
    engine = create_async_engine(sqlite.async_url)
    try:
        return await AsyncDispatcher(async_sessionmaker(engine, **options), _named(handler)).deliver(event)
    finally:
        await engine.dispose()


def test_a_sessionmaker_inside_an_async_sessionmaker_keeps_its_listeners_and_arguments(
    sqlite: Any, factory: Any
) -> None:
    """`sync_session_class=sessionmaker(...)`, by which events are attached to async sessions, is followed."""
    assert factory is not None  # the table is there
    flushed: list[Any] = []
    infos: list[Any] = []
    inner = sessionmaker(info={"from": "inner"}, autoflush=False, autobegin=False)
    event.listen(inner, "before_commit", flushed.append)

    async def handler(_event: Paid, session: AsyncSession) -> None:
        infos.append((dict(session.info), session.sync_session.autoflush))

    delivery = asyncio.run(adelivered(sqlite, handler, sync_session_class=inner))
    assert delivery.outcome is Outcome.APPLIED
    assert len(flushed) == 1
    assert infos == [({"from": "inner"}, True)]  # the async_sessionmaker's own autoflush wins


def test_sessions_that_do_not_begin_by_themselves_are_taken(factory: sessionmaker[Session]) -> None:
    """`autobegin=False` is about sessions that the user opens; a unit of work begins its own."""
    sessions = sessionmaker(factory.kw["bind"], autobegin=False)
    assert Dispatcher(sessions, Totals()).deliver(Paid()).outcome is Outcome.APPLIED


class _OwnCall(sessionmaker[Session]):
    def __call__(self, **local_kw: Any) -> Session:
        return super().__call__(**local_kw)


@pytest.mark.parametrize(
    "given",
    [
        _OwnCall(FACTORY.kw["bind"]),
        scoped_session(FACTORY),
        FACTORY(),
        FACTORY.kw["bind"],
        ASYNC_FACTORY,
        FACTORY.__call__,
        sessionmaker(FACTORY.kw["bind"], twophase=True),
    ],
    ids=["own __call__", "scoped_session", "Session", "Engine", "async_sessionmaker", "function", "twophase"],
)
def test_what_is_no_factory_of_new_sessions_is_refused(given: Any) -> None:
    """At start-up, naming what to give instead."""
    with pytest.raises(UnsafeSessionError, match="sessionmaker"):
        Dispatcher(given, Totals())


@pytest.mark.parametrize(
    "given", [FACTORY, async_scoped_session(ASYNC_FACTORY, lambda: 1)], ids=["sessionmaker", "async_scoped_session"]
)
def test_what_is_no_factory_of_new_async_sessions_is_refused(given: Any) -> None:
    """The same for asyncio."""
    with pytest.raises(UnsafeSessionError, match="async_sessionmaker"):
        AsyncDispatcher(given, _named(_async))


@pytest.mark.parametrize(
    "options",
    [{"unhandled": "drop"}, {"message_id": "id"}, {"type": "meta.type"}, {"claim_timeout": 0}],
    ids=lambda options: next(iter(options)),
)
def test_options_are_checked_at_start_up(options: dict[str, Any]) -> None:
    """A mistake in an option does not wait for a message."""
    with pytest.raises(ValueError, match=next(iter(options))):
        Dispatcher(FACTORY, Totals(), **options)


# Routing ---------------------------------------------------------------------------------------------------------


def routed(handler: Any, factory: sessionmaker[Session], event: object) -> bool:
    """Whether the handler is called for the event."""
    calls: list[object] = []
    marked = handler(lambda got, _session: calls.append(got))
    delivery = Dispatcher(factory, projector(name="x")(marked), unhandled="ignore").deliver(event)
    assert delivery.outcome is (Outcome.APPLIED if calls else Outcome.SKIPPED)
    return bool(calls)


@pytest.mark.parametrize(
    ("handler", "event", "expected"),
    [
        (on(Paid), Paid(), True),
        (on(Paid), PaidTwice(), False),
        (on(Paid, subclasses=True), PaidTwice(), True),
        (on(PaidTwice, subclasses=True), Paid(), False),
        (on(Paid, "paid"), Message("m1", {}, "paid"), True),
        (on("paid"), Message("m1", {}, "Paid"), False),
        (on("paid"), Message("m1", Paid()), False),
        (on(Paid), Message("m1", Paid()), True),
        (on(Paid), Message("m1", Paid(), "other"), False),
        (on(Paid), Message("m1", {}, Paid), True),
        (on(Paid, subclasses=True), Message("m1", {}, PaidTwice), True),
        (on(dict), {"message_id": "m1"}, True),
        (on(object), Paid(), False),
    ],
)
def test_a_message_goes_where_its_type_or_class_says(
    factory: sessionmaker[Session], handler: Any, event: object, expected: bool
) -> None:
    """The exact class, or the name; derived classes only on request; `Message.type` before the class of the body."""
    assert routed(handler, factory, event) is expected


def test_what_no_handler_wants_is_an_error(factory: sessionmaker[Session]) -> None:
    """Nothing is lost by a typo: `UnhandledMessage`, unless that is said to be well."""
    with pytest.raises(UnhandledMessage, match=r"test_projector\.PaidTwice"):
        Dispatcher(factory, Totals()).deliver(PaidTwice())
    with pytest.raises(UnhandledMessage, match=r"typo\\n"):
        Dispatcher(factory, Totals()).deliver(Message("m1", {}, "typo\n"))
    with pytest.raises(UnhandledMessage):
        count.deliver(PaidTwice(), session_factory=factory)
    skipped = Dispatcher(factory, Totals(), unhandled="ignore").deliver(PaidTwice())
    assert (skipped.outcome, dict(skipped.outcomes), skipped.message_id) == (Outcome.SKIPPED, {}, "m1")


def test_an_extractor_is_not_asked_for_what_nobody_claims(factory: sessionmaker[Session]) -> None:
    """A stray event without the parts of its id is skipped, not refused, where unhandled events are."""
    skipped = Dispatcher(factory, Totals(), unhandled="ignore", message_id=kafka).deliver(SimpleNamespace())
    assert skipped.outcome is Outcome.SKIPPED


def test_a_handler_gets_the_body_or_on_request_the_envelope(factory: sessionmaker[Session]) -> None:
    """`envelope=True` hands over the `Message`, with the id under which it was claimed."""
    got: list[object] = []
    body = projector(name="body")(on(Paid)(lambda event, _session: got.append(event)))
    whole = projector(name="whole")(on(Paid, envelope=True)(lambda event, _session: got.append(event)))
    at = datetime(2026, 1, 2, tzinfo=UTC)
    Dispatcher(factory, body, whole).deliver(Message("m1", Paid(), occurred_at=at), message_id="m2")
    assert got == [Paid(), Message("m2", Paid(), occurred_at=at)]


def test_a_function_projector_delivers_by_itself(factory: sessionmaker[Session]) -> None:
    """`deliver` on a function is the wrapper in its plainest form."""
    outcomes = [count.deliver(Paid(), session_factory=factory) for _ in range(2)]
    assert outcomes == [
        Delivery("m1", {f"{__name__}.count": Outcome.APPLIED}),
        Delivery("m1", {f"{__name__}.count": Outcome.DUPLICATE}),
    ]


def test_an_id_that_nobody_claims_may_be_anything(factory: sessionmaker[Session]) -> None:
    """Off means free: a projector that is not idempotent takes a number for an id, or none."""
    plain = projector(name="plain")(on(Paid)(_plain))
    for message_id, known in ((7, None), ("", None), (uuid.UUID(int=1), str(uuid.UUID(int=1)))):
        assert Dispatcher(factory, plain).deliver(Paid(message_id)).message_id == known


def test_an_async_function_projector_delivers_by_itself(sqlite: Any, factory: sessionmaker[Session]) -> None:
    """`adeliver` is the same, awaited."""
    assert factory is not None  # the table is there

    async def deliver_twice() -> list[Outcome]:
        engine = create_async_engine(sqlite.async_url)
        sessions = async_sessionmaker(engine)
        outcomes = [(await _named(_async).adeliver(Paid(), session_factory=sessions)).outcome for _ in range(2)]
        await engine.dispose()
        return outcomes

    assert asyncio.run(deliver_twice()) == [Outcome.APPLIED, Outcome.DUPLICATE]


def test_a_failed_delivery_keeps_its_outcomes_when_it_is_split() -> None:
    """`except*` and `split` give parts that still know the delivery."""
    delivery = Delivery("m1", {"a": Outcome.FAILED, "b": Outcome.FAILED})
    whole = DeliveryFailed("not applied", [ValueError("a"), KeyError("b")], delivery)
    part, rest = whole.split(ValueError)
    assert isinstance(part, DeliveryFailed)
    assert isinstance(rest, DeliveryFailed)
    assert part.delivery is rest.delivery is delivery


@pytest.mark.parametrize(
    "handler",
    [lambda: None, lambda _event: None, lambda _event, _session, _more: None, lambda _event, *, session: session],
    ids=["none", "one", "three", "by keyword"],
)
def test_a_handler_with_other_parameters_is_refused_when_the_projector_is_made(handler: Any) -> None:
    """Not at the first message: by then the deployment is through."""
    with pytest.raises(
        HandlerDefinitionError, match=r"the library calls .*p with two arguments, \(event, session\), but it takes"
    ):
        projector(name="p")(on(Paid)(handler))


class OfOurs(AsyncSession):
    """A class of sessions, as users have them."""


async def _declares_a_session(event: Paid, session: Session) -> None: ...


def _declares_an_async_session(event: Paid, session: AsyncSession) -> None: ...


def _declares_our_session(event: Paid, session: OfOurs) -> None: ...


def _declares_it_as_text(event: Paid, session: "AsyncSession") -> None: ...


@pytest.mark.parametrize(
    "handler", [_declares_a_session, _declares_an_async_session, _declares_our_session, _declares_it_as_text]
)
def test_a_handler_with_the_session_of_the_other_kind_is_refused(handler: Any) -> None:
    """An async handler that awaits nothing, as a `Session` wants it, would lose every write without a word."""
    with pytest.raises(HandlerDefinitionError, match=r"p is .* def and declares .*Session|p is .* of the class OfOurs"):
        projector(name="p")(on(Paid)(handler))


def test_a_session_that_cannot_be_looked_at_is_not_refused() -> None:
    """Its name may be imported for type checkers only; a wrapper may give its function another session."""

    def unknown(event: Paid, session: "NotImported") -> None: ...  # type: ignore[name-defined]  # noqa: F821

    @functools.wraps(_async)
    def runs_it(event: Paid, session: AsyncSession) -> None: ...

    for handler in (unknown, runs_it):
        projector(name="p")(on(Paid)(handler))


def test_an_unknown_option_names_what_the_user_wrote() -> None:
    """The class that was called, not a private base of it, which nobody could look up."""

    class Own(Dispatcher):
        """A class of the user's."""

    classes: tuple[Any, ...] = (
        *(Dispatcher, AsyncDispatcher, UnitOfWork, AsyncUnitOfWork, Commands, AsyncCommands, Effects, AsyncEffects),
        Own,
    )
    for each in classes:
        with pytest.raises(TypeError, match=rf"\b{each.__name__}.__init__\(\) got an unexpected .* 'retries'"):
            each(FACTORY, retries=3)
    assert inspect.signature(Dispatcher) == inspect.signature(AsyncDispatcher)


def test_handlers_may_have_more_parameters_with_defaults() -> None:
    """Whatever can be called with an event and a session: a default, ``*args``, a wrapper, an object."""

    class Callable:
        def __call__(self, event: Paid, session: Session) -> None: ...

    for handler in (lambda _e, _s, _d=1: None, lambda *_: None, functools.wraps(_plain)(lambda *_: None), Callable()):
        marked: Any = on(Paid)(handler)
        marked.__module__, marked.__qualname__ = __name__, "handler"
        projector(name="p")(marked)


def test_a_message_id_that_is_not_used_is_warned_of_once(
    factory: sessionmaker[Session], caplog: pytest.LogCaptureFixture
) -> None:
    """Who gives an id expects that it counts: without ``idempotent=True`` a redelivery is applied again."""
    forgot = projector(name="forgot idempotent")(on(Paid)(lambda _event, _session: None))
    dispatcher = Dispatcher(factory, forgot)
    for number in range(3):
        dispatcher.deliver(Paid(), message_id=f"m{number}")
        forgot.deliver(Paid(), message_id=f"m{number}", session_factory=factory)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "forgot idempotent" in warnings[0]
    assert "idempotent=True" in warnings[0]


@pytest.mark.parametrize("many", [False, True], ids=["deliver", "deliver_batch"])
def test_an_envelope_with_an_id_that_is_not_used_is_warned_of_too(
    factory: sessionmaker[Session], caplog: pytest.LogCaptureFixture, many: bool
) -> None:
    """Consumers give ids in envelopes; an id inside an event may be there for another reason, and is passed over."""
    forgot = projector(name=f"forgot, {many}")(on(Paid)(lambda _event, _session: None))
    dispatcher = Dispatcher(factory, forgot)
    for given, warnings in ((Paid(), 0), (Message("m1", Paid()), 1), (Message("m2", Paid()), 1)):
        dispatcher.deliver_batch([given]) if many else dispatcher.deliver(given)
        assert sum(record.levelname == "WARNING" for record in caplog.records) == warnings


def test_a_failed_delivery_has_the_error_of_each_handler(factory: sessionmaker[Session]) -> None:
    """Nobody has to deliver a message again to learn which handler failed, and why."""
    wrong, late = ValueError("wrong"), KeyError("late")

    def failing(name: str, error: Exception) -> Any:
        def fails(_event: Paid, _session: Session) -> None:
            raise error

        return projector(idempotent=True, name=name)(on(Paid)(fails))

    with pytest.raises(DeliveryFailed) as failed:
        Dispatcher(factory, Totals(), failing("first", wrong), failing("second", late)).deliver(Paid("m1"))
    assert dict(failed.value.delivery.errors) == {"first": wrong, "second": late}


def _again(whole: Any) -> list[Any]:
    return [pickle.loads(pickle.dumps(whole)), copy.copy(whole), copy.deepcopy(whole)]  # our own bytes


def test_a_delivery_can_be_pickled_copied_and_hashed() -> None:
    """A task queue stores results, a log takes plain data, and a set of deliveries is a set."""
    delivery = Delivery("m1", {"a": Outcome.APPLIED}, durable=False, errors={"b": ValueError("b")})
    assert _again(delivery) == [delivery] * 3
    assert [str(each.errors["b"]) for each in _again(delivery)] == ["b"] * 3
    assert {delivery, *_again(delivery)} == {delivery}
    as_data = asdict(delivery)
    assert str(as_data.pop("errors")["b"]) == "b"
    assert as_data == {"message_id": "m1", "outcomes": {"a": Outcome.APPLIED}, "durable": False}


@pytest.mark.parametrize("name", [name for name in projector_dedup.__all__ if name in vars(public_errors)])
def test_every_public_error_can_be_pickled_and_copied(name: str) -> None:
    """A worker in another process hands its errors over whole."""
    error_type: Any = getattr(public_errors, name)
    delivery = Delivery("m1", {"a": Outcome.FAILED})
    error: Any
    if error_type is BatchFailed:
        error = BatchFailed("why", [ValueError("a")], [delivery])
    elif error_type is CleanupInterruptedError:
        error = CleanupInterruptedError("why", 7)
    elif error_type is DeliveryFailed:
        error = DeliveryFailed("why", [ValueError("a")], delivery)
    elif issubclass(error_type, TransactionViolatedError):
        error = error_type("why", durable=True)
    else:
        error = error_type("why")
    error.add_note("seen twice")
    for other in _again(error):
        assert type(other) is error_type
        assert (str(other), other.__notes__) == (str(error), ["seen twice"])
        assert getattr(other, "durable", True)
        assert getattr(other, "deleted", 7) == 7
        assert getattr(other, "delivery", delivery) == delivery
        assert getattr(other, "deliveries", [delivery]) == [delivery]


def test_an_external_transaction_within_another_leaves_the_outer_one_open(factory: sessionmaker[Session]) -> None:
    """The inner block ends what it began: until the outer one ends, nothing is durable, and then all is refused."""
    with factory.kw["bind"].connect() as connection:
        dispatcher = Dispatcher(sessionmaker(connection), Totals())
        with external_transaction(dispatcher):
            with external_transaction(dispatcher):
                assert not dispatcher.deliver(Paid("m1")).durable
            assert not dispatcher.deliver(Paid("m2")).durable
        with pytest.raises(UnsafeSessionError):
            dispatcher.deliver(Paid("m3"))
        connection.rollback()


# Where an id is found --------------------------------------------------------------------------------------------

NAMED = SimpleNamespace(message_id="m1", headers={"id": "h1"}, source="s", id="1", topic="t", partition=0, offset=7)


@pytest.mark.parametrize(
    ("extractor", "event", "expected"),
    [
        (None, NAMED, "m1"),
        (None, {"message_id": "m2"}, "m2"),
        (by_path("headers.id"), NAMED, "h1"),
        (by_path("a.b.c"), {"a": {"b": {"c": "deep"}}}, "deep"),
        (cloudevents, NAMED, "1:s1:1"),
        (cloudevents, {"source": "s1", "id": ""}, None),
        (cloudevents, {"id": "1"}, None),
        (kafka, NAMED, "1:t1:01:7"),
        (kafka, SimpleNamespace(topic=lambda: "t", partition=lambda: 1, offset=lambda: 2), "1:t1:11:2"),
        (kafka, {"topic": "t", "partition": 0}, None),
        (by_path("headers.other"), NAMED, None),
        (by_path("a.b"), {"a": None}, None),
        (lambda _event: uuid.UUID(int=1), NAMED, "00000000-0000-0000-0000-000000000001"),
        (lambda _event: 5, NAMED, None),
        (hashed(by_path("message_id")), {"message_id": "x" * 1000}, hashlib.sha256(b"x" * 1000).hexdigest()),
        (hashed(by_path("message_id")), {}, None),
        (hashed(by_path("message_id")), {"message_id": ""}, None),
        (hashed(by_path("message_id")), {"message_id": "\ud800"}, None),
    ],
)
def test_extractors_find_an_id_or_the_message_is_refused(
    factory: sessionmaker[Session], extractor: Any, event: Any, expected: str | None
) -> None:
    """What is found is the id; what is not found is never the text "None"."""
    handler = projector(name="x", idempotent=True)(on(SimpleNamespace, dict)(lambda _event, _session: None))
    options = {} if extractor is None else {"message_id": extractor}
    dispatcher = Dispatcher(factory, handler, **options)
    if expected is None:
        with pytest.raises(InvalidMessageIdError):
            dispatcher.deliver(event)
        return
    assert dispatcher.deliver(event).message_id == expected
    assert dispatcher.deliver(event, message_id="given").message_id == "given"


def test_composite_ids_cannot_be_confused() -> None:
    """The parts are length-prefixed: moving a character from one to the other gives another id, be it a colon."""
    assert cloudevents({"source": "a1", "id": "b"}) != cloudevents({"source": "a", "id": "1b"})
    assert cloudevents({"source": "a:b", "id": "c"}) != cloudevents({"source": "a", "id": "b:c"})
    assert kafka({"topic": "t1", "partition": 1, "offset": 2}) != kafka({"topic": "t", "partition": 11, "offset": 2})


@pytest.mark.parametrize("part", [1, True, 1.0, b"1", ("1",), object()], ids=lambda part: type(part).__name__)
def test_a_part_of_a_composite_id_is_of_its_own_type(part: object) -> None:
    """A number that prints like the text, or an object that prints its address, makes no id."""
    with pytest.raises(InvalidMessageIdError, match="must be str, not"):
        cloudevents({"source": "s", "id": part})
    with pytest.raises(InvalidMessageIdError, match="must be int, not"):
        kafka({"topic": "t", "partition": 0, "offset": True if part == 1 else part})


def test_a_uuid_in_a_composite_id_is_its_text() -> None:
    """As it is where it is the whole id."""
    of = uuid.UUID(int=1)
    assert cloudevents({"source": "s", "id": of}) == cloudevents({"source": "s", "id": str(of)})


def test_a_hashed_id_tells_types_and_texts_apart() -> None:
    """The hash is of the exact text; what is no id stays none."""
    of = hashed(lambda event: event)
    assert len({of("a"), of("A"), of("a "), of(uuid.UUID(int=1))}) == 4
    assert of(uuid.UUID(int=1)) == of(str(uuid.UUID(int=1)))
    with pytest.raises(InvalidMessageIdError):
        of(5)


# Events that are dictionaries: the dispatcher finds their type (``type=``) and id (``message_id=``) in the body ------

SEEN: list[tuple[str, Any]] = []


@projector(idempotent=True, name="seen")
class Seen:
    """Writes down what comes."""

    @on("flight.scheduled")
    def scheduled(self, event: Any, _session: Session) -> None:
        """Note an event by its name."""
        SEEN.append(("flight.scheduled", event))

    @on(dict)
    def other(self, event: Any, _session: Session) -> None:
        """Note any other dictionary."""
        SEEN.append(("dict", event))


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    """Forget what the test before has seen."""
    SEEN.clear()


SCHEDULED = {"message_id": "m1", "meta": {"type": "flight.scheduled"}}


@pytest.mark.parametrize(
    ("event", "handler"),
    [
        (SCHEDULED, "flight.scheduled"),
        (Message("m1", SCHEDULED), "flight.scheduled"),
        (Message(None, SCHEDULED), "flight.scheduled"),
        (Message("m1", SCHEDULED, type=dict), "dict"),
        (Message("m1", {}, type="flight.scheduled"), "flight.scheduled"),
        ({"message_id": "m1"}, "dict"),
        (Message("m1", {"meta": None}), "dict"),
    ],
    ids=["in the body", "in an envelope", "id in the body", "told", "told, not in the body", "nowhere", "None"],
)
def test_the_type_is_that_of_the_message_else_that_in_the_body_else_the_class(
    factory: sessionmaker[Session], event: Any, handler: str
) -> None:
    """A type that a message was given wins over the extractor's, and that one over the class of the body."""
    dispatcher = Dispatcher(factory, Seen(), type=by_path("meta.type"))
    deliveries = [dispatcher.deliver(event), *dispatcher.deliver_batch([event])]
    assert [name for name, _ in SEEN] == [handler]
    assert [each.message_id for each in deliveries] == ["m1", "m1"]


@pytest.mark.parametrize("kind", [5, ["flight.scheduled"], {"a": 1}, b"flight.scheduled"])
def test_what_is_no_type_is_refused(factory: sessionmaker[Session], kind: object) -> None:
    """A number is not taken for its text, and nothing is applied."""
    dispatcher = Dispatcher(factory, Seen(), type=by_path("type"))
    with pytest.raises(InvalidMessageError, match="the type of a message must be a class or a name"):
        dispatcher.deliver({"message_id": "m1", "type": kind})
    with pytest.raises(BatchFailed):
        dispatcher.deliver_batch([{"message_id": "m1", "type": kind}])
    assert SEEN == []


def test_a_type_that_nobody_wants_is_told_in_short(factory: sessionmaker[Session]) -> None:
    """A producer's megabyte does not become a log's."""
    dispatcher = Dispatcher(factory, Seen(), type=by_path("type"))
    with pytest.raises(UnhandledMessage, match=r"no handler for the name 'x{200}'; there is one for "):
        dispatcher.deliver({"message_id": "m1", "type": "x" * 1_000_000})


@pytest.mark.parametrize(
    ("event", "name", "remedy"),
    [
        ({"message_id": "m1"}, "the class builtins.dict", "Message(id, body, type=...) or Dispatcher(type="),
        (Message("m1", {}), "the class builtins.dict", "Message(id, body, type=...) or Dispatcher(type="),
        ([{"message_id": "m1"}], "the class builtins.list", "call deliver_batch"),
        (Message("m1", {}, type="ship"), "the name 'ship'", "add the name to into({...}); otherwise write a handler"),
        (Paid(), f"the class {__name__}.Paid", "Write a handler with @on"),
    ],
    ids=["a dict", "in an envelope", "a list", "a name", "a class"],
)
def test_what_nobody_handles_is_told_what_to_write(
    factory: sessionmaker[Session], event: object, name: str, remedy: str
) -> None:
    """A dict needs a type beside it or from its body; a list is a batch; a name belongs to `@on` or to `into`."""

    @projector(idempotent=True, name="flights")
    @on("flight")
    def flights(event: Any, _session: Session) -> None:
        SEEN.append(("flight", event))

    with pytest.raises(UnhandledMessage) as raised:
        Dispatcher(factory, flights).deliver(event)
    assert str(raised.value).startswith(f"no handler for {name}; there is one for the name 'flight'. ")
    assert remedy in str(raised.value)
    assert str(raised.value).endswith(", or pass unhandled='ignore'")
    assert len(str(raised.value)) < 240
    with pytest.raises(UnhandledMessage, match="no handler for "):
        flights.deliver(event, session_factory=factory)
    assert SEEN == []


def test_a_returned_value_is_warned_of_once(factory: sessionmaker[Session], caplog: pytest.LogCaptureFixture) -> None:
    """Nobody gets it; the message is applied all the same."""

    @projector(idempotent=True, name="returns-a-value")
    @on(str)
    def returns(event: str, _: Session) -> Any:
        return len(event)

    dispatcher = Dispatcher(factory, returns)
    assert [dispatcher.deliver("event", message_id=id_).outcome for id_ in "12"] == [Outcome.APPLIED] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "handler returns-a-value returned int, and the library ignores what a handler returns"
    ]


def test_an_id_in_bytes_is_refused_with_the_right_advice() -> None:
    """The text of ``str(b"7")`` would be another id."""
    with pytest.raises(InvalidMessageIdError, match=r"text, not bytes; .* bytes by value\.decode\(\)"):
        Message(cast(Any, b"7"), {})
