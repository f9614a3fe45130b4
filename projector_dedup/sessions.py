"""The private session of a unit of work: made from the user's factory, opened at the right isolation level."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import inspect
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from .asyncio_names import AsyncSession, async_scoped_session, async_sessionmaker
from .closing import connected
from .dialects import LEVELS, Dialect, is_as_strict
from .dialects.listeners import forget_if_moved
from .errors import UnsafeSessionError
from .guards import GuardedSession, guarded_session, locking_session
from .isolation import take_connection
from .preflight import try_out, try_within
from .row_source import ReadAhead
from .tables import DedupTables, default_tables

logger = logging.getLogger("projector_dedup")


_begun_by_claims: WeakKeyDictionary[Engine, bool] = WeakKeyDictionary()
"""Which engines send BEGIN with the claim, known since their first unit of work (docs/adr/0023)."""


@dataclass
class UnitOptions:
    """How a unit of work is opened; the same for every message of one handler.

    ``claim_timeout`` (seconds) bounds the wait for another delivery of the same message; None waits as long as the
    database does. ``isolation`` overrides the level that invariant I6 asks for; entities in ``read_models`` are read
    under lock instead. ``strict`` spends one or two round trips more to ask the database, before COMMIT,
    whether the marker is in *this* transaction: that finds what a handler did on the driver's own connection.
    ``external`` permits a transaction that somebody else commits.
    """

    tables: DedupTables = default_tables
    claim_timeout: float | None = None
    isolation: str | None = None
    read_models: tuple[type[Any], ...] = ()
    strict: bool = False
    external: bool = False
    warned: bool = False  # the level was said to lose updates; once is enough
    read_ahead: ReadAhead | None = None  # of one handler; None: no row is read before a handler asks for it

    def __post_init__(self) -> None:
        if self.claim_timeout is not None and self.claim_timeout <= 0:
            raise ValueError("claim_timeout is in seconds and must be positive; None waits without a bound")


def check_session_factory(factory: object, *, asynchronous: bool) -> None:
    """Refuse what is not a factory of new sessions, naming what to give instead."""
    wanted, name = (async_sessionmaker, "async_sessionmaker") if asynchronous else (sessionmaker, "sessionmaker")
    if isinstance(factory, wanted):
        if factory.kw.get("twophase"):
            raise UnsafeSessionError(f"{name}(twophase=True) is not supported: marker and read model need one database")
        if type(factory).__call__ is not wanted.__call__:
            raise UnsafeSessionError(
                f"{type(factory).__name__}.__call__ would not be called: sessions here are of a private class; give a "
                f"plain {name} and put what it does into the class_ or the arguments of the {name}"
            )
        return
    if isinstance(factory, (scoped_session, async_scoped_session, Session, AsyncSession)):
        raise UnsafeSessionError(
            f"{type(factory).__name__} is the caller's live session; give the {name} that makes sessions: every "
            "attempt needs a new one (a scoped_session has it as .session_factory)"
        )
    if isinstance(factory, (sessionmaker, async_sessionmaker)):
        pair = "AsyncDispatcher with async_sessionmaker, Dispatcher with sessionmaker"
        raise UnsafeSessionError(f"{type(factory).__name__} does not fit here; use {pair}")
    raise UnsafeSessionError(f"expected a {name}, such as {name}(engine); got {type(factory).__name__}")


def new_session(factory: sessionmaker[Session], options: UnitOptions) -> GuardedSession:
    """A session like the factory's, of a private class that the guards listen to."""
    return _private_class(factory.class_, options)(**_private_arguments(factory.kw, options))


def new_async_session(factory: async_sessionmaker[AsyncSession], options: UnitOptions) -> AsyncSession:
    """The same for asyncio: what is private is the synchronous session inside."""
    arguments = _private_arguments(factory.kw, options)
    inner = arguments.pop("sync_session_class", None) or factory.class_.sync_session_class
    if isinstance(inner, sessionmaker):  # SQLAlchemy's way to attach events; its arguments count where we have none
        arguments = {**_private_arguments(inner.kw, options), **arguments}
        inner = inner.class_
    return factory.class_(sync_session_class=_private_class(inner, options), **arguments)


def _private_class(session_class: type[Session], options: UnitOptions) -> type[GuardedSession]:
    guarded = guarded_session(session_class)
    return locking_session(guarded, options.read_models) if options.read_models else guarded


def _private_arguments(arguments: dict[str, Any], options: UnitOptions) -> dict[str, Any]:
    # A session that was kept after its message must not come to life again.
    private = {**arguments, "close_resets_only": False}
    private.pop("autobegin", None)  # the unit of work says when it begins
    # To SQLAlchemy 2.0 a transaction that a listener to engine_connect has begun is not ours to commit; it is.
    private["join_transaction_mode"] = "create_savepoint" if options.external else "control_fully"
    return private


