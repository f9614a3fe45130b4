"""FastStream with Redis streams: entries are acknowledged after the commit, and those that wait come again in it."""

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from faststream import FastStream
from faststream.asgi import AsgiFastStream
from faststream.redis import RedisBroker
from redis.exceptions import ConnectionError as Lost
from sqlalchemy import insert, text

import payments
from brokers import broker
from consumer_rig import prove, wait_for
from databases import Database
from own_server import own_redis
from payments import RULES, payment
from projector_dedup import HandlerDefinitionError, RefusedError
from projector_dedup.integrations.faststream.redis import subscribe
from projector_dedup.integrations.redis import Consumer
from projector_dedup.integrations.redis_group import Group
from redis_rig import GROUP, RedisStream


class Rig(RedisStream):
    """A stream of the test's own, and a FastStream application that consumes it."""

    def __init__(self, database: Database, address: str) -> None:
        super().__init__(database, address)
        self.database = database
        payments.dispatcher(self.engine)  # makes the tables

    @contextlib.asynccontextmanager
    async def consuming(self, **options: Any) -> AsyncIterator[asyncio.Task[None]]:
        """Run a FastStream application with one subscriber; `broker` are arguments for the broker itself."""
        dispatcher, engine = payments.async_dispatcher(self.database.async_url)
        broker = RedisBroker(self.address, graceful_timeout=0.1, **options.pop("broker", {}))
        application = FastStream(broker)
        subscribe(application, broker, self.stream, GROUP, dispatcher, **options)
        running = asyncio.create_task(application.run())
        try:
            yield running
        finally:
            application.exit()
            await running
            await engine.dispose()

    def consume_until(self, done: Callable[[], object], **options: Any) -> None:
        """Consume until something is so; raise the error with which the application ends before."""

        async def run() -> None:
            async with asyncio.timeout(40), self.consuming(**options) as running:
                becoming = asyncio.create_task(_become(done))
                await asyncio.wait({becoming, running}, return_when=asyncio.FIRST_COMPLETED)
                becoming.cancel()

        asyncio.run(run())


async def _become(done: Callable[[], object]) -> None:
    while not await asyncio.to_thread(done):  # noqa: ASYNC110  # a server tells nobody when it is so
        await asyncio.sleep(0.05)


@pytest.fixture
def rig(postgresql: Database) -> Iterator[Rig]:
    """A stream, which is deleted in the end."""
    RULES.clear()
    rig = Rig(postgresql, broker("redis"))
    yield rig
    rig.close()
    RULES.clear()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", ["with_faststream_redis.py", "with_faststream_redis_batches.py"])
def test_killed_consumers_with_faststream_are_exact(rig: Rig, postgresql: Database, program: str) -> None:
    """Two processes, 22 of them killed, poison, garbage, messages before their time: the read model equals the file."""
    prove(program, rig, postgresql, {"REDIS_URL": rig.address, "STREAM": rig.stream})


def test_what_was_published_before_the_group_is_applied_once(rig: Rig) -> None:
    """A group begins with the first entry, and a second start goes on with the next; a duplicate is skipped."""
    for number in (1, 2, 1):
        rig.pay(number)
    rig.consume_until(rig.settled(3))
    assert rig.applied == ({"a": 2}, 2)
    rig.pay(2)
    rig.pay(3)
    rig.consume_until(rig.settled(5))
    assert rig.applied == ({"a": 3}, 3)


@pytest.mark.parametrize("batch", [None, 6])
def test_poison_is_kept_with_its_reason_and_replayed_after_the_mend(rig: Rig, batch: int | None) -> None:
    """So is what no parser of FastStream's could read; the dead letter has every field that the entry had."""
    RULES["b"] = "poison"
    rig.pay(1)
    rig.pay(2, "b", trace=b"\xff")
    rig.client.xadd(rig.stream, {"body": b"\xff{"})
    rig.client.xadd(rig.stream, {"__data__": b"\xff{"})
    rig.client.xadd(rig.stream, {"__data__": b'{"data": "{}", "headers": [1]}'})
    rig.pay(3)
    rig.consume_until(rig.settled(6), batch=batch)
    assert rig.applied == ({"a": 2}, 2)
    (poison,) = (each for each in rig.letters() if b"trace" in each)
    garbage = [each for each in rig.letters() if b"trace" not in each]
    assert poison == {
        b"body": payment(2, "b"),
        b"trace": b"\xff",
        b"x-rejected-for": rb"ValueError: this account cannot be read\nreally",
    }
    assert [each.get(b"__data__") for each in garbage] == [None, b"\xff{", b'{"data": "{}", "headers": [1]}']
    RULES.clear()
    assert rig.replay() == 4
    rig.consume_until(rig.settled(10), batch=batch)
    assert rig.applied == ({"a": 2, "b": 1}, 3)


