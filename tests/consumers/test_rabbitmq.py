"""RabbitMQ by pika and aio-pika: acknowledged after the commit, delayed in queues, rejected with a reason, replayed."""

import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import aio_pika
import pika
import pytest

from amqp_fields import UNREADABLE_VALUES, VALUES, drawn, short, table
from consumer_rig import prove
from databases import Database
from projector_dedup import Defer
from projector_dedup.integrations import aio_pika as awaited
from projector_dedup.integrations import pika as plain
from projector_dedup.integrations.incoming import cloudevent
from projector_dedup.integrations.rabbitmq import DELIVERIES, REJECTED_FOR, WITHOUT_ID, dead_letters, queues_beside
from queue_rig import RULES, Client, Rig, named, raises
from rabbitmq_rig import RabbitMQ, rabbitmq

FRAME = 131_072


class KilledError(BaseException):
    """Ends a consumer in the midst of a message."""


@pytest.fixture
def queue() -> Iterator[RabbitMQ]:
    """A queue of the test's own."""
    with rabbitmq() as opened:
        yield opened


@pytest.fixture(params=["pika", "aio-pika"])
def rig(request: pytest.FixtureRequest, queue: RabbitMQ, sqlite: Database) -> Iterator[Rig]:
    """A queue, and a consumer of it by each client."""
    client: Client = request.param
    rig = Rig(client, queue, sqlite)
    yield rig
    rig.engine.dispose()


def test_what_is_applied_or_was_applied_is_acknowledged(rig: Rig) -> None:
    """A redelivery too, and nothing is left behind."""
    for name in ("a", "b", "a", "a"):
        rig.send(name)
    rig.run_until(lambda: rig.seen().keys() == {"a", "b"} and rig.queue.left() == 0, "both")
    assert rig.seen() == {"a": 1, "b": 1}
    assert (rig.queue.left(), rig.queue.dead()) == (0, [])


def test_a_consumer_that_dies_in_a_message_has_not_acknowledged_it(rig: Rig) -> None:
    """RabbitMQ delivers it again."""
    RULES["a"] = raises(KilledError())
    rig.send("a")
    assert rig.failure(prefetch=1) is not None
    assert (rig.seen(), rig.queue.count()) == ({}, 1)
    RULES.clear()
    rig.run_until(lambda: rig.seen() == {"a": 1}, "the message that was delivered again")
    assert rig.queue.left() == 0


def test_what_comes_before_its_time_waits_outside_of_the_window(rig: Rig) -> None:
    """With one message in flight at most, what is behind it is applied first; the count of deliveries grows."""
    RULES["early"] = raises(Defer("not yet"))
    rig.send("early")
    for name in ("b", "c"):
        rig.send(name)

    def waits_for_the_second_time() -> bool:
        return rig.queue.count(f"{rig.queue.queue}.wait.5s") == 1

    rig.run_until(waits_for_the_second_time, "the second wait", prefetch=1)
    assert rig.seen() == {"b": 1, "c": 1}
    RULES.clear()
    rig.run_until(lambda: "early" in rig.seen(), "what came too early", prefetch=1)
    assert rig.seen() == {"early": 1, "b": 1, "c": 1}
    assert (rig.queue.left(), rig.queue.dead()) == (0, [])


def test_poison_is_kept_with_its_reason_and_replayed_after_the_mend(rig: Rig) -> None:
    """Everything that the producer said is in the dead letter, but for what would end it or send it elsewhere."""
    RULES["poison"] = raises(KeyError("airline"))
    at = datetime(2013, 1, 1, tzinfo=UTC)
    said = {
        "message_id": "id-poison",
        "timestamp": int(at.timestamp()),
        "content_type": "application/json",
        "correlation_id": "c",
        "app_id": "producer",
        "priority": 3,
    }
    elsewhere = f"{rig.queue.queue}.wait.300s"  # a queue that is there
    headers = {"tenant": "north", "n": 5, "CC": [elsewhere], "x-death": "garbage"}
    rig.queue.send(named("poison"), **said, headers=headers, expiration="600000", user_id="guest")
    rig.send("behind")
    rig.run_until(lambda: len(rig.queue.dead()) == 1 and rig.queue.count() == 0, "a dead letter")
    ((properties, body),) = rig.queue.dead_letters()
    assert body == named("poison")
    assert {name: getattr(properties, name) for name in said} == said
    reason = {DELIVERIES: 1, REJECTED_FOR: "KeyError: 'airline'"}
    assert properties.headers == {"tenant": "north", "n": 5, **reason}
    assert (properties.delivery_mode, properties.expiration, properties.user_id) == (2, None, None)
    assert rig.seen() == {"behind": 1}
    assert rig.queue.count(elsewhere) == 0

    RULES.clear()
    assert rig.replay() == 1
    assert (rig.queue.count(), rig.queue.dead()) == (1, [])
    rig.run_until(lambda: "poison" in rig.seen(), "the mended message")
    assert rig.seen() == {"behind": 1, "poison": 1}
    assert rig.replay() == 0


