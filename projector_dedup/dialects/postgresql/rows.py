"""Read rows early and write them late on PostgreSQL, and tell by the catalogue which tables and columns allow it."""

from __future__ import annotations

from typing import Any

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
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DataError, DBAPIError
from sqlalchemy.sql import Executable
from sqlalchemy.types import TypeEngine

from ..answers import sqlstate_of
from ..cacheable_tables import (
    CacheableRows,
    CacheableTable,
    Wanted,
    columns_to_ask_by,
    parameter,
    rows_beside,
)
from ..levels import LEVEL_OF_BEGIN, chosen_level
from .catalog import regclass
from .claim import insert_statement
from .columns import cacheable_column

# Tables are excluded on which an UPDATE could do more than it says, or a later SELECT could find another row.
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

# If an INSERT does more than it says, the row that was read with it may not be the one that a SELECT would find. The
# triggers for statements on a partition's parent run too. An xmax means that somebody is about to change the table, or
# has changed it since the snapshot was taken, while the INSERT waited for them.
_INSERTS_ALONE = "NOT (c.relhastriggers OR c.relhasrules OR c.relispartition) AND c.xmax = 0"

# A view, a foreign table or a table with a policy may give another row a moment later.
_READABLE = text(
    "SELECT c.oid FROM pg_class c WHERE c.oid = to_regclass(:name) AND c.relkind = 'r' "
    "AND NOT (c.relhasrules OR c.relrowsecurity OR c.relhassubclass)"
)

_CLAIM = "projector_dedup_claim"  # a name that no table of the user's has: it would hide that table
_AT_LEVEL = "current_setting('transaction_isolation') = 'repeatable read'"


class PostgreSQLRows(CacheableRows):
    """Reads rows with a claim, and reads and writes many rows in one statement each, by arrays."""

    writes_late = True

    def look(self, connection: Connection, table: Table) -> CacheableTable | None:
        """Return what holds for a table in this transaction; None if it is not safe to cache. Takes one round trip."""
        found = Connection.execute(connection, _COLUMNS, {"name": regclass(connection, table)}).all()  # past any guard
        columns = {}
        for row in found:
            if (mapped := table.c.get(row.name)) is None:
                continue
            column = cacheable_column(row.type, row.modifier, mapped.type, not_null=row.attnotnull, bound=row.bound)
            if column is not None:
                columns[row.name] = column
        return CacheableTable(found[0].identity, columns, found[0].ahead) if found else None

    def readable(self, connection: Connection, table: Table) -> CacheableTable | None:
        """Return what is known of a table whose rows a claim may read; None if it may not. Takes one round trip."""
        try:
            found = Connection.execute(connection, _READABLE, {"name": regclass(connection, table)}).scalar()
        except DBAPIError as error:
            if sqlstate_of(error) == "42501":
                connection.rollback()
                return None  # in a schema that this role may not use
            raise
        return None if found is None else CacheableTable(found, columns_to_ask_by(table), reads_ahead=True)

    def claiming(self, marker: Table, wanted: Wanted) -> Executable:
        """Return a SELECT of the wanted rows with the INSERT of the marker in a CTE.

        Both see one snapshot, and the rows are read only if the marker is new. The statement itself checks whether an
        INSERT into the marker table does nothing else.
        """
        place: ColumnElement[int] = literal_column("tableoid", Integer)
        claimed = insert_statement(marker, bounded=False, names=1).returning(place.label("claimed")).cte(_CLAIM)
        is_alone = f"(SELECT {_INSERTS_ALONE} FROM pg_class c WHERE c.oid = {_CLAIM}.claimed)"  # noqa: S608  # ours
        lasts: ColumnElement[bool] = literal_column(is_alone if wanted.locked else f"{_AT_LEVEL} AND {is_alone}")
        return rows_beside(claimed, lasts, wanted.rows, select=Select, bound_as=_unbounded, locked=wanted.locked)

    def keeps_snapshots(self, connection: Connection) -> bool:
        """True at REPEATABLE READ only: at SERIALIZABLE rows that are read for nothing may fail other transactions."""
        level = connection.get_execution_options().get(LEVEL_OF_BEGIN) or chosen_level(connection)
        return bool((level or connection.default_isolation_level) == "REPEATABLE READ")

    def may_be_about_the_row(self, error: DBAPIError) -> bool:
        """True if the class of its SQLSTATE says: not there any more, forbidden, or a value that cannot be read.

        Also True if the marker lacks a value that it must have now, which the claim alone reports more clearly.
        """
        sqlstate = sqlstate_of(error)
        if sqlstate is None:
            return isinstance(error, DataError)  # raised by the driver
        return sqlstate[:2] in ("42", "22", "23", "0A", "P0")

    def reading(self, table: Table, columns: tuple[str, ...]) -> Executable:
        """Return a SELECT of the key and ``columns`` of many rows, by arrays: one plan for any number of rows."""
        given = _given(table)
        return select(*table.primary_key, *(table.c[name] for name in columns)).join_from(
            table, given, _same(table, given)
        )

    def writing(self, table: Table, changed: tuple[str, ...]) -> Executable:
        """Return an UPDATE of the columns ``changed`` of many rows, by arrays: one plan for any number of rows."""
        given = _given(table, changed)
        return update(table).where(_same(table, given)).values({name: given.c[name] for name in changed})


def _given(table: Table, columns: tuple[str, ...] = ()) -> TableValuedAlias:
    """Return the rows that the arrays give: the key and ``columns``."""
    names = [*(column.name for column in table.primary_key), *columns]
    arrays = []
    for place, name in enumerate(names):
        array: sa.ARRAY[Any] = sa.ARRAY(_unbounded(table.c[name].type))
        arrays.append(cast(bindparam(parameter(place), type_=array), array))
    return func.unnest(*arrays).table_valued(*names).render_derived("projector_dedup_rows")


def _same(table: Table, given: TableValuedAlias) -> ColumnElement[bool]:
    return and_(*(column == given.c[column.name] for column in table.primary_key))


def _unbounded(kind: TypeEngine[Any]) -> TypeEngine[Any]:
    """Return TEXT for a type of text: a cast to VARCHAR(20) would cut a longer value, instead of refusing it."""
    return sa.Text() if isinstance(kind, sa.String) else kind
