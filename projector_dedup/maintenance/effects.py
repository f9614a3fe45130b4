"""Find effects that are not finished, and write a person's decision about one.

``settle`` or ``run`` records the decision, because only the application has the code for it (docs/effects.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, Never

from sqlalchemy import ColumnElement, MetaData, Row, Select, case, func, inspect, select, update
from sqlalchemy.engine import Connection, Engine

from ..commands.record import RecordKey
from ..dialects import dialect_of
from ..dialects.columns import now_ms
from ..effects import EffectTables, default_effect_tables
from ..effects.record import new_token
from ..effects.steps import State, state_of
from ..errors import RefusedError
from ..message import printable, valid_handler
from ..options import RetryPolicy
from .findings import Finding, advice
from .running import connected_to, run_with_retries
from .schema import KINDS, require_tables
from .state import in_hours
from .state import state_of as read_state_of

Decided = Literal["done", "rejected", "not done"]

MAX_DECISION = 60_000  #: bytes of a decision, including the value
_MAX_CODE, _MAX_WHO, _MAX_WHY = 200, 100, 500  # characters
_LONG_AGO = timedelta(days=1)  # after which an effect that is armed should have been sent


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
    decision: dict[str, Any] | None  #: without the value
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
    older_than: timedelta = timedelta(0),
    limit: int | None = None,
    tables: EffectTables = default_effect_tables,
) -> list[StoredEffect]:
    """Return the effects that are not finished: first those that need a person, then the oldest.

    ``unknown`` returns only effects that may or may not have been done. ``older_than`` returns only effects that were
    armed at least this long ago. ``limit`` is the largest number of effects to return.

    Raises ``MissingTableError`` if the tables are missing.
    """
    table = tables.marker
    wanted = _selected(tables).where(table.c.outcome.is_(None))
    wanted = wanted.where(table.c.armed_at <= now_ms() - int(older_than / timedelta(milliseconds=1)))
    if unknown:
        wanted = wanted.where(_is_unknown(tables))
    needs_a_person = case((table.c.stopped_at.is_(None), 1), else_=0)
    wanted = wanted.order_by(needs_a_person, table.c.armed_at, table.c.message_id).limit(limit)
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

    A later decision replaces one that is not recorded yet. Returns the effect after the decision. Raises
    ``RefusedError``, and writes nothing, if the number of attempts has changed, an attempt is running, the effect has
    an outcome, an attempt has left its value, or the arguments cannot be recorded. Raises the errors of
    ``find_effect``.
    """
    decision = _decision(outcome, value, code, why, who) | {"attempt": attempt}
    asked, table = RecordKey.of(key, scope), tables.marker

    def decide(connection: Connection) -> StoredEffect:
        dialect.begin(connection, None, None)
        found = _one(connection, tables, asked, effect)
        text = json.dumps({**decision, "at": _moment(found.now).isoformat(timespec="seconds")})
        if len(text) > MAX_DECISION:
            raise RefusedError(
                f"the value is too large: a decision has at most {MAX_DECISION:,} bytes, and this one has {len(text):,}"
            )
        change = update(table).where(
            table.c.message_id == asked.stored,
            table.c.handler == found.handler,
            table.c.attempt == attempt,
            table.c.outcome.is_(None),
            table.c.evidence_outcome.is_(None),
            table.c.lease_until.is_(None) | (table.c.lease_until <= now_ms()),
        )
        written = {"decision": text, "token": new_token(), "next_at": now_ms(), "stopped_at": None, "error": None}
        changed = connection.execute(change.values(written)).rowcount
        now = _one(connection, tables, asked, found.handler)
        if not changed:
            _refuse(now, attempt)
        return _stored(now)

    require_tables(engine, tables)
    dialect = dialect_of(engine)
    return run_with_retries(decide, engine, dialect, RetryPolicy())


def _decision(outcome: Decided, value: str | None, code: str | None, why: str, who: str) -> dict[str, Any]:
    """Return the decision, as ``Effects`` reads it. Raises ``RefusedError`` if it could not be recorded."""
    if outcome not in ("done", "rejected", "not done"):
        raise RefusedError(f"outcome must be done, rejected or not done, not {printable(str(outcome))[:80]}")
    if (value is not None) != (outcome == "done") or (code is not None) != (outcome == "rejected"):
        raise RefusedError("give a value with done, a code with rejected, and neither with not done")
    if not why.strip() or not who.strip():
        raise RefusedError("give the reason and the person who decides; the row keeps both")
    if code is not None and not 0 < len(code.strip()) <= _MAX_CODE:
        raise RefusedError(f"the code of a rejection must have 1 to {_MAX_CODE} characters, such as cancelled")
    if value is not None:
        try:
            value.encode()
            json.dumps(json.loads(value), allow_nan=False)  # refuses NaN and its like, and 1e999
        except (ValueError, RecursionError):
            raise RefusedError("the value is not JSON; write a text in double quotes, and no value as null") from None
    decided_by = {"who": printable(who)[:_MAX_WHO], "why": printable(why)[:_MAX_WHY]}
    return {"outcome": outcome, "value": value, "code": code, **decided_by}


