"""The contract for concurrent messages: one delivery of a message applies it (I3), and no update is lost (I6).

No test sleeps to create a race. A handler stops at a ``Gate``, and the test opens the gate when the other deliveries
have reached their place.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest
from sqlalchemy import select, update
from sqlalchemy.orm import Session, joinedload

from kit import Account, Added, Broken, Gate, Harness, Held, Total, add, until_acknowledged
from projector_dedup.dialects import dialect_of
from projector_dedup.errors import InProgress, RetriesExhaustedError, UnlockedWriteError
from projector_dedup.outcome import Outcome


class RaceContract:
    """I3: concurrent deliveries of one message."""

    @pytest.mark.parametrize("rivals", [1, 5])
    def test_rivals_wait_and_skip_if_the_first_commits(self, harness: Harness, rivals: int) -> None:
        """The other deliveries wait for the first. If it commits, they do not call the handler."""
        held = Held(harness)
        dispatcher = harness.dispatcher(harness.handler(held))
        winner = harness.start(harness.deliver, dispatcher)
        held.gate.arrival()
        losers = [harness.start(harness.deliver, dispatcher) for _ in range(rivals)]
        harness.waits(rivals)
        assert not any(loser.done() for loser in losers)
        held.gate.open()
        assert winner.result().outcome is Outcome.APPLIED
        assert [loser.result().outcome for loser in losers] == [Outcome.DUPLICATE] * rivals
        assert (held.runs, harness.totals(), harness.markers()) == (1, {"a": 1}, [("m1", "totals")])

    @pytest.mark.parametrize("rivals", [1, 5])
    def test_one_rival_applies_if_the_first_rolls_back(self, harness: Harness, rivals: int) -> None:
        """The other deliveries wait for the first. If it fails, exactly one of them applies the message."""
        held = Held(harness, fails=True)
        dispatcher = harness.dispatcher(harness.handler(held))
        winner = harness.start(harness.deliver, dispatcher)
        held.gate.arrival()
        losers = [harness.start(harness.deliver, dispatcher) for _ in range(rivals)]
        harness.waits(rivals)
        held.gate.open()
        assert isinstance(winner.exception(), Broken)
        outcomes = Counter(loser.result().outcome for loser in losers)
        assert outcomes == Counter([Outcome.APPLIED] + [Outcome.DUPLICATE] * (rivals - 1))
        assert (held.runs, harness.totals(), harness.markers()) == (2, {"a": 1}, [("m1", "totals")])

    @pytest.mark.parametrize("fails", [False, True])
    def test_the_wait_can_be_bounded(self, harness: Harness, fails: bool) -> None:
        """After ``claim_timeout``, ``deliver`` raises InProgress, and a redelivery returns the right outcome."""
        held = Held(harness, fails=fails)
        handler = harness.handler(held)
        winner = harness.start(harness.deliver, harness.dispatcher(handler))
        held.gate.arrival()
        hasty = harness.dispatcher(handler, claim_timeout=0.1)
        with pytest.raises(InProgress, match=r"0\.1 s"):
            harness.deliver(hasty)
        held.gate.open()
        assert isinstance(winner.exception(), Broken) is fails
        assert harness.deliver(hasty).outcome is (Outcome.APPLIED if fails else Outcome.DUPLICATE)
        assert (harness.totals(), harness.markers()) == ({"a": 1}, [("m1", "totals")])

    def test_different_handlers_of_one_message_do_not_wait(self, harness: Harness) -> None:
        """Each handler has its own claim. If the database locks rows, another handler does not wait for this one."""
        if not dialect_of(harness.engine).locks_rows:
            pytest.skip("the database has one writer at a time, so every delivery waits for the first")
        for key in "ab":  # a row that does not exist yet may be locked with its neighbours
            harness.transact(partial(add, Added((key,), 0)))
        held = Held(harness)
        winner = harness.start(harness.deliver, harness.dispatcher(harness.handler(held)))
        held.gate.arrival()
        other = harness.dispatcher(harness.handler(name="other"))
        assert harness.deliver(other, Added(("b",))).outcome is Outcome.APPLIED
        assert harness.deliver(other, Added(("b",)), "m2").outcome is Outcome.APPLIED
        held.gate.open()
        assert winner.result().outcome is Outcome.APPLIED


# Different messages that update or create the same row ----------------------------------------------------------------

# Each function reads a total and writes it. Between the two steps it calls ``pause``, where another message may come.


def _by_get(session: Session, pause: Callable[[], None]) -> None:
    total = session.get_one(Total, "a")
    pause()
    total.amount += 1


def _by_select(session: Session, pause: Callable[[], None]) -> None:
    total = session.scalars(select(Total).where(Total.amount >= 0)).one()
    pause()
    total.amount += 1


def _by_joinedload(session: Session, pause: Callable[[], None]) -> None:
    account = session.scalars(select(Account).options(joinedload(Account.total))).unique().one()
    pause()
    account.total.amount += 1


def _by_relationship(session: Session, pause: Callable[[], None]) -> None:
    total = session.get_one(Account, "x").total
    pause()
    total.amount += 1


def _by_column(session: Session, pause: Callable[[], None]) -> None:
    amount = session.scalars(select(Total.amount).where(Total.key == "a")).one()
    pause()
    session.execute(update(Total).where(Total.key == "a").values(amount=amount + 1))


def _by_row(session: Session, pause: Callable[[], None]) -> None:
    total, _account = session.execute(select(Total, Account).join(Account.total)).one()
    pause()
    total.amount += 1


def _by_creating(session: Session, pause: Callable[[], None]) -> None:
    total = session.get(Total, "new")
    pause()
    if total is None:
        session.add(total := Total(key="new", amount=0))
    total.amount += 1


MESSAGES = 24
SHAPES = [_by_get, _by_select, _by_joinedload, _by_relationship, _by_column, _by_row, _by_creating]
DEALS: dict[str, Callable[[int], tuple[str, ...]]] = {
    "one hot row": lambda _: ("a",),
    "a hundred rows": lambda number: (f"{number % 100}",),
    "two of ten rows, in any order": lambda number: tuple(random.Random(number).sample("abcdefghij", 2)),  # repeatable
    "the same new row": lambda number: (f"new {number // 8}",),
}


class LostUpdateContract:
    """I6: two different messages that update one row both count, with ordinary ORM code."""

    @pytest.fixture(params=["by default", "read_models"])
    def settings(self, request: pytest.FixtureRequest, harness: Harness) -> dict[str, Any]:
        """Return the arguments of ``@projector`` with which no update is lost: ``read_models`` or, by default, none."""
        if request.param == "read_models" or harness.subject.loses_updates:
            return {"read_models": [Total]}
        return {}

    @pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__[1:])
    def test_what_two_messages_read_before_either_wrote(
        self, harness: Harness, settings: dict[str, Any], shape: Callable[[Session, Callable[[], None]], None]
    ) -> None:
        """Both messages count, however they read the row. With ``read_models``, a read without a lock is refused."""
        harness.transact(_an_account)
        gate = Gate(harness)
        dispatcher = harness.dispatcher(harness.handler(lambda _, session: shape(session, gate.stop), **settings))
        deliveries = []
        for message_id in ("m1", "m2"):
            delivery = harness.start(harness.deliver, dispatcher, None, message_id)
            gate.arrival(partial(_done_or_waiting, delivery, harness))
            deliveries.append(delivery)
        gate.open()
        refused = [isinstance(delivery.exception(), UnlockedWriteError) for delivery in deliveries]
        assert settings or not any(refused)
        applied = [delivery.result().outcome for delivery in deliveries if delivery.exception() is None]
        assert applied == [Outcome.APPLIED] * refused.count(False)
        assert sum(harness.totals().values()) == len(applied)

    @pytest.mark.parametrize("deal", DEALS)
    def test_many_messages_at_once(self, harness: Harness, settings: dict[str, Any], deal: str) -> None:
        """The totals are exact if many threads deliver different messages, and each message has one marker."""
        messages = {f"m{number}": Added(DEALS[deal](number), number + 1) for number in range(MESSAGES)}
        dispatcher = harness.dispatcher(harness.handler(**settings))
        work = list(messages.items())

        def work_off() -> None:
            while work:
                message_id, happened = work.pop()
                until_acknowledged(partial(harness.deliver, dispatcher, happened, message_id), RetriesExhaustedError)

        for worker in [harness.start(work_off) for _ in range(8)]:
            worker.result()
        expected: Counter[str] = Counter()
        for happened in messages.values():
            expected.update(dict.fromkeys(happened.keys, happened.amount))
        assert harness.totals() == expected
        assert harness.markers() == sorted((message_id, "totals") for message_id in messages)


def _done_or_waiting(delivery: Future[Any], harness: Harness) -> bool:
    return delivery.done() or harness.waiting() > 0


def _an_account(session: Session) -> None:
    session.add(Account(key="x", total=Total(key="a", amount=0)))
