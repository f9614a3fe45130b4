"""`deliver_batch` where something goes wrong, and what its session does not do for every message.

What holds on every driver is in the contract (`tests/contract/contract.py`); what handlers do with their
session is drawn by lot (`test_batch_programs.py`).
"""

from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.orm.exc import FlushError, StaleDataError

from cut_proxy import Cut, CutProxy
from databases import Database
from kit import Added, Base, Total, add
from marked import one_of_each_engine  # noqa: F401  # a fixture
from projector_dedup import Dispatcher, Message, Outcome, on, projector
from projector_dedup.errors import (
    BatchFailed,
    CommitOutcomeUnknown,
    InProgress,
    InvalidMessageIdError,
    MissingTableError,
    RefusedError,
    RetriesExhaustedError,
    TransactionViolatedError,
    UnhandledMessage,
    UnsafeSessionError,
)
from projector_dedup.options import RetryPolicy
from projector_dedup.outcome import Delivery
from projector_dedup.tables import default_metadata
from projector_dedup.unit_of_work import UnitOfWork
from ready import ready

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
    """The tables, on each database."""
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
    assert "2 of 4 messages failed (deliveries[1] without a known id, m2)" in str(failed.value)
    assert [delivery.message_id for delivery in failed.value.deliveries] == ["m1", None, "m2", "m3"]
    unrouted = [dict(delivery.errors) for delivery in failed.value.deliveries]
    assert unrouted == [{}, *({"(not routed)": error} for error in failed.value.exceptions), {}]
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
    assert {name: str(error) for name, error in second.errors.items()} == {"other": "2"}
    assert not failed.value.deliveries[0].errors
    assert amounts(sessions) == {"a": 6, "other": 4}
    broken.clear()
    again = dispatcher.deliver_batch(numbered(1, 2, 3))
    assert outcomes(again) == [DUPLICATE, APPLIED, DUPLICATE]
    assert amounts(sessions) == {"a": 6, "other": 6}


def test_handlers_take_turns(sessions: sessionmaker[Session]) -> None:
    """All messages of the first handler come before those of the next, whatever their order in the batch."""
    called: list[object] = []

    @projector(idempotent=True, name="two-handlers")
    class Two:
        @on(int)
        def number(self, event: int, session: Session) -> None:  # noqa: ARG002  # as handlers have it
            called.append(event)

        @on(str)
        def name(self, event: str, session: Session) -> None:  # noqa: ARG002  # as handlers have it
            called.append(event)

    bodies: list[object] = [1, "a", 2, "b"]
    Dispatcher(sessions, Two()).deliver_batch([Message(f"m{at}", body) for at, body in enumerate(bodies)])
    assert called == [1, 2, "a", "b"]


def test_what_is_left_of_a_batch_is_applied_in_its_order(sessions: sessionmaker[Session]) -> None:
    """However a batch is divided around messages that fail, each message is applied after those before it."""
    called: list[int] = []

    @projector(idempotent=True, name="in order")
    @on(Added)
    def in_order(happened: Added, session: Session) -> None:
        called.append(happened.amount)
        if happened.amount in (3, 4):
            raise ValueError(happened.amount)
        add(happened, session)

    with pytest.raises(BatchFailed) as failed:
        Dispatcher(sessions, in_order).deliver_batch(numbered(*range(1, 9)))
    assert outcomes(failed.value.deliveries) == [APPLIED] * 2 + [FAILED] * 2 + [APPLIED] * 4
    last_call = {amount: place for place, amount in enumerate(called)}
    assert sorted(last_call, key=last_call.__getitem__) == list(range(1, 9))


def test_each_message_of_a_batch_finds_its_session_empty(sessions: sessionmaker[Session]) -> None:
    """Objects that another message read, and that somebody still holds, are not given to the next one as they were."""
    held: list[Any] = []
    found: list[int] = []

    @projector(idempotent=True, name="holds")
    @on(Added)
    def holds(happened: Added, session: Session) -> None:
        found.append(len(list(session)))
        add(happened, session)
        held.append(session.get(Total, "a"))

    Dispatcher(sessions, holds).deliver_batch(numbered(1, 2, 3))
    assert found == [0, 0, 0]
    assert amounts(sessions) == {"a": 6}


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


