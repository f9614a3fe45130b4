"""Find and delete the rows of a message, of a command's key or of a scope, and rename the rows of a handler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
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
    select,
)
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.sql import Delete, Insert

from ..commands import CommandTables, default_command_tables
from ..commands.record import DEFAULT, REJECTED, RESULT, RecordKey
from ..dialects import Dialect, Failure, dialect_of
from ..dialects.columns import now_ms
from ..effects import EffectTables
from ..errors import RefusedError
from ..late import in_utc
from ..message import printable, valid_handler, valid_message_id
from ..options import RetryPolicy
from ..tables import DedupTables, default_tables
from .databases import database_of
from .rebuilds import refuse_kept
from .running import PASSING, connected_to, run_with_retries
from .schema import columns_there, require_tables
from .state import insert_state, pruned_key, read_state

MAX_BATCH_SIZE = 10_000

_PASSING = (*PASSING, Failure.UNIQUE)  # UNIQUE: a delivery wrote one of the copies meanwhile

STATES = {RESULT: "result", REJECTED: "rejected", DEFAULT: "result not stored", None: "no outcome"}
"""The word for each outcome of a record. ``begin_command`` without ``record`` leaves a record without an outcome."""


@dataclass(frozen=True)
class Marker:
    """A marker: the record that a handler applied a message, and when. ``age`` is by the database's clock."""

    message_id: str
    handler: str
    processed_at: datetime
    occurred_at: datetime | None
    age: timedelta
    digest: str | None  #: of the body, in hexadecimal; None if the message had none


def find(engine: Engine, message_id: object, *, tables: DedupTables = default_tables) -> list[Marker]:
    """Return the markers of one message, sorted by handler.

    The list is empty if no handler applied the message, or cleanup has deleted its markers. Raises
    ``InvalidMessageIdError`` for an id that no message can have, and ``MissingTableError`` if the tables are missing.
    """
    return [marker for marker, _ in find_rows(engine, valid_message_id(message_id), tables)]


def find_rows(engine: Engine, message_id: str, tables: DedupTables) -> list[tuple[Marker, Row[Any]]]:
    """Return each row of an id, sorted by handler: as a marker, and with all columns of its table."""
    marker = tables.marker
    with connected_to(engine, tables) as connection:
        now = database_of(engine).now(connection)
        columns = columns_there(connection, marker)
        statement = select(*columns).where(marker.c.message_id == message_id).order_by(marker.c.handler)
        rows = connection.execute(statement).all()
    found = []
    for row in rows:
        at = in_utc(row.processed_at)
        occurred = None if row.occurred_at is None else in_utc(row.occurred_at)
        digest = getattr(row, "digest", None)
        shown = None if digest is None else bytes(digest).hex()
        found.append((Marker(row.message_id, row.handler, at, occurred, now - at, shown), row))
    return found


def has_markers(engine: Engine, handler: str, *, tables: DedupTables = default_tables) -> bool:
    """True if the table has a marker of the handler, of any age.

    Raises ``RefusedError`` for a name that no handler can have, ``MissingTableError`` if the tables are missing.
    """
    some = select(tables.marker.c.handler).where(tables.marker.c.handler == valid_handler(handler)).limit(1)
    with connected_to(engine, tables) as connection:
        return connection.execute(some).first() is not None


def forget(
    engine: Engine, message_id: object, *, handler: str | None = None, tables: DedupTables = default_tables
) -> int:
    """Delete the markers of one message (of one handler, if given), so that a redelivery is applied *again*.

    Returns their number. The function does not undo changes in the read model; you must correct the read model.

    Raises ``InvalidMessageIdError`` for an id that no message can have, ``RefusedError`` for a name that no handler
    can have and for an effect that is not finished, ``MissingTableError`` if the tables are missing, and
    ``RetriesExhaustedError`` if a transient error lasted too long.
    """
    marker, dialect = tables.marker, dialect_of(engine)
    conditions = [marker.c.message_id == valid_message_id(message_id)]
    if handler is not None:
        conditions.append(marker.c.handler == valid_handler(handler))
    require_tables(engine, tables)
    deleted: set[str] = set()  # also those of an attempt whose COMMIT was lost: the next one finds nothing any more

    def step(connection: Connection) -> None:
        dialect.begin(connection, None, None)
        chosen = select(marker.c.handler, marker.c.processed_at).where(*conditions).with_for_update()
        there = connection.execute(chosen).all()
        _refuse_unfinished(tables, [row.handler for row in there if row.processed_at is None])
        connection.execute(delete(marker).where(*conditions, *_finished(tables)))
        deleted.update(row.handler for row in there)

    run_with_retries(step, engine, dialect, RetryPolicy())
    return len(deleted)