@pytest.mark.parametrize("batch", [None, 20])
def test_whatever_a_client_adds_is_applied_delayed_or_a_dead_letter(
    rig: Rig, caplog: pytest.LogCaptureFixture, batch: int | None
) -> None:
    """Fields and envelopes that no client writes stop nobody: what is behind them is applied."""
    caplog.set_level(logging.INFO, "projector_dedup.consumers")
    sent = rig.add_garbage(seed=2013)
    rig.consume_until(rig.garbage_is_settled(sent, caplog), batch=batch, max_delay=0.2)
    assert rig.applied[1] + len(rig.letters()) == sent
    assert set(rig.applied[0]) == {"a", "behind", "c"}


@pytest.mark.parametrize("batch", [None, 3])
def test_a_message_before_its_time_comes_again_after_its_delay(rig: Rig, batch: int | None) -> None:
    """Nothing behind it waits for it, and it is pending in Redis all the time: no copy exists."""
    RULES["b"] = "early"
    early = [rig.pay(number, "b") for number in range(4)]
    for other in range(4, 14):
        rig.pay(other)
    rig.consume_until(
        lambda: rig.applied == ({"a": 10}, 10) and all(rig.owner(each).startswith(b"later-") for each in early),
        batch=batch,
    )
    assert rig.letters() == []
    RULES.clear()
    rig.consume_until(rig.settled(14), batch=batch)
    assert rig.applied == ({"a": 10, "b": 4}, 14)


def test_a_batch_is_one_transaction(rig: Rig) -> None:
    """Entries that are there together are applied together; one after the other they take a transaction each."""
    for number in range(5):
        rig.pay(number)
    rig.consume_until(rig.settled(5), batch=5)
    assert payments.transactions(rig.engine) == 1
    for number in range(5, 10):
        rig.pay(number)
    rig.consume_until(rig.settled(10))
    assert payments.transactions(rig.engine) == 6


def test_a_message_that_is_always_early_is_rejected_in_the_end(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """Redis counts its deliveries, ``max_attempts`` is their limit, and ``max_delay`` that of its waits."""
    caplog.set_level(logging.INFO, "projector_dedup.consumers")
    RULES["b"] = "early"
    rig.pay(1, "b")
    rig.consume_until(rig.letters, max_attempts=2, max_delay=0.2)
    assert "is to come again in 0.2 s after delivery 1: Defer" in caplog.text
    (letter,) = rig.letters()
    assert letter[b"x-rejected-for"] == b"Defer: the account is not open yet"


@pytest.mark.parametrize("batch", [None, 10])
def test_a_message_is_not_acknowledged_before_the_commit(rig: Rig, batch: int | None) -> None:
    """An application that ends while the handler runs has not taken the entry with it; another takes it over."""
    rig.pay(1)
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )

    def waits() -> bool:
        with rig.engine.connect() as connection:
            return bool(connection.scalar(waiting))

    with rig.engine.connect() as holding:
        holding.execute(insert(payments.Balance).values(account="a", amount=0))  # for which the handler waits
        rig.consume_until(waits, batch=batch)
        assert rig.left() == 1
        holding.rollback()
    assert rig.applied == ({}, 0)
    rig.consume_until(rig.settled(1), abandoned_after=0.5, batch=batch)
    assert rig.applied == ({"a": 1}, 1)


@pytest.mark.parametrize("batch", [None, 2])
def test_the_id_of_what_faststream_publishes_is_in_its_headers(rig: Rig, batch: int | None) -> None:
    """FastStream makes an id up for each delivery, and a correlation id for each publication: neither is taken."""
    event = json.loads(payment(1))
    del event["message_id"]

    async def publish() -> None:
        async with RedisBroker(rig.address) as broker:
            for headers in ({"message_id": "p1"}, {"message_id": "p1"}, None):
                await broker.publish(event, stream=rig.stream, headers=headers)

    asyncio.run(publish())
    rig.consume_until(rig.settled(3), batch=batch)
    assert rig.applied == ({"a": 1}, 1)
    (letter,) = rig.letters()
    assert letter[b"x-rejected-for"].startswith(b"InvalidMessageIdError: the message has no id")


