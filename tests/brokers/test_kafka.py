"""Kafka: an offset is stored when its message is settled, and whatever cannot be applied is put aside first.

What every consumer promises is in `test_every_consumer.py`.
The cluster is librdkafka's mock: see `kafka_cluster.py` for what it is not.
"""

import contextlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from confluent_kafka import KafkaException, TopicPartition

import payments
from adapters import KAFKA, KafkaTopic, adapter
from consumer_rig import Sent, wait_for
from databases import Database
from kafka_cluster import MESSAGE_TOO_LARGE, NOT_AUTHORIZED, PRODUCE, UNKNOWN_TOPIC, KafkaCluster
from kafka_garbage import produce
from kafka_rig import Kafka, headers_of
from payments import RULES, payment
from projector_dedup import Defer, Message
from projector_dedup.brokers import kafka as plug
from projector_dedup.brokers.incoming import Incoming, text_of
from projector_dedup.brokers.kafka import ATTEMPT, NOT_BEFORE, OCCURRED, Consumer, begin, replay
from projector_dedup.errors import RefusedError
from projector_dedup.message import stored_id

ONCE = pytest.mark.parametrize("batch", [1, 6])
"""One message in a transaction, or several, of both topics."""

FAR = {NOT_BEFORE: "99999999999999"}  # a header by which a message waits, for some thousand years


@pytest.fixture
def rig(cluster: KafkaCluster, postgresql: Database) -> Iterator[KafkaTopic]:
    """A topic of the test's own, and a consumer of it."""
    with adapter(KAFKA, postgresql, cluster) as made:
        yield made


def test_a_copy_says_where_its_message_was_and_why_it_was_rejected(rig: KafkaTopic) -> None:
    """Key, body and headers are those of the message, also in the copy of a copy; the message stays where it was."""
    called: list[object] = []

    def fail() -> None:
        called.append(None)
        raise KeyError("poison") if len(called) == 2 else Defer("not yet")

    RULES["b"] = fail
    rig.queue.send(payment(1, "b"), {"trace": "t", "empty": None})
    rig.consume_until(lambda: len(rig.queue.dead()) == 1)
    (dead,), (original,) = (rig.queue.messages(each) for each in (rig.queue.dead_letters, rig.queue.topic))
    assert (dead.key(), dead.value()) == (original.key(), original.value())
    assert headers_of(dead) == {
        **headers_of(original),
        "projector-dedup-origin": f"{rig.queue.topic} [0] at offset 0".encode(),
        "projector-dedup-timestamp": str(original.timestamp()[1]).encode(),
        "projector-dedup-attempt": b"2",
        "projector-dedup-reason": b"KeyError: 'poison'",
    }
    assert [sum(rig.queue.committed(each)) for each in (rig.queue.topic, rig.queue.retry)] == [1, 1]


def test_whatever_a_client_sends_into_the_retry_topic_is_applied_delayed_or_a_dead_letter(rig: KafkaTopic) -> None:
    """Headers like ours with values that we never write stop nobody: what is behind them is applied."""
    RULES.update(b="poison", c="early")
    sent = rig.send_strange(rig.queue.retry) + 1
    rig.queue.send(payment(1_000, "behind"), topic=rig.queue.retry)

    def all_settled() -> bool:
        if "behind" in rig.applied[0]:
            RULES.pop("c", None)
        return rig.applied[1] + len(rig.queue.dead()) == sent

    rig.consume_until(all_settled)
    assert set(rig.applied[0]) == {"a", "behind", "c"}


UNREADABLE: list[tuple[bytes, bytes | None]] = [(b"message_id", b"m2"), (b"caf\xe9", b"1")]


@pytest.fixture
def other(rig: KafkaTopic, cluster: KafkaCluster) -> Iterator[Kafka]:
    """Another topic, of which the same group is to consume."""
    with contextlib.closing(Kafka(cluster, beside=rig.queue)) as made:
        yield made


