"""Compare the tables of a database with those that this version needs, and return each problem with its remedy.

``check`` examines the tables and the database, ``advise`` the age of the markers and the handlers.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Set
from datetime import datetime, timedelta
from importlib.resources import files
from pathlib import Path
from typing import Any

from sqlalchemy import ColumnElement, Table, select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError

from ..commands import CommandTables
from ..commands.record import MAX_CODEC_BYTES, RESULT, Record, RecordKey, recalling, recording
from ..dialects import Dialect, Failure, dialect_of
from ..effects import EffectTables
from ..effects.record import ATTEMPT, DONE, MAX_ERROR, NewRow, evidence, finish, new_token, read, release
from ..errors import RefusedError
from ..http.parked import ParkedTables
from ..late import in_utc
from ..markers import insert_marker, marker_key
from ..message import DIGEST_BYTES, MAX_MESSAGE_ID_BYTES, printable
from ..tables import DedupTables, default_tables, full_name
from .databases import database_of
from .findings import Finding, advice, server_findings
from .rebuilds import open_rebuilds
from .running import connected_to
from .schema import KINDS, columns_there, has_default, structure_findings, version_findings
from .state import duration, in_hours, moment_with_zone
from .stats import Ages, handlers_of

_LONG = "x" * (MAX_MESSAGE_ID_BYTES - 1)
_LOOK_ALIKES = ("a", "A", "a ", "e", "\N{LATIN SMALL LETTER E WITH ACUTE}", "1", "01", _LONG + "1", _LONG + "2")

_EVERY_BYTE = bytes(range(256))
_WHOLE = Record(RESULT, "x" * MAX_CODEC_BYTES, _EVERY_BYTE * 256, _EVERY_BYTE[-32:])
"""A record that fills its columns: a result of 64 KiB with every byte, which a text column cannot store."""

_PARKED = {"reason": "x" * 1000, "headers": "{}", "body": _EVERY_BYTE * 256}

_DIGEST = _EVERY_BYTE[-DIGEST_BYTES:]

_MINUTE = 60_000  # milliseconds

_SLACK = timedelta(days=2)  # do not report one missed cleanup, for example at a weekend


def check(engine: Engine, tables: DedupTables = default_tables) -> list[Finding]:
    """Return every problem of the tables and of the database's settings. An empty list means no problem.

    The function inserts test rows, and rolls them back.
    """
    with engine.connect() as connection:
        return [*_check_tables(connection, tables), *server_findings(connection, tables.marker)]


def _check_tables(connection: Connection, tables: DedupTables) -> list[Finding]:
    findings = structure_findings(connection, tables)
    if not any(finding.fatal for finding in findings):
        findings += version_findings(connection, tables)
        findings += _check_comparison(connection, tables)
    return findings


def _check_comparison(connection: Connection, tables: DedupTables) -> list[Finding]:
    """Insert markers with similar ids and handlers, and roll them back.

    A table that treats two of them as equal would lose messages. If the table gives a row a wrong time, a cleanup would
    delete new markers. In a table of commands, the function writes a whole record and compares it after reading.
    """
    dialect, remedy = dialect_of(connection), tables.mending(connection)
    handler = f"idempotency check {secrets.token_hex(8)}"  # unique, so that two checks do not wait for each other
    merges = Finding(
        f"{full_name(tables.marker, connection)} treats different message ids or handlers as equal",
        "its columns must compare byte for byte, otherwise messages are lost; " + remedy,
    )
    try:
        keys = [marker_key(each, handler) for each in _LOOK_ALIKES]
        if type(tables) is DedupTables and tables.marker.c.digest in columns_there(connection, tables.marker):
            keys[0]["digest"] = _DIGEST
        keys += [marker_key(_LOOK_ALIKES[0], each) for each in (handler.upper(), handler + " ")]
        new = [_insert(connection, dialect, tables, key) for key in keys]
        late = _is_late(connection, tables.marker, handler)
        kept = not all(new) or _keeps(connection, dialect, tables, handler)
    except RefusedError as error:
        return [Finding(str(error), remedy)]
    except DBAPIError as error:
        if dialect.classify(error) is Failure.UNIQUE:
            return [merges]
        words = printable(str(error.orig)).partition("\\n")[0][:200]
        problem = f"no {tables.noun} could be inserted to try {full_name(tables.marker, connection)}: {words}"
        if dialect.classify(error) is Failure.READ_ONLY:
            connection.invalidate()  # otherwise the pool would keep a connection to a server that is no primary
            return [Finding(problem, "this server is read-only now; give the URL of the primary, or try again")]
        mend = "grant its user SELECT, INSERT, UPDATE and DELETE, or check as the user that delivers; else " + remedy
        passes = dialect.classify(error) in (Failure.TRANSIENT, Failure.LOCK_TIMEOUT)
        return [advice(problem, "another transaction locks the table; try again") if passes else Finding(problem, mend)]
    finally:
        connection.rollback()
    if not all(new):
        return [merges]
    if late:
        column = f"{full_name(tables.marker, connection)}.processed_at"
        if tables.marker.c.processed_at.nullable:
            return [has_default(column, remedy)]
        wrong = f"{column} is not the time at which a row is inserted"
        return [Finding(wrong, "cleanup would delete new rows; correct the default of the column; " + remedy)]
    what = {CommandTables: "a record", EffectTables: "an effect", ParkedTables: "a request"}.get(
        type(tables), "a digest"
    )
    problem = f"{full_name(tables.marker, connection)} does not store {what} exactly as it was written"
    return [] if kept else [Finding(problem, "values would be cut or changed; " + remedy)]


def _insert(connection: Connection, dialect: Dialect, tables: DedupTables, key: dict[str, Any]) -> bool:
    """Insert a row of this kind. Return False if its key exists."""
    if isinstance(tables, ParkedTables):
        return dialect.insert_new(connection, tables.marker, key | _PARKED)
    if not isinstance(tables, EffectTables):
        try:
            return insert_marker(connection, dialect, tables, key)
        except RefusedError as error:
            if type(error) is RefusedError and isinstance(error.__cause__, DBAPIError):
                raise error.__cause__ from None  # the findings below are more precise
            raise
    stored, effect = key["message_id"], key["handler"]
    new = NewRow(effect, RecordKey(stored, None, stored), _EVERY_BYTE * 256, _EVERY_BYTE[-32:])
    return dialect.insert_new(connection, tables.marker, new.values(armed=True, token=new_token()))


def _is_late(connection: Connection, marker: Table, handler: str) -> bool:
    """True if the time of a new row differs from the database's clock by a minute or more.

    For a kind whose rows get a time later, True if a new row already has one.
    """
    off = _off_by(connection, marker, marker.c.handler == handler)
    return off is not None and (marker.c.processed_at.nullable or off > timedelta(minutes=1))


def _off_by(connection: Connection, marker: Table, *which: ColumnElement[bool]) -> timedelta | None:
    """Return the difference between the time of such a row and the database's clock, or None if it has no time."""
    found: datetime | None = connection.scalar(select(marker.c.processed_at).where(*which).limit(1))
    return None if found is None else abs(database_of(connection).now(connection) - in_utc(found))


