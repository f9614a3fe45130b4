"""Say what each database does differently when somebody cleans up, migrates, counts or checks the tables.

Nothing of this is used while a message is delivered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil
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
    select,
    text,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import Executable
from sqlalchemy.sql.compiler import SQLCompiler

from ..dialects import MariaDB, PostgreSQL, SQLite, dialect_of
from ..dialects.columns import moment, utc_now
from ..errors import RetriesExhaustedError


@dataclass(frozen=True)
class Finding:
    """Names a problem and its remedy; ``fatal`` if deliveries fail, or may be lost or doubled, before it is solved."""

    problem: str
    remedy: str
    fatal: bool = True


def advice(problem: str, remedy: str) -> Finding:
    """Return a finding that is not fatal: nothing is wrong, but it could be better."""
    return Finding(problem, remedy, fatal=False)


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

    def among(self, rows: Any) -> ColumnElement[bool]:
        """Return the condition that a row of ``rows``, the marker table or an alias of it, is expired."""
        old: ColumnElement[bool] = rows.c.processed_at < bindparam("cutoff", self.cutoff, type_=_CUTOFF)
        if self.handler is None:
            return old
        return and_(old, rows.c.handler == bindparam("handler", self.handler, type_=rows.c.handler.type))

    def oldest(self, rows: Any, *columns: ColumnElement[Any]) -> Select[Any]:
        """Return a SELECT of the ``columns`` of the oldest ``batch_size`` expired rows of the table, or of an alias."""
        expired = select(*columns).select_from(rows).where(self.among(rows)).order_by(rows.c.processed_at)
        return expired.limit(bindparam("batch_size", self.batch_size))

    def any(self) -> Select[Any]:
        """Return a SELECT that gives a row if an expired marker is there, even if another cleaner is deleting it."""
        return select(literal_column("1")).select_from(self.marker).where(self.among(self.marker)).limit(1)


def in_utc(moment: datetime) -> datetime:
    """Return a moment that a database gave, in UTC. One without a time zone is taken for UTC: all are stored so."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


class Database:
    """Answers what maintenance asks of a database. The defaults suit a database of which only the dialect is known."""

    cleanup_isolation: ClassVar[str | None] = None
    """The isolation level at which a cleanup locks only the rows that it deletes; None if the level does not matter."""

    keeps_zones: ClassVar[bool] = False
    """True if the database has a type for moments with a time zone, so that a moment is not in doubt."""

    transactional_ddl: ClassVar[bool | None] = None
    """True if a migration is one transaction; None to leave it to what Alembic says of the database."""

    # Cleanup --------------------------------------------------------------------------------------------------------

    def now(self, connection: Connection) -> datetime:
        """Return the current time in UTC, by the clock that claims take their time from."""
        return in_utc(connection.execute(select(utc_now())).scalar_one())

    def cleanup_statement(self, expired: Expired) -> Executable:
        """Return a DELETE of the oldest batch of expired markers.

        Rows that others have locked are left to them, where the database can do that.
        """
        marker, old = expired.marker, expired.marker.alias()
        batch = expired.oldest(old, old.c.message_id, old.c.handler).subquery("batch")
        same = (batch.c.message_id == marker.c.message_id, batch.c.handler == marker.c.handler)
        return delete(marker).where(select(literal_column("1")).select_from(batch).where(*same).exists())

    def limit_waits(self, connection: Connection, seconds: float) -> str | None:
        """Let no statement of this transaction, which has just begun, wait longer than ``seconds`` for a lock.

        Return the statement that gives the session its usual limit back; None if the limit ends with the transaction,
        or if the database has none.
        """
        return None

    def migrating(self, connection: Connection, name: str) -> AbstractContextManager[None]:
        """Return a block for a migration of the table set ``name``: a second migration waits for the first.

        It is entered in the migration's transaction. A statement in the block that would have to wait for other
        transactions fails with a lock timeout after a moment, and the caller runs the migration again: whoever waited
        longer to change a table would make every later transaction wait behind it.
        """
        return nullcontext()

    # For the people who run it ----------------------------------------------------------------------------------------

    def findings(self, connection: Connection, marker: Table) -> list[Finding]:
        """Return what is wrong, or could be better, in the settings of this database and of the marker table."""
        return []

    def size(self, connection: Connection, table: Table) -> int | None:
        """Return the bytes of the table with all indexes; None if the database's catalogue does not say it."""
        return None


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
        in_a_hurry = select(literal_column(settings, type_=Text())).scalar_subquery().is_not(None)
        # An address is unique in one partition only: a row of another partition with this address may be young.
        return delete(expired.marker).where(in_a_hurry, literal_column("ctid") == batch, expired.among(expired.marker))

    def findings(self, connection: Connection, marker: Table) -> list[Finding]:
        """Return what a crash of the server, or a failover, would lose."""
        return [*_persistence(connection, marker), *_replication(connection)]

    def size(self, connection: Connection, table: Table) -> int | None:
        """Return the bytes of the table with all indexes."""
        name = {"name": _regclass(connection, table)}
        found: int | None = connection.scalar(text("SELECT pg_total_relation_size(to_regclass(:name))"), name)
        return found

    def limit_waits(self, connection: Connection, seconds: float) -> str | None:
        """Set ``lock_timeout`` for the transaction: behind a pooler a session's setting would meet somebody else."""
        connection.exec_driver_sql(f"SET LOCAL lock_timeout = {max(1, round(seconds * 1000))}")
        return None

    def migrating(self, connection: Connection, name: str) -> AbstractContextManager[None]:
        """Take a lock that the transaction holds, so that it is released behind a pooler too; return an empty block."""
        # At a stricter level the snapshot would be older than the wait, and not show what the other migration did.
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        connection.exec_driver_sql("SET LOCAL lock_timeout = '500ms'")
        connection.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(f"projector_dedup {name}", 0))))
        return nullcontext()