@pytest.mark.parametrize("batch", [None, 4])
def test_an_id_that_faststream_cuts_short_is_rejected(rig: Rig, batch: int | None) -> None:
    """FastStream writes the length of a header in characters and reads bytes: all these ids would be ``flügel-``."""

    async def publish() -> None:
        async with RedisBroker(rig.address) as broker:
            for number in range(3):
                await broker.publish(payment(number), stream=rig.stream, headers={"message_id": f"flügel-{number}"})
            await broker.publish(payment(3), stream=rig.stream, headers={"message_id": "flügel-3", "type": "payment"})
            await broker.publish(payment(4), stream=rig.stream, headers={"message_id": "fluegel-4"})

    asyncio.run(publish())
    rig.consume_until(rig.settled(5), batch=batch)
    assert rig.applied == ({"a": 1}, 1)
    reasons = [each[b"x-rejected-for"] for each in rig.letters()]
    assert len(reasons) == 4
    assert all(each.startswith(b"InvalidMessageError: the headers of the entry do not end") for each in reasons)
    assert all(each.endswith(b"publish it with headers in ASCII") for each in reasons)


@pytest.mark.parametrize("batch", [None, 3])
def test_a_correlation_id_that_is_no_text_keeps_nothing_from_the_dispatcher(rig: Rig, batch: int | None) -> None:
    """The old envelope of FastStream, in JSON, may have anything there; FastStream's log takes texts only."""
    for number, correlation in enumerate([5, {"a": 1}, ["x"], None, "c"]):
        envelope = {"data": payment(number).decode(), "headers": {"correlation_id": correlation}}
        rig.client.xadd(rig.stream, {"__data__": json.dumps(envelope)})
    rig.pay(5)
    rig.consume_until(rig.settled(6), batch=batch)
    assert rig.applied == ({"a": 6}, 6)


async def _fails(*_: object) -> None:
    raise RuntimeError("the application's own")


def test_nothing_of_the_applications_fails_before_the_dispatcher(rig: Rig) -> None:
    """A parser and a decoder of the application's own for its broker are not used."""
    rig.pay(1)
    rig.consume_until(rig.settled(1), broker={"parser": _fails, "decoder": _fails})
    assert rig.applied == ({"a": 1}, 1)


def test_dead_letters_that_cannot_be_written_keep_no_other_entry(rig: Rig) -> None:
    """The rest of the batch is settled; the poison stays pending, and is kept when its dead letter can be."""
    RULES.update({"b": "poison", "c": "early"})
    rig.client.set(rig.dead_letters, "no stream")
    poison = rig.pay(1, "b")
    early = rig.pay(2, "c")
    for number in range(3, 6):
        rig.pay(number)
    rig.consume_until(
        lambda: rig.applied[1] == 3 and rig.owner(early).startswith(b"later-") and rig.left() == 2, batch=5
    )
    assert not rig.owner(poison).startswith(b"later-")
    rig.client.delete(rig.dead_letters)
    RULES.pop("c")
    rig.consume_until(rig.settled(5), batch=5, abandoned_after=0.2)
    assert rig.applied == ({"a": 3, "c": 1}, 4)
    assert [each[b"body"] for each in rig.letters()] == [payment(1, "b")]


