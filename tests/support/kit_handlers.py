"""Projectors for the tests of `exactly_once`: the read model, the messages, mistakes that it must find, and right ones.

Each mistake and each right projector is a `Case`. A mistake says in its docstring what is wrong.
"""

import asyncio
import contextlib
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from sqlalchemy import String, delete, func, insert, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from projector_dedup import Defer, Message, on, projector
from projector_dedup.testing.exactly_once import ProjectorCheck


class Base(DeclarativeBase):
    """The user's metadata."""


class Totals(Base):
    """The read model: a sum, and the last payment, for each account."""

    __tablename__ = "kit_totals"
    account: Mapped[str] = mapped_column(String(20), primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)
    last: Mapped[int] = mapped_column(default=0)


class Entry(Base):
    """A line of an account's statement."""

    __tablename__ = "kit_entry"
    id: Mapped[int] = mapped_column(primary_key=True)
    account: Mapped[str] = mapped_column(String(20))
    amount: Mapped[int]


@dataclass(frozen=True)
class Paid:
    """A payment into an account."""

    message_id: str
    account: str
    amount: int


PAYMENTS = [Paid(f"p-{number}", "aab"[number % 3], 1 + number) for number in range(6)]


def sums(messages: Sequence[Paid]) -> dict[str, int]:
    """The sum of each account, computed from the messages."""
    found: dict[str, int] = {}
    for paid in messages:
        found[paid.account] = found.get(paid.account, 0) + paid.amount
    return found


def lasts(messages: Sequence[Paid]) -> dict[str, int]:
    """The last payment of each account, computed from the messages."""
    return {paid.account: paid.amount for paid in messages}


def read_sums(session: Session) -> dict[str, int]:
    """The sums of the read model."""
    return {each.account: each.amount for each in session.scalars(select(Totals))}


def read_lasts(session: Session) -> dict[str, int]:
    """The last payments of the read model."""
    return {each.account: each.last for each in session.scalars(select(Totals))}


def read_entries(session: Session) -> dict[str, int]:
    """The sums of the statement lines."""
    found = session.execute(select(Entry.account, func.sum(Entry.amount)).group_by(Entry.account))
    return {account: int(amount) for account, amount in found}


def read_balances(session: Session) -> dict[str, int]:
    """The balances by the last statement line of each account."""
    return {each.account: each.amount for each in session.scalars(select(Entry).order_by(Entry.id))}


def append(paid: Paid, session: Session) -> None:
    """Read the balance in the last statement line, and insert the next line."""
    last = select(Entry.amount).where(Entry.account == paid.account).order_by(Entry.id.desc()).limit(1)
    session.execute(insert(Entry).values(account=paid.account, amount=(session.scalar(last) or 0) + paid.amount))


def lock(paid: Paid, session: Session) -> None:
    """Lock the name of the account."""
    session.execute(select(func.pg_advisory_xact_lock(func.hashtext(paid.account))))


def add_in_database(paid: Paid, session: Session) -> None:
    """Let the database add to the row."""
    session.execute(update(Totals).where(Totals.account == paid.account).values(amount=Totals.amount + paid.amount))


def check_of(made: Any, messages: Sequence[Any] = (), **settings: Any) -> ProjectorCheck:
    """Return the check of a projector, by default with all payments and the sums of the read model."""
    usual = {"expected": sums, "read": read_sums, "metadata": Base.metadata}
    return ProjectorCheck(made, messages or PAYMENTS, **{**usual, **settings})


def add(paid: Paid, session: Session) -> None:
    """Ordinary ORM code: read the row, create it if missing, add."""
    row = session.get(Totals, paid.account)
    if row is None:
        row = Totals(account=paid.account, amount=0, last=0)
        session.add(row)
    row.amount += paid.amount


@dataclass(frozen=True)
class Case:
    """One projector, and how it is checked."""

    name: str
    make: Callable[[], Any]
    expected: Callable[[Sequence[Any]], Any] = sums
    read: Callable[[Session], Any] = read_sums
    options: dict[str, Any] = field(default_factory=dict)
    server: bool = False  #: True if it shows only on a server whose writers do not take turns
    engine: dict[str, Any] = field(default_factory=dict)  #: arguments of create_engine

    def __str__(self) -> str:
        return self.name


