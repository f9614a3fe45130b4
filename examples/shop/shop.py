"""A shop: a command takes the order, an effect charges the card, a projector counts, an effect mails the receipt.

idempotency consume shop:consumer              counts what was charged
idempotency effects settle --app shop:effects  charges, announces and mails (from cron, or in a loop)
python shop.py web-7 ada 30                    takes an order; say it twice, and it is one order

SHOP_DATABASE_URL, SHOP_QUEUE_URL, SHOP_BANK_URL and SHOP_MAIL_URL choose the servers.
"""

import os
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from json import dumps

import httpx
import pika
from pika.exceptions import AMQPConnectionError
from sqlalchemy import String, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from projector_dedup import Dispatcher, make_tables, on, projector
from projector_dedup.brokers.pika import Consumer
from projector_dedup.brokers.typed_events import into
from projector_dedup.commands import Call, Commands, command, make_command_tables
from projector_dedup.dialects import configure_sqlite
from projector_dedup.effects import Attempt, Effects, NotDone, Rejected, arm, ask, effect, make_effect_tables, resend


class Base(DeclarativeBase):
    """The base of the shop's entities."""


class Order(Base):
    """An order. ``state`` is "placed", and then "paid" or "declined"."""

    __tablename__ = "shop_order"
    number: Mapped[str] = mapped_column(String(36), primary_key=True)
    customer: Mapped[str] = mapped_column(String(40))
    amount: Mapped[int]
    state: Mapped[str] = mapped_column(String(10))


class Sales(Base):
    """The read model: how many orders a customer has paid, and how much."""

    __tablename__ = "sales"
    customer: Mapped[str] = mapped_column(String(40), primary_key=True)
    orders: Mapped[int]
    amount: Mapped[int]


make_tables(Base.metadata)
make_command_tables(Base.metadata)
make_effect_tables(Base.metadata)
engine = create_engine(os.environ.get("SHOP_DATABASE_URL", "sqlite:///shop.sqlite3"))
if engine.dialect.name == "sqlite":
    configure_sqlite(engine)
sessions = sessionmaker(engine)
QUEUE = os.environ.get("SHOP_QUEUE", "shop.charged")
RABBITMQ = pika.URLParameters(os.environ.get("SHOP_QUEUE_URL", "amqp://guest:guest@127.0.0.1"))
bank = httpx.Client(base_url=os.environ.get("SHOP_BANK_URL", "http://127.0.0.1:8001"))
mailer = httpx.Client(base_url=os.environ.get("SHOP_MAIL_URL", "http://127.0.0.1:8001"))


# 1. A command takes the order -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlaceOrder:
    """What the customer asks for."""

    customer: str
    amount: int


@command(name="shop.place-order")
def place_order(order: PlaceOrder, call: Call) -> str:
    """Write the order, and arm its charge; both commit together with the answer, the number of the order."""
    number = str(call.derived_id("order"))
    call.session.add(Order(number=number, customer=order.customer, amount=order.amount, state="placed"))
    arm(call.session, charge, Charge(number, order.customer, order.amount), key=f"charge:{number}")
    return number


commands = Commands(sessions)


def ask_for(service: httpx.Client, content: dict[str, object], attempt: Attempt) -> str:
    """Ask the bank or the mail service for a deed; return its number."""
    headers = {"Idempotency-Key": attempt.key}
    try:
        answer = service.post("/deeds", json=content, headers=headers, timeout=attempt.time_left(5))
    except httpx.ConnectError as error:
        raise NotDone from error
    if answer.status_code == 402:
        raise Rejected("declined")
    return str(answer.raise_for_status().json()["id"])


# 2. An effect charges the card ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Charge:
    """What the bank is asked for; and the event that it was done."""

    order: str
    customer: str
    amount: int


@effect(name="shop.charge", lease=10, unknown=resend(within=timedelta(hours=23)))  # the bank keeps a key for a day
def charge(order: Charge, attempt: Attempt) -> str:
    """Return the bank's number of the payment."""
    return ask_for(bank, asdict(order), attempt)


@charge.recorded
def paid(order: Charge, _payment: str, session: Session) -> None:
    """Note that the order is paid, and arm its announcement."""
    session.get_one(Order, order.order).state = "paid"
    arm(session, announce, order, key=f"announce:{order.order}")


@charge.refused
def declined(order: Charge, _why: Rejected, session: Session) -> None:
    """Note that the bank said no."""
    session.get_one(Order, order.order).state = "declined"


# 3. An effect announces it; the projector below counts a message once, so it may be sent again ------------------------


@effect(name="shop.announce", lease=10, unknown=resend(within=timedelta(days=7)))  # as long as markers are kept
def announce(order: Charge, attempt: Attempt) -> None:
    """Publish the event under the key of the effect."""
    try:
        connection = pika.BlockingConnection(RABBITMQ)
    except AMQPConnectionError as error:
        raise NotDone from error
    with connection, connection.channel() as channel:
        channel.confirm_delivery()
        properties = pika.BasicProperties(message_id=attempt.key, type="shop.charged", delivery_mode=2)
        channel.basic_publish("", QUEUE, dumps(asdict(order)).encode(), properties, mandatory=True)


# 4. A projector counts ------------------------------------------------------------------------------------------------


@projector(idempotent=True, name="shop.sales")
class CountSales:
    """Adds up what was charged, and arms the receipt."""

    @on(Charge)
    def count(self, order: Charge, session: Session) -> None:
        """Write the read model; the receipt is armed in the same transaction."""
        sales = session.get(Sales, order.customer)
        if sales is None:
            sales = Sales(customer=order.customer, orders=0, amount=0)
            session.add(sales)
        sales.orders += 1
        sales.amount += order.amount
        arm(session, receipt, order, key=f"receipt:{order.order}")


dispatcher = Dispatcher(sessions, CountSales())
consumer = Consumer(RABBITMQ, QUEUE, dispatcher, convert=into({"shop.charged": Charge}))


# 5. An effect mails the receipt ---------------------------------------------------------------------------------------


def was_mailed(_order: Charge, attempt: Attempt) -> str:
    """Return the number of the mail if the mail service has it; its list lags by some seconds."""
    answer = mailer.get("/deeds", params={"key": attempt.key}, timeout=attempt.time_left(5))
    found = answer.raise_for_status().json()["deeds"]
    if not found:
        raise NotDone
    return str(found[0]["id"])


@effect(name="shop.receipt", lease=10, unknown=ask(was_mailed, after=timedelta(minutes=1), within=timedelta(days=1)))
def receipt(order: Charge, attempt: Attempt) -> str:
    """Mail the receipt, with a tag by which it is found."""
    return ask_for(mailer, asdict(order) | {"tag": attempt.key}, attempt)


effects = Effects(sessions, [charge, announce, receipt])

if __name__ == "__main__":
    key, customer, amount = sys.argv[1:]
    Base.metadata.create_all(engine)  # a real application migrates
    sys.stdout.write(commands.handle(place_order, PlaceOrder(customer, int(amount)), key=key).result + "\n")
