"""Open a unit of work: a private session like the user's, with a transaction on one connection at the right level.

The session's class is private, so that the guard's listeners reach no session of the user. The module refuses an engine
on which the guarantees would not hold. It sets the isolation level before the transaction begins. If a user's listener
has already begun the transaction, for example to select a tenant, the module keeps its settings and sets the level by
SQL inside the transaction, if the database can do that (docs/adr/0005-handlers-and-transactions.md).
"""

from __future__ import annotations

from typing import Any, NoReturn
from weakref import WeakKeyDictionary, WeakSet

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.engine.interfaces import Dialect as EngineDialect
from sqlalchemy.exc import ArgumentError, DBAPIError, InvalidRequestError
from sqlalchemy.orm import Session, sessionmaker

from .asyncio_names import AsyncSession, async_sessionmaker
from .closing import connected
from .dialects import (
    LEVEL_OF_BEGIN,
    LEVELS,
    Dialect,
    Status,
    chosen_level,
    dialect_of,
    forget_if_moved,
    is_as_strict,
    sqlstate_of,
)
from .errors import UnsafeSessionError, UnsupportedDatabaseError
from .guard import GuardedSession
from .inherited import after_fork, leave_to_parent
from .markers import refuse_elsewhere
from .message import logger_of
from .options import UnitOptions
from .read_models import LockingSession, locking_session

logger = logger_of("projector_dedup")

_TOO_LATE = {"25001", "25P02"}  # active_sql_transaction: a query has run; in_failed_sql_transaction

_prepared: WeakSet[Engine] = WeakSet()

_begun_by_claims: WeakKeyDictionary[Engine, bool] = WeakKeyDictionary()
"""True for engines whose claims send BEGIN, too. Decided once (docs/adr/0006-round-trips-and-batches.md)."""

_warned_of: WeakKeyDictionary[EngineDialect, set[str]] = WeakKeyDictionary()
"""The isolation levels for which the library has logged that they lose updates, for an engine and its copies."""


_SUBCLASSES = "_projector_dedup_subclasses"  # the attribute of a Session class for its private subclasses


# The session ----------------------------------------------------------------------------------------------------------


def new_session(factory: sessionmaker[Session], options: UnitOptions) -> GuardedSession:
    """Return a session like the factory's, of a private class that the guard listens to."""
    return _private_class(factory.class_, options)(**_private_arguments(factory.kw, options))


def new_async_session(factory: async_sessionmaker[AsyncSession], options: UnitOptions) -> AsyncSession:
    """Return an asynchronous session like the factory's. The synchronous session inside has the private class."""
    arguments = _private_arguments(factory.kw, options)
    inner = arguments.pop("sync_session_class", None) or factory.class_.sync_session_class
    if isinstance(inner, sessionmaker):  # SQLAlchemy's way to attach events; its arguments are defaults
        arguments = {**_private_arguments(inner.kw, options), **arguments}
        inner = inner.class_
    return factory.class_(sync_session_class=_private_class(inner, options), **arguments)


def _private_class(session_class: type[Session], options: UnitOptions) -> type[GuardedSession]:
    """Return a subclass of the user's Session class that fits the ``options``.

    Every ``sessionmaker`` makes a class. The subclasses are stored on that class, so both are garbage collected
    together.
    """
    if session_class.connection_callable is not None:
        raise UnsafeSessionError(
            f"{session_class.__name__} chooses a connection for each row, as ShardedSession does, so marker and read "
            "model could not commit together; give the dispatcher a sessionmaker for one shard, and deliver a message "
            "with the dispatcher of its shard"
        )
    if _SUBCLASSES not in vars(session_class):
        setattr(session_class, _SUBCLASSES, {})
    kept: dict[object, type[GuardedSession]] = vars(session_class)[_SUBCLASSES]
    wanted = options.read_models, options.lowered
    if wanted not in kept:
        private = type(f"GuardedSessionOf{session_class.__name__}", (GuardedSession, session_class), {})
        locks = options.read_models or options.lowered
        kept[wanted] = locking_session(private, options.read_models, verifies=options.lowered) if locks else private
    return kept[wanted]


def _private_arguments(arguments: dict[str, Any], options: UnitOptions) -> dict[str, Any]:
    # A session that a handler has kept must not begin another transaction after its message.
    private = {**arguments, "close_resets_only": False}
    private.pop("autobegin", None)  # the unit of work begins it
    # If a listener to engine_connect has begun the transaction, SQLAlchemy 2.0 would not commit it for the session.
    private["join_transaction_mode"] = "create_savepoint" if options.external else "control_fully"
    return private


# Its connection -------------------------------------------------------------------------------------------------------


