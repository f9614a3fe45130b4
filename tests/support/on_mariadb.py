"""A database of MariaDB or MySQL through a driver, with settings of its own; and statements on it."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from sqlalchemy import text

from databases import Database, Driver, mariadb_connection
from kit import Harness, Subject


def subject(
    mariadb: Database,
    driver: Driver,
    *,
    collation: str | None = None,
    charset: str | None = None,
    isolation: str | None = None,
    **session: Any,
) -> Subject:
    """The database through a driver, with its own collation, and a connection and a session of another kind."""
    if collation:
        with closing(mariadb_connection(mariadb.url())) as admin, admin.cursor() as cursor:
            cursor.execute(f"ALTER DATABASE COLLATE {collation}")
    url = mariadb.url(driver.drivername).update_query_dict({"charset": charset} if charset else {})
    assignments = ", ".join(f"SESSION {name} = {value!r}" for name, value in session.items() if value is not None)
    arguments = {"connect_args": {"init_command": f"SET {assignments}"}} if assignments else {}
    return Subject(url, dispatcher_isolation=isolation, engine_arguments=arguments)


def run(harness: Harness, *statements: str) -> None:
    """Each in a transaction of its own."""
    for statement in statements:
        harness.transact(lambda session, statement=statement: session.execute(text(statement)))  # type: ignore[misc]
