"""The keys of rows that the messages of a batch will ask for: by where in its event the message at hand has its own.

A guess, and no more: a row that was read for nothing costs its reading, and one that was not is read when it is asked
for. Events are looked at as data. Their own code is not run, and whatever happens all the same is no guess.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import islice, product
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any, NamedTuple
from uuid import UUID

Key = tuple[Any, ...]
Path = tuple[str | int, ...]
"""From an event to something in it: by names and positions."""

_FIRST, _GROWTH, _MOST = 25, 4, 500  # messages whose rows are read at once: more, if the guess was right before
_GUESSES = 4  # for one entity
_LOOKED_AT, _DEEPEST = 200, 6  # parts of an event
_LONGEST = 64  # text that is tried as a number or a UUID

_KEYS = (str, int, UUID)
_FORMS: Mapping[tuple[type, type], Callable[[Any], Any]] = {  # in which an event may have what is a key elsewhere
    (str, int): int,
    (str, UUID): UUID,
    (int, str): str,
    (UUID, str): str,
}


class _Guess:
    """That the keys of an entity are at the same places in every event."""

    def __init__(self) -> None:
        self.asked = 0  # events before this one
        self.size = _FIRST


class KeysAhead:
    """Of one unit of work."""

    def __init__(self, events: Sequence[Any]) -> None:
        self._events = events
        self._at = 0
        self._places: Mapping[Any, list[Path]] | None = None  # in the event at hand, of what is there
        self._guesses: dict[object, dict[tuple[Path, ...], _Guess]] = {}

    def next_message(self) -> None:
        """The event at hand is the next."""
        self._at += 1
        self._places = None

    def of(self, entity: object, key: Key) -> list[Key]:
        """Keys of rows of ``entity``: of the events to come, if ``key`` is in that at hand. None of them twice."""
        with suppress(Exception):  # an event of a kind that nobody has thought of
            return list(dict.fromkeys(self._ahead(entity, key)))
        return []

    def _ahead(self, entity: object, key: Key) -> Iterable[Key]:
        if self._places is None:
            self._places = _places_in(self._events[self._at]) if self._at < len(self._events) else {}
        candidates = [[path for form in _forms(part) for path in self._places.get(form, ())] for part in key]
        guesses = self._guesses.setdefault(entity, {})
        for paths in islice(product(*candidates), _GUESSES):
            if paths not in guesses and len(guesses) == _GUESSES:
                break
            guess = guesses.setdefault(paths, _Guess())
            if guess.asked <= self._at:
                return self._behind(self._at, guess, paths, key)
        if self._at == 0:  # a handler of lists goes through its events unseen: is it at one that was not asked?
            for paths, guess in guesses.items():
                for at in range(guess.asked, min(guess.asked + guess.size, len(self._events))):
                    if _key_in(self._events[at], paths, tuple(map(type, key))) == key:
                        return self._behind(at, guess, paths, key)
        return ()

    def _behind(self, at: int, guess: _Guess, paths: tuple[Path, ...], key: Key) -> Iterable[Key]:
        guess.asked = at + 1 + guess.size
        guess.size = min(guess.size * _GROWTH, _MOST)
        types = tuple(map(type, key))
        found = (_key_in(each, paths, types) for each in self._events[at + 1 : guess.asked])
        return (each for each in found if each is not None)


def _key_in(event: Any, paths: tuple[Path, ...], types: tuple[type, ...]) -> Key | None:
    parts = tuple(_as(_follow(event, path), kind) for path, kind in zip(paths, types, strict=True))
    return None if None in parts else parts


def _forms(part: Any) -> Iterator[Any]:
    """As which an event may have it."""
    yield part
    for kind in _KEYS:
        if kind is not type(part) and (form := _as(part, kind)) is not None:
            yield form


def _as(value: Any, kind: type) -> Any:
    """None if it is none of that type."""
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


def _places_in(event: Any) -> Mapping[Any, list[Path]]:
    """What is in an event that may be a key, and where; what lies on top comes first."""
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
        """What is in its dictionary."""
        found = None if self.dictionary is None else self.dictionary.__get__(value)
        return found if type(found) is dict else {}

    def slot(self, value: Any, name: str) -> Any:
        """None if it is empty."""
        with suppress(AttributeError):
            return self.slots[name].__get__(value)
        return None


def _fields_of(value: Any) -> _Fields:
    kind: Any = type(value)
    its_class: Any = type(kind)
    plain = its_class.__eq__ is type.__eq__ and its_class.__hash__ is type.__hash__
    return _fields(kind) if plain else _Fields(None, {})


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
    """None where there is none."""
    kind = type(value)
    if issubclass(kind, dict):
        return dict.get(value, step)
    if issubclass(kind, (list, tuple)):
        base = list if issubclass(kind, list) else tuple
        return base.__getitem__(value, step) if type(step) is int and step < base.__len__(value) else None
    fields, name = _fields_of(value), str(step)
    attributes = fields.attributes(value)
    return attributes[name] if name in attributes else fields.slot(value, name) if name in fields.slots else None
