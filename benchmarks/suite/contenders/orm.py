"""SQLAlchemy: without deduplication, with a marker that is written by hand, and this library in each of its modes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import URL, Engine, String, create_engine, insert, select, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from projector_dedup import Dispatcher, Message, make_tables, on, projector
from projector_dedup.dialects import configure_sqlite
from projector_dedup.markers import claim

from ..harness import ROWS, Contender, Item
from ..servers import DRIVERS, Place

IDENTITY = "benchmark.totals.add"


class Base(DeclarativeBase):
    """The tables, the markers' too."""


class Total(Base):
    """One row of the read model."""

    __tablename__ = "total"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    amount: Mapped[int]


class Seen(Base):
    """The marker that one writes by hand."""

    __tablename__ = "seen"
    message_id: Mapped[str] = mapped_column(String(64), primary_key=True)


TABLES = make_tables(Base.metadata)


@dataclass(frozen=True)
class Added:
    """The event."""

    row: int


Given = tuple[Added, str]
"""An event and its id."""


# What handlers do -----------------------------------------------------------------------------------------------------


def add(event: Added, session: Session) -> None:
    """What people write: read a row, add to it."""
    session.get_one(Total, event.row).amount += 1


def upsert(event: Added, session: Session) -> None:
    """One statement, right at every isolation level."""
    session.execute(
        postgresql.insert(Total)
        .values(id=event.row, amount=1)
        .on_conflict_do_update(index_elements=["id"], set_={"amount": Total.amount + 1})
    )


def rows_once(events: list[Added], session: Session) -> None:
    """Each row is read once, by one SELECT, and written once."""
    found = session.scalars(select(Total).where(Total.id.in_({event.row for event in events})))
    totals = {total.id: total for total in found}
    for event in events:
        totals[event.row].amount += 1


_ADD_ALL = text(
    "UPDATE total SET amount = amount + n "
    "FROM unnest(CAST(:rows AS integer[]), CAST(:counts AS bigint[])) AS gained (row_id, n) WHERE id = row_id"
)


def one_statement(events: list[Added], session: Session) -> None:
    """One UPDATE for the whole batch."""
    counts = Counter(event.row for event in events)
    session.execute(_ADD_ALL, {"rows": list(counts), "counts": list(counts.values())})


# Contenders -----------------------------------------------------------------------------------------------------------


def events(items: Sequence[Item]) -> list[Given]:
    """The messages as ``deliver`` takes them."""
    return [(Added(item.row), item.id) for item in items]


def create_tables(place: Place) -> None:
    """Everything in ``Base``, and the rows."""
    engine = _engine(place.url)
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(insert(Total), [{"id": row, "amount": 0} for row in range(ROWS)])
    engine.dispose()


def _engine(url: URL, **options: Any) -> Engine:
    engine = create_engine(url, **options)
    if engine.name == "sqlite":
        configure_sqlite(engine)
    return engine


class ByORM(Contender):
    """A contender that uses SQLAlchemy; those below say what happens between BEGIN and COMMIT."""

    engines = frozenset(DRIVERS)
    drivers = DRIVERS

    def create(self, place: Place) -> None:
        """The tables of ``Base``."""
        create_tables(place)

    def connect(self, url: URL) -> None:
        """An engine with a connection for each of its tasks."""
        self.engine = _engine(url, pool_size=self.tasks)
        self.sessions = sessionmaker(self.engine)

    def disconnect(self) -> None:
        """Close it."""
        self.engine.dispose()

    def messages(self, items: Sequence[Item]) -> Sequence[Any]:
        """Events, and their ids beside them."""
        return events(items)

    def one(self, message: Given) -> None:
        """Apply one message, in a transaction of its own."""
        raise NotImplementedError

    def deliver(self, messages: Sequence[Any]) -> None:
        """One by one."""
        for message in messages:
            self.one(message)


class NoDedup(ByORM):
    """The handler's code in a transaction: a redelivery counts twice."""

    def __init__(self, name: str, change: Callable[[Added, Session], None] = add) -> None:
        self.name = name
        self._change = change

    def one(self, message: Given) -> None:
        """BEGIN, the change, COMMIT."""
        with self.sessions.begin() as session:
            self._change(message[0], session)


class SelectThenInsert(ByORM):
    """What most people write first."""

    name = "SELECT, then INSERT"
    markers = "seen"

    def one(self, message: Given) -> None:
        """Look, write, and let the primary key find who was overtaken."""
        with self.sessions.begin() as session:
            if session.get(Seen, message[1]) is None:
                session.add(Seen(message_id=message[1]))
                add(message[0], session)


class InsertOnConflict(ByORM):
    """What those write who have thought about it."""

    name = "ON CONFLICT, by hand"
    engines = frozenset({"postgresql"})
    markers = "seen"

    def one(self, message: Given) -> None:
        """Whose INSERT returns a row, has a new message."""
        claimed = postgresql.insert(Seen).values(message_id=message[1]).on_conflict_do_nothing()
        with self.sessions.begin() as session:
            if session.scalar(claimed.returning(Seen.message_id)) is not None:
                add(message[0], session)


class BareClaim(ByORM):
    """``claim()`` in a transaction of one's own: no guards, no retries."""

    name = "claim() alone"
    markers = TABLES.marker.name

    def one(self, message: Given) -> None:
        """As the README has it."""
        with self.sessions.begin() as session:
            if claim(session, message[1], IDENTITY, tables=TABLES):
                add(message[0], session)


class Deliver(ByORM):
    """``Dispatcher.deliver``, or with a ``size`` ``Dispatcher.deliver_batch``."""

    markers = TABLES.marker.name

    def __init__(
        self,
        name: str,
        handler: Callable[..., None] = add,
        *,
        size: int = 1,
        batch: bool = False,
        declared: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.name, self.batch, self._options = name, size, options
        decorate = projector(**{"idempotent": True, "name": IDENTITY, **(declared or {})})
        self._handler = decorate(on(Added, batch=batch)(handler))

    def connect(self, url: URL) -> None:
        """An engine and a dispatcher."""
        super().connect(url)
        self.dispatcher = Dispatcher(self.sessions, self._handler, tables=TABLES, **self._options)

    def messages(self, items: Sequence[Item]) -> Sequence[Any]:
        """In a batch, events in envelopes."""
        return super().messages(items) if self.batch == 1 else [Message(item.id, Added(item.row)) for item in items]

    def one(self, message: Given) -> None:
        """That it returns means that it may be acknowledged."""
        self.dispatcher.deliver(message[0], message_id=message[1])

    def deliver(self, messages: Sequence[Any]) -> None:
        """One by one, or a batch after the other."""
        if self.batch == 1:
            super().deliver(messages)
            return
        for start in range(0, len(messages), self.batch):
            self.dispatcher.deliver_batch(messages[start : start + self.batch])
