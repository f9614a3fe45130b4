"""A consumer in a process of its own: signals let it settle its message, and `idempotency consume` starts it again."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import create_engine, make_url

import payments
from adapters import KAFKA, Adapter, adapter
from consumer_rig import wait_for
from databases import Database
from flights_consumer import AWAITED, OURS, run
from projector_dedup.brokers.running import draining
from projector_dedup.testing.provider import free_port

SUPPORT = Path(__file__).parents[1] / "support"
IDEMPOTENCY = str(Path(sys.executable).with_name("idempotency"))
WEBHOOKS = (SUPPORT.parents[1] / "docs" / "webhooks.md").read_text(encoding="utf-8")
SIGNALS = {client: (signal.SIGTERM, signal.SIGINT)[number % 2] for number, client in enumerate(OURS)}


@pytest.fixture(params=OURS)
def consumer(request: pytest.FixtureRequest, postgresql: Database) -> Iterator[Adapter]:
    """A queue of the test's own, for each consumer of the library in turn."""
    cluster = request.getfixturevalue("cluster") if request.param == KAFKA else None
    with adapter(request.param, postgresql, cluster) as made:
        yield made


class Process:
    """A process that consumes the queue of an adapter, and the pipe at which the handler of ``held`` waits."""

    def __init__(self, consumer: Adapter, folder: Path, *command: str) -> None:
        self.pipe, self._log = folder / "pipe", folder / "log"
        os.mkfifo(self.pipe)
        url = consumer.database.url(consumer.drivername).render_as_string(hide_password=False)
        environment = {**os.environ, **consumer.settings, "DATABASE_URL": url, "PIPE": str(self.pipe)}
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, cwd=SUPPORT, env=environment, stdout=log, stderr=log)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """The handler waits during the block: to open a pipe for writing waits for its reader."""
        opened: list[Any] = []
        thread = threading.Thread(target=lambda: opened.append(self.pipe.open("wb")), daemon=True)
        thread.start()
        thread.join(60)
        assert opened, self.log
        with opened[0]:
            yield

    @property
    def log(self) -> str:
        """What the process has printed."""
        return self._log.read_text(encoding="utf-8")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def end(self) -> int:
        """Wait for the end; return the exit code."""
        return self._process.wait(60)

    def workers(self) -> list[int]:
        """The numbers of the processes that consume or have consumed, as their log lines have them."""
        return [int(each) for each in re.findall(r" (\d+) INFO projector_dedup\.consumers: consumes ", self.log)]

    def close(self) -> None:
        """Kill what still runs."""
        self._process.kill()
        self._process.wait()


@pytest.mark.timeout(180)
def test_a_signal_lets_the_current_message_be_settled(consumer: Adapter, tmp_path: Path) -> None:
    """In every consumer whose ``run`` is called in the main thread: exit code 0, no traceback, nothing begun anew."""
    consumer.pay((1, "held"))
    with contextlib.closing(Process(consumer, tmp_path, sys.executable, "consuming.py", consumer.client)) as process:
        with process.held():
            consumer.pay((2, "a"))
            process.signal(SIGNALS[consumer.client])
        assert (process.end(), process.log) == (0, "")
    assert consumer.applied == ({"held": 1}, 1)
    wait_for(lambda: consumer.queue.left() == 1, "the second payment only")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("consumer", "number", "processes"),
    [("pika", signal.SIGTERM, 2), ("aio-pika", signal.SIGINT, 1)],
    indirect=["consumer"],
)
def test_the_command_starts_killed_workers_again_and_drains_them(
    consumer: Adapter, number: signal.Signals, processes: int, tmp_path: Path
) -> None:
    """A message whose workers are killed in its handler is applied once; a signal then lets its handler end."""
    place = f"consuming:{consumer.client.replace('-', '_')}"
    command = IDEMPOTENCY, "consume", place, "--processes", str(processes)
    with contextlib.closing(Process(consumer, tmp_path, *command)) as process:
        wait_for(lambda: len(process.workers()) == processes, "the workers", 200)
        killed = set(process.workers())
        assert len(killed) == processes
        consumer.pay((1, "held"))
        with process.held():
            for worker in killed:
                os.kill(worker, signal.SIGKILL)
        wait_for(lambda: len(process.workers()) == 2 * processes, "the workers that take their places", 200)
        with process.held():
            process.signal(number)
        assert process.end() == 0, process.log
        assert "Traceback" not in process.log
        assert process.log.count("signal SIGKILL; it is started again in 1 s\n") == processes
        assert process.log.count("SIGTERM: the consumer has settled its current messages, and ends") == processes
    assert consumer.applied == ({"held": 1}, 1)
    assert consumer.queue.left() == 0


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("no_such_module:consumer", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("flights_consumer:consumer", "AttributeError: module 'flights_consumer' has no attribute 'consumer'"),
        ("flights_consumer:AWAITED", "flights_consumer:AWAITED is of type tuple; name a consumer of"),
        ("projector_dedup.brokers.running:_DRAINING", "_DRAINING is of type _Draining; name a consumer of"),
        ("celery:current_app", "run it with `celery --app MODULE worker`"),
    ],
)
def test_the_command_ends_without_a_consumer(place: str, said: str) -> None:
    """One line, and exit code 2; no worker is started again."""
    command = [IDEMPOTENCY, "consume", place, "--processes", "2"]
    ended = subprocess.run(command, cwd=SUPPORT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1)
    assert ended.stderr.startswith("Error: ")
    assert said in ended.stderr


