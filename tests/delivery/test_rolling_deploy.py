"""A projector is renamed while it runs: processes of the old and of the new code consume one stream, and are killed."""

import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from databases import Database
from projector_dedup import configure_sqlite
from projector_dedup.maintenance.rows import Renamed, rename
from projector_dedup.testing.convergence import DEATHS, Messages, Task, generate, redelivered, totals_of
from projector_dedup.testing.kit import Harness, Subject

OLD, NEW = "billing.Totals.add", "accounts.AccountTotals.book"

CODE = {
    "1": ("billing.py", "idempotent=True", "Totals", "Added", "add"),
    "2": ("accounts.py", "idempotent=True", "AccountTotals", 'Added, formerly=["billing.Totals.add"]', "book"),
    "3": ("accounts.py", "idempotent=True", "AccountTotals", "Added", "book"),
}
"""The versions: before the rename, with both names, and when the old one is forgotten."""

PROJECTOR = """
from worker import die
from projector_dedup import on, projector
from projector_dedup.testing.kit import Added, add


@projector({settings})
class {cls}:
    @on({event})
    def {method}(self, event, session):
        die("before the write")
        add(event, session)
        session.flush()
        die("after the write")


PROJECTOR = {cls}
"""

WORKER = """
import json, os, signal, sys
from importlib import import_module

from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

from projector_dedup import Dispatcher, RetriesExhaustedError, configure_sqlite
from projector_dedup.testing.kit import Added

task = {}


def die(where):
    if where is not None and task.get("death") == where:
        os.kill(os.getpid(), signal.SIGKILL)


def main(url, module):
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":
        configure_sqlite(engine)
    dispatcher = Dispatcher(sessionmaker(engine), import_module(module).PROJECTOR())
    for line in sys.stdin:
        task.update(json.loads(line))
        try:
            delivery = dispatcher.deliver(Added(tuple(task["keys"]), task["amount"]), message_id=task["message_id"])
        except RetriesExhaustedError:
            print("again", flush=True)
            continue
        die(task.get("death"))  # after the commit; or it was a duplicate, and never came to the write
        print(delivery.outcome.value, flush=True)


if __name__ == "__main__":
    sys.modules["worker"] = sys.modules["__main__"]
    main(*sys.argv[1:])
"""


@pytest.fixture
def harness(database: Database) -> Iterator[Harness]:
    """The tables, on each engine."""
    prepare = configure_sqlite if database.engine == "sqlite" else None
    with Harness(Subject(database.url(), prepare=prepare)) as harness:
        harness.create_tables()
        yield harness


class Deployment:
    """Worker processes of chosen versions, and what they said."""

    def __init__(self, folder: Path, harness: Harness) -> None:
        self.outcomes: list[str] = []
        self.killed = 0
        self._folder = folder
        self._url = harness.subject.url.render_as_string(hide_password=False)
        for version, (file, settings, cls, event, method) in CODE.items():
            (folder / version).mkdir()
            (folder / version / "worker.py").write_text(WORKER)
            code = PROJECTOR.format(settings=settings, cls=cls, event=event, method=method)
            (folder / version / file).write_text(code)

    def consume(self, stream: Sequence[Task], *slots: str) -> None:
        """Deliver until everything is acknowledged; each of ``slots`` is a version, and the one after the next kill."""
        todo: queue.Queue[Task] = queue.Queue()
        for task in stream:
            todo.put(task)
        consumers = [threading.Thread(target=self._consume, args=(todo, slot), daemon=True) for slot in slots]
        for consumer in consumers:
            consumer.start()
        todo.join()
        for _ in consumers:
            todo.put(Task("", generate(0, 1).popitem()[1]))  # no more
        for consumer in consumers:
            consumer.join()

    def _consume(self, todo: "queue.Queue[Task]", versions: str) -> None:
        worker, turn = self._hire(versions[0]), 0
        while (task := todo.get()).message_id:
            happened = task.happened
            order = {"message_id": task.message_id, "keys": happened.keys, "amount": happened.amount}
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(json.dumps({**order, "death": task.death}) + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline().strip()
            if not answer:
                worker.communicate()
                self.killed += worker.returncode == -signal.SIGKILL
                turn += 1
                worker = self._hire(versions[turn % len(versions)])
            if answer in ("applied", "duplicate"):
                self.outcomes.append(answer)
            else:
                todo.put(Task(task.message_id, happened))  # not acknowledged: it comes again
            todo.task_done()
        worker.communicate()

    def _hire(self, version: str) -> "subprocess.Popen[str]":
        folder = self._folder / version
        module = CODE[version][0].removesuffix(".py")
        return subprocess.Popen(
            [sys.executable, str(folder / "worker.py"), self._url, module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(folder)},
        )


def deliveries(messages: Messages, seed: int, *, deaths: int = 0) -> list[Task]:
    """Everything one to three times in any order; in some, each its message's first, the worker dies."""
    stream = redelivered(messages, random.Random(seed))
    first = sorted({message_id: place for place, (message_id, _) in reversed([*enumerate(stream)])}.values())
    dying = {first[-10 * number - 1]: DEATHS[number % len(DEATHS)] for number in range(deaths)}
    return [Task(*item, dying.get(place)) for place, item in enumerate(stream)]


def test_a_projector_is_renamed_while_it_runs(harness: Harness, tmp_path: Path) -> None:
    """Old code, both at once with a deploy that is rolled back, new code, and new code without the old name."""
    messages = generate(5, 60)
    earlier = dict(list(messages.items())[:20])
    deployment = Deployment(tmp_path, harness)

    deployment.consume(deliveries(earlier, 1), "1")
    assert harness.markers() == sorted((each, OLD) for each in earlier)

    # A worker of the old code that dies comes back with the new code, and the reverse.
    deployment.consume(deliveries(messages, 2, deaths=6), "12", "12", "21", "21")
    assert deployment.killed == 6
    assert harness.totals() == totals_of(messages)
    assert {handler for _, handler in harness.markers()} == {OLD, NEW}  # both versions have worked

    deployment.consume(deliveries(messages, 3), "2")
    twins = sum(handler == NEW for _, handler in harness.markers())
    assert rename(harness.engine, OLD, NEW, batch_size=7) == Renamed(len(messages) - twins, twins)

    deployment.outcomes.clear()
    deployment.consume(deliveries(messages, 4), "3")
    assert set(deployment.outcomes) == {"duplicate"}
    assert harness.totals() == totals_of(messages)
    assert harness.markers() == sorted((each, name) for each in messages for name in (OLD, NEW))
