"""Celery on RabbitMQ: acknowledged after the commit, retried after the delay, put aside with a reason, replayed."""

import os
import re
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import celery
import kombu
import pytest
from kombu.serialization import dumps, loads
from sqlalchemy import create_engine, inspect, text
from sqlalchemy.orm import Session, sessionmaker

from brokers import broker
from celery_rig import TASK, CeleryQueue, celery_queue
from consumer_rig import wait_for
from databases import Database
from projector_dedup import Defer, Dispatcher, on, projector
from projector_dedup.brokers.celery import delivering_task, replay
from projector_dedup.brokers.typed_events import into

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"


@pytest.fixture
def queue() -> Iterator[CeleryQueue]:
    """A queue of the test's own."""
    with celery_queue() as opened:
        yield opened


class Worker:
    """The worker of `celery_worker.py`, and what its handler has written."""

    def __init__(self, queue: CeleryQueue, database: Database) -> None:
        self.queue = queue
        self.engine = create_engine(database.url())
        url = database.url().render_as_string(hide_password=False)
        environment = {**os.environ, "AMQP_URL": queue.url, "QUEUE": queue.queue, "FLIGHTS_DATABASE_URL": url}
        program = SUPPORT / "celery_worker.py"
        self.process = subprocess.Popen([sys.executable, program], env=environment)

    def send(self, number: int, message_id: str | None = None, limits: Any = None, **event: Any) -> None:
        """Publish an event, with options of Celery's."""
        body = {"type": "see", "number": number, **event}
        kwargs = {"message_id": message_id or f"m{number}"}
        self.queue.app.send_task(TASK, [body], kwargs, queue=self.queue.queue, **(limits or {}))

    def seen(self) -> dict[int, tuple[int, int]]:
        """The backend and the process that served each event; 0 is that of the parent."""
        with self.engine.connect() as connection:
            if not inspect(connection).has_table("seen"):
                return {}
            rows = connection.execute(text("SELECT number, backend, process FROM seen"))
            return {row.number: (row.backend, row.process) for row in rows}

    def stop(self) -> int:
        """Ask it to stop; return its exit code."""
        self.process.terminate()
        return self.process.wait()


@pytest.fixture
def worker(queue: CeleryQueue, postgresql: Database) -> Iterator[Worker]:
    """A worker with two children."""
    worker = Worker(queue, postgresql)
    yield worker
    worker.process.kill()
    worker.process.wait()
    worker.engine.dispose()


def test_children_use_connections_of_their_own(worker: Worker) -> None:
    """The parent has one in its pool when it forks; two processes on one connection would mix up their answers."""
    for number in range(1, 9):
        worker.send(number, takes=0.3)
    wait_for(lambda: len(worker.seen()) == 9, "every event")
    seen = worker.seen()
    parent = seen.pop(0)
    assert len({process for _, process in seen.values()}) == 2
    assert len({backend for backend, _ in seen.values()}) == 2
    assert parent[0] not in {backend for backend, _ in seen.values()}
    with worker.engine.connect() as connection:  # nor have they closed what is the parent's
        backends = connection.scalars(text("SELECT pid FROM pg_stat_activity WHERE datname = current_database()"))
        assert parent[0] in set(backends)
    assert worker.stop() == 0


def test_an_event_published_again_is_another_task_and_applied_once(worker: Worker) -> None:
    """Each publication has an id of Celery's own; that of the event decides."""
    for _ in range(3):
        worker.send(1)
    worker.send(2)
    wait_for(lambda: len(worker.seen()) == 3, "both events")
    assert worker.stop() == 0
    assert worker.queue.left() == 0
    assert worker.queue.dead() == []


