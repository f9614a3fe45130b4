"""The read model of the demo, and the projector that keeps it: ordinary ORM code, once idempotent and once not."""

from __future__ import annotations

from typing import ClassVar

from sqlalchemy import BigInteger, Column, Integer, MetaData, String, Table
from sqlalchemy.orm import Mapped, Session, registry

from projector_dedup import on, projector

from .flights import FlightScheduled


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


def carriers_table(metadata: MetaData, name: str) -> Table:
    """Return the table of the read model, under the name that this run gave it."""
    return Table(
        name,
        metadata,
        Column("carrier", String(2), primary_key=True),
        Column("flights", Integer, nullable=False),
        Column("miles", BigInteger, nullable=False),
    )


def map_to(table: Table) -> None:
    """Map `CarrierTotals` to a table, once in a process: each process has one projector, which keeps that table."""
    registry(metadata=table.metadata).map_imperatively(CarrierTotals, table)
