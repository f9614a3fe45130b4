"""The markers that a cleanup deletes, and how each database deletes them. Deliveries do not use this module."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import (
    ColumnElement,
    Delete,
    Select,
    Table,
    Text,
    and_,
    bindparam,
    delete,
    func,
    literal_column,
    or_,
    select,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import Executable
from sqlalchemy.sql.compiler import SQLCompiler

from ..dialects import MariaDB, PostgreSQL, SQLite, dialect_of
from ..dialects.columns import moment, utc_now
from ..late import in_utc

# SQLite compares text, and its clock has whole seconds. So the cutoff must have whole seconds too.
_WHOLE_SECONDS = "%(year)04d-%(month)02d-%(day)02d %(hour)02d:%(minute)02d:%(second)02d"
CUTOFF = moment().with_variant(sqlite.DATETIME(storage_format=_WHOLE_SECONDS), "sqlite")  # type: ignore[no-untyped-call]  # SQLAlchemy's


@dataclass(frozen=True)
class Expired:
    """The markers to delete: those that were processed before ``cutoff``, of all handlers or of one.

    The message of such a marker occurred before ``cutoff`` too, or has no time. With ``undated``, it has no time.
    Markers of the handlers ``kept``, which belong to a rebuild, are not deleted.
    """

    marker: Table
    cutoff: datetime
    handler: str | None
    batch_size: int
    kept: Collection[str] = ()
    undated: bool = False

    def among(self, rows: Any) -> ColumnElement[bool]:
        """Return the condition that a row of ``rows``, the marker table or an alias of it, is expired."""
        at, cutoff = rows.c.occurred_at, bindparam("cutoff", self.cutoff, type_=CUTOFF)
        old = and_(rows.c.processed_at < cutoff, at.is_(None) if self.undated else or_(at.is_(None), at < cutoff))
        if self.kept:
            old = and_(old, rows.c.handler.not_in(sorted(self.kept)))
        if self.handler is None:
            return old
        return and_(old, rows.c.handler == bindparam("handler", self.handler, type_=rows.c.handler.type))

    def handlers(self) -> Select[Any]:
        """Return a SELECT of the handlers that have an expired marker."""
        return select(self.marker.c.handler).where(self.among(self.marker)).distinct()

    def oldest(self, rows: Any, *columns: ColumnElement[Any]) -> Select[Any]:
        """Return a SELECT of the ``columns`` of the oldest ``batch_size`` expired rows of the table, or of an alias."""
        expired = select(*columns).select_from(rows).where(self.among(rows)).order_by(rows.c.processed_at)
        return expired.limit(bindparam("batch_size", self.batch_size))

    def any(self) -> Select[Any]:
        """Return a SELECT that gives a row if an expired marker is there, even if another cleaner is deleting it."""
        return select(literal_column("1")).select_from(self.marker).where(self.among(self.marker)).limit(1)


class Database:
    """The differences of one database for maintenance. The defaults are for any database with a dialect."""

    cleanup_isolation: ClassVar[str | None] = None
    """The isolation level at which a cleanup locks only the rows that it deletes; None if the level does not matter."""

    keeps_zones: ClassVar[bool] = False
    """True if the database has a type for times with a time zone."""

    def now(self, connection: Connection) -> datetime:
        """Return the current time in UTC, by the clock that claims take their time from."""
        return in_utc(connection.execute(select(utc_now())).scalar_one())

    def cleanup_statement(self, expired: Expired) -> Executable:
        """Return a DELETE of the oldest batch of expired markers.

        If the database supports it, the statement skips rows that other transactions have locked.
        """
        marker, old = expired.marker, expired.marker.alias()
        batch = expired.oldest(old, old.c.message_id, old.c.handler).subquery("batch")
        same = (batch.c.message_id == marker.c.message_id, batch.c.handler == marker.c.handler)
        return delete(marker).where(select(literal_column("1")).select_from(batch).where(*same).exists())


# PostgreSQL ----------------------------------------------------------------------------------------------------------


class OnPostgreSQL(Database):
    """PostgreSQL."""

    cleanup_isolation = "READ COMMITTED"  # above it, what another cleaner deleted is a serialization failure
    keeps_zones = True

    def cleanup_statement(self, expired: Expired) -> Executable:
        """Return a DELETE of the oldest expired markers; it skips rows that another cleaner has locked.

        It finds them by physical address, which takes no second index lookup.
        """
        oldest = expired.oldest(expired.marker, literal_column("ctid")).with_for_update(skip_locked=True)
        batch = func.any(func.array(oldest.scalar_subquery()))
        # This condition is true, and is evaluated once, before anything is read. It gives the transaction a short lock
        # timeout, since a cleanup comes back to rows that others hold for longer; and a COMMIT that does not wait for
        # the disk, since the next cleanup deletes what a crash restores.
        settings = "concat(set_config('lock_timeout', '100ms', true), set_config('synchronous_commit', 'off', true))"
        impatient = select(literal_column(settings, type_=Text())).scalar_subquery().is_not(None)
        # An address is unique in one partition only: a row of another partition with this address may be young.
        return delete(expired.marker).where(impatient, literal_column("ctid") == batch, expired.among(expired.marker))


# MariaDB -------------------------------------------------------------------------------------------------------------


class OnMariaDB(Database):
    """MariaDB and MySQL."""

    cleanup_isolation = "READ COMMITTED"  # above it, the gap after the last expired marker is where new ones go

    def cleanup_statement(self, expired: Expired) -> Executable:
        """Return a DELETE by a join: it locks only the rows it deletes, and skips rows that another cleaner locked."""
        marker = expired.marker
        batch = expired.oldest(marker, *marker.primary_key).with_for_update(skip_locked=True).subquery("batch")
        return _ImpatientDelete(marker).where(
            marker.c.message_id == batch.c.message_id,
            marker.c.handler == batch.c.handler,
        )


class _ImpatientDelete(Delete):
    """Waits for a lock at most a second: in a small table the planner makes a DELETE read rows that others hold.

    MySQL cannot limit the wait of one statement, but can be told to find the batch first.
    """

    inherit_cache = True


@compiles(_ImpatientDelete)
def _compile_impatient(element: _ImpatientDelete, compiler: SQLCompiler, **options: Any) -> str:
    on_mysql = MariaDB.is_mysql(compiler.dialect)
    hinted = element.prefix_with("/*+ JOIN_PREFIX(batch) SET_VAR(sql_safe_updates = 0) */") if on_mysql else element
    statement: str = compiler.visit_delete(hinted, **options)  # type: ignore[no-untyped-call]  # SQLAlchemy's
    settings = "innodb_lock_wait_timeout = 1, sql_safe_updates = 0"
    return statement if on_mysql else f"SET STATEMENT {settings} FOR {statement}"


# SQLite --------------------------------------------------------------------------------------------------------------


class OnSQLite(Database):
    """SQLite."""

    def cleanup_statement(self, expired: Expired) -> Executable:
        """Return a DELETE of the oldest expired markers, by rowid."""
        rowid: ColumnElement[Any] = literal_column("rowid")
        return delete(expired.marker).where(rowid.in_(expired.oldest(expired.marker, rowid)))


# The database of an engine --------------------------------------------------------------------------------------------

_KNOWN = ((PostgreSQL, OnPostgreSQL()), (MariaDB, OnMariaDB()), (SQLite, OnSQLite()))
_OTHER = Database()


def database_of(bind: Engine | Connection) -> Database:
    """Return the ``Database`` of ``bind``. Raises ``UnsupportedDatabaseError``, as deliveries do."""
    dialect = dialect_of(bind)
    return next((database for kind, database in _KNOWN if isinstance(dialect, kind)), _OTHER)
