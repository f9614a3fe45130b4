"""Send effects: take a row, call the effect's function without holding a connection, and record the outcome.

``run`` sends one effect now. ``settle`` handles all effects that are due, by their policies. Each step has its own
transaction (``delivery.deliver``).
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from enum import Enum, auto
from functools import partial
from hashlib import sha256
from typing import Any, Literal, NoReturn, TypeVar, cast

from sqlalchemy import Table
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.util import await_only, greenlet_spawn

from ..asyncio_names import AsyncSession, async_sessionmaker
from ..commands.codecs import as_json, encoded, is_same
from ..commands.codecs import json as json_codec
from ..commands.errors import Rejected, ResultError, ResultUnreadableError
from ..commands.record import REJECTED, RecordKey
from ..commands.runner import MAX_RESULT_BYTES
from ..delivery import deliver
from ..dialects import Dialect
from ..dialects.columns import now_ms
from ..errors import (
    HandlerDefinitionError,
    InProgress,
    OvertakenError,
    ProjectorDedupError,
    RetriesExhaustedError,
    UnsafeSessionError,
)
from ..handler import check_result
from ..markers import library_errors, marker_key
from ..message import logger_of, printable
from ..observer import Observed, Observer, Observing
from ..options import NamedInErrors, RetryPolicy, UnitOptions, check_session_factory
from ..reentry import is_handling
from ..retry import Attempts
from ..unit_of_work import UnitOfWork
from ..waiting import AWAITING, BLOCKING
from . import record
from .arming import new_row, refuse_large, refuse_other_request
from .definition import AsyncEffect, Attempt, Definition, Effect
from .errors import DoubleEffectError, EffectUnknown, LeaseLostError, NotArmedError, NotDone, NotRecordedError
from .policy import Resend
from .record import (
    ASKED,
    ATTEMPT,
    DONE,
    DOUBLE,
    HOUR,
    PERSON,
    Change,
    EffectTables,
    NewRow,
    Seen,
    default_effect_tables,
    new_token,
    shown,
)
from .steps import Do, Step, next_step, pace

logger = logger_of("projector_dedup")

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")

_FOUND_AT_ONCE = 100
_UNSTORABLE = "it was done, but its value cannot be stored"
_NOTHING_SENT: dict[str, Any] = {"first_sent_at": None, "ended_at": None, "stopped_at": None}


class _Sending:
    """A note in the context of a thread or task while an effect's function runs. Tasks that it starts see it too."""

    under_way = True


_sending: ContextVar[_Sending | None] = ContextVar("projector_dedup_sending", default=None)


@dataclass
class _Transaction:
    """One transaction on the row of an effect: first ``change``, then perhaps a handler.

    ``change`` returns False if there is nothing to commit. It may be called again after an interrupted COMMIT.
    """

    tables: EffectTables
    key: tuple[str, str]
    change: Callable[[Connection, Dialect], bool]
    handler: Callable[[UnitOfWork], Callable[[], Any] | None]
    reads: bool = False  #: True: ``change`` only reads, and must not wait for rows that others hold
    marked = connected = True

    def __post_init__(self) -> None:
        self.identity = self.key[1]

    def claim(self, uow: UnitOfWork) -> bool:
        """Change the row. Return True if there is something to commit."""

        def changes(connection: Connection, dialect: Dialect) -> bool:
            if self.reads and uow.durable:  # else the transaction is the caller's
                dialect.lock_nothing(connection)
            dialect.refuse_marker(connection, self.tables.marker)
            with library_errors(connection, dialect, self.tables):
                dialect.limit_waits(connection)
                return self.change(connection, dialect)

        return uow.claim_by(marker_key(*self.key), changes)

    def calls(self, uow: UnitOfWork) -> Iterator[Callable[[], Any]]:
        """Yield the call of ``recorded`` or ``refused``, if there is one."""
        call = self.handler(uow)
        if call is not None:
            yield call

    def log_settled(self, attempts: Attempts) -> None:
        """Log nothing, because the outcome of the effect is logged elsewhere."""

    def log_retry(self, error: Exception, attempts: Attempts) -> None:
        """Log the retry of the transaction and its cause at INFO."""
        text = f"effect {printable(self.key[0])}, {printable(self.identity)}"
        logger.info("retry after %s: %s", type(error).__name__, text, extra={"attempts": attempts.number})


@dataclass
class _Changing:
    """The change of one row in one transaction, and what became of it.

    ``run`` makes the ``change``. If that changes nothing, ``run`` reads the row and decides:

    - The row has the change, because an earlier ``run`` has committed it and only the reply to the COMMIT was lost.
    - Another process was faster: ``otherwise`` gets the row (None: it is gone), and returns another change or None.
    """

    table: Table
    key: tuple[str, str]
    change: Change | None
    otherwise: Callable[[Seen | None], Change | None]
    waits: bool  #: False raises ``RowHeld`` if another transaction holds the row
    made: Change | None = None  #: the change that the row has
    now: Seen | None = None  #: the row as it was read
    _written: Change | None = None  # by an earlier run, whose COMMIT may have lost its reply

    def run(self, connection: Connection, dialect: Dialect) -> bool:
        """Change the row. Return True if there is something to commit."""
        if not self.waits:
            record.lock(connection, dialect, self.table, *self.key)
        made = self.change if self.change is not None and self.change.run(connection) else None
        if made is None:
            self.now = record.read(connection, self.table, *self.key)
            if self._written is not None and self._written.is_in(self.now):
                self.made = self._written
                return False
            made = self.otherwise(self.now)
            if made is not None and not made.run(connection):
                raise OvertakenError("another process has changed the effect meanwhile; try again")
        self.made = self._written = made
        return made is not None


