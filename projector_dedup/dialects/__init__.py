"""The differences between databases when a message is claimed and committed, with a file for each database."""

from __future__ import annotations

from .claims import handler_parameters, key_of, marker_exists, parts
from .dialect import (
    LEVEL_OF_BEGIN,
    LEVELS,
    Dialect,
    Failure,
    LastChange,
    LastStatement,
    Snapshot,
    Status,
    chosen_level,
    dialect_of,
    failure_of,
    is_as_strict,
    quoted_name,
    register,
    sqlstate_of,
)
from .listeners import forget_if_moved, info_of, may_move
from .mariadb import Aiomysql, Asyncmy, MariaDB, MySQLClient, PyMySQL
from .postgresql import Asyncpg, PostgreSQL, Psycopg, Psycopg2
from .sqlite import Aiosqlite, Pysqlite, SQLite, configure_sqlite

__all__ = [
    "LEVELS",
    "LEVEL_OF_BEGIN",
    "Dialect",
    "Failure",
    "LastChange",
    "LastStatement",
    "MariaDB",
    "PostgreSQL",
    "SQLite",
    "Snapshot",
    "Status",
    "chosen_level",
    "configure_sqlite",
    "dialect_of",
    "failure_of",
    "forget_if_moved",
    "handler_parameters",
    "info_of",
    "is_as_strict",
    "key_of",
    "marker_exists",
    "may_move",
    "parts",
    "quoted_name",
    "register",
    "sqlstate_of",
]

for _known in (Psycopg, Psycopg2, Asyncpg, PyMySQL, MySQLClient, Asyncmy, Aiomysql, Pysqlite, Aiosqlite):
    register(_known())