MISTAKES: list[Case] = []
RIGHT: list[Case] = []


def case(
    into: list[Case],
    *,
    idempotent: bool = True,
    read_models: Sequence[type] = (),
    batch: bool = False,
    envelope: bool = False,
    **arguments: Any,
) -> Callable[[Any], Any]:
    """Register a handler of payments, or a class of handlers, as a case under its name."""

    def register(given: Any) -> Any:
        declared: Any = projector(idempotent=idempotent, name=given.__name__, read_models=read_models)
        is_class = isinstance(given, type)
        made = declared(given if is_class else on(Paid, batch=batch, envelope=envelope)(given))
        into.append(Case(given.__name__, made if is_class else partial(_same, made), **arguments))
        return made

    return register


def _same(handler: Any) -> Any:
    """Return the handler: a function keeps nothing, so each worker may have the same one."""
    return handler


mistake, right = partial(case, MISTAKES), partial(case, RIGHT)


# Mistakes -------------------------------------------------------------------------------------------------------------


@mistake(idempotent=False)
def naive(paid: Paid, session: Session) -> None:
    """It counts without idempotent=True: a redelivery counts twice."""
    add(paid, session)


@mistake()
def commits(paid: Paid, session: Session) -> None:
    """It commits by itself."""
    add(paid, session)
    session.commit()


@mistake()
def rolls_back(paid: Paid, session: Session) -> None:
    """It rolls the session back after its write."""
    add(paid, session)
    session.rollback()


@mistake()
def closes(paid: Paid, session: Session) -> None:
    """It closes the session that belongs to the library."""
    add(paid, session)
    session.close()


@mistake(options={"message_id": lambda _: str(uuid.uuid4())})
def new_id(paid: Paid, session: Session) -> None:
    """The id is made anew at each delivery, so each redelivery is a new message."""
    add(paid, session)


@mistake(options={"message_id": lambda paid: paid.account})
def coarse_id(paid: Paid, session: Session) -> None:
    """The id is that of the account, so the second payment into it counts as a duplicate."""
    add(paid, session)


@mistake(options={"message_id": lambda paid: str(hash(paid.message_id))})
def hash_id(paid: Paid, session: Session) -> None:
    """The id is made by hash(), which has another seed in another process."""
    add(paid, session)


@mistake()
class KeepsSums:
    """It keeps the sums in the projector, where a rollback does not undo them."""

    def __init__(self) -> None:
        self.sums: dict[str, int] = {}

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        self.sums[paid.account] = self.sums.get(paid.account, 0) + paid.amount
        session.merge(Totals(account=paid.account, amount=self.sums[paid.account], last=0))