@pytest.mark.parametrize("closes", [False, True], ids=["", "closes"])
def test_a_commit_of_the_handlers_own_is_told_of_every_message(postgresql: Database, closes: bool) -> None:
    """The markers of all are durable by then, so none of them may be taken for applied, or tried again."""
    with ready(postgresql.url()) as harness:

        def body(happened: Added, session: Session) -> None:
            add(happened, session)
            if happened.amount == 2:
                session.flush()
                driver: Any = session.connection().connection.driver_connection
                driver.commit()
                if closes:
                    driver.close()

        dispatcher = harness.dispatcher(harness.handler(body))
        dispatcher.deliver_batch(numbered(4))
        with pytest.raises(BatchFailed) as failed:
            dispatcher.deliver_batch(numbered(1, 2, 3, 4, 1))
        assert outcomes(failed.value.deliveries) == [FAILED] * 5
        (violation,) = failed.value.exceptions
        assert isinstance(violation, TransactionViolatedError)
        assert violation.durable
        assert "no handler got these messages: m3. Delete" in violation.__notes__[0]  # m4 and m1 were applied
        assert harness.totals() == {"a": 7}


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


def test_a_server_that_is_down_is_down_for_all(postgresql: Database) -> None:
    """Fewer messages would wait as long for it, one after the other, longer than a broker does."""
    url = postgresql.url().set(port=9)  # nobody listens there
    engine, connects = create_engine(url), list[int]()
    event.listen(engine, "do_connect", lambda *_: connects.append(1))
    dispatcher = Dispatcher(sessionmaker(engine), totals, retry=RetryPolicy(attempts=3, base=0))
    with pytest.raises(BatchFailed) as failed:
        dispatcher.deliver_batch(numbered(*range(9)))
    assert [type(error) for error in failed.value.exceptions] == [RetriesExhaustedError]
    assert len(connects) == 3


def test_what_concerns_one_message_is_not_taken_for_all(sessions: sessionmaker[Session]) -> None:
    """A refusal or exhausted retries of one message leave the others alone."""

    @projector(idempotent=True, name="picky")
    @on(int)
    def picky(number: int, session: Session) -> None:
        if number == 2:
            raise UnsafeSessionError("this one")
        if number == 4:
            raise StaleDataError
        add(Added(amount=number), session)

    dispatcher = Dispatcher(sessions, picky, retry=RetryPolicy(attempts=2))
    with pytest.raises(BatchFailed) as failed:
        dispatcher.deliver_batch([Message(f"m{number}", number) for number in range(1, 6)])
    assert outcomes(failed.value.deliveries) == [APPLIED, FAILED, APPLIED, FAILED, APPLIED]
    assert amounts(sessions) == {"a": 9}


def test_markers_are_claimed_in_one_order(postgresql: Database) -> None:
    """Whatever the order of the messages: two batches that meet wait for each other, and not in a circle."""
    claimed: list[list[str]] = []
    with ready(postgresql.url()) as harness:

        def see(_c: object, _u: object, statement: str, parameters: Any, *_: object) -> None:
            if "ON CONFLICT" in statement:
                claimed.append(parameters["message_ids"])

        event.listen(harness.engine, "before_cursor_execute", see)
        harness.dispatcher().deliver_batch(numbered(3, 1, 4, 2))
    assert claimed == [["m1", "m2", "m3", "m4"]]


@pytest.mark.parametrize("one", [{"message_id": "m1"}, "m1", Message("m1", Added())], ids=["dict", "str", "Message"])
def test_one_event_is_no_batch(sessions: sessionmaker[Session], one: Any) -> None:
    """Its keys or letters would be taken for events, which somebody may ignore."""
    with pytest.raises(RefusedError, match="a list of messages, not one"):
        Dispatcher(sessions, totals, unhandled="ignore").deliver_batch(one)


def test_a_look_that_could_see_what_is_rolled_back_is_refused(mariadb: Database) -> None:
    """At READ UNCOMMITTED a rival's marker would make a duplicate of a message that nobody applies."""
    with ready(mariadb.url(), engine_isolation="READ UNCOMMITTED") as harness:
        with pytest.raises(BatchFailed) as failed:
            harness.dispatcher().deliver_batch(numbered(1, 2))
        assert [type(error) for error in failed.value.exceptions] == [UnsafeSessionError]
        assert harness.markers() == []