def _keeps(connection: Connection, dialect: Dialect, tables: DedupTables, handler: str) -> bool:
    """True if the row of the first look-alike keeps the values of its other columns."""
    marker, first = tables.marker, _LOOK_ALIKES[0]
    if isinstance(tables, ParkedTables):
        wanted = marker.c.message_id == first, marker.c.handler == handler
        kept = dict(connection.execute(select(*(marker.c[name] for name in _PARKED)).where(*wanted)).mappings().one())
        return isinstance(kept["body"], (bytes, memoryview)) and kept | {"body": bytes(kept["body"])} == _PARKED
    if type(tables) is DedupTables:
        if marker.c.digest not in columns_there(connection, marker):
            return True
        row = select(marker.c.digest).where(marker.c.message_id == first, marker.c.handler == handler)
        return connection.scalar(row) in (_DIGEST, memoryview(_DIGEST))
    if isinstance(tables, CommandTables):
        return keeps_records(connection, dialect, tables, _LOOK_ALIKES[0], handler)
    return not isinstance(tables, EffectTables) or _keeps_effects(connection, tables.marker, _LOOK_ALIKES[0], handler)


def _keeps_effects(connection: Connection, table: Table, stored: str, effect: str) -> bool:
    """True if an effect that fills its columns is read as it was written, and gets a time when it is finished."""
    whole = _EVERY_BYTE * 256
    known = evidence(DONE, whole, 1) | {"error": "x" * MAX_ERROR, "decision": "x" * 1000}
    try:
        new = read(connection, table, stored, effect)
        if new is None or not release(table, new, new.token, 0, **known).run(connection):
            return False
        kept = read(connection, table, stored, effect)
        if not finish(table, new, new.token, DONE, whole, ATTEMPT, over=True).run(connection):
            return False
        done = read(connection, table, stored, effect)
    except TypeError:  # a text where bytes should be
        return False
    off = _off_by(connection, table, table.c.message_id == stored, table.c.handler == effect)
    return (
        kept is not None
        and done is not None
        and (new.request, new.fingerprint, new.armed) == (whole, _EVERY_BYTE[-32:], True)
        and abs(new.now - new.armed_at) < _MINUTE
        and (kept.evidence, kept.evidence_outcome, kept.decision) == (whole, DONE, known["decision"])
        and (done.result, done.outcome, done.decided_by) == (whole, DONE, ATTEMPT)
        and off is not None
        and off < timedelta(minutes=1)
    )


