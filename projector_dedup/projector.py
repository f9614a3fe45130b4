"""The decorators ``@projector`` (of a class or a function) and ``@on`` (of a handler).

The overloads of ``@on`` let a type checker report a handler with wrong parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    Never,
    ParamSpec,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)
from uuid import UUID

from sqlalchemy.orm import Session, sessionmaker

from .asyncio_names import AsyncSession, async_sessionmaker
from .dispatcher import AsyncDispatcher, Dispatcher
from .errors import HandlerDefinitionError
from .handler import ON, PROJECTOR, On, Settings, handler_of, is_pinned, joined
from .message import Message, Route, valid_formerly
from .outcome import Delivery

C = TypeVar("C", bound=type[Any])
E = TypeVar("E")
E1 = TypeVar("E1")
if TYPE_CHECKING:
    from typing_extensions import TypeVar as WithDefault

    E2 = WithDefault("E2", default=Never)
    E3 = WithDefault("E3", default=Never)
P = ParamSpec("P")
NoResult = TypeVar("NoResult", bound=Awaitable[None] | None)  # what a handler returns
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
) -> Any:
    """Make a projector of a class with ``@on`` methods, or of one function with ``@on``.

    You can still call the class and the function directly, for example in a unit test.

    - ``idempotent``: True applies each message once, because a marker commits with the handler's writes. False runs
      each handler in a transaction too, but without a marker and without the marker table.
    - ``name``: the name of the projector, which markers store. The default is ``module.Class``, so give a name before
      you move or rename the class.
    - ``formerly``: the former names of the projector (of a function: former identities). The library claims each
      message under these names too, so old and new code may run at the same time.
    - ``read_models``: the entities that the handlers change, if many workers change the same rows. The library reads
      their rows under lock, on PostgreSQL at READ COMMITTED (docs/adr/0004-lost-updates.md). A handler that changes a
      row of another entity without a lock then gets an ``UnlockedWriteError``.
    - ``isolation``: overrides the isolation level.
    Raises ``HandlerDefinitionError`` for a wrong argument, at import.
    """
    given: object = read_models
    if not isinstance(given, Sequence) or not all(hasattr(model, "__mapper__") for model in given):
        raise HandlerDefinitionError("read_models must be a list of mapped classes, as in read_models=[Totals]")
    former = valid_formerly(formerly, HandlerDefinitionError)
    settings = Settings(idempotent, name, tuple(read_models), isolation, former)
    decorate = ProjectorDecorator(settings)
    return decorate if target is None else decorate(target)


class ProjectorDecorator:
    """The decorator that ``@projector(...)`` returns. Write it above a class or a function."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @overload
    def __call__(self, target: C, /) -> C: ...  # type: ignore[overload-overlap]  # a class can be called as well
    @overload
    def __call__(self, target: Callable[P, R], /) -> FunctionProjector[P, R]: ...
    def __call__(self, target: Any, /) -> Any:
        """Mark a class as a projector and return the class, or make a ``FunctionProjector`` of a function."""
        if isinstance(target, type):
            setattr(target, PROJECTOR, self._settings)
            return target
        return FunctionProjector(target, self._settings)


