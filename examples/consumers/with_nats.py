"""Add up the payments in a stream of NATS JetStream."""

import asyncio
import os
from dataclasses import dataclass

from sqlalchemy import String
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from projector_dedup import AsyncDispatcher, make_tables, on, projector
from projector_dedup.brokers.nats import Consumer
from projector_dedup.brokers.typed_events import into

DATABASE_URL = os.environ.get("DATABASE_URL", "sqlite+aiosqlite:///payments.db")
NATS_URL = os.environ.get("NATS_URL", "nats://localhost:4222")


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
    async def add_payment(self, event: PaymentReceived, session: AsyncSession) -> None:
        totals = await session.get(Totals, event.account_id)
        if totals is None:
            totals = Totals(account_id=event.account_id, amount=0)
            session.add(totals)
        totals.amount += event.amount


engine = create_async_engine(DATABASE_URL)
dispatcher = AsyncDispatcher(async_sessionmaker(engine), AccountTotals())
consumer = Consumer(NATS_URL, "payments", "totals", dispatcher, convert)


async def main() -> None:
    async with engine.begin() as connection:  # or by your migrations
        await connection.run_sync(Base.metadata.create_all)
    await consumer.run()


if __name__ == "__main__":
    asyncio.run(main())
