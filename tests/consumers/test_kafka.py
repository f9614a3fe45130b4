"""Kafka: an offset is stored when its message is settled, and whatever cannot be applied is put aside first.

The cluster is librdkafka's mock: see `kafka_cluster.py` for what it is not.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from confluent_kafka import Consumer as Client
from confluent_kafka import KafkaException, Message, Producer, TopicPartition
from sqlalchemy import create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from databases import Database
from kafka_cluster import MESSAGE_TOO_LARGE, NOT_AUTHORIZED, PRODUCE, UNKNOWN_TOPIC, KafkaCluster, kafka_cluster
from kafka_garbage import garbage, produce
from projector_dedup import Defer, Dispatcher, RefusedError, by_path, make_tables, on, projector
from projector_dedup.integrations import kafka as plug
from projector_dedup.integrations.kafka import Consumer, begin, partitions_of, replay

TIMEOUT = 30.0  # seconds after which something that should happen has not


class Base(DeclarativeBase):
    """The read model, with the marker table beside it."""


class Miles(Base):
    """The row of a carrier."""

    __tablename__ = "miles"
    carrier: Mapped[str] = mapped_column(primary_key=True)
    miles: Mapped[int]


make_tables(Base.metadata)


@projector(idempotent=True, name="miles")
class AddMiles:
    """Add up miles; what a message asks for may be poison, or wait for a carrier."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.mended = False
        self.called = threading.Condition()

    @on("flight")
    def add(self, event: Any, session: Session) -> None:
        """Add, or fail as the event says."""
        with self.called:
            self.seen.append(event)
            self.called.notify_all()
        if not isinstance(event, dict):
            raise ValueError("an event is an object")
        if event.get("poison") and not self.mended:
            raise KeyError("poison")
        if (awaited := event.get("after")) and session.get(Miles, awaited) is None:
            raise Defer(f"{awaited} is not there yet")
        miles = session.get(Miles, event["carrier"])
        if miles is None:
            miles = Miles(carrier=event["carrier"], miles=0)
            session.add(miles)
        miles.miles += event["miles"]