def test_a_look_that_fails_is_tried_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis is away for a moment, just when what is due is looked for: the log says so, and the next look finds it."""
    RULES["b"] = "early"
    number = rig.pay(1, "b")
    rig.consume_until(lambda: rig.owner(number).startswith(b"later-"))
    RULES.clear()
    looked = Group.due
    failures = iter([Lost("away")])

    def due(self: Group) -> Any:
        if (failure := next(failures, None)) is not None:
            raise failure
        return (yield from looked(self))

    monkeypatch.setattr(Group, "due", due)
    rig.consume_until(rig.settled(1))
    assert f"the entries of stream {rig.stream} that are due could not be looked for" in caplog.text
    assert rig.applied == ({"b": 1}, 1)


def test_a_redis_that_is_killed_is_waited_for_and_nothing_is_lost(postgresql: Database, tmp_path: Path) -> None:
    """FastStream connects again; what was applied and could not be acknowledged comes again, and is a duplicate."""
    server = own_redis(tmp_path)
    server.start()
    rig = Rig(postgresql, f"redis://127.0.0.1:{server.port}/0")
    try:
        for number in range(200):
            rig.pay(number)

        async def run() -> None:
            async with rig.consuming(abandoned_after=0.5):
                await _become(lambda: rig.applied[1] >= 5)
                await asyncio.to_thread(server.kill)
                assert rig.applied[1] < 200
                await asyncio.to_thread(server.start)
                await asyncio.wait_for(_become(rig.settled(200)), 40)

        asyncio.run(run())
        assert rig.applied == ({"a": 200}, 200)
    finally:
        server.kill()
        rig.engine.dispose()


def test_a_group_that_vanishes_ends_the_application(rig: Rig) -> None:
    """After a Redis that lost its data the consumer must not sit there and look busy."""
    rig.pay(1)

    async def run() -> None:
        async with rig.consuming() as running:
            await _become(lambda: rig.applied[1] == 1)
            await asyncio.to_thread(rig.client.xgroup_destroy, rig.stream, GROUP)
            await asyncio.wait_for(asyncio.shield(running), 20)

    asyncio.run(run())


def test_a_broker_that_is_started_without_its_application_applies_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody would look for what is to come again: the subscriber says so, ends, and leaves the entry pending."""

    async def run() -> None:
        dispatcher, engine = payments.async_dispatcher(rig.database.async_url)
        async with RedisBroker(rig.address, graceful_timeout=0.1) as broker:
            subscribe(FastStream(broker), broker, rig.stream, GROUP, dispatcher)
            await broker.start()
            await asyncio.to_thread(rig.pay, 1)
            await asyncio.wait_for(_become(lambda: "its broker was started without" in caplog.text), 20)
        await engine.dispose()

    asyncio.run(run())
    assert rig.applied == ({}, 0)
    assert rig.left() == 1


def test_it_shares_a_group_with_the_plain_consumer(rig: Rig) -> None:
    """One has an entry wait, and the other one delivers it when its delay is over."""
    RULES["b"] = "early"
    number = rig.pay(1, "b")
    plain = Consumer(rig.client, rig.stream, GROUP, payments.dispatcher(rig.engine))
    thread = threading.Thread(target=plain.run)
    thread.start()
    wait_for(lambda: rig.owner(number).startswith(b"later-"), "the entry to wait")
    plain.stop()
    thread.join()
    RULES.clear()
    rig.consume_until(rig.settled(1))
    assert rig.applied == ({"b": 1}, 1)


def test_an_asgi_application_serves_as_well(rig: Rig) -> None:
    """Its hooks are the same."""
    RULES["b"] = "early"
    number = rig.pay(1, "b")

    async def run() -> None:
        dispatcher, engine = payments.async_dispatcher(rig.database.async_url)
        broker = RedisBroker(rig.address, graceful_timeout=0.1)
        application = AsgiFastStream(broker)
        subscribe(application, broker, rig.stream, GROUP, dispatcher)
        async with application.start_lifespan_context():
            await asyncio.wait_for(_become(lambda: rig.owner(number).startswith(b"later-")), 20)
            RULES.clear()
            await asyncio.wait_for(_become(rig.settled(1)), 20)
        await engine.dispose()

    asyncio.run(run())
    assert rig.applied == ({"b": 1}, 1)


def test_what_would_lose_messages_is_refused(rig: Rig) -> None:
    """A dispatcher that nobody awaits, a group whose dead letters two streams would share, a client that decodes."""
    broker = RedisBroker(rig.address)
    application = FastStream(broker)
    direct: Any = payments.dispatcher(rig.engine)
    with pytest.raises(HandlerDefinitionError, match="AsyncDispatcher"):
        subscribe(application, broker, "s", GROUP, direct)
    dispatcher, _ = payments.async_dispatcher(rig.database.async_url)
    with pytest.raises(ValueError, match="no colon"):
        subscribe(application, broker, "s", "x:g", dispatcher)
    with pytest.raises(ValueError, match="batch"):
        subscribe(application, broker, "s", GROUP, dispatcher, batch=0)
    with pytest.raises(RefusedError, match="decode_responses"):
        rig.consume_until(lambda: False, broker={"decode_responses": True})
