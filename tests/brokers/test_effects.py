"""A consumer that runs an effect for each message: each error of the effect ends where ``verdict_of`` says."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy.orm import Session

from adapters import Adapter, adapter
from databases import Database
from effect_rig import Charge, Lost, Till, book
from kit import Gate, Harness, Subject
from payments import RULES, payment
from projector_dedup.brokers.incoming import Incoming, json_event
from projector_dedup.effects import Attempt, NotDone, Rejected, resend
from projector_dedup.maintenance.effects import resolve

HOUR = timedelta(hours=1)


@pytest.fixture(params=["pika", "redis"])
def consumer(request: pytest.FixtureRequest, postgresql: Database) -> Iterator[Adapter]:
    """A queue of the test's own, and a consumer of it."""
    with adapter(request.param, postgresql) as made:
        yield made


@pytest.fixture
def till(postgresql: Database) -> Iterator[Till]:
    """The effects of the database to which the consumer delivers."""
    with Harness(Subject(postgresql.url())) as harness:
        till = Till(harness)
        till.create_tables()
        yield till


@dataclass
class Shop:
    """A consumer whose messages run an effect each, before they are delivered."""

    consumer: Adapter
    till: Till
    charge: Any

    def sent(self, **options: Any) -> dict[str, Any]:
        """Publish one message; return the options of a consumer that runs the effect for it."""
        effects = self.till.effects(self.charge)

        def charged(incoming: Incoming) -> object:
            effects.run(self.charge, Charge("o1"), key="k1")
            return json_event(incoming)

        self.consumer.pay((1, "a"))
        return {"convert": charged, "max_delay": 0.2, **options}

    def is_applied(self) -> bool:
        """True if the message was applied and acknowledged, and the effect is recorded once."""
        return self.consumer.settled({"a": 1})() and self.till.payments() == [("o1", f"pi_{len(self.till.sent)}")]

    def is_dead(self) -> bool:
        """True if the message is a dead letter."""
        return len(self.consumer.queue.dead()) == 1


