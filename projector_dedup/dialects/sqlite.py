"""SQLite: one writer at a time, so the unit of work takes the write lock before anything else."""

from __future__ import annotations

import sqlite3
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from sqlalchemy import URL, Row, Select, Table, bindparam, delete, literal_column, select, text
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import ColumnElement, Executable

from ..errors import UnsafeSessionError
from ..findings import Finding, advice
from ..transaction_text import Grammar
from .answers import Failure, Status
from .claims import Key, Parameters, handler_parameters, inserted, inserting
from .interface import Dialect
from .places import is_in_memory, place_of_sqlite
from .plain_tables import Wanted
from .pruning import is_expired
from .shared_connection import refuse_sharing
from .sqlite_close import close_ends_transactions
from .sqlite_rows import SQLiteRows

_COMMITS = "projector_dedup_commits"


class SQLite(Dialect):
    """SQLite 3.35 and later (RETURNING)."""

    names = frozenset({"sqlite"})
    drivers = frozenset({"pysqlite", "aiosqlite"})
    grammar = Grammar(settings=r"\bdefer_foreign_keys\b")
    claims_may_read = True
    locks_rows = False
    plain_rows = SQLiteRows()
    transactional_ddl = True  # once ``migrating`` has begun; sqlite3 itself begins for rows only

    def place_of(self, url: URL) -> Hashable | None:
        """The file, whatever the path to it."""
        return place_of_sqlite(url)

    def lives_in_connection(self, url: URL) -> bool:
        """In memory."""
        return is_in_memory(url)

    def detecting_isolation(self, engine: Engine) -> str | None:
        """Writers are serialised."""
        return None

    def prepare(self, engine: Engine) -> None:
        """An interrupted statement must not keep the write lock."""
        close_ends_transactions(engine)

    def refuse_unsafe(self, connection: Connection) -> None:
        """A connection that several threads share, and AUTOCOMMIT."""
        refuse_sharing(connection)
        asked = connection.get_execution_options().get("isolation_level")
        engine_level = getattr(connection.dialect, "_on_connect_isolation_level", None)
        if "AUTOCOMMIT" in (asked, asked or engine_level) or self._commits_nothing(connection):
            raise UnsafeSessionError(
                "the engine is in AUTOCOMMIT: marker and read model would be committed one by one; give the "
                "dispatcher an engine without isolation_level='AUTOCOMMIT' and without autocommit=True"
            )

    def _commits_nothing(self, connection: Connection) -> bool:
        """Whether ``commit()`` is without effect, as sqlite3's autocommit=True has it; our BEGIN would stay open."""
        if connection.dialect.driver != "aiosqlite":
            return getattr(connection.connection.dbapi_connection, "autocommit", None) is True
        driver = connection.connection.driver_connection
        # aiosqlite does not tell, so try, once for each of its connections.
        if _COMMITS not in connection.info and self.status(driver) is Status.NONE:
            connection.exec_driver_sql("BEGIN")
            connection.connection.commit()
            connection.info[_COMMITS] = self.status(driver) is Status.NONE
            if not connection.info[_COMMITS]:
                connection.exec_driver_sql("ROLLBACK")
        return connection.info.get(_COMMITS) is False

    def begin(self, connection: Connection, marker: Table | None, wait: float | None) -> None:
        """Take the write lock first: a transaction that reads first could only fail when it came to write."""
        driver: Any = connection.connection.driver_connection
        if self.status(driver) is Status.OPEN:
            return  # the engine's own begin hook, or sqlite3's autocommit=False, has begun; the claim locks
        if wait is None:
            if marker is None or driver.isolation_level is None:
                connection.exec_driver_sql("BEGIN IMMEDIATE")
            return  # or else sqlite3 begins with the claim, and what begins with an INSERT locks at once
        usual = connection.exec_driver_sql("PRAGMA busy_timeout").scalar_one()
        connection.exec_driver_sql(f"PRAGMA busy_timeout = {int(wait * 1000)}")
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        finally:
            connection.exec_driver_sql(f"PRAGMA busy_timeout = {usual}")

    def begin_around(self, connection: Connection, marker: Table | None) -> None:
        """Not by the claim, for that is not the first statement."""
        self.begin(connection, None, None)

    def claim_statement(self, marker: Table, *, bounded: bool, names: int = 1) -> Executable:
        """ON CONFLICT names its columns, so that a table without the unique index is an error, not a double apply."""
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
        """By the count of rows."""
        return inserted(connection, statement, key) == names

    def claim_and_read(
        self, connection: Connection, marker: Table, wanted: Wanted, parameters: Parameters
    ) -> Row[Any] | None:
        """One after the other: there are no round trips to spare, but the ORM's work for a SELECT."""
        key = {name: parameters[name] for name in ("message_id", "handler", "occurred_at")}
        if not self.claim(connection, _claim(self, marker), marker, key):
            return None
        return super().claim_and_read(connection, marker, wanted, parameters)

    def claim_many(self, connection: Connection, marker: Table, keys: Sequence[Parameters]) -> set[Key]:
        """As many statements as SQLite's limit on parameters asks for; they say which rows are new."""
        return {(row[0], row[1]) for row in connection.execute(_claim_many(marker), list(keys))}

    def is_only(self, connection: Connection, table: Table) -> bool:
        """A temporary table, or that of an attached file, may have its name."""
        quote, namesakes = connection.dialect.identifier_preparer.quote_identifier, 0
        for _, file, _ in Connection.exec_driver_sql(connection, "PRAGMA database_list").all():
            found = f"SELECT count(*) FROM {quote(file)}.sqlite_master WHERE name = ? COLLATE NOCASE"  # noqa: S608  # quoted
            namesakes += Connection.exec_driver_sql(connection, found, (table.name,)).scalar_one()
        return namesakes <= 1

    def prune_statement(self, marker: Table, *, of_handler: bool = False) -> Executable:
        """Oldest first, by rowid."""
        oldest: Select[Any] = (
            select(literal_column("rowid"))
            .select_from(marker)
            .where(is_expired(marker, of_handler=of_handler))
            .order_by(marker.c.processed_at)
            .limit(bindparam("batch_size"))
        )
        return delete(marker).where(literal_column("rowid").in_(oldest))

    def findings(self, connection: Connection, marker: Table) -> list[Finding]:
        """Without write-ahead logging a reader makes writers wait at COMMIT; with it, files do not commit as one."""
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

    def measured(self, connection: Connection, table: Table) -> tuple[int | None, int | None]:
        """The bytes only, and where SQLite was built with dbstat; rows are counted."""
        if connection.exec_driver_sql("SELECT 1 FROM pragma_module_list WHERE name = 'dbstat'").first() is None:
            return None, None
        schema = {"schema": connection.schema_for_object(table) or "main"}
        indexes = connection.execute(
            text("SELECT name FROM pragma_index_list(:name, :schema)"), {"name": table.name, **schema}
        )
        names = [table.name, *indexes.scalars()]
        pages = text("SELECT sum(pgsize) FROM dbstat(:schema, 1) WHERE name IN :names")
        return None, connection.scalar(pages.bindparams(bindparam("names", expanding=True)), {"names": names, **schema})

    def migrating(self, connection: Connection, name: str) -> AbstractContextManager[None]:
        """The write lock, which makes DDL part of the transaction too."""
        self.begin(connection, None, None)
        return nullcontext()

    def status(self, driver_connection: Any) -> Status:
        """``in_transaction`` asks the library, not the file."""
        try:
            return Status.OPEN if driver_connection.in_transaction else Status.NONE
        except (sqlite3.ProgrammingError, ValueError):  # closed
            return Status.BUSY

    def classify(self, error: Exception) -> Failure:
        """By SQLite's extended result code."""
        code = _code(error)
        if code.startswith("SQLITE_BUSY"):
            return Failure.LOCK_TIMEOUT
        if getattr(error, "connection_invalidated", False) or code.startswith("SQLITE_LOCKED"):
            return Failure.TRANSIENT
        if code in ("SQLITE_CONSTRAINT_UNIQUE", "SQLITE_CONSTRAINT_PRIMARYKEY"):
            return Failure.UNIQUE
        return Failure.NO_TABLE if code in ("SQLITE_ERROR", "SQLITE_CONSTRAINT_NOTNULL") else Failure.PERMANENT

    def commit_refused(self, error: DBAPIError) -> bool:
        """BUSY, a deferred constraint and a full disk leave the transaction uncommitted."""
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
