"""A synchronous standby of PostgreSQL: a marker that only the primary has does not make a duplicate."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
from sqlalchemy import delete, make_url

from command_rig import Desk
from costs import column, written
from databases import DRIVERS, Driver
from deliveries import ROWS, WAYS
from kit import PATIENCE, Added, Harness, Subject, Total
from meter import metered
from projector_dedup import Message, Outcome
from projector_dedup.commands import default_command_tables
from projector_dedup.errors import (
    BatchFailed,
    CommitOutcomeUnknown,
    RetriesExhaustedError,
)
from projector_dedup.markers import claim
from projector_dedup.options import RetryPolicy
from projector_dedup.tables import default_tables
from projector_dedup.unit_of_work import AsyncUnitOfWork, UnitOfWork
from reached import reached
from ready import ready
from standby import Primary, Standby, own_primary, standby_of

pytestmark = pytest.mark.nightly

POSTGRESQL = [driver for driver in DRIVERS if driver.engine == "postgresql"]
HEARING = [driver for driver in POSTGRESQL if driver.module != "psycopg2"]
PSYCOPG2 = next(driver for driver in POSTGRESQL if driver.module == "psycopg2")
OLD, NEW = "old", "totals"
Redeliver = Callable[[], Any]
"""Deliver message m1 once more; returns an outcome, or True where it is new."""


@pytest.fixture(scope="module")
def primary() -> Iterator[Primary]:
    """A server for the tests of this file."""
    with own_primary() as server:
        server.execute("alter system set fsync = off")
        yield server


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Driver:
    """psycopg, where a test does not name its drivers."""
    return getattr(request, "param", POSTGRESQL[0])


@pytest.fixture
def harness(primary: Primary, driver: Driver) -> Iterator[Harness]:
    """Empty tables on the primary, whose standby answers."""
    if not driver.installed:
        reached.give_up("postgresql", str(driver), f"{driver.module} is not installed")
    primary.answer()
    primary.execute("drop schema public cascade")
    primary.execute("create schema public")
    with ready(primary.database.url().set(drivername=driver.name_in_url)) as harness:
        try:
            yield harness
        finally:
            primary.answer()


every_driver = pytest.mark.parametrize("driver", POSTGRESQL, ids=str, indirect=True)
drivers_that_hear = pytest.mark.parametrize("driver", HEARING, ids=str, indirect=True)


# Ways to redeliver -------------------------------------------------------------------------------------------------


def alone(harness: Harness, *, first: Any = None, before: int = 0, **settings: Any) -> Redeliver:
    """By a dispatcher that has delivered m1, and `before` other messages."""
    timeout = settings.pop("claim_timeout", None)
    dispatcher = harness.dispatcher(harness.handler(name=NEW, **settings), claim_timeout=timeout)
    harness.deliver(first or dispatcher)
    for number in range(before):
        harness.deliver(dispatcher, message_id=f"before-{number}")
    return lambda: harness.deliver(dispatcher).outcome


def renamed(harness: Harness) -> Redeliver:
    """Under a new name, after m1 was applied under the old one."""
    return alone(harness, first=harness.dispatcher(harness.handler(name=OLD)), formerly=[OLD])


def looked_for(harness: Harness) -> Redeliver:
    """After duplicates in a row, so that psycopg looks for the marker before it claims."""
    redeliver = alone(harness)
    for _ in range(4):
        assert redeliver() is Outcome.DUPLICATE
    return redeliver


def batch(harness: Harness, *, first: str = NEW, formerly: tuple[str, ...] = ()) -> Redeliver:
    """Two messages at once, both known."""
    messages = [Message(message_id, Added()) for message_id in ("m1", "m2")]
    harness.run(harness.dispatcher(harness.handler(name=first)).deliver_batch, messages)
    dispatcher = harness.dispatcher(harness.handler(name=NEW, formerly=formerly))

    def redeliver() -> Outcome:
        outcomes: set[Outcome] = {delivery.outcome for delivery in harness.run(dispatcher.deliver_batch, messages)}
        return outcomes.pop() if len(outcomes) == 1 else Outcome.FAILED

    return redeliver


def by_hand(harness: Harness, *, many: bool = False) -> Redeliver:
    """By a unit of work; what is known when the claim returns, not when the block ends."""

    def claimed(uow: Any) -> Any:
        return uow.claim_many([("m1", None)], NEW) if many else uow.claim("m1", NEW)

    async def awaited() -> Any:
        async with AsyncUnitOfWork(harness.factory) as uow:
            return Outcome.APPLIED if await claimed(uow) else Outcome.DUPLICATE

    def direct() -> Any:
        with UnitOfWork(harness.factory) as uow:
            return Outcome.APPLIED if claimed(uow) else Outcome.DUPLICATE

    harness.deliver(harness.dispatcher(harness.handler(name=NEW)))
    return partial(harness.run, awaited if harness.asynchronous else direct)


def by_caller(harness: Harness) -> Redeliver:
    """In a transaction of the caller's, who commits a duplicate too."""
    harness.deliver(harness.dispatcher(harness.handler(name=NEW)))

    def redeliver() -> Outcome:
        new = harness.transact(lambda session: claim(session, "m1", NEW))
        return Outcome.APPLIED if new else Outcome.DUPLICATE

    return redeliver


