"""Problems and advice, as ``check`` reports them, and those about the server on which a promise depends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import Table, text
from sqlalchemy.engine import Connection

from ..dialects import MariaDB, PostgreSQL, SQLite, dialect_of, quoted_name


@dataclass(frozen=True)
class Finding:
    """A problem and its remedy. If it is ``fatal``, deliveries fail, or messages may be lost or applied twice."""

    problem: str
    remedy: str
    fatal: bool = True


def advice(problem: str, remedy: str) -> Finding:
    """Return a finding that is not fatal."""
    return Finding(problem, remedy, fatal=False)


def server_findings(connection: Connection, marker: Table) -> Iterator[Finding]:
    """Yield findings about the settings of the server and of the marker table."""
    dialect = dialect_of(connection)
    if isinstance(dialect, PostgreSQL):
        name = quoted_name(connection, marker)
        unlogged = text("SELECT relpersistence = 'u' FROM pg_class WHERE oid = to_regclass(:name)")
        if connection.scalar(unlogged, {"name": name}):
            yield Finding(
                f"{name} is UNLOGGED, so a crash of the server empties it, but not the read model",
                f"every redelivery after a crash would be applied again; ALTER TABLE {name} SET LOGGED",
            )
    elif isinstance(dialect, MariaDB):
        if not MariaDB.is_dependable(connection):
            yield advice(
                "this server does not reliably refuse lost updates at REPEATABLE READ, so projectors run at "
                "SERIALIZABLE, where every read locks",
                "declare read_models=[...] for handlers that read what they change: they run at READ COMMITTED"
                if MariaDB.is_mysql(connection.dialect)
                else "upgrade to MariaDB 10.6.27, 10.11.18, 11.4.12, 11.8.8, 12.3.3 or later",
            )
    elif isinstance(dialect, SQLite):
        mode = connection.exec_driver_sql("PRAGMA journal_mode").scalar_one()
        files = [file for _, _, file in connection.exec_driver_sql("PRAGMA database_list") if file]
        if mode == "wal" and len(files) > 1:  # https://www.sqlite.org/lang_attach.html
            yield advice(
                "databases are attached, and with write-ahead logging a crash during COMMIT may commit one file and "
                "not another",
                "put the markers into the file of the read model: make_tables(metadata, schema=...)",
            )
