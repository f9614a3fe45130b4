"""NATS JetStream, by nats-py and FastStream: settings that lose messages, and headers that can be published again.

What every consumer promises is in `test_every_consumer.py`.
"""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import nats
import pytest
from faststream import FastStream
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import NotFoundError
from sqlalchemy import create_engine

import nats_rig
import payments
from adapters import adapter
from brokers import broker
from databases import Database
from nats_garbage import send
from own_server import OwnServer
from payments import RULES, payment
from projector_dedup import RefusedError
from projector_dedup.integrations.nats import Consumer, dead_stream, replay
from reached import reached

DURABLE = "balances"


class Rig:
    """A stream of the test's own, a consumer in this event loop, and the read model of its projector."""

    def __init__(self, connection: Client, database: Database) -> None:
        self.connection, self.streams = connection, connection.jetstream()
        self.engine = create_engine(database.url())
        payments.dispatcher(self.engine)  # makes the tables
        self.async_url = database.async_url
        self.stream = f"payments-{uuid.uuid4().hex}"
        self.subject = f"{self.stream}.made"
        self.dead = dead_stream(self.stream, DURABLE)

    async def publish(self, number: int, account: str = "a", **headers: str) -> int:
        """Publish a payment; return its number in the stream."""
        added = await self.streams.publish(self.subject, payment(number, account), headers=headers or None)
        return int(added.seq)

    @asynccontextmanager
    async def consuming(self, **options: Any) -> AsyncIterator["asyncio.Task[None]"]:
        """Run a consumer, and let it settle what it has begun."""
        dispatcher, engine = payments.async_dispatcher(self.async_url)
        consumer = Consumer(self.connection, self.stream, DURABLE, dispatcher, subject=self.subject, **options)
        task = asyncio.create_task(consumer.run())
        try:
            yield task
        finally:
            consumer.stop()
            await task
            await engine.dispose()

    async def consume_until(self, done: Callable[[], Awaitable[object]], **options: Any) -> None:
        """Run a consumer until ``done``."""
        async with self.consuming(**options) as task:
            while not task.done() and not await done():  # noqa: ASYNC110  # a server tells nobody when it is so
                await asyncio.sleep(0.1)

    async def settled(self) -> bool:
        """True once every message was delivered and acknowledged."""
        try:
            found = await self.streams.consumer_info(self.stream, DURABLE)
        except NotFoundError:
            return False
        return not found.num_pending and not found.num_ack_pending

    async def letters(self) -> list[Any]:
        """Return the dead letters."""
        state = (await self.streams.stream_info(self.dead)).state
        found = []
        for number in range(state.first_seq, state.last_seq + 1 if state.messages else 0):
            with contextlib.suppress(NotFoundError):  # it was replayed, or there is none
                found.append(await self.streams.get_msg(self.dead, number))
        return found

    @property
    def applied(self) -> tuple[dict[str, int], int]:
        """The balances, and the number of markers."""
        return payments.applied(self.engine)


@pytest.fixture
def run(postgresql: Database) -> "Run":
    """Run a test in an event loop, with a stream that is deleted in the end."""
    RULES.clear()

    def start(test: Callable[[Rig], Coroutine[Any, Any, None]], address: str | None = None) -> None:
        async def main() -> None:
            connection = await nats.connect(address or broker("nats"), reconnect_time_wait=0.1)
            reached.saw("nats", str(connection.connected_server_version))
            rig = Rig(connection, postgresql)
            await rig.streams.add_stream(name=rig.stream, subjects=[f"{rig.stream}.>"])
            try:
                await test(rig)
            finally:
                RULES.clear()
                for name in (rig.stream, rig.dead):
                    try:
                        await rig.streams.delete_stream(name)
                    except NotFoundError:
                        continue
                await connection.close()
                rig.engine.dispose()

        asyncio.run(main())

    return start


