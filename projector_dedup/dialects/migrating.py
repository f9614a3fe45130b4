"""Lock a table set for one migration at a time, and keep the migration from making writers wait.

A change of a table that has to wait for an open transaction makes every later transaction wait behind it. So the change
waits for a moment only, fails with a lock timeout, and is run again by the caller.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import func, select
from sqlalchemy.engine import Connection

from ..errors import RetriesExhaustedError

_RIVAL = 60  # seconds that a migration waits for another one, on MariaDB


def lock_transaction(connection: Connection, name: str) -> None:
    """Take a lock on PostgreSQL that the transaction holds, so that it is released behind a pooler too."""
    # At a stricter level the snapshot would be older than the wait, and not show what the other migration did.
    connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
    connection.exec_driver_sql("SET LOCAL lock_timeout = '500ms'")
    connection.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(f"projector_dedup {name}", 0))))


@contextmanager
def lock_session(connection: Connection, name: str) -> Iterator[None]:
    """Hold a lock of MariaDB's session while the block runs: a lock of the transaction would end with the first DDL.

    Names of locks belong to the whole server, and have 64 characters at most, so the name is hashed with the database.
    Raises ``RetriesExhaustedError`` if another migration holds the lock for too long.
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
