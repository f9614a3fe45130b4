"""Several markers in one transaction, where an INSERT does not say which of its rows were new: look, then insert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import BindParameter, Select, Table, bindparam, select
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import Executable

from ..errors import OvertakenError

Parameters = Mapping[str, Any]
Key = tuple[str, str]
"""Message id and handler."""

_AT_ONCE = 500  # what every database takes in one IN (...)


def key_of(parameters: Parameters) -> Key:
    """What tells one marker from another."""
    return parameters["message_id"], parameters["handler"]


def look_then_insert(
    connection: Connection,
    marker: Table,
    keys: Sequence[Parameters],
    claim_statement: Executable,
    violates_unique: Callable[[DBAPIError], bool],
) -> set[Key]:
    """Claim those of ``keys`` that are not there; returns them. They are compared here, letter for letter."""
    found: set[Key] = set()
    for part in _parts(keys):
        ids = {"message_ids": [each["message_id"] for each in part]}
        found.update((row.message_id, row.handler) for row in connection.execute(_present(marker), ids))
    new = [each for each in keys if key_of(each) not in found]
    try:
        for part in _parts(new):
            connection.execute(claim_statement, part)
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
