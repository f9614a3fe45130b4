"""Read rows of SQLite right behind a claim, without the ORM: no other connection can write by then."""

from __future__ import annotations

from sqlalchemy import Select, Table, literal_column, select, text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable

from ..cacheable_tables import CacheableRows, CacheableTable, Wanted, columns_to_ask_by, rows_beside

_TABLE = text(
    """
    SELECT name FROM main.sqlite_master
    WHERE type = 'table' AND name = :name COLLATE NOCASE AND sql NOT LIKE 'CREATE VIRTUAL%'
        AND NOT EXISTS (SELECT 1 FROM sqlite_temp_master WHERE name = :name COLLATE NOCASE)
    """
)


class SQLiteRows(CacheableRows):
    """Reads rows by a SELECT behind the claim, which has taken the write lock. Nothing is written late."""

    def readable(self, connection: Connection, table: Table) -> CacheableTable | None:
        """Return what is known of a table whose rows may be read behind the claim.

        Return None for a view, a virtual table, whose module may do anything, and a table hidden by a temporary one.
        """
        if connection.schema_for_object(table) not in (None, "main"):
            return None  # a claim locks the file of its table only
        try:
            found: object = Connection.execute(connection, _TABLE, {"name": table.name}).scalar()  # past any guard
        except DBAPIError:
            return None  # from an authorizer, for example; the transaction goes on
        return CacheableTable(found, columns_to_ask_by(table), reads_ahead=True) if found is not None else None

    def claiming(self, marker: Table, wanted: Wanted) -> Executable:
        """Return the SELECT of the wanted rows that is run behind the claim."""
        claimed = select(literal_column("1").label("claimed")).subquery()
        return rows_beside(claimed, literal_column("1"), wanted.rows, select=Select)