def test_batches_with_a_bound_warn_of_nothing(postgresql: Database) -> None:
    """A warning that is an error would turn them into single messages."""
    calls: list[int] = []
    with ready(postgresql.url()) as harness:

        def body(happened: list[Added], _session: Session) -> None:
            calls.append(len(happened))

        dispatcher = harness.dispatcher(harness.handler(body, batch=True), claim_timeout=1.0)
        dispatcher.deliver_batch(numbered(1, 2, 3))
    assert calls == [3]


# COMMIT ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("cut", "first"), [("before", APPLIED), ("after", DUPLICATE)])
def test_a_cut_commit_is_asked_for_by_claiming_again(postgresql: Database, cut: Cut, first: Outcome) -> None:
    """All of the batch happened, or none of it."""
    with CutProxy(postgresql.url()) as proxy, ready(proxy.through(postgresql.url())) as harness:
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


def test_what_a_listener_to_a_flush_adds_is_written_too(sessions: sessionmaker[Session]) -> None:
    """As a COMMIT does, the end of each message flushes until nothing is left."""
    added = projector(idempotent=True, name="added")(on(Added)(lambda event, session: session.add(_total(event))))

    def audit(session: Session, _context: object) -> None:
        for new in session.new:
            if isinstance(new, Total) and not new.key.startswith("audit"):
                session.add(Total(key=f"audit {new.key}", amount=new.amount))

    class Audited(Session):
        """A Session class of the user's, with a listener to its flushes."""

    event.listen(Audited, "after_flush", audit)
    audited = sessionmaker(sessions.kw["bind"], class_=Audited)
    messages = [Message(f"m{number}", Added((f"row {number}",), number)) for number in (1, 2, 3)]
    Dispatcher(audited, added).deliver_batch(messages)
    assert amounts(sessions) == {f"{kind}row {number}": number for kind in ("", "audit ") for number in (1, 2, 3)}


def test_a_listener_that_always_adds_more_is_an_error(sessions: sessionmaker[Session]) -> None:
    """Nothing of the batch is applied, as nothing is where a COMMIT meets such a listener."""
    added = projector(idempotent=True, name="added")(on(Added)(lambda event, session: session.add(_total(event))))

    class Restless(Session):
        """A Session class of the user's whose flushes never end."""

    event.listen(Restless, "after_flush", lambda session, _: session.add(Total(key=uuid4().hex[:12], amount=0)))
    dispatcher = Dispatcher(sessionmaker(sessions.kw["bind"], class_=Restless), added)
    with pytest.raises(BatchFailed) as failed:
        dispatcher.deliver_batch(numbered(1, 2))
    assert {type(error) for error in failed.value.exceptions} == {FlushError}
    assert amounts(sessions) == {}


def _total(happened: Added) -> Total:
    return Total(key=happened.keys[0], amount=happened.amount)


def test_what_a_handler_puts_into_its_session_is_gone_for_the_next_message(sessions: sessionmaker[Session]) -> None:
    """A cached row, a switch of autoflush: each message of a batch finds the session that it would find alone."""

    def cached(event: Added, session: Session) -> None:
        assert session.autoflush
        session.autoflush = False
        if "row" not in session.info:
            session.info["row"] = session.get(Total, "cached") or Total(key="cached", amount=0)
            session.add(session.info["row"])
        session.info["row"].amount += event.amount

    handler = projector(idempotent=True, name="cached")(on(Added)(cached))
    factory = sessionmaker(sessions.kw["bind"], expire_on_commit=False)
    Dispatcher(factory, handler).deliver_batch([Message(f"m{number}", Added(("a",), 1)) for number in range(3)])
    assert amounts(sessions) == {"cached": 3}


def test_what_a_listener_puts_into_the_session_is_there_for_each_message(sessions: sessionmaker[Session]) -> None:
    """A tenant that is chosen when the transaction begins, as applications do."""

    class Chosen(Session):
        """A Session class of the user's, with a listener to its beginning."""

    event.listen(Chosen, "after_begin", lambda session, _transaction, _connection: session.info.update(tenant="a"))
    found: list[str] = []
    handler = projector(idempotent=True, name="chosen")(
        on(Added)(lambda _event, session: found.append(session.info["tenant"]))
    )
    factory = sessionmaker(sessions.kw["bind"], class_=Chosen)
    Dispatcher(factory, handler).deliver_batch([Message(f"m{number}", Added(("a",), 1)) for number in range(3)])
    assert found == ["a"] * 3