@mistake(idempotent=False)
class RemembersIds:
    """It remembers in memory which messages it has seen, before their transaction has committed."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        if paid.message_id not in self.seen:
            self.seen.add(paid.message_id)
            add(paid, session)


@mistake(expected=lasts, read=read_lasts)
def order_assumed(paid: Paid, session: Session) -> None:
    """It keeps the payment that comes last, and the broker does not keep the order."""
    session.merge(Totals(account=paid.account, amount=0, last=paid.amount))


@mistake()
def row_assumed(paid: Paid, session: Session) -> None:
    """It updates a row that the first payment creates, and ignores that the row may be missing."""
    if paid in PAYMENTS[:1] + PAYMENTS[2:3]:
        session.add(Totals(account=paid.account, amount=paid.amount, last=0))
    else:
        raised = {"amount": Totals.amount + paid.amount}
        session.execute(update(Totals).where(Totals.account == paid.account).values(raised))


@mistake()
def row_demanded(paid: Paid, session: Session) -> None:
    """It raises until the first payment has created the row: consumers make dead letters of the payments before it."""
    if paid in PAYMENTS[:1] + PAYMENTS[2:3]:
        session.add(Totals(account=paid.account, amount=paid.amount, last=0))
    else:
        session.get_one(Totals, paid.account).amount += paid.amount


@mistake()
async def row_demanded_async(paid: Paid, session: AsyncSession) -> None:
    """The same, under asyncio."""
    await session.run_sync(partial(row_demanded, paid))


@mistake()
def swallows_database_errors(paid: Paid, session: Session) -> None:
    """It logs a database error and goes on: the message counts as applied, without its write."""
    try:
        add(paid, session)
        session.flush()
    except SQLAlchemyError:
        session.expunge_all()


@mistake()
def looks_elsewhere_and_swallows(paid: Paid, session: Session) -> None:
    """The same, after it has read by a connection of its own."""
    with session.get_bind().engine.connect() as another:
        another.execute(select(func.count()).select_from(Entry))
    swallows_database_errors(paid, session)


@mistake()
def swallows_everything(paid: Paid, session: Session) -> None:
    """It catches every error of its statement."""
    try:
        changed = update(Totals).where(Totals.account == paid.account)
        if not session.execute(changed.values(amount=Totals.amount + paid.amount)).rowcount:  # type: ignore[attr-defined]
            session.execute(insert(Totals).values(account=paid.account, amount=paid.amount, last=0))
    except Exception:  # noqa: BLE001  # the mistake
        return


@mistake()
def second_session(paid: Paid, session: Session) -> None:
    """It writes by a session of its own, which commits although the message may roll back."""
    with Session(session.get_bind().engine) as own, own.begin():
        add(paid, own)


@mistake(engine={"isolation_level": "AUTOCOMMIT"})
def autocommit(paid: Paid, session: Session) -> None:
    """Its engine commits each statement at once."""
    add(paid, session)


FILE = Path(tempfile.gettempdir()) / f"projector-dedup-kit-{uuid.uuid4().hex}.txt"


def _read_file(_session: Session) -> dict[str, int]:
    lines = FILE.read_text().split() if FILE.exists() else []
    return sums([Paid("", line.split(":")[0], int(line.split(":")[1])) for line in lines])


def remove_file() -> None:
    """Remove the file that a mistake has written."""
    FILE.unlink(missing_ok=True)


@mistake(read=_read_file, options={"reset": remove_file})
def writes_a_file(paid: Paid, session: Session) -> None:
    """It appends to a file, which a rollback does not undo."""
    add(paid, session)
    with FILE.open("a") as file:
        file.write(f"{paid.account}:{paid.amount}\n")


@mistake(options={"reset": lambda: CountsInTheClass.sums.clear()})  # noqa: PLW0108  # the class comes below
class CountsInTheClass:
    """It counts in a variable of the class."""

    sums: ClassVar[dict[str, int]] = {}

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        self.sums[paid.account] = self.sums.get(paid.account, 0) + paid.amount
        session.merge(Totals(account=paid.account, amount=self.sums[paid.account], last=0))


@mistake(batch=True)
def last_of_the_batch(batch: list[Paid], session: Session) -> None:
    """It takes a whole batch, and applies the last event of each batch only."""
    add(batch[-1], session)


@mistake(idempotent=False)
def skips_alike(paid: Paid, session: Session) -> None:
    """It compares the amount with that of the last payment to recognise a redelivery."""
    row = session.get(Totals, paid.account)
    if row is None or row.last != paid.amount:
        add(paid, session)
        session.get_one(Totals, paid.account).last = paid.amount


@mistake(options={"ordered": True})
def always_fails(paid: Paid, session: Session) -> None:
    """It fails at each delivery of the first message, so that the others wait."""
    session.get_one(Totals, "c")
    add(paid, session)


@mistake()
async def forgets_await(paid: Paid, session: AsyncSession) -> None:
    """It does not await its statement, so that nothing is written."""
    session.run_sync(partial(add, paid))  # type: ignore[unused-coroutine]


@mistake(idempotent=False)
async def naive_async(paid: Paid, session: AsyncSession) -> None:
    """It counts without idempotent=True, under asyncio."""
    await session.run_sync(partial(add, paid))


@mistake()
async def commits_async(paid: Paid, session: AsyncSession) -> None:
    """It commits by itself, under asyncio."""
    await session.run_sync(partial(add, paid))
    await session.commit()


@mistake(expected=lambda messages: {"all": sum(paid.amount for paid in messages)})
class KeepsANumber:
    """It keeps one sum in the projector, which a rollback does not undo and a new worker begins anew."""

    def __init__(self) -> None:
        self.sum = 0

    @on(Paid)
    async def apply(self, paid: Paid, session: AsyncSession) -> None:
        self.sum += paid.amount
        await session.merge(Totals(account="all", amount=self.sum, last=0))


@mistake(server=True, options={"isolation": "READ COMMITTED"})
def lost_update(paid: Paid, session: Session) -> None:
    """It reads, then writes a literal, at READ COMMITTED: two messages lose an update."""
    where = Totals.account == paid.account
    amount = session.scalar(select(Totals.amount).where(where))
    if amount is None:
        session.execute(insert(Totals).values(account=paid.account, amount=paid.amount, last=0))
    else:
        session.execute(
            text("UPDATE kit_totals SET amount = :amount WHERE account = :account").bindparams(
                amount=amount + paid.amount, account=paid.account
            )
        )


@mistake(server=True, options={"isolation": "READ COMMITTED"})
def orm_lost_update(paid: Paid, session: Session) -> None:
    """It adds to an attribute at READ COMMITTED, without read_models."""
    add(paid, session)


@mistake(server=True, options={"isolation": "READ COMMITTED"})
async def async_lost_update(paid: Paid, session: AsyncSession) -> None:
    """It adds to an attribute at READ COMMITTED, without read_models, under asyncio."""
    await session.run_sync(partial(add, paid))


@mistake(batch=True, server=True, options={"isolation": "READ COMMITTED"})
def locks_only_one(batch: list[Paid], session: Session) -> None:
    """It locks the row for one payment, but not the rows for a batch: a batch beside it loses an update."""
    if len(batch) == 1:
        session.get(Totals, batch[0].account, with_for_update=True)
    for paid in batch:
        lost_update(paid, session)


@mistake(server=True, read=read_balances)
def unlocked_ledger(paid: Paid, session: Session) -> None:
    """It reads the last line and inserts the next, without a lock: no row conflicts."""
    append(paid, session)


@mistake(server=True, read=read_balances)
def locks_too_late(paid: Paid, session: Session) -> None:
    """It locks the account after it has read the last line."""
    last = select(Entry.amount).where(Entry.account == paid.account).order_by(Entry.id.desc()).limit(1)
    balance = session.scalar(last) or 0
    lock(paid, session)
    session.execute(insert(Entry).values(account=paid.account, amount=balance + paid.amount))


@mistake(server=True, read=read_balances)
def locks_another(paid: Paid, session: Session) -> None:
    """It locks a name of its own, which no other message locks."""
    session.execute(select(func.pg_advisory_xact_lock(func.hashtext(paid.message_id))))
    append(paid, session)


@mistake(server=True, read=read_balances, options={"isolation": "REPEATABLE READ"})
def locks_at_repeatable_read(paid: Paid, session: Session) -> None:
    """It locks and then reads at REPEATABLE READ, which it has chosen: its snapshot is older than its lock."""
    lock(paid, session)
    append(paid, session)


@mistake(server=True, read=read_balances)
def locks_below(paid: Paid, session: Session) -> None:
    """It locks on the driver's own connection, where the library does not see that its snapshot is older."""
    driver: Any = session.connection().connection.driver_connection
    driver.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [paid.account])
    append(paid, session)


