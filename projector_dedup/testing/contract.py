"""The contract: what must hold on every database, driver and isolation level that the library says it supports.

Run it against yours, with a class in a test file; register the mark ``contract`` in your pytest settings::

    class TestOurDatabase(ProjectorContract):
        @pytest.fixture
        def subject(self) -> Subject:
            return Subject(make_url("postgresql+psycopg://.../an_empty_database"))

``ConcurrencyContract`` is the part that an isolation level may change; ``ISOLATION`` holds the places where a level can
be set, as arguments of ``Subject``. Tests read results back after the commit, from another connection.
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

from ..dialects import Failure, dialect_of
from ..errors import (
    BatchFailed,
    Defer,
    DeliveryFailed,
    InvalidMessageIdError,
    MissingTableError,
    UnsafeSessionError,
)
from ..markers import claim
from ..message import Message
from ..outcome import Outcome
from ..tables import default_tables
from . import external_transaction
from .convergence import (
    BatchRaceContract,
    ConvergenceContract,
    KilledContract,
    generate,
    redelivered,
    totals_of,
)
from .kit import Added, Broken, Gate, Harness, Held, Interruption, Subject, Total, add, broken, until_acknowledged
from .races import LostUpdateContract, RaceContract

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
        """I1: after a delivery, others see the write and the marker."""
        delivery = harness.deliver(harness.dispatcher(), Added(("a", "b"), 3), "m1")
        assert (delivery.outcome, delivery.message_id, delivery.durable) == (Outcome.APPLIED, "m1", True)
        assert harness.totals() == {"a": 3, "b": 3}
        assert harness.markers() == [("m1", "totals")]

    @pytest.mark.parametrize("point", ["before the write", "after the write", "after the flush", "in the last flush"])
    def test_a_failing_handler_leaves_neither(self, harness: Harness, point: str) -> None:
        """I1: wherever a handler fails, neither its write nor the marker is there, and a redelivery applies."""
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
        """I2: the handler runs once; a redelivery, also by another dispatcher, is an outcome and no exception."""
        entered: list[Added] = []

        def body(happened: Added, session: Session) -> None:
            entered.append(happened)
            add(happened, session)

        outcomes = [harness.deliver(harness.dispatcher(harness.handler(body))).outcome for _ in range(3)]
        assert outcomes == [Outcome.APPLIED, Outcome.DUPLICATE, Outcome.DUPLICATE]
        assert len(entered) == 1
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [("m1", "totals")])

    def test_a_redelivery_writes_nothing(self, harness: Harness) -> None:
        """I2: the marker stays as it was, on PostgreSQL to its transaction ids and its place in the file."""
        system = ", xmin::text, xmax::text, ctid::text" if harness.engine.dialect.name == "postgresql" else ""

        def look(session: Session) -> list[Any]:
            return [tuple(row) for row in session.execute(text(f"select *{system} from processed_message"))]  # noqa: S608

        dispatcher = harness.dispatcher()
        harness.deliver(dispatcher)
        before = harness.transact(look)
        harness.deliver(dispatcher)
        assert harness.transact(look) == before

    def test_ids_that_look_alike_are_different(self, harness: Harness) -> None:
        """I7: case, accents, spaces, long prefixes and ways to write a number tell ids apart, and handlers."""
        lower, upper = (harness.dispatcher(harness.handler(name=name)) for name in ("totals", "Totals"))
        for message_id in LOOK_ALIKES:
            assert harness.deliver(lower, message_id=message_id).outcome is Outcome.APPLIED
        assert harness.deliver(upper, message_id="a").outcome is Outcome.APPLIED
        for message_id in LOOK_ALIKES:
            assert harness.deliver(lower, message_id=message_id).outcome is Outcome.DUPLICATE
        assert harness.totals() == {"a": len(LOOK_ALIKES) + 1}
        assert harness.markers() == sorted([*((each, "totals") for each in LOOK_ALIKES), ("a", "Totals")])

    def test_what_is_no_id_is_refused(self, harness: Harness) -> None:
        """I8: without an id that every database can tell from every other, no handler runs."""
        for message_id in (None, "", "x" * 513, "\0", "\ud800", 5, b"a"):
            with pytest.raises(InvalidMessageIdError):
                harness.deliver(harness.dispatcher(), message_id=message_id)
        assert (harness.totals(), harness.markers()) == ({}, [])

    def test_a_missing_table_is_refused(self, harness: Harness) -> None:
        """I8: without the marker table nothing is applied, and the error names the remedy."""
        harness.transact(lambda session: default_tables.marker.drop(session.connection()))
        with pytest.raises(MissingTableError, match=r"processed_message is missing.*idempotency"):
            harness.deliver(harness.dispatcher())
        assert harness.totals() == {}

    def test_off_means_free(self, harness: Harness) -> None:
        """I9: a projector that is not idempotent needs neither table nor id, and applies every delivery."""
        harness.transact(lambda session: default_tables.marker.drop(session.connection()))
        dispatcher = harness.dispatcher(harness.handler(idempotent=False))
        outcomes = [harness.deliver(dispatcher, message_id=given).outcome for given in (None, "m1", "m1")]
        assert outcomes == [Outcome.APPLIED] * 3
        assert harness.totals() == {"a": 3}

    def test_off_writes_no_marker(self, harness: Harness) -> None:
        """I9: a projector that is not idempotent leaves the marker table alone, and is rolled back when it fails."""
        dispatcher = harness.dispatcher(harness.handler(idempotent=False))
        assert harness.deliver(dispatcher).outcome is Outcome.APPLIED
        with pytest.raises(Broken):
            harness.deliver(harness.dispatcher(harness.handler(broken, idempotent=False)))
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [])


class AcknowledgementContract:
    """``deliver`` returns if, and only if, the message may be acknowledged."""

    def test_every_handler_is_tried_and_the_failures_come_together(self, harness: Harness) -> None:
        """One handler's failure leaves the others applied, in the order of registration; a redelivery skips those."""
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
        """A handler that says "not now" raises through ``deliver``; a redelivery applies."""
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
        """An interruption is raised at once: later handlers do not run, and the interrupted one leaves nothing."""

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
    """``claim`` in a transaction that the caller commits, ``UnitOfWork`` by hand, and ``external_transaction``."""

    def test_claim_commits_with_its_caller(self, harness: Harness) -> None:
        """I1: the marker and the caller's writes, earlier ones too, commit together."""

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
        """I1: a caller that rolls back takes the marker along, and may claim again."""

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
        """I7: ids that look alike are different, also within one transaction."""
        assert harness.transact(lambda session: [claim(session, each, "h") for each in LOOK_ALIKES * 2]) == (
            [True] * len(LOOK_ALIKES) + [False] * len(LOOK_ALIKES)
        )

    def test_claim_does_not_flush(self, harness: Harness) -> None:
        """Pending objects, which may be wrong yet, are not written by the claim."""

        def body(session: Session) -> None:
            session.add(pending := Total(key=None))
            assert claim(session, "m1", "h")
            assert pending in session.new
            pending.key = "now it is right"

        harness.transact(body)
        assert harness.totals() == {"now it is right": 0}

    def test_claim_inside_a_savepoint_is_refused(self, harness: Harness) -> None:
        """I8: rolling the savepoint back would take the marker without the caller's noticing."""

        def body(session: Session) -> None:
            with session.begin_nested():
                claim(session, "m1", "h")

        with pytest.raises(UnsafeSessionError, match="savepoint"):
            harness.transact(body)
        assert harness.markers() == []

    @pytest.mark.parametrize("commits", [True, False])
    def test_a_rival_claim_waits(self, harness: Harness, commits: bool) -> None:
        """I3: the second claim waits; then it is a duplicate or new. With a snapshot it may have to be repeated."""
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
        """``UnitOfWork`` rolls back unless committed, and tells a duplicate from a new message."""
        body: Callable[[Session], None] = lambda session: add(Added(), session)  # noqa: E731  # one line, one use
        assert harness.unit_of_work("m1", body, commit=False) is True
        assert (harness.totals(), harness.markers()) == ({}, [])
        assert harness.unit_of_work("m1", body) is True
        assert harness.unit_of_work("m1", body) is False
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [("m1", "totals")])

    def test_an_external_transaction_takes_everything_back(self, harness: Harness) -> None:
        """Duplicates are recognised in an outer transaction, nothing is durable, and a rollback removes everything."""

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
    """Return a dispatcher of one version of the code; the newer one knows the older one's name."""
    formerly = [OLD] if version == NEW else []
    return harness.dispatcher(harness.handler(body, version, formerly=formerly, **harness.subject.exact))


