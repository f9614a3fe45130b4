"""Drive effects: take a row, call the body with no connection held, and record the outcome.

``run`` does so for one effect, now. ``settle`` does so for all that are due, each as its policy says. Every step is a
transaction of its own, by ``delivery.deliver``.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from enum import Enum, auto
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar, cast

from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.util import await_only, greenlet_spawn

from ..asyncio_names import AsyncSession, async_sessionmaker
from ..commands.codecs import as_json, encoded
from ..commands.codecs import json as json_codec
from ..commands.errors import Rejected, ResultError, ResultUnreadableError
from ..commands.record import REJECTED, RecordKey
from ..commands.runner import MAX_RESULT_BYTES
from ..delivery import deliver
from ..dialects import Dialect
from ..dialects.columns import now_ms
from ..errors import HandlerDefinitionError, InProgress, OvertakenError, ProjectorDedupError, UnsafeSessionError
from ..handler import check_result
from ..markers import library_errors, marker_key
from ..message import printable
from ..options import RetryPolicy, UnitOptions, check_session_factory
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
    PERSON,
    EffectTables,
    NewRow,
    Seen,
    default_effect_tables,
    new_token,
    shown,
)
from .steps import Do, Step, next_step, pace

logger = logging.getLogger("projector_dedup")

I = TypeVar("I")  # noqa: E741
R = TypeVar("R")

_FOUND_AT_ONCE = 100
_NOTHING_SENT: dict[str, Any] = {"first_sent_at": None, "ended_at": None, "stopped_at": None}

_sending: ContextVar[bool] = ContextVar("projector_dedup_sending", default=False)


@dataclass
class _Transaction:
    """One transaction on the row of an effect: a change as its first statement, and perhaps a handler behind it.

    ``change`` returns False if there is nothing to commit. It may be called again after an interrupted COMMIT.
    """

    tables: EffectTables
    key: tuple[str, str]
    change: Callable[[Connection, Dialect], bool]
    handler: Callable[[UnitOfWork], Callable[[], Any] | None]
    marked = connected = True

    def __post_init__(self) -> None:
        self.identity = self.key[1]

    def claim(self, uow: UnitOfWork) -> bool:
        """Change the row; return True if there is something to commit."""

        def changes(connection: Connection, dialect: Dialect) -> bool:
            dialect.refuse_marker(connection, self.tables.marker)
            with library_errors(connection, dialect, self.tables):
                return self.change(connection, dialect)

        return uow.claim_by(marker_key(*self.key), changes)

    def calls(self, uow: UnitOfWork) -> Iterator[Callable[[], Any]]:
        """Yield the call of ``recorded`` or ``refused``, if there is one."""
        call = self.handler(uow)
        if call is not None:
            yield call

    def log_settled(self, attempts: Attempts) -> None:
        """Log nothing: the outcome of the effect is logged."""

    def log_retry(self, error: Exception, attempts: Attempts) -> None:
        """Log at INFO that the transaction is tried again, and after which error."""
        told = f"effect {printable(self.key[0])}, {printable(self.identity)}"
        logger.info("retry after %s: %s", type(error).__name__, told, extra={"attempts": attempts.number})


@dataclass
class Settled:
    """The numbers of effects with which ``settle`` did one thing or another."""

    done: int = 0  #: recorded as done
    rejected: int = 0  #: recorded as rejected
    not_done: int = 0  #: surely not sent, or not done: it is sent again later
    unknown: int = 0  #: the attempt ended without an answer, or the provider could not tell
    stopped: int = 0  #: its policy has ended: a person decides
    failed: int = 0  #: it could not be recorded, or not be read; see the log
    skipped: int = 0  #: somebody else was faster, or it was too early

    def __str__(self) -> str:
        return ", ".join(f"{getattr(self, each.name)} {each.name.replace('_', ' ')}" for each in fields(self))


@dataclass(frozen=True)
class _Outcome:
    """The outcome that an attempt, an ask or a person gives an effect."""

    number: int  #: DONE or REJECTED
    data: bytes  #: the value or the rejection, as it is stored
    by: str
    told: Any  #: the value, or ``Rejected``


class _Found(Enum):
    """How a row was found when its outcome came."""

    MINE = auto()
    DOUBLE = auto()  #: an earlier attempt had been done too
    OVERRULED = auto()  #: by the value that an attempt had left there, which is stronger
    TAKEN_OVER = auto()  #: by another process, or by a person


@dataclass(frozen=True)
class _Taken:
    """A row that this process has taken."""

    effect: Definition[Any, Any]
    row: Seen  #: as it was before it was taken; of a new row, as it is now
    token: str
    given: Any  #: the request
    attempt: Attempt
    step: Step
    set_first: bool  #: this attempt is the first that may have sent something


class _Effects:
    """The part that both share."""

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
    ) -> None:
        check_session_factory(session_factory, asynchronous=self._asynchronous)
        if not isinstance(tables, EffectTables):
            raise ValueError("tables are those of make_effect_tables(), which have columns for effects")
        if scope not in ("required", "optional"):
            raise ValueError(f"scope is 'required' or 'optional', not {scope!r}")
        self._factory = session_factory
        self._tables = tables
        self._scope_required = scope == "required"
        self._policy = retry or RetryPolicy()
        self._options = UnitOptions(tables)
        self._max_result_bytes = max_result_bytes
        self._waiting = AWAITING if self._asynchronous else BLOCKING
        self._known: dict[str, Definition[Any, Any]] = {}
        for each in effects:
            if self._known.setdefault(self._checked(each).identity, each) is not each:
                raise HandlerDefinitionError(f"two effects have the name {each.identity}; give each its own name=")

    def _checked(self, given: object) -> Definition[Any, Any]:
        effect: Any = given
        if not isinstance(effect, Definition):
            raise HandlerDefinitionError(f"{effect!r} is no effect; give functions under @effect(...)")
        if effect.asynchronous != self._asynchronous:
            has, other = ("async def", "AsyncEffects") if effect.asynchronous else ("plain def", "Effects")
            raise HandlerDefinitionError(f"{effect.identity} is {has}: give it to {other}")
        return effect

    # run ----------------------------------------------------------------------------------------------------------

    def _run(self, asked: object, given: Any, key: object, scope: object, wait: float) -> Any:
        _refuse_within("run()")
        effect = self._checked(asked)
        if effect not in self._known.values():
            raise HandlerDefinitionError(f"{effect.identity} is not in the list that this object was made with; add it")
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
                self._record_left(effect, row)
                continue
            if row.lease_until is None or step.until != row.lease_until:
                raise EffectUnknown(
                    f"an attempt at {_told(row)} ended without an answer; its policy does not permit to send it again "
                    "now. `settle` drives it"
                )
            left = (step.until - row.now) / 1000
            if time.monotonic() >= deadline:
                raise InProgress(f"an attempt at {_told(row)} is under way; ask again later", retry_after=left)
            self._waiting.sleep(min(left, deadline - time.monotonic(), random.uniform(0.05, 0.5)))  # noqa: S311

    def _begin(
        self, effect: Definition[Any, Any], key: tuple[str, str], new: NewRow | None
    ) -> tuple[Step, Seen | None, _Taken | None]:
        """Take the row, or make it; else return what is to be done with it."""
        table, token, lease, began = self._tables.marker, new_token(), effect.lease_ms, time.monotonic()
        found: list[tuple[Step, Seen | None, _Taken | None]] = []

        def change(connection: Connection, dialect: Dialect) -> bool:
            if new is not None and dialect.insert_new(
                connection, table, new.values(armed=False, token=token, lease=lease)
            ):
                found[:] = [(Step(Do.SEND), None, _new_taken(effect, new, token, began))]
                return True
            row = record.read(connection, table, *key)
            if row is None:
                if new is not None:
                    raise OvertakenError("the row of the effect was deleted meanwhile; run it again")
                raise NotArmedError(f"nothing is armed under the key of {effect.identity}: arm it, or give its request")
            if row.token == token:  # the COMMIT that was interrupted came through
                return False
            if new is not None:
                refuse_other_request(row.fingerprint, new)
            step = next_step(row, effect.unknown, lease)
            if step.do is not Do.SEND:
                found[:] = [(step, row, None)]
                return False
            taken = _taken(effect, row, token, began, step)
            if not record.take(connection, table, row, token, lease, latest=step.latest):
                raise OvertakenError("another process took the effect; look again")
            found[:] = [(step, row, taken)]
            return True

        self._transact(key, change)
        return found[0]

    # settle -------------------------------------------------------------------------------------------------------

    def _settle(self, limit: int) -> Settled:
        _refuse_within("settle()")
        if limit < 1:
            raise ValueError(f"limit is the number of effects to look at, and at least 1, not {limit}")
        settled, seen, until = Settled(), set[tuple[str, str]](), None
        while len(seen) < limit:
            rows = self._due(until, min(_FOUND_AT_ONCE, limit - len(seen)))
            new = [row for row in rows if row.key not in seen]
            if not new:
                break
            until = until or new[0].now  # each row at most once: what becomes due later is for the next run
            for row in new:
                seen.add(row.key)
                self._settle_one(self._known[row.handler], row, settled)
        return settled

    def _due(self, until: int | None, limit: int) -> list[Seen]:
        found: list[Seen] = []

        def look(connection: Connection, _: Dialect) -> bool:
            found[:] = record.due(connection, self._tables.marker, list(self._known), until, limit)
            return False

        self._transact(("", "settle"), look)
        return found

    def _settle_one(self, effect: Definition[Any, Any], row: Seen, settled: Settled) -> None:
        """Do what the policy permits; an error is logged, and never ends the sweep."""
        step = next_step(row, effect.unknown, effect.lease_ms)
        try:
            if step.do is Do.RECORD:
                outcome = self._record_left(effect, row)
                _count(settled, outcome)
            elif step.do is Do.STOP:
                logger.warning("%s: its policy has ended; a person decides", _told(row))
                self._release(row, row.token, None, stopped_at=now_ms(), lease_until=row.lease_until)
                settled.stopped += 1
            elif step.do is Do.WAIT:
                self._release(row, row.token, None, next_at=step.until, lease_until=row.lease_until)
                settled.skipped += 1
            elif step.do is Do.ANSWER or (taken := self._take(effect, row, step)) is None:
                settled.skipped += 1
            elif step.do is Do.SEND:
                self._send(taken)
                settled.done += 1
            else:
                _count(settled, self._ask(taken))
        except Rejected:
            settled.rejected += 1
        except NotDone:
            settled.not_done += 1
        except EffectUnknown:
            settled.unknown += 1
        except Exception:
            logger.exception("%s: could not be settled", _told(row))
            settled.failed += 1
            if step.do is not Do.WAIT:  # does nothing if the row was taken
                self._release(row, row.token, pace(row, effect.lease_ms), over=True, lease_until=row.lease_until)

    def _take(self, effect: Definition[Any, Any], row: Seen, step: Step) -> _Taken | None:
        """Take the row for the step, by one statement; return None if somebody was faster."""
        table, token, lease, began = self._tables.marker, new_token(), effect.lease_ms, time.monotonic()
        taken, mine = _taken(effect, row, token, began, step), False

        def change(connection: Connection, _: Dialect) -> bool:
            nonlocal mine
            if step.do is Do.ASK:
                changed = record.take_to_ask(connection, table, row, token, lease, latest=step.latest)
            else:
                changed = record.take(connection, table, row, token, lease, latest=step.latest)
            if mine and not changed:  # has the COMMIT that was interrupted come through?
                now = record.read(connection, table, *row.key)
                mine = now is not None and now.token == token
            else:
                mine = changed
            return changed

        self._transact(row.key, change)
        return taken if mine else None

    # An attempt ---------------------------------------------------------------------------------------------------

    def _send(self, taken: _Taken) -> Any:
        """Call the body, and record what it returned; no connection is held meanwhile."""
        effect, row = taken.effect, taken.row
        try:
            value = self._call(effect, effect.function, taken)
            try:
                data = self._encoded(effect, value)
            except ResultError as error:
                raise ResultError(f"{shown(error)[:200]}; it was {_shown_value(value)}") from error
        except Rejected as rejected:
            self._record(taken, _Outcome(REJECTED, _rejection(rejected), ATTEMPT, rejected))
            raise
        except NotDone as error:
            if not taken.set_first:
                self._give_back(taken, error)
                raise EffectUnknown(
                    f"{_told(row)} was not sent by this attempt, and nobody knows of an earlier one"
                ) from error
            self._give_back(taken, error, **_NOTHING_SENT)
            raise
        except Exception as error:
            self._give_back(taken, error)
            raise EffectUnknown(f"an attempt at {_told(row)} ended without an answer ({shown(error)})") from error
        self._record(taken, _Outcome(DONE, data, ATTEMPT, value))
        return value

    def _ask(self, taken: _Taken) -> int | None:
        """Ask the provider, and record its answer; return the outcome, or None if it could not tell."""
        effect, row, asked = taken.effect, taken.row, taken.step.ask
        assert asked is not None  # noqa: S101  # of a step that asks
        try:
            value = self._call(effect, asked.function, taken)
            data = self._encoded(effect, value)
        except Rejected as rejected:
            self._record(taken, _Outcome(REJECTED, _rejection(rejected), ASKED, rejected))
            return REJECTED
        except NotDone as error:
            self._give_back(taken, error, at_once=True, **_NOTHING_SENT)
            raise
        except Exception as error:  # StillUnknown, and whatever else: the provider could not tell
            self._give_back(taken, error, ended_at=row.last_ended_at)
            raise EffectUnknown(f"the provider could not tell whether {_told(row)} was done") from error
        self._record(taken, _Outcome(DONE, data, ASKED, value))
        return DONE

    def _call(self, effect: Definition[Any, Any], function: Callable[..., Any], taken: _Taken) -> Any:
        with _noted():
            returned = function(taken.given, taken.attempt)
            check_result(effect.identity, returned, asynchronous=self._asynchronous)
            value = await_only(returned) if self._asynchronous else returned
        check_result(effect.identity, value, asynchronous=False)
        return value

    def _encoded(self, effect: Definition[Any, Any], value: Any) -> bytes:
        data = encoded(effect.codec, value, f"{effect.identity} returned {type(value).__name__}")
        refuse_large(data, self._max_result_bytes, f"the value of {effect.identity}")
        return data

    def _give_back(self, taken: _Taken, error: Exception, *, at_once: bool = False, **values: Any) -> None:
        """End the attempt without an outcome. A row that ``run`` made, and of which nothing was sent, is deleted."""
        row, table = taken.row, self._tables.marker
        nothing_sent = values.get("first_sent_at", 0) is None
        if nothing_sent and not row.armed and taken.step.do is Do.SEND:
            removed = False

            def remove(connection: Connection, _: Dialect) -> bool:
                nonlocal removed
                removed = record.remove(connection, table, row, taken.token) or removed
                return removed

            self._transact(taken.row.key, remove)
            if removed:
                return  # else somebody has armed it meanwhile
        given = {"ended_at": now_ms(), "error": shown(error), **values}
        self._release(
            row, taken.token, 0 if at_once else pace(row, taken.effect.lease_ms, sent=not nothing_sent), **given
        )

    def _release(
        self,
        row: Seen,
        held: str,
        next_in: int | None,
        *,
        over: bool = False,
        **values: Any,
    ) -> None:
        table = self._tables.marker
        self._transact(
            row.key,
            lambda connection, _: record.release(connection, table, row, held, next_in, over=over, **values),
        )

    # The outcome --------------------------------------------------------------------------------------------------

    def _record(self, taken: _Taken, outcome: _Outcome) -> None:
        """Record the outcome with the rows of ``recorded``, in one transaction; keep it if that fails."""
        told = taken.row, outcome.told
        try:
            found = self._finish(taken.effect, taken.row, taken.token, taken.given, outcome)
        except BaseException as error:  # also a cancellation: what the provider has said is kept
            try:
                kept = self._waiting.to_the_end(partial(self._keep, taken, outcome, error))
            except Exception as second:
                logger.exception("%s: its outcome could be neither recorded nor kept", _told(taken.row))
                raise _not_recorded(*told, error, "and it could not be kept") from second
            if not isinstance(error, Exception):
                raise
            if kept:
                raise _not_recorded(*told, error, "it is kept, and `settle` tries again") from error
            self._keep_beside(taken, outcome)
        if found is _Found.TAKEN_OVER:
            self._keep_beside(taken, outcome)
        if found is _Found.DOUBLE:
            raise _double(taken, outcome)

    def _finish(self, effect: Definition[Any, Any], row: Seen, token: str, given: Any, outcome: _Outcome) -> _Found:
        """Write the outcome, and call ``recorded`` or ``refused`` in the same transaction."""
        table, found = self._tables.marker, _Found.MINE
        written = outcome.number, outcome.data, outcome.by

        def change(connection: Connection, _: Dialect) -> bool:
            nonlocal found
            found = _Found.MINE
            if record.finish(connection, table, row, token, *written, over=row.evidence is not None):
                return True
            now = record.read(connection, table, *row.key)
            if now is None or now.token != token:
                found = _Found.TAKEN_OVER
                return False
            evidence = now.evidence_outcome, now.evidence
            of_attempt = row.evidence is None and now.evidence_attempt is not None
            if of_attempt and outcome.by == ATTEMPT and _are_two(effect, outcome, *evidence):
                found = _Found.DOUBLE
            if now.outcome is not None:  # the COMMIT that was interrupted came through, or it is not ours
                if (now.outcome, now.result) != written[:2]:
                    found = _Found.TAKEN_OVER
                return False
            if now.evidence_outcome == DONE and not (outcome.by == ATTEMPT and outcome.number == DONE):
                found = _Found.OVERRULED
                return record.release(connection, table, row, token, 0, over=True)  # settle records it, at once
            if not record.finish(connection, table, row, token, *written, over=True):
                raise OvertakenError("the effect was changed meanwhile; look again")
            return True

        function = effect.on_recorded if outcome.number == DONE else effect.on_refused

        def handler(uow: UnitOfWork) -> Callable[[], Any] | None:
            if function is None or found is _Found.OVERRULED:
                return None
            return lambda: function(given, outcome.told, uow.handlers_session)

        self._transact(row.key, change, handler)
        if found is _Found.OVERRULED:
            logger.error("%s was done by an attempt, whatever else was said of it: look at the provider", _told(row))
            raise EffectUnknown(f"{_told(row)} was done by an earlier attempt; `settle` records what that returned")
        return found

    def _keep(self, taken: _Taken, outcome: _Outcome, why: BaseException) -> bool:
        """Keep the outcome in the row, in a transaction of its own.

        Return False if the row was taken over, or an earlier attempt has left its outcome there.
        """
        row, table, kept = taken.row, self._tables.marker, False
        number = taken.attempt.number if outcome.by == ATTEMPT else None
        kept_values = record.evidence(outcome.number, outcome.data, number)
        kept_values |= {"ended_at": now_ms(), "error": shown(why)}

        def change(connection: Connection, _: Dialect) -> bool:
            nonlocal kept
            if record.release(connection, table, row, taken.token, pace(row, taken.effect.lease_ms), **kept_values):
                kept = True
                return True
            now = record.read(connection, table, *taken.row.key)
            if now is not None and now.token == taken.token:  # a COMMIT that was interrupted may have come through
                recorded = (now.outcome, now.result) == (outcome.number, outcome.data)
                kept = recorded or (now.evidence_attempt, now.evidence) == (number, outcome.data)
            return False

        self._transact(taken.row.key, change)
        return kept

    def _keep_beside(self, taken: _Taken, outcome: _Outcome) -> NoReturn:
        """Keep what was told after the row had been taken over, and raise ``LeaseLostError``."""
        effect, row, table = taken.effect, taken.row, self._tables.marker
        number, seen = taken.attempt.number, list[Seen | None]()

        def change(connection: Connection, _: Dialect) -> bool:
            values = record.evidence(outcome.number, outcome.data, number)
            kept = record.keep_beside(connection, table, row, taken.token, values)
            seen[:] = [record.read(connection, table, *taken.row.key)]
            return kept

        self._transact(taken.row.key, change)
        now = seen[0]
        if now is None:
            raise LeaseLostError(f"{_told(row)} was done, and its row was deleted meanwhile", outcome.told)
        by_attempt = now.outcome is not None and now.decided_by == ATTEMPT
        if by_attempt and _are_two(effect, outcome, now.outcome, now.result):
            raise _double(taken, outcome)
        of_another = now.evidence_attempt not in (None, number)  # None: of an ask
        if of_another and _are_two(effect, outcome, now.evidence_outcome, now.evidence):
            raise _double(taken, outcome)
        told = f"{_told(row)} was told its outcome after another process had taken it over; the outcome is kept"
        if now.outcome is not None and (now.outcome, now.result) != (outcome.number, outcome.data):
            told += f", and it is not what is recorded ({now.decided_by} decided): look at the provider"
            logger.error("%s", told)
        raise LeaseLostError(told, outcome.told)

    def _record_left(self, effect: Definition[Any, Any], row: Seen) -> int | None:
        """Record what an attempt has left, or a person has decided; return the outcome, or None for "not done"."""
        given = effect.request_codec.loads(row.request)
        if row.evidence is not None:
            number, data = row.evidence_outcome, row.evidence
            by = ASKED if row.evidence_attempt is None else ATTEMPT
        else:
            decision = json.loads(row.decision or "")
            if decision["outcome"] == "not done":
                why = f"not done, said {decision['who']}: {decision['why']}"
                self._release(row, row.token, 0, **_NOTHING_SENT, decision=None, error=why, token=new_token())
                return None
            number, by = (DONE if decision["outcome"] == "done" else REJECTED), PERSON
            data = decision["value"].encode() if number == DONE else _rejection(Rejected(decision["code"]))
        assert number is not None  # noqa: S101  # written together with the evidence
        told = effect.codec.loads(data) if number == DONE else _rejected(data, replayed=False)
        try:
            found = self._finish(effect, row, row.token, given, _Outcome(number, data, by, told))
        except ProjectorDedupError as error:  # a Rejected or NotDone of `recorded` says nothing about the effect
            raise _not_recorded(row, told, error, "`settle` tries again") from error
        if found is _Found.TAKEN_OVER:
            raise OvertakenError(f"{_told(row)} was taken over meanwhile")
        return number

    def _transact(
        self,
        key: tuple[str, str],
        change: Callable[[Connection, Dialect], bool],
        handler: Callable[[UnitOfWork], Callable[[], Any] | None] = lambda _: None,
    ) -> None:
        work = _Transaction(self._tables, key, change, handler)
        deliver(work, self._factory, self._options, self._policy, self._waiting)


class Effects(_Effects):
    """Drives effects: ``run`` one now, or ``settle`` all that are due.

    Threads may share it. ``session_factory`` is a ``sessionmaker`` on one engine, ``effects`` lists the functions under
    ``@effect``, ``tables`` is the result of ``make_effect_tables``. ``scope="required"`` refuses calls that name no
    scope. ``retry`` bounds how often each transaction is repeated. ``max_result_bytes`` bounds what is recorded.

    Raises ``HandlerDefinitionError``, ``UnsafeSessionError`` for a session factory that does not fit, ``ValueError``.
    """

    _asynchronous = False
    _factory: sessionmaker[Session]

    def run(
        self, effect: Effect[I, R], request: I | None = None, *, key: object, scope: object = None, wait: float = 0.0
    ) -> R:
        """Do the effect now, or return what it returned before. It returns only if the outcome is recorded.

        Without ``request`` it must have been armed. ``wait`` (seconds) is how long to wait for an attempt that is under
        way. No connection is held while the body runs.

        Raises ``Rejected`` if the provider said no, ``NotDone`` if nothing was sent, ``InProgress`` (with
        ``retry_after``), ``EffectUnknown``, ``NotRecordedError``, ``LeaseLostError``, ``KeyReusedError`` and
        ``NotArmedError``; and ``UnsafeSessionError`` inside a handler: arm the effect there.
        """
        return cast("R", self._run(effect, request, key, scope, wait))

    def settle(self, *, limit: int = 100) -> Settled:
        """Drive what is due: armed effects, those of killed processes, and unknown ones, each by its policy.

        Looks at ``limit`` effects at most, at each of them once, the oldest first. Several processes may settle at
        once. Call it from cron or in a loop. An effect that fails is logged, and the next one follows.
        """
        return self._settle(limit)


class AsyncEffects(_Effects):
    """Drives effects whose functions are ``async def``. Tasks of one event loop may share it. See ``Effects``."""

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
        """Do the effect now, or return what it returned before. See ``Effects.run``."""
        return cast("R", await greenlet_spawn(self._run, effect, request, key, scope, wait))

    async def settle(self, *, limit: int = 100) -> Settled:
        """Drive what is due. See ``Effects.settle``."""
        return cast("Settled", await greenlet_spawn(self._settle, limit))


# Words ----------------------------------------------------------------------------------------------------------------


def _new_taken(effect: Definition[Any, Any], new: NewRow, token: str, began: float) -> _Taken:
    attempt = Attempt(new.provider_key, 1, effect.lease, began)
    given = effect.request_codec.loads(new.request)
    return _Taken(effect, Seen.of_new(new, token), token, given, attempt, Step(Do.SEND), set_first=True)


def _taken(effect: Definition[Any, Any], row: Seen, token: str, began: float, step: Step) -> _Taken:
    number = row.attempt if step.do is Do.ASK else row.attempt + 1
    called = step.do is Do.ASK  # there `NotDone` would say that the provider has nothing
    attempt = Attempt(row.provider_key, number, effect.lease, began, called)
    given = effect.request_codec.loads(row.request)  # before the row is taken: what cannot be read is not sent
    return _Taken(effect, row, token, given, attempt, step, set_first=row.first_sent_at is None)


def _are_two(effect: Definition[Any, Any], outcome: _Outcome, number: int | None, data: bytes | None) -> bool:
    """True if two attempts were done. Those of a ``resend`` are one if the provider gave the same answer twice."""
    if outcome.number != DONE or number != DONE:
        return False
    return not (isinstance(effect.unknown, Resend) and data == outcome.data)


def _not_recorded(row: Seen, value: Any, why: BaseException, then: str) -> NotRecordedError:
    return NotRecordedError(f"{_told(row)} has its outcome, and recording it failed ({shown(why)}); {then}", value)


def _double(taken: _Taken, outcome: _Outcome) -> DoubleEffectError:
    told = f"two attempts at {_told(taken.row)} were done: look at the provider, and undo one of them"
    logger.error("%s", told)
    return DoubleEffectError(told, outcome.told)


def _answer(effect: Definition[Any, Any], row: Seen) -> Any:
    """Return the recorded value, or raise the recorded rejection."""
    data = row.result or b""
    if row.outcome == REJECTED:
        raise _rejected(data, replayed=True)
    try:
        return effect.codec.loads(data)
    except Exception as error:
        raise ResultUnreadableError(
            f"the value of {_told(row)} cannot be read ({type(error).__name__}); it was done, and is not sent again",
            data,
        ) from error


def _rejection(rejected: Rejected) -> bytes:
    """Return a rejection as it is stored: without its detail if JSON has no form for that."""
    try:
        return json_codec.dumps(as_json({"code": rejected.code, "detail": rejected.detail}))
    except Exception:  # noqa: BLE001  # what the user gave must not hinder the outcome
        code: object = rejected.code
        return json_codec.dumps({"code": code if type(code) is str else shown(rejected), "detail": None})


def _rejected(data: bytes, *, replayed: bool) -> Rejected:
    value = json_codec.loads(data)
    return Rejected(value["code"], value["detail"], replayed=replayed)


def _shown_value(value: object) -> str:
    try:
        return printable(repr(value)[:250])
    except Exception:  # noqa: BLE001  # a __repr__ of the user's
        return type(value).__name__


def _told(row: Seen) -> str:
    return f"effect {printable(row.handler)}, key {printable(row.message_id)[:80]}"


def _count(settled: Settled, number: int | None) -> None:
    if number is None:
        settled.not_done += 1
    elif number == DONE:
        settled.done += 1
    else:
        settled.rejected += 1


def _refuse_within(call: str) -> None:
    if is_handling() or _sending.get():
        raise UnsafeSessionError(
            f"{call} inside a handler or an effect: what was sent would stay sent when the handler is rolled back. Use "
            "arm(session, ...) there, and `settle` sends it after the COMMIT"
        )


@contextmanager
def _noted() -> Iterator[None]:
    token = _sending.set(True)
    try:
        yield
    finally:
        _sending.reset(token)
