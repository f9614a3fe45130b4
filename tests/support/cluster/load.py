"""A broker and its workers: messages come more than once, until each was acknowledged; and what came of it."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.orm import Session

from projector_dedup import BatchFailed, DeliveryFailed, Outcome, ProjectorDedupError
from projector_dedup.testing.convergence import Messages, totals_of
from projector_dedup.testing.kit import Added, Harness, add

PATIENCE = 180.0  # seconds for anything that must happen
REDELIVERED = 0.3  # the share of messages that the broker sends twice, acknowledged or not
FAILING = 0.1  # the share of runs in which the handler fails after it has written

Deliver = Callable[[str, Added], Outcome]


class Broken(Exception):  # noqa: N818  # a failure that a handler has on purpose
    """The handler failed, and would not the next time."""


NOT_ACKNOWLEDGED = (ProjectorDedupError, DeliveryFailed, BatchFailed, Broken)


class Broker:
    """Messages that wait, in any order; what was not acknowledged waits again."""

    def __init__(self, messages: Messages, seed: int, *, redelivered: float = REDELIVERED) -> None:
        self.messages = messages
        self.acknowledged: set[str] = set()
        self.outcomes: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        dice = random.Random(seed)
        stream = [*messages, *dice.sample(sorted(messages), round(len(messages) * redelivered))]
        dice.shuffle(stream)
        self._waiting = deque(stream)
        self._in_flight = 0
        self._changed = threading.Condition()

    def take(self) -> str | None:
        """Return a message to deliver, or None when all are acknowledged."""
        with self._changed:
            while not self._waiting and self._in_flight:
                self._changed.wait(0.1)
            if not self._waiting:
                return None
            self._in_flight += 1
            return self._waiting.popleft()

    def acknowledge(self, message_id: str, outcome: Outcome) -> None:
        """Forget a delivery that returned."""
        with self._changed:
            self._in_flight -= 1
            self.acknowledged.add(message_id)
            self.outcomes[outcome.name] += 1
            self._changed.notify_all()

    def give_back(self, message_id: str, error: Exception) -> None:
        """Put a message that raised behind the others."""
        with self._changed:
            self._in_flight -= 1
            self.errors[type(error).__name__] += 1
            self._waiting.append(message_id)
            self._changed.notify_all()

    def send_again(self, message_ids: list[str]) -> None:
        """Send messages once more, whether or not they were acknowledged."""
        with self._changed:
            self._waiting.extend(message_ids)

    def wait_for(self, acknowledged: int) -> None:
        """Return when so many messages are acknowledged."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.acknowledged) >= acknowledged, PATIENCE), "too few came"

    @property
    def seen(self) -> set[str]:
        """The messages that are acknowledged now."""
        with self._changed:
            return set(self.acknowledged)


@contextlib.contextmanager
def working(broker: Broker, workers: list[Deliver]) -> Iterator[None]:
    """Deliver by one thread for each of ``workers`` while the block runs, and then until all is acknowledged.

    If the block fails, the workers stop after the message that each has.
    """
    stopped = threading.Event()

    def work(deliver: Deliver) -> None:
        while not stopped.is_set() and (message_id := broker.take()) is not None:
            try:
                outcome = deliver(message_id, broker.messages[message_id])
            except NOT_ACKNOWLEDGED as error:
                broker.give_back(message_id, error)
                time.sleep(0.05)
            except BaseException as error:
                broker.give_back(message_id, RuntimeError(repr(error)))
                raise
            else:
                broker.acknowledge(message_id, outcome)

    failed: list[BaseException] = []

    def run(deliver: Deliver) -> None:
        try:
            work(deliver)
        except BaseException as error:  # noqa: BLE001  # raised below, in the thread that waits
            failed.append(error)

    # Daemons: where the block fails, one may wait for a server that is only stopped after that.
    threads = [threading.Thread(target=run, args=(deliver,), daemon=True) for deliver in workers]
    for thread in threads:
        thread.start()
    try:
        yield
    except BaseException:
        stopped.set()
        raise
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    stopped.set()
    if failed:
        raise failed[0]
    assert not any(thread.is_alive() for thread in threads), "workers do not come to an end"


class Handler:
    """Adds to totals by ordinary ORM code, counts its runs, and fails in some of them after it has written.

    ``settings`` are those of `@projector` and `@on`.
    """

    def __init__(
        self, seed: int, failing: float = FAILING, write: Callable[[Added, Session], None] = add, **settings: Any
    ) -> None:
        self.runs = 0
        self._dice = random.Random(seed)
        self._failing = failing
        self._write = write
        self._settings = settings
        self._lock = threading.Lock()

    def __call__(self, happened: Added, session: Session) -> None:
        """Write, and perhaps fail."""
        with self._lock:
            self.runs += 1
            fails = self._dice.random() < self._failing
        self._write(happened, session)
        if fails:
            session.flush()
            raise Broken

    def through(self, harness: Harness) -> Deliver:
        """Return what delivers to this handler through the engine of ``harness``."""
        dispatcher = harness.dispatcher(harness.handler(self, **self._settings))

        def deliver(message_id: str, happened: Added) -> Outcome:
            return harness.deliver(dispatcher, happened, message_id).outcome

        return deliver


@dataclass
class Ran:
    """One run: what was done, and what came of it."""

    name: str
    fault: str
    messages: int
    broker: Broker
    runs: int
    seconds: float
    found: dict[str, dict[str, int]]
    """The totals, by server."""
    acknowledged: int = 0
    """Messages that were acknowledged when a server was killed."""
    lost: int = 0
    """Messages of those that are missing on the server that goes on."""
    must_lose: bool = False
    """True if the run is there to show a loss."""
    remarks: list[str] = field(default_factory=list)
    version: str = ""
    """The version of the server."""

    @property
    def expected(self) -> dict[str, int]:
        """The true totals: a sum over the input."""
        return dict(totals_of(self.broker.messages))

    @property
    def exact(self) -> bool:
        """True if every server has the true totals in the end."""
        return all(totals == self.expected for totals in self.found.values())

    @property
    def as_promised(self) -> bool:
        """True if the totals are exact, none applied twice, and messages lost only where the run is to show that."""
        applied_once = self.broker.outcomes["APPLIED"] <= self.messages + self.lost
        return self.exact and bool(self.lost) is self.must_lose and applied_once
