"""``@on``, the decorator that marks a handler. Its types tell type checkers which functions it accepts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, Protocol, TypedDict, TypeVar, Unpack, overload

from sqlalchemy.orm import Session

from .asyncio_names import AsyncSession
from .errors import HandlerDefinitionError
from .handler import On, refuse_second_of_one_name
from .identity import ON
from .message import Message, Route, valid_formerly
from .reads import DeclaredReads, Reads

E = TypeVar("E")
E1 = TypeVar("E1")
E2 = TypeVar("E2")
E3 = TypeVar("E3")
S = TypeVar("S", bound=Session | AsyncSession)
T = TypeVar("T")
R = TypeVar("R")


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
