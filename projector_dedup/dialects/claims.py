"""What the claims of all databases are made of: keys, rows, and a way without an INSERT that says which were new."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Insert,
    Select,
    Table,
    and_,
    bindparam,
    literal_column,
    select,
    union_all,
)
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable

from ..errors import OvertakenError, UnsafeSessionError, UnsupportedDatabaseError

Parameters = Mapping[str, Any]
InsertT = TypeVar("InsertT", bound=Insert)
Key = tuple[str, str]
"""Message id and handler."""

_AT_ONCE = 500  # what every database takes in one IN (...)


@cache
def same_key(marker: Table) -> ColumnElement[bool]:
    """The condition by which a statement finds the marker of ``:message_id, :handler``."""
    return and_(marker.c.message_id == bindparam("message_id"), marker.c.handler == bindparam("handler"))


def handler_parameters(names: int) -> list[str]:
    """The parameters of the handlers in a claim of so many ``names`` of one handler, in the order of their rows."""
    return ["handler"] if names == 1 else [f"handler_{number}" for number in range(names)]


def inserting(statement: InsertT, rows: Sequence[Mapping[str, ColumnElement[Any]]]) -> InsertT:
    """The INSERT ``statement`` of these rows, in this order.

    Several come from SELECTs: VALUES of several rows would be compiled anew for every message.
    """
    if len(rows) == 1:
        return statement.values(rows[0])
    return statement.from_select(list(rows[0]), union_all(*(select(*row.values()) for row in rows)))


def key_of(parameters: Parameters) -> Key:
    """What tells one marker from another."""
    return parameters["message_id"], parameters["handler"]


def inserted(connection: Connection, statement: Executable, parameters: Parameters) -> int:
    """How many rows it was, by a count that costs less than RETURNING; an error where the driver does not say."""
    count = connection.execute(statement, parameters).rowcount
    if count < 0:
        raise UnsupportedDatabaseError("the driver does not say how many rows the claim has inserted")
    return count


def look_then_insert(
    connection: Connection,
    marker: Table,
    keys: Sequence[Parameters],
    insert: Callable[[list[Parameters]], object],
    violates_unique: Callable[[DBAPIError], bool],
) -> set[Key]:
    """Claim those of ``keys`` that are not there; returns them. They are compared here, letter for letter."""
    with suppress(NotImplementedError):  # where nobody can ask, nobody could choose it either
        if connection.get_isolation_level() == "READ UNCOMMITTED":
            raise UnsafeSessionError(
                "at READ UNCOMMITTED the marker of a delivery that is rolled back later would be taken for that of a "
                "duplicate; choose READ COMMITTED or above, or deliver one message at a time"
            )
    found: set[Key] = set()
    for part in _parts(keys):
        ids = {"message_ids": [each["message_id"] for each in part]}
        found.update((row.message_id, row.handler) for row in connection.execute(_present(marker), ids))
    new = [each for each in keys if key_of(each) not in found]
    try:
        for part in _parts(new):
            insert(part)
    except DBAPIError as error:
        if violates_unique(error):
            raise OvertakenError(
                "another delivery claimed one of these messages meanwhile; run the unit of work again"
            ) from error
        raise
    return {key_of(each) for each in new}


def _parts(keys: Sequence[Parameters]) -> Iterator[list[Parameters]]:
    for start in range(0, len(keys), _AT_ONCE):
        yield list(keys[start : start + _AT_ONCE])


@cache
def _present(marker: Table) -> Select[Any]:
    ids: BindParameter[Any] = bindparam("message_ids", expanding=True)
    return select(marker.c.message_id, marker.c.handler).where(marker.c.message_id.in_(ids))


def marker_exists(connection: Connection, marker: Table, key: Parameters) -> bool:
    """True if the marker of ``key`` can be seen; asked past any guard of the connection."""
    return Connection.execute(connection, lookup_statement(marker), key).first() is not None


@cache
def lookup_statement(marker: Table) -> Select[Any]:
    """SELECT a row if the marker of ``:message_id, :handler`` is there."""
    return select(literal_column("1")).select_from(marker).where(same_key(marker))
