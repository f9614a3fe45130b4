"""Add up the payments in a stream of NATS JetStream."""

import asyncio
import os
import signal
from dataclasses import dataclass

import nats
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


async def create_tables() -> None:  # or by your migrations
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)


async def main() -> None:
    await create_tables()
    async with await nats.connect(NATS_URL) as connection:
        consumer = Consumer(connection, "payments", "totals", dispatcher, convert)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, consumer.stop)
        await consumer.run()


asyncio.run(main())
