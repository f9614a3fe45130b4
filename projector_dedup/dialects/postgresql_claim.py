"""The claim on PostgreSQL as SQL: what inserts one marker or many, and what finds this transaction's own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from sqlalchemy import (
    ARRAY,
    CTE,
    DateTime,
    Select,
    Table,
    Text,
    bindparam,
    cast,
    func,
    literal_column,
    select,
    true,
    union_all,
)
from sqlalchemy.dialects.postgresql import Insert, insert
from sqlalchemy.sql import ColumnElement, Executable
from sqlalchemy.types import TypeEngine

from .claims import Parameters, handler_parameters, inserting, same_key

_COLUMNS: dict[str, TypeEngine[Any]] = {
    "message_id": Text(),
    "handler": Text(),
    "occurred_at": DateTime(timezone=True),
}
_CONFLICT = ["message_id", "handler"]  # named, so that a table without the unique index is an error, not a double apply


def insert_markers(marker: Table, *, bounded: bool, names: int) -> Insert:
    """One row for each name that is not there; its row count says how many were not."""
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
    if bounded:
        bound = _bound()
        selects = (select(*row.values()).select_from(bound) for row in rows)
        statement = insert(marker).from_select(list(_COLUMNS), union_all(*selects))
    else:
        statement = inserting(insert(marker), rows)
    return statement.on_conflict_do_nothing(index_elements=_CONFLICT).execution_options(preserve_rowcount=True)


def insert_many(marker: Table, keys: Sequence[Parameters]) -> tuple[Executable, dict[str, Any]]:
    """Any number of rows, and its parameters; it returns the message id and handler of each that was not there."""
    lists = tuple(name for name in _COLUMNS if name != "handler" or len({key["handler"] for key in keys}) > 1)
    shared = [name for name in ("handler", "wait_ms") if name in keys[0] and name not in lists]
    parameters: dict[str, Any] = {f"{name}s": [key[name] for key in keys] for name in lists}
    return _insert_many(marker, lists, "wait_ms" in shared), parameters | {name: keys[0][name] for name in shared}


@cache
def _insert_many(marker: Table, lists: tuple[str, ...], bounded: bool) -> Executable:
    """By an array for each of ``lists``; what is not among them is the same in all rows."""
    arrays = [bindparam(f"{name}s", type_=ARRAY(_COLUMNS[name])) for name in lists]
    given = func.unnest(*arrays).table_valued(*lists, name="given").render_derived()
    rows = select(*(given.c[name] if name in lists else bindparam(name, type_=_COLUMNS[name]) for name in _COLUMNS))
    rows = rows.select_from(given.join(_bound(), true()) if bounded else given)
    statement = insert(marker).from_select(list(_COLUMNS), rows).on_conflict_do_nothing(index_elements=_CONFLICT)
    return statement.returning(marker.c.message_id, marker.c.handler)


def _bound() -> CTE:
    """One round trip for claim and bound; it goes on to bound the lock waits of the handler (docs/adr/0006)."""
    wait = func.set_config("lock_timeout", func.concat(bindparam("wait_ms", type_=Text()), "ms"), True)
    return select(wait.label("wait")).cte("bound").prefix_with("MATERIALIZED")


@cache
def inserted_here(marker: Table) -> Select[Any]:
    """A row if the marker is there, and this transaction inserted it."""
    ours = literal_column("xmin") == literal_column("pg_current_xact_id_if_assigned()::xid")
    return select(literal_column("1")).select_from(marker).where(same_key(marker), ours)
