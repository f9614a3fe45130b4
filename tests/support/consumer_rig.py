"""Flights through a real broker to two processes of a consumer, killed again and again: its last test.

`prove` publishes in portions, some messages twice, some before their time, some that are poison and some that are
garbage. In the end the read model must be what the data file adds up to, and the dead letters what was not applied.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sqlalchemy import create_engine, func, select, text
from sqlalchemy.orm import Session

from databases import Database
from flights import Airline, Base, Event, events, prepare

HERE = Path(__file__).parent
PROCESSES = 2
KILLS = 2
FLIGHTS = 330
POISON = 5  # flights at least of the airline that is not registered
MAX_DELAY = 5  # seconds: a message that came before its time four times, kills included, would wait for 300
SETTLING = 10  # seconds for copies that a consumer still holds: RabbitMQ does not tell of them, Celery's may wait for 5
WINDOW = 20  # messages that one process has in flight at most


@dataclass(frozen=True)
class Sent:
    """A message as it is published: its id and its type beside the body, where it has them, and the body."""

    id: str | None
    body: bytes
    type: str | None = None


class Broker(Protocol):
    """The broker of a consumer, from outside."""

    def publish(self, messages: Sequence[Sent]) -> None:
        """Publish, and return when the broker has it all."""

    def dead(self) -> list[Sent]:
        """The dead letters that are there, which stay there."""

    def letters(self) -> dict[bytes, str]:
        """The body of each dead letter, and why it is one."""

    def replay(self) -> int:
        """Publish the dead letters again, by the library; how many there were."""

    def left(self) -> int:
        """How many messages wait to be delivered; of a stopped consumer, also those that were not acknowledged."""


GARBAGE = (
    Sent("garbage:1", b"{"),
    Sent("garbage:2", b"\xff\xfe"),
    Sent("garbage:3", b"[1, 2]"),
    Sent("garbage:4", b'{"type": 5}'),
    Sent("garbage:5", b'{"type": "flight.sold"}'),
    Sent("garbage:6", b'{"type": "flight.scheduled"}'),
    Sent(None, b'{"type": "flight.scheduled", "carrier": "UA", "flight": "x", "miles": 1}'),
)


class Plan:
    """The messages, in the order in which they are published."""

    def __init__(self) -> None:
        dice = random.Random(20130101)  # repeatable
        known = dict(events(FLIGHTS))
        carriers = Counter(event["carrier"] for event in known.values())
        self.unregistered = min((times, carrier) for carrier, times in carriers.items() if times >= 2 * POISON)[1]
        self.poison = self._of(known, "flight.scheduled", lambda event: event["carrier"] == self.unregistered)
        self.after_the_mend = self._of(known, "flight.departed", lambda event: event["carrier"] == self.unregistered)
        usual = [name for name in known if name not in {each.id for each in (*self.poison, *self.after_the_mend)}]
        self.early = [_sent(name, known[name]) for name in usual if name.startswith("departed")][: 3 * WINDOW]
        rest = [_sent(name, known[name]) for name in usual if name not in {each.id for each in self.early}]
        start = len(self.early) * 2  # their flights are scheduled soon
        first, later = rest[:start], rest[start:]
        anywhere = [*self.poison, *GARBAGE, *dice.sample(rest, len(rest) // 5)]  # a fifth comes twice
        size = (len(later) + len(anywhere)) // KILLS + 1
        # A flight is scheduled so many messages behind its departure, not more: else that waits for minutes in the end.
        places = [number + dice.uniform(0, len(later) / 3) for number in range(len(later))]
        places += [dice.uniform(0, len(later)) for _ in anywhere]
        mixed = [each for _, each in sorted(zip(places, [*later, *anywhere], strict=True), key=lambda pair: pair[0])]
        self.portions = [first, *(mixed[at : at + size] for at in range(0, len(mixed), size))]
        self.applied = len(usual)
        self.applied_after_the_mend = len(known)

    @staticmethod
    def _of(known: Mapping[str, Event], kind: str, wanted: Callable[[Event], bool]) -> list[Sent]:
        return [_sent(name, event) for name, event in known.items() if event["type"] == kind and wanted(event)]

    def true_totals(self, *, mended: bool) -> dict[str, tuple[int, int, int]]:
        """Return flights, departures and miles of each airline, from the file alone."""
        totals: dict[str, tuple[int, int, int]] = {}
        for _, event in events(FLIGHTS):
            if mended or event["carrier"] != self.unregistered:
                flights, departures, miles = totals.get(event["carrier"], (0, 0, 0))
                scheduled = event["type"] == "flight.scheduled"
                add = (1, 0, event["miles"]) if scheduled else (0, 1, 0)
                totals[event["carrier"]] = (flights + add[0], departures + add[1], miles + add[2])
        return totals


class Consumers:
    """The processes of ``flights_consumer.py`` by one client, which consume one queue together."""

    def __init__(self, client: str, database: Database, drivername: str, environment: Mapping[str, str]) -> None:
        self.engine = create_engine(database.url())
        self._client, self._url, self._environment = client, database.url(drivername), environment
        self._names = [f"consumer-{number}-0" for number in range(PROCESSES)]
        self._processes = [self._start(name) for name in self._names]
        self.killed = 0

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        url = self._url.update_query_dict({"application_name": name}).render_as_string(hide_password=False)
        environment = {**os.environ, **self._environment, "FLIGHTS_DATABASE_URL": url, "MAX_DELAY": str(MAX_DELAY)}
        return subprocess.Popen([sys.executable, "flights_consumer.py", self._client], cwd=HERE, env=environment)

    def works(self, number: int) -> bool:
        """True if a process has had a message since it was started: its connection is there."""
        assert self._processes[number].poll() is None, "a consumer has ended by itself"
        with self.engine.connect() as connection:
            name = {"name": self._names[number]}
            return bool(
                connection.scalar(text("SELECT count(*) FROM pg_stat_activity WHERE application_name = :name"), name)
            )

    def kill(self, number: int) -> None:
        """Kill a process, which can do nothing about it, and start another in its place."""
        process = self._processes[number]
        assert process.poll() is None
        process.kill()
        assert process.wait() == -signal.SIGKILL
        self.killed += 1
        self._names[number] = f"consumer-{number}-{self.killed}"
        self._processes[number] = self._start(self._names[number])

    def stop(self) -> list[int]:
        """Ask each process to stop; return their exit codes."""
        for process in self._processes:
            process.terminate()
        return [process.wait() for process in self._processes]

    def applied(self) -> int:
        """How many messages are marked as applied."""
        with self.engine.connect() as connection:
            return connection.scalar(select(func.count()).select_from(Base.metadata.tables["processed_message"])) or 0

    def totals(self) -> dict[str, tuple[int, int, int]]:
        """The read model: flights, departures and miles of each airline that has any."""
        with Session(self.engine) as session:
            rows = session.scalars(select(Airline).where(Airline.scheduled > 0))
            return {row.carrier: (row.scheduled, row.departed, row.miles) for row in rows}

    def close(self) -> None:
        """Kill whatever still runs."""
        for process in self._processes:
            process.kill()
            process.wait()
        self.engine.dispose()


@contextlib.contextmanager
def consumers(
    client: str, database: Database, drivername: str, environment: Mapping[str, str], plan: Plan
) -> Iterator[Consumers]:
    """The processes of a consumer, on a database with its tables; one airline is not registered."""
    engine = create_engine(database.url())
    prepare(engine, without=plan.unregistered)
    engine.dispose()
    running = Consumers(client, database, drivername, environment)
    try:
        yield running
    finally:
        running.close()


def prove(
    client: str,
    broker: Broker,
    database: Database,
    environment: Mapping[str, str],
    drivername: str = "postgresql+psycopg",
) -> None:
    """Run a consumer as it may go in production, and hold the read model against the data file."""
    plan = Plan()
    with consumers(client, database, drivername, environment, plan) as running:
        broker.publish(plan.early)  # more than all windows hold: whoever kept these in flight would see nothing else
        published = list(plan.early)
        broker.publish(plan.portions[0])
        wait_for(lambda: running.applied() > WINDOW, "anything behind what came before its time")
        published += plan.portions[0]
        for number, portion in enumerate(plan.portions[1:]):
            broker.publish(portion)
            published += portion
            victim = number % PROCESSES
            while not running.works(victim):  # it may still start; redeliveries keep the queue from running dry
                broker.publish(published[-1:])
                time.sleep(0.5)
            broker.publish(random.Random(number).sample(published, WINDOW))
            running.kill(victim)
        assert running.killed >= KILLS - 1
        wait_for(lambda: running.applied() == plan.applied, "every message but the poisoned ones")
        wait_for(lambda: _are(broker.dead(), [*plan.poison, *GARBAGE]), "what is poison or garbage, as dead letters")
        assert running.totals() == plan.true_totals(mended=False)

        with Session(running.engine) as session, session.begin():
            session.add(Airline(carrier=plan.unregistered))  # the mend
        assert broker.replay() >= len(plan.poison) + len(GARBAGE)
        wait_for(lambda: running.applied() == plan.applied + len(plan.poison), "the poisoned messages")
        broker.publish([*plan.after_the_mend, *plan.poison])
        wait_for(lambda: running.applied() == plan.applied_after_the_mend, "every message")
        wait_for(lambda: broker.left() == 0, "every message delivered")
        wait_for(lambda: _are(broker.dead(), GARBAGE), "the garbage, as dead letters again")
        time.sleep(SETTLING)
        assert running.stop() == [0] * PROCESSES
        assert broker.left() == 0  # now also nothing that was delivered and not acknowledged
        assert running.totals() == plan.true_totals(mended=True)
        assert _are(broker.dead(), GARBAGE)


def _are(found: Sequence[Sent], wanted: Sequence[Sent]) -> bool:
    """True if these are the messages, each of them once or more often: a copy may be made twice, around a kill."""
    return {*found} == {*wanted}


def wait_for(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Wait until something is so; the test fails if it does not become so."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


def _sent(name: str, event: Event) -> Sent:
    return Sent(name, json.dumps(event).encode())
