"""Find the place of a row's key in an event, and the value at that place in another event.

Events are looked at as data: their own code is not run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from itertools import islice, product
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple
from uuid import UUID

Key = tuple[Any, ...]
Path = tuple[str | int, ...]
"""The way from an event to a value in it, by names and positions."""

_LOOKED_AT, _DEEPEST = 200, 6  # parts of an event
_LONGEST = 64  # text that is tried as a number or a UUID

_KEYS = (str, int, UUID)
_FORMS: Mapping[tuple[type, type], Callable[[Any], Any]] = {  # in which an event may have what is a key elsewhere
    (str, int): int,
    (str, UUID): UUID,
    (int, str): str,
    (UUID, str): str,
}


def key_in(event: Any, paths: tuple[Path, ...], types: tuple[type, ...]) -> Key | None:
    """Return the values at ``paths``, converted to ``types``; None if one of them is missing or cannot be converted."""
    parts = tuple(_as(_follow(event, path), kind) for path, kind in zip(paths, types, strict=True))
    return None if None in parts else parts


def paths_to(key: Key, places: Mapping[Any, list[Path]]) -> Iterator[tuple[Path, ...]]:
    """Yield every combination of paths at which an event has the parts of ``key``; ``places`` is of ``places_in``."""
    return product(*([path for form in _forms(part) for path in places.get(form, ())] for part in key))


def _forms(part: Any) -> Iterator[Any]:
    """Yield the values by which an event may write a part of a key: itself, or a number or UUID as text."""
    yield part
    for kind in _KEYS:
        if kind is not type(part) and (form := _as(part, kind)) is not None:
            yield form


def _as(value: Any, kind: type) -> Any:
    """Return ``value`` converted to a type, or None if that cannot be done."""
    if type(value) is kind:
        return value
    form = _FORMS.get((type(value), kind)) if _may_be_key(value) else None
    if form is None or (type(value) is str and len(value) > _LONGEST):
        return None
    with suppress(ValueError):
        return form(value)
    return None


def _may_be_key(value: Any) -> bool:
    kind = type(value)
    return kind is str or kind is int or kind is UUID  # a class of classes may have an __eq__ of its own


def places_in(event: Any) -> Mapping[Any, list[Path]]:
    """Return every value in an event that may be a key, with the paths to it; the shortest path comes first."""
    places: dict[Any, list[Path]] = {}
    todo: deque[tuple[Path, Any]] = deque([((), event)])
    left = _LOOKED_AT
    while todo:
        path, value = todo.popleft()
        if _may_be_key(value):
            places.setdefault(value, []).append(path)
        elif len(path) < _DEEPEST:
            parts = list(islice(_parts(value), left))
            left -= len(parts)
            todo.extend(((*path, step), part) for step, part in parts)
    return places


def _follow(value: Any, path: Path) -> Any:
    for step in path:
        value = _part(value, step)
    return value


# A value's parts, one or all, past whatever its class has of its own ------------------------------------------------


class _Fields(NamedTuple):
    """How instances of a class keep what they have: by descriptors that the interpreter made."""

    dictionary: GetSetDescriptorType | MemberDescriptorType | None
    slots: Mapping[str, MemberDescriptorType]

    def attributes(self, value: Any) -> dict[str, Any]:
        """Return the dictionary of an instance's attributes, or an empty one."""
        found = None if self.dictionary is None else self.dictionary.__get__(value)
        return found if type(found) is dict else {}

    def slot(self, value: Any, name: str) -> Any:
        """Return the value of a slot, or None if the slot is empty."""
        with suppress(AttributeError):
            return self.slots[name].__get__(value)
        return None


def _fields_of(value: Any) -> _Fields:
    kind: Any = type(value)
    its_class: Any = type(kind)
    cacheable = its_class.__eq__ is type.__eq__ and its_class.__hash__ is type.__hash__
    return _fields(kind) if cacheable else _Fields(None, {})


@lru_cache(256)  # classes that a program makes by the thousand must be able to go
def _fields(kind: type) -> _Fields:
    members: dict[str, object] = {}
    for each in kind.__mro__:
        members = {**vars(each), **members}  # of two of a name the first counts
    dictionary = members.get("__dict__")
    return _Fields(
        dictionary if isinstance(dictionary, (GetSetDescriptorType, MemberDescriptorType)) else None,
        {name: member for name, member in members.items() if isinstance(member, MemberDescriptorType)},
    )


def _parts(value: Any) -> Iterator[tuple[str | int, Any]]:
    kind = type(value)
    if issubclass(kind, dict):
        yield from ((name, part) for name, part in dict.items(value) if type(name) is str)
    elif issubclass(kind, list):
        yield from enumerate(list.__iter__(value))
    elif issubclass(kind, tuple):
        yield from enumerate(tuple.__iter__(value))
    else:
        fields = _fields_of(value)
        yield from dict.items(fields.attributes(value))
        yield from ((name, fields.slot(value, name)) for name in fields.slots)


def _part(value: Any, step: str | int) -> Any:
    """Return the part of a value by key, position or attribute; None if there is none, or only a property has it."""
    kind = type(value)
    if issubclass(kind, dict):
        return dict.get(value, step)
    if issubclass(kind, (list, tuple)):
        base = list if issubclass(kind, list) else tuple
        return base.__getitem__(value, step) if type(step) is int and step < base.__len__(value) else None
    fields, name = _fields_of(value), str(step)
    attributes = fields.attributes(value)
    return attributes[name] if name in attributes else fields.slot(value, name) if name in fields.slots else None
