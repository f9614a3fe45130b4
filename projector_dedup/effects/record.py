"""The table of effects, and the statements that insert, take, release and finish a row.

Every UPDATE of a row names the token that the row must have, so it changes nothing if another process was faster. A
process that takes a row writes a new token. Times are milliseconds since 1970 of the database's clock
(docs/adr/0014-effects.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from uuid import uuid4

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Index,
    Integer,
    MetaData,
    RowMapping,
    SmallInteger,
    Table,
    Text,
    case,
    delete,
    func,
    or_,
    select,
    update,
)
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from ..commands.operation import derived_id
from ..commands.record import MAX_CODEC_BYTES, RESULT, RecordKey
from ..dialects import Dialect, Failure, dialect_of
from ..dialects.columns import exact_bytes, exact_text, now_ms, utc_now
from ..errors import InProgress
from ..message import printable
from ..tables import DedupTables, key_tables
from .definition import MAX_LEASE

DEFAULT_NAME = "external_effect"
DONE = RESULT  #: the outcomes of effects are numbered like those of commands
DOUBLE = 9  #: in ``evidence_outcome``: done, as another attempt was, which no person has seen yet
ATTEMPT, ASKED, PERSON = "attempt", "ask", "person"  #: who has decided an outcome
HAPPENED = ("armed_at", "first_sent_at", "ended_at", "stopped_at")  #: columns with times of what has happened
AHEAD = 60_000  #: milliseconds by which such a time may be later than the database's clock
HOUR = 3_600_000  #: milliseconds: the longest pause before a known outcome is recorded again
MAX_ERROR = 500  # characters of an error's text that are kept


@dataclass(frozen=True, repr=False)
class EffectTables(DedupTables):
    """The table of effects and its state table, as ``make_effect_tables`` returns them.

    A row has the key columns of a marker: ``handler`` is the name of the effect, ``message_id`` is the scope and the
    key. ``processed_at`` is NULL until the outcome is recorded.
    """

    maker: ClassVar[str] = "make_effect_tables"
    default_name: ClassVar[str] = DEFAULT_NAME
    option: ClassVar[str] = " --effects"
    revisions: ClassVar[tuple[str, ...]] = ("projector_dedup_0003",)
    noun: ClassVar[str] = "effect"
    handler: ClassVar[str] = "effect"
    subject: ClassVar[str] = "effects"
    keyed: ClassVar[bool] = True

    @staticmethod
    def make(metadata: MetaData, name: str, schema: str | None) -> EffectTables:
        """Return tables of this kind, added to ``metadata``."""
        return make_effect_tables(metadata, name, schema)


def make_effect_tables(metadata: MetaData, name: str = DEFAULT_NAME, schema: str | None = None) -> EffectTables:
    """Add the table of effects ``name`` and the state table ``<name>_state`` to your ``metadata``, and return both.

    ``schema`` is the database schema, or None for the default one. If you give a name or a schema, pass the result as
    ``tables=`` to ``Effects`` and ``arm``.

    Raises the errors of ``make_tables``.
    """
    tables = key_tables(metadata, name, schema)
    finished = tables.marker.c.processed_at
    finished.nullable, finished.server_default = True, None  # an unfinished row has no age, so it cannot be pruned
    for column in (
        Column("fingerprint", exact_bytes(), nullable=False),  # of the request
        Column("request", exact_bytes(), nullable=False),
        Column("provider_key", exact_text(36), nullable=False),
        Column("armed", Boolean(), nullable=False),  # False: run() inserted the row, and arm() was not called
        Column("armed_at", BigInteger(), nullable=False),
        Column("attempt", Integer(), nullable=False),  # the number of attempts that have begun
        Column("token", exact_text(32), nullable=False),
        Column("lease_until", BigInteger(), nullable=True),  # NULL: no attempt is running
        Column("first_sent_at", BigInteger(), nullable=True),  # NULL: nothing was sent
        Column("ended_at", BigInteger(), nullable=True),  # when the last attempt ended
        Column("next_at", BigInteger(), nullable=True),  # when settle takes the row again; NULL: never
        Column("stopped_at", BigInteger(), nullable=True),  # when the policy ended; a person must decide
        Column("decision", Text(), nullable=True),  # of a person, as JSON, until it is recorded
        Column("evidence_attempt", Integer(), nullable=True),
        Column("evidence_outcome", SmallInteger(), nullable=True),  # of an attempt that could not be recorded
        Column("evidence", exact_bytes(), nullable=True),  # its value; NULL: a value that cannot be stored
        Column("error", Text(), nullable=True),  # of the last attempt or ask
        Column("outcome", SmallInteger(), nullable=True),
        Column("decided_by", exact_text(10), nullable=True),
        Column("codec", exact_text(MAX_CODEC_BYTES), nullable=True),
        Column("result", exact_bytes(), nullable=True),
    ):
        tables.marker.append_column(column)
    Index(f"ix_{name}_next_at", tables.marker.c.next_at)
    return EffectTables(tables.marker, tables.state)


default_effect_tables = make_effect_tables(MetaData())


@dataclass(frozen=True)
class NewRow:
    """An effect before it has a row."""

    identity: str
    key: RecordKey
    request: bytes
    fingerprint: bytes

    def values(self, *, armed: bool, token: str, lease: int | None = None) -> dict[str, Any]:
        """Return the values of the row: armed, or taken at once for an attempt of ``lease`` milliseconds."""
        now = now_ms()
        taken = {"attempt": 0, "token": token, "next_at": now}
        if lease is not None:
            taken = {"attempt": 1, "first_sent_at": now} | _leased(token, lease)
        return {
            "message_id": self.key.stored,
            "handler": self.identity,
            "fingerprint": self.fingerprint,
            "request": self.request,
            "provider_key": self.provider_key,
            "armed": armed,
            "armed_at": now,
            **taken,
        }

    @property
    def provider_key(self) -> str:
        """The key for the provider. It is stored, so that a row keeps it when the effect is renamed."""
        return str(derived_id("effect", self.key.scope or "", self.identity, self.key.key))


@dataclass(frozen=True)
class Seen:
    """A row as it was read, and the database's time then."""

    message_id: str
    handler: str
    fingerprint: bytes
    request: bytes
    provider_key: str
    armed: bool
    armed_at: int
    attempt: int
    token: str
    lease_until: int | None
    first_sent_at: int | None
    ended_at: int | None
    stopped_at: int | None
    decision: str | None
    evidence_attempt: int | None
    evidence_outcome: int | None
    evidence: bytes | None
    outcome: int | None
    decided_by: str | None
    result: bytes | None
    now: int

    @classmethod
    def of_new(cls, new: NewRow, token: str) -> Seen:
        """Return the row that was made for an attempt at once; its times are unknown, and count as 0."""
        made: tuple[Any, ...] = (new.key.stored, new.identity, new.fingerprint, new.request, new.provider_key)
        unknown: dict[str, Any] = dict.fromkeys(_SEEN[len(made) :])
        return cls(*made, **unknown | {"armed": False, "armed_at": 0, "attempt": 1, "token": token, "now": 0})

    @property
    def key(self) -> tuple[str, str]:
        """The message id and the handler, which identify the row."""
        return self.message_id, self.handler

    @property
    def is_unstorable(self) -> bool:
        """True if an attempt, or an ask, has returned a value that cannot be stored."""
        return self.evidence_outcome is not None and self.evidence is None

    @property
    def was_sent_ahead(self) -> bool:
        """True if an attempt began or ended in the future: the database's clock was ahead then."""
        return max(self.first_sent_at or 0, self.ended_at or 0) > self.now + AHEAD

    @property
    def last_ended_at(self) -> int:
        """When the last attempt ended: that of a killed process ends with its lease."""
        return self.ended_at or self.lease_until or self.armed_at