def test_a_message_is_rejected_after_so_many_deliveries(rig: Rig) -> None:
    """With ``max_attempts``, what would wait for ever is a dead letter."""
    RULES["never"] = raises(Defer("not yet"))
    rig.send("never", headers={DELIVERIES: 6})
    rig.run_until(lambda: len(rig.queue.dead()) == 1, "the dead letter", max_attempts=7)
    ((properties, _),) = rig.queue.dead_letters()
    assert properties.headers == {DELIVERIES: 7, REJECTED_FOR: "Defer: not yet"}


@pytest.mark.parametrize(("bound", "wait"), [(0.5, "1s"), (1, "1s"), (29.9, "5s"), (30, "30s")])
def test_a_message_waits_in_the_longest_queue_within_the_bound(rig: Rig, bound: float, wait: str) -> None:
    """It would wait for 300 seconds; the shortest queue is for every smaller bound."""
    RULES["early"] = raises(Defer("not yet"))
    rig.send("early", headers={DELIVERIES: 6})
    rig.run_until(lambda: rig.queue.count(f"{rig.queue.queue}.wait.{wait}") == 1, "the wait", max_delay=bound)


def test_an_id_in_the_body_stays_the_only_one(rig: Rig) -> None:
    """aio-pika gives a message without an id one that is drawn by lot: a copy must not be claimed under that."""
    RULES["early"] = raises(Defer("not yet"))
    body = b'{"type": "seen", "name": "early", "message_id": "id-in-the-body"}'
    for _ in range(2):
        rig.queue.send(body)
    rig.run_until(lambda: rig.queue.count(f"{rig.queue.queue}.wait.1s") == 2, "two in the wait queue", prefetch=1)
    RULES["early"] = raises(KeyError("airline"))
    rig.run_until(lambda: len(rig.queue.dead()) == 2, "two dead letters")
    RULES.clear()
    assert rig.replay() == 2
    rig.run_until(lambda: rig.queue.left() == 0 and rig.seen() != {}, "both")
    assert (rig.seen(), rig.markers()) == ({"early": 1}, {"id-in-the-body"})


GARBAGE: dict[str, tuple[bytes, dict[str, Any]]] = {
    "no JSON": (b"{", {}),
    "no text": (b"\xff", {}),
    "nothing": (b"", {}),
    "too deep": (b"[" * 100_000, {}),
    "no type": (b"{}", {}),
    "another type": (b'{"type": "unseen"}', {}),
    "a type that is none": (b'{"type": ["seen"]}', {}),
    "no id": (named("a"), {"message_id": None}),
    "an empty id": (named("a"), {"message_id": ""}),
    "a huge header": (b"{", {"headers": {"h": "x" * (FRAME - 1000)}}),
    "headers up to the limit": (b"{", {"headers": {"h": "x" * (FRAME - 110)}}),
    "a header of another kind": (b"{", {"headers": {DELIVERIES: "many", REJECTED_FOR: {"a": [1, None]}}}),
    "a count below zero": (b"{", {"headers": {DELIVERIES: -7}}),
    "an immense count": (b"{", {"headers": {DELIVERIES: 1 << 62}}),
    "bytes in a header": (b"{", {"headers": {"h": b"\xff\xfe"}}),
}
UNREADABLE: dict[str, dict[str, Any]] = {
    "an id that is no text": {"message_id": b"\xff\xfe"},
    "a type that is no text": {"type": b"\xff"},
    "a moment that is none": {"timestamp": 1 << 62},
}


def test_garbage_becomes_dead_letters_and_the_consumer_lives_on(rig: Rig) -> None:
    """Nothing of it is applied, and what is behind it is."""
    unreadable = UNREADABLE if rig.client == "pika" else {}
    for name, (body, properties) in GARBAGE.items():
        rig.queue.send(body, **{"message_id": name, "correlation_id": name, **properties})
    for name, properties in unreadable.items():
        rig.queue.send(named("a"), **{"message_id": name, "correlation_id": name, **properties})
    rig.send("behind")
    wanted = {*GARBAGE, *unreadable}
    rig.run_until(lambda: "behind" in rig.seen() and len(rig.queue.dead()) >= len(wanted), "the dead letters")
    found = {properties.correlation_id: properties.headers for properties, _ in rig.queue.dead_letters()}
    assert found.keys() == wanted
    assert rig.seen() == {"behind": 1}
    without = {name for name, headers in found.items() if not (headers or {}).get(REJECTED_FOR)}
    assert without == {"headers up to the limit"}


