"""The marker that a unit of work has claimed, and what the database can say of it: ``marks.Marker`` for the guard."""

from __future__ import annotations

from typing import Any

from sqlalchemy import literal_column, select
from sqlalchemy.engine import Connection

from .dialects import Dialect, Status
from .markers import marker_exists
from .tables import DedupTables


class ClaimedMarker:
    """Without a ``key`` there is none, and only the transaction can be asked about."""

    def __init__(
        self,
        connection: Connection,
        driver: Any,
        dialect: Dialect,
        tables: DedupTables,
        schemas: object,  # the map by which it was claimed
        key: dict[str, Any] | None,
    ) -> None:
        self.key = key
        self._connection = connection
        self._driver = driver
        self._dialect = dialect
        self._tables = tables
        self._schemas = schemas
        self._marked = False

    def mark_transaction(self) -> None:
        """From here on, ``is_ours`` can tell this transaction from any that follows it."""
        self._dialect.mark_transaction(self._connection)
        self._marked = True

    def is_ours(self) -> bool:
        """Whether the open transaction is the claim's, and not aborted."""
        connection, marked, self._marked = self._where_claimed(), self._marked, False
        if marked:
            return self._dialect.is_marked(connection, self._tables.marker, self.key)
        if self.key is None:
            return Connection.execute(connection, select(literal_column("1"))).first() is not None
        return marker_exists(connection, self._tables, self.key)

    def is_committed(self) -> bool | None:
        """What the handler's own commit or rollback left behind."""
        if self.key is None:
            return None
        connection = self._where_claimed()
        if self._dialect.status(self._driver) in (Status.OPEN, Status.ABORTED):
            self._dialect.abandon(connection)  # what is open now will not be committed by us
        return marker_exists(connection, self._tables, self.key)

    def _where_claimed(self) -> Connection:
        """The connection, which looks for the marker where it was claimed, whatever map a handler gave it since."""
        return self._connection.execution_options(schema_translate_map=self._schemas)