def command_again(harness: Harness) -> Redeliver:
    """As a command, whose recorded answer is sent with the COMMIT that waits."""
    desk = Desk(harness)
    desk.create_tables()
    operation, commands = desk.operation(name=NEW), desk.commands(retry=RetryPolicy(attempts=3))
    desk.handle(operation, key="m1", commands=commands)
    return lambda: desk.handle(operation, key="m1", commands=commands).outcome


REDELIVERIES: dict[str, Callable[[Harness], Redeliver]] = {
    "alone": alone,
    "claimed with its row": partial(alone, before=3),
    "looked for": looked_for,
    "claim_timeout": partial(alone, claim_timeout=60.0),
    "strict isolation": partial(alone, read_models=[Total]),
    "formerly": partial(alone, formerly=[OLD]),
    "renamed": renamed,
    "batch": batch,
    "renamed batch": partial(batch, first=OLD, formerly=(OLD,)),
    "claim": by_hand,
    "claim_many": partial(by_hand, many=True),
    "the caller's claim": by_caller,
    "command": command_again,
}
BY_DRIVER = ("alone", "batch", "claim", "command")
"""One of each kind: the others send by a driver what these send by it."""


@pytest.mark.parametrize(
    ("way", "driver"),
    [(way, each) for each in POSTGRESQL for way in (REDELIVERIES if each is POSTGRESQL[0] else BY_DRIVER)],
    ids=str,
    indirect=["driver"],
)
def test_a_duplicate_waits_for_the_standby(primary: Primary, harness: Harness, way: str) -> None:
    """While the standby is silent, no way to redeliver returns; then it is a duplicate, and has written no row."""
    redeliver = REDELIVERIES[way](harness)
    before = harness.markers(), harness.totals()
    primary.fall_silent()
    redelivery = harness.start(redeliver)
    primary.next_wait(redelivery)
    primary.answer()
    assert redelivery.result(PATIENCE) is Outcome.DUPLICATE
    assert (harness.markers(), harness.totals()) == before


@every_driver
@pytest.mark.parametrize("synchronous_commit", ["off", "local"])
def test_who_waits_for_no_standby_is_not_kept_waiting(
    primary: Primary, harness: Harness, synchronous_commit: str
) -> None:
    """A new message and its redelivery return, though the standby is silent."""
    user = "alter role postgres set synchronous_commit ="
    primary.execute(f"{user} {synchronous_commit}")
    harness.run(harness._engine.dispose)
    try:
        primary.fall_silent()
        dispatcher = harness.dispatcher()
        assert [harness.deliver(dispatcher).outcome for _ in "12"] == [Outcome.APPLIED, Outcome.DUPLICATE]
    finally:
        primary.execute(f"{user} default")


# The wait is ended -------------------------------------------------------------------------------------------------


def ended(primary: Primary, delivery: Future[Any], how: str) -> None:
    """End the wait of a delivery's COMMIT, by a function of the server's."""
    waiting = primary.next_wait(delivery)
    assert primary.execute(f"select {how}(%s)", waiting) == [(True,)]


