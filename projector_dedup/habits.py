"""What the messages of a handler have in common: which row it asks for first, and whether they are duplicates.

What is learned here is a guess, and decides only in which way a message is claimed and its row is read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from sqlalchemy.engine import Engine

from .event_keys import Key, Path, key_in, paths_to, places_in
from .message import Message, Route, route_of
from .plain import Plain

_CREDIT = 8  # wrong guesses, beyond those that right ones make up for, until there are no more
_LATEST, _DUPLICATES = 4, 3  # messages, and how many duplicates among them make another one likely
_ROUTES = 100


class Habit(NamedTuple):
    """What the handler asks for first when it gets an event of one kind."""

    entity: Any
    plain: Plain
    columns: tuple[str, ...]  #: of its table, that a SELECT gives
    paths: tuple[Path, ...]  #: to its key, in the event
    types: tuple[type, ...]

    def key_in(self, message: Message) -> Key | None:
        """The key of the row that the handler of this message will ask for, as it seems."""
        with suppress(Exception):  # an event of a kind that nobody has thought of
            key = key_in(message.body, self.paths, self.types)
            if key is not None and self.plain.identity_key(key) is not None:
                return key
        return None


class Habits:
    """The habits of one handler on one engine.

    Threads may share them: what they do to each other's guesses does not matter.
    """

    def __init__(self) -> None:
        self._habits: dict[Route, Habit] = {}
        self._plain: dict[Any, Plain | None] = {}  # by entity
        self._credit = _CREDIT
        self._otherwise: dict[Route, int] = {}  # how often it began with something else
        self._latest = 0  # messages, a bit for each: whether it was a duplicate
        self.duplicates_follow = False  #: whether it is likely that the next message is one more

    def claimed(self, *, new: bool) -> None:
        """What became of the claim of a message."""
        self._latest = (self._latest << 1 | (not new)) % (1 << _LATEST)
        self.duplicates_follow = self._latest.bit_count() >= _DUPLICATES

    def of(self, message: Message) -> Habit | None:
        """That of the kind of this message; None if it is not known, or not worth knowing."""
        return self._habits.get(route_of(message)) if self._credit > 0 else None

    def may_learn(self, message: Message) -> bool:
        """Whether it would be of use to know what the handler asks for."""
        if self._credit <= 0 or len(self._habits) >= _ROUTES:
            return False
        route = route_of(message)
        return route not in self._habits and self._otherwise.get(route, 0) < _CREDIT

    def began_otherwise(self, message: Message) -> None:
        """It asked for no row before anything else: at some time nobody waits for that any more."""
        if len(self._otherwise) < _ROUTES:
            route = route_of(message)
            self._otherwise[route] = self._otherwise.get(route, 0) + 1

    def plain(self, entity: Any, look: Callable[[], Plain | None]) -> Plain | None:
        """What is known of the entity, if its rows may be read ahead; the database is asked once."""
        if entity not in self._plain:
            found = look()
            self._plain[entity] = found if found is not None and found.reads_ahead else None
        return self._plain[entity]

    def learn(self, message: Message, entity: Any, plain: Plain, key: Key) -> None:
        """Remember that the handler of ``message`` asked for that row."""
        paths: tuple[Path, ...] | None = None
        with suppress(Exception):  # the same
            paths = next(paths_to(key, places_in(message.body)), None)
        if paths is None:
            self.wrong(message)
        else:
            columns = tuple(plain.columns[name] for name in plain.loaded)
            self._habits[route_of(message)] = Habit(entity, plain, columns, paths, tuple(map(type, key)))

    def right(self) -> None:
        """The handler asked for what was expected."""
        self._credit = min(self._credit + 1, _CREDIT)

    def wrong(self, message: Message, cost: int = 1) -> None:
        """It did not."""
        self._credit -= cost
        self._habits.pop(route_of(message), None)


class HabitsByEngine:
    """The habits of one handler, for each engine that its messages are applied on.

    One handler may be given several databases, and a catalogue that was read on one says nothing of another.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Engine, Habits] = WeakKeyDictionary()

    def on(self, engine: Engine) -> Habits:
        """Return the habits on just this engine; its ``execution_options()`` clones are other engines."""
        known = self._known.get(engine)
        return self._known.setdefault(engine, Habits()) if known is None else known
