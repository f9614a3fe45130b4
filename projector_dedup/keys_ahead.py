"""The keys of rows that the messages of a batch will ask for: by where in its event the message at hand has its own.

A guess, and no more: a row that was read for nothing costs its reading, and one that was not is read when it is asked
for. Events are looked at, and none of their code is run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice, product
from types import MemberDescriptorType
from typing import Any
from uuid import UUID

Key = tuple[Any, ...]
Path = tuple[str | int, ...]
"""From an event to something in it: by names and positions."""

_AT_ONCE = 500  # messages for which rows are read
_LOOKED_AT, _DEEPEST, _GUESSES = 200, 6, 8

_FORMS: Mapping[tuple[type, type], Callable[[Any], Any]] = {  # in which events have what is a key elsewhere
    (str, int): int,
    (str, UUID): UUID,
    (int, str): str,
    (UUID, str): str,
}
_KEYS = (str, int, UUID)
_ITERATION = (list.__iter__, tuple.__iter__)  # of a subclass, too, if it has none of its own


class KeysAhead:
    """Of one unit of work."""

    def __init__(self, events: Sequence[Any]) -> None:
        self._events = events
        self._at = 0
        self._guessed: dict[object, int] = {}  # for each guess: the first event that was not looked at

    def next_message(self) -> None:
        """The event at hand is the next."""
        self._at += 1

    def of(self, entity: object, key: Key) -> list[Key]:
        """Keys of rows of ``entity``: of the events to come, if ``key`` is in that at hand. None of them twice."""
        event = self._events[self._at] if self._at < len(self._events) else None
        candidates = [[path for path, value in _leaves(event) if _as(value, type(part)) == part] for part in key]
        for paths in islice(product(*candidates), _GUESSES):
            if self._guessed.get((entity, paths), 0) <= self._at:
                end = self._guessed[entity, paths] = self._at + 1 + _AT_ONCE
                types = tuple(map(type, key))
                found = (_key_in(each, paths, types) for each in self._events[self._at + 1 : end])
                return list(dict.fromkeys(each for each in found if each is not None))
        return []


def _key_in(event: Any, paths: tuple[Path, ...], types: tuple[type, ...]) -> Key | None:
    parts = tuple(_as(_follow(event, path), kind) for path, kind in zip(paths, types, strict=True))
    return None if None in parts else parts


def _leaves(event: Any) -> Iterator[tuple[Path, Any]]:
    """What is in an event that may be a key, and where; what lies on top comes first."""
    found: deque[tuple[Path, Any]] = deque([((), event)])
    for _ in range(_LOOKED_AT):
        if not found:
            return
        path, value = found.popleft()
        if isinstance(value, _KEYS):
            yield path, value
        elif len(path) < _DEEPEST:
            found.extend(((*path, step), part) for step, part in islice(_parts(value), _LOOKED_AT))


def _parts(value: Any) -> Iterator[tuple[str | int, Any]]:
    if isinstance(value, dict):
        yield from ((name, part) for name, part in tuple(dict.items(value)) if type(name) is str)
    elif _is_list(value):
        yield from enumerate(value)
    else:
        for name in (*_attributes(value), *_slots(type(value).__mro__)):
            yield name, _part(value, name)


def _follow(value: Any, path: Path) -> Any:
    for step in path:
        value = _part(value, step)
    return value


def _part(value: Any, step: str | int) -> Any:
    """None where there is none."""
    if isinstance(value, dict):
        return dict.get(value, step)
    if _is_list(value):
        return value[step] if isinstance(step, int) and step < len(value) else None
    if step in (attributes := _attributes(value)):
        return attributes[step]
    return _attribute(value, str(step)) if step in _slots(type(value).__mro__) else None


def _is_list(value: Any) -> bool:
    return type(value).__iter__ in _ITERATION if isinstance(value, (list, tuple)) else False


def _attributes(value: Any) -> Mapping[Any, Any]:
    found = _attribute(value, "__dict__")
    return found if type(found) is dict else {}


def _attribute(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return None


@cache
def _slots(classes: tuple[type, ...]) -> tuple[str, ...]:
    found = [name for each in classes for name, it in vars(each).items() if isinstance(it, MemberDescriptorType)]
    return tuple(dict.fromkeys(found))


def _as(value: Any, kind: type) -> Any:
    """None if it is none of that type."""
    if type(value) is kind:
        return value
    form = _FORMS.get((type(value), kind))
    try:
        return None if form is None else form(value)
    except ValueError:
        return None