def _regclass(connection: Connection, table: Table) -> str:
    """Return the table's name, quoted, as the server's functions take it."""
    quote, schema = connection.dialect.identifier_preparer.quote, connection.schema_for_object(table)
    return ".".join(quote(part) for part in (schema, table.name) if part)


def _persistence(connection: Connection, table: Table) -> Iterator[Finding]:
    name = _regclass(connection, table)
    unlogged = text("SELECT relpersistence = 'u' FROM pg_class WHERE oid = to_regclass(:name)")
    if connection.scalar(unlogged, {"name": name}):
        yield Finding(
            f"{name} is UNLOGGED: a crash of the server empties it, while the read model stays",
            f"every redelivery after that would be applied again; ALTER TABLE {name} SET LOGGED",
        )


# A COMMIT that has waited for a synchronous standby is still there after a failover to it. One that has not may be lost
# by a failover, although its message was acknowledged (docs/clusters.md).

# A subscriber of logical replication (Debezium, say) is no server to fail over to.
_REPLICATION = text(
    """
    SELECT current_user AS role, current_setting('synchronous_commit') AS waits,
        current_setting('synchronous_standby_names') AS names,
        EXISTS (
            SELECT FROM pg_stat_replication WHERE pid NOT IN
                (SELECT active_pid FROM pg_replication_slots WHERE slot_type = 'logical' AND active_pid IS NOT NULL)
        ) AS has_standby
    """
)


def _replication(connection: Connection) -> Iterator[Finding]:
    """Yield advice if a crash or a failover loses messages that were acknowledged."""
    found = connection.execute(_REPLICATION).one()
    if found.waits == "off":
        yield advice(
            f"synchronous_commit is off for {found.role}: a crash loses messages that were acknowledged just before",
            "set it to on for the role that delivers: ALTER ROLE ... SET synchronous_commit = on",
        )
    if found.has_standby and (not found.names or found.waits in ("off", "local")):
        reason = f"synchronous_commit = {found.waits}" if found.names else "synchronous_standby_names is empty"
        yield advice(
            f"replication is asynchronous ({reason}): a failover loses messages that were acknowledged just before",
            "name the standby in synchronous_standby_names; until then, deliver the last minutes again from an archive "
            "after each failover (docs/clusters.md)",
        )


# MariaDB -------------------------------------------------------------------------------------------------------------

_RIVAL = 60  # seconds that a migration waits for another one


