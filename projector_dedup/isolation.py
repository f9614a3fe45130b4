"""Choose the isolation level of a unit of work, on a connection as the user's listeners have left it.

To set a level, SQLAlchemy first rolls back what is open on the connection (psycopg 3 refuses instead). So a
transaction that a listener began, to choose a tenant for it say, keeps what it has: the level is chosen within it, by
SQL, where the database can do that (docs/adr/0025-what-is-set-for-a-transaction.md).
"""

from __future__ import annotations

import logging
from inspect import unwrap
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.interfaces import Dialect as EngineDialect
from sqlalchemy.exc import ArgumentError, DBAPIError, InvalidRequestError
from sqlalchemy.orm import Session

from .dialects import LEVEL_OF_BEGIN, LEVELS, Dialect, Status, is_as_strict
from .dialects.answers import sqlstate_of
from .errors import UnsafeSessionError
from .options import UnitOptions

logger = logging.getLogger("projector_dedup")

_TOO_LATE = {"25001", "25P02"}  # active_sql_transaction: a query has run; in_failed_sql_transaction

_warned_of: WeakKeyDictionary[EngineDialect, set[str]] = WeakKeyDictionary()
"""The isolation levels that a log line has said to lose updates, by engine and all copies of it: once is enough."""


class Taking:
    """An engine for a session that takes a connection: sets the level before the session can use the connection.

    Where the claim sends BEGIN, the level is only noted, to be said with BEGIN.
    """

    def __init__(self, engine: Engine, dialect: Dialect, level: str, *, begun_by_claim: bool) -> None:
        self.engine = engine
        self.was_open = False  # the driver's transaction, when the connection had been taken
        self.option = {LEVEL_OF_BEGIN if begun_by_claim else "isolation_level": level}
        self._dialect = dialect
        self._level = level

    def __getattr__(self, name: str) -> Any:
        """Answer for the engine, if a Session class of the user's looks at what it is given."""
        return getattr(self.engine, name)

    def __eq__(self, other: object) -> bool:
        """Be found by a session that has a connection of the engine already: it must not take a second one."""
        return other is self or other is self.engine

    def __hash__(self) -> int:
        return hash(self.engine)

    def connect(self) -> Connection:
        """Take a connection, and choose the level before the session begins a transaction on it."""
        connection = self.engine.connect()
        try:
            self._choose_level(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _choose_level(self, connection: Connection) -> None:
        status = self._dialect.status(connection.connection.driver_connection)
        self.was_open = connection.in_transaction() or status in (Status.OPEN, Status.ABORTED)
        if not (self.was_open and self._dialect.begins_with_level and self._level in LEVELS):
            try:
                connection.execution_options(**self.option)
            except InvalidRequestError as error:
                self._refuse(error)
            return
        try:
            connection.exec_driver_sql(f"SET TRANSACTION ISOLATION LEVEL {self._level}")
        except DBAPIError as error:
            if sqlstate_of(error) not in _TOO_LATE:
                raise
            self._refuse(error)

    def _refuse(self, error: Exception) -> NoReturn:
        raise UnsafeSessionError(
            f"{_names_of_listeners(self.engine)} left a transaction open on the connection in which a query has run or "
            f"failed, so its level can no longer be chosen ({self._level} is needed), and a rollback would undo what "
            "was set. "
            "Let the listener use SET or SET LOCAL, not a query such as SELECT set_config(...), or let it commit; or "
            f"choose the level with the engine: create_engine(..., isolation_level={self._level!r})"
        ) from error


def take_connection(
    session: Session, engine: Engine, dialect: Dialect, level: str, *, begun_by_claim: bool
) -> Connection | None:
    """Begin the session's transaction at ``level``; None if the claim was to begin it, and a listener has."""
    taking = Taking(engine, dialect, level, begun_by_claim=begun_by_claim)
    # A level among the session's own options would be set after ours.
    again = taking.option if "isolation_level" in (getattr(session, "execution_options", None) or {}) else None
    bind: Any = taking
    try:
        connection = session.connection(bind_arguments={"bind": bind}, execution_options=again)
    except ArgumentError as error:
        raise UnsafeSessionError(f"isolation={level!r} is no level of this database: {error}") from error
    if begun_by_claim and not taking.was_open and not dialect.claim_begins(connection):
        return None
    options = connection.get_execution_options()
    dropped = not taking.was_open and any(options.get(name) != level for name in taking.option)
    if dropped and not is_as_strict(connection.get_isolation_level(), level):
        raise UnsafeSessionError(
            f"a listener has taken the session's connection before it was asked for at {level}; let it listen to "
            "after_begin, which has the connection"
        )
    return connection


def usual_level(engine: Engine, dialect: Dialect, options: UnitOptions, *, marked: bool) -> str | None:
    """Return the level to ask for where the user has chosen none; None keeps the engine's (docs/adr/0003)."""
    detecting = dialect.detecting_isolation(engine)
    if detecting is None:
        return None
    default: str | None = engine.dialect.default_isolation_level
    if dialect.begins_with_level and default is not None and is_as_strict(default, detecting):
        return default  # said, for it was asked on one connection; the next may have another (docs/adr/0011)
    if options.read_models:
        return dialect.locking_isolation
    return detecting if marked else None


def warn_of_lost_updates(connection: Connection, dialect: Dialect, options: UnitOptions, level: str) -> None:
    """Log that a ``level`` which the user has chosen loses updates, if it does; once for each engine and level."""
    warned = _warned_of.setdefault(connection.dialect, set())
    if options.warn and not (options.read_models or level in warned or dialect.detects_lost_updates(connection, level)):
        warned.add(level)
        logger.warning(
            "isolation level %s was chosen: two messages that change one row can lose an update, unless the handler "
            "writes it by an atomic upsert; leave the level to projector_dedup, or declare read_models=[...]",
            level,
        )


def _names_of_listeners(engine: Engine) -> str:
    """Return the names of the user's functions that are called while a connection is taken from the engine."""
    events = engine.pool.dispatch.connect, engine.pool.dispatch.checkout, engine.dispatch.engine_connect
    found = [unwrap(listener) for listeners in events for listener in listeners]
    ours = ("sqlalchemy.", f"{__package__}.")
    names = [f"{each.__module__}.{each.__qualname__}" for each in found if hasattr(each, "__qualname__")]
    return ", ".join(name for name in dict.fromkeys(names) if not name.startswith(ours)) or "a listener"
