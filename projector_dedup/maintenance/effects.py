"""Find effects that are not finished, and write a person's decision about one.

``settle`` or ``run`` records the decision, because only the application has the code for it (docs/effects.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal, Never

from sqlalchemy import ColumnElement, MetaData, Row, Select, case, func, inspect, select, update
from sqlalchemy.engine import Connection, Engine

from ..commands.record import RecordKey
from ..dialects import dialect_of
from ..dialects.columns import now_ms, utc_now
from ..effects import EffectTables, default_effect_tables
from ..effects.record import DONE, DOUBLE, is_ahead, is_known, new_token
from ..effects.steps import State, state_of
from ..errors import RefusedError
from ..message import printable, valid_handler
from ..options import RetryPolicy
from .findings import Finding, advice
from .running import connected_to, run_with_retries
from .schema import KINDS, require_tables
from .state import duration, in_hours
from .state import state_of as read_state_of

Decided = Literal["done", "rejected", "not done"]

MAX_DECISION = 60_000  #: bytes of a decision, including the value
_MAX_CODE, _MAX_WHO, _MAX_WHY = 200, 100, 500  # characters
OVERDUE = timedelta(minutes=15)  #: after which an effect that is armed or due should have been sent


@dataclass(frozen=True)
class StoredEffect:
    """An effect as it is stored, and its state. Times are in UTC, by the database's clock."""

    effect: str
    key: str
    scope: str | None
    state: State
    attempt: int
    provider_key: str
    age: timedelta  #: since it was armed
    armed_at: datetime
    first_sent_at: datetime | None
    ended_at: datetime | None
    lease_until: datetime | None
    next_at: datetime | None
    stopped_at: datetime | None
    decisions: list[dict[str, Any]]  #: of persons, the oldest first, without their values
    twice: bool  #: two attempts were done, and no person has seen it
    decided_by: str | None
    error: str | None
    request: bytes
    value: bytes | None  #: the recorded value or rejection, else the value of an attempt or of a person's decision

    @property
    def handler(self) -> str:
        """The name of the effect, as other kinds of rows call it."""
        return self.effect


def find_effects(
    engine: Engine,
    *,
    unknown: bool = False,
    older_than: timedelta | None = None,
    limit: int | None = None,
    tables: EffectTables = default_effect_tables,
) -> list[StoredEffect]:
    """Return the effects that are not finished: first those that need a person, then the oldest.

    An effect that was done twice is not finished until a person has seen it. ``unknown`` returns only effects that may
    or may not have been done. ``older_than`` returns only effects that were armed at least this long ago. ``limit`` is
    the largest number of effects to return.

    Raises ``MissingTableError`` if the tables are missing.
    """
    table = tables.marker
    wanted = _selected(tables).where(table.c.processed_at.is_(None))
    if older_than is not None:
        wanted = wanted.where(table.c.armed_at <= now_ms() - _milliseconds(older_than))
    if unknown:
        wanted = wanted.where(is_unknown(tables))
    first = case((needs_person(tables), 0), else_=1)
    wanted = wanted.order_by(first, table.c.armed_at, table.c.message_id).limit(limit)
    with connected_to(engine, tables) as connection:
        return [_stored(row) for row in connection.execute(wanted).all()]


def find_effect(
    engine: Engine,
    key: object,
    effect: str | None = None,
    scope: object = None,
    *,
    tables: EffectTables = default_effect_tables,
) -> StoredEffect:
    """Return the effect of this key in this scope, or of the name ``effect`` if several effects have the key.

    Raises ``RefusedError`` if there is none or more than one, ``InvalidKeyError`` for a key that no effect can have,
    and ``MissingTableError`` if the tables are missing.
    """
    with connected_to(engine, tables) as connection:
        return _stored(_one(connection, tables, RecordKey.of(key, scope), effect))


def effects_of(
    engine: Engine, key: object, scope: object = None, *, tables: EffectTables = default_effect_tables
) -> list[StoredEffect]:
    """Return the effects of one key in one scope, by name."""
    with connected_to(engine, tables) as connection:
        return [_stored(row) for row in _all(connection, tables, RecordKey.of(key, scope))]


