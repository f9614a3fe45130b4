"""A read model of a few rows, and what a delivery sends to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Engine, String, create_engine, delete, event, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from databases import Database
from projector_dedup.tables import default_metadata

ROWS = 4


class Base(DeclarativeBase):
    """The read model."""


class Total(Base):
    """The entity that the messages change."""

    __tablename__ = "few_total"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    amount: Mapped[int]


class Named(Base):
    """A key of two columns."""

    __tablename__ = "few_named"
    shop: Mapped[str] = mapped_column(String(20), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]


@dataclass(frozen=True)
class Added:
    """One more for a row."""

    row: int


@contextmanager
def engine_of(database: Database) -> Iterator[Engine]:
    """The tables, with rows of zeros."""
    engine = create_engine(database.url())
    for metadata in (default_metadata, Base.metadata):
        metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.execute(delete(Total))
        session.add_all(Total(id=number, amount=0) for number in range(ROWS))
    yield engine
    engine.dispose()


@contextmanager
def sent_by(engine: Engine) -> Iterator[list[str]]:
    """The statements that the block sends."""
    statements: list[str] = []

    def note(*given: object) -> None:
        statements.append(str(given[2]))

    event.listen(engine, "before_cursor_execute", note)
    yield statements
    event.remove(engine, "before_cursor_execute", note)


def totals(engine: Engine) -> list[int]:
    """Return the amounts of all rows, read by another connection."""
    with Session(engine) as session:
        return list(session.scalars(select(Total.amount).order_by(Total.id)))
