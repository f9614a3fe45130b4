"""Define the last statement of a transaction, and what a dialect must say to run it, together with COMMIT if it can."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sqlalchemy import Row, Update
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable

from ..errors import TransactionViolatedError
from .answers import sqlstate_of

_NOT_THERE = {
    "22012",  # division_by_zero: another number of rows than was expected (LastStatements.changing)
    "42501",  # insufficient_privilege: for a role that the handler chose
    "42P01",  # undefined_table: in a schema that the handler chose
}


class LastStatement:
    """A statement that a unit of work runs behind everything else in its transaction; ``row`` is its answer then."""

    def __init__(self, statement: Executable, parameters: Mapping[str, Any]) -> None:
        self.statement = statement
        self.parameters = parameters
        self.row: Row[Any] | None = None  # the first one; None also if there was none

    def run(self, connection: Connection) -> None:
        """Execute the statement past any guard of the connection, and keep the first row of its answer."""
        result = Connection.execute(connection, self.statement, self.parameters)
        self.row = result.first() if result.returns_rows else None


class LastChange(LastStatement):
    """An UPDATE, as ``LastStatements.changing`` made it, that changes a given number of ``rows``, or is an error."""

    def __init__(self, statement: Executable, parameters: Mapping[str, Any], rows: int) -> None:
        super().__init__(statement, parameters)
        self.rows = rows

    def run(self, connection: Connection) -> None:
        """Execute the UPDATE. Raises ``TransactionViolatedError`` if the rows were not there any more."""
        try:
            result = Connection.execute(connection, self.statement, self.parameters)
            changed = result.scalar() if result.returns_rows else result.rowcount
        except DBAPIError as error:
            if sqlstate_of(error) not in _NOT_THERE:
                raise
            changed = 0
        if changed != self.rows:
            raise TransactionViolatedError(
                "the row of the claim is not there any more: the handler deleted or changed it, or chose another "
                "schema, database or role for the rest of the transaction. Everything was rolled back"
            )


class LastStatements:
    """Declares the part of a dialect that ends the transaction of a command."""

    def changing(self, update: Update, rows: int) -> Executable:
        """Return the statement for a ``LastChange`` of so many ``rows``.

        Where COMMIT may go along, it fails if it changes another number of rows.
        """
        return update

    def commit_goes_along(self, connection: Connection, driver_connection: Any) -> bool:
        """True if COMMIT can be sent with the last statement, for one round trip instead of two."""
        return False

    def taking_commit_along(self, driver_connection: Any) -> AbstractContextManager[object]:
        """Return a block in which a statement takes COMMIT along; used only where ``commit_goes_along``."""
        return nullcontext()
