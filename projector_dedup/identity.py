"""The handlers of a projector, and the identity under which the markers of each are kept."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from typing import Any, Never, Protocol, overload

from .errors import HandlerDefinitionError
from .handler import Handler, On, Settings, check_parameters, check_session
from .message import valid_formerly, valid_handler

ON = "__projector_dedup_on__"  #: the attribute in which ``@on`` leaves what it says of a function
PROJECTOR = "__projector_dedup_projector__"  #: and ``@projector`` what it says of a class


class Instance(Protocol):
    """Any object that is no class: a class given by mistake is an error of types.

    Every object has a size. For a class, and for nothing else, the first line would have to hold too.
    """

    @overload
    def __sizeof__(self: type[Any]) -> Never: ...  # type: ignore[misc]  # that it never holds is the point
    @overload
    def __sizeof__(self) -> int: ...


def handlers_of(target: Any) -> list[Handler]:
    """Return the handlers of a function projector or of an instance of a ``@projector`` class; refuse anything else."""
    if isinstance(alone := getattr(target, "handler", None), Handler):  # that of a FunctionProjector
        return [alone]
    if isinstance(target, type):
        raise HandlerDefinitionError(f"give the dispatcher an instance, {target.__name__}(), not the class")
    cls = type(target)
    settings: Settings | None = getattr(cls, PROJECTOR, None)
    if settings is None:
        if isinstance(target, (list, tuple, set, frozenset)):
            raise HandlerDefinitionError(
                f"projectors are given one by one, not in a {cls.__name__}: Dispatcher(session_factory, First(), "
                "Second()), or Dispatcher(session_factory, *projectors)"
            )
        raise HandlerDefinitionError(f"{cls.__qualname__} is not a projector; decorate it with @projector(...)")
    if PROJECTOR not in vars(cls):  # names, and former names, belong to the class they were given to
        settings = replace(settings, name=None, formerly=())
    marked: dict[str, On] = {
        name: _inherited(getattr(function, ON), base, cls)
        for base in reversed(cls.__mro__)
        for name, member in vars(base).items()
        for function in (member, getattr(member, "__func__", None))  # @on may be under @staticmethod or @classmethod
        if hasattr(function, ON)
    }
    if not marked:
        raise HandlerDefinitionError(f"{cls.__qualname__} has no handler; mark its methods with @on(Event)")
    owner = settings.name or f"{cls.__module__}.{cls.__qualname__}"
    owners, pinned = [owner, *settings.formerly], is_pinned(cls, settings)
    return [
        handler_of(
            f"{owner}.{on.name or name}",
            joined(owners, [on.name or name, *on.former_parts]),
            getattr(target, name),
            on,
            settings,
            pinned=pinned,
        )
        for name, on in marked.items()
    ]


def _inherited(on: On, base: type[Any], cls: type[Any]) -> On:
    """Return what ``@on`` says of a method, without the former identities if ``cls`` inherits it from a projector."""
    return replace(on, formerly=on.former_parts) if base is not cls and PROJECTOR in vars(base) else on


def joined(owners: Iterable[str], parts: Iterable[str]) -> set[str]:
    """Return every identity that one of the owners gives to one of the parts."""
    return {f"{owner}.{part}" for owner, part in product(owners, parts)}


def is_pinned(target: Any, settings: Settings) -> bool:
    """True if a projector has the same identity wherever it runs: it has a name, or is in an imported module."""
    return settings.name is not None or not (target.__module__ == "__main__" or "<" in target.__qualname__)


def handler_of(
    identity: str, former: set[str], function: Callable[..., Any], on: On, settings: Settings, *, pinned: bool
) -> Handler:
    """Return the handler of a function, or raise ``HandlerDefinitionError`` if it would lose or double messages."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise HandlerDefinitionError(f"{identity} is a generator: calling it would run nothing; do not yield in it")
    check_parameters(identity, function)
    check_session(identity, function)
    if settings.idempotent and not pinned:
        raise HandlerDefinitionError(
            f"{identity} would have another identity when it runs from another place, and messages would be applied "
            'again; pin it with @projector(idempotent=True, name="...")'
        )
    if (settings.formerly or on.formerly) and not settings.idempotent:
        raise HandlerDefinitionError(
            f"{identity} has former names, but no markers under any name: formerly=[...] needs "
            "@projector(idempotent=True)"
        )
    former_identities = valid_formerly({*former, *on.former_identities} - {identity}, HandlerDefinitionError)
    return Handler(valid_handler(identity), function, on, settings, former_identities)