_SEEN = tuple(name for name in Seen.__dataclass_fields__ if name != "now")


@dataclass(frozen=True)
class Change:
    """A statement that changes one row, and how to recognise its change in the row.

    A COMMIT can succeed although its reply is lost. Then the statement runs again and changes nothing, because the row
    has another token or an outcome now, or is gone. ``is_in`` distinguishes this from a change of another process.
    """

    run: Callable[[Connection], bool]  #: runs the statement; returns True if it changed the row
    is_in: Callable[[Seen | None], bool]  #: True if the row (None: it is gone) has this change


class RowHeld(InProgress):
    """Another transaction holds the row of the effect."""


def lock(connection: Connection, dialect: Dialect, table: Table, message_id: str, handler: str) -> None:
    """Lock the row without waiting. Raises ``RowHeld``. SQLite, which has no locks of rows, locks nothing."""
    locking = select(table.c.handler).where(*_is(table, message_id, handler)).with_for_update(nowait=True)
    try:
        connection.execute(locking)
    except DBAPIError as error:
        if dialect.classify(error) is Failure.LOCK_TIMEOUT:
            text = f"another transaction holds the row of effect {printable(handler)}; try again later"
            raise RowHeld(text, retry_after=1.0) from error
        raise


def new_token() -> str:
    """Return a token that no other change of any row has."""
    return uuid4().hex


