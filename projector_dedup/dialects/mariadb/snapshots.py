"""Change the settings of a MariaDB session so that units of work lose no update, and change them back for others.

The settings are innodb_snapshot_isolation, if the server can be relied on to keep it, and an isolation level. Both are
variables of the session, so they stay with a pooled connection. They are changed when a connection is taken from the
pool by code that needs other settings: if only projectors use an engine, that is one round trip for each connection,
not for each message.

Each physical connection is asked for itself: behind one address there may be another server tomorrow (docs/adr/0023).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.interfaces import Dialect as EngineDialect

from ..findings import Finding, advice
from ..levels import is_as_strict
from ..listeners import are_of_others, ask, info_of

SETTING = "innodb_snapshot_isolation"
DEPENDABLE = {(10, 6): 27, (10, 11): 18, (11, 4): 12, (11, 8): 8, (12, 3): 3}
"""The releases, by series, that are the first to refuse *every* stale write. One in 150,000 slipped through before
(https://jira.mariadb.org/browse/MDEV-39263); every later series has always been without the defect."""

_LEVELS = ("transaction_isolation", "tx_isolation")  # two names of one variable, the newer one first
_ASKED = "projector_dedup_server"  # in the ``info`` of a physical connection


class Wanted(NamedTuple):
    """Says which settings a unit of work needs on its connection."""

    snapshots: bool  #: the server's refusal of stale writes
    level: bool  #: a level under which no update is lost; else it is the user's, who has chosen one or needs none
    locking: str | None  #: the level that is enough where what changes is read under lock
    heard: bool  #: others listen for connections that are taken from the pool, and may change them too


_NOTHING = Wanted(snapshots=False, level=False, locking=None, heard=False)
_wanted: ContextVar[Wanted] = ContextVar("projector_dedup_wanted", default=_NOTHING)


@dataclass(frozen=True)
class Server:
    """Holds what the server of one physical connection said, and the settings that the session has now."""

    session: int  #: the server's number for it; a driver that connects anew by itself (``ping``) gets another
    is_dependable: bool
    level_variable: str
    snapshots: str | None  #: the setting as other users of the engine have it; None on a server without it
    level: str  #: the isolation level as other users of the engine have it
    now: tuple[str | None, str | None]  #: both as they are now; the level is None if others may have set another since

    @property
    def detecting_level(self) -> str:
        """Return the weakest level at which the server refuses a lost update."""
        return "REPEATABLE READ" if self.is_dependable else "SERIALIZABLE"

    def detects_lost_updates(self, level: str | None) -> bool:
        """True if the server refuses a lost update at ``level``, or at the level that the session has now."""
        snapshots, now = self.now
        detecting = self.detecting_level if snapshots == "ON" else "SERIALIZABLE"
        level = level or now
        return level is not None and is_as_strict(level, detecting)

    def settings_for(self, wanted: Wanted) -> tuple[str | None, str | None]:
        """Return the two settings for what is ``wanted``: those that were found, where they are strict enough."""
        snapshots = "ON" if wanted.snapshots and self.snapshots is not None else self.snapshots
        if not wanted.level:
            return snapshots, None if self.now[1] is None else self.level
        if is_as_strict(self.level, self.detecting_level):
            return snapshots, self.level
        return snapshots, wanted.locking or self.detecting_level


class Opening:
    """Makes connections that are taken from the pool in the block get the settings of a unit of work."""

    def __init__(self, engine: Engine, *, snapshots: bool, level: bool, locking: str | None) -> None:
        self._is_wanted = Wanted(snapshots, level, locking, are_of_others([engine.pool.dispatch.checkout]))

    def __enter__(self) -> None:
        self._token = _wanted.set(self._is_wanted)

    def __exit__(self, *_error: object) -> None:
        _wanted.reset(self._token)


def server_of(connection: Connection) -> Server | None:
    """Return what the server of this connection said; None if no unit of work has asked it."""
    found: Server | None = info_of(connection).get(_ASKED)
    return found


def snapshot_findings(connection: Connection) -> list[Finding]:
    """Return advice to upgrade a server on which projectors wait for each other more than on later releases."""
    pooled: Any = connection.connection
    if _asked(connection.dialect, pooled.dbapi_connection, pooled.driver_connection).is_dependable:
        return []
    return [
        advice(
            "this server cannot be relied on to refuse lost updates at REPEATABLE READ, so projectors run at "
            "SERIALIZABLE, where every read locks",
            "upgrade to MariaDB 10.6.27, 10.11.18, 11.4.12, 11.8.8, 12.3.3 or later",
        )
    ]


def switching(dialect: EngineDialect) -> Callable[[Any, Any, object], None]:
    """Return a listener to ``checkout`` that gives the connection the settings that are wanted in this context."""

    def switch(dbapi_connection: Any, record: Any, _proxy: object) -> None:
        wanted = _wanted.get()
        server: Server | None = record.info.get(_ASKED)
        if server is None or server.session != record.driver_connection.thread_id():
            if not (wanted.snapshots or wanted.level):
                return
            server = _asked(dialect, dbapi_connection, record.driver_connection)
        snapshots, level = settings = server.settings_for(wanted)
        overruled = wanted.heard and wanted.level and level != server.level
        if settings != server.now or overruled:
            values = {SETTING: snapshots, server.level_variable: level and f"'{level.replace(' ', '-')}'"}
            assigned = [f"SESSION {name} = {value}" for name, value in values.items() if value is not None]
            ask(dialect, dbapi_connection, f"SET {', '.join(assigned)}")
            if wanted.heard:
                dbapi_connection.commit()  # a transaction that a listener has begun would keep its level
        if not wanted.level and server.level != dialect.default_isolation_level:
            level = None  # SQLAlchemy resets the level to its default behind everybody who chooses one
        record.info[_ASKED] = replace(server, now=(snapshots, level))

    return switch


def _asked(dialect: EngineDialect, dbapi_connection: Any, driver: Any) -> Server:
    names = "', '".join(("version", SETTING, *_LEVELS))
    found = dict(ask(dialect, dbapi_connection, f"SHOW SESSION VARIABLES WHERE variable_name IN ('{names}')"))
    level_variable = next(name for name in _LEVELS if name in found)
    snapshots, level = found.get(SETTING), found[level_variable].replace("-", " ")
    is_dependable = snapshots is not None and _is_dependable(found["version"])
    return Server(driver.thread_id(), is_dependable, level_variable, snapshots, level, now=(snapshots, level))


def _is_dependable(version: str) -> bool:
    numbers = re.search(r"(\d+)\.(\d+)\.(\d+)", version.removeprefix("5.5.5-"))  # proxies add it for old clients
    if numbers is None:
        return False
    *series, release = map(int, numbers.groups())
    return tuple(series) > max(DEPENDABLE) or release >= DEPENDABLE.get((series[0], series[1]), sys.maxsize)
