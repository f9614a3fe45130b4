"""Tables whose rows may be read earlier and written later than a handler does it, unnoticed: what a database says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sqlalchemy import CursorResult, Row, Table
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable


@dataclass(frozen=True)
class PlainColumn:
    """A column of a type that is known."""

    accepts: Callable[[Any], bool]
    """Whether this value is stored without an error and comes back as it was given, in type and form."""
    can_change: bool
    """Whether it is in no index and no constraint, by which another row could refuse the value."""


@dataclass(frozen=True)
class PlainTable:
    """A table on which an UPDATE has no effect but its own: no trigger, no rule, nothing computed."""

    identity: object
    """The same for every name that the table goes by."""
    columns: Mapping[str, PlainColumn]
    """By name, those of a type that is known."""
    reads_ahead: bool
    """Whether it does not matter if more rows are read than were asked for."""


def parameter(place: int) -> str:
    """The name of a key's part, or of a list, among the parameters of ``PlainRows``; no column is called so."""
    return f"projector_dedup_{place}"


class UnreadableRowError(Exception):
    """The row that comes with a claim could not be read; the claim itself might have succeeded."""


class PlainRows:
    """What a database says of its tables, and how it reads rows early and writes them late. This one says nothing."""

    writes_late: ClassVar[bool] = False
    """Whether ``reading`` and ``writing`` are there."""

    def look(self, _connection: Connection, _table: Table) -> PlainTable | None:
        """What is known of the table, and may be relied upon in this transaction; None if it is not plain."""
        return None

    def claiming(self, marker: Table, table: Table, columns: tuple[str, ...]) -> Executable:
        """The claim of one marker, for ``Dialect.claim_and_read``, and one row by the parts of its key.

        It gives nothing for a duplicate, else a row of: whether what was read is what would be read later, the key, and
        ``columns``, all of them NULL if there is no such row.
        """
        raise NotImplementedError

    def inserted_alone(self, _connection: Connection, _marker: Table) -> object | None:
        """The identity of the marker table, if inserting there changes nothing else; None if it may."""
        return None

    def claim(self, connection: Connection, statement: Executable, parameters: Mapping[str, Any]) -> Row[Any] | None:
        """Run such a claim. Raises ``UnreadableRowError`` for errors that may be about the row."""
        try:
            result = connection.execute(statement, parameters)
        except DBAPIError as error:
            if not self.may_be_about_the_row(error):
                raise
            raise UnreadableRowError from error
        try:
            return self.first(connection, result)
        except Exception as error:  # a type of the ORM's cannot read it
            raise UnreadableRowError from error

    def may_be_about_the_row(self, _error: DBAPIError) -> bool:
        """Whether an error of such a claim may be for the row's sake."""
        return True

    def first(self, _connection: Connection, result: CursorResult[Any]) -> Row[Any] | None:
        """What such a claim gives."""
        return result.first()

    def reading(self, table: Table, columns: tuple[str, ...]) -> Executable:
        """SELECT the key and ``columns`` of many rows, by a list for each column of the key."""
        raise NotImplementedError

    def writing(self, table: Table, changed: tuple[str, ...]) -> Executable:
        """UPDATE the columns ``changed`` of many rows, by lists: first of each column of the key, then of those."""
        raise NotImplementedError
