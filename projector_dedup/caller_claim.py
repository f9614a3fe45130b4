"""``claim()``: a claim in a transaction that the caller owns and commits."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy.engine import Engine
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session

from .dialects import LEVEL_OF_BEGIN, Status, dialect_of
from .dialects.listeners import forget_if_moved
from .errors import UnsafeSessionError
from .markers import COMMITTED_AT_ONCE, bind_of_marker, insert_marker, refuse_shared_markers, translate_map, valid_key
from .message import valid_formerly
from .preflight import try_within
from .reentry import refuse_within_handler
from .tables import DedupTables, default_tables


def claim(
    session: Session,
    message_id: object,
    handler: str,
    *,
    formerly: Collection[str] = (),
    tables: DedupTables = default_tables,
) -> bool:
    """Claim a message in a transaction that the caller owns and commits: True if it is new, False if a duplicate.

    The marker commits or rolls back with whatever else the caller writes in that transaction. A concurrent claim of
    the same message waits; at REPEATABLE READ and above the loser gets a serialization failure, upon which the
    caller runs the whole transaction again. Pending objects of the session are not flushed. For an ``AsyncSession``:
    ``await session.run_sync(claim, message_id, handler)``.

    Commit a duplicate too, before it is acknowledged: on PostgreSQL the COMMIT waits until a synchronous standby has
    the marker that was found; a rollback does not.

    With ``formerly``, names that the handler had before, the message is claimed under these too, and new only if it
    is new under each. Of a duplicate, a caller that commits may leave a marker under a name that had none (not on
    PostgreSQL), which is as true: the message was applied.

    Nothing watches what else happens in the transaction; that, and retries, are what ``UnitOfWork`` adds.

    Raises ``RefusedError`` before anything is written: an id that is none, AUTOCOMMIT, an open savepoint (rolling
    back to it would take the marker without the caller's noticing), no bind or another bind for the marker table,
    a ``schema_translate_map`` that says nothing of it.
    """
    key, former_names = valid_key(message_id, handler), valid_formerly(formerly)
    given: object = session
    if isinstance(given, scoped_session):
        session = given()
    elif not isinstance(given, Session):
        raise UnsafeSessionError(
            f"claim() takes a Session, not {type(given).__name__}; with an AsyncSession: "
            "await session.run_sync(claim, message_id, handler)"
        )
    if session.in_nested_transaction():
        raise UnsafeSessionError("claim() inside a savepoint: claim first, then begin_nested()")
    bind = bind_of_marker(session, tables)
    refuse_within_handler(bind, session)
    try:
        elsewhere = session.get_bind() is not bind
    except UnboundExecutionError:
        elsewhere = False  # every bind of this session is per table; the marker's is known
    if elsewhere:
        raise UnsafeSessionError(
            "the marker table is bound to another engine than the session, so they could not commit together"
        )
    connection = session.connection(bind_arguments={"bind": bind})  # a get_bind() of the user's may not repeat itself
    if LEVEL_OF_BEGIN in connection.get_execution_options():  # in a handler, whose transaction has begun with the level
        connection.execution_options(**{LEVEL_OF_BEGIN: None})
    if isinstance(bind, Engine) and connection.in_nested_transaction():
        raise UnsafeSessionError("claim() inside a savepoint of the connection: claim first, then begin_nested()")
    refuse_shared_markers(translate_map(connection), tables)
    dialect = dialect_of(connection)
    dialect.refuse_unsafe(connection)
    moved = (dialect.remembers_tables or dialect.unknown) and forget_if_moved(session, connection)
    if dialect.unknown:
        try_within(connection, dialect, tables, moved=moved)
    dialect.begin(connection, tables.marker, None)
    new = insert_marker(connection, dialect, tables, key, former_names)
    if new and dialect.status(connection.connection.driver_connection) is not Status.OPEN:
        raise UnsafeSessionError(COMMITTED_AT_ONCE)
    return new