class Run(Protocol):
    """Runs a test on the server of this run, or on another one."""

    def __call__(self, test: Callable[[Rig], Coroutine[Any, Any, None]], address: str | None = None) -> None:
        """Run it in an event loop."""


@pytest.mark.parametrize("in_flight", [1, 4])
def test_poison_is_kept_with_its_reason_and_replayed_after_the_mend(run: Run, in_flight: int) -> None:
    """The consumer lives on; the replay has the id that the message had, which the server must not call a duplicate."""

    async def test(rig: Rig) -> None:
        RULES["b"] = "poison"
        await rig.publish(1)
        await rig.publish(2, "b", **{"Nats-Msg-Id": "the-id", "trace": "t2"})
        await rig.streams.publish(rig.subject, b"\xff{")
        await rig.publish(3)
        await rig.consume_until(rig.settled, in_flight=in_flight)
        assert rig.applied == ({"a": 2}, 2)
        letters = {each.data: each.headers for each in await rig.letters()}
        assert set(letters) == {payment(2, "b"), b"\xff{"}
        poison = letters[payment(2, "b")]
        assert poison["trace"] == "t2"
        assert poison["x-rejected-for"] == r"ValueError: this account cannot be read\nreally"
        RULES.clear()
        assert await replay(rig.connection, rig.stream, DURABLE) == 2
        assert await rig.letters() == []
        await rig.consume_until(rig.settled)
        assert rig.applied == ({"a": 2, "b": 1}, 3)
        assert [each.data for each in await rig.letters()] == [b"\xff{"]
        again = await rig.streams.get_last_msg(rig.stream, rig.subject)
        assert "x-rejected-for" not in (again.headers or {})
        await rig.publish(2, "b", **{"x-message-id": "the-id"})
        await rig.consume_until(rig.settled)
        assert rig.applied == ({"a": 2, "b": 1}, 3)

    run(test)


def test_a_server_that_is_killed_and_started_again_loses_nothing(run: Run, tmp_path: Path) -> None:
    """The client connects again by itself, and the consumer goes on."""
    server = OwnServer("nats", "nats-server", tmp_path, "-a", "127.0.0.1", "-p", "{port}", "-js", "-sd", "{folder}")
    server.start()

    async def test(rig: Rig) -> None:
        for number in range(60):
            await rig.publish(number)
        async with rig.consuming(ack_wait=2.0) as task:
            while rig.applied[1] < 5:  # noqa: ASYNC110  # a database tells nobody when it is so
                await asyncio.sleep(0.01)
            server.kill()
            assert rig.applied[1] < 60
            server.start()
            while True:  # it answers nobody until it has read its streams; what is published twice is a duplicate
                with contextlib.suppress(nats.errors.Error):
                    await rig.publish(60)
                    break
            while not task.done() and not await rig.settled():  # noqa: ASYNC110  # as above
                await asyncio.sleep(0.1)
        assert rig.applied == ({"a": 61}, 61)

    try:
        run(test, f"nats://127.0.0.1:{server.port}")
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("setting", "flaw"),
    [
        ({"max_deliver": 3}, "max_deliver"),
        ({"max_ack_pending": 10, "max_deliver": -1}, "max_ack_pending"),
        ({"ack_policy": AckPolicy.ALL, "max_ack_pending": -1}, "ack_policy is not explicit"),
        ({"filter_subject": "elsewhere"}, "filter_subject is"),
    ],
)
def test_a_consumer_that_would_lose_messages_is_refused(run: Run, setting: dict[str, Any], flaw: str) -> None:
    """Somebody has made the durable with settings under which the server drops, forgets or holds back messages."""

    async def test(rig: Rig) -> None:
        config = {"filter_subject": rig.subject, "max_ack_pending": -1, **setting}
        if "elsewhere" in config["filter_subject"]:
            config["filter_subject"] = f"{rig.stream}.elsewhere"
        await rig.streams.add_consumer(rig.stream, ConsumerConfig(durable_name=DURABLE, **config))
        with pytest.raises(RefusedError, match=flaw):
            await rig.consume_until(rig.settled)

    run(test)