WAYS_TO_END = [(driver, "pg_terminate_backend") for driver in POSTGRESQL] + [
    (driver, "pg_cancel_backend") for driver in HEARING
]
every_end = pytest.mark.parametrize(("driver", "how"), WAYS_TO_END, ids=str, indirect=["driver"])


@every_end
@pytest.mark.parametrize("known", [False, True], ids=["new", "redelivered"])
def test_a_wait_that_is_ended_begins_again(primary: Primary, harness: Harness, how: str, known: bool) -> None:
    """The COMMIT of a new message, or of a duplicate: its outcome is unknown, and what asks for it waits as well."""
    dispatcher = harness.dispatcher()
    if known:
        harness.deliver(dispatcher)
    primary.fall_silent()
    delivery = harness.start(harness.deliver, dispatcher)
    for _ in range(3):
        waiting = primary.next_wait(delivery)
        assert primary.execute(f"select {how}(%s)", waiting) == [(True,)]
    primary.next_wait(delivery)
    assert harness.totals() == {"a": 1}, "everybody sees what only the primary has"
    primary.answer()
    assert delivery.result(PATIENCE).outcome is Outcome.DUPLICATE
    assert harness.totals() == {"a": 1}


@pytest.mark.parametrize(
    ("driver", "how"),
    [(POSTGRESQL[0], "pg_cancel_backend"), (POSTGRESQL[-1], "pg_terminate_backend")],
    ids=str,
    indirect=["driver"],
)
@pytest.mark.parametrize("way", ["new", "looked for", "batch", "claim", "command", "new command"])
def test_a_wait_that_is_always_ended_leaves_the_outcome_unknown(
    primary: Primary, harness: Harness, way: str, how: str
) -> None:
    """No way to deliver returns, so nothing is acknowledged; the redelivery is a duplicate when the standby answers."""
    harness.dispatcher = partial(harness.dispatcher, retry=RetryPolicy(attempts=3))  # type: ignore[method-assign]
    redeliver = REDELIVERIES.get(way.removeprefix("new "), alone)(harness)
    if way.startswith("new"):
        tables = default_command_tables if way == "new command" else default_tables
        harness.transact(lambda session: session.execute(delete(tables.marker)))
    primary.fall_silent()
    delivery = harness.start(redeliver)
    primary.end_waits(delivery, how)
    error = delivery.exception()
    if isinstance(error, BatchFailed):
        (error,) = error.exceptions
    assert isinstance(error, (CommitOutcomeUnknown, RetriesExhaustedError))
    primary.answer()
    assert redeliver() is Outcome.DUPLICATE


@pytest.mark.parametrize("driver", [PSYCOPG2], ids=str, indirect=True)
@pytest.mark.parametrize("known", [False, True], ids=["new", "redelivered"])
def test_psycopg2_does_not_hear_of_a_cancelled_wait(primary: Primary, harness: Harness, known: bool) -> None:
    """It returns as if the standby had answered, which docs/production.md says; the next redelivery waits."""
    redeliver = alone(harness)
    if not known:
        harness.transact(lambda session: session.execute(delete(default_tables.marker)))
    primary.fall_silent()
    delivery = harness.start(redeliver)
    primary.end_waits(delivery, "pg_cancel_backend")
    assert delivery.result() is (Outcome.DUPLICATE if known else Outcome.APPLIED)
    primary.next_wait(harness.start(redeliver))


@pytest.mark.parametrize("driver", [POSTGRESQL[0], POSTGRESQL[-1]], ids=str, indirect=True)
def test_a_marker_that_a_crash_made_visible_waits(primary: Primary, harness: Harness) -> None:
    """The server comes back with what its standby has not got; the redelivery of it does not return before that."""
    dispatcher = harness.dispatcher(retry=RetryPolicy(attempts=1))
    primary.fall_silent()
    delivery = harness.start(harness.deliver, dispatcher)
    primary.next_wait(delivery)
    primary.restart()
    assert isinstance(delivery.exception(PATIENCE), CommitOutcomeUnknown)
    redelivery = harness.start(harness.deliver, harness.dispatcher())
    primary.next_wait(redelivery)
    primary.answer()
    assert redelivery.result(PATIENCE).outcome is Outcome.DUPLICATE
    assert harness.totals() == {"a": 1}