class Rig:
    """A cluster, a database, one topic of two partitions, and whoever consumes it."""

    def __init__(self, cluster: KafkaCluster, database: Database, topic: str) -> None:
        self.cluster, self.topic = cluster, topic
        self.engine = create_engine(database.url())
        Base.metadata.create_all(self.engine)
        self.config: dict[str, Any] = {
            "bootstrap.servers": cluster.brokers,
            "group.id": f"of-{topic}",
            "session.timeout.ms": 2000,
            "heartbeat.interval.ms": 300,
            "log_level": 0,
        }
        self.projector = AddMiles()
        self.raised: list[BaseException] = []
        self.retry, self.dead = f"{topic}.of-{topic}.retry", f"{topic}.of-{topic}.dead"
        for each in (topic, self.retry, self.dead):
            cluster.make_topic(each, 2)
        self.producer = Producer({"bootstrap.servers": cluster.brokers, "log_level": 0})

    def publish(
        self,
        event: Mapping[str, Any] | bytes | None,
        message_id: str | bytes | None = None,
        *,
        topic: str = "",
        partition: int = 0,
        headers: Mapping[str, str | bytes | None] | None = None,
    ) -> None:
        """Publish an event; beside it an id, if it has one."""
        ours: list[tuple[str, str | bytes | None]] = [("type", "flight")]
        if message_id is not None:
            ours.append(("message_id", message_id))
        value = json.dumps(event).encode() if isinstance(event, Mapping) else event
        self.producer.produce(topic or self.topic, value, b"key", partition, headers=[*ours, *(headers or {}).items()])
        assert self.producer.flush(TIMEOUT) == 0

    def consumer(self, **options: Any) -> Consumer:
        """A consumer that has not begun to run."""
        dispatcher = Dispatcher(sessionmaker(self.engine), self.projector, type=by_path("type"))
        return Consumer(self.config, [self.topic], dispatcher, **{"max_delay": 0.2, **options})

    def begin(self) -> int:
        """Give the group its first positions."""
        return begin(self.config, [self.topic])

    @contextmanager
    def consuming(self, consumer: Consumer | None = None) -> Iterator[Consumer]:
        """A consumer that runs in a thread, and is stopped in the end; what it raised is raised."""
        consumer = consumer or self.consumer()
        self.raised = []

        def run() -> None:
            try:
                consumer.run()
            except BaseException as error:  # noqa: BLE001  # raised by wait_until, or below
                self.raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield consumer
        finally:
            consumer.stop()
            thread.join(TIMEOUT)
            assert not thread.is_alive()
        self.reraise()

    def consume_until(self, condition: Callable[[], bool], consumer: Consumer | None = None) -> None:
        """Consume until something is so, and stop."""
        with self.consuming(consumer):
            self.wait_until(condition)

    def reraise(self) -> None:
        """Raise what ended a consumer."""
        if self.raised:
            raise self.raised[0]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that a consumer does: looked at after each call of the handler, and now and then."""
        with self.projector.called:
            end = time.monotonic() + TIMEOUT
            while time.monotonic() < end:
                if condition():
                    return
                self.reraise()
                self.projector.called.wait(0.05)
        raise AssertionError("it does not happen")

    def miles(self) -> dict[str, int]:
        """The read model, from another connection."""
        with self.engine.connect() as connection:
            return {row.carrier: row.miles for row in connection.execute(text("SELECT * FROM miles"))}

    def messages(self, topic: str) -> list[Message]:
        """All messages of a topic."""
        client = Client({**self.config, "group.id": "reader", "auto.offset.reset": "error"})
        found: list[Message] = []
        for partition in partitions_of(client, topic):
            low, high = client.get_watermark_offsets(TopicPartition(topic, partition), timeout=TIMEOUT)
            client.assign([TopicPartition(topic, partition, low)])
            while len([each for each in found if each.partition() == partition]) < high - low:
                message = client.poll(TIMEOUT)
                assert message is not None
                assert message.error() is None
                found.append(message)
        client.close()
        return found

    def markers(self) -> int:
        """The number of messages that were applied, from another connection."""
        with self.engine.connect() as connection:
            return connection.scalar(text("SELECT count(*) FROM processed_message")) or 0

    def committed(self, topic: str) -> list[int]:
        """The position of the group in each partition of a topic."""
        client = Client(self.config)
        found = client.committed([TopicPartition(topic, partition) for partition in (0, 1)], timeout=TIMEOUT)
        client.close()
        return [place.offset for place in found]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """A cluster for all tests of this file; each has topics of its own."""
    with kafka_cluster(tmp_path_factory.mktemp("kafka")) as found:
        yield found


@pytest.fixture
def rig(cluster: KafkaCluster, postgresql: Database, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """A topic named for the test, and what belongs to it."""
    rig = Rig(cluster, postgresql, "".join(c if c.isalnum() else "-" for c in request.node.name))
    yield rig
    rig.engine.dispose()


def headers_of(message: Message) -> dict[str, Any]:
    """The headers of a message, none of which comes twice."""
    found = message.headers()
    assert isinstance(found, list)
    assert len(dict(found)) == len(found)
    return dict(found)


def test_offsets_are_committed_when_messages_are_applied(rig: Rig) -> None:
    """All are applied, and a consumer that is stopped leaves the positions behind them."""
    for number in range(6):
        rig.publish({"carrier": "UA", "miles": 1}, f"m{number}", partition=number % 2)
    assert rig.begin() == 4
    rig.consume_until(lambda: rig.miles() == {"UA": 6})
    assert rig.committed(rig.topic) == [3, 3]


def test_poison_is_put_aside_with_its_reason(rig: Rig) -> None:
    """Key, body and headers are those of the message, which stays where it was; others are applied."""
    rig.publish({"carrier": "UA", "miles": 5, "poison": True}, "m1", headers={"trace": "t", "empty": None})
    rig.publish({"carrier": "UA", "miles": 7}, "m2")
    rig.begin()
    rig.consume_until(lambda: rig.miles() == {"UA": 7})
    (dead,) = rig.messages(rig.dead)
    (original, _) = rig.messages(rig.topic)
    assert (dead.key(), dead.value()) == (original.key(), original.value())
    assert headers_of(dead) == {
        **headers_of(original),
        "projector-dedup-origin": f"{rig.topic} [0] at offset 0".encode(),
        "projector-dedup-timestamp": str(original.timestamp()[1]).encode(),
        "projector-dedup-attempt": b"1",
        "projector-dedup-reason": b"KeyError: 'poison'",
    }
    assert rig.committed(rig.topic) == [2, 0]


@pytest.mark.parametrize("in_retry", [False, True], ids=["topic", "retry"])
def test_whatever_a_client_sends_is_applied_delayed_or_a_dead_letter(rig: Rig, *, in_retry: bool) -> None:
    """Headers, values and timestamps that no client writes stop nobody: what is behind them is applied."""
    messages = list(garbage(seed=20130101, count=50))
    produce(rig.cluster.brokers, rig.retry if in_retry else rig.topic, messages)
    rig.publish({"carrier": "BB", "miles": 1}, "behind")
    rig.begin()
    with rig.consuming():
        rig.wait_until(lambda: "BB" in rig.miles() and "AA" in rig.miles() and rig.messages(rig.retry) != [])
        rig.publish({"carrier": "UA", "miles": 1}, "awaited")
        rig.wait_until(lambda: rig.markers() + len(rig.messages(rig.dead)) == len(messages) + 2)
    assert rig.miles() == {"AA": rig.markers() - 2, "BB": 1, "UA": 1}


def test_headers_that_cannot_be_read_are_named_and_their_message_is_rejected(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """The id may be among them, so a replay of the dead letter is rejected again, although the body has an id."""
    event = json.dumps({"type": "flight", "message_id": "m1", "carrier": "AA", "miles": 1}).encode()
    produce(rig.cluster.brokers, rig.topic, [(event, [(b"message_id", b"m2"), (b"caf\xe9", b"1")], 0)])
    rig.begin()
    rig.consume_until(lambda: len(rig.messages(rig.dead)) == 1)
    assert f"a header of {rig.topic} [0] at offset 0 has a name that is not UTF-8" in caplog.text
    assert replay(rig.config, rig.topic) == 1
    rig.consume_until(lambda: len(rig.messages(rig.dead)) == 2)
    assert [each.value() for each in rig.messages(rig.dead)] == [event] * 2


@pytest.mark.parametrize(
    ("event", "refused", "left_out"),
    [
        ({"poison": True}, 1, "headers"),
        ({"poison": True}, 2, "headers, key and value"),
        ({"after": "nobody"}, 1, ""),
        ({"after": "nobody"}, 2, "headers"),
    ],
)
def test_a_copy_that_is_too_large_becomes_a_smaller_dead_letter(
    rig: Rig, caplog: pytest.LogCaptureFixture, event: dict[str, Any], refused: int, left_out: str
) -> None:
    """It is without its headers, or even without its value, which the log says; the consumer goes on."""
    rig.publish({"carrier": "AA", "miles": 1, **event}, "m1", headers={"trace": "t"})
    rig.publish({"carrier": "BB", "miles": 1}, "m2")
    rig.begin()
    rig.cluster.fail(PRODUCE, MESSAGE_TOO_LARGE, refused)
    rig.consume_until(lambda: rig.miles() == {"BB": 1})
    (dead,) = rig.messages(rig.dead)
    assert (dead.value() is None) == ("value" in left_out)
    assert ("trace" in headers_of(dead)) == (not left_out)
    assert not left_out or f"is without its {left_out}, because it is too large" in caplog.text


def test_a_message_before_its_time_comes_again(rig: Rig) -> None:
    """It is put aside, more of them than one consumer holds at a time, and those behind are applied meanwhile."""
    for number in range(40):
        rig.publish({"carrier": "AA", "miles": 1, "after": "UA"}, f"early{number}", partition=number % 2)
    rig.begin()
    with rig.consuming(rig.consumer(max_delay=2)):
        rig.wait_until(lambda: len(rig.projector.seen) > 60)  # all, and many of them again
        assert rig.miles() == {}
        rig.publish({"carrier": "UA", "miles": 5}, "late")
        rig.wait_until(lambda: rig.miles() == {"UA": 5, "AA": 40})
    assert rig.committed(rig.topic) == [21, 20]
    assert rig.messages(rig.dead) == []
    copies = rig.messages(rig.retry)
    assert sum(rig.committed(rig.retry)) == len(copies)
    assert {headers_of(each)["projector-dedup-attempt"] for each in copies} >= {b"2", b"3"}


def test_deliveries_are_counted_over_the_copies(rig: Rig) -> None:
    """The third delivery was the last one, so the message is rejected."""
    rig.publish({"carrier": "AA", "miles": 1, "after": "UA"}, "m1")
    rig.begin()
    rig.consume_until(lambda: len(rig.messages(rig.dead)) == 1, rig.consumer(max_attempts=3))
    assert len(rig.projector.seen) == 3
    (dead,) = rig.messages(rig.dead)
    assert headers_of(dead)["projector-dedup-attempt"] == b"3"
    assert headers_of(dead)["projector-dedup-origin"].decode() == f"{rig.topic} [0] at offset 0"


@pytest.mark.parametrize("event", [{"poison": True}, {"after": "nobody"}], ids=["dead", "retry"])
def test_an_offset_waits_for_its_copy(rig: Rig, event: dict[str, Any]) -> None:
    """A copy that no broker takes: the consumer ends with the error, and the message is delivered again."""
    rig.publish({"carrier": "AA", "miles": 1, **event}, "m1")
    rig.begin()
    rig.cluster.fail(PRODUCE, NOT_AUTHORIZED, 1)
    with pytest.raises(KafkaException, match="authorization"), rig.consuming():
        rig.wait_until(lambda: len(rig.projector.seen) == 1)
    assert rig.committed(rig.topic) == [0, 0]
    rig.consume_until(lambda: rig.messages(rig.dead) + rig.messages(rig.retry) != [])
    assert rig.committed(rig.topic) == [1, 0]


def test_a_group_without_positions_is_refused(rig: Rig) -> None:
    """Somebody has to say that it is new: it may have lost its positions, and what it had applied is long forgotten."""
    rig.publish({"carrier": "AA", "miles": 1}, "m1")
    with pytest.raises(RefusedError, match="no position in one of its topics"):
        rig.consume_until(lambda: False)
    assert rig.projector.seen == []


def test_a_group_begins_once(rig: Rig) -> None:
    """What has a position keeps it; a group may begin at the end, but never behind what was put aside for it."""
    rig.publish({"carrier": "AA", "miles": 1}, "m1")
    rig.publish({"carrier": "AA", "miles": 2}, "m2", topic=rig.retry)
    assert begin(rig.config, [rig.topic], at="latest") == 4
    assert (rig.committed(rig.topic), rig.committed(rig.retry)) == ([1, 0], [0, 0])
    rig.publish({"carrier": "AA", "miles": 4}, "m3")
    assert rig.begin() == 0
    rig.consume_until(lambda: rig.miles() == {"AA": 6})


def test_a_topic_that_is_missing_is_named(rig: Rig) -> None:
    """Before anything is consumed: nothing could be put aside."""
    rig.begin()
    rig.cluster.break_topic(rig.dead, UNKNOWN_TOPIC)
    with pytest.raises(RefusedError, match=f"no topic {rig.dead}"), rig.consuming():
        pass


BODIES = [None, b"", b"{", b"\xff\xfe", b"[1]", b"7", b'{"carrier": null, "miles": "x"}', b"[" * 5000]
HEADERS: list[dict[str, str | bytes | None]] = [
    {"message_id": b"\xff"},
    {"message_id": b"x" * 600},
    {"type": b"\xff"},
    {"type": "unheard of"},
    {"message_id": None},
]


def test_garbage_goes_to_the_dead_letters(rig: Rig) -> None:
    """Whatever is in a body or a header, the consumer lives on, and nothing is applied."""
    for number, body in enumerate(BODIES):
        rig.publish(body, f"m{number}")
    for headers in HEADERS:
        rig.publish({"carrier": "AA", "miles": 1}, headers=headers)
    rig.publish({"carrier": "AA", "miles": 1}, "one", headers={"message_id": "two"})  # which of them is it?
    rig.publish({"carrier": "UA", "miles": 1}, "good")
    rig.begin()
    rig.consume_until(lambda: rig.miles() == {"UA": 1})
    dead = rig.messages(rig.dead)
    assert len(dead) == len(BODIES) + len(HEADERS) + 1
    assert sorted(each.value() or b"" for each in dead) == sorted(
        each.value() or b"" for each in rig.messages(rig.topic) if b"UA" not in (each.value() or b"")
    )
    assert [each.value() for each in dead].count(None) == 1  # no value is not an empty one


def test_headers_like_ours_are_believed_in_our_topics_only(rig: Rig) -> None:
    """A stranger cannot delay a message, nor use up its deliveries; garbage in our own topic counts as nothing."""
    ours: dict[str, str | bytes | None] = {
        "projector-dedup-not-before": "99999999999999",
        "projector-dedup-attempt": "99",
        "more": "1",
    }
    rig.publish({"carrier": "AA", "miles": 1, "after": "UA"}, "m1", headers=ours)
    garbage: dict[str, str | bytes | None] = {
        "projector-dedup-not-before": b"\xff",
        "projector-dedup-attempt": "-7",
        "projector-dedup-timestamp": "?",
    }
    rig.begin()
    with rig.consuming(rig.consumer(max_attempts=50)):
        rig.wait_until(lambda: len(rig.projector.seen) == 2)
        rig.publish({"carrier": "UA", "miles": 2}, "m2", topic=rig.retry, headers=garbage)
        rig.wait_until(lambda: rig.miles() == {"UA": 2, "AA": 1})
    assert rig.messages(rig.dead) == []
    for copy in rig.messages(rig.retry):
        assert int(headers_of(copy)["projector-dedup-attempt"]) < 50


def test_a_clock_that_is_wrong_holds_nothing_up_for_ever(rig: Rig) -> None:
    """No message waits longer than ``max_delay``, whatever the clock said of the process that put it aside."""
    far = {"projector-dedup-not-before": "99999999999999"}
    rig.publish({"carrier": "AA", "miles": 1}, "m1", topic=rig.retry, headers=far)
    rig.begin()
    rig.consume_until(lambda: rig.miles() == {"AA": 1})


class _DeafClient:
    """A client whose pauses are lost, as librdkafka loses one that meets a change of the assignment."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def pause(self, partitions: list[TopicPartition]) -> None:
        """Do nothing."""


