"""Handlers that are right in a session of their own, and a rival that commits between their claim and their first read.

Each handler adds an amount to an account. It is right alone at the database's default level, however many run at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine, ForeignKey, Index, String, create_engine, func, insert, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from command_rig import PlaceOrder
from databases import Driver
from http_rig import Reply, Shop, shop_on
from kit import Added
from projector_dedup import Message, Outcome

MINE, RIVALS = 5, 7
"""The amounts that the message and its rival add."""


class Base(DeclarativeBase):
    """The read model."""


class Parent(Base):
    """The row that handlers of one account lock."""

    __tablename__ = "harm_parent"
    account: Mapped[str] = mapped_column(String(20), primary_key=True)


class Entry(Base):
    """A line of an account's ledger. Two lines with the same balance are an update that was lost."""

    __tablename__ = "harm_entry"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    account: Mapped[str] = mapped_column(String(20), index=True)
    balance: Mapped[int]


class Sum(Base):
    """The sum of an account. It is not there before the first message."""

    __tablename__ = "harm_sum"
    account: Mapped[str] = mapped_column(String(20), primary_key=True)
    amount: Mapped[int]


class Child(Base):
    """A row that refers to a parent."""

    __tablename__ = "harm_child"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    account: Mapped[str] = mapped_column(String(20), ForeignKey(Parent.account))


class Offer(Base):
    """A row of which one for each account is active."""

    __tablename__ = "harm_offer"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    account: Mapped[str] = mapped_column(String(20))
    active: Mapped[bool] = mapped_column(default=True)
    amount: Mapped[int] = mapped_column(default=0)
    __table_args__ = (Index("harm_active", "account", unique=True, postgresql_where=text("active")),)


Body = Callable[[Session, str, int], None]


def append(session: Session, account: str, amount: int) -> None:
    """Read the last line of the ledger, and insert the next."""
    last = session.scalars(select(Entry).where(Entry.account == account).order_by(Entry.id.desc()).limit(1)).first()
    session.add(Entry(account=account, balance=(0 if last is None else last.balance) + amount))
    session.flush()


# A lock, then a read --------------------------------------------------------------------------------------------------


def locks_parent(session: Session, account: str, amount: int) -> None:
    """Lock the parent by the ORM."""
    session.get_one(Parent, account, with_for_update=True)
    append(session, account, amount)


def locks_parent_by_text(session: Session, account: str, amount: int) -> None:
    """Lock the parent by SQL text on the connection."""
    session.connection().exec_driver_sql(f"select 1 from harm_parent where account = '{account}' for update")
    append(session, account, amount)


def locks_parent_by_core(session: Session, account: str, amount: int) -> None:
    """Lock the parent by a statement of Core, and read the balance as a column."""
    parents, entries = Base.metadata.tables["harm_parent"], Base.metadata.tables["harm_entry"]
    session.connection().execute(select(parents).where(parents.c.account == account).with_for_update())
    balances = select(entries.c.balance).where(entries.c.account == account).order_by(entries.c.id.desc()).limit(1)
    last = session.connection().execute(balances).scalar() or 0
    session.connection().execute(insert(entries).values(account=account, balance=last + amount))


def locks_and_inserts_from_select(session: Session, account: str, amount: int) -> None:
    """Let the database compute the next line, under the lock of the parent."""
    session.get_one(Parent, account, with_for_update=True)
    balance = func.coalesce(func.max(Entry.balance), 0) + amount
    session.execute(insert(Entry).from_select(["account", "balance"], select(text(f"'{account}'"), balance).where(
        Entry.account == account
    )))  # fmt: skip


def locks_and_inserts_a_subquery(session: Session, account: str, amount: int) -> None:
    """Let the INSERT of a flush compute the next line, under the lock of the parent."""
    session.get_one(Parent, account, with_for_update=True)
    newest = select(func.coalesce(func.max(Entry.balance), 0) + amount).where(Entry.account == account)
    session.add(Entry(account=account, balance=newest.scalar_subquery()))


def locks_and_calls_a_function(session: Session, account: str, amount: int) -> None:
    """Read the balance by a function of the database."""
    session.execute(text("set local lock_timeout = '5s'; lock table harm_parent in exclusive mode"))
    balance = session.scalar(text(f"select harm_balance('{account}')"))
    session.add(Entry(account=account, balance=balance + amount))


FUNCTION = """create function harm_balance(text) returns integer language sql as
    'select coalesce(max(balance), 0) from harm_entry where account = $1'"""


