"""The contract suite: the tests that every supported database, driver and isolation level passes.

To run the suite on your database, write this class in a test file, and register the mark ``contract`` in your pytest
settings::

    class TestOurDatabase(ProjectorContract):
        @pytest.fixture
        def subject(self) -> Subject:
            return Subject(make_url("postgresql+psycopg://.../an_empty_database"))

``ConcurrencyContract`` has the tests whose result may depend on the isolation level. ``ISOLATION`` lists the places
where a level can be set, as arguments of ``Subject``. Tests read the results after the commit, from another connection.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
from sqlalchemy import insert, null, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from convergence import (
    BatchRaceContract,
    ConvergenceContract,
    KilledContract,
    generate,
    redelivered,
    totals_of,
)
from kit import Added, Broken, Gate, Harness, Held, Interruption, Subject, Total, add, broken, until_acknowledged
from projector_dedup.dialects import Failure, dialect_of
from projector_dedup.errors import (
    BatchFailed,
    Defer,
    DeliveryFailed,
    InvalidMessageIdError,
    MissingTableError,
    UnsafeSessionError,
)
from projector_dedup.markers import claim
from projector_dedup.message import Message
from projector_dedup.outcome import Outcome
from projector_dedup.tables import default_tables
from projector_dedup.testing import external_transaction
from races import LostUpdateContract, RaceContract

__all__ = ["ISOLATION", "ConcurrencyContract", "ProjectorContract", "Subject"]

ISOLATION: Mapping[str, Mapping[str, str]] = {
    f"{level} on {place}": {f"{place}_isolation": level}
    for level in ("READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
    for place in ("engine", "option", "dispatcher")
}

# One message after another --------------------------------------------------------------------------------------------
LOOK_ALIKES = (
    *("a", "A", "á", "a\u0301", "à", "ä", "ae", "æ", "a ", " a", "a\t", "a\n", "a\u200b", "a\u00a0", "\uff41"),
    *("1", "01", "1.0", "1e0", "+1", "\u0661", "1e3", "1000", "0x1", "true", "True", "t"),
    *("\U0001f600", "\U0001f601", "ß", "ss", "SS", "\u0131", "i", "I", "\u0130", "K", "\u212a"),
    *("null", "NULL", "None", " "),
    *("a'b", "a''b", "a%b", "a%%b", "a_b", "a\\", "a\\\\", "a\\n", ":a", ":b", "?", "%s", "$1"),
    *("x" * 511 + "1", "x" * 511 + "2", "x" * 255, "x" * 256, "€" * 170 + "a", "€" * 170 + "b"),
    *("0b1a2c3d-1111-4111-8111-111111111111", "0B1A2C3D-1111-4111-8111-111111111111"),
    "0b1a2c3d111141118111111111111111",
)


class OnceContract:
    """I1, I2, I7, I8 and I9: each message is applied once, together with its marker."""

    def test_marker_and_write_commit_together(self, harness: Harness) -> None:
        """I1: after a delivery, other connections see the write and the marker."""
        delivery = harness.deliver(harness.dispatcher(), Added(("a", "b"), 3), "m1")
        assert (delivery.outcome, delivery.message_id, delivery.durable) == (Outcome.APPLIED, "m1", True)
        assert harness.totals() == {"a": 3, "b": 3}
        assert harness.markers() == [("m1", "totals")]

    @pytest.mark.parametrize("point", ["before the write", "after the write", "after the flush", "in the last flush"])
    def test_a_failing_handler_leaves_neither(self, harness: Harness, point: str) -> None:
        """I1: if a handler fails, its write and the marker are rolled back, and a redelivery applies the message."""
        failing = [True]

        def body(happened: Added, session: Session) -> None:
            if failing and point == "before the write":
                raise Broken
            add(happened, session)
            if point == "after the flush":
                session.flush()
            if failing and point == "in the last flush":
                session.execute(insert(Total).values(key="b", amount=0))
                session.add(Total(key="b"))
            elif failing:
                raise Broken

        dispatcher = harness.dispatcher(harness.handler(body))
        with pytest.raises(Exception) as failure:  # noqa: PT011  # the next line looks at the type
            harness.deliver(dispatcher)
        assert isinstance(failure.value, Broken) is (point != "in the last flush")
        assert (harness.totals(), harness.markers()) == ({}, [])
        failing.clear()
        assert harness.deliver(dispatcher).outcome is Outcome.APPLIED
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [("m1", "totals")])

    def test_a_redelivery_never_enters_the_handler(self, harness: Harness) -> None:
        """I2: the handler runs once. A redelivery returns ``DUPLICATE``, also from another dispatcher."""
        entered: list[Added] = []

        def body(happened: Added, session: Session) -> None:
            entered.append(happened)
            add(happened, session)

        outcomes = [harness.deliver(harness.dispatcher(harness.handler(body))).outcome for _ in range(3)]
        assert outcomes == [Outcome.APPLIED, Outcome.DUPLICATE, Outcome.DUPLICATE]
        assert len(entered) == 1
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [("m1", "totals")])

    def test_a_redelivery_writes_nothing(self, harness: Harness) -> None:
        """I2: a redelivery does not change the marker. On PostgreSQL, ``xmin`` and ``ctid`` stay the same too."""
        system = ", xmin::text, xmax::text, ctid::text" if harness.engine.dialect.name == "postgresql" else ""

        def look(session: Session) -> list[Any]:
            return [tuple(row) for row in session.execute(text(f"select *{system} from processed_message"))]

        dispatcher = harness.dispatcher()
        harness.deliver(dispatcher)
        before = harness.transact(look)
        harness.deliver(dispatcher)
        assert harness.transact(look) == before

    def test_ids_that_look_alike_are_different(self, harness: Harness) -> None:
        """I7: ids that differ in case, accents, spaces or a late character are different, and so are handlers."""
        lower, upper = (harness.dispatcher(harness.handler(name=name)) for name in ("totals", "Totals"))
        for message_id in LOOK_ALIKES:
            assert harness.deliver(lower, message_id=message_id).outcome is Outcome.APPLIED
        assert harness.deliver(upper, message_id="a").outcome is Outcome.APPLIED
        for message_id in LOOK_ALIKES:
            assert harness.deliver(lower, message_id=message_id).outcome is Outcome.DUPLICATE
        assert harness.totals() == {"a": len(LOOK_ALIKES) + 1}
        assert harness.markers() == sorted([*((each, "totals") for each in LOOK_ALIKES), ("a", "Totals")])

    def test_what_is_no_id_is_refused(self, harness: Harness) -> None:
        """I8: a missing id, or one that a database cannot store exactly, raises before a handler runs."""
        for message_id in (None, "", "x" * 513, "\0", "\ud800", 5, b"a"):
            with pytest.raises(InvalidMessageIdError):
                harness.deliver(harness.dispatcher(), message_id=message_id)
        assert (harness.totals(), harness.markers()) == ({}, [])

    def test_a_missing_table_is_refused(self, harness: Harness) -> None:
        """I8: without the marker table, the delivery raises an error that names the remedy."""
        harness.transact(lambda session: default_tables.marker.drop(session.connection()))
        with pytest.raises(MissingTableError, match=r"processed_message is missing.*idempotency"):
            harness.deliver(harness.dispatcher())
        assert harness.totals() == {}

    def test_off_means_free(self, harness: Harness) -> None:
        """I9: a projector that is not idempotent needs no table and no id, and applies every delivery."""
        harness.transact(lambda session: default_tables.marker.drop(session.connection()))
        dispatcher = harness.dispatcher(harness.handler(idempotent=False))
        outcomes = [harness.deliver(dispatcher, message_id=given).outcome for given in (None, "m1", "m1")]
        assert outcomes == [Outcome.APPLIED] * 3
        assert harness.totals() == {"a": 3}

    def test_off_writes_no_marker(self, harness: Harness) -> None:
        """I9: a projector that is not idempotent writes no marker. If it fails, its writes are rolled back."""
        dispatcher = harness.dispatcher(harness.handler(idempotent=False))
        assert harness.deliver(dispatcher).outcome is Outcome.APPLIED
        with pytest.raises(Broken):
            harness.deliver(harness.dispatcher(harness.handler(broken, idempotent=False)))
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [])


class AcknowledgementContract:
    """``deliver`` returns if and only if the consumer may acknowledge the message."""

    def test_every_handler_is_tried_and_the_failures_come_together(self, harness: Harness) -> None:
        """The handlers run in the order of registration. If one fails, a redelivery skips those that succeeded."""
        order: list[str] = []

        def noted(name: str, fails: bool) -> Any:
            def body(_happened: Added, session: Session) -> None:
                order.append(name)
                add(Added((name,)), session)
                if fails and failing:
                    raise Broken(name)

            return harness.handler(body, name)

        failing = [True]
        dispatcher = harness.dispatcher(noted("c", False), noted("a", True), noted("b", False), noted("d", True))
        with pytest.raises(DeliveryFailed) as failure:
            harness.deliver(dispatcher)
        applied, failed = Outcome.APPLIED, Outcome.FAILED
        assert dict(failure.value.delivery.outcomes) == {"c": applied, "a": failed, "b": applied, "d": failed}
        assert failure.value.delivery.outcome is failed
        assert [str(error) for error in failure.value.exceptions] == ["a", "d"]
        assert order == ["c", "a", "b", "d"]
        assert harness.markers() == [("m1", "b"), ("m1", "c")]

        failing.clear()
        delivery = harness.deliver(dispatcher)
        duplicate = Outcome.DUPLICATE
        assert list(delivery.outcomes.items()) == [("c", duplicate), ("a", applied), ("b", duplicate), ("d", applied)]
        assert order == ["c", "a", "b", "d", "a", "d"]
        assert harness.totals() == dict.fromkeys("abcd", 1)

    def test_defer_rolls_the_marker_back(self, harness: Harness) -> None:
        """``deliver`` raises the ``Defer`` of a handler and rolls back. A redelivery applies the message."""
        early = [True]

        def body(happened: Added, session: Session) -> None:
            add(happened, session)
            session.flush()
            if early:
                raise Defer

        dispatcher = harness.dispatcher(harness.handler(body))
        with pytest.raises(Defer):
            harness.deliver(dispatcher)
        assert (harness.totals(), harness.markers()) == ({}, [])
        early.clear()
        assert harness.deliver(dispatcher).outcome is Outcome.APPLIED

    def test_an_interruption_passes_through_at_once(self, harness: Harness) -> None:
        """``deliver`` raises an interruption at once: the handler is rolled back, and later handlers do not run."""

        def body(happened: Added, session: Session) -> None:
            add(happened, session)
            session.flush()
            raise Interruption

        dispatcher = harness.dispatcher(
            harness.handler(name="first"), harness.handler(body, "second"), harness.handler(name="third")
        )
        with pytest.raises(Interruption):
            harness.deliver(dispatcher)
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [("m1", "first")])


# The parts below the dispatcher ---------------------------------------------------------------------------------------


class ClaimContract:
    """``claim`` in the caller's transaction, ``UnitOfWork`` without a dispatcher, and ``external_transaction``."""

    def test_claim_commits_with_its_caller(self, harness: Harness) -> None:
        """I1: the marker commits together with the caller's writes before and after the claim."""

        def body(session: Session) -> bool:
            session.add(Total(key="earlier", amount=1))
            session.flush()
            new = claim(session, "m1", "h")
            add(Added(), session)
            return new

        assert harness.transact(body) is True
        assert (harness.totals(), harness.markers()) == ({"earlier": 1, "a": 1}, [("m1", "h")])
        assert harness.transact(lambda session: claim(session, "m1", "h")) is False
        assert harness.transact(lambda session: claim(session, "m1", "other")) is True

    def test_claim_rolls_back_with_its_caller(self, harness: Harness) -> None:
        """I1: a rollback of the caller removes the marker, and the caller may claim again."""

        def body(session: Session) -> None:
            assert claim(session, "m1", "h")
            add(Added(), session)
            session.flush()
            raise Broken

        with pytest.raises(Broken):
            harness.transact(body)
        assert (harness.totals(), harness.markers()) == ({}, [])
        assert harness.transact(lambda session: claim(session, "m1", "h")) is True

    def test_claim_tells_look_alikes_apart(self, harness: Harness) -> None:
        """I7: ids that look alike are different, also in one transaction."""
        assert harness.transact(lambda session: [claim(session, each, "h") for each in LOOK_ALIKES * 2]) == (
            [True] * len(LOOK_ALIKES) + [False] * len(LOOK_ALIKES)
        )

    def test_claim_does_not_flush(self, harness: Harness) -> None:
        """The claim does not flush pending objects, because the caller may not have completed them."""

        def body(session: Session) -> None:
            session.add(pending := Total(key=None))
            assert claim(session, "m1", "h")
            assert pending in session.new
            pending.key = "now it is right"

        harness.transact(body)
        assert harness.totals() == {"now it is right": 0}

    def test_claim_inside_a_savepoint_is_refused(self, harness: Harness) -> None:
        """I8: a rollback to the savepoint would silently remove the marker."""

        def body(session: Session) -> None:
            with session.begin_nested():
                claim(session, "m1", "h")

        with pytest.raises(UnsafeSessionError, match="savepoint"):
            harness.transact(body)
        assert harness.markers() == []

    @pytest.mark.parametrize("commits", [True, False])
    def test_a_rival_claim_waits(self, harness: Harness, commits: bool) -> None:
        """I3: the second claim waits for the first. With a snapshot, the database may then refuse it as a conflict."""
        gate = Gate(harness)

        def first(session: Session) -> None:
            assert claim(session, "m1", "h")
            gate.stop()
            if not commits:
                raise Broken

        winner = harness.start(harness.transact, first)
        gate.arrival()
        loser = harness.start(harness.transact, _claims)
        harness.waits()
        gate.open()
        assert isinstance(winner.exception(), Broken) is not commits
        conflict = loser.exception()
        if conflict is not None:
            assert commits
            assert harness.subject.has_snapshots
            assert isinstance(conflict, DBAPIError)
            assert dialect_of(harness.engine).classify(conflict) is Failure.TRANSIENT
            loser = harness.start(harness.transact, _claims)
        assert loser.result() is not commits
        assert harness.markers() == [("m1", "h")]

    def test_the_unit_of_work_alone(self, harness: Harness) -> None:
        """``UnitOfWork`` rolls back if nobody calls ``commit``, and ``claim`` returns False for a duplicate."""
        body: Callable[[Session], None] = lambda session: add(Added(), session)  # noqa: E731  # one line, one use
        assert harness.unit_of_work("m1", body, commit=False) is True
        assert (harness.totals(), harness.markers()) == ({}, [])
        assert harness.unit_of_work("m1", body) is True
        assert harness.unit_of_work("m1", body) is False
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [("m1", "totals")])

    def test_an_external_transaction_takes_everything_back(self, harness: Harness) -> None:
        """The library detects duplicates in an outer transaction, and the outer rollback removes everything."""

        with harness.outer_transaction() as factory:
            with external_transaction(harness.dispatcher(factory=factory)) as dispatcher:
                outcomes = [harness.deliver(dispatcher) for _ in range(2)]
            assert [each.outcome for each in outcomes] == [Outcome.APPLIED, Outcome.DUPLICATE]
            assert [each.durable for each in outcomes] == [False, False]
            failing = harness.dispatcher(harness.handler(broken, "broken"), factory=factory)
            with external_transaction(failing), pytest.raises(Broken):
                harness.deliver(failing)
            assert harness.transact(_amounts, factory) == [1]
            with pytest.raises(UnsafeSessionError, match="external_transaction"):
                harness.deliver(dispatcher, message_id="m2")
        assert (harness.totals(), harness.markers()) == ({}, [])


