"""A desk that takes orders: one account, one order for each command, on any driver, by sync or async alike."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import MetaData, String, delete, insert, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from databases import DRIVERS, USUAL, USUAL_ASYNC
from kit import PATIENCE, Harness
from projector_dedup.commands import (
    AsyncCall,
    AsyncCommands,
    Call,
    Commands,
    Handled,
    command,
    default_command_tables,
)
from reach import reach

START = 1_000_000

NEVER_AGAIN = {
    "postgresql": [
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF OLD.outcome IS NOT NULL THEN RAISE EXCEPTION 'a finished record was written'; END IF; RETURN NEW; END $$",
        "CREATE TRIGGER finished BEFORE UPDATE ON processed_command FOR EACH ROW EXECUTE FUNCTION refuse()",
    ],
    "mariadb": [
        "CREATE TRIGGER finished BEFORE UPDATE ON processed_command FOR EACH ROW "
        "BEGIN IF OLD.outcome IS NOT NULL THEN "
        "SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'a finished record was written'; END IF; END",
    ],
    "sqlite": [
        "CREATE TRIGGER finished BEFORE UPDATE ON processed_command WHEN OLD.outcome IS NOT NULL "
        "BEGIN SELECT RAISE(ABORT, 'a finished record was written'); END",
    ],
}
"""A trigger on each engine that refuses to change a record which has an outcome: every test of commands is under it."""
NEVER_AGAIN["mysql"] = NEVER_AGAIN["mariadb"]


class Base(DeclarativeBase):
    """The base of the desk's entities."""

    metadata = MetaData()


class Balance(Base):
    """What the customer has left; wrong for good once an order counts twice or not at all."""

    __tablename__ = "desk_balance"
    customer: Mapped[str] = mapped_column(String(20), primary_key=True)
    amount: Mapped[int]


class Order(Base):
    """An order that was placed. Its id follows from nothing, so that a second run places a second one."""

    __tablename__ = "desk_order"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    note: Mapped[str] = mapped_column(String(80))
    amount: Mapped[int]


@dataclass(frozen=True)
class PlaceOrder:
    """A command."""

    amount: int = 1
    note: str = ""
    customer: str = "alice"


@dataclass(frozen=True)
class Placed:
    """Its result."""

    number: int
    left: int


def place(order: PlaceOrder, call: Call) -> Placed:
    """Ordinary ORM code: read, change, insert."""
    balance = call.session.get_one(Balance, order.customer)
    balance.amount -= order.amount
    placed = Order(note=order.note or str(call.key), amount=order.amount)
    call.session.add(placed)
    call.session.flush()
    return Placed(placed.number, balance.amount)


