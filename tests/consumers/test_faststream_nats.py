"""FastStream with NATS JetStream: messages are acknowledged after the commit, by a consumer that can lose none."""

import asyncio
import contextlib
import logging
import re
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import nats
import pytest
from faststream import FastStream
from faststream.nats import NatsBroker
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import NotFoundError
from sqlalchemy import create_engine, insert, text

import payments
from brokers import broker
from consumer_rig import Sent, prove
from databases import Database
from nats_garbage import garbage, send
from payments import RULES, payment
from projector_dedup import HandlerDefinitionError, RefusedError
from projector_dedup.integrations import nats as plug
from projector_dedup.integrations.faststream.nats import subscribe
from projector_dedup.integrations.nats import MESSAGE_ID
from reached import reached

T = TypeVar("T")
DURABLE = "airlines"


class JetStream:
    """One stream with a name of its own, looked at on a connection of the test's own."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.stream = f"test-{secrets.token_hex(6)}"
        self.subject = f"{self.stream}.all"
        self.dead_stream = plug.dead_stream(self.stream, DURABLE)
        self.ask(lambda streams: streams.add_stream(name=self.stream, subjects=[f"{self.stream}.>"]))

    def ask(self, question: Callable[[JetStreamContext], Coroutine[Any, Any, T]]) -> T:
        """Ask the server."""

        async def run() -> T:
            async with await nats.connect(self.url) as connection:
                reached.saw("nats", str(connection.connected_server_version))
                return await question(connection.jetstream())

        return asyncio.run(run())

    def publish(self, messages: Sequence[Sent]) -> None:
        """Publish, and return when the server has it all; twice is twice, which `Nats-Msg-Id` would prevent."""

        async def publish(streams: JetStreamContext) -> None:
            for each in messages:
                await streams.publish(self.subject, each.body, headers={MESSAGE_ID: each.id} if each.id else None)

        self.ask(publish)

    def dead(self) -> list[Sent]:
        """The dead letters."""

        async def letters(streams: JetStreamContext) -> list[Sent]:
            found = []
            try:
                state = (await streams.stream_info(self.dead_stream)).state
            except NotFoundError:
                return []
            for number in range(state.first_seq, state.last_seq + 1):
                with contextlib.suppress(NotFoundError):
                    letter = await streams.get_msg(self.dead_stream, number)
                    found.append(Sent((letter.headers or {}).get(MESSAGE_ID), letter.data or b""))
            return found

        return self.ask(letters)

    def replay(self) -> int:
        """Publish the dead letters again, by the library."""

        async def run() -> int:
            async with await nats.connect(self.url) as connection:
                return await plug.replay(connection, self.stream, DURABLE)

        return asyncio.run(run())

    def left(self) -> int:
        """How many messages were not acknowledged."""
        found = self.ask(lambda streams: streams.consumer_info(self.stream, DURABLE))
        return (found.num_pending or 0) + (found.num_ack_pending or 0)

    def close(self) -> None:
        """Delete the streams."""

        async def delete(streams: JetStreamContext) -> None:
            for name in (self.stream, self.dead_stream):
                with contextlib.suppress(NotFoundError):
                    await streams.delete_stream(name)

        self.ask(delete)


@pytest.fixture
def stream() -> Iterator[JetStream]:
    """A stream of the test's own."""
    opened = JetStream(broker("nats"))
    yield opened
    opened.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("program", ["with_faststream_nats.py", "with_faststream_nats_batches.py"])
def test_killed_consumers_with_faststream_are_exact(stream: JetStream, postgresql: Database, program: str) -> None:
    """Two processes, 22 of them killed, poison, garbage, messages before their time: the read model equals the file."""
    prove(program, stream, postgresql, {"NATS_URL": stream.url, "STREAM": stream.stream})


