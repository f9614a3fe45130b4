"""The declaration ``@on(..., reads={...})``: finds in an event the keys of the rows that its handler gets."""

from __future__ import annotations

import inspect as inspect_module
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from sqlalchemy import inspect
from sqlalchemy.orm import Mapper

from .errors import HandlerDefinitionError
from .message import by_path

Key: TypeAlias = tuple[Any, ...]
KeyPath: TypeAlias = str | tuple[str, ...]
"""A dotted path to the key of a row, or a path for each column of a composite key, in the order of the table."""
Reads: TypeAlias = Mapping[type[Any], KeyPath | list[KeyPath] | Callable[[Any], Iterable[Any]]]
"""A mapping from entities to the path to the key of a row, a list of paths, or a function that lists keys."""

_EXAMPLE = "as in reads={Totals: 'account_id'}"


class DeclaredReads:
    """The rows that a handler declares to read.

    Raises ``HandlerDefinitionError`` if a declaration names no entity, or another number of columns than its key has.
    """

    def __init__(self, reads: object) -> None:
        if not isinstance(reads, Mapping) or not reads:
            raise HandlerDefinitionError(f"reads takes a mapping from entities to where their keys are, {_EXAMPLE}")
        finders = {entity: _finder(entity, declared) for entity, declared in reads.items()}
        self._finders = {entity: finders[entity] for entity in sorted(finders, key=lambda each: each.__qualname__)}

    @property
    def entities(self) -> Iterable[type[Any]]:
        """The declared entities in the order of their names, whatever order the declaration has."""
        return self._finders.keys()

    def keys_of(self, entity: type[Any], event: Any) -> list[Key]:
        """Return the keys of the rows of ``entity`` that the handler of ``event`` will ask for, each once.

        A key can have any type, or be None. Raises what the event or the user's function raises.
        """
        return list(dict.fromkeys(self._finders[entity](event)))


def _finder(entity: Any, declared: object) -> Callable[[Any], Iterable[Key]]:
    mapper = inspect(entity, raiseerr=False)
    if not isinstance(entity, type) or not isinstance(mapper, Mapper):
        raise HandlerDefinitionError(f"reads names {entity!r}, which is no mapped class; name an entity, {_EXAMPLE}")
    width = len(mapper.primary_key)
    if callable(declared):
        if inspect_module.iscoroutinefunction(declared):
            raise HandlerDefinitionError(f"reads={{{entity.__name__}: ...}} takes a plain function, not an async one")
        return lambda event: [_key(each, width) for each in _listed(declared(event))]
    paths = [_paths(entity, width, each) for each in (declared if isinstance(declared, list) else [declared])]
    if not paths:
        raise HandlerDefinitionError(f"reads says nothing of where the keys of {entity.__name__} are, {_EXAMPLE}")
    return lambda event: [tuple(find(event) for find in parts) for parts in paths]


def _key(given: Any, width: int) -> Key:
    key = given if isinstance(given, tuple) else (given,)
    if len(key) != width:
        raise TypeError(f"a key has {width} columns, not {len(key)}")
    return key


def _listed(keys: Any) -> Iterable[Any]:
    if isinstance(keys, (str, bytes)) or not isinstance(keys, Iterable):
        raise TypeError(f"the function returns a list of keys, not {type(keys).__name__}")
    return keys


def _paths(entity: type[Any], width: int, declared: object) -> list[Callable[[Any], Any]]:
    parts = declared if isinstance(declared, tuple) else (declared,)
    for path in parts:
        if not isinstance(path, str) or not all(path.split(".")):
            raise HandlerDefinitionError(
                f"reads={{{entity.__name__}: ...}} takes a dotted path such as 'account.id', a tuple of paths for a "
                f"composite key, a list of these, or a function of the event; not {path!r}"
            )
    if len(parts) != width:
        one, key = entity.__name__, ", ".join(column.name for column in inspect(entity).primary_key)
        raise HandlerDefinitionError(
            f"the key of {one} is ({key}), and {declared!r} is not for {width} column{'s' * (width > 1)}: write a "
            f"tuple with a path for each column, reads={{{one}: ('a.b', 'c')}}; for several rows, a list of these"
        )
    return [by_path(path) for path in parts]
