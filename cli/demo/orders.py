"""The scene of orders: each is asked for three times, of plain code and of the same code as a command."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from sqlalchemy import URL, Column, Connection, Integer, MetaData, String, Table, func, select
from sqlalchemy.orm import Mapped, Session, registry, sessionmaker

from projector_dedup.commands import Call, Commands, command, make_command_tables

from .scene import Delivered, Words

_CUSTOMERS = ("Ada", "Boris", "Chen", "Dilara", "Emeka", "Fatima", "Goran", "Hana", "Ines", "Jonas", "Kofi", "Lena")


@dataclass(frozen=True)
class PlaceOrder:
    """The command: what a customer asks for."""

    customer: str
    amount: int


@dataclass(frozen=True)
class Placed:
    """The answer: the number of the order, and what the customer has spent with it."""

    number: int
    spent: int


@dataclass(frozen=True)
class Request:
    """The request of a caller: the key, and the command."""

    key: str
    command: PlaceOrder


class Account:
    """The row of one customer: what was spent."""

    __table__: ClassVar[Table]
    customer: Mapped[str]
    spent: Mapped[int]


class Order:
    """The row of one order."""

    __table__: ClassVar[Table]
    number: Mapped[int]
    customer: Mapped[str]
    amount: Mapped[int]

    def __init__(self, customer: str, amount: int) -> None:
        self.customer, self.amount = customer, amount


def place(asked: PlaceOrder, session: Session) -> Placed:
    """Write the order, and add its amount to the customer's account: the code of both sides."""
    order = Order(asked.customer, asked.amount)
    session.add(order)
    session.flush()  # gives the order its number
    account = session.get_one(Account, asked.customer, with_for_update=True)
    account.spent += asked.amount
    return Placed(order.number, account.spent)


@command(name="demo.place-order")
def place_order(asked: PlaceOrder, call: Call) -> list[int]:
    """Place the order as plain code does, in the transaction of the record; return what needs no Pydantic."""
    placed = place(asked, call.session)
    return [placed.number, placed.spent]


def requests(number: int, seed: int) -> list[Request]:
    """Return the requests of ``number`` orders. The same seed gives the same orders."""
    chance = random.Random(seed)  # noqa: S311  # made-up orders, not secrets
    return [
        Request(f"order-{place}", PlaceOrder(chance.choice(_CUSTOMERS), chance.randint(1, 100)))
        for place in range(number)
    ]


def totals_of(asked: Iterable[Request]) -> dict[str, tuple[int, int]]:
    """Return the true orders and amounts of each customer: each request is added once, in plain Python."""
    totals: dict[str, tuple[int, int]] = {}
    for request in asked:
        orders, amount = totals.get(request.command.customer, (0, 0))
        totals[request.command.customer] = (orders + 1, amount + request.command.amount)
    return totals


@dataclass(frozen=True)
class OrdersTarget:
    """One of the two sides: plain code, or the command; and the names of this run's tables."""

    url: str = field(repr=False)
    run_id: str
    idempotent: bool

    def open(self, factory: sessionmaker[Session]) -> Callable[[Request], Delivered]:
        """Return the function that handles one request."""
        accounts, orders = _tables(MetaData(), self.run_id, idempotent=self.idempotent)
        registry().map_imperatively(Account, accounts)  # once in a process
        registry().map_imperatively(Order, orders)
        commands = Commands(factory, tables=make_command_tables(MetaData(), _records(self.run_id)))

        def plain(request: Request) -> Delivered:
            with factory.begin() as session:
                placed = place(request.command, session)
            return Delivered(duplicate=False, answer=(placed.number, placed.spent))

        def once(request: Request) -> Delivered:
            handled = commands.handle(place_order, request.command, key=request.key, scope="demo")
            number, spent = handled.result
            return Delivered(handled.replayed, (number, spent))

        return once if self.idempotent else plain


class Orders:
    """The scene in which orders are each sent three times, to plain code and to the same code as a command."""

    words = Words(
        sides=("plain code", "command"),
        columns=("plain", "command", "input"),
        group="customer",
        fields=("orders", "amount"),
        messages="orders",
        deliveries="requests",
        acknowledged="requests answered",
        acknowledgement="answer",
        duplicates="requests answered from the record",
    )
    redelivered: float = 2
    window = 100  # callers that hear nothing ask again soon

    def __init__(self, number: int, seed: int) -> None:
        self.messages: Sequence[Request] = requests(number, seed)

    def opening(self, workers: int) -> str:
        """Return the sentence that says what is about to happen."""
        return (
            f"{len(self.messages):,} orders are each sent three times, with one key for each order, by {workers} "
            f"{'worker that is' if workers == 1 else 'workers that are'} killed now and then."
        )

    def expected(self) -> dict[str, tuple[int, int]]:
        """Return the totals of the requests, each added once."""
        return totals_of(self.messages)

    def add_tables(self, metadata: MetaData, run_id: str) -> None:
        """Add the accounts and orders of both sides, and the records."""
        for idempotent in (False, True):
            _tables(metadata, run_id, idempotent=idempotent)
        make_command_tables(metadata, _records(run_id))

    def target(self, url: URL, run_id: str, *, idempotent: bool) -> OrdersTarget:
        """Return plain code, or the command."""
        return OrdersTarget(url.render_as_string(hide_password=False), run_id, idempotent)

    def prepare(self, connection: Connection, run_id: str) -> None:
        """Write an account for each customer."""
        for idempotent in (False, True):
            accounts, _ = _tables(MetaData(), run_id, idempotent=idempotent)
            connection.execute(accounts.insert(), [{"customer": name, "spent": 0} for name in _CUSTOMERS])

    def totals(self, connection: Connection, run_id: str, *, idempotent: bool) -> dict[str, tuple[int, int]]:
        """Return the number of orders of each customer, and their amounts together."""
        _, orders = _tables(MetaData(), run_id, idempotent=idempotent)
        counted = select(orders.c.customer, func.count(), func.sum(orders.c.amount)).group_by(orders.c.customer)
        return {customer: (number, int(amount)) for customer, number, amount in connection.execute(counted)}


def _records(run_id: str) -> str:
    return f"{run_id}_processed_command"


def _tables(metadata: MetaData, run_id: str, *, idempotent: bool) -> tuple[Table, Table]:
    side = "command" if idempotent else "plain"
    accounts = Table(
        f"{run_id}_account_{side}",
        metadata,
        Column("customer", String(20), primary_key=True),
        Column("spent", Integer, nullable=False),
    )
    orders = Table(
        f"{run_id}_order_{side}",
        metadata,
        Column("number", Integer, primary_key=True),
        Column("customer", String(20), nullable=False),
        Column("amount", Integer, nullable=False),
    )
    return accounts, orders
