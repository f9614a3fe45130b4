"""The programs of the pages run as they are printed there; the names of queues and servers are those of the test."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.exc import ProgrammingError

from adapters import CLIENTS, KAFKA, Adapter, KafkaTopic, adapter
from celery_rig import TASK
from consumer_rig import Sent, wait_for
from databases import Database
from kafka_rig import Kafka

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "consumers"
PROGRAMS = {kind.program: client for client, (kind, _) in CLIENTS.items() if kind.program}
PROGRAMS[KafkaTopic.program] = KAFKA
PAGES = [path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "consumers").glob("*.md")]


class Program:
    """A program of a page, in a folder of its own."""

    def __init__(self, consumer: Adapter, folder: Path) -> None:
        self._consumer, self._folder = consumer, folder
        shown = (EXAMPLES / consumer.program).read_text(encoding="utf-8")
        marked = rf"<!-- publishes for {re.escape(consumer.program)} -->\n```python\n(.*?)```"
        (publish,) = [code for page in PAGES for code in re.findall(marked, page, re.DOTALL)]
        for name, source in ("payments.py", shown), ("publish.py", publish):
            (folder / name).write_text(self._renamed(source), encoding="utf-8")
        self._url = consumer.database.url("postgresql+psycopg").render_as_string(hide_password=False)
        self._processes: list[subprocess.Popen[bytes]] = []

    def _renamed(self, source: str) -> str:
        """Give the queue, the group of Kafka and the task of Celery the names that the test's own have."""
        queue: Any = self._consumer.queue
        own = next((getattr(queue, name) for name in ("queue", "stream", "topic") if hasattr(queue, name)), "")
        source = source.replace('"payments.add"', f'"{TASK}"')
        source = re.sub(r'"payments(\.received|\.>)?"', lambda found: f'"{own}{found[1] or ""}"', source)
        if isinstance(queue, Kafka):
            source = source.replace('"group.id": "totals"', f'"group.id": "{queue.config["group.id"]}"')
        return source

    def run(self, *arguments: str) -> None:
        """Run a program to its end."""
        subprocess.run([sys.executable, *arguments], cwd=self._folder, env=self._environment, check=True)

    def start(self) -> None:
        """Start the consumer."""
        command = [sys.executable, "payments.py"]
        self._processes.append(subprocess.Popen(command, cwd=self._folder, env=self._environment))

    def end(self, by: signal.Signals) -> int:
        """End the consumer; return its exit code."""
        self._processes[-1].send_signal(by)
        return self._processes[-1].wait(60)

    @property
    def _environment(self) -> dict[str, str]:
        servers = self._consumer.settings
        if isinstance(self._consumer.queue, Kafka):
            servers = {"KAFKA": self._consumer.queue.config["bootstrap.servers"]}
        return {**os.environ, **servers, "DATABASE_URL": self._url}

    def totals(self) -> tuple[dict[str, int], int]:
        """The amount of each account, and the number of markers."""
        with contextlib.suppress(ProgrammingError), self._consumer.engine.connect() as connection:
            amounts = connection.execute(text("SELECT account_id, amount FROM totals"))
            return {row.account_id: row.amount for row in amounts}, self._consumer.applied[1]
        return {}, 0

    def close(self) -> None:
        """Kill what still runs."""
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture(params=PROGRAMS)
def consumer(request: pytest.FixtureRequest, postgresql: Database) -> Iterator[Adapter]:
    """A queue of the test's own, with each program in turn."""
    client = PROGRAMS[request.param]
    cluster = request.getfixturevalue("cluster") if client == KAFKA else None
    with adapter(client, postgresql, cluster) as made:
        yield made


@pytest.fixture
def program(consumer: Adapter, tmp_path: Path) -> Iterator[Program]:
    """The program of a page, which was not started."""
    with contextlib.closing(Program(consumer, tmp_path)) as made:
        yield made


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_program_is_exact(consumer: Adapter, program: Program) -> None:
    """Pasted and run, it applies once what its page and others publish twice. Some messages are no payments.

    SIGTERM ends it. `test_every_consumer.py` kills a program of the same client.
    """
    program.run("publish.py")
    if consumer.client == KAFKA:
        program.run("payments.py", "begin")
    program.start()
    wait_for(lambda: program.totals() == ({"alice": 30}, 1), "the payment", 60)
    wait_for(lambda: consumer.queue.left() == 0 or consumer.client.endswith(("nats", "redis")), "the duplicate", 60)
    body, kind = b'{"account_id": "%d", "amount": 1}', "payment.received"
    garbage = [Sent("g1", b"{", kind), Sent("g2", b'{"account_id": "1"}', kind), Sent("g3", body % 1, "payment.lost")]
    payments = [Sent(f"p{number}", body % (number % 3), kind) for number in range(20)]
    consumer.queue.publish([*payments, *garbage, *reversed(payments)])
    exact = ({"alice": 30, "0": 7, "1": 7, "2": 6}, 21)
    wait_for(lambda: program.totals() == exact, "every payment", 200)
    assert program.end(signal.SIGTERM) == 0
    assert program.totals() == exact