@dataclass
class Settled:
    """The result of ``settle``: the number of effects by what happened to them."""

    done: int = 0  #: recorded as done
    rejected: int = 0  #: recorded as rejected
    not_done: int = 0  #: not sent or not done; ``settle`` sends it again later
    unknown: int = 0  #: the attempt ended without an answer, or the provider does not know
    stopped: int = 0  #: the policy has ended, and a person must decide
    failed: int = 0  #: the effect could not be recorded or read; see the log
    skipped: int = 0  #: another process was faster, or it was too early
    held: int = 0  #: another transaction holds the row of the effect, so ``settle`` has passed it over

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, each.name)} {each.name.replace('_', ' ')}" for each in fields(self))


@dataclass(frozen=True)
class _Outcome:
    """The outcome of an effect, from an attempt, an ask function or a person."""

    number: int  #: DONE or REJECTED
    data: bytes | None  #: the value or the rejection, as it is stored; None for a value that cannot be stored
    by: str
    result: Any  #: the value, or ``Rejected``


class _Found(Enum):
    """The state of a row when its outcome is about to be written."""

    MINE = auto()
    OVERRULED = auto()  #: an attempt has left a value, which has precedence
    TAKEN_OVER = auto()  #: another process or a person has taken over the row


@dataclass(frozen=True)
class _Taken:
    """A row that this process has taken."""

    effect: Definition[Any, Any]
    row: Seen  #: the row before it was taken, or the new row
    token: str
    given: Any  #: the request
    attempt: Attempt
    step: Step
    set_first: bool  #: True if no earlier attempt may have sent something


