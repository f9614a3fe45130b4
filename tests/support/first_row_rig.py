"""A read model of a few rows, and a dispatcher whose statements are seen: for what comes with a claim, or before."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, String, Uuid, create_engine, delete, event, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from databases import Database
from projector_dedup import Dispatcher, Message, Outcome, RetryPolicy, on, projector
from projector_dedup.reads import Reads
from projector_dedup.tables import default_metadata

ROWS = 4


class Base(DeclarativeBase):
    """The read model."""


class Total(Base):
    """The entity that the messages change."""

    __tablename__ = "first_total"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    amount: Mapped[int]


class Other(Base):
    """Another table."""

    __tablename__ = "first_other"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    amount: Mapped[int]


class Named(Base):
    """A key of two columns."""

    __tablename__ = "first_named"
    shop: Mapped[str] = mapped_column(String(20), primary_key=True)
    number: Mapped[UUID] = mapped_column(Uuid, primary_key=True)
    amount: Mapped[int]


@dataclass(frozen=True)
class Added:
    """One more for a row."""

    row: int


@dataclass(frozen=True)
class Removed:
    """One less; the key has another name."""

    number: int


Body = Callable[[Any, Session], Any]
DECLARED: Reads = {Total: "row"}


def add(change: Added, session: Session) -> None:
    """A handler of the usual kind: it reads a row and changes it."""
    session.get_one(Total, change.row).amount += 1


@projector(idempotent=True, name="first")
@on(Added, reads=DECLARED)
async def add_awaited(change: Added, session: AsyncSession) -> None:
    """A handler for asyncio that reads a row and changes it."""
    (await session.get_one(Total, change.row)).amount += 1


@contextmanager
def engine_of(database: Database) -> Iterator[Engine]:
    """The tables, and rows of zeros."""
    engine = create_engine(database.url())
    for metadata in (default_metadata, Base.metadata):
        metadata.create_all(engine)
    reset(engine)
    yield engine
    engine.dispose()


class Delivered:
    """A dispatcher of one handler; what it sends to its engine."""

    def __init__(
        self,
        engine: Engine,
        body: Body = add,
        sessions: Any = None,
        retry: RetryPolicy | None = None,
        reads: Reads | None = DECLARED,
        **settings: Any,
    ) -> None:
        @projector(idempotent=True, name="first", **settings)
        @on(Added, Removed, "added", reads=reads)
        def handler(change: Any, session: Session) -> None:
            self.body(change, session)

        self.body = body
        self.dispatcher = Dispatcher(
            sessions or sessionmaker(engine), handler, retry=retry or RetryPolicy(attempts=3, base=0)
        )
        self.sent: list[str] = []
        self._number = 0
        event.listen(engine, "before_cursor_execute", lambda *given: self.sent.append(given[2]))

    def __call__(self, change: Any, message_id: str | None = None, *, type: str | None = None) -> list[str]:  # noqa: A002
        """Apply one message; the statements that it took, by their first word, or ``BOTH``."""
        self._number += 1
        self.sent.clear()
        message = Message(message_id or f"m{self._number}", change, type=type)
        assert self.dispatcher.deliver(message).outcome is (Outcome.DUPLICATE if message_id else Outcome.APPLIED)
        return kinds_of(self.sent)

    def learned(self) -> "Delivered":
        """After two messages."""
        for _ in range(2):
            self(Added(0))
        assert self(Added(1)) == WITH_CLAIM
        return self

    def redelivered(self) -> None:
        """Four times: where one can look, the next message is looked for."""
        for _ in range(4):
            self(Added(1), "m1")


BOTH = "CLAIM, SELECT"
SELECTED = ["INSERT", "SELECT", "UPDATE"]
WITH_CLAIM = [BOTH, "UPDATE"]


def kinds_of(statements: Iterable[str]) -> list[str]:
    """Their first words; ``BOTH`` for a claim that reads a row, or is followed by a SELECT for just that."""
    kinds: list[str] = []
    for statement in statements:
        if "AS claimed)" in statement and statement.startswith("SELECT"):
            assert kinds.pop() == "INSERT"
        word = statement.split()[0]
        kinds.append(BOTH if "claimed" in statement else word)
    return kinds


def reset(engine: Engine) -> None:
    """Rows of zeros, and no others."""
    with Session(engine) as session, session.begin():
        for kind in (Total, Other):
            session.execute(delete(kind))
            session.add_all(kind(id=number, amount=0) for number in range(ROWS))


def totals(engine: Engine, kind: type[Any] = Total) -> list[int]:
    """Return the amounts of all rows, read by another connection."""
    with Session(engine) as session:
        return list(session.scalars(select(kind.amount).order_by(kind.id)))
