"""Tables whose rows may be read earlier and written later than a handler does it, unnoticed: what a database says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Table
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


class PlainRows:
    """What a database says of its tables, and how it reads rows early and writes them late. This one says nothing."""

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

    def may_fail_reading(self, _error: DBAPIError) -> bool:
        """Whether an error of such a claim may be for the row's sake."""
        return True

    def reading(self, table: Table, columns: tuple[str, ...]) -> Executable:
        """SELECT the key and ``columns`` of many rows, by a list for each column of the key."""
        raise NotImplementedError

    def writing(self, table: Table, changed: tuple[str, ...]) -> Executable:
        """UPDATE the columns ``changed`` of many rows, by lists: first of each column of the key, then of those."""
        raise NotImplementedError