class _Effects(NamedInErrors):
    """The part that ``Effects`` and ``AsyncEffects`` share."""

    _asynchronous: bool

    def __init__(
        self,
        session_factory: Any,
        effects: Sequence[Any],
        *,
        tables: EffectTables = default_effect_tables,
        scope: Literal["required", "optional"] = "optional",
        retry: RetryPolicy | None = None,
        max_result_bytes: int = MAX_RESULT_BYTES,
        observer: Observer | None = None,
    ) -> None:
        check_session_factory(session_factory, asynchronous=self._asynchronous)
        if not isinstance(tables, EffectTables):
            raise ValueError("tables must come from make_effect_tables(), whose tables have columns for effects")
        if scope not in ("required", "optional"):
            raise ValueError(f"scope must be 'required' or 'optional', not {scope!r}")
        self._factory = session_factory
        self._tables = tables
        self._scope_required = scope == "required"
        self._policy = retry or RetryPolicy()
        self._options = UnitOptions(tables)
        self._max_result_bytes = max_result_bytes
        self._observing = None if observer is None else Observing(observer)
        self._waiting = AWAITING if self._asynchronous else BLOCKING
        self._known: dict[str, Definition[Any, Any]] = {}
        self._logged = set[str]()  # unknown names of effects that were logged
        for each in effects:
            if self._known.setdefault(self._checked(each).identity, each) is not each:
                raise HandlerDefinitionError(f"two effects have the name {each.identity}; give each its own name=")

    @property
    def identities(self) -> frozenset[str]:
        """The names of the effects."""
        return frozenset(self._known)

    def permit_external_transaction(self, permitted: bool) -> bool:
        """Permit or forbid an outer transaction, and return the previous setting. For ``external_transaction``."""
        before = self._options.external
        self._options = replace(self._options, external=permitted)
        return before

    def _checked(self, given: object) -> Definition[Any, Any]:
        effect: Any = given
        if not isinstance(effect, Definition):
            raise HandlerDefinitionError(f"{effect!r} is no effect; pass functions with @effect(...)")
        if effect.asynchronous != self._asynchronous:
            has, other = ("async def", "AsyncEffects") if effect.asynchronous else ("plain def", "Effects")
            raise HandlerDefinitionError(f"{effect.identity} is {has}: use {other} for it")
        return effect

    # run ----------------------------------------------------------------------------------------------------------

    def _run(self, asked: object, given: Any, key: object, scope: object, wait: float) -> Any:
        _refuse_within("run()")
        effect = self._checked(asked)
        if effect not in self._known.values():
            raise HandlerDefinitionError(
                f"{effect.identity} is not in the list of effects that was passed to {type(self).__name__}(); add it"
            )
        if scope is None and self._scope_required:
            raise HandlerDefinitionError(
                f"{effect.identity} was called without a scope; give scope=, such as the tenant"
            )
        new = None if given is None else new_row(effect, given, key, scope)
        stored = (RecordKey.of(key, scope).stored, effect.identity)
        deadline = time.monotonic() + wait
        while True:
            step, row, taken = self._begin(effect, stored, new)
            if taken is not None:
                return self._send(taken)
            assert row is not None  # noqa: S101  # _begin raises NotArmedError
            if step.do is Do.ANSWER:
                return _answer(effect, row)
            if step.do is Do.RECORD:
                try:
                    self._record_left(effect, row)
                except record.RowHeld:
                    if time.monotonic() >= deadline:
                        raise
                    self._waiting.sleep(random.uniform(0.05, 0.5))  # noqa: S311
                continue
            if row.is_unstorable:
                raise EffectUnknown(f"{_label(row)} was done, and its value cannot be stored; a person must decide")
            if row.lease_until is None or step.until != row.lease_until:
                raise EffectUnknown(
                    f"an attempt at {_label(row)} ended without an answer, and the policy does not permit to send it "
                    "again now; `settle` continues by the policy"
                )
            left = (step.until - row.now) / 1000
            if time.monotonic() >= deadline:
                raise InProgress(f"an attempt at {_label(row)} is running; call run() again later", retry_after=left)
            self._waiting.sleep(min(left, deadline - time.monotonic(), random.uniform(0.05, 0.5)))  # noqa: S311

    def _begin(
        self, effect: Definition[Any, Any], key: tuple[str, str], new: NewRow | None
    ) -> tuple[Step, Seen | None, _Taken | None]:
        """Take the row or insert it. If neither is possible, return the next step."""
        table, token, lease, began = self._tables.marker, new_token(), effect.lease.ms, time.monotonic()
        insert = None if new is None else record.insert(table, new, token, lease)
        found: list[tuple[Step, Seen, _Taken | None]] = []

        def otherwise(row: Seen | None) -> Change | None:
            if row is None:
                if new is not None:
                    raise OvertakenError("the row of the effect was deleted meanwhile; run it again")
                raise NotArmedError(
                    f"no effect {effect.identity} is armed under this key; arm it, or pass its request to run()"
                )
            if new is not None:
                refuse_other_request(row.fingerprint, new)
            step = next_step(row, effect.unknown, effect.lease.ms)
            taken = _taken(effect, row, token, began, step) if step.do is Do.SEND else None
            found[:] = [(step, row, taken)]
            return None if taken is None else record.take(table, row, token, lease, latest=step.latest)

        made = self._change(key, insert, otherwise).made
        if new is not None and made is insert:
            return Step(Do.SEND), None, _new_taken(effect, new, token, began)
        self._report_armed(found[0][2])
        return found[0]

    # settle -------------------------------------------------------------------------------------------------------

    def _settle(self, limit: int) -> Settled:
        _refuse_within("settle()")
        if limit < 1:
            raise ValueError(f"limit (the number of effects to handle) must be at least 1, not {limit}")
        settled, seen, held, until = Settled(), set[tuple[str, str]](), list[Seen](), None
        while (left := limit - len(seen) + len(held)) > 0:
            rows = self._due(until, min(_FOUND_AT_ONCE, left) + len(held))
            new = [row for row in rows if row.key not in seen]
            if not new:
                break
            until = until or new[0].now  # leave rows that become due later to the next run
            for row in new:
                seen.add(row.key)
                if not self._settle_one(self._known[row.handler], row, settled):
                    held.append(row)
        for row in held:  # a row that was held for a moment is free now
            if not self._settle_one(self._known[row.handler], row, settled):
                logger.warning("%s: passed over, because another transaction holds its row", _label(row))
                settled.held += 1
        return settled

    def _due(self, until: int | None, limit: int) -> list[Seen]:
        found: list[Seen] = []

        def look(connection: Connection, _: Dialect) -> bool:
            found[:] = record.due(connection, self._tables.marker, list(self._known), until, limit)
            if len(found) < limit:  # all other due rows have other names
                self._log_overdue(
                    record.overdue(connection, self._tables.marker, self._known.keys() | self._logged, HOUR)
                )
            return False

        self._transact(("", "settle"), look, reads=True)
        return found

    def _log_overdue(self, others: list[tuple[str, int]]) -> None:
        for name, number in others:
            self._logged.add(name)
            logger.warning(
                "%d effects with the name %s have been due for more than an hour, and this process has no such effect",
                number,
                name,
            )

    def _settle_one(self, effect: Definition[Any, Any], row: Seen, settled: Settled) -> bool:
        """Do what the policy permits. Log an error instead of raising it, so that ``settle`` continues.

        Return False, and do nothing, if another transaction holds the row.
        """
        step = next_step(row, effect.unknown, effect.lease.ms)
        try:
            if step.do is Do.RECORD:
                outcome = self._record_left(effect, row)
                _count(settled, outcome)
            elif step.do is Do.STOP:
                self._stop(effect, row, settled)
            elif step.do is Do.WAIT:
                until = step.until  # also beside evidence, which is recorded when the running attempt has ended
                self._release(row, row.token, None, over=True, waits=False, next_at=until, lease_until=row.lease_until)
                settled.skipped += 1
            elif step.do is Do.ANSWER or (taken := self._take(effect, row, step)) is None:
                settled.skipped += 1
            elif step.do is Do.SEND:
                self._send(taken, keep=True)
                settled.done += 1
            else:
                _count(settled, self._ask(taken))
        except record.RowHeld:
            return False
        except Rejected:
            settled.rejected += 1
        except NotDone:
            settled.not_done += 1
        except EffectUnknown:
            settled.unknown += 1
        except Exception as error:
            logger.exception("%s: could not be settled", _label(row))
            settled.failed += 1
            if not isinstance(error, NotRecordedError | LeaseLostError):  # these were already observed
                self._report("failed", row, error=error)
            if step.do is not Do.WAIT:  # does nothing if the row was taken
                again = pace(row, effect.lease.ms)
                values: dict[str, Any] = {"lease_until": row.lease_until}
                if step.do is Do.RECORD:
                    values["error"] = shown(error.__cause__ or error)
                with suppress(record.RowHeld, RetriesExhaustedError):  # the row stays due
                    self._release(row, row.token, again, over=True, waits=False, **values)
        return True

    def _stop(self, effect: Definition[Any, Any], row: Seen, settled: Settled) -> None:
        """Leave the effect to a person. An attempt that is running may still record its outcome."""
        lease_until = None if row.lease_until is None else min(row.lease_until, row.now + effect.lease.ms)
        stop = {"stopped_at": now_ms(), "lease_until": lease_until}
        if not self._release(row, row.token, None, over=row.is_unstorable, waits=False, **stop):
            settled.skipped += 1
            return
        why = "the policy has ended"
        if row.is_unstorable:
            why = "it was done, and its value cannot be stored"
        elif row.was_sent_ahead:
            why = "the database's clock was ahead during an attempt"
        logger.warning("%s: %s; a person must decide", _label(row), why)
        self._report("stopped", row)
        settled.stopped += 1

    def _take(self, effect: Definition[Any, Any], row: Seen, step: Step) -> _Taken | None:
        """Take the row for the step with one statement. Return None if another process was faster."""
        token = new_token()
        taken = _taken(effect, row, token, time.monotonic(), step)
        take = record.take_to_ask if step.do is Do.ASK else record.take
        change = take(self._tables.marker, row, token, effect.lease.ms, latest=step.latest)
        if self._change(row.key, change, waits=False).made is None:
            return None
        self._report_armed(taken)
        return taken

    # An attempt ---------------------------------------------------------------------------------------------------

    def _send(self, taken: _Taken, *, keep: bool = False) -> Any:
        """Call the effect's function without holding a connection, and record its result.

        If nothing was sent, a row that ``run`` inserted is deleted unless ``keep``: the caller gets ``NotDone``.
        """
        effect, row = taken.effect, taken.row
        try:
            value = self._call(effect, effect.function, taken)
        except Rejected as rejected:
            self._record(taken, _Outcome(REJECTED, _rejection(rejected), ATTEMPT, rejected))
            raise
        except NotDone as error:
            if not taken.set_first:
                self._give_back(taken, error)
                raise EffectUnknown(
                    f"this attempt did not send {_label(row)}, and it is unknown whether an earlier one did"
                ) from error
            self._give_back(taken, error, delete=not keep, **_NOTHING_SENT)
            raise
        except Exception as error:
            self._give_back(taken, error)
            raise EffectUnknown(f"an attempt at {_label(row)} ended without an answer ({shown(error)})") from error
        self._record(taken, self._done(taken, value, ATTEMPT))
        return value

    def _ask(self, taken: _Taken) -> int | None:
        """Ask the provider and record its answer. Return the outcome."""
        effect, row, asked = taken.effect, taken.row, taken.step.ask
        assert asked is not None  # noqa: S101  # the step is Do.ASK
        try:
            value = self._call(effect, asked.function, taken)
        except Rejected as rejected:
            self._record(taken, _Outcome(REJECTED, _rejection(rejected), ASKED, rejected))
            return REJECTED
        except NotDone as error:
            self._give_back(taken, error, at_once=True, **_NOTHING_SENT)
            raise
        except Exception as error:  # StillUnknown or any other error: the provider does not know
            self._give_back(taken, error, ended_at=row.last_ended_at)
            raise EffectUnknown(f"the provider does not know whether {_label(row)} was done") from error
        self._record(taken, self._done(taken, value, ASKED))
        return DONE

    def _call(self, effect: Definition[Any, Any], function: Callable[..., Any], taken: _Taken) -> Any:
        with _noted():
            returned = function(taken.given, taken.attempt)
            check_result(effect.identity, returned, asynchronous=self._asynchronous)
            value = await_only(returned) if self._asynchronous else returned
        check_result(effect.identity, value, asynchronous=False)
        return value

    def _done(self, taken: _Taken, value: Any, by: str) -> _Outcome:
        """Return the outcome of an attempt or an ask that returned ``value``.

        If the value cannot be stored, keep in the row that it was returned, and raise ``NotRecordedError``.
        """
        effect, row = taken.effect, taken.row
        try:
            data = encoded(effect.codec, value, f"{effect.identity} returned {type(value).__name__}")
            refuse_large(data, self._max_result_bytes, f"the value of {effect.identity}")
            return _Outcome(DONE, data, by, value)
        except ResultError as error:
            refused = error
        why = shown(refused)  # names the type of the value, which may contain secrets
        kept = record.evidence(DONE, None, taken.attempt.number if by == ATTEMPT else None)
        text = f"{_UNSTORABLE}: {why}"
        keep = record.keep(self._tables.marker, row, taken.token, None, kept, text, stopped_at=now_ms())
        try:
            made = self._waiting.to_the_end(partial(self._change, row.key, keep)).made
        except Exception as second:
            raise self._lost(taken, value, refused, second) from second
        if made is None:
            self._waiting.to_the_end(partial(self._keep_beside, taken, _Outcome(DONE, None, by, value)))
        text = f"{_label(row)}: {text}; a person must decide"
        logger.error("%s", text)
        self._report("stopped", row, taken)
        raise NotRecordedError(text, value)

    def _give_back(
        self, taken: _Taken, error: Exception, *, at_once: bool = False, delete: bool = False, **values: Any
    ) -> None:
        """End the attempt without an outcome. ``delete`` deletes the row, unless it was armed."""
        row = taken.row
        nothing_sent = values.get("first_sent_at", 0) is None
        self._report("not_done" if nothing_sent else "unknown", row, taken, error)
        if delete and not row.armed:
            removed = self._change(row.key, record.remove(self._tables.marker, row, taken.token)).made
            if removed is not None:
                return  # otherwise the row was armed meanwhile
        given = {"ended_at": now_ms(), "error": shown(error), **values}
        self._release(
            row, taken.token, 0 if at_once else pace(row, taken.effect.lease.ms, sent=not nothing_sent), **given
        )

    def _release(
        self, row: Seen, held: str, next_in: int | None, *, over: bool = False, waits: bool = True, **values: Any
    ) -> bool:
        release = record.release(self._tables.marker, row, held, next_in, over=over, **values)
        return self._change(row.key, release, waits=waits).made is not None

    # The outcome --------------------------------------------------------------------------------------------------

    def _record(self, taken: _Taken, outcome: _Outcome) -> None:
        """Record the outcome with the rows of ``recorded`` in one transaction. If that fails, keep the outcome."""
        try:
            found, twice = self._finish(taken.effect, taken.row, taken.token, outcome)
        except BaseException as error:  # also after a cancellation, keep the provider's answer
            try:
                kept = self._waiting.to_the_end(partial(self._keep, taken, outcome, error))
            except Exception as second:
                raise self._lost(taken, outcome.result, error, second) from second
            if not isinstance(error, Exception):
                raise
            if kept:
                self._report("failed", taken.row, taken, error)
                then = "the row keeps the outcome, and `settle` tries again"
                raise _not_recorded(taken.row, outcome.result, error, then) from error
            found, twice = _Found.TAKEN_OVER, ""
        if found is _Found.TAKEN_OVER:
            self._waiting.to_the_end(partial(self._keep_beside, taken, outcome))
        self._report("done" if outcome.number == DONE else "rejected", taken.row, taken)
        if twice:
            raise self._double(taken, outcome, twice)

    def _lost(self, taken: _Taken, value: Any, why: BaseException, error: Exception) -> NotRecordedError:
        """Return the error for an outcome that was neither recorded, because of ``why``, nor kept in the row."""
        self._report("failed", taken.row, taken, error)
        reason = shown(error) if isinstance(error, ProjectorDedupError) else type(error).__name__  # no value of SQL
        text = "%s: the library could not store the outcome: %s; compare it with `idempotency effects show`"
        logger.error(text, _label(taken.row), reason)
        return _not_recorded(taken.row, value, why, "the row could not keep the outcome either")

    def _finish(
        self, effect: Definition[Any, Any], row: Seen, token: str, outcome: _Outcome, *, waits: bool = True
    ) -> tuple[_Found, str]:
        """Write the outcome, and call ``recorded`` or ``refused`` in the same transaction.

        If an earlier attempt was done too, mark the row, and also return a text that says so.
        """
        found, twice = _Found.MINE, ""
        finish = partial(record.finish, self._tables.marker, row, token, outcome.number, outcome.data, outcome.by)
        recording = finish(over=row.evidence_outcome is not None)

        def otherwise(now: Seen | None) -> Change | None:
            nonlocal found, twice
            found, twice = _Found.MINE, ""
            if now is None or now.token != token or not (now.outcome is None or recording.is_in(now)):
                found = _Found.TAKEN_OVER
                return None
            evidence = now.evidence_outcome, now.evidence
            of_attempt = row.evidence_outcome is None and now.evidence_attempt is not None
            if of_attempt and outcome.by == ATTEMPT and _is_double(effect, outcome, *evidence):
                twice = _twice(now, now.attempt, outcome)
            if now.outcome is not None:  # another process has recorded the same outcome
                found = _Found.TAKEN_OVER if twice else found  # so that the row is marked
                return None
            agrees = outcome.number == DONE and (outcome.by == ATTEMPT or now.evidence is None)
            if now.evidence_outcome in (DONE, DOUBLE) and not agrees:
                found = _Found.OVERRULED
                return record.release(self._tables.marker, row, token, 0, over=True)  # the next settle records it
            return finish(over=True, twice=twice)

        function = effect.on_recorded if outcome.number == DONE else effect.on_refused

        def handler(uow: UnitOfWork) -> Callable[[], Any] | None:
            if function is None or found is _Found.OVERRULED:
                return None
            return lambda: function(*_own_arguments(effect, row, outcome), uow.handlers_session)

        self._change(row.key, recording, otherwise, handler, waits=waits)
        if found is _Found.OVERRULED:
            logger.error("%s: an earlier attempt was done, but a later answer differs: check the provider", _label(row))
            raise EffectUnknown(f"{_label(row)} was done by an earlier attempt; `settle` records its value")
        return found, twice

    def _keep(self, taken: _Taken, outcome: _Outcome, why: BaseException) -> bool:
        """Keep the outcome in the row, in a separate transaction.

        Return False if another process has taken over the row, or an earlier attempt has left its outcome there.
        """
        row, table, written = taken.row, self._tables.marker, (outcome.number, outcome.data)
        kept = record.evidence(*written, taken.attempt.number if outcome.by == ATTEMPT else None)
        keep = record.keep(table, row, taken.token, pace(row, taken.effect.lease.ms), kept, shown(why))
        changing = self._change(row.key, keep)
        recorded = record.finish(table, row, taken.token, *written, outcome.by, over=True)  # by a lost COMMIT
        return changing.made is not None or recorded.is_in(changing.now)

    def _keep_beside(self, taken: _Taken, outcome: _Outcome) -> NoReturn:
        """Keep an outcome that came after another process had taken over the row, and raise ``LeaseLostError``."""
        effect, row, table = taken.effect, taken.row, self._tables.marker
        number = taken.attempt.number
        values = record.evidence(outcome.number, outcome.data, number if outcome.by == ATTEMPT else None)
        error = _UNSTORABLE if outcome.data is None else None
        twice = ""

        def keep(now: Seen | None) -> Change | None:
            nonlocal twice
            twice = ""
            if now is None:
                return None
            others = [(now.outcome, now.result)] if now.decided_by == ATTEMPT else []  # values of other attempts
            if now.evidence_attempt not in (None, number):  # None: of an ask
                others.append((now.evidence_outcome, now.evidence))
            if outcome.by == ATTEMPT and any(_is_double(effect, outcome, *other) for other in others):
                twice = _twice(now, number, outcome)
            return record.keep_beside(table, now, taken.token, number, values, error, twice)

        try:
            changing = self._change(row.key, None, keep)
        except Exception as error:
            if twice:
                unmarked = f"{twice}; the row could not be marked, so no list may have it"
                raise self._double(taken, outcome, unmarked) from error
            late = LeaseLostError("it came after another process had taken over the effect")
            raise self._lost(taken, outcome.result, late, error) from error
        kept, now = changing.made is not None, changing.now
        if now is None:
            self._report("fenced", row, taken)
            raise LeaseLostError(f"{_label(row)} has an outcome, but its row was deleted meanwhile", outcome.result)
        if twice:
            raise self._double(taken, outcome, twice)
        self._report("fenced", row, taken)
        text = f"the outcome of {_label(row)} came after another process had taken over the effect"
        text += "; the row keeps the outcome" if kept else "; the outcome is only in this error"
        differs = now.outcome != outcome.number or not _is_same_value(effect, now.result, outcome.data)
        if now.outcome is not None and differs:
            text += f", and it differs from the recorded one ({now.decided_by} decided): check the provider"
            logger.error("%s", text)
        raise LeaseLostError(text, outcome.result)

    def _double(self, taken: _Taken, outcome: _Outcome, twice: str) -> DoubleEffectError:
        """Report that the effect was done twice. Return the error."""
        text = f"{twice}; at the provider, undo each deed that is not the recorded value"
        logger.error("%s", text)
        error = DoubleEffectError(text, outcome.result)
        self._report("double", taken.row, taken, error)
        return error

    def _record_left(self, effect: Definition[Any, Any], row: Seen) -> int | None:
        """Record the value that an attempt has left, or the decision of a person. Return the outcome.

        Return None if the person decided "not done".
        """
        decision = json.loads(row.decision or "{}")
        if row.evidence is not None:
            number, data = DONE if row.evidence_outcome == DOUBLE else row.evidence_outcome, row.evidence
            by = ASKED if row.evidence_attempt is None else ATTEMPT
        else:
            unseen = decision.get("knew") != [row.evidence_outcome, row.evidence_attempt]
            if row.is_unstorable and decision["outcome"] != "done" and unseen:
                self._ask_again(row, decision)
            if decision["outcome"] == "not done":
                why = f"not done, said {decision['who']}: {decision['why']}"
                values = {**_NOTHING_SENT, "decision": None, "error": why, "token": new_token()}
                if row.is_unstorable:
                    values |= {"evidence_outcome": None, "evidence_attempt": None}
                self._release(row, row.token, 0, over=row.is_unstorable, waits=False, **values)
                self._report("not_done", row)
                return None
            number, by = (DONE if decision["outcome"] == "done" else REJECTED), PERSON
            data = decision["value"].encode() if number == DONE else _rejection(Rejected(decision["code"]))
        assert number is not None  # noqa: S101  # the row has both or neither
        result = effect.codec.loads(data) if number == DONE else _rejected(data, replayed=False)
        try:
            found, _ = self._finish(effect, row, row.token, _Outcome(number, data, by, result), waits=False)
        except record.RowHeld:
            raise
        except Exception as error:  # a Rejected or NotDone of `recorded` says nothing about the effect
            self._report("failed", row, error=error)
            raise _not_recorded(row, result, error, "`settle` tries again") from error
        if found is _Found.TAKEN_OVER:
            raise OvertakenError(f"another process has taken over {_label(row)} meanwhile")
        if by != PERSON and decision and decision["outcome"] != ("done" if number == DONE else "rejected"):
            logger.error(
                "%s: the library recorded the outcome of an attempt, and ignored the decision of a person", _label(row)
            )
        self._report("done" if number == DONE else "rejected", row)
        return number

    def _ask_again(self, row: Seen, decision: dict[str, Any]) -> NoReturn:
        """Leave the effect to a person again: after the decision, an attempt returned a value that cannot be stored."""
        text = f"{_UNSTORABLE}; it came after {decision['who']} had decided"
        values = {"decision": None, "stopped_at": now_ms(), "error": text}
        self._release(row, row.token, None, over=True, waits=False, **values)
        logger.error("a person must decide again: %s was decided as %s; %s", _label(row), decision["outcome"], text)
        self._report("stopped", row)
        raise EffectUnknown(f"{_label(row)}: {text}; a person must decide again")

    def _report_armed(self, taken: _Taken | None) -> None:
        if taken is not None and taken.row.armed and taken.row.attempt == 0:
            self._report("armed", taken.row)

    def _report(
        self, outcome: Observed, row: Seen, taken: _Taken | None = None, error: Exception | None = None
    ) -> None:
        """Call the observer. ``taken`` is the attempt, or None."""
        if self._observing is None:
            return
        began, number = (None, row.attempt) if taken is None else (taken.attempt.began, taken.attempt.number)
        self._observing.report_call("effect", outcome, row.handler, row.message_id, began, number, error)

    def _change(
        self,
        key: tuple[str, str],
        change: Change | None,
        otherwise: Callable[[Seen | None], Change | None] = lambda _: None,
        handler: Callable[[UnitOfWork], Callable[[], Any] | None] = lambda _: None,
        *,
        waits: bool = True,
    ) -> _Changing:
        """Change the row of an effect in a transaction of its own, in which ``handler`` runs too. See ``_Changing``."""
        changing = _Changing(self._tables.marker, key, change, otherwise, waits)
        self._transact(key, changing.run, handler)
        return changing

    def _transact(
        self,
        key: tuple[str, str],
        change: Callable[[Connection, Dialect], bool],
        handler: Callable[[UnitOfWork], Callable[[], Any] | None] = lambda _: None,
        *,
        reads: bool = False,
    ) -> None:
        work = _Transaction(self._tables, key, change, handler, reads)
        deliver(work, self._factory, self._options, self._policy, self._waiting)