# Decide -----------------------------------------------------------------------------------------------------------


def resolve(
    engine: Engine,
    key: object,
    *,
    attempt: int,
    outcome: Decided,
    value: str | None = None,
    code: str | None = None,
    why: str,
    who: str,
    instead_of: Decided | None = None,
    effect: str | None = None,
    scope: object = None,
    tables: EffectTables = default_effect_tables,
) -> StoredEffect:
    """Write a person's decision about an effect. The next ``settle`` or ``run`` records it.

    - ``attempt``: the number of attempts that the person has seen. If it has changed, the decision is refused.
      ``attempt=0`` with "rejected" cancels an armed effect.
    - ``outcome``: "done" needs the ``value`` as JSON, "rejected" needs a ``code``. After "not done", ``settle`` sends
      the effect again.
    - ``why``, ``who``: the reason and the person. The row keeps both.
    - ``instead_of``: the outcome of an earlier decision that is not recorded yet. The row keeps both decisions.

    Returns the effect after the decision. Raises ``RefusedError``, and writes nothing, if the number of attempts has
    changed, an attempt is running, the effect has an outcome, an attempt has left its value, another person has decided
    and ``instead_of`` is not that decision, or the arguments cannot be recorded. Raises the errors of ``find_effect``.
    """
    decision, table = _decision(outcome, value, code, why, who) | {"attempt": attempt}, tables.marker
    undecided = (
        table.c.attempt == attempt,
        table.c.outcome.is_(None),
        table.c.evidence.is_(None),
        table.c.lease_until.is_(None) | (table.c.lease_until <= now_ms()),
    )

    def refuse(row: Row[Any]) -> None:
        if outcome == "not done" and row.evidence_outcome == DOUBLE:
            raise RefusedError(f"{_label_of(row)} was done twice, and not done is no answer: decide done or rejected")
        if row.decision is not None and json.loads(row.decision)["outcome"] != instead_of:
            last = json.loads(row.decision)
            raise RefusedError(
                f"{last['who']} has decided that {_label_of(row)} is {last['outcome']} ({last['why']}): give that "
                f"outcome as --instead-of {last['outcome'].replace(' ', '-')} to replace the decision"
            )

    error = case((table.c.evidence_outcome.is_not(None), table.c.error), else_=None)
    written = {"token": new_token(), "next_at": now_ms(), "stopped_at": None, "error": error}
    return _decide(engine, tables, RecordKey.of(key, scope), effect, decision, undecided, written, refuse, attempt)


def mark_seen(
    engine: Engine,
    key: object,
    *,
    why: str,
    who: str,
    effect: str | None = None,
    scope: object = None,
    tables: EffectTables = default_effect_tables,
) -> StoredEffect:
    """Note that a person has seen that the effect was done twice: it is finished then, and no list has it any more.

    ``why`` says what the person did about it. Returns the effect. Raises ``RefusedError`` if it was not done twice, and
    the errors of ``find_effect``.
    """
    seen, table = {"outcome": "seen", **_by(why, who)}, tables.marker
    double = (table.c.outcome.is_not(None), table.c.evidence_outcome == DOUBLE)

    def refuse(row: Row[Any]) -> None:
        if state_of(row) is not State.DOUBLE:
            raise RefusedError(f"{_label_of(row)} is {state_of(row)}, and not {State.DOUBLE}: there is nothing to see")

    written = {"evidence_outcome": DONE, "processed_at": utc_now()}
    return _decide(engine, tables, RecordKey.of(key, scope), effect, seen, double, written, refuse)


