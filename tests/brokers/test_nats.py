"""NATS JetStream, by nats-py and FastStream: settings that lose messages, and headers that can be published again.

What every consumer promises is in `test_every_consumer.py`.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from faststream import FastStream
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import NotFoundError

import payments
from adapters import Nats, adapter
from databases import Database
from nats_rig import DURABLE, JetStream
from own_server import OwnServer
from payments import RULES, payment
from projector_dedup import AsyncDispatcher
from projector_dedup.brokers.nats import Consumer
from projector_dedup.errors import RefusedError


@pytest.fixture
def rig(postgresql: Database) -> Iterator[Nats]:
    """A stream of the test's own, and a consumer of it."""
    with adapter("nats", postgresql) as made:
        yield made


@pytest.mark.parametrize("in_flight", [1, 4])
def test_poison_is_kept_with_its_reason_and_replayed_after_the_mend(rig: Nats, in_flight: int) -> None:
    """The replay has the id that the message had, which the server must not call a duplicate."""
    RULES["b"] = "poison"
    rig.queue.post(payment(2, "b"), **{"Nats-Msg-Id": "the-id", "trace": "t2"})
    rig.pay((1, "a"))
    rig.consume_until(rig.settled({"a": 1}), in_flight=in_flight)
    (letter,) = rig.queue.dead_messages()
    assert letter.headers is not None
    assert letter.headers["trace"] == "t2"
    assert letter.headers["x-rejected-for"] == r"ValueError: this account cannot be read\nreally"
    RULES.clear()
    assert rig.queue.replay() == 1
    rig.consume_until(rig.settled({"a": 1, "b": 1}))
    again = rig.queue.ask(lambda streams: streams.get_last_msg(rig.queue.stream, rig.queue.subject))
    assert "x-rejected-for" not in (again.headers or {})
    rig.queue.post(payment(2, "b"), **{"x-message-id": "the-id"})
    rig.consume_until(rig.settled({"a": 1, "b": 1}))


def test_a_server_that_is_killed_and_started_again_loses_nothing(postgresql: Database, tmp_path: Path) -> None:
    """The client connects again by itself, and the consumer goes on."""
    server = OwnServer("nats", "nats-server", tmp_path, "-a", "127.0.0.1", "-p", "{port}", "-js", "-sd", "{folder}")
    server.start()
    rig = Nats(postgresql, JetStream(f"nats://127.0.0.1:{server.port}"))
    killed: list[int] = []

    def all_applied_by_a_server_that_was_killed() -> bool:
        if not killed and rig.applied[1] >= 5:
            server.kill()
            killed.append(rig.applied[1])
            server.start()
            while True:  # it answers nobody until it has read its streams; what is published twice is a duplicate
                with contextlib.suppress(nats.errors.Error):
                    rig.pay((60, "a"))
                    break
        return bool(killed) and rig.settled({"a": 61})()

    try:
        rig.pay(*((number, "a") for number in range(60)))
        rig.consume_until(all_applied_by_a_server_that_was_killed, **rig.soon)
        assert killed[0] < 60
    finally:
        server.kill()
        rig.close()


@pytest.mark.parametrize(
    ("setting", "flaw"),
    [
        ({"max_deliver": 3}, "max_deliver"),
        ({"max_ack_pending": 10, "max_deliver": -1}, "max_ack_pending"),
        ({"ack_policy": AckPolicy.ALL, "max_ack_pending": -1}, "ack_policy is not explicit"),
        ({"filter_subject": "elsewhere"}, "filter_subject is"),
    ],
)
def test_a_consumer_that_would_lose_messages_is_refused(rig: Nats, setting: dict[str, Any], flaw: str) -> None:
    """Somebody has made the durable with settings under which the server drops, forgets or holds back messages."""
    config = {"filter_subject": "all", "max_ack_pending": -1, **setting}
    config["filter_subject"] = f"{rig.queue.stream}.{config['filter_subject']}"
    durable = ConsumerConfig(durable_name=DURABLE, **config)
    rig.queue.ask(lambda streams: streams.add_consumer(rig.queue.stream, durable))
    with pytest.raises(RefusedError, match=flaw):
        rig.consume_until(lambda: False)


