"""What once lost or doubled messages of projectors is tried on commands: engines, tenants, servers, plans, poison."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import datetime, timedelta, timezone
from decimal import Decimal
from itertools import permutations
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from command_rig import START, Balance, Base, Desk, Placed, PlaceOrder, desk_on, place
from cut_proxy import CutProxy
from databases import DRIVERS, USUAL, Database, Driver
from http_rig import Shop
from misbehaviour import execute_raw
from projector_dedup import RetriesExhaustedError, RetryPolicy, TransactionViolatedError
from projector_dedup.commands import Call, Commands, InvalidKeyError, command, default_command_tables

POSTGRESQL = [driver for driver in DRIVERS if driver.engine == "postgresql"]
SERVERS = [driver for driver in DRIVERS if driver.engine != "sqlite"]
placing = command(name="desk.place")(place)


@pytest.fixture
def desk(request: pytest.FixtureRequest, driver: Driver) -> Iterator[Desk]:
    """A desk on the driver that a test names."""
    with desk_on(request, driver) as desk:
        yield desk


def every(drivers: list[Driver]) -> pytest.MarkDecorator:
    """Run on each of these drivers."""
    return pytest.mark.parametrize("driver", drivers, ids=str)


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


# One engine after another --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [*permutations(USUAL, 2)], ids=str)
@pytest.mark.parametrize("way", ["two factories", "one factory, configured anew"])
def test_one_operation_on_two_engines(request: pytest.FixtureRequest, first: str, second: str, way: str) -> None:
    """What it was on the first says nothing of the second: each has its records, and every command is done once."""
    with ExitStack() as stack:
        engines = []
        for name in (first, second):
            engine = create_engine(request.getfixturevalue(name).url())
            stack.callback(engine.dispose)
            with_account(engine)
            engines.append(engine)
        factory: sessionmaker[Session] = sessionmaker(engines[0])
        commands = Commands(factory)
        for engine in engines:
            if way == "two factories":
                commands = Commands(sessionmaker(engine))
            factory.configure(bind=engine)
            answers = [commands.handle(placing, PlaceOrder(), key=f"k{number % 3}") for number in range(6)]
            assert [answer.replayed for answer in answers] == [False] * 3 + [True] * 3
            assert counted(engine) == (3, 3, 3)


# Tenants that a listener chooses -------------------------------------------------------------------------------------


@every(POSTGRESQL)
@pytest.mark.parametrize("setting", ["SET search_path TO {}", "SET LOCAL search_path TO {}"])
def test_a_listener_that_chooses_the_tenant(desk: Desk, setting: str) -> None:
    """Record, writes and answer are that tenant's, whatever is asked of the connection before."""
    owner = create_engine(desk.harness.subject.url.set(drivername=USUAL["postgresql"]))
    with owner.begin() as connection:
        connection.execute(text("CREATE SCHEMA tenant_b"))
    with_account(owner, "tenant_b")
    now = ["public"]

    def choose(driver: Any, _record: object, _proxy: object) -> None:
        with closing(driver.cursor()) as cursor:
            cursor.execute(setting.format(now[0]))

    event.listen(desk.harness.engine, "checkout", choose)
    commands, operation = desk.commands(), desk.operation()
    for replayed in (False, True):
        for amount, now[0] in ((1, "public"), (10, "tenant_b")):
            for number in range(3):
                answer = desk.handle(operation, PlaceOrder(amount), key=f"k{number}", commands=commands)
                assert (answer.replayed, answer.result.left) == (replayed, START - amount * (number + 1))
    now[0] = "public"
    assert (counted(owner, "public"), counted(owner, "tenant_b")) == ((3, 3, 3), (3, 3, 30))
    owner.dispose()


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


@every(POSTGRESQL)
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
    with pytest.raises(TransactionViolatedError, match="chose another schema"):
        desk.handle(operation, PlaceOrder(3), commands=desk.commands(strict=strict))
    assert counted(owner, "public") == (0, 0, 0)
    if schema == "elsewhere":
        assert counted(owner, schema) == (0, 0, 0)
    assert not desk.handle(desk.operation(), PlaceOrder(3)).replayed
    assert counted(owner, "public") == (1, 1, 3)
    owner.dispose()


# Servers -------------------------------------------------------------------------------------------------------------


@every(POSTGRESQL)
def test_a_pool_that_has_met_a_standby_goes_on_to_the_primary(desk: Desk) -> None:
    """A server that takes no writes records nothing, and its connections are not used again."""
    create: Callable[..., Any] = create_async_engine if desk.harness.asynchronous else create_engine
    bind, is_standby = create(desk.harness.subject.url), [True]

    def connect(dialect: Any, _record: Any, _arguments: Any, options: dict[str, Any]) -> None:
        for name in ("server_settings", "options"):  # SQLAlchemy 2.0 gives every connection the same dictionary
            options.pop(name, None)
        if is_standby and dialect.driver == "asyncpg":
            options["server_settings"] = {"default_transaction_read_only": "on"}
        elif is_standby:
            options["options"] = "-c default_transaction_read_only=on"

    event.listen(getattr(bind, "sync_engine", bind), "do_connect", connect)
    commands = desk.commands(desk.harness.factory_for(bind), retry=RetryPolicy(attempts=2, base=0))
    for _ in range(3):
        with pytest.raises(RetriesExhaustedError, match="read-only transaction"):
            desk.handle(desk.operation(), commands=commands)
    assert desk.records() == []
    is_standby.clear()
    for number in range(4):
        assert not desk.handle(desk.operation(), key=f"k{number}", commands=commands).replayed
    assert desk.orders() == [f"k{number}" for number in range(4)]
    desk.harness.run(bind.dispose)


@every(SERVERS)
def test_a_server_that_refuses_to_roll_back_keeps_no_connection(desk: Desk) -> None:
    """As a node of a cluster does that has lost the others; once it has found them, the command is done."""
    with CutProxy(desk.harness.subject.url) as proxy:
        shop = Shop(desk)
        factory = shop.factory_through(proxy)
        operation, patient = desk.operation(), desk.commands(factory)
        desk.handle(operation, key="k0", commands=patient)
        with proxy.refusing("rollback"), pytest.raises(ValueError, match="a bug"):
            desk.handle(desk.operation(_fail), commands=patient)
        assert not desk.handle(operation, commands=patient).replayed
        bind = factory.kw["bind"]
        assert getattr(bind, "sync_engine", bind).pool.checkedout() == 0
        assert (desk.orders(), len(desk.records())) == (["k0", "k1"], 2)
        shop.close()


def _fail(order: PlaceOrder, call: Call) -> Placed:
    place(order, call)
    raise ValueError("a bug")


# Plans and parameters ------------------------------------------------------------------------------------------------


@every(POSTGRESQL)
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


@pytest.mark.parametrize("key", ["a\0b", "\ud800", "x" * 513, "\N{GREEK SMALL LETTER PI}" * 256, " ", "\n", "'; --"])
@every([driver for driver in DRIVERS if driver.drivername in USUAL.values() and not driver.is_async])
def test_a_key_is_taken_as_it_is_or_refused(desk: Desk, key: str) -> None:
    """Whatever a client sends: it is found again as it was, or is an error of ours before any SQL."""
    operation = desk.operation()
    try:
        answers = [desk.handle(operation, PlaceOrder(note="x"), key=key) for _ in range(2)]
    except InvalidKeyError:
        assert desk.records() == []
    else:
        assert [answer.replayed for answer in answers] == [False, True]
        assert [stored for stored, *_ in desk.records()] == [f"0:{key}"]