class FormerlyContract:
    """Code of the old name, and code of the new name that lists the old: in any order, and at the same time."""

    @pytest.mark.parametrize(("first", "second"), [(OLD, NEW), (NEW, OLD)])
    def test_what_one_version_applied_the_other_skips(self, harness: Harness, first: str, second: str) -> None:
        """The new version skips a message that the old one applied, and the reverse, as after a rolled back deploy."""
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
        """I3: the second neither enters its handler nor gives up before the first has ended."""
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
        """Consumers of both versions race with duplicated and reordered messages: the totals are exact."""
        messages, dice = generate(4, 30), random.Random(4)  # noqa: S311  # repeatable
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
    """``deliver_batch`` keeps every promise of ``deliver``."""

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
        """Handlers run in the order of the input, and see earlier writes of the batch, flushed or not."""
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
        """A message that fails, at once or at the flush, fails alone; a redelivery applies only those that failed."""
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
        """``@on(..., batch=True)`` is called once, with those that are new, in their order."""
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
        """A batch tells duplicates under the former name, and under the new name, from messages that are new."""
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
        """Override this fixture: return an empty database, which is empty again after each test."""
        raise NotImplementedError("override the fixture `subject`")

    @pytest.fixture
    def harness(self, subject: Subject) -> Iterator[Harness]:
        """Yield a harness of the subject, with the contract's tables; they are dropped afterwards."""
        with Harness(subject) as harness:
            harness.create_tables()
            yield harness
            harness.drop_tables()


@pytest.mark.contract
class ConcurrencyContract(
    ClaimContract, RaceContract, LostUpdateContract, ConvergenceContract, BatchRaceContract, _OnOneSubject
):
    """The part of the contract that depends on the isolation level."""


@pytest.mark.contract
class ProjectorContract(
    OnceContract, AcknowledgementContract, FormerlyContract, BatchContract, KilledContract, ConcurrencyContract
):
    """The whole contract."""
