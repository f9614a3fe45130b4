"""Markers: claim one or many by the dialect's statement, say what its errors mean, and find the marker table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import Insert, Row, Table, inspect
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError, UnboundExecutionError
from sqlalchemy.orm import Session
from sqlalchemy.sql import Executable

from .dialects import Dialect, Failure, handler_parameters, key_of
from .dialects.cacheable_tables import Wanted
from .errors import InProgress, MissingTableError, UnsafeSessionError
from .message import moment_in_utc, valid_handler, valid_message_id
from .tables import DedupTables

COMMITTED_AT_ONCE = "the driver committed the claim at once; turn its AUTOCOMMIT off"


def insert_marker(
    connection: Connection,
    dialect: Dialect,
    tables: DedupTables,
    key: Mapping[str, Any],
    formerly: Collection[str] = (),
    *,
    wait: float | None = None,
) -> bool:
    """Claim a message by one statement, which checks and writes: True if it is new, False if it is a duplicate.

    It is claimed under the names ``formerly``, too, and new only if it is new under each. Raises ``InProgress`` when it
    has waited ``wait`` seconds for a rival, ``MissingTableError``, and the database's error for anything else.
    """
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
    keys: Mapping[str, Mapping[str, Any]],
    formerly: Collection[str] = (),
    wait: float | None = None,
) -> list[str]:
    """Claim several messages, given by their ids; return the ids that are new, under each of their names.

    May raise ``OvertakenError``, after which nothing of it may commit; else raises what ``insert_marker`` raises.
    """
    names = {key["handler"] for key in keys.values()} | {*formerly}
    claims = [{**key, "handler": name} for key in keys.values() for name in names]
    # In one order everywhere, so that two who claim the same do not wait for each other.
    in_order = sorted(claims if wait is None else (_bounded(key, wait) for key in claims), key=key_of)
    dialect.refuse_marker(connection, tables.marker)
    try:
        inserted = dialect.claim_many(connection, tables.marker, in_order)
    except DBAPIError as error:
        _raise_what_it_means(error, connection, dialect, tables, wait)
        raise
    return [message_id for message_id in keys if all((message_id, name) in inserted for name in names)]


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


def marker_key(message_id: str, handler: str, occurred_at: datetime | None = None) -> dict[str, Any]:
    """Return the parameters of every marker statement."""
    moment = None if occurred_at is None else moment_in_utc(occurred_at)  # SQLite would drop the zone
    return {"message_id": message_id, "handler": handler, "occurred_at": moment}


def valid_key(message_id: object, handler: str, occurred_at: datetime | None = None) -> dict[str, Any]:
    """Return the parameters of a claim, or raise ``InvalidMessageIdError`` or ``RefusedError``."""
    return marker_key(valid_message_id(message_id), valid_handler(handler), occurred_at)


def valid_keys(messages: Iterable[tuple[object, datetime | None]], handler: str) -> dict[str, dict[str, Any]]:
    """Return the parameters of several claims by message id; of an id that comes twice, those of the first."""
    keys: dict[str, dict[str, Any]] = {}
    for message_id, occurred_at in messages:
        key = valid_key(message_id, handler, occurred_at)
        keys.setdefault(key["message_id"], key)
    if not keys:
        raise UnsafeSessionError("claim_many() of no message: there would be nothing to commit")
    return keys


def bind_of_marker(session: Session, tables: DedupTables) -> Any:
    """Return the engine or connection on which the session would insert into the marker table."""
    try:
        return session.get_bind(clause=_insert(tables.marker))
    except UnboundExecutionError:
        raise UnsafeSessionError(
            f"the session has no engine for the table {tables.marker.fullname}: give the sessionmaker bind=, or name "
            "that table in its binds=, with the engine of the read model"
        ) from None


def bind_of_session(session: Session) -> Any:
    """Return the engine or connection of a session that claims nothing."""
    try:
        return session.get_bind()
    except UnboundExecutionError:
        raise UnsafeSessionError("the session has no engine to begin with: give the sessionmaker bind=") from None


def refuse_elsewhere(session: Session, bind: Engine | Connection, model: type[Any]) -> None:
    """Raise ``UnsafeSessionError`` if the session reads an entity on another engine than that of its marker."""
    try:
        its_bind = session.get_bind(mapper=inspect(model))
    except UnboundExecutionError:
        its_bind = None
    if its_bind is not bind:
        raise UnsafeSessionError(
            f"the session reads {model.__name__} on another engine than that of the transaction, with which its "
            "changes could not commit; give the dispatcher a sessionmaker with one engine, the one that writes"
        )


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
    """Return the ``schema_translate_map`` by which the connection finds the marker now."""
    return connection.get_execution_options().get("schema_translate_map")


# A statement is built once for each table: building an insert() costs as much as running it.


@cache
def _claim_statement(dialect: Dialect, marker: Table, bounded: bool, names: int) -> Executable:
    return dialect.claim_statement(marker, bounded=bounded, names=names)


@cache
def _insert(marker: Table) -> Insert:
    return marker.insert()
