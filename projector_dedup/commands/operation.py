"""``@command`` makes an operation of a function. The function gets a ``Call``, and the caller gets a ``Handled``."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass
from hashlib import sha256
from types import UnionType
from typing import Any, Generic, Literal, Never, TypeVar, Union, cast, get_args, get_origin, overload
from uuid import UUID, uuid5

from sqlalchemy.orm import Session

from ..asyncio_names import AsyncSession
from ..errors import HandlerDefinitionError
from ..message import valid_formerly, valid_handler
from .codecs import Codec, json, raw, typed_json
from .errors import InvalidKeyError, Rejection
from .fingerprint import Fingerprint, whole
from .lock import LOCK, LockFunction
from .record import MAX_CODEC_BYTES

C = TypeVar("C")
R = TypeVar("R")
S = TypeVar("S")

_NAMESPACE = UUID("6f1b9a52-43c1-5f0e-9d5c-2a7c1f6d3b84")  # of this library; it must never change
_READABLE = 200  # bytes; longer names are hashed


def derived_key(*parts: str) -> str:
    """Return a key that is derived from ``parts``, such as the name of a step and the id of an event.

    The same parts give the same key in every process, and different parts give different keys. So a saga that runs
    again calls the same commands. A long key is hashed.
    """
    if not parts or not all(isinstance(part, str) for part in parts):
        raise InvalidKeyError("derived_key takes one or more texts, as in derived_key('ship', event_id)")
    joined = "".join(f"{len(part)}:{part}" for part in parts)
    encoded = joined.encode("utf-8", "surrogatepass")
    return joined if len(encoded) <= _READABLE else f"sha256:{sha256(encoded).hexdigest()}"


def derived_id(*parts: str) -> UUID:
    """Return a UUID (version 5) that is derived from ``parts``. Different parts give different UUIDs."""
    return uuid5(_NAMESPACE, derived_key(*parts))


@dataclass(frozen=True)
class _Call(Generic[S]):
    session: S
    key: str | None
    scope: str | None = None
    operation: str = ""

    def derived_id(self, *parts: str) -> UUID:
        """Return an id for a row that this command creates. It is the same each time the same command runs.

        If a retry comes after its record was deleted, the primary key prevents a second row. Raises ``InvalidKeyError``
        if the command has no key.
        """
        return derived_id(*self._parts("id"), *parts)

    def key_for(self, name: str) -> str:
        """Return an idempotency key for a call to another system, ``name``, on behalf of this command.

        The key is the same each time the same command runs. Raises ``InvalidKeyError`` if the command has no key.
        """
        return str(derived_id(*self._parts("key"), name))

    def _parts(self, kind: str) -> tuple[str, ...]:
        if self.key is None:
            raise InvalidKeyError("the command has no key, so no id can be derived from it; give handle() a key=")
        return kind, self.scope or "", self.operation, self.key


@dataclass(frozen=True)
class Call(_Call[Session]):
    """The second argument of a command's handler: the ``session`` of the transaction, and the caller's ``key``.

    The handler must not commit. In a unit test, create one yourself: ``Call(session, key="k")``.
    """


@dataclass(frozen=True)
class AsyncCall(_Call[AsyncSession]):
    """The second argument of an ``async def`` handler, with an ``AsyncSession``. See ``Call``."""


# @command ---------------------------------------------------------------------------------------------------------

NO_RESULT: Codec[Any] = Codec("none", lambda _: b"", lambda _: None)
"""The codec of operations with ``default=``, whose records have no result."""

_FUNCTION, _METHOD = 2, 3  # positional arguments: (command, call), or (self, command, call)


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
    lock: LockFunction | None


class Operation(Generic[C, R]):
    """A function with ``@command``: its identity, and the codec of its results."""

    asynchronous: bool

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        self.function = function
        self.settings = settings
        self.identity = settings.name or f"{function.__module__}.{function.__qualname__}"
        self.names = (self.identity, *(name for name in settings.formerly if name != self.identity))
        self.is_method = _takes_an_object(self.identity, function)
        _check_default(self.identity, settings.default, asynchronous=self.asynchronous)
        self.codec = settings.codec or (NO_RESULT if settings.default else codec_of(self.identity, function))
        self.__name__ = function.__name__
        self.__doc__ = function.__doc__

    def bound_to(self, instance: object) -> Any:
        """Return the operation as a method of ``instance``. If the function is no method, return the operation."""
        if instance is None or not self.is_method:
            return self
        bound = type(self).__new__(type(self))
        bound.__dict__.update(self.__dict__, function=self.function.__get__(instance), is_method=False)
        return bound

    def codecs_called(self, name: str) -> list[Codec[Any]]:
        """Return this operation's codecs with the name ``name``, which may be none."""
        return [each for each in (self.codec, *self.settings.older_codecs) if each.name == name]


