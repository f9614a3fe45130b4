"""Operations, which ``@command`` makes of functions: what each is given (``Call``), and a caller gets (``Handled``)."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from types import UnionType
from typing import Any, Generic, Literal, Never, TypeVar, Union, cast, get_args, get_origin, overload
from uuid import UUID, uuid5

from sqlalchemy.orm import Session

from ..asyncio_names import AsyncSession
from ..errors import HandlerDefinitionError
from ..message import valid_formerly, valid_handler
from ..outcome import Outcome
from .codecs import Codec, json, raw, typed_json
from .errors import InvalidKeyError, Rejected
from .fingerprint import Fingerprint, whole
from .record import MAX_CODEC_BYTES

C = TypeVar("C")
R = TypeVar("R")
S = TypeVar("S")

_NAMESPACE = UUID("6f1b9a52-43c1-5f0e-9d5c-2a7c1f6d3b84")  # of this library: any would do, but never another
_READABLE = 200  # bytes; longer names are hashed


def derived_key(*parts: str) -> str:
    """Return a key that follows from ``parts``, such as a step's name and an event's id, and from no other parts.

    The same parts give the same key in every process: a saga that is run again asks for the same commands. A long one
    is hashed.
    """
    if not parts or not all(isinstance(part, str) for part in parts):
        raise InvalidKeyError("derived_key takes texts, as in derived_key('ship', event_id)")
    joined = "".join(f"{len(part)}:{part}" for part in parts)
    encoded = joined.encode("utf-8", "surrogatepass")
    return joined if len(encoded) <= _READABLE else f"sha256:{sha256(encoded).hexdigest()}"


def derived_id(*parts: str) -> UUID:
    """Return a UUID (version 5) that follows from ``parts``, and from no other parts."""
    return uuid5(_NAMESPACE, derived_key(*parts))


@dataclass(frozen=True)
class _Call(Generic[S]):
    session: S
    key: str | None
    scope: str | None = None
    operation: str = ""

    def derived_id(self, *parts: str) -> UUID:
        """Return an id for something that this command makes: the same whenever the same command runs again.

        A retry that comes after its record was deleted meets that primary key, instead of making a second one.
        Raises ``InvalidKeyError`` if the command was given without a key.
        """
        return derived_id(*self._parts("id"), *parts)

    def key_for(self, name: str) -> str:
        """Return the key under which another system, ``name``, is asked on behalf of this command.

        Raises ``InvalidKeyError`` if the command was given without a key.
        """
        return str(derived_id(*self._parts("key"), name))

    def _parts(self, kind: str) -> tuple[str, ...]:
        if self.key is None:
            raise InvalidKeyError("the command has no key, so nothing can be derived from it; give key=")
        return kind, self.scope or "", self.operation, self.key


@dataclass(frozen=True)
class Call(_Call[Session]):
    """Holds what a handler is given beside the command: the transaction's ``session``, and the caller's ``key``.

    The handler must not commit. A test makes one by hand: ``Call(session, key="k")``.
    """


@dataclass(frozen=True)
class AsyncCall(_Call[AsyncSession]):
    """Holds what an ``async def`` handler is given beside the command. See ``Call``."""


# What a caller gets -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rejection:
    """A refusal that a handler returns instead of a result: recorded together with the handler's writes.

    ``detail`` is what JSON can say. A handler whose writes are to be rolled back raises ``Rejected`` instead.
    """

    code: str
    detail: Any = None


@dataclass(frozen=True)
class Handled(Generic[R]):
    """The result of ``Commands.handle``, which returns only if an outcome is recorded, and raises otherwise.

    ``outcome`` is ``APPLIED`` for the caller whose command ran, ``DUPLICATE`` for all who asked again. ``rejection`` is
    None if the command has a result. ``recorded_at`` is when the record was begun, by the database's clock; only those
    who asked again know it, so it is None for the first. ``durable`` is False only inside
    ``testing.external_transaction``.
    """

    outcome: Outcome
    value: R | None
    rejection: Rejection | None = None
    recorded_at: datetime | None = None
    durable: bool = True

    @property
    def replayed(self) -> bool:
        """True if the command was handled before, and this is the recorded answer."""
        return self.outcome is Outcome.DUPLICATE

    @property
    def result(self) -> R:
        """The recorded result. Raises ``Rejected`` if the recorded answer is a rejection."""
        if self.rejection is not None:
            raise Rejected(self.rejection.code, self.rejection.detail, replayed=self.replayed)
        return cast(R, self.value)


# @command ---------------------------------------------------------------------------------------------------------

NO_RESULT: Codec[Any] = Codec("none", lambda _: b"", lambda _: None)
"""The codec of operations with ``default=``, whose records have no result."""

_FUNCTION, _METHOD = 2, 3  # positional arguments: the command and the call, and before them perhaps the object


@dataclass(frozen=True)
class Settings:
    """The arguments of ``@command``."""

    name: str | None
    formerly: tuple[str, ...]
    codec: Codec[Any] | None
    older_codecs: tuple[Codec[Any], ...]
    fingerprint: Fingerprint | None
    default: Callable[..., Any] | None
    key_required: bool
    read_models: tuple[type[Any], ...]
    isolation: str | None


class Operation(Generic[C, R]):
    """A function under ``@command``: its identity, and how its results are recorded."""

    asynchronous: bool

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        self.function = function
        self.settings = settings
        self.identity = settings.name or f"{function.__module__}.{function.__qualname__}"
        self.names = (self.identity, *(name for name in settings.formerly if name != self.identity))
        self.is_method = _takes_an_object(self.identity, function)
        _check_default(self.identity, settings.default, asynchronous=self.asynchronous)
        self.codec = settings.codec or (NO_RESULT if settings.default else _codec_of(self.identity, function))
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def bound_to(self, instance: object) -> Any:
        """Return the operation as a method of ``instance``; of a function that is no method, the operation itself."""
        if instance is None or not self.is_method:
            return self
        bound = type(self).__new__(type(self))
        bound.__dict__.update(self.__dict__, function=self.function.__get__(instance), is_method=False)
        return bound

    def codecs_called(self, name: str) -> list[Codec[Any]]:
        """Return the codecs that read what a codec of this name has stored; none if this code does not have them."""
        return [each for each in (self.codec, *self.settings.older_codecs) if each.name == name]


class Command(Operation[C, R]):
    """An operation for ``Commands.handle``. Calling it calls the function, in the caller's transaction."""

    asynchronous = False

    def __get__(self, instance: object, owner: type[Any] | None = None) -> Command[C, R]:
        return cast("Command[C, R]", self.bound_to(instance))

    def __call__(self, command: C, call: Call) -> R | Rejection:
        """Call the function as it was written: nothing is claimed, and nothing recorded."""
        return cast("R | Rejection", self.function(command, call))


