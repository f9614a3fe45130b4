"""Detect late messages. A message is late if it has no marker, but its marker may have been deleted.

Before a cleanup deletes markers of a handler, it writes a *line* for the handler: the latest ``occurred_at`` of the
markers that it will delete. A message without a marker that occurred at or before the line is late, because the library
does not know whether it was applied. A worker reads the lines rarely. So a cleanup waits until every worker has read a
line before it deletes markers by this line:

1. A cleanup commits a line. In a later transaction it writes the time from which the line is known to be committed.
2. The cleanup deletes markers by that line ``SETTLE`` after that time, and not earlier.
3. A worker reads the lines again if it last asked for them more than ``FRESH`` seconds ago.
4. If a claim is answered more than ``ANSWERED`` seconds after the worker asked for the lines, the worker rolls the
   claim back and runs it again.

So if a worker has not seen a line, no marker was deleted by that line before the claim was answered. The claim's
statement does not read the lines, so a claim costs the same with and without them (docs/adr/0044).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from weakref import WeakKeyDictionary

from sqlalchemy import select
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from .dialects import Failure, dialect_of, may_move
from .errors import MissingTableError, RefusedError
from .markers import bind_of_marker
from .message import MAX_HANDLER_BYTES, printable
from .tables import DedupTables, full_name

SETTLE = timedelta(hours=1)  #: from the time a line is known to be committed until a cleanup deletes by it
FRESH, ANSWERED = SETTLE.total_seconds() / 4, SETTLE.total_seconds() / 2

_PREFIX = "line:"
_UNKNOWN = "-"


class OutdatedLinesError(Exception):
    """Raised if a claim was answered too long after the worker read the lines. ``deliver`` then claims again."""


@dataclass(frozen=True)
class Line:
    """The line of one handler, as it is stored in the state table.

    ``known`` is the time, by the database's clock, from which ``at`` is known to be committed. It is None until a later
    transaction has written it. ``settled`` is the line before this one, or None. Lines only advance.
    """

    at: datetime
    known: datetime | None = None
    settled: datetime | None = None

    def settled_by(self, now: datetime) -> datetime | None:
        """Return the time up to which markers may be deleted ``now`` (the database's clock), or None if none may."""
        return self.at if self.known is not None and self.known + SETTLE <= now else self.settled

    def settles(self, now: datetime) -> datetime | None:
        """Return when markers may be deleted by this line, or None if they may be ``now`` or the time is unknown."""
        return None if self.known is None or self.known + SETTLE <= now else self.known + SETTLE

    @property
    def text(self) -> str:
        """The value in the state table."""
        moments = (self.at, self.known, self.settled)
        return " ".join(_UNKNOWN if each is None else each.isoformat(timespec="microseconds") for each in moments)

    @classmethod
    def of(cls, text: str) -> Line:
        """Return the line with this ``text``. Raises ``ValueError`` if the text is no line."""
        at, known, settled = (None if each == _UNKNOWN else datetime.fromisoformat(each) for each in text.split(" "))
        if at is None or any(each is not None and each.tzinfo is None for each in (at, known, settled)):
            raise ValueError
        return cls(at, known, settled)


@lru_cache
def line_key(handler: str) -> str:
    """Return the key of a handler's line in the state table. A long name is hashed."""
    key = _PREFIX + handler
    if len(key.encode()) <= MAX_HANDLER_BYTES:
        return key
    return f"{_PREFIX}sha256:{hashlib.sha256(handler.encode()).hexdigest()}"


def read_lines(connection: Connection, tables: DedupTables) -> dict[str, Line]:
    """Return the lines of all handlers by their keys. Raises ``RefusedError`` for a value that is no line."""
    key, value = tables.state.c.key, tables.state.c.value
    found = connection.execute(select(key, value).where(key.startswith(_PREFIX))).all()
    try:
        return {row.key: Line.of(row.value) for row in found}
    except ValueError:
        raise RefusedError(
            f"{full_name(tables.state, connection)} has a key that begins with {_PREFIX!r}, and its value is no line; "
            "correct the value, or restore it from a backup. Without it, late messages would be applied again"
        ) from None


# What a worker knows ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Known:
    """The lines as a worker has read them, and the time of the question by both of its clocks."""

    lines: Mapping[str, Line]
    monotonic: float
    wall: float

    @property
    def age(self) -> float:
        """Seconds since the worker asked. The wall clock decides if the machine was suspended meanwhile."""
        return max(time.monotonic() - self.monotonic, time.time() - self.wall)

    def line_of(self, names: Collection[str]) -> datetime | None:
        """Return the latest line of a handler with these present and former names, or None.

        Raises ``OutdatedLinesError`` if a cleanup may have deleted markers by a line that this worker has not read.
        """
        if self.age > ANSWERED:
            raise OutdatedLinesError
        found = (self.lines.get(line_key(name)) for name in names)
        return max((line.at for line in found if line is not None), default=None)


class Lines:
    """The lines that one dispatcher has read. Threads may share the object.

    ``skip`` is True if a late message is skipped, and False if it is an error.
    """

    def __init__(self, tables: DedupTables, *, skip: bool) -> None:
        self.skip = skip
        self._tables = tables
        self._known: WeakKeyDictionary[Engine, Known] = WeakKeyDictionary()  # by engine, which may have a schema map

    def known(self, session: Session, another: Callable[[], AbstractContextManager[Session]]) -> Known:
        """Return the lines in the database of ``session``, which has not begun yet. Read them if they are not fresh.

        The method reads them with ``another`` session of the same kind, so that a user's listener selects the same
        tenant. If such a listener may exist, the method reads the lines each time, so it never uses those of another
        tenant. In the caller's own transaction (``testing.external_transaction``) it reads no lines.

        Raises ``MissingTableError`` or ``RefusedError`` if the lines cannot be read, and a transient database error
        unchanged.
        """
        bind = bind_of_marker(session, self._tables)
        if not isinstance(bind, Engine):
            return Known({}, time.monotonic(), time.time())
        known = self._known.get(bind)
        if known is None or known.age > FRESH or may_move(session, bind):
            dialect_of(bind).prepare(bind)
            with another() as reader:
                known = self._known[bind] = self._read(reader, bind)
        return known

    def _read(self, session: Session, bind: Engine) -> Known:
        monotonic, wall = time.monotonic(), time.time()  # before the question: a line may be written during the answer
        connection = session.connection(bind_arguments={"bind": bind})
        try:
            return Known(read_lines(connection, self._tables), monotonic, wall)
        except DBAPIError as error:
            failure = dialect_of(bind).classify(error)
            if failure in (Failure.TRANSIENT, Failure.READ_ONLY, Failure.LOCK_TIMEOUT):
                raise
            kind = MissingTableError if failure is Failure.NO_TABLE else RefusedError
            raise kind(
                f"{full_name(self._tables.state, connection)} cannot be read, so a late message could not be "
                f"detected: {printable(str(error.orig))[:200]}; create the table if it is missing (`idempotency "
                "migrate`), or grant SELECT on it, or give the dispatcher late='apply'"
            ) from error
