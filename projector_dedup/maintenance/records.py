"""The records of commands: ``find_records`` lists those of a key, ``forget_scope`` deletes those of a tenant, say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

from sqlalchemy import Row, Select, Table, bindparam, delete, func, or_, select
from sqlalchemy.engine import Connection, Engine

from ..commands import CommandTables, InvalidKeyError, default_command_tables
from ..commands.record import DEFAULT, REJECTED, RESULT, RecordKey
from ..commands.runner import MAX_RESULT_BYTES
from ..dialects import Dialect, Finding, advice, dialect_of
from ..message import valid_handler
from ..options import RetryPolicy
from .check import verify
from .connection import connected_to
from .markers import Marker, find_rows, forget
from .retrying import run_with_retries

STATES = {RESULT: "result", REJECTED: "rejected", DEFAULT: "result not stored", None: "no outcome"}
"""The words for each outcome of a record. One without was committed by ``begin_command`` without ``record``."""

_SAMPLE = 1_000  # newest records that are looked at for advice
_NEAR = 0.9  # of the largest result, from which on there is advice


@dataclass(frozen=True)
class StoredRecord(Marker):
    """A record as it is stored: a marker whose ``handler`` is the operation, with what everybody is answered."""

    key: str
    scope: str | None
    outcome: int | None
    codec: str | None
    result: bytes | None

    @property
    def state(self) -> str:
        """The outcome in words."""
        return STATES.get(self.outcome, f"unknown outcome {self.outcome}")


def find_records(
    engine: Engine, key: object, *, scope: object = None, tables: CommandTables = default_command_tables
) -> list[StoredRecord]:
    """Return the records of one key in one scope, by operation; none if no command was handled, or all were pruned.

    Raises ``InvalidKeyError`` for a key or a scope that no command can have, ``MissingTableError`` if the tables are
    missing, or are those of projectors.
    """
    asked = RecordKey.of(key, scope)
    return [
        StoredRecord(
            **vars(marker),
            key=asked.key,
            scope=asked.scope,
            outcome=row.outcome,
            codec=row.codec,
            result=None if row.result is None else bytes(row.result),
        )
        for marker, row in find_rows(engine, asked.stored, tables)
    ]


def forget_record(
    engine: Engine,
    key: object,
    *,
    operation: str,
    scope: object = None,
    tables: CommandTables = default_command_tables,
) -> int:
    """Delete the record of one command, so that it is handled *again* when it is asked for again.

    Returns how many there were, 0 or 1. Nothing that the command did is undone.

    Raises ``InvalidKeyError`` for a key or a scope that no command can have, ``RefusedError`` for a name that no
    operation can have, ``MissingTableError`` if the tables are missing, or are those of projectors.
    """
    return forget(engine, RecordKey.of(key, scope).stored, handler=operation, tables=tables)


def count_scope(
    engine: Engine,
    scope: object,
    *,
    operation: str | None = None,
    tables: CommandTables = default_command_tables,
    up_to: int = 100_000,
) -> Counter[str]:
    """Return how many records each operation has in a scope; counting ends when there are ``up_to`` or more.

    Raises ``InvalidKeyError`` for a scope that no command can have, and ``MissingTableError`` as ``find_records`` does.
    """
    of, counted = _Scope(tables.marker, scope, operation, 10_000), Counter[str]()
    verify(engine, tables)
    with connected_to(engine, tables) as connection:
        while (page := of.page(connection)) and counted.total() < up_to:
            counted.update(row.handler for row in of.chosen(page))
            of.go_on(page)
    return counted


def forget_scope(
    engine: Engine,
    scope: object,
    *,
    operation: str | None = None,
    tables: CommandTables = default_command_tables,
    on_batch: Callable[[int], None] | None = None,
    batch_size: int = 1_000,
) -> int:
    """Delete every record of a scope, such as a tenant, or those of one operation in it; return how many there were.

    Their commands are handled *again* when they are asked for again. Every batch is a short transaction, so a run that
    was interrupted can be run again. Commands that are handled meanwhile may leave records behind the run.
    ``on_batch`` is called with the number of records that a batch deleted, and may raise to end the run.

    Raises ``InvalidKeyError`` for a scope that no command can have, ``MissingTableError`` as ``find_records`` does, and
    ``RetriesExhaustedError`` for an error that did not pass.
    """
    of, deleted = _Scope(tables.marker, scope, operation, batch_size), 0
    verify(engine, tables)
    dialect = dialect_of(engine)
    dialect.prepare(engine)
    while True:
        page, number = run_with_retries(partial(of.delete_page, dialect), engine, dialect, RetryPolicy())
        if not page:
            return deleted
        of.go_on(page)
        deleted += number
        if on_batch is not None and number:
            on_batch(number)


class _Scope:
    """The records of one scope, a page at a time, in the order of the primary key, in which they are neighbours.

    Their stored keys begin with the scope and its length, which no key of another scope does: "1:a" is not "2:ab". Of
    each page only the rows that begin so are taken, and none behind the first that does not, so that no other scope's
    is touched, however the database compares texts.
    """

    def __init__(self, record: Table, scope: object, operation: str | None, size: int) -> None:
        if scope is None:
            raise InvalidKeyError("say whose records are meant: a scope is a text or a UUID, such as a tenant")
        self._prefix = RecordKey.of("x", scope).stored.removesuffix("x")
        self._record = record
        self._operation = None if operation is None else valid_handler(operation)
        self._after = {"message_id": self._prefix, "handler": ""}
        self._statement = _page(record, size)

    def page(self, connection: Connection) -> Sequence[Row[Any]]:
        """Return the next rows of the scope; none at its end."""
        rows = connection.execute(self._statement, self._after).all()
        return list(takewhile(lambda row: row.message_id.startswith(self._prefix), rows))

    def chosen(self, page: Sequence[Row[Any]]) -> Iterator[Row[Any]]:
        """Yield the rows of the operation that was asked for."""
        return (row for row in page if self._operation in (None, row.handler))

    def go_on(self, page: Sequence[Row[Any]]) -> None:
        """Begin the next page behind this one."""
        self._after = {"message_id": page[-1].message_id, "handler": page[-1].handler}

    def delete_page(self, dialect: Dialect, connection: Connection) -> tuple[Sequence[Row[Any]], int]:
        """Delete the chosen rows of the next page; return the page, and how many were deleted."""
        dialect.begin(connection, None, None)
        record, page, deleted = self._record, self.page(connection), 0
        by_operation: dict[str, list[str]] = {}
        for row in self.chosen(page):
            by_operation.setdefault(row.handler, []).append(row.message_id)
        for operation, ids in by_operation.items():
            these = (record.c.handler == operation) & record.c.message_id.in_(ids)
            deleted += connection.execute(delete(record).where(these)).rowcount
        return page, deleted


def _page(record: Table, size: int) -> Select[Any]:
    message_id, handler = (bindparam(column.name, type_=column.type) for column in record.primary_key)
    behind = or_(record.c.message_id > message_id, record.c.handler > handler)
    return (
        select(record.c.message_id, record.c.handler)
        .where(record.c.message_id >= message_id, behind)  # the first alone finds the place in the index
        .order_by(record.c.message_id, record.c.handler)
        .limit(size)
    )


def advise_records(engine: Engine, tables: CommandTables) -> list[Finding]:
    """Return what somebody should do about the newest records of ``tables``; none of it is fatal."""
    record = tables.marker
    newest = (
        select(record.c.outcome, func.length(record.c.result).label("bytes"))
        .order_by(record.c.processed_at.desc())
        .limit(_SAMPLE)
    )
    with connected_to(engine, tables) as connection:
        rows = connection.execute(newest).all()
    sizes = [row.bytes for row in rows if row.bytes is not None and row.bytes > _NEAR * MAX_RESULT_BYTES]
    open_ = sum(row.outcome is None for row in rows)
    found = []
    if sizes:
        found.append(
            advice(
                f"of the newest {len(rows):,} records, {len(sizes):,} have results near the limit of "
                f"{MAX_RESULT_BYTES:,} bytes, the largest of {max(sizes):,}",
                "a larger one is refused, and its command is not done: return an id of what was made, or give "
                "Commands(max_result_bytes=...)",
            )
        )
    if open_:
        found.append(
            advice(
                f"of the newest {len(rows):,} records, {open_:,} have no outcome",
                "begin_command() was committed without record(), so that nobody who asks again gets an answer; "
                "`idempotency forget --commands` frees their keys",
            )
        )
    return found
