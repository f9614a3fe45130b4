"""The common parts of all databases' claims: keys, rows, and a claim of many messages by SELECT and INSERT."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Insert,
    Select,
    Table,
    bindparam,
    literal_column,
    select,
    union_all,
)
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from ..errors import OvertakenError, UnsafeSessionError

Parameters = Mapping[str, Any]
InsertT = TypeVar("InsertT", bound=Insert)
T = TypeVar("T")
Key = tuple[str, str]
"""The message id and the handler, which identify a marker."""

_AT_ONCE = 500  # every database accepts this many values in one IN (...)


def handler_parameters(names: int) -> list[str]:
    """Return the names of the handler parameters in a claim that inserts ``names`` markers, in the order of the rows.

    There are several if the handler has former names.
    """
    return ["handler"] if names == 1 else [f"handler_{number}" for number in range(names)]


def inserting(statement: InsertT, rows: Sequence[Mapping[str, ColumnElement[Any]]]) -> InsertT:
    """Return the INSERT ``statement`` with the values of ``rows``, in this order.

    Several rows come from SELECTs, because SQLAlchemy would compile VALUES of several rows again for every message.
    """
    if len(rows) == 1:
        return statement.values(rows[0])
    return statement.from_select(list(rows[0]), union_all(*(select(*row.values()) for row in rows)))


def key_of(parameters: Parameters) -> Key:
    """Return the key of the marker that a claim with these parameters inserts."""
    return parameters["message_id"], parameters["handler"]


def look_then_insert(
    connection: Connection,
    marker: Table,
    keys: Sequence[Parameters],
    insert: Callable[[list[Parameters]], object],
    violates_unique: Callable[[DBAPIError], bool],
) -> set[Key]:
    """SELECT the existing markers of ``keys``, INSERT the others with ``insert``, and return the inserted keys.

    The function compares keys exactly, because the database may treat two ids as equal. Raises ``UnsafeSessionError``
    at READ UNCOMMITTED, and ``OvertakenError`` if another delivery inserted a marker meanwhile.
    """
    if connection.get_isolation_level() == "READ UNCOMMITTED":
        raise UnsafeSessionError(
            "at READ UNCOMMITTED a message would count as a duplicate if another delivery of it is rolled back later; "
            "choose READ COMMITTED or above, or deliver one message at a time"
        )
    found: set[Key] = set()
    for part in parts(keys):
        ids = {"message_ids": [each["message_id"] for each in part]}
        found.update((row.message_id, row.handler) for row in connection.execute(_present(marker), ids))
    new = [each for each in keys if key_of(each) not in found]
    try:
        for part in parts(new):
            insert(part)
    except DBAPIError as error:
        if violates_unique(error):
            raise OvertakenError(
                "another delivery claimed one of these messages meanwhile; run the unit of work again"
            ) from error
        raise
    return {key_of(each) for each in new}


def parts(keys: Sequence[T]) -> Iterator[list[T]]:
    """Yield the keys in their order, as many at a time as one IN (...) may have."""
    for start in range(0, len(keys), _AT_ONCE):
        yield list(keys[start : start + _AT_ONCE])


@cache
def _present(marker: Table) -> Select[Any]:
    ids: BindParameter[Any] = bindparam("message_ids", expanding=True)
    return select(marker.c.message_id, marker.c.handler).where(marker.c.message_id.in_(ids))


def marker_exists(connection: Connection, marker: Table, key: Parameters) -> bool:
    """True if the transaction sees the marker of ``key``. The SELECT bypasses the guard of the connection."""
    return Connection.execute(connection, lookup_statement(marker), key).first() is not None


@cache
def lookup_statement(marker: Table) -> Select[Any]:
    """Return a SELECT that returns a row if the marker of ``:message_id`` and ``:handler`` exists."""
    same = (marker.c.message_id == bindparam("message_id"), marker.c.handler == bindparam("handler"))
    return select(literal_column("1")).select_from(marker).where(*same)
