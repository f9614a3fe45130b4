"""Rows of SQLite that are read right behind a claim, without the ORM: nobody else can write by then."""

from __future__ import annotations

from sqlalchemy import Select, Table, literal_column, select, text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable

from .plain_tables import PlainRows, PlainTable, Wanted, columns_to_ask_by, rows_beside

_TABLE = text(
    """
    SELECT name FROM main.sqlite_master
    WHERE type = 'table' AND name = :name COLLATE NOCASE AND sql NOT LIKE 'CREATE VIRTUAL%'
        AND NOT EXISTS (SELECT 1 FROM sqlite_temp_master WHERE name = :name COLLATE NOCASE)
    """
)


class SQLiteRows(PlainRows):
    """By a SELECT of its own, since the claim has taken the write lock. Nothing is written late."""

    def readable(self, connection: Connection, table: Table) -> PlainTable | None:
        """Whether it is a table: not a view, not of a module that may do anything, not hidden by a temporary one."""
        if connection.schema_for_object(table) not in (None, "main"):
            return None  # a claim locks the file of its table only
        try:
            found: object = Connection.execute(connection, _TABLE, {"name": table.name}).scalar()  # past any guard
        except DBAPIError:
            return None  # by an authorizer, say; the transaction goes on
        return PlainTable(found, columns_to_ask_by(table), reads_ahead=True) if found is not None else None

    def claiming(self, marker: Table, wanted: Wanted) -> Executable:
        """What comes behind the claim."""
        claimed = select(literal_column("1").label("claimed")).subquery()
        return rows_beside(claimed, literal_column("1"), wanted.rows, select=Select)