class Effects(_Effects):
    """Sends effects: ``run`` sends one now, ``settle`` handles all that are due.

    Threads may share the object. ``projector_dedup.options`` describes the arguments that are not described here.

    - ``effects``: a list of functions with ``@effect``. Raises ``HandlerDefinitionError`` for any other list.
    """

    _asynchronous = False
    _factory: sessionmaker[Session]

    def run(
        self, effect: Effect[I, R], request: I | None = None, *, key: object, scope: object = None, wait: float = 0.0
    ) -> R:
        """Send the effect now and return the provider's answer, or return the recorded answer.

        If ``run`` returns, the outcome is recorded. The library holds no connection while the effect's function runs.

        - ``request``: the first argument of the function. Omit it if the effect is armed.
        - ``key``, ``scope``: as in ``arm``.
        - ``wait``: how long to wait for an attempt of another process, in seconds.

        Raises ``Rejected`` if the provider rejected the request, ``NotDone`` if nothing was sent, ``InProgress`` (with
        ``retry_after`` in seconds), ``EffectUnknown``, ``NotRecordedError``, ``LeaseLostError``, ``KeyReusedError``
        and ``NotArmedError``. Raises ``UnsafeSessionError`` inside a handler; call ``arm`` there.
        """
        return cast("R", self._run(effect, request, key, scope, wait))

    def settle(self, *, limit: int = 100) -> Settled:
        """Send armed effects, and continue unknown effects and those of killed processes by their policies.

        Call it from cron or in a loop. Several processes may call it at the same time. It handles at most ``limit``
        effects, each once, the oldest first. If an effect fails, ``settle`` logs the error and continues with the next.

        Returns how many effects had which result.
        """
        return self._settle(limit)


