"""Rows of MariaDB that are read with a claim: which tables allow it, and two statements in one block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import CursorResult, Row, Select, Table, and_, bindparam, literal_column, text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import Executable
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.visitors import InternalTraversal

from .mysql_claim import marker_row
from .mysql_errors import may_be_about_the_row
from .mysql_snapshots import offers_snapshot_isolation
from .plain_tables import PlainColumn, PlainRows, PlainTable, parameter

_Types = dict[type[Any], Callable[[Any], bool]]

_LASTS = "@@tx_isolation = 'REPEATABLE-READ' AND @@innodb_snapshot_isolation"

# By constants for both tables: the server would read the definitions of all tables of all databases else.
_COLUMNS = text(
    f"""
    SELECT t.table_schema, t.table_name, c.column_name, c.data_type, c.is_generated = 'ALWAYS' AS is_generated
    FROM information_schema.tables t JOIN information_schema.columns c
    WHERE t.table_schema = coalesce(:schema, database()) AND t.table_name = :name
        AND c.table_schema = coalesce(:schema, database()) AND c.table_name = :name
        AND t.table_type = 'BASE TABLE' AND t.engine = 'InnoDB'
        AND {_LASTS} AND @@character_set_client = 'utf8mb4'
    """  # noqa: S608  # a condition of our own
)


class MariaDBRows(PlainRows):
    """By a block of two statements; nothing is written late, since who may not see a trigger is not told of it."""

    def look(self, connection: Connection, table: Table) -> PlainTable | None:
        """One round trip."""
        found = _columns(connection, table)
        if not found or any(row.is_generated for row in found):
            return None
        columns = {}
        for row in found:
            column = table.c.get(row.column_name)
            if column is not None and not column.type._variant_mapping:
                accepts = _KEYS.get(row.data_type.lower(), {}).get(type(column.type))
                if accepts is not None:
                    columns[row.column_name] = PlainColumn(accepts, can_change=False)
        return PlainTable(_identity(found), columns, reads_ahead=True)

    def claiming(self, marker: Table, table: Table, columns: tuple[str, ...]) -> Executable:
        """INSERT, then SELECT: what one after the other would do, and if the first fails the second does not run."""
        keys = list(table.primary_key)
        asked = (key == bindparam(parameter(place), type_=key.type) for place, key in enumerate(keys))
        found = sa.select(literal_column("1").label("claimed")).subquery().outerjoin(table, and_(*asked))
        block = _Block(literal_column(_LASTS), *keys, *(table.c[name] for name in columns)).select_from(found)
        block.marker = marker
        return block.execution_options(stream_results=False)  # what an engine may ask for of every SELECT

    def inserted_alone(self, connection: Connection, marker: Table) -> object | None:
        """The row is read behind the INSERT: whatever that changes is seen."""
        return _identity(_columns(connection, marker))

    def may_be_about_the_row(self, error: DBAPIError) -> bool:
        """By the server's error number."""
        return may_be_about_the_row(error)

    def first(self, connection: Connection, result: CursorResult[Any]) -> Row[Any] | None:
        """The row, and the answer of the block, which is behind it."""
        try:
            try:
                return result.fetchone()
            finally:
                while result.cursor.nextset():
                    pass
                result.close()
        except BaseException:
            connection.invalidate()
            raise


def _columns(connection: Connection, table: Table) -> Sequence[Any]:
    """Those of the table, if what is read in this transaction lasts."""
    if not offers_snapshot_isolation(connection.engine):
        return ()
    place = {"schema": connection.schema_for_object(table), "name": table.name}
    return Connection.execute(connection, _COLUMNS, place).all()  # past any guard


def _identity(columns: Sequence[Any]) -> object | None:
    return (columns[0].table_schema, columns[0].table_name) if columns else None


class _Block(Select[Any]):
    """The claim of a marker, and this SELECT behind it: the server runs both, and sends one answer."""

    inherit_cache = True
    _traverse_internals = [*Select._traverse_internals, ("marker", InternalTraversal.dp_clauseelement)]  # noqa: RUF012
    marker: Table


@compiles(_Block)
def _in_a_block(element: _Block, compiler: SQLCompiler, **options: Any) -> str:
    found = compiler.visit_select(element, **options)  # type: ignore[no-untyped-call]  # SQLAlchemy's
    row = marker_row(element.marker)
    names = ", ".join(map(compiler.preparer.quote, row))
    values = ", ".join(compiler.process(value, **options) for value in row.values())
    claim = f"INSERT INTO {compiler.preparer.format_table(element.marker)} ({names}) VALUES ({values})"  # noqa: S608  # compiled
    return f"BEGIN NOT ATOMIC {claim}; {found}; END"


def _of(kind: type[Any]) -> Callable[[Any], bool]:
    return lambda value: type(value) is kind


def _is_integer(value: Any) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _is_text(value: Any) -> bool:
    return type(value) is str and (value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value))


_INTEGERS: _Types = dict.fromkeys(
    (sa.Integer, sa.BigInteger, sa.SmallInteger, sa.INTEGER, sa.BIGINT, sa.SMALLINT), _is_integer
)
_TEXTS: _Types = dict.fromkeys((sa.String, sa.Unicode, sa.VARCHAR, sa.CHAR), _is_text)
_UUIDS: _Types = dict.fromkeys((sa.Uuid, sa.UUID), _of(UUID))

# By the column's type, and the one it is mapped with: what may be asked for. A key that is found must equal it.
_KEYS: dict[str, _Types] = {
    **dict.fromkeys(("tinyint", "smallint", "mediumint", "int", "bigint"), _INTEGERS),
    "varchar": _TEXTS,
    "char": {**_TEXTS, **_UUIDS},
    "uuid": _UUIDS,
    "date": dict.fromkeys((sa.Date, sa.DATE), _of(date)),
}