@mistake(server=True)
def inserts_without_a_savepoint(paid: Paid, session: Session) -> None:
    """It catches the unique violation of an INSERT that is in no savepoint: the transaction is aborted."""
    with contextlib.suppress(IntegrityError):
        session.execute(insert(Totals).values(account=paid.account, amount=0, last=0))
    add_in_database(paid, session)


@mistake()
def skips_on_any_error(paid: Paid, session: Session) -> None:
    """It skips a payment if its savepoint fails, whatever the reason is."""
    with contextlib.suppress(DBAPIError), session.begin_nested():
        add(paid, session)


# Right ones -----------------------------------------------------------------------------------------------------------


@right()
def right_sums(paid: Paid, session: Session) -> None:
    """It counts with idempotent=True."""
    add(paid, session)


@right()
def flushes(paid: Paid, session: Session) -> None:
    """It flushes by itself, which is allowed."""
    add(paid, session)
    session.flush()


@right()
def atomic(paid: Paid, session: Session) -> None:
    """It adds by one statement, and inserts the row if it is missing."""
    changed = update(Totals).where(Totals.account == paid.account)
    if not session.execute(changed.values(amount=Totals.amount + paid.amount)).rowcount:  # type: ignore[attr-defined]
        session.execute(insert(Totals).values(account=paid.account, amount=paid.amount, last=0))