UNREADABLE_BY_AIO_PIKA = {
    **{f"a {name} that is not UTF-8": {name: short(b"\xff")} for name in ("message_id", "type", "app_id")},
    "a moment that is none": {"timestamp": b"\xff" * 8},
    "a header's name that is not UTF-8": {"headers": table((b"\xff", b"V"))},
    **{name: {"headers": table((b"h", value))} for name, value in UNREADABLE_VALUES.items()},
}


@pytest.mark.parametrize("properties", UNREADABLE_BY_AIO_PIKA.values(), ids=UNREADABLE_BY_AIO_PIKA)
def test_what_aio_pika_cannot_read_ends_its_consumer_which_names_the_remedy(
    queue: RabbitMQ, sqlite: Database, properties: dict[str, bytes]
) -> None:
    """aio-pika closes the connection, and ``run`` raises; pika's consumer settles the message."""
    rig = Rig("aio-pika", queue, sqlite)
    queue.send_octets(named("a"), **{"message_id": short(b"id-a"), **properties})
    error = rig.failure()
    assert isinstance(error, ConnectionError)
    assert f"cannot read a message of queue {queue.queue}" in str(error)
    assert (rig.seen(), queue.count()) == ({}, 1)
    by_pika = Rig("pika", queue, sqlite)
    by_pika.run_until(lambda: len(rig.seen()) + len(queue.dead_letters()) == 1, "the message to be settled")
    for each in (rig, by_pika):
        each.engine.dispose()


def test_whatever_headers_another_client_sends_nothing_comes_again_for_ever(rig: Rig) -> None:
    """A good message with them is applied; a poisoned one, and one before its time at the last, is a dead letter."""
    good, dead = {"behind"}, set[str]()
    for number, properties in enumerate(drawn(10, unreadable=rig.client == "pika")):
        for kind, error in {"good": None, "poison": KeyError("airline"), "early": Defer("not yet")}.items():
            name = f"{kind} {number}"
            if error:
                RULES[name] = raises(error)
            (dead if error else good).add(name)
            rig.queue.send_octets(named(name), message_id=short(name.encode()), **properties)
    rig.send("behind")
    letters = dead_letters(rig.queue.queue)
    rig.run_until(lambda: len(rig.seen()) == len(good) and rig.queue.count(letters) == len(dead), "all", max_attempts=2)
    assert rig.seen() == dict.fromkeys(good, 1)
    assert sorted(body for _, body in rig.queue.dead_letters()) == sorted(map(named, dead))
    assert rig.queue.left() == 0


def test_a_header_that_is_not_utf_8_is_in_the_copy(rig: Rig) -> None:
    """With its octets; a header that the client cannot encode is not."""
    RULES["poison"] = raises(KeyError("airline"))
    headers = table((b"not text", VALUES["text that is not UTF-8"]), (b"too large", VALUES["double"]))
    rig.queue.send_octets(named("poison"), message_id=short(b"id-poison"), headers=headers)
    rig.run_until(lambda: len(rig.queue.dead()) == 1, "the dead letter")
    ((properties, _),) = rig.queue.dead_letters()
    assert properties.headers == {"not text": b"\xff\xfe", DELIVERIES: 1, REJECTED_FOR: "KeyError: 'airline'"}


def test_dead_letters_of_others_are_replayed_whatever_their_headers(rig: Rig) -> None:
    """RabbitMQ itself puts there what a quorum queue gives up, as its producer sent it."""
    without_id = {"headers": table((WITHOUT_ID.encode(), VALUES["double"])), "message_id": short(b"a")}
    sent = [*drawn(10, unreadable=rig.client == "pika"), without_id]
    assert rig.replay() == 0  # the queue of dead letters is declared
    for properties in sent:
        rig.queue.send_octets(b"{", dead_letters(rig.queue.queue), **properties)
    assert rig.replay() == len(sent)
    assert (rig.queue.count(), rig.queue.dead_letters()) == (len(sent), [])


