"""How many files of the library one message enters: whoever wants to follow it has to open no more."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from databases import Database
from projector_dedup import Dispatcher, make_tables, on, projector
from walk import files_entered

MOST = 17  # ``transaction_text`` tells whether a statement takes a lock


class Base(DeclarativeBase):
    """A read model of its own: no other test has declared its entity in read_models, which listens to it for good."""


class Walked(Base):
    """A row."""

    __tablename__ = "walked"

    key: Mapped[str] = mapped_column(primary_key=True)
    amount: Mapped[int]


TABLES = make_tables(Base.metadata)


@dataclass(frozen=True)
class Moved:
    """Two rows change."""

    keys: tuple[str, ...] = ("a", "b")


def move(moved: Moved, session: Session) -> None:
    """Add 1 to each row."""
    for key in moved.keys:
        session.get_one(Walked, key).amount += 1


@pytest.fixture
def engine(postgresql: Database) -> Iterator[Engine]:
    """PostgreSQL by psycopg."""
    engine = create_engine(postgresql.url("postgresql+psycopg"))
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add_all([Walked(key=key, amount=0) for key in "ab"])
    yield engine
    engine.dispose()


def test_a_message_enters_few_files(engine: Engine) -> None:
    """Counted on a warm dispatcher: what is found out once for an engine is not counted."""
    handler = projector(idempotent=True, name="walked")(on(Moved)(move))
    dispatcher = Dispatcher(sessionmaker(engine), handler, tables=TABLES)
    for number in range(3):
        dispatcher.deliver(Moved(), message_id=f"warm-{number}")
    with files_entered() as entered:
        dispatcher.deliver(Moved(), message_id="measured")
    assert 10 < len(entered) <= MOST, " ".join(sorted(entered))