@right(read=read_entries)
def entries(paid: Paid, session: Session) -> None:
    """It inserts a line for each message."""
    session.add(Entry(account=paid.account, amount=paid.amount))


@right(expected=lasts, read=read_lasts, options={"ordered": lambda paid: paid.account})
def last_by_key(paid: Paid, session: Session) -> None:
    """It keeps the last payment, from a broker that keeps the order of each account."""
    session.merge(Totals(account=paid.account, amount=0, last=paid.amount))


@right(expected=lasts, read=read_lasts, options={"ordered": True})
def last_in_order(paid: Paid, session: Session) -> None:
    """It keeps the last payment, from a broker that keeps the order of all messages."""
    session.merge(Totals(account=paid.account, amount=0, last=paid.amount))


@right(idempotent=False, expected=lasts, read=read_lasts, options={"ordered": lambda paid: paid.account})
def sets(paid: Paid, session: Session) -> None:
    """It sets a value, and needs no idempotent=True where the order is kept."""
    session.merge(Totals(account=paid.account, amount=0, last=paid.amount))


def _highest(messages: Sequence[Paid]) -> dict[str, int]:
    return {each.account: max(other.amount for other in messages if other.account == each.account) for each in messages}


@right(expected=_highest, read=read_lasts)
def highest(paid: Paid, session: Session) -> None:
    """It keeps the highest payment, in any order."""
    row = session.get(Totals, paid.account)
    if row is None:
        session.add(Totals(account=paid.account, amount=0, last=paid.amount))
    else:
        row.last = max(row.last, paid.amount)


@right()
def defers(paid: Paid, session: Session) -> None:
    """It waits, by Defer, for the payment that creates the row."""
    row = session.get(Totals, paid.account)
    if row is not None:
        row.amount += paid.amount
    elif paid in PAYMENTS[:1] + PAYMENTS[2:3]:
        session.add(Totals(account=paid.account, amount=paid.amount, last=0))
    else:
        raise Defer("no account yet")


@right(options={"ordered": lambda paid: paid.account})
def defers_by_key(paid: Paid, session: Session) -> None:
    """It waits, by Defer, for another account, from a broker that keeps the order of each account."""
    if paid.account == "a" and session.get(Totals, "b") is None:
        raise Defer("no account b yet")
    add(paid, session)


@right()
def savepoint(paid: Paid, session: Session) -> None:
    """It tries an INSERT in a savepoint, and catches the error that means that the row is there."""
    try:
        with session.begin_nested():
            session.execute(insert(Totals).values(account=paid.account, amount=0, last=0))
    except IntegrityError:
        pass
    session.execute(update(Totals).where(Totals.account == paid.account).values(amount=Totals.amount + paid.amount))


@right(batch=True)
def whole_batch(batch: list[Paid], session: Session) -> None:
    """It takes a whole batch, and applies all of it."""
    for paid in batch:
        add(paid, session)


@right()
class Caches:
    """It caches in the projector what never changes."""

    def __init__(self) -> None:
        self.upper: dict[str, str] = {}

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        self.upper[paid.account] = paid.account.upper()
        add(paid, session)


