"""FastStream: messages are acknowledged after the commit, and nothing of FastStream's fails before the dispatcher."""

import ast
import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest
from faststream.rabbit import RabbitBroker, RabbitQueue
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from amqp_fields import drawn, nested, short, table
from consumer_rig import EXAMPLES, prove, wait_for
from databases import Database
from projector_dedup import AsyncDispatcher, Defer, Dispatcher, HandlerDefinitionError, by_path, on, projector
from projector_dedup.integrations.faststream.rabbit import subscribe
from projector_dedup.integrations.pika import replay
from projector_dedup.integrations.rabbitmq import WITHOUT_ID
from projector_dedup.testing.kit import Added, Harness, Subject, add
from rabbitmq_rig import RabbitMQ, rabbitmq


@pytest.fixture
def queue() -> Iterator[RabbitMQ]:
    """A queue of the test's own."""
    with rabbitmq() as opened:
        yield opened


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_consumers_with_faststream_are_exact(queue: RabbitMQ, postgresql: Database) -> None:
    """Two processes, 22 of them killed, poison, garbage, messages before their time: the read model equals the file."""
    prove("with_faststream.py", queue, postgresql, {"AMQP_URL": queue.url, "QUEUE": queue.queue})


@pytest.mark.parametrize("name", sorted(each.name for each in EXAMPLES.glob("with_faststream*.py")))
def test_the_example_is_short_and_in_the_documentation(name: str) -> None:
    """As the tests run it; ten lines at most beside the imports."""
    program = (EXAMPLES / name).read_text(encoding="utf-8")
    page = EXAMPLES.parents[1] / "docs" / "consumers" / "faststream.md"
    assert f"```python\n{program}```" in page.read_text(encoding="utf-8")
    body = [each for each in ast.parse(program).body[1:] if not isinstance(each, (ast.Import, ast.ImportFrom))]
    assert sum(1 + (each.end_lineno or 0) - each.lineno for each in body) <= 10


# In one process ------------------------------------------------------------------------------------------------------


class Payments:
    """The consumer of a test: its handler adds, or does first what a test asks for."""

    def __init__(self, harness: Harness, queue: RabbitMQ) -> None:
        self.harness, self.queue = harness, queue
        self.early: set[str] = set()
        self.poison: set[str] = set()
        self.entered = asyncio.Event()
        self.leave: asyncio.Event | None = None

    async def add(self, body: dict[str, Any], session: AsyncSession) -> None:
        """Add 1 to the account of a payment."""
        self.entered.set()
        if self.leave is not None:
            await self.leave.wait()
        if body["account"] in self.early:
            raise Defer("not yet")
        if body["account"] in self.poison:
            raise ValueError("poison")
        await session.run_sync(lambda inner: add(Added((body["account"],)), inner))

    @asynccontextmanager
    async def consuming(self, given: str | RabbitQueue = "", **options: Any) -> AsyncIterator[RabbitBroker]:
        """Run FastStream's broker with one subscriber; `broker` are arguments for the broker itself."""
        engine: AsyncEngine = create_async_engine(self.harness.subject.url)

        async def handle(body: dict[str, Any], session: AsyncSession) -> None:
            await self.add(body, session)

        handler = projector(idempotent=True, name="totals")(on("payment")(handle))
        dispatcher = AsyncDispatcher(async_sessionmaker(engine), handler, type=by_path("type"))
        broker = RabbitBroker(self.queue.url, graceful_timeout=0.1, **options.pop("broker", {}))
        subscribe(broker, given or self.queue.queue, dispatcher, **options)
        try:
            async with broker:
                await broker.start()
                yield broker
        finally:
            await engine.dispose()

    def consume(self, until: Callable[[], bool], **options: Any) -> None:
        """Consume until something is so."""

        async def run() -> None:
            async with self.consuming(**options):
                await asyncio.to_thread(wait_for, until, "what the test waits for", 30)

        asyncio.run(run())

    def in_letters(self) -> int:
        """How many dead letters there are."""
        return self.queue.count(f"{self.queue.queue}.dead")


