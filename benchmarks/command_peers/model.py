"""The work that everybody does: read one of 100 rows, add one to it, and answer with about 200 bytes."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from sqlalchemy import MetaData, create_engine, event, insert
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from projector_dedup.commands import make_command_tables
from suite.servers import Place

ROWS = 100
NOTE = "x" * 180
METADATA = MetaData()
RECORDS = make_command_tables(METADATA)


class Base(DeclarativeBase):
    """The base of the entity."""

    metadata = METADATA


class Total(Base):
    """A row that is added to."""

    __tablename__ = "total"
    id: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]


@dataclass(frozen=True)
class Add:
    """The command."""

    row: int


@dataclass(frozen=True)
class Added:
    """The answer."""

    amount: int
    note: str


def create(place: Place) -> None:
    """Make the tables and the rows."""
    engine = create_engine(place.url)
    METADATA.create_all(engine)
    with engine.begin() as connection:
        connection.execute(insert(Total), [{"id": row, "amount": 0} for row in range(ROWS)])
    engine.dispose()


def add(row: int, session: Session) -> Added:
    """Do the work."""
    session.info["of the handler"] = True
    total = session.get_one(Total, row)
    total.amount += 1
    return Added(total.amount, NOTE)


async def async_add(row: int, session: AsyncSession) -> Added:
    """Do the work with asyncio."""
    session.sync_session.info["of the handler"] = True
    total = await session.get_one(Total, row)
    total.amount += 1
    return Added(total.amount, NOTE)


def die_after_commit() -> None:
    """Kill this process as soon as a transaction of the handler has committed."""

    @event.listens_for(Session, "after_commit")
    def _die(session: Session) -> None:
        if session.info.get("of the handler"):
            os.kill(os.getpid(), signal.SIGKILL)
