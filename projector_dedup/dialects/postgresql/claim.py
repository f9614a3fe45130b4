"""Build and run the SQL of a claim on PostgreSQL: an INSERT of one marker or of many."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlalchemy import (
    ARRAY,
    DateTime,
    Delete,
    Insert,
    Subquery,
    Table,
    Text,
    bindparam,
    cast,
    delete,
    func,
    literal_column,
    select,
    true,
    union_all,
)
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection
from sqlalchemy.sql import ColumnElement, Executable
from sqlalchemy.types import TypeEngine

from ..claims import Key, Parameters, handler_parameters, key_of
from .standby import WRITTEN_FOR_STANDBY

_COLUMNS: dict[str, TypeEngine[Any]] = {
    "message_id": Text(),
    "handler": Text(),
    "occurred_at": DateTime(timezone=True),
}
_CONFLICT = ["message_id", "handler"]  # named, so that a table without the unique index is an error, not a double apply


def insert_statement(marker: Table, *, bounded: bool, names: int) -> Insert:
    """Return an INSERT of a marker for each of ``names`` handler names that is not there.

    Its row count says how many are new; for several names RETURNING says which.
    """
    occurred_at: ColumnElement[Any] = bindparam("occurred_at", type_=_COLUMNS["occurred_at"])
    if names > 1:
        occurred_at = cast(occurred_at, _COLUMNS["occurred_at"])  # psycopg2's NULL would be text in a UNION
    rows: list[dict[str, ColumnElement[Any]]] = [
        {
            "message_id": bindparam("message_id", type_=Text()),
            "handler": bindparam(handler, type_=Text()),
            "occurred_at": occurred_at,
        }
        for handler in handler_parameters(names)
    ]
    before = _before(bounded=bounded)
    selects = [select(*row.values()).select_from(before) for row in rows]
    given = selects[0] if names == 1 else union_all(*selects)
    statement = insert(marker).from_select(list(_COLUMNS), given)
    statement = statement.on_conflict_do_nothing(index_elements=_CONFLICT).execution_options(preserve_rowcount=True)
    return statement if names == 1 else statement.returning(marker.c.handler)


def claim_names(connection: Connection, marker: Table, message_id: str, new: Sequence[str], names: int) -> bool:
    """True if a claim of several ``names`` inserted a marker for each; else delete those of ``new`` again."""
    if len(new) == names:
        return True
    _take_back(connection, marker, [(message_id, handler) for handler in new])
    return False


def claim_many(connection: Connection, marker: Table, keys: Sequence[Parameters]) -> set[Key]:
    """Claim any number of markers in one statement; return those of messages that are new under all their names."""
    new = {(row[0], row[1]) for row in connection.execute(*_insert(marker, keys)).all()}
    known = {each["message_id"] for each in keys if key_of(each) not in new}
    beside = {key for key in new if key[0] in known}
    _take_back(connection, marker, sorted(beside))
    return new - beside


def _take_back(connection: Connection, marker: Table, keys: Sequence[Key]) -> None:
    """Delete markers that a duplicate got under its other names: its transaction commits, and must leave none."""
    if keys:
        message_ids, handlers = zip(*keys, strict=True)
        connection.execute(_delete(marker), {"message_ids": list(message_ids), "handlers": list(handlers)})


def _insert(marker: Table, keys: Sequence[Parameters]) -> tuple[Executable, dict[str, Any]]:
    """Return an INSERT of any number of markers, and its parameters; it gives the key of each one that is new."""
    lists = tuple(name for name in _COLUMNS if name != "handler" or len({key["handler"] for key in keys}) > 1)
    shared = [name for name in ("handler", "wait_ms") if name in keys[0] and name not in lists]
    parameters: dict[str, Any] = {f"{name}s": [key[name] for key in keys] for name in lists}
    return _insert_many(marker, lists, "wait_ms" in shared), parameters | {name: keys[0][name] for name in shared}


@cache
def _insert_many(marker: Table, lists: tuple[str, ...], bounded: bool) -> Executable:
    """Return an INSERT with an array for each column of ``lists``; the other columns are the same in all rows."""
    arrays = [bindparam(f"{name}s", type_=ARRAY(_COLUMNS[name])) for name in lists]
    given = func.unnest(*arrays).table_valued(*lists, name="given").render_derived()
    rows = select(*(given.c[name] if name in lists else bindparam(name, type_=_COLUMNS[name]) for name in _COLUMNS))
    rows = rows.select_from(given.join(_before(bounded=bounded), true()))
    statement = insert(marker).from_select(list(_COLUMNS), rows).on_conflict_do_nothing(index_elements=_CONFLICT)
    return statement.returning(marker.c.message_id, marker.c.handler)


def _before(*, bounded: bool) -> Subquery:
    """Return a subquery that runs before the INSERT, in the statement of the claim.

    It writes for the standby, because a duplicate must wait for that as well (docs/adr/0024). If ``bounded``, it also
    bounds the claim's wait for locks; the bound holds for the handler's lock waits too (docs/adr/0006).
    """
    columns: list[ColumnElement[Any]] = [WRITTEN_FOR_STANDBY.label("standby")]
    if bounded:
        wait = func.set_config("lock_timeout", func.concat(bindparam("wait_ms", type_=Text()), "ms"), True)
        columns.append(wait.label("wait"))
    return select(*columns).offset(literal_column("0")).subquery("before")  # OFFSET keeps it a subquery of its own


@cache
def _delete(marker: Table) -> Delete:
    """Return a DELETE of the markers whose keys are given by two arrays."""
    arrays = [bindparam(f"{name}s", type_=ARRAY(Text())) for name in _CONFLICT]
    given = func.unnest(*arrays).table_valued(*_CONFLICT, name="given").render_derived()
    return delete(marker).where(*(marker.c[name] == given.c[name] for name in _CONFLICT))
