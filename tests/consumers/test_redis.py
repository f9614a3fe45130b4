"""A Redis stream is consumed: acknowledged after the commit, delayed, rejected to the dead letters, and taken over."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import redis

import payments
from brokers import broker
from consumer_rig import prove, wait_for
from databases import Database
from own_server import own_redis
from payments import RULES, payment
from projector_dedup import RefusedError
from projector_dedup.integrations.redis import Consumer, replay
from redis_rig import GROUP, RedisStream


class Rig(RedisStream):
    """A stream of the test's own, and a consumer of it in a thread."""

    def consumer(self, **options: Any) -> Consumer:
        """Return a consumer with a dispatcher of its own."""
        return Consumer(self.client, self.stream, GROUP, payments.dispatcher(self.engine), **options)

    def consume_until(self, done: Callable[[], object], **options: Any) -> None:
        """Run a consumer until ``done``, and let it settle what it has begun."""
        consumer = self.consumer(**options)
        failed: list[BaseException] = []

        def run() -> None:
            try:
                consumer.run()
            except BaseException as error:  # noqa: BLE001  # raised below
                failed.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        pause = threading.Event()
        try:
            while not done() and thread.is_alive():
                pause.wait(0.02)
        finally:
            consumer.stop()
            thread.join()
        if failed:
            raise failed[0]


@pytest.fixture
def rig(postgresql: Database) -> Iterator[Rig]:
    """A stream, which is deleted in the end."""
    rig = Rig(postgresql, broker("redis"))
    RULES.clear()
    yield rig
    rig.close()
    RULES.clear()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_consumers_are_exact(rig: Rig, postgresql: Database) -> None:
    """Two processes, 22 of them killed, poison, garbage, messages before their time: the read model equals the file."""
    prove("with_redis.py", rig, postgresql, {"REDIS_URL": rig.address, "STREAM": rig.stream})


def test_what_was_published_before_the_group_is_applied_once(rig: Rig) -> None:
    """A group begins with the first entry; a message that was published twice is a duplicate."""
    for number in (1, 2, 1):
        rig.pay(number)
    rig.consume_until(rig.settled(3))
    assert rig.applied == ({"a": 2}, 2)
    rig.pay(2)
    rig.consume_until(rig.settled(4))
    assert rig.applied == ({"a": 2}, 2)


def test_poison_is_kept_with_its_reason_and_replayed_after_the_mend(rig: Rig) -> None:
    """The consumer lives on; the dead letter has every field that the entry had."""
    RULES["b"] = "poison"
    rig.pay(1)
    rig.pay(2, "b", trace="t2")
    rig.client.xadd(rig.stream, {"body": b"\xff{"})
    rig.client.xadd(rig.stream, {"somebody": b"else's"})
    rig.pay(3)
    rig.consume_until(rig.settled(5))
    assert rig.applied == ({"a": 2}, 2)
    poison, garbage, foreign = rig.letters()
    assert poison[b"body"] == payment(2, "b")
    assert poison[b"trace"] == b"t2"
    assert poison[b"x-rejected-for"] == rb"ValueError: this account cannot be read\nreally"
    assert garbage[b"x-rejected-for"].startswith(b'InvalidMessageError: the field "body" of the entry is not JSON: ')
    assert foreign[b"somebody"] == b"else's"
    assert foreign[b"x-rejected-for"] == (
        b'InvalidMessageError: the field "body" of the entry is not JSON: it is missing, or empty; send the JSON '
        b"there, or give the consumer a convert= that makes the event of what there is in incoming.headers"
    )
    RULES.clear()
    assert replay(rig.client, rig.stream, GROUP) == 3
    assert rig.letters() == []
    rig.consume_until(rig.settled(8))
    assert rig.applied == ({"a": 2, "b": 1}, 3)
    assert len(rig.letters()) == 2  # the garbage is garbage still
    replayed: Any = rig.client.xrange(rig.stream)
    assert all(b"x-rejected-for" not in fields for _, fields in replayed)


@pytest.mark.parametrize(
    ("converter", "entry"),
    [
        ("of_payload", {"payload": payment(1)}),
        ("of_fields", {"type": "payment", "message_id": "p1", "account": "a", "amount": "1"}),
    ],
)
def test_entries_of_another_form_are_applied_by_a_converter(rig: Rig, converter: str, entry: Any) -> None:
    """Those of the page, as they are printed there. After they were rejected for want of it, too."""
    page = (Path(__file__).parents[2] / "docs" / "consumers" / "redis.md").read_text(encoding="utf-8")
    converters: dict[str, Any] = {}
    exec(page.partition("<!-- converters -->\n```python\n")[2].partition("```")[0], converters)
    rig.client.xadd(rig.stream, entry)
    rig.consume_until(rig.settled(1))
    assert rig.applied == ({}, 0)
    assert replay(rig.client, rig.stream, GROUP) == 1
    rig.consume_until(rig.settled(2), convert=converters[converter])
    assert rig.applied == ({"a": 1}, 1)
    assert rig.letters() == []