def _claims(session: Session) -> bool:
    return claim(session, "m1", "h")


def _amounts(session: Session) -> list[int]:
    return list(session.scalars(select(Total.amount)))


# A rename -------------------------------------------------------------------------------------------------------------

OLD, NEW = "old", "new"


def deployed(harness: Harness, version: str, body: Any = add) -> Any:
    """Return a dispatcher of one version of the code. The new version has the old name in ``formerly``."""
    formerly = [OLD] if version == NEW else []
    return harness.dispatcher(harness.handler(body, version, formerly=formerly, **harness.subject.exact))


class FormerlyContract:
    """Code with the old name, and code with the new name and ``formerly``, run in any order and concurrently."""

    @pytest.mark.parametrize(("first", "second"), [(OLD, NEW), (NEW, OLD)])
    def test_what_one_version_applied_the_other_skips(self, harness: Harness, first: str, second: str) -> None:
        """Each version skips the messages that the other one applied, also after the deployment was rolled back."""
        outcomes = [
            harness.deliver(deployed(harness, version), message_id=message_id).outcome
            for message_id, versions in {"m1": (first, second), "m2": (second, first)}.items()
            for version in versions
        ]
        assert outcomes == [Outcome.APPLIED, Outcome.DUPLICATE] * 2
        assert harness.totals() == {"a": 2}
        by_old = {"m1" if first == OLD else "m2"}  # a duplicate left no marker behind
        assert harness.markers() == sorted(
            (each, name) for each in ("m1", "m2") for name in ((OLD,) if each in by_old else (OLD, NEW))
        )

    @pytest.mark.parametrize("fails", [False, True], ids=["commits", "rolls back"])
    @pytest.mark.parametrize(("first", "second"), [(OLD, NEW), (NEW, OLD)])
    def test_one_version_waits_for_the_other(self, harness: Harness, first: str, second: str, fails: bool) -> None:
        """I3: the second delivery waits until the first has ended, and does not call its handler before."""
        held = Held(harness, fails=fails)
        winner = harness.start(harness.deliver, deployed(harness, first, held))
        held.gate.arrival()
        loser = harness.start(harness.deliver, deployed(harness, second, held))
        harness.waits()
        assert held.runs == 1
        held.gate.open()
        assert isinstance(winner.exception(), Broken) is fails
        assert loser.result().outcome is (Outcome.APPLIED if fails else Outcome.DUPLICATE)
        assert harness.totals() == {"a": 1}

    def test_both_versions_converge(self, harness: Harness) -> None:
        """The totals are exact if consumers of both versions get duplicated and reordered messages concurrently."""
        messages, dice = generate(4, 30), random.Random(4)  # repeatable
        stream = redelivered(messages, dice)

        def consume(version: str) -> None:
            dispatcher = deployed(harness, version)
            while stream:
                message_id, happened = stream.pop()
                until_acknowledged(partial(harness.deliver, dispatcher, happened, message_id))

        for consumer in [harness.start(consume, version) for version in (OLD, NEW) * 2]:
            consumer.result()
        assert harness.totals() == totals_of(messages)
        assert {message_id for message_id, _ in harness.markers()} == messages.keys()


