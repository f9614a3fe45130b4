"""Refuse tables without transactions, and marker tables without their unique index, by MariaDB's catalogue.

The catalogue is asked once per table and physical connection, since another connection may lead to another server; and
once per unit of work if a listener may have chosen another database meanwhile (docs/adr/0023).
"""

from __future__ import annotations

from sqlalchemy import Table, text
from sqlalchemy.engine import Connection

from ...errors import MissingTableError, UnsafeSessionError
from ..listeners import TABLES, info_of

_QUERY = text(
    """
    SELECT e.engine, e.transactions = 'YES' AS has_transactions, EXISTS (
        SELECT 1 FROM information_schema.statistics s
        WHERE s.table_schema = coalesce(:schema, database()) AND s.table_name = :name AND s.non_unique = 0
        GROUP BY s.index_name
        HAVING count(*) = 2 AND sum(s.column_name IN ('message_id', 'handler') AND s.sub_part IS NULL) = 2
    ) AS is_unique
    FROM information_schema.tables t JOIN information_schema.engines e ON e.engine = t.engine
    WHERE t.table_schema = coalesce(:schema, database()) AND t.table_name = :name
    """
)


def refuse_unfit(connection: Connection, table: Table, *, marker: bool) -> None:
    """Raise ``UnsafeSessionError`` for a table without transactions.

    With ``marker``, also raise ``MissingTableError`` if a plain INSERT could insert one marker twice. A table that is
    not there, or is a view, is left to the statement that was about to run.
    """
    known = info_of(connection).setdefault(TABLES, set())  # schema, name, whether as a marker table
    place = connection.schema_for_object(table), table.name, marker
    if place in known:
        return
    found = Connection.execute(connection, _QUERY, {"schema": place[0], "name": place[1]}).first()
    if found is None:
        return
    name = ".".join(part for part in place[:2] if part)
    if not found.has_transactions:
        raise UnsafeSessionError(
            f"the table {name} is in the storage engine {found.engine}, which has no transactions: what "
            f"is written there stays when the marker is rolled back; ALTER TABLE {name} ENGINE=InnoDB"
        )
    if marker and not found.is_unique:
        raise MissingTableError(
            f"the table {name} is not the one this version expects: without a unique index over "
            "(message_id, handler), and nothing else, a duplicate would be applied; `idempotency check` says what is "
            "wrong"
        )
    known.add(place)
