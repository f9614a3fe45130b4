"""MariaDB and MySQL: a claim is a plain INSERT, because INSERT IGNORE would hide errors and so lose messages."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from inspect import unwrap
from typing import Any, NamedTuple

from sqlalchemy import BINARY, ColumnElement, Select, Table, and_, bindparam, cast, or_, select, text
from sqlalchemy.dialects.mysql import Insert as MariaDBInsert
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.interfaces import Dialect as EngineDialect
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import Executable, Insert
from sqlalchemy.sql.compiler import SQLCompiler

from ..closing import connected
from ..errors import MissingTableError, UnsafeSessionError, UnsupportedDatabaseError
from ..message import DIGEST_BYTES, MAX_HANDLER_BYTES, MAX_MESSAGE_ID_BYTES
from ..transaction_text import COMMANDS, LOCKS, Grammar
from .claims import Parameters, handler_parameters, inserting
from .columns import in_utc, utc_now
from .dialect import Dialect, Failure, Snapshot, Status, is_as_strict, quoted_name
from .listeners import TABLES, are_of_others, ask, info_of, listen_once

# The meaning of errors, by number (MariaDB's "Error Code Reference", MySQL's "Server Error Message Reference") -------

_DEADLOCK, _RECORD_CHANGED, _LOCK_WAIT_TIMEOUT, _STATEMENT_TIMEOUT, _NO_SAVEPOINT = 1213, 1020, 1205, 1969, 1305
_LOCK_TABLE_FULL, _TRANSACTION_IN_PROGRESS, _ROLLED_BACK_IN_COMMIT = 1206, 1568, 3101
_TRANSIENT = {
    _DEADLOCK,
    _LOCK_TABLE_FULL,
    _RECORD_CHANGED,  # since this transaction's snapshot was taken
    *(1412, 1684),  # somebody has changed the table since the snapshot, or is about to
    1040,  # too many connections
    1203,  # too many connections of this user
    1047,  # this node of a cluster is not ready
    1053,  # server shutdown in progress
    *(1927, 3169),  # connection was killed
    *(3032, 3168),  # the server is offline, or not available
    3058,  # a deadlock of GET_LOCK, on MySQL
    _ROLLED_BACK_IN_COMMIT,
    *(1243, 1615),  # a prepared statement is gone, or is outdated
    *(2002, 2003, 2005, 2006, 2012, 2013, 2026, 2055),  # no connection, or lost
    4031,  # disconnected for inactivity
}
_READ_ONLY = {
    *(1290, 1792, 1836),  # an option that prevents the statement; tx_read_only; read-only mode
    # A group of MySQL chooses another primary, or this member left it:
    *(3098, 4094),  # SERIALIZABLE is refused meanwhile (a table without primary key always is); all statements are
    3100,  # at COMMIT, which the other members may have done nevertheless
    *(3781, 3782, 3783, 3796, 3797, 3798, 3799),  # a statement that had to wait for other members, and cannot
}
_LOCK_TIMEOUT = {_LOCK_WAIT_TIMEOUT, _STATEMENT_TIMEOUT, 3572}  # the last: NOWAIT
_LATER = {
    *(1021, 1114, 1026, 3),  # disk full, table full, error writing a file
    *(1016, 1023, 1024, 1028, 1030, 1296, 1297),  # a file cannot be opened or read, the storage engine reports an error
    *(1034, 1194, 1195, 1712, 1877),  # a corrupted index or table
    *(1037, 1038, 1041),  # out of memory
    *(1135, 1461, 1637),  # no more threads, prepared statements, concurrent transactions
    *(1158, 1159, 1160, 1161, 1429),  # the network failed, or a foreign server cannot be reached
    1815,  # internal error
    *(1317, 3024),  # the statement was killed; it took longer than it may, on MySQL
    *(1044, 1045, 1129, 1130, 1226, 1698),  # login refused, too many errors of the host, over a limit of the user
}
_UNIQUE = {1062, 1169, 1586}
_NO_TABLE = {
    *(1049, 1054, 1146),  # unknown database, column, table
    *(1048, 1364, 1406),  # a column that takes no NULL, has no default, is too short
}

_OUT_OF_SYNC = 2014  # a result of mysqlclient's was left unread: the command was not sent


def _number(error: Exception) -> int | None:
    original = getattr(error, "orig", error)
    if type(original).__module__.partition(".")[0] not in ("pymysql", "MySQLdb", "asyncmy", "aiomysql"):
        return None
    number = original.args[0] if original.args else None
    return number if isinstance(number, int) else None


class MariaDB(Dialect):
    """MariaDB 10.6 and later, and MySQL, with the driver of a subclass."""

    names = frozenset({"mysql", "mariadb"})
    grammar = Grammar(
        opaque=(
            r"'(?:[^'\\]|\\.|'')*'",
            r'"(?:[^"\\]|\\.|"")*"',
            r"`(?:[^`]|``)*`",
            r"(?:\#|--(?=\s|\Z))[^\n]*",
            r"/\*M?!\d*",  # what follows is executed
            r"/\*.*?\*/",
            r"\bSET\s+STATEMENT\b[^;]*?\bFOR\b",  # what follows is the statement
        ),
        commands=(
            *COMMANDS,
            # The implicit commits (MariaDB documentation, "SQL statements that cause an implicit commit")
            r"(?:CREATE|DROP)(?!\s+(?:OR\s+REPLACE\s+)?TEMPORARY\s+TABLE\b)",
            r"ALTER|TRUNCATE|RENAME|GRANT|REVOKE|FLUSH|RESET|OPTIMIZE|REPAIR|INSTALL|UNINSTALL|BACKUP|SHUTDOWN|XA|CLONE",
            r"(?:ANALYZE|CHECK)\s+(?:\w+\s+)?TABLES?|(?:CACHE|LOAD)\s+INDEX|(?:UN)?LOCK\s+TABLES?",
            r"CHANGE\s+(?:MASTER|REPLICATION)|IMPORT\s+TABLE",
            r"(?:START|STOP)\s+(?:ALL\s+)?(?:SLAVES?|REPLICA)",
            r"SET\b[^;]*?(?:(?<![@\w])|@@(?:\w+\.)?)(?:autocommit|PASSWORD|DEFAULT\s+ROLE)",
        ),
        hidden="CALL|EXECUTE|REPEAT|USE",  # the last hides where the marker is
        settings="(?!)",  # SET LOCAL is of the session, and SET TRANSACTION is refused within one
        # An UPDATE that changes no value locks the row, and rivals find it unchanged.
        locks=rf"{LOCKS}|\bLOCK\s+IN\s+SHARE\s+MODE\b|\bGET_LOCK\s*\(|^\W*(?:UPDATE|DELETE|REPLACE)\b|\bON\s+DUPLICATE\b",
        # A SELECT that locks, and every statement that writes, finds the newest rows.
        reads=r"^[\s(]*(?:TABLE|SELECT|WITH|CALL|EXECUTE|DO)\b"
        rf"(?!.*(?:{LOCKS}|\bLOCK\s+IN\s+SHARE\s+MODE\b|\b(?:GET|RELEASE)_LOCK\b))",
        one_at_a_time=True,
    )
    abort_lasts = True
    remembers_tables = True

    def prepare(self, engine: Engine) -> None:
        """Attach a listener that asks each server how it refuses lost updates, and sets the connection accordingly."""
        listen_once(engine, checkout=[switching(engine.dialect)])
        with self.opening(engine, marked=False), connected(engine):
            pass  # for code that opens no unit of work, such as the command line

    def detects_lost_updates(self, connection: Connection, level: str | None) -> bool:
        """True if the server of this connection refuses lost updates at ``level``, by default the level it has now.

        With innodb_snapshot_isolation a stale write gets error 1020. Without it, only locking reads prevent lost
        updates.
        """
        server = server_of(connection)
        return server is None or server.detects_lost_updates(level)

    def default_level(self, connection: Connection) -> str | None:
        """Return the level of the session before the library has set one."""
        server = server_of(connection)
        return super().default_level(connection) if server is None else server.found.level

    def snapshot(self, connection: Connection, level: str | None) -> Snapshot:
        """Return ``READ`` at REPEATABLE READ: an INSERT, such as the claim, takes no snapshot."""
        server = server_of(connection)
        level = level or (server and server.now.level) or self.default_level(connection)
        return Snapshot.READ if level == "REPEATABLE READ" else Snapshot.NEVER

    @staticmethod
    def is_mysql(dialect: EngineDialect) -> bool:
        """True if the server is MySQL, False if it is MariaDB."""
        return not getattr(dialect, "is_mariadb", False)

    @staticmethod
    def is_dependable(connection: Connection) -> bool:
        """True if the server of this connection refuses every stale write under innodb_snapshot_isolation."""
        pooled: Any = connection.connection
        return _asked(connection.dialect, pooled.dbapi_connection, pooled.driver_connection).is_dependable

    @contextmanager
    def opening(
        self, engine: Engine, *, marked: bool, locking: bool = False, chosen: bool = False, wait: float | None = None
    ) -> Iterator[None]:
        """Give the connections of the block the settings of a unit of work, and restore them for later users."""
        level, locked = (marked or locking) and not chosen, self.locking_isolation if locking else None
        heard = are_of_others([engine.pool.dispatch.checkout])
        limit = str(math.ceil(wait)) if wait is not None and self.is_mysql(engine.dialect) else None
        token = _wanted.set(Wanted(marked, level, locked, heard, limit))
        try:
            yield
        finally:
            _wanted.reset(token)

    def lock_nothing(self, connection: Connection) -> None:
        """Choose REPEATABLE READ for one transaction: at SERIALIZABLE, a plain SELECT locks the rows that it reads.

        If a listener has begun the transaction, it keeps its level.
        """
        try:
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        except DBAPIError as error:
            if _number(error) != _TRANSACTION_IN_PROGRESS:
                raise

    def refuse_table(self, connection: Connection, table: Table) -> None:
        """Raise ``UnsafeSessionError`` for a table of a storage engine without transactions, such as MyISAM or Aria."""
        refuse_unfit(connection, table, marker=False)

    def refuse_marker(self, connection: Connection, marker: Table) -> None:
        """Raise ``UnsafeSessionError`` without transactions, and ``MissingTableError`` without the unique index.

        A claim would not detect a missing index, because a plain INSERT names no index.
        """
        refuse_unfit(connection, marker, marker=True)

    def claim_statement(self, marker: Table, *, bounded: bool, names: int = 1, digest: bool = False) -> Executable:
        """Return a plain INSERT.

        IGNORE would truncate values and ignore errors. ON DUPLICATE KEY UPDATE would not distinguish a duplicate from a
        new row.
        """
        rows = [marker_row(marker, handler, digest=digest) for handler in handler_parameters(names)]
        return inserting((_BoundedInsert if bounded else Insert)(marker), rows)

    def lock_statement(self, marker: Table, *, bounded: bool) -> Executable:
        """Return an upsert. Unlike a failed INSERT, it takes no shared lock first, so two of them do not deadlock."""
        upsert = (_BoundedInsert if bounded else MariaDBInsert)(marker).values(marker_row(marker, "handler"))
        return upsert.on_duplicate_key_update(processed_at=utc_now())

    def claim(
        self, connection: Connection, statement: Executable, marker: Table, key: Mapping[str, Any], *, names: int = 1
    ) -> bool:
        """Run the INSERT. Return True if it succeeds, False if it fails because the marker exists.

        A failed INSERT has locked the existing marker. If there is no marker, another constraint was violated, and the
        ``DBAPIError`` is raised.
        """
        try:
            connection.execute(statement, key)
        except DBAPIError as error:
            self._raise_unless_there(connection, marker, key, error, names)
            return False
        return True

    def _raise_unless_there(
        self, connection: Connection, marker: Table, key: Parameters, error: DBAPIError, names: int = 1
    ) -> None:
        """Raise ``error``, unless the marker of ``key`` exists.

        Raises ``MissingTableError`` if the table treats the key of another marker as equal.
        """
        clashed = self.classify(error) is Failure.UNIQUE
        found = connection.execute(met_by_claim(marker, names), key).scalar() if clashed else None
        if found is None:
            raise error
        if not found:
            raise MissingTableError(
                f"{marker.fullname} treats different message ids or handlers as equal, because its columns do not "
                "compare byte for byte, and messages would be lost; `idempotency check` prints what is wrong"
            ) from error

    def insert_many(self, connection: Connection, marker: Table, keys: list[Parameters]) -> None:
        """Insert the markers of ``keys`` in one statement."""
        statement = insert_given(marker, bounded="wait_ms" in keys[0], digest="digest" in keys[0])
        connection.execute(statement, given(keys))

    def aborts(self, error: Exception) -> bool:
        """True if the server rolled back, or may have done so (after a lock wait), and began another transaction."""
        return _number(error) in (_DEADLOCK, _RECORD_CHANGED, _LOCK_TABLE_FULL, _LOCK_WAIT_TIMEOUT, _NO_SAVEPOINT)

    def classify(self, error: Exception) -> Failure:
        """Return the meaning of the error by the server's error number, because not every driver has the SQLSTATE."""
        number = _number(error)
        if number in _READ_ONLY:
            return Failure.READ_ONLY
        if number in _LOCK_TIMEOUT:
            return Failure.LOCK_TIMEOUT
        if number == _OUT_OF_SYNC:
            return Failure.PERMANENT  # SQLAlchemy takes the connection for lost
        if getattr(error, "connection_invalidated", False) or number in _TRANSIENT:
            return Failure.TRANSIENT
        if number in _UNIQUE:
            return Failure.UNIQUE
        if number in _LATER:
            return Failure.LATER
        return Failure.NO_TABLE if number in _NO_TABLE else Failure.PERMANENT

    def commit_refused(self, error: DBAPIError) -> bool:
        """True if a cluster refused the COMMIT, or mysqlclient did not send it. Otherwise unknown."""
        number, answered = _number(error), not error.connection_invalidated
        return number == _OUT_OF_SYNC or (number in (_DEADLOCK, _ROLLED_BACK_IN_COMMIT) and answered)