def open_connection(
    session: GuardedSession, bind: Engine | Connection, options: UnitOptions, *, marked: bool, one: bool
) -> Connection:
    """Begin the session's transaction on ``bind`` at the isolation level of ``options``. Return the connection.

    ``marked``: a claim comes next. ``one``: it claims one message. Raises ``RefusedError`` for a bind on which the
    guarantees would not hold.
    """
    dialect = dialect_of(bind)
    if session.in_transaction():  # a session begins when an instance is added or changed
        raise UnsafeSessionError(
            "the session was used before the claim, which must be the first statement of the transaction; use it after "
            "claim()"
        )
    if not isinstance(bind, (Engine, Connection)):
        raise UnsafeSessionError(
            f"the session is bound to {type(bind).__name__}; bind it to an Engine, and use AsyncDispatcher for an "
            "AsyncEngine"
        )
    for model in options.read_models:
        refuse_elsewhere(session, bind, model)
    if isinstance(bind, Engine):
        if options.external:
            raise UnsafeSessionError(
                "external_transaction has no effect on a session factory that is bound to an Engine: the library would "
                "commit. Bind the factory to the connection whose transaction your test rolls back: "
                "sessionmaker(connection)"
            )
        connection = _on_engine(session, bind, dialect, options, marked=marked, one=one)
    elif options.external:
        if not bind.in_transaction():
            bind.begin()  # otherwise the session begins the outer transaction, and commits it
        dialect.begin_around(bind, options.tables.marker if marked else None)
        connection = session.connection(bind_arguments={"bind": bind})
        dialect.refuse_unsafe(connection)
        chosen = options.isolation or chosen_level(bind)
        level = chosen or _usual_level(bind.engine, dialect, options, marked=marked)  # that of production
        _note_level(session, connection, dialect, options, level, chosen=chosen is not None)
    else:
        raise UnsafeSessionError(
            "the session is bound to a Connection, whose transaction the library must not commit; bind the "
            "sessionmaker to the engine (in tests, use projector_dedup.testing.external_transaction)"
        )
    if dialect.remembers_tables:
        forget_if_moved(session, connection)
    return connection


def _on_engine(
    session: GuardedSession, engine: Engine, dialect: Dialect, options: UnitOptions, *, marked: bool, one: bool
) -> Connection:
    try:
        begun_by_claims = _admit(engine, dialect)
        chosen = options.isolation or chosen_level(engine)
        level = options.isolation if chosen is not None else _usual_level(engine, dialect, options, marked=marked)
        locking, wait = bool(options.read_models) or options.lowered, options.claim_timeout
        with dialect.opening(engine, marked=marked, locking=locking, chosen=chosen is not None, wait=wait):
            by_claim = one and level in LEVELS and begun_by_claims
            connection = _connect(session, engine, dialect, level, begun_by_claim=by_claim)
        dialect.refuse_unsafe(connection)
    except engine.dialect.loaded_dbapi.Error as error:  # direct calls of the driver are not wrapped
        raise DBAPIError(None, None, error) from error
    if marked and chosen in LEVELS:
        _warn_of_lost_updates(connection, dialect, options, chosen)
    _note_level(session, connection, dialect, options, level or chosen, chosen=chosen is not None)
    return connection


def _note_level(
    session: GuardedSession,
    connection: Connection,
    dialect: Dialect,
    options: UnitOptions,
    level: str | None,
    *,
    chosen: bool,
) -> None:
    """Let the session know what its isolation level hides and detects. ``level`` is None for the level of the server.

    ``chosen``: the user has chosen the level, so the library must not run the handler at another one.
    """
    session.snapshot, session.accepted = dialect.snapshot(connection, level), options.accepted
    default = dialect.default_level(connection)
    weaker = default is not None and not is_as_strict(default, "REPEATABLE READ")
    session.may_lower = weaker and not (chosen or options.lowered)
    if isinstance(session, LockingSession):
        session.conflicts_are_found = dialect.detects_lost_updates(connection, level)


def prepared(engine: Engine) -> Dialect:
    """Return the dialect of an engine, which it has prepared once in this process."""
    leave_to_parent(engine)
    dialect = dialect_of(engine)
    if engine not in _prepared:
        dialect.prepare(engine)
        _prepared.add(engine)
    return dialect


