"""`deliver_batch` where something goes wrong, and what its session does not do for every message.

What holds on every driver is in the contract (`projector_dedup/testing/batches.py`).
"""

import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.orm import Session, sessionmaker

from cut_proxy import Cut, CutProxy
from databases import Database
from projector_dedup import (
    BatchFailed,
    CommitOutcomeUnknown,
    Delivery,
    Dispatcher,
    InProgress,
    InvalidMessageIdError,
    Message,
    MissingTableError,
    Outcome,
    RetryPolicy,
    TransactionViolatedError,
    UnhandledMessage,
    UnitOfWork,
    on,
    projector,
)
from projector_dedup.tables import default_metadata
from projector_dedup.testing.harness import Harness
from projector_dedup.testing.subject import Account, Added, Base, Subject, Total, add

APPLIED, DUPLICATE, FAILED = Outcome.APPLIED, Outcome.DUPLICATE, Outcome.FAILED
totals = projector(idempotent=True, name="totals")(on(Added)(add))


def numbered(*numbers: int) -> list[Message]:
    """Messages `m<number>` that add the number to row a."""
    return [Message(f"m{number}", Added(amount=number)) for number in numbers]


def outcomes(deliveries: list[Delivery]) -> list[Outcome]:
    """Of each delivery."""
    return [delivery.outcome for delivery in deliveries]


@pytest.fixture
def sessions(engine: Engine) -> sessionmaker[Session]:
    """The tables, on every engine and synchronous driver."""
    for metadata in (default_metadata, Base.metadata):
        metadata.create_all(engine)
    return sessionmaker(engine)


def amounts(sessions: sessionmaker[Session]) -> dict[str, int]:
    """The read model, from another connection."""
    with sessions() as session:
        return {total.key: total.amount for total in session.query(Total)}


def test_what_cannot_be_routed_takes_no_other_with_it(sessions: sessionmaker[Session]) -> None:
    """No id, no handler: those fail, in their place."""
    batch = [*numbered(1), Added(amount=10), Message("m2", "nobody wants this"), *numbered(3)]
    with pytest.raises(BatchFailed) as failed:
        Dispatcher(sessions, totals).deliver_batch(batch)
    assert outcomes(failed.value.deliveries) == [APPLIED, FAILED, FAILED, APPLIED]
    assert [type(error) for error in failed.value.exceptions] == [InvalidMessageIdError, UnhandledMessage]
    assert amounts(sessions) == {"a": 4}


def test_no_messages_are_settled(sessions: sessionmaker[Session]) -> None:
    """An empty batch is none."""
    assert Dispatcher(sessions, totals).deliver_batch([]) == []


def test_each_handler_fails_for_itself(sessions: sessionmaker[Session]) -> None:
    """A redelivery skips those that had applied."""
    broken = {2}

    @projector(idempotent=True, name="other")
    @on(Added)
    def other(happened: Added, session: Session) -> None:
        if happened.amount in broken:
            raise ValueError(happened.amount)
        add(Added(("other",), happened.amount), session)

    dispatcher = Dispatcher(sessions, totals, other)
    with pytest.raises(BatchFailed) as failed:
        dispatcher.deliver_batch(numbered(1, 2, 3))
    second = failed.value.deliveries[1]
    assert dict(second.outcomes) == {"totals": APPLIED, "other": FAILED}
    assert amounts(sessions) == {"a": 6, "other": 4}
    broken.clear()
    again = dispatcher.deliver_batch(numbered(1, 2, 3))
    assert outcomes(again) == [DUPLICATE, APPLIED, DUPLICATE]
    assert amounts(sessions) == {"a": 6, "other": 6}


def test_without_a_marker_a_batch_is_a_unit_of_work_too(engine: Engine) -> None:
    """No table is needed, ids neither; what fails is left out."""
    Base.metadata.create_all(engine)
    sessions = sessionmaker(engine)

    @projector
    @on(Added)
    def plain(happened: Added, session: Session) -> None:
        if happened.amount == 2:
            raise ValueError(happened.amount)
        add(happened, session)

    with pytest.raises(BatchFailed) as failed:
        Dispatcher(sessions, plain).deliver_batch([Added(amount=amount) for amount in (1, 2, 1)])
    assert outcomes(failed.value.deliveries) == [APPLIED, FAILED, APPLIED]
    assert amounts(sessions) == {"a": 2}


