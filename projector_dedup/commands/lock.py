"""Locks: commands with the same lock key run one after the other, each until its COMMIT.

A lock is a row in the record table, under a reserved operation name. The first statement of each transaction updates
this row, so a second command waits for the COMMIT of the first before it reads anything. At REPEATABLE READ and above
PostgreSQL refuses the second update, and the library retries the whole transaction. So no command uses values that it
read before it had the lock (docs/adr/0012-commands.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from uuid import UUID

from sqlalchemy import Table
from sqlalchemy.engine import Connection
from sqlalchemy.sql import Executable

from ..dialects import Dialect
from ..errors import HandlerDefinitionError
from ..markers import bounded_key, library_errors, marker_key
from .record import CommandTables, RecordKey

LOCK = "projector_dedup.lock"  #: the operation name under which locks are stored

LockKey = str | int | UUID
LockFunction = Callable[[Any], LockKey | Sequence[LockKey]]


def keys_of(identity: str, function: LockFunction | None, command: object, scope: str | None) -> tuple[str, ...]:
    """Return the stored keys of the rows to lock, sorted, so that two commands do not deadlock.

    Raises ``HandlerDefinitionError`` for a lock key of a wrong type, and ``InvalidKeyError`` for one that is too long.
    """
    if function is None:
        return ()
    given: object = function(command)
    several = given if isinstance(given, tuple | list) else (given,)
    for each in several:
        if isinstance(each, bool) or not isinstance(each, str | int | UUID):
            raise HandlerDefinitionError(
                f"lock= of {identity} returned {type(each).__name__}; it must return a text, an int or a UUID, or a "
                "list of them"
            )
    return tuple(sorted({RecordKey.of(str(each), scope).stored for each in several}))


def take(
    connection: Connection, dialect: Dialect, tables: CommandTables, keys: Sequence[str], wait: float | None
) -> None:
    """Lock the rows until the transaction ends. Raises ``InProgress`` if that takes more than ``wait`` seconds."""
    dialect.refuse_marker(connection, tables.marker)
    statement, began = _statement(dialect, tables.marker, wait is not None), time.monotonic()
    with library_errors(connection, dialect, tables, wait):
        for key in keys:
            left = None if wait is None else wait - (time.monotonic() - began)
            connection.execute(statement, bounded_key(marker_key(key, LOCK), left))


@cache
def _statement(dialect: Dialect, table: Table, bounded: bool) -> Executable:
    return dialect.lock_statement(table, bounded=bounded)