def _decide(
    engine: Engine,
    tables: EffectTables,
    asked: RecordKey,
    effect: str | None,
    decision: dict[str, Any],
    conditions: Sequence[ColumnElement[bool]],
    written: dict[str, Any],
    refuse: Callable[[Row[Any]], None],
    attempt: int | None = None,
) -> StoredEffect:
    """Write a decision behind the earlier ones, unless the row has changed since it was read. Return the effect."""
    table = tables.marker

    def decide(connection: Connection) -> StoredEffect:
        dialect.begin(connection, None, None)
        found = _one(connection, tables, asked, effect)
        refuse(found)
        earlier = [{name: each[name] for name in each if name != "value"} for each in _decisions(found.decision)]
        more: dict[str, Any] = {"at": _moment(found.now).isoformat(timespec="seconds")}
        if earlier:
            more["earlier"] = earlier
        if found.evidence_outcome is not None:
            more["knew"] = [found.evidence_outcome, found.evidence_attempt]  # a value that cannot be stored
        text = json.dumps({**decision, **more})
        if len(text) > MAX_DECISION:
            raise RefusedError(
                f"the value is too large: decisions have at most {MAX_DECISION:,} bytes, and these have {len(text):,}"
            )
        is_it = (table.c.message_id == asked.stored, table.c.handler == found.handler)
        unchanged = table.c.decision.is_(None) if found.decision is None else table.c.decision == found.decision
        change = update(table).where(*is_it, unchanged, *conditions).values(decision=text, **written)
        changed = connection.execute(change).rowcount
        now = _one(connection, tables, asked, found.handler)
        if not changed:
            _refuse(now, attempt)
        return _stored(now)

    require_tables(engine, tables)
    dialect = dialect_of(engine)
    return run_with_retries(decide, engine, dialect, RetryPolicy())


def _decisions(text: str | None) -> list[dict[str, Any]]:
    """Return the decisions of persons about a row, the oldest first."""
    if text is None:
        return []
    last = json.loads(text)
    return [*last.pop("earlier", []), last]


def _decision(outcome: Decided, value: str | None, code: str | None, why: str, who: str) -> dict[str, Any]:
    """Return the decision, as ``Effects`` reads it. Raises ``RefusedError`` if it could not be recorded."""
    if outcome not in ("done", "rejected", "not done"):
        raise RefusedError(f"outcome must be done, rejected or not done, not {printable(str(outcome))[:80]}")
    if (value is not None) != (outcome == "done") or (code is not None) != (outcome == "rejected"):
        raise RefusedError("give a value with done, a code with rejected, and neither with not done")
    decided_by = _by(why, who)
    if code is not None and not 0 < len(code.strip()) <= _MAX_CODE:
        raise RefusedError(f"the code of a rejection must have 1 to {_MAX_CODE} characters, such as cancelled")
    if value is not None:
        try:
            value.encode()
            json.dumps(json.loads(value), allow_nan=False)  # refuses NaN and its like, and 1e999
        except (ValueError, RecursionError):
            raise RefusedError("the value is not JSON; write a text in double quotes, and no value as null") from None
    return {"outcome": outcome, "value": value, "code": code, **decided_by}


def _by(why: str, who: str) -> dict[str, str]:
    if not why.strip() or not who.strip():
        raise RefusedError("give the reason and the person who decides; the row keeps both")
    return {"who": printable(who)[:_MAX_WHO], "why": printable(why)[:_MAX_WHY]}


def _refuse(row: Row[Any], attempt: int | None) -> Never:
    """Raise ``RefusedError`` with what has changed since the person read the effect."""
    state, name = state_of(row), _label_of(row)
    if state is State.DOUBLE:
        raise RefusedError(f"{name} was done twice: undo each deed that is not the recorded value, then give --seen")
    if row.outcome is not None:
        raise RefusedError(f"{name} is already {state}, and an outcome is never overwritten")
    if attempt is not None and row.attempt != attempt:
        raise RefusedError(
            f"{name} has changed: {row.attempt} attempts were made, not {attempt}. Show it again and check the provider"
        )
    if state is State.RUNNING:
        raise RefusedError(
            f"{name} is running until {_moment(row.lease_until):%Y-%m-%d %H:%M:%S} UTC; show it again after that"
        )
    if row.evidence is None:
        raise RefusedError(f"{name} has changed: another person has decided at the same moment. Show it again")
    raise RefusedError(f"{name} has the value of an attempt, which has precedence over a decision; `settle` records it")


# Rows -------------------------------------------------------------------------------------------------------------


def _selected(tables: EffectTables) -> Select[Any]:
    return select(tables.marker, now_ms().label("now"))


