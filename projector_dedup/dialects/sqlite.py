"""SQLite, which permits one writer at a time: a unit of work first takes the write lock."""

from __future__ import annotations

import contextlib
import sqlite3
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakSet, ref

from sqlalchemy import Table, bindparam, event
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.interfaces import Dialect as EngineDialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import QueuePool
from sqlalchemy.sql import ColumnElement, Executable

from ..asyncio_names import AsyncEngine
from ..errors import UnsafeSessionError, UnsupportedDatabaseError
from ..transaction_text import Grammar
from .claims import Key, Parameters, handler_parameters, inserting
from .columns import utc_now
from .dialect import Dialect, Failure, Status, chosen_level, insert_and_count
from .listeners import listen_once

_LATER = (  # a full disk, a file that may not be written or opened, or is corrupted, an interrupted statement
    *("SQLITE_FULL", "SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM"),
    *("SQLITE_IOERR", "SQLITE_NOMEM", "SQLITE_PROTOCOL", "SQLITE_INTERRUPT"),
    *("SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_INTERNAL", "SQLITE_SCHEMA"),
)
_IN_MEMORY = {"memory", "memdb"}  # values of mode= and vfs= in the URL


class SQLite(Dialect):
    """SQLite 3.35 and later (which has RETURNING), with the sqlite3 module of Python."""

    names = frozenset({"sqlite"})
    modules = frozenset({"sqlite3"})
    grammar = Grammar(settings=r"\bdefer_foreign_keys\b")
    locks_rows = False

    def prepare(self, engine: Engine) -> None:
        """Make closed connections release the write lock, also when a statement was interrupted.

        Raises ``UnsupportedDatabaseError`` for a database in memory, which is lost when its connection is closed.
        """
        path, arguments = engine.url.database or "", engine.url.query
        if path in ("", "file:") or ":memory:" in path or {arguments.get("mode"), arguments.get("vfs")} & _IN_MEMORY:
            raise UnsupportedDatabaseError(
                "an SQLite database in memory is lost with its connection, and all sessions would share one "
                "connection; use a file, such as sqlite:///read_model.db, in tests in a temporary folder"
            )
        close_ends_transactions(engine)

    def refuse_unsafe(self, connection: Connection) -> None:
        """Raise ``RefusedError`` for a connection that several sessions share, and for AUTOCOMMIT."""
        self.refuse_sharing(connection.engine)
        if chosen_level(connection) == "AUTOCOMMIT" or self.commits_nothing(connection):
            raise UnsafeSessionError(
                "the engine is in AUTOCOMMIT, so marker and read model would be committed separately; give the "
                "dispatcher an engine without isolation_level='AUTOCOMMIT' and without autocommit=True"
            )

    @abstractmethod
    def commits_nothing(self, connection: Connection) -> bool:
        """True if the driver's ``commit()`` has no effect, so that the library's own BEGIN would stay open."""

    def begin(self, connection: Connection, marker: Table | None, wait: float | None) -> None:
        """Take the write lock, or let the claim take it. ``wait`` limits the wait, in seconds.

        A transaction that reads before it takes the lock could fail at its first write.
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
        """Take the write lock, unless a transaction is open on the driver's connection. Then the claim takes the lock.

        After a savepoint the claim is not the first statement, so it would lock too late.
        """
        self.begin(connection, None, None)

    def claim_statement(self, marker: Table, *, bounded: bool, names: int = 1, digest: bool = False) -> Executable:
        """Return an INSERT that skips existing markers.

        ON CONFLICT names its columns, so that a table without the unique index causes an error, and no message is
        applied twice.
        """
        rows: list[dict[str, ColumnElement[Any]]] = [
            {
                "message_id": bindparam("message_id"),
                "handler": bindparam(handler),
                "occurred_at": bindparam("occurred_at", type_=marker.c.occurred_at.type),
                **({"digest": bindparam("digest", type_=marker.c.digest.type)} if digest else {}),
            }
            for handler in handler_parameters(names)
        ]
        statement = inserting(insert(marker), rows)
        return statement.on_conflict_do_nothing(index_elements=["message_id", "handler"]).execution_options(
            preserve_rowcount=True
        )

    def lock_statement(self, marker: Table, *, bounded: bool) -> Executable:  # `begin` has waited
        """Return an upsert. The transaction has the lock of the whole file already."""
        row: dict[str, ColumnElement[Any]] = {"message_id": bindparam("message_id"), "handler": bindparam("handler")}
        upsert = insert(marker).values(row)
        return upsert.on_conflict_do_update(index_elements=list(row), set_={"processed_at": utc_now()})

    def insert_new(self, connection: Connection, table: Table, values: Mapping[str, Any]) -> bool:
        """Insert a row. Return False if its key exists, because an error would abort the transaction."""
        statement = insert(table).values(values).on_conflict_do_nothing(index_elements=["message_id", "handler"])
        return insert_and_count(connection, statement.execution_options(preserve_rowcount=True), {}) == 1

    def claim_many(self, connection: Connection, marker: Table, keys: Sequence[Parameters]) -> set[Key]:
        """Claim several markers by INSERTs that return the new ones, and return their keys."""
        return {(row[0], row[1]) for row in connection.execute(_claim_many(marker, tuple(keys[0])), list(keys))}

    def status(self, driver_connection: Any) -> Status:
        """Return OPEN or NONE as SQLite's library reports it, or BUSY for a closed connection. Do not read the file."""
        try:
            return Status.OPEN if driver_connection.in_transaction else Status.NONE
        except (sqlite3.ProgrammingError, ValueError):  # closed
            return Status.BUSY

    def classify(self, error: Exception) -> Failure:
        """Return the meaning of the error, by SQLite's extended result code."""
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
        """True for BUSY, a violated deferred constraint and a full disk, after which nothing is committed."""
        return _code(error).startswith(("SQLITE_BUSY", "SQLITE_CONSTRAINT", "SQLITE_FULL"))


