"""The parts of the contract suite: the database under test, a read model, a harness for both, and gates for races.

Each test is written once, as synchronous code. For an asynchronous driver the dispatcher runs on an event loop in its
own thread, and the handler is an ``async def`` that runs the same code with ``AsyncSession.run_sync``.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, Self, TypeVar

from sqlalchemy import URL, ForeignKey, String, create_engine, event, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship, sessionmaker
from sqlalchemy.util import await_only

from projector_dedup.dispatcher import AsyncDispatcher, Dispatcher
from projector_dedup.outcome import Delivery
from projector_dedup.projector import FunctionProjector, on, projector
from projector_dedup.tables import default_tables
from projector_dedup.unit_of_work import AsyncUnitOfWork, UnitOfWork

PATIENCE = 30.0
"""Seconds to wait for something that must happen, before the test fails."""


class Base(DeclarativeBase):
    """The base of the entities in the contract's read model."""


class Total(Base):
    """A sum, which is wrong if a message counts twice or not at all."""

    __tablename__ = "contract_total"
    key: Mapped[str] = mapped_column(String(20), primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)


class Account(Base):
    """A row that has a relationship to a total, so that handlers can reach the total through it."""

    __tablename__ = "contract_account"
    key: Mapped[str] = mapped_column(String(20), primary_key=True)
    total_key: Mapped[str] = mapped_column(String(20), ForeignKey(Total.key))
    total: Mapped[Total] = relationship()


@dataclass(frozen=True)
class Added:
    """An event: add ``amount`` to each of ``keys``."""

    keys: tuple[str, ...] = ("a",)
    amount: int = 1


def add(happened: Added, session: Session) -> None:
    """A handler of ordinary ORM code: read each total, create it if missing, add."""
    for key in happened.keys:
        total = session.get(Total, key)
        if total is None:
            total = Total(key=key, amount=0)
            session.add(total)
        total.amount += happened.amount


@dataclass(frozen=True)
class Subject:
    """The database under test: its URL with the driver, and the place where an isolation level is set, if any.

    The database must be empty. The driver of ``url`` decides between sync and async. For psycopg, write
    ``psycopg_async`` for async.
    """

    url: URL
    engine_isolation: str | None = None  #: create_engine(isolation_level=...)
    option_isolation: str | None = None  #: engine.execution_options(isolation_level=...)
    dispatcher_isolation: str | None = None  #: Dispatcher(isolation=...)
    engine_arguments: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any], None] | None = None  #: called with the new engine, as configure_sqlite is

    @property
    def loses_updates(self) -> bool:
        """True if a level was chosen at which invariant I6 needs ``read_models`` or atomic upserts."""
        chosen = self.dispatcher_isolation or self.option_isolation or self.engine_isolation
        return chosen == "READ COMMITTED" or (chosen == "REPEATABLE READ" and self.is_mysql)

    @property
    def is_mysql(self) -> bool:
        """True if the URL says so."""
        return self.url.get_backend_name() == "mysql"

    @property
    def has_snapshots(self) -> bool:
        """True if transactions of the test's own see the database as it was when they began."""
        return (self.option_isolation or self.engine_isolation) in ("REPEATABLE READ", "SERIALIZABLE")

    @property
    def exact(self) -> dict[str, Any]:
        """The arguments of ``@projector`` with which totals are exact on this subject."""
        return {"read_models": [Total]} if self.loses_updates else {}


def until_acknowledged(deliver: Callable[[], Delivery], *passing: type[Exception], times: int = 200) -> Delivery:
    """Deliver again after every error of the kinds ``passing``, as a broker would, and return the first delivery."""
    for _ in range(times):
        with contextlib.suppress(*passing):
            return deliver()
    raise AssertionError(f"still not acknowledged after {times} deliveries")


class Broken(Exception):  # noqa: N818  # as InProgress is
    """An error that a handler raises by itself."""


class Interruption(BaseException):
    """An interruption that is no Exception, as KeyboardInterrupt is, which would end an event loop."""


def broken(_happened: Added, session: Session) -> None:
    """A handler that writes, then fails."""
    add(_happened, session)
    session.flush()
    raise Broken


# The harness ----------------------------------------------------------------------------------------------------------


P = ParamSpec("P")
T = TypeVar("T")
_ALL = (Base.metadata, default_tables.marker.metadata)


