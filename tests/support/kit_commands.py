"""Commands for the tests of `answered_once`: a shop, mistakes that the check must find, and right commands."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from secrets import token_bytes
from typing import Any
from uuid import UUID

from sqlalchemy import String, func, insert, select, update
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from projector_dedup.commands import AsyncCall, Call, Codec, Rejected, Rejection, command


class Base(DeclarativeBase):
    """The user's metadata."""


class Account(Base):
    """What a customer has spent."""

    __tablename__ = "kit_account"
    customer: Mapped[str] = mapped_column(String(20), primary_key=True)
    spent: Mapped[int] = mapped_column(default=0)


class Order(Base):
    """An order."""

    __tablename__ = "kit_order"
    id: Mapped[UUID] = mapped_column(primary_key=True)
    customer: Mapped[str] = mapped_column(String(20))
    number: Mapped[int] = mapped_column(default=0)


@dataclass(frozen=True)
class PlaceOrder:
    """A request."""

    customer: str
    amount: int


REQUESTS = [(f"r{number}", PlaceOrder("aab"[number % 3], 1 + number)) for number in range(6)]


def spent(requests: Sequence[tuple[str, PlaceOrder]]) -> dict[str, int]:
    """What each customer has spent, computed from the requests."""
    found: dict[str, int] = {}
    for _, order in requests:
        found[order.customer] = found.get(order.customer, 0) + order.amount
    return found


def small(requests: Sequence[tuple[str, PlaceOrder]]) -> dict[str, int]:
    """The same without the orders that are rejected."""
    return spent([(key, order) for key, order in requests if order.amount < 4])


def read_spent(session: Session) -> dict[str, int]:
    """The same, from the database."""
    return {each.customer: each.spent for each in session.scalars(select(Account))}


def numbers(requests: Sequence[Any]) -> list[int]:
    """Orders are numbered from 1 without a gap."""
    return [*range(1, len(requests) + 1)]


def read_numbers(session: Session) -> list[int]:
    """The numbers of the orders."""
    return sorted(session.scalars(select(Order.number)))


def spend(order: PlaceOrder, session: Session) -> int:
    """Ordinary ORM code: read the row, create it if missing, add."""
    account = session.get(Account, order.customer)
    if account is None:
        account = Account(customer=order.customer, spent=0)
        session.add(account)
    account.spent += order.amount
    session.flush()
    return account.spent


@dataclass(frozen=True)
class Case:
    """One command, and how it is checked."""

    operation: Any
    expected: Callable[[Sequence[Any]], Any] = spent
    read: Callable[[Session], Any] = read_spent
    requests: Sequence[Any] = tuple(REQUESTS)
    options: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return str(self.operation.__name__)


MISTAKES: list[Case] = []
RIGHT: list[Case] = []


def case(into: list[Case], codec: Codec[Any] | None = None, **arguments: Any) -> Callable[[Any], Any]:
    """Register a command as a case, under the name of its function."""

    def register(function: Any) -> Any:
        operation = command(name=f"kit.{function.__name__}", codec=codec)(function)
        into.append(Case(operation, **arguments))
        return operation

    return register


mistake, right = partial(case, MISTAKES), partial(case, RIGHT)


# Mistakes -------------------------------------------------------------------------------------------------------------


@mistake()
def commits(order: PlaceOrder, call: Call) -> int:
    """It commits by itself."""
    left = spend(order, call.session)
    call.session.commit()
    return left


@mistake()
def writes_in_another_session(order: PlaceOrder, call: Call) -> int:
    """A second session commits what the first one may roll back."""
    with Session(call.session.get_bind()) as other, other.begin():
        return spend(order, other)


@mistake(engine={"isolation_level": "AUTOCOMMIT"})
def autocommits(order: PlaceOrder, call: Call) -> int:
    """Each statement commits by itself."""
    return spend(order, call.session)


@mistake(requests=[("the same", order) for _, order in REQUESTS])
def has_one_key_for_all(order: PlaceOrder, call: Call) -> int:
    """Different commands have one key."""
    return spend(order, call.session)


_numbered: list[str] = []


