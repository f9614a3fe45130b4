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

    make: Callable[[], Any]
    expected: Callable[[Sequence[Any]], Any] = sums
    read: Callable[[Session], Any] = read_sums
    options: dict[str, Any] = field(default_factory=dict)
    server: bool = False  #: True if it shows only on a server whose writers do not take turns
    engine: dict[str, Any] = field(default_factory=dict)  #: arguments of create_engine

    def __str__(self) -> str:
        return str(getattr(self.make, "__name__", self.make))


MISTAKES: list[Case] = []
RIGHT: list[Case] = []


def case(into: list[Case], **arguments: Any) -> Callable[[Any], Any]:
    """Register a projector as a case, under the name of its class."""

    def register(cls: Any) -> Any:
        into.append(Case(cls, **arguments))
        return cls

    return register


mistake, right = partial(case, MISTAKES), partial(case, RIGHT)
once = partial(projector, idempotent=True)


# Mistakes -------------------------------------------------------------------------------------------------------------


@mistake()
@projector(name="naive")
class Naive:
    """It counts without idempotent=True: a redelivery counts twice."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        add(paid, session)


@mistake()
@once(name="commits")
class Commits:
    """It commits by itself."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        add(paid, session)
        session.commit()


@mistake()
@once(name="rolls-back")
class RollsBack:
    """It rolls the session back after its write."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        add(paid, session)
        session.rollback()


@mistake()
@once(name="closes")
class Closes:
    """It closes the session that belongs to the library."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        add(paid, session)
        session.close()


@mistake(options={"message_id": lambda _: str(uuid.uuid4())})
@once(name="new-id")
class NewId:
    """The id is made anew at each delivery, so each redelivery is a new message."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        add(paid, session)


@mistake(options={"message_id": lambda paid: paid.account})
@once(name="coarse-id")
class CoarseId:
    """The id is that of the account, so the second payment into it counts as a duplicate."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        add(paid, session)


@mistake(options={"message_id": lambda paid: str(hash(paid.message_id))})
@once(name="hash-id")
class HashId:
    """The id is made by hash(), which has another seed in another process."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        add(paid, session)


@mistake()
@once(name="keeps-sums")
class KeepsSums:
    """It keeps the sums in the projector, where a rollback does not undo them."""

    def __init__(self) -> None:
        self.sums: dict[str, int] = {}

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        self.sums[paid.account] = self.sums.get(paid.account, 0) + paid.amount
        session.merge(Totals(account=paid.account, amount=self.sums[paid.account], last=0))


@mistake()
@projector(name="remembers-ids")
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
@once(name="order-assumed")
class OrderAssumed:
    """It keeps the payment that comes last, and the broker does not keep the order."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        session.merge(Totals(account=paid.account, amount=0, last=paid.amount))


@mistake()
@once(name="row-assumed")
class RowAssumed:
    """It updates a row that the first payment creates, and ignores that the row may be missing."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        if paid in PAYMENTS[:1] + PAYMENTS[2:3]:
            session.add(Totals(account=paid.account, amount=paid.amount, last=0))
        else:
            raised = {"amount": Totals.amount + paid.amount}
            session.execute(update(Totals).where(Totals.account == paid.account).values(raised))


@mistake()
@once(name="row-demanded")
class RowDemanded:
    """It raises until the first payment has created the row: consumers make dead letters of the payments before it."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        if paid in PAYMENTS[:1] + PAYMENTS[2:3]:
            session.add(Totals(account=paid.account, amount=paid.amount, last=0))
        else:
            session.get_one(Totals, paid.account).amount += paid.amount


@mistake()
@once(name="row-demanded-async")
class RowDemandedAsync:
    """The same, under asyncio."""

    @on(Paid)
    async def apply(self, paid: Paid, session: AsyncSession) -> None:
        await session.run_sync(lambda inner: RowDemanded.apply(self, paid, inner))  # type: ignore[arg-type]