def test_a_stream_with_several_subjects_needs_a_declared_source(rig: Nats) -> None:
    """Or one subject of it. The consumer creates nothing before that; a stream with one subject needs none."""
    names = [f"{rig.queue.stream}.all", f"{rig.queue.stream}.other"]
    rig.queue.ask(lambda streams: streams.update_stream(name=rig.queue.stream, subjects=names))
    for rig.queue.subject in names:
        rig.pay((1, "a"))
    with pytest.raises(RefusedError, match=r"several subjects needs source=.* source=None .* with its subject="):
        rig.consume_until(lambda: False, subject=None)
    with pytest.raises(NotFoundError):
        rig.queue.ask(lambda streams: streams.consumer_info(rig.queue.stream, DURABLE))
    rig.consume_until(rig.settled({"a": 1}), subject=None, source=None)
    assert payments.markers(rig.engine) == {"p1"}
    rig.queue.ask(lambda streams: streams.update_stream(name=rig.queue.stream, subjects=names[1:]))
    rig.pay((2, "a"))
    rig.consume_until(rig.settled({"a": 2}), subject=None)


def test_a_missing_stream_is_named(rig: Nats) -> None:
    """At the start, and for the commands about its dead letters; a name that NATS cannot have, before that."""
    rig.queue.ask(lambda streams: streams.delete_stream(rig.queue.stream))
    with pytest.raises(RefusedError, match=rf"NATS has no stream {rig.queue.stream}: create it"):
        rig.consume_until(lambda: False)
    with pytest.raises(RefusedError, match=rf"NATS has no stream {rig.queue.stream}: create it"):
        rig.queue.replay()
    dispatcher, _ = payments.async_dispatcher(rig.database.async_url)
    for stream, durable in (("a.b", "d"), ("a b", "d"), ("", "d"), ("s", "d.e")):
        with pytest.raises(ValueError, match="a name of a stream or consumer has no white space and none of"):
            Consumer("nats://n", stream, durable, dispatcher)


@pytest.mark.parametrize(
    ("limits", "flaw"), [({"max_msgs": 10}, "discards the oldest"), ({"subjects": ["elsewhere.dead"]}, "subjects")]
)
def test_a_stream_that_would_lose_dead_letters_is_refused(rig: Nats, limits: dict[str, Any], flaw: str) -> None:
    """Somebody has made it with a limit, or it belongs to another consumer."""
    config = {"subjects": [f"dead.{rig.queue.stream}.{DURABLE}"], **limits}
    rig.queue.ask(lambda streams: streams.add_stream(name=rig.queue.dead_stream, **config))
    with pytest.raises(RefusedError, match=flaw):
        rig.consume_until(lambda: False)


def test_ids_that_are_not_utf_8_are_rejected(rig: Nats) -> None:
    """Two of them would look alike when they were decoded: the second one would be called a duplicate."""
    for end in (b"\xe8", b"\xe9"):
        rig.queue.send(b"NATS/1.0\r\nNats-Msg-Id: caf" + end + b"\r\n\r\n", payment(1))
    rig.pay((2, "a"))
    rig.consume_until(rig.settled({"a": 1}))
    assert [each.body for each in rig.queue.dead()] == [payment(1)] * 2


@pytest.mark.parametrize("first", ["503", "404 No Messages", "408 \xff", "100 Idle Heartbeat"])
def test_a_message_that_looks_like_an_answer_of_the_server_is_applied(rig: Nats, first: str) -> None:
    """A status in the first line of the headers is a producer's, where the message is one of the stream."""
    rig.queue.send(f"NATS/1.0 {first}\r\nNats-Msg-Id: m1\r\nStatus: 503\r\n\r\n".encode("latin-1"), payment(1))
    rig.pay((2, "a"))
    rig.consume_until(rig.settled({"a": 2}))


def test_headers_that_cannot_be_copied_are_left_out_and_named(rig: Nats, caplog: pytest.LogCaptureFixture) -> None:
    """nats-py publishes no such name, and the server would obey ``Nats-...`` in the dead letter and its replay."""
    RULES["b"] = "poison"
    rig.pay((1, "a"))
    block = b"NATS/1.0\r\na(b): c\r\nNats-Expected-Last-Sequence: 1\r\ntrace: \xff\r\nkept: k\r\n\r\n"
    rig.queue.send(block, payment(2, "b"))
    rig.consume_until(rig.settled({"a": 1}))
    (letter,) = rig.queue.dead_messages()
    ours = {"x-subject", "x-rejected-for", "Nats-Msg-Id", "Nats-Expected-Stream"}
    assert {*(letter.headers or {})} == {"kept", "trace", *ours}
    named = "lacks or changes 3 of its headers: a(b), Nats-Expected-Last-Sequence, trace"
    assert f"the dead letter of message 2 of stream {rig.queue.stream} {named}" in caplog.messages
    RULES.clear()
    assert rig.queue.replay() == 1
    rig.consume_until(rig.settled({"a": 1, "b": 1}))


