"""Read rows with a claim on MariaDB, by two statements in one block, and tell which tables allow it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import CursorResult, Row, Select, Table, literal_column, select, text
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import Executable
from sqlalchemy.sql.compiler import NO_LINTING, SQLCompiler

from ..answers import Failure
from ..cacheable_tables import CacheableRows, CacheableTable, UnreadableRowError, Wanted, columns_to_ask_by, rows_beside
from ..listeners import are_of_others
from .claim import marker_row
from .errors import classify
from .snapshots import server_of

_LASTS = "@@tx_isolation = 'REPEATABLE-READ' AND @@innodb_snapshot_isolation"

# Both tables are restricted by constants: otherwise the server reads the definitions of all tables of all databases.
_TABLE = text(
    """
    SELECT t.table_schema, t.table_name, max(c.is_generated = 'ALWAYS') AS is_generated
    FROM information_schema.tables t JOIN information_schema.columns c
    WHERE t.table_schema = coalesce(:schema, database()) AND t.table_name = :name
        AND c.table_schema = coalesce(:schema, database()) AND c.table_name = :name
        AND t.table_type = 'BASE TABLE' AND t.engine = 'InnoDB'
        AND @@character_set_client = 'utf8mb4'
    GROUP BY 1, 2
    """
)


class MariaDBRows(CacheableRows):
    """Reads rows with a claim by a block of two statements.

    Nothing is written late: a role that may not see a trigger is not told of it.
    """

    def readable(self, connection: Connection, table: Table) -> CacheableTable | None:
        """Return what is known of a table whose rows a claim may read; None if it may not. Takes one round trip."""
        place = {"schema": connection.schema_for_object(table), "name": table.name}
        try:
            found = Connection.execute(connection, _TABLE, place).first()  # past any guard
        except DBAPIError as error:
            if classify(error) is Failure.PERMANENT:
                return None  # a server that does not know what is asked
            raise
        if found is None or found.is_generated:  # a computed column may be the time
            return None
        return CacheableTable((found.table_schema, found.table_name), columns_to_ask_by(table), reads_ahead=True)

    def claiming(self, marker: Table, wanted: Wanted) -> Executable:
        """Return a block of an INSERT and a SELECT, which does the same as the two one after the other.

        If the INSERT fails, the SELECT does not run.
        """
        # The name makes SQLAlchemy cache the compiled statement for this marker table, and for no other.
        claimed = select(literal_column("1").label("claimed")).subquery(f"claimed in {marker.fullname}")
        block = rows_beside(claimed, literal_column("1" if wanted.locked else _LASTS), wanted.rows, select=_Block)
        block = block.with_for_update() if wanted.locked else block
        block.marker = marker
        return block

    def keeps_snapshots(self, connection: Connection) -> bool:
        """True if the session's level, which the statement of ``claiming`` checks, must hold for this transaction too.

        False if somebody may have chosen another for this transaction alone, which the server does not tell; and for a
        server that is not dependable, or that no unit of work has asked.
        """
        server, chosen = server_of(connection), connection.get_execution_options().get("isolation_level")
        if server is None or not server.is_dependable or chosen not in (None, "REPEATABLE READ"):
            return False
        pool = connection.engine.pool.dispatch
        return not are_of_others((pool.checkout, pool.reset, pool.checkin, connection.dispatch.begin))

    def claim(self, connection: Connection, statement: Executable, parameters: Mapping[str, Any]) -> Row[Any] | None:
        """Run the block and return its row. The server answers twice, with the row and for the block, or by one error.

        Raises ``UnreadableRowError`` for an error that may come from the reading.
        """
        result = None
        try:
            result = self.executed(connection, statement, parameters)
            row = _fetched(result)
            _skip_answer(connection, result)
        except BaseException as error:
            said = error.__cause__ if isinstance(error, UnreadableRowError) else error
            if result is not None or not isinstance(said, DBAPIError):
                connection.invalidate()  # an answer that is left would be taken for that to the next statement
            raise
        result.close()
        if row is None:  # to return None would mean a duplicate
            raise UnreadableRowError
        return row

    def may_be_about_the_row(self, error: DBAPIError) -> bool:
        """True for every error that is not known to be about something else than the row."""
        return classify(error) in (Failure.PERMANENT, Failure.NO_TABLE)


def _fetched(result: CursorResult[Any]) -> Row[Any] | None:
    try:
        return result.fetchone()
    except Exception as error:  # a type of the ORM's cannot read it
        raise UnreadableRowError from error


def _skip_answer(connection: Connection, result: CursorResult[Any]) -> None:
    try:
        result.cursor.nextset()
    except connection.dialect.loaded_dbapi.Error as error:  # SQLAlchemy does not wrap it
        raise DBAPIError(None, None, error) from error


class _Block(Select[Any]):
    """Sends the claim of a marker, and this SELECT behind it, in one command to the server."""

    inherit_cache = True
    marker: Table


@compiles(_Block)
def _in_a_block(element: _Block, compiler: SQLCompiler, **options: Any) -> str:
    compiler.linting = NO_LINTING  # SQLAlchemy takes joins by the parts of a key for a product of tables, and warns
    found = compiler.visit_select(element, **options)  # type: ignore[no-untyped-call]  # SQLAlchemy's
    row = marker_row(element.marker)
    names = ", ".join(map(compiler.preparer.quote, row))
    values = ", ".join(compiler.process(value, **options) for value in row.values())
    claim = f"INSERT INTO {compiler.preparer.format_table(element.marker)} ({names}) VALUES ({values})"  # noqa: S608  # compiled
    return f"BEGIN NOT ATOMIC {claim}; {found}; END"
