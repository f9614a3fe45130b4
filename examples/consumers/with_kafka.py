"""Add up the payments in a topic of Kafka; ``begin`` prepares a new group."""

import os
import sys
from dataclasses import dataclass

from sqlalchemy import String, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from projector_dedup import Dispatcher, make_tables, on, projector
from projector_dedup.brokers.kafka import Consumer, begin
from projector_dedup.brokers.typed_events import into

DATABASE_URL = os.environ.get("DATABASE_URL", "sqlite:///payments.db")
KAFKA = os.environ.get("KAFKA", "localhost:9092")


class Base(DeclarativeBase):
    pass


class Totals(Base):
    __tablename__ = "totals"
    account_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    amount: Mapped[int]


make_tables(Base.metadata)


@dataclass
class PaymentReceived:
    account_id: str
    amount: int


convert = into({"payment.received": PaymentReceived})


@projector(idempotent=True, name="account-totals")
class AccountTotals:
    @on(PaymentReceived)
    def add_payment(self, event: PaymentReceived, session: Session) -> None:
        totals = session.get(Totals, event.account_id)
        if totals is None:
            totals = Totals(account_id=event.account_id, amount=0)
            session.add(totals)
        totals.amount += event.amount


engine = create_engine(DATABASE_URL)
Base.metadata.create_all(engine)  # or by your migrations
dispatcher = Dispatcher(sessionmaker(engine), AccountTotals())

config = {"bootstrap.servers": KAFKA, "group.id": "totals"}
consumer = Consumer(config, ["payments"], dispatcher, convert)

if sys.argv[1:] == ["begin"]:
    begin(config, ["payments"])
elif __name__ == "__main__":
    consumer.run()
