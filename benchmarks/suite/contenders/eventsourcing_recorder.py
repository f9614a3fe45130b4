"""eventsourcing's own way: a projection whose view is a tracking recorder (psycopg 3, without SQLAlchemy).

It does not remember messages but the position in one ordered stream, in one row that is updated; what comes from a
position at or before that is refused. So there can be one consumer for each stream, and no message out of order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eventsourcing.persistence import IntegrityError, Tracking
from eventsourcing.postgres import PostgresDatastore, PostgresTrackingRecorder
from psycopg.sql import SQL
from sqlalchemy import URL

from ..harness import ROWS, Contender, Item
from ..servers import Place


class TotalsView(PostgresTrackingRecorder):  # type: ignore[misc]
    """The read model and the position, changed in one transaction."""

    def __init__(self, datastore: PostgresDatastore, **options: Any) -> None:
        super().__init__(datastore, **options)
        self.sql_create_statements.append(
            SQL("CREATE TABLE IF NOT EXISTS total (id integer PRIMARY KEY, amount integer NOT NULL)")
        )
        self.sql_create_statements.append(
            SQL(f"INSERT INTO total SELECT n, 0 FROM generate_series(0, {ROWS - 1}) n ON CONFLICT DO NOTHING")
        )

    def add(self, row: int, tracking: Tracking) -> None:
        """As its documentation counts events, with an UPDATE because the row is there."""
        with self.datastore.transaction(commit=True) as cursor:
            cursor.execute("UPDATE total SET amount = amount + 1 WHERE id = %s", (row,), prepare=True)
            self._insert_tracking(cursor, tracking)


class EventSourcing(Contender):
    """The view, called as a projection calls it."""

    name = "eventsourcing, tracking"
    markers = "notification_tracking"

    def create(self, place: Place) -> None:
        """Its table of positions, and the rows."""
        self.connect(place.url)
        self._view.create_table()
        self.disconnect()

    def connect(self, url: URL) -> None:
        """Its pool, of one connection."""
        self._datastore = PostgresDatastore(
            url.database, url.host or "127.0.0.1", url.port or 5432, url.username, url.password or "", pool_size=1
        )
        self._view = TotalsView(self._datastore)

    def disconnect(self) -> None:
        """Close it."""
        self._datastore.close()

    def messages(self, items: Sequence[Item]) -> Sequence[Any]:
        """Rows, and positions in the stream."""
        return [(item.row, Tracking("benchmark", item.number)) for item in items]

    def deliver(self, messages: Sequence[Any]) -> None:
        """What is refused was applied before."""
        for row, tracking in messages:
            try:
                self._view.add(row, tracking)
            except IntegrityError:
                continue


def contenders() -> list[Contender]:
    """It has no batches."""
    return [EventSourcing()]
