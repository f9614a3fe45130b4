"""Define what a dialect must offer to clean up, migrate, count and check markers.

Nothing of this is used while a message is delivered.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from typing import Any, ClassVar

from sqlalchemy import ColumnElement, Select, Table, and_, bindparam, func, literal_column, select
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import Connection
from sqlalchemy.sql import Executable

from ..errors import RetriesExhaustedError
from .columns import moment, utc_now

# SQLite compares text, and its clock has whole seconds: all markers of a second would be older than a cutoff within it.
_WHOLE_SECONDS = "%(year)04d-%(month)02d-%(day)02d %(hour)02d:%(minute)02d:%(second)02d"
_CUTOFF = moment().with_variant(sqlite.DATETIME(storage_format=_WHOLE_SECONDS), "sqlite")  # type: ignore[no-untyped-call]  # SQLAlchemy's


@dataclass(frozen=True)
class Expired:
    """Says which markers to delete: those that were processed before ``cutoff``, of all handlers or of one."""

    marker: Table
    cutoff: datetime
    handler: str | None
    batch_size: int

    @property
    def bounds(self) -> dict[str, Any]:
        """Return the parameters of the condition ``is_expired``; a DELETE takes ``batch_size`` too."""
        return {"cutoff": self.cutoff} | ({} if self.handler is None else {"handler": self.handler})


def is_expired(marker: Any, *, of_handler: bool) -> ColumnElement[bool]:
    """Return the condition that a row of ``marker``, the table or an alias, is expired by ``Expired.bounds``."""
    old: ColumnElement[bool] = marker.c.processed_at < bindparam("cutoff", type_=_CUTOFF)
    return and_(old, marker.c.handler == bindparam("handler")) if of_handler else old


@cache
def any_expired(marker: Table, *, of_handler: bool) -> Select[Any]:
    """Return a SELECT that gives a row if an expired marker is there, even if another cleaner is about to delete it."""
    return select(literal_column("1")).select_from(marker).where(is_expired(marker, of_handler=of_handler)).limit(1)


@dataclass(frozen=True)
class Finding:
    """Names a problem and its remedy; ``fatal`` if deliveries fail, or may be lost or doubled, before it is solved.

    ``informs`` if there is nothing to solve: ``problem`` says how the database is set up, ``remedy`` what follows.
    """

    problem: str
    remedy: str
    fatal: bool = True
    informs: bool = False


def advice(problem: str, remedy: str) -> Finding:
    """Return a finding that is not fatal: nothing is wrong, but it could be better."""
    return Finding(problem, remedy, fatal=False)


def note(fact: str, consequence: str) -> Finding:
    """Return a finding that asks for nothing: a fact about the database, and what follows from it."""
    return Finding(fact, consequence, fatal=False, informs=True)


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


# Migrations ----------------------------------------------------------------------------------------------------------
#
# A change of a table that has to wait for an open transaction makes every later transaction wait behind it. So the
# change waits for a moment only, fails with a lock timeout, and is run again by the caller.

_RIVAL = 60  # seconds that a migration waits for another one, on MariaDB


def lock_transaction(connection: Connection, name: str) -> None:
    """Take a lock on PostgreSQL that the transaction holds, so that it is released behind a pooler too."""
    # At a stricter level the snapshot would be older than the wait, and not show what the other migration did.
    connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
    connection.exec_driver_sql("SET LOCAL lock_timeout = '500ms'")
    connection.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(f"projector_dedup {name}", 0))))


@contextmanager
def lock_session(connection: Connection, name: str) -> Iterator[None]:
    """Hold a lock of MariaDB's session while the block runs: a lock of the transaction would end with the first DDL.

    Names of locks belong to the whole server, and have 64 characters at most, so the name is hashed with the database.
    Raises ``RetriesExhaustedError`` if another migration holds the lock for too long.
    """
    database = connection.exec_driver_sql("SELECT database()").scalar_one()
    lock = f"projector_dedup {hashlib.sha256(f'{database} {name}'.encode()).hexdigest()[:40]}"
    usual = connection.exec_driver_sql("SELECT @@session.lock_wait_timeout").scalar_one()
    if connection.scalar(select(func.get_lock(lock, _RIVAL))) != 1:
        raise RetriesExhaustedError(
            f"another migration of {name} has been running for {_RIVAL} seconds; nothing was changed; run it again"
        )
    try:
        connection.exec_driver_sql("SET lock_wait_timeout = 1")  # of metadata locks; the default is a day
        connection.commit()
        yield
    finally:
        if not connection.invalidated:
            connection.rollback()
            connection.exec_driver_sql(f"SET lock_wait_timeout = {int(usual)}")
            connection.scalar(select(func.release_lock(lock)))
            connection.commit()
