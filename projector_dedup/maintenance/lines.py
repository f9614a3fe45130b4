"""Write the lines by which workers detect late messages, and find the markers that may be deleted by them.

``projector_dedup.late`` explains lines, and why a cleanup waits before it deletes by one. ``newest_of``,
``write_lines``, ``unknown_lines``, ``write_known`` and ``settled_by`` run in this order, each in its own transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from sqlalchemy.engine import Connection

from ..late import Line, line_key, read_lines
from ..tables import DedupTables
from .databases import Expired, database_of, in_utc
from .state import insert_state, replace_state


def newest_of(expired: Expired, connection: Connection) -> dict[str, datetime]:
    """Return the latest time of each handler's messages whose markers were processed before the cutoff."""
    return {row.handler: in_utc(row.newest) for row in connection.execute(expired.newest()).all()}


def write_lines(tables: DedupTables, newest: Mapping[str, datetime], connection: Connection) -> None:
    """Write the first line of each handler that has none, and replace a settled line by a later one."""
    now, lines = database_of(connection).now(connection), read_lines(connection, tables)
    for handler, latest in sorted(newest.items()):
        key = line_key(handler)
        line = lines.get(key)
        if line is None:
            insert_state(connection, tables, key, Line(latest).text)
        elif line.settled_by(now) == line.at < latest:
            replace_state(connection, tables, key, line.text, Line(latest, settled=line.at).text)


def unknown_lines(tables: DedupTables, connection: Connection) -> dict[str, Line]:
    """Return the lines that are not yet recorded as committed."""
    return {key: line for key, line in read_lines(connection, tables).items() if line.known is None}


def write_known(tables: DedupTables, unknown: Mapping[str, Line], connection: Connection) -> None:
    """Record that these lines are committed now: an earlier transaction has read them."""
    now = database_of(connection).now(connection)
    for key, line in sorted(unknown.items()):
        replace_state(connection, tables, key, line.text, replace(line, known=now).text)


def settled_by(
    tables: DedupTables, expired: Expired, newest: Mapping[str, datetime], connection: Connection
) -> tuple[Expired, datetime | None]:
    """Return the markers that may be deleted now, by the lines of the handlers in ``newest``.

    Return also when the last of these lines will have settled; None if all have.
    """
    now, lines = database_of(connection).now(connection), read_lines(connection, tables)
    found = {handler: line for handler in newest if (line := lines.get(line_key(handler))) is not None}
    until = {handler: line.settled_by(now) for handler, line in found.items()}
    pending = [settles for line in found.values() if (settles := line.settles(now)) is not None]
    settled = {handler: at for handler, at in until.items() if at is not None}
    return replace(expired, settled=settled), max(pending, default=None)


def expired_now(connection: Connection, tables: DedupTables, expired: Expired) -> Expired:
    """Return the markers among ``expired`` that a cleanup would delete now; nothing is written."""
    if tables.keyed:  # records and effects have no line: what comes again after them is not detected
        return expired
    return settled_by(tables, expired, newest_of(expired, connection), connection)[0]


def take_over_line(tables: DedupTables, old: str, new: str, connection: Connection) -> bool:
    """Copy the line of the handler ``old`` to its ``new`` name; return False if another line was written meanwhile."""
    lines = read_lines(connection, tables)
    theirs, ours = lines.get(line_key(old)), lines.get(line_key(new))
    if theirs is None or (ours is not None and theirs.at <= ours.at):
        return True
    if ours is None:
        return insert_state(connection, tables, line_key(new), Line(theirs.at).text)
    return replace_state(connection, tables, line_key(new), ours.text, Line(theirs.at, settled=ours.settled).text)
