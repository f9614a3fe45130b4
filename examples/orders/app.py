"""Orders by HTTP: each is placed once, however often it is sent, and whatever is killed meanwhile.

uvicorn app:app                 (docs/http.md says what to send; ORDERS_DATABASE_URL chooses the database)
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from sqlalchemy import MetaData, String
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from projector_dedup import configure_sqlite
from projector_dedup.commands import AsyncCall, AsyncCommands, Rejected, command, make_command_tables
from projector_dedup.integrations.starlette import (
    IdempotencyKey,
    endpoint_session,
    install,
    recorded_route,
    replay_headers,
)


class Base(DeclarativeBase):
    """The base of the shop's entities."""

    metadata = MetaData()


class Account(Base):
    """A customer's money; wrong for good once an order counts twice."""

    __tablename__ = "account"
    customer: Mapped[str] = mapped_column(String(40), primary_key=True)
    balance: Mapped[int]


class Order(Base):
    """An order that was placed."""

    __tablename__ = "shop_order"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    customer: Mapped[str] = mapped_column(String(40))
    reference: Mapped[str] = mapped_column(String(40))
    amount: Mapped[int]


make_command_tables(Base.metadata)
engine = create_async_engine(os.environ.get("ORDERS_DATABASE_URL", "sqlite+aiosqlite:///orders.sqlite3"))
if engine.dialect.name == "sqlite":
    configure_sqlite(engine)
commands = AsyncCommands(async_sessionmaker(engine), scope="required", claim_timeout=5.0)


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    """Create the tables; a real application migrates them."""
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    yield
    await engine.dispose()


app = FastAPI(lifespan=lifespan)
install(app, on_rejected={"no_such_customer": 404, "insufficient_funds": 409})

TOKENS = {"secret-of-north": "north", "secret-of-south": "south"}  # stands for whatever verifies who asks


def tenant(request: Request) -> str:
    """Return who asks, or refuse: keys of one tenant are not those of another."""
    found = TOKENS.get(request.headers.get("authorization", "").removeprefix("Bearer "))
    if found is None:
        raise HTTPException(401)
    return found


# An endpoint that calls handle() and renders the result -----------------------------------------------------------


@dataclass(frozen=True)
class PlaceOrder:
    """A command; FastAPI makes it of the request's body."""

    customer: str
    amount: int
    reference: str = ""


@dataclass(frozen=True)
class Placed:
    """Its result, which is recorded with its writes."""

    number: int
    balance: int


@command(name="shop.place-order", read_models=[Account])
async def place_order(order: PlaceOrder, call: AsyncCall) -> Placed:
    """Place an order; nothing here knows of HTTP, or of requests that are sent twice."""
    account = await call.session.get(Account, order.customer)
    if account is None:
        raise Rejected("no_such_customer")
    if account.balance < order.amount:
        raise Rejected("insufficient_funds", {"missing": order.amount - account.balance})
    account.balance -= order.amount
    placed = Order(customer=order.customer, reference=order.reference, amount=order.amount)
    call.session.add(placed)
    await call.session.flush()
    return Placed(placed.number, account.balance)


@app.post("/orders", status_code=201)
async def post_order(
    order: PlaceOrder,
    response: Response,
    who: Annotated[str, Depends(tenant)],
    key: Annotated[str, Depends(IdempotencyKey())],
) -> Placed:
    """Place an order once."""
    done = await commands.handle(place_order, order, key=key, scope=who)
    response.headers.update(replay_headers(done, key))
    return done.result


# An endpoint that was there before, on a router whose answers are recorded ------------------------------------------

accounts = APIRouter(route_class=recorded_route(commands, scope=tenant, name="shop.accounts"))


@accounts.post("/accounts/{customer}", status_code=201)
async def open_account(
    customer: str, balance: int, session: Annotated[AsyncSession, Depends(endpoint_session)]
) -> dict[str, str | int]:
    """Open an account once: who asks again is told 201 again, and not that it exists."""
    if await session.get(Account, customer) is not None:
        raise HTTPException(409, "there is such an account")
    session.add(Account(customer=customer, balance=balance))
    return {"customer": customer, "balance": balance}


app.include_router(accounts)
