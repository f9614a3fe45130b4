"""The read models of random programs, and what each of them must hold in the end, whatever the order of the messages.

A step has a number, its slot, and owns the rows of that slot, so that the steps of a program do not disturb each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from functools import partial
from typing import Any

from sqlalchemy import (
    JSON,
    CheckConstraint,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Numeric,
    PickleType,
    String,
    UniqueConstraint,
    func,
    select,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, relationship

ACCOUNTS = ("a", "b", "c", "d")
SEATS = 30
PLACES = 5

Worth = Sequence[tuple[str, int]]
"""What the messages are worth to a step: pairs of an account and an amount."""


class Base(DeclarativeBase):
    """The read models."""


class OfSlot:
    """The columns of rows that belong to one step."""

    slot: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    account: Mapped[str] = mapped_column(String(10), primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)


class Account(Base):
    """The parent, which handlers lock."""

    __tablename__ = "harmless_account"
    id: Mapped[str] = mapped_column(String(10), primary_key=True)
    total: Mapped[int] = mapped_column(default=0)
    touched: Mapped[int] = mapped_column(default=0)
    entries: Mapped[list[Entry]] = relationship(order_by="Entry.number")


class Tally(OfSlot, Base):
    """A row that is there from the beginning."""

    __tablename__ = "harmless_tally"


class Made(OfSlot, Base):
    """A row that a handler creates."""

    __tablename__ = "harmless_made"


class Versioned(OfSlot, Base):
    """A row whose version the ORM compares in each UPDATE."""

    __tablename__ = "harmless_versioned"
    version: Mapped[int] = mapped_column(default=1)
    __mapper_args__ = {"version_id_col": version}  # noqa: RUF012


class Numbered(OfSlot, Base):
    """A row with a running number, which the database keeps unique."""

    __tablename__ = "harmless_numbered"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class Coded(Base):
    """A row that a handler creates, with a key of its own, and a second one that the database keeps unique."""

    __tablename__ = "harmless_coded"
    __table_args__ = (UniqueConstraint("slot", "account"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    slot: Mapped[int]
    account: Mapped[str] = mapped_column(String(10))
    amount: Mapped[int]


class Detail(Base):
    """A row that needs one of `Made`."""

    __tablename__ = "harmless_detail"
    __table_args__ = (ForeignKeyConstraint(["slot", "account"], [Made.slot, Made.account]),)
    id: Mapped[int] = mapped_column(primary_key=True)
    slot: Mapped[int]
    account: Mapped[str] = mapped_column(String(10))
    amount: Mapped[int]


class Thing:
    """A value that equals nothing but itself."""


class Odd(OfSlot, Base):
    """A row with values of many kinds, some of which are hard to compare."""

    __tablename__ = "harmless_odd"
    price: Mapped[Decimal] = mapped_column(Numeric(12, 2), default=Decimal(0))
    ratio: Mapped[float | None]
    thing: Mapped[Any] = mapped_column(PickleType, default=Thing)
    document: Mapped[Any] = mapped_column(JSON, default=lambda: {"sum": 0, "kinds": ["x"]})
    changed_at: Mapped[datetime | None] = mapped_column(onupdate=func.now())


class Item(OfSlot, Base):
    """A row whose columns are in two tables."""

    __tablename__ = "harmless_item"
    kind: Mapped[str] = mapped_column(String(10))
    __mapper_args__ = {"polymorphic_on": kind, "polymorphic_identity": "plain"}  # noqa: RUF012


class Special(Item):
    """The second of the tables."""

    __tablename__ = "harmless_special"
    __table_args__ = (ForeignKeyConstraint(["slot", "account"], [Item.slot, Item.account]),)
    __mapper_args__ = {"polymorphic_identity": "special"}  # noqa: RUF012
    slot: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    account: Mapped[str] = mapped_column(String(10), primary_key=True)
    bonus: Mapped[int] = mapped_column(default=0)


class Stamped(OfSlot, Base):
    """A row with a running number, whose key is that of its message."""

    __tablename__ = "harmless_stamped"
    message: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int]


class Entry(Base):
    """A line of a ledger. Its number is not unique in the database."""

    __tablename__ = "harmless_entry"
    __table_args__ = (Index("harmless_entry_of", "slot", "account", "number"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    slot: Mapped[int]
    account: Mapped[str] = mapped_column(ForeignKey(Account.id))
    number: Mapped[int] = mapped_column(default=0)
    amount: Mapped[int] = mapped_column(default=0)
    balance: Mapped[int] = mapped_column(default=0)


class Line(Base):
    """A good line of a message."""

    __tablename__ = "harmless_line"
    __table_args__ = (CheckConstraint("amount >= 0"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    slot: Mapped[int]
    account: Mapped[str] = mapped_column(String(10))
    amount: Mapped[int]


class Seat(Base):
    """One of many rows, of which a handler takes any that is free."""

    __tablename__ = "harmless_seat"
    slot: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    taken_by: Mapped[int | None]


class Other(Base):
    """A row that nobody changes."""

    __tablename__ = "harmless_other"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


def reset(session: Session, slots: Slots) -> None:
    """Fill the tables as they are in the beginning, for the steps of a program."""
    for table in reversed(Base.metadata.sorted_tables):
        session.execute(table.delete())
    session.add_all([Other(id=1), *(Account(id=account) for account in ACCOUNTS)])
    ratio = float("nan") if session.get_bind().dialect.name == "postgresql" else 0.5
    kinds: dict[Model, Any] = {TALLY: Tally, VERSIONED: Versioned, ODD: partial(Odd, ratio=ratio), ITEMS: Special}
    for model, kind in kinds.items():
        for slot in slots.get(model, ()):
            session.add_all(kind(slot=slot, account=account) for account in ACCOUNTS)
    session.add_all(Seat(slot=slot, number=number) for slot in slots.get(SEATED, ()) for number in range(SEATS))


# What a read model holds ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """One read model: what it must hold after messages of that worth, and what it holds for a slot."""

    name: str
    expected: Callable[[Worth], Any]
    found: Callable[[Session, int], Any]


Slots = Mapping[Model, Sequence[int]]
"""The slots of a program that have rows of a read model."""


def _sums(worth: Worth) -> dict[str, int]:
    sums: dict[str, int] = defaultdict(int)
    for account, amount in worth:
        sums[account] += amount
    return {account: amount for account, amount in sums.items() if amount}


def _by_account(worth: Worth) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for account, amount in worth:
        found[account].append(amount)
    return dict(found)


def _amounts(kind: Any) -> Callable[[Session, int], dict[str, int]]:
    def found(session: Session, slot: int) -> dict[str, int]:
        rows = session.execute(select(kind.account, kind.amount).where(kind.slot == slot))
        return {account: amount for account, amount in rows if amount}

    return found


def _odd(session: Session, slot: int) -> dict[str, Any]:
    rows = session.scalars(select(Odd).where(Odd.slot == slot))
    return _agreed({row.account: [row.amount, int(row.price), row.document["sum"]] for row in rows})


def _items(session: Session, slot: int) -> dict[str, Any]:
    rows = session.scalars(select(Special).where(Special.slot == slot))
    return _agreed({row.account: [row.amount, row.bonus] for row in rows})


def _agreed(sums: dict[str, list[int]]) -> dict[str, Any]:
    """Return one sum for each account, or all of those that should be the same."""
    return {account: each[0] if len({*each}) == 1 else each for account, each in sums.items() if any(each)}


def _total(session: Session, _slot: int) -> dict[str, int]:
    return {account: total for account, total in session.execute(select(Account.id, Account.total)) if total}


def _entries(session: Session, slot: int, order: Any) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in session.scalars(select(Entry).where(Entry.slot == slot).order_by(order, Entry.id)):
        found[entry.account].append(entry)
    return found


def _ledger(session: Session, slot: int) -> dict[str, Any]:
    """Return the number of lines and the last balance of each account, or where its chain is broken."""
    return {
        account: _chained(entries, numbers=True) for account, entries in _entries(session, slot, Entry.number).items()
    }


def _balances(session: Session, slot: int) -> dict[str, Any]:
    entries = _entries(session, slot, Entry.balance)
    return {account: _chained(lines, numbers=False) for account, lines in entries.items()}


def _chained(entries: list[Entry], *, numbers: bool) -> Any:
    balance = 0
    for number, entry in enumerate(entries, 1):
        balance += entry.amount
        if entry.balance != balance or (numbers and entry.number != number):
            return f"broken at line {number} of {len(entries)}"
    return len(entries), balance


def _numbers(kind: Any) -> Callable[[Session, int], dict[str, Any]]:
    def found(session: Session, slot: int) -> dict[str, Any]:
        rows = session.execute(select(kind.account, kind.number).where(kind.slot == slot).order_by(kind.number)).all()
        each = _by_account([(account, number) for account, number in rows])
        return {
            account: len(numbers) if numbers == list(range(1, len(numbers) + 1)) else numbers
            for account, numbers in each.items()
        }

    return found


def _places(session: Session, slot: int) -> dict[str, int]:
    rows = session.execute(select(Line.account, func.count()).where(Line.slot == slot).group_by(Line.account))
    return {account: number for account, number in rows}  # noqa: C416  # rows are no pairs for a type checker


def _firsts(session: Session, slot: int) -> dict[str, tuple[int, int]]:
    rows = session.execute(select(Line.account, Line.amount).where(Line.slot == slot)).all()
    each = _by_account([(account, amount) for account, amount in rows])
    return {account: (len(amounts), amounts.count(1)) for account, amounts in each.items()}


def _lines(kind: Any) -> Callable[[Session, int], dict[str, Any]]:
    def found(session: Session, slot: int) -> dict[str, Any]:
        rows = session.execute(select(kind.account, kind.amount).where(kind.slot == slot)).all()
        return _chains([(account, amount) for account, amount in rows])

    return found


def _seats(session: Session, slot: int) -> tuple[int, int]:
    taken = session.scalars(select(Seat.taken_by).where(Seat.slot == slot, Seat.taken_by.is_not(None))).all()
    return len(taken), len(set(taken))


def _counts(worth: Worth) -> dict[str, int]:
    return {account: len(amounts) for account, amounts in _by_account(worth).items()}


def _chains(worth: Worth) -> dict[str, tuple[int, int]]:
    return {account: (len(amounts), sum(amounts)) for account, amounts in _by_account(worth).items()}


TALLY = Model("tally", _sums, _amounts(Tally))
MADE = Model("made", _sums, _amounts(Made))
MEMBERS = Model("members", lambda worth: {account: 1 for account, _ in worth}, _amounts(Made))
VERSIONED = Model("versioned", _sums, _amounts(Versioned))
TOTAL = Model("total", _sums, _total)
LEDGER = Model("ledger", _chains, _ledger)
BALANCES = Model("balances", _chains, _balances)
NUMBERS = Model("numbers", _counts, _numbers(Entry))
STAMPED = Model("stamped", _counts, _numbers(Stamped))
UNIQUE_NUMBERS = Model("unique numbers", _counts, _numbers(Numbered))
AT_MOST = Model("at most", lambda worth: {account: min(n, PLACES) for account, n in _counts(worth).items()}, _places)
FIRST = Model("first", lambda worth: {account: (n, 1) for account, n in _counts(worth).items()}, _firsts)
LINES = Model("lines", _chains, _lines(Line))
DETAILS = Model("details", _chains, _lines(Detail))
CODED = Model("coded", _sums, _amounts(Coded))
ODD = Model("odd", _sums, _odd)
ITEMS = Model("items", _sums, _items)
INSERTED = (LEDGER, NUMBERS, STAMPED, AT_MOST, FIRST)
"""Read models of which handlers change no row, so that the database never refuses what they write."""
SEATED = Model("seats", lambda worth: (len(worth), len(worth)), _seats)
