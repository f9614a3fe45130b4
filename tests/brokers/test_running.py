"""A consumer in a process of its own: signals let it settle its message, and `idempotency consume` starts it again."""

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapters import KAFKA, Adapter, adapter
from consumer_rig import wait_for
from databases import Database
from flights_consumer import OURS
from kafka_cluster import KafkaCluster, kafka_cluster

SUPPORT = Path(__file__).parents[1] / "support"
IDEMPOTENCY = str(Path(sys.executable).with_name("idempotency"))
SIGNALS = {client: (signal.SIGTERM, signal.SIGINT)[number % 2] for number, client in enumerate(OURS)}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaCluster]:
    """A cluster for the tests of this file."""
    with kafka_cluster(tmp_path_factory.mktemp("kafka")) as found:
        yield found


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

    def worker(self) -> int:
        """The number of the process that consumes, as its log line has it."""
        return int(re.findall(r" (\d+) INFO projector_dedup\.consumers: consumes ", self.log)[-1])

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