class AsyncEffects(_Effects):
    """Sends effects with ``async def`` functions. Tasks of one event loop may share the object. See ``Effects``."""

    _asynchronous = True
    _factory: async_sessionmaker[AsyncSession]

    async def run(
        self,
        effect: AsyncEffect[I, R],
        request: I | None = None,
        *,
        key: object,
        scope: object = None,
        wait: float = 0.0,
    ) -> R:
        """Send the effect now, or return the recorded answer. See ``Effects.run``."""
        return cast("R", await greenlet_spawn(self._run, effect, request, key, scope, wait))

    async def settle(self, *, limit: int = 100) -> Settled:
        """Handle all effects that are due. See ``Effects.settle``."""
        return cast("Settled", await greenlet_spawn(self._settle, limit))


# Helpers --------------------------------------------------------------------------------------------------------------


def _new_taken(effect: Definition[Any, Any], new: NewRow, token: str, began: float) -> _Taken:
    attempt = Attempt(new.provider_key, 1, effect.lease.seconds, began)
    given = effect.request_codec.loads(new.request)
    return _Taken(effect, Seen.of_new(new, token), token, given, attempt, Step(Do.SEND), set_first=True)


def _taken(effect: Definition[Any, Any], row: Seen, token: str, began: float, step: Step) -> _Taken:
    number = row.attempt if step.do is Do.ASK else row.attempt + 1
    called = step.do is Do.ASK  # in an ask function, `NotDone` would mean that the provider has not done it
    attempt = Attempt(row.provider_key, number, effect.lease.seconds, began, called)
    given = effect.request_codec.loads(row.request)  # before the row is taken, in case the request cannot be read
    return _Taken(effect, row, token, given, attempt, step, set_first=row.first_sent_at is None)