@right(options={"message_id": lambda paid: f"payment:{paid.message_id}"})
def extractor(paid: Paid, session: Session) -> None:
    """It has its id from an extractor."""
    add(paid, session)


@right(envelope=True)
def takes_the_envelope(message: Message, session: Session) -> None:
    """It takes the envelope."""
    add(message.body, session)


@right(expected=lambda messages: {account: 2 * amount for account, amount in sums(messages).items()})
class TwoHandlers:
    """It has two handlers, each of which counts."""

    @on(Paid)
    def one(self, paid: Paid, session: Session) -> None:
        add(paid, session)

    @on(Paid)
    def two(self, paid: Paid, session: Session) -> None:
        add(paid, session)


@right()
def derived(paid: Paid, session: Session) -> None:
    """It computes the sums from the entries that it has written."""
    session.add(Entry(account=paid.account, amount=paid.amount))
    session.flush()
    amount = session.scalar(select(func.sum(Entry.amount)).where(Entry.account == paid.account))
    session.execute(delete(Totals).where(Totals.account == paid.account))
    session.execute(insert(Totals).values(account=paid.account, amount=amount, last=0))


@right()
async def sums_async(paid: Paid, session: AsyncSession) -> None:
    """It counts, under asyncio."""
    await session.run_sync(partial(add, paid))


@right(read=read_entries)
async def entries_async(paid: Paid, session: AsyncSession) -> None:
    """It waits for something else, and inserts a line, under asyncio."""
    await asyncio.sleep(0)
    session.add(Entry(account=paid.account, amount=paid.amount))


@right(read_models=[Totals], server=True, options={"isolation": "READ COMMITTED"})
def under_lock(paid: Paid, session: Session) -> None:
    """It adds to an attribute at READ COMMITTED, under lock."""
    add(paid, session)


@right(batch=True, server=True, options={"isolation": "READ COMMITTED"})
def locks_the_batch(batch: list[Paid], session: Session) -> None:
    """It locks the rows of a batch, in the order of their names."""
    for account in sorted({paid.account for paid in batch}):
        session.get(Totals, account, with_for_update=True)
    for paid in batch:
        lost_update(paid, session)


@right(server=True)
def default_isolation(paid: Paid, session: Session) -> None:
    """It reads, then writes a literal, at the default isolation level of the library."""
    lost_update(paid, session)


@right(server=True)
def inserts_or_updates(paid: Paid, session: Session) -> None:
    """It inserts in a savepoint, and updates if the row is there."""
    try:
        with session.begin_nested():
            session.add(Totals(account=paid.account, amount=paid.amount, last=0))
    except IntegrityError:
        add_in_database(paid, session)


@right(server=True, read=read_balances)
def locked_ledger(paid: Paid, session: Session) -> None:
    """It locks the name of the account, reads the last line and inserts the next."""
    lock(paid, session)
    append(paid, session)


@right(server=True, read=read_balances, options={"isolation": "READ COMMITTED"})
def ledger_below(paid: Paid, session: Session) -> None:
    """It locks on the driver's own connection, and declares the level at which that protects its reads."""
    locks_below(paid, session)


@right(server=True, read=read_balances)
def ledger_of_a_row(paid: Paid, session: Session) -> None:
    """It creates the row of the account in a savepoint, locks it, reads the last line and inserts the next."""
    with contextlib.suppress(IntegrityError), session.begin_nested():
        session.execute(insert(Totals).values(account=paid.account, amount=0, last=0))
    session.get_one(Totals, paid.account, with_for_update=True)
    append(paid, session)


@right(server=True, read=read_entries)
def skips_bad_lines(paid: Paid, session: Session) -> None:
    """It adds each line in a savepoint, and skips the lines that break a constraint."""
    for account in (None, paid.account):  # the database refuses the first
        with contextlib.suppress(IntegrityError), session.begin_nested():
            session.execute(insert(Entry).values(account=account, amount=paid.amount))
