"""A handler that is right in a session of its own is right here: its locks protect its reads, and no conflict is lost.

In each test a rival commits between the claim and the handler's first statement (docs/adr/0004-lost-updates.md).
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import insert, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from databases import DRIVERS, USUAL_DRIVERS, Driver
from harm import (
    FUNCTION,
    LOCKING,
    MINE,
    RIVALS,
    UPSERTS,
    Body,
    Child,
    Offer,
    Parent,
    Play,
    Scene,
    Sum,
    append,
    inserts_or_updates,
    locks_and_calls_a_function,
    locks_and_inserts_from_select,
    locks_parent,
    locks_the_table,
    play_fixture,  # noqa: F401  # a fixture
    skips_bad_lines,
)
from kit import Added
from projector_dedup import Outcome, on, projector
from projector_dedup.errors import OvertakenError, TransactionViolatedError
from projector_dedup.options import RetryPolicy
from projector_dedup.testing import external_transaction
from projector_dedup.unit_of_work import UnitOfWork

Way = Callable[[Scene], None]
WAYS: tuple[Way, ...] = (Scene.deliver, Scene.deliver_batch, Scene.command, Scene.endpoint)
SERVERS = [driver for driver in DRIVERS if driver.engine != "sqlite"]
ONCE = RetryPolicy(attempts=1, within=0)
LEVELS = {
    "postgresql": ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"),
    "mariadb": ("READ COMMITTED", "REPEATABLE READ"),
}


def keeps_the_rival_out(driver: Driver, body: Body) -> bool:
    """True if the locks of the batch's first message stop the rival, who works on another account."""
    gaps = driver.engine == "mariadb" and body is locks_and_inserts_from_select
    return gaps or body is locks_the_table


def leave_out_on_mysql(scene: Scene, way: Way, level: str | None) -> None:
    """Skip a batch at MySQL's default: SERIALIZABLE, where what its first message reads keeps the rival out."""
    if scene.shop.harness.subject.is_mysql and level is None and way is Scene.deliver_batch:
        pytest.skip("at SERIALIZABLE the reads of the batch's first message keep the rival out")


def _cases(bodies: Callable[[Driver], tuple[Body, ...]], *, levels: Callable[[Driver, Way], tuple[Any, ...]]) -> Any:
    """Each body in each way, at each level: all on the usual drivers, the first of each on the others."""
    return [
        pytest.param(driver, body, way, level, id=f"{driver}-{body.__name__}-{way.__name__}-{level or 'default'}")
        for driver in SERVERS
        for body in (bodies(driver) if driver in USUAL_DRIVERS else bodies(driver)[:1])
        for way in (WAYS if driver in USUAL_DRIVERS else WAYS[:2])
        if not (way is Scene.deliver_batch and keeps_the_rival_out(driver, body))
        for level in (None, *levels(driver, way))
        if level is None or (driver in USUAL_DRIVERS and not driver.is_async)
    ]


def _levels_of_locks(driver: Driver, _way: Way) -> tuple[str, ...]:
    if driver.engine == "mariadb":
        return LEVELS["mariadb"]
    return "READ COMMITTED", "SERIALIZABLE"  # at REPEATABLE READ such a handler is wrong without the library too


@pytest.mark.by_turns
@pytest.mark.parametrize(
    ("driver", "body", "way", "level"), _cases(lambda driver: LOCKING[driver.engine], levels=_levels_of_locks)
)
def test_a_lock_protects_what_is_read_after_it(play: Play, body: Body, way: Way, level: str | None) -> None:
    """The handler locks, reads the last line and inserts the next: the rival's line counts."""
    with play(body, dispatcher_isolation=level) as scene:
        leave_out_on_mysql(scene, way, level)
        way(scene)
        assert scene.balance() == MINE + RIVALS