@pytest.mark.parametrize(
    ("limits", "flaw"), [({"max_msgs": 10}, "discards the oldest"), ({"subjects": ["elsewhere.dead"]}, "subjects")]
)
def test_a_stream_that_would_lose_dead_letters_is_refused(run: Run, limits: dict[str, Any], flaw: str) -> None:
    """Somebody has made it with a limit, or it belongs to another consumer."""

    async def test(rig: Rig) -> None:
        config = {"subjects": [f"dead.{rig.stream}.{DURABLE}"], **limits}
        await rig.streams.add_stream(name=rig.dead, **config)
        with pytest.raises(RefusedError, match=flaw):
            await rig.consume_until(rig.settled)

    run(test)


def test_ids_that_are_not_utf_8_are_rejected(run: Run) -> None:
    """Two of them would look alike when they were decoded: the second one would be called a duplicate."""

    async def test(rig: Rig) -> None:
        for end in (b"\xe8", b"\xe9"):
            header = b"NATS/1.0\r\nNats-Msg-Id: caf" + end + b"\r\n\r\n"
            body = payment(1)
            line = f"HPUB {rig.subject} {len(header)} {len(header) + len(body)}\r\n".encode()
            await rig.connection._send_command(line + header + body + b"\r\n")
            await rig.connection.flush()
        await rig.publish(2)
        await rig.consume_until(rig.settled)
        assert rig.applied == ({"a": 1}, 1)
        assert [each.data for each in await rig.letters()] == [payment(1)] * 2

    run(test)


@pytest.mark.parametrize("first", ["503", "404 No Messages", "408 \xff", "100 Idle Heartbeat"])
def test_a_message_that_looks_like_an_answer_of_the_server_is_applied(run: Run, first: str) -> None:
    """A status in the first line of the headers is a producer's, where the message is one of the stream."""

    async def test(rig: Rig) -> None:
        block = f"NATS/1.0 {first}\r\nNats-Msg-Id: m1\r\nStatus: 503\r\n\r\n".encode("latin-1")
        await send(rig.connection, rig.subject.encode(), block, payment(1))
        await rig.publish(2)
        await rig.consume_until(rig.settled)
        assert rig.applied == ({"a": 2}, 2)

    run(test)


