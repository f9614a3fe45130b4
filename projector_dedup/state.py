"""The state table: what the deployment of the markers knows of itself, a value for each key."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from sqlalchemy import Executable, Select, Table, bindparam, select
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError

from .tables import DedupTables

SCHEMA_VERSION = "schema_version"  #: of the tables, where our migrations made them
REDELIVERY_HORIZON = "redelivery_horizon_hours"  #: as declared: how long after its first delivery a message may return
RETENTION = "retention_hours"  #: of the last cleanup of all handlers
CLEANED_AT = "cleaned_at"  #: when it ended, ISO 8601, UTC, by the database's clock
PRUNED_UNTIL = "pruned_until"  #: no marker older than this is kept any more, written the same way


def read_state(connection: Connection, tables: DedupTables) -> dict[str, str]:
    """Everything the deployment knows; what was never written is not in it."""
    return {row.key: row.value for row in connection.execute(_everything(tables.state))}


def write_state(connection: Connection, tables: DedupTables, values: Mapping[str, str | None]) -> None:
    """Set ``values``, and forget those that are None, in the caller's transaction; the last writer of a key wins."""
    known = read_state(connection, tables)
    for key, value in values.items():
        row = {"the_key": key, "the_value": value}
        if value is None:
            connection.execute(_forgetting(tables.state), row)
            continue
        if key not in known:  # else an UPDATE that finds nothing would lock the gap, on MariaDB
            try:
                with connection.begin_nested():
                    connection.execute(tables.state.insert(), {"key": key, "value": value})
                continue
            except IntegrityError:  # somebody else was first
                pass
        connection.execute(_changing(tables.state), row)


def advance_state(connection: Connection, tables: DedupTables, key: str, value: str) -> None:
    """Set a ``value`` that never goes back: a later one that somebody wrote meanwhile stays."""
    if key not in read_state(connection, tables):
        write_state(connection, tables, {key: value})
    connection.execute(_advancing(tables.state), {"the_key": key, "the_value": value})


@cache
def _everything(state: Table) -> Select[Any]:
    return select(state.c.key, state.c.value)


@cache
def _changing(state: Table) -> Executable:
    return state.update().where(state.c.key == bindparam("the_key")).values(value=bindparam("the_value"))


@cache
def _advancing(state: Table) -> Executable:
    earlier = (state.c.key == bindparam("the_key")) & (state.c.value < bindparam("the_value"))
    return state.update().where(earlier).values(value=bindparam("the_value"))


@cache
def _forgetting(state: Table) -> Executable:
    return state.delete().where(state.c.key == bindparam("the_key"))