# The drivers ---------------------------------------------------------------------------------------------------------


class PyMySQL(MariaDB):
    """MariaDB with PyMySQL. The library makes an interrupted connection of PyMySQL close."""

    drivers = frozenset({"pymysql"})

    def prepare(self, engine: Engine) -> None:
        """Attach ``disconnect_when_interrupted``, then the listener of ``MariaDB.prepare``."""
        listen_once(engine, checkout=[disconnect_when_interrupted, switching(engine.dialect)])
        super().prepare(engine)

    def status(self, driver_connection: Any) -> Status:
        """Return OPEN or NONE by the server's last answer, or BUSY for a closed connection."""
        if not driver_connection.open:
            return Status.BUSY
        return Status.OPEN if driver_connection.server_status & IN_TRANSACTION else Status.NONE


class MySQLClient(MariaDB):
    """MariaDB with mysqlclient, which does not report the flags of the server's answers."""

    drivers = frozenset({"mysqldb"})
    modules = frozenset({"MySQLdb"})

    def status(self, driver_connection: Any) -> Status:
        """Return BUSY for a closed connection, otherwise OPEN: the driver does not report if a transaction is open."""
        return Status.OPEN if driver_connection.open else Status.BUSY


class Asyncmy(MariaDB):
    """MariaDB with asyncmy."""

    drivers = frozenset({"asyncmy"})

    def status(self, driver_connection: Any) -> Status:
        """Return OPEN or NONE by the server's last answer, or BUSY for a closed connection."""
        if not driver_connection.connected:
            return Status.BUSY
        return Status.OPEN if driver_connection.get_transaction_status() else Status.NONE