def read(connection: Connection, table: Table, message_id: str, handler: str) -> Seen | None:
    """Return the row of this key; None if there is none."""
    found = connection.execute(_select(table).where(*_is(table, message_id, handler))).mappings().one_or_none()
    return None if found is None else _seen(found)


def due(connection: Connection, table: Table, names: list[str], until: int | None, limit: int) -> list[Seen]:
    """Return the rows of these effects that are due, oldest first. They are not locked.

    Rows of the time when the database's clock was ahead are due, too.
    """
    until_then = now_ms() if until is None else until
    unsent = is_ahead(table, "armed_at") & (table.c.attempt == 0)
    sent = is_ahead(table, "first_sent_at", "ended_at") & _has_no_evidence(table) & table.c.decision.is_(None)
    left = is_known(table) & (table.c.next_at > until_then + HOUR + AHEAD)
    ready = (table.c.next_at <= until_then) | unsent | sent | left
    wanted = table.c.handler.in_(names) & (table.c.next_at > 0) & ready  # an index has the rows with a next_at
    rows = connection.execute(_select(table).where(wanted).order_by(table.c.next_at).limit(limit)).mappings()
    return [_seen(row) for row in rows]


def is_known(table: Table) -> ColumnElement[bool]:
    """Return the condition that an attempt has left its value, or that a person has decided."""
    return table.c.evidence.is_not(None) | table.c.decision.is_not(None)


def is_ahead(table: Table, *names: str) -> ColumnElement[bool]:
    """Return the condition that one of these times of what has happened lies in the future: the clock was ahead then.

    Without names, it is about all such times, and about a lease that no clock that is right can have given.
    """
    now = select(now_ms()).scalar_subquery()
    ahead = [table.c[name] > now + AHEAD for name in names or HAPPENED]
    return or_(*ahead, *([] if names else [table.c.lease_until > now + MAX_LEASE * 1000 + AHEAD]))


def overdue(connection: Connection, table: Table, known: set[str], ms: int) -> list[tuple[str, int]]:
    """Return the names beside ``known`` whose effects have been due for ``ms`` milliseconds, and the number of each."""
    since = select(now_ms() - ms).scalar_subquery()  # else PostgreSQL reads every row
    others = table.c.handler.not_in(known) & (table.c.next_at <= since)
    found = connection.execute(select(table.c.handler, func.count()).where(others).group_by(table.c.handler))
    return [(name, number) for name, number in found]


def insert(table: Table, new: NewRow, token: str, lease: int) -> Change:
    """Insert the row and take it for the first attempt. Change nothing if there is a row."""
    values = new.values(armed=False, token=token, lease=lease)
    return Change(
        lambda connection: dialect_of(connection).insert_new(connection, table, values),
        lambda now: _has(now, token=token),
    )


def take(table: Table, row: Seen, token: str, lease: int, *, latest: int | None) -> Change:
    """Take the row for another attempt. Change nothing if somebody was faster, or if it is later than ``latest``."""
    first = now_ms() if row.first_sent_at is None else row.first_sent_at
    begun = {"attempt": row.attempt + 1, "first_sent_at": first, "ended_at": None}
    return _take(table, row, latest, token, _leased(token, lease) | begun)


def take_to_ask(table: Table, row: Seen, token: str, lease: int, *, latest: int | None) -> Change:
    """Take the row to ask the provider: no attempt begins, and the end of the last one stays."""
    return _take(table, row, latest, token, _leased(token, lease) | {"ended_at": row.last_ended_at})


def _leased(token: str, lease: int) -> dict[str, Any]:
    until = now_ms() + lease
    return {"token": token, "lease_until": until, "next_at": until}