def test_what_is_rejected_is_a_dead_letter_with_its_reason(worker: Worker) -> None:
    """Poison, an event without an id, one that came too often, wrong arguments, and what is not even a task."""
    worker.send(1, poison=True)
    worker.send(2, early=True)
    app, name = worker.queue.app, worker.queue.queue
    app.send_task(TASK, [{"type": "see", "number": 3}], {}, queue=name)
    app.send_task(TASK, [{"type": "see", "number": 4}], {"message_id": 4}, queue=name)
    app.send_task(TASK, [], {}, queue=name)
    app.send_task(TASK, [], {"no": "such argument"}, queue=name)
    worker.queue.publish_raw(b"{")
    worker.queue.publish_raw(b'{"args": 7}')
    worker.queue.publish_raw(b"\x80\x04N.", lang="py")
    worker.send(9)
    wait_for(lambda: len(worker.queue.dead_messages()) == 9 and 9 in worker.seen(), "all dead letters")
    reasons = sorted(each.headers["x-rejected-for"].partition(":")[0] for each in worker.queue.dead_messages())
    assert reasons == [
        *["DecodeError"] * 2,
        "Defer",
        *["InvalidMessageIdError"] * 2,
        "KeyError",
        *["TypeError"] * 2,
        "UnhandledMessage",
    ]
    assert set(worker.seen()) == {0, 9}
    assert worker.stop() == 0
    assert worker.queue.left() == 0


def test_a_worker_that_is_lost_leaves_its_event(worker: Worker, tmp_path: Path) -> None:
    """The child dies in the handler: the event comes again, and holds up no other."""
    trace = tmp_path / "trace"
    trace.touch()
    worker.send(1, kills=str(trace))
    wait_for(lambda: len(trace.read_text().splitlines()) >= 2, "the event again")
    worker.send(2)
    wait_for(lambda: 2 in worker.seen(), "the other event")
    assert 1 not in worker.seen()
    assert worker.queue.dead() == []


def test_an_event_that_is_interrupted_comes_again(worker: Worker, tmp_path: Path) -> None:
    """By the hard time limit, by the soft one, or by a handler that ends its process: it is applied the next time."""
    worker.send(1, hangs=str(tmp_path / "hard"), limits={"time_limit": 2})
    worker.send(2, hangs=str(tmp_path / "soft"), limits={"soft_time_limit": 2})
    worker.send(3, exits=str(tmp_path / "exit"))
    wait_for(lambda: set(worker.seen()) == {0, 1, 2, 3} or worker.queue.dead() != [], "the three events", 100)
    assert worker.queue.dead() == []


