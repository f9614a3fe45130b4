"""Fill a projector from a source of old messages: a new generation beside live traffic, or a projector in place.

The projector's markers record which messages are applied. So you can run an interrupted rebuild again, run several at
once, and deliver live messages meanwhile. ``lacking`` then returns the messages that the new generation lacks.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Any

from sqlalchemy import select
from sqlalchemy.engine import Connection
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only, greenlet_spawn

from ..dialects import dialect_of
from ..dispatcher import AsyncDispatcher, Dispatcher
from ..errors import BatchFailed, RefusedError
from ..late import in_utc
from ..maintenance.rebuilds import OpenRebuild, end, open_rebuilds, refuse_kept, write_rebuild
from ..maintenance.rows import forget_all
from ..maintenance.running import connected_to, run_with_retries
from ..maintenance.schema import require_tables
from ..maintenance.state import moment_text, now_text, pruned_key, read_state, state_of
from ..message import Message, moment_in_utc, printable
from ..options import RetryPolicy
from ..outcome import Delivery, Outcome
from ..verdict import Action, verdict_of
from .lacking import handlers_of, pairs_of

Source = Iterable[Any] | Callable[[], Iterable[Any]] | Callable[[str | None], Iterable[Any]]
"""Messages in their original order, or a function that returns them.

