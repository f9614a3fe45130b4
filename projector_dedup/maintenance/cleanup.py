"""Delete the markers that are older than the retention, in batches, and keep those of messages that may come again.

The redelivery horizon is the longest time after which a message may come again. The state table stores it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TypedDict, TypeVar, Unpack

from sqlalchemy import func, literal_column, select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from ..dialects import Dialect, Failure, dialect_of
from ..errors import (
    CleanupInterruptedError,
    RefusedError,
    RetentionTooShortError,
    RetriesExhaustedError,
    UnsupportedDatabaseError,
)
from ..late import MARGIN, PRUNED_UNTIL, REDELIVERY_HORIZON, stored_hours
from ..message import logger_of, printable, valid_handler
from ..options import RetryPolicy
from ..tables import DedupTables, default_tables
from .databases import Expired, database_of
from .rebuilds import kept_handlers, open_rebuilds
from .running import connected_to, run_with_retries
from .schema import require_tables, require_tables_on
from .state import (
    CLEANED_AT,
    DEFAULT_RETENTION_HOURS,
    HORIZON_BEFORE,
    RETENTION,
    advance_state,
    in_hours,
    insert_state,
    moment_text,
    pruned_key,
    read_state,
    state_of,
    write_state,
)

logger = logger_of("projector_dedup")

MAX_HOURS = 24 * 366 * 100  #: a century
COUNTED = 1_000_000  #: the number of expired markers at which a dry run stops counting
_ALERT = 0.1  # seconds after which ``stop`` is called again during a pause

T = TypeVar("T")


@dataclass(frozen=True)
class Pruned:
    """The result of a run.

    ``left`` is the reason why expired markers may remain, or None if none remain. ``rebuilt`` names the projectors with
    an open rebuild, whose markers were kept (``end_rebuild``). ``declared`` is the horizon, in hours, that the run has
    declared because none was declared, or None.
    """

    deleted: int
    left: str | None
    rebuilt: tuple[str, ...] = ()
    declared: float | None = None

    @property
    def complete(self) -> bool:
        """True if no expired marker remains."""
        return self.left is None


class Bounds(TypedDict, total=False):
    """The arguments of ``cleanup`` and ``prune``. ``prune`` documents them, and has the defaults."""

    retention_hours: float | None
    batch_size: int
    tables: DedupTables
    on_batch: Callable[[int], None] | None
    max_batches: int | None
    time_budget: float | None
    pause: float
    handler: str | None
    stop: Callable[[], bool] | None
    retry: RetryPolicy


def cleanup(engine: Engine, **bounds: Unpack[Bounds]) -> int:
    """Delete the markers that are older than ``retention_hours``, and return their number.

    The arguments and the errors are those of ``prune``, which also returns whether expired markers remain.
    """
    return prune(engine, **bounds).deleted


def prune(
    engine: Engine,
    *,
    retention_hours: float | None = None,
    batch_size: int = 5_000,
    tables: DedupTables = default_tables,
    on_batch: Callable[[int], None] | None = None,
    max_batches: int | None = None,
    time_budget: float | None = None,
    pause: float = 0.0,
    handler: str | None = None,
    stop: Callable[[], bool] | None = None,
    retry: RetryPolicy = RetryPolicy(),  # noqa: B008  # immutable
) -> Pruned:
    """Delete the markers that are older than the retention: their messages were processed, and occurred, before that.

    - ``retention_hours``: hours by the database's clock. The default is the declared horizon, or 168. It must not be
      shorter than the declared horizon. Markers of projectors stay an hour longer (``late.MARGIN``).
    - ``batch_size``: about how many markers to delete in one transaction.
    - ``on_batch``: called after each batch with the number of deleted markers.
    - ``max_batches``, ``time_budget`` (seconds): end the run earlier.
    - ``pause``: seconds to wait between two batches.
    - ``handler``: delete only the markers of this handler.
    - ``stop``: called between batches. If it returns True, the run ends.
    - ``retry``: how long to retry after a transient error, and to wait for markers that another transaction locks.

    You can interrupt a run at any time, and several runs may run at once. If a message with a time comes again after
    its marker was deleted, it is late (``Dispatcher(late=...)``). A message without a time is applied *again*. If no
    horizon is declared, the run declares its retention as the horizon, and deletes only markers of messages without a
    time; a run an hour later deletes the others. While a rebuild of a projector is open, the markers of both
    generations are kept (``rebuild.rebuild``).

    Returns a ``Pruned``. Raises ``ValueError`` for an argument out of range, ``RetentionTooShortError`` for a retention
    below the declared horizon, ``MissingTableError``, ``UnsupportedDatabaseError`` for an engine that a dispatcher
    refuses too, and ``CleanupInterruptedError`` if an error lasts longer than ``retry`` allows: run it again.
    """
    _check_bounds(retention_hours, batch_size, max_batches, time_budget, pause)
    handler = None if handler is None else valid_handler(handler)
    dialect = dialect_of(engine)
    dialect.prepare(engine)
    deadline = None if time_budget is None else time.monotonic() + time_budget
    run = _Run(engine, dialect, retry, tables)
    hours = run.attempt(partial(_checked_retention, tables, retention_hours))
    rebuilds = run.attempt(lambda connection: open_rebuilds(connection, tables))
    look = partial(expired_now, tables=tables, hours=hours, handler=handler, batch_size=batch_size)
    try:
        expired, declared = run.attempt(partial(_announce, dialect, tables, look, hours))
    except DBAPIError as error:
        logger.warning(
            "cleanup kept the markers of messages that have a time, because it could not write into %s: %s; grant "
            "SELECT, INSERT, UPDATE and DELETE on it",
            tables.state.fullname,
            printable(str(error.orig))[:300],
        )
        expired, declared = replace(run.attempt(look), undated=True), None

    def ended() -> str | None:
        if stop is not None and stop():
            return "the run was stopped"
        if max_batches is not None and run.number >= max_batches:
            return f"the limit of {max_batches} batches is reached"
        if deadline is not None and time.monotonic() >= deadline:
            return f"the limit of {time_budget:g} seconds is reached"
        return None

    left = None
    if expired is not None:
        left = _delete_all(run, expired, ended, pause=pause, stop=stop, on_batch=on_batch)
    if left is None and handler is None:
        _record(run, tables, hours)
    return Pruned(run.deleted, left, tuple(sorted(rebuilds)), declared)


def _checked_retention(tables: DedupTables, hours: float | None, connection: Connection) -> float:
    require_tables_on(connection, tables)
    return _retention(connection, tables, hours)


def retention_of(engine: Engine, hours: float | None, *, tables: DedupTables = default_tables) -> float:
    """Return the retention of a cleanup: ``hours``, or else the declared horizon, or else 168 hours.

    Raises ``RetentionTooShortError`` if ``hours`` is below the declared horizon.
    """
    with connected_to(engine, tables) as connection:
        return _retention(connection, tables, hours)


def _retention(connection: Connection, tables: DedupTables, hours: float | None) -> float:
    horizon = _declared_horizon(connection, tables)
    if hours is None:
        return DEFAULT_RETENTION_HOURS if horizon is None else horizon
    if horizon is not None and hours < horizon:
        raise RetentionTooShortError(
            f"a retention of {in_hours(hours)} is shorter than the redelivery horizon of {in_hours(horizon)}, so a "
            f"message that comes again after its {tables.noun} is deleted could be applied again; keep {tables.noun}s "
            f"for at least {in_hours(horizon)}, or declare a shorter horizon (`idempotency horizon`)"
        )
    return hours


def count_expired(
    engine: Engine,
    *,
    retention_hours: float | None = None,
    tables: DedupTables = default_tables,
    handler: str | None = None,
    up_to: int = COUNTED,
) -> int:
    """Return how many markers ``prune`` would delete now. A result of ``up_to`` means at least that many.

    Raises ``ValueError`` for a retention out of range, and ``MissingTableError`` for a missing table.
    """
    if retention_hours is not None:
        check_hours("retention_hours", retention_hours)
    with connected_to(engine, tables) as connection:
        hours = _checked_retention(tables, retention_hours, connection)
        expired = expired_now(connection, tables, hours, handler, up_to)
        statement = select(func.count()).select_from(expired.oldest(tables.marker, literal_column("1")).subquery())
        return connection.execute(statement).scalar_one()


def _announce(
    dialect: Dialect,
    tables: DedupTables,
    look: Callable[[Connection], Expired],
    hours: float,
    connection: Connection,
) -> tuple[Expired | None, float | None]:
    """Return the markers to delete, or None. Before, write into the state table what workers need to know of this.

    If no horizon is declared, the function declares ``hours``, and also returns them.
    """
    dialect.begin(connection, None, None)
    declared = None
    while not tables.keyed and not lock_horizon(connection, tables):
        declared = hours if declare_first(connection, tables, hours) else None
    expired = look(connection)
    if connection.execute(expired.any()).first() is None:
        return None, declared
    advance_state(connection, tables, PRUNED_UNTIL, moment_text(expired.cutoff))
    known = read_state(connection, tables)
    for name in sorted(connection.scalars(expired.handlers())):
        if pruned_key(name) not in known:
            insert_state(connection, tables, pruned_key(name), name)
    return expired, declared


def _check_bounds(
    retention_hours: float | None, batch_size: int, max_batches: int | None, time_budget: float | None, pause: float
) -> None:
    if retention_hours is not None:
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

    def __init__(self, engine: Engine, dialect: Dialect, retry: RetryPolicy, tables: DedupTables) -> None:
        self.dialect, self.retry, self.tables = dialect, retry, tables
        self.deleted = self.number = 0
        self._engine = engine

    def attempt(self, act: Callable[[Connection], T]) -> T:
        """Run ``act`` in its own transaction, retry after transient errors, and return its result.

        If the COMMIT of a batch is not confirmed, the batch may be deleted, but is not counted.

        Raises ``CleanupInterruptedError`` if the retry policy permits no more attempts.
        """
        try:
            return run_with_retries(act, self._engine, self.dialect, self.retry)
        except RetriesExhaustedError as error:
            raise CleanupInterruptedError(
                f"at least {self.deleted:,} markers were deleted, then {error}", self.deleted
            ) from error.__cause__

    def delete(self, expired: Expired) -> int:
        """Delete the oldest batch, and return the number of its markers.

        Returns 0 also if another transaction locked some of them for too long; ``left`` finds these later.

        Raises ``UnsupportedDatabaseError`` if the driver does not report how many rows were deleted.
        """

        def batch(connection: Connection) -> int:
            kept = kept_handlers(open_rebuilds(connection, self.tables))  # a rebuild may have begun since
            statement = database_of(self._engine).cleanup_statement(replace(expired, kept=kept))
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
                "a batch was deleted, but the driver does not report how many markers it had, so the run cannot detect "
                "the last batch; delete old markers with your own statement"
            )
        self.deleted += deleted
        self.number += deleted > 0
        return deleted

    def left(self, expired: Expired) -> bool:
        """True if an expired marker remains. A batch skips markers that another transaction locks."""
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
    """Delete batches until no expired marker remains, and return None; else return why some may remain.

    Raises ``CleanupInterruptedError`` if an error lasts longer than the retries.
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
            return "another transaction locks expired markers"
        _rest(run.retry.delay(looked), stop)
    return why