def keeps_records(connection: Connection, dialect: Dialect, tables: CommandTables, stored: str, operation: str) -> bool:
    """Write a record that fills its columns into an existing row. Return True if it is read as it was written."""
    recording(dialect, tables, stored, (operation,), _WHOLE).run(connection)
    recall = recalling(tables, stored, (operation,))
    recall.run(connection)
    row = recall.row
    if row is None or not all(isinstance(each, (bytes, memoryview)) for each in (row.fingerprint, row.result)):
        return False
    found = Record(row.outcome, row.codec, bytes(row.result), bytes(row.fingerprint))
    return found == _WHOLE


# Advice -----------------------------------------------------------------------------------------------------------


def advise(found: Ages, *, tables: DedupTables = default_tables) -> list[Finding]:
    """Return advice about the ``tables`` by the ages of their markers. No advice is fatal."""
    return [*_pruning(found, tables), *_horizon(found, tables), *_timeless(found)]


def _pruning(found: Ages, tables: DedupTables) -> Iterator[Finding]:
    if found.oldest is None:
        return
    state, age, command = found.state, found.at - found.oldest, f"`idempotency cleanup{tables.option}`"
    clean = f"run {command} from cron, or find out why it fails there"
    if state.cleaned_at is None:
        if age > timedelta(hours=found.retention_hours):
            yield advice(
                f"the oldest {tables.noun} is {duration(age)} old, and no complete cleanup was ever recorded",
                f"put {command} into cron; otherwise the table grows without limit",
            )
    elif age > timedelta(hours=found.retention_hours) + _SLACK:
        yield advice(
            f"the oldest {tables.noun} is {duration(age)} old, but the retention is {in_hours(found.retention_hours)}; "
            f"the last complete cleanup was {duration(found.at - state.cleaned_at)} ago",
            clean,
        )
    elif found.at - state.cleaned_at > max(_SLACK, timedelta(hours=2 * found.retention_hours)):
        yield advice(f"the last complete cleanup was {duration(found.at - state.cleaned_at)} ago", clean)


