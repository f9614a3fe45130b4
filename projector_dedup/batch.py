"""A batch of messages by one handler: one unit of work for all, and fewer at a time where some of them fail."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlalchemy.orm import Session, sessionmaker

from .apply import aapply, apply
from .asyncio_names import AsyncSession, async_sessionmaker
from .chunk import Chunk
from .errors import CommitOutcomeUnknown, InvalidMessageError, RefusedError, RetriesExhaustedError
from .handler import Handler
from .message import Message, id_text, printable
from .observer import Observing
from .options import RetryPolicy, UnitOptions
from .outcome import Outcome

Result = Outcome | Exception
"""One message's outcome, or the error with which it failed."""

_IN_A_ROW = 2


def apply_batch(
    handler: Handler,
    messages: Sequence[Message],
    factory: sessionmaker[Session],
    options: UnitOptions,
    policy: RetryPolicy,
    observing: Observing | None = None,
) -> tuple[list[Result], bool]:
    """Apply messages together; return the outcome or the error of each, and True if what was applied is durable.

    A message that fails takes no other with it.
    """
    batch = _Batch(handler, messages, observing)
    for chunk in batch.chunks():
        try:
            batch.settled(apply(chunk, factory, options, policy))
        except Exception as error:  # noqa: BLE001  # kept: it is what became of the message
            batch.failed(error)
    return batch.results, batch.durable


async def aapply_batch(
    handler: Handler,
    messages: Sequence[Message],
    factory: async_sessionmaker[AsyncSession],
    options: UnitOptions,
    policy: RetryPolicy,
    observing: Observing | None = None,
) -> tuple[list[Result], bool]:
    """Apply messages as ``apply_batch`` does, awaiting the database and the handlers."""
    batch = _Batch(handler, messages, observing)
    for chunk in batch.chunks():
        try:
            batch.settled(await aapply(chunk, factory, options, policy))
        except Exception as error:  # noqa: BLE001  # kept: it is what became of the message
            batch.failed(error)
    return batch.results, batch.durable


class _Batch:
    """A batch on its way: what became of its messages, and which of them are tried together next.

    First all of them are; if that fails, halves, or those before and behind the message that failed.
    """

    def __init__(self, handler: Handler, messages: Sequence[Message], observing: Observing | None) -> None:
        self.results: list[Result] = [RetriesExhaustedError("it was not tried")] * len(messages)
        self._exhausted = 0  # messages in a row that outlived their retries
        self.durable = True
        self._handler = handler
        self._messages = messages
        self._observing = observing
        self._todo = [range(len(messages))]  # the last is next

    def chunks(self) -> Iterator[Chunk]:
        """Yield what to apply next, in the order of delivery. Call ``settled`` or ``failed`` before taking the next."""
        while self._todo:
            self._now = self._todo.pop()
            messages = [self._messages[index] for index in self._now]
            self._chunk = Chunk(self._handler, messages, self._observing)
            yield self._chunk

    def settled(self, durable: bool) -> None:
        """Note that the chunk that was yielded last is applied."""
        self.durable = self.durable and durable
        self._exhausted = 0
        for index, outcome in zip(self._now, self._chunk.outcomes, strict=True):
            self.results[index] = outcome
        if self._chunk.watch is not None:
            self._chunk.watch.settled(self._chunk.outcomes)

    def failed(self, error: Exception) -> None:
        """Note that the chunk that was yielded last failed; plan to try its messages again, fewer at a time."""
        now, at = self._now, self._chunk.at
        if len(now) == 1 or self._concerns_all(error):
            self._fail(now, error)
            return
        after = now if at is None else now[at + 1 :]
        middle = len(after) // 2
        pieces = [after[:middle], after[middle:]]  # in halves, or many that fail would cost their square
        if at is not None:
            pieces = [now[:at], now[at : at + 1], *pieces]
        self._todo += [piece for piece in reversed(pieces) if piece]

    def _concerns_all(self, error: Exception) -> bool:
        """True if fewer messages would meet the error too, or must not be tried: all of them may be durable in part."""
        if getattr(error, "durable", False):
            self._tell_who_was_handled(error)
            return True
        if isinstance(error, InvalidMessageError):  # of a message that was made past its checks, by unpickling say
            return False
        if not self._chunk.connected:  # which is nobody's fault in here
            return True
        return isinstance(error, CommitOutcomeUnknown) or (isinstance(error, RefusedError) and not self._chunk.claimed)

    def _tell_who_was_handled(self, error: Exception) -> None:
        """Name in ``error`` the messages whose markers a handler has committed together with its own message's."""
        messages, at = self._chunk.messages, self._chunk.at
        behind = [] if at is None else messages[at + 1 :]
        if behind:
            names = ", ".join(printable(str(id_text(message))) for message in behind[:20])
            error.add_note(
                f"The markers of {len(behind)} messages behind it in the batch may be COMMITTED too, though nobody "
                f"handled them: forget those before they are delivered again ({names}"
                + (", ...)" if len(behind) > 20 else ")")
            )

    def _fail(self, chunk: range, error: Exception) -> None:
        self._give_up(chunk, error)
        if not isinstance(error, RetriesExhaustedError):
            self._exhausted = 0
            return
        self._exhausted += 1
        if self._exhausted == _IN_A_ROW:  # the database's trouble, not the messages'
            for rest in reversed(self._todo):
                self._give_up(rest, error)
            self._todo.clear()

    def _give_up(self, chunk: range, error: Exception) -> None:
        for index in chunk:
            self.results[index] = error
        if self._chunk.watch is not None:
            self._chunk.watch.failed(error, [self._messages[index] for index in chunk])