# Batches --------------------------------------------------------------------------------------------------------------


def numbered(*numbers: int) -> list[Message]:
    """Return messages with the ids ``m<number>``, each of which adds its number."""
    return [Message(f"m{number}", Added(amount=number)) for number in numbers]


class BatchContract:
    """``deliver_batch`` gives every guarantee of ``deliver``."""

    def test_a_batch_applies_each_message_once(self, harness: Harness) -> None:
        """A message that comes twice in a batch is a duplicate; outcomes are in the order of the input."""
        dispatcher = harness.dispatcher(harness.handler(**harness.subject.exact))
        harness.deliver(dispatcher, Added(amount=2), "m2")
        batch = numbered(3, 2, 1, 3, 4)
        first = harness.run(dispatcher.deliver_batch, batch)
        assert [delivery.message_id for delivery in first] == ["m3", "m2", "m1", "m3", "m4"]
        assert [delivery.outcome.value for delivery in first] == [
            *("applied", "duplicate", "applied", "duplicate", "applied")
        ]
        again = harness.run(dispatcher.deliver_batch, batch)
        assert {delivery.outcome for delivery in again} == {Outcome.DUPLICATE}
        assert harness.totals() == {"a": 10}
        assert harness.markers() == [(f"m{number}", "totals") for number in (1, 2, 3, 4)]

    def test_handlers_see_what_those_before_them_did(self, harness: Harness) -> None:
        """Handlers run in the order of the input, and read the earlier writes of the batch, flushed or not."""
        seen: list[int] = []

        def look(happened: Added, session: Session) -> None:
            total = session.get(Total, "a")
            seen.append(0 if total is None else total.amount)
            add(happened, session)

        dispatcher = harness.dispatcher(harness.handler(look, **harness.subject.exact))
        harness.run(dispatcher.deliver_batch, numbered(1, 2, 3))
        assert seen[-3:] == [0, 1, 3]
        assert harness.totals() == {"a": 6}

    @pytest.mark.parametrize("bad", [{0, 4, 7}, set(range(8))], ids=str)
    @pytest.mark.parametrize("late", [False, True], ids=["at once", "at the flush"])
    def test_a_failing_message_takes_no_other_with_it(self, harness: Harness, bad: set[int], late: bool) -> None:
        """A message that fails in the handler or in the flush fails alone. A redelivery applies it."""
        broken = [True]

        def body(happened: Added, session: Session) -> None:
            if happened.amount in bad and broken:
                if not late:
                    raise Broken
                session.add(Total(key=f"{happened.amount}", amount=null()))
            add(happened, session)

        dispatcher = harness.dispatcher(harness.handler(body, **harness.subject.exact))
        batch = numbered(*range(8))
        with pytest.raises(BatchFailed) as failed:
            harness.run(dispatcher.deliver_batch, batch)
        outcomes = [delivery.outcome for delivery in failed.value.deliveries]
        assert outcomes == [Outcome.FAILED if number in bad else Outcome.APPLIED for number in range(8)]
        assert sum(harness.totals().values()) == sum(set(range(8)) - bad)
        broken.clear()
        again = harness.run(dispatcher.deliver_batch, batch)
        assert [delivery.outcome is Outcome.APPLIED for delivery in again] == [number in bad for number in range(8)]
        assert harness.totals() == {"a": sum(range(8))}

    def test_a_handler_may_take_them_all(self, harness: Harness) -> None:
        """The library calls an ``@on(..., batch=True)`` handler once, with the new messages in their order."""
        calls: list[list[int]] = []

        def body(happened: list[Added], session: Session) -> None:
            calls.append([each.amount for each in happened])
            for each in happened:
                add(each, session)

        dispatcher = harness.dispatcher(harness.handler(body, batch=True, **harness.subject.exact))
        harness.deliver(dispatcher, Added(amount=2), "m2")
        harness.run(dispatcher.deliver_batch, numbered(3, 2, 3, 1))
        assert calls == [[2], [3, 1]]
        assert harness.totals() == {"a": 6}

    def test_what_was_applied_under_a_former_name_is_a_duplicate(self, harness: Harness) -> None:
        """A batch skips the messages that were applied under the former name or under the new name."""
        settings = harness.subject.exact
        old = harness.dispatcher(harness.handler(name="before", **settings))
        new = harness.dispatcher(harness.handler(formerly=["before"], **settings))
        harness.run(old.deliver_batch, numbered(1, 2))
        outcomes = [delivery.outcome for delivery in harness.run(new.deliver_batch, numbered(3, 2, 1, 4))]
        assert outcomes == [Outcome.APPLIED, Outcome.DUPLICATE, Outcome.DUPLICATE, Outcome.APPLIED]
        again = harness.run(old.deliver_batch, numbered(1, 2, 3, 4))
        assert {delivery.outcome for delivery in again} == {Outcome.DUPLICATE}
        assert harness.totals() == {"a": 10}


# All of it ------------------------------------------------------------------------------------------------------------


class _OnOneSubject:
    @pytest.fixture
    def subject(self) -> Subject:
        """Return an empty database, which must be empty again after each test. Override this fixture."""
        raise NotImplementedError("override the fixture `subject`")

    @pytest.fixture
    def harness(self, subject: Subject) -> Iterator[Harness]:
        """Yield a harness of the subject with the contract's tables, and drop the tables afterwards."""
        with Harness(subject) as harness:
            harness.create_tables()
            yield harness
            harness.drop_tables()


@pytest.mark.contract
class ConcurrencyContract(
    ClaimContract, RaceContract, LostUpdateContract, ConvergenceContract, BatchRaceContract, _OnOneSubject
):
    """The tests of the contract whose result may depend on the isolation level."""


@pytest.mark.contract
class ProjectorContract(
    OnceContract, AcknowledgementContract, FormerlyContract, BatchContract, KilledContract, ConcurrencyContract
):
    """The whole contract."""