def _own_arguments(effect: Definition[Any, Any], row: Seen, outcome: _Outcome) -> tuple[Any, Any]:
    """Return the request and the outcome as they are stored, so that no function has changed them."""
    request, data = effect.request_codec.loads(row.request), outcome.data or b""
    return request, effect.codec.loads(data) if outcome.number == DONE else _rejected(data, replayed=False)


def _is_double(effect: Definition[Any, Any], outcome: _Outcome, number: int | None, data: bytes | None) -> bool:
    """True if two attempts were done. With ``resend``, equal answers mean that the provider did it once."""
    if outcome.number != DONE or number not in (DONE, DOUBLE):
        return False
    return not (isinstance(effect.unknown, Resend) and _is_same_value(effect, outcome.data, data))


def _is_same_value(effect: Definition[Any, Any], one: bytes | None, other: bytes | None) -> bool:
    """True if two values are equal when they are read. One that cannot be stored may be equal to any other."""
    if one is None or other is None or one == other:
        return True
    try:
        return is_same(effect.codec.loads(one), effect.codec.loads(other))
    except Exception:  # noqa: BLE001  # of the user's codec
        return False


def _twice(now: Seen, number: int, outcome: _Outcome) -> str:
    """Return a text about two attempts that were done: attempt ``number``, just now, and the one that the row has."""
    other = now.evidence_attempt, now.evidence, None if now.outcome else now.ended_at
    if now.evidence_attempt in (None, number):
        other = now.attempt, now.result, now.ended_at
    both = " and ".join(
        f"attempt {each} ({_digest(value)}{'' if at is None else f', {_time(at)}'})"
        for each, value, at in (other, (number, outcome.data, now.now))
    )
    return f"two attempts at {_label(now)} were done: {both}"