A function with an argument gets the id of the message after which to start, or None to start at the first message.
"""

AsyncSource = (
    AsyncIterable[Any] | Callable[[], AsyncIterable[Any]] | Callable[[str | None], AsyncIterable[Any]] | Source
)
"""Messages for ``arebuild``, which takes asynchronous iterables too."""


@dataclass(frozen=True)
class Rebuilt:
    """The result of a run: how many messages it read, and their outcomes for the projector.

    ``skipped`` counts the messages that the projector does not handle. ``complete`` is True if the run read the source
    to its end.
    """

    read: int = 0
    applied: int = 0
    duplicates: int = 0
    skipped: int = 0
    failed: int = 0
    complete: bool = False


def rebuild(
    dispatcher: Dispatcher,
    projector: str,
    source: Source,
    *,
    batch_size: int = 200,
    limit: int | None = None,
    until: datetime | None = None,
    reset: Callable[[Any], object] | None = None,
    failed: Callable[[Delivery], None] | None = None,
    on_batch: Callable[[int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Rebuilt:
    """Deliver every message of ``source`` to one projector of ``dispatcher``, in batches. Return the counts.

    The projector is ``building`` beside an older one. Live deliveries may continue, because markers make each message
    count once. If the run is interrupted, run it again: it reads the source from the beginning, and skips the messages
    that were applied. A source that is a function of an id continues after the last batch. ``cleanup`` keeps the
    markers of both generations until ``lacking`` finds nothing and you call ``end_rebuild``.

    - ``batch_size``: the number of messages in a batch.
    - ``limit``: stop after this many messages.
    - ``until``: stop before the first message that occurred at or after this time, with a zone.
    - ``reset``: rebuild the projector in place. **Stop every worker that delivers to it first.** The run deletes all
      markers of the projector, and calls ``reset`` with a session, which must empty the read model without a commit.
      Then it delivers the source. You can run it again at any time, but **start no worker before it has ended**.
    - ``failed``: called for each message that would fail again, and the run continues. Without it, the first failing
      message ends the run with ``BatchFailed``. Applied messages stay applied.
    - ``on_batch``: called after each batch with the number of its messages.
    - ``stop``: called after each batch. If it returns True, the run ends.

    Raises ``RefusedError`` for a projector that is not idempotent, or is neither ``building`` nor reset, for a name
    that the dispatcher does not have, for a message without ``occurred_at`` if ``until`` is given, and during a
    ``reset`` if a worker is still running.
    """
    return _Run(dispatcher, projector, reset, until, failed).run(source, batch_size, limit, on_batch, stop)


async def arebuild(
    dispatcher: AsyncDispatcher,
    projector: str,
    source: AsyncSource,
    *,
    batch_size: int = 200,
    limit: int | None = None,
    until: datetime | None = None,
    reset: Callable[[Any], Any] | None = None,
    failed: Callable[[Delivery], None] | None = None,
    on_batch: Callable[[int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Rebuilt:
    """Rebuild with an ``AsyncDispatcher``. ``reset`` is an ``async def``. See ``rebuild``."""
    run = _Run(dispatcher, projector, reset, until, failed)
    return await greenlet_spawn(run.run, source, batch_size, limit, on_batch, stop)


def end_rebuild(dispatcher: Dispatcher, projector: str) -> bool:
    """Let cleanup delete markers of both generations again. Return False if no rebuild of ``projector`` is open.

    Call it when ``lacking`` finds nothing, or to abandon the rebuild.
    """
    return _end(dispatcher, projector)


async def aend_rebuild(dispatcher: AsyncDispatcher, projector: str) -> bool:
    """End a rebuild with an ``AsyncDispatcher``. See ``end_rebuild``."""
    return await greenlet_spawn(_end, dispatcher, projector)


def _end(dispatcher: Dispatcher | AsyncDispatcher, projector: str) -> bool:
    def step(connection: Connection) -> bool:
        return end(connection, dispatcher.tables, projector)

    engine = dispatcher.markers_engine
    return run_with_retries(step, engine, dialect_of(engine), RetryPolicy())


class _Run:
    """One run of a rebuild."""

    def __init__(
        self,
        dispatcher: Dispatcher | AsyncDispatcher,
        projector: str,
        reset: Callable[[Any], Any] | None,
        until: datetime | None,
        failed: Callable[[Delivery], None] | None,
    ) -> None:
        self._dispatcher, self._projector, self._reset, self._failed = dispatcher, projector, reset, failed
        self._until = None if until is None else moment_in_utc(until)
        self._engine, self._tables = dispatcher.markers_engine, dispatcher.tables
        self._only = dispatcher.replaying(projector)
        self._handlers = handlers_of(dispatcher, projector)
        self._done, self._ended = Rebuilt(), True
        beside = self._handlers[0].beside
        if beside is None and reset is None:
            beside = self._built_beside()
        if (beside is None) == (reset is None):
            raise RefusedError(
                f"{printable(projector)} is in use: register it by building(..., beside=...) under another name and "
                "with a table of its own; or stop its workers and rebuild it in place (reset=, --reset)"
                if reset is None
                else f"{printable(projector)} is building beside {beside}, so nothing has to be reset: leave reset out"
            )
        olds = [] if beside is None else handlers_of(dispatcher, beside)
        pairs_of(olds, self._handlers)  # else the rebuild could not be verified
        names = frozenset().union(*(handler.names for handler in (*self._handlers, *olds)))
        self._open = OpenRebuild("", beside, sorted(names), forgetting=reset is not None)

    def _built_beside(self) -> str | None:
        """Return the old generation of a rebuild that is open, when ``building`` was taken away; None if none is."""
        with connected_to(self._engine, self._tables) as connection:
            known = open_rebuilds(connection, self._tables).get(self._projector)
        return None if known is None else known.beside

    def run(
        self,
        source: Any,
        batch_size: int,
        limit: int | None,
        on_batch: Callable[[int], None] | None,
        stop: Callable[[], bool] | None,
    ) -> Rebuilt:
        """Deliver the messages of ``source``, and return what was done."""
        if batch_size < 1 or (limit is not None and limit < 1):
            raise ValueError(f"batch_size and limit must be at least 1, not {batch_size} and {limit}")
        iterable = hasattr(source, "__iter__") or hasattr(source, "__aiter__")
        if not (iterable or callable(source)):
            raise ValueError(f"source is an iterable of messages, or a function that returns one, not {source!r}")
        resumes = not iterable and _takes_an_id(source)
        require_tables(self._engine, self._tables)
        self._begin()
        messages = islice(self._before_until(self._messages(source, resumes=resumes)), limit)
        batch = [*islice(messages, batch_size)]  # a source that fails at once fails here
        if self._open.forgetting:
            if not batch:
                raise RefusedError("the source has no message, so nothing was reset")
            self._empty()
        while batch:
            deliveries = self._deliver(batch)
            self._count(deliveries)
            if resumes and not self._done.failed:  # else the next run would not read what has failed
                self._note(after=next((each.message_id for each in reversed(deliveries) if each.message_id), None))
            if on_batch is not None:
                on_batch(len(batch))
            if stop is not None and stop():
                return self._done
            batch = [*islice(messages, batch_size)]
        if self._ended and (limit is None or self._done.read < limit):
            self._end_of_source()
        return self._done

    def _end_of_source(self) -> None:
        self._done = replace(self._done, complete=True)
        if self._done.failed:
            return
        if self._reset is not None:
            _end(self._dispatcher, self._projector)
        else:  # a later run, for what is lacking, reads all of it
            self._note(after=None, complete=True)

    def _write(self, change: Callable[[Connection], OpenRebuild | None]) -> None:
        def step(connection: Connection) -> OpenRebuild | None:
            dialect.begin(connection, None, None)
            changed = change(connection)
            if changed is not None:
                write_rebuild(connection, self._tables, self._projector, changed)
            return changed

        dialect = dialect_of(self._engine)
        self._open = run_with_retries(step, self._engine, dialect, RetryPolicy()) or self._open

    def _begin(self) -> None:
        """Write into the state table that the rebuild is open, before the first message; or find it open."""

        def opened(connection: Connection) -> OpenRebuild:
            in_place = self._reset is not None
            refuse_kept(connection, self._tables, self._open.handlers, of=self._projector, in_place_only=not in_place)
            known = open_rebuilds(connection, self._tables).get(self._projector)
            if known is not None and known.beside != self._open.beside:
                raise RefusedError(
                    f"another rebuild of {printable(self._projector)} is open, "
                    f"{'in place' if known.beside is None else f'beside {printable(known.beside)}'}: finish it, or "
                    "give it up (--abandon)"
                )
            if known is None or known.forgetting:
                self._refuse_pruned(connection)
                pruned_until = state_of(connection, self._tables).pruned_until
                since = None if pruned_until is None else moment_text(pruned_until)
                return replace(self._open, opened=now_text(connection), known_since=since)
            same = known.handlers == self._open.handlers  # a handler that is new has read nothing yet
            return replace(
                known,
                handlers=self._open.handlers,
                after=known.after if same else None,
                complete=known.complete and same,
            )

        self._write(opened)

    def _refuse_pruned(self, connection: Connection) -> None:
        """Raise ``RefusedError`` if markers of the new generation were pruned: their messages would count twice."""
        known = read_state(connection, self._tables)
        pruned = [name for each in self._handlers for name in each.names if pruned_key(name) in known]
        if pruned and self._reset is None:
            raise RefusedError(
                f"cleanup has deleted markers of {printable(min(pruned))}, so a rebuild would apply their messages "
                "again: build a generation with another name and an empty table, and begin its rebuild before cleanup "
                "deletes its first marker"
            )

    def _note(self, **changes: Any) -> None:
        """Write ``changes`` into the line of the rebuild, unless somebody has ended it meanwhile."""

        def change(connection: Connection) -> OpenRebuild | None:
            is_open = self._projector in open_rebuilds(connection, self._tables)
            return replace(self._open, **changes) if is_open else None

        self._write(change)

    # The source -----------------------------------------------------------------------------------------------------

    def _messages(self, source: Any, *, resumes: bool) -> Iterator[Any]:
        if not (hasattr(source, "__iter__") or hasattr(source, "__aiter__")):
            source = source(self._open.after) if resumes else source()
        if not hasattr(source, "__aiter__"):
            yield from source
            return
        if isinstance(self._dispatcher, Dispatcher):
            raise RefusedError("the source is asynchronous: rebuild it with an AsyncDispatcher, by arebuild")
        iterator = aiter(source)
        while True:
            try:
                yield await_only(anext(iterator))
            except StopAsyncIteration:
                return

    def _before_until(self, messages: Iterator[Any]) -> Iterator[Any]:
        for message in messages:
            if self._until is not None:
                if not isinstance(message, Message) or message.occurred_at is None:
                    raise RefusedError("until= needs the time of each message: give Message(..., occurred_at=...)")
                if moment_in_utc(message.occurred_at) >= self._until:
                    self._ended = False
                    return
            yield message

    # A batch --------------------------------------------------------------------------------------------------------

    def _deliver(self, batch: list[Any]) -> list[Delivery]:
        only: Any = self._only
        try:
            answer = only.deliver_batch(batch)
            deliveries: list[Delivery] = answer if isinstance(self._dispatcher, Dispatcher) else await_only(answer)
        except BatchFailed as error:
            deliveries = error.deliveries
            for each in deliveries:
                if each.error is None:
                    continue
                if self._failed is None or verdict_of(each.error).action is not Action.REJECT:
                    raise
                self._failed(each)
        return deliveries

    def _count(self, deliveries: list[Delivery]) -> None:
        outcomes = [each.outcome for each in deliveries]
        done = self._done
        self._done = Rebuilt(
            done.read + len(deliveries),
            done.applied + outcomes.count(Outcome.APPLIED),
            done.duplicates + outcomes.count(Outcome.DUPLICATE),
            done.skipped + outcomes.count(Outcome.SKIPPED),
            done.failed + outcomes.count(Outcome.FAILED),
        )

    # In place -------------------------------------------------------------------------------------------------------

    def _empty(self) -> None:
        """Delete the markers that were written before the run began, and reset the read model."""
        for name in self._open.handlers:
            forget_all(self._engine, name, before=self._open.opened_at, tables=self._tables, rebuild=self._projector)
        marker = self._tables.marker
        younger = select(marker.c.message_id, marker.c.processed_at).where(marker.c.handler.in_(self._open.handlers))

        def refuse_younger(connection: Connection) -> None:
            found = connection.execute(younger.limit(1)).first()
            if found is not None:
                raise RefusedError(
                    f"{printable(self._projector)} is rebuilt in place, and message {printable(found.message_id)} was "
                    f"applied at {in_utc(found.processed_at):%H:%M:%S} UTC, after the rebuild began: a worker is still "
                    "running. Stop every worker that delivers to it, and run this again. Older markers are deleted "
                    "already, so start no worker before this has ended: it would apply old messages twice"
                )

        factory, reset = self._dispatcher.session_factory, self._reset
        assert reset is not None  # noqa: S101  # else nothing is forgotten
        session: Any = factory()
        plain: Session = session if isinstance(session, Session) else session.sync_session
        try:
            connection = plain.connection(bind_arguments={"bind": self._engine})
            dialect_of(connection).begin(connection, None, None)
            refuse_younger(connection)
            self._call(reset, session)
            plain.commit()
        except RefusedError:
            raise
        except Exception as error:
            raise RefusedError(
                f"the reset of {printable(self._projector)} failed ({type(error).__name__}: "
                f"{printable(str(error))[:200]}). The markers are already deleted, so start no worker: correct "
                "the function, and run this again"
            ) from error
        finally:
            plain.close()
        self._write(lambda _connection: replace(self._open, forgetting=False))

    def _call(self, reset: Callable[[Any], Any], session: Any) -> None:
        answer, waits = reset(session), isinstance(self._dispatcher, AsyncDispatcher)
        if inspect.isawaitable(answer) != waits:
            if inspect.iscoroutine(answer):
                answer.close()
            kind = "an async def, as the dispatcher is async" if waits else "a plain function"
            raise RefusedError(f"reset must be {kind}; it was rolled back. Start no worker, and run this again")
        if waits:
            await_only(answer)


def _takes_an_id(source: Callable[..., Any]) -> bool:
    """True if the function takes the id as its first argument, and cannot be called without one."""
    parameters = inspect.signature(source).parameters.values()
    return any(
        each.default is each.empty and each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
        for each in parameters
    )