@mistake()
@once(name="swallows-database-errors")
class SwallowsDatabaseErrors:
    """It logs a database error and goes on: the message counts as applied, without its write."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        try:
            add(paid, session)
            session.flush()
        except SQLAlchemyError:
            session.expunge_all()


@mistake()
@once(name="looks-elsewhere-and-swallows")
class LooksElsewhereAndSwallows:
    """The same, after it has read by a connection of its own."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        with session.get_bind().engine.connect() as another:
            another.execute(select(func.count()).select_from(Entry))
        try:
            add(paid, session)
            session.flush()
        except SQLAlchemyError:
            session.expunge_all()


@mistake()
@once(name="swallows-everything")
class SwallowsEverything:
    """It catches every error of its statement."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        try:
            changed = update(Totals).where(Totals.account == paid.account)
            if not session.execute(changed.values(amount=Totals.amount + paid.amount)).rowcount:  # type: ignore[attr-defined]
                session.execute(insert(Totals).values(account=paid.account, amount=paid.amount, last=0))
        except Exception:  # noqa: BLE001  # the mistake
            return


@mistake()
@once(name="second-session")
class SecondSession:
    """It writes by a session of its own, which commits although the message may roll back."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        with Session(session.get_bind().engine) as own, own.begin():
            add(paid, own)


@mistake(engine={"isolation_level": "AUTOCOMMIT"})
@once(name="autocommit")
class Autocommit:
    """Its engine commits each statement at once."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        add(paid, session)


FILE = Path(tempfile.gettempdir()) / f"projector-dedup-kit-{uuid.uuid4().hex}.txt"


def _read_file(_session: Session) -> dict[str, int]:
    lines = FILE.read_text().split() if FILE.exists() else []
    return sums([Paid("", line.split(":")[0], int(line.split(":")[1])) for line in lines])


def remove_file() -> None:
    """Remove the file that a mistake has written."""
    FILE.unlink(missing_ok=True)


@mistake(read=_read_file, options={"reset": remove_file})
@once(name="writes-a-file")
class WritesAFile:
    """It appends to a file, which a rollback does not undo."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        add(paid, session)
        with FILE.open("a") as file:
            file.write(f"{paid.account}:{paid.amount}\n")


@mistake(options={"reset": lambda: CountsInTheClass.sums.clear()})  # noqa: PLW0108  # the class comes below
@once(name="counts-in-the-class")
class CountsInTheClass:
    """It counts in a variable of the class."""

    sums: ClassVar[dict[str, int]] = {}

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        self.sums[paid.account] = self.sums.get(paid.account, 0) + paid.amount
        session.merge(Totals(account=paid.account, amount=self.sums[paid.account], last=0))


@mistake()
@once(name="last-of-the-batch")
class LastOfTheBatch:
    """It takes a whole batch, and applies the last event of each batch only."""

    @on(Paid, batch=True)
    def apply(self, batch: list[Paid], session: Session) -> None:
        add(batch[-1], session)


@mistake()
@projector(name="skips-alike")
class SkipsAlike:
    """It compares the amount with that of the last payment to recognise a redelivery."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        row = session.get(Totals, paid.account)
        if row is None or row.last != paid.amount:
            add(paid, session)
            session.get_one(Totals, paid.account).last = paid.amount


@mistake(options={"ordered": True})
@once(name="always-fails")
class AlwaysFails:
    """It fails at each delivery of the first message, so that the others wait."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        session.get_one(Totals, "c")
        add(paid, session)


@mistake()
@once(name="forgets-await")
class ForgetsAwait:
    """It does not await its statement, so that nothing is written."""

    @on(Paid)
    async def apply(self, paid: Paid, session: AsyncSession) -> None:
        session.run_sync(partial(add, paid))  # type: ignore[unused-coroutine]


@mistake()
@projector(name="naive-async")
class NaiveAsync:
    """It counts without idempotent=True, under asyncio."""

    @on(Paid)
    async def apply(self, paid: Paid, session: AsyncSession) -> None:
        await session.run_sync(lambda inner: add(paid, inner))


@mistake()
@once(name="commits-async")
class CommitsAsync:
    """It commits by itself, under asyncio."""

    @on(Paid)
    async def apply(self, paid: Paid, session: AsyncSession) -> None:
        await session.run_sync(lambda inner: add(paid, inner))
        await session.commit()


