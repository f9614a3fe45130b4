"""Rows of PostgreSQL that are read early and written late: which tables allow it, which values, and the statements."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from typing import Any
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy import (
    ColumnElement,
    Integer,
    Select,
    Table,
    TableValuedAlias,
    and_,
    bindparam,
    cast,
    func,
    literal_column,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DataError, DBAPIError
from sqlalchemy.sql import Executable
from sqlalchemy.types import TypeEngine

from .answers import sqlstate_of
from .plain_tables import PlainColumn, PlainRows, PlainTable, is_integer, is_text, parameter, row_beside
from .postgresql_catalog import regclass
from .postgresql_claim import insert_markers

# Whatever could make an UPDATE do more than it says, or give back another row than a SELECT before it, is excluded.
_COLUMNS = text(
    """
    SELECT c.oid AS identity, a.attname AS name, a.atttypid::int AS type, a.atttypmod AS modifier, a.attnotnull,
        EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND a.attnum = ANY (i.indkey))
        OR EXISTS (SELECT FROM pg_constraint k
            WHERE k.conrelid = c.oid AND k.contype <> 'n' AND a.attnum = ANY (k.conkey)) AS bound,
        s.level <> 'serializable' AS ahead  -- there, what was read may fail other transactions, and this one
    FROM current_setting('transaction_isolation') AS s (level),
        pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    WHERE c.oid = to_regclass(:name) AND c.relkind = 'r'
        AND NOT (c.relhasrules OR c.relrowsecurity OR c.relhassubclass)
        AND (a.attcollation = 0 OR (SELECT collisdeterministic FROM pg_collation WHERE oid = a.attcollation))
        AND s.level IN ('repeatable read', 'serializable')
        AND current_setting('server_encoding') = 'UTF8' AND current_setting('client_encoding') = 'UTF8'
        AND NOT EXISTS (SELECT FROM pg_trigger WHERE tgrelid = c.oid AND NOT tgisinternal)
        AND NOT EXISTS (SELECT FROM pg_inherits WHERE inhrelid = c.oid)
        AND NOT EXISTS (SELECT FROM pg_attribute WHERE attrelid = c.oid AND attgenerated <> '')
        AND NOT EXISTS (SELECT FROM pg_index
            WHERE indrelid = c.oid AND (indexprs IS NOT NULL OR indpred IS NOT NULL))
        AND NOT EXISTS (SELECT FROM pg_constraint
            WHERE conrelid = c.oid AND contype = 'c' AND (coalesce(cardinality(conkey), 0) = 0 OR 0 = ANY (conkey)))
        AND NOT EXISTS (SELECT FROM pg_depend  -- a function of the user's, which may read other rows
            WHERE refclassid = 'pg_proc'::regclass AND (
                classid = 'pg_attrdef'::regclass AND objid IN (SELECT oid FROM pg_attrdef WHERE adrelid = c.oid)
                OR classid = 'pg_constraint'::regclass
                    AND objid IN (SELECT oid FROM pg_constraint WHERE conrelid = c.oid)))
    """
)

# An INSERT may do more than it says: then the row that was read with it is not the one that a SELECT would find. The
# triggers for statements on a partition's parent run too. An xmax means that somebody is about to change the table, or
# has done so since the snapshot was taken, while the INSERT waited for them.
_INSERTS_ALONE = "NOT (c.relhastriggers OR c.relhasrules OR c.relispartition) AND c.xmax = 0"

_ALONE = text(f"SELECT c.oid FROM pg_class c WHERE c.oid = to_regclass(:name) AND c.relkind = 'r' AND {_INSERTS_ALONE}")  # noqa: S608  # ours

_CLAIM = "projector_dedup_claim"  # a name that no table of the user's has: it would hide that table
_AT_LEVEL = "current_setting('transaction_isolation') = 'repeatable read'"


class PostgreSQLRows(PlainRows):
    """By the catalogue and by arrays."""

    writes_late = True

    def look(self, connection: Connection, table: Table) -> PlainTable | None:
        """One round trip."""
        found = Connection.execute(connection, _COLUMNS, {"name": regclass(connection, table)}).all()  # past any guard
        columns = {}
        for row in found:
            known, column = _KNOWN.get(row.type), table.c.get(row.name)
            if known is None or column is None or not known.fits(column.type, row.modifier):
                continue
            accepts = partial(known.accepts, row.modifier)
            if not row.attnotnull:
                accepts = partial(_null_or, accepts)
            columns[row.name] = PlainColumn(accepts, can_change=not row.bound)
        return PlainTable(found[0].identity, columns, found[0].ahead) if found else None

    def claiming(self, marker: Table, table: Table, columns: tuple[str, ...]) -> Executable:
        """By an INSERT in a CTE. Both see one snapshot, and the row is looked for only if the marker is new.

        The statement itself looks whether the marker's table is still as ``marker_identity`` found it.
        """
        place: ColumnElement[int] = literal_column("tableoid", Integer)
        claimed = insert_markers(marker, bounded=False, names=1).returning(place.label("claimed")).cte(_CLAIM)
        is_alone = f"SELECT {_INSERTS_ALONE} FROM pg_class c WHERE c.oid = {_CLAIM}.claimed"  # noqa: S608  # ours
        lasts: ColumnElement[bool] = literal_column(f"{_AT_LEVEL} AND ({is_alone})")
        return row_beside(claimed, lasts, table, columns, select=Select, bound_as=_unbounded)

    def marker_identity(self, connection: Connection, marker: Table) -> object | None:
        """No trigger, no rule, and no partition, nor one that has some. One round trip."""
        return Connection.execute(connection, _ALONE, {"name": regclass(connection, marker)}).scalar()

    def may_be_about_the_row(self, error: DBAPIError) -> bool:
        """By the class of its SQLSTATE: something is not there any more, or forbidden, or a value cannot be read.

        Or the marker lacks a value that it must have now, which the claim alone says more clearly.
        """
        sqlstate = sqlstate_of(error)
        if sqlstate is None:
            return isinstance(error, DataError)  # the driver's
        return sqlstate[:2] in ("42", "22", "23", "0A", "P0")

    def reading(self, table: Table, columns: tuple[str, ...]) -> Executable:
        """By arrays: whatever their length, one statement and one plan."""
        given = _given(table)
        return select(*table.primary_key, *(table.c[name] for name in columns)).join_from(
            table, given, _same(table, given)
        )

    def writing(self, table: Table, changed: tuple[str, ...]) -> Executable:
        """The same, for an UPDATE."""
        given = _given(table, changed)
        return update(table).where(_same(table, given)).values({name: given.c[name] for name in changed})


def _given(table: Table, columns: tuple[str, ...] = ()) -> TableValuedAlias:
    """The rows of the arrays: the key, and ``columns``."""
    names = [*(column.name for column in table.primary_key), *columns]
    arrays = []
    for place, name in enumerate(names):
        array: sa.ARRAY[Any] = sa.ARRAY(_unbounded(table.c[name].type))
        arrays.append(cast(bindparam(parameter(place), type_=array), array))
    return func.unnest(*arrays).table_valued(*names).render_derived("projector_dedup_rows")


def _same(table: Table, given: TableValuedAlias) -> ColumnElement[bool]:
    return and_(*(column == given.c[column.name] for column in table.primary_key))


def _unbounded(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    """A cast to VARCHAR(20) would cut what is longer, instead of refusing it."""
    return sa.Text() if isinstance(kind, sa.String) else kind


@dataclass(frozen=True)
class _Known:
    """A type of PostgreSQL, and those of SQLAlchemy that hand values on to it as they are."""

    types: frozenset[type[TypeEngine[Any]]]
    accepts: Callable[..., bool]

    def fits(self, mapped: TypeEngine[Any], modifier: int) -> bool:
        """Whether a column so mapped does: not with a type of the user's, which may do anything with its values."""
        if type(mapped) not in self.types or mapped._variant_mapping:
            return False
        if isinstance(mapped, sa.Float):
            return mapped.precision is None and not mapped.asdecimal
        if isinstance(mapped, sa.Numeric):
            said = (mapped.precision, mapped.scale)
            return mapped.asdecimal and said in ((None, None), _precision_and_scale(modifier))
        if isinstance(mapped, sa.DateTime):
            return not mapped.timezone
        return not isinstance(mapped, sa.Uuid) or bool(mapped.as_uuid)