@pytest.mark.by_turns
@pytest.mark.parametrize(
    ("driver", "body", "way", "level"),
    _cases(lambda _driver: UPSERTS, levels=lambda driver, _way: LEVELS[driver.engine]),
)
def test_a_row_that_the_snapshot_hides_counts(play: Play, body: Body, way: Way, level: str | None) -> None:
    """The INSERT in a savepoint meets the rival's row, which the snapshot does not show: both amounts count."""
    with play(body, dispatcher_isolation=level) as scene:
        leave_out_on_mysql(scene, way, level)
        way(scene)
        assert scene.balance() == MINE + RIVALS


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", [None, "REPEATABLE READ"])
@pytest.mark.parametrize("driver", [each for each in SERVERS if each in USUAL_DRIVERS], ids=str)
def test_a_conflict_in_a_savepoint_runs_the_handler_again(play: Play, way: Way, level: str | None) -> None:
    """The handler skips lines that the database refuses. A line that met a rival's change is a good one."""

    def reads(session: Session) -> None:
        session.scalar(select(Sum.amount).where(Sum.account == "a"))  # on MariaDB this takes the snapshot

    with play(skips_bad_lines, dispatcher_isolation=level, before=reads) as scene:
        if scene.shop.harness.subject.is_mysql:
            pytest.skip("SERIALIZABLE keeps the rival out, and at REPEATABLE READ the database finds no conflict")
        scene.store(Sum(account="a", amount=1))
        way(scene)
        assert scene.balance() == 1 + MINE + RIVALS
        assert scene.runs > 1


POSTGRESQL = [each for each in SERVERS if each.engine == "postgresql"]
PSYCOPG = [each for each in POSTGRESQL if each in USUAL_DRIVERS and not each.is_async]
postgresql = pytest.mark.parametrize("driver", PSYCOPG, ids=str)


