"""What the guards must leave alone: ordinary errors, retries and duplicates cost neither a reconnect nor a message."""

import gc
from collections.abc import Callable

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError, IntegrityError, InvalidRequestError, ResourceClosedError
from sqlalchemy.orm import Session

from databases import DRIVERS, Driver
from misbehaviour import bad_flush, fail, swallow
from projector_dedup import Defer, Outcome, TransactionViolatedError
from projector_dedup.guarded import GuardedSession
from rig import NOTHING, ONCE, Durable, Rig, add, outsides_fixture, rig_on_fixture  # noqa: F401  # fixtures

every_driver = pytest.mark.parametrize("driver", DRIVERS, ids=str)
on_postgresql = pytest.mark.parametrize(
    "driver", [driver for driver in DRIVERS if driver.engine == "postgresql"], ids=str
)
RigOn = Callable[[Driver], Rig]


def raises_value_error(session: Session) -> None:
    """A bug."""
    add(session)
    raise ValueError


def raises_integrity_error(session: Session) -> None:
    """The database says no, and will say it again."""
    session.execute(text("insert into total values ('b', null)"))


def raises_integrity_error_in_flush(session: Session) -> None:
    """The same, found by the ORM."""
    add(session)
    bad_flush(session)


def raises_defer(session: Session) -> None:
    """Not now."""
    add(session)
    raise Defer


def rolls_back_and_raises(session: Session) -> None:
    """The idiom of those who were taught to clean up."""
    try:
        raises_integrity_error(session)
    except Exception:
        session.rollback()
        raise


@every_driver
@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (raises_value_error, ValueError),
        (raises_integrity_error, IntegrityError),
        (raises_integrity_error_in_flush, IntegrityError),
        (raises_defer, Defer),
        (rolls_back_and_raises, IntegrityError),
    ],
)
def test_a_handlers_own_error_is_what_the_caller_gets(
    driver: Driver, handler: Callable[[Session], None], expected: type[Exception], rig_on: RigOn
) -> None:
    """It surfaces as it is, nothing is durable, the connection is kept, and a redelivery applies."""
    rig = rig_on(driver)
    with pytest.raises(expected):
        rig.deliver(handler)
    assert rig.durable() == NOTHING
    rig.assert_nothing_is_left()
    assert rig.deliver(add).outcome is Outcome.APPLIED
    assert rig.deliver(add).outcome is Outcome.DUPLICATE
    assert rig.durable() == ONCE
    assert rig.connects == 1


def overtaken(rig: Rig, then: Callable[[Session], None]) -> Callable[[Session], None]:
    """A handler that the first time changes a row which somebody else has changed since: 40001."""
    rig.outside.execute("insert into total values ('a', 0)")
    attempts = iter(range(100))

    def handler(session: Session) -> None:
        session.execute(text("select 1"))
        if next(attempts) == 0:
            rig.outside.execute("update total set amount = amount")
            then(session)
        add(session)

    return handler


def surfaces(session: Session) -> None:
    """The error goes where it should."""
    add(session)


def is_swallowed(session: Session) -> None:
    """It does not."""
    swallow(session.execute, text("update total set amount = 5"))


def is_swallowed_and_so_is_the_next(session: Session) -> None:
    """The second error, 25P02, says nothing of the first."""
    is_swallowed(session)
    swallow(session.execute, text("select 1"))


def is_swallowed_by_the_flush(session: Session) -> None:
    """The ORM rolls back, and says so at every later use."""
    swallow(add, session)


def is_swallowed_and_rolled_back(session: Session) -> None:
    """Whoever rolls back loses the marker too."""
    is_swallowed(session)
    session.rollback()


def is_made_another(session: Session) -> None:
    """The handler wraps it."""
    try:
        add(session)
    except DBAPIError as error:
        raise ValueError("could not add") from error


@on_postgresql
@pytest.mark.parametrize(
    "then",
    [
        surfaces,
        is_swallowed,
        is_swallowed_and_so_is_the_next,
        is_swallowed_by_the_flush,
        is_swallowed_and_rolled_back,
        is_made_another,
    ],
)
def test_a_serialization_failure_is_retried_whatever_the_handler_makes_of_it(
    driver: Driver, then: Callable[[Session], None], rig_on: RigOn
) -> None:
    """The first error of the transaction decides: the whole unit runs again, on the connection that it had."""
    rig = rig_on(driver)
    assert rig.deliver(overtaken(rig, then)).outcome is Outcome.APPLIED
    assert rig.durable() == ONCE
    assert rig.connects == 1
    rig.assert_nothing_is_left()


