"""Use SQLite, which has one writer at a time: a unit of work takes the write lock before anything else."""

from __future__ import annotations

import sqlite3
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from sqlalchemy import Select, Table, bindparam, delete, literal_column, select, text
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import ColumnElement, Executable

from ...errors import UnsafeSessionError, UnsupportedDatabaseError
from ...transaction_text import Grammar
from ..answers import Failure, Status
from ..claims import Key, Parameters, handler_parameters, insert_and_count, inserting
from ..cleanup import is_expired
from ..findings import Finding, advice
from ..interface import Dialect
from ..levels import chosen_level
from .close import close_ends_transactions

_LATER = (  # a full disk, a file that may not be written or opened, or is corrupted, an interrupted statement
    *("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM"),
    *("SQLITE_IOERR", "SQLITE_NOMEM", "SQLITE_PROTOCOL", "SQLITE_INTERRUPT"),
    *("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_INTERNAL", "SQLITE_SCHEMA"),
)
_IN_MEMORY = {"memory", "memdb"}  # values of mode= and vfs= in the URL


class SQLite(Dialect):
    """Uses SQLite 3.35 and later (RETURNING), through the sqlite3 of Python's library."""

    names = frozenset({"sqlite"})
    modules = frozenset({"sqlite3"})
    grammar = Grammar(settings=r"\bdefer_foreign_keys\b")
    locks_rows = False
    transactional_ddl = True  # once ``migrating`` has begun; sqlite3 itself begins for rows only

    def detecting_isolation(self, engine: Engine) -> str | None:
        """Return None: writers take turns, so that no update is lost at any level."""
        return None

    def prepare(self, engine: Engine) -> None:
        """Make closed connections release the write lock, also when a statement was interrupted.

        Raises ``UnsupportedDatabaseError`` for a database in memory, which is gone when its connection is closed.
        """
        path, arguments = engine.url.database or "", engine.url.query
        if path in ("", "file:") or ":memory:" in path or {arguments.get("mode"), arguments.get("vfs")} & _IN_MEMORY:
            raise UnsupportedDatabaseError(
                "SQLite in memory is lost with its connection, and sessions would share one; use a file, such as "
                "sqlite:///read_model.db, in tests in a temporary folder"
            )
        close_ends_transactions(engine)

    def refuse_unsafe(self, connection: Connection) -> None:
        """Raise ``RefusedError`` for a connection that several sessions share, and for AUTOCOMMIT."""
        self.refuse_sharing(connection.engine)
        if chosen_level(connection) == "AUTOCOMMIT" or self.commits_nothing(connection):
            raise UnsafeSessionError(
                "the engine is in AUTOCOMMIT: marker and read model would be committed one by one; give the "
                "dispatcher an engine without isolation_level='AUTOCOMMIT' and without autocommit=True"
            )

    @abstractmethod
    def commits_nothing(self, connection: Connection) -> bool:
        """True if the driver's ``commit()`` has no effect: the library's own BEGIN would stay open."""

    def begin(self, connection: Connection, marker: Table | None, wait: float | None) -> None:
        """Take the write lock, or leave that to the claim; wait at most ``wait`` seconds for it, if that is given.

        A transaction that reads first could fail when it comes to write.
        """
        driver: Any = connection.connection.driver_connection
        if self.status(driver) is Status.OPEN:
            return  # a begin hook of the engine, or sqlite3's autocommit=False, has begun; the claim locks
        if wait is None:
            if marker is None or driver.isolation_level is None:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            return  # otherwise sqlite3 begins with the claim, and a transaction locks at once if its first is an INSERT
        usual = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(wait * 1000)}")
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        finally:
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {usual}")

    def begin_around(self, connection: Connection, marker: Table | None) -> None:
        """Take the write lock, unless a transaction is open on the driver's connection: then the claim takes it.

        Behind a savepoint the claim is not the first statement, so it would not lock in time.
        """
        self.begin(connection, None, None)

    def claim_statement(self, marker: Table, *, bounded: bool, names: int = 1) -> Executable:
        """Return an INSERT that skips markers that are there.

        ON CONFLICT names its columns, so that a table without the unique index is an error, not a double apply.
        """
        rows: list[dict[str, ColumnElement[Any]]] = [
            {
                "message_id": bindparam("message_id"),
                "handler": bindparam(handler),
                "occurred_at": bindparam("occurred_at", type_=marker.c.occurred_at.type),
            }
            for handler in handler_parameters(names)
        ]
        statement = inserting(insert(marker), rows)
        return statement.on_conflict_do_nothing(index_elements=["message_id", "handler"]).execution_options(
            preserve_rowcount=True
        )

    def claim(
        self, connection: Connection, statement: Executable, marker: Table, key: Mapping[str, Any], *, names: int = 1
    ) -> bool:
        """Run the claim, and return True if the row count says that every marker is new."""
        return insert_and_count(connection, statement, key) == names

    def claim_many(self, connection: Connection, marker: Table, keys: Sequence[Parameters]) -> set[Key]:
        """Claim several markers by INSERTs that return the new ones, and return their keys."""
        return {(row[0], row[1]) for row in connection.execute(_claim_many(marker), list(keys))}

    def is_only(self, connection: Connection, table: Table) -> bool:
        """True if no temporary table, and no table of an attached file, has the same name."""
        quote, namesakes = connection.dialect.identifier_preparer.quote_identifier, 0
        for _, file, _ in Connection.exec_driver_sql(connection, "PRAGMA database_list").all():
            found = f"SELECT count(*) FROM {quote(file)}.sqlite_master WHERE name = ? COLLATE NOCASE"  # noqa: S608  # quoted
            namesakes += Connection.exec_driver_sql(connection, found, (table.name,)).scalar_one()
        return namesakes <= 1

    def cleanup_statement(self, marker: Table, *, of_handler: bool = False) -> Executable:
        """Return a DELETE of the oldest expired markers, by rowid."""
        oldest: Select[Any] = (
            select(literal_column("rowid"))
            .select_from(marker)
            .where(is_expired(marker, of_handler=of_handler))
            .order_by(marker.c.processed_at)
            .limit(bindparam("batch_size"))
        )
        return delete(marker).where(literal_column("rowid").in_(oldest))

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

    def size(self, connection: Connection, table: Table) -> int | None:
        """Return the bytes of the table with all indexes; None if SQLite was built without dbstat."""
        if connection.exec_driver_sql("SELECT 1 FROM pragma_module_list WHERE name = 'dbstat'").first() is None:
            return None
        schema = {"schema": connection.schema_for_object(table) or "main"}
        indexes = connection.execute(
            text("SELECT name FROM pragma_index_list(:name, :schema)"), {"name": table.name, **schema}
        )
        names = [table.name, *indexes.scalars()]
        pages = text("SELECT sum(pgsize) FROM dbstat(:schema, 1) WHERE name IN :names")
        names_of = pages.bindparams(bindparam("names", expanding=True))
        found: int | None = connection.scalar(names_of, {"names": names, **schema})
        return found

    def limit_waits(self, connection: Connection, seconds: float) -> str | None:
        """Set the busy timeout of the connection."""
        usual = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {round(seconds * 1000)}")
        return f"PRAGMA busy_timeout = {usual}"

    def migrating(self, connection: Connection, name: str) -> AbstractContextManager[None]:
        """Take the write lock, which also makes DDL part of the transaction; return a block without further effect."""
        self.begin(connection, None, None)
        return nullcontext()

    def status(self, driver_connection: Any) -> Status:
        """Return OPEN or NONE as SQLite's library says, or BUSY for a closed connection; the file is not read."""
        try:
            return Status.OPEN if driver_connection.in_transaction else Status.NONE
        except (sqlite3.ProgrammingError, ValueError):  # closed
            return Status.BUSY

    def classify(self, error: Exception) -> Failure:
        """Return what the error means, by SQLite's extended result code."""
        code = _code(error)
        if code.startswith("SQLITE_BUSY"):
            return Failure.LOCK_TIMEOUT
        if getattr(error, "connection_invalidated", False) or code.startswith("SQLITE_LOCKED"):
            return Failure.TRANSIENT
        if code in ("SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY"):
            return Failure.UNIQUE
        if code.startswith(_LATER):
            return Failure.LATER
        return Failure.NO_TABLE if code in ("SQLITE_ERROR", "SQLITE_CONSTRAINT_NOTNULL") else Failure.PERMANENT

    def commit_refused(self, error: DBAPIError) -> bool:
        """True for BUSY, a violated deferred constraint and a full disk: the transaction was not committed."""
        return _code(error).startswith(("SQLITE_BUSY", "SQLITE_CONSTRAINT", "SQLITE_FULL"))


@cache
def _claim(dialect: SQLite, marker: Table) -> Executable:
    return dialect.claim_statement(marker, bounded=False)


@cache
def _claim_many(marker: Table) -> Executable:
    values: dict[str, Any] = {name: bindparam(name) for name in ("message_id", "handler", "occurred_at")}
    statement = insert(marker).values(values).on_conflict_do_nothing(index_elements=["message_id", "handler"])
    return statement.returning(marker.c.message_id, marker.c.handler)


def _code(error: Exception) -> str:
    code: str = getattr(getattr(error, "orig", error), "sqlite_errorname", "")
    return code
