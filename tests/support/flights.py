"""The flights out of New York, counted for each airline: the read model, the projectors, and what they are sent.

``flights_consumer.py`` gives its messages to these projectors. The database is ``$FLIGHTS_DATABASE_URL``, and
``$MAX_DELAY`` is the longest time, in seconds, after which a message comes again that came before its time.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, String, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from projector_dedup import AsyncDispatcher, Defer, Dispatcher, make_tables, on, projector
from projector_dedup.message import by_path

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from demo.flights import read_flights  # the demo reads the same data

Event = Mapping[str, Any]

MAX_DELAY = float(os.environ.get("MAX_DELAY", "300"))


class Base(DeclarativeBase):
    """The tables of the flights."""


make_tables(Base.metadata)


class Airline(Base):
    """An airline, with what its flights add up to. Somebody registers it before its flights can be counted."""

    __tablename__ = "airline"
    carrier: Mapped[str] = mapped_column(String(2), primary_key=True)
    scheduled: Mapped[int] = mapped_column(default=0)
    departed: Mapped[int] = mapped_column(default=0)
    miles: Mapped[int] = mapped_column(default=0)


class Flight(Base):
    """A flight that was scheduled."""

    __tablename__ = "flight"
    id: Mapped[str] = mapped_column(String(80), primary_key=True)
    carrier: Mapped[str] = mapped_column(String(2))


def schedule(event: Event, session: Session) -> None:
    """Count a flight. Of an airline that is not registered it is poison: a redelivery fails in the same way."""
    airline = session.get(Airline, event["carrier"])
    if airline is None:
        raise LookupError(f"no airline {event['carrier']}")
    session.add(Flight(id=event["flight"], carrier=event["carrier"]))
    airline.scheduled += 1
    airline.miles += event["miles"]


def depart(event: Event, session: Session) -> None:
    """Count a departure. That of a flight which is not scheduled yet comes before its time."""
    flight = session.get(Flight, event["flight"])
    if flight is None:
        raise Defer(f"flight {event['flight']} is not scheduled yet")
    session.get_one(Airline, flight.carrier).departed += 1


@projector(idempotent=True, name="airlines")
class Airlines:
    """Keeps the airlines."""

    @on("flight.scheduled")
    def scheduled(self, event: Event, session: Session) -> None:
        """Count a flight."""
        schedule(event, session)

    @on("flight.departed")
    def departed(self, event: Event, session: Session) -> None:
        """Count a departure."""
        depart(event, session)


@projector(idempotent=True, name="airlines")
class AsyncAirlines:
    """Keeps the airlines, awaited."""

    @on("flight.scheduled")
    async def scheduled(self, event: Event, session: AsyncSession) -> None:
        """Count a flight."""
        await session.run_sync(lambda inner: schedule(event, inner))

    @on("flight.departed")
    async def departed(self, event: Event, session: AsyncSession) -> None:
        """Count a departure."""
        await session.run_sync(lambda inner: depart(event, inner))


def dispatcher() -> Dispatcher:
    """Return a dispatcher to the airlines, for a consumer that does not await."""
    engine = create_engine(os.environ["FLIGHTS_DATABASE_URL"])
    return Dispatcher(sessionmaker(engine), Airlines(), type=by_path("type"))


def async_dispatcher() -> AsyncDispatcher:
    """Return a dispatcher to the airlines, for a consumer that awaits."""
    engine = create_async_engine(os.environ["FLIGHTS_DATABASE_URL"])
    return AsyncDispatcher(async_sessionmaker(engine), AsyncAirlines(), type=by_path("type"))


def prepare(engine: Engine, *, without: str = "") -> None:
    """Make the tables, and register the airlines, but for the one that is left out."""
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        for carrier in {flight.carrier for flight in read_flights()} - {without}:
            session.add(Airline(carrier=carrier))


def events(limit: int) -> Iterator[tuple[str, Event]]:
    """Yield what happened to the first flights: the id of each message, and its body."""
    for flight in read_flights(limit):
        known = {"flight": flight.message_id, "carrier": flight.carrier}
        yield f"scheduled:{flight.message_id}", {"type": "flight.scheduled", **known, "miles": flight.miles}
        yield f"departed:{flight.message_id}", {"type": "flight.departed", **known}