@ONCE
def test_two_topics_whose_producers_count_from_one_are_applied_each(rig: KafkaTopic, other: Kafka, batch: int) -> None:
    """A copy to retry, a dead letter and its replay keep the source: whatever comes again is a duplicate of itself."""
    both = (rig.queue, other)
    options: dict[str, Any] = {
        "topics": [each.topic for each in both],
        "source": {rig.queue.topic: "first", other.topic: "second"},
        "batch": batch,
    }
    failed: list[object] = []

    def fail() -> None:
        failed.append(None)
        raise Defer("not yet") if len(failed) <= 2 else ValueError("poison")

    def settled(balances: dict[str, int]) -> Callable[[], bool]:
        return lambda: rig.applied == (balances, sum(balances.values())) and all(each.left() == 0 for each in both)

    RULES["b"] = fail
    sent = [*(Sent(f"p{number}", payment(number, "a")) for number in (1, 2, 3)), Sent("p4", payment(4, "b"))]
    for each in both:
        each.publish(sent)
    rig.consume_until(lambda: settled({"a": 6})() and all(len(each.dead()) == 1 for each in both), **options)
    RULES.clear()
    assert [each.replay() for each in both] == [1, 1]
    rig.consume_until(settled({"a": 6, "b": 2}), **options)
    for each in both:
        each.publish(sent)
    rig.consume_until(settled({"a": 6, "b": 2}), **options)
    assert payments.markers(rig.engine) == {
        stored_id(each.id, source) for each in sent for source in ("first", "second")
    }


@ONCE
@pytest.mark.parametrize("source", [None, "both"])
def test_two_topics_that_are_declared_to_be_one_source_share_their_ids(
    rig: KafkaTopic, other: Kafka, batch: int, source: str | None
) -> None:
    """An event that an outbox publishes to both is one message."""
    for each in (rig.queue, other):
        each.publish([Sent("p1", payment(1))])
    topics = [rig.queue.topic, other.topic]
    rig.consume_until(lambda: rig.settled({"a": 1})() and other.left() == 0, topics=topics, source=source, batch=batch)
    assert payments.markers(rig.engine) == {stored_id("p1", source)}


def test_a_topic_that_joins_another_changes_no_id_of_it(rig: KafkaTopic, other: Kafka) -> None:
    """The first one keeps its ids as they are, by declaration; a consumer of one topic needs none."""
    rig.queue.publish([Sent("p1", payment(1))])
    rig.consume_until(rig.settled({"a": 1}))
    for each in (rig.queue, other):
        each.publish([Sent("p1", payment(1))])
    source = {rig.queue.topic: None, other.topic: "other"}
    options: dict[str, Any] = {"topics": [*source], "source": source}
    rig.consume_until(lambda: rig.settled({"a": 2})() and other.left() == 0, **options)
    assert payments.markers(rig.engine) == {"p1", "5:other2:p1"}


def test_several_topics_need_a_declared_source(rig: KafkaTopic) -> None:
    """The consumer is not made, and names the choices. A topic that is named twice is one."""
    dispatcher = payments.dispatcher(rig.engine)
    with pytest.raises(ValueError, match="several topics needs source=") as refused:
        Consumer(rig.queue.config, ["payments", "refunds"], dispatcher)
    choices = ("source=None", 'source="payments"', 'source={"payments": "payments", "refunds": "refunds"}')
    assert [each for each in choices if each not in str(refused.value)] == []
    Consumer(rig.queue.config, ["payments", "payments"], dispatcher)
    wrong: Any
    for wrong in ({"payments": "payments"}, {"payments": "p", "refunds": "r", "refund": "r"}, {}):
        with pytest.raises(ValueError, match="source has a source or None for each topic"):
            Consumer(rig.queue.config, ["payments", "refunds"], dispatcher, source=wrong)
    for wrong in (7, ["payments"], {"payments": 7, "refunds": None}, {"payments": ..., "refunds": ...}):
        with pytest.raises(TypeError, match=r'source is text, as in source="payments", or None'):
            Consumer(rig.queue.config, ["payments", "refunds"], dispatcher, source=wrong)


