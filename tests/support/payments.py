"""Payments for the tests of consumers: a read model, a projector that adds up, and the messages that it gets."""

import json
from collections.abc import Callable
from typing import Any

from sqlalchemy import URL, Engine, func, select, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from projector_dedup import AsyncDispatcher, Defer, Dispatcher, make_tables, on, projector
from projector_dedup.message import by_path
from projector_dedup.observer import Observation, Observer


class KilledError(BaseException):
    """Ends a consumer in the midst of a message."""


class Base(DeclarativeBase):
    """The read model, with the marker table beside it."""


class Balance(Base):
    """The sum of an account's payments."""

    __tablename__ = "balance"
    account: Mapped[str] = mapped_column(primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)


make_tables(Base.metadata)

RULES: dict[str, str | Callable[[], object]] = {}
"""Accounts whose payments fail: ``early`` (``Defer``), ``poison``, or by a function. Tests mend by taking them out."""


class Notes:
    """An observer that keeps what it gets."""

    def __init__(self) -> None:
        self.all: list[Observation] = []

    def observed(self, observation: Observation) -> None:
        """Keep it."""
        self.all.append(observation)


NOTES = Notes()
"""The observer of every dispatcher of payments. A test that looks at it empties it first."""


def _add(event: Any, session: Session) -> None:
    match RULES.get(event["account"]):
        case "early":
            raise Defer("the account is not open yet")
        case "poison":
            raise ValueError("this account cannot be read\nreally")
        case rule if callable(rule):
            rule()
    found = session.get(Balance, event["account"])
    if found is None:
        session.add(Balance(account=event["account"], amount=event["amount"]))
    else:
        found.amount += event["amount"]


@projector(idempotent=True, name="payments")
class Payments:
    """Adds payments up."""

    @on("payment")
    def paid(self, event: Any, session: Session) -> None:
        """Add one payment."""
        _add(event, session)


@projector(idempotent=True, name="payments")
class AsyncPayments:
    """Adds payments up, awaited."""

    @on("payment")
    async def paid(self, event: Any, session: AsyncSession) -> None:
        """Add one payment."""
        await session.run_sync(lambda inner: _add(event, inner))


def payment(number: int, account: str = "a", amount: int = 1) -> bytes:
    """Return the body of a payment, with its id in it."""
    return json.dumps({"type": "payment", "message_id": f"p{number}", "account": account, "amount": amount}).encode()


def dispatcher(engine: Engine, observer: Observer | None = NOTES) -> Dispatcher:
    """Return a dispatcher on a database, whose tables are made if they are missing."""
    Base.metadata.create_all(engine)
    return Dispatcher(sessionmaker(engine), Payments(), type=by_path("type"), observer=observer)


def async_dispatcher(url: URL) -> tuple[AsyncDispatcher, AsyncEngine]:
    """Return an asynchronous dispatcher on a database that has its tables, and its engine, to be disposed of."""
    engine = create_async_engine(url)
    return AsyncDispatcher(async_sessionmaker(engine), AsyncPayments(), type=by_path("type"), observer=NOTES), engine


def applied(engine: Engine) -> tuple[dict[str, int], int]:
    """Return the balances and the number of markers, read on a connection of their own."""
    with Session(engine) as session:
        balances = {each.account: each.amount for each in session.scalars(select(Balance))}
        markers = session.scalar(select(func.count()).select_from(Base.metadata.tables["processed_message"]))
        return balances, markers or 0


def markers(engine: Engine) -> set[str]:
    """Return the ids of the messages that were applied."""
    with engine.connect() as connection:
        return set(connection.scalars(select(Base.metadata.tables["processed_message"].c.message_id)))


def transactions(engine: Engine) -> int:
    """Return the number of transactions in which the messages were applied. PostgreSQL keeps it with each row."""
    with engine.connect() as connection:
        return connection.scalar(text("SELECT count(DISTINCT xmin::text) FROM processed_message")) or 0
