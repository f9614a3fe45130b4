"""`make cluster`: servers that replicate, on this machine; faults under load; totals that come from the input.

Each message adds an amount to one or two of six rows, by `session.get` and `+=`. Some messages are sent twice, and the
handler fails on purpose (`Broken`) in some of its runs, after it has written. The command prints a row for each run:
what `deliver` returned, the deliveries that raised and came again, the runs of the handler, whether the totals of
every server are those of the input, and how many messages were acknowledged and then lost in a failover.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import URL, NullPool, Row, Select, create_engine, delete, make_url, select, text
from sqlalchemy.dialects.mysql import insert
from sqlalchemy.orm import Session

from convergence import Messages, generate, totals_of
from databases import until
from galera import GaleraCluster, GaleraUnavailableError, galera_cluster
from kit import Added, Harness, Subject, Total, add
from mysql_group import MySQLGroup, mysql_group
from projector_dedup import Outcome
from projector_dedup.errors import BatchFailed, DeliveryFailed, ProjectorDedupError, RefusedError
from projector_dedup.tables import default_tables
from servers import NotSetUpError
from standby import Primary, either, standby_of

PATIENCE = 180.0  # seconds for anything that must happen
REDELIVERED = 0.3  # the share of messages that the broker sends twice, acknowledged or not
FAILING = 0.1  # the share of runs in which the handler fails after it has written
COLUMNS = ("run", "messages", "applied", "duplicates", "came again", "handler runs", "totals", "lost", "s", "verdict")

Deliver = Callable[[str, Added], Outcome]


class Broken(Exception):  # noqa: N818  # a failure that a handler has on purpose
    """The handler failed, and would not the next time."""


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
        self._waiting, self._in_flight, self._changed = deque(stream), 0, threading.Condition()

    def work(self, deliver: Deliver) -> None:
        """Deliver messages until all are acknowledged."""
        while (message_id := self._take()) is not None:
            try:
                outcome = deliver(message_id, self.messages[message_id])
            except Exception as error:
                self._settle(message_id, error)
                passing = isinstance(error, (ProjectorDedupError, DeliveryFailed, BatchFailed, Broken))
                if not passing or isinstance(error, RefusedError):  # no cluster needs another configuration
                    raise
                time.sleep(0.05)
            else:
                self._settle(message_id, outcome)

    def _take(self) -> str | None:
        with self._changed:
            while not self._waiting and self._in_flight:
                self._changed.wait(0.1)
            if not self._waiting:
                return None
            self._in_flight += 1
            return self._waiting.popleft()

    def _settle(self, message_id: str, result: Outcome | Exception) -> None:
        with self._changed:
            self._in_flight -= 1
            if isinstance(result, Exception):
                self.errors[type(result).__name__] += 1
                self._waiting.append(message_id)
            else:
                self.acknowledged.add(message_id)
                self.outcomes[result.name] += 1
            self._changed.notify_all()

    def send_again(self, message_ids: set[str]) -> None:
        """Send messages once more, whether or not they were acknowledged."""
        with self._changed:
            self._waiting.extend(sorted(message_ids))

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
def working(broker: Broker, workers: Sequence[Deliver]) -> Iterator[None]:
    """Deliver by one thread for each of ``workers`` while the block runs, and then until all is acknowledged."""
    with ThreadPoolExecutor(len(workers)) as threads:
        running = [threads.submit(broker.work, deliver) for deliver in workers]
        yield
        for each in running:
            each.result(PATIENCE)


class Handler:
    """Adds to totals by ordinary ORM code, counts its runs, and fails in some of them after it has written."""

    def __init__(
        self, seed: int, failing: float = FAILING, write: Callable[[Added, Session], None] = add, **settings: Any
    ) -> None:
        self.runs, self._dice, self._lock = 0, random.Random(seed), threading.Lock()
        self._failing, self._write, self._settings = failing, write, settings

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
        return lambda message_id, happened: harness.deliver(dispatcher, happened, message_id).outcome


@dataclass
class Ran:
    """One run: what was done, and what came of it."""

    name: str
    broker: Broker
    runs: int
    seconds: float
    found: dict[str, dict[str, int]]  # the totals, by server
    acknowledged: int = 0  # messages that were acknowledged when a server was killed
    lost: int = 0  # messages of those that are missing on the server that goes on
    must_lose: bool = False  # the run is there to show a loss

    @property
    def exact(self) -> bool:
        """True if every server has the true totals in the end: a sum over the input."""
        return all(totals == totals_of(self.broker.messages) for totals in self.found.values())

    @property
    def as_promised(self) -> bool:
        """True if the totals are exact, none applied twice, and messages lost only where the run is to show that."""
        applied_once = self.broker.outcomes["APPLIED"] <= len(self.broker.messages) + self.lost
        return self.exact and bool(self.lost) is self.must_lose and applied_once

    @property
    def cells(self) -> tuple[object, ...]:
        """What is told of the run, in the order of COLUMNS."""
        errors = ", ".join(f"{count} {name}" for name, count in sorted(self.broker.errors.items())) or 0
        return (
            *(self.name, len(self.broker.messages), self.broker.outcomes["APPLIED"], self.broker.outcomes["DUPLICATE"]),
            *(errors, self.runs, "exact" if self.exact else f"WRONG: {self.found}"),
            *(f"{self.lost} of {self.acknowledged}" if self.acknowledged else "-", round(self.seconds)),
            "as promised" if self.as_promised else "NOT AS PROMISED",
        )


# PostgreSQL: a primary that is killed, and its standby that is promoted ---------------------------------------------

DRIVERS = ("psycopg", "psycopg", "psycopg2", "psycopg2", "asyncpg", "asyncpg")  # one worker each
WAITING = "select 1 from pg_stat_activity where wait_event = 'SyncRep' or wait_event_type = 'Lock'"
STREAMING = "select 1 from pg_stat_replication where state = 'streaming'"


def postgresql(seed: int, number: int) -> Iterator[Ran]:
    """Run the same load and the same failover three times."""
    yield _fail_over("synchronous standby, primary killed", seed, number, synchronous=True, cut=False)
    yield _fail_over("synchronous standby cut off, primary killed", seed, number, synchronous=True, cut=True)
    yield _fail_over("asynchronous standby cut off, primary killed", seed, number, synchronous=False, cut=True)


def _fail_over(name: str, seed: int, number: int, *, synchronous: bool, cut: bool) -> Ran:
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="primary-", ignore_cleanup_errors=True))
        primary = stack.enter_context(Primary(Path(folder) / "data"))
        with Harness(Subject(make_url(primary.url).set(drivername="postgresql+psycopg"))) as owner:
            owner.create_tables()
        standby = stack.enter_context(standby_of(primary))
        if synchronous:
            primary.wait_for(standby)
        until(lambda: primary.execute(STREAMING), PATIENCE)
        broker, handler = Broker(generate(seed, number), seed), Handler(seed)
        new = stack.enter_context(Harness(Subject(make_url(standby.url).set(drivername="postgresql+psycopg"))))
        workers = [
            handler.through(stack.enter_context(Harness(Subject(either(primary, standby, driver=driver)))))
            for driver in DRIVERS
        ]
        with contextlib.ExitStack() as load:
            load.enter_context(working(broker, workers))
            broker.wait_for(number // 2)
            if cut:
                standby.fall_behind()
            if cut and synchronous:
                until(lambda: len(primary.execute(WAITING)) == len(workers), PATIENCE)
            if not synchronous:
                load.close()  # everything is delivered to the primary alone, and acknowledged
            primary.kill()
            acknowledged = broker.seen
            standby.take_over()
            lost = acknowledged - {message_id for message_id, _ in new.markers()}
            broker.send_again(broker.seen)  # what the broker still has, or an archive
        with working(broker, workers):
            pass
        totals = {"new primary": new.totals()}
    seconds = time.monotonic() - began
    return Ran(name, broker, handler.runs, seconds, totals, len(acknowledged), len(lost), must_lose=not synchronous)


# Galera: three nodes, each of which takes writes -------------------------------------------------------------------

WORKERS = 2  # at each node


def galera(seed: int, number: int) -> Iterator[Ran]:
    """Run all of them on one cluster, each with empty tables."""
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(galera_cluster({}, {}, {}))
        nodes = [
            stack.enter_context(Harness(Subject(node.url.set(drivername=f"mariadb+{driver}"))))
            for node, driver in zip(cluster.nodes, ("pymysql", "asyncmy", "pymysql"), strict=True)
        ]
        nodes[0].create_tables()
        messages = generate(seed, number)
        yield _through(cluster, nodes, "several writers, all nodes", messages, Handler(seed))
        hot = {f"hot-{amount}": Added(("a",), amount) for amount in range(1, number // 4 + 1)}
        for where, through in (("all nodes", nodes), ("one node", nodes[:1] * 3)):
            yield _through(cluster, through, f"one hot row, {where}", hot, Handler(seed, 0))
            locked = Handler(seed, 0, read_models=[Total])
            yield _through(cluster, through, f"one hot row, `read_models`, {where}", hot, locked)
            upserts = Handler(seed, 0, _add_by_upsert)
            yield _through(cluster, through, f"one hot row, upserts, {where}", hot, upserts)
        yield _through(cluster, nodes, "several writers, a node killed and back", messages, Handler(seed), kill=True)


def _add_by_upsert(happened: Added, session: Session) -> None:
    for key in sorted(happened.keys):
        row = insert(Total).values(key=key, amount=happened.amount)
        session.execute(row.on_duplicate_key_update(amount=Total.amount + happened.amount))


def _through(
    cluster: GaleraCluster, nodes: list[Harness], name: str, messages: Messages, handler: Handler, *, kill: bool = False
) -> Ran:
    """Deliver through these nodes; ``kill`` kills one at a third of the messages, and brings it back at two thirds."""
    nodes[0].transact(_empty)
    began, broker = time.monotonic(), Broker(messages, seed=1)
    acknowledged, lost = set[str](), set[str]()
    with working(broker, [handler.through(node) for node in nodes for _ in range(WORKERS)]):
        if kill:
            broker.wait_for(len(messages) // 3)
            cluster.nodes[2].kill()
            acknowledged = broker.seen
            lost = acknowledged - _markers(cluster.nodes[0].url, SYNCED)
            broker.wait_for(2 * len(messages) // 3)
            cluster.rejoin(cluster.nodes[2])
    seconds = time.monotonic() - began
    return Ran(name, broker, handler.runs, seconds, _totals(cluster), len(acknowledged), len(lost))


def _empty(session: Session) -> None:
    session.execute(delete(Total))
    session.execute(delete(default_tables.marker))


def _totals(cluster: GaleraCluster) -> dict[str, dict[str, int]]:
    return {node.name: _totals_at(node.url, SYNCED) for node in cluster.nodes}


SYNCED = "SET SESSION wsrep_sync_wait = 1"


def _totals_at(node: URL, synced: str) -> dict[str, int]:
    return {str(key): int(amount) for key, amount in _settled(node, synced, select(Total.key, Total.amount))}


def _markers(node: URL, synced: str) -> set[str]:
    return {str(message_id) for (message_id,) in _settled(node, synced, select(default_tables.marker.c.message_id))}


def _settled(node: URL, synced: str, statement: Select[*tuple[Any, ...]]) -> Sequence[Row[*tuple[Any, ...]]]:
    """Return rows of a node as they are when it has applied everything that the cluster has committed."""
    with create_engine(node, poolclass=NullPool).connect() as connection:
        connection.execute(text(synced))
        connection.commit()
        return connection.execute(statement).all()


# MySQL: a group of three, one of which takes writes -----------------------------------------------------------------

MYSQL_DRIVERS = ("pymysql", "mysqldb", "asyncmy", "aiomysql") * 2  # one worker each
CONSISTENCIES = ("EVENTUAL", "BEFORE_ON_PRIMARY_FAILOVER", "BEFORE", "AFTER")


def mysql(seed: int, number: int) -> Iterator[Ran]:
    """Run three faults on a group at each setting of group_replication_consistency, each with empty tables."""
    for consistency in CONSISTENCIES:
        with mysql_group(3, group_replication_consistency=consistency) as group:
            with Harness(Subject(group.url("pymysql"))) as owner:
                owner.create_tables()
            for name, fault in (("switched", group.switch), ("frozen", group.freeze), ("killed", group.kill)):
                yield _in_group(group, f"group, {consistency}, primary {name}", seed, number, fault)


def _in_group(group: MySQLGroup, name: str, seed: int, number: int, fault: Callable[[], None]) -> Ran:
    """Deliver each message two or three times, and let the primary fail at a third of the messages."""
    synced = "SET SESSION group_replication_consistency = 'BEFORE'"
    broker, handler = Broker(generate(seed, number), seed, redelivered=1.0), Handler(seed)
    with contextlib.ExitStack() as stack:
        owner, *workers = (
            stack.enter_context(Harness(Subject(group.url(driver), prepare=group.follow)))
            for driver in ("pymysql", *MYSQL_DRIVERS)
        )
        owner.transact(_empty)
        began = time.monotonic()
        with working(broker, [handler.through(worker) for worker in workers]):
            broker.wait_for(number // 3)
            fault()
            acknowledged = broker.seen
            lost = acknowledged - _markers(group.url("pymysql"), synced)
            broker.send_again(acknowledged)
        seconds = time.monotonic() - began
    found = {f"port {node.port}": _totals_at(group.url("pymysql", node), synced) for node in group.nodes}
    return Ran(name, broker, handler.runs, seconds, found, len(acknowledged), len(lost))


SERVERS = {"postgresql": postgresql, "galera": galera, "mysql": mysql}


def main() -> int:
    """Print a table in Markdown, row by row; return 0 if everything was as promised."""
    parser = argparse.ArgumentParser(prog="make cluster", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("servers", nargs="?", choices=("all", *SERVERS), default="all")
    parser.add_argument("--messages", type=int, default=1_200, help="in each run (1200)")
    parser.add_argument("--seed", type=int, default=2026, help="of messages, their order and the failures (2026)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # every server is ended, as it is by Ctrl-C
    logging.disable(logging.ERROR)  # a killed server is not news here
    as_promised = True
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for run in [SERVERS[options.servers]] if options.servers in SERVERS else SERVERS.values():
        for ran in run(options.seed, options.messages):
            print(f"| {' | '.join(map(str, ran.cells))} |", flush=True)
            as_promised &= ran.as_promised
    return 0 if as_promised else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (
        KeyboardInterrupt,
        GaleraUnavailableError,
        NotSetUpError,
        ImportError,
        subprocess.CalledProcessError,
    ) as reason:
        sys.exit(f"make cluster: {str(reason) or 'stopped'}")
