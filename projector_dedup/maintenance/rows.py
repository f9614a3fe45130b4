"""Find and delete the rows of a message, a command's key or a scope, and rename those of a handler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import takewhile
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Row,
    Select,
    Table,
    bindparam,
    delete,
    exists,
    literal,
    literal_column,
    or_,
    select,
)
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.sql import Delete, Insert

from ..commands import CommandTables, InvalidKeyError, default_command_tables
from ..commands.record import DEFAULT, REJECTED, RESULT, RecordKey
from ..dialects import Dialect, Failure, dialect_of
from ..dialects.columns import now_ms
from ..effects import EffectTables
from ..errors import RefusedError
from ..message import printable, valid_handler, valid_message_id
from ..options import RetryPolicy
from ..tables import DedupTables, default_tables
from .check import verify
from .databases import database_of, in_utc
from .running import PASSING, connected_to, refuse_other_kind, run_with_retries

MAX_BATCH_SIZE = 10_000

_PASSING = (*PASSING, Failure.UNIQUE)  # UNIQUE: a delivery wrote one of the copies meanwhile

STATES = {RESULT: "result", REJECTED: "rejected", DEFAULT: "result not stored", None: "no outcome"}
"""The words for each outcome of a record. One without was committed by ``begin_command`` without ``record``."""


@dataclass(frozen=True)
class Marker:
    """A marker: the record that a handler applied a message, and when. ``age`` is by the database's clock."""

    message_id: str
    handler: str
    processed_at: datetime
    occurred_at: datetime | None
    age: timedelta


def find(engine: Engine, message_id: object, *, tables: DedupTables = default_tables) -> list[Marker]:
    """Return the markers of one message, by handler; none if no handler applied it, or its markers were pruned.

    Raises ``InvalidMessageIdError`` for an id that no message can have, ``MissingTableError`` if the tables are
    missing.
    """
    return [marker for marker, _ in find_rows(engine, valid_message_id(message_id), tables)]


def find_rows(engine: Engine, message_id: str, tables: DedupTables) -> list[tuple[Marker, Row[Any]]]:
    """Return each row of an id, by handler, as a marker and with all columns that its table has."""
    marker = tables.marker
    with connected_to(engine, tables) as connection:
        refuse_other_kind(connection, tables)
        now = database_of(engine).now(connection)
        statement = select(marker).where(marker.c.message_id == message_id).order_by(marker.c.handler)
        rows = connection.execute(statement).all()
    found = []
    for row in rows:
        at = in_utc(row.processed_at)
        occurred = None if row.occurred_at is None else in_utc(row.occurred_at)
        found.append((Marker(row.message_id, row.handler, at, occurred, now - at), row))
    return found


def has_markers(engine: Engine, handler: str, *, tables: DedupTables = default_tables) -> bool:
    """True if the table has a marker of the handler, of whatever age.

    Raises ``RefusedError`` for a name that no handler can have, ``MissingTableError`` if the tables are missing.
    """
    some = select(tables.marker.c.handler).where(tables.marker.c.handler == valid_handler(handler)).limit(1)
    with connected_to(engine, tables) as connection:
        return connection.execute(some).first() is not None


def forget(
    engine: Engine, message_id: object, *, handler: str | None = None, tables: DedupTables = default_tables
) -> int:
    """Delete the markers of one message, or that of one handler, so that a redelivery is applied *again*.

    Returns how many there were. Nothing that was applied is undone: whoever repairs the read model has to do that.

    Raises ``InvalidMessageIdError`` for an id that no message can have, ``RefusedError`` for a name that no handler
    can have and for an effect that is not finished, ``MissingTableError`` if the tables are missing.
    """
    marker, level = tables.marker, database_of(engine).cleanup_isolation
    conditions = [marker.c.message_id == valid_message_id(message_id)]
    if handler is not None:
        conditions.append(marker.c.handler == valid_handler(handler))
    options = {} if level is None else {"isolation_level": level}
    with connected_to(engine, tables) as connection, connection.execution_options(**options).begin():
        refuse_other_kind(connection, tables)
        chosen = select(marker.c.handler, marker.c.processed_at).where(*conditions).with_for_update()
        there = connection.execute(chosen).all()
        _refuse_unfinished(tables, [row.handler for row in there if row.processed_at is None])
        connection.execute(delete(marker).where(*conditions, *_finished(tables)))
    return len(there)


def _finished(tables: DedupTables) -> list[ColumnElement[bool]]:
    """Return the condition that a row may be deleted: an effect, only if it has its outcome."""
    return [tables.marker.c.processed_at.is_not(None)] if isinstance(tables, EffectTables) else []


def _refuse_unfinished(tables: DedupTables, names: Sequence[str]) -> None:
    """Raise ``RefusedError`` if an effect of one of these ``names`` is not finished."""
    if names and isinstance(tables, EffectTables):
        raise RefusedError(
            f"{', '.join(printable(name) for name in names)}: an effect that is not finished is not forgotten, or "
            "nobody would know that it may have been done. Let `idempotency effects settle` finish it, or decide it "
            "with `idempotency effects resolve`, and forget it then"
        )


