"""Build the SQL of a claim on MariaDB and MySQL: an INSERT of the markers, and a SELECT of the one that was there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlalchemy import BINARY, ColumnElement, Select, Table, and_, bindparam, cast, or_, select, text
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import Insert
from sqlalchemy.sql.compiler import SQLCompiler

from ...errors import UnsupportedDatabaseError
from ...message import MAX_HANDLER_BYTES, MAX_MESSAGE_ID_BYTES
from ..claims import Parameters, handler_parameters, inserting
from ..columns import in_utc, utc_now


def marker_row(marker: Table, handler: str = "handler") -> dict[str, ColumnElement[Any]]:
    """Return the values that a claim inserts, by column; ``handler`` is the name of the handler's parameter."""
    return {
        "message_id": bindparam("message_id", type_=marker.c.message_id.type),
        "handler": bindparam(handler, type_=marker.c.handler.type),
        "occurred_at": bindparam("occurred_at", type_=marker.c.occurred_at.type),
        "processed_at": utc_now(),
    }


def insert_statement(marker: Table, *, bounded: bool, names: int) -> Insert:
    """Return an INSERT of a marker for each of ``names`` handler names; if one is there, it fails and inserts none."""
    rows = [marker_row(marker, handler) for handler in handler_parameters(names)]
    return inserting((_BoundedInsert if bounded else Insert)(marker), rows)


_GIVEN = text(
    f"""
    SELECT unhex(message_id), unhex(handler), utc_timestamp(6), occurred_at
    FROM json_table(convert(unhex(:given) USING utf8mb4), '$[*]' COLUMNS (
        message_id VARCHAR({2 * MAX_MESSAGE_ID_BYTES}) CHARACTER SET utf8mb4 PATH '$[0]',
        handler VARCHAR({2 * MAX_HANDLER_BYTES}) CHARACTER SET utf8mb4 PATH '$[1]',
        occurred_at DATETIME(6) PATH '$[2]'
    )) AS given"""  # noqa: S608  # two numbers of our own
)


@cache
def insert_given(marker: Table, *, bounded: bool) -> Insert:
    """Return an INSERT of the rows of ``given``, in their order; if one is there, it fails and inserts none.

    It is one statement for any number of rows. VALUES of many rows would be sent row by row by the drivers, or compiled
    anew by SQLAlchemy.
    """
    insert = (_BoundedInsert if bounded else Insert)(marker)
    return insert.from_select(["message_id", "handler", "processed_at", "occurred_at"], _GIVEN.columns())


def given(keys: Sequence[Parameters]) -> dict[str, str]:
    """Return the parameters of ``insert_given``: JSON in hexadecimal digits, as are its texts (see ``columns``)."""
    rows = [
        (key["message_id"].encode().hex(), key["handler"].encode().hex(), in_utc(key["occurred_at"])) for key in keys
    ]
    bounds = {name: value for name, value in keys[0].items() if name == "wait_ms"}
    return {"given": json.dumps(rows, default=str).encode().hex(), **bounds}


@cache
def met_by_claim(marker: Table, names: int = 1) -> Select[Any]:
    """Return a SELECT that says whether the row with which a claim collided has the same ids, byte for byte.

    It gives no row if there is none. Of several it reads the first only: the claim has not locked those after it, and a
    rival may hold them.
    """
    message_id, handler = marker.c.message_id, marker.c.handler
    asked = bindparam("message_id", type_=message_id.type)
    claimed = [bindparam(name, type_=handler.type) for name in handler_parameters(names)]
    same = and_(cast(message_id, BINARY()) == asked, or_(*(cast(handler, BINARY()) == name for name in claimed)))
    found = select(same).where(message_id == asked, or_(*(handler == name for name in claimed)))
    first = found if names == 1 else found.order_by(handler).limit(1)
    return first.with_for_update(read=True)


class _BoundedInsert(Insert):
    """Fails if the INSERT takes longer than ``:wait_ms``; innodb_lock_wait_timeout knows whole seconds only."""

    inherit_cache = True


@compiles(_BoundedInsert)
def _set_statement(element: _BoundedInsert, compiler: SQLCompiler, **options: Any) -> str:
    if not getattr(compiler.dialect, "is_mariadb", False):
        raise UnsupportedDatabaseError("claim_timeout needs MariaDB: MySQL cannot bound the wait of one statement")
    wait = compiler.process(bindparam("wait_ms"), **options)
    insert = compiler.visit_insert(element, **options)  # type: ignore[no-untyped-call]  # SQLAlchemy's
    # The second setting allows a longer wait than the server's own limit for locks.
    return (
        f"SET STATEMENT max_statement_time = {wait} / 1000, innodb_lock_wait_timeout = {wait} div 1000 + 2 FOR {insert}"
    )