@every_driver
def test_a_swallowed_flush_error_names_the_remedy(driver: Driver, rig_on: RigOn) -> None:
    """It comes out as a violation that says what to write, not as SQLAlchemy's PendingRollbackError."""
    rig = rig_on(driver)

    def handler(session: Session) -> None:
        add(session)
        swallow(bad_flush, session)

    with pytest.raises(TransactionViolatedError, match="begin_nested"):
        rig.deliver(handler)


@every_driver
def test_a_prevented_commit_is_remembered_to_the_end(driver: Driver, rig_on: RigOn) -> None:
    """After it was swallowed no statement runs any more, and the last word is the first violation."""
    rig = rig_on(driver)
    later: list[BaseException] = []

    def handler(session: Session) -> None:
        swallow(session.commit)
        for _ in range(2):
            try:
                add(session)
            except TransactionViolatedError as error:
                later.append(error)

    with pytest.raises(TransactionViolatedError, match=r"session\.commit\(\)") as raised:
        rig.deliver(handler)
    assert later == [raised.value] * 2
    assert rig.durable() == NOTHING
    rig.assert_nothing_is_left()


@every_driver
def test_a_session_kept_after_its_message_is_dead(driver: Driver, rig_on: RigOn) -> None:
    """Whoever stores the session, or its connection, and uses it later gets an error, and writes nothing."""
    rig = rig_on(driver)
    kept: list[Session] = []

    def handler(session: Session) -> None:
        kept.append(session)
        add(session)

    rig.deliver(handler)
    session = kept[0]

    def use(_other: Session) -> None:
        with pytest.raises(InvalidRequestError):
            add(session, 100)
        with pytest.raises(InvalidRequestError):
            session.commit()

    rig.deliver(use, "m-2")
    assert rig.durable() == Durable(2, 1)
    rig.assert_nothing_is_left()


@every_driver
def test_a_connection_kept_after_its_message_is_closed(driver: Driver, rig_on: RigOn) -> None:
    """The connection is an ordinary, closed one again."""
    rig = rig_on(driver)
    kept = []

    def handler(session: Session) -> None:
        kept.append(session.connection())

    rig.deliver(handler)

    def use(_other: Session) -> None:
        with pytest.raises(ResourceClosedError):
            kept[0].execute(text("select 1"))

    rig.deliver(use, "m-2")
    rig.assert_nothing_is_left()


@every_driver
def test_a_lost_connection_that_was_swallowed_is_retried(driver: Driver, rig_on: RigOn) -> None:
    """The whole unit runs again on a new connection, and counts once."""
    rig = rig_on(driver)
    attempts = iter(range(100))

    def handler(session: Session) -> None:
        add(session)
        if next(attempts) == 0:
            session.connection().connection.dbapi_connection.close()  # type: ignore[union-attr]  # it is open
            swallow(fail, session)

    assert rig.deliver(handler).outcome is Outcome.APPLIED
    assert rig.durable() == ONCE
    rig.assert_nothing_is_left()


@every_driver
def test_without_a_marker_the_transaction_is_guarded_too(driver: Driver, rig_on: RigOn) -> None:
    """A projector that is not idempotent gets invariant I4; what it committed below is never called rolled back."""
    rig = rig_on(driver)

    def commits(session: Session) -> None:
        add(session)
        session.commit()

    def commits_below(session: Session) -> None:
        add(session)
        session.connection().connection.commit()
        raise ValueError

    with pytest.raises(TransactionViolatedError) as raised:
        rig.deliver(commits, idempotent=False)
    assert not raised.value.durable
    assert rig.durable() == NOTHING
    with pytest.raises(TransactionViolatedError, match="without a marker") as raised:
        rig.deliver(commits_below, idempotent=False)
    assert raised.value.durable
    assert rig.durable() == Durable(0, 1)
    rig.assert_nothing_is_left()


@pytest.mark.parametrize("driver", [driver for driver in DRIVERS if not driver.is_async], ids=str)
def test_a_detached_connection_still_commits(driver: Driver, rig_on: RigOn) -> None:
    """It has left the pool, and marker and writes are in it all the same."""
    rig = rig_on(driver)

    def handler(session: Session) -> None:
        session.connection().detach()
        add(session)

    assert rig.deliver(handler).outcome is Outcome.APPLIED
    assert rig.durable() == ONCE
    rig.assert_nothing_is_left()


@every_driver
def test_a_sessionmaker_that_is_dropped_is_forgotten(driver: Driver, rig_on: RigOn) -> None:
    """Whoever makes a sessionmaker for every message leaves no class behind for each of them."""
    rig = rig_on(driver)

    def classes() -> int:
        gc.collect()
        return len(GuardedSession.__subclasses__())

    rig.deliver(add, "m-0")
    before = classes()
    for number in range(20):
        rig.deliver(add, f"m-{number}")
    assert classes() <= before + 1