def _all(connection: Connection, tables: EffectTables, asked: RecordKey) -> Sequence[Row[Any]]:
    table = tables.marker
    wanted = _selected(tables).where(table.c.message_id == asked.stored).order_by(table.c.handler)
    return connection.execute(wanted).all()


def _one(connection: Connection, tables: EffectTables, asked: RecordKey, effect: str | None) -> Row[Any]:
    name = None if effect is None else valid_handler(effect)
    found = [row for row in _all(connection, tables, asked) if name in (None, row.handler)]
    if not found:
        raise RefusedError(
            f"{_label(name, asked)} does not exist: it was not armed, or cleanup has deleted it, or its name, scope or "
            "key is spelled differently"
        )
    if len(found) > 1:
        names = ", ".join(printable(row.handler) for row in found)
        raise RefusedError(f"several effects have the {asked}: {names}. Choose one with --effect NAME")
    return found[0]


def _label(name: str | None, asked: RecordKey) -> str:
    return f"the effect{'' if name is None else f' {printable(name)}'} of the {asked}"


def _label_of(row: Row[Any]) -> str:
    return _label(row.handler, RecordKey.read(row.message_id))


def _stored(row: Row[Any]) -> StoredEffect:
    asked = RecordKey.read(row.message_id)
    said = _decisions(row.decision)
    value = next((each for each in (row.result, row.evidence) if each is not None), None)
    if value is None and said and said[-1].get("value") is not None:
        value = said[-1]["value"].encode()
    moments = ("first_sent_at", "ended_at", "lease_until", "next_at", "stopped_at")
    return StoredEffect(
        effect=row.handler,
        key=asked.key,
        scope=asked.scope,
        state=state_of(row),
        attempt=row.attempt,
        provider_key=row.provider_key,
        age=timedelta(milliseconds=row.now - row.armed_at),
        armed_at=_moment(row.armed_at),
        **{name: None if getattr(row, name) is None else _moment(getattr(row, name)) for name in moments},
        decisions=[{name: each[name] for name in each if name not in ("value", "knew")} for each in said],
        twice=row.evidence_outcome == DOUBLE,
        decided_by=row.decided_by,
        error=row.error,
        request=bytes(row.request),
        value=None if value is None else bytes(value),
    )


def _milliseconds(time: timedelta) -> int:
    return int(time / timedelta(milliseconds=1))


def _moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


# Advice -----------------------------------------------------------------------------------------------------------


def _no_verdict(tables: EffectTables) -> ColumnElement[bool]:
    """Return the condition that a row has no outcome, no stored value of an attempt, no decision, no running lease."""
    column = tables.marker.c
    return column.outcome.is_(None) & ~is_known(tables.marker) & _is_free(tables)


def _is_free(tables: EffectTables) -> ColumnElement[bool]:
    """Return the condition that no attempt is running."""
    until = tables.marker.c.lease_until
    return until.is_(None) | (until <= now_ms())


def needs_person(tables: EffectTables) -> ColumnElement[bool]:
    """Return the condition that a person must decide about the effect, or must see that it was done twice."""
    column = tables.marker.c
    stopped = column.stopped_at.is_not(None) | column.evidence_outcome.is_not(None)
    is_double = column.outcome.is_not(None) & (column.evidence_outcome == DOUBLE)
    return (_no_verdict(tables) & stopped) | is_double


def is_overdue(tables: EffectTables, since: timedelta) -> ColumnElement[bool]:
    """Return the condition that the effect was due, or was armed and never sent, at least so long ago.

    A value or a decision that could not be recorded has been due since the last attempt, whenever the next try is.
    """
    column, then = tables.marker.c, now_ms() - _milliseconds(since)
    unsent = column.first_sent_at.is_(None) & column.next_at.is_not(None) & column.decision.is_(None)
    failed = is_known(tables.marker) & column.error.is_not(None) & _is_free(tables)
    last = func.coalesce(column.ended_at, column.first_sent_at, column.armed_at)
    late = (column.next_at <= then) | (unsent & (column.armed_at <= then)) | (failed & (last <= then))
    return column.outcome.is_(None) & late


