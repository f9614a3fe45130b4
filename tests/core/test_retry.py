"""What is tried again, for how long, and what surfaces in the end.

That of several who wait for a delivery one applies when it fails is in the contract (`tests/contract/races.py`).
"""

import time

import pytest
from sqlalchemy import event, insert, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.orm.exc import StaleDataError

from databases import SERVERS, Database, each_driver
from kit import Held
from projector_dedup import Dispatcher, Outcome, on, projector
from projector_dedup.errors import CommitOutcomeUnknown, RetriesExhaustedError
from projector_dedup.options import RetryPolicy
from ready import ready
from rig import CONFLICT, NOTHING, ONCE, TOTAL, Counting, Durable, Rig, Total, add

on_each_server = each_driver(*SERVERS, is_async=False, usual=True)
VIOLATION = text("insert into total values ('same', 1), ('same', 2)")


@pytest.mark.parametrize("database", SERVERS, indirect=True)
def test_a_slow_winner_does_not_cost_the_loser_its_retries(database: Database) -> None:
    """The time for retries starts at the first failure: a loser that waited longer than that is still a duplicate."""
    with ready(database.url()) as harness:
        held = Held(harness)
        dispatcher = harness.dispatcher(harness.handler(held), retry=RetryPolicy(within=0.05))
        winner = harness.start(harness.deliver, dispatcher)
        held.gate.arrival()
        loser = harness.start(harness.deliver, dispatcher)
        harness.waits()
        time.sleep(0.2)  # not to win a race: longer than `within`, which must not matter
        held.gate.open()
        assert (winner.result().outcome, loser.result().outcome) == (Outcome.APPLIED, Outcome.DUPLICATE)
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [("m1", "totals")])


@on_each_server
def test_different_unique_violations_are_different_rivals(rig: Rig) -> None:
    """A handler that creates several rows may meet several rivals; only the same violation again is a bug.

    SQLite's errors do not say which row, and need not: there are no rivals where writers take turns.
    """
    runs: list[int] = []

    def meets_a_rival_each_time(session: Session) -> None:
        runs.append(1)
        number = len(runs)
        session.add(Total(account=f"row-{number}", amount=1))
        session.flush()
        if number <= 4:
            session.execute(text(f"INSERT INTO total VALUES ('row-{number}', 1)"))

    assert rig.deliver(meets_a_rival_each_time).outcome is Outcome.APPLIED
    assert len(runs) == 5
    assert rig.durable() == ONCE


@each_driver()
def test_the_same_unique_violation_is_the_users_error(rig: Rig) -> None:
    """It is tried again twice, then the user's own IntegrityError surfaces, and nothing is applied.

    A bug that writes another value each time, the time of day say, is the same bug.
    """
    runs: list[int] = []

    def bug(session: Session) -> None:
        runs.append(1)
        session.execute(insert(TOTAL).values(account="same", amount=len(runs)))
        session.execute(insert(TOTAL).values(account="same", amount=1000 + len(runs)))

    with pytest.raises(IntegrityError):
        rig.deliver(bug)
    assert len(runs) == 3
    assert rig.durable() == NOTHING


@on_each_server
def test_a_violation_that_comes_too_late_to_be_tried_again_is_no_bug_yet(rig: Rig) -> None:
    """After conflicts for as long as the policy allows, a first violation may be a rival's: the message is kept."""
    runs: list[int] = []

    def conflicts_then_violates(session: Session) -> None:
        runs.append(1)
        session.execute(text(CONFLICT[rig.driver.engine]) if len(runs) == 1 else VIOLATION)

    with pytest.raises(RetriesExhaustedError) as exhausted:
        rig.deliver(conflicts_then_violates, retry=RetryPolicy(attempts=2, base=0))
    assert isinstance(exhausted.value.__cause__, IntegrityError)
    assert rig.durable() == NOTHING


@on_each_server
def test_a_violation_that_may_not_be_tried_again_is_the_users_error(rig: Rig) -> None:
    """Who asks for no retries gets the violation itself."""
    with pytest.raises(IntegrityError):
        rig.deliver(lambda session: session.execute(VIOLATION), retry=RetryPolicy(attempts=1))


