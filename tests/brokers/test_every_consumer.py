"""One contract for all consumers: acknowledged after the commit, delayed, rejected with a reason, replayed."""

import contextlib
import logging
import re
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import payments
from adapters import BATCHED, CLIENTS, KAFKA, Adapter, adapter
from consumer_rig import Sent, prove, wait_for
from databases import Database
from payments import NOTES, RULES, KilledError, payment
from projector_dedup import Defer
from projector_dedup.errors import HandlerDefinitionError

pytestmark = pytest.mark.filterwarnings(
    "ignore:\\s*The 'queue' task attribute:DeprecationWarning"
)  # of Celery, for 6.0

TANSU = f"{KAFKA} on tansu"
"""The consumer of Kafka on a broker by others than its client. As plain `KAFKA` it runs on the client's mock."""
ALL = (*CLIENTS, KAFKA, TANSU, *(f"{each}-batches" for each in BATCHED))
BROKERS = {
    **dict.fromkeys(("Pika", "AioPika", "FastStreamRabbit"), "rabbitmq"),
    **dict.fromkeys(("Nats", "FastStreamNats", "FastStreamNatsBatches"), "nats"),
    **dict.fromkeys(("SqsQueue", "SqsFifoQueue"), "sqs"),
    "PubSubSubscription": "pubsub",
    "Redis": "redis",
    "KafkaTopic": "kafka",
    "Celery": "celery",
}
ID_NAMES = {
    "rabbitmq": "property message_id",
    "nats": "header Nats-Msg-Id",
    "sqs": "message attribute message_id",
    "pubsub": "attribute message_id",
    "redis": 'field "message_id" of the entry',
    "kafka": "header message_id",
    "celery": "argument message_id of the task",
}
"""Where a producer sets the id, as the error for a missing one says."""
REASON = "ValueError: this account cannot be read\\nreally"


def _turned(client: str) -> Any:
    """The batched forms run by turns."""
    return pytest.param(client, marks=pytest.mark.by_turns if client.endswith("-batches") else ())


@pytest.fixture(params=[*map(_turned, ALL)])
def consumer(request: pytest.FixtureRequest, postgresql: Database) -> Iterator[Adapter]:
    """A queue of the test's own, and a consumer of it, by each client in turn."""
    client, _, server = request.param.partition(" on ")
    cluster = request.getfixturevalue(server or "cluster") if client.startswith(KAFKA) else None
    with adapter(client, postgresql, cluster) as made:
        yield made


def but(*clients: str) -> pytest.MarkDecorator:
    """Try all clients but these; whoever leaves one out says why."""
    tried = [_turned(each) for each in ALL if each.removesuffix("-batches") not in clients]
    return pytest.mark.parametrize("consumer", tried, indirect=True)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_killed_consumers_are_exact(consumer: Adapter) -> None:
    """Two processes, both killed, poison, garbage, messages before their time: the read model equals the file."""
    prove(consumer.client, consumer.queue, consumer.database, consumer.settings, consumer.drivername)


def test_what_is_applied_or_was_applied_is_acknowledged(consumer: Adapter) -> None:
    """From the first message on, which came before the consumer; one that was published twice is a duplicate."""
    consumer.pay((1, "a"), (2, "a"), (1, "a"))
    consumer.consume_until(consumer.settled({"a": 2}))
    consumer.pay((2, "a"), (3, "a"))
    consumer.consume_until(consumer.settled({"a": 3}))
    assert consumer.queue.left() == 0
    assert consumer.queue.dead() == []


# Celery's worker is a thread here: test_celery.py kills the process of one.
@but("celery")
def test_a_consumer_that_dies_in_a_message_has_not_acknowledged_it(consumer: Adapter) -> None:
    """The broker delivers the message again."""
    called: list[object] = []

    def die() -> None:
        called.append(None)
        raise KilledError

    RULES["a"] = die
    consumer.pay((1, "a"))
    consumer.failure(lambda: called != [], **consumer.soon)
    wait_for(lambda: consumer.queue.left() == 1, "the message to be there again", 20)
    assert consumer.applied == ({}, 0)
    RULES.clear()
    consumer.consume_until(consumer.settled({"a": 1}), **consumer.soon)


def test_messages_before_their_time_come_again_and_hold_nobody_up(
    consumer: Adapter, caplog: pytest.LogCaptureFixture
) -> None:
    """However many they are: more than are in flight at a time."""
    caplog.set_level(logging.INFO, "projector_dedup.consumers")
    RULES["b"] = "early"
    consumer.pay(*((number, "b") for number in range(13)), (13, "a"))

    def applied_when_it_is_time() -> bool:
        if consumer.applied == ({"a": 1}, 1) and caplog.text.count("will be delivered again in") >= 13:
            RULES.clear()
        return consumer.settled({"a": 1, "b": 13})()

    consumer.consume_until(applied_when_it_is_time, max_delay=1.0, **consumer.few)  # else the early ones starve others
    assert consumer.queue.dead() == []