def test_headers_that_cannot_be_read_end_the_consumer_which_names_their_message(rig: KafkaTopic) -> None:
    """The id may be among them, although the body has one. A person moves the position behind the message."""
    rig.queue.send(payment(1))
    produce(rig.queue.config["bootstrap.servers"], rig.queue.topic, [(payment(2), UNREADABLE, 0)])
    rig.queue.send(payment(3, "behind"))
    for _ in range(2):
        with pytest.raises(RefusedError, match=rf"of Kafka, {rig.queue.topic} \[0\] at offset 1: .* --to-offset 2"):
            rig.consume_until(lambda: False)
        assert rig.queue.committed(rig.queue.topic)[0] == 1
        assert rig.applied == ({"a": 1}, 1)
    rig.queue.skip(rig.queue.topic)
    rig.consume_until(rig.settled({"a": 1, "behind": 1}))
    assert rig.queue.dead() == []


def test_a_dead_letter_whose_headers_cannot_be_read_ends_the_replay(rig: KafkaTopic) -> None:
    """With its place; what is before it is replayed."""
    rig.queue.send(payment(1), topic=rig.queue.dead_letters)
    produce(rig.queue.config["bootstrap.servers"], rig.queue.dead_letters, [(payment(2), UNREADABLE, 0)])
    with pytest.raises(RefusedError, match=rf"of Kafka, {rig.queue.dead_letters} \[0\] at offset 1: "):
        rig.queue.replay()
    rig.consume_until(rig.settled({"a": 1}))


@pytest.mark.parametrize("rule", ["poison", "early"])
def test_a_copy_that_is_too_large_is_refused_with_the_remedy(rig: KafkaTopic, cluster: KafkaCluster, rule: str) -> None:
    """The topic beside it has a smaller limit: nothing is passed over, and after the mend the consumer goes on."""
    RULES["b"] = rule
    rig.queue.send(payment(1, "b"))
    cluster.fail(PRODUCE, MESSAGE_TOO_LARGE, 1)
    topic = rig.queue.dead_letters if rule == "poison" else rig.queue.retry
    with pytest.raises(RefusedError, match=rf"is too large for the topic {topic}: .* larger max\.message\.bytes"):
        rig.consume_until(lambda: False)
    assert rig.queue.committed(rig.queue.topic)[0] == 0
    rig.consume_until(lambda: rig.queue.messages(topic) != [])


@pytest.mark.parametrize("rule", ["poison", "early"], ids=["dead", "retry"])
def test_an_offset_waits_for_its_copy(rig: KafkaTopic, cluster: KafkaCluster, rule: str) -> None:
    """A copy that no broker takes: the consumer ends with the error, and the message is delivered again."""
    RULES["b"] = rule
    rig.queue.send(payment(1, "b"))
    cluster.fail(PRODUCE, NOT_AUTHORIZED, 1)
    with pytest.raises(KafkaException, match="authorization"):
        rig.consume_until(lambda: False)
    assert rig.queue.committed(rig.queue.topic)[0] == 0
    rig.consume_until(lambda: rig.queue.dead() or rig.queue.messages(rig.queue.retry))
    assert rig.queue.committed(rig.queue.topic)[0] == 1


def test_a_group_without_positions_is_refused(rig: KafkaTopic) -> None:
    """Somebody has to say that it is new: it may have lost its positions, and what it had applied is long forgotten."""
    rig.pay((1, "a"))
    rig.queue.config["group.id"] += "-new"
    with pytest.raises(RefusedError, match="no position in one of its topics"):
        rig.consume_until(lambda: False)
    assert rig.applied == ({}, 0)


def test_a_group_begins_once(rig: KafkaTopic) -> None:
    """What has a position keeps it; a group may begin at the end, but never behind what was put aside for it."""
    group = rig.queue.config["group.id"] = f"{rig.queue.config['group.id']}-new"
    rig.queue.send(payment(1))
    rig.queue.send(payment(2), topic=f"{rig.queue.topic}.{group}.retry")
    assert begin(rig.queue.config, [rig.queue.topic], at="latest") == 8
    rig.queue.send(payment(3))
    assert begin(rig.queue.config, [rig.queue.topic]) == 0
    rig.consume_until(lambda: rig.applied == ({"a": 2}, 2))
    assert payments.markers(rig.engine) == {"p2", "p3"}


