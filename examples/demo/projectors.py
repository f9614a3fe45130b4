"""The read model and its two projectors: the same ordinary ORM code, and one word that makes the difference."""

from __future__ import annotations

from sqlalchemy import BigInteger, String
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from projector_dedup import make_tables, on, projector

from .flights import FlightScheduled


class Base(DeclarativeBase):
    """The tables of the demo."""


class CarrierTotals(Base):
    """The row of one carrier: how many flights and miles it has."""

    __tablename__ = "projector_dedup_demo_totals"
    carrier: Mapped[str] = mapped_column(String(2), primary_key=True)
    flights: Mapped[int] = mapped_column(default=0)
    miles: Mapped[int] = mapped_column(BigInteger, default=0)


TABLES = make_tables(Base.metadata, "projector_dedup_demo_marker")


class _Carriers:
    @on(FlightScheduled, name="count")
    def count(self, event: FlightScheduled, session: Session) -> None:
        totals = session.get_one(CarrierTotals, event.carrier)
        totals.flights += 1
        totals.miles += event.miles


@projector(name="demo-naive")
class NaiveCarriers(_Carriers):
    """The projector that counts every delivery."""


@projector(idempotent=True, name="demo-idempotent")
class IdempotentCarriers(_Carriers):
    """The projector that counts every flight once."""