@mistake(expected=lambda messages: {"all": sum(paid.amount for paid in messages)})
@once(name="keeps-a-number")
class KeepsANumber:
    """It keeps one sum in the projector, which a rollback does not undo and a new worker begins anew."""

    def __init__(self) -> None:
        self.sum = 0

    @on(Paid)
    async def apply(self, paid: Paid, session: AsyncSession) -> None:
        self.sum += paid.amount
        await session.merge(Totals(account="all", amount=self.sum, last=0))


@mistake(server=True, options={"isolation": "READ COMMITTED"})
@once(name="lost-update")
class LostUpdate:
    """It reads, then writes a literal, at READ COMMITTED: two messages lose an update."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
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
@once(name="orm-lost-update")
class OrmLostUpdate:
    """It adds to an attribute at READ COMMITTED, without read_models."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        add(paid, session)


@mistake(server=True, options={"isolation": "READ COMMITTED"})
@once(name="async-lost-update")
class AsyncLostUpdate:
    """It adds to an attribute at READ COMMITTED, without read_models, under asyncio."""

    @on(Paid)
    async def apply(self, paid: Paid, session: AsyncSession) -> None:
        await session.run_sync(lambda inner: add(paid, inner))


@mistake(server=True, options={"isolation": "READ COMMITTED"})
@once(name="locks-only-one")
class LocksOnlyOne:
    """It locks the row for one payment, but not the rows for a batch: a batch beside it loses an update."""

    @on(Paid, batch=True)
    def apply(self, batch: list[Paid], session: Session) -> None:
        if len(batch) == 1:
            session.get(Totals, batch[0].account, with_for_update=True)
        for paid in batch:
            LostUpdate.apply(self, paid, session)  # type: ignore[arg-type]


@mistake(server=True, read=read_balances)
@once(name="unlocked-ledger")
class UnlockedLedger:
    """It reads the last line and inserts the next, without a lock: no row conflicts."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        append(paid, session)


@mistake(server=True, read=read_balances)
@once(name="locks-too-late")
class LocksTooLate:
    """It locks the account after it has read the last line."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        last = select(Entry.amount).where(Entry.account == paid.account).order_by(Entry.id.desc()).limit(1)
        balance = session.scalar(last) or 0
        lock(paid, session)
        session.execute(insert(Entry).values(account=paid.account, amount=balance + paid.amount))


@mistake(server=True, read=read_balances)
@once(name="locks-another")
class LocksAnother:
    """It locks a name of its own, which no other message locks."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        session.execute(select(func.pg_advisory_xact_lock(func.hashtext(paid.message_id))))
        append(paid, session)


@mistake(server=True, read=read_balances, options={"isolation": "REPEATABLE READ"})
@once(name="locks-at-repeatable-read")
class LocksAtRepeatableRead:
    """It locks and then reads at REPEATABLE READ, which it has chosen: its snapshot is older than its lock."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        lock(paid, session)
        append(paid, session)


@mistake(server=True, read=read_balances)
@once(name="locks-below")
class LocksBelow:
    """It locks on the driver's own connection, where the library does not see that its snapshot is older."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        driver: Any = session.connection().connection.driver_connection
        driver.execute("SELECT pg_advisory_xact_lock(hashtext(%s))", [paid.account])
        append(paid, session)


@mistake(server=True)
@once(name="inserts-without-a-savepoint")
class InsertsWithoutASavepoint:
    """It catches the unique violation of an INSERT that is in no savepoint: the transaction is aborted."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        with contextlib.suppress(IntegrityError):
            session.execute(insert(Totals).values(account=paid.account, amount=0, last=0))
        add_in_database(paid, session)


@mistake()
@once(name="skips-on-any-error")
class SkipsOnAnyError:
    """It skips a payment if its savepoint fails, whatever the reason is."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        with contextlib.suppress(DBAPIError), session.begin_nested():
            add(paid, session)


# Right ones -----------------------------------------------------------------------------------------------------------


@right()
@once(name="right-sums")
class Sums:
    """It counts with idempotent=True."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        add(paid, session)