WORKER = """
import sys
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from projector_dedup.unit_of_work import UnitOfWork
with UnitOfWork(sessionmaker(create_engine(sys.argv[1]))) as uow:
    uow.claim("m1", "totals")
    uow.commit()
"""


def test_what_a_killed_worker_has_left_waits(primary: Primary, harness: Harness) -> None:
    """SIGKILL does not end the wait; when something does, the redelivery that waited for it waits for the standby."""
    primary.fall_silent()
    arguments = [sys.executable, "-c", WORKER, primary.database.url().render_as_string(hide_password=False)]
    with subprocess.Popen(arguments) as worker:
        waiting = primary.next_wait(Future())
        worker.kill()
    redelivery = harness.start(harness.deliver, harness.dispatcher())
    harness.waits()
    primary.execute("select pg_terminate_backend(%s)", waiting)
    primary.next_wait(redelivery)
    primary.answer()
    assert redelivery.result(PATIENCE).outcome is Outcome.DUPLICATE


# A real standby ------------------------------------------------------------------------------------------------------


COUNTED = ("new message", "redelivery", "claim_timeout", "formerly", "batch, all known")


@pytest.fixture(scope="module")
def standby(primary: Primary) -> Iterator[Standby]:
    """A standby of the primary, which no COMMIT waits for yet."""
    with standby_of(primary) as standby:
        yield standby


@every_driver
def test_a_standby_costs_no_round_trip(primary: Primary, harness: Harness, driver: Driver, standby: Standby) -> None:
    """A delivery takes the statements and round trips of tests/core/costs.md with a standby that answers, too."""
    primary.wait_for(standby)
    with metered(harness.subject.url) as meter:
        harness.transact(lambda session: session.add_all([Total(key=key, amount=0) for key in ROWS]))
        found = {name: str(meter.cost_of(way(meter.harness, name))) for name, way in WAYS.items() if name in COUNTED}
    assert found == {name: cost for name, cost in written()[column(driver)].items() if name in COUNTED}


def test_what_was_acknowledged_is_there_after_a_promotion(primary: Primary, harness: Harness) -> None:
    """The standby stops, waits are ended, messages come again; the standby that is promoted has all that returned."""
    acknowledged: list[str] = []
    dispatcher = harness.dispatcher(retry=RetryPolicy(attempts=2))
    messages = [f"m-{number}" for number in range(8)]

    def deliver(message_id: str) -> None:
        harness.deliver(dispatcher, message_id=message_id)
        acknowledged.append(message_id)

    with standby_of(primary) as standby:
        primary.wait_for(standby)
        for message_id in messages[:4]:
            deliver(message_id)
        standby.stop()
        for message_id in messages[4:] * 2:
            delivery = harness.start(deliver, message_id)
            primary.end_waits(delivery, "pg_cancel_backend")
            assert isinstance(delivery.exception(), CommitOutcomeUnknown)
        assert harness.totals() == {"a": 8}
        standby.promote()
        with Harness(Subject(make_url(standby.url).set(drivername="postgresql+psycopg"))) as promoted:
            assert promoted.totals() == {"a": len(acknowledged)}
            for message_id in messages:
                promoted.deliver(promoted.dispatcher(), message_id=message_id)
            assert promoted.totals() == {"a": len(messages)}


def test_a_replica_answers_for_itself(primary: Primary, harness: Harness) -> None:
    """``applied`` on the engine of a standby is True when the standby shows the writes, and False before that."""
    dispatcher = harness.dispatcher()
    with (
        standby_of(primary) as standby,
        Harness(Subject(make_url(standby.url).set(drivername="postgresql+psycopg"))) as replica,
    ):
        looking = replica.dispatcher()
        harness.deliver(dispatcher)
        assert looking.applied("m1", by=NEW, timeout=PATIENCE)
        assert replica.totals() == {"a": 1}
        standby.fall_behind()
        harness.deliver(dispatcher, message_id="m2")
        assert dispatcher.applied("m2", by=NEW, timeout=0)
        assert not looking.applied("m2", by=NEW, timeout=0.1)
        assert replica.totals() == {"a": 1}
