"""Orders by HTTP: each is placed once, however often it is sent, and whatever is killed meanwhile.

An order by card is charged by a bank, and its receipt is mailed. Both are effects, and `settle` completes them.

uvicorn app:app                                 (docs/http.md says what to send)
idempotency effects settle --app app:effects    (from cron, or in a loop)

ORDERS_DATABASE_URL chooses the database, ORDERS_BANK_URL and ORDERS_MAIL_URL the bank and the mail service.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Annotated

import httpx
from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request, Response
from sqlalchemy import MetaData, String
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from projector_dedup.commands import AsyncCall, AsyncCommands, command, make_command_tables
from projector_dedup.dialects import configure_sqlite
from projector_dedup.effects import (
    AsyncEffects,
    Attempt,
    EffectUnknown,
    NotDone,
    Rejected,
    aarm,
    ask,
    effect,
    make_effect_tables,
    resend,
)
from projector_dedup.errors import InProgress
from projector_dedup.http.starlette import (
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
    """An order that was placed. ``state`` is "paid", or of an order by card: "pending", then "paid" or "declined"."""

    __tablename__ = "shop_order"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    tenant: Mapped[str] = mapped_column(String(40))
    customer: Mapped[str] = mapped_column(String(40))
    reference: Mapped[str] = mapped_column(String(40))
    amount: Mapped[int]
    state: Mapped[str] = mapped_column(String(10))


make_command_tables(Base.metadata)
make_effect_tables(Base.metadata)
engine = create_async_engine(os.environ.get("ORDERS_DATABASE_URL", "sqlite+aiosqlite:///orders.sqlite3"))
if engine.dialect.name == "sqlite":
    configure_sqlite(engine)
sessions = async_sessionmaker(engine)
commands = AsyncCommands(sessions, scope="required", claim_timeout=5.0)
bank = httpx.AsyncClient(base_url=os.environ.get("ORDERS_BANK_URL", "http://127.0.0.1:8001"))
mailer = httpx.AsyncClient(base_url=os.environ.get("ORDERS_MAIL_URL", "http://127.0.0.1:8001"))


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


# What happens outside the database: a charge, then a receipt ------------------------------------------------------


@dataclass(frozen=True)
class Charge:
    """What the bank is asked for."""

    order: int
    card: str
    amount: int


@dataclass(frozen=True)
class Receipt:
    """What the mail service is asked for."""

    order: int
    customer: str
    payment: str


@effect(name="shop.charge", lease=20, unknown=resend(within=timedelta(hours=23)))  # the bank keeps a key for a day
async def charge(order: Charge, attempt: Attempt) -> str:
    """Charge the card; return the bank's number of the payment."""
    headers, seconds = {"Idempotency-Key": attempt.key}, attempt.time_left(5)
    try:
        answer = await bank.post("/deeds", json=asdict(order), headers=headers, timeout=seconds)
    except httpx.ConnectError as error:
        raise NotDone from error
    if answer.status_code == 402:
        raise Rejected("card_declined")
    payment: str = answer.raise_for_status().json()["id"]
    return payment


@charge.recorded
async def paid(charged: Charge, payment: str, session: AsyncSession) -> None:
    """Note that the order is paid, and arm the receipt, in the transaction that records the payment."""
    order = await session.get_one(Order, charged.order)
    order.state = "paid"
    await aarm(session, receipt, Receipt(order.number, order.customer, payment), key=f"receipt:{order.number}")


@charge.refused
async def declined(charged: Charge, _why: Rejected, session: AsyncSession) -> None:
    """Note that the bank said no, in the transaction that records it."""
    order = await session.get_one(Order, charged.order)
    order.state = "declined"


async def was_sent(_mail: Receipt, attempt: Attempt) -> str:
    """Return the number of the mail if the mail service has it; its list lags by a minute."""
    answer = await mailer.get("/deeds", params={"key": attempt.key}, timeout=attempt.time_left(5))
    found = answer.raise_for_status().json()["deeds"]
    if not found:
        raise NotDone
    mail: str = found[0]["id"]
    return mail


@effect(name="shop.receipt", lease=20, unknown=ask(was_sent, after=timedelta(minutes=5), within=timedelta(days=1)))
async def receipt(mail: Receipt, attempt: Attempt) -> str:
    """Mail the receipt, with a tag by which it is found."""
    content = asdict(mail) | {"tag": attempt.key}
    answer = await mailer.post("/deeds", json=content, timeout=attempt.time_left(5))
    number: str = answer.raise_for_status().json()["id"]
    return number


effects = AsyncEffects(sessions, [charge, receipt])  # the number of an order is one of all tenants: no scope

# An endpoint that calls handle() and renders the result -----------------------------------------------------------


@dataclass(frozen=True)
class PlaceOrder:
    """A command; FastAPI makes it of the request's body."""

    customer: str
    amount: int
    reference: str = ""
    card: str = ""  #: without a card, the account pays


@command(name="shop.place-order", read_models=[Account])
async def place_order(order: PlaceOrder, call: AsyncCall) -> int:
    """Place an order; nothing here knows of HTTP, or of requests that are sent twice.

    The number of the order is recorded, and nothing that changes later.
    """
    account = await call.session.get(Account, order.customer)
    if account is None:
        raise Rejected("no_such_customer")
    if not order.card:
        if account.balance < order.amount:
            raise Rejected("insufficient_funds", {"missing": order.amount - account.balance})
        account.balance -= order.amount
    placed = Order(
        tenant=call.scope,
        customer=order.customer,
        reference=order.reference,
        amount=order.amount,
        state="pending" if order.card else "paid",
    )
    call.session.add(placed)
    await call.session.flush()
    if order.card:
        asked = Charge(placed.number, order.card, order.amount)
        await aarm(call.session, charge, asked, key=f"charge:{placed.number}")
    return placed.number


@dataclass(frozen=True)
class Shown:
    """An order as it is now."""

    number: int
    state: str


STATUS = {"paid": 201, "pending": 202, "declined": 402}


@app.post("/orders", status_code=201)
async def post_order(
    order: PlaceOrder,
    response: Response,
    who: Annotated[str, Depends(tenant)],
    key: Annotated[str, Depends(IdempotencyKey())],
    prefer: Annotated[str, Header()] = "",
) -> Shown:
    """Place an order once, and answer its state of now, also to a request that comes again."""
    done = await commands.handle(place_order, order, key=key, scope=who)
    number = done.result
    if order.card and prefer != "respond-async":  # RFC 7240: the client does not want to wait
        with suppress(InProgress, EffectUnknown, NotDone, Rejected):  # the state says what became of it
            await effects.run(charge, key=f"charge:{number}", wait=5.0)
    shown = await get_order(number, who)
    response.status_code = STATUS[shown.state]
    response.headers.update({"Location": f"/orders/{number}", **replay_headers(done, key)})
    return shown


@app.get("/orders/{number}")
async def get_order(number: int, who: Annotated[str, Depends(tenant)]) -> Shown:
    """Show the state of an order now."""
    async with sessions() as session:
        order = await session.get(Order, number)
    if order is None or order.tenant != who:
        raise HTTPException(404)
    return Shown(order.number, order.state)


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