# Records of commands ----------------------------------------------------------------------------------------------


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


def forget_scope(
    engine: Engine,
    scope: object,
    *,
    operation: str | None = None,
    tables: DedupTables = default_command_tables,
    on_batch: Callable[[int], None] | None = None,
    batch_size: int = 1_000,
) -> int:
    """Delete every record of a scope, such as a tenant, or those of one operation in it; return how many there were.

    Effects of the scope are deleted in the same way. Those that are not finished are left.

    Their commands are handled *again* when they are asked for again. Every batch is a short transaction, so a run that
    was interrupted can be run again. Commands that are handled meanwhile may leave records behind the run.
    ``on_batch`` is called with the number of records that a batch deleted, and may raise to end the run.

    Raises ``InvalidKeyError`` for a scope that no command can have, ``MissingTableError`` as ``find_records`` does, and
    ``RetriesExhaustedError`` for an error that did not pass.
    """
    if scope is None:
        raise InvalidKeyError("say whose records are meant: a scope is a text or a UUID, such as a tenant")
    operation = None if operation is None else valid_handler(operation)
    record, prefix = tables.marker, RecordKey.of("x", scope).stored.removesuffix("x")
    verify(engine, tables)
    dialect = dialect_of(engine)
    dialect.prepare(engine)
    look, after = _next_rows(record, batch_size), {"message_id": prefix, "handler": ""}

    def batch(connection: Connection) -> tuple[Sequence[Row[Any]], int]:
        dialect.begin(connection, None, None)
        # The keys of a scope are neighbours in the primary key, and begin with the scope and its length, which no key
        # of another scope does: "1:a" is not "2:ab". Nothing behind the first that does not begin so is taken, so that
        # no other scope's is touched, however the database compares texts.
        page = list(takewhile(lambda row: row.message_id.startswith(prefix), connection.execute(look, after)))
        these = [row for row in page if operation in (None, row.handler)]
        number = 0
        for name in {row.handler for row in these}:
            ids = [row.message_id for row in these if row.handler == name]
            one_operation = (record.c.handler == name) & record.c.message_id.in_(ids)
            number += connection.execute(delete(record).where(one_operation, *_finished(tables))).rowcount
        return page, number

    deleted = 0
    while True:
        page, number = run_with_retries(batch, engine, dialect, RetryPolicy())
        if not page:
            return deleted
        after = {"message_id": page[-1].message_id, "handler": page[-1].handler}
        deleted += number
        if on_batch is not None and number:
            on_batch(number)


def _next_rows(record: Table, size: int) -> Select[Any]:
    """Return a SELECT of the rows behind ``:message_id`` and ``:handler``, in the order of the primary key."""
    message_id, handler = (bindparam(column.name, type_=column.type) for column in record.primary_key)
    behind = or_(record.c.message_id > message_id, record.c.handler > handler)
    return (
        select(record.c.message_id, record.c.handler)
        .where(record.c.message_id >= message_id, behind)  # the first alone finds the place in the index
        .order_by(record.c.message_id, record.c.handler)
        .limit(size)
    )


# A handler that got another name ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Renamed:
    """The number of markers of the old name that were copied, that the new name had already, that were removed."""

    copied: int = 0
    already: int = 0
    removed: int = 0

    def __add__(self, other: Renamed) -> Renamed:
        return Renamed(self.copied + other.copied, self.already + other.already, self.removed + other.removed)


def rename(
    engine: Engine,
    old: str,
    new: str,
    *,
    tables: DedupTables = default_tables,
    batch_size: int = 1_000,
    remove_old: bool = False,
    dry_run: bool = False,
    on_batch: Callable[[Renamed], None] | None = None,
) -> Renamed:
    """Copy every marker of the handler ``old`` to the name ``new``, with the same times, and return how many.

    An effect is moved, not copied, since a copy of an unfinished one would be sent beside it: it takes ``remove_old``,
    and no process may know the old name any more. It is refused while an attempt under the old name is running.

    Afterwards ``formerly=["..."]`` can be removed from the code. Run it when every process knows the new name: until
    then, code of the old name goes on writing markers that have no copy. The markers of ``old`` stay until cleanup
    deletes them, so that a deploy can be rolled back; ``remove_old`` removes them in the same transactions.

    Every batch of at most ``batch_size`` markers is a short transaction. ``on_batch`` is called after each with the
    sum so far, and may raise to end the run. A run that was interrupted can be run again. ``dry_run`` writes nothing.
    A batch that a deadlock or a lost connection undid is tried again, for some seconds.

    Raises ``RefusedError`` for a name that no handler can have, for effects as said above, and if neither name has a
    marker, perhaps because one is misspelt; ``ValueError`` if both names are the same, or ``batch_size`` is out of
    range; ``MissingTableError`` for a missing table; ``RetriesExhaustedError`` for an error that did not pass.
    """
    if valid_handler(old) == valid_handler(new):
        raise ValueError(f"{printable(old)} has this name already; give the old name and another one")
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise ValueError(f"batch_size must be between 1 and {MAX_BATCH_SIZE:,}, not {batch_size}")
    verify(engine, tables)
    dialect = dialect_of(engine)
    dialect.prepare(engine)
    if isinstance(tables, EffectTables) and not remove_old:
        raise RefusedError(
            f"an effect is moved to another name, not copied: a copy of {printable(old)} would be sent beside it. Stop "
            "every process that knows the old name, and say remove_old=True (--remove-old)"
        )
    batch = _Batch(tables.marker, old, new, batch_size, remove_old=remove_old, dry_run=dry_run)
    policy = RetryPolicy()
    total, last = Renamed(), ""  # the empty text is before every id
    while True:
        renamed, last = run_with_retries(partial(batch.run, dialect, last), engine, dialect, policy, _PASSING)
        if renamed == Renamed():
            break
        total += renamed
        if on_batch is not None:
            on_batch(total)
    if total == Renamed() and not run_with_retries(batch.new_is_known, engine, dialect, policy):
        raise RefusedError(
            f"neither {printable(old)} nor {printable(new)} has a {tables.noun} in {tables.marker.fullname}: look at "
            "the spelling of the names, and at the table's name and schema"
        )
    return total


