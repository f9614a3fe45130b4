"""The core of the contract: after any redeliveries and failures, the totals equal the totals of the input.

Each test generates messages, and computes the expected totals from them, never from the deliveries. Then several
consumers deliver each message more than once, in any order. Handlers fail, and worker processes are killed and
replaced. The test delivers a message again until it is acknowledged.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import pytest
from sqlalchemy.orm import Session

from kit import PATIENCE, Added, Broken, Harness, Subject, add, until_acknowledged
from projector_dedup.errors import BatchFailed, DeliveryFailed, RetriesExhaustedError
from projector_dedup.message import Message
from projector_dedup.outcome import Outcome

Messages = dict[str, Added]
Death = Literal["before the write", "after the write", "after the commit"]
DEATHS: tuple[Death, ...] = ("before the write", "after the write", "after the commit")


def generate(seed: int, number: int) -> Messages:
    """Return ``number`` messages that update few rows and have similar ids. A ``seed`` always gives the same ones."""
    dice = random.Random(seed)  # repeatable
    return {
        f"{dice.choice('aA')}{index} ": Added(tuple(dice.sample("abcdef", dice.randint(1, 2))), dice.randint(1, 999))
        for index in range(number)
    }


def totals_of(messages: Messages) -> Counter[str]:
    """Return the totals of the input."""
    totals: Counter[str] = Counter()
    for message in messages.values():
        totals.update(dict.fromkeys(message.keys, message.amount))
    return totals


def redelivered(messages: Messages, dice: random.Random) -> list[tuple[str, Added]]:
    """Return each message one to three times, in random order."""
    stream = [item for item in messages.items() for _ in range(dice.randint(1, 3))]
    dice.shuffle(stream)
    return stream


class ConvergenceContract:
    """I1, I2, I3 and I6 together: threads deliver the same messages while handlers fail."""

    @pytest.mark.parametrize("seed", [1, 2])
    def test_threads_converge(self, harness: Harness, seed: int) -> None:
        """The totals are exact if six threads deliver duplicated and reordered messages, and handlers fail."""
        messages, dice = generate(seed, 30), random.Random(seed)
        lock = threading.Lock()

        def failing(happened: Added, session: Session) -> None:
            with lock:
                early, late = dice.random() < 0.1, dice.random() < 0.2
            if early:
                raise Broken
            add(happened, session)
            if late:
                session.flush()
                raise Broken

        settings = harness.subject.exact
        dispatcher = harness.dispatcher(
            harness.handler(failing, "one", **settings), harness.handler(failing, "two", **settings)
        )
        stream = redelivered(messages, dice)

        def consume() -> None:
            while stream:
                message_id, happened = stream.pop()
                until_acknowledged(partial(harness.deliver, dispatcher, happened, message_id), DeliveryFailed)

        for consumer in [harness.start(consume) for _ in range(6)]:
            consumer.result()
        assert harness.totals() == {key: 2 * amount for key, amount in totals_of(messages).items()}
        assert harness.markers() == sorted((each, name) for each in messages for name in ("one", "two"))


class BatchRaceContract:
    """``deliver_batch`` in several threads that deliver the same messages."""

    def test_batches_that_race_converge(self, harness: Harness) -> None:
        """The totals are exact if threads deliver the same messages in random order, in batches of random size."""
        messages = generate(5, 60)

        def consume(seed: int) -> None:
            barrier.wait()
            dice = random.Random(seed)
            stream: list[Any] = [Message(*item) for item in redelivered(messages, dice)]
            while stream:
                size = dice.randint(1, 30)
                batch, stream = stream[:size], stream[size:]
                try:
                    harness.run(dispatcher.deliver_batch, batch)
                except BatchFailed as failed:
                    pairs = zip(batch, failed.deliveries, strict=True)
                    stream += [message for message, delivery in pairs if delivery.outcome is Outcome.FAILED]

        dispatcher = harness.dispatcher(harness.handler(**harness.subject.exact))
        barrier = threading.Barrier(3)
        consumers = [harness.start(consume, seed) for seed in range(3)]
        for consumer in consumers:
            consumer.result()
        assert harness.totals() == totals_of(messages)
        assert harness.markers() == sorted((message_id, "totals") for message_id in messages)


class KilledContract:
    """I1, I2, I3 and I6 together: processes deliver the same messages, and some are killed."""

    def test_processes_converge_though_they_are_killed(self, harness: Harness) -> None:
        """The totals are exact if SIGKILL ends workers before the write, after it, and after the commit."""
        messages = generate(3, 30)
        stream = redelivered(messages, random.Random(3))
        broker = Broker(harness.subject, stream, dict(zip((5, 15, 25), DEATHS, strict=True)))
        broker.run(workers=3)
        assert broker.killed == len(DEATHS)
        assert harness.totals() == totals_of(messages)
        assert harness.markers() == sorted((message_id, "totals") for message_id in messages)


@dataclass(frozen=True)
class Task:
    """One delivery to a worker. ``death`` is the step at which the worker kills itself, or None."""

    message_id: str
    happened: Added
    death: Death | None = None


class Broker:
    """Gives deliveries to worker processes, and delivers each unacknowledged message again."""

    def __init__(self, subject: Subject, stream: list[tuple[str, Added]], deaths: dict[int, Death]) -> None:
        self.killed = 0
        self._subject = subject
        self._todo = [Task(*item, deaths.get(index)) for index, item in enumerate(stream)]
        # A fork server copies no threads or connections, as spawn does, and imports everything once. Windows has none.
        methods = multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        self._context.set_forkserver_preload([__name__])
        self._processes: dict[Connection, BaseProcess] = {}
        self._given: dict[Connection, Task] = {}

    def run(self, workers: int) -> None:
        """Deliver with ``workers`` processes until every message is acknowledged."""
        try:
            for _ in range(workers):
                self._start_worker()
            while self._todo or self._given:
                for line in self._processes.keys() - self._given.keys():
                    if self._todo:
                        self._given[line] = self._todo.pop()
                        line.send(self._given[line])
                ready = wait(list(self._given), timeout=PATIENCE)
                assert ready, "the workers are stuck"
                for line in set(self._given).intersection(ready):
                    self._receive(line)
        finally:
            for line, process in self._processes.items():
                line.close()  # a worker ends when its pipe is closed
                process.join()

    def _start_worker(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=work, args=(self._subject, theirs), daemon=True)
        process.start()
        theirs.close()
        self._processes[ours] = process

    def _receive(self, line: Connection) -> None:
        task = self._given.pop(line)
        try:
            acknowledged = line.recv()
        except EOFError:
            process = self._processes.pop(line)
            process.join()
            assert process.exitcode == -signal.SIGKILL, f"a worker ended by itself, with {process.exitcode}"
            self.killed += 1
            self._start_worker()
            acknowledged = False
        if not acknowledged:
            self._todo.insert(random.randint(0, len(self._todo)), Task(task.message_id, task.happened))


def work(subject: Subject, line: Connection) -> None:
    """Deliver and acknowledge each task, in a worker process. Kill the process at the step that the task names."""
    dying: list[Death] = []

    def body(happened: Added, session: Session) -> None:
        if "before the write" in dying:
            os.kill(os.getpid(), signal.SIGKILL)
        add(happened, session)
        session.flush()
        if "after the write" in dying:
            os.kill(os.getpid(), signal.SIGKILL)

    with Harness(subject) as harness:
        dispatcher = harness.dispatcher(harness.handler(body, **harness.subject.exact))
        for task in _tasks(line):
            dying[:] = [task.death] if task.death else []
            try:
                harness.deliver(dispatcher, task.happened, task.message_id)
                acknowledged = True
            except RetriesExhaustedError:
                acknowledged = False
            if task.death:
                os.kill(os.getpid(), signal.SIGKILL)
            line.send(acknowledged)


def _tasks(line: Connection) -> Iterator[Task]:
    try:
        while True:
            yield line.recv()
    except EOFError:
        return