def _refuse(row: Row[Any], attempt: int) -> Never:
    """Raise ``RefusedError`` with what has changed since the person read the effect."""
    state, name = state_of(row), _label(row.handler, RecordKey.of(*_key(row.message_id)))
    if row.outcome is not None:
        raise RefusedError(f"{name} is already {state}, and an outcome is never overwritten")
    if row.attempt != attempt:
        raise RefusedError(
            f"{name} has changed: {row.attempt} attempts were made, not {attempt}. Show it again and check the provider"
        )
    if state is State.RUNNING:
        raise RefusedError(f"{name} is running until {_moment(row.lease_until):%H:%M:%S} UTC; show it again after that")
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
        raise RefusedError(f"several effects have the {_of(asked)}: {names}. Choose one with --effect NAME")
    return found[0]


def _label(name: str | None, asked: RecordKey) -> str:
    return f"the effect{'' if name is None else f' {printable(name)}'} of the {_of(asked)}"


def _of(asked: RecordKey) -> str:
    return f"key {printable(asked.key)[:80]}" + ("" if asked.scope is None else f" in scope {printable(asked.scope)}")


def _key(stored: str) -> tuple[str, str | None]:
    """Return the key and the scope of a stored text."""
    length, _, text = stored.partition(":")
    return text[int(length) :], text[: int(length)] or None


def _stored(row: Row[Any]) -> StoredEffect:
    key, scope = _key(row.message_id)
    decision = None if row.decision is None else json.loads(row.decision)
    given = None if decision is None else decision.pop("value", None)
    value = next((each for each in (row.result, row.evidence) if each is not None), None)
    if value is None and given is not None:
        value = given.encode()
    moments = ("first_sent_at", "ended_at", "lease_until", "next_at", "stopped_at")
    return StoredEffect(
        effect=row.handler,
        key=key,
        scope=scope,
        state=state_of(row),
        attempt=row.attempt,
        provider_key=row.provider_key,
        age=timedelta(milliseconds=row.now - row.armed_at),
        armed_at=_moment(row.armed_at),
        **{name: None if getattr(row, name) is None else _moment(getattr(row, name)) for name in moments},
        decision=decision,
        decided_by=row.decided_by,
        error=row.error,
        request=bytes(row.request),
        value=None if value is None else bytes(value),
    )


def _moment(milliseconds: int) -> datetime:
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


# Advice -----------------------------------------------------------------------------------------------------------


def _no_verdict(tables: EffectTables) -> ColumnElement[bool]:
    """Return the condition that a row has no outcome, no value of an attempt, no decision and no running lease."""
    column = tables.marker.c
    free = column.lease_until.is_(None) | (column.lease_until <= now_ms())
    return column.outcome.is_(None) & column.evidence_outcome.is_(None) & column.decision.is_(None) & free


def _is_unknown(tables: EffectTables) -> ColumnElement[bool]:
    """Return the condition that the effect may or may not have been done."""
    return _no_verdict(tables) & tables.marker.c.first_sent_at.is_not(None)


def unknown_effects(tables: EffectTables) -> Select[Any]:
    """Return the statement that finds the ids of unknown effects.

    ``processed_at`` has an index and is NULL until the outcome is recorded, so finished effects are not read.
    """
    column = tables.marker.c
    return select(column.message_id).where(column.processed_at.is_(None), _is_unknown(tables))


def advise_effects(engine: Engine, *, tables: EffectTables = default_effect_tables) -> list[Finding]:
    """Return advice about effects that are not finished. No advice is fatal.

    Raises ``MissingTableError`` if the tables are missing.
    """
    column, unknown = tables.marker.c, _is_unknown(tables)
    long_ago = now_ms() - int(_LONG_AGO / timedelta(milliseconds=1))
    counts = select(
        *(
            func.coalesce(func.sum(case((condition, 1), else_=0)), 0)
            for condition in (
                unknown & column.stopped_at.is_not(None),
                unknown & column.stopped_at.is_(None),
                _no_verdict(tables) & column.first_sent_at.is_(None) & (column.armed_at < long_ago),
                column.evidence_outcome.is_not(None) | (column.decision.is_not(None) & (column.next_at < long_ago)),
            )
        )
    ).where(column.outcome.is_(None))
    with connected_to(engine, tables) as connection:
        stopped, unknown_now, armed, kept = (int(number) for number in connection.execute(counts).one())
        found = list(_pruned_too_early(connection, tables))
    settle = "run `idempotency effects settle --app ...` from cron, and read its log lines"
    if stopped:
        found.append(
            advice(
                f"effects that need a person, because their policies have ended: {stopped:,}",
                "run `idempotency effects list --unknown`, check the provider, then run `idempotency effects resolve`",
            )
        )
    if unknown_now:
        found.append(advice(f"effects that may or may not have been done: {unknown_now:,}", settle))
    if armed:
        found.append(
            advice(
                f"effects that were armed more than a day ago, and never sent: {armed:,}",
                f"{settle}; if no process defines an effect of this name any more, add it to `Effects` again",
            )
        )
    if kept:
        found.append(advice(f"effects whose value or decision is known, but is not recorded: {kept:,}", settle))
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