class OnMariaDB(Database):
    """MariaDB and MySQL."""

    cleanup_isolation = "READ COMMITTED"  # above it, the gap after the last expired marker is where new ones go

    def cleanup_statement(self, expired: Expired) -> Executable:
        """Return a DELETE by a join: it locks only the rows it deletes, and skips rows that another cleaner locked."""
        marker = expired.marker
        batch = expired.oldest(marker, *marker.primary_key).with_for_update(skip_locked=True).subquery("batch")
        return _HastyDelete(marker).where(
            marker.c.message_id == batch.c.message_id,
            marker.c.handler == batch.c.handler,
        )

    def findings(self, connection: Connection, marker: Table) -> list[Finding]:
        """Return advice about the server's release and about a log that is not flushed."""
        found = []
        if not MariaDB.is_dependable(connection):
            found.append(
                advice(
                    "this server cannot be relied on to refuse lost updates at REPEATABLE READ, so projectors run at "
                    "SERIALIZABLE, where every read locks",
                    "upgrade to MariaDB 10.6.27, 10.11.18, 11.4.12, 11.8.8, 12.3.3 or later",
                )
            )
        flushed = connection.exec_driver_sql("SELECT @@global.innodb_flush_log_at_trx_commit").scalar_one()
        if flushed != 1:
            setting = "innodb_flush_log_at_trx_commit"
            found.append(
                advice(
                    f"{setting} = {flushed}: a crash of the machine loses messages that were acknowledged just before",
                    f"SET GLOBAL {setting} = 1, and write it into the server's configuration, in a cluster on every "
                    "node",
                )
            )
        return found

    def size(self, connection: Connection, table: Table) -> int | None:
        """Return the bytes of the table with all indexes, as InnoDB estimates them; None if it does not know."""
        place = {"schema": connection.schema_for_object(table), "name": table.name}
        found = connection.scalar(_SIZE, place)
        return None if found is None else int(found)

    def limit_waits(self, connection: Connection, seconds: float) -> str | None:
        """Set the session's limits for locks of tables, where the default is a day, and of rows."""
        names = ("lock_wait_timeout", "innodb_lock_wait_timeout")
        found = connection.exec_driver_sql(f"SELECT {', '.join(f'@@session.{name}' for name in names)}").one()
        limits = [min(int(usual), max(1, ceil(seconds))) for usual in found]
        setting, usual = (
            ", ".join(f"{name} = {int(value)}" for name, value in zip(names, values, strict=True))
            for values in (limits, found)
        )
        connection.exec_driver_sql(f"SET {setting}")
        return f"SET {usual}"

    @contextmanager
    def migrating(self, connection: Connection, name: str) -> Iterator[None]:
        """Hold a lock of the session while the block runs: a lock of the transaction would end with the first DDL.

        Names of locks belong to the whole server, and have 64 characters at most, so the name is hashed with the
        database. Raises ``RetriesExhaustedError`` if another migration holds the lock for too long.
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


class _HastyDelete(Delete):
    """Waits for a lock at most a second: in a small table the planner makes a DELETE read rows that others hold."""

    inherit_cache = True


@compiles(_HastyDelete)
def _hurry(element: _HastyDelete, compiler: SQLCompiler, **options: Any) -> str:
    statement: str = compiler.visit_delete(element, **options)  # type: ignore[no-untyped-call]  # SQLAlchemy's
    mariadb = getattr(compiler.dialect, "is_mariadb", False)
    return f"SET STATEMENT innodb_lock_wait_timeout = 1 FOR {statement}" if mariadb else statement


_SIZE = text(
    """
    SELECT data_length + index_length FROM information_schema.tables
    WHERE table_schema = coalesce(:schema, database()) AND table_name = :name
    """
)


# SQLite --------------------------------------------------------------------------------------------------------------


class OnSQLite(Database):
    """SQLite."""

    transactional_ddl = True  # once ``migrating`` has begun; sqlite3 itself begins for rows only

    def cleanup_statement(self, expired: Expired) -> Executable:
        """Return a DELETE of the oldest expired markers, by rowid."""
        rowid: ColumnElement[Any] = literal_column("rowid")
        return delete(expired.marker).where(rowid.in_(expired.oldest(expired.marker, rowid)))

    def findings(self, connection: Connection, marker: Table) -> list[Finding]:
        """Return advice about the journal mode.

        Without write-ahead logging a reader makes writers wait at COMMIT; with it, several files do not commit as one.
        """
        mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar_one()
        files = [file for _, _, file in connection.exec_driver_sql("PRAGMA database_list") if file]
        if mode == "wal" and len(files) > 1:  # https://www.sqlite.org/lang_attach.html
            return [
                advice(
                    "databases are attached, and under write-ahead logging a COMMIT that a crash interrupts is atomic "
                    "in each file only",
                    "keep the markers in the file of the read model: make_tables(metadata, schema=...)",
                )
            ]
        if mode in ("wal", "memory"):
            return []
        return [
            advice(f"the journal mode is {mode}", "call projector_dedup.configure_sqlite(engine) once, at start-up")
        ]

    def limit_waits(self, connection: Connection, seconds: float) -> str | None:
        """Set the busy timeout of the connection."""
        usual = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {round(seconds * 1000)}")
        return f"PRAGMA busy_timeout = {usual}"

    def migrating(self, connection: Connection, name: str) -> AbstractContextManager[None]:
        """Take the write lock, which also makes DDL part of the transaction; return a block without further effect."""
        dialect_of(connection).begin(connection, None, None)
        return nullcontext()


# The database of an engine --------------------------------------------------------------------------------------------

_KNOWN = ((PostgreSQL, OnPostgreSQL()), (MariaDB, OnMariaDB()), (SQLite, OnSQLite()))
_OTHER = Database()


def database_of(bind: Engine | Connection) -> Database:
    """Return what maintenance asks of the database of ``bind``; raise ``UnsupportedDatabaseError`` as deliveries do."""
    dialect = dialect_of(bind)
    return next((database for kind, database in _KNOWN if isinstance(dialect, kind)), _OTHER)
