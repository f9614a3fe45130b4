"""Ways to lose or double a message without a sound that were found from outside, and are closed."""

import threading
import time
from collections.abc import Callable
from contextvars import Context
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, select, text
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import Pool, SingletonThreadPool, StaticPool

from databases import SERVERS, Database, Driver, each_driver
from misbehaviour import swallow
from projector_dedup import (
    Dispatcher,
    InProgress,
    Message,
    Outcome,
    RetriesExhaustedError,
    TransactionViolatedError,
    UnitOfWork,
    UnsafeSessionError,
    UnsupportedDatabaseError,
    claim,
    on,
    projector,
)
from projector_dedup.tables import default_metadata
from projector_dedup.testing.kit import Added, Base, add
from rig import NOTHING, ONCE, Rig, Total
from rig import add as add_one

RigOn = Callable[..., Rig]

totals = projector(idempotent=True, name="totals")(on(Added)(add))


@each_driver("mariadb")
@pytest.mark.parametrize("swallows", [False, True])
def test_an_error_that_a_driver_tells_nobody_cannot_happen(driver: Driver, swallows: bool, rig_on: RigOn) -> None:
    """The second statement of one text may fail, or roll everything back, in silence: such texts are refused."""
    rig = rig_on(driver)

    def handler(session: Session) -> None:
        add_one(session)
        both = text("update total set amount = amount + 1; insert into total values ('a', 5)")
        if swallows:
            swallow(session.execute, both)
        else:
            session.execute(both)

    if swallows:
        assert rig.deliver(handler).outcome is Outcome.APPLIED
        assert rig.durable() == ONCE
    else:
        with pytest.raises(UnsafeSessionError, match="one by one"):
            rig.deliver(handler)
        assert rig.durable() == NOTHING


@each_driver("mariadb", is_async=False)
def test_a_deadlock_while_a_result_is_streamed_is_not_forgotten(driver: Driver, rig_on: RigOn) -> None:
    """The fetch rolls the transaction back and a rival applies the message: what is written then does not commit."""
    rig, rival = rig_on(driver), rig_on(driver)
    rig.outside.execute("insert into total values " + ", ".join(f"('r{n:04}', 0)" for n in range(2000)))
    other = create_engine(rig.sync_engine.url)
    failed: list[Exception] = []

    def handler(session: Session) -> None:
        if failed:
            return
        with other.connect() as connection:
            # Much to roll back: of the two, the server will choose the other, whose fetch is told.
            connection.execute(text("update total set amount = 7 where account > 'r1000'"))
            stream = select(Total.account).where(Total.account > "r").order_by(Total.account).with_for_update()
            blocked = threading.Thread(target=swallow, args=(_waits_for_all, connection, rig))
            blocked.start()
            result = session.execute(stream, execution_options={"stream_results": True, "yield_per": 1})
            try:
                result.all()
            except Exception as error:  # noqa: BLE001  # the disease
                failed.append(error)
            blocked.join()
            connection.rollback()
        if failed:
            Context().run(rival.deliver, add_one)  # as another worker: a handler may not deliver
            session.execute(text("update total set amount = amount + 10 where account = 'a'"))

    with pytest.raises(TransactionViolatedError):
        rig.deliver(handler)
    assert failed
    assert rig.durable() == ONCE
    other.dispose()


def _waits_for_all(connection: Any, rig: Rig) -> None:
    """Once somebody waits for what it holds."""
    while not rig.outside.execute("select 1 from information_schema.innodb_trx where trx_state = 'LOCK WAIT'"):
        time.sleep(0.15)  # the catalogue is a copy that is not made anew more often
    connection.execute(text("update total set amount = 0 where account >= 'r' order by account desc"))


