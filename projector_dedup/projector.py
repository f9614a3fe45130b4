"""``@projector`` for classes and functions, ``@on`` for their handlers, and the projector that is one function.

The types of ``@on`` tell type checkers which functions it accepts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypedDict, TypeVar, Unpack, overload

from sqlalchemy.orm import Session, sessionmaker

from .asyncio_names import AsyncSession, async_sessionmaker
from .dispatcher import AsyncDispatcher, Dispatcher
from .errors import HandlerDefinitionError
from .handler import ON, PROJECTOR, On, Settings, handler_of, is_pinned, joined, refuse_second_of_one_name
from .message import Message, Route, valid_formerly
from .outcome import Delivery
from .read_models import DeclaredReads, Reads

C = TypeVar("C", bound=type[Any])
E = TypeVar("E")
E1 = TypeVar("E1")
E2 = TypeVar("E2")
E3 = TypeVar("E3")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Session | AsyncSession)
T = TypeVar("T")


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
    shared_session: bool = ...,
) -> ProjectorDecorator: ...
def projector(
    target: Any = None,
    /,
    *,
    idempotent: bool = False,
    name: str | None = None,
    formerly: Collection[str] = (),
    read_models: Sequence[type[Any]] = (),
    isolation: str | None = None,
    shared_session: bool = False,
) -> Any:
    """Make a projector of a class with ``@on`` methods, or of a function under ``@on``. Both can be called as before.

    With ``idempotent=True`` each message is applied once, by a marker that commits with the handler's writes. Without
    it, handlers run in a unit of work too, but the library reads and writes no marker and needs no table. ``name`` pins
    the identity, which is otherwise ``module.Class``, so that you can move the class. ``formerly`` lists former names
    (of a function, whole identities). Each message is claimed under these names too, so code of both names may run at
    the same time. ``read_models`` lists the entities that the handlers change, if many workers change the same rows.
    Their rows are read under lock (docs/adr/0003-lost-updates.md), on PostgreSQL at READ COMMITTED. A change of another
    entity's row without a lock then raises ``UnlockedWriteError``. ``isolation`` overrides the isolation level.

    ``shared_session=True`` runs the messages of a batch as a loop in one session does: rows stay in the session until
    the COMMIT. The session flushes at the end of the batch, at the end of a message that deletes a row, and before the
    first statement that the handler of a later message sends itself, also SQL text, and also if autoflush is off.
    ``session.get`` of a row that the session has sends nothing, so it does not autoflush. Handlers whose messages
    change the same rows need far fewer statements.

    Do not use ``shared_session`` if a handler assigns SQL expressions without a flush: the next message would replace
    the expression, and the update would be lost. Triggers, version counters and mapper events run once for each flush
    (docs/handlers.md). Without ``shared_session`` the session is flushed and emptied after each message, and a handler
    sees what it would see alone. Raises ``HandlerDefinitionError``.
    """
    given: object = read_models
    if not isinstance(given, Sequence) or not all(hasattr(model, "__mapper__") for model in given):
        raise HandlerDefinitionError("read_models is a list of mapped classes, as in read_models=[Totals]")
    former = valid_formerly(formerly, HandlerDefinitionError)
    settings = Settings(idempotent, name, tuple(read_models), isolation, former, shared_session)
    decorate = ProjectorDecorator(settings)
    return decorate if target is None else decorate(target)


class ProjectorDecorator:
    """``@projector`` with its arguments, to be written above a class or a function."""

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
    """A projector that consists of one function, which can be called as before. ``deliver`` applies one event."""

    def __init__(self, function: Callable[P, R], settings: Settings) -> None:
        if not callable(function):
            raise HandlerDefinitionError(
                f'@projector is written above a class or a function, not given {function!r}; a name is name="..."'
            )
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

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function itself, without a claim, in the transaction that the caller has."""
        return self._function(*args, **kwargs)

    def deliver(self, event: object, *, message_id: object = None, session_factory: sessionmaker[Any]) -> Delivery:
        """Apply the event once, in a unit of work of its own. Return only if the message may be acknowledged.

        ``message_id`` overrides the event's own id. Raises what ``Dispatcher.deliver`` raises with one handler.
        """
        return Dispatcher(session_factory, self).deliver(event, message_id=message_id)

    async def adeliver(
        self, event: object, *, message_id: object = None, session_factory: async_sessionmaker[Any]
    ) -> Delivery:
        """Apply the event once, by an ``async def`` function. Returns and raises what ``deliver`` does."""
        return await AsyncDispatcher(session_factory, self).deliver(event, message_id=message_id)


# @on ------------------------------------------------------------------------------------------------------------------


