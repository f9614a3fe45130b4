"""The marker that a unit of work has claimed, and what the database can say of it: ``marks.Marker`` for the guard."""

from __future__ import annotations

from typing import Any

from sqlalchemy import literal_column, select
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from ..dialects import Dialect, Failure, Status
from ..dialects.claims import marker_exists
from ..tables import DedupTables


class ClaimedMarker:
    """Without a ``key`` there is none, and only the transaction can be asked about."""

    def __init__(
        self,
        connection: Connection,
        driver: Any,
        dialect: Dialect,
        tables: DedupTables,
        schemas: Any,  # the map by which it was claimed
        key: dict[str, Any] | None,
    ) -> None:
        self.key = key
        self._connection = connection
        self._driver = driver
        self._dialect = dialect
        self._tables = tables
        self._schemas = schemas
        self._marked = False
        self._transaction_id: str | None = None
        self._place: str | None = None

    def mark_transaction(self) -> None:
        """From here on, ``is_ours`` can tell this transaction from any that follows it."""
        if self._transaction_id is None:  # a later one would be of whatever transaction is open by then
            self._transaction_id = self._dialect.transaction_id(self._connection)
        if self._transaction_id is None:
            self._dialect.mark_transaction(self._connection)
        self._marked = True

    def note_place(self) -> None:
        """Remember the schema or database of the claim, where its name does not say it."""
        if self._where_claimed().schema_for_object(self._tables.marker) is None:
            self._place = self._dialect.place(self._connection)

    def is_ours(self) -> bool:
        """Whether the open transaction is the claim's, and not aborted."""
        connection, marked, self._marked = self._where_claimed(), self._marked, False
        if self._transaction_id is not None:
            return self._dialect.transaction_id(connection) == self._transaction_id
        if marked:
            return self._dialect.is_marked(connection, self._tables.marker, self.key)
        if self.key is None:
            return Connection.execute(connection, select(literal_column("1"))).first() is not None
        return marker_exists(connection, self._tables.marker, self.key)

    def is_committed(self) -> bool | None:
        """True if the handler's own commit left it behind, False if a rollback did not, None if nobody can tell."""
        if self.key is None:
            return None
        connection = self._where_claimed()
        if self._dialect.status(self._driver) in (Status.OPEN, Status.ABORTED):
            self._dialect.abandon(connection)  # what is open now will not be committed by us
        if self._transaction_id is not None:
            return self._dialect.has_committed(connection, self._transaction_id)
        try:
            if self._place is not None:
                places: Any = {**(self._schemas or {}), self._tables.marker.schema: self._place}
                connection = Connection.execution_options(connection, schema_translate_map=places)
            found = marker_exists(connection, self._tables.marker, self.key)
            # A handler may have chosen another schema, database or role since, for as long as the connection lives.
            named = connection.schema_for_object(self._tables.marker) is not None
            return found if named or self._dialect.is_only(connection, self._tables.marker) else None
        except DBAPIError as error:
            if connection.invalidated or self._dialect.classify(error) is Failure.TRANSIENT:
                raise
            return None

    def _where_claimed(self) -> Connection:
        """The connection, which looks for the marker where it was claimed, whatever map a handler gave it since."""
        return Connection.execution_options(self._connection, schema_translate_map=self._schemas)  # past any guard