class FunctionProjector(Generic[P, R]):
    """A projector that consists of one function. ``deliver`` applies one event; a plain call runs the function."""

    def __init__(self, function: Callable[P, R], settings: Settings) -> None:
        if not callable(function):
            raise HandlerDefinitionError(
                f"write @projector above a class or a function; it was called with {function!r}. To name a projector, "
                'write @projector(name="...")'
            )
        functools.update_wrapper(self, function)
        self._function = function
        marked = getattr(function, ON, None)
        if marked is None:
            raise HandlerDefinitionError(
                f"{function.__qualname__} has no @on: write @projector(...), then @on(Event), then the function"
            )
        owner = settings.name or function.__module__
        identity = settings.name or f"{function.__module__}.{function.__qualname__}"
        if marked.name is not None:
            identity = f"{owner}.{marked.name}"
        former = {*settings.formerly, *joined([owner], marked.former_parts)}
        name, pinned = settings.name or identity, is_pinned(function, settings)
        self.handler = handler_of(identity, former, function, marked, settings, owner=name, pinned=pinned)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function directly: without a claim, and in the caller's transaction."""
        return self._function(*args, **kwargs)

    def deliver(
        self, event: object, *, message_id: str | UUID | None = None, session_factory: sessionmaker[Any]
    ) -> Delivery:
        """Apply the event once, in its own transaction. If ``deliver`` raises, do not acknowledge the message.

        ``message_id`` overrides the id in the event. The errors are those of a ``Dispatcher`` with one handler.
        """
        return Dispatcher(session_factory, self).deliver(event, message_id=message_id)

    async def adeliver(
        self, event: object, *, message_id: str | UUID | None = None, session_factory: async_sessionmaker[Any]
    ) -> Delivery:
        """Apply the event once with an ``async def`` function. The result and the errors are those of ``deliver``."""
        return await AsyncDispatcher(session_factory, self).deliver(event, message_id=message_id)


# @on ------------------------------------------------------------------------------------------------------------------


class Marks(Protocol[E]):
    """The type of ``@on(E)``: takes a function or a method with the parameters ``(event: E, session)`` and returns it.

    For the type checker, the parameters of the result are positional: no type can both keep and check their names.
    """

    # Methods come first: of a method that fits none, mypy takes the first result, and a function has no ``self``.
    @overload
    def __call__(self, function: Callable[[T, E, object], NoResult], /) -> Callable[[T, E, object], NoResult]: ...
    @overload
    def __call__(self, function: Callable[[E, object], NoResult], /) -> Callable[[E, object], NoResult]: ...
    @overload
    def __call__(self, function: Callable[[T, E, S], NoResult], /) -> Callable[[T, E, S], NoResult]: ...
    @overload
    def __call__(self, function: Callable[[E, S], NoResult], /) -> Callable[[E, S], NoResult]: ...


class OnOptions(TypedDict, total=False):
    """The arguments of ``@on`` that do not change how the handler is called."""

    name: str | None
    formerly: Collection[str]
    subclasses: bool


# Type checkers check the event of one, two or three classes. With more classes, or with names, the event is Any.
@overload
def on(
    event: type[E1],
    second: type[E2] = ...,
    third: type[E3] = ...,
    /,
    *,
    batch: Literal[False] = ...,
    envelope: Literal[False] = ...,
    **options: Unpack[OnOptions],
) -> Marks[E1 | E2 | E3]: ...
@overload
def on(
    event: type[E1],
    second: type[E2] = ...,
    third: type[E3] = ...,
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
) -> Marks[Any]:
    """Mark a method or a function as the handler of ``events``. An event is a class (the exact type) or a name.

    The library calls the handler with ``(event, session)``. The handler must not commit.

    - ``name``: the name of the handler, which markers store. The default is the name of the method, so give a name
      before you rename the method.
    - ``formerly``: former names of the method, or, with a dot, former identities of the whole handler. Old and new code
      may run at the same time (docs/operations.md). If the projector has former names too, the library stores a marker
      for each combination: four, if each had one other name. If both were renamed at once, declare only the former
      identity here, such as ``formerly=["Totals.add"]``: that is two markers.
    - ``subclasses``: True also takes events of derived classes.
    - ``envelope``: True passes the ``Message`` instead of its body.
    - ``batch``: True passes a list with all new events of a ``deliver_batch``, in their order. ``deliver`` then passes
      a list with one event.
    Raises ``HandlerDefinitionError`` for a wrong argument, at import.
    """
    if not events or not all(isinstance(event, (type, str)) for event in events):
        raise HandlerDefinitionError("@on takes the events of the handler, classes or names: @on(PaymentReceived)")

    former = valid_formerly(formerly, HandlerDefinitionError)

    def mark(function: Any) -> Any:
        setattr(function, ON, On(events, name, subclasses, envelope, former, batch))
        return function

    return mark