def test_a_message_that_is_always_early_is_rejected_in_the_end(
    consumer: Adapter, caplog: pytest.LogCaptureFixture
) -> None:
    """Its deliveries are counted, ``max_attempts`` is their limit, and ``max_delay`` that of its waits."""
    caplog.set_level(logging.INFO, "projector_dedup.consumers")
    RULES["b"] = "early"
    consumer.pay((1, "b"))
    consumer.consume_until(lambda: len(consumer.queue.dead()) == 1, max_attempts=2, max_delay=0.2)
    assert consumer.queue.letters() == {payment(1, "b"): "Defer: the account is not open yet"}
    assert re.search(r"will be delivered again in (0\.2|1\.0) s, after delivery 1: Defer", caplog.text)
    # The number is the broker's. A NATS server with no time to spare once gave two deliveries the number 1, then 3.
    assert re.search(r"is rejected at delivery [2-9]: Defer", caplog.text)
    assert set(re.findall(r"will be delivered again .* after delivery (\d+)", caplog.text)) == {"1"}
    assert consumer.applied == ({}, 0)
    assert consumer.queue.left() == 0


def test_an_error_that_is_named_is_retried_and_no_longer_than_the_limit(consumer: Adapter) -> None:
    """A message before the one that it refers to: applied when that has come; a dead letter if it never comes."""
    called: list[object] = []
    named = {"retry_later": (LookupError,), "max_attempts": 3, "max_delay": 0.2}

    def fail() -> None:
        called.append(None)
        raise KeyError("no such account")

    def fail_once() -> None:
        if not called:
            fail()

    RULES.update(b=fail, c=fail_once)
    consumer.pay((1, "b"))
    consumer.consume_until(lambda: len(consumer.queue.dead()) == 1, **named)
    assert len(called) > 1
    assert consumer.queue.letters() == {payment(1, "b"): "KeyError: 'no such account'"}
    called.clear()
    consumer.pay((2, "c"))
    consumer.consume_until(consumer.settled({"c": 1}), **named)
    assert len(called) == 1
    assert len(consumer.queue.dead()) == 1


def test_every_delivery_is_observed_with_its_broker_and_its_reason(consumer: Adapter) -> None:
    """What no handler got, too: a body that cannot be read, and a missing id. Dead letters once each."""
    NOTES.all.clear()
    consumer.pay((1, "a"))
    consumer.consume_until(consumer.settled({"a": 1}))  # and has declared its queues, which FastStream does late
    RULES.update(b="early", c="poison")
    consumer.pay((2, "b"), (3, "c"))
    consumer.queue.publish([Sent("garbage", b"{"), Sent(None, b'{"type": "payment"}')])

    def kept() -> bool:  # a consumer learns of a confirmed copy a moment after the broker has it
        return [each.outcome for each in NOTES.all].count("dead_letter") == 4 and consumer.queue.left() == 0

    consumer.consume_until(kept, max_attempts=2)
    assert len(consumer.queue.dead()) == 4
    assert consumer.applied == ({"a": 1}, 1)
    deliveries = [each for each in NOTES.all if each.kind == "delivery"]
    assert {each.broker for each in deliveries} == {BROKERS[type(consumer).__name__]}
    rejected = ("max_attempts", "handler", "invalid_message", "invalid_id")
    expected: dict[tuple[str, str | None], int] = {("acknowledged", None): 1, ("retried", "deferred"): 1}
    expected |= {(outcome, reason): 1 for outcome in ("rejected", "dead_letter") for reason in rejected}
    assert Counter((each.outcome, each.reason) for each in deliveries) == expected


def test_poison_is_kept_with_its_reason_and_replayed_after_the_mend(consumer: Adapter) -> None:
    """Others are applied meanwhile; the message is applied once, however often it comes after that, with one body."""
    NOTES.all.clear()
    RULES["b"] = "poison"
    consumer.pay((1, "a"), (2, "b"), (3, "a"))
    consumer.consume_until(lambda: consumer.settled({"a": 2})() and len(consumer.queue.dead()) == 1)
    assert consumer.queue.dead() == [Sent("p2", payment(2, "b"))]
    assert consumer.queue.letters() == {payment(2, "b"): REASON}
    RULES.clear()
    assert consumer.queue.replay() == 1
    consumer.pay((2, "b"))
    consumer.consume_until(consumer.settled({"a": 2, "b": 1}))
    assert consumer.queue.dead() == []
    assert consumer.queue.replay() == 0
    assert "other_body" not in {each.outcome for each in NOTES.all}


