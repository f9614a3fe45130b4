"""The contract of the parts below the dispatcher: ``claim``, the unit of work, and a test's outer transaction."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from ..dialects import Failure, dialect_of
from ..errors import UnsafeSessionError
from ..markers import claim
from ..outcome import Outcome
from . import external_transaction
from .harness import Harness
from .once import LOOK_ALIKES, Broken, broken
from .races import Gate
from .subject import Added, Total, add


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
