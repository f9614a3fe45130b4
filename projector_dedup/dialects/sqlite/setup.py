"""Set up an SQLite file for several worker processes."""

from __future__ import annotations

from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine

from ...asyncio_names import AsyncEngine


def configure_sqlite(engine: Engine | AsyncEngine, *, busy_timeout: float = 5.0) -> None:
    """Set an engine up for several worker processes: call it once, before the engine is first used.

    Write-ahead logging lets readers read while a projector writes; ``busy_timeout`` (seconds) is how long a writer
    waits for the one before it. Units of work take the write lock before anything else, whether or not this function
    was called. Other code that reads through the engine does not take the lock, and never waits for it.
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
