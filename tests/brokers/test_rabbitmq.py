"""RabbitMQ, by pika, aio-pika and FastStream: the queues beside a work queue, and headers that copies can carry or not.

What every consumer promises is in `test_every_consumer.py`.
"""

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import aio_pika
import aiormq
import pika
import pytest
from faststream.rabbit import RabbitQueue

import payments
from adapters import AioPika, FastStreamRabbit, Pika, adapter
from amqp_fields import LATE_VALUES, OCTET_VALUES, UNREADABLE_VALUES, VALUES, drawn, short, table
from consumer_rig import wait_for
from databases import Database
from payments import RULES, KilledError, payment
from projector_dedup.brokers.incoming import cloudevent
from projector_dedup.brokers.rabbitmq import DELIVERIES, REJECTED_FOR, WITHOUT_ID, dead_letters, queues_beside
from projector_dedup.errors import RefusedError
from walk import files_entered, map_anew

FRAME = 131_072  # bytes, which the server offers
POISON = "ValueError: this account cannot be read\\nreally"
EARLY = "Defer: the account is not open yet"


Rig = Pika | AioPika | FastStreamRabbit


@pytest.fixture(params=["pika", "aio-pika", "faststream-rabbit"])
def rig(request: pytest.FixtureRequest, postgresql: Database) -> Iterator[Rig]:
    """A queue, and a consumer of it by each client."""
    with adapter(request.param, postgresql) as made:
        yield made


def by(*clients: str) -> pytest.MarkDecorator:
    """Try these clients only."""
    return pytest.mark.parametrize("rig", clients, indirect=True)


def letter(rig: Rig) -> pika.BasicProperties:
    """The properties of the only dead letter."""
    ((properties, _),) = rig.queue.dead_letters()
    return properties


def one_letter(rig: Rig) -> bool:
    """True if there is a dead letter."""
    return rig.queue.count(dead_letters(rig.queue.queue)) == 1


def test_everything_that_the_producer_said_is_in_the_dead_letter(rig: Rig) -> None:
    """But for what would end it, or send it elsewhere."""
    RULES["b"] = "poison"
    at = datetime(2013, 1, 1, tzinfo=UTC)
    said = {
        "message_id": "id-poison",
        "timestamp": int(at.timestamp()),
        "content_type": "application/json",
        "correlation_id": "c",
        "app_id": "producer",
        "priority": 3,
    }
    elsewhere = f"{rig.queue.queue}.wait.300s"
    headers = {"tenant": "north", "n": 5, "CC": [elsewhere], "x-death": "garbage"}
    assert rig.replay() == 0  # that queue is declared
    rig.queue.send(payment(1, "b"), **said, headers=headers, expiration="600000", user_id="guest")
    rig.consume_until(lambda: one_letter(rig))
    properties = letter(rig)
    assert {name: getattr(properties, name) for name in said} == said
    assert properties.headers == {"tenant": "north", "n": 5, DELIVERIES: 1, REJECTED_FOR: POISON}
    assert (properties.delivery_mode, properties.expiration, properties.user_id) == (2, None, None)
    assert rig.queue.count(elsewhere) == 1  # the original, by its CC
    RULES.clear()
    assert rig.replay() == 1
    assert (rig.queue.count(), rig.queue.dead()) == (1, [])
    assert rig.replay() == 0


def test_the_count_is_that_of_the_copies(rig: Rig) -> None:
    """The second wait is in the next queue; a count that a copy carries goes on."""
    RULES["b"] = "early"
    rig.pay((1, "b"))
    rig.consume_until(lambda: rig.queue.count(f"{rig.queue.queue}.wait.5s") == 1)
    rig.queue.send(payment(2, "b"), message_id="p2", headers={DELIVERIES: 6})
    rig.consume_until(lambda: one_letter(rig), max_attempts=7)
    assert letter(rig).headers == {DELIVERIES: 7, REJECTED_FOR: EARLY}


def test_a_message_waits_in_the_longest_queue_within_the_bound(rig: Rig) -> None:
    """It would wait for 300 seconds."""
    RULES["b"] = "early"
    rig.queue.send(payment(1, "b"), message_id="p1", headers={DELIVERIES: 6})
    rig.consume_until(lambda: rig.queue.count(f"{rig.queue.queue}.wait.5s") == 1, max_delay=29.9)