class Aiomysql(MariaDB):
    """MariaDB with aiomysql."""

    drivers = frozenset({"aiomysql"})

    def status(self, driver_connection: Any) -> Status:
        """Return OPEN or NONE by the server's last answer, or BUSY for a closed connection."""
        if driver_connection.closed:
            return Status.BUSY
        return Status.OPEN if driver_connection.get_transaction_status() else Status.NONE


# PyMySQL takes whatever comes next on the line for the answer to its last command. When a signal handler raises after
# the command was sent, SQLAlchemy discards the connection, but not for every exception and not wherever it talks to the
# database; then each later statement gets the answer to the one before it (tests/core/test_interrupts.py).
#
# Whenever a connection goes back to its pool, SQLAlchemy sends ROLLBACK. Right behind the end of a transaction that is
# a round trip for nothing. psycopg knows that, PyMySQL does not (docs/adr/0006-round-trips-and-batches.md).

IN_TRANSACTION = 1  # SERVER_STATUS_IN_TRANS of the client-server protocol


def disconnect_when_interrupted(dbapi_connection: Any, _record: object, _proxy: object) -> None:
    """Make a PyMySQL connection disconnect when a command is interrupted. This is a listener to ``checkout``.

    Raises ``UnsupportedDatabaseError`` for a connection whose class is not PyMySQL's, also behind ``__wrapped__``.
    """
    driver: Any = unwrap(dbapi_connection)  # tracing libraries give a proxy to SQLAlchemy
    connection_class: Any = type(driver)
    if not hasattr(connection_class, "_force_close"):
        raise UnsupportedDatabaseError(
            f"the connections of this engine are {connection_class.__qualname__}, which hides "
            "PyMySQL's Connection, so an interrupted statement could give its answer to the next one. Trace with a "
            "library whose proxy has __wrapped__, such as OpenTelemetry's, or trace the SQLAlchemy engine instead"
        )
    driver.__class__ = _disconnecting(connection_class)