@pytest.fixture
def payments(queue: RabbitMQ, postgresql: Database) -> Iterator[Payments]:
    """A consumer of the queue, and its read model."""
    with Harness(Subject(postgresql.async_url)) as harness:
        harness.create_tables()
        yield Payments(harness, queue)


def payment(account: str = "a", **more: Any) -> bytes:
    """A body."""
    return json.dumps({"type": "payment", "account": account, **more}).encode()


def test_a_message_is_not_acknowledged_before_the_commit(payments: Payments) -> None:
    """A consumer that goes away while the handler runs has not taken the message with it."""
    payments.queue.send(payment(), message_id="p1")

    async def run() -> None:
        payments.leave = asyncio.Event()
        async with payments.consuming():
            await asyncio.wait_for(payments.entered.wait(), 20)

    asyncio.run(run())
    payments.leave = None
    wait_for(lambda: payments.queue.count() == 1, "the message to come back", 20)
    assert payments.harness.totals() == {}
    payments.consume(lambda: payments.harness.totals() == {"a": 1})
    assert payments.queue.left() == 0


def test_poison_goes_to_the_dead_letters_and_comes_back_after_the_mend(payments: Payments) -> None:
    """With why; the others are applied meanwhile, and a replay is applied once."""
    payments.poison = {"b"}
    for number, account in enumerate("aba"):
        payments.queue.send(payment(account), message_id=f"p{number}", headers={"trace": "t1"})
    payments.consume(lambda: payments.harness.totals() == {"a": 2} and payments.in_letters() == 1)
    ((properties, body),) = payments.queue.dead_letters()
    assert body == payment("b")
    assert properties.message_id == "p1"
    assert properties.headers == {"trace": "t1", "x-deliveries": 1, "x-rejected-for": "ValueError: poison"}
    payments.poison.clear()
    for _ in range(2):
        payments.queue.send(payment("b"), message_id="p1")
    assert replay(payments.queue.parameters, payments.queue.queue) == 1
    payments.consume(lambda: payments.harness.totals() == {"a": 2, "b": 1} and payments.queue.left() == 0)
    assert len(payments.harness.markers()) == 3


def test_what_comes_too_early_waits_outside_of_the_window(payments: Payments) -> None:
    """More messages before their time than are in flight at once hold up nothing; when it is time, they are applied."""
    payments.early = {"b"}
    for number in range(6):
        payments.queue.send(payment("b"), message_id=f"early{number}")
    payments.queue.send(payment("a"), message_id="p1")
    payments.consume(lambda: payments.harness.totals() == {"a": 1}, prefetch=2)
    payments.early.clear()
    payments.consume(lambda: payments.harness.totals() == {"a": 1, "b": 6} and payments.queue.left() == 0)
    assert len(payments.harness.markers()) == 7


def test_a_message_without_an_id_beside_its_body_keeps_that_of_the_body(payments: Payments) -> None:
    """aio-pika gives a copy a random id, which must not be the message's: it is applied once."""
    payments.early = {"b"}
    payments.queue.send(payment("b", message_id="in the body"))
    payments.consume(lambda: payments.queue.count(f"{payments.queue.queue}.wait.1s") == 1)
    payments.early.clear()
    payments.queue.send(payment("b", message_id="in the body"))
    payments.consume(lambda: payments.harness.totals() == {"b": 1} and payments.queue.left() == 0)
    assert payments.harness.markers() == [("in the body", "totals")]


def test_a_message_without_any_id_is_rejected(payments: Payments) -> None:
    """FastStream makes an id up for it, a new one for each delivery: with that one it would be applied each time."""
    payments.queue.send(payment("a"))
    payments.consume(lambda: payments.in_letters() == 1)
    ((properties, _),) = payments.queue.dead_letters()
    assert properties.headers["x-rejected-for"].startswith("InvalidMessageIdError: the message has no id")
    assert properties.headers[WITHOUT_ID] is True
    assert payments.harness.markers() == []


async def _fails(*_: object) -> None:
    raise RuntimeError("the application's own")


