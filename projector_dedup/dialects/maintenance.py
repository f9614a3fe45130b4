"""Define what a dialect must offer to clean up, migrate, count and check markers.

Nothing of this is used while a message is delivered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import ClassVar

from sqlalchemy import Table, select
from sqlalchemy.engine import Connection
from sqlalchemy.sql import Executable

from .columns import utc_now
from .findings import Finding


class Maintenance(ABC):
    """Declares the part of a dialect that commands and cron jobs use."""

    cleanup_isolation: ClassVar[str | None] = None
    """The isolation level at which a cleanup locks only the rows that it deletes; None if the level does not matter."""

    keeps_zones: ClassVar[bool] = False
    """True if the database has a type for moments with a time zone, so that a moment is not in doubt."""

    transactional_ddl: ClassVar[bool | None] = None
    """True if a migration is one transaction; None to leave it to what Alembic says of the database."""

    # Cleanup --------------------------------------------------------------------------------------------------------

    def now(self, connection: Connection) -> datetime:
        """Return the current time in UTC, by the clock that claims take their time from."""
        found: datetime = connection.execute(select(utc_now())).scalar_one()
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)

    @abstractmethod
    def cleanup_statement(self, marker: Table, *, of_handler: bool = False) -> Executable:
        """Return a DELETE of the oldest ``:batch_size`` markers before ``:cutoff``, of ``:handler`` if ``of_handler``.

        Rows that others have locked are left to them, where the database can do that.
        """

    def limit_waits(self, connection: Connection, seconds: float) -> str | None:
        """Let no statement of this transaction, which has just begun, wait longer than ``seconds`` for a lock.

        Return the statement that gives the session its usual limit back; None if the limit ends with the transaction,
        or if the database has none.
        """
        return None

    def migrating(self, connection: Connection, name: str) -> AbstractContextManager[None]:
        """Return a block for a migration of the table set ``name``: a second migration waits for the first.

        It is entered in the migration's transaction. A statement in the block that would have to wait for other
        transactions fails with a lock timeout after a moment.
        """
        return nullcontext()

    # For the people who run it ----------------------------------------------------------------------------------------

    def findings(self, connection: Connection, marker: Table) -> list[Finding]:
        """Return what is wrong, or could be better, in the settings of this database and of the marker table."""
        return []

    def size(self, connection: Connection, table: Table) -> int | None:
        """Return the bytes of the table with all indexes; None if the database's catalogue does not say it."""
        return None