def locks_a_name(session: Session, account: str, amount: int) -> None:
    """Take an advisory lock."""
    session.execute(select(func.pg_advisory_xact_lock(func.hashtext(account))))
    append(session, account, amount)


def locks_the_table(session: Session, account: str, amount: int) -> None:
    """Lock the whole table."""
    session.execute(text("/* all of it */ lock table harm_entry in share row exclusive mode"))
    append(session, account, amount)


def locks_and_updates(session: Session, account: str, amount: int) -> None:
    """Let the database add to every line, under the lock of the parent; insert the first line if there is none."""
    session.get_one(Parent, account, with_for_update=True)
    entries = update(Entry).where(Entry.account == account).values(balance=Entry.balance + amount)
    if not session.execute(entries).rowcount:  # type: ignore[attr-defined]  # an UPDATE has it
        session.execute(insert(Entry).values(account=account, balance=amount))


def locks_by_an_update(session: Session, account: str, amount: int) -> None:
    """Lock the parent by an UPDATE that changes nothing."""
    session.execute(update(Parent).where(Parent.account == account).values(account=account))
    append(session, account, amount)


LOCKING: dict[str, tuple[Body, ...]] = {
    "postgresql": (
        *(locks_parent, locks_parent_by_text, locks_parent_by_core, locks_and_inserts_from_select),
        *(locks_a_name, locks_the_table, locks_and_updates),
    ),
    "mariadb": (
        *(locks_parent, locks_parent_by_text, locks_parent_by_core, locks_and_inserts_from_select),
        locks_by_an_update,
    ),
}


# A unique violation in a savepoint ------------------------------------------------------------------------------------


def _insert(session: Session, account: str, amount: int) -> None:
    with session.begin_nested():
        session.add(Sum(account=account, amount=amount))


def inserts_or_updates(session: Session, account: str, amount: int) -> None:
    """Insert; if the row is there, let the database add."""
    try:
        _insert(session, account, amount)
    except IntegrityError:
        session.execute(update(Sum).where(Sum.account == account).values(amount=Sum.amount + amount))


def inserts_or_updates_by_core(session: Session, account: str, amount: int) -> None:
    """The same by Core, with the values in the statement."""
    sums = Base.metadata.tables["harm_sum"]
    try:
        with session.begin_nested():
            session.execute(insert(sums).values(account=account, amount=amount))
    except IntegrityError:
        session.execute(update(sums).where(Sum.account == account).values(amount=Sum.amount + amount))


def inserts_or_updates_by_text(session: Session, account: str, amount: int) -> None:
    """The same by text, savepoints too."""
    session.execute(text("savepoint mine"))
    try:
        session.execute(text(f"insert into harm_sum (account, amount) values ('{account}', {amount})"))
    except IntegrityError:
        session.execute(text("rollback to savepoint mine"))
        session.execute(text(f"update harm_sum set amount = amount + {amount} where account = '{account}'"))


def inserts_or_gets(session: Session, account: str, amount: int) -> None:
    """Insert; if the row is there, get it."""
    try:
        _insert(session, account, amount)
    except IntegrityError:
        session.get_one(Sum, account).amount += amount


def gets_or_creates_in_a_loop(session: Session, account: str, amount: int) -> None:
    """Get or create, until one of them succeeds."""
    for _ in range(50):
        row = session.get(Sum, account)
        if row is not None:
            row.amount += amount
            return
        with contextlib.suppress(IntegrityError):
            _insert(session, account, amount)
            return
    raise AssertionError("the loop does not end")


UPSERTS: tuple[Body, ...] = (
    *(inserts_or_updates, inserts_or_updates_by_core, inserts_or_updates_by_text),
    *(inserts_or_gets, gets_or_creates_in_a_loop),
)


# A conflict in a savepoint --------------------------------------------------------------------------------------------


def skips_bad_lines(session: Session, account: str, amount: int) -> None:
    """Add a line in a savepoint, and skip the line if the database refuses it."""
    with contextlib.suppress(DBAPIError), session.begin_nested():
        session.execute(update(Sum).where(Sum.account == account).values(amount=Sum.amount + amount))


# A rival --------------------------------------------------------------------------------------------------------------