@each_driver("mariadb", is_async=False, usual=True)
def test_a_lock_wait_of_the_handler_is_tried_again(rig: Rig) -> None:
    """MariaDB's own bound (1205) undoes one statement only; the unit of work runs again whole, and is no InProgress."""
    event.listen(rig.sync_engine, "connect", lambda driver, _: driver.query("SET innodb_lock_wait_timeout = 1"))
    rig.outside.execute("insert into total values ('a', 1)")
    runs: list[int] = []
    with Session(rig.sync_engine) as holder:
        holder.execute(select(Total).where(Total.account == "a").with_for_update()).all()

        def body(session: Session) -> None:
            runs.append(1)
            session.add(Total(account=f"b{len(runs)}", amount=1))
            session.flush()
            if len(runs) == 2:
                holder.rollback()
            add(session)

        assert rig.deliver(body).outcome is Outcome.APPLIED
    assert len(runs) == 2
    assert rig.durable() == Durable(1, 3)


@on_each_server
def test_retries_are_bounded_by_their_number(rig: Rig) -> None:
    """A conflict that never ends is raised as RetriesExhaustedError, with the last one as its cause."""
    runs: list[int] = []

    def conflict(session: Session) -> None:
        runs.append(1)
        session.execute(text(CONFLICT[rig.driver.engine]))

    with pytest.raises(RetriesExhaustedError) as exhausted:
        rig.deliver(conflict, retry=RetryPolicy(attempts=4, base=0))
    assert len(runs) == 4
    assert isinstance(exhausted.value.__cause__, DBAPIError)
    assert "conflict" in str(exhausted.value.__cause__)
    assert rig.durable() == NOTHING


def test_a_policy_of_many_attempts_does_not_overflow(factory: sessionmaker[Session]) -> None:
    """The backoff doubles only so far."""
    attempts = iter(range(10_000))

    @projector(idempotent=True, name="retry")
    @on(str)
    def handler(_event: str, _session: Session) -> None:
        if next(attempts) < 1_100:
            raise StaleDataError("somebody was faster")

    dispatcher = Dispatcher(factory, handler, retry=RetryPolicy(attempts=2_000, within=100, cap=0))
    assert dispatcher.deliver("e", message_id="1").outcome is Outcome.APPLIED


@pytest.mark.parametrize("policy", [{"attempts": 0}, {"within": -1}, {"base": -1}])
def test_a_policy_that_means_nothing_is_refused(policy: dict[str, int]) -> None:
    """At start-up, not at the first failure."""
    with pytest.raises(ValueError, match="RetryPolicy"):
        RetryPolicy(**policy)  # type: ignore[arg-type]  # one number each


@on_each_server
def test_an_unknown_outcome_of_another_delivery_is_not_ours(rig: Rig) -> None:
    """A handler that delivers elsewhere and hears CommitOutcomeUnknown fails once; it is not run again."""

    def inner_unknown(_session: Session) -> None:
        raise CommitOutcomeUnknown("elsewhere") from OSError()

    handler = Counting(inner_unknown)
    with pytest.raises(CommitOutcomeUnknown, match="elsewhere"):
        rig.deliver(handler)
    assert handler.runs == 1
    assert rig.durable() == NOTHING


@on_each_server
@pytest.mark.parametrize("error", [ConnectionResetError("lookup"), TimeoutError("lookup")], ids=repr)
def test_a_listener_that_cannot_reach_its_directory_is_tried_again(rig: Rig, error: OSError) -> None:
    """A listener that looks a tenant up when the transaction begins fails like a connection that cannot be had."""
    begun: list[object] = []

    class Choosing(Session):
        """A Session class of the user's."""

    def choose(*_: object) -> None:
        begun.append(1)
        if len(begun) == 1:
            raise error

    event.listen(Choosing, "after_begin", choose)
    rig.session_class = Choosing
    assert rig.deliver(add).outcome is Outcome.APPLIED
    assert len(begun) == 2
    assert rig.durable() == ONCE