def _take(table: Table, row: Seen, latest: int | None, token: str, values: dict[str, Any]) -> Change:
    conditions = [_is_unchanged(table, row)]
    if latest is not None:
        conditions.append(now_ms() <= latest)
    return _by(update(table).where(*conditions).values(values), lambda now: _has(now, token=token))


def release(table: Table, row: Seen, held: str, next_in: int | None, *, over: bool = False, **values: Any) -> Change:
    """Give the row back without an outcome, with other ``values``; ``settle`` looks at it in ``next_in`` ms, or never.

    ``held`` is the token that it must have. Changes nothing if it was taken over, or has an outcome; or evidence,
    unless ``over``. A row that nobody has taken keeps its ``lease_until``; changes nothing if the attempt has ended
    since. After a lost COMMIT a release changes the row again, unless it has given the row another token.
    """
    conditions = [_has_token(table, row, held), table.c.outcome.is_(None)]
    if "lease_until" in values:
        conditions.append(_has_lease(table, row))
    if not over:
        conditions.append(_has_no_evidence(table))
    elif "evidence_outcome" in values:  # which are forgotten: never a stored value, or what came since the row was read
        conditions.append(table.c.evidence.is_(None))
        conditions += _as_read(table, row, "evidence_outcome", "evidence_attempt")
    next_at = None if next_in is None else now_ms() + next_in
    given = {"lease_until": None, "next_at": next_at, **values}
    if "error" in given:
        given["error"] = _unless_double(table, table.c.error, _kept_text(given["error"]))
    return _by(update(table).where(*conditions).values(given), lambda now: _has(now, token=values.get("token")))


def keep(
    table: Table, row: Seen, token: str, next_in: int | None, kept: dict[str, Any], error: str, **times: Any
) -> Change:
    """End the attempt, and keep its ``evidence`` in the row, unless the row has evidence or an outcome."""
    given_back = release(table, row, token, next_in, **kept, ended_at=now_ms(), error=error, **times)
    return replace(given_back, is_in=lambda now: _has(now, token=token, **kept))


def mark_armed(connection: Connection, table: Table, message_id: str, handler: str) -> None:
    """Mark a row that ``run`` made as armed: it is driven, and not deleted, from now on."""
    made_by_run = (*_is(table, message_id, handler), table.c.armed.is_(False))
    connection.execute(update(table).where(*made_by_run).values(armed=True))


def remove(table: Table, row: Seen, token: str) -> Change:
    """Delete a row that ``run`` made, and of which nothing was sent: nobody asked for it to be driven."""
    unfinished = (table.c.outcome.is_(None), _has_no_evidence(table), table.c.armed.is_(False))
    return _by(delete(table).where(_has_token(table, row, token), *unfinished), lambda now: now is None)


def finish(
    table: Table, row: Seen, token: str, outcome: int, data: bytes | None, by: str, *, over: bool, twice: str = ""
) -> Change:
    """Record the outcome. ``over``: also over evidence. An outcome is never written again.

    ``twice`` is a text about the evidence and the outcome if two attempts were done. It marks the row.
    """
    conditions = [_has_token(table, row, token), table.c.outcome.is_(None)]
    if not over:
        conditions.append(_has_no_evidence(table))
    values = {
        "outcome": outcome,
        "result": data,
        "decided_by": by,
        "processed_at": _unless_double(table, None, utc_now()),
        "ended_at": func.coalesce(table.c.ended_at, now_ms()) if by == ATTEMPT else table.c.ended_at,
        "lease_until": None,
        "next_at": None,
        "stopped_at": None,
        "error": _unless_double(table, table.c.error, None),
        **(_doubled(twice) if twice else {}),
    }
    statement = update(table).where(*conditions).values(values)
    return _by(statement, lambda now: _has(now, token=token, outcome=outcome, result=data))


def evidence(outcome: int, data: bytes | None, attempt: int | None) -> dict[str, Any]:
    """Return the values of a row that keep what an ``attempt``, or an ask (None), was told and could not record.

    ``data`` is None for a value that cannot be stored.
    """
    return {"evidence_outcome": outcome, "evidence": data, "evidence_attempt": attempt}