@right()
@once(name="right-flushes")
class Flushes:
    """It flushes by itself, which is allowed."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        add(paid, session)
        session.flush()


@right()
@once(name="right-sql")
class Atomic:
    """It adds by one statement, and inserts the row if it is missing."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        changed = update(Totals).where(Totals.account == paid.account)
        if not session.execute(changed.values(amount=Totals.amount + paid.amount)).rowcount:  # type: ignore[attr-defined]
            session.execute(insert(Totals).values(account=paid.account, amount=paid.amount, last=0))


@right(read=read_entries)
@once(name="right-entries")
class Entries:
    """It inserts a line for each message."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        session.add(Entry(account=paid.account, amount=paid.amount))


@right(expected=lasts, read=read_lasts, options={"ordered": lambda paid: paid.account})
@once(name="right-last-by-key")
class LastByKey:
    """It keeps the last payment, from a broker that keeps the order of each account."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        session.merge(Totals(account=paid.account, amount=0, last=paid.amount))


@right(expected=lasts, read=read_lasts, options={"ordered": True})
@once(name="right-last")
class LastInOrder:
    """It keeps the last payment, from a broker that keeps the order of all messages."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        session.merge(Totals(account=paid.account, amount=0, last=paid.amount))


@right(expected=lasts, read=read_lasts, options={"ordered": lambda paid: paid.account})
@projector(name="right-sets")
class Sets:
    """It sets a value, and needs no idempotent=True where the order is kept."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        session.merge(Totals(account=paid.account, amount=0, last=paid.amount))


def _highest(messages: Sequence[Paid]) -> dict[str, int]:
    return {each.account: max(other.amount for other in messages if other.account == each.account) for each in messages}


@right(expected=_highest, read=read_lasts)
@once(name="right-highest")
class Highest:
    """It keeps the highest payment, in any order."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        row = session.get(Totals, paid.account)
        if row is None:
            session.add(Totals(account=paid.account, amount=0, last=paid.amount))
        else:
            row.last = max(row.last, paid.amount)


@right()
@once(name="right-defers")
class Defers:
    """It waits, by Defer, for the payment that creates the row."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        row = session.get(Totals, paid.account)
        if row is not None:
            row.amount += paid.amount
        elif paid in PAYMENTS[:1] + PAYMENTS[2:3]:
            session.add(Totals(account=paid.account, amount=paid.amount, last=0))
        else:
            raise Defer("no account yet")


@right(options={"ordered": lambda paid: paid.account})
@once(name="right-defers-by-key")
class DefersByKey:
    """It waits, by Defer, for another account, from a broker that keeps the order of each account."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        if paid.account == "a" and session.get(Totals, "b") is None:
            raise Defer("no account b yet")
        add(paid, session)


@right()
@once(name="right-savepoint")
class Savepoint:
    """It tries an INSERT in a savepoint, and catches the error that means that the row is there."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        try:
            with session.begin_nested():
                session.execute(insert(Totals).values(account=paid.account, amount=0, last=0))
        except IntegrityError:
            pass
        session.execute(update(Totals).where(Totals.account == paid.account).values(amount=Totals.amount + paid.amount))


@right()
@once(name="right-batch")
class Batch:
    """It takes a whole batch, and applies all of it."""

    @on(Paid, batch=True)
    def apply(self, batch: list[Paid], session: Session) -> None:
        for paid in batch:
            add(paid, session)


@right()
@once(name="right-cache")
class Caches:
    """It caches in the projector what never changes."""

    def __init__(self) -> None:
        self.upper: dict[str, str] = {}

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        self.upper[paid.account] = paid.account.upper()
        add(paid, session)


