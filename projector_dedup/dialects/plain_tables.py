"""Tables whose rows may be read earlier and written later than a handler does it, unnoticed: what a database says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from typing import Any, ClassVar, NamedTuple, TypeVar
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import ColumnElement, CursorResult, FromClause, Row, Select, Table, and_, bindparam, true
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError, StatementError
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


def _is_key_text(value: Any) -> bool:
    """One that every database takes for a parameter."""
    return is_text(value) and "\0" not in value


_KEYS: dict[type[TypeEngine[Any]], Callable[[Any], bool]] = {
    **dict.fromkeys((sa.SmallInteger, sa.SMALLINT), partial(is_integer, bits=16)),
    **dict.fromkeys((sa.Integer, sa.INTEGER), partial(is_integer, bits=32)),
    **dict.fromkeys((sa.BigInteger, sa.BIGINT), is_integer),
    **dict.fromkeys((sa.String, sa.Unicode, sa.Text, sa.VARCHAR, sa.CHAR, sa.TEXT), _is_key_text),
    **dict.fromkeys((sa.Uuid, sa.UUID), _is_uuid),
}


def columns_to_ask_by(table: Table) -> dict[str, PlainColumn]:
    """The columns of the key, as they are mapped: enough where what is found is held against what was asked for."""
    found = {}
    for column in table.primary_key:
        is_other = column.type._variant_mapping or (isinstance(column.type, sa.Uuid) and not column.type.as_uuid)
        accepts = None if is_other else _KEYS.get(type(column.type))
        if accepts is not None:
            found[column.name] = PlainColumn(accepts, can_change=False)
    return found


class WantedRow(NamedTuple):
    """A row that is to be read with a claim: of which table, and which of its columns besides the key."""

    table: Table
    columns: tuple[str, ...]


class Wanted(NamedTuple):
    """The rows that are to be read with a claim; if ``locked``, under a lock against other writers."""

    rows: tuple[WantedRow, ...]
    locked: bool = False


def rows_beside(
    claimed: FromClause,
    lasts: ColumnElement[bool],
    wanted: Sequence[WantedRow],
    *,
    select: type[SelectT],
    bound_as: Callable[[TypeEngine[Any]], TypeEngine[Any]] = lambda kind: kind,
    locked: bool = False,
) -> SelectT:
    """Return what ``PlainRows.claiming`` promises, for the one row of ``claimed``: nothing but LEFT JOINs to it.

    If ``locked``, each row is locked by a subquery of its own, which does not run for a duplicate.
    """
    source, given, place = claimed, [lasts], count()
    for number, (table, columns) in enumerate(wanted):
        row: FromClause = table.alias(f"projector_dedup_row_{number}")
        names = [*(key.name for key in table.primary_key), *columns]
        asked = (
            row.c[key.name] == bindparam(parameter(next(place)), type_=bound_as(key.type)) for key in table.primary_key
        )
        if locked:
            found = sa.select(*(row.c[name].label(f"value_{at}") for at, name in enumerate(names))).where(*asked)
            row = found.with_for_update(key_share=True).lateral(f"projector_dedup_locked_{number}")
            names = [f"value_{at}" for at in range(len(names))]
            source = source.outerjoin(row, true())
        else:
            source = source.outerjoin(row, and_(*asked))
        given.extend(row.c[name] for name in names)
    return select(*given).select_from(source)


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

    def readable(self, _connection: Connection, _table: Table) -> PlainTable | None:
        """Return what is known of a table whose rows a claim may read; None if it may be more than a plain table.

        Nothing in the answer depends on the transaction in which it is asked, so it may be kept for an engine.
        """
        return None

    def claiming(self, marker: Table, wanted: Wanted) -> Executable:
        """The claim of one marker, for ``Dialect.claim_and_read``, and rows by the parts of their keys.

        It gives no row for a duplicate. Else it gives one, of: whether what was read is what would be read later; then
        for each of the rows ``wanted`` the key and the columns, all of them NULL if there is no such row.
        """
        raise NotImplementedError

    def keeps_snapshots(self, _connection: Connection) -> bool:
        """True if such a claim can tell whether the rows that it reads last to the end of the transaction."""
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
        except StatementError as error:  # of the database, or of a type that cannot send a key
            if isinstance(error, DBAPIError) and not self.may_be_about_the_row(error):
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
def claiming(rows: PlainRows, marker: Table, wanted: Wanted) -> Executable:
    """Keep what ``PlainRows.claiming`` gives: to build a statement takes as long as to run it."""
    return rows.claiming(marker, wanted)