NOWHERE = {
    "AMQP_URL": "amqp://user:secret@localhost:1",
    "NATS_URL": "nats://user:secret@localhost:1",
    "REDIS_URL": "redis://:secret@localhost:1/0",
    "KAFKA": json.dumps({"bootstrap.servers": "localhost:1", "group.id": "g"}),
    "TOPIC": "payments",
    "AWS_ENDPOINT_URL": "http://localhost:1",
    "AWS_DEFAULT_REGION": "eu-central-1",
    "AWS_ACCESS_KEY_ID": "id",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "QUEUE_URL": "http://localhost:1/0/payments",
    "PUBSUB_EMULATOR_HOST": "localhost:1",
    "SUBSCRIPTION": "projects/p/subscriptions/s",
}


@pytest.mark.parametrize("client", [each for each in OURS if each != "sqs-fifo"])
def test_a_broker_that_cannot_be_reached_is_named(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """``run`` raises ``ConnectionError`` with its address, and without its password; it does not wait for long."""
    for name, value in NOWHERE.items():
        monkeypatch.setenv(name, value)
    dispatcher: Any
    if client in AWAITED:
        dispatcher, _ = payments.async_dispatcher(make_url("sqlite+aiosqlite://"))
    else:
        dispatcher = payments.dispatcher(create_engine("sqlite://"))
    with pytest.raises(ConnectionError, match=r"^cannot connect to [\w/]+ at localhost:1: \w*.*\w") as raised:
        run(OURS[client](dispatcher))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("client", ["pika", "aio-pika"])
def test_a_rabbitmq_that_never_answers_is_named(client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the connection, and is silent."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AMQP_URL", f"amqp://user:secret@{address}")
        if client in AWAITED:
            dispatcher: Any = payments.async_dispatcher(make_url("sqlite+aiosqlite://"))[0]
        else:
            dispatcher = payments.dispatcher(create_engine("sqlite://"))
        with pytest.raises(ConnectionError, match=rf"^cannot connect to RabbitMQ at {address}: .*\w"):
            run(OURS[client](dispatcher))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("consumer", ["pika"], indirect=True)
def test_the_command_tries_again_to_reach_a_broker(
    consumer: Adapter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time in one line, after a pause that grows; a signal ends it with exit code 0 all the same."""
    monkeypatch.setattr(type(consumer), "settings", NOWHERE)
    command = IDEMPOTENCY, "consume", "consuming:pika"
    with contextlib.closing(Process(consumer, tmp_path, *command)) as process:
        wait_for(lambda: process.log.count("\n") == 2, "two attempts", 200)
        process.signal(signal.SIGTERM)
        assert process.end() == 0
    lines = process.log.splitlines()
    for line, pause in zip(lines, (1, 2), strict=False):
        assert re.fullmatch(
            rf"worker 1 \(process \d+\) has ended: cannot connect to RabbitMQ at localhost:1: .*Connection refused.*; "
            rf"it is started again in {pause} s",
            line,
        ), process.log
    assert "secret" not in process.log


@pytest.mark.timeout(300)
@pytest.mark.parametrize("consumer", ["aio-pika"], indirect=True)
def test_a_consumer_in_a_lifespan(consumer: Adapter, tmp_path: Path) -> None:
    """As docs/webhooks.md shows it: uvicorn's own signal ends it, after its message is settled."""
    (shown,) = re.findall(r"<!-- a consumer in a lifespan -->\n```python\n(.*?)```", WEBHOOKS, re.DOTALL)
    (tmp_path / "app.py").write_text(f"import consuming\nconsumer = consuming.aio_pika\n{shown}", encoding="utf-8")
    uvicorn = sys.executable, "-m", "uvicorn", "--app-dir", str(tmp_path), "--port", "0", "app:app"
    consumer.pay((1, "held"))
    with contextlib.closing(Process(consumer, tmp_path, *uvicorn)) as process:
        with process.held():
            process.signal(signal.SIGTERM)
        process.end()
        assert "Finished server process" in process.log
        assert "Traceback" not in process.log
    assert consumer.applied == ({"held": 1}, 1)
    assert consumer.queue.left() == 0


HOOK = """
import consuming
import payments
from projector_dedup.http.starlette import webhook_endpoint
from projector_dedup.http.webhook import Provider

dispatcher = payments.async_dispatcher(consuming.URL)[0]
consumer = consuming.OURS["aio-pika"](dispatcher)
{lifespan}
provider = Provider("shop", lambda body, headers: True, id="X-Id", type="X-Type")
app.add_route("/hook", webhook_endpoint(dispatcher, provider), methods=["POST"])
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("consumer", ["aio-pika"], indirect=True)
def test_a_webhook_and_a_consumer_in_one_application(consumer: Adapter, tmp_path: Path) -> None:
    """They share a dispatcher and an event loop; a message that comes both ways is applied once."""
    (shown,) = re.findall(r"<!-- a consumer in a lifespan -->\n```python\n(.*?)```", WEBHOOKS, re.DOTALL)
    (tmp_path / "app.py").write_text(HOOK.replace("{lifespan}", shown), encoding="utf-8")
    port, sent = free_port(), range(20)
    uvicorn = sys.executable, "-m", "uvicorn", "--app-dir", str(tmp_path), "--port", str(port), "app:app"
    with contextlib.closing(Process(consumer, tmp_path, *uvicorn)) as process:
        wait_for(lambda: "Application startup complete" in process.log, "the server", 60)
        consumer.pay(*((number, "both") for number in sent))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", verify=False) as client:
            for number in sent:
                headers = {"X-Id": f"p{number}", "X-Type": "payment"}
                answer = client.post("/hook", content=payments.payment(number, "both"), headers=headers)
                assert answer.json()["outcome"] in ("applied", "duplicate")
        wait_for(consumer.settled({"both": len(sent)}), "each payment once")
        process.signal(signal.SIGTERM)
        process.end()
        assert "Traceback" not in process.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_handler_of_an_application_is_left_alone(number: signal.Signals) -> None:
    """As uvicorn's is; that of Python is there again afterwards, and signals reach all consumers meanwhile."""
    stopped: list[str] = []
    came: list[int] = []
    usual = signal.getsignal(number)
    with draining(lambda: stopped.append("first")):
        with draining(lambda: stopped.append("second")):
            signal.raise_signal(number)
        assert stopped == ["first", "second"]
        signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):  # who insists
            signal.raise_signal(number)
    assert signal.getsignal(number) is usual
    before = signal.signal(number, lambda given, _frame: came.append(given))
    try:
        with draining(lambda: stopped.append("never")):
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)
    assert (came, "never" in stopped) == ([number], False)