def test_a_worker_on_redis_refuses_to_start(tmp_path: Path) -> None:
    """It ends with a code that is not 0, and its log names the task, Redis and RabbitMQ; it has taken no message."""
    queue = f"projector-dedup-test-{secrets.token_hex(6)}"
    url = broker("redis")
    publisher = celery.Celery("publisher", broker=url, set_as_current=False)
    publisher.send_task(TASK, [{"type": "see", "number": 1}], {"message_id": "m1"}, queue=queue)
    environment = {
        **os.environ,
        "AMQP_URL": url,
        "QUEUE": queue,
        "FLIGHTS_DATABASE_URL": f"sqlite:///{tmp_path}/none.db",
    }
    command = [sys.executable, "-m", "celery", "-A", "celery_worker", "worker", "--pool", "solo", "-n", f"{queue}@%h"]
    ended = subprocess.run(
        command, cwd=SUPPORT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    try:
        assert ended.returncode not in (0, -9), ended.stderr
        (refused,) = re.findall(r"Unrecoverable error: RefusedError\((.*)\)", ended.stderr)
        assert f"the task {TASK} needs RabbitMQ, and the broker of this worker is redis" in refused
        with publisher.connection_for_read() as connection:
            assert connection.default_channel.client.llen(queue) == 1
    finally:
        with publisher.connection_for_read() as connection:
            connection.default_channel.client.delete(queue)
        publisher.close()


# An existing task ---------------------------------------------------------------------------------------------------

FAULTS = """
import os, signal, sys, threading
from pathlib import Path

from kombu import Queue
from projector_dedup import Defer


def is_first(name):
    try:
        Path(name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


page_convert = convert


def convert(incoming):
    message = page_convert(incoming)
    if message.body.account_id == "early" and is_first("early"):
        raise Defer("not yet")
    if message.body.account_id == "lost" and is_first("lost"):
        os.kill(os.getpid(), signal.SIGKILL)
    if message.body.account_id == "slow" and is_first("slow"):
        threading.Event().wait()  # until the soft time limit ends it
    return message
"""
"""Put before the task of the page: of some messages the first delivery is too early, kills the child, or hangs."""

STARTED = """
deliver = settling.deliver


def deliver_and_die(incoming):
    settled = deliver(incoming)
    if b'"committed"' in incoming.body and is_first("committed"):
        os.kill(os.getpid(), signal.SIGKILL)
    return settled


settling.deliver = deliver_and_die
to_the_dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{QUEUE}.dead"}
app.conf.task_queues = [Queue(QUEUE, routing_key=QUEUE, queue_arguments=to_the_dead)]
app.worker_main(["worker", "-n", f"{os.getpid()}@%h", "--concurrency", "2", "--without-mingle", "--without-gossip"])
"""
"""Put behind it: one that kills the child after the COMMIT. The dead letters are a policy's on the page."""


def _existing_task(queue: str) -> str:
    page = (ROOT / "docs" / "consumers" / "celery.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"<!-- an existing task -->\n```python\n(.*?)```", page, re.DOTALL)
    program = (ROOT / "examples" / "consumers" / "with_celery.py").read_text(encoding="utf-8")
    before = program.partition("add_payment = delivering_task(")[0]
    return "\n".join([before, f"QUEUE = {queue!r}", FAULTS, shown, STARTED])


def test_an_existing_task_that_delivers_in_its_body_is_exact(postgresql: Database, tmp_path: Path) -> None:
    """Published twice, early, slow, killed before and after COMMIT, each payment counts once; poison is a dead letter.

    The program is that of the page, with the page's task in the place of `delivering_task`.
    """
    name = f"projector-dedup-test-{secrets.token_hex(6)}"
    (tmp_path / "payments.py").write_text(_existing_task(name), encoding="utf-8")
    publisher = celery.Celery("publisher", broker=broker("rabbitmq"), set_as_current=False)
    publisher.conf.broker_transport_options = {"confirm_publish": True}
    connection = publisher.connection_for_write()
    channel = connection.default_channel
    dead = kombu.Queue(f"{name}.dead", routing_key=f"{name}.dead", durable=True)(channel)
    dead.queue_declare()
    to_the_dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead.name}
    publisher.conf.task_queues = [kombu.Queue(name, routing_key=name, queue_arguments=to_the_dead)]
    publisher.conf.task_queues[0](channel).queue_declare()

    def send(*arguments: object) -> None:
        limits = {"soft_time_limit": 2, "time_limit": 30} if arguments[0] == "slow" else {}
        publisher.send_task("payments.add", arguments, queue=name, **limits)

    accounts = ("a", "b", "early", "lost", "committed")
    identified = [(account, amount, f"p-{account}-{amount}") for amount in range(1, 6) for account in accounts]
    without_id = [("early", 100), ("lost", 100), ("committed", 100), ("slow", 100)]
    for each in [*without_id, *identified, *reversed(identified)]:
        send(*each)
    expected = Counter[str]()
    for account, amount in [*without_id, *((account, amount) for account, amount, _ in identified)]:
        expected[account] += amount
    send("a", "many", "p-poison")
    send("a")  # wrong arguments
    engine = create_engine(postgresql.url())

    def totals() -> dict[str, int]:
        if not inspect(engine).has_table("totals"):
            return {}
        with engine.connect() as reading:
            return {
                row.account_id: row.amount for row in reading.execute(text("SELECT account_id, amount FROM totals"))
            }

    def waiting(queue: str) -> int:
        return int(channel.queue_declare(queue, passive=True).message_count)

    url = postgresql.url("postgresql+psycopg").render_as_string(hide_password=False)
    environment = {**os.environ, "AMQP_URL": broker("rabbitmq"), "DATABASE_URL": url}

    def work() -> None:
        worker = subprocess.Popen([sys.executable, "payments.py"], cwd=tmp_path, env=environment)
        try:
            wait_for(lambda: totals() == expected and waiting(dead.name) == 2, "every payment", 50)
            worker.terminate()
            assert worker.wait(60) == 0
        finally:
            worker.kill()
            worker.wait()

    try:
        work()
        send("b", 1, "p-last")  # behind the redeliveries that the worker had not begun when it was stopped
        expected["b"] += 1
        work()
        assert totals() == expected
        assert (waiting(name), waiting(dead.name)) == (0, 2)
        assert replay(publisher, name) == 2
        assert (waiting(name), waiting(dead.name)) == (2, 0)
        assert {each.name for each in tmp_path.iterdir()} >= {"early", "lost", "committed", "slow"}
    finally:
        engine.dispose()
        for created in (name, dead.name):
            channel.queue_delete(created)
        connection.release()
        publisher.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_process_that_forks_by_itself(postgresql: Database) -> None:
    """After ``forget_connections`` a child has a connection of its own, and the parent keeps its."""
    code = """
import os, sys
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker
from projector_dedup import Defer, Dispatcher, on, projector
from projector_dedup.brokers.celery import forget_connections

@projector()
class Nothing:
    @on("x")
    def x(self, event, session): ...

engine = create_engine(sys.argv[1])
dispatcher = Dispatcher(sessionmaker(engine), Nothing())
def backend():
    with engine.connect() as connection:
        return connection.scalar(text("SELECT pg_backend_pid()"))

before = backend()
if (child := os.fork()) == 0:
    forget_connections(dispatcher)
    os._exit(backend() == before)
assert os.waitpid(child, 0)[1] == 0
assert backend() == before
"""
    url = postgresql.url().render_as_string(hide_password=False)
    subprocess.run([sys.executable, "-c", code, url], check=True)


@pytest.mark.filterwarnings("ignore::celery.exceptions.CDeprecationWarning")  # of Celery's own task.apply
@pytest.mark.parametrize("error", [Defer("not yet"), ConnectionError("away")], ids=["early", "network"])
def test_an_eager_task_that_is_to_be_retried_runs_once(factory: sessionmaker[Session], error: Exception) -> None:
    """It has no queue in which it could wait: its state says that it would, and the caller decides."""
    ran: list[object] = []

    @projector(idempotent=True, name="early")
    @on("early")
    def early(event: object, _: Session) -> None:
        ran.append(event)
        raise error

    app = celery.Celery("eager", broker="memory://")
    app.conf.task_always_eager = True
    task = delivering_task(app, "deliver", Dispatcher(factory, early), queue="q")
    for number, run in enumerate((task.delay, lambda *args: task.apply(args)), start=1):
        result = run("e", "m", "early")
        assert (result.state, len(ran)) == ("RETRY", number)
        assert str(error) in str(result.result)


@dataclass
class Dated:
    """An event with values that Celery's JSON makes objects of."""

    at: datetime
    amount: Decimal
    id: UUID


@pytest.mark.filterwarnings("ignore::celery.exceptions.CDeprecationWarning")  # of Celery's own task.apply
def test_objects_of_celerys_json_reach_convert_as_text(factory: sessionmaker[Session]) -> None:
    """The producer gave a moment, a Decimal and a UUID; `into` builds them again from text."""
    seen: list[Dated] = []

    @projector(idempotent=True, name="dated")
    @on(Dated)
    def collect(event: Dated, _: Session) -> None:
        seen.append(event)

    app = celery.Celery("dated", broker="memory://")
    task = delivering_task(app, "deliver", Dispatcher(factory, collect), queue="q", convert=into({"dated": Dated}))
    event: dict[str, Any] = {"at": datetime(2026, 1, 2, tzinfo=UTC), "amount": Decimal("1.50"), "id": UUID(int=7)}
    content_type, encoding, body = dumps([[event], {"message_id": "m", "type": "dated"}, {}], serializer="json")
    args, kwargs, _ = loads(body, content_type, encoding, accept=["application/json"])
    assert task.apply(args, kwargs).state == "SUCCESS"
    assert seen == [Dated(**event)]