def test_nothing_of_the_applications_fails_before_the_dispatcher(payments: Payments) -> None:
    """Neither a parser and a decoder of the application's own for its broker, nor those of FastStream."""
    payments.queue.send(payment("a"), message_id="p1", content_type="application/json", reply_to="nowhere.at.all")
    payments.queue.send(b"{", message_id="p2", content_type="application/json")
    payments.queue.send(b"\xff", message_id="p3", content_type="text/plain")
    payments.consume(
        lambda: payments.harness.totals() == {"a": 1} and payments.in_letters() == 2,
        broker={"parser": _fails, "decoder": _fails},
    )
    assert payments.queue.left() == 0


def test_without_fastdepends(payments: Payments) -> None:
    """An application that switches the injection off is served as well."""
    payments.queue.send(payment("a"), message_id="p1")
    payments.consume(lambda: payments.harness.totals() == {"a": 1}, broker={"apply_types": False})


def test_a_message_waits_in_the_longest_queue_within_the_bound(payments: Payments) -> None:
    """It would wait for 300 seconds."""
    payments.early = {"b"}
    payments.queue.send(payment("b"), message_id="p1", headers={"x-deliveries": 6})
    payments.consume(lambda: payments.queue.count(f"{payments.queue.queue}.wait.30s") == 1, max_delay=299)


def test_the_broker_counts_to_the_limit(payments: Payments) -> None:
    """The copies carry the count; a second delivery is the last one here."""
    payments.early = {"b"}
    payments.queue.send(payment("b"), message_id="p1")
    payments.consume(lambda: payments.in_letters() == 1, max_attempts=2)
    ((properties, _),) = payments.queue.dead_letters()
    assert properties.headers["x-deliveries"] == 2
    assert properties.headers["x-rejected-for"] == "Defer: not yet"


