"""Fault points: the steps of a delivery at which an error is raised, the connection is lost, or the process is killed.

`FaultPoints` watches an engine and the handlers of a dispatcher while the dispatcher delivers. The library, the handler
and the database stay as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import PoolProxiedConnection
from sqlalchemy.util import await_only

from ..dialects import dialect_of
from ..dispatcher import AsyncDispatcher, Dispatcher

_STATEMENTS = tuple(f"at statement {number} of the handler" for number in (1, 2, 3))
BEFORE_CLAIM, AFTER_CLAIM, AFTER_FLUSH = "before the claim", "after the claim", "after the flush"
BEFORE_COMMIT, AFTER_COMMIT = "before COMMIT", "after COMMIT"
BEFORE_ACKNOWLEDGEMENT = "before the acknowledgement"
ERRORS = (
    BEFORE_CLAIM,
    AFTER_CLAIM,
    *_STATEMENTS,
    AFTER_FLUSH,
    BEFORE_COMMIT,
    AFTER_COMMIT,
    BEFORE_ACKNOWLEDGEMENT,
)
"""The steps at which an error is raised, in their order. ``after COMMIT``, the database has committed and the worker
sees an error. ``before the acknowledgement``, ``deliver`` has returned and the worker stops."""
CAN_KILL = sys.platform == "linux"  #: a fork of a test is safe
KILLED, LOST = "killed ", "connection lost "
KILLS = tuple(
    KILLED + point for point in (AFTER_CLAIM, AFTER_FLUSH, BEFORE_COMMIT, AFTER_COMMIT, BEFORE_ACKNOWLEDGEMENT)
)
"""The steps at which the process of the worker is killed, as ``kill -9`` does."""
LOSSES = tuple(LOST + point for point in (_STATEMENTS[0], BEFORE_COMMIT))
"""The steps at which the server ends the session of the delivery."""
CALL_KILLS = (KILLED + "before the call", KILLED + "after the call")
"""The steps of an effect at which the process is killed."""
PROVIDER = "provider: "  #: before the name of a behaviour

_SESSIONS = {
    "postgresql": ("SELECT pg_backend_pid()", "SELECT pg_terminate_backend({})"),
    "mysql": ("SELECT connection_id()", "KILL {}"),
    "mariadb": ("SELECT connection_id()", "KILL {}"),
}

MEETING = 0.3
"""Seconds that a handler of a burst waits at most, before its first write, for the others of the burst."""


class InjectedError(Exception):
    """The error that is raised at a fault point."""


class InjectedDatabaseError(OperationalError):
    """The error that is raised at a statement of the handler, as if the database had refused the statement."""


def faults_on(engine: Engine) -> tuple[str, ...]:
    """Return the faults that can be made: on Linux a process can be killed, and on a server a session can end."""
    kills = KILLS if CAN_KILL else ()
    losses = LOSSES if engine.dialect.name in _SESSIONS else ()
    return (*ERRORS, *kills, *losses)


def told(fault: str) -> str:
    """Return what a fault does, for a report."""
    said = {KILLED: "the process is killed ", LOST: "the connection is lost ", PROVIDER: "the provider is told to "}
    for prefix, text in said.items():
        if fault.startswith(prefix):
            return text + fault.removeprefix(prefix)
    return f"an error is raised {fault}"


def session_of(argument: Any) -> Any:
    """Return the session that the last argument of a handler is, or has: a command gets a ``Call``."""
    return getattr(argument, "session", argument)


def end_with_parent() -> None:
    """Have the system kill this process when its parent ends. Linux only."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def kill_this_process() -> NoReturn:
    """End this process as ``kill -9`` does."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("the process goes on after SIGKILL")


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

    def __init__(self, number: int) -> None:
        self.number = number
        self.statements: int | None = None
        self.is_in_handler = False
        self.has_met = False


_progress: ContextVar[Progress | None] = ContextVar("projector_dedup_progress", default=None)


class FaultPoints:
    """Makes the fault that is armed, in the first delivery that comes to its step."""

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
        replaced = vars(dialect).get("do_commit")  # of the user's

        def do_commit(dbapi_connection: PoolProxiedConnection) -> None:
            progress = _progress.get()
            if progress is None or progress.statements is None:  # no handler has run in this transaction
                commit(dbapi_connection)
                return
            self._reach(BEFORE_COMMIT, dbapi_connection)
            commit(dbapi_connection)
            self._reach(AFTER_COMMIT)

        event.listen(self._engine, "checkout", self._connection_is_taken)
        event.listen(self._engine, "before_cursor_execute", self._statement_begins)
        dialect.do_commit = do_commit  # type: ignore[method-assign]  # no event comes after COMMIT
        try:
            yield
        finally:
            del dialect.do_commit
            if replaced is not None:
                dialect.do_commit = replaced  # type: ignore[method-assign]
            event.remove(self._engine, "before_cursor_execute", self._statement_begins)
            event.remove(self._engine, "checkout", self._connection_is_taken)

    def arm(self, fault: str | None, burst: Collection[int] = ()) -> None:
        """Choose the fault of the next deliveries, and the messages that are delivered at the same time."""
        self._armed = fault
        meets = len(burst) > 1 and self._locks_rows  # else a handler does not begin before the other has committed
        self._meeting = Meeting(burst, asynchronous=self._engine.dialect.is_async) if meets else None

    def takes(self, *faults: str) -> bool:
        """True, once, if one of ``faults`` is armed."""
        with self._lock:
            if self._armed not in faults:
                return False
            self._armed = None
            return True

    @contextmanager
    def delivery(self, number: int) -> Iterator[None]:
        """Reach fault points in the block, which delivers in this thread or task, or in those that it starts."""
        before = _progress.set(Progress(number))
        try:
            yield
        finally:
            _progress.reset(before)
            if self._meeting is not None:
                self._meeting.has_ended(number)

    def watch(self, dispatcher: Dispatcher | AsyncDispatcher) -> None:
        """Put fault points around each handler of a new dispatcher."""
        for identity, handler in dispatcher._handlers.items():
            function = self.around(handler.function, asynchronous=handler.is_async)
            dispatcher._handlers[identity] = dataclasses.replace(handler, function=function)
        dispatcher._index_handlers()

    def around(self, function: Callable[..., Any], *, asynchronous: bool) -> Callable[..., Any]:
        """Return a handler with fault points around it. Its last argument is a session, or has one."""

        def called(*arguments: Any) -> Any:
            with self._in_handler():
                result = function(*arguments)
            if self._flushes:
                session_of(arguments[-1]).flush()
                self._reach(AFTER_FLUSH)
            return result

        async def awaited(*arguments: Any) -> Any:
            with self._in_handler():
                result = await function(*arguments)
            if self._flushes:
                await session_of(arguments[-1]).flush()
                self._reach(AFTER_FLUSH)
            return result

        return awaited if asynchronous else called

    def around_call(self, function: Callable[..., Any], *, asynchronous: bool) -> Callable[..., Any]:
        """Return the function of an effect with fault points before and after it."""

        def called(*arguments: Any) -> Any:
            self._reach("before the call")
            result = function(*arguments)
            self._reach("after the call")
            return result

        async def awaited(*arguments: Any) -> Any:
            self._reach("before the call")
            result = await function(*arguments)
            self._reach("after the call")
            return result

        return awaited if asynchronous else called

    @property
    def _flushes(self) -> bool:  # otherwise the COMMIT flushes, as it does without fault points
        return self._armed in (AFTER_FLUSH, KILLED + AFTER_FLUSH)

    def _reach(self, point: str, connection: PoolProxiedConnection | None = None) -> None:
        if _progress.get() is None:
            return
        if self.takes(KILLED + point):
            kill_this_process()
        if connection is not None and self.takes(LOST + point):
            self._end_session(connection)
        if self.takes(point):
            raise InjectedError(f"an injected error, {point}")

    def _end_session(self, connection: PoolProxiedConnection) -> None:
        """Have the server end the session of a connection. The driver learns it when it next uses the connection."""
        which, end = _SESSIONS[self._engine.dialect.name]
        cursor = connection.cursor()
        cursor.execute(which)
        (session,) = cursor.fetchone()  # type: ignore[misc]  # one row, as both servers answer
        cursor.close()
        progress = _progress.set(None)  # the connection that ends the other one is no part of the delivery
        beside = self._engine.pool.recreate()  # the pool may have no other connection
        try:
            with contextlib.closing(beside.connect()) as another, contextlib.closing(another.cursor()) as sent:
                sent.execute(end.format(int(session)))
        finally:
            beside.dispose()
            _progress.reset(progress)

    def _connection_is_taken(self, *_: object) -> None:
        progress = _progress.get()
        if progress is None or progress.is_in_handler:  # the handler takes another connection
            return
        progress.statements = None
        self._reach(BEFORE_CLAIM)

    @contextmanager
    def _in_handler(self) -> Iterator[None]:
        progress = _progress.get()
        if progress is None:
            yield
            return
        progress.statements = 0
        self._reach(AFTER_CLAIM)
        progress.is_in_handler = True
        try:
            yield
        finally:
            progress.is_in_handler = False

    def _statement_begins(self, connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        progress = _progress.get()
        if progress is None or progress.statements is None:
            return
        progress.statements += 1
        point = f"at statement {progress.statements} of the handler"
        if self.takes(LOST + point):
            self._end_session(connection.connection)
        if self.takes(point):
            raise InjectedDatabaseError(statement, {}, InjectedError(f"an injected error, {point}"))
        writes = statement.lstrip()[:6].upper() != "SELECT"
        if writes and self._meeting is not None and not progress.has_met:
            progress.has_met = True
            self._meeting.wait(progress.number)