def test_a_cloudevent_in_headers_is_applied(rig: Rig) -> None:
    """In the binary mode of AMQP; its id is made of source and id."""
    headers = {
        f"cloudEvents:{name}": value for name, value in {"specversion": "1.0", "id": "7", "source": "/s"}.items()
    }
    rig.queue.send(named("a"), headers={**headers, "cloudEvents:type": "seen"}, content_type="application/json")
    rig.run_until(lambda: rig.seen() == {"a": 1}, "the event", convert=cloudevent)
    assert rig.markers() == {"2:/s1:7"}


def test_a_deleted_queue_ends_the_consumer_with_an_error(rig: Rig) -> None:
    """It does not wait for ever in silence."""
    at_work = threading.Event()
    RULES["a"] = at_work.set
    rig.send("a")

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


def test_a_copy_that_rabbitmq_does_not_take_is_not_acknowledged(rig: Rig) -> None:
    """Without dead letters to go to, the poisoned message stays where it was, and the consumer says so."""

    def fail() -> None:
        with pika.BlockingConnection(rig.queue.parameters) as connection:
            connection.channel().queue_delete(dead_letters(rig.queue.queue))
        raise KeyError("airline")

    RULES["poison"] = fail
    rig.send("poison")
    error = rig.failure()
    if isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, (pika.exceptions.UnroutableError, aio_pika.exceptions.PublishError))
    assert rig.queue.count() == 1
    RULES["poison"] = raises(KeyError("airline"))
    rig.run_until(lambda: len(rig.queue.dead()) == 1, "the dead letter, in a queue that is made anew")


def test_the_queues_are_made_and_one_that_is_there_keeps_its_arguments(rig: Rig) -> None:
    """A work queue may be of any type; without one, a durable queue is made."""
    rig.queue.channel.queue_delete(rig.queue.queue)
    with rig.running():
        pass
    rig.queue.channel.queue_declare(rig.queue.queue, durable=True)  # refused, if it had other arguments
    for queue in (rig.queue.queue, *queues_beside(rig.queue.queue)):
        rig.queue.channel.queue_declare(queue, passive=True)
    rig.queue.channel.queue_delete(rig.queue.queue)
    rig.queue.channel.queue_declare(rig.queue.queue, durable=True, arguments={"x-queue-type": "quorum"})
    rig.send("a")
    rig.run_until(lambda: rig.seen() == {"a": 1}, "the message of a quorum queue")


def test_a_window_without_an_end_is_refused(queue: RabbitMQ, sqlite: Database) -> None:
    """RabbitMQ takes a prefetch of 0 for no limit."""
    rig = Rig("pika", queue, sqlite)
    with pytest.raises(ValueError, match="prefetch is at least 1"):
        plain.Consumer(queue.parameters, queue.queue, None, prefetch=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefetch is at least 1"):
        awaited.Consumer(queue.url, queue.queue, None, prefetch=0)  # type: ignore[arg-type]
    rig.engine.dispose()


def test_a_message_that_kills_its_consumers_is_given_up_by_a_quorum_queue(rig: Rig) -> None:
    """RabbitMQ counts its deliveries, and puts it where replay finds it."""
    rig.queue.channel.queue_delete(rig.queue.queue)
    to_the_dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead_letters(rig.queue.queue)}
    arguments = {"x-queue-type": "quorum", "x-delivery-limit": 1, **to_the_dead}
    rig.queue.channel.queue_declare(rig.queue.queue, durable=True, arguments=arguments)
    RULES["killer"] = raises(KilledError())
    rig.send("killer")
    for _ in range(2):
        rig.failure(prefetch=1)
    rig.send("behind")
    rig.run_until(lambda: rig.seen() == {"behind": 1} and len(rig.queue.dead()) == 1, "the dead letter")
    RULES.clear()
    assert rig.replay() == 1
    rig.run_until(lambda: "killer" in rig.seen(), "the mended message")
    assert rig.seen() == {"behind": 1, "killer": 1}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_consumers_with_pika_are_exact(queue: RabbitMQ, postgresql: Database) -> None:
    """Two processes, 22 of them killed, poison, garbage, messages before their time: the read model equals the file."""
    prove("with_pika.py", queue, postgresql, {"AMQP_URL": queue.url, "QUEUE": queue.queue})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_consumers_with_aio_pika_are_exact(queue: RabbitMQ, postgresql: Database) -> None:
    """The same, many messages at a time in each process."""
    settings = {"AMQP_URL": queue.url, "QUEUE": queue.queue}
    prove("with_aio_pika.py", queue, postgresql, settings, "postgresql+psycopg_async")