def test_headers_that_cannot_be_copied_are_left_out_and_named(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """nats-py publishes no such name, and the server would obey ``Nats-...`` in the dead letter and its replay."""

    async def test(rig: Rig) -> None:
        RULES["b"] = "poison"
        await rig.publish(1)
        block = b"NATS/1.0\r\na(b): c\r\nNats-Expected-Last-Sequence: 1\r\ntrace: \xff\r\nkept: k\r\n\r\n"
        await send(rig.connection, rig.subject.encode(), block, payment(2, "b"))
        await rig.consume_until(rig.settled)
        (letter,) = await rig.letters()
        ours = {"x-subject", "x-rejected-for", "Nats-Msg-Id", "Nats-Expected-Stream"}
        assert {*letter.headers} == {"kept", "trace", *ours}
        named = "lacks or changes 3 of its headers: a(b), Nats-Expected-Last-Sequence, trace"
        assert f"the dead letter of message 2 of stream {rig.stream} {named}" in caplog.messages
        RULES.clear()
        assert await replay(rig.connection, rig.stream, DURABLE) == 1
        await rig.consume_until(rig.settled)
        assert rig.applied == ({"a": 1, "b": 1}, 2)

    run(test)


@pytest.mark.parametrize("header", [b"", b"x-subject: a b\r\n"])
def test_a_stranger_among_the_dead_letters_keeps_none_from_the_replay(
    run: Run, caplog: pytest.LogCaptureFixture, header: bytes
) -> None:
    """Nobody knows where it belongs: it stays, and the log says so."""

    async def test(rig: Rig) -> None:
        RULES["b"] = "poison"
        await rig.publish(1, "b")
        await rig.consume_until(rig.settled)
        block = b"NATS/1.0 503\r\n" + header + b"\r\n"
        await send(rig.connection, f"dead.{rig.stream}.{DURABLE}".encode(), block, b"?")
        await rig.publish(2, "b")
        await rig.consume_until(rig.settled)
        assert await replay(rig.connection, rig.stream, DURABLE) == 2
        assert [each.data for each in await rig.letters()] == [b"?"]
        assert f"message 2 of stream {rig.dead} stays there" in caplog.text

    run(test)


def test_an_id_that_comes_twice_is_rejected(run: Run) -> None:
    """Which of the two is the message's nobody knows; a replay of it is rejected again."""

    async def test(rig: Rig) -> None:
        block = b"NATS/1.0\r\nNats-Msg-Id: m1\r\nNats-Msg-Id: m2\r\n\r\n"
        await send(rig.connection, rig.subject.encode(), block, payment(1))
        await rig.consume_until(rig.settled)
        assert await replay(rig.connection, rig.stream, DURABLE) == 1
        await rig.consume_until(rig.settled)
        assert [each.data for each in await rig.letters()] == [payment(1)]
        assert rig.applied == ({}, 0)

    run(test)


@pytest.mark.parametrize("end", [b"\xc2\xa0", b"\x1f"], ids=["a no-break space", "a separator"])
def test_a_replayed_id_is_not_taken_for_a_shorter_one(run: Run, end: bytes) -> None:
    """nats-py cuts blanks off the ends of a header that it publishes: the replay is rejected, and no duplicate."""

    async def test(rig: Rig) -> None:
        RULES["b"] = "poison"
        await send(rig.connection, rig.subject.encode(), b"NATS/1.0\r\nNats-Msg-Id: m1\r\n\r\n", payment(1))
        await send(
            rig.connection, rig.subject.encode(), b"NATS/1.0\r\nNats-Msg-Id: m1" + end + b"\r\n\r\n", payment(2, "b")
        )
        await rig.consume_until(rig.settled)
        RULES.clear()
        assert await replay(rig.connection, rig.stream, DURABLE) == 1
        await rig.consume_until(rig.settled)
        assert [each.data for each in await rig.letters()] == [payment(2, "b")]
        assert rig.applied == ({"a": 1}, 1)

    run(test)


def test_dead_letters_with_any_text_in_their_headers_are_replayed(run: Run) -> None:
    """The id is the one that was sent, letter by letter."""

    async def test(rig: Rig) -> None:
        RULES["b"] = "poison"
        await rig.publish(1, "b", **{"Nats-Msg-Id": "caf\u00e9", "trace": "\u2603"})
        await rig.publish(2, "b")
        await rig.consume_until(rig.settled)
        RULES.clear()
        assert await replay(rig.connection, rig.stream, DURABLE) == 2
        await rig.consume_until(rig.settled)
        assert rig.applied == ({"b": 2}, 2)
        await rig.publish(1, "b", **{"x-message-id": "caf\u00e9"})
        await rig.consume_until(rig.settled)
        assert rig.applied == ({"b": 2}, 2)

    run(test)


@pytest.mark.parametrize(("room", "kept"), [(300, True), (400, True), (1_000, True), (20, False)])
def test_poison_that_fills_the_payload_of_the_server(
    run: Run, caplog: pytest.LogCaptureFixture, room: int, kept: bool
) -> None:
    """Its dead letter has fewer headers; where not even that fits, the message comes again, and others go on."""

    async def test(rig: Rig) -> None:
        body = b"x" * (rig.connection.max_payload - room)
        await rig.streams.publish(rig.subject, body)
        await rig.publish(1)

        async def done() -> bool:
            told = any("is too large for a dead letter" in message for message in caplog.messages)
            return rig.applied == ({"a": 1}, 1) and (await rig.settled() if kept else told)

        await rig.consume_until(done)
        assert [each.data for each in await rig.letters()] == [body] * kept

    run(test)


@pytest.mark.parametrize("what", ["consumer", "stream"])
def test_what_is_deleted_under_a_consumer_ends_it(run: Run, what: str) -> None:
    """It would look for messages for ever, and find none."""

    async def test(rig: Rig) -> None:
        await rig.publish(1)
        with pytest.raises(ExceptionGroup) as ended:  # noqa: PT012  # it is raised where the block ends
            async with rig.consuming() as task:
                while not await rig.settled():  # noqa: ASYNC110  # a server tells nobody when it is so
                    await asyncio.sleep(0.05)
                if what == "consumer":
                    await rig.streams.delete_consumer(rig.stream, DURABLE)
                else:
                    await rig.streams.delete_stream(rig.stream)
                await asyncio.wait([task], timeout=30)
                assert task.done()
        assert ended.group_contains(NotFoundError)

    run(test)


def test_a_handler_that_takes_longer_than_ack_wait_is_not_run_beside_itself(run: Run) -> None:
    """The message is kept alive: the server delivers it once."""

    async def test(rig: Rig) -> None:
        deliveries = 0
        loop = asyncio.get_running_loop()
        over = asyncio.Event()

        dispatcher, engine = payments.async_dispatcher(rig.async_url)
        real = dispatcher.deliver

        async def deliver(event: Any) -> Any:
            nonlocal deliveries
            deliveries += 1
            loop.call_later(2.5, over.set)
            await over.wait()
            return await real(event)

        dispatcher.deliver = deliver  # type: ignore[method-assign, assignment]
        consumer = Consumer(rig.connection, rig.stream, DURABLE, dispatcher, in_flight=2, ack_wait=0.6)
        await rig.publish(1)
        task = asyncio.create_task(consumer.run())
        while not await rig.settled():  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.05)
        consumer.stop()
        await task
        await engine.dispose()
        assert deliveries == 1
        assert rig.applied == ({"a": 1}, 1)

    run(test)


