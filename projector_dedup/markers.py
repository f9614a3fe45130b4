"""The marker's SQL: claim it in a transaction, or ask whether it is there."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import Insert, Row, Table
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.sql import Executable

from .dialects import LEVEL_OF_BEGIN, Dialect, Failure, Key, Status, dialect_of, handler_parameters, key_of
from .dialects.listeners import forget_if_moved
from .dialects.plain_tables import Wanted
from .errors import InProgress, MissingTableError, UnsafeSessionError
from .message import moment_in_utc, valid_formerly, valid_handler, valid_message_id
from .preflight import try_within
from .reentry import outside_handlers
from .tables import DedupTables, default_tables

COMMIT_INTERRUPTED = (
    "interrupted during COMMIT, by the loss of the connection or otherwise: the message may be applied or not. Do not "
    "acknowledge it; a redelivery finds out"
)
COMMITTED_AT_ONCE = "the driver committed the claim at once; turn its AUTOCOMMIT off"


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
    key, former_names = marker_key(valid_message_id(message_id), valid_handler(handler)), valid_formerly(formerly)
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
    bind = outside_handlers(bind_of_marker(session, tables), session)
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
    moved = forget_if_moved(connection, session.dispatch.after_begin, session.dispatch.after_transaction_create)
    if dialect.untried:
        try_within(connection, dialect, tables, moved=moved)
    dialect.begin(connection, tables.marker, None)
    new = insert_marker(connection, dialect, tables, key, former_names)
    if new and dialect.status(connection.connection.driver_connection) is not Status.OPEN:
        raise UnsafeSessionError(COMMITTED_AT_ONCE)
    return new


def insert_marker(
    connection: Connection,
    dialect: Dialect,
    tables: DedupTables,
    key: Mapping[str, Any],
    formerly: Collection[str] = (),
    *,
    wait: float | None = None,
) -> bool:
    """One statement checks and writes. What is neither new nor a duplicate raises."""
    # In one order, whoever claims which of them: or two claims could each wait for a name that the other holds.
    names = sorted({key["handler"], *formerly}) if formerly else [key["handler"]]
    if len(names) > 1:
        named = dict(zip(handler_parameters(len(names)), names, strict=True))
        key = {name: value for name, value in key.items() if name != "handler"} | named
    if wait is not None:
        key = _bounded(key, wait)
    statement = _claim_statement(dialect, tables.marker, wait is not None, len(names))
    dialect.refuse_marker(connection, tables.marker)
    try:
        return dialect.claim(connection, statement, tables.marker, key, names=len(names))
    except DBAPIError as error:
        _raise_what_it_means(error, connection, dialect, tables, wait)
        raise


def insert_marker_and_read(
    connection: Connection,
    dialect: Dialect,
    tables: DedupTables,
    wanted: Wanted,
    parameters: Mapping[str, Any],
) -> Row[Any] | None:
    """Insert a marker and read the rows ``wanted``; None for a duplicate. See ``Dialect.claim_and_read``."""
    dialect.refuse_marker(connection, tables.marker)
    try:
        return dialect.claim_and_read(connection, tables.marker, wanted, parameters)
    except DBAPIError as error:
        _raise_missing(error, connection, dialect, tables)
        raise


def insert_markers(
    connection: Connection,
    dialect: Dialect,
    tables: DedupTables,
    keys: Iterable[Mapping[str, Any]],
    wait: float | None = None,
) -> set[Key]:
    """Several at once: which of them are new. May raise ``OvertakenError``, after which nothing of it may commit.

    In one order everywhere, so that two who claim the same do not wait for each other.
    """
    in_order = sorted(keys if wait is None else (_bounded(key, wait) for key in keys), key=key_of)
    dialect.refuse_marker(connection, tables.marker)
    try:
        return dialect.claim_many(connection, tables.marker, in_order)
    except DBAPIError as error:
        _raise_what_it_means(error, connection, dialect, tables, wait)
        raise


def _bounded(key: Mapping[str, Any], wait: float) -> dict[str, Any]:
    return {**key, "wait_ms": str(max(1, int(wait * 1000)))}


def _raise_what_it_means(
    error: DBAPIError, connection: Connection, dialect: Dialect, tables: DedupTables, wait: float | None
) -> None:
    raise_in_progress(error, dialect, wait)
    _raise_missing(error, connection, dialect, tables)


def _raise_missing(error: DBAPIError, connection: Connection, dialect: Dialect, tables: DedupTables) -> None:
    if dialect.classify(error) is Failure.NO_TABLE:
        raise MissingTableError(tables.missing(connection)) from error


def raise_in_progress(error: DBAPIError, dialect: Dialect, wait: float | None) -> None:
    """Raise ``InProgress`` if ``error`` is a claim's, or its BEGIN's, running out of ``wait`` seconds."""
    if wait is not None and dialect.classify(error) is Failure.LOCK_TIMEOUT:
        raise InProgress(
            f"another transaction held the claim for more than {wait} s; let the message be redelivered"
        ) from error


def refuse_shared_markers(translated: Any, tables: DedupTables) -> None:
    """Refuse schemas that are kept apart, in one table of markers, unless the map says that this is meant.

    A tenant's message 1 would be taken for a duplicate of another tenant's message 1, and be lost.
    """
    schema = tables.marker.schema
    if translated and schema not in translated:
        raise UnsafeSessionError(
            f"the engine's schema_translate_map moves other tables than {tables.marker.fullname}, so several schemas "
            "would share its message ids, and what has an id in common would be lost as a duplicate. Give the markers "
            "the schema of the read model, make_tables(metadata, schema=...); or, if no two schemas have an id in "
            f"common, say that they stay: {{{schema!r}: {schema!r}, ...}}"
        )


def translate_map(connection: Connection) -> Any:
    """The ``schema_translate_map`` by which the connection finds the marker now."""
    return connection.get_execution_options().get("schema_translate_map")


def marker_key(message_id: str, handler: str, occurred_at: datetime | None = None) -> dict[str, Any]:
    """The parameters of every marker statement."""
    moment = None if occurred_at is None else moment_in_utc(occurred_at)  # SQLite would drop the zone
    return {"message_id": message_id, "handler": handler, "occurred_at": moment}


def bind_of_marker(session: Session, tables: DedupTables) -> Any:
    """The engine or connection on which the session would insert into the marker table."""
    try:
        return session.get_bind(clause=_insert(tables.marker))
    except UnboundExecutionError:
        raise UnsafeSessionError(
            f"the session has no engine for the table {tables.marker.fullname}: give the sessionmaker bind=, or name "
            "that table in its binds=, with the engine of the read model"
        ) from None


# Statements are built once per table: building an insert() costs as much as running it.


@cache
def _claim_statement(dialect: Dialect, marker: Table, bounded: bool, names: int) -> Executable:
    return dialect.claim_statement(marker, bounded=bounded, names=names)


@cache
def _insert(marker: Table) -> Insert:
    return marker.insert()
