"""Claim on MariaDB and MySQL by a plain INSERT: every form of INSERT that cannot fail there loses messages silently."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from math import ceil
from typing import Any

from sqlalchemy import Select, Table, bindparam, select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import Delete, Executable
from sqlalchemy.sql.compiler import SQLCompiler

from ...errors import MissingTableError
from ...transaction_text import COMMANDS, Grammar
from ..answers import Failure
from ..claims import Parameters
from ..cleanup import is_expired
from ..findings import Finding
from ..interface import Dialect
from ..listeners import listen_once
from ..migrating import lock_session
from . import galera
from .catalog import size
from .claim import given, insert_given, insert_statement, met_by_claim
from .errors import aborts, classify, commit_refused
from .snapshots import Opening, server_of, snapshot_findings, switching
from .tables import refuse_unfit


class MariaDB(Dialect):
    """Uses MariaDB 10.6 and later, through the driver of a subclass; MySQL 8 should work, and was not tried."""

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
    remembers_tables = True
    cleanup_isolation = "READ COMMITTED"  # above it, the gap after the last expired marker is where new ones go

    def prepare(self, engine: Engine) -> None:
        """Attach a listener that asks each connection how its server refuses lost updates, and sets it up for that."""
        listen_once(engine, checkout=[switching(engine.dialect)])

    def detecting_isolation(self, engine: Engine) -> str | None:
        """Return None: ``opening`` chooses the level for each connection, as servers behind one address may differ."""
        return None

    def detects_lost_updates(self, connection: Connection, level: str | None) -> bool:
        """True if the server of this connection refuses lost updates at ``level``, by default the level it has now.

        With innodb_snapshot_isolation a stale write gets error 1020; without, only reads that lock keep rivals out.
        """
        server = server_of(connection)
        return server is None or server.detects_lost_updates(level)

    def opening(
        self, engine: Engine, *, marked: bool, locking: bool = False, chosen: bool = False
    ) -> AbstractContextManager[None]:
        """Return a block in which a connection gets the settings of a unit of work; later users get theirs back."""
        level = (marked or locking) and not chosen
        return Opening(engine, snapshots=marked, level=level, locking=self.locking_isolation if locking else None)

    def refuse_table(self, connection: Connection, table: Table) -> None:
        """Raise ``UnsafeSessionError`` for a table of a storage engine without transactions, such as MyISAM or Aria."""
        refuse_unfit(connection, table, marker=False)

    def refuse_marker(self, connection: Connection, marker: Table) -> None:
        """Raise ``UnsafeSessionError`` without transactions, and ``MissingTableError`` without the unique index.

        A claim would not notice: a plain INSERT names no index that must be there.
        """
        refuse_unfit(connection, marker, marker=True)

    def claim_statement(self, marker: Table, *, bounded: bool, names: int = 1) -> Executable:
        """Return a plain INSERT.

        IGNORE would truncate values and swallow errors; ON DUPLICATE KEY UPDATE would not tell a duplicate from a new
        row.
        """
        return insert_statement(marker, bounded=bounded, names=names)

    def claim(
        self, connection: Connection, statement: Executable, marker: Table, key: Mapping[str, Any], *, names: int = 1
    ) -> bool:
        """Run the INSERT; return True if it succeeds, False if it fails and the marker is there.

        A failed INSERT has locked the marker that it met. If there is no marker, something else was violated, and the
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
        """Raise ``error``, unless it means that the marker of ``key`` is there.

        Raises ``MissingTableError`` if another marker is there which the table takes for the same.
        """
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
        """Insert the markers of ``keys`` in one statement."""
        connection.execute(insert_given(marker, bounded="wait_ms" in keys[0]), given(keys))

    def place(self, connection: Connection) -> str | None:
        """Return the current database, which a handler may change by USE."""
        place: str | None = Connection.exec_driver_sql(connection, "SELECT database()").scalar()  # past any guard
        return place

    def cleanup_statement(self, marker: Table, *, of_handler: bool = False) -> Executable:
        """Return a DELETE by a join: it locks only the rows it deletes, and skips rows that another cleaner locked."""
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
        """Return advice about the server's release and its log, and tell whether it is a node of a Galera cluster."""
        return [*snapshot_findings(connection), *galera.findings(connection)]

    def size(self, connection: Connection, table: Table) -> int | None:
        """Return the bytes of the table with all indexes, by InnoDB's statistics."""
        return size(connection, table)

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

    def migrating(self, connection: Connection, name: str) -> AbstractContextManager[None]:
        """Return a block that holds a named lock."""
        return lock_session(connection, name)

    def aborts(self, error: DBAPIError) -> bool:
        """True if the server rolled back, or perhaps did (after a lock wait), and goes on in another transaction."""
        return aborts(error)

    def classify(self, error: Exception) -> Failure:
        """Return what the error means by the server's error number: drivers differ in SQLSTATEs, or have none."""
        return classify(error)

    def commit_refused(self, error: DBAPIError) -> bool:
        """True if a cluster refused the COMMIT with a deadlock, or mysqlclient did not send it; else it is in doubt."""
        return commit_refused(error)


class _HastyDelete(Delete):
    """Waits for a lock at most a second: in a small table the planner makes a DELETE read rows that others hold."""

    inherit_cache = True


@compiles(_HastyDelete)
def _hurry(element: _HastyDelete, compiler: SQLCompiler, **options: Any) -> str:
    statement: str = compiler.visit_delete(element, **options)  # type: ignore[no-untyped-call]  # SQLAlchemy's
    mariadb = getattr(compiler.dialect, "is_mariadb", False)
    return f"SET STATEMENT innodb_lock_wait_timeout = 1 FOR {statement}" if mariadb else statement