def _rest(seconds: float, stop: Callable[[], bool] | None) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and not (stop is not None and stop()):
        time.sleep(min(left, _ALERT))


def _record(run: _Run, tables: DedupTables, hours: float) -> None:
    """Write that a cleanup of all handlers has ended. Log an error instead of raising it: the markers are deleted."""

    def write(connection: Connection) -> None:
        now = moment_text(database_of(connection).now(connection))
        write_state(connection, tables, {RETENTION: repr(float(hours)), CLEANED_AT: now})

    try:
        run.attempt(write)
    except (DBAPIError, CleanupInterruptedError) as error:
        logger.warning(
            "markers are deleted, but %s could not be written, so `idempotency check` does not know of this cleanup: "
            "%s; grant SELECT, INSERT, UPDATE and DELETE on it",
            tables.state.fullname,
            printable(str(getattr(error, "orig", error)))[:300],
        )


# The redelivery horizon -------------------------------------------------------------------------------------------


def check_hours(name: str, hours: float) -> None:
    """Raise ``ValueError`` unless ``hours`` is more than 0 and at most a century. The text begins with ``name``."""
    if not (math.isfinite(hours) and 0 < hours <= MAX_HOURS):
        raise ValueError(f"{name} must be positive and at most {MAX_HOURS} (a century), not {hours:g}")


