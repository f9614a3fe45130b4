"""Detect late messages. A message is late if it has no marker, but its marker may have been deleted.

A message without a marker is late if it occurred before the *late moment*, which is the later of two moments:

1. now minus the declared horizon, by the database's clock;
2. the moment up to which cleanups have deleted markers, as the state table stores it. It never goes back.

A worker reads the late moment after a claim, in the transaction of the claim, and keeps it for ``FRESH`` seconds. So
it may rely on a moment that is too early. These rules make that harmless (docs/adr/0009-cleanup-and-late-messages.md):

- A cleanup deletes a marker only if its message occurred before now minus the horizon minus ``MARGIN``.
- A cleanup deletes by a *lowered* horizon ``MARGIN`` after the change at the earliest.
- A cleanup reads the horizon under a lock, and commits the moment of rule 2 in the same transaction, before it deletes.
  So a worker that reads a *raised* horizon also reads the moment up to which the lower one deletes.
- A worker relies on a reading for ``ANSWERED`` seconds at most, which is half of ``MARGIN``. The other half is for
  clocks that differ and for a COMMIT that takes long.

Proof: a worker reads the late moment at the time r. A cleanup deletes the marker at the time d. The worker claims the
message again at the time c, so d <= c <= r + MARGIN. If the worker read after the cleanup had committed the moment of
rule 2, the message is late by this moment. If the worker read before, it read a horizon H that was declared at r, which
is within MARGIN before d. So the cleanup kept markers for H or longer, and the message occurred before
d - H - MARGIN <= r - H. Then it is late by rule 1.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from weakref import WeakKeyDictionary

from sqlalchemy import select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from .dialects import Failure, Snapshot, dialect_of
from .dialects.columns import utc_now
from .errors import InProgress, MissingTableError, RefusedError
from .message import printable
from .tables import DedupTables, full_name

MARGIN = timedelta(hours=1)  #: how much longer than the horizon a cleanup keeps a marker
FRESH, ANSWERED = MARGIN.total_seconds() / 4, MARGIN.total_seconds() / 2

REDELIVERY_HORIZON = "redelivery_horizon_hours"  #: as declared: how long after its first delivery a message may return
PRUNED_UNTIL = "pruned_until"  #: markers older than this moment may be deleted: ISO 8601, UTC


@dataclass(frozen=True)
class Instant:
    """A moment by both clocks of a worker."""

    monotonic: float
    wall: float

    @classmethod
    def now(cls) -> Instant:
        """Return the present instant."""
        return cls(time.monotonic(), time.time())

    @property
    def age(self) -> float:
        """Seconds since the instant. The wall clock decides if the machine was suspended meanwhile."""
        return max(time.monotonic() - self.monotonic, time.time() - self.wall)


class Lateness:
    """The late moments that one dispatcher has read. Threads may share the object.

    ``skip`` is True if a late message is skipped, and False if it is an error.
    """

    def __init__(self, tables: DedupTables, *, skip: bool) -> None:
        self.skip = skip
        self._tables = tables
        #: by engine, which may have a schema map: the late moment, and an instant before it was read
        self._known: WeakKeyDictionary[Engine, tuple[datetime | None, Instant]] = WeakKeyDictionary()

    def moment(self, connection: Connection, bind: Engine, claimed: Instant, *, moves: bool) -> datetime | None:
        """Return the late moment for a claim on this ``connection``, or None. Read it if the known one is not fresh.

        ``bind`` is the engine of the session. ``claimed`` is an instant before the claim was sent. ``moves`` is True if
        a user's listener may select another tenant for each transaction; the method then reads each time.

        Raises ``InProgress`` if the database has answered the claim too late to rely on the late moment. Raises
        ``MissingTableError`` or ``RefusedError`` if it cannot be read, and a transient database error unchanged.
        """
        known = self._known.get(bind)
        if known is None or moves or known[1].age > FRESH:
            known = self._known[bind] = self._read(connection), claimed
        moment, read = known
        if read.age > ANSWERED:
            raise InProgress(
                f"the database answered the claim {read.age / 60:.0f} minutes after the library had sent it, and the "
                "marker may be deleted meanwhile; let the broker redeliver the message"
            )
        return moment

    def _read(self, connection: Connection) -> datetime | None:
        state = self._tables.state
        asked = select(state.c.key, state.c.value, utc_now()).where(state.c.key.in_((REDELIVERY_HORIZON, PRUNED_UNTIL)))
        if dialect_of(connection).snapshot(connection, None) is Snapshot.READ:
            asked = asked.with_for_update(read=True)  # else it would take the snapshot before the handler's first lock
        try:
            found = {key: (value, now) for key, value, now in connection.execute(asked).all()}
        except DBAPIError as error:
            failure = dialect_of(connection).classify(error)
            if failure in (Failure.TRANSIENT, Failure.READ_ONLY, Failure.LOCK_TIMEOUT):
                raise
            kind = MissingTableError if failure is Failure.NO_TABLE else RefusedError
            raise kind(
                f"{full_name(state, connection)} cannot be read, so a late message could not be detected: "
                f"{printable(str(error.orig))[:200]}; create the table if it is missing (`idempotency schema` prints "
                "the SQL), or grant SELECT on it, or give the dispatcher late='apply'"
            ) from error
        moments = []
        try:
            if REDELIVERY_HORIZON in found:
                hours, now = found[REDELIVERY_HORIZON]
                moments.append(in_utc(now) - timedelta(hours=stored_hours(hours)))
            if PRUNED_UNTIL in found:
                moments.append(datetime.fromisoformat(found[PRUNED_UNTIL][0]))
            return max(moments, default=None)
        except (ValueError, TypeError, OverflowError):  # TypeError: a moment without a time zone
            raise RefusedError(
                f"{full_name(state, connection)} has a wrong value for {REDELIVERY_HORIZON} or {PRUNED_UNTIL}, so a "
                "late message could not be detected; declare the horizon again (`idempotency horizon HOURS --yes`), "
                "or restore the value from a backup"
            ) from None


def stored_hours(text: str) -> float:
    """Return the hours that a text of the state table says. Raises ``ValueError`` for what the library never writes."""
    hours = float(text)
    if not hours > 0:  # nor nan
        raise ValueError(f"{text!r} is no positive number of hours")
    return hours


def in_utc(moment: datetime) -> datetime:
    """Return a time from the database in UTC. A time without a zone is in UTC, because all times are stored in UTC."""
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
