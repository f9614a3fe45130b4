"""Add up the payments in a subscription of Google Cloud Pub/Sub."""

import os
from dataclasses import dataclass

from google.cloud.pubsub_v1 import PublisherClient, SubscriberClient
from sqlalchemy import String, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from projector_dedup import Dispatcher, make_tables, on, projector
from projector_dedup.brokers.pubsub import Consumer
from projector_dedup.brokers.typed_events import into

DATABASE_URL = os.environ.get("DATABASE_URL", "sqlite:///payments.db")
SUBSCRIPTION = os.environ["SUBSCRIPTION"]  # projects/.../subscriptions/...


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

clients = SubscriberClient(), PublisherClient()
consumer = Consumer(*clients, SUBSCRIPTION, dispatcher, convert)
if __name__ == "__main__":
    consumer.run()