class Desk:
    """The desk on one subject: handles commands, and looks at what became of them from another connection."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.ran: list[Any] = []  # keys, each time that a handler is entered
        self.isolation = harness.subject.dispatcher_isolation

    def create_tables(self) -> None:
        """Create the tables, and give the customer an account."""
        for metadata in (Base.metadata, default_command_tables.marker.metadata):
            self.harness.transact(partial(_create, metadata))
        for statement in NEVER_AGAIN[self.harness.engine.dialect.name]:
            self.harness.transact(partial(_execute, statement))
        self.harness.transact(lambda session: session.add(Balance(customer="alice", amount=START)))

    def operation(self, body: Callable[[Any, Call], Any] = place, name: str = "desk.place", **settings: Any) -> Any:
        """Return an operation of ``body``, which is as it is, or run by an ``async def``."""
        returns = getattr(body, "__annotations__", {}).get("return", Placed)

        async def awaited(asked: Any, call: AsyncCall) -> Any:
            def inner(session: Session) -> Any:
                return body(asked, Call(session, call.key, call.scope, call.operation))

            self.ran.append(call.key)
            return await call.session.run_sync(inner)

        def direct(asked: Any, call: Call) -> Any:
            self.ran.append(call.key)
            return body(asked, call)

        function: Any = awaited if self.harness.asynchronous else direct
        function.__annotations__ = {**function.__annotations__, "return": returns}
        return command(name=name, **settings)(function)

    def commands(self, factory: Any = None, **options: Any) -> Any:
        """Return ``Commands`` or ``AsyncCommands`` with the subject's isolation level."""
        if self.isolation:
            options.setdefault("isolation", self.isolation)
        kind: Any = AsyncCommands if self.harness.asynchronous else Commands
        return kind(factory or self.harness.factory, **options)

    def handle(
        self, operation: Any, asked: Any = None, key: Any = "k1", commands: Any = None, **said: Any
    ) -> Handled[Any]:
        """Call ``handle``, and await it if it is asynchronous."""
        answer: Handled[Any] = self.harness.run(
            (commands or self.commands()).handle, operation, PlaceOrder() if asked is None else asked, key=key, **said
        )
        return answer

    def age(self, days: float = 30) -> None:
        """Make every record that much older; each is made anew for it, since a finished one cannot be changed."""

        def anew(session: Session) -> None:
            record = default_command_tables.marker
            rows = [dict(row) for row in session.execute(select(record)).mappings()]
            session.execute(delete(record))
            for row in rows:
                session.execute(insert(record).values(row | {"processed_at": row["processed_at"] - timedelta(days)}))

        self.harness.transact(anew)

    def orders(self) -> list[str]:
        """The notes of the orders that were placed, in order, as another connection sees them."""
        return self.harness.transact(lambda session: sorted(session.scalars(select(Order.note))))

    def spent(self) -> int:
        """What has left the account."""
        left = self.harness.transact(lambda session: session.get_one(Balance, "alice").amount)
        return START - int(left)

    def records(self) -> list[tuple[str, str, Any]]:
        """The key, the operation and the outcome of each record, in order."""
        record = default_command_tables.marker
        columns = record.c.message_id, record.c.handler, record.c.outcome
        return sorted(
            tuple(row) for row in self.harness.transact(lambda session: session.execute(select(*columns)).all())
        )


def _create(metadata: MetaData, session: Session) -> None:
    metadata.create_all(session.connection())


def _execute(sql: str, session: Session) -> None:
    session.connection().exec_driver_sql(sql)


@contextlib.contextmanager
def desk_on(request: pytest.FixtureRequest, driver: Any, **subject: Any) -> Iterator[Desk]:
    """Return a desk with its tables on an empty database of the driver's."""
    with Harness(reach(request, driver, **subject)) as harness:
        desk = Desk(harness)
        desk.create_tables()
        yield desk


USUAL_ONES = [each for each in DRIVERS if each.drivername == (USUAL_ASYNC if each.is_async else USUAL)[each.engine]]
"""One driver of each database, sync and async."""

SYNC_ONES = [driver for driver in USUAL_ONES if not driver.is_async]
SQLITE = [driver for driver in SYNC_ONES if driver.engine == "sqlite"]


LEVELS = ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")


def desks(drivers: Sequence[Any], name: str = "desk", levels: Sequence[str] = ()) -> Any:
    """Return a fixture: a desk on each of the drivers in turn, and on one of each server at each of the levels."""
    servers = [driver for driver in USUAL_ONES if driver.engine != "sqlite"]
    params = [pytest.param((driver, None), id=str(driver)) for driver in drivers]
    params += [pytest.param((driver, level), id=f"{driver}, {level}") for driver in servers for level in levels]

    @pytest.fixture(params=params, name=name)
    def desk(request: pytest.FixtureRequest) -> Iterator[Desk]:
        driver, level = request.param
        with desk_on(request, driver, dispatcher_isolation=level) as desk:
            yield desk

    return desk


class Held:
    """A handler that places the order, and is held before it ends, the first time that it is entered."""

    def __init__(
        self, desk: Desk, body: Callable[[Any, Call], Any] = place, *, raises: Exception | None = None
    ) -> None:
        self.entered, self.may_end = threading.Event(), threading.Event()
        self._desk, self._body, self._raises = desk, body, raises

    def __call__(self, order: PlaceOrder, call: Call) -> Any:
        """Do the work; the first one waits, and then perhaps fails."""
        done = self._body(order, call)
        if not self.entered.is_set():
            self.entered.set()
            assert self._desk.harness.blocking(self.may_end.wait, PATIENCE)
            if self._raises is not None:
                raise self._raises
        return done