def test_a_lost_pause_stores_no_offset_too_early(rig: Rig) -> None:
    """What comes behind a message that waits is settled after it, so no position moves over one that is not applied."""
    late = {"projector-dedup-not-before": "99999999999999"}
    rig.publish({"carrier": "AA", "miles": 1}, "m1", topic=rig.retry, headers=late)
    rig.publish({"carrier": "UA", "miles": 1}, "m2", topic=rig.retry)
    rig.begin()
    consumer = rig.consumer(max_delay=3600)
    consumer._client = cast(Any, _DeafClient(consumer._client))
    with rig.consuming(consumer):
        rig.wait_until(lambda: [len(line) for line in consumer._waiting.values()] == [2])
        rig.publish({"carrier": "DL", "miles": 1}, "m3", topic=rig.retry, partition=1)
        rig.wait_until(lambda: rig.miles() == {"DL": 1})
    assert rig.committed(rig.retry) == [0, 1]
    rig.consume_until(lambda: rig.miles() == {"AA": 1, "UA": 1, "DL": 1})
    assert [event["carrier"] for event in rig.projector.seen] == ["DL", "AA", "UA"]


def test_what_waits_goes_to_who_gets_the_partition(rig: Rig) -> None:
    """The first consumer stores nothing of it and forgets it; the second applies it, and both go on."""
    late = {"projector-dedup-not-before": "99999999999999"}
    for partition in (0, 1):
        rig.publish({"carrier": "AA", "miles": 1}, f"m{partition}", topic=rig.retry, partition=partition, headers=late)
    rig.begin()
    first, second = rig.consumer(max_delay=3600), rig.consumer(max_delay=0.2)
    with rig.consuming(first):
        rig.wait_until(lambda: len(first._waiting) == 2)
        with rig.consuming(second):
            rig.wait_until(lambda: rig.miles() == {"AA": 1} and len(first._waiting) == 1)
        rig.wait_until(lambda: len(first._waiting) == 1)
        assert sorted(rig.committed(rig.retry)) == [0, 1]
        for partition in (0, 1):
            rig.publish({"carrier": "UA", "miles": 1}, f"n{partition}", partition=partition)
        rig.wait_until(lambda: rig.miles() == {"AA": 1, "UA": 2})
    assert sorted(rig.committed(rig.retry)) == [0, 1]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("enable.auto.commit", False), ("enable.auto.offset.store", "true"), ("auto.offset.reset", "earliest")],
)
def test_settings_that_lose_messages_are_refused(rig: Rig, setting: str, value: object) -> None:
    """Also where the user has written them."""
    rig.config[setting] = value
    with pytest.raises(ValueError, match=setting):
        rig.consumer()


