"""Redis: what waits stays pending and is taken over, and what was deleted meanwhile is reported.

What every consumer promises is in `test_every_consumer.py`.
"""

import logging
import threading
import time
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import redis

import payments
from adapters import Redis, adapter
from brokers import broker
from consumer_rig import wait_for
from databases import Database
from own_server import own_redis
from payments import RULES, payment
from projector_dedup import Defer
from projector_dedup.brokers.redis import Consumer, replay
from projector_dedup.errors import RefusedError
from redis_rig import GROUP, RedisStream


@pytest.fixture
def rig(postgresql: Database) -> Iterator[Redis]:
    """A stream of the test's own, and a consumer of it."""
    with adapter("redis", postgresql) as made:
        yield made


def test_a_dead_letter_has_every_field_that_the_entry_had(rig: Redis) -> None:
    """And the reason, which is not in what is replayed."""
    RULES["b"] = "poison"
    rig.queue.pay(1, "b", trace="t2")
    rig.queue.client.xadd(rig.queue.stream, {"somebody": b"else's"})
    rig.consume_until(rig.queue.settled(2))
    poison, foreign = rig.queue.dead_entries()
    assert poison == {
        b"body": payment(1, "b"),
        b"trace": b"t2",
        b"x-rejected-for": rb"ValueError: this account cannot be read\nreally",
    }
    assert foreign[b"somebody"] == b"else's"
    assert foreign[b"x-rejected-for"] == (
        b'InvalidMessageError: the field "body" of the entry is not JSON: it is missing, or empty; send JSON '
        b"there, or give the consumer a convert= that builds the event from incoming.headers"
    )
    assert replay(rig.queue.client, rig.queue.stream, GROUP) == 2
    replayed: Any = rig.queue.client.xrange(rig.queue.stream)
    assert all(b"x-rejected-for" not in fields for _, fields in replayed)


@pytest.mark.parametrize(
    ("converter", "entry"),
    [
        ("of_payload", {"payload": payment(1)}),
        ("of_fields", {"type": "payment", "message_id": "p1", "account": "a", "amount": "1"}),
    ],
)
def test_entries_of_another_form_are_applied_by_a_converter(rig: Redis, converter: str, entry: Any) -> None:
    """Those of the page, as they are printed there. After they were rejected for want of it, too."""
    page = (Path(__file__).parents[2] / "docs" / "consumers" / "redis.md").read_text(encoding="utf-8")
    converters: dict[str, Any] = {}
    exec(page.partition("<!-- converters -->\n```python\n")[2].partition("```")[0], converters)
    rig.queue.client.xadd(rig.queue.stream, entry)
    rig.consume_until(rig.queue.settled(1))
    assert rig.applied == ({}, 0)
    assert replay(rig.queue.client, rig.queue.stream, GROUP) == 1
    rig.consume_until(rig.queue.settled(2), convert=converters[converter])
    assert rig.applied == ({"a": 1}, 1)
    assert rig.queue.dead_entries() == []


def test_a_message_before_its_time_comes_again_after_its_delay(rig: Redis) -> None:
    """Nothing behind it waits for it, and it is pending in Redis all the time: no copy exists."""
    RULES["b"] = "early"
    number = rig.queue.pay(1, "b")
    for other in range(2, 12):
        rig.queue.pay(other)
    rig.consume_until(lambda: rig.applied == ({"a": 10}, 10) and rig.queue.owner(number).startswith(b"later-"))
    assert rig.queue.dead_entries() == []
    RULES.clear()
    rig.consume_until(rig.queue.settled(11))
    assert rig.applied == ({"a": 10, "b": 1}, 11)


def test_what_a_dead_process_had_read_is_taken_over(rig: Redis) -> None:
    """An entry that somebody read and never acknowledged, and one that was committed without an acknowledgement."""
    rig.queue.pay(1)
    rig.queue.pay(2)
    rig.queue.client.xgroup_create(rig.queue.stream, GROUP, id="0")
    rig.queue.client.xreadgroup(GROUP, "who died", {rig.queue.stream: ">"})
    payments.dispatcher(rig.engine).deliver({"type": "payment", "message_id": "p1", "account": "a", "amount": 1})
    rig.consume_until(rig.queue.settled(2), abandoned_after=0.2)
    assert rig.applied == ({"a": 2}, 2)


