"""The scene of flights: a read model, and its projector, which is ordinary ORM code, once idempotent and once not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from sqlalchemy import URL, BigInteger, Column, Connection, Integer, MetaData, String, Table, select
from sqlalchemy.orm import Mapped, Session, registry, sessionmaker

from projector_dedup import Dispatcher, Outcome, make_tables, on, projector

from .flights import ALL_FLIGHTS, FlightScheduled, Totals, read_flights, totals_of
from .scene import Delivered, Words


class CarrierTotals:
    """The row of one carrier: how many flights and miles it has."""

    __table__: ClassVar[Table]
    carrier: Mapped[str]
    flights: Mapped[int]
    miles: Mapped[int]

    def __init__(self, carrier: str) -> None:
        self.carrier, self.flights, self.miles = carrier, 0, 0


class _Carriers:
    @on(FlightScheduled, name="count")
    def count(self, event: FlightScheduled, session: Session) -> None:
        totals = session.get(CarrierTotals, event.carrier)
        if totals is None:
            totals = CarrierTotals(event.carrier)
            session.add(totals)
        totals.flights += 1
        totals.miles += event.miles


@projector(name="demo-naive")
class NaiveCarriers(_Carriers):
    """The naive projector, which counts every delivery."""


@projector(idempotent=True, name="demo-idempotent")
class IdempotentCarriers(_Carriers):
    """The idempotent projector, which counts every message once."""


@dataclass(frozen=True)
class FlightsTarget:
    """One of the two projectors, and the names of this run's tables."""

    url: str = field(repr=False)
    carriers: str
    markers: str
    idempotent: bool

    def open(self, factory: sessionmaker[Session]) -> Callable[[FlightScheduled], Delivered]:
        """Return the function that delivers one flight to the projector."""
        registry().map_imperatively(CarrierTotals, _carriers_table(MetaData(), self.carriers))  # once in a process
        handler = IdempotentCarriers() if self.idempotent else NaiveCarriers()
        dispatcher = Dispatcher(factory, handler, tables=make_tables(MetaData(), self.markers))
        return lambda flight: Delivered(dispatcher.deliver(flight).outcome is Outcome.DUPLICATE)


class Flights:
    """The scene in which flights are delivered to a projector that counts them for each carrier.

    ``limit`` is the number of flights, from 1 January on; all if it is None. Raises `Failed` if the data is missing.
    """

    words = Words(
        sides=("naive projector", "idempotent projector"),
        columns=("naive", "idempotent", "data file"),
        group="carrier",
        fields=Totals._fields,
        messages="messages",
        deliveries="deliveries",
        acknowledged="deliveries acknowledged",
        acknowledgement="acknowledgement",
        duplicates="duplicates skipped",
    )
    window = 500

    def __init__(self, limit: int | None, redelivered: float = 0.2) -> None:
        self.messages: Sequence[FlightScheduled] = read_flights(limit)
        self.redelivered = redelivered

    def opening(self, workers: int) -> str:
        """Return the sentence that says what is about to happen."""
        return (
            f"{len(self.messages):,} of the {ALL_FLIGHTS:,} flights out of New York in 2013 are delivered at least "
            f"once: {self.redelivered:.0%} come twice, and {workers} "
            f"{'worker delivers' if workers == 1 else 'workers deliver'} them and crash."
        )

    def expected(self) -> dict[str, Totals]:
        """Return the totals of the data file."""
        return totals_of(self.messages)

    def add_tables(self, metadata: MetaData, run_id: str) -> None:
        """Add both read models and the markers."""
        for idempotent in (False, True):
            _carriers_table(metadata, _name(run_id, idempotent=idempotent))
        make_tables(metadata, _markers(run_id))

    def target(self, url: URL, run_id: str, *, idempotent: bool) -> FlightsTarget:
        """Return one of the two projectors."""
        name = _name(run_id, idempotent=idempotent)
        return FlightsTarget(url.render_as_string(hide_password=False), name, _markers(run_id), idempotent)

    def prepare(self, connection: Connection, run_id: str) -> None:
        """Write nothing: the projector adds a row for each carrier."""

    def totals(self, connection: Connection, run_id: str, *, idempotent: bool) -> dict[str, tuple[int, int]]:
        """Return the read model of one projector."""
        table = _carriers_table(MetaData(), _name(run_id, idempotent=idempotent))
        return {row.carrier: Totals(row.flights, row.miles) for row in connection.execute(select(table))}


def _name(run_id: str, *, idempotent: bool) -> str:
    return f"{run_id}_carriers_{'idempotent' if idempotent else 'naive'}"


def _markers(run_id: str) -> str:
    return f"{run_id}_processed_message"


def _carriers_table(metadata: MetaData, name: str) -> Table:
    return Table(
        name,
        metadata,
        Column("carrier", String(2), primary_key=True),
        Column("flights", Integer, nullable=False),
        Column("miles", BigInteger, nullable=False),
    )