class Command(Operation[C, R]):
    """An operation for ``Commands.handle``. A direct call runs the function in the caller's transaction."""

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
            raise HandlerDefinitionError(f"write @command(...) above a function, not above {function!r}")
        if name is None and (function.__module__ == "__main__" or "<" in function.__qualname__):
            raise HandlerDefinitionError(
                f"{function.__qualname__} is defined in __main__ or inside a function, so its identity may change, and "
                'commands would then run again; give it a fixed name: @command(name="...")'
            )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise HandlerDefinitionError(
                f"{function.__qualname__} is a generator function, so a call would not run its code; remove the yield"
            )
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
    lock: LockFunction | None = None,
) -> _Decorator:
    """Make an operation of a function or a method. ``Commands.handle`` calls it with ``(command, call)``.

    The function must not commit. The library records its result together with its writes. If the function returns
    ``Rejection(code, detail)``, the library records that with the writes. If it raises ``Rejected``, the library rolls
    back the writes and records the rejection. After any other exception the library rolls back and records nothing, so
    the caller may retry with the same key.

    - ``name``: the name of the operation, which records store. The default is ``module.function``, so give a name
      before you move or rename the function.
    - ``formerly``: former names of the operation. Old and new code may run at the same time.
    - ``codec``: stores the results. The default follows from the annotation of the function's result.
    - ``older_codecs``: codecs that read the results that earlier versions of the code have stored.
    - ``fingerprint``: a function of the command that returns the values to compare when a key is used again. The
      default compares the whole command. None compares nothing.
    - ``default``: a function with the parameters of the operation. With it, the library stores no result: a repeated
      call gets what ``default`` returns at that time.
    - ``key``: ``"required"`` refuses calls without a key.
    - ``read_models``, ``isolation``: as in ``@projector``.
    - ``lock``: a function of the command that returns a lock key (text, int or UUID) or a list of them. Commands with
      the same lock key and the same scope run one after the other, from before the handler's first read until the
      COMMIT. ``claim_timeout`` limits the wait. Such a command needs a key.

    Raises ``HandlerDefinitionError`` for a wrong argument, and if no codec can store the result.
    """
    if misplaced:
        raise HandlerDefinitionError(
            'write @command with parentheses and named arguments: @command() or @command(name="accounts.credit")'
        )
    given: object = read_models
    if not isinstance(given, Sequence) or not all(hasattr(model, "__mapper__") for model in given):
        raise HandlerDefinitionError("read_models must be a list of mapped classes, as in read_models=[Account]")
    if key not in ("required", "optional"):
        raise HandlerDefinitionError(f"key must be 'required' or 'optional', not {key!r}")
    if name is not None:
        valid_handler(name)
    if LOCK in (name, *formerly):
        raise HandlerDefinitionError(f"the library stores locks under the name {LOCK}; choose another name")
    if lock is not None and not callable(lock):
        raise HandlerDefinitionError(
            f"lock must be a function of the command, such as lambda order: order.customer, not {lock!r}"
        )
    for each in (*([codec] if codec else []), *older_codecs):
        if not all(hasattr(each, part) for part in ("name", "dumps", "loads")):
            raise HandlerDefinitionError(f"a codec needs name, dumps and loads, and {each!r} lacks one of them")
        _check_codec_name(each.name)
    former = valid_formerly(formerly, HandlerDefinitionError)
    required = key == "required"
    return _Decorator(
        Settings(
            name,
            former,
            codec,
            tuple(older_codecs),
            fingerprint,
            default,
            required,
            tuple(read_models),
            isolation,
            lock,
        )
    )


def checked(operation: Any, *, asynchronous: bool, by: str, other: str) -> Operation[Any, Any]:
    """Return the operation that was passed to ``by``. Raises ``HandlerDefinitionError`` if ``by`` cannot take it."""
    if not isinstance(operation, Operation):
        raise HandlerDefinitionError(f"{by} takes a function with @command, not {operation!r}")
    if operation.asynchronous != asynchronous:
        has = "async def" if operation.asynchronous else "plain def"
        raise HandlerDefinitionError(f"{operation.identity} is {has}: use {other} for it")
    if operation.is_method:
        raise HandlerDefinitionError(
            f"{operation.identity} is a method; pass it bound to an object, as in service.place, not Service.place"
        )
    return operation


def _check_default(identity: str, default: Any, *, asynchronous: bool) -> None:
    if default is None:
        return
    try:
        inspect.signature(default).bind(None, None)
    except (TypeError, ValueError) as error:
        raise HandlerDefinitionError(
            f"the library calls default= of {identity} with (command, call), also if the operation is a method; pass a "
            f"function that takes both ({error})"
        ) from error
    awaited = inspect.iscoroutinefunction(default) or inspect.iscoroutinefunction(type(default).__call__)
    if awaited != asynchronous:
        needed = "an async def" if asynchronous else "a plain def"
        raise HandlerDefinitionError(f"{identity} is {needed}, and its default= is not; make default= {needed} too")


def _check_codec_name(name: object) -> None:
    if isinstance(name, str) and name.isprintable() and 0 < len(name.encode()) <= MAX_CODEC_BYTES:
        return
    raise HandlerDefinitionError(
        f"the name of a codec is stored with each result: it is a text of 1 to {MAX_CODEC_BYTES} bytes without control "
        f"characters, not {name!r:.80}; give Codec(...) such a name"
    )


def _takes_an_object(identity: str, function: Callable[..., Any]) -> bool:
    """Return True for a method with the parameters (self, command, call), False for a function with (command, call).

    Raises ``HandlerDefinitionError`` for a function with other parameters.
    """
    signature = inspect.signature(function)
    for arguments in (_FUNCTION, _METHOD):
        try:
            signature.bind(*[None] * arguments)
        except TypeError:
            continue
        return arguments == _METHOD
    raise HandlerDefinitionError(
        f"the library calls {identity} with two arguments, (command, call), but it takes {signature}"
    )


def codec_of(identity: str, function: Callable[..., Any]) -> Codec[Any]:
    """Return the codec for the annotated result of ``function``. Raises ``HandlerDefinitionError``."""
    try:
        hints = typing.get_type_hints(function)
    except Exception as error:
        raise HandlerDefinitionError(
            f"{identity}: the annotation of its result cannot be evaluated ({error}); define the types at the top "
            "level of the module, or give @command(codec=...)"
        ) from error
    if "return" not in hints:
        raise HandlerDefinitionError(
            f"{identity} has no annotation of its result, so the library does not know how to store the result; "
            "annotate it, as in -> None, or give @command(codec=...)"
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