@cache
def _claim_many(marker: Table, parameters: tuple[str, ...]) -> Executable:
    values: dict[str, Any] = {name: bindparam(name) for name in parameters if name in marker.c}
    statement = insert(marker).values(values).on_conflict_do_nothing(index_elements=["message_id", "handler"])
    return statement.returning(marker.c.message_id, marker.c.handler)


def _code(error: Exception) -> str:
    code: str = getattr(getattr(error, "orig", error), "sqlite_errorname", "")
    return code


# The drivers ---------------------------------------------------------------------------------------------------------

_COMMITS = "projector_dedup_commits"  # in the ``info`` of a physical connection


class Pysqlite(SQLite):
    """SQLite with Python's own sqlite3 module."""

    drivers = frozenset({"pysqlite"})

    def commits_nothing(self, connection: Connection) -> bool:
        """True if the connection was made with autocommit=True, which sqlite3 has since Python 3.12."""
        return getattr(connection.connection.dbapi_connection, "autocommit", None) is True


class Aiosqlite(SQLite):
    """SQLite with aiosqlite, which does not report whether a connection has autocommit."""

    drivers = frozenset({"aiosqlite"})

    def commits_nothing(self, connection: Connection) -> bool:
        """True if ``commit()`` has no effect. The method tries it once for each physical connection."""
        driver = connection.connection.driver_connection
        if _COMMITS not in connection.info and self.status(driver) is Status.NONE:
            connection.exec_driver_sql("BEGIN")
            connection.connection.commit()
            connection.info[_COMMITS] = self.status(driver) is Status.NONE
            if not connection.info[_COMMITS]:
                connection.exec_driver_sql("ROLLBACK")
        return connection.info.get(_COMMITS) is False


# Closing a connection ------------------------------------------------------------------------------------------------
#
# Since Python 3.11, ``sqlite3.Connection.close()`` leaves unfinished cursors alone, and SQLite keeps a connection with
# an unfinished statement alive, locks included, until the cursor dies. An interrupted statement leaves just that:
# SQLAlchemy invalidates the connection, which closes it, while the exception's traceback holds the cursor. Every writer
# of the database then waits for the garbage collector (tests/core/test_interrupts.py).