def test_a_message_that_cannot_be_copied_is_given_back(payments: Payments, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody has deleted the dead letters: the message is not lost, the log says so, and others are applied."""
    payments.poison = {"b"}

    async def run() -> None:
        async with payments.consuming() as broker:
            dead = f"{payments.queue.queue}.dead"
            payments.queue.channel.queue_delete(dead)
            payments.queue.send(payment("b"), message_id="p1")
            payments.queue.send(payment("a"), message_id="p2")
            await asyncio.to_thread(wait_for, lambda: "could not be settled" in caplog.text, "the log line", 20)
            await broker.declare_queue(RabbitQueue(f"{dead}.other"))  # the connection lives
            payments.queue.channel.queue_declare(dead, durable=True)
            await asyncio.to_thread(wait_for, lambda: payments.in_letters() == 1, "the dead letter", 20)

    with caplog.at_level(logging.ERROR, logger="projector_dedup.consumers"):
        asyncio.run(run())
    payments.queue.channel.queue_delete(f"{payments.queue.queue}.dead.other")
    assert f"a message from queue {payments.queue.queue} could not be settled, and is given back to it" in caplog.text
    assert payments.harness.totals() == {"a": 1}
    assert payments.queue.left() == 0


@pytest.mark.parametrize(
    ("below", "kept"), [(1_000, {"x-deliveries", "x-rejected-for"}), (70, {"x-deliveries"}), (42, set())]
)
def test_headers_that_fill_a_frame(payments: Payments, below: int, kept: set[str]) -> None:
    """A copy leaves out what no longer fits: RabbitMQ would close the connection, and every consumer's after it."""
    payments.poison = {"b"}
    text = "x" * (131_072 - below)  # the frame that the server offers
    payments.queue.send(payment("b"), message_id="p1", headers={"x": text})
    payments.consume(lambda: payments.in_letters() == 1)
    ((properties, _),) = payments.queue.dead_letters()
    assert properties.headers.pop("x") == text
    assert set(properties.headers) == kept


@pytest.mark.parametrize(("given", "marked"), [("p1", {}), (None, {WITHOUT_ID: True})])
def test_headers_that_leave_no_room_for_a_copy_are_left_out_and_named(
    payments: Payments, caplog: pytest.LogCaptureFixture, given: str | None, marked: dict[str, bool]
) -> None:
    """RabbitMQ would close the connection over the copy, and deliver the message again for ever."""
    payments.early = {"b"}
    headers = {"small": 1, "large": "x" * (131_072 - 57)}
    payments.queue.send(payment("b", message_id="in the body"), message_id=given, headers=headers)
    payments.consume(lambda: payments.in_letters() == 1, max_attempts=2)
    ((properties, _),) = payments.queue.dead_letters()
    assert properties.headers == {"small": 1, **marked, "x-deliveries": 2, "x-rejected-for": "Defer: not yet"}
    line = f"a message from queue {payments.queue.queue} is copied without 1 of its headers"
    (told,) = {each.getMessage() for each in caplog.records if each.getMessage().startswith(line)}
    assert told.endswith(": large")


def test_whatever_headers_another_client_sends_nothing_is_held_up(payments: Payments) -> None:
    """A good message with them is applied; a poisoned one, and one before its time at the last, is a dead letter."""
    payments.poison, payments.early = {"p"}, {"e"}
    sent = list(drawn(10, unreadable=False))
    for number, properties in enumerate(sent):
        for account in "pea":
            payments.queue.send_octets(payment(account), message_id=short(f"{account} {number}".encode()), **properties)
    payments.consume(
        lambda: payments.harness.totals() == {"a": len(sent)} and payments.in_letters() == 2 * len(sent),
        prefetch=2,
        max_attempts=2,
    )
    assert sorted(body for _, body in payments.queue.dead_letters()) == sorted([payment("p"), payment("e")] * len(sent))
    assert payments.queue.left() == 0


def test_a_header_is_copied_or_left_out_however_deeply_it_is_nested(payments: Payments) -> None:
    """aio-pika reads some depths that Python's stack has no room to write; ``copy`` measures where it has less room."""
    depths = range(440, 475)
    for depth in depths:
        payments.queue.send_octets(b"{", message_id=short(b"%d" % depth), headers=table((b"h", nested(depth))))
    with ThreadPoolExecutor(1) as thread:  # whose stack is empty, and not pytest's
        thread.submit(payments.consume, lambda: payments.in_letters() == len(depths)).result()
    kept = ["h" in properties.headers for properties, _ in payments.queue.dead_letters()]
    assert True in kept
    assert False in kept


def test_what_aio_pika_cannot_read_is_logged_with_the_remedy(
    payments: Payments, caplog: pytest.LogCaptureFixture
) -> None:
    """aio-pika closes FastStream's connection at each delivery; the message stays, until pika's consumer settles it."""

    async def run() -> None:
        async with payments.consuming():
            payments.queue.send_octets(payment(), message_id=short(b"\xff"))
            line = f"aio-pika cannot read a message of queue {payments.queue.queue}"
            await asyncio.to_thread(wait_for, lambda: line in caplog.text, "the log line", 20)

    asyncio.run(run())
    wait_for(lambda: payments.queue.count() == 1, "the message to be in its queue", 20)


def test_a_queue_that_is_there_is_taken_as_it_is(payments: Payments) -> None:
    """With arguments of its own: `RabbitQueue` says so."""
    name = payments.queue.queue
    payments.queue.channel.queue_delete(name)
    payments.queue.channel.queue_declare(name, durable=True, arguments={"x-max-priority": 3})
    payments.queue.send(payment("a"), message_id="p1")
    payments.consume(lambda: payments.harness.totals() == {"a": 1}, given=RabbitQueue(name, declare=False))


def test_wait_queues_that_are_others_are_heard_of_at_the_start(payments: Payments) -> None:
    """A queue of that name with other arguments would keep messages for ever, or lose them."""
    payments.queue.channel.queue_declare(f"{payments.queue.queue}.wait.1s", durable=True)
    with pytest.raises(Exception, match="PRECONDITION_FAILED"):
        payments.consume(lambda: True)


def test_what_would_lose_messages_is_refused(payments: Payments) -> None:
    """A dispatcher that nobody awaits, and a window without an end."""
    broker = RabbitBroker(payments.queue.url)

    def direct(body: dict[str, Any], session: Session) -> None:
        """Do nothing."""

    wrong: Any = Dispatcher(sessionmaker(), projector(idempotent=True, name="totals")(on("payment")(direct)))
    with pytest.raises(HandlerDefinitionError, match="AsyncDispatcher"):
        subscribe(broker, "q", wrong)
    with pytest.raises(ValueError, match="prefetch"):
        subscribe(broker, "q", wrong, prefetch=0)
