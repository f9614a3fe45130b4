"""The contract of batches: the result is that of single messages, also if some fail, come twice, or meet rivals."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import Any

import pytest
from sqlalchemy import null
from sqlalchemy.orm import Session

from ..errors import BatchFailed
from ..message import Message
from ..outcome import Outcome
from .convergence import generate, redelivered, totals_of
from .harness import Harness
from .once import Broken
from .subject import Added, Total, add


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


class BatchRaceContract:
    """``deliver_batch`` keeps its promises when rivals deliver the same messages."""

    def test_batches_that_race_converge(self, harness: Harness) -> None:
        """Rivals deliver the same messages in any order, in batches of any size: the totals are exact."""
        messages = generate(5, 60)

        def consume(seed: int) -> None:
            dice = random.Random(seed)  # noqa: S311  # repeatable, which is what a test wants
            stream: list[Any] = [Message(*item) for item in redelivered(messages, dice)]
            while stream:
                size = dice.randint(1, 30)
                batch, stream = stream[:size], stream[size:]
                try:
                    harness.run(dispatcher.deliver_batch, batch)
                except BatchFailed as failed:
                    pairs = zip(batch, failed.deliveries, strict=True)
                    stream += [message for message, delivery in pairs if delivery.outcome is Outcome.FAILED]

        dispatcher = harness.dispatcher(harness.handler(**harness.subject.exact))
        barrier = threading.Barrier(3)
        consumers = [harness.start(partial(_after, barrier, consume, seed)) for seed in range(3)]
        for consumer in consumers:
            consumer.result()
        assert harness.totals() == totals_of(messages)
        assert harness.markers() == sorted((message_id, "totals") for message_id in messages)


def _after(barrier: threading.Barrier, function: Any, *arguments: Any) -> None:
    barrier.wait()
    function(*arguments)