_MANY = 50  # cursors; with more, those that are gone are forgotten


class _ClosingConnection(sqlite3.Connection):
    """Finishes its cursors and rolls back before it closes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._cursors: list[ref[sqlite3.Cursor]] = []
        super().__init__(*args, **kwargs)

    def cursor(self, *args: Any, **kwargs: Any) -> Any:
        cursor = super().cursor(*args, **kwargs)
        if len(self._cursors) > _MANY:
            self._cursors = [known for known in self._cursors if known() is not None]
        self._cursors.append(ref(cursor))
        return cursor

    def close(self) -> None:
        # An error means: closed already, or called by a thread that may not close it. Then there is nothing to finish.
        with contextlib.suppress(sqlite3.Error):
            for known in self._cursors:
                if (cursor := known()) is not None:
                    cursor.close()
            if self.in_transaction:
                self.rollback()
        super().close()


@cache
def _closing(connection_class: type[sqlite3.Connection]) -> type[sqlite3.Connection]:
    if issubclass(connection_class, _ClosingConnection):
        return connection_class  # older SQLAlchemy hands the same keywords to every connect
    if connection_class is sqlite3.Connection:
        return _ClosingConnection
    return type(f"Closing{connection_class.__name__}", (_ClosingConnection, connection_class), {})


# Engines that have no connection older than the listeners; by the dialect, which execution_options() clones share.
_prepared: WeakSet[EngineDialect] = WeakSet()


def close_ends_transactions(engine: Engine) -> None:
    """Make the engine's connections end their transaction when they close, and when the pool gives them out."""
    if engine.dialect in _prepared:
        return
    checkout = [_checkout] if isinstance(engine.pool, QueuePool) else []
    listen_once(engine, before_others=True, do_connect=[_connect], checkout=checkout)
    if isinstance(engine.pool, QueuePool):
        # Not dispose(): a connection that another task takes meanwhile would return to a pool that nobody closes.
        for _ in range(engine.pool.checkedin()):
            with engine.connect() as connection:
                connection.invalidate()
    _prepared.add(engine.dialect)


def _connect(_dialect: EngineDialect, _record: object, _arguments: object, keywords: dict[str, Any]) -> None:
    if "async_creator_fn" not in keywords:  # the user makes the connection, and its class is the user's choice
        keywords["factory"] = _closing(keywords.get("factory", sqlite3.Connection))


def _checkout(dbapi_connection: Any, _record: object, _proxy: object) -> None:
    """End a transaction that a refused COMMIT left open, because SQLAlchemy returns the connection to the pool with it.

    The next transaction on the connection would commit writes that were reported as failed, perhaps with a marker.
    """
    if getattr(dbapi_connection, "driver_connection", dbapi_connection).in_transaction:
        dbapi_connection.rollback()


def configure_sqlite(engine: Engine | AsyncEngine, *, busy_timeout: float = 5.0) -> None:
    """Configure an SQLite engine for several worker processes. Call it once, before you first use the engine.

    The function turns on write-ahead logging, so that readers can read while a projector writes. ``busy_timeout`` is
    how long a writer waits for another writer, in seconds. Units of work always take the write lock first. Other code
    that only reads through the engine does not take this lock, and does not wait for it.
    """
    sync_engine = engine.sync_engine if isinstance(engine, AsyncEngine) else engine

    @event.listens_for(sync_engine, "connect")
    def _set_up(dbapi_connection: Any, _record: Any) -> None:
        cursor = dbapi_connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {int(busy_timeout * 1000)}")
        begun = getattr(dbapi_connection, "driver_connection", dbapi_connection).in_transaction
        if begun:  # sqlite3's autocommit=False; the journal mode can be changed between transactions only
            cursor.execute("COMMIT")
        cursor.execute("PRAGMA journal_mode = WAL")
        if begun:
            cursor.execute("BEGIN")
        cursor.close()