WITHOUT_AN_ID = b'{"type": "payment", "account": "a", "amount": 1}'
GARBAGE: dict[str, tuple[bytes, dict[str, Any]]] = {
    "nothing": (b"", {}),
    "too deep": (b"[" * 100_000, {}),
    "an empty id": (WITHOUT_AN_ID, {"message_id": ""}),
    "a huge header": (b"{", {"headers": {"h": "x" * (FRAME - 1000)}}),
    "headers up to the limit": (b"{", {"headers": {"h": "x" * (FRAME - 110)}}),
    "a header of another kind": (b"{", {"headers": {DELIVERIES: "many", REJECTED_FOR: {"a": [1, None]}}}),
    "a count below zero": (b"{", {"headers": {DELIVERIES: -7}}),
    "an immense count": (b"{", {"headers": {DELIVERIES: 1 << 62}}),
    "bytes in a header": (b"{", {"headers": {"h": b"\xff\xfe"}}),
}
OCTETS: dict[str, dict[str, Any]] = {
    "an id that is no text": {"message_id": b"\xff\xfe"},
    "a type that is no text": {"type": b"\xff"},
    "a moment that is none": {"timestamp": 1 << 62},
}


def test_garbage_in_properties_becomes_dead_letters(rig: Rig) -> None:
    """Nothing of it is applied, and what is behind it is."""
    octets = OCTETS if rig.reads_octets else {}
    for name, (body, properties) in GARBAGE.items():
        rig.queue.send(body, **{"message_id": name, "correlation_id": name, **properties})
    for name, properties in octets.items():
        rig.queue.send(WITHOUT_AN_ID, **{"message_id": name, "correlation_id": name, **properties})
    rig.pay((2, "behind"))
    wanted = {*GARBAGE, *octets}
    rig.consume_until(lambda: rig.settled({"behind": 1})() and len(rig.queue.dead()) == len(wanted))
    found = {properties.correlation_id: properties.headers for properties, _ in rig.queue.dead_letters()}
    assert found.keys() == wanted
    without = {name for name, headers in found.items() if not (headers or {}).get(REJECTED_FOR)}
    assert without == {"headers up to the limit"}


@pytest.mark.parametrize(("below", "kept"), [(1_000, {DELIVERIES, REJECTED_FOR}), (70, {DELIVERIES}), (42, set())])
def test_headers_that_fill_a_frame(rig: Rig, below: int, kept: set[str]) -> None:
    """A copy leaves out what no longer fits: RabbitMQ would close the connection, and every consumer's after it."""
    RULES["b"] = "poison"
    text = "x" * (FRAME - below)
    rig.queue.send(payment(1, "b"), message_id="p1", headers={"x": text})
    rig.consume_until(lambda: one_letter(rig))
    headers = letter(rig).headers
    assert headers.pop("x") == text
    assert set(headers) == kept


@pytest.mark.parametrize(("given", "marked"), [("p1", {}), (None, {WITHOUT_ID: True})])
def test_headers_that_leave_no_room_for_a_copy_are_left_out_and_named(
    rig: Rig, caplog: pytest.LogCaptureFixture, given: str | None, marked: dict[str, bool]
) -> None:
    """RabbitMQ would close the connection over the copy, and deliver the message again for ever."""
    RULES["b"] = "early"
    headers = {"small": 1, "large": "x" * (FRAME - 57)}
    rig.queue.send(payment(1, "b"), message_id=given, headers=headers)
    rig.consume_until(lambda: one_letter(rig), max_attempts=2)
    marked = {} if rig.reads_octets else marked  # pika copies a message without an id as it is
    assert letter(rig).headers == {"small": 1, **marked, DELIVERIES: 2, REJECTED_FOR: EARLY}
    line = f"a message from queue {rig.queue.queue} is copied without 1 of its headers"
    (told,) = {each.getMessage() for each in caplog.records if each.getMessage().startswith(line)}
    assert told.endswith(": large")


async def _too_deep(*_: object, **__: object) -> None:
    raise RecursionError