def _precision_and_scale(modifier: int) -> tuple[int, int]:
    return modifier - 4 >> 16 & 0xFFFF, modifier - 4 & 0xFFFF


def _null_or(accepts: Callable[[Any], bool], value: Any) -> bool:
    return value is None or accepts(value)


def _integer(_modifier: int, value: Any, *, bits: int) -> bool:
    return is_integer(value, bits=bits)


def _text(modifier: int, value: Any) -> bool:
    return is_text(value) and "\0" not in value and (modifier <= 0 or len(value) <= modifier - 4)


def _decimal(modifier: int, value: Any) -> bool:
    """With just the digits that the column keeps."""
    if type(value) is not Decimal or not value.is_finite() or (value.is_signed() and not value):
        return False
    _, digits, exponent = value.as_tuple()
    if modifier < 0:
        return -1000 < exponent <= 0 and len(digits) < 1000  # type: ignore[operator]  # it is finite
    precision, scale = _precision_and_scale(modifier)
    return exponent == -scale and len(digits) <= precision


def _is(kind: type[Any]) -> Callable[..., bool]:
    return lambda _modifier, value: type(value) is kind


def _float(_modifier: int, value: Any) -> bool:
    return type(value) is float and math.isfinite(value) and (value != 0 or math.copysign(1, value) > 0)


def _moment(modifier: int, value: Any) -> bool:
    return type(value) is datetime and value.tzinfo is None and not value.fold and modifier == -1


def _types(*types: type[TypeEngine[Any]]) -> frozenset[type[TypeEngine[Any]]]:
    return frozenset(types)


_TEXTS = _types(sa.String, sa.Text, sa.Unicode, sa.UnicodeText, sa.VARCHAR, sa.TEXT)

_KNOWN = {  # by the numbers of the types, which never change
    16: _Known(_types(sa.Boolean, sa.BOOLEAN), _is(bool)),
    20: _Known(_types(sa.BigInteger, sa.BIGINT), partial(_integer, bits=64)),
    21: _Known(_types(sa.SmallInteger, sa.SMALLINT), partial(_integer, bits=16)),
    23: _Known(_types(sa.Integer, sa.INTEGER), partial(_integer, bits=32)),
    25: _Known(_TEXTS, _text),
    701: _Known(_types(sa.Float, sa.Double, sa.DOUBLE_PRECISION), _float),
    1043: _Known(_TEXTS, _text),
    1082: _Known(_types(sa.Date, sa.DATE), _is(date)),
    1114: _Known(_types(sa.DateTime, sa.DATETIME, sa.TIMESTAMP, postgresql.TIMESTAMP), _moment),  # 1184 changes zones
    1700: _Known(_types(sa.Numeric, sa.NUMERIC, sa.DECIMAL), _decimal),
    2950: _Known(_types(sa.Uuid, sa.UUID), _is(UUID)),
}
