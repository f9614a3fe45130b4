"""MariaDB and MySQL: the claim is a plain INSERT, since every INSERT that cannot fail there loses messages silently."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from sqlalchemy import URL, FromClause, Row, Select, Table, bindparam, select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import Delete, Executable
from sqlalchemy.sql.compiler import SQLCompiler

from ..errors import MissingTableError
from ..findings import Finding
from ..transaction_text import COMMANDS, Grammar
from .answers import Failure, Status
from .claims import Parameters
from .interface import Dialect
from .levels import is_as_strict
from .listeners import listen_once
from .migrating import lock_session
from .mysql_catalog import measured, sampled
from .mysql_claim import given, insert_given, insert_markers, met_by_claim
from .mysql_connection import IN_TRANSACTION, careful
from .mysql_errors import aborts, classify, commit_refused
from .mysql_rows import MariaDBRows
from .mysql_snapshots import Opening, server_of, snapshot_findings, switching
from .mysql_tables import refuse_unfit
from .places import place_of_server
from .plain_tables import Wanted
from .pruning import is_expired


class MySQL(Dialect):
    """MariaDB 10.6 and later; MySQL 8 should do, and was not tried."""

    names = frozenset({"mysql", "mariadb"})
    drivers = frozenset({"pymysql", "mysqldb", "asyncmy", "aiomysql"})
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
            r"ALTER|TRUNCATE|RENAME|GRANT|REVOKE|FLUSH|RESET|OPTIMIZE|REPAIR|INSTALL|UNINSTALL|BACKUP|SHUTDOWN|XA",
            r"(?:ANALYZE|CHECK)\s+(?:\w+\s+)?TABLES?|(?:CACHE|LOAD)\s+INDEX|(?:UN)?LOCK\s+TABLES?|CHANGE\s+MASTER",
            r"(?:START|STOP)\s+(?:ALL\s+)?(?:SLAVES?|REPLICA)",
            r"SET\b[^;]*?(?:(?<![@\w])|@@(?:\w+\.)?)(?:autocommit|PASSWORD|DEFAULT\s+ROLE)",
        ),
        hidden="CALL|EXECUTE|REPEAT|USE",  # the last hides where the marker is
        settings="(?!)",  # SET LOCAL is of the session, and SET TRANSACTION is refused within one
        one_at_a_time=True,
    )
    abort_lasts = True
    claims_may_read = True
    plain_rows = MariaDBRows()
    pruning_isolation = "READ COMMITTED"  # above it, the gap after the last expired marker is where new ones go

    def place_of(self, url: URL) -> Hashable | None:
        """The database by its host and name; MariaDB's URLs may call it MySQL."""
        return place_of_server(url.set(drivername="mysql"), port=3306, names={"unix_socket", "read_default_file"})

    def prepare(self, engine: Engine) -> None:
        """An answer is only its own statement's; and each connection is asked how its server refuses lost updates."""
        careful_ones = [careful] if engine.dialect.driver == "pymysql" else []
        listen_once(engine, checkout=[*careful_ones, switching(engine.dialect)])

    def detecting_isolation(self, engine: Engine) -> str | None:
        """Nothing to ask for: ``opening`` sees to the level, for servers behind one address may differ in it."""
        return None

    def detects_lost_updates(self, connection: Connection, level: str) -> bool:
        """With innodb_snapshot_isolation a stale write gets 1020; without, only reads that lock keep rivals out."""
        server = server_of(connection)
        return server is None or is_as_strict(level, server.detecting_level)

    def opening(
        self, engine: Engine, *, marked: bool, locking: bool = False, chosen: bool = False
    ) -> AbstractContextManager[None]:
        """The unit of work's connection gets its settings; whoever has the connection next gets them back."""
        level = (marked or locking) and not chosen
        return Opening(engine, snapshots=marked, level=level, locking=self.locking_isolation if locking else None)

    def refuse_table(self, connection: Connection, table: Table) -> None:
        """MyISAM, Aria and their like."""
        refuse_unfit(connection, table, marker=False)

    def refuse_marker(self, connection: Connection, marker: Table) -> None:
        """A plain INSERT names no index that must be there."""
        refuse_unfit(connection, marker, marker=True)

    def claim_statement(self, marker: Table, *, bounded: bool, names: int = 1) -> Executable:
        """No IGNORE, which truncates and swallows; no ON DUPLICATE KEY UPDATE, which cannot be told from a new row."""
        return insert_markers(marker, bounded=bounded, names=names)

    def claim(
        self, connection: Connection, statement: Executable, marker: Table, key: Mapping[str, Any], *, names: int = 1
    ) -> bool:
        """The failed INSERT has locked the row, so it is there; if it is not, something else was violated."""
        try:
            connection.execute(statement, key)
        except DBAPIError as error:
            self._raise_unless_there(connection, marker, key, error, names)
            return False
        return True

    def claim_and_read(
        self, connection: Connection, marker: Table, wanted: Wanted, parameters: Parameters
    ) -> Row[Any] | None:
        """As ``claim``."""
        try:
            return super().claim_and_read(connection, marker, wanted, parameters)
        except DBAPIError as error:
            self._raise_unless_there(connection, marker, parameters, error)
            return None

    def _raise_unless_there(
        self, connection: Connection, marker: Table, key: Parameters, error: DBAPIError, names: int = 1
    ) -> None:
        clashed = self.classify(error) is Failure.UNIQUE
        found = connection.execute(met_by_claim(marker, names), key).scalar() if clashed else None
        if found is None:
            raise error
        if not found:
            raise MissingTableError(
                f"{marker.fullname} takes different message ids for one, or handlers: its columns do not compare "
                "byte for byte, and messages would be lost; `idempotency check` says what is wrong"
            ) from error

    def insert_many(self, connection: Connection, marker: Table, keys: list[Parameters]) -> None:
        """In one statement."""
        connection.execute(insert_given(marker, bounded="wait_ms" in keys[0]), given(keys))

    def place(self, connection: Connection) -> str | None:
        """The database, until somebody says USE."""
        place: str | None = Connection.exec_driver_sql(connection, "SELECT database()").scalar()  # past any guard
        return place

    def prune_statement(self, marker: Table, *, of_handler: bool = False) -> Executable:
        """By a join, which locks the rows it deletes and no others; rows another cleaner holds are left to it."""
        oldest: Select[Any] = (
            select(*marker.primary_key)
            .where(is_expired(marker, of_handler=of_handler))
            .order_by(marker.c.processed_at)
            .limit(bindparam("batch_size"))
            .with_for_update(skip_locked=True)
        )
        batch = oldest.subquery("batch")
        return _HastyDelete(marker).where(
            marker.c.message_id == batch.c.message_id,
            marker.c.handler == batch.c.handler,
        )

    def findings(self, connection: Connection, marker: Table) -> list[Finding]:
        """Settings that cost retries or round trips."""
        return snapshot_findings(connection)

    def measured(self, connection: Connection, table: Table) -> tuple[int | None, int | None]:
        """By InnoDB's statistics."""
        return measured(connection, table)

    def sampled(self, connection: Connection, marker: Table, rows: int, of: int) -> FromClause:
        """By slices of the index on ``processed_at``."""
        return sampled(connection, marker, rows)

    def migrating(self, connection: Connection, name: str) -> AbstractContextManager[None]:
        """A named lock."""
        return lock_session(connection, name)

    def status(self, driver_connection: Any) -> Status:
        """From the flags of the server's last answer; mysqlclient keeps them to itself."""
        is_open = getattr(driver_connection, "open", None)  # PyMySQL, mysqlclient
        if is_open is None:
            is_open = getattr(driver_connection, "connected", True) and not getattr(driver_connection, "closed", False)
        if not is_open:
            return Status.BUSY
        flags = getattr(driver_connection, "server_status", None)
        if flags is None and hasattr(driver_connection, "get_transaction_status"):
            flags = driver_connection.get_transaction_status()
        if flags is None:
            return Status.OPEN
        return Status.OPEN if flags & IN_TRANSACTION else Status.NONE

    def aborts(self, error: DBAPIError) -> bool:
        """The server rolled back, all of it or (a lock wait) perhaps all, and goes on in another transaction."""
        return aborts(error)

    def classify(self, error: Exception) -> Failure:
        """By the server's error number: PyMySQL calls a deadlock 40001, and others have no SQLSTATE."""
        return classify(error)

    def commit_refused(self, error: DBAPIError) -> bool:
        """A cluster refuses a COMMIT with a deadlock, mysqlclient without sending it; else the outcome is asked."""
        return commit_refused(error)


class _HastyDelete(Delete):
    """A DELETE that waits a second for a lock, no more: in a small table the planner reads rows that others hold."""

    inherit_cache = True


@compiles(_HastyDelete)
def _hurry(element: _HastyDelete, compiler: SQLCompiler, **options: Any) -> str:
    statement: str = compiler.visit_delete(element, **options)  # type: ignore[no-untyped-call]  # SQLAlchemy's
    mariadb = getattr(compiler.dialect, "is_mariadb", False)
    return f"SET STATEMENT innodb_lock_wait_timeout = 1 FOR {statement}" if mariadb else statement