@mistake(expected=numbers, read=read_numbers, options={"reset": _numbered.clear})
def numbers_in_memory(order: PlaceOrder, call: Call) -> int:
    """A number that a rollback has used is lost."""
    _numbered.append(order.customer)
    call.session.add(Order(id=call.derived_id("order"), customer=order.customer, number=len(_numbered)))
    return len(_numbered)


@mistake()
def continues_after_an_error(order: PlaceOrder, call: Call) -> int:
    """A statement that failed was not executed, and the command is recorded as done."""
    spend(PlaceOrder(order.customer, 0), call.session)
    more = update(Account).where(Account.customer == order.customer).values(spent=Account.spent + order.amount)
    try:
        call.session.execute(more)
    except SQLAlchemyError:
        return -1
    return order.amount


@mistake()
def demands_a_row(order: PlaceOrder, call: Call) -> int:
    """It raises until the first order has created the row: consumers make dead letters of the orders before it."""
    if order in (REQUESTS[0][1], REQUESTS[2][1]):
        return spend(order, call.session)
    call.session.get_one(Account, order.customer).spent += order.amount
    return order.amount


FILE = Path(tempfile.gettempdir()) / "kit_orders_sent"


def _lines(_session: Session) -> int:
    return FILE.read_text(encoding="utf-8").count("\n")


@mistake(expected=len, read=_lines, options={"reset": partial(FILE.write_text, "", encoding="utf-8")})
def sends_a_mail(order: PlaceOrder, call: Call) -> int:
    """What leaves the database is not rolled back: a retry does it again."""
    with FILE.open("a", encoding="utf-8") as file:
        file.write(f"{order.customer}\n")
    return spend(order, call.session)


# Right ones -----------------------------------------------------------------------------------------------------------


@right()
def adds(order: PlaceOrder, call: Call) -> int:
    """Ordinary ORM code."""
    return spend(order, call.session)


@right()
async def adds_async(order: PlaceOrder, call: AsyncCall) -> int:
    """The same as an async def."""
    return await call.session.run_sync(lambda session: spend(order, session))


SALTED = Codec[int]("salted", lambda value: token_bytes(4) + str(value).encode(), lambda data: int(data[4:]))


@right(codec=SALTED)
def is_stored_in_another_form_each_time(order: PlaceOrder, call: Call) -> int:
    """As a codec that encrypts does."""
    return spend(order, call.session)


@right(expected=small)
def rejects(order: PlaceOrder, call: Call) -> int:
    """It writes, and rejects: the write is rolled back, the rejection recorded."""
    left = spend(order, call.session)
    if order.amount >= 4:
        raise Rejected("too_much", {"amount": order.amount})
    return left


@right()
def returns_a_rejection(order: PlaceOrder, call: Call) -> int | Rejection:
    """It writes, and returns a rejection: both are recorded."""
    left = spend(order, call.session)
    return Rejection("too_much") if order.amount >= 4 else left


@right(expected=numbers, read=read_numbers)
def numbers_in_the_database(order: PlaceOrder, call: Call) -> UUID:
    """The number comes from a row that is locked."""
    counter = call.session.get(Account, "counter", with_for_update=True)
    if counter is None:
        counter = Account(customer="counter", spent=0)
        call.session.add(counter)
    counter.spent += 1
    made = call.derived_id("order")
    call.session.execute(insert(Order).values(id=made, customer=order.customer, number=counter.spent))
    return made


@right(
    requests=[*REQUESTS, *REQUESTS[:2], ("r0", PlaceOrder("c", 7), "another tenant")],
    expected=lambda given: spent([(each[0], each[1]) for each in given]),
)
def has_scopes(order: PlaceOrder, call: Call) -> int:
    """A request may be there twice; the same key in another scope is another command."""
    return spend(order, call.session)


@right(read=lambda session: session.scalar(select(func.count()).select_from(Order)), expected=len)
def makes_rows(order: PlaceOrder, call: Call) -> UUID:
    """One row for each command, with an id that is the same in each retry."""
    made = call.derived_id("order")
    call.session.add(Order(id=made, customer=order.customer))
    return made