def _horizon(found: Ages, tables: DedupTables) -> Iterator[Finding]:
    state, horizon = found.state, found.state.horizon_hours
    if horizon is None:
        return
    if state.pruned_until is not None and state.pruned_until > found.at - timedelta(hours=horizon):
        yield advice(
            f"{tables.noun}s up to {moment_with_zone(state.pruned_until)} are deleted, but a message may come again "
            f"after {in_hours(horizon)} (the declared horizon); without its {tables.noun} it is refused as late, or "
            "applied again if it has no time",
            "do not replay messages from before that time",
        )


def _timeless(found: Ages) -> Iterator[Finding]:
    if found.timeless:
        yield advice(
            f"the messages of these handlers have no occurred_at: {_listed(found.timeless)}",
            "a message without a time that comes again after cleanup has deleted its marker is applied again, without "
            "any notice; set occurred_at, or give the dispatcher an extractor, such as occurred_at=from_uuid7",
        )


def check_handlers(engine: Engine, known: Set[str], *, tables: DedupTables = default_tables) -> list[Finding]:
    """Return a problem if there are markers of handlers that are not ``known``. The function reads every marker.

    ``known`` are the present and former names of the application's handlers (``Dispatcher.identities``).
    """
    unknown = handlers_of(engine, tables=tables) - known
    if not unknown:
        return []
    return [
        Finding(
            f"markers of handlers that the application does not have: {_listed(unknown)}",
            "if a handler was renamed, its messages are applied again under the new name: write "
            f"{_former(min(unknown))} for it, or run `idempotency rename OLD NEW --remove-old` if no old code runs. If "
            "another application has it, add its dispatcher (--app). If it was removed, delete its rows in "
            f"{tables.marker.fullname}",
        )
    ]


def _former(name: str) -> str:
    """Return the decorator that declares the former identity of a handler. Only that of a function may have no dot."""
    return f"@{'on(...' if '.' in name else 'projector(...'}, formerly=[{name!r}])"


def _listed(names: Collection[str]) -> str:
    """Return up to ten of the names, and the number of the others."""
    some = ", ".join(printable(name) for name in sorted(names)[:10])
    return some + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def advise_rebuilds(engine: Engine, *, tables: DedupTables = default_tables) -> list[Finding]:
    """Return the rebuilds that have been open for days."""
    with connected_to(engine, tables) as connection:
        now, rebuilds = database_of(connection).now(connection), open_rebuilds(connection, tables)
    return [
        advice(
            f"a rebuild of {printable(name)} has been open for {duration(now - each.opened_at)}: cleanup keeps all "
            "markers of both generations",
            "finish it with `idempotency rebuild --verify`, or drop the new generation (docs/rebuild.md)",
        )
        for name, each in sorted(rebuilds.items())
        if now - each.opened_at > _SLACK
    ]


# Alembic ----------------------------------------------------------------------------------------------------------


def _installed_versions() -> Path:
    return Path(str(files("projector_dedup.migrations").joinpath("versions")))


def check_installed_revisions() -> list[Finding]:
    """Return a finding if the user's own revisions are in the folder of the library's revisions.

    Alembic writes the first revision of a project into this folder, unless the user names another one.
    """
    versions = _installed_versions()
    ours = tuple(f"{each.rpartition('_')[2]}_{kind.default_name}" for kind in KINDS for each in kind.revisions)
    theirs = sorted(file.name for file in versions.glob("*.py") if not file.name.startswith((*ours, "__init__.py")))
    if not theirs:
        return []
    return [
        advice(
            f"{', '.join(theirs)} in {versions} is your own revision: Alembic wrote it into the installed package",
            "move it into the folder of your own revisions before the next installation deletes it; from now on run "
            "`alembic revision --head <your branch>@head`, and for the first revision of a project add `--head base "
            "--version-path <your folder>`",
        )
    ]