def test_a_topic_that_is_missing_is_named(rig: KafkaTopic, cluster: KafkaCluster) -> None:
    """Before anything is consumed: nothing could be put aside."""
    cluster.break_topic(rig.queue.dead_letters, UNKNOWN_TOPIC)
    with pytest.raises(RefusedError, match=f"no topic {rig.queue.dead_letters}"):
        rig.consume_until(lambda: False)


def test_garbage_goes_to_the_dead_letters(rig: KafkaTopic) -> None:
    """Ids and types that are no text, and an id that comes twice: nothing of it is applied."""
    wrong: list[dict[str, Any]] = [{"message_id": b"\xff"}, {"message_id": b"x" * 600}, {"type": b"\xff"}]
    for headers in wrong:
        rig.queue.send(payment(1), headers)
    two: list[tuple[bytes, bytes | None]] = [(b"message_id", b"one"), (b"message_id", b"two")]
    produce(rig.queue.config["bootstrap.servers"], rig.queue.topic, [(payment(1), two, 0)])
    rig.queue.send(None, {"message_id": "m"})
    rig.pay((2, "good"))
    rig.consume_until(rig.settled({"good": 1}))
    values = [each.value() for each in rig.queue.messages(rig.queue.dead_letters)]
    assert (len(values), values.count(payment(1)), values.count(None)) == (5, 4, 1)  # no value is not an empty one
    assert "a convert= that builds the event from incoming.key" in rig.queue.letters()[b""]


def test_a_tombstone_comes_with_its_key(rig: KafkaTopic) -> None:
    """A null value says nothing but "deleted": the converter gets the key, also from the retry topic."""
    seen: list[tuple[bytes | None, bytes]] = []

    def convert(incoming: Incoming) -> Message:
        seen.append((incoming.key, incoming.body))
        account = text_of(incoming.key, "key")
        return Message(text_of(incoming.message_id, "id"), {"account": account, "amount": 1}, "payment")

    def once() -> None:
        del RULES["key"]
        raise Defer("not yet")

    RULES["key"] = once
    rig.queue.send(None, {"message_id": "gone"})
    rig.consume_until(rig.settled({"key": 1}), convert=convert)
    assert seen == [(b"key", b"")] * 2


def test_headers_like_ours_are_believed_in_our_topics_only(rig: KafkaTopic) -> None:
    """A stranger cannot delay a message, nor use up its deliveries; garbage in our own topic counts as nothing."""
    RULES["b"] = "early"
    rig.queue.send(payment(1, "b"), {ATTEMPT: "99", **FAR})
    rig.pay((3, "a"))

    def mended() -> bool:
        if rig.applied[0] and rig.queue.messages(rig.queue.retry):
            RULES.clear()
        return rig.settled({"a": 1, "b": 1})()

    rig.consume_until(mended, max_attempts=50)
    rig.queue.send(payment(2), {ATTEMPT: "-7", NOT_BEFORE: b"\xff", OCCURRED: "?"}, topic=rig.queue.retry)
    rig.consume_until(rig.settled({"a": 2, "b": 1}), max_attempts=50)
    assert rig.queue.dead() == []


def test_a_clock_that_is_wrong_holds_nothing_up_for_ever(rig: KafkaTopic) -> None:
    """No message waits longer than ``max_delay``, whatever the clock said of the process that put it aside."""
    rig.queue.send(payment(1), FAR, topic=rig.queue.retry)
    rig.consume_until(rig.settled({"a": 1}))


