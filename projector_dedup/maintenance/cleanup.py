"""Delete the markers that are older than the retention, a batch at a time; keep those of messages that may return.

The redelivery horizon says how late a message may come again. It is declared once and kept beside the markers.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypedDict, TypeVar, Unpack

from sqlalchemy import func, literal_column, select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from ..closing import connected
from ..dialects import Dialect, Failure, dialect_of
from ..errors import (
    CleanupInterruptedError,
    RetentionTooShortError,
    RetriesExhaustedError,
    UnsupportedDatabaseError,
)
from ..message import printable, valid_handler
from ..options import RetryPolicy
from ..tables import DedupTables, default_tables
from .check import verify
from .databases import Expired, database_of
from .running import connected_to, run_with_retries
from .state import (
    CLEANED_AT,
    PRUNED_UNTIL,
    REDELIVERY_HORIZON,
    RETENTION,
    advance_state,
    moment_text,
    read_state,
    write_state,
)

logger = logging.getLogger("projector_dedup")

MAX_HOURS = 24 * 366 * 100  #: a century
COUNTED = 1_000_000  #: the number of expired markers at which a dry run stops counting
_ALERT = 0.1  # seconds after which ``stop`` is called again during a pause

T = TypeVar("T")


@dataclass(frozen=True)
class Pruned:
    """The result of a run. ``left`` says why expired markers may be left; None if the run saw none in the end."""

    deleted: int
    left: str | None

    @property
    def complete(self) -> bool:
        """True if the run saw no expired marker in the end."""
        return self.left is None


class Bounds(TypedDict, total=False):
    """The arguments of ``cleanup`` and ``prune``; ``prune`` has the defaults, and says what each means."""

    retention_hours: float
    batch_size: int
    tables: DedupTables
    on_batch: Callable[[int], None] | None
    max_batches: int | None
    time_budget: float | None
    pause: float
    handler: str | None
    force: bool
    stop: Callable[[], bool] | None
    retry: RetryPolicy


def cleanup(engine: Engine, **bounds: Unpack[Bounds]) -> int:
    """Delete the markers that were processed more than ``retention_hours`` (168) ago, and return how many they were.

    Takes the arguments of ``prune``, and raises the same errors. ``prune`` also says whether expired markers are left.
    """
    return prune(engine, **bounds).deleted


def prune(
    engine: Engine,
    *,
    retention_hours: float = 168,
    batch_size: int = 5_000,
    tables: DedupTables = default_tables,
    on_batch: Callable[[int], None] | None = None,
    max_batches: int | None = None,
    time_budget: float | None = None,
    pause: float = 0.0,
    handler: str | None = None,
    force: bool = False,
    stop: Callable[[], bool] | None = None,
    retry: RetryPolicy = RetryPolicy(),  # noqa: B008  # immutable
) -> Pruned:
    """Delete the markers that were processed more than ``retention_hours`` before the run began; return what was done.

    The database's clock decides. A message that is redelivered after its marker was pruned is applied *again*: the
    retention must exceed the longest time after which a message may come again (``declare_horizon``).

    Every batch of about ``batch_size`` markers is a short transaction of its own, so a run can be stopped at any
    time, and several may run at once. ``on_batch`` is called with the number of markers that a batch deleted. With
    ``handler``, the markers of that handler only are deleted.

    The run ends when it sees no expired marker any more; for markers that another transaction holds it waits as long
    as ``retry`` allows. It ends earlier after ``max_batches`` batches, after ``time_budget`` seconds, or when ``stop``,
    which is called between batches, returns True. ``pause`` is the time between two batches, in seconds.

    Raises ``ValueError`` for an argument out of range, ``RetentionTooShortError`` for a retention below the declared
    horizon unless ``force``, ``MissingTableError`` for a missing table, ``UnsupportedDatabaseError`` for an engine
    that a dispatcher would refuse too, ``CleanupInterruptedError`` if an error lasted longer than ``retry`` allows.
    """
    _check_bounds(retention_hours, batch_size, max_batches, time_budget, pause)
    handler = None if handler is None else valid_handler(handler)
    verify(engine, tables)
    dialect = dialect_of(engine)
    dialect.prepare(engine)
    if not force:
        refuse_short_retention(engine, retention_hours, tables=tables)
    deadline = None if time_budget is None else time.monotonic() + time_budget
    run = _Run(engine, dialect, retry)
    now = run.attempt(database_of(engine).now)
    expired = Expired(tables.marker, now - timedelta(hours=retention_hours), handler, batch_size)

    def ended() -> str | None:
        if stop is not None and stop():
            return "it was told to stop"
        if max_batches is not None and run.number >= max_batches:
            return f"{max_batches} batches were all it was to delete"
        if deadline is not None and time.monotonic() >= deadline:
            return f"its {time_budget:g} seconds were over"
        return None

    left = _delete_all(run, expired, ended, pause=pause, stop=stop, on_batch=on_batch)
    if left is None and handler is None:
        _record(run, tables, expired.cutoff, retention_hours)
    return Pruned(run.deleted, left)


def refuse_short_retention(engine: Engine, retention_hours: float, *, tables: DedupTables = default_tables) -> None:
    """Raise ``RetentionTooShortError`` if ``retention_hours`` is below the declared horizon."""
    horizon = redelivery_horizon(engine, tables=tables)
    if horizon is not None and retention_hours < horizon:
        raise RetentionTooShortError(
            f"a retention of {retention_hours:g} hours is shorter than the redelivery horizon of {horizon:g} hours: a "
            f"message that comes again in between would be applied again; keep the {tables.noun}s for at least "
            f"{horizon:g} hours, or declare a shorter horizon (`idempotency horizon`), or insist (force=True, --force)"
        )


def count_expired(
    engine: Engine,
    *,
    retention_hours: float = 168,
    tables: DedupTables = default_tables,
    handler: str | None = None,
    up_to: int = COUNTED,
) -> int:
    """Return how many markers ``prune`` would delete now; a result of ``up_to`` means that many or more.

    Raises ``ValueError`` for a retention out of range, ``MissingTableError`` for a missing table.
    """
    check_hours("retention_hours", retention_hours)
    verify(engine, tables)
    with connected(engine) as connection:
        now = database_of(connection).now(connection)
        expired = Expired(tables.marker, now - timedelta(hours=retention_hours), handler, up_to)
        statement = select(func.count()).select_from(expired.oldest(tables.marker, literal_column("1")).subquery())
        return connection.execute(statement).scalar_one()


def _check_bounds(
    retention_hours: float, batch_size: int, max_batches: int | None, time_budget: float | None, pause: float
) -> None:
    check_hours("retention_hours", retention_hours)
    for name, number in (("batch_size", batch_size), ("max_batches", max_batches)):
        if number is not None and number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")
    if time_budget is not None:
        check_hours("time_budget, in hours,", time_budget / 3600)
    if pause != 0:
        check_hours("pause, in hours,", pause / 3600)


class _Run:
    """One run of a cleanup: it deletes batches, and counts batches and markers."""

    def __init__(self, engine: Engine, dialect: Dialect, retry: RetryPolicy) -> None:
        self.dialect, self.retry = dialect, retry
        self.deleted = self.number = 0
        self._engine = engine

    def attempt(self, act: Callable[[Connection], T]) -> T:
        """Run ``act`` in a transaction of its own, again while its errors may pass, and return what it returns.

        A batch whose COMMIT was not confirmed may be deleted all the same, and is not counted then.

        Raises ``CleanupInterruptedError`` if the retry policy is used up.
        """
        try:
            return run_with_retries(act, self._engine, self.dialect, self.retry)
        except RetriesExhaustedError as error:
            raise CleanupInterruptedError(
                f"at least {self.deleted:,} markers were deleted, then {error}", self.deleted
            ) from error.__cause__

    def delete(self, expired: Expired) -> int:
        """Delete the oldest batch and return the number of its markers.

        Returns 0 also where another transaction held some of them too long; ``left`` finds those later.

        Raises ``UnsupportedDatabaseError`` if the driver does not say how many rows were deleted.
        """
        statement = database_of(self._engine).cleanup_statement(expired)

        def batch(connection: Connection) -> int:
            try:
                return connection.execute(statement).rowcount
            except DBAPIError as error:
                if not self.dialect.locks_rows or self.dialect.classify(error) is not Failure.LOCK_TIMEOUT:
                    raise
                connection.rollback()
                return 0

        deleted = self.attempt(batch)
        if deleted < 0:
            raise UnsupportedDatabaseError(
                "a batch was deleted, but the driver does not say how many markers it had, so nobody could tell which "
                "batch is the last; delete from the table by a statement of your own"
            )
        self.deleted += deleted
        self.number += deleted > 0
        return deleted

    def left(self, expired: Expired) -> bool:
        """True if an expired marker is left: a batch leaves out those that another transaction holds."""
        return self.attempt(lambda connection: connection.execute(expired.any()).first()) is not None


def _delete_all(
    run: _Run,
    expired: Expired,
    ended: Callable[[], str | None],
    *,
    pause: float,
    stop: Callable[[], bool] | None,
    on_batch: Callable[[int], None] | None,
) -> str | None:
    """Delete batches until no expired marker is left, and return None; else return why some may be left.

    Raises ``CleanupInterruptedError`` if an error outlasts the retries.
    """
    held_since: float | None = None
    looked = 0
    while (why := ended()) is None:
        deleted = run.delete(expired)
        if deleted:
            held_since = None
            if on_batch is not None:
                on_batch(deleted)
            _rest(pause, stop)
            continue
        if not run.left(expired):
            return None
        if held_since is None:
            held_since, looked = time.monotonic(), 0
        looked += 1
        if time.monotonic() - held_since > run.retry.within:
            return "somebody else holds expired markers"
        _rest(run.retry.delay(looked), stop)
    return why


def _rest(seconds: float, stop: Callable[[], bool] | None) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not (stop is not None and stop()):
        time.sleep(min(left, _ALERT))


def _record(run: _Run, tables: DedupTables, cutoff: datetime, retention_hours: float) -> None:
    """Write into the state table that no marker older than ``cutoff`` is kept.

    An error is only logged: the run has deleted everything that it was asked to delete.
    """

    def write(connection: Connection) -> None:
        now = moment_text(database_of(connection).now(connection))
        write_state(connection, tables, {RETENTION: repr(float(retention_hours)), CLEANED_AT: now})
        advance_state(connection, tables, PRUNED_UNTIL, moment_text(cutoff))

    try:
        run.attempt(write)
    except (DBAPIError, CleanupInterruptedError) as error:
        logger.warning(
            "the markers were pruned, but %s could not be written, so `idempotency check` cannot tell that they were: "
            "%s; grant SELECT, INSERT, UPDATE and DELETE on it",
            tables.state.fullname,
            printable(str(getattr(error, "orig", error)))[:300],
        )


# The redelivery horizon -------------------------------------------------------------------------------------------


def check_hours(name: str, hours: float) -> None:
    """Raise ``ValueError`` unless ``hours`` is more than 0 and at most a century; ``name`` is for the text."""
    if not (math.isfinite(hours) and 0 < hours <= MAX_HOURS):
        raise ValueError(f"{name} must be positive and at most {MAX_HOURS} (a century), not {hours:g}")


def declare_horizon(engine: Engine, hours: float | None, *, tables: DedupTables = default_tables) -> None:
    """Declare that a message may come again up to ``hours`` after it was first processed; None deletes the horizon.

    Add up what can bring a message back: the broker's retention, the dead-letter queue, a replay by hand. The horizon
    is written into the database, so ``cleanup`` keeps to it on whichever machine it is run.

    Raises ``ValueError`` for hours that are not positive or more than a century, ``MissingTableError`` for a missing
    table.
    """
    if hours is not None:
        check_hours("the redelivery horizon", hours)
    verify(engine, tables)
    with engine.begin() as connection:
        write_state(connection, tables, {REDELIVERY_HORIZON: None if hours is None else repr(float(hours))})


def redelivery_horizon(engine: Engine, *, tables: DedupTables = default_tables) -> float | None:
    """Return the declared horizon in hours; None if none was declared.

    Raises ``MissingTableError`` if the state table is missing.
    """
    with connected_to(engine, tables) as connection:
        declared = read_state(connection, tables).get(REDELIVERY_HORIZON)
    return None if declared is None else float(declared)