# In one process ------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def consuming(stream: JetStream, database: Database, **options: Any) -> AsyncIterator[FastStream]:
    """Run a FastStream application with one subscriber."""
    dispatcher, engine = payments.async_dispatcher(database.async_url)
    broker = NatsBroker(stream.url, graceful_timeout=0.1)
    subscribe(broker, stream.stream, stream.subject, DURABLE, dispatcher, **options)
    application = FastStream(broker)
    running = asyncio.create_task(application.run())
    try:
        yield application
    finally:
        application.exit()
        await running
        await engine.dispose()


def consume(stream: JetStream, database: Database, until: Callable[[], bool], **options: Any) -> None:
    """Consume until something is so."""

    async def run() -> None:
        async with asyncio.timeout(40), consuming(stream, database, **options):
            while not await asyncio.to_thread(until):  # noqa: ASYNC110  # a server tells nobody when it is so
                await asyncio.sleep(0.1)

    asyncio.run(run())


@pytest.fixture
def applied(postgresql: Database) -> Iterator[Callable[[], tuple[dict[str, int], int]]]:
    """Return the balances, and the number of markers."""
    RULES.clear()
    engine = create_engine(postgresql.url())
    payments.dispatcher(engine)  # makes the tables
    yield lambda: payments.applied(engine)
    RULES.clear()
    engine.dispose()


Applied = Callable[[], tuple[dict[str, int], int]]