class Marks(Protocol[E]):
    """Takes the function of a handler of ``E``, called with ``(event, session)``, or such a method; returns it.

    Its parameters are positional afterwards: no type can keep their names and look into them.
    """

    @overload
    def __call__(self, function: Callable[[E, object], R], /) -> Callable[[E, object], R]: ...
    @overload
    def __call__(self, function: Callable[[T, E, object], R], /) -> Callable[[T, E, object], R]: ...
    @overload
    def __call__(self, function: Callable[[E, S], R], /) -> Callable[[E, S], R]: ...
    @overload
    def __call__(self, function: Callable[[T, E, S], R], /) -> Callable[[T, E, S], R]: ...


class OnOptions(TypedDict, total=False):
    """The arguments of ``@on`` that do not change how the handler is called."""

    name: str | None
    formerly: Collection[str]
    subclasses: bool
    reads: Reads | None


@overload
def on(
    event: type[E1],
    /,
    *,
    batch: Literal[False] = ...,
    envelope: Literal[False] = ...,
    **options: Unpack[OnOptions],
) -> Marks[E1]: ...
@overload
def on(
    event: type[E1],
    second: type[E2],
    /,
    *,
    batch: Literal[False] = ...,
    envelope: Literal[False] = ...,
    **options: Unpack[OnOptions],
) -> Marks[E1 | E2]: ...
@overload
def on(
    event: type[E1],
    second: type[E2],
    third: type[E3],
    /,
    *,
    batch: Literal[False] = ...,
    envelope: Literal[False] = ...,
    **options: Unpack[OnOptions],
) -> Marks[E1 | E2 | E3]: ...
@overload
def on(
    event: type[E1], /, *, batch: Literal[True], envelope: Literal[False] = ..., **options: Unpack[OnOptions]
) -> Marks[list[E1]]: ...
@overload
def on(
    event: type[E1],
    second: type[E2],
    /,
    *,
    batch: Literal[True],
    envelope: Literal[False] = ...,
    **options: Unpack[OnOptions],
) -> Marks[list[E1 | E2]]: ...
@overload
def on(
    event: type[E1],
    second: type[E2],
    third: type[E3],
    /,
    *,
    batch: Literal[True],
    envelope: Literal[False] = ...,
    **options: Unpack[OnOptions],
) -> Marks[list[E1 | E2 | E3]]: ...
@overload
def on(
    *events: Route, envelope: Literal[True], batch: Literal[False] = ..., **options: Unpack[OnOptions]
) -> Marks[Message]: ...
@overload
def on(
    *events: Route, envelope: Literal[True], batch: Literal[True], **options: Unpack[OnOptions]
) -> Marks[list[Message]]: ...
@overload
def on(
    *events: Route, batch: Literal[True], envelope: Literal[False] = ..., **options: Unpack[OnOptions]
) -> Marks[list[Any]]: ...
@overload
def on(*events: Route, batch: bool = ..., envelope: bool = ..., **options: Unpack[OnOptions]) -> Marks[Any]: ...
def on(
    *events: Route,
    name: str | None = None,
    formerly: Collection[str] = (),
    subclasses: bool = False,
    envelope: bool = False,
    batch: bool = False,
    reads: Reads | None = None,
) -> Marks[Any]:
    """Mark a method or a function as the handler of ``events``, each a class (the exact type) or a name.

    The handler is called with ``(event, session)``. It must not commit. ``name`` pins the method's part of the
    identity, so that you can rename the method. ``formerly`` lists former names of that part or, with a dot, former
    identities of the whole handler; code of both names may run at the same time (docs/operations.md). ``subclasses``
    also takes events of derived classes. ``envelope`` passes the ``Message`` instead of its body. ``batch`` passes the
    list of all events that ``deliver_batch`` found new, in their order; ``deliver`` then passes a list of one event.

    ``reads`` declares the rows that the handler gets by ``session.get``: for each entity a dotted path to the key in
    the event, a tuple of paths for a composite key, a list of these for several rows, or a function of the event that
    returns a list of keys. The library reads the rows as if the handler's first line had loaded them: by one SELECT for
    each entity, in the order of the keys, under lock if the entity is in ``read_models``. With ``batch=True``, or
    ``@projector(shared_session=True)``, it reads the rows of all messages together. It leaves a single key to the
    handler's own ``session.get``.

    ``session.get`` of a row that was read this way sends nothing, **and so it does not autoflush** the handler's
    earlier changes. Call ``session.flush()`` first if the database must have them, for example because a trigger
    changes the row. The session keeps the rows until a statement is sent that is not a SELECT. If a declaration finds
    no key, the library logs a warning once for each handler and ignores the declaration. Raises
    ``HandlerDefinitionError`` for a wrong argument.
    """
    if not events or not all(isinstance(event, (type, str)) for event in events):
        raise HandlerDefinitionError("@on takes the events it handles: classes or names, as in @on(PaymentReceived)")

    former = valid_formerly(formerly, HandlerDefinitionError)
    declared = None if reads is None else DeclaredReads(reads)

    def mark(function: Any) -> Any:
        refuse_second_of_one_name(function, ON)
        setattr(function, ON, On(events, name, subclasses, envelope, former, batch, declared))
        return function

    return mark
