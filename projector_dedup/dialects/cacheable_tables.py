"""Define which tables are safe to cache, and read rows of these with a claim: the part that databases share."""

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
class CacheableColumn:
    """Describes a column whose type is known."""

    accepts: Callable[[Any], bool]
    """Return True if a value is stored without an error, and read back as it was given, in type and form."""
    can_change: bool
    """True if the column is in no index and no constraint, by which another row could refuse the value."""


@dataclass(frozen=True)
class CacheableTable:
    """Describes a table whose rows stay the same while nothing writes to them: no view, no computed column.

    If ``CacheableRows.writes_late``, an UPDATE of it also has no other effect: no trigger, no rule.
    """

    identity: object
    """A value that is equal for all names by which the table can be reached."""
    columns: Mapping[str, CacheableColumn]
    """The columns whose type is known, by name."""
    reads_ahead: bool
    """True if reading more rows than were asked for does no harm."""


def _is_uuid(value: Any) -> bool:
    return type(value) is UUID


def is_integer(value: Any, *, bits: int = 64) -> bool:
    """True if the value is an integer of at most ``bits`` bits, with its sign."""
    return type(value) is int and -(1 << bits - 1) <= value < 1 << bits - 1


def is_text(value: Any) -> bool:
    """True if the value is text that can be written as UTF-8: it has no lone surrogates."""
    return type(value) is str and (value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value))


def _is_key_text(value: Any) -> bool:
    """True if the value is text that every database takes as a parameter: PostgreSQL refuses NUL."""
    return is_text(value) and "\0" not in value


_KEYS: dict[type[TypeEngine[Any]], Callable[[Any], bool]] = {
    **dict.fromkeys((sa.SmallInteger, sa.SMALLINT), partial(is_integer, bits=16)),
    **dict.fromkeys((sa.Integer, sa.INTEGER), partial(is_integer, bits=32)),
    **dict.fromkeys((sa.BigInteger, sa.BIGINT), is_integer),
    **dict.fromkeys((sa.String, sa.Unicode, sa.Text, sa.VARCHAR, sa.CHAR, sa.TEXT), _is_key_text),
    **dict.fromkeys((sa.Uuid, sa.UUID), _is_uuid),
}


def columns_to_ask_by(table: Table) -> dict[str, CacheableColumn]:
    """Return the columns of the primary key whose type is known, by name, as the table maps them.

    The database is not asked for their types: the key that is found is compared with the key that was asked for.
    """
    found = {}
    for column in table.primary_key:
        is_other = column.type._variant_mapping or (isinstance(column.type, sa.Uuid) and not column.type.as_uuid)
        accepts = None if is_other else _KEYS.get(type(column.type))
        if accepts is not None:
            found[column.name] = CacheableColumn(accepts, can_change=False)
    return found


class WantedRow(NamedTuple):
    """Names a row to read with a claim: its table, and the columns to read besides the key."""

    table: Table
    columns: tuple[str, ...]


class Wanted(NamedTuple):
    """Names the rows to read with a claim; if ``locked``, they are locked against other writers."""

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
    """Return a SELECT of the ``wanted`` rows beside the one row of ``claimed``: see ``CacheableRows.claiming``.

    Its first column is ``lasts``: whether a later SELECT of the transaction would read the same. Then come, for each
    wanted row, its key and its columns. There are LEFT JOINs to ``claimed`` only, so that no row means a duplicate. If
    ``locked``, each row is locked by a subquery of its own, which does not run for a duplicate. ``bound_as`` gives
    the type of the parameter for a column of a type.
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
    """Return the name of the parameter at this place, for a part of a key or a list; no column has such a name."""
    return f"projector_dedup_{place}"


class UnreadableRowError(Exception):
    """Raised if the rows that come with a claim could not be read; the claim itself might have succeeded."""


class CacheableRows:
    """Says which tables of a database are safe to cache, and how rows are read early and written late.

    This base class allows nothing.
    """

    writes_late: ClassVar[bool] = False
    """True if the methods ``reading`` and ``writing`` are implemented."""

    def look(self, _connection: Connection, _table: Table) -> CacheableTable | None:
        """Return what holds for the table in this transaction; None if its rows are not safe to cache."""
        return None

    def readable(self, _connection: Connection, _table: Table) -> CacheableTable | None:
        """Return what is known of a table whose rows a claim may read; None for a view, say, or a table with a policy.

        A view or such a table may give another row a moment later. The answer does not depend on the transaction in
        which it is asked, so it may be kept for an engine.
        """
        return None

    def claiming(self, marker: Table, wanted: Wanted) -> Executable:
        """Return a statement for ``Dialect.claim_and_read`` that claims a marker and reads the ``wanted`` rows.

        The statement gives no row for a duplicate. For a new marker it gives one row: first, True if a SELECT later in
        the transaction would read the same; then, for each wanted row, its key and its columns, which are all NULL if
        there is no such row. Its parameters are those of the claim and the parts of the keys, named by ``parameter``.
        """
        raise NotImplementedError

    def keeps_snapshots(self, _connection: Connection) -> bool:
        """True if the statement of ``claiming`` can tell that rows stay as they were read, to the transaction's end."""
        return True

    def claim(self, connection: Connection, statement: Executable, parameters: Mapping[str, Any]) -> Row[Any] | None:
        """Run the statement of ``claiming`` and return its row, or None for a duplicate.

        Raises ``UnreadableRowError`` for an error that may come from the reading.
        """
        result = self.executed(connection, statement, parameters)
        try:
            return result.first()
        except Exception as error:  # a type of the ORM's cannot read the value
            raise UnreadableRowError from error

    def executed(
        self, connection: Connection, statement: Executable, parameters: Mapping[str, Any]
    ) -> CursorResult[Any]:
        """Run the statement of ``claiming`` and return its result, from which no row is read yet.

        An engine's options for streaming its SELECTs are overruled. Raises ``UnreadableRowError`` for an error that may
        come from the reading.
        """
        try:
            return connection.execute(statement, parameters, execution_options=_AT_ONCE)
        except StatementError as error:  # from the database, or from a type that cannot send a key
            if isinstance(error, DBAPIError) and not self.may_be_about_the_row(error):
                raise
            raise UnreadableRowError from error
        except _DECODING as error:  # a driver that reads rows at once raises it, and SQLAlchemy does not wrap it
            raise UnreadableRowError from error

    def may_be_about_the_row(self, _error: DBAPIError) -> bool:
        """True if this error of the statement of ``claiming`` may come from the reading, not from the claim."""
        return True

    def reading(self, table: Table, columns: tuple[str, ...]) -> Executable:
        """Return a SELECT of the key and ``columns`` of many rows, with a list of values for each column of the key."""
        raise NotImplementedError

    def writing(self, table: Table, changed: tuple[str, ...]) -> Executable:
        """Return an UPDATE of the columns ``changed`` of many rows, with a list of values for each column.

        The lists of the key come first, then those of ``changed``.
        """
        raise NotImplementedError


@lru_cache(256)
def claiming(rows: CacheableRows, marker: Table, wanted: Wanted) -> Executable:
    """Return the statement that claims a marker and reads the wanted rows; cached, since building it takes long."""
    return rows.claiming(marker, wanted)
