"""Guess which keys the messages of a batch will ask for, by the place of the key in the event of the message at hand.

A wrong guess costs the reading of a row; a row that was not read ahead is read when a handler asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from .event_keys import Key, Path, key_in, paths_to, places_in

_FIRST, _GROWTH, _MOST = 25, 4, 500  # messages whose rows are read at once: more, if the guess was right before
_GUESSES = 4  # for one entity


KeysOf = Callable[[Any, Any], list[Key]]
"""Returns the keys that ``reads`` declares for an entity and an event."""


def _none_declared(_entity: Any, _event: Any) -> list[Key]:
    return []


class _Guess:
    """One guess: the keys of an entity are at the same places in every event."""

    def __init__(self) -> None:
        self.asked = 0  # events before this one
        self.size = _FIRST


class KeysAhead:
    """The keys that the messages of one unit of work are expected to ask for."""

    def __init__(self, events: Sequence[Any], keys_of: KeysOf = _none_declared) -> None:
        self._events = events
        self._keys_of = keys_of
        self._seen: set[Any] = set()  # entities of which the declared keys were given
        self._at = 0
        self._places: Mapping[Any, list[Path]] | None = None  # in the event at hand, of what is there
        self._guesses: dict[object, dict[tuple[Path, ...], _Guess]] = {}

    def next_message(self) -> None:
        """Go on to the next message, whose event is the one at hand from here on."""
        self._at += 1
        self._places = None

    def of(self, entity: Any, key: Key) -> list[Key]:
        """Return keys of ``entity`` in the events to come, none twice, if the event at hand has ``key``.

        Where keys are declared, the first call returns those of all events. A declaration that does not give ``key``
        is a wrong one, and no worse than none.
        """
        if entity not in self._seen:
            self._seen.add(entity)
            declared = dict.fromkeys(
                each for event in self._events[self._at :] for each in self._keys_of(entity, event)
            )
            if key in declared:
                return list(declared)
        with suppress(Exception):  # an event of a kind that nobody has thought of
            return list(dict.fromkeys(self._ahead(entity, key)))
        return []

    def _ahead(self, entity: object, key: Key) -> Iterable[Key]:
        if self._places is None:
            self._places = places_in(self._events[self._at]) if self._at < len(self._events) else {}
        guesses = self._guesses.setdefault(entity, {})
        for paths in islice(paths_to(key, self._places), _GUESSES):
            if paths not in guesses and len(guesses) == _GUESSES:
                break
            guess = guesses.setdefault(paths, _Guess())
            if guess.asked <= self._at:
                return self._behind(self._at, guess, paths, key)
        if self._at == 0:  # a handler of lists goes through its events unseen: is it at one that was not asked?
            for paths, guess in guesses.items():
                for at in range(guess.asked, min(guess.asked + guess.size, len(self._events))):
                    if key_in(self._events[at], paths, tuple(map(type, key))) == key:
                        return self._behind(at, guess, paths, key)
        return ()

    def _behind(self, at: int, guess: _Guess, paths: tuple[Path, ...], key: Key) -> Iterable[Key]:
        guess.asked = at + 1 + guess.size
        guess.size = min(guess.size * _GROWTH, _MOST)
        types = tuple(map(type, key))
        found = (key_in(each, paths, types) for each in self._events[at + 1 : guess.asked])
        return (each for each in found if each is not None)