@cache
def _disconnecting(connection_class: Any) -> Any:
    if hasattr(connection_class, "_or_disconnect"):
        return connection_class

    class Disconnecting(connection_class):  # type: ignore[misc]  # of a driver that is perhaps not installed
        _ended = False  # the transaction, by the last command that was sent

        def query(self, *args: Any, **kwargs: Any) -> Any:
            self._ended = False
            return self._or_disconnect(super().query, *args, **kwargs)

        def commit(self) -> None:
            self._or_disconnect(super().commit)
            self._ended = True

        def rollback(self) -> None:
            if self._ended and self.open and not self.server_status & IN_TRANSACTION:
                return
            self._or_disconnect(super().rollback)
            self._ended = True

        def ping(self, *args: Any, **kwargs: Any) -> Any:
            return self._or_disconnect(super().ping, *args, **kwargs)

        def _or_disconnect(self, talk: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                return talk(*args, **kwargs)
            except self.Error:  # an answer, or the loss of the connection
                raise
            except BaseException:
                self._force_close()  # as PyMySQL itself does when it is interrupted while it reads; close() would talk
                raise

    return Disconnecting


# The claim -----------------------------------------------------------------------------------------------------------


def marker_row(marker: Table, handler: str = "handler", *, digest: bool = False) -> dict[str, ColumnElement[Any]]:
    """Return the values of a claim by column. ``handler`` is the name of the parameter for the handler."""
    row = {
        "message_id": bindparam("message_id", type_=marker.c.message_id.type),
        "handler": bindparam(handler, type_=marker.c.handler.type),
        "occurred_at": bindparam("occurred_at", type_=marker.c.occurred_at.type),
        "processed_at": utc_now(),
    }
    return {**row, "digest": bindparam("digest", type_=marker.c.digest.type)} if digest else row


_GIVEN = """
    SELECT unhex(message_id), unhex(handler), utc_timestamp(6), occurred_at{value}
    FROM json_table(convert(unhex(:given) USING utf8mb4), '$[*]' COLUMNS (
        message_id VARCHAR({ids}) CHARACTER SET utf8mb4 PATH '$[0]',
        handler VARCHAR({handlers}) CHARACTER SET utf8mb4 PATH '$[1]',
        occurred_at DATETIME(6) PATH '$[2]'{column}
    )) AS given"""
_LENGTHS = {"ids": 2 * MAX_MESSAGE_ID_BYTES, "handlers": 2 * MAX_HANDLER_BYTES}
_DIGEST = {
    "value": ", unhex(digest)",
    "column": f",\n        digest VARCHAR({2 * DIGEST_BYTES}) CHARACTER SET utf8mb4 PATH '$[3]'",
}


@cache
def insert_given(marker: Table, *, bounded: bool, digest: bool = False) -> Insert:
    """Return an INSERT of the rows of ``given``, in their order. If one exists, the INSERT fails and inserts none.

    The statement is the same for any number of rows. For VALUES of many rows, the drivers would send row by row, or
    SQLAlchemy would compile the statement again.
    """
    insert = (_BoundedInsert if bounded else Insert)(marker)
    columns = ["message_id", "handler", "processed_at", "occurred_at", *(["digest"] if digest else [])]
    rows = text(_GIVEN.format(**_LENGTHS, **(_DIGEST if digest else dict.fromkeys(_DIGEST, ""))))
    return insert.from_select(columns, rows.columns())


def given(keys: Sequence[Parameters]) -> dict[str, str]:
    """Return the parameters of ``insert_given``: JSON in hexadecimal digits, as are its texts (see ``columns``)."""
    rows = [
        (
            key["message_id"].encode().hex(),
            key["handler"].encode().hex(),
            in_utc(key["occurred_at"]),
            None if (digest := key.get("digest")) is None else digest.hex(),
        )
        for key in keys
    ]
    bounds = {name: value for name, value in keys[0].items() if name == "wait_ms"}
    return {"given": json.dumps(rows, default=str).encode().hex(), **bounds}


@cache
def met_by_claim(marker: Table, names: int = 1) -> Select[Any]:
    """Return a SELECT that returns whether the row with which a claim collided has the same ids, byte for byte.

    It returns no row if there is none. It reads only the first of several rows, because the claim has not locked the
    others, and another transaction may have locked them.
    """
    message_id, handler = marker.c.message_id, marker.c.handler
    asked = bindparam("message_id", type_=message_id.type)
    claimed = [bindparam(name, type_=handler.type) for name in handler_parameters(names)]
    same = and_(cast(message_id, BINARY()) == asked, or_(*(cast(handler, BINARY()) == name for name in claimed)))
    found = select(same).where(message_id == asked, or_(*(handler == name for name in claimed)))
    first = found if names == 1 else found.order_by(handler).limit(1)
    return first.with_for_update(read=True)


class _BoundedInsert(MariaDBInsert):
    """An INSERT that fails after ``:wait_ms`` on MariaDB, and after the session's limit for locks on MySQL."""

    inherit_cache = True


@compiles(_BoundedInsert)
def _set_statement(element: _BoundedInsert, compiler: SQLCompiler, **options: Any) -> str:
    insert: str = compiler.visit_insert(element, **options)  # type: ignore[no-untyped-call]  # SQLAlchemy's
    if MariaDB.is_mysql(compiler.dialect):
        return insert
    wait = compiler.process(bindparam("wait_ms"), **options)
    # The second setting allows a longer wait than the server's own limit for locks.
    return (
        f"SET STATEMENT max_statement_time = {wait} / 1000, innodb_lock_wait_timeout = {wait} div 1000 + 2 FOR {insert}"
    )


# The settings of a session -------------------------------------------------------------------------------------------
#
# The settings are innodb_snapshot_isolation, if the server can be relied on to keep it, an isolation level, and on
# MySQL, which cannot limit the wait of one statement, the limit for locks. They are variables of the session, so they
# stay with a pooled connection. They are changed when a connection is taken from the pool by code that needs others: if
# only projectors use an engine, that is one round trip for each connection, not for each message.
#
# Each physical connection is asked: one address can lead to two servers (docs/adr/0008-mariadb-and-galera.md).

SETTING = "innodb_snapshot_isolation"
DEPENDABLE = {(10, 6): 27, (10, 11): 18, (11, 4): 12, (11, 8): 8, (12, 3): 3}
"""The first release of each series that refuses *every* stale write. Older ones missed one in 150,000
(https://jira.mariadb.org/browse/MDEV-39263). Later series never had this defect."""

_LEVELS = ("transaction_isolation", "tx_isolation")  # two names of one variable, the newer one first
_LIMIT, _UNLIMITED = "sql_select_limit", str(2**64 - 1)
_WAIT = "innodb_lock_wait_timeout"  # whole seconds
_ASKED = "projector_dedup_server"  # in the ``info`` of a physical connection


class Wanted(NamedTuple):
    """The settings that a unit of work needs on its connection."""

    snapshots: bool  #: the server's refusal of stale writes
    level: bool  #: a level under which no update is lost; else it is the user's, who has chosen one or needs none
    locking: str | None  #: the level that is enough where what changes is read under lock
    heard: bool  #: others listen for connections that are taken from the pool, and may change them too
    wait: str | None  #: the longest wait for a lock, in whole seconds; None for that of the server


_NOTHING = Wanted(snapshots=False, level=False, locking=None, heard=False, wait=None)
_wanted: ContextVar[Wanted] = ContextVar("projector_dedup_wanted", default=_NOTHING)


class Settings(NamedTuple):
    """The settings of a session."""

    snapshots: str | None  #: None on a server without them
    level: str | None
    wait: str  #: for a lock, in whole seconds


@dataclass(frozen=True)
class Server:
    """The answers of the server of one physical connection, and the current settings of the session."""

    session: int  #: the server's number for it; a driver that connects anew by itself (``ping``) gets another
    is_dependable: bool
    level_variable: str
    found: Settings  #: as other users of the engine have them
    now: Settings  #: as they are now; the level is None if others may have set another since

    @property
    def detecting_level(self) -> str:
        """Return the weakest level at which the server refuses a lost update."""
        return "REPEATABLE READ" if self.is_dependable else "SERIALIZABLE"

    def detects_lost_updates(self, level: str | None) -> bool:
        """True if the server refuses a lost update at ``level``, or at the level that the session has now."""
        detecting = self.detecting_level if self.now.snapshots == "ON" else "SERIALIZABLE"
        level = level or self.now.level
        return level is not None and is_as_strict(level, detecting)

    def settings_for(self, wanted: Wanted) -> Settings:
        """Return the settings for what is ``wanted``: those that were found, where they are strict enough."""
        snapshots, level, wait = self.found
        if wanted.snapshots and snapshots is not None:
            snapshots = "ON"
        if not wanted.level:
            level = level if self.now.level is not None else None
        elif level is None or not is_as_strict(level, self.detecting_level):
            level = wanted.locking or self.detecting_level
        return Settings(snapshots, level, wanted.wait or wait)


def server_of(connection: Connection) -> Server | None:
    """Return the answers of the server of this connection, or None if no unit of work has asked it."""
    found: Server | None = info_of(connection).get(_ASKED)
    return found


def switching(dialect: EngineDialect) -> Callable[[Any, Any, object], None]:
    """Return a listener of ``checkout`` that applies the settings of the current context to the connection."""

    def switch(dbapi_connection: Any, record: Any, _proxy: object) -> None:
        wanted = _wanted.get()
        server: Server | None = record.info.get(_ASKED)
        if server is None or server.session != record.driver_connection.thread_id():
            if wanted is _NOTHING:
                return
            server = _asked(dialect, dbapi_connection, record.driver_connection)
        snapshots, level, wait = settings = server.settings_for(wanted)
        overruled = wanted.heard and ((wanted.level and level != server.found.level) or wanted.wait)
        if settings != server.now or overruled:
            values = {SETTING: snapshots, server.level_variable: level and f"'{level.replace(' ', '-')}'"}
            if wait != server.now.wait or wanted.wait:
                values[_WAIT] = wait
            assigned = [f"SESSION {name} = {value}" for name, value in values.items() if value is not None]
            ask(dialect, dbapi_connection, f"SET {', '.join(assigned)}")
            if wanted.heard:
                dbapi_connection.commit()  # a transaction that a listener has begun would keep its level
        if not wanted.level and server.found.level != dialect.default_isolation_level:
            level = None  # SQLAlchemy resets the level to its default behind everybody who chooses one
        record.info[_ASKED] = replace(server, now=Settings(snapshots, level, wait))

    return switch


def _asked(dialect: EngineDialect, dbapi_connection: Any, driver: Any) -> Server:
    names = "', '".join(("version", SETTING, _LIMIT, _WAIT, *_LEVELS))
    found = dict(ask(dialect, dbapi_connection, f"SHOW SESSION VARIABLES WHERE variable_name IN ('{names}')"))
    if found.get(_LIMIT) != _UNLIMITED:  # the limit may also hide itself
        raise UnsafeSessionError(
            f"{_LIMIT} is set for this session, so the server hides rows from the library's SELECTs, and a message "
            f"could be applied twice. Remove the setting from init_connect or init_command: SET {_LIMIT} = DEFAULT"
        )
    level_variable = next(name for name in _LEVELS if name in found)
    snapshots, level = found.get(SETTING), found[level_variable].replace("-", " ")
    is_dependable = snapshots is not None and _is_dependable(found["version"])
    settings = Settings(snapshots, level, found[_WAIT])
    return Server(driver.thread_id(), is_dependable, level_variable, settings, now=settings)


def _is_dependable(version: str) -> bool:
    numbers = re.search(r"(\d+)\.(\d+)\.(\d+)", version.removeprefix("5.5.5-"))  # proxies add it for old clients
    if numbers is None:
        return False
    *series, release = map(int, numbers.groups())
    return tuple(series) > max(DEPENDABLE) or release >= DEPENDABLE.get((series[0], series[1]), sys.maxsize)


# Tables --------------------------------------------------------------------------------------------------------------
#
# The catalogue is asked once per table and physical connection, since another connection may lead to another server;
# and once per unit of work if a listener may have chosen another database (docs/adr/0008-mariadb-and-galera.md).

_QUERY = text(
    """
    SELECT e.engine, e.transactions = 'YES' AS has_transactions, EXISTS (
        SELECT 1 FROM information_schema.statistics s
        WHERE s.table_schema = coalesce(:schema, database()) AND s.table_name = :name AND s.non_unique = 0
        GROUP BY s.index_name
        HAVING count(*) = 2 AND sum(s.column_name IN ('message_id', 'handler') AND s.sub_part IS NULL) = 2
    ) AS is_unique
    FROM information_schema.tables t JOIN information_schema.engines e ON e.engine = t.engine
    WHERE t.table_schema = coalesce(:schema, database()) AND t.table_name = :name
    """
)
_NOT_SHOWN = {1049, 1142, 1146, 1356}  # unknown database, no privilege, unknown table, a view of unknown tables
_IN_INNODB = re.compile(r"^\)(?: /\*.*?\*/)? ENGINE=InnoDB\b", re.MULTILINE)  # a tablespace comes before it
_OUR_KEY = re.compile(r"^ *PRIMARY KEY \(([`\"])message_id\1,\1handler\1\),?$", re.MULTILINE)


def refuse_unfit(connection: Connection, table: Table, *, marker: bool) -> None:
    """Raise ``UnsafeSessionError`` for a table without transactions.

    With ``marker``, also raise ``MissingTableError`` if a plain INSERT could insert the same marker twice. The function
    ignores a missing table and a view, because the next statement fails anyway.
    """
    known = info_of(connection).setdefault(TABLES, set())  # schema, name, whether as a marker table
    place = connection.schema_for_object(table), table.name, marker
    if place in known:
        return
    if MariaDB.is_mysql(connection.dialect) and _is_plainly_fit(connection, table, marker=marker):
        known.add(place)
        return
    found = Connection.execute(connection, _QUERY, {"schema": place[0], "name": place[1]}).first()
    if found is None:
        return
    name = ".".join(part for part in place[:2] if part)
    if not found.has_transactions:
        raise UnsafeSessionError(
            f"the table {name} has the storage engine {found.engine}, which has no transactions, so its changes would "
            f"stay after a rollback of the marker; run ALTER TABLE {name} ENGINE=InnoDB"
        )
    if marker and not found.is_unique:
        raise MissingTableError(
            f"the table {name} has no unique index over (message_id, handler) alone, so a duplicate would be applied; "
            "`idempotency check` prints what is wrong"
        )
    known.add(place)


def _is_plainly_fit(connection: Connection, table: Table, *, marker: bool) -> bool:
    """True if SHOW CREATE TABLE proves that the table is fit.

    On MySQL this statement takes no snapshot. A query of information_schema does, so it is asked only in doubt.
    """
    try:
        shown = Connection.exec_driver_sql(connection, f"SHOW CREATE TABLE {quoted_name(connection, table)}")
    except DBAPIError as error:
        if _number(error) not in _NOT_SHOWN:
            raise
        return False
    definition = shown.one()[1]
    in_innodb = definition.startswith("CREATE TABLE ") and _IN_INNODB.search(definition)
    return bool(in_innodb and (not marker or _OUR_KEY.search(definition)))