@by("aio-pika", "faststream-rabbit")
def test_a_message_that_is_nested_too_deeply_for_a_copy_is_named(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """aio-pika reads one level more than it writes: 488 arrays, with Python 3.11. The message stays in its queue."""
    monkeypatch.setattr(aiormq.Channel, "basic_publish", _too_deep)
    rig.queue.send(b"{", message_id="deep")
    named = f"aio-pika cannot copy the message deep of RabbitMQ's queue {rig.queue.queue} (delivery tag 1)"
    if isinstance(rig, AioPika):
        error = rig.failure()
        assert isinstance(error, ExceptionGroup)
        assert error.subgroup(RefusedError) is not None
        assert named in str(error.exceptions[0])
    else:
        with rig.consuming():
            wait_for(lambda: named in caplog.text, "the log line", 20)
    wait_for(lambda: rig.queue.count() == 1, "the message to be in its queue", 20)
    assert rig.queue.dead() == []


def test_a_header_that_is_not_utf_8_is_in_the_copy(rig: Rig) -> None:
    """With its octets; a header that the client cannot encode is not."""
    RULES["b"] = "poison"
    headers = table((b"not text", VALUES["text that is not UTF-8"]), (b"too large", VALUES["double"]))
    rig.queue.send_octets(payment(1, "b"), message_id=short(b"p1"), headers=headers)
    rig.consume_until(lambda: one_letter(rig))
    assert letter(rig).headers == {"not text": b"\xff\xfe", DELIVERIES: 1, REJECTED_FOR: POISON}


def _in_header(values: Mapping[str, bytes]) -> dict[str, dict[str, bytes]]:
    return {name: {"headers": table((b"h", value))} for name, value in values.items()}


READ_BY_PIKA = {
    **{f"a {name} that is not UTF-8": {name: short(b"\xff")} for name in ("message_id", "type", "app_id")},
    "a moment that is none": {"timestamp": b"\xff" * 8},
    "a header's name that is not UTF-8": {"headers": table((b"\xff", b"V"))},
    **_in_header(OCTET_VALUES),
}
UNREADABLE_BY_AIO_PIKA = {**READ_BY_PIKA, **_in_header(UNREADABLE_VALUES)}
UNREADABLE_BY_PIKA = _in_header({**LATE_VALUES, **UNREADABLE_VALUES})


@by("pika")
@pytest.mark.parametrize("properties", UNREADABLE_BY_PIKA.values(), ids=UNREADABLE_BY_PIKA)
def test_what_pika_cannot_read_ends_its_consumer_which_says_how_to_drop_it(
    rig: Rig, properties: dict[str, bytes]
) -> None:
    """pika closes the connection, and ``run`` raises; no message is lost, and with prefetch=1 that one is the first."""
    rig.pay((1, "a"))
    rig.queue.send_octets(payment(2), message_id=short(b"p2"), **properties)
    rig.pay((3, "behind"))
    error = rig.failure()
    assert isinstance(error, ConnectionError)
    assert f"the connection to RabbitMQ was lost at queue {rig.queue.queue}: " in str(error)
    assert "a message among the first 20 of the queue" in str(error)
    wait_for(lambda: rig.queue.count() + rig.applied[1] >= 3, "the messages to be there again", 20)
    assert isinstance(rig.failure(prefetch=1), ConnectionError)
    wait_for(lambda: rig.queue.count() == 2, "the messages to be there again", 20)
    assert rig.applied == ({"a": 1}, 1)
    rig.queue.drop_first()
    rig.consume_until(rig.settled({"a": 1, "behind": 1}))
    assert rig.queue.dead() == []


@by("pika")
def test_a_dead_letter_that_pika_cannot_read_ends_the_replay(rig: Rig) -> None:
    """It is the first of its queue then; nothing is lost."""
    dead = dead_letters(rig.queue.queue)
    assert rig.replay() == 0  # the queue of dead letters is declared
    for properties in ({}, UNREADABLE_BY_PIKA["last timestamp"], {}):
        rig.queue.send_octets(b"{", dead, **properties)
    with pytest.raises(ConnectionError, match=rf"was lost at queue {dead}: .*`rabbitmqadmin get`"):
        rig.replay()
    wait_for(lambda: rig.queue.count(dead) == 2, "the dead letters to be there again", 20)
    rig.queue.drop_first(dead)
    assert rig.replay() == 1
    assert (rig.queue.count(), rig.queue.count(dead)) == (2, 0)


@by("pika")
@pytest.mark.parametrize("properties", READ_BY_PIKA.values(), ids=READ_BY_PIKA)
def test_pika_settles_what_aio_pika_cannot_read(rig: Rig, properties: dict[str, bytes]) -> None:
    """It is the remedy that aio-pika's consumer names."""
    rig.queue.send_octets(payment(1), **{"message_id": short(b"p1"), **properties})
    rig.consume_until(lambda: rig.applied[1] + len(rig.queue.dead_letters()) == 1)


@by("aio-pika")
@pytest.mark.parametrize("properties", UNREADABLE_BY_AIO_PIKA.values(), ids=UNREADABLE_BY_AIO_PIKA)
def test_what_aio_pika_cannot_read_ends_its_consumer_which_names_the_remedy(
    rig: Rig, properties: dict[str, bytes]
) -> None:
    """aio-pika closes the connection, and ``run`` raises; the message stays in its queue."""
    rig.queue.send_octets(payment(1), **{"message_id": short(b"p1"), **properties})
    error = rig.failure()
    assert isinstance(error, ConnectionError)
    assert f"cannot read a message of queue {rig.queue.queue}" in str(error)
    assert (rig.applied, rig.queue.count()) == (({}, 0), 1)


@by("faststream-rabbit")
def test_what_aio_pika_cannot_read_is_logged_with_the_remedy(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """aio-pika closes FastStream's connection at each delivery; the message stays, until pika's consumer settles it."""
    with rig.consuming():
        rig.queue.send_octets(payment(1), message_id=short(b"\xff"))
        line = f"aio-pika cannot read a message of queue {rig.queue.queue}"
        wait_for(lambda: line in caplog.text, "the log line", 20)
    wait_for(lambda: rig.queue.count() == 1, "the message to be in its queue", 20)


@by("pika", "aio-pika")
def test_dead_letters_of_others_are_replayed_whatever_their_headers(rig: Rig) -> None:
    """RabbitMQ itself puts there what a quorum queue gives up, as its producer sent it."""
    without_id = {"headers": table((WITHOUT_ID.encode(), VALUES["double"])), "message_id": short(b"a")}
    sent = [*drawn(10, octets=rig.reads_octets), without_id]
    assert rig.replay() == 0  # the queue of dead letters is declared
    for properties in sent:
        rig.queue.send_octets(b"{", dead_letters(rig.queue.queue), **properties)
    assert rig.replay() == len(sent)
    assert (rig.queue.count(), rig.queue.dead_letters()) == (len(sent), [])


def test_a_cloudevent_in_headers_is_applied(rig: Rig) -> None:
    """In the binary mode of AMQP; its id is made of source and id."""
    attributes = {"specversion": "1.0", "id": "7", "source": "/s", "type": "payment"}
    headers = {f"cloudEvents:{name}": value for name, value in attributes.items()}
    rig.queue.send(payment(1), headers=headers, content_type="application/json")
    rig.consume_until(rig.settled({"a": 1}), convert=cloudevent)
    assert payments.markers(rig.engine) == {"2:/s1:7"}


@by("pika", "aio-pika")
def test_a_deleted_queue_ends_the_consumer_with_an_error(rig: Rig) -> None:
    """It does not wait for ever in silence."""
    at_work = threading.Event()
    RULES["a"] = at_work.set
    rig.pay((1, "a"))

    def delete() -> None:
        at_work.wait(30)
        with pika.BlockingConnection(rig.queue.parameters) as connection:
            connection.channel().queue_delete(rig.queue.queue)

    deleting = threading.Thread(target=delete)
    deleting.start()
    error = rig.failure()
    deleting.join()
    assert isinstance(error, ConnectionError)
    assert "was the queue deleted?" in str(error)


@by("pika", "aio-pika")
def test_a_copy_that_rabbitmq_does_not_take_ends_the_consumer(rig: Rig) -> None:
    """With the client's error."""

    def fail() -> None:
        with ThreadPoolExecutor(1) as other:
            other.submit(rig.lose_letters).result()
        raise KeyError("airline")

    RULES["b"] = fail
    rig.pay((1, "b"))
    error = rig.failure()
    if isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, (pika.exceptions.UnroutableError, aio_pika.exceptions.PublishError))
    assert rig.queue.count() == 1


@by("faststream-rabbit")
def test_a_message_that_cannot_be_copied_is_given_back(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody has deleted the dead letters: the message is not lost, the log says so, and others are applied."""
    RULES["b"] = "poison"
    with rig.consuming():
        rig.lose_letters()
        rig.pay((1, "b"), (2, "a"))
        line = f"a message from queue {rig.queue.queue} could not be settled, and is given back to it"
        wait_for(lambda: line in caplog.text and rig.applied == ({"a": 1}, 1), "the log line", 20)
        rig.queue.channel.queue_declare(dead_letters(rig.queue.queue), durable=True)
        wait_for(lambda: one_letter(rig), "the dead letter", 20)
    assert rig.queue.left() == 0


def test_the_queues_are_made_and_one_that_is_there_keeps_its_arguments(rig: Rig) -> None:
    """A work queue may be of any type; without one, a durable queue is made."""
    channel, queue = rig.queue.channel, rig.queue.queue
    channel.queue_delete(queue)
    with rig.consuming():
        pass
    channel.queue_declare(queue, durable=True)  # refused, if it had other arguments
    for name in (queue, *queues_beside(queue)):
        channel.queue_declare(name, passive=True)
    channel.queue_delete(queue)
    channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
    given = {"given": RabbitQueue(queue, declare=False)} if isinstance(rig, FastStreamRabbit) else {}
    rig.pay((1, "a"))
    rig.consume_until(rig.settled({"a": 1}), **given)


def test_wait_queues_that_are_others_are_told_of_at_the_start(rig: Rig) -> None:
    """A queue of that name with other arguments would keep messages for ever, or lose them."""
    rig.queue.channel.queue_declare(f"{rig.queue.queue}.wait.1s", durable=True)
    assert "PRECONDITION_FAILED" in str(rig.failure())


def test_a_window_without_an_end_is_refused(rig: Rig) -> None:
    """RabbitMQ takes a prefetch of 0 for no limit."""
    with pytest.raises(ValueError, match="prefetch is at least 1"):
        rig.make(None, prefetch=0)


@by("pika", "aio-pika")
def test_a_message_that_kills_its_consumers_is_given_up_by_a_quorum_queue(rig: Rig) -> None:
    """RabbitMQ counts its deliveries, and puts it where replay finds it."""

    def die() -> None:
        raise KilledError

    queue = rig.queue.queue
    rig.queue.channel.queue_delete(queue)
    to_the_dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead_letters(queue)}
    arguments = {"x-queue-type": "quorum", "x-delivery-limit": 1, **to_the_dead}
    rig.queue.channel.queue_declare(queue, durable=True, arguments=arguments)
    RULES["b"] = die
    rig.pay((1, "b"))
    for _ in range(2):
        rig.failure(prefetch=1)
    rig.pay((2, "a"))
    rig.consume_until(lambda: rig.settled({"a": 1})() and one_letter(rig))
    RULES.clear()
    assert rig.replay() == 1
    rig.consume_until(rig.settled({"a": 1, "b": 1}))


async def _fails(*_: object) -> None:
    raise RuntimeError("the application's own")


@by("faststream-rabbit")
@pytest.mark.parametrize("broker", [{"parser": _fails, "decoder": _fails}, {"apply_types": False}])
def test_nothing_of_the_applications_fails_before_the_dispatcher(rig: Rig, broker: dict[str, Any]) -> None:
    """Neither a parser and a decoder of its own for its broker, nor FastStream's; FastDepends may be switched off."""
    rig.queue.send(payment(1), message_id="p1", content_type="application/json", reply_to="nowhere.at.all")
    rig.queue.send(b"{", message_id="p2", content_type="application/json")
    rig.queue.send(b"\xff", message_id="p3", content_type="text/plain")
    rig.consume_until(lambda: rig.settled({"a": 1})() and len(rig.queue.dead()) == 2, broker=broker)


MOST = 23  # files of the library; ``bodies`` too, because a consumer gives the digest of the body


@by("pika")
def test_a_message_enters_few_files(rig: Pika, monkeypatch: pytest.MonkeyPatch) -> None:
    """From pika's callback to the acknowledgement, once the engine is known."""
    map_anew(monkeypatch, payments, "Balance")
    consumer: Any = rig.make(payments.dispatcher(rig.engine, observer=None))
    channel: Any = SimpleNamespace(basic_ack=lambda _tag, **_: None)
    for number in range(3):
        consumer._settle(channel, [(1, pika.BasicProperties(message_id=f"p{number}"), payment(number))])
    with files_entered() as entered:
        consumer._settle(channel, [(1, pika.BasicProperties(message_id="measured"), payment(3))])
    assert rig.applied == ({"a": 4}, 4)
    assert len(entered) <= MOST, " ".join(sorted(entered))
