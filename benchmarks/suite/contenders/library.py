"""This library, in each of its modes; only what it exports is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import URL, select, text
from sqlalchemy import event as sqlalchemy_event
from sqlalchemy.orm import Session

from projector_dedup import Dispatcher, Message, claim, on, projector
from projector_dedup.reads import Reads

from ..messages import Item
from .model import TABLES, ByORM, Total, add, upsert

IDENTITY = "benchmark.totals.add"


@dataclass(frozen=True)
class Added:
    """The event."""

    row: int


def _by_orm(event: Added, session: Session) -> None:
    add(event.row, session)


def _by_upsert(event: Added, session: Session) -> None:
    upsert(event.row, session)


def _rows_once(events: list[Added], session: Session) -> None:
    """Each row is read once, by one SELECT, and written once."""
    found = session.scalars(select(Total).where(Total.id.in_({event.row for event in events})))
    totals = {total.id: total for total in found}
    for event in events:
        totals[event.row].amount += 1


_ADD_ALL = text(
    "UPDATE total SET amount = amount + n "
    "FROM unnest(CAST(:rows AS integer[]), CAST(:counts AS bigint[])) AS gained (row_id, n) WHERE id = row_id"
)


def _one_statement(events: list[Added], session: Session) -> None:
    counts = Counter(event.row for event in events)
    session.execute(_ADD_ALL, {"rows": list(counts), "counts": list(counts.values())})


class Deliver(ByORM):
    """``Dispatcher.deliver``, message by message."""

    markers = TABLES.marker.name

    def __init__(
        self,
        name: str,
        handler: Callable[..., None] = _by_orm,
        *,
        batch: bool = False,
        idempotent: bool = True,
        read_models: Sequence[type[Any]] = (),
        listened: bool = False,
        reads: bool = False,
        shared_session: bool = False,
        **options: Any,
    ) -> None:
        self.name = name
        decorate = projector(
            idempotent=idempotent, name=IDENTITY, read_models=read_models, shared_session=shared_session
        )
        rows: Reads | None = {Total: "row"} if reads else None
        self._handler = decorate(on(Added, batch=batch, reads=rows)(handler))
        self._listened = listened
        self._options = options

    def connect(self, url: URL) -> None:
        """An engine and a dispatcher."""
        super().connect(url)
        if self._listened:
            for name in ("before_cursor_execute", "commit"):
                sqlalchemy_event.listen(self.engine, name, lambda *_: None)
        self.dispatcher = Dispatcher(self.sessions, self._handler, tables=TABLES, **self._options)

    def messages(self, items: Sequence[Item]) -> Sequence[Any]:
        """Events, and their ids beside them."""
        return [(Added(item.row), item.id) for item in items]

    def one(self, message: tuple[Added, str]) -> None:
        """That it returns means that it may be acknowledged."""
        self.dispatcher.deliver(message[0], message_id=message[1])


class DeliverBatch(Deliver):
    """``Dispatcher.deliver_batch``."""

    def __init__(self, name: str, size: int, handler: Callable[..., None] = _by_orm, **declared: Any) -> None:
        super().__init__(name, handler, **declared)
        self.batch = size

    def messages(self, items: Sequence[Item]) -> Sequence[Any]:
        """Events in envelopes."""
        return [Message(item.id, Added(item.row)) for item in items]

    def deliver(self, messages: Sequence[Any]) -> None:
        """A batch after the other."""
        for start in range(0, len(messages), self.batch):
            self.dispatcher.deliver_batch(messages[start : start + self.batch])


class BareClaim(ByORM):
    """``claim()`` in a transaction of one's own: no guards, no retries."""

    name = "claim() alone"
    markers = TABLES.marker.name

    def one(self, message: Item) -> None:
        """As the README has it."""
        with self.sessions.begin() as session:
            if claim(session, message.id, IDENTITY, tables=TABLES):
                add(message.row, session)


def shared(name: str, size: int) -> DeliverBatch:
    """A handler of one message, whose messages share the session and declare their rows."""
    return DeliverBatch(name, size, shared_session=True, reads=True)


def rows_once(name: str, size: int) -> DeliverBatch:
    """A batch handler, by the ORM."""
    return DeliverBatch(name, size, _rows_once, batch=True)


def one_statement(name: str, size: int) -> DeliverBatch:
    """A batch handler of one statement."""
    return DeliverBatch(name, size, _one_statement, batch=True)


def core_upsert(name: str, isolation: str | None = None) -> Deliver:
    """A handler that upserts."""
    return Deliver(name, _by_upsert, isolation=isolation)