def _admit(engine: Engine, dialect: Dialect) -> bool:
    """Prepare an engine once, or refuse it as unsafe. Return True if its claims also send BEGIN."""
    known = _begun_by_claims.get(engine)
    if known is None:
        try:
            prepared(engine)
            with connected(engine) as connection:
                dialect.refuse_unsafe(connection)
                dialect.status(connection.connection.driver_connection)
                known = _begun_by_claims[engine] = dialect.claim_begins(connection)
        except (AttributeError, TypeError) as error:
            raise UnsupportedDatabaseError(
                f"the connections of this engine do not behave as those of {engine.driver} ({error}), perhaps because "
                "a tracing library or a creator= wraps them, or because the client encoding is SQL_ASCII; correct "
                "that, or trace the SQLAlchemy engine instead of the driver"
            ) from error
    return known


@after_fork
def _forget_engines() -> None:
    """Admit each engine anew in a forked process, where it gets a new pool."""
    _prepared.clear()
    _begun_by_claims.clear()


def _connect(
    session: Session, engine: Engine, dialect: Dialect, level: str | None, *, begun_by_claim: bool
) -> Connection:
    if level is None:
        return session.connection(bind_arguments={"bind": engine})
    taking = _Taking(engine, dialect, level, begun_by_claim=begun_by_claim)
    # A level in the session's own execution options would be set later, and would override this one.
    again = taking.option if "isolation_level" in (getattr(session, "execution_options", None) or {}) else None
    bind: Any = taking
    try:
        connection = session.connection(bind_arguments={"bind": bind}, execution_options=again)
    except ArgumentError as error:
        raise UnsafeSessionError(
            f"isolation={level!r} is no isolation level of this database; choose another ({error})"
        ) from error
    if begun_by_claim and not taking.was_open and not dialect.claim_begins(connection):
        _begun_by_claims[engine] = False  # a user's listener has sent or set something
        session.rollback()
        return _connect(session, engine, dialect, level, begun_by_claim=False)
    options = connection.get_execution_options()
    dropped = not taking.was_open and not taking.option.items() <= options.items()
    if dropped and not is_as_strict(connection.get_isolation_level(), level):
        raise UnsafeSessionError(
            f"a listener took the session's connection before the library could set {level}; let the listener use "
            "the event after_begin, which gets the connection"
        )
    return connection


class _Taking:
    """Replaces the engine while a session takes a connection, to set the level before the session uses it.

    If the claim sends BEGIN, this object only notes the level, and the claim sends it with BEGIN.
    """

    def __init__(self, engine: Engine, dialect: Dialect, level: str, *, begun_by_claim: bool) -> None:
        self.engine = engine
        self.was_open = False  # True: the driver had a transaction open when the connection was taken
        self.option = {LEVEL_OF_BEGIN if begun_by_claim else "isolation_level": level}
        self._dialect = dialect
        self._level = level

    def __getattr__(self, name: str) -> Any:
        """Return the engine's attribute, because a user's Session class may read it."""
        return getattr(self.engine, name)

    def __eq__(self, other: object) -> bool:
        """True for the engine itself, so that a session does not take a second connection."""
        return other is self or other is self.engine

    def __hash__(self) -> int:
        return hash(self.engine)

    def connect(self) -> Connection:
        """Take a connection, and set the level before the session begins a transaction on it."""
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
            "a listener of the engine ran a query and left its transaction open, so the isolation level can no longer "
            f"be set ({self._level} is needed), and a rollback would undo the listener's settings. Let the listener "
            "use SET or SET LOCAL instead of a query such as SELECT set_config(...), or let it commit; or set the "
            f"level of the engine: create_engine(..., isolation_level={self._level!r})"
        ) from error


def _usual_level(engine: Engine, dialect: Dialect, options: UnitOptions, *, marked: bool) -> str | None:
    """Return the level to set if the user has chosen none. None keeps the engine's (docs/adr/0004-lost-updates.md)."""
    detecting = dialect.detecting_isolation
    if detecting is None:
        return None
    default: str | None = engine.dialect.default_isolation_level
    if dialect.begins_with_level and default is not None and is_as_strict(default, detecting):
        return default  # the next connection may have another default (docs/adr/0007-pgbouncer-and-standbys.md)
    if options.read_models or options.lowered:
        return dialect.locking_isolation
    return detecting if marked else None


def _warn_of_lost_updates(connection: Connection, dialect: Dialect, options: UnitOptions, level: str) -> None:
    """Log, once for each engine and level, if the user has chosen a ``level`` that loses updates."""
    warned = _warned_of.setdefault(connection.dialect, set())
    if options.warn and not (options.read_models or level in warned or dialect.detects_lost_updates(connection, level)):
        warned.add(level)
        logger.warning(
            "isolation level %s was chosen: if two messages change the same row, an update can be lost, unless the "
            "handler locks the row when it reads it, or lets the database compute the value; otherwise remove the "
            "level, so that projector_dedup sets it, or declare read_models=[...]",
            level,
        )