@pytest.mark.parametrize("driver", POSTGRESQL, ids=str)
def test_the_lowered_run_is_no_attempt_and_comes_once(
    driver: Driver, play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    """The library runs the handler again at once, without a retry, and logs once which declaration spares it."""
    with play(locks_parent) as scene, caplog.at_level(logging.INFO, "projector_dedup"):
        scene.deliver(retry=ONCE, declared={"name": f"lowered-{driver.module}-{driver.is_async}"})
        assert scene.runs == 2
        scene.deliver_batch(retry=ONCE)
    told = [record.message for record in caplog.records if f"lowered-{driver.module}" in record.message]
    assert sum("declare isolation='READ COMMITTED'" in text for text in told) == 1


@postgresql
def test_a_declared_level_spares_the_first_run(play: Play) -> None:
    """With isolation='READ COMMITTED' the handler runs once."""
    with play(locks_parent) as scene:
        scene.deliver(declared={"isolation": "READ COMMITTED"})
        assert (scene.runs, scene.balance()) == (1, MINE + RIVALS)


@postgresql
def test_a_chosen_level_is_not_lowered(play: Play) -> None:
    """With isolation='REPEATABLE READ' the handler runs once, as it would run in a session of that level."""
    with play(locks_parent, begins=0) as scene:
        scene.deliver(declared={"isolation": "REPEATABLE READ"})
        assert (scene.runs, scene.balance()) == (1, MINE)


@pytest.mark.parametrize("driver", [each for each in SERVERS if each in USUAL_DRIVERS], ids=str)
def test_a_lock_of_the_first_message_of_a_batch_protects_its_reads(play: Play) -> None:
    """The claim of a batch takes the snapshot, also on MariaDB, where the claim of a single message takes none."""

    def locks_for_one(session: Session, account: str, amount: int) -> None:
        if account == "a":  # the other message takes no lock, which would also run the batch again
            locks_parent(session, account, amount)

    with play(locks_for_one) as scene:
        scene.deliver_batch(first="a")
        assert scene.balance() == MINE + RIVALS


@pytest.mark.parametrize("driver", [each for each in SERVERS if each in USUAL_DRIVERS], ids=str)
def test_a_lock_beside_duplicates_protects_its_reads(play: Play) -> None:
    """The claim of a batch takes the snapshot, also if only one of its messages is new."""
    with play(locks_parent) as scene:
        scene.deliver_batch(repeats=True)
        assert scene.balance() == MINE + RIVALS


@pytest.mark.parametrize("driver", [each for each in SERVERS if each in USUAL_DRIVERS], ids=str)
def test_a_message_of_a_batch_that_changes_a_row_and_reads_runs_once(play: Play) -> None:
    """The UPDATE of a flush is no lock: the database itself compares the row."""

    def adds_and_reads(session: Session, account: str, amount: int) -> None:
        session.get_one(Sum, account).amount += amount
        append(session, account, amount)

    with play(adds_and_reads, begins=0) as scene:
        scene.store(Sum(account="a", amount=1), Sum(account="other", amount=1))
        scene.deliver_batch(first="a")
        assert scene.runs == 1


@postgresql
def test_a_handler_that_locks_and_changes_one_row_runs_once(play: Play) -> None:
    """A lock without a later read costs nothing: the database itself compares the row."""

    def locks_and_adds(session: Session, account: str, amount: int) -> None:
        session.get_one(Sum, account, with_for_update=True).amount += amount
        session.flush()
        session.add(Parent(account=f"after-{amount}"))

    with play(locks_and_adds, begins=0) as scene:
        scene.store(Sum(account="a", amount=1))
        scene.deliver()
        assert (scene.runs, scene.balance()) == (1, 1 + MINE)


@postgresql
def test_an_insert_that_meets_a_visible_row_runs_once(play: Play) -> None:
    """A unique violation with a row that the snapshot shows costs one question, and no second run."""
    with play(inserts_or_updates, begins=0) as scene:
        scene.rival()
        scene.deliver()
        assert (scene.runs, scene.balance()) == (1, MINE + RIVALS)


@pytest.mark.parametrize("level", ["REPEATABLE READ", None])
@postgresql
def test_a_unique_index_that_the_library_does_not_know_runs_the_handler_twice_at_most(
    play: Play, level: str | None
) -> None:
    """No column of the table has the value of the index lower(account), so the library cannot find the row."""

    def inserts_or_ignores(session: Session, account: str, amount: int) -> None:
        inserts_or_updates(session, account.upper(), amount)

    with play(inserts_or_ignores, dispatcher_isolation=level, begins=0) as scene:
        with scene.engine.begin() as connection:
            connection.exec_driver_sql("create unique index harm_lower on harm_sum (lower(account))")
            connection.exec_driver_sql("insert into harm_sum values ('a', 1)")
        scene.deliver()
        assert (scene.runs, scene.balance()) == (2, 1)


# The lowered run keeps every update of ordinary ORM code --------------------------------------------------------------


def _locks_then(change: Callable[[Session], None]) -> Body:
    def body(session: Session, account: str, amount: int) -> None:
        session.get_one(Parent, "other" if amount == RIVALS else account, with_for_update=True)
        append(session, f"{account}-{amount}", amount)
        change(session)

    return body


def _adds(session: Session) -> None:
    session.get_one(Sum, "a").amount += 1


@pytest.mark.parametrize("driver", POSTGRESQL, ids=str)
def test_an_unlocked_row_keeps_both_updates(play: Play) -> None:
    """The rival changes, in the lowered run, a row that the handler has read without a lock."""
    rivals: list[int] = []

    def change(session: Session) -> None:
        row = session.get_one(Sum, "a")
        if scene.runs == 2 and not rivals:
            rivals.append(1)
            scene.shop.harness.blocking(add_ten)
        row.amount += 1

    def add_ten() -> None:
        with Session(scene.engine) as session:
            session.get_one(Sum, "a").amount += 10
            session.commit()

    with play(_locks_then(change), begins=0) as scene:
        scene.store(Sum(account="a", amount=100))
        scene.deliver()
        assert (scene.runs, scene.balance()) == (3, 111)


# Where the library cannot run a handler again -------------------------------------------------------------------------


@postgresql
def test_a_unit_of_work_says_at_which_level_to_run_it_again(play: Play) -> None:
    """It has no dispatcher that could do so. At the level of the error it is right."""
    with play(locks_parent) as scene:
        factory = scene.shop.harness.factory
        with UnitOfWork(factory) as uow:
            assert uow.claim("m1", "harm")
            with pytest.raises(OvertakenError, match="isolation='READ COMMITTED'") as raised:
                scene.handle("a", uow.session)
        with UnitOfWork(factory, isolation=raised.value.isolation) as uow:
            assert uow.claim("m1", "harm")
            scene.handle("a", uow.session)
            uow.commit()
        assert scene.balance() == MINE + RIVALS


@postgresql
def test_a_test_of_the_user_finds_the_lock(play: Play) -> None:
    """In the outer transaction of a test the handler raises, unless its level is declared."""
    with play(locks_parent, begins=0) as scene, scene.shop.harness.outer_transaction() as factory:
        for declared, right in (({}, False), ({"isolation": "READ COMMITTED"}, True)):
            handler = scene._handler(**declared)
            dispatcher = scene.shop.harness.dispatcher(handler, factory=factory)
            with external_transaction(dispatcher):
                if right:
                    assert not scene.shop.harness.deliver(dispatcher).durable
                    continue
                with pytest.raises(OvertakenError, match="READ COMMITTED"):
                    scene.shop.harness.deliver(dispatcher)


def _sends(session: Session) -> None:
    with pytest.raises(OvertakenError):  # nothing more is sent for an attempt that is given up
        session.execute(insert(Sum).values(account="a", amount=-1))


def _raises(_session: Session) -> None:
    raise ValueError("the handler translates the error")


@pytest.mark.parametrize("goes_on", [lambda _session: None, _sends, _raises], ids=["returns", "sends", "raises"])
@postgresql
def test_a_handler_cannot_swallow_it(play: Play, goes_on: Callable[[Session], None]) -> None:
    """The library runs the handler again although the handler has caught the error and goes on."""

    def swallows(session: Session, account: str, amount: int) -> None:
        try:
            locks_parent(session, account, amount)
        except OvertakenError:
            goes_on(session)

    with play(swallows) as scene:
        scene.deliver()
        assert scene.balance() == MINE + RIVALS


@postgresql
def test_a_handler_that_catches_everything_and_tries_again_ends(play: Play) -> None:
    """The loop of an attempt that was given up is ended by an exception that ``except Exception`` does not catch."""
    rounds: list[int] = []

    def tries_again(session: Session, account: str, amount: int) -> None:
        while True:
            rounds.append(1)
            assert len(rounds) < 10_000, "the loop does not end"
            with contextlib.suppress(Exception):
                return locks_parent(session, account, amount)

    with play(tries_again) as scene:
        scene.deliver()
        assert (scene.runs, scene.balance()) == (2, MINE + RIVALS)


# What the library looks for, and where --------------------------------------------------------------------------------


@postgresql
def test_a_function_that_reads_behind_a_lock_is_a_read(play: Play) -> None:
    """Its SQL names no table, and the lock stands behind another statement."""
    with play(locks_and_calls_a_function) as scene:
        with scene.engine.begin() as connection:
            connection.exec_driver_sql(FUNCTION)
        scene.deliver()
        assert scene.balance() == MINE + RIVALS


@pytest.mark.parametrize("caught", [True, False], ids=["caught", "raised"])
@postgresql
def test_a_parent_that_the_snapshot_hides_is_found(play: Play, caught: bool) -> None:
    """The rival inserts the parent, and the handler's child refers to it."""

    def inserts(session: Session, _account: str, amount: int) -> None:
        if amount == RIVALS:
            session.add(Parent(account="new"))
            return
        try:
            with session.begin_nested():
                session.add(Child(account="new"))
        except IntegrityError:
            if not caught:
                raise
            session.add(Sum(account="parked", amount=amount))

    with play(inserts) as scene:
        scene.deliver()
        with Session(scene.engine) as session:
            assert session.scalars(select(Child.account)).all() == ["new"]
        assert (scene.runs, scene.balance("parked")) == (2, 0)


@postgresql
def test_a_row_outside_of_a_partial_index_is_not_the_one_that_was_met(play: Play) -> None:
    """The snapshot shows an old offer of the account, and hides the active one of the rival."""

    def offers(session: Session, account: str, amount: int) -> None:
        try:
            with session.begin_nested():
                session.add(Offer(account=account, amount=amount))
        except IntegrityError:
            active = update(Offer).where(Offer.account == account, Offer.active)
            session.execute(active.values(amount=Offer.amount + amount))

    with play(offers) as scene:
        scene.store(Offer(account="a", active=False))
        scene.deliver()
        assert scene.read(select(Offer.amount).where(Offer.active)) == MINE + RIVALS


@postgresql
def test_the_handlers_schema_stays(play: Play) -> None:
    """The question for the row goes to the tenant of the handler, and so does what the handler writes next."""

    def of_tenant(session: Session, account: str, amount: int) -> None:
        session.connection().execution_options(schema_translate_map={None: "harm_tenant"})
        inserts_or_updates(session, account, amount)

    with play(of_tenant, begins=0) as scene:
        with scene.engine.begin() as connection:
            connection.exec_driver_sql("create schema harm_tenant")
            tenant = connection.execution_options(schema_translate_map={None: "harm_tenant"})
            Sum.metadata.create_all(tenant)
            connection.exec_driver_sql("insert into harm_tenant.harm_sum values ('a', 1)")
            connection.exec_driver_sql("insert into harm_sum values ('a', 1000)")
        scene.deliver()
        with scene.engine.connect() as connection:
            tenants = connection.exec_driver_sql("select amount from harm_tenant.harm_sum").scalar()
        assert (scene.runs, scene.balance(), tenants) == (1, 1000, 1 + MINE)


@postgresql
def test_many_rows_that_cannot_be_looked_for_cost_one_run(play: Play) -> None:
    """At a level that the library must not lower, a handler of text that inserts or ignores runs twice at most."""

    def inserts_or_ignores(session: Session, account: str, amount: int) -> None:
        for number in range(30):
            with contextlib.suppress(IntegrityError), session.begin_nested():
                session.execute(text(f"insert into harm_sum values ('{account}{number}', {amount})"))

    with play(inserts_or_ignores, begins=0, dispatcher_isolation="REPEATABLE READ") as scene:
        scene.rival()
        scene.deliver()
        assert (scene.runs, scene.balance("a7")) == (2, RIVALS)


@postgresql
def test_a_commit_on_the_drivers_connection_is_heard_of_behind_a_lock(play: Play) -> None:
    """The attempt was given up, and then the handler commits what it has written until then: it does not run again."""

    def commits_below(session: Session, account: str, amount: int) -> None:
        below: Any = session.connection().connection
        below.cursor().execute(f"insert into harm_sum values ('below', {amount})")
        with contextlib.suppress(OvertakenError):
            locks_parent(session, account, amount)
        below.commit()

    with play(commits_below, begins=0) as scene:
        with pytest.raises(TransactionViolatedError) as raised:
            scene.deliver()
        assert (raised.value.durable, scene.runs) == (True, 1)


@pytest.mark.parametrize("driver", PSYCOPG, ids=str)
def test_a_handler_that_commits_again_and_again_ends(play: Play) -> None:
    """The guard ends a loop that catches the error of a violation, too."""
    rounds: list[int] = []

    def commits(session: Session, _account: str, _amount: int) -> None:
        while True:
            rounds.append(1)
            assert len(rounds) < 10_000, "the loop does not end"
            with contextlib.suppress(Exception):
                session.execute(text("commit"))
                return

    with play(commits, begins=0) as scene, pytest.raises(TransactionViolatedError):
        scene.deliver()


@postgresql
def test_many_rows_of_an_unknown_index_cost_a_few_runs(play: Play) -> None:
    """At a level that the library must not lower, an index that the table does not declare exhausts no retries."""

    def inserts_or_ignores(session: Session, account: str, amount: int) -> None:
        for number in range(25):
            with contextlib.suppress(IntegrityError), session.begin_nested():
                session.add(Sum(account=f"{account.upper() if amount == MINE else account}{number}", amount=amount))

    with play(inserts_or_ignores, begins=0, dispatcher_isolation="REPEATABLE READ") as scene:
        with scene.engine.begin() as connection:
            connection.exec_driver_sql("create unique index harm_lower on harm_sum (lower(account))")
        scene.rival()
        scene.deliver()
        assert (scene.runs, scene.balance("a7")) == (4, RIVALS)


ASYNCPG = [each for each in POSTGRESQL if each in USUAL_DRIVERS and each.is_async]


@pytest.mark.parametrize("driver", ASYNCPG, ids=str)
def test_a_loop_in_a_task_group_ends(play: Play) -> None:
    """A TaskGroup puts the exception that ends the handler into a group."""
    runs: list[int] = []

    async def loops(_happened: Added, session: AsyncSession) -> None:
        runs.append(1)

        async def tries_again() -> None:
            for _ in range(10_000):
                with contextlib.suppress(Exception):
                    return await session.run_sync(locks_parent, "a", MINE)
            raise AssertionError("the loop does not end")

        async with asyncio.TaskGroup() as group:
            group.create_task(tries_again())

    with play(locks_parent) as scene:
        handler = projector(idempotent=True, name="groups")(on(Added)(loops))
        dispatcher = scene.shop.harness.dispatcher(handler)
        assert scene.shop.harness.deliver(dispatcher).outcome is Outcome.APPLIED
        assert (len(runs), scene.balance()) == (2, MINE)
