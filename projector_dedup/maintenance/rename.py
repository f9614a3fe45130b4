"""`idempotency rename`: copy the markers of a handler to its new name, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sqlalchemy import Select, Table, bindparam, delete, exists, literal, literal_column, select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.sql import Delete, Insert

from ..dialects import Dialect, Failure, dialect_of
from ..errors import RefusedError
from ..message import printable, valid_handler
from ..options import RetryPolicy
from ..tables import DedupTables, default_tables
from .check import verify
from .retrying import PASSING, run_with_retries

MAX_BATCH_SIZE = 10_000

_PASSING = (*PASSING, Failure.UNIQUE)  # UNIQUE: a delivery wrote one of the copies meanwhile


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

    Afterwards ``formerly=["..."]`` can be removed from the code. Run it when every process knows the new name: until
    then, code of the old name goes on writing markers that have no copy. The markers of ``old`` stay until cleanup
    deletes them, so that a deploy can be rolled back; ``remove_old`` removes them in the same transactions.

    Every batch of at most ``batch_size`` markers is a short transaction. ``on_batch`` is called after each with the
    sum so far, and may raise to end the run. A run that was interrupted can be run again. ``dry_run`` writes nothing.
    A batch that a deadlock or a lost connection undid is tried again, for some seconds.

    Raises ``RefusedError`` for a name that no handler can have, and if neither name has a marker, perhaps because one
    is misspelt; ``ValueError`` if both names are the same, or ``batch_size`` is out of range; ``MissingTableError``
    for a missing table; ``RetriesExhaustedError`` for an error that did not pass.
    """
    if valid_handler(old) == valid_handler(new):
        raise ValueError(f"{printable(old)} has this name already; give the old name and another one")
    if not 1 <= batch_size <= MAX_BATCH_SIZE:
        raise ValueError(f"batch_size must be between 1 and {MAX_BATCH_SIZE:,}, not {batch_size}")
    verify(engine, tables)
    dialect = dialect_of(engine)
    dialect.prepare(engine)
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