def declare_horizon(engine: Engine, hours: float | None, *, tables: DedupTables = default_tables) -> None:
    """Declare that a message may come again up to ``hours`` after it occurred. None deletes the horizon.

    Add up the broker's retention, the time in the dead-letter queue, and the time until a manual replay. The horizon is
    stored in the database: ``cleanup`` uses it on every machine, and dispatchers refuse older new messages as late.

    Raises ``ValueError`` for hours that are not positive or more than a century, ``MissingTableError`` for a missing
    table, and ``RetriesExhaustedError`` if a transient error lasted too long.
    """
    if hours is not None:
        check_hours("the redelivery horizon", hours)
    require_tables(engine, tables)
    dialect = dialect_of(engine)

    def step(connection: Connection) -> None:
        dialect.begin(connection, None, None)
        lock_horizon(connection, tables)
        text = None if hours is None else repr(float(hours))
        write_state(connection, tables, {**_before(connection, tables), REDELIVERY_HORIZON: text})

    run_with_retries(step, engine, dialect, RetryPolicy())


def redelivery_horizon(engine: Engine, *, tables: DedupTables = default_tables) -> float | None:
    """Return the declared horizon in hours, or None if none was declared.

    Raises ``MissingTableError`` if the state table is missing, and ``RefusedError`` for a value that is no horizon.
    """
    with connected_to(engine, tables) as connection:
        return _declared_horizon(connection, tables)