class AsyncCommand(Operation[C, R]):
    """An operation for ``AsyncCommands.handle``: an ``async def``. See ``Command``."""

    asynchronous = True

    def __get__(self, instance: object, owner: type[Any] | None = None) -> AsyncCommand[C, R]:
        return cast("AsyncCommand[C, R]", self.bound_to(instance))

    async def __call__(self, command: C, call: AsyncCall) -> R | Rejection:
        """Call the function as it was written: nothing is claimed, and nothing recorded."""
        return cast("R | Rejection", await self.function(command, call))


class _Decorator:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @overload
    def __call__(
        self, function: Callable[[C, AsyncCall], Coroutine[Any, Any, R | Rejection]], /
    ) -> AsyncCommand[C, R]: ...
    @overload
    def __call__(
        self, function: Callable[[Any, C, AsyncCall], Coroutine[Any, Any, R | Rejection]], /
    ) -> AsyncCommand[C, R]: ...
    @overload
    def __call__(self, function: Callable[[C, Call], R | Rejection], /) -> Command[C, R]: ...
    @overload
    def __call__(self, function: Callable[[Any, C, Call], R | Rejection], /) -> Command[C, R]: ...
    def __call__(self, function: Any, /) -> Any:
        """Make an operation of the function. Raises ``HandlerDefinitionError``."""
        name = self._settings.name
        if not inspect.isroutine(function):
            raise HandlerDefinitionError(f"@command makes an operation of a function, not of {function!r}")
        if name is None and (function.__module__ == "__main__" or "<" in function.__qualname__):
            raise HandlerDefinitionError(
                f"{function.__qualname__} would have another identity when it runs from another place, and commands "
                'would run again; pin it with @command(name="...")'
            )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise HandlerDefinitionError(f"{function.__qualname__} is a generator: calling it would run nothing")
        return (AsyncCommand if inspect.iscoroutinefunction(function) else Command)(function, self._settings)