class _DeafClient:
    """A client whose pauses are lost, as librdkafka loses one that meets a change of the assignment."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def pause(self, partitions: list[TopicPartition]) -> None:
        """Do nothing."""


def test_a_lost_pause_stores_no_offset_too_early(rig: KafkaTopic) -> None:
    """What comes behind a message that waits is settled after it, so no position moves over one that is not applied."""
    rig.queue.send(payment(1), FAR, topic=rig.queue.retry)
    rig.queue.send(payment(2), topic=rig.queue.retry)
    consumer = rig.consumer(max_delay=3600)
    consumer._client = cast(Any, _DeafClient(consumer._client))
    with rig.consuming(consumer=consumer):
        wait_for(lambda: [len(line) for line in consumer._waiting.values()] == [2], "both to wait", 40)
        rig.queue.send(payment(3), topic=rig.queue.retry, partition=1)
        wait_for(lambda: rig.applied[1] == 1, "the other partition", 40)
    assert payments.markers(rig.engine) == {"p3"}
    assert rig.queue.committed(rig.queue.retry)[:2] == [0, 1]
    rig.consume_until(rig.settled({"a": 3}))


def test_what_waits_goes_to_who_gets_the_partition(rig: KafkaTopic) -> None:
    """The first consumer stores nothing of it and forgets it; the second applies it, and both go on."""
    partitions = range(4)
    for number in partitions:
        rig.queue.send(payment(number), FAR, topic=rig.queue.retry, partition=number)
    first: Consumer = rig.consumer(max_delay=3600)
    with rig.consuming(consumer=first):
        wait_for(lambda: len(first._waiting) == 4, "all to wait", 40)
        with rig.consuming():
            wait_for(lambda: rig.applied[1] == 2 and len(first._waiting) == 2, "half of them", 40)
        wait_for(lambda: len(first._waiting) == 2, "the first consumer to keep its half", 40)
        assert sorted(rig.queue.committed(rig.queue.retry)) == [0, 0, 1, 1]
        for number in partitions:
            rig.queue.send(payment(10 + number, "behind"), partition=number)
        wait_for(lambda: rig.applied == ({"a": 2, "behind": 4}, 6), "what is behind them", 40)
    assert sorted(rig.queue.committed(rig.queue.retry)) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("enable.auto.commit", False, "enable.auto.commit must be true"),
        ("enable.auto.offset.store", "true", "enable.auto.offset.store must be false"),
        ("auto.offset.reset", "earliest", "auto.offset.reset must be error"),
        ("group.id", "", "group.id"),
        ("group.id", "a/b", "choose another group.id"),
    ],
)
def test_settings_that_lose_messages_are_refused(rig: KafkaTopic, setting: str, value: object, says: str) -> None:
    """Also where the user has written them; so are a missing group, and a group of which no topic can be named."""
    rig.queue.config[setting] = value
    with pytest.raises(ValueError, match=says):
        rig.consumer()


def test_a_name_in_place_of_names_is_refused(rig: KafkaTopic) -> None:
    """Each letter would be a topic."""
    with pytest.raises(ValueError, match="a list of names"):
        Consumer(rig.queue.config, "flights", payments.dispatcher(rig.engine))


def test_a_replay_that_is_interrupted_goes_on(rig: KafkaTopic, cluster: KafkaCluster) -> None:
    """What was published again has its position; the rest is published by the next run."""
    for number in range(4):
        rig.queue.send(payment(number), topic=rig.queue.dead_letters)
    cluster.fail(PRODUCE, 0, 2)
    cluster.fail(PRODUCE, MESSAGE_TOO_LARGE, 1)
    with pytest.raises(KafkaException, match="too large"):
        rig.queue.replay()
    assert rig.queue.replay() == 2
    rig.consume_until(rig.settled({"a": 4}))


def test_an_old_dead_letter_is_not_replayed_unasked(rig: KafkaTopic, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been replayed by somebody whose position is gone, as the markers are that would tell."""
    rig.queue.send(payment(1), topic=rig.queue.dead_letters)
    monkeypatch.setattr(plug, "KEPT", timedelta(0))
    with pytest.raises(RefusedError, match="since="):
        rig.queue.replay()
    for hours, replayed in ((1, 0), (-1, 1)):
        assert replay(rig.queue.config, rig.queue.topic, since=datetime.now(UTC) + timedelta(hours=hours)) == replayed
    rig.queue.send(payment(2), topic=rig.queue.dead_letters)
    assert rig.queue.replay() == 1  # whose position is known
    rig.consume_until(rig.settled({"a": 2}))
