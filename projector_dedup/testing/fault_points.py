"""Fault points: the steps of a delivery at which an error is raised, once.

`FaultPoints` watches an engine and the handlers of a dispatcher while the dispatcher delivers. The library, the handler
and the database stay as they are.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.util import await_only

from ..dialects import dialect_of
from ..dispatcher import AsyncDispatcher, Dispatcher
from ..handler import Handler

_STATEMENTS = tuple(f"at statement {number} of the handler" for number in (1, 2, 3))
BEFORE_CLAIM, AFTER_FLUSH, AFTER_COMMIT = "before the claim", "after the flush", "after COMMIT"
BEFORE_ACKNOWLEDGEMENT = "before the acknowledgement"
FAULT_POINTS = (
    BEFORE_CLAIM,
    "after the claim",
    *_STATEMENTS,
    AFTER_FLUSH,
    "before COMMIT",
    AFTER_COMMIT,
    BEFORE_ACKNOWLEDGEMENT,
)
"""The steps of a delivery, in their order. ``after COMMIT``, the database has committed and the worker sees an error.
``before the acknowledgement``, ``deliver`` has returned and the worker stops."""

MEETING = 0.3
"""Seconds that a handler of a burst waits at most, before its first write, for the others of the burst."""


class InjectedError(Exception):
    """The error that is raised at a fault point."""


class InjectedDatabaseError(OperationalError):
    """The error that is raised at a statement of the handler, as if the database had refused the statement."""


class Meeting:
    """Stops each handler of a burst before its first write, until all have arrived there or their deliveries ended."""

    def __init__(self, numbers: Collection[int], *, asynchronous: bool) -> None:
        self._missing = {*numbers}
        self._open = asyncio.Event() if asynchronous else threading.Event()

    def has_ended(self, number: int) -> None:
        """Note that the others need not wait for this message any more."""
        self._missing.discard(number)
        if not self._missing:
            self._open.set()

    def wait(self, number: int) -> None:
        """Wait for the others, in a handler."""
        self.has_ended(number)
        if isinstance(self._open, asyncio.Event):
            await_only(asyncio.wait([asyncio.ensure_future(self._open.wait())], timeout=MEETING))
        else:
            self._open.wait(MEETING)
        self._open.set()  # who has not come by now waits for a lock of this handler


class Progress:
    """The progress of one delivery: how many statements its handler has sent. None if the handler does not run."""

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.statements: int | None = None
        self.has_met = False


_progress: ContextVar[Progress | None] = ContextVar("projector_dedup_progress", default=None)


class FaultPoints:
    """Raises an error at the fault point that is armed, in the first delivery that comes there."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._armed: str | None = None
        self._lock = threading.Lock()
        self._locks_rows = dialect_of(engine).locks_rows
        self._meeting: Meeting | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Listen to the engine, in the block."""
        dialect, commit = self._engine.dialect, self._engine.dialect.do_commit

        def do_commit(dbapi_connection: PoolProxiedConnection) -> None:
            self._reach("before COMMIT")
            commit(dbapi_connection)
            self._reach(AFTER_COMMIT)

        event.listen(self._engine, "checkout", self._connection_is_taken)
        event.listen(self._engine, "before_cursor_execute", self._statement_begins)
        dialect.do_commit = do_commit  # type: ignore[method-assign]  # no event comes after COMMIT
        try:
            yield
        finally:
            del dialect.do_commit
            event.remove(self._engine, "before_cursor_execute", self._statement_begins)
            event.remove(self._engine, "checkout", self._connection_is_taken)

    def arm(self, fault: str | None, burst: Collection[int] = ()) -> None:
        """Choose the fault point of the next deliveries, and the messages that are delivered at the same time."""
        self._armed = fault
        meets = len(burst) > 1 and self._locks_rows  # else a handler does not begin before the other has committed
        self._meeting = Meeting(burst, asynchronous=self._engine.dialect.is_async) if meets else None

    def takes(self, point: str) -> bool:
        """True, once, if ``point`` is armed."""
        with self._lock:
            if self._armed != point:
                return False
            self._armed = None
            return True

    @contextmanager
    def delivery(self, number: int | None) -> Iterator[None]:
        """Reach fault points in the block, which delivers in this thread or task, or in those that it starts."""
        before = _progress.set(Progress(number))
        try:
            yield
        finally:
            _progress.reset(before)
            if self._meeting is not None and number is not None:
                self._meeting.has_ended(number)

    def watch(self, dispatcher: Dispatcher | AsyncDispatcher) -> None:
        """Put fault points around each handler of a new dispatcher."""
        for identity, handler in dispatcher._handlers.items():
            around = self._around_async if handler.is_async else self._around
            dispatcher._handlers[identity] = dataclasses.replace(handler, function=around(handler))
        dispatcher._index_handlers()

    def _around(self, handler: Handler) -> Callable[[Any, Any], Any]:
        def function(event: Any, session: Any) -> Any:
            self._handler_begins()
            result = handler.function(event, session)
            if self._armed == AFTER_FLUSH:  # otherwise the COMMIT flushes, as it does without fault points
                session.flush()
                self._reach(AFTER_FLUSH)
            return result

        return function

    def _around_async(self, handler: Handler) -> Callable[[Any, Any], Any]:
        async def function(event: Any, session: Any) -> Any:
            self._handler_begins()
            result = await handler.function(event, session)
            if self._armed == AFTER_FLUSH:
                await session.flush()
                self._reach(AFTER_FLUSH)
            return result

        return function

    def _reach(self, point: str) -> None:
        progress = _progress.get()
        if progress is None or (progress.statements is None and point != BEFORE_CLAIM):
            return
        if self.takes(point):
            raise InjectedError(f"an injected error, {point}")

    def _connection_is_taken(self, *_: object) -> None:
        if (progress := _progress.get()) is not None:
            progress.statements = None
        self._reach(BEFORE_CLAIM)

    def _handler_begins(self) -> None:
        if (progress := _progress.get()) is not None:
            progress.statements = 0
        self._reach("after the claim")

    def _statement_begins(self, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        progress = _progress.get()
        if progress is None or progress.statements is None:
            return
        progress.statements += 1
        point = f"at statement {progress.statements} of the handler"
        if self.takes(point):
            raise InjectedDatabaseError(statement, {}, InjectedError(f"an injected error, {point}"))
        writes = statement.lstrip()[:6].upper() != "SELECT"
        if writes and self._meeting is not None and progress.number is not None and not progress.has_met:
            progress.has_met = True
            self._meeting.wait(progress.number)