def test_what_cannot_be_is_refused(rig: Rig) -> None:
    """A name that is no list of names, no group, a group of which no topic can be named."""
    with pytest.raises(ValueError, match="a list of names"):
        Consumer(rig.config, "flights", Dispatcher(sessionmaker(rig.engine), rig.projector))
    for group, said in (("", "group.id"), ("a/b", "choose another group.id")):
        rig.config["group.id"] = group
        with pytest.raises(ValueError, match=said):
            rig.consumer()


def test_dead_letters_are_replayed_once(rig: Rig) -> None:
    """After the mend they are applied; a second replay finds nothing, and none of them was lost."""
    for number in range(5):
        rig.publish({"carrier": "AA", "miles": 1, "poison": True}, f"m{number}", partition=number % 2)
    rig.begin()
    assert replay(rig.config, rig.topic) == 0
    rig.consume_until(lambda: len(rig.messages(rig.dead)) == 5)
    rig.projector.mended = True
    assert replay(rig.config, rig.topic) == 5
    rig.consume_until(lambda: rig.miles() == {"AA": 5}, rig.consumer(max_attempts=1))
    assert replay(rig.config, rig.topic) == 0
    assert len(rig.messages(rig.dead)) == 5


def test_a_replay_that_is_interrupted_goes_on(rig: Rig) -> None:
    """What was published again has its position; the rest is published by the next run."""
    for number in range(4):
        rig.publish({"carrier": "AA", "miles": 1}, f"m{number}", topic=rig.dead)
    rig.begin()
    rig.cluster.fail(PRODUCE, 0, 2)
    rig.cluster.fail(PRODUCE, MESSAGE_TOO_LARGE, 1)
    with pytest.raises(KafkaException, match="too large"):
        replay(rig.config, rig.topic)
    assert replay(rig.config, rig.topic) == 2
    rig.consume_until(lambda: rig.miles() == {"AA": 4})


def test_an_old_dead_letter_is_not_replayed_unasked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been replayed by somebody whose position is gone, as the markers are that would tell."""
    rig.publish({"carrier": "AA", "miles": 1}, "m1", topic=rig.dead)
    rig.begin()
    monkeypatch.setattr(plug, "KEPT", timedelta(0))
    with pytest.raises(RefusedError, match="since="):
        replay(rig.config, rig.topic)
    assert replay(rig.config, rig.topic, since=datetime.now(UTC) + timedelta(hours=1)) == 0
    assert replay(rig.config, rig.topic, since=datetime.now(UTC) - timedelta(hours=1)) == 1
    rig.publish({"carrier": "AA", "miles": 1}, "m2", topic=rig.dead)
    assert replay(rig.config, rig.topic) == 1  # whose position is known
    rig.consume_until(lambda: rig.miles() == {"AA": 2})
