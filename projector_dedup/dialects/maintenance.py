"""What a database must be able to say of the markers that it keeps: how they are pruned, migrated, counted and checked.

Nothing of this is asked while a message is delivered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from typing import ClassVar

from sqlalchemy import FromClause, Table, select
from sqlalchemy.engine import Connection
from sqlalchemy.sql import Executable

from ..findings import Finding
from .columns import utc_now
from .pruning import Expired, Route, by_index


class Maintenance(ABC):
    """The part of a dialect that commands and cron jobs use."""

    pruning_isolation: ClassVar[str | None] = None
    """The level at which a cleaner meets only the rows that it deletes; None where there is nothing to choose."""

    keeps_zones: ClassVar[bool] = False
    """True if the database has a type of moments that need no agreement on their time zone."""

    transactional_ddl: ClassVar[bool | None] = None
    """True if a migration is one transaction; None for what Alembic thinks of the database."""

    # Pruning --------------------------------------------------------------------------------------------------------

    def now(self, connection: Connection) -> datetime:
        """By the clock that the claims were stamped with, in UTC."""
        found: datetime = connection.execute(select(utc_now())).scalar_one()
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)

    @abstractmethod
    def prune_statement(self, marker: Table, *, of_handler: bool = False) -> Executable:
        """Delete the oldest ``:batch_size`` markers from before ``:cutoff``, of ``:handler`` if ``of_handler``.

        What others hold is left to them, where the database can do that.
        """

    def pruning_route(self, connection: Connection, expired: Expired) -> Route:
        """The fastest way through what is expired. It may leave what others hold; then the index is asked."""
        return self.index_route(expired)

    def index_route(self, expired: Expired) -> Route:
        """Oldest first, until nothing is found."""
        return by_index(self.prune_statement(expired.marker, of_handler=expired.handler is not None), expired)

    def migrating(self, connection: Connection, name: str) -> AbstractContextManager[None]:
        """Entered in the transaction of a migration of the table set ``name``: a second one waits for the first.

        Within, whatever would have to wait for other transactions fails with a lock timeout after a moment.
        """
        return nullcontext()

    # What the people who run it want to know ------------------------------------------------------------------------

    def findings(self, connection: Connection, marker: Table) -> list[Finding]:
        """Settings of this database and of the marker table that are wrong, or could be better."""
        return []

    def measured(self, connection: Connection, table: Table) -> tuple[int | None, int | None]:
        """About how many rows, and bytes with all indexes, by the catalogue: None where only counting would tell."""
        return None, None

    def sampled(self, connection: Connection, marker: Table, rows: int, of: int) -> FromClause:
        """``handler`` and ``processed_at`` of about ``rows`` markers of about ``of``; of all where there is no way."""
        return marker
