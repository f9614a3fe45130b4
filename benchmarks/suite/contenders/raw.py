"""psycopg without SQLAlchemy, on the same tables: what the server and the driver alone cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from sqlalchemy import URL

from ..harness import Contender, Item
from ..servers import Place
from .orm import IDENTITY, TABLES, create_tables

_CLAIM = (
    "INSERT INTO processed_message (message_id, handler) VALUES (%s, %s) ON CONFLICT (message_id, handler) DO NOTHING"
)


class Raw(Contender):
    """Those below differ in how many statements they need."""

    markers = TABLES.marker.name
    autocommit = True

    def create(self, place: Place) -> None:
        """The tables of everybody."""
        create_tables(place)

    def connect(self, url: URL) -> None:
        """One connection."""
        plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
        self.connection = psycopg.connect(plain, autocommit=self.autocommit)

    def disconnect(self) -> None:
        """Close it."""
        self.connection.close()

    def deliver(self, messages: Sequence[Any]) -> None:
        """One by one."""
        for message in messages:
            self.one(message)

    def one(self, item: Item) -> None:
        """Apply one message."""
        raise NotImplementedError


class FourStatements(Raw):
    """BEGIN, claim, UPDATE, COMMIT."""

    name = "psycopg, 4 statements"
    autocommit = False

    def one(self, item: Item) -> None:
        """psycopg sends the BEGIN."""
        if self.connection.execute(_CLAIM, [item.id, IDENTITY]).rowcount:
            self.connection.execute("UPDATE total SET amount = amount + 1 WHERE id = %s", [item.row])
        self.connection.commit()


class OneStatement(Raw):
    """All of it in one."""

    name = "psycopg, one CTE"

    def one(self, item: Item) -> None:
        """The UPDATE finds its row only if the claim has one."""
        self.connection.execute(
            f"WITH claimed AS ({_CLAIM} RETURNING 1) "
            "UPDATE total SET amount = amount + 1 WHERE id = %s AND EXISTS (SELECT FROM claimed)",
            [item.id, IDENTITY, item.row],
        )


class SetBased(Raw):
    """A batch in one statement: the claims, and each row once."""

    name = "psycopg, set of 1000"
    batch = 1_000

    def messages(self, items: Sequence[Item]) -> Sequence[Any]:
        """Two columns for each batch."""
        batches = [items[start : start + self.batch] for start in range(0, len(items), self.batch)]
        return [([item.id for item in batch], [item.row for item in batch]) for batch in batches]

    def one(self, columns: Any) -> None:
        """Sorted, as every claim of many must be."""
        self.connection.execute(
            "WITH given AS (SELECT DISTINCT ON (id) id, row_id FROM unnest(%s::text[], %s::int[]) AS m (id, row_id)),"
            " claimed AS (INSERT INTO processed_message (message_id, handler) SELECT id, %s FROM given ORDER BY id"
            " ON CONFLICT (message_id, handler) DO NOTHING RETURNING message_id),"
            " gained AS (SELECT row_id, count(*) AS n FROM claimed JOIN given ON id = message_id GROUP BY row_id)"
            " UPDATE total SET amount = amount + n FROM gained WHERE total.id = gained.row_id",
            [*columns, IDENTITY],
        )


def contenders() -> list[Contender]:
    """All three."""
    return [FourStatements(), OneStatement(), SetBased()]
