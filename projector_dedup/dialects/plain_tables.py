"""Tables whose rows may be read earlier and written later than a handler does it, unnoticed: what a database says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, TypeVar
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import ColumnElement, CursorResult, FromClause, Row, Select, Table, and_, bindparam
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable
from sqlalchemy.types import TypeEngine

SelectT = TypeVar("SelectT", bound=Select[Any])

_AT_ONCE = {"stream_results": False, "yield_per": None}
_DECODING = (ArithmeticError, LookupError, TypeError, ValueError)


@dataclass(frozen=True)
class PlainColumn:
    """A column of a type that is known."""

    accepts: Callable[[Any], bool]
    """Whether this value is stored without an error and comes back as it was given, in type and form."""
    can_change: bool
    """Whether it is in no index and no constraint, by which another row could refuse the value."""


@dataclass(frozen=True)
class PlainTable:
    """A table whose rows are what they are when nothing writes to them: no view, nothing computed.

    And where ``PlainRows.writes_late``, one on which an UPDATE has no effect but its own: no trigger, no rule.
    """

    identity: object
    """The same for every name that the table goes by."""
    columns: Mapping[str, PlainColumn]
    """By name, those of a type that is known."""
    reads_ahead: bool
    """Whether it does not matter if more rows are read than were asked for."""


def _is_uuid(value: Any) -> bool:
    return type(value) is UUID


def is_integer(value: Any, *, bits: int = 64) -> bool:
    """One that a database has a type for."""
    return type(value) is int and -(1 << bits - 1) <= value < 1 << bits - 1


def is_text(value: Any) -> bool:
    """One that is UTF-8, too."""
    return type(value) is str and (value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value))


_KEYS: dict[type[TypeEngine[Any]], Callable[[Any], bool]] = {
    **dict.fromkeys((sa.Integer, sa.BigInteger, sa.SmallInteger, sa.INTEGER, sa.BIGINT, sa.SMALLINT), is_integer),
    **dict.fromkeys((sa.String, sa.Unicode, sa.Text, sa.VARCHAR, sa.CHAR, sa.TEXT), is_text),
    **dict.fromkeys((sa.Uuid, sa.UUID), _is_uuid),
}


def columns_to_ask_by(table: Table) -> dict[str, PlainColumn]:
    """The columns of the key, as they are mapped: enough where what is found is held against what was asked for."""
    found = {}
    for column in table.primary_key:
        accepts = None if column.type._variant_mapping else _KEYS.get(type(column.type))
        if accepts is not None:
            found[column.name] = PlainColumn(accepts, can_change=False)
    return found


def row_beside(
    claimed: FromClause,
    lasts: ColumnElement[bool],
    table: Table,
    columns: tuple[str, ...],
    *,
    select: type[SelectT],
    bound_as: Callable[[TypeEngine[Any]], TypeEngine[Any]] = lambda kind: kind,
) -> SelectT:
    """What ``PlainRows.claiming`` gives, for the one row of ``claimed``."""
    keys = list(table.primary_key)
    asked = (key == bindparam(parameter(place), type_=bound_as(key.type)) for place, key in enumerate(keys))
    found = claimed.outerjoin(table, and_(*asked))
    return select(lasts, *keys, *(table.c[name] for name in columns)).select_from(found)


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
        """The claim of one marker, for ``Dialect.claim_and_read``, and one row by the parts of its key; or just that.

        It gives nothing for a duplicate, else a row of: whether what was read is what would be read later, the key, and
        ``columns``, all of them NULL if there is no such row.
        """
        raise NotImplementedError

    def marker_identity(self, _connection: Connection, _marker: Table) -> object | None:
        """That of the marker table, if such a claim finds what a SELECT behind it would; None if it may not."""
        return None

    def level_is_known(self, _connection: Connection) -> bool:
        """Whether such a claim can tell at which level it ran."""
        return True

    def claim(self, connection: Connection, statement: Executable, parameters: Mapping[str, Any]) -> Row[Any] | None:
        """Run such a claim. Raises ``UnreadableRowError`` for errors that may be about the row."""
        result = self.executed(connection, statement, parameters)
        try:
            return result.first()
        except Exception as error:  # a type of the ORM's cannot read it
            raise UnreadableRowError from error

    def executed(
        self, connection: Connection, statement: Executable, parameters: Mapping[str, Any]
    ) -> CursorResult[Any]:
        """The same, not read yet. What an engine may ask for of every SELECT, to stream it, does not concern it."""
        try:
            return connection.execute(statement, parameters, execution_options=_AT_ONCE)
        except DBAPIError as error:
            if not self.may_be_about_the_row(error):
                raise
            raise UnreadableRowError from error
        except _DECODING as error:  # by a driver that reads rows at once; it is not wrapped
            raise UnreadableRowError from error

    def may_be_about_the_row(self, _error: DBAPIError) -> bool:
        """Whether an error of such a claim may be for the row's sake."""
        return True

    def reading(self, table: Table, columns: tuple[str, ...]) -> Executable:
        """SELECT the key and ``columns`` of many rows, by a list for each column of the key."""
        raise NotImplementedError

    def writing(self, table: Table, changed: tuple[str, ...]) -> Executable:
        """UPDATE the columns ``changed`` of many rows, by lists: first of each column of the key, then of those."""
        raise NotImplementedError


@lru_cache(256)
def claiming(rows: PlainRows, marker: Table, table: Table, columns: tuple[str, ...]) -> Executable:
    """Keep what ``PlainRows.claiming`` gives: to build a statement takes as long as to run it."""
    return rows.claiming(marker, table, columns)
