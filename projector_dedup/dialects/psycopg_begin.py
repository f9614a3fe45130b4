"""Send BEGIN with the claim, and COMMIT with the last statement, in one round trip of psycopg 3.

psycopg sends BEGIN separately before the first statement and waits for the answer, which costs a round trip for every
message. A pipeline of libpq waits once for both. SQLAlchemy sees a cursor that executes the claim, so echo, events and
errors work as usual. psycopg sees a transaction that has begun. Ids are sent as parameters, never as text.

The last statement of a transaction is sent together with COMMIT in the same way. If it fails, the server skips the
COMMIT (docs/adr/0006-round-trips-and-batches.md).
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache, partial
from itertools import count
from logging import LogRecord
from typing import Any
from weakref import WeakKeyDictionary

from psycopg import AsyncCursor, Binary, Cursor, IsolationLevel, OperationalError, Pipeline, errors, pq
from psycopg.adapt import AdaptersMap, Transformer
from psycopg.pq.abc import PGresult
from psycopg.waiting import Ready, Wait

from ..errors import UnsafeSessionError

Driver = Any  # psycopg.Connection or AsyncConnection

_IDLE, _OPEN = pq.TransactionStatus.IDLE, pq.TransactionStatus.INTRANS
_FAILED = pq.ExecStatus.FATAL_ERROR

_LEVELS = {level.name.replace("_", " "): level for level in IsolationLevel}  # as SQLAlchemy calls them
_BEGIN = {level: f"BEGIN ISOLATION LEVEL {name}".encode() for name, level in _LEVELS.items()}
_STALE = {  # the errors of a statement that was prepared and cannot be run any more
    "26000",  # invalid_sql_statement_name: psycopg sends DEALLOCATE ALL after a ROLLBACK, to a savepoint too
    "0A000",  # feature_not_supported: a column of its result has another type now
}

_OK = pq.ConnStatus.OK
_DONE, _SYNC = pq.ExecStatus.COMMAND_OK, pq.ExecStatus.PIPELINE_SYNC
_READ, _READ_OR_WRITE = Wait.R, Wait.RW
_PREPARED_AT_MOST = 16  # for each connection: schemas, and listeners that add comments, change the text of a claim

_numbers = count()
_prepared: WeakKeyDictionary[Driver, dict[bytes, bytes]] = WeakKeyDictionary()


def beginning(driver: Driver, level: str | None = None) -> AbstractContextManager[object]:
    """Return a block in which a statement on the driver's connection takes BEGIN along, if ``can_begin``.

    The transaction begins at ``level``, or at the level that is set on the connection. A ``level`` is given only after
    ``can_begin`` returned True. Raises ``UnsafeSessionError`` if a transaction was begun since.
    """
    if level is not None:
        if driver.pgconn.transaction_status != _IDLE:
            raise UnsafeSessionError(
                "a transaction was begun on the connection before the claim; let the claim be the first statement"
            )
        return _Executing(driver, begin=_BEGIN[_LEVELS[level]])
    if not can_begin(driver):
        return nullcontext()
    chosen = driver.isolation_level
    return _Executing(driver, begin=b"BEGIN" if chosen is None else _BEGIN[chosen])


def ending(driver: Driver) -> AbstractContextManager[object]:
    """Return a block in which a statement on the driver's connection takes COMMIT along, if ``can_end``."""
    return _Executing(driver, commit=b"COMMIT")


class _Executing:
    """Makes the driver's connection create cursors in the block that send a command before or after their statement."""

    def __init__(self, driver: Driver, **command: bytes) -> None:
        self._driver = driver
        self._command = command

    def __enter__(self) -> None:
        self._usual = self._driver.cursor_factory
        self._driver.cursor_factory = partial(_CURSORS[self._usual], **self._command)

    def __exit__(self, *_error: object) -> None:
        self._driver.cursor_factory = self._usual


def can_begin(driver: Driver) -> bool:
    """True if BEGIN can go with a statement on this connection, on which no transaction has begun.

    Not with AUTOCOMMIT, read_only, deferrable or a cursor class of the user's, another encoding than UTF8, a libpq
    without pipelines, or a psycopg that prepares no statements. An isolation level may be set.
    """
    return (
        driver.pgconn.transaction_status == _IDLE
        and not driver.autocommit
        and driver.read_only is driver.deferrable is None
        and _can_pipeline(driver)
    )


def can_end(driver: Driver) -> bool:
    """True if COMMIT can go with a statement on this connection, in whose transaction no statement has failed."""
    return driver.pgconn.transaction_status == _OPEN and not driver.autocommit and _can_pipeline(driver)


def _can_pipeline(driver: Driver) -> bool:
    return (
        driver.cursor_factory in _CURSORS
        and driver.prepare_threshold is not None  # with None there may be a pooler; not all of them know pipelines
        and driver.pgconn.parameter_status(b"client_encoding") == b"UTF8"
        and _has_pipelines()
    )


@cache
def _has_pipelines() -> bool:
    return Pipeline.is_supported()


