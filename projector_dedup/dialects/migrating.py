"""How each database keeps two migrations of one table set apart, and a migration from keeping writers waiting.

A change of a table that has to wait for an open transaction lets everybody who comes later queue behind it. So it waits
for moments only, fails with a lock timeout, and is run again by whoever asked for it.
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
    """PostgreSQL: held by the transaction, so that it is given back behind a pooler too."""
    # Above it, the snapshot would be older than the wait, and not show what the other migration did.
    connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
    connection.exec_driver_sql("SET LOCAL lock_timeout = '500ms'")
    connection.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(f"projector_dedup {name}", 0))))


@contextmanager
def lock_session(connection: Connection, name: str) -> Iterator[None]:
    """MariaDB: held by the session, since DDL commits. Names of locks are the whole server's, 64 characters at most."""
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