def test_another_body_under_a_known_id_is_told(consumer: Adapter) -> None:
    """By the bytes of the body alone. A task of Celery has none."""
    NOTES.all.clear()
    consumer.pay((1, "a"))
    consumer.consume_until(consumer.settled({"a": 1}))
    consumer.queue.publish([Sent("p1", payment(1, "a", 7)), Sent("p1", payment(1, "a"))])
    consumer.consume_until(
        lambda: [each.kind for each in NOTES.all].count("message") == 3 and consumer.queue.left() == 0
    )
    expected = ["duplicate", "duplicate" if type(consumer).__name__ == "Celery" else "other_body"]
    assert sorted(each.outcome for each in NOTES.all if each.kind == "message") == ["applied", *expected]
    assert consumer.applied == ({"a": 1}, 1)


def test_a_replay_ends_while_a_producer_goes_on_with_poison(consumer: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the dead letters that were there when it began; those that come meanwhile stay dead letters."""
    monkeypatch.setattr("projector_dedup.brokers.pubsub._POLL", 5.0)  # a request waits longer than poison takes
    RULES["b"] = "poison"
    NOTES.all.clear()
    sent, ended = [1], threading.Event()

    def produce() -> None:
        while not ended.wait(0.1):
            sent.append(sent[-1] + 1)
            consumer.pay((sent[-1], "b"))

    def all_are_dead() -> bool:
        return consumer.queue.left() == 0 and {each.body for each in consumer.queue.dead()} == bodies

    consumer.pay((1, "b"))
    with ThreadPoolExecutor(2) as others:
        try:
            with consumer.consuming(**consumer.soon):  # what it holds when it is stopped comes again soon
                producing = others.submit(produce)
                wait_for(lambda: sum(each.outcome == "dead_letter" for each in NOTES.all) > 2, "three dead letters", 60)
                replaying = others.submit(consumer.queue.replay)
                wait_for(replaying.done, "the replay to return", 40)
        finally:
            ended.set()
    producing.result()
    assert replaying.result() >= 1
    bodies = {payment(number, "b") for number in sent}
    consumer.consume_until(all_are_dead, **consumer.soon)


def test_an_id_in_the_body_stays_the_only_one(consumer: Adapter) -> None:
    """Through a delay, the dead letters and a replay: aio-pika gives each copy without an id one of its own."""
    called: list[object] = []

    def fail() -> None:
        called.append(None)
        if len(called) <= 2:
            raise Defer("not yet")
        raise ValueError("poison")

    RULES["b"] = fail
    sent = [Sent(None, payment(1, "b"))] * 2
    consumer.queue.publish(sent)
    consumer.consume_until(lambda: len(consumer.queue.dead()) == 2, max_delay=0.2)
    assert consumer.queue.dead() == sent
    RULES.clear()
    assert consumer.queue.replay() == 2
    consumer.consume_until(consumer.settled({"b": 1}))
    assert payments.markers(consumer.engine) == {"p1"}


def test_the_same_ids_of_two_sources_are_applied_each(consumer: Adapter) -> None:
    """Beside the body or in it. A delay, the dead letters and a replay keep the source: each is its own duplicate."""
    called: list[object] = []

    def fail() -> None:
        called.append(None)
        raise Defer("not yet") if len(called) == 1 else ValueError("poison")

    def is_dead_and_others_applied() -> bool:
        return len(consumer.queue.dead()) == 1 and consumer.queue.left() == 0 and consumer.applied[0]["a"] == 2 * count

    for count, source in enumerate(("first", "second"), 1):
        called.clear()
        RULES["b"] = fail
        consumer.pay((1, "a"), (2, "b"))
        consumer.queue.publish([Sent(None, payment(3, "a"))])
        consumer.consume_until(is_dead_and_others_applied, source=source, max_delay=0.2)
        RULES.clear()
        assert consumer.queue.replay() == 1
        consumer.pay((2, "b"))
        consumer.consume_until(consumer.settled({"a": 2 * count, "b": count}), source=source)
    assert payments.markers(consumer.engine) == {
        f"{len(source)}:{source}2:p{number}" for source in ("first", "second") for number in (1, 2, 3)
    }


NO_JSON = ("InvalidMessageError: the ", "DecodeError: ")  # by this library, and by Celery
NO_ID = Sent(None, b'{"type": "payment", "account": "a", "amount": 1}')
GARBAGE: dict[Sent, str | tuple[str, ...]] = {
    Sent("no JSON", b"{"): NO_JSON,
    Sent("no text", b"\xff\xfe"): NO_JSON,
    Sent("no object", b"[1, 2]"): "",
    Sent("a type that is none", b'{"type": 5}'): "InvalidMessageError",
    Sent("a type that nobody wants", b'{"type": "unheard of"}'): "UnhandledMessage",
    Sent("no account", b'{"type": "payment"}'): "KeyError: 'account'",
    NO_ID: "InvalidMessageIdError: the message has no id",
}
"""What is no payment, and how the reason begins for which it is rejected. No client makes an id up."""


def test_garbage_becomes_dead_letters_and_the_consumer_lives_on(consumer: Adapter) -> None:
    """Nothing of it is applied, and what is behind it is. A missing id is missed where the producer sets it."""
    consumer.queue.publish([*GARBAGE])
    consumer.pay((1, "a"))
    consumer.consume_until(lambda: consumer.settled({"a": 1})() and len(consumer.queue.dead()) == len(GARBAGE))
    assert {*consumer.queue.dead()} == {*GARBAGE}
    reasons = consumer.queue.letters()
    assert {each: reasons[each.body] for each in GARBAGE if not reasons[each.body].startswith(GARBAGE[each])} == {}
    assert f"the producer must set the {ID_NAMES[BROKERS[type(consumer).__name__]]}. " in reasons[NO_ID.body]


# Celery declares the queue of its dead letters for each of them; test_kafka.py has the topics of Kafka.
@but("celery", KAFKA, TANSU)
def test_a_message_that_cannot_be_kept_is_not_acknowledged(consumer: Adapter) -> None:
    """Somebody has deleted the dead letters: the poison comes again until it can be one."""
    called: list[object] = []

    def fail() -> None:
        called.append(None)
        if len(called) == 1:
            with ThreadPoolExecutor(1) as other:  # an event loop may run in this thread
                other.submit(consumer.lose_letters).result()
        raise ValueError("poison")

    RULES["b"] = fail
    with contextlib.suppress(Exception), consumer.consuming(**consumer.soon) as thread:  # most of them fail
        consumer.pay((1, "b"))  # now, since FastStream takes messages while it still declares the queue of dead letters
        wait_for(lambda: len(called) > 1 or not thread.is_alive(), "the poison to come again", 40)
    wait_for(lambda: consumer.queue.left() == 1, "the message to be there again", 20)
    consumer.mend_letters()
    consumer.consume_until(lambda: len(consumer.queue.dead()) == 1, **consumer.soon)
    assert consumer.queue.letters() == {payment(1, "b"): "ValueError: poison"}
    assert consumer.queue.left() == 0


@pytest.mark.by_turns
# What Celery cannot read is in test_celery.py.
@but("celery")
def test_whatever_a_client_sends_is_applied_delayed_or_a_dead_letter(
    consumer: Adapter, caplog: pytest.LogCaptureFixture
) -> None:
    """Headers, fields and subjects that no client writes stop nobody: what is behind them is applied."""
    caplog.set_level(logging.INFO, "projector_dedup.consumers")
    RULES.update(b="poison", c="early")
    sent = consumer.send_strange() + 1
    consumer.pay((1_000, "behind"))

    before = 0

    def all_settled() -> bool:
        nonlocal before
        balances, markers = consumer.applied
        if "behind" in balances and "will be delivered again" in caplog.text:
            RULES.pop("c", None)
        is_busy, before = markers > before, markers  # then it need not be asked for more
        return not is_busy and consumer.queue.left() == 0 and markers + len(consumer.queue.dead()) == sent

    consumer.consume_until(all_settled, max_delay=0.2, **consumer.few)
    assert set(consumer.applied[0]) == {"a", "behind", "c"}


def test_what_a_consumer_does_not_take_is_refused_when_it_is_made(consumer: Adapter) -> None:
    """A dispatcher whose answers nobody would await, or that is awaited for nothing; limits that are none; a class."""
    plain: Any = payments.dispatcher(consumer.engine)
    awaited: Any = payments.async_dispatcher(consumer.database.async_url)[0]
    takes = "AsyncDispatcher" if consumer.is_awaited else "Dispatcher"
    with pytest.raises(HandlerDefinitionError, match=f"takes {takes}, not"):
        consumer.make(plain if consumer.is_awaited else awaited)
    wrong: dict[str, Any]
    for wrong in (
        {"max_attempts": 0},
        {"max_delay": 0},
        {"convert": payments.Balance},
        {"retry_later": (LookupError,)},
        {"source": ""},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            consumer.make(awaited if consumer.is_awaited else plain, **wrong)