def test_a_batch_whose_dead_letter_cannot_be_kept_settles_the_others(run: Run) -> None:
    """The poison comes again; those behind it are applied and acknowledged, and do not come with it."""

    async def test(rig: Rig) -> None:
        RULES["b"] = "poison"
        dispatcher, engine = payments.async_dispatcher(rig.async_url)
        consumer = Consumer(rig.connection, rig.stream, DURABLE, dispatcher, subject=rig.subject)
        await consumer.open()
        await rig.streams.delete_stream(rig.dead)
        for number, account in enumerate("abaa"):
            await rig.publish(number, account)
        fetching = await rig.streams.pull_subscribe_bind(DURABLE, rig.stream)
        messages = await fetching.fetch(4, timeout=10)
        assert len(messages) == 4
        with pytest.raises(nats.errors.Error):
            await consumer.settle_batch(messages)
        await rig.connection.flush()
        found = await rig.streams.consumer_info(rig.stream, DURABLE)
        assert (found.num_pending, found.num_ack_pending) == (0, 1)
        assert rig.applied == ({"a": 3}, 3)
        await fetching.unsubscribe()
        await engine.dispose()

    run(test)


def test_any_number_of_messages_may_wait(run: Run) -> None:
    """What they wait for is behind them, so the durable consumer that is made has no limit (by default 1,000)."""

    async def test(rig: Rig) -> None:
        await rig.publish(1)
        await rig.consume_until(rig.settled)
        assert (await rig.streams.consumer_info(rig.stream, DURABLE)).config.max_ack_pending == -1

    run(test)


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
            durable_name=nats_rig.DURABLE,
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

        with pytest.raises(RefusedError, match=f"the consumer {nats_rig.DURABLE} .* cannot be used.*{flaw}"):
            asyncio.run(run())
        found = queue.ask(lambda streams: streams.consumer_info(queue.stream, nats_rig.DURABLE))
        assert (found.delivered.consumer_seq, found.num_pending) == (0, 3)
        assert rig.applied == ({}, 0)