def open_connection(
    session: Session, bind: Engine | Connection, dialect: Dialect, options: UnitOptions, *, marked: bool, one: bool
) -> Connection:
    """Begin the session's transaction on ``bind``, at the level that ``options`` come to. ``one`` claim comes next."""
    if session.in_transaction():  # as it is since anything was added to it, or changed in it
        raise UnsafeSessionError(
            "the session was used before the claim; the claim is the transaction's first statement"
        )
    if not isinstance(bind, (Engine, Connection)):
        raise UnsafeSessionError(f"the session is bound to {type(bind).__name__}; an AsyncEngine needs AsyncDispatcher")
    for model in options.read_models:
        _refuse_elsewhere(session, bind, model)
    if isinstance(bind, Engine):
        try:
            begun_by_claims = _admit(bind, dialect)
            if one and options.read_ahead is not None:
                options.read_ahead.prepare(bind, dialect)  # when the engine is: its connections are to be trusted then
            if marked and dialect.untried:
                try_out(bind, dialect, options.tables)
            chosen = _chosen_level(bind, options)
            level = options.isolation if chosen is not None else _usual_level(bind, dialect, options, marked=marked)
            with dialect.opening(bind, marked=marked, locking=bool(options.read_models), chosen=chosen is not None):
                by_claim = one and level in LEVELS and begun_by_claims
                connection = _connect(session, bind, dialect, level, begun_by_claim=by_claim)
            dialect.refuse_unsafe(connection)
        except bind.dialect.loaded_dbapi.Error as error:  # SQLAlchemy does not wrap what is asked of the driver
            raise DBAPIError(None, None, error) from error
        if marked and chosen in LEVELS:
            _warn_of_lost_updates(connection, dialect, options, chosen)
    elif options.external:
        if marked and dialect.untried:
            try_within(bind, dialect, options.tables)
        dialect.begin_around(bind, options.tables.marker if marked else None)
        connection = session.connection(bind_arguments={"bind": bind})
        dialect.refuse_unsafe(connection)
    else:
        raise UnsafeSessionError(
            "the session is bound to a Connection, whose transaction is somebody else's to commit; bind the "
            "sessionmaker to the engine (in tests: projector_dedup.testing.external_transaction)"
        )
    moved = forget_if_moved(connection, session.dispatch.after_begin, session.dispatch.after_transaction_create)
    if moved and marked and dialect.untried and options.claim_timeout is None:  # a bounded one is refused
        try_within(connection, dialect, options.tables, moved=True)
    return connection


def _connect(
    session: Session, bind: Engine, dialect: Dialect, level: str | None, *, begun_by_claim: bool
) -> Connection:
    if level is None:
        return session.connection(bind_arguments={"bind": bind})
    connection = take_connection(session, bind, dialect, level, begun_by_claim=begun_by_claim)
    if connection is None:  # a listener has sent something, or set
        _begun_by_claims[bind] = False
        session.rollback()
        return _connect(session, bind, dialect, level, begun_by_claim=False)
    return connection


def _refuse_elsewhere(session: Session, bind: Engine | Connection, model: type[Any]) -> None:
    try:
        its_bind = session.get_bind(mapper=inspect(model))
    except UnboundExecutionError:
        its_bind = None
    if its_bind is not bind:
        raise UnsafeSessionError(
            f"the session reads {model.__name__} on another engine than that of the transaction, with which its "
            "changes could not commit; give the dispatcher a sessionmaker with one engine, the one that writes"
        )


def _admit(engine: Engine, dialect: Dialect) -> bool:
    """Refuse an engine that could not keep the promise, once; return True if its claims send BEGIN."""
    known = _begun_by_claims.get(engine)
    if known is None:
        dialect.prepare(engine)
        with connected(engine) as connection:
            dialect.refuse_unsafe(connection)
            known = _begun_by_claims[engine] = dialect.claim_begins(connection)
    return known


def _chosen_level(engine: Engine, options: UnitOptions) -> str | None:
    level: str | None = (
        options.isolation
        or engine.get_execution_options().get("isolation_level")
        or getattr(engine.dialect, "_on_connect_isolation_level", None)  # create_engine() leaves no public trace of it
    )
    return level


def _usual_level(engine: Engine, dialect: Dialect, options: UnitOptions, *, marked: bool) -> str | None:
    """The level to ask for where nobody has chosen one; None keeps the engine's own (docs/adr/0003-lost-updates.md)."""
    detecting = dialect.detecting_isolation(engine)
    if detecting is None:
        return None
    default: str | None = engine.dialect.default_isolation_level
    if dialect.begins_with_level and default is not None and is_as_strict(default, detecting):
        return default  # said, for it was asked on one connection; the next may have another (docs/adr/0011)
    if options.read_models:
        return dialect.locking_isolation
    return detecting if marked else None


def _warn_of_lost_updates(connection: Connection, dialect: Dialect, options: UnitOptions, level: str) -> None:
    if not (options.read_models or options.warned or dialect.detects_lost_updates(connection, level)):
        options.warned = True
        logger.warning(
            "isolation level %s was chosen: two messages that change one row can lose an update, unless the handler "
            "writes it by an atomic upsert; leave the level to projector_dedup, or declare read_models=[...]",
            level,
        )