def keep_beside(
    table: Table, row: Seen, token: str, attempt: int, kept: dict[str, Any], error: str | None, twice: str
) -> Change | None:
    """Keep ``evidence`` that came after the ``row`` had been taken over; the first value that can be stored stays.

    ``twice`` marks the row, as in ``finish``. Return None if there is nothing to write.
    """
    written: dict[str, Any] = {}
    if row.token != token and _has_room(row, attempt, kept):
        written = {**kept, "next_at": now_ms() if row.outcome is None else None}  # what has stopped is recorded now
        if error is not None:
            written["error"] = _kept_text(error)
    if twice and written.get("evidence_outcome", row.evidence_outcome) == DONE:
        written |= _doubled(twice)
    if not written:
        return None
    unchanged = _as_read(table, row, "token", "outcome", "evidence_outcome", "evidence_attempt")
    change = update(table).where(*_is(table, *row.key), *unchanged).values(written)
    return _by(change, lambda now: _has(now, **{name: written[name] for name in written if name in kept}))


def _has_room(row: Seen, attempt: int, kept: dict[str, Any]) -> bool:
    """True if the row takes what is ``kept``, because it has nothing that is as strong.

    A rejection is kept only if no ``attempt`` with a higher number has begun: it says nothing of that one.
    """
    if kept["evidence_outcome"] != DONE:
        return row.evidence_outcome is None and row.attempt == attempt
    if row.evidence_outcome == DONE and row.evidence is None:
        return row.outcome is None and (kept["evidence"] is not None or row.decision is not None)
    return row.evidence_outcome not in (DONE, DOUBLE)


def _doubled(error: str) -> dict[str, Any]:
    """Return the values of a row that was done twice: it is not finished, and cleanup keeps it, until it is seen."""
    return {"evidence_outcome": DOUBLE, "processed_at": None, "error": _kept_text(error)}


def _unless_double(table: Table, kept: Any, other: Any) -> Any:
    """Return ``other``, or ``kept`` if the row was done twice: its text says so, and it is not finished."""
    return case((table.c.evidence_outcome == DOUBLE, kept), else_=other)


def _kept_text(error: str) -> str:
    """Return the text in ASCII: the database, or the connection, may have no other letters."""
    return error.encode("ascii", "backslashreplace").decode()[:MAX_ERROR]


def shown(error: BaseException) -> str:
    """Return the text of an error: short, in printable characters. Never raises."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001  # a __str__ of the user's
        text = ""
    return printable(f"{type(error).__name__}: {text[:MAX_ERROR]}")[:MAX_ERROR]


def _seen(found: RowMapping) -> Seen:
    values: dict[str, Any] = dict(found)
    for name in ("fingerprint", "request", "evidence", "result"):
        values[name] = None if values[name] is None else bytes(values[name])
    return Seen(**values)


def _select(table: Table) -> Any:
    return select(*(table.c[name] for name in _SEEN), now_ms().label("now"))


def _is(table: Table, message_id: str, handler: str) -> tuple[Any, Any]:
    return table.c.message_id == message_id, table.c.handler == handler


def _has_token(table: Table, row: Seen, token: str) -> Any:
    mine, name = _is(table, *row.key)
    return mine & name & (table.c.token == token)


def _is_unchanged(table: Table, row: Seen) -> Any:
    """Return the condition that the row is as it was read: the end of an attempt changes no token."""
    unfinished = table.c.outcome.is_(None) & _has_no_evidence(table)
    return _has_token(table, row, row.token) & unfinished & _has_lease(table, row)


def _as_read(table: Table, row: Seen, *names: str) -> list[Any]:
    return [table.c[name].is_not_distinct_from(getattr(row, name)) for name in names]


def _has_no_evidence(table: Table) -> Any:
    return table.c.evidence_outcome.is_(None)


def _has_lease(table: Table, row: Seen) -> Any:
    until = table.c.lease_until
    return until.is_(None) if row.lease_until is None else until == row.lease_until


def _has(now: Seen | None, **values: Any) -> bool:
    return now is not None and all(getattr(now, name) == value for name, value in values.items())


def _by(statement: Any, is_in: Callable[[Seen | None], bool]) -> Change:
    return Change(lambda connection: _changed(connection, statement), is_in)


def _changed(connection: Connection, statement: Any) -> bool:
    return connection.execute(statement).rowcount == 1