class _Together:
    """Sends a statement with BEGIN or with COMMIT, and waits once: shared by the sync and the async cursor."""

    connection: Driver
    adapters: AdaptersMap
    pgresult: PGresult | None
    _fetched = False

    def __init__(self, connection: Driver, *, begin: bytes = b"", commit: bytes = b"", **options: Any) -> None:
        super().__init__(connection, **options)  # type: ignore[call-arg]  # psycopg's cursor is the next base class
        self._begin = begin
        self._commit = commit
        self._prepared = _prepared.setdefault(connection, {}) if begin else None

    @property
    def rowcount(self) -> int:
        """Return how many rows the statement inserted; -1 before it was executed."""
        return -1 if self.pgresult is None else self.pgresult.command_tuples or 0

    def _rest(self) -> list[tuple[Any, ...]]:
        """Return all rows at the first call, and none after it.

        psycopg's own methods would find no rows, since psycopg's cursor has not executed anything.
        """
        result, fetched, self._fetched = self.pgresult, self._fetched, True
        if result is None or fetched:
            return []
        transformer = Transformer.from_context(self)
        transformer.set_pgresult(result)
        return transformer.load_rows(0, result.ntuples, tuple)

    def _execute(self, sql: str, parameters: Mapping[str, Any]) -> Generator[Wait, Ready, None]:
        statement, names = numbered(sql)
        values = [as_text(parameters[name]) for name in names]
        after = (self._commit,) if self._commit else ()
        error = errors.Error()
        for before in ((self._begin,), (b"ROLLBACK", self._begin)) if self._begin else ((),):
            replies = yield from self._send(before, statement, values, after)
            failed = next((reply for reply in replies if reply.status == _FAILED), None)
            if failed is None:
                self.pgresult = replies[-1 - len(after)]
                return
            error = errors.error_from_result(failed)
            if self._prepared is None or error.sqlstate not in _STALE:
                break
            self._prepared.clear()
        raise error

    def _send(
        self, before: Sequence[bytes], statement: bytes, values: list[bytes | None], after: Sequence[bytes]
    ) -> Generator[Wait, Ready, list[PGresult]]:
        """Send the ``statement`` between other commands in a pipeline, wait once, and return the answers.

        Of commands after one that fails, the server runs none. Only a statement that comes with BEGIN is prepared: one
        that comes with COMMIT, and cannot be run any more, would fail a transaction that has run the user's code. An
        interruption half-way leaves the connection busy, as it does for any statement.
        """
        pgconn, prepared = self.connection.pgconn, self._prepared
        pgconn.enter_pipeline_mode()
        for command in before:
            pgconn.send_query_params(command, None)
        name = None if prepared is None else prepared.get(statement)
        if new := name is None:
            room = prepared is not None and len(prepared) < _PREPARED_AT_MOST
            name = b"projector_dedup_%d" % next(_numbers) if room else b""
            pgconn.send_prepare(name, statement)  # behind BEGIN: it takes a snapshot, after which no level can be set
        pgconn.send_query_prepared(name, values)
        for command in after:
            pgconn.send_query_params(command, None)
        pgconn.pipeline_sync()
        while pgconn.flush():
            if (yield _READ_OR_WRITE) & Ready.R:
                pgconn.consume_input()
        replies: list[PGresult] = []
        while not replies or replies[-1].status != _SYNC:
            while pgconn.is_busy():
                if (yield _READ):
                    pgconn.consume_input()
            if (reply := pgconn.get_result()) is not None:
                replies.append(reply)
            elif pgconn.status != _OK:
                raise OperationalError("the connection was lost")
        pgconn.exit_pipeline_mode()
        if prepared is not None and new and name and replies[len(before)].status == _DONE:
            prepared[statement] = name
        return replies[:-1]


class CursorTogether(_Together, Cursor[Any]):
    """Executes the first or the last statement of a transaction on a sync connection of psycopg's."""

    def execute(self, query: Any, params: Any = None, **_options: Any) -> Any:
        """Send the statement with its named parameters, and BEGIN or COMMIT; wait once for the answers."""
        self.connection.wait(self._execute(query, params))
        return self

    def fetchall(self) -> list[Any]:
        """Return all rows of the statement that were not fetched yet."""
        return self._rest()

    def fetchone(self) -> Any:
        """Return the first row, or None; these statements give one row at most, so the others are dropped."""
        return next(iter(self._rest()), None)


class AsyncCursorTogether(_Together, AsyncCursor[Any]):
    """Executes the first or the last statement of a transaction on an async connection of psycopg's."""

    async def execute(self, query: Any, params: Any = None, **_options: Any) -> Any:
        """Send the statement with its named parameters, and BEGIN or COMMIT; await the answers once."""
        await self.connection.wait(self._execute(query, params))
        return self

    async def fetchall(self) -> list[Any]:
        """Return all rows of the statement that were not fetched yet."""
        return self._rest()


def is_no_echo(record: LogRecord) -> bool:
    """True unless psycopg logs a ``PipelineAborted``, which repeats an error that it has raised before.

    ``executemany`` uses a pipeline, so every conflict of a flush would log a warning, and the library retries it.
    """
    return not any(isinstance(each, errors.PipelineAborted) for each in record.args or ())


_CURSORS: dict[Any, Any] = {Cursor: CursorTogether, AsyncCursor: AsyncCursorTogether}


def as_text(value: Any) -> bytes | None:
    """Return a parameter as libpq sends it: text; of bytes, which SQLAlchemy has wrapped, their digits."""
    if isinstance(value, Binary):
        return b"\\x" + bytes(value.obj).hex().encode()
    return None if value is None else str(value).encode()


@lru_cache(256)
def numbered(sql: str) -> tuple[bytes, list[str]]:
    """Return the statement as libpq takes it, with ``$1`` for ``%(name)s``, and the names in their order."""
    names: list[str] = []

    def number(found: re.Match[str]) -> str:
        if found[1] is None:
            return "%"
        if found[1] not in names:
            names.append(found[1])
        return f"${names.index(found[1]) + 1}"

    return re.sub(r"%%|%\((\w+)\)s", number, sql).encode(), names