def command(
    *misplaced: Never,
    name: str | None = None,
    formerly: Collection[str] = (),
    codec: Codec[Any] | None = None,
    older_codecs: Sequence[Codec[Any]] = (),
    fingerprint: Fingerprint | None = whole,
    default: Callable[..., Any] | None = None,
    key: Literal["required", "optional"] = "optional",
    read_models: Sequence[type[Any]] = (),
    isolation: str | None = None,
) -> _Decorator:
    """Make an operation of a function or method that is called with ``(command, call)``, and must not commit.

    What it returns is recorded together with its writes. ``Rejection(code, detail)``, returned, is too; ``Rejected``,
    raised, is recorded after its writes were rolled back. Any other exception rolls everything back and records
    nothing, so that the same key may be tried again.

    ``name`` pins the operation, which else is ``module.function``; ``formerly`` lists its names from before, so that
    code of both names may run at once. ``codec`` says how results are stored; without one the annotation of what the
    function returns does. ``older_codecs`` read what codecs of
    their names have stored. ``fingerprint`` returns what must be the same when a key
    comes again: the whole command if it is not given; None compares nothing. With ``default``, a function like the
    operation itself, no result is stored, and who asks again gets what ``default`` returns from the present state.
    ``key="required"`` refuses calls without a key. ``read_models`` and ``isolation`` are those of ``@projector``.

    Raises ``HandlerDefinitionError`` for a wrong argument, and for a result that no codec can store.
    """
    if misplaced:
        raise HandlerDefinitionError(
            "@command is written with parentheses, and its arguments have names: @command() or "
            '@command(name="accounts.credit")'
        )
    given: object = read_models
    if not isinstance(given, Sequence) or not all(hasattr(model, "__mapper__") for model in given):
        raise HandlerDefinitionError("read_models is a list of mapped classes, as in read_models=[Account]")
    if key not in ("required", "optional"):
        raise HandlerDefinitionError(f"key is 'required' or 'optional', not {key!r}")
    if name is not None:
        valid_handler(name)
    for each in (*([codec] if codec else []), *older_codecs):
        if not all(hasattr(each, part) for part in ("name", "dumps", "loads")):
            raise HandlerDefinitionError(f"a codec has a name, dumps and loads; {each!r} has not")
        _check_codec_name(each.name)
    former = valid_formerly(formerly, HandlerDefinitionError)
    required = key == "required"
    return _Decorator(
        Settings(
            name, former, codec, tuple(older_codecs), fingerprint, default, required, tuple(read_models), isolation
        )
    )


def checked(operation: Any, *, asynchronous: bool, by: str, other: str) -> Operation[Any, Any]:
    """Return the operation that was given to ``by``; raise ``HandlerDefinitionError`` if it is none for ``by``."""
    if not isinstance(operation, Operation):
        raise HandlerDefinitionError(f"{by} takes a function under @command, not {operation!r}")
    if operation.asynchronous != asynchronous:
        has = "async def" if operation.asynchronous else "plain def"
        raise HandlerDefinitionError(f"{operation.identity} is {has}: handle it through {other}")
    if operation.is_method:
        raise HandlerDefinitionError(f"{operation.identity} is a method: give it as one of an object")
    return operation


def _check_default(identity: str, default: Any, *, asynchronous: bool) -> None:
    if default is None:
        return
    try:
        inspect.signature(default).bind(None, None)
    except (TypeError, ValueError) as error:
        raise HandlerDefinitionError(
            f"default= of {identity} is called with (command, call), also where the operation is a method ({error}); "
            "give a function that takes both"
        ) from error
    awaited = inspect.iscoroutinefunction(default) or inspect.iscoroutinefunction(type(default).__call__)
    if awaited != asynchronous:
        needed = "an async def" if asynchronous else "a plain def"
        raise HandlerDefinitionError(f"{identity} is {needed}, and its default= is not; make default= {needed}, too")


def _check_codec_name(name: object) -> None:
    if isinstance(name, str) and name.isprintable() and 0 < len(name.encode()) <= MAX_CODEC_BYTES:
        return
    raise HandlerDefinitionError(
        f"the name of a codec is stored with each result: it is a text of 1 to {MAX_CODEC_BYTES} bytes without control "
        f"characters, not {name!r:.80}; give Codec(...) such a name"
    )


def _takes_an_object(identity: str, function: Callable[..., Any]) -> bool:
    """Return True for a method, called with (self, command, call), and False for a function, (command, call).

    Raises ``HandlerDefinitionError`` for a function that takes other arguments.
    """
    signature = inspect.signature(function)
    for arguments in (_FUNCTION, _METHOD):
        try:
            signature.bind(*[None] * arguments)
        except TypeError:
            continue
        return arguments == _METHOD
    raise HandlerDefinitionError(f"{identity} is called with two arguments, (command, call), and takes {signature}")


def _codec_of(identity: str, function: Callable[..., Any]) -> Codec[Any]:
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise HandlerDefinitionError(
            f"{identity}: the annotation of its result cannot be read ({error}); define its types where the module "
            "does, or give @command(codec=...)"
        ) from error
    if "return" not in hints:
        raise HandlerDefinitionError(
            f"{identity} does not say what it returns, so nobody knows how to record it: annotate its result, as in "
            "-> None, or give @command(codec=...)"
        )
    kind = _without_rejection(hints["return"])
    if kind is bytes:
        return raw
    try:
        return json if kind in (Any, type(None)) else typed_json(kind)
    except HandlerDefinitionError as error:
        raise HandlerDefinitionError(f"{identity}: {error}") from error.__cause__


def _without_rejection(annotation: Any) -> Any:
    """Return the annotation without the ``Rejection`` that a handler may return instead of a result."""
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    rest = [each for each in get_args(annotation) if each is not Rejection]
    return Union[tuple(rest)] if rest else type(None)  # noqa: UP007  # made at run time
