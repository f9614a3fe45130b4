"""The row that a handler asks for first, read by the statement that claims its message: one round trip less.

Most handlers begin by ``session.get(Entity, something in the event)``. Where in an event the key of that row is, the
first messages of a handler tell; from then on its row comes with the claim, from the same snapshot. It is given to the
handler if that is what it asks for, before anything else; if not, it is forgotten (docs/adr/0022-the-first-row.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

from sqlalchemy import Result, Table
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Mapper, Session
from sqlalchemy.sql import Executable

from .dialects import Dialect, Failure
from .dialects.plain_tables import parameter
from .errors import OvertakenError
from .event_keys import Key, Path, key_in, paths_to, places_in
from .message import Message, Route
from .plain import Plain, is_plain_beginning, is_plain_session, is_read_by, plain_entity

_CREDIT, _FAILED = 8, 4  # wrong guesses, beyond those that right ones make up for, and one that cost an attempt
_DUPLICATES = 2  # in a row: then more of them are likely
_ROUTES = 100

Load = Callable[[Any, Any], Any]


class Watched(Protocol):
    """The unit of work: ``guards.Guard``."""

    session: Session
    connection: Connection
    dialect: Dialect

    def before_statement(self, sql: str | None, written: Table | None) -> None:
        """Whether there may be another one: raises if the transaction is not ours any more."""

    def statement_failed(self, error: BaseException) -> None:
        """One of ours did, and nobody else saw it."""


class _Habit(NamedTuple):
    """What the handler asks for first when it gets an event of one kind."""

    entity: Any
    plain: Plain
    claiming: Executable  # a message, and reading that row
    paths: tuple[Path, ...]  # to its key, in the event
    types: tuple[type, ...]


class FirstRows:
    """Of one handler: what its messages have asked for first. Threads may share it; what they get is a guess."""

    def __init__(self) -> None:
        self._habits: dict[Route, _Habit] = {}
        self._plain: dict[Any, Plain | None] = {}  # by entity
        self._credit = _CREDIT
        self._duplicates = 0  # in a row

    @property
    def duplicates_follow(self) -> bool:
        """Whether it is likely that the next message is one more."""
        return self._duplicates >= _DUPLICATES

    def expected(self, watched: Watched, message: Message) -> FirstRow | None:
        """The row that the handler of a message will ask for, as it seems; None if there had better be none."""
        habit = self._habits.get(_route(message))
        if habit is None or self._credit <= 0:
            return None
        if habit.plain.is_listened_to() or not _is_plain(watched, habit.plain.mapper):
            return None
        with suppress(Exception):  # an event of a kind that nobody has thought of
            key = key_in(message.body, habit.paths, habit.types)
            if key is not None and habit.plain.identity_key(key) is not None:
                return FirstRow(watched, self, message, habit, key)
        return None

    def learning(self, watched: Watched, message: Message, marker: Table) -> _Learning | None:
        """What to learn it from; None if it is known, or nobody can know."""
        known = len(self._habits) == _ROUTES or _route(message) in self._habits
        return None if known or self._credit <= 0 else _Learning(watched, self, message, marker)

    def learn(self, message: Message, entity: Any, plain: Plain, key: Key, claiming: Callable[..., Executable]) -> None:
        """The handler of ``message`` asked for that row; ``claiming`` makes a statement of its table and columns."""
        paths: tuple[Path, ...] | None = None
        with suppress(Exception):  # the same
            paths = next(paths_to(key, places_in(message.body)), None)
        if paths is None:
            self.wrong(message)
        else:
            statement = claiming(plain.table, tuple(plain.columns[name] for name in plain.loaded))
            self._habits[_route(message)] = _Habit(entity, plain, statement, paths, tuple(map(type, key)))

    def plain(self, entity: Any, look: Callable[[], Plain | None]) -> Plain | None:
        """What is known of the entity, if its rows may be read ahead; the database is asked once."""
        if entity not in self._plain:
            found = look()
            self._plain[entity] = found if found is not None and found.reads_ahead else None
        return self._plain[entity]

    def claimed(self, *, new: bool) -> None:
        """What became of the claim of a message."""
        self._duplicates = 0 if new else self._duplicates + 1

    def right(self) -> None:
        """It asked for what was expected."""
        self._credit = min(self._credit + 1, _CREDIT)

    def wrong(self, message: Message, cost: int = 1) -> None:
        """It did not."""
        self._credit -= cost
        self._habits.pop(_route(message), None)


class _First:
    """Of one unit of work: stands between session and database until the handler has asked for something."""

    def __init__(self, watched: Watched, rows: FirstRows, message: Message) -> None:
        self._watched = watched
        self._rows = rows
        self._message = message
        self._waiting = True

    def get(self, entity: Any, ident: Any, load: Load) -> Any:
        """``session.get()``."""
        session, lost = self._watched.session, self._watched.connection.invalidated
        if not self._waiting or lost or session.identity_map or session.new or session.in_nested_transaction():
            # it does more than to send a SELECT, or less
            self.stop()
            return load(entity, ident)
        self._watched.before_statement(None, None)  # which it would be
        self._waiting = False
        return self._first(entity, ident, load)

    def before_statement(self, _statement: Any) -> None:
        """The handler began with something else."""
        self.stop()

    def stop(self) -> None:
        """Whatever it asks for from here on, it asks the database."""
        self._waiting = False

    def _first(self, entity: Any, ident: Any, load: Load) -> Any:
        raise NotImplementedError


class FirstRow(_First):
    """A row that was read because it is expected to be asked for."""

    def __init__(self, watched: Watched, rows: FirstRows, message: Message, habit: _Habit, key: Key) -> None:
        super().__init__(watched, rows, message)
        self._habit = habit
        self._key = key
        self._values: Mapping[str, Any] | None = None  # None: there is no such row

    def claim(self, insert: Callable[[Executable, Mapping[str, Any]], Result[Any]], marker: dict[str, Any]) -> bool:
        """Claim the message and read the row, in one statement."""
        parameters = marker | {parameter(place): part for place, part in enumerate(self._key)}
        dialect = self._watched.dialect
        try:
            result = insert(self._habit.claiming, parameters)
        except DBAPIError as error:
            if dialect.classify(error) is Failure.LOCK_TIMEOUT:
                self._rows.wrong(self._message)  # a redelivery need not wait for that table
            if not dialect.plain_rows.may_fail_reading(error):
                raise
            raise self._unreadable() from error
        try:
            row = result.first()
        except Exception as error:  # a type of the ORM's cannot read it
            raise self._unreadable() from error
        if row is None:
            return False
        lasts, *found = tuple(row)
        key, values = tuple(found[: len(self._key)]), found[len(self._key) :]
        if not lasts or key not in (self._key, (None,) * len(key)):
            self.stop()
        elif key == self._key:
            self._values = dict(zip(self._habit.plain.loaded, values, strict=True))
        return True

    def stop(self) -> None:
        """It was read for nothing."""
        if self._waiting:
            self._rows.wrong(self._message)
        super().stop()

    def _unreadable(self) -> OvertakenError:
        self._rows.wrong(self._message, _FAILED)
        return OvertakenError(
            "the row that the message seems to be about could not be read with its claim; run the unit of work again, "
            "which will not try that"
        )

    def _first(self, entity: Any, ident: Any, load: Load) -> Any:
        plain = self._habit.plain
        key = plain.identity_key(self._key)
        as_expected = entity is self._habit.entity and plain.identity_key(ident) == key
        if not as_expected or plain.is_listened_to() or not _is_plain(self._watched, plain.mapper):
            self._rows.wrong(self._message)
            return load(entity, ident)
        self._rows.right()
        return None if self._values is None else plain.restored(self._watched.session, key, self._values)


class _Learning(_First):
    """Nobody knows yet what the handler asks for."""

    def __init__(self, watched: Watched, rows: FirstRows, message: Message, marker: Table) -> None:
        super().__init__(watched, rows, message)
        self._marker = marker

    def _first(self, entity: Any, ident: Any, load: Load) -> Any:
        try:
            plain = self._rows.plain(entity, lambda: self._look(entity))
        except BaseException as error:
            self._rows.wrong(self._message)
            self._watched.statement_failed(error)
            raise
        key = plain.identity_key(ident) if plain is not None and _is_plain(self._watched, plain.mapper) else None
        instance = load(entity, ident)
        if plain is None or key is None:
            self._rows.wrong(self._message)
        else:
            claiming = partial(self._watched.dialect.plain_rows.claiming, self._marker)
            self._rows.learn(self._message, entity, plain, key[1], claiming)
        return instance

    def _look(self, entity: Any) -> Plain | None:
        connection, database = self._watched.connection, self._watched.dialect.plain_rows
        marker = database.inserted_alone(connection, self._marker)
        plain = plain_entity(entity, connection, database.look) if marker is not None else None
        return None if plain is None or plain.identity == marker else plain


def _route(message: Message) -> Route:
    return type(message.body) if message.type is None else message.type


def _is_plain(watched: Watched, mapper: Mapper[Any]) -> bool:
    """Whether nobody would notice."""
    session, connection = watched.session, watched.connection
    if not (is_plain_beginning(session, connection) and is_plain_session(session)):
        return False
    return is_read_by(connection, session, mapper)
