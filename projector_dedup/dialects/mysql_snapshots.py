"""innodb_snapshot_isolation, under which MariaDB refuses a lost update: on for units of work, as it was for others.

It is a variable of the session, so it stays with a pooled connection. It is changed when a connection is taken from the
pool by somebody who wants it otherwise: where only projectors use an engine, that is one round trip for each
connection, not for each message.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy.engine import Engine
from sqlalchemy.engine.interfaces import Dialect as EngineDialect
from sqlalchemy.exc import DisconnectionError

from ..findings import Finding, advice

SETTING = "innodb_snapshot_isolation"
DEPENDABLE = {(10, 6): 27, (10, 11): 18, (11, 4): 12, (11, 8): 8, (12, 3): 3}
"""The releases, by series, from which on it refuses *every* stale write. One in 150,000 slipped through before
(https://jira.mariadb.org/browse/MDEV-39263); every later series has been born without the defect."""

_wanted: ContextVar[bool] = ContextVar("projector_dedup_snapshot_isolation", default=False)

# What the server says of it, if it knows it, and whether that holds; by the engine's dialect, which its
# execution_options() clones share.
_found: WeakKeyDictionary[EngineDialect, tuple[str | None, bool]] = WeakKeyDictionary()


class SnapshotIsolation:
    """Within the block, connections are taken from the pool with the setting on if it is ``wanted``."""

    def __init__(self, wanted: bool) -> None:
        self._is_wanted = wanted

    def __enter__(self) -> None:
        self._token = _wanted.set(self._is_wanted)

    def __exit__(self, *_error: object) -> None:
        _wanted.reset(self._token)


def offers_snapshot_isolation(engine: Engine) -> bool:
    """Whether the server has the setting, and can be relied on to keep it."""
    known = _found.get(engine.dialect)
    if known is None:
        with engine.connect() as connection:
            found = connection.exec_driver_sql(f"SHOW VARIABLES LIKE '{SETTING}'").first()
        version: tuple[Any, ...] = engine.dialect.server_version_info or (0, 0, 0)
        series, release = version[:2], version[2]
        dependable = series > max(DEPENDABLE) or release >= DEPENDABLE.get(series, sys.maxsize)
        known = _found[engine.dialect] = (found[1], dependable) if found is not None else (None, False)
    return known[1]


def snapshot_findings(engine: Engine) -> list[Finding]:
    """That units of work cost more here."""
    if offers_snapshot_isolation(engine):
        return []
    return [
        advice(
            "this server cannot be relied on to refuse lost updates at REPEATABLE READ, so projectors run at "
            "SERIALIZABLE, where every read locks; that costs four round trips for each message",
            "give projectors an engine of their own, create_engine(isolation_level='SERIALIZABLE'), which costs "
            "none; or upgrade to MariaDB 10.6.27, 10.11.18, 11.4.12, 11.8.8, 12.3.3 or later",
        )
    ]


def switching(dialect: EngineDialect) -> Callable[[Any, Any, object], None]:
    """A listener: whoever takes a connection from the pool gets the setting as it is wanted."""

    def switch(dbapi_connection: Any, record: Any, _proxy: object) -> None:
        wanted = _wanted.get()
        if _found.get(dialect, (None, False))[0] != "OFF" or record.info.get(_wanted, False) is wanted:
            return
        cursor = dbapi_connection.cursor()
        try:
            cursor.execute(f"SET SESSION {SETTING} = {'ON' if wanted else 'OFF'}")
        except Exception as error:
            if isinstance(error, dialect.loaded_dbapi.Error) and not dialect.is_disconnect(error, None, cursor):
                raise  # the server's answer: another connection would get it too
            raise DisconnectionError from error  # the pool makes another
        finally:
            cursor.close()
        record.info[_wanted] = wanted

    return switch
