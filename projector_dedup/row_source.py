"""The port of ``read_ahead``: all that the rest of the library knows of rows that are read before a handler asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Load = Callable[[Any, Any], Any]
"""SQLAlchemy's own ``session.get``, given an entity and a key."""


class RowSource(Protocol):
    """The rows that one unit of work has read ahead. A handler must not be able to tell that they were."""

    def get(self, entity: Any, ident: Any, load: Load) -> Any:
        """Return what ``session.get(entity, ident)`` would return; ``load`` reads it from the database."""

    def before_statement(self, statement: Any) -> None:
        """Called before a statement of the session runs, which may read or change any row."""

    def end_message(self) -> None:
        """Called between two messages of a batch: write what the first has changed, and empty the session."""

    def stop(self) -> None:
        """Called before COMMIT, and before statements that nobody sees: write everything, and serve no row any more."""


class ReadAhead(Protocol):
    """Reads rows ahead for one handler, on whichever engine its messages are delivered."""

    declares_rows: bool  #: whether ``prepare`` and ``claim`` are of use: the handler declares which rows it asks for

    def prepare(self, engine: Any, dialect: Any) -> None:
        """Called before a unit of work takes its connection: ask an engine's catalogue what it was not asked yet."""

    def claim(self, guard: Any, key: dict[str, Any], message: Any, insert: Callable[[], bool]) -> bool:
        """Claim one message, and give the guard the rows that came with it; ``insert`` claims without any.

        Raises ``ReadAheadError`` where the rows could not be read, and nothing of the unit of work may commit.
        """

    def batch(self, guard: Any, events: Sequence[Any]) -> RowSource:
        """Return the source of rows for several messages, whose handlers are given ``events`` in this order."""


class ReadAheadError(Exception):
    """Raised where rows could not be read with a claim: run the unit of work again, which will not try that.

    It ``lasts`` if the next message would meet it too; a lock that was not had in time does not.
    """

    def __init__(self, *, lasts: bool = True) -> None:
        super().__init__("rows could not be read with a claim")
        self.lasts = lasts