@pytest.mark.parametrize("header", [b"", b"x-subject: a b\r\n"])
def test_a_stranger_among_the_dead_letters_keeps_none_from_the_replay(
    rig: Nats, caplog: pytest.LogCaptureFixture, header: bytes
) -> None:
    """Nobody knows where it belongs: it stays, and the log says so."""
    RULES["b"] = "poison"
    rig.pay((1, "b"))
    rig.consume_until(rig.settled({}))
    rig.queue.send(b"NATS/1.0 503\r\n" + header + b"\r\n", b"?", f"dead.{rig.queue.stream}.{DURABLE}")
    rig.pay((2, "b"))
    rig.consume_until(rig.settled({}))
    assert rig.queue.replay() == 2
    assert [each.body for each in rig.queue.dead()] == [b"?"]
    assert f"message 2 of stream {rig.queue.dead_stream} is not replayed" in caplog.text


def test_an_id_that_comes_twice_is_rejected(rig: Nats) -> None:
    """Which of the two is the message's nobody knows; a replay of it is rejected again."""
    rig.queue.send(b"NATS/1.0\r\nNats-Msg-Id: m1\r\nNats-Msg-Id: m2\r\n\r\n", payment(1))
    rig.consume_until(rig.settled({}))
    assert rig.queue.replay() == 1
    rig.consume_until(rig.settled({}))
    assert [each.body for each in rig.queue.dead()] == [payment(1)]


@pytest.mark.parametrize("end", [b"\xc2\xa0", b"\x1f"], ids=["a no-break space", "a separator"])
def test_a_replayed_id_is_not_taken_for_a_shorter_one(rig: Nats, end: bytes) -> None:
    """nats-py cuts blanks off the ends of a header that it publishes: the replay is rejected, and no duplicate."""
    RULES["b"] = "poison"
    rig.queue.send(b"NATS/1.0\r\nNats-Msg-Id: m1\r\n\r\n", payment(1))
    rig.queue.send(b"NATS/1.0\r\nNats-Msg-Id: m1" + end + b"\r\n\r\n", payment(2, "b"))
    rig.consume_until(rig.settled({"a": 1}))
    RULES.clear()
    assert rig.queue.replay() == 1
    rig.consume_until(rig.settled({"a": 1}))
    assert [each.body for each in rig.queue.dead()] == [payment(2, "b")]


def test_dead_letters_with_any_text_in_their_headers_are_replayed(rig: Nats) -> None:
    """The id is the one that was sent, letter by letter."""
    RULES["b"] = "poison"
    rig.queue.post(payment(1, "b"), **{"Nats-Msg-Id": "caf\u00e9", "trace": "\u2603"})
    rig.queue.post(payment(2, "b"))
    rig.consume_until(rig.settled({}))
    RULES.clear()
    assert rig.queue.replay() == 2
    rig.consume_until(rig.settled({"b": 2}))
    rig.queue.post(payment(1, "b"), **{"x-message-id": "caf\u00e9"})
    rig.consume_until(rig.settled({"b": 2}))


@pytest.mark.parametrize(("room", "kept"), [(300, True), (400, True), (1_000, True), (20, False)])
def test_poison_that_fills_the_payload_of_the_server(
    rig: Nats, caplog: pytest.LogCaptureFixture, room: int, kept: bool
) -> None:
    """Its dead letter has fewer headers; where not even that fits, the message comes again, and others go on."""
    body = b"x" * (PAYLOAD - room)
    rig.queue.post(body)
    rig.pay((1, "a"))

    def done() -> bool:
        told = any("is too large for a dead letter" in message for message in caplog.messages)
        return rig.applied == ({"a": 1}, 1) and (rig.queue.left() == 0 if kept else told)

    rig.consume_until(done)
    assert [each.body for each in rig.queue.dead()] == [body] * kept


PAYLOAD = 1_048_576  # bytes that the server takes, unless it is told otherwise


@pytest.mark.parametrize("what", ["consumer", "stream"])
def test_what_is_deleted_under_a_consumer_ends_it(rig: Nats, what: str) -> None:
    """It would look for messages for ever, and find none."""
    rig.pay((1, "a"))
    deleted: list[str] = []

    def deleted_when_all_is_settled() -> None:
        if not deleted and rig.settled({"a": 1})():
            deleted.append(what)
            stream = rig.queue.stream
            if what == "consumer":
                rig.queue.ask(lambda streams: streams.delete_consumer(stream, DURABLE))
            else:
                rig.queue.ask(lambda streams: streams.delete_stream(stream))

    ended = rig.failure(deleted_when_all_is_settled)
    assert isinstance(ended, ExceptionGroup)
    assert ended.subgroup(NotFoundError) is not None