@each_driver("mariadb")
@pytest.mark.parametrize("number", [1206, 1213, 1020])
def test_an_error_by_which_the_server_rolls_back_is_remembered(driver: Driver, number: int, rig_on: RigOn) -> None:
    """A full lock table, 1206, too: swallowed, it is a reason to run the whole unit again, never `APPLIED`."""
    rig = rig_on(driver)

    def handler(session: Session) -> None:
        add_one(session)
        swallow(session.execute, text(f"signal sqlstate 'HY000' set mysql_errno = {number}, message_text = 'x'"))

    with pytest.raises(RetriesExhaustedError):
        rig.deliver(handler)
    assert rig.durable() == NOTHING


@each_driver("mariadb", is_async=False)
def test_a_level_that_a_listener_sets_is_not_taken_for_the_servers(driver: Driver, rig_on: RigOn) -> None:
    """READ COMMITTED set on connecting, after SQLAlchemy has asked for the level, would lose updates."""
    rig = rig_on(driver)

    @event.listens_for(rig.sync_engine, "connect")
    def _set(dbapi_connection: Any, _record: object) -> None:
        cursor = dbapi_connection.cursor()
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        cursor.close()

    found: list[str] = []
    rig.deliver(lambda session: found.append(session.execute(text("select @@tx_isolation")).scalar_one()))
    assert found == ["REPEATABLE-READ"]


@each_driver(*SERVERS, is_async=False)
@pytest.mark.parametrize(
    ("engine_level", "level", "sufficient"),
    [
        (None, "SERIALIZABLE", False),
        ("READ COMMITTED", "REPEATABLE READ", False),
        ("SERIALIZABLE", "REPEATABLE READ", True),
        ("REPEATABLE READ", "REPEATABLE READ", True),
    ],
)
@pytest.mark.filterwarnings("ignore:Connection is already established")
def test_a_connection_that_a_listener_takes_before_its_level_is_set_is_refused(
    driver: Driver, engine_level: str | None, level: str, sufficient: bool, rig_on: RigOn
) -> None:
    """Unless its level will do. SQLAlchemy only warns, and goes on at READ COMMITTED, say, which loses updates."""
    rig = rig_on(driver, **({} if engine_level is None else {"isolation_level": engine_level}))
    sessions = sessionmaker(rig.sync_engine)

    @event.listens_for(sessions, "after_transaction_create")
    def take(session: Session, transaction: Any) -> None:
        if transaction.parent is None:
            session.connection()

    @projector(idempotent=True, name="totals")
    @on("added")
    def handler(_event: None, session: Session) -> None:
        add_one(session)

    dispatcher = Dispatcher(sessions, handler, isolation=level)
    if sufficient:
        assert dispatcher.deliver(Message("m-1", None, type="added")).outcome is Outcome.APPLIED
    else:
        with pytest.raises(UnsafeSessionError, match="after_begin"):
            dispatcher.deliver(Message("m-1", None, type="added"))
    assert rig.durable() == (ONCE if sufficient else NOTHING)
    rig.assert_nothing_is_left()


def test_nothing_commits_after_a_claim_that_was_in_progress(engine: Engine) -> None:
    """The same where a rival held the claim too long."""
    Base.metadata.create_all(engine)
    default_metadata.create_all(engine)
    sessions = sessionmaker(engine)
    with UnitOfWork(sessions) as rival:
        assert rival.claim("m1", "h")
        with UnitOfWork(sessions, claim_timeout=0.1) as uow:
            with pytest.raises(InProgress):
                uow.claim("m1", "h")
            with pytest.raises(UnsafeSessionError):
                uow.commit()


@pytest.mark.parametrize("pool", [StaticPool, SingletonThreadPool])
def test_a_connection_that_is_shared_is_refused_everywhere(database: Database, pool: type[Pool]) -> None:
    """One session's COMMIT would commit another's marker, whoever claims."""
    engine = create_engine(database.url(), poolclass=pool)
    default_metadata.create_all(engine)
    with pytest.raises(UnsupportedDatabaseError, match=pool.__name__):
        Dispatcher(sessionmaker(engine), totals).deliver(Added(), message_id="m1")
    with Session(engine) as session, pytest.raises(UnsupportedDatabaseError, match=pool.__name__):
        claim(session, "m1", "totals")
    engine.dispose()