def is_unknown(tables: EffectTables) -> ColumnElement[bool]:
    """Return the condition that the effect may or may not have been done."""
    return _no_verdict(tables) & tables.marker.c.first_sent_at.is_not(None)


def count(connection: Connection, tables: EffectTables, which: ColumnElement[bool], most: int | None = None) -> int:
    """Return the number of effects that are not finished and match the condition, counted up to ``most``.

    ``processed_at`` has an index and is NULL until the effect is finished, so finished effects are not read.
    """
    column = tables.marker.c
    found = select(column.message_id).where(column.processed_at.is_(None), which).limit(most).subquery("found")
    return connection.scalar(select(func.count()).select_from(found)) or 0


def count_overdue(engine: Engine, since: timedelta = OVERDUE, *, tables: EffectTables = default_effect_tables) -> int:
    """Return the number of effects that were due, or were armed and never sent, at least so long ago.

    Raises ``MissingTableError`` if the tables are missing.
    """
    with connected_to(engine, tables) as connection:
        return count(connection, tables, is_overdue(tables, since))


def advise_effects(
    engine: Engine,
    *,
    overdue: timedelta = OVERDUE,
    known: Set[str] | None = None,
    tables: EffectTables = default_effect_tables,
) -> list[Finding]:
    """Return findings about effects that are not finished. Overdue ones, and times in the future, are problems.

    ``overdue`` is how long an effect may be armed or due. ``known`` are the names of the application's effects; an
    effect with another name is a problem, too.

    Raises ``MissingTableError`` if the tables are missing.
    """
    column = tables.marker.c
    with connected_to(engine, tables) as connection:
        number = partial(count, connection, tables)
        person, unknown = number(needs_person(tables)), number(is_unknown(tables) & ~needs_person(tables))
        kept = number(column.outcome.is_(None) & column.evidence.is_not(None))
        late, ahead = number(is_overdue(tables, overdue)), number(is_ahead(tables.marker))
        nameless = 0 if known is None else number(column.outcome.is_(None) & column.handler.not_in(known))
        found = list(_pruned_too_early(connection, tables))
    settle = "run `idempotency effects settle --app ...` from cron, and read its log lines"
    if person:
        found.append(
            advice(
                f"effects that need a person: {person:,}",
                "run `idempotency effects list`, check the provider, then run `idempotency effects resolve`",
            )
        )
    if unknown:
        found.append(advice(f"effects that may or may not have been done: {unknown:,}", settle))
    if kept:
        found.append(advice(f"effects whose value is known, but is not recorded: {kept:,}", settle))
    if late:
        found.append(
            Finding(
                f"effects that have been armed or due for more than {duration(overdue)}: {late:,}",
                f"{settle}; if no process defines an effect of this name any more, add it to `Effects` again",
            )
        )
    if ahead:
        found.append(
            Finding(
                f"effects with times in the future: {ahead:,}; the database's clock was ahead",
                "synchronise the clock of the database server; `settle` sends those that were never sent, records "
                "those whose outcome is known, and leaves the others to a person",
            )
        )
    if nameless:
        found.append(
            Finding(
                f"effects that the application does not have: {nameless:,}",
                "no process sends them; add the effect to `Effects` again, or give the --app of all applications",
            )
        )
    return found


def _pruned_too_early(connection: Connection, tables: EffectTables) -> Iterator[Finding]:
    """Yield advice if effects are deleted earlier than the commands or messages that arm them."""
    own, has_table = read_state_of(connection, tables).retention_hours, inspect(connection).has_table
    for kind in (each for each in KINDS if each is not EffectTables and own is not None):
        others = kind.make(MetaData(), kind.default_name, tables.marker.schema)
        if not has_table(others.state.name, schema=connection.schema_for_object(others.state)):
            continue
        theirs = read_state_of(connection, others).retention_hours
        if theirs is not None and own is not None and own < theirs:
            yield advice(
                f"cleanup deletes effects after {in_hours(own)}, but {kind.noun}s after {in_hours(theirs)}; after "
                "that, a repeated command or message arms the same key, and the effect is sent a second time",
                f"run `idempotency cleanup --effects --retention-hours {theirs * 2:g}`, or more hours",
            )