def test_a_handler_that_takes_longer_than_ack_wait_is_not_run_beside_itself(
    rig: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message is kept alive: the server delivers it once."""
    deliveries: list[object] = []
    real = AsyncDispatcher.deliver

    async def deliver(self: AsyncDispatcher, event: Any) -> Any:
        deliveries.append(event)
        over = asyncio.Event()
        asyncio.get_running_loop().call_later(7, over.set)
        await over.wait()
        return await real(self, event)

    monkeypatch.setattr(AsyncDispatcher, "deliver", deliver)
    rig.pay((1, "a"))
    rig.consume_until(rig.settled({"a": 1}), in_flight=2, ack_wait=3)  # long, for a busy machine
    assert len(deliveries) == 1


def test_a_batch_whose_dead_letter_cannot_be_kept_settles_the_others(rig: Nats) -> None:
    """The poison comes again; those behind it are applied and acknowledged, and do not come with it."""
    RULES["b"] = "poison"
    rig.pay(*enumerate("abaa"))

    async def settle() -> None:
        dispatcher, engine = payments.async_dispatcher(rig.database.async_url)
        async with await nats.connect(rig.queue.url) as connection:
            consumer, streams = rig.make(dispatcher, connection=connection), connection.jetstream()
            await consumer.open()
            await streams.delete_stream(rig.queue.dead_stream)
            fetching = await streams.pull_subscribe_bind(DURABLE, rig.queue.stream)
            messages = await fetching.fetch(4, timeout=10)
            assert len(messages) == 4
            with pytest.raises(nats.errors.Error):
                await consumer.settle(messages)
            async with asyncio.timeout(10):  # nobody confirms an acknowledgement
                while (await streams.consumer_info(rig.queue.stream, DURABLE)).num_ack_pending != 1:
                    await connection.flush()
            await fetching.unsubscribe()
        await engine.dispose()

    asyncio.run(settle())
    assert rig.applied == ({"a": 3}, 3)


def test_any_number_of_messages_may_wait(rig: Nats) -> None:
    """What they wait for is behind them, so the durable consumer that is made has no limit (by default 1,000)."""
    rig.pay((1, "a"))
    rig.consume_until(rig.settled({"a": 1}))
    found = rig.queue.ask(lambda streams: streams.consumer_info(rig.queue.stream, DURABLE))
    assert found.config.max_ack_pending == -1


# FastStream ----------------------------------------------------------------------------------------------------------


def test_a_batch_is_one_transaction(postgresql: Database) -> None:
    """Messages that are there together are applied together; one after the other they take a transaction each."""
    with adapter("faststream-nats-batches", postgresql) as rig:
        rig.pay(*((number, "a") for number in range(5)))
        rig.consume_until(rig.settled({"a": 5}), batch=5)
        assert payments.transactions(rig.engine) == 1
        rig.pay(*((number, "a") for number in range(5, 10)))
        rig.consume_until(rig.settled({"a": 10}), batch=None)
        assert payments.transactions(rig.engine) == 6


@pytest.mark.parametrize("batch", [None, 10])
@pytest.mark.parametrize(
    ("setting", "flaw"),
    [({"max_deliver": 1}, "max_deliver"), ({"max_ack_pending": 5}, "max_ack_pending")],
    ids=["drops", "stands still"],
)
def test_a_consumer_that_would_lose_messages_ends_the_application(
    postgresql: Database, setting: dict[str, Any], flaw: str, batch: int | None
) -> None:
    """FastStream would take the durable consumer as it is. Nothing is fetched, which ``max_deliver=1`` would lose."""
    with adapter("faststream-nats", postgresql) as rig:
        queue = rig.queue
        config = ConsumerConfig(
            durable_name=DURABLE,
            filter_subject=queue.subject,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=1.0,
            **setting,
        )
        queue.ask(lambda streams: streams.add_consumer(queue.stream, config))
        rig.pay((1, "a"), (2, "a"), (3, "a"))

        async def run() -> None:
            dispatcher, engine = payments.async_dispatcher(postgresql.async_url)
            broker = rig.make(dispatcher, batch=batch)
            try:
                await asyncio.wait_for(FastStream(broker).run(), 30)
            finally:
                await broker.stop()
                await engine.dispose()

        with pytest.raises(RefusedError, match=f"the consumer {DURABLE} .* cannot be used.*{flaw}"):
            asyncio.run(run())
        found = queue.ask(lambda streams: streams.consumer_info(queue.stream, DURABLE))
        assert (found.delivered.consumer_seq, found.num_pending) == (0, 3)
        assert rig.applied == ({}, 0)