def test_a_message_before_its_time_comes_again_after_its_delay(rig: Rig) -> None:
    """Nothing behind it waits for it, and it is pending in Redis all the time: no copy exists."""
    RULES["b"] = "early"
    number = rig.pay(1, "b")
    for other in range(2, 12):
        rig.pay(other)
    rig.consume_until(lambda: rig.applied == ({"a": 10}, 10) and rig.owner(number).startswith(b"later-"))
    assert rig.letters() == []
    RULES.clear()
    rig.consume_until(rig.settled(11))
    assert rig.applied == ({"a": 10, "b": 1}, 11)


def test_a_message_that_is_always_early_is_rejected_in_the_end(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Redis counts its deliveries, ``max_attempts`` is their limit, and ``max_delay`` that of its waits."""
    caplog.set_level(logging.INFO, "projector_dedup.consumers")
    RULES["b"] = "early"
    rig.pay(1, "b")
    rig.consume_until(rig.letters, max_attempts=2, max_delay=0.2)
    assert "is to come again in 0.2 s after delivery 1: Defer" in caplog.text
    assert rig.settled(1)()
    (letter,) = rig.letters()
    assert letter[b"x-rejected-for"] == b"Defer: the account is not open yet"


def test_what_a_dead_process_had_read_is_taken_over(rig: Rig) -> None:
    """An entry that somebody read and never acknowledged, and one that was committed without an acknowledgement."""
    rig.pay(1)
    rig.pay(2)
    rig.client.xgroup_create(rig.stream, GROUP, id="0")
    rig.client.xreadgroup(GROUP, "who died", {rig.stream: ">"})
    payments.dispatcher(rig.engine).deliver({"type": "payment", "message_id": "p1", "account": "a", "amount": 1})
    rig.consume_until(rig.settled(2), abandoned_after=0.2)
    assert rig.applied == ({"a": 2}, 2)


def test_an_entry_that_was_deleted_while_it_waited_is_reported(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody trims the stream: what was pending is lost, and that is an ERROR in the log."""
    caplog.set_level(logging.ERROR, "projector_dedup.consumers")
    RULES["b"] = "early"
    number = rig.pay(1, "b")
    rig.consume_until(lambda: rig.owner(number).startswith(b"later-"))
    rig.client.xtrim(rig.stream, maxlen=0)
    rig.consume_until(lambda: caplog.records)
    assert caplog.messages[0] == (
        f"entry {number.decode()} of stream {rig.stream} was deleted before group {GROUP} had applied it: it is lost"
    )


def test_an_entry_that_was_deleted_while_its_handler_ran_is_reported(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis has nothing any more that could come again; the entry that was applied is no loss."""
    caplog.set_level(logging.ERROR, "projector_dedup.consumers")
    monkeypatch.setattr(payments, "_add", _trimming(payments._add, rig))
    RULES["b"] = "early"
    rig.pay(1)
    number = rig.pay(2, "b")
    rig.consume_until(rig.settled(2))
    assert caplog.messages == [
        f"entry {number.decode()} of stream {rig.stream} was deleted before group {GROUP} had applied it: it is lost"
    ]
    assert rig.applied == ({"a": 1}, 1)


def _trimming(add: Callable[[Any, Any], None], rig: Rig) -> Callable[[Any, Any], None]:
    """Have the stream trimmed by somebody while the last entry is handled."""

    def trim(event: Any, session: Any) -> None:
        if event["message_id"] == "p2":
            rig.client.xtrim(rig.stream, maxlen=0, approximate=False)
        add(event, session)

    return trim


def test_a_group_that_vanishes_ends_the_consumer(rig: Rig) -> None:
    """After a Redis that lost its data the consumer must not sit there and look busy."""
    rig.pay(1)
    with pytest.raises(redis.ResponseError, match="NOGROUP"):
        rig.consume_until(lambda: rig.applied[1] == 1 and rig.client.xgroup_destroy(rig.stream, GROUP) and False)


def test_a_redis_that_is_killed_is_heard_of_and_nothing_is_lost(postgresql: Database, tmp_path: Path) -> None:
    """``run`` raises, so that a supervisor starts the process again; what Redis had confirmed is applied once."""
    server = own_redis(tmp_path)
    server.start()
    rig = Rig(postgresql, f"redis://127.0.0.1:{server.port}/0")
    try:
        for number in range(60):
            rig.pay(number)

        def killed_in_the_midst() -> bool:
            if rig.applied[1] >= 5:
                server.kill()
            return False

        with pytest.raises(redis.ConnectionError):
            rig.consume_until(killed_in_the_midst)
        assert rig.applied[1] < 60
        server.start()
        rig.pay(60)
        rig.consume_until(rig.settled(61), abandoned_after=0.5)
        assert rig.applied == ({"a": 61}, 61)
    finally:
        server.kill()
        rig.engine.dispose()


_IS_NEW = "legacy_responses" in signature(redis.connection.AbstractConnection).parameters  # since redis-py 7
NEW_ANSWERS = {"legacy_responses": False} if _IS_NEW else {}


@pytest.mark.parametrize("options", [{"protocol": 2}, {"protocol": 3}, {"protocol": 3, **NEW_ANSWERS}])
def test_a_client_of_either_protocol_consumes(rig: Rig, options: dict[str, Any]) -> None:
    """The answers of redis-py have another form with each of these."""
    rig.client.close()
    rig.client = redis.Redis.from_url(rig.address, **options)
    RULES["b"] = "early"
    number = rig.pay(1, "b")
    rig.pay(2)
    rig.client.xadd(rig.stream, {"body": b"\xff{"})
    rig.consume_until(lambda: rig.applied[1] == 1 and rig.owner(number).startswith(b"later-") and rig.letters())
    RULES.clear()
    rig.consume_until(rig.settled(3))
    assert rig.applied == ({"a": 1, "b": 1}, 2)
    assert replay(rig.client, rig.stream, GROUP) == 1


def test_two_consumers_share_what_is_due(rig: Rig) -> None:
    """Both look at the same pending entries: each is delivered by one of them."""
    RULES["b"] = "early"
    for number in range(20):
        rig.pay(number, "b")
    rig.consume_until(lambda: all(rig.owner(each).startswith(b"later-") for each in rig.numbers()) and rig.left() == 20)
    RULES.clear()
    other = rig.consumer()
    thread = threading.Thread(target=other.run)
    thread.start()
    rig.consume_until(rig.settled(20))
    other.stop()
    thread.join()
    assert rig.applied == ({"b": 20}, 20)


def test_what_another_process_has_taken_over_is_left_to_it(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """The list of what is due is worked off slowly: what another one handles by then, or has settled, is left."""
    RULES["b"] = "early"
    numbers = [rig.pay(1, "b"), rig.pay(2, "b")]
    rig.consume_until(lambda: all(rig.owner(each).startswith(b"later-") for each in numbers))
    slow, quick = rig.consumer(), rig.consumer()
    quick._member = "quick"
    wait_for(lambda: len(slow._due()) == 2, "the entries to be due")
    listed = slow._due()
    taken = [quick._take(each) for each in listed]
    assert [each and each.attempt for each in taken] == [2, 2]
    rig.client.xack(rig.stream, GROUP, numbers[1])
    rig.client.xdel(rig.stream, numbers[1])
    time.sleep(listed[0].idle / 1000 + 0.1)  # it is handled for longer than its delay was
    caplog.clear()
    assert [slow._take(each) for each in listed] == [None, None]
    assert rig.owner(numbers[0]) == b"quick"
    assert caplog.messages == []


def test_whatever_a_client_adds_is_applied_delayed_or_a_dead_letter(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Fields that no client writes stop nobody: what is behind them is applied."""
    caplog.set_level(logging.INFO, "projector_dedup.consumers")
    sent = rig.add_garbage(seed=2013)
    rig.consume_until(rig.garbage_is_settled(sent, caplog), max_delay=0.2)
    assert rig.applied[1] + len(rig.letters()) == sent
    assert set(rig.applied[0]) == {"a", "behind", "c"}


@pytest.mark.parametrize(
    "name", ["later-shift", b"later-\xff", "later-5-pods", "later-" + "9" * 400, "later-9" + "9" * 20, "later-9999"]
)
def test_somebody_elses_consumer_may_be_called_anything(rig: Rig, name: str) -> None:
    """A host is called so: its entries are those of a process that may have died, not of a delay."""
    rig.pay(1)
    rig.client.xgroup_create(rig.stream, GROUP, id="0")
    rig.client.xreadgroup(GROUP, name, {rig.stream: ">"})
    rig.consume_until(rig.settled(1), abandoned_after=0.2)
    assert rig.applied == ({"a": 1}, 1)


def test_a_letter_of_nothing_but_its_reason_is_replayed(rig: Rig) -> None:
    """Somebody sent an entry with that field alone; Redis keeps no entry without a field."""
    rig.client.xadd(rig.stream, {"x-rejected-for": "?"})
    rig.pay(1)
    rig.consume_until(rig.settled(2))
    assert replay(rig.client, rig.stream, GROUP) == 1
    assert rig.letters() == []


def test_a_client_that_decodes_is_refused(rig: Rig) -> None:
    """One body that is not UTF-8 would raise in every read, for ever."""
    client = redis.Redis.from_url(broker("redis"), decode_responses=True)
    with pytest.raises(RefusedError, match="decode_responses"):
        Consumer(client, "s", "g", payments.dispatcher(rig.engine))
    with pytest.raises(ValueError, match="no colon"):
        Consumer(rig.client, "s", "x:g", payments.dispatcher(rig.engine))
    with pytest.raises(ValueError, match="abandoned_after"):
        rig.consumer(abandoned_after=0)


def test_a_stream_of_another_kind_ends_the_consumer(rig: Rig) -> None:
    """The error of Redis is raised as it is."""
    rig.client.set(rig.stream, "no stream")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        rig.consumer().run()