def _declared_horizon(connection: Connection, tables: DedupTables) -> float | None:
    declared = read_state(connection, tables).get(REDELIVERY_HORIZON)
    try:
        return None if declared is None else stored_hours(declared)
    except ValueError as error:
        raise RefusedError(
            f"{tables.state.fullname} has a wrong value for {REDELIVERY_HORIZON}: {error}; declare the horizon again "
            "(`idempotency horizon HOURS --yes`)"
        ) from None


def expired_now(
    connection: Connection, tables: DedupTables, hours: float, handler: str | None = None, batch_size: int = 0
) -> Expired:
    """Return the markers that a cleanup with a retention of ``hours`` would delete now. Nothing is written.

    ``late`` explains why markers of messages stay longer than the horizon.
    """
    now, state = database_of(connection).now(connection), state_of(connection, tables)
    kept = kept_handlers(open_rebuilds(connection, tables))
    if tables.keyed:  # records and effects: what comes again after them is not detected
        return Expired(tables.marker, now - timedelta(hours=hours), handler, batch_size, kept)
    judged = state.judged_hours(now)
    undated = math.isinf(judged)
    cutoff = now - timedelta(hours=hours if undated else max(hours, judged)) - MARGIN
    return Expired(tables.marker, cutoff, handler, batch_size, kept, undated)


def lock_horizon(connection: Connection, tables: DedupTables) -> bool:
    """Lock the row of the declared horizon until the transaction ends. Return False if no horizon is declared."""
    state = tables.state
    row = select(state.c.value).where(state.c.key == REDELIVERY_HORIZON).with_for_update()
    return connection.execute(row).first() is not None


def declare_first(connection: Connection, tables: DedupTables, hours: float) -> bool:
    """Declare the horizon in the caller's transaction. Return False if another transaction has declared one."""
    before = _before(connection, tables)
    if not insert_state(connection, tables, REDELIVERY_HORIZON, repr(float(hours))):
        return False
    write_state(connection, tables, before)
    return True


def _before(connection: Connection, tables: DedupTables) -> dict[str, str]:
    """Return the horizon by which workers may judge messages until they have read a change that happens now."""
    now = database_of(connection).now(connection)
    hours = state_of(connection, tables).judged_hours(now)
    return {HORIZON_BEFORE: f"{hours!r} {moment_text(now + MARGIN)}"}
