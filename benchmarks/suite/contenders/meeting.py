"""Handlers whose messages meet on rows: one process, several threads, with this library and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from psycopg.errors import DeadlockDetected, UniqueViolation
from sqlalchemy import URL, Index, select, update
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Mapped, Session, mapped_column

from projector_dedup.errors import RetriesExhaustedError

from ..harness import ROWS, Item
from .orm import Added, Base, Deliver, Given, Total, add


class Line(Base):
    """A line of a ledger, whose balance is that of the line before it, and one more."""

    __tablename__ = "line"
    __table_args__ = (Index("line_newest", "total_id", "id"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    total_id: Mapped[int]
    balance: Mapped[int]


# What handlers do -----------------------------------------------------------------------------------------------------


def add_to_two(event: Added, session: Session) -> None:
    """Add to one of ten rows, then to another of them, which may have the lower key."""
    first, distance = event.row % 10, 1 + event.row // 10 % 9
    for row in (first, (first + distance) % 10):
        session.get_one(Total, row).amount += 1


def get_or_create(event: Added, session: Session) -> None:
    """Read the row; make it if it is not there; add to it."""
    total = session.get(Total, event.row)
    if total is None:
        total = Total(id=event.row, amount=0)
        session.add(total)
    total.amount += 1


def insert_or_update(event: Added, session: Session) -> None:
    """Insert the row in a savepoint; if it is there, have the database add to it."""
    try:
        with session.begin_nested():
            session.add(Total(id=event.row, amount=1))
    except IntegrityError:
        session.execute(update(Total).where(Total.id == event.row).values(amount=Total.amount + 1))


def lock_and_add(event: Added, session: Session) -> None:
    """Lock the row, and add to it."""
    session.get_one(Total, event.row, with_for_update=True).amount += 1


def add_line(event: Added, session: Session) -> None:
    """Lock the parent, read its last line, insert the next."""
    session.get_one(Total, event.row, with_for_update=True)
    last = select(Line.balance).where(Line.total_id == event.row).order_by(Line.id.desc()).limit(1)
    session.add(Line(total_id=event.row, balance=(session.scalar(last) or 0) + 1))


# Shapes ---------------------------------------------------------------------------------------------------------------


def _one_of_all(item: Item) -> int:
    return item.row


def _the_same(_: Item) -> int:
    return 0


def _one_of_ten(item: Item) -> int:
    return item.row % 10


def _created(item: Item) -> int:
    return ROWS + item.number // 8  # eight messages after each other


_BALANCES = "SELECT sum(balance) FROM (SELECT max(balance) AS balance FROM line GROUP BY total_id) AS newest"


@dataclass(frozen=True)
class Shape:
    """A handler, the row that it gets for a message, and the SQL that counts the messages in the read model."""

    name: str
    change: Callable[[Added, Session], None]
    row: Callable[[Item], int]
    counted: str = "SELECT sum(amount) FROM total"
    declared: dict[str, Any] = field(default_factory=dict)


SHAPES = (
    Shape("one of 100 rows", add, _one_of_all),
    Shape("one hot row", add, _the_same),
    Shape("two of 10 rows, any order", add_to_two, _one_of_all, "SELECT sum(amount) / 2 FROM total"),
    Shape("get or create, 8 on each row", get_or_create, _created),
    Shape("insert in a savepoint, else UPDATE, 8 on each row", insert_or_update, _created),
    Shape("lock one of 10 rows, change it", lock_and_add, _one_of_ten),
    Shape("ledger, one of 10", add_line, _one_of_ten, _BALANCES),
    Shape("ledger, R. C. declared", add_line, _one_of_ten, _BALANCES, {"isolation": "READ COMMITTED"}),
)


# Contenders -----------------------------------------------------------------------------------------------------------


class InThreads(Deliver):
    """Several threads, each of which takes the next message, or batch, as soon as it has done one."""

    def connect(self, url: URL) -> None:
        """And the threads."""
        super().connect(url)
        self._threads = ThreadPoolExecutor(self.tasks)

    def disconnect(self) -> None:
        """End both."""
        self._threads.shutdown()
        super().disconnect()

    def deliver(self, messages: Sequence[Any]) -> None:
        """Share them out."""
        for _ in self._threads.map(self._until_done, messages):
            pass  # what a thread raised is raised here

    def _until_done(self, message: Any) -> None:
        """Deliver a message or a batch, again if it fails as a broker would bring it again."""
        raise NotImplementedError


class Delivered(InThreads):
    """``Dispatcher.deliver`` of a shape."""

    def __init__(self, shape: Shape, threads: int, name: str = "deliver") -> None:
        def change(event: Added, session: Session) -> None:
            self.runs.append(event)
            shape.change(event, session)

        super().__init__(name, change, declared=shape.declared)
        self.tasks, self.shape, self.runs, self._change = threads, shape, list[Added](), change

    def messages(self, items: Sequence[Item]) -> Sequence[Any]:
        """Each with the row of the shape."""
        return super().messages([item._replace(row=self.shape.row(item)) for item in items])

    def _until_done(self, message: Given) -> None:
        while True:
            try:
                return self.one(message)
            except RetriesExhaustedError:
                continue  # a broker would bring it again
            except DBAPIError as error:
                if not isinstance(error.orig, (UniqueViolation, DeadlockDetected)):
                    raise


class Unprotected(Delivered):
    """The same handler in ``session.begin()``, again after a unique violation or a deadlock, as by hand."""

    def __init__(self, shape: Shape, threads: int) -> None:
        super().__init__(shape, threads, "no dedup")

    def one(self, message: Given) -> None:
        """BEGIN, the change, COMMIT."""
        with self.sessions.begin() as session:
            self._change(message[0], session)
