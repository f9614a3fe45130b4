"""The transaction in which a marker was claimed, and what the database can say of both, by a round trip each."""

from __future__ import annotations

from typing import Any

from sqlalchemy import literal_column, select
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from ..dialects import Dialect, Failure, Status
from ..dialects.claims import marker_exists
from ..tables import DedupTables

_MARK = "the mark"


class ClaimTransaction:
    """The transaction of one unit of work, known by the marker that was claimed in it, or by a mark.

    Without a ``key`` there is no marker, and only the transaction can be asked about.
    """

    def __init__(
        self,
        connection: Connection,
        driver: Any,
        dialect: Dialect,
        tables: DedupTables,
        schemas: Any,  # the map by which it was claimed
        key: dict[str, Any] | None,
    ) -> None:
        self.connection = connection
        self.driver = driver
        self.dialect = dialect
        self.key = key
        self._tables = tables
        self._schemas = schemas
        self._marked = False
        self._transaction_id: str | None = None
        self._place: str | None = None

    def mark(self) -> None:
        """Mark the transaction, so that ``is_open`` can tell it from any that follows."""
        if self._transaction_id is None:  # a later one would be of whatever transaction is open by then
            self._transaction_id = self.dialect.transaction_id(self.connection)
        if self._transaction_id is None:
            self.dialect.mark_transaction(self.connection)
        self._marked = True

    def note_place(self) -> None:
        """Remember the schema or database of the claim, before a handler chooses another one for what comes next."""
        if self.where_claimed().schema_for_object(self._tables.marker) is None:
            self._place = self.dialect.place(self.connection)

    def is_open(self) -> bool:
        """True if the transaction that is open now is the claim's, and not aborted."""
        connection, marked, self._marked = self.where_claimed(), self._marked, False
        if self._transaction_id is not None:
            return self.dialect.transaction_id(connection) == self._transaction_id
        if marked:
            return self.dialect.is_marked(connection, self._tables.marker, self.key)
        if self.key is None:
            return Connection.execute(connection, select(literal_column("1"))).first() is not None
        return marker_exists(connection, self._tables.marker, self.key)

    def is_committed(self) -> bool | None:
        """True if the marker is there, now that its transaction has ended; False if it is not.

        None if there never was a marker, or nobody can tell.
        """
        if self.key is None:
            return None
        connection = self.where_claimed()
        if self.dialect.status(self.driver) in (Status.OPEN, Status.ABORTED):
            self.dialect.abandon(connection)  # what is open now will not be committed by us
        if self._transaction_id is not None:
            return self.dialect.has_committed(connection, self._transaction_id)
        try:
            if self._place is not None:
                places: Any = {**(self._schemas or {}), self._tables.marker.schema: self._place}
                connection = Connection.execution_options(connection, schema_translate_map=places)
            found = marker_exists(connection, self._tables.marker, self.key)
            # A handler may have chosen another schema, database or role since, for as long as the connection lives.
            named = connection.schema_for_object(self._tables.marker) is not None
            return found if named or self.dialect.is_only(connection, self._tables.marker) else None
        except DBAPIError as error:
            if connection.invalidated or self.dialect.classify(error) is Failure.TRANSIENT:
                raise
            return None

    def where_claimed(self) -> Connection:
        """Return the connection, with the schema map of the claim, whatever map a handler gave it since."""
        return Connection.execution_options(self.connection, schema_translate_map=self._schemas)  # past any guard


def what_is_durable(claimed: ClaimTransaction) -> str | None:
    """Return the words for what a commit below SQLAlchemy has left behind; None if there was no commit."""
    committed = claimed.is_committed()
    if committed:
        return (
            ", by a commit: the marker and what the handler had written by then are COMMITTED, and what it wrote later "
            "may not be. A redelivery will be skipped as a duplicate, so look at the read model"
        )
    if committed is None and claimed.key is None:
        return (
            ". If by a commit, what it had written by then is COMMITTED, and without a marker a redelivery writes it "
            "again: look at the read model first"
        )
    if committed is None:
        return (
            ". If by a commit, the marker and what it had written by then are COMMITTED, and a redelivery will be "
            "skipped as a duplicate. Which it was cannot be told, because several tables have the marker's name, or it "
            "cannot be read any more, after what the handler chose (a schema, a database, a role): look for the marker "
            "where it was claimed, and at the read model"
        )
    return None


class Savepoints:
    """The open savepoints of a unit of work, and the mark on its transaction, in the order in which they were set.

    The mark goes with the savepoint in which it was set, be that released or rolled back, and is then set again.
    """

    def __init__(self, claimed: ClaimTransaction) -> None:
        self._claimed = claimed
        self._open: list[str] = []

    def began(self, name: str) -> None:
        """Called after a savepoint was set."""
        self._open.append(name)

    def ended(self, name: str) -> None:
        """Called after a savepoint was ended; set the mark again if it ended with that.

        The transaction is still the one in which the savepoint was set, or it could not have been ended.
        """
        place = self._open.index(name) if name in self._open else 0
        gone = self._open[place:]
        del self._open[place:]
        if _MARK in gone:
            self.mark()

    def mark(self) -> None:
        """Mark the transaction, once: a second mark would belong to whatever transaction is open by then."""
        if _MARK in self._open:
            return
        self._open.append(_MARK)  # first: a listener that hears of the mark's own statement may ask for the driver
        try:
            self._claimed.mark()
        except BaseException:
            self._open.remove(_MARK)
            raise