def test_an_entry_that_was_deleted_while_it_waited_is_reported(rig: Redis, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody trims the stream: what was pending is lost, and that is an ERROR in the log."""
    caplog.set_level(logging.ERROR, "projector_dedup.consumers")
    RULES["b"] = "early"
    number = rig.queue.pay(1, "b")
    rig.consume_until(lambda: rig.queue.owner(number).startswith(b"later-"))
    rig.queue.client.xtrim(rig.queue.stream, maxlen=0)
    rig.consume_until(lambda: caplog.records)
    assert caplog.messages[0] == (
        f"entry {number.decode()} of stream {rig.queue.stream} "
        f"was deleted before group {GROUP} had applied it: it is lost"
    )


def test_an_entry_that_was_deleted_while_its_handler_ran_is_reported(
    rig: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis has nothing any more that could come again; the entry that was applied is no loss."""
    caplog.set_level(logging.ERROR, "projector_dedup.consumers")

    def trim() -> None:
        rig.queue.client.xtrim(rig.queue.stream, maxlen=0, approximate=False)
        raise Defer("not yet")

    RULES["b"] = trim
    rig.queue.pay(1)
    number = rig.queue.pay(2, "b")
    rig.consume_until(rig.queue.settled(2))
    assert caplog.messages == [
        f"entry {number.decode()} of stream {rig.queue.stream} "
        f"was deleted before group {GROUP} had applied it: it is lost"
    ]
    assert rig.applied == ({"a": 1}, 1)


def test_a_group_that_vanishes_ends_the_consumer(rig: Redis) -> None:
    """After a Redis that lost its data the consumer must not sit there and look busy."""
    rig.queue.pay(1)

    def destroyed_behind_the_payment() -> None:
        if rig.applied[1] == 1:
            rig.queue.client.xgroup_destroy(rig.queue.stream, GROUP)

    error = rig.failure(destroyed_behind_the_payment)
    assert isinstance(error, redis.ResponseError)
    assert "NOGROUP" in str(error)


def test_a_redis_that_is_killed_is_heard_of_and_nothing_is_lost(postgresql: Database, tmp_path: Path) -> None:
    """``run`` raises, so that a supervisor starts the process again; what Redis had confirmed is applied once."""
    server = own_redis(tmp_path)
    server.start()
    rig = Redis(postgresql, RedisStream(f"redis://127.0.0.1:{server.port}/0"))
    try:
        for number in range(60):
            rig.queue.pay(number)
        called: list[object] = []

        def kill_in_the_midst() -> None:
            called.append(None)
            if len(called) == 5:
                server.kill()

        RULES["a"] = kill_in_the_midst
        assert isinstance(rig.failure(), redis.ConnectionError)
        assert rig.applied == ({"a": 5}, 5)  # the last was not acknowledged
        RULES.clear()
        server.start()
        rig.queue.pay(60)
        rig.consume_until(rig.queue.settled(61), abandoned_after=0.5)
        assert rig.applied == ({"a": 61}, 61)
    finally:
        server.kill()
        rig.engine.dispose()


_IS_NEW = "legacy_responses" in signature(redis.connection.AbstractConnection).parameters  # since redis-py 7
NEW_ANSWERS = {"legacy_responses": False} if _IS_NEW else {}


@pytest.mark.parametrize("options", [{"protocol": 2}, {"protocol": 3}, {"protocol": 3, **NEW_ANSWERS}])
def test_a_client_of_either_protocol_consumes(rig: Redis, options: dict[str, Any]) -> None:
    """The answers of redis-py have another form with each of these."""
    rig.queue.client.close()
    rig.queue.client = redis.Redis.from_url(rig.queue.address, **options)
    RULES["b"] = "early"
    number = rig.queue.pay(1, "b")
    rig.queue.pay(2)
    rig.queue.client.xadd(rig.queue.stream, {"body": b"\xff{"})
    waits = b"later-"
    rig.consume_until(lambda: rig.applied[1] == 1 and rig.queue.owner(number).startswith(waits) and rig.queue.dead())
    RULES.clear()
    rig.consume_until(rig.queue.settled(3))
    assert rig.applied == ({"a": 1, "b": 1}, 2)
    assert replay(rig.queue.client, rig.queue.stream, GROUP) == 1


def test_two_consumers_share_what_is_due(rig: Redis) -> None:
    """Both look at the same pending entries: each is delivered by one of them."""
    RULES["b"] = "early"
    numbers = [rig.queue.pay(number, "b") for number in range(20)]
    rig.consume_until(lambda: all(rig.queue.owner(each).startswith(b"later-") for each in numbers))
    RULES.clear()
    other = rig.consumer()
    thread = threading.Thread(target=other.run)
    thread.start()
    rig.consume_until(rig.queue.settled(20))
    other.stop()
    thread.join()
    assert rig.applied == ({"b": 20}, 20)


def test_what_another_process_has_taken_over_is_left_to_it(rig: Redis, caplog: pytest.LogCaptureFixture) -> None:
    """The list of what is due is worked off slowly: what another one handles by then, or has settled, is left."""
    RULES["b"] = "early"
    numbers = [rig.queue.pay(1, "b"), rig.queue.pay(2, "b")]
    rig.consume_until(lambda: all(rig.queue.owner(each).startswith(b"later-") for each in numbers))
    slow, quick = rig.consumer(), rig.consumer()
    quick._member = "quick"
    wait_for(lambda: len(slow._due()) == 2, "the entries to be due")
    listed = slow._due()
    taken = [quick._take(each) for each in listed]
    assert [each and each.attempt for each in taken] == [2, 2]
    rig.queue.client.xack(rig.queue.stream, GROUP, numbers[1])
    rig.queue.client.xdel(rig.queue.stream, numbers[1])
    time.sleep(listed[0].idle / 1000 + 0.1)  # it is handled for longer than its delay was
    caplog.clear()
    assert [slow._take(each) for each in listed] == [None, None]
    assert rig.queue.owner(numbers[0]) == b"quick"
    assert caplog.messages == []


@pytest.mark.parametrize(
    "name", ["later-shift", b"later-\xff", "later-5-pods", "later-" + "9" * 400, "later-9" + "9" * 20, "later-9999"]
)
def test_somebody_elses_consumer_may_be_called_anything(rig: Redis, name: str) -> None:
    """A host is called so: its entries are those of a process that may have died, not of a delay."""
    rig.queue.pay(1)
    rig.queue.client.xgroup_create(rig.queue.stream, GROUP, id="0")
    rig.queue.client.xreadgroup(GROUP, name, {rig.queue.stream: ">"})
    rig.consume_until(rig.queue.settled(1), abandoned_after=0.2)
    assert rig.applied == ({"a": 1}, 1)


def test_a_letter_of_nothing_but_its_reason_is_replayed(rig: Redis) -> None:
    """Somebody sent an entry with that field alone; Redis keeps no entry without a field."""
    rig.queue.client.xadd(rig.queue.stream, {"x-rejected-for": "?"})
    rig.queue.pay(1)
    rig.consume_until(rig.queue.settled(2))
    assert replay(rig.queue.client, rig.queue.stream, GROUP) == 1
    assert rig.queue.dead_entries() == []


def test_a_client_that_decodes_is_refused(rig: Redis) -> None:
    """One body that is not UTF-8 would raise in every read, for ever."""
    client = redis.Redis.from_url(broker("redis"), decode_responses=True)
    with pytest.raises(RefusedError, match="decode_responses"):
        Consumer(client, "s", "g", payments.dispatcher(rig.engine))
    with pytest.raises(ValueError, match="no colon"):
        Consumer(rig.queue.client, "s", "x:g", payments.dispatcher(rig.engine))
    with pytest.raises(ValueError, match="abandoned_after"):
        rig.consumer(abandoned_after=0)


def test_a_stream_of_another_kind_ends_the_consumer(rig: Redis) -> None:
    """The error of Redis is raised as it is."""
    rig.queue.client.set(rig.queue.stream, "no stream")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        rig.consumer().run()


def test_a_url_without_a_port_means_that_of_redis(factory: Any) -> None:
    """Its client takes 6379 then."""
    client = redis.Redis.from_url("redis://nowhere.invalid")
    consumer = Consumer(client, "payments", "totals", payments.dispatcher(factory.kw["bind"]))
    with pytest.raises(ConnectionError, match=r"cannot connect to Redis at nowhere\.invalid:6379"):
        consumer.run()
    with pytest.raises(ConnectionError, match=r"cannot connect to Redis at nowhere\.invalid:6379"):
        consumer.settle_dead_letters(lambda _: "keep")