def _digest(data: bytes | None) -> str:
    return "a value that cannot be stored" if data is None else f"sha256:{sha256(data).hexdigest()[:12]}"


def _time(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _not_recorded(row: Seen, value: Any, why: BaseException, then: str) -> NotRecordedError:
    return NotRecordedError(f"the outcome of {_label(row)} could not be recorded ({shown(why)}); {then}", value)


def _answer(effect: Definition[Any, Any], row: Seen) -> Any:
    """Return the recorded value, or raise the recorded rejection."""
    data = row.result or b""
    if row.outcome == REJECTED:
        raise _rejected(data, replayed=True)
    try:
        return effect.codec.loads(data)
    except Exception as error:
        raise ResultUnreadableError(
            f"the value of {_label(row)} cannot be read ({type(error).__name__}); the effect was done, and is not sent "
            "again. Correct the annotation of its result",
            data,
        ) from error


def _rejection(rejected: Rejected) -> bytes:
    """Return a rejection as it is stored. Omit its detail if JSON cannot store it."""
    try:
        return json_codec.dumps(as_json({"code": rejected.code, "detail": rejected.detail}))
    except Exception:  # noqa: BLE001  # a wrong detail must not prevent that the outcome is recorded
        code: object = rejected.code
        return json_codec.dumps({"code": code if type(code) is str else shown(rejected), "detail": None})


def _rejected(data: bytes, *, replayed: bool) -> Rejected:
    value = json_codec.loads(data)
    return Rejected(value["code"], value["detail"], replayed=replayed)


def _label(row: Seen) -> str:
    return f"effect {printable(row.handler)}, {RecordKey.read(row.message_id)}"


def _count(settled: Settled, number: int | None) -> None:
    if number is None:
        settled.not_done += 1
    elif number == DONE:
        settled.done += 1
    else:
        settled.rejected += 1


def _refuse_within(call: str) -> None:
    sending = _sending.get()
    if is_handling() or (sending is not None and sending.under_way):
        raise UnsafeSessionError(
            f"{call} was called inside a handler or an effect, whose rollback could not undo what was sent. Call "
            "arm(session, ...) there, and `settle` sends the effect after the COMMIT"
        )


@contextmanager
def _noted() -> Iterator[None]:
    note = _Sending()
    token = _sending.set(note)
    try:
        yield
    finally:
        note.under_way = False
        _sending.reset(token)
