"""What commands alone could lose: a record that goes to another schema, a plan of its table, a value without a form."""

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from command_rig import START, Balance, Base, Desk, Placed, PlaceOrder, desks, place
from databases import DRIVERS, USUAL, Database
from misbehaviour import execute_raw
from projector_dedup.commands import Call, Commands, InvalidKeyError, command, default_command_tables
from projector_dedup.errors import TransactionViolatedError

POSTGRESQL = [driver for driver in DRIVERS if driver.engine == "postgresql"]
desk = desks(POSTGRESQL)


def with_account(engine: Engine, schema: str | None = None) -> None:
    """Create the tables, and an account, in a schema."""
    with engine.begin() as connection:
        mapped = connection.execution_options(schema_translate_map={None: schema})
        for metadata in (Base.metadata, default_command_tables.marker.metadata):
            metadata.create_all(mapped)
        with Session(mapped) as session:
            session.add(Balance(customer="alice", amount=START))
            session.flush()


def counted(engine: Engine, schema: str = "") -> tuple[int, int, int]:
    """The records, the orders, and what was spent, as another connection sees them."""
    prefix = f"{schema}." if schema else ""
    with engine.connect() as connection:
        records, orders, left = connection.execute(
            text(
                f"SELECT (SELECT count(*) FROM {prefix}processed_command WHERE outcome = 1), "
                f"(SELECT count(*) FROM {prefix}desk_order), (SELECT amount FROM {prefix}desk_balance)"
            )
        ).one()
    return int(records), int(orders), START - int(left)


# Handlers that choose where they write -------------------------------------------------------------------------------


def choosing(statement: str, execute: Callable[[Session, str], object]) -> Callable[[PlaceOrder, Call], Placed]:
    """Return a handler that places the order, and then chooses another place for what comes after."""

    def choose(order: PlaceOrder, call: Call) -> Placed:
        placed = place(order, call)
        execute(call.session, statement)
        return placed

    return choose


def as_text(session: Session, sql: str) -> None:
    """By SQLAlchemy."""
    session.execute(text(sql))


@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
@pytest.mark.parametrize("schema", ["elsewhere", "nothing"])
@pytest.mark.parametrize("execute", [as_text, execute_raw], ids=["by SQLAlchemy", "by the driver"])
def test_a_handler_that_chooses_another_schema_for_the_rest(
    desk: Desk, strict: bool, schema: str, execute: Callable[[Session, str], object]
) -> None:
    """The record is written behind it, and would go elsewhere: refused with words, and nothing is applied anywhere."""
    owner = create_engine(desk.harness.subject.url.set(drivername=USUAL["postgresql"]))
    with owner.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {schema}"))
    if schema == "elsewhere":
        with_account(owner, schema)
    operation = desk.operation(choosing(f"SET LOCAL search_path TO {schema}", execute))
    with pytest.raises(TransactionViolatedError, match="selected another schema"):
        desk.handle(operation, PlaceOrder(3), commands=desk.commands(strict=strict))
    assert counted(owner, "public") == (0, 0, 0)
    if schema == "elsewhere":
        assert counted(owner, schema) == (0, 0, 0)
    assert not desk.handle(desk.operation(), PlaceOrder(3)).replayed
    assert counted(owner, "public") == (1, 1, 3)
    owner.dispose()


# Plans and parameters ------------------------------------------------------------------------------------------------


def test_a_column_of_the_records_that_gets_another_type(desk: Desk) -> None:
    """What a driver has prepared is outdated then, and nothing is lost: the recorded answers are given."""
    operation = desk.operation()
    first, *_ = [desk.handle(operation, key="k1") for _ in range(7)]  # drivers prepare what comes again
    desk.harness.transact(
        lambda session: session.execute(
            text('ALTER TABLE processed_command ALTER COLUMN codec TYPE varchar(80) COLLATE "C"')
        )
    )
    assert [desk.handle(operation, key="k1").result for _ in range(3)] == [first.result] * 3
    assert not desk.handle(operation, key="k2").replayed
    assert desk.orders() == ["k1", "k2"]


# Poison --------------------------------------------------------------------------------------------------------------


def nested(depth: int) -> list[Any]:
    """Return lists in lists."""
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    "poison",
    [
        datetime(9999, 12, 31, 23, 59, 59, tzinfo=timezone(timedelta(hours=-5))),
        datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=5))),
        ITSELF,
        nested(10_000),
        10**5_000,
        Decimal("1E+999999"),
        Decimal("1E-999999"),
    ],
    ids=["after 9999 in UTC", "before 1 in UTC", "in itself", "deep", "a long number", "a large one", "a small one"],
)
def test_a_command_that_cannot_be_compared_is_named(sqlite: Database, poison: object) -> None:
    """By an error of ours that says so, before any SQL: the caller's request is at fault, and not the server."""
    commands = Commands(sessionmaker(create_engine(sqlite.url())))
    with pytest.raises(InvalidKeyError):
        commands.handle(anything, {"value": poison}, key="k1")


@command(name="desk.anything")
def anything(_asked: Any, _call: Call) -> None:
    """Do nothing."""