@right(options={"message_id": lambda paid: f"payment:{paid.message_id}"})
@once(name="right-extractor")
class Extractor:
    """It has its id from an extractor."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        add(paid, session)


@right()
@once(name="right-envelope")
class Envelope:
    """It takes the envelope."""

    @on(Paid, envelope=True)
    def apply(self, message: Message, session: Session) -> None:
        add(message.body, session)


@right(expected=lambda messages: {account: 2 * amount for account, amount in sums(messages).items()})
@once(name="right-two")
class TwoHandlers:
    """It has two handlers, each of which counts."""

    @on(Paid)
    def one(self, paid: Paid, session: Session) -> None:
        add(paid, session)

    @on(Paid)
    def two(self, paid: Paid, session: Session) -> None:
        add(paid, session)


@right()
@once(name="right-derived")
class Derived:
    """It computes the sums from the entries that it has written."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        session.add(Entry(account=paid.account, amount=paid.amount))
        session.flush()
        amount = session.scalar(select(func.sum(Entry.amount)).where(Entry.account == paid.account))
        session.execute(delete(Totals).where(Totals.account == paid.account))
        session.execute(insert(Totals).values(account=paid.account, amount=amount, last=0))


@right()
@once(name="right-async")
class SumsAsync:
    """It counts, under asyncio."""

    @on(Paid)
    async def apply(self, paid: Paid, session: AsyncSession) -> None:
        await session.run_sync(lambda inner: add(paid, inner))


@right(read=read_entries)
@once(name="right-async-entries")
class EntriesAsync:
    """It waits for something else, and inserts a line, under asyncio."""

    @on(Paid)
    async def apply(self, paid: Paid, session: AsyncSession) -> None:
        await asyncio.sleep(0)
        session.add(Entry(account=paid.account, amount=paid.amount))


@right(server=True, options={"isolation": "READ COMMITTED"})
@once(name="right-read-models", read_models=[Totals])
class ReadModels:
    """It adds to an attribute at READ COMMITTED, under lock."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        add(paid, session)


@right(server=True, options={"isolation": "READ COMMITTED"})
@once(name="right-locks-the-batch")
class LocksTheBatch:
    """It locks the rows of a batch, in the order of their names."""

    @on(Paid, batch=True)
    def apply(self, batch: list[Paid], session: Session) -> None:
        for account in sorted({paid.account for paid in batch}):
            session.get(Totals, account, with_for_update=True)
        for paid in batch:
            LostUpdate.apply(self, paid, session)  # type: ignore[arg-type]


@right(server=True)
@once(name="right-default-isolation")
class DefaultIsolation:
    """It reads, then writes a literal, at the default isolation level of the library."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        LostUpdate.apply(self, paid, session)  # type: ignore[arg-type]


@right(server=True)
@once(name="right-insert-or-update")
class InsertsOrUpdates:
    """It inserts in a savepoint, and updates if the row is there."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        try:
            with session.begin_nested():
                session.add(Totals(account=paid.account, amount=paid.amount, last=0))
        except IntegrityError:
            add_in_database(paid, session)


@right(server=True, read=read_balances)
@once(name="right-ledger")
class LockedLedger:
    """It locks the name of the account, reads the last line and inserts the next."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        lock(paid, session)
        append(paid, session)


@right(server=True, read=read_balances, options={"isolation": "READ COMMITTED"})
@once(name="right-ledger-below")
class LedgerBelow:
    """It locks on the driver's own connection, and declares the level at which that protects its reads."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        LocksBelow.apply(self, paid, session)  # type: ignore[arg-type]


@right(server=True, read=read_balances)
@once(name="right-ledger-of-a-row")
class LedgerOfARow:
    """It creates the row of the account in a savepoint, locks it, reads the last line and inserts the next."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        with contextlib.suppress(IntegrityError), session.begin_nested():
            session.execute(insert(Totals).values(account=paid.account, amount=0, last=0))
        session.get_one(Totals, paid.account, with_for_update=True)
        append(paid, session)


@right(server=True, read=read_entries)
@once(name="right-skips-bad-lines")
class SkipsBadLines:
    """It adds each line in a savepoint, and skips the lines that break a constraint."""

    @on(Paid)
    def apply(self, paid: Paid, session: Session) -> None:
        for account in (None, paid.account):  # the database refuses the first
            with contextlib.suppress(IntegrityError), session.begin_nested():
                session.execute(insert(Entry).values(account=account, amount=paid.amount))
