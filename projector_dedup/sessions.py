"""The private session of a unit of work: made from the user's factory, begun at the right isolation level, watched."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from .asyncio_names import AsyncSession, async_sessionmaker
from .closing import connected
from .dialects import LEVELS, Dialect, Status, dialect_of
from .dialects.levels import chosen_level
from .dialects.listeners import forget_if_moved
from .errors import UnsafeSessionError
from .guards import ClaimTransaction, Guard, GuardedSession, LockingSession, guarded_session, locking_session
from .isolation import take_connection, usual_level, warn_of_lost_updates
from .markers import COMMITTED_AT_ONCE, raise_in_progress, refuse_elsewhere, refuse_shared_markers, translate_map
from .options import UnitOptions
from .preflight import try_out, try_within
from .row_source import ReadAhead

_begun_by_claims: WeakKeyDictionary[Engine, bool] = WeakKeyDictionary()
"""True for engines that send BEGIN with the claim, known since their first unit of work (docs/adr/0023)."""


def new_session(factory: sessionmaker[Session], options: UnitOptions) -> GuardedSession:
    """Return a session like the factory's, of a private class that the guards listen to."""
    return _private_class(factory.class_, options)(**_private_arguments(factory.kw, options))


def new_async_session(factory: async_sessionmaker[AsyncSession], options: UnitOptions) -> AsyncSession:
    """Return an asynchronous session like the factory's; the synchronous one inside is of the private class."""
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


def guard_for(
    session: GuardedSession, connection: Connection, options: UnitOptions, key: dict[str, Any] | None
) -> Guard:
    """Make the connection ready for the claim of ``key`` (None: of no marker), and return its guard, not yet watching.

    Raises ``UnsafeSessionError`` if tenants would share the markers, and ``InProgress`` if ``claim_timeout`` ran out.
    """
    marked, dialect, schemas = key is not None, dialect_of(connection), translate_map(connection)
    if marked:
        refuse_shared_markers(schemas, options.tables)
    try:
        dialect.begin(connection, options.tables.marker if marked else None, options.claim_timeout)
    except DBAPIError as error:
        raise_in_progress(error, dialect, options.claim_timeout)
        raise
    driver = connection.connection.driver_connection
    claimed = ClaimTransaction(connection, driver, dialect, options.tables, schemas, key)
    return Guard(session, claimed)


def watch(guard: Guard, options: UnitOptions, *, new: bool) -> None:
    """Watch the session from here on, also where the claim failed: a write must not commit without a marker.

    ``new`` is False for a duplicate and for a claim that failed. Raises ``UnsafeSessionError`` if the claim was
    committed at once.
    """
    status = guard.watch()
    if not new:
        return
    if guard.claim_transaction.key is not None and status is not Status.OPEN:
        raise UnsafeSessionError(COMMITTED_AT_ONCE)
    if options.strict:
        guard.savepoints.mark()
    if guard.dialect.unknown:  # its driver cannot tell what happens there
        guard.require_server_check()


def open_connection(
    session: Session,
    bind: Engine | Connection,
    options: UnitOptions,
    ahead: ReadAhead | None,
    *,
    marked: bool,
    one: bool,
) -> Connection:
    """Begin the session's transaction on ``bind``, at the level that ``options`` come to, and return its connection.

    A claim of markers comes next if ``marked``, of ``one`` or of many, with rows if there is ``ahead``. An unknown
    database is tried first. Raises ``RefusedError`` for a bind on which the promise would not hold.
    """
    dialect = dialect_of(bind)
    if session.in_transaction():  # as it is since anything was added to it, or changed in it
        raise UnsafeSessionError(
            "the session was used before the claim; the claim is the transaction's first statement"
        )
    if not isinstance(bind, (Engine, Connection)):
        raise UnsafeSessionError(f"the session is bound to {type(bind).__name__}; an AsyncEngine needs AsyncDispatcher")
    for model in options.read_models:
        refuse_elsewhere(session, bind, model)
    if isinstance(bind, Engine):
        try:
            begun_by_claims = _admit(bind, dialect)
            if ahead is not None:
                ahead.prepare(bind, dialect)  # when the engine is: its connections are to be trusted then
            if marked and dialect.unknown:
                try_out(bind, dialect, options.tables)
            chosen = options.isolation or chosen_level(bind)
            level = options.isolation if chosen is not None else usual_level(bind, dialect, options, marked=marked)
            with dialect.opening(bind, marked=marked, locking=bool(options.read_models), chosen=chosen is not None):
                by_claim = one and level in LEVELS and begun_by_claims
                connection = _connect(session, bind, dialect, level, begun_by_claim=by_claim)
            level = level or chosen
            dialect.refuse_unsafe(connection)
        except bind.dialect.loaded_dbapi.Error as error:  # SQLAlchemy does not wrap what is asked of the driver
            raise DBAPIError(None, None, error) from error
        if marked and chosen in LEVELS:
            warn_of_lost_updates(connection, dialect, options, chosen)
    elif options.external:
        if marked and dialect.unknown:
            try_within(bind, dialect, options.tables)
        dialect.begin_around(bind, options.tables.marker if marked else None)
        connection = session.connection(bind_arguments={"bind": bind})
        dialect.refuse_unsafe(connection)
        level = chosen_level(bind) or usual_level(bind.engine, dialect, options, marked=marked)  # as without a test
    else:
        raise UnsafeSessionError(
            "the session is bound to a Connection, whose transaction is somebody else's to commit; bind the "
            "sessionmaker to the engine (in tests: projector_dedup.testing.external_transaction)"
        )
    if isinstance(session, LockingSession):
        session.conflicts_are_found = dialect.detects_lost_updates(connection, level)
    if dialect.remembers_tables or dialect.unknown:
        moved = forget_if_moved(session, connection)
        if moved and marked and dialect.unknown and options.claim_timeout is None:  # a bounded one is refused
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


def _admit(engine: Engine, dialect: Dialect) -> bool:
    """Prepare an engine once, or refuse it if it could not keep the promise; return True if its claims send BEGIN."""
    known = _begun_by_claims.get(engine)
    if known is None:
        dialect.prepare(engine)
        with connected(engine) as connection:
            dialect.refuse_unsafe(connection)
            known = _begun_by_claims[engine] = dialect.claim_begins(connection)
    return known
