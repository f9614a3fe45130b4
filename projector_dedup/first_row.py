"""The row that a handler asks for first, read with the claim of its message: one round trip less.

Most handlers begin by ``session.get(Entity, something in the event)``. Where in an event the key of that row is, the
first messages of a handler tell; from then on its row comes with the claim, from the same snapshot. It is given to the
handler if that is what it asks for, before anything else; if not, it is forgotten (docs/adr/0022-the-first-row.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Row, Table

from .dialects import Failure
from .dialects.plain_tables import UnreadableRowError, parameter
from .errors import OvertakenError
from .event_keys import Key
from .habits import Habit, Habits
from .message import Message
from .plain import Plain, Watched, is_plain_beginning, is_read_by, loads_unheard, plain_entity

_FAILED = 4  # wrong guesses are as bad as one that cost an attempt

Load = Callable[[Any, Any], Any]
Insert = Callable[[Table, tuple[str, ...], Mapping[str, Any]], Row[Any] | None]


def expected_row(watched: Watched, habits: Habits, message: Message) -> FirstRow | None:
    """The row that the handler of a message will ask for, as it seems; None if there had better be none."""
    habit = habits.of(message)
    if habit is None or not _is_plain(watched, habit.plain):
        return None
    key = habit.key_in(message)
    return None if key is None else FirstRow(watched, habits, message, habit, key)


class _First:
    """Of one unit of work: stands between session and database until the handler has asked for something."""

    def __init__(self, watched: Watched, habits: Habits, message: Message) -> None:
        self._watched = watched
        self._habits = habits
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

    def __init__(self, watched: Watched, habits: Habits, message: Message, habit: Habit, key: Key) -> None:
        super().__init__(watched, habits, message)
        self._habit = habit
        self._key = key
        self._values: Mapping[str, Any] | None = None  # None: there is no such row

    def claim(self, insert: Insert, marker: dict[str, Any]) -> bool:
        """Claim the message and read the row; ``insert`` takes its table and columns, and the parameters."""
        parameters = marker | {parameter(place): part for place, part in enumerate(self._key)}
        try:
            row = insert(self._habit.plain.table, self._habit.columns, parameters)
        except UnreadableRowError as error:
            self._habits.wrong(self._message, _FAILED)
            raise OvertakenError(
                "the row that the message seems to be about could not be read with its claim; run the unit of work "
                "again, which will not try that"
            ) from error.__cause__
        except Exception as error:
            if self._watched.dialect.classify(error) is not Failure.TRANSIENT:
                self._habits.wrong(self._message)  # whatever it is about: the next message is claimed without the row
            raise
        if row is None:
            return False
        lasts, *found = tuple(row)
        key, values = tuple(found[: len(self._key)]), found[len(self._key) :]
        if lasts and key == self._key and tuple(map(type, key)) == self._habit.types:
            self._values = dict(zip(self._habit.plain.loaded, values, strict=True))
        elif not lasts or key != (None,) * len(key):
            self.stop()
        return True

    def stop(self) -> None:
        """It was read for nothing."""
        if self._waiting:
            self._habits.wrong(self._message)
        super().stop()

    def _first(self, entity: Any, ident: Any, load: Load) -> Any:
        plain = self._habit.plain
        key = plain.identity_key(self._key)
        as_expected = entity is self._habit.entity and plain.identity_key(ident) == key
        if not as_expected or not _is_plain(self._watched, plain):
            self._habits.wrong(self._message)
            return load(entity, ident)
        self._habits.right()
        return None if self._values is None else plain.restored(self._watched.session, key, self._values)


class Learning(_First):
    """Nobody knows yet what the handler asks for."""

    def __init__(self, watched: Watched, habits: Habits, message: Message, marker: Table) -> None:
        super().__init__(watched, habits, message)
        self._marker = marker

    def stop(self) -> None:
        """There was nothing to learn."""
        if self._waiting:
            self._habits.began_otherwise(self._message)
        super().stop()

    def _first(self, entity: Any, ident: Any, load: Load) -> Any:
        try:
            plain = self._habits.plain(entity, lambda: self._look(entity))
        except BaseException as error:
            self._habits.wrong(self._message)
            self._watched.statement_failed(error)
            raise
        key = plain.identity_key(ident) if plain is not None and _is_plain(self._watched, plain) else None
        instance = load(entity, ident)
        if plain is None or key is None:
            self._habits.wrong(self._message)
        else:
            self._habits.learn(self._message, entity, plain, key[1])
        return instance

    def _look(self, entity: Any) -> Plain | None:
        connection, database = self._watched.connection, self._watched.dialect.plain_rows
        marker = database.marker_identity(connection, self._marker)
        plain = plain_entity(entity, connection, database.look) if marker is not None else None
        return None if plain is None or plain.identity == marker else plain


def _is_plain(watched: Watched, plain: Plain) -> bool:
    """Whether nobody would notice."""
    session, connection = watched.session, watched.connection
    if not (is_plain_beginning(session, connection) and loads_unheard(session) and plain.loads_unheard()):
        return False
    if not watched.dialect.plain_rows.level_is_known(connection):
        return False
    return is_read_by(connection, session, plain.mapper)