def failing(till: Till, *errors: Exception) -> Callable[..., str]:
    """A body that raises these errors, one at each attempt, and then does the deed."""
    left = list(errors)

    def body(request: Charge, attempt: Attempt) -> str:
        if left:
            raise left.pop(0)
        return till.plain(request, attempt)

    return body


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        ([Lost(), Lost()], "EffectUnknown: "),
        ([NotDone(), NotDone()], "NotDone: "),
    ],
    ids=["unknown", "not done"],
)
def test_a_message_comes_again_until_its_effect_is_done(
    consumer: Adapter, till: Till, ends: list[Exception], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And is acknowledged then. Nothing is sent beside the attempts that the policy permits."""
    caplog.set_level(logging.INFO, "projector_dedup.consumers")
    shop = Shop(consumer, till, till.effect(failing(till, *ends), resend(within=HOUR)))
    consumer.consume_until(shop.is_applied, **shop.sent())
    assert caplog.text.count(f"s, after delivery 1: {told}") == 1
    assert caplog.text.count(f"s, after delivery 2: {told}") == 1
    assert (len(till.sent), consumer.queue.dead()) == (1, [])


def test_a_message_waits_for_the_person_who_decides(
    consumer: Adapter, till: Till, caplog: pytest.LogCaptureFixture
) -> None:
    """However often it comes: ``max_attempts`` is no limit for what nobody knows."""
    caplog.set_level(logging.INFO, "projector_dedup.consumers")
    shop = Shop(consumer, till, till.effect(failing(till, Lost())))
    decided = False

    def is_applied() -> bool:
        nonlocal decided
        if not decided and "after delivery 3: EffectUnknown" in caplog.text:
            decided = True
            resolve(till.harness.engine, "k1", attempt=1, outcome="done", value='"pi_0"', why="it is there", who="ada")
        return shop.is_applied()

    consumer.consume_until(is_applied, **shop.sent(max_attempts=2))
    assert (till.sent, consumer.queue.dead()) == ([], [])


def test_a_message_waits_for_the_attempt_that_is_under_way(
    consumer: Adapter, till: Till, caplog: pytest.LogCaptureFixture
) -> None:
    """However often it comes. It is told when the lease ends, and not delayed until then."""
    caplog.set_level(logging.INFO, "projector_dedup.consumers")
    gate = Gate(till.harness)

    def body(request: Charge, attempt: Attempt) -> str:
        gate.stop()
        return till.plain(request, attempt)

    shop = Shop(consumer, till, till.effect(body))
    other = till.harness.start(till.run, shop.charge, Charge("o1"))
    gate.arrival()

    def is_applied() -> bool:
        if "after delivery 3: InProgress" in caplog.text:
            gate.open()
        return shop.is_applied()

    consumer.consume_until(is_applied, **shop.sent(max_attempts=2))
    assert (other.result(), len(till.sent), consumer.queue.dead()) == ("pi_1", 1, [])


def test_a_message_that_is_early_charges_once(consumer: Adapter, till: Till, caplog: pytest.LogCaptureFixture) -> None:
    """The effect is done; the projector defers the message, which runs the effect again."""
    caplog.set_level(logging.INFO, "projector_dedup.consumers")
    RULES["a"] = "early"
    shop = Shop(consumer, till, till.effect())

    def is_applied() -> bool:
        if "after delivery 2: Defer" in caplog.text:
            RULES.clear()
        return shop.is_applied()

    consumer.consume_until(is_applied, **shop.sent())
    assert (len(till.sent), consumer.queue.dead()) == (1, [])


def test_a_value_that_could_not_be_recorded_is_recorded_when_the_message_comes_again(
    consumer: Adapter, till: Till, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is sent again."""
    caplog.set_level(logging.INFO, "projector_dedup.consumers")
    failures: list[Exception] = [ZeroDivisionError()]

    def recorded(request: Charge, value: str, session: Session) -> None:
        if failures:
            raise failures.pop()
        book(request, value, session)

    shop = Shop(consumer, till, till.effect(recorded=recorded))
    consumer.consume_until(shop.is_applied, **shop.sent())
    assert "after delivery 1: NotRecordedError" in caplog.text
    assert (len(till.sent), consumer.queue.dead()) == (1, [])


def test_a_rejection_is_a_dead_letter(consumer: Adapter, till: Till) -> None:
    """With the code of the rejection, which is recorded; the message is not applied."""
    shop = Shop(consumer, till, till.effect(failing(till, Rejected("card_declined"))))
    consumer.consume_until(shop.is_dead, **shop.sent())
    assert consumer.queue.letters() == {payment(1, "a"): "Rejected: card_declined"}
    assert (till.payments(), consumer.applied) == ([("o1", "refused: card_declined")], ({}, 0))


def test_what_was_never_sent_is_a_dead_letter_in_the_end(consumer: Adapter, till: Till) -> None:
    """``max_attempts`` bounds it: a replay of the dead letter runs the effect again."""
    shop = Shop(consumer, till, till.effect(failing(till, NotDone("refused"), NotDone("refused"))))
    options = shop.sent(max_attempts=2)
    consumer.consume_until(shop.is_dead, **options)
    assert consumer.queue.letters() == {payment(1, "a"): "NotDone: refused"}
    assert (till.row(), consumer.applied) == (None, ({}, 0))
    assert consumer.queue.replay() == 1
    consumer.consume_until(shop.is_applied, **options)


def test_two_deeds_are_a_dead_letter(consumer: Adapter, till: Till) -> None:
    """Somebody has to look: another attempt was done while that of the consumer was late."""
    gate = Gate(till.harness)

    def body(request: Charge, attempt: Attempt) -> str:
        value = till.plain(request, attempt)
        if attempt.number == 1:
            gate.stop()
        return value

    shop = Shop(consumer, till, till.effect(body, resend(within=HOUR)))

    def is_dead() -> bool:
        if not till.payments() and till.sent:
            gate.arrival()
            till.pass_time(40)
            assert till.run(shop.charge, Charge("o1")) == "pi_2"
            gate.open()
        return shop.is_dead()

    consumer.consume_until(is_dead, **shop.sent())
    (reason,) = consumer.queue.letters().values()
    assert reason.startswith("DoubleEffectError: two attempts at effect till.charge, key k1 were done")
    assert (till.payments(), consumer.applied) == ([("o1", "pi_2")], ({}, 0))