class Harness:
    """One subject, reached through an engine of its own, with the contract's tables."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.asynchronous = subject.url.get_dialect().is_async
        self._threads = ThreadPoolExecutor(32)
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(32))
        self._loop_thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._loop_thread.start()
        create: Callable[..., Any] = create_async_engine if self.asynchronous else create_engine
        arguments = {"pool_size": 20, **subject.engine_arguments}
        if subject.engine_isolation:
            arguments["isolation_level"] = subject.engine_isolation
        self._engine = create(subject.url, **arguments)
        self.engine = self._engine.sync_engine if isinstance(self._engine, AsyncEngine) else self._engine
        if subject.prepare:
            subject.prepare(self._engine)
        self._running: Counter[object] = Counter()
        event.listen(self.engine, "before_cursor_execute", self._statement_begins)
        event.listen(self.engine, "after_cursor_execute", self._statement_ends)
        event.listen(self.engine, "handle_error", lambda context: self._statement_ends(context.connection))
        options = {"isolation_level": subject.option_isolation} if subject.option_isolation else {}
        self._bind = self._engine.execution_options(**options)
        self.factory = self.factory_for(self._bind)

    def create_tables(self) -> None:
        """Create the read model, the marker table and the state table."""
        for metadata in _ALL:
            self.transact(partial(_on_connection, metadata.create_all))

    def drop_tables(self) -> None:
        """Drop the tables that ``create_tables`` made."""
        for metadata in _ALL:
            self.transact(partial(_on_connection, metadata.drop_all))

    def close(self) -> None:
        """Close every connection, and end every thread."""
        self.run(self._engine.dispose)
        self._threads.shutdown()
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_default_executor(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Delivering --------------------------------------------------------------------------------------------------

    def factory_for(self, bind: Any) -> Any:
        """Return a session factory of the kind that fits the driver."""
        return async_sessionmaker(bind) if self.asynchronous else sessionmaker(bind)

    def handler(
        self,
        body: Callable[[Any, Session], Any] = add,
        name: str = "totals",
        *,
        batch: bool = False,
        **settings: Any,
    ) -> FunctionProjector[[Any, Any], Any]:
        """Return a projector whose handler is ``body``: as it is, or run by an ``async def``."""

        async def awaited(happened: Any, session: AsyncSession) -> Any:
            return await session.run_sync(lambda inner: body(happened, inner))

        def direct(happened: Any, session: Session) -> Any:
            return body(happened, session)

        function: Callable[[Any, Any], Any] = on(Added, batch=batch)(awaited if self.asynchronous else direct)
        settings = {"idempotent": True, "name": name, **settings}
        return projector(**settings)(function)

    def dispatcher(self, *projectors: Any, factory: Any = None, **options: Any) -> Any:
        """Return a ``Dispatcher`` or ``AsyncDispatcher`` with the subject's isolation level."""
        if self.subject.dispatcher_isolation:
            options.setdefault("isolation", self.subject.dispatcher_isolation)
        kind = AsyncDispatcher if self.asynchronous else Dispatcher
        return kind(self.factory if factory is None else factory, *projectors or (self.handler(),), **options)

    def deliver(self, dispatcher: Any, happened: Any = None, message_id: Any = "m1") -> Delivery:
        """Call ``dispatcher.deliver``, and await it if it is asynchronous."""
        delivery: Delivery = self.run(
            dispatcher.deliver, Added() if happened is None else happened, message_id=message_id
        )
        return delivery

    def unit_of_work(self, message_id: str, body: Callable[[Session], None], *, commit: bool = True) -> bool:
        """Claim by a unit of work, run ``body`` if the message is new, and ``commit``; return True if it was new."""

        isolation = self.subject.dispatcher_isolation

        async def awaited() -> bool:
            async with AsyncUnitOfWork(self.factory, isolation=isolation) as uow:
                if new := await uow.claim(message_id, "totals"):
                    await uow.session.run_sync(body)
                    if commit:
                        await uow.commit()
                return new

        def direct() -> bool:
            with UnitOfWork(self.factory, isolation=isolation) as uow:
                if new := uow.claim(message_id, "totals"):
                    body(uow.session)
                    if commit:
                        uow.commit()
                return new

        new: bool = self.run(awaited if self.asynchronous else direct)
        return new

    # Looking, and doing something else meanwhile -----------------------------------------------------------------

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function`` and return its result; an asynchronous one runs on the event loop."""
        if not self.asynchronous:
            return function(*args, **kwargs)

        async def call() -> Any:
            return await function(*args, **kwargs)

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(4 * PATIENCE)

    def transact(self, body: Callable[[Session], T], factory: Any = None) -> T:
        """Run ``body`` in a transaction of its own, on another connection, and commit it."""
        factory = factory or self.factory

        async def awaited() -> T:
            async with factory.begin() as session:
                result: T = await session.run_sync(body)
                return result

        def direct() -> T:
            with factory.begin() as session:
                return body(session)

        result: T = self.run(awaited if self.asynchronous else direct)
        return result

    @contextmanager
    def outer_transaction(self) -> Iterator[Any]:
        """Yield a session factory bound to one connection, whose transaction is rolled back in the end."""
        connection = self._bind.connect()
        if self.asynchronous:
            self.run(connection.start)
        self.run(connection.begin)
        try:
            yield self.factory_for(connection)
        finally:
            self.run(connection.rollback)
            self.run(connection.close)

    def totals(self) -> dict[str, int]:
        """Return the read model as another connection sees it."""
        return self.transact(lambda session: {total.key: total.amount for total in session.scalars(select(Total))})

    def markers(self) -> list[tuple[str, str]]:
        """Return the message id and handler of each marker, as another connection sees them, in order."""
        marker = default_tables.marker
        rows = self.transact(lambda session: session.execute(select(marker.c.message_id, marker.c.handler)).all())
        return sorted((message_id, handler) for message_id, handler in rows)

    def blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that blocks, from a handler, without holding up the event loop on which its rivals run."""
        if not self.asynchronous:
            return function(*args, **kwargs)
        waiting: Coroutine[Any, Any, T] = asyncio.to_thread(function, *args, **kwargs)
        result: T = await_only(waiting)
        return result

    def start(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Call ``function`` in a thread, and return its future."""
        return self._threads.submit(function, *args, **kwargs)

    def waits(self, number: int = 1) -> None:
        """Return once ``number`` rivals wait for a lock in the database, or for the end of a statement."""
        calm, deadline = 0, time.monotonic() + PATIENCE
        while calm < 3:
            assert time.monotonic() < deadline, f"{number} rivals should have waited, {self.waiting()} do"
            calm = calm + 1 if self.waiting() >= number else 0
            time.sleep(0.01)

    def waiting(self) -> int:
        """Return how many rivals wait now."""
        if self.engine.dialect.name != "postgresql":
            return sum(self._running.values())  # a statement that has not returned is waiting
        query = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        return self.transact(lambda session: int(session.execute(text(query)).scalar_one()))

    def _statement_begins(self, connection: object, *_: object) -> None:
        self._running[connection] = 1

    def _statement_ends(self, connection: object, *_: object) -> None:
        self._running.pop(connection, None)

    # It executes nothing: the library may send COMMIT along, as in a program without listeners (dialects/listeners.py).
    _statement_ends.__module__ = "projector_dedup.contract"


def _on_connection(function: Callable[..., None], session: Session) -> None:
    function(session.connection())


# Gates ----------------------------------------------------------------------------------------------------------------


class Gate:
    """A place in a handler where it stops: the test sees that it has come, and opens the gate."""

    def __init__(self, harness: Harness) -> None:
        self._harness = harness
        self._arrived = threading.Semaphore(0)
        self._open = threading.Event()

    def stop(self) -> None:
        """Report that the handler has come, and wait until the gate is open; called in the handler."""
        self._arrived.release()
        self._harness.blocking(self._wait)

    def _wait(self) -> None:
        assert self._open.wait(PATIENCE), "nobody opened the gate"

    def arrival(self, instead: Callable[[], bool] = lambda: False) -> None:
        """Wait until one more handler has come, or ``instead()`` is True; called in the test."""
        deadline = time.monotonic() + PATIENCE
        while not self._arrived.acquire(timeout=0.02) and not instead():
            assert time.monotonic() < deadline, "nobody came to the gate"

    def open(self) -> None:
        """Open the gate for every handler, now and later; called in the test."""
        self._open.set()


class Held:
    """A handler whose first run stops at a gate before it returns, and then fails if ``fails``."""

    def __init__(self, harness: Harness, *, fails: bool = False) -> None:
        self.gate = Gate(harness)
        self.runs = 0
        self._fails = fails

    def __call__(self, happened: Added, session: Session) -> None:
        """Write, and stop at the gate in the first run."""
        self.runs += 1
        first = self.runs == 1
        add(happened, session)
        session.flush()
        if first:
            self.gate.stop()
            if self._fails:
                raise Broken
