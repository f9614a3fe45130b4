"""Several workers with batches that meet on rows: a loop of the handler, locks in the order of keys, one upsert."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import Session

from projector_dedup import Message
from projector_dedup.errors import BatchFailed, RetriesExhaustedError

from ..harness import Item
from ..servers import Place
from .meeting import InThreads, get_or_create
from .orm import Added, Total

SIZE, KEYS = 100, 5_000
NEW = 1_000_000  # the first key that no row has
_WINDOW = 4_000  # messages that share 2,000 new keys


def in_order(events: list[Added], session: Session) -> None:
    """Lock the rows in the order of their keys, make those that are missing, and add."""
    counts = Counter(event.row for event in events)
    rows = select(Total).where(Total.id.in_(counts)).order_by(Total.id).with_for_update()
    found = {total.id: total for total in session.scalars(rows)}
    for row in sorted(counts):
        if row in found:
            found[row].amount += counts[row]
        else:
            session.add(Total(id=row, amount=counts[row]))


def upsert(events: list[Added], session: Session) -> None:
    """One statement, with the rows in the order of their keys."""
    counts = Counter(event.row for event in events)
    new = postgresql.insert(Total).values([{"id": row, "amount": counts[row]} for row in sorted(counts)])
    more = {"amount": Total.amount + new.excluded.amount}
    session.execute(new.on_conflict_do_update(index_elements=["id"], set_=more))


SINGLE, PLAIN, ORDERED, UPSERT = "single deliveries", "batches, a loop", "batches, keys in order", "batches, one upsert"
_WAYS: dict[str, Callable[..., None]] = {SINGLE: get_or_create, PLAIN: get_or_create, ORDERED: in_order, UPSERT: upsert}
WAYS = tuple(_WAYS)


class Batches(InThreads):
    """Batches, or single messages, of rows that several have; what fails comes again."""

    def __init__(self, way: str, workers: int, *, creates: bool) -> None:
        self.runs, self.creates = 0, creates
        change, whole = _WAYS[way], way in (ORDERED, UPSERT)

        def counted(given: Any, session: Session) -> None:
            self.runs += len(given) if whole else 1
            change(given, session)

        super().__init__(f"{way}, {workers}", counted, size=1 if way == SINGLE else SIZE, batch=whole)
        self.tasks = workers

    def create(self, place: Place) -> None:
        """And the rows that exist."""
        super().create(place)
        place.run(f"INSERT INTO total (id, amount) SELECT id, 0 FROM generate_series(100, {KEYS - 1}) AS new (id)")

    def messages(self, items: Sequence[Item]) -> Sequence[Any]:
        """In their batches. Rows are drawn: two batches have them in two orders."""
        given = [Message(item.id, Added(self._row(item))) for item in items]
        return [given[start : start + self.batch] for start in range(0, len(given), self.batch)]

    def _row(self, item: Item) -> int:
        if not self.creates:
            return item.row
        return NEW + item.number // _WINDOW * _WINDOW // 2 + item.row % (_WINDOW // 2)

    def _until_done(self, batch: list[Message]) -> None:
        while batch:
            try:
                if self.batch > 1:
                    self.dispatcher.deliver_batch(batch)
                else:
                    self.dispatcher.deliver(batch[0])
                return
            except RetriesExhaustedError:
                continue
            except BatchFailed as failed:
                batch = [
                    each for each, result in zip(batch, failed.deliveries, strict=True) if result.error is not None
                ]