def test_what_concerns_all_is_not_tried_for_each(engine: Engine) -> None:
    """A missing table is found out once."""
    Base.metadata.create_all(engine)
    connections: list[object] = []
    with pytest.raises(BatchFailed) as failed:
        Dispatcher(sessionmaker(engine), totals).deliver_batch(numbered(1))
    event.listen(engine, "checkout", lambda *_: connections.append(1))
    with pytest.raises(BatchFailed) as failed:
        Dispatcher(sessionmaker(engine), totals).deliver_batch(numbered(*range(50)))
    assert outcomes(failed.value.deliveries) == [FAILED] * 50
    assert [type(error) for error in failed.value.exceptions] == [MissingTableError]
    assert len(connections) == 1


def test_a_commit_of_the_handlers_own_is_told_of_every_message(postgresql: Database) -> None:
    """The markers of all are durable by then, so none of them may be taken for applied, or tried again."""
    with Harness(Subject(postgresql.url())) as harness:
        harness.create_tables()

        def body(happened: Added, session: Session) -> None:
            add(happened, session)
            if happened.amount == 2:
                session.flush()
                session.connection().connection.driver_connection.commit()  # type: ignore[union-attr]  # it is there

        with pytest.raises(BatchFailed) as failed:
            harness.dispatcher(harness.handler(body)).deliver_batch(numbered(1, 2, 3))
        assert outcomes(failed.value.deliveries) == [FAILED] * 3
        (violation,) = failed.value.exceptions
        assert isinstance(violation, TransactionViolatedError)
        assert violation.durable
        assert harness.totals() == {"a": 3}


def test_a_message_that_is_held_fails_alone(engine: Engine, sessions: sessionmaker[Session]) -> None:
    """With `claim_timeout`, what another delivery is about is told; where one writer is all there is, nothing goes."""
    batch = numbered(1, 2, 3, 4)
    with UnitOfWork(sessions) as other:
        assert other.claim("m3", "totals")
        dispatcher = Dispatcher(sessions, totals, claim_timeout=0.1)
        with pytest.raises(BatchFailed) as failed:
            dispatcher.deliver_batch(batch)
    assert {type(error) for error in failed.value.exceptions} == {InProgress}
    one_writer = engine.dialect.name == "sqlite"
    assert outcomes(failed.value.deliveries) == [FAILED] * 4 if one_writer else [APPLIED, APPLIED, FAILED, APPLIED]
    dispatcher.deliver_batch(batch)
    assert amounts(sessions) == {"a": 10}


# The session of a batch --------------------------------------------------------------------------------------------


def test_rows_are_read_and_written_once(postgresql: Database) -> None:
    """However many messages meet on them, and although no handler keeps them."""
    with CutProxy(postgresql.url()) as proxy:
        engine = create_engine(proxy.through(postgresql.url()))
        for metadata in (default_metadata, Base.metadata):
            metadata.create_all(engine)
        sessions = sessionmaker(engine)
        with sessions.begin() as session:
            session.add_all(Total(key=key, amount=0) for key in "abc")
        dispatcher = Dispatcher(sessions, totals)
        trips = []
        for start, size in enumerate((30, 30, 30, 30, 30, 30, 30, 300)):
            batch = [Message(f"m{start}-{n}", Added(("abc"[n % 3],), n)) for n in range(size)]
            before = len(proxy.trips)
            dispatcher.deliver_batch(batch)
            trips.append(len(proxy.trips) - before)
        engine.dispose()
    assert trips[-1] == trips[-2]
    assert trips[-1] <= 9  # BEGIN, claim, three SELECTs, UPDATEs, COMMIT, and the pool's ROLLBACK


