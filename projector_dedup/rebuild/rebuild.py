"""Fill the new generation of a projector from a source of old messages, beside live traffic.

The generation's markers record which messages are applied. So you can start an interrupted rebuild again, run several
at once, and deliver live messages meanwhile. ``lacking`` then returns the messages that the new generation lacks.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Any

from sqlalchemy.engine import Connection
from sqlalchemy.util import await_only, greenlet_spawn

from ..dialects import dialect_of
from ..dispatcher import AsyncDispatcher, Dispatcher
from ..errors import BatchFailed, RefusedError
from ..handler import Handler
from ..maintenance.rebuilds import OpenRebuild, end, open_rebuilds, write_rebuild
from ..maintenance.running import connected_to, run_with_retries
from ..maintenance.schema import require_tables
from ..maintenance.state import moment_text, now_text, pruned_key, read_state, state_of
from ..message import Message, moment_in_utc, printable
from ..options import RetryPolicy
from ..outcome import Delivery, Outcome
from ..verdict import Action, verdict_of
from .lacking import handlers_of, pairs_of

Source = Iterable[Any] | Callable[[], Iterable[Any]]
"""Messages in their original order, or a function that returns them."""

AsyncSource = AsyncIterable[Any] | Callable[[], AsyncIterable[Any]] | Source
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
    failed: Callable[[Delivery], None] | None = None,
    on_batch: Callable[[int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Rebuilt:
    """Deliver every message of ``source`` to one projector of ``dispatcher``, in batches. Return the counts.

    The projector is ``building`` beside an older one. Live deliveries may continue, because markers make each message
    count once. If the run is interrupted, start it again: it reads the source from the first message, and skips the
    messages that were applied. ``cleanup`` keeps the markers of both generations until ``lacking`` finds nothing and
    you call ``end_rebuild``.

    - ``batch_size``: the number of messages in a batch.
    - ``limit``: stop after this many messages.
    - ``until``: stop before the first message that occurred at or after this time, with a zone.
    - ``failed``: called for each message that would fail again, and the run continues. Without it, the first failing
      message ends the run with ``BatchFailed``. Applied messages stay applied.
    - ``on_batch``: called after each batch with the number of its messages.
    - ``stop``: called after each batch. If it returns True, the run ends.

    Raises ``RefusedError`` for a projector that is not idempotent or not ``building``, for a name that the dispatcher
    does not have, for a generation of which ``cleanup`` has deleted markers, and for a message without ``occurred_at``
    if ``until`` is given.
    """
    return _Run(dispatcher, projector, until, failed).run(source, batch_size, limit, on_batch, stop)


async def arebuild(
    dispatcher: AsyncDispatcher,
    projector: str,
    source: AsyncSource,
    *,
    batch_size: int = 200,
    limit: int | None = None,
    until: datetime | None = None,
    failed: Callable[[Delivery], None] | None = None,
    on_batch: Callable[[int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Rebuilt:
    """Rebuild with an ``AsyncDispatcher``. See ``rebuild``."""
    return await greenlet_spawn(
        lambda: _Run(dispatcher, projector, until, failed).run(source, batch_size, limit, on_batch, stop)
    )


def end_rebuild(dispatcher: Dispatcher, projector: str) -> bool:
    """Let cleanup delete markers of both generations again. Return False if no rebuild of ``projector`` is open.

    Call it when ``lacking`` finds nothing, or when you have dropped the new generation.
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
        until: datetime | None,
        failed: Callable[[Delivery], None] | None,
    ) -> None:
        self._dispatcher, self._projector, self._failed = dispatcher, projector, failed
        self._until = None if until is None else moment_in_utc(until)
        self._engine, self._tables = dispatcher.markers_engine, dispatcher.tables
        self._only = dispatcher.replaying(projector)
        self._handlers = handlers_of(dispatcher, projector)
        self._done, self._ended = Rebuilt(), True
        beside = self._handlers[0].beside or self._built_beside()
        if beside is None:
            raise RefusedError(
                f"{printable(projector)} is in use: register the new generation by building(..., beside=...), under "
                "another name and with a table of its own"
            )
        olds = handlers_of(dispatcher, beside)
        pairs_of(olds, self._handlers)  # else the rebuild could not be verified
        names = frozenset().union(*(handler.names for handler in (*self._handlers, *olds)))
        self._open = OpenRebuild("", beside, sorted(names))

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
        require_tables(self._engine, self._tables)
        self._begin()
        messages = islice(self._before_until(self._messages(source)), limit)
        while batch := [*islice(messages, batch_size)]:
            self._count(self._deliver(batch))
            if on_batch is not None:
                on_batch(len(batch))
            if stop is not None and stop():
                return self._done
        if self._ended and (limit is None or self._done.read < limit):
            self._done = replace(self._done, complete=True)
            if not self._done.failed:
                self._write(self._completed)
        return self._done

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
            known = open_rebuilds(connection, self._tables).get(self._projector)
            if known is not None and known.beside != self._open.beside:
                raise RefusedError(
                    f"another rebuild of {printable(self._projector)} is open, beside {printable(known.beside)}: "
                    "verify that one first, or build a generation with another name"
                )
            kept = () if known is None else known.handlers
            self._refuse_pruned(connection, [each for each in self._handlers if each.names.isdisjoint(kept)])
            if known is None:
                pruned_until = state_of(connection, self._tables).pruned_until
                since = None if pruned_until is None else moment_text(pruned_until)
                return replace(self._open, opened=now_text(connection), known_since=since)
            same = known.handlers == self._open.handlers  # a handler that is new has read nothing yet
            return replace(known, handlers=self._open.handlers, complete=known.complete and same)

        self._write(opened)

    def _refuse_pruned(self, connection: Connection, handlers: Sequence[Handler]) -> None:
        """Raise ``RefusedError`` if markers of ``handlers``, which are new to the rebuild, were pruned.

        The messages of such markers would count twice.
        """
        known = read_state(connection, self._tables)
        pruned = [name for each in handlers for name in each.names if pruned_key(name) in known]
        if pruned:
            raise RefusedError(
                f"cleanup has deleted markers of {printable(min(pruned))}, so a rebuild would apply their messages "
                "again: build a generation with another name and an empty table, and begin its rebuild before cleanup "
                "deletes its first marker"
            )

    def _completed(self, connection: Connection) -> OpenRebuild | None:
        """Return that a run has read the source; None if somebody has ended or changed the rebuild meanwhile."""
        known = open_rebuilds(connection, self._tables).get(self._projector)
        return replace(known, complete=True) if known == self._open else None

    # The source -----------------------------------------------------------------------------------------------------

    def _messages(self, source: Any) -> Iterator[Any]:
        if not (hasattr(source, "__iter__") or hasattr(source, "__aiter__")):
            source = source()
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