class _Batch:
    """The statements of one run; each batch begins behind the id with which the batch before it ended."""

    def __init__(self, marker: Table, old: str, new: str, batch_size: int, *, remove_old: bool, dry_run: bool) -> None:
        self._marker, self._old, self._new = marker, old, new
        self._remove_old, self._dry_run = remove_old, dry_run
        self._look, self._copy, self._remove = self._looking(batch_size), self._copying(), self._removing()
        self._effects = self._locking() if "lease_until" in marker.c else None

    def run(self, dialect: Dialect, after: str, connection: Connection) -> tuple[Renamed, str]:
        """Copy, or in a dry run only count, the batch that follows the id ``after``.

        Returns the counts and the last id of the batch; nothing and ``after`` if no marker follows.
        """
        if not self._dry_run:
            dialect.begin(connection, None, None)
        found = connection.execute(self._look, {"after": after}).all()
        if not found:
            return Renamed(), after
        ids, already = [row.message_id for row in found], sum(row.twin is not None for row in found)
        if self._effects is not None:
            twins = {row.message_id for row in found if row.twin is not None}
            for effect in connection.execute(self._effects, {"ids": ids}).all():
                if effect.running or (effect.processed_at is None and effect.message_id in twins):
                    raise RefusedError(
                        f"an effect under the name {printable(self._old)} is running, or is not finished and is armed "
                        "under the new name too: stop every process that knows the old name, wait for the end of the "
                        "leases, decide effects that are there twice, and run this again"
                    )
        if not self._dry_run:
            if already < len(found):
                connection.execute(self._copy, {"after": after, "last": ids[-1]})
            if self._remove_old:
                connection.execute(self._remove, {"ids": ids})
        return Renamed(len(found) - already, already, len(found) if self._remove_old else 0), ids[-1]

    def new_is_known(self, connection: Connection) -> bool:
        """True if the new name has a marker."""
        known = select(self._marker.c.message_id).where(self._marker.c.handler == self._new).limit(1)
        return connection.execute(known).first() is not None

    def _looking(self, batch_size: int) -> Select[tuple[str, str | None]]:
        source, twin = self._marker.alias("source"), self._marker.alias("twin")
        same = (twin.c.message_id == source.c.message_id) & (twin.c.handler == self._new)
        return (
            select(source.c.message_id, twin.c.handler.label("twin"))
            .select_from(source.outerjoin(twin, same))
            .where(source.c.handler == self._old, source.c.message_id > bindparam("after"))
            .order_by(source.c.message_id)
            .limit(batch_size)
        )

    def _locking(self) -> Select[Any]:
        """Return a SELECT that locks the effects of a batch: no attempt begins between the copy and the removal."""
        old = self._marker
        these = (old.c.handler == self._old) & old.c.message_id.in_(bindparam("ids", expanding=True))
        running = (old.c.lease_until > now_ms()).label("running")
        return select(old.c.message_id, old.c.processed_at, running).where(these).with_for_update()

    def _copying(self) -> Insert:
        source, twin = self._marker.alias("source"), self._marker.alias("twin")
        name = literal(self._new, self._marker.c.handler.type).label("handler")
        columns = [column.name for column in self._marker.columns]
        copies = select(*(name if each == "handler" else source.c[each] for each in columns)).where(
            source.c.handler == self._old,
            source.c.message_id > bindparam("after"),
            source.c.message_id <= bindparam("last"),
            ~exists(literal_column("1"))
            .select_from(twin)
            .where(twin.c.message_id == source.c.message_id, twin.c.handler == self._new)
            .correlate(source),
        )
        return self._marker.insert().from_select(columns, copies)

    def _removing(self) -> Delete:
        # Only markers that this batch has read, which have a copy by now: old code may have written others since.
        seen = self._marker.c.message_id.in_(bindparam("ids", expanding=True))
        return delete(self._marker).where(self._marker.c.handler == self._old, seen)
