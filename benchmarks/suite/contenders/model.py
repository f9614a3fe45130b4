"""The read model of every SQLAlchemy contender, and the code that changes it: read a row, add to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import URL, Engine, String, create_engine, insert
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from projector_dedup import configure_sqlite, make_tables

from ..harness import Contender
from ..messages import ROWS
from ..servers import DRIVERS, Place


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


def add(row: int, session: Session) -> None:
    """What people write."""
    session.get_one(Total, row).amount += 1


def upsert(row: int, session: Session) -> None:
    """One statement, right at every isolation level."""
    session.execute(
        postgresql.insert(Total)
        .values(id=row, amount=1)
        .on_conflict_do_update(index_elements=["id"], set_={"amount": Total.amount + 1})
    )


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
        """An engine with one connection."""
        self.engine = _engine(url, pool_size=1)
        self.sessions = sessionmaker(self.engine)

    def disconnect(self) -> None:
        """Close it."""
        self.engine.dispose()

    def one(self, message: Any) -> None:
        """Apply one message, in a transaction of its own."""
        raise NotImplementedError

    def deliver(self, messages: Sequence[Any]) -> None:
        """One by one."""
        for message in messages:
            self.one(message)
