"""SQLAlchemy without this library: without deduplication, and with a marker that is written by hand."""

from __future__ import annotations

from collections.abc import Callable

from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from ..messages import Item
from .model import ByORM, Seen, add


class NoDedup(ByORM):
    """The handler's code in a transaction: a redelivery counts twice."""

    def __init__(self, name: str, change: Callable[[int, Session], None] = add) -> None:
        self.name = name
        self._change = change

    def one(self, message: Item) -> None:
        """BEGIN, the change, COMMIT."""
        with self.sessions.begin() as session:
            self._change(message.row, session)


class SelectThenInsert(ByORM):
    """What most people write first."""

    name = "SELECT, then INSERT"
    markers = "seen"

    def one(self, message: Item) -> None:
        """Look, write, and let the primary key find who was overtaken."""
        with self.sessions.begin() as session:
            if session.get(Seen, message.id) is None:
                session.add(Seen(message_id=message.id))
                add(message.row, session)


class InsertOnConflict(ByORM):
    """What those write who have thought about it."""

    name = "ON CONFLICT, by hand"
    engines = frozenset({"postgresql"})
    markers = "seen"

    def one(self, message: Item) -> None:
        """Whose INSERT returns a row, has a new message."""
        claim = insert(Seen).values(message_id=message.id).on_conflict_do_nothing().returning(Seen.message_id)
        with self.sessions.begin() as session:
            if session.scalar(claim) is not None:
                add(message.row, session)