@pytest.mark.parametrize("batch", [None, 6])
def test_poison_and_what_comes_too_early(
    stream: JetStream,
    postgresql: Database,
    applied: Applied,
    batch: int | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One is kept with the dead letters and replayed after the mend, the other comes again; both are applied once."""
    caplog.set_level(logging.INFO, "projector_dedup.consumers")
    RULES.update(b="poison", c="early")
    stream.publish([Sent(None, payment(number, account)) for number, account in enumerate("abac")])
    stream.publish([Sent("g", b"\xff{"), Sent("h", b"{}")])
    patience = {"ack_wait": 2.0, "max_delay": 0.2}
    consume(stream, postgresql, lambda: applied() == ({"a": 2}, 2) and len(stream.dead()) == 3, batch=batch, **patience)
    assert re.search(r"is to come again in 0\.2 s after delivery \d+: Defer", caplog.text)
    assert {each.body for each in stream.dead()} == {payment(1, "b"), b"\xff{", b"{}"}
    RULES.clear()
    assert stream.replay() == 3
    done = {"a": 2, "b": 1, "c": 1}
    # What the first application had fetched, and not settled when it ended, comes after ack_wait.
    consume(stream, postgresql, lambda: applied() == (done, 4) and stream.left() == 0, batch=batch, **patience)
    assert {each.body for each in stream.dead()} == {b"\xff{", b"{}"}


@pytest.mark.parametrize("batch", [None, 20])
def test_whatever_a_client_sends_is_applied_delayed_or_a_dead_letter(
    stream: JetStream,
    postgresql: Database,
    applied: Applied,
    caplog: pytest.LogCaptureFixture,
    batch: int | None,
) -> None:
    """Headers and subjects that no client writes stop nobody: what is behind them is applied."""
    caplog.set_level(logging.INFO, "projector_dedup.consumers")
    RULES.update(b="poison", c="early")

    async def publish() -> None:
        async with await nats.connect(stream.url) as connection:
            for end, block, body in garbage(seed=2013, count=60):
                await send(connection, stream.stream.encode() + b"." + end, block, body)

    asyncio.run(publish())
    stream.publish([Sent(None, payment(1_000, "behind"))])
    sent = stream.ask(lambda streams: streams.stream_info(stream.stream)).state.messages

    def done() -> bool:
        if "behind" not in applied()[0]:
            return False
        if "is to come again in 0.2 s" in caplog.text:
            RULES.pop("c", None)
        return stream.left() == 0

    stream.subject = f"{stream.stream}.>"
    consume(stream, postgresql, done, batch=batch, max_delay=0.2)
    balances, markers = applied()
    assert set(balances) == {"a", "behind", "c"}
    assert markers + len(stream.dead()) == sent


def test_a_batch_is_one_transaction(stream: JetStream, postgresql: Database, applied: Applied) -> None:
    """Messages that are there together are applied together; one after the other they take a transaction each."""
    engine = create_engine(postgresql.url())
    stream.publish([Sent(None, payment(number)) for number in range(5)])
    consume(stream, postgresql, lambda: applied()[1] == 5 and stream.left() == 0, batch=5)
    assert payments.transactions(engine) == 1
    stream.publish([Sent(None, payment(number)) for number in range(5, 10)])
    consume(stream, postgresql, lambda: applied()[1] == 10 and stream.left() == 0)
    assert payments.transactions(engine) == 6
    engine.dispose()


@pytest.mark.parametrize("batch", [None, 10])
def test_a_message_is_not_acknowledged_before_the_commit(
    stream: JetStream, postgresql: Database, applied: Applied, batch: int | None
) -> None:
    """A consumer that goes away while the handler runs has not taken the message with it."""
    stream.publish([Sent(None, payment(1))])
    engine = create_engine(postgresql.url())
    waiting = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )

    def waits() -> bool:
        with engine.connect() as connection:
            return bool(connection.scalar(waiting))

    with engine.connect() as holding:
        holding.execute(insert(payments.Balance).values(account="a", amount=0))  # for which the handler waits
        consume(stream, postgresql, waits, ack_wait=2.0, batch=batch)
        assert stream.left() == 1
        holding.rollback()
    engine.dispose()
    assert applied() == ({}, 0)
    consume(stream, postgresql, lambda: applied() == ({"a": 1}, 1) and stream.left() == 0)


@pytest.mark.parametrize("batch", [None, 10])
@pytest.mark.parametrize(
    ("setting", "flaw"),
    [({"max_deliver": 1}, "max_deliver"), ({"max_ack_pending": 5}, "max_ack_pending")],
    ids=["drops", "stands still"],
)
def test_a_consumer_that_would_lose_messages_ends_the_application(
    stream: JetStream, postgresql: Database, applied: Applied, setting: dict[str, Any], flaw: str, batch: int | None
) -> None:
    """FastStream would take the durable consumer as it is. Nothing is fetched, which ``max_deliver=1`` would lose."""
    config = ConsumerConfig(
        durable_name=DURABLE, filter_subject=stream.subject, ack_policy=AckPolicy.EXPLICIT, ack_wait=1.0, **setting
    )
    stream.ask(lambda streams: streams.add_consumer(stream.stream, config))
    stream.publish([Sent(None, payment(number)) for number in range(3)])

    async def run() -> None:
        dispatcher, engine = payments.async_dispatcher(postgresql.async_url)
        broker = NatsBroker(stream.url, graceful_timeout=0.1)
        subscribe(broker, stream.stream, stream.subject, DURABLE, dispatcher, batch=batch)
        try:
            await asyncio.wait_for(FastStream(broker).run(), 30)
        finally:
            await broker.stop()
            await engine.dispose()

    with pytest.raises(RefusedError, match=f"the consumer {DURABLE} .* cannot be used.*{flaw}"):
        asyncio.run(run())
    found = stream.ask(lambda streams: streams.consumer_info(stream.stream, DURABLE))
    assert found.delivered is not None
    assert (found.delivered.consumer_seq, found.num_pending) == (0, 3)
    assert applied() == ({}, 0)


def test_a_dispatcher_that_nobody_awaits_is_refused(postgresql: Database) -> None:
    """At once, not at the first message."""
    engine = create_engine(postgresql.url())
    dispatcher: Any = payments.dispatcher(engine)
    with pytest.raises(HandlerDefinitionError, match="AsyncDispatcher"):
        subscribe(NatsBroker(), "stream", "subject", DURABLE, dispatcher)
    engine.dispose()