def _finished(tables: DedupTables) -> list[ColumnElement[bool]]:
    """Return the condition that a row may be deleted. An effect must have an outcome."""
    return [tables.marker.c.processed_at.is_not(None)] if isinstance(tables, EffectTables) else []


def _refuse_unfinished(tables: DedupTables, names: Sequence[str]) -> None:
    """Raise ``RefusedError`` if an effect of one of these ``names`` is not finished."""
    if names and isinstance(tables, EffectTables):
        raise RefusedError(
            f"{', '.join(printable(name) for name in names)}: an unfinished effect cannot be deleted, because it may "
            "have been done. Let `idempotency effects settle` finish it, or decide it with `idempotency effects "
            "resolve` (`--seen` if it was done twice), and delete it then"
        )


# Records of commands ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredRecord(Marker):
    """A record as it is stored: a marker whose ``handler`` is the operation, and the recorded answer."""

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
    """Return the records of one key in one scope, sorted by operation.

    The list is empty if no command was handled, or cleanup has deleted the records. Raises ``InvalidKeyError`` for a
    key or a scope that no command can have, and ``MissingTableError`` if the tables are missing.
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
    """Delete the record of one command, so that the next call with this key runs the command *again*.

    Returns the number of deleted records, 0 or 1. The function does not undo what the command did.

    Raises ``InvalidKeyError`` for a key or a scope that no command can have, ``RefusedError`` for a name that no
    operation can have, and ``MissingTableError`` if the tables are missing.
    """
    return forget(engine, RecordKey.of(key, scope).stored, handler=operation, tables=tables)


# Renamed handlers -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Renamed:
    """The numbers of markers of the old name: copied, already there under the new name, and removed."""

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
    """Copy every marker of the handler ``old`` to the name ``new``, with the same times, and return the numbers.

    Run it when every process has code with the new name, because code with the old name still writes markers without a
    copy. Afterwards you can remove ``formerly=["..."]`` from the code.

    - ``batch_size``: the largest number of markers in one transaction.
    - ``remove_old``: True also removes the markers of ``old``, in the same transactions. By default they remain until
      cleanup deletes them, so that you can roll back a deployment.
    - ``dry_run``: True only counts.
    - ``on_batch``: called after each batch with the sum so far. It may raise to end the run.

    You can interrupt a run and run it again. A message that is late under ``old`` is late under ``new``, because all
    handlers have the same late moment (``late``).

    An effect is moved, because a copy of an unfinished effect would also be sent. This needs ``remove_old``, and no
    process may have the old name. It is refused while an attempt under the old name is running, and if both names have
    an effect with the same key, because one of the two may be done.

    Raises ``RefusedError`` for a name that no handler can have, for effects as described above, and if neither name has
    a marker. Raises ``ValueError`` if the names are equal or ``batch_size`` is wrong. Raises ``MissingTableError`` if a
    table is missing, and ``RetriesExhaustedError`` if a transient error lasted too long.
    """
    if valid_handler(old) == valid_handler(new):
        raise ValueError(f"the old and the new name are both {printable(old)}; give two different names")
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise ValueError(f"batch_size must be between 1 and {MAX_BATCH_SIZE:,}, not {batch_size}")
    require_tables(engine, tables)
    dialect = dialect_of(engine)
    if isinstance(tables, EffectTables) and not remove_old:
        raise RefusedError(
            f"an effect cannot be copied to another name, because the copy of {printable(old)} would also be sent. "
            "Stop every process with the old name, and add remove_old=True (--remove-old)"
        )
    with connected_to(engine, tables) as connection:
        refuse_kept(connection, tables, [old, new])
        columns = [column.name for column in columns_there(connection, tables.marker)]
    batch = _Batch(tables.marker, old, new, batch_size, columns, remove_old=remove_old, dry_run=dry_run)
    policy = RetryPolicy()
    total, last = Renamed(), ""  # the empty text is before every id
    while True:
        renamed, last = run_with_retries(partial(batch.run, dialect, last), engine, dialect, policy, _PASSING)
        if renamed == Renamed():
            break
        total += renamed
        if on_batch is not None:
            on_batch(total)
    if not dry_run:
        run_with_retries(partial(_tell_of_pruned, dialect, tables, old, new), engine, dialect, policy)
    if total == Renamed() and not run_with_retries(batch.new_is_known, engine, dialect, policy):
        raise RefusedError(
            f"neither {printable(old)} nor {printable(new)} has a {tables.noun} in {tables.marker.fullname}; check the "
            f"spelling of both names, and the table's name and schema. If cleanup has deleted all {tables.noun}s of "
            f"{printable(old)}, nothing is left to rename: remove `formerly` from the code"
        )
    return total


def _tell_of_pruned(dialect: Dialect, tables: DedupTables, old: str, new: str, connection: Connection) -> None:
    """If cleanup may have deleted markers of ``old``, store that for ``new``, whose copies lack the same messages."""
    dialect.begin(connection, None, None)
    known = read_state(connection, tables)
    if pruned_key(old) in known and pruned_key(new) not in known:
        insert_state(connection, tables, pruned_key(new), new)


class _Batch:
    """The statements of one run. Each batch begins after the last id of the batch before it."""

    def __init__(
        self,
        marker: Table,
        old: str,
        new: str,
        batch_size: int,
        columns: Sequence[str],
        *,
        remove_old: bool,
        dry_run: bool,
    ) -> None:
        self._marker, self._old, self._new, self._columns = marker, old, new, columns
        self._remove_old, self._dry_run = remove_old, dry_run
        self._look, self._copy, self._remove = self._looking(batch_size), self._copying(), self._removing()
        self._effects = self._locking() if "lease_until" in marker.c else None

    def run(self, dialect: Dialect, after: str, connection: Connection) -> tuple[Renamed, str]:
        """Copy the batch that follows the id ``after``, or only count it in a dry run.

        Returns the counts and the last id of the batch. If no marker follows, returns zeros and ``after``.
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
                if effect.running or effect.message_id in twins:
                    raise RefusedError(
                        f"an effect with the name {printable(self._old)} is running, or exists with the new name too. "
                        "Stop every process with the old name, and wait until the leases end. Of two effects with the "
                        "same key, finish and delete one. Then run this again"
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
        """Return a SELECT that locks the effects of a batch, so that no attempt begins during the move."""
        old = self._marker
        these = (old.c.handler == self._old) & old.c.message_id.in_(bindparam("ids", expanding=True))
        running = (old.c.lease_until > now_ms()).label("running")
        return select(old.c.message_id, running).where(these).with_for_update()

    def _copying(self) -> Insert:
        source, twin = self._marker.alias("source"), self._marker.alias("twin")
        name = literal(self._new, self._marker.c.handler.type).label("handler")
        copies = select(*(name if each == "handler" else source.c[each] for each in self._columns)).where(
            source.c.handler == self._old,
            source.c.message_id > bindparam("after"),
            source.c.message_id <= bindparam("last"),
            ~exists(literal_column("1"))
            .select_from(twin)
            .where(twin.c.message_id == source.c.message_id, twin.c.handler == self._new)
            .correlate(source),
        )
        return self._marker.insert().from_select(self._columns, copies)

    def _removing(self) -> Delete:
        # Remove only markers that this batch has read and copied, because old code may have written others since.
        seen = self._marker.c.message_id.in_(bindparam("ids", expanding=True))
        return delete(self._marker).where(self._marker.c.handler == self._old, seen)