@pytest.fixture
def deliver(sessions: sessionmaker[Session]) -> Callable[..., None]:
    """Delivers functions of a session as the messages of one batch, on rows a and b."""
    with sessions.begin() as session:
        session.add_all([Total(key="a", amount=1), Total(key="b", amount=2)])
        session.flush()
        session.add(Account(key="x", total_key="a"))

    @projector(idempotent=True, name="looking")
    @on("look")
    def look(body: Any, session: Session) -> None:
        body(session)

    def deliver(*bodies: Any) -> None:
        Dispatcher(sessions, look).deliver_batch([Message(f"{n}", body, "look") for n, body in enumerate(bodies)])

    return deliver


def test_what_was_not_flushed_is_seen_all_the_same(deliver: Callable[..., None]) -> None:
    """A changed key, a new row, a deleted one, a query: as if every message had been committed."""
    seen: list[Any] = []

    def rename(session: Session) -> None:
        session.get_one(Total, "b").key = "c"

    def create(session: Session) -> None:
        session.add(Total(key="d", amount=4))

    def delete(session: Session) -> None:
        session.delete(session.get_one(Total, "d"))

    def change(session: Session) -> None:
        session.get_one(Total, "a").amount = 100

    def look(session: Session) -> None:
        rows = [session.get(Total, key) for key in "bcd"]
        large = session.query(Total).filter(Total.amount > 50).count()
        seen.append(([row and row.amount for row in rows], large, session.get_one(Account, "x").total.amount))

    deliver(look, rename, look, create, look, delete, look, change, look)
    assert seen == [
        ([2, None, None], 0, 1),
        ([None, 2, None], 0, 1),
        ([None, 2, 4], 0, 1),
        ([None, 2, None], 0, 1),
        ([None, 2, None], 1, 100),
    ]


# COMMIT ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cut", "first"), [("before", APPLIED), ("after", DUPLICATE)])
def test_a_cut_commit_is_asked_for_by_claiming_again(postgresql: Database, cut: Cut, first: Outcome) -> None:
    """All of the batch happened, or none of it."""
    with CutProxy(postgresql.url()) as proxy, Harness(Subject(proxy.through(postgresql.url()))) as harness:
        harness.create_tables()
        dispatcher = harness.dispatcher()
        dispatcher.deliver_batch(numbered(7, 8))
        proxy.cut_commit(cut)
        assert outcomes(dispatcher.deliver_batch(numbered(1, 2, 3))) == [first] * 3
        assert harness.totals() == {"a": 21}
        proxy.cut_commit(cut)
        impatient = harness.dispatcher(retry=RetryPolicy(attempts=1))
        with pytest.raises(BatchFailed) as failed:
            impatient.deliver_batch(numbered(4, 5))
        assert [type(error) for error in failed.value.exceptions] == [CommitOutcomeUnknown]
        assert outcomes(failed.value.deliveries) == [FAILED] * 2
        dispatcher.deliver_batch(numbered(4, 5))
        assert harness.totals() == {"a": 30}


# Killed ------------------------------------------------------------------------------------------------------------

WORKER = """
import os, signal, sys
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from projector_dedup import Dispatcher, Message, on, projector
from projector_dedup.testing.subject import Added, add

url, death = sys.argv[1:]

@projector(idempotent=True, name="totals")
@on(Added)
def dying(happened, session):
    add(happened, session)
    session.flush()
    if death == str(happened.amount):
        os.kill(os.getpid(), signal.SIGKILL)

Dispatcher(sessionmaker(create_engine(url)), dying).deliver_batch(
    Message(f"m{number}", Added(amount=number)) for number in (1, 2, 3, 4)
)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("death", "then"), [("3", APPLIED), ("before the acknowledgement", DUPLICATE)])
def test_a_batch_whose_process_is_killed_is_delivered_again(
    sync_url: URL, sessions: sessionmaker[Session], death: str, then: Outcome
) -> None:
    """In the midst of it nothing is left of it; after its commit all of it is."""
    url = sync_url.render_as_string(hide_password=False)
    died = subprocess.run([sys.executable, "-c", WORKER, url, death], check=False, timeout=60)
    assert died.returncode == -signal.SIGKILL
    again = Dispatcher(sessions, totals).deliver_batch(numbered(1, 2, 3, 4))
    assert outcomes(again) == [then] * 4
    assert amounts(sessions) == {"a": 10}