@dataclass
class Scene:
    """A shop whose handlers are ``body``, and a rival that commits the same for ``account`` when a run ``begins``."""

    shop: Shop
    engine: Engine
    body: Body
    account: str = "a"
    begins: int = 1  #: the run of that account's message in which the rival comes
    runs: int = 0  #: of the message of that account
    before: Callable[[Session], object] = field(default=lambda _session: None)  #: done before the rival comes

    def handle(self, account: str, session: Session) -> None:
        """The handler: let the rival come, then do the work."""
        if account == self.account:
            self.runs += 1
            self.before(session)
            if self.runs == self.begins:
                self.shop.harness.blocking(self.rival)
        self.body(session, account, MINE)

    def rival(self) -> None:
        """Do the same in a session of its own, and commit."""
        with Session(self.engine) as session:
            self.body(session, self.account, RIVALS)
            session.commit()

    # The ways by which a message comes

    def deliver(self, **options: Any) -> None:
        """Deliver one message by itself."""
        handler = self._handler(**options.pop("declared", {}))
        dispatcher = self.shop.harness.dispatcher(handler, **options)
        assert self.shop.harness.deliver(dispatcher, Added((self.account,))).outcome is Outcome.APPLIED

    def deliver_batch(self, *, first: str = "other", repeats: bool = False, **options: Any) -> None:
        """Deliver the message in a batch, behind one of another account that has done the same before.

        With ``repeats``, the first message is a duplicate.
        """
        dispatcher = self.shop.harness.dispatcher(self._handler(), **options)
        second = self.account if first == "other" else "other"
        batch = [Message(f"m{key}", Added((key,))) for key in (first, second)]
        if repeats:
            self.shop.harness.run(dispatcher.deliver_batch, batch[:1])
        found = self.shop.harness.run(dispatcher.deliver_batch, batch)
        outcomes = [Outcome.DUPLICATE if repeats else Outcome.APPLIED, Outcome.APPLIED]
        assert [each.outcome for each in found] == outcomes

    def command(self) -> None:
        """Send a command."""
        desk = self.shop.desk

        def place(order: PlaceOrder, call: Any) -> None:
            self.handle(order.customer, call.session)

        operation = desk.operation(place)
        assert desk.handle(operation, PlaceOrder(customer=self.account)).outcome is Outcome.APPLIED

    def endpoint(self) -> None:
        """Send a request to a recorded endpoint."""

        def view(_asked: Any, session: Session) -> Reply:
            self.handle(self.account, session)
            return Reply(201, {})

        self.shop.records(view)
        assert self.shop.send(path="/things").status_code == 201

    def _handler(self, **declared: Any) -> Any:
        def body(happened: Added, session: Session) -> None:
            self.handle(happened.keys[0], session)

        return self.shop.harness.handler(body, **{"name": "harm", **declared})

    # What came of it

    def store(self, *rows: object) -> None:
        """Store rows before the message comes, or beside it."""
        with Session(self.engine) as session:
            session.add_all(rows)
            session.commit()

    def read(self, statement: Any) -> Any:
        """Return a value that is committed."""
        with Session(self.engine) as session:
            return session.scalar(statement)

    def balance(self, account: str | None = None) -> int:
        """Return the sum of an account by its last line, or by its row."""
        account = account or self.account
        with Session(self.engine) as session:
            last = select(Entry.balance).where(Entry.account == account).order_by(Entry.id.desc()).limit(1)
            return int(session.scalar(last) or session.scalar(select(Sum.amount).where(Sum.account == account)) or 0)


@contextlib.contextmanager
def scene_on(request: pytest.FixtureRequest, driver: Driver, body: Body, **arguments: Any) -> Iterator[Scene]:
    """Return a scene on an empty database of the driver's."""
    subject: dict[str, Any] = {
        name: arguments.pop(name) for name in ("dispatcher_isolation", "engine_isolation") if name in arguments
    }
    with shop_on(request, driver, **subject) as shop:
        url = request.getfixturevalue(driver.engine).url()
        engine = create_engine(url, **({"isolation_level": level} if (level := _level(subject)) else {}))
        try:
            shop.harness.create_tables()
            Base.metadata.create_all(engine)
            with Session(engine) as session:
                session.add_all([Parent(account="a"), Parent(account="other")])
                session.commit()
            yield Scene(shop, engine, body, **arguments)
        finally:
            engine.dispose()


def _level(subject: dict[str, Any]) -> str | None:
    return next(iter(subject.values()), None)


Play = Callable[..., contextlib.AbstractContextManager[Scene]]


@pytest.fixture(name="play")
def play_fixture(request: pytest.FixtureRequest, driver: Driver) -> Play:
    """What makes a scene on the driver of the test, of a handler and the arguments of ``scene_on``."""
    return partial(scene_on, request, driver)
