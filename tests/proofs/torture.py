"""`make torture`: worker processes on servers that are killed, too, and totals that come from the input.

Each message adds an amount to an account. The broker sends half of the messages twice, mostly to different workers. A
worker delivers its share in order, and writes the number of each message that it may acknowledge into a log of its
own, which it syncs. After a SIGKILL it goes on behind the last line of its log, as a consumer does. Other workers
handle commands in the same way, and write each answer into their log.

Meanwhile workers are killed, the server is stopped as in a crash, COMMITs are cut on both sides, a pool has fewer
connections than threads, and the database turns read-only for a moment. In the end every total is the sum over the
input, everything that was acknowledged is marked, each command was done once and has one answer, and no session is
left at the server. The command prints a row for each database, and the throughput between the faults.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from sqlalchemy import URL, create_engine, make_url, select, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from command_rig import Order
from cut_proxy import CutProxy
from fault_points import add
from private_mariadb import NotInstalledError, PrivateMariaDB, folder_for_servers
from private_postgres import PrivatePostgres
from projector_dedup import AsyncDispatcher, Dispatcher, Message, on, projector
from projector_dedup.commands import Call, Commands, command
from projector_dedup.outcome import Delivery
from projector_dedup.tables import default_tables
from projector_dedup.verdict import Action, verdict_of
from rig import Total, tables_on

ACCOUNTS = 200
BATCH = 20
WINDOW = 5.0  # seconds of the throughput that is printed
SPARED = "singles"  # the worker that is not killed: its memory and its descriptors are looked at
CUT_EVERY = 40  # messages between two COMMITs that are cut, in the worker that meets them
COLUMNS = (
    *("database", "deliveries", "commands", "SIGKILLs", "crashes", "COMMITs cut", "read-only", "errors", "missing"),
    *("wrong totals", "doubled", "answers that differ", "left open", "MiB", "descriptors", "s", "verdict"),
)
WAYS = ("singles", "a new name", "cut", "few connections", "batches", "asyncio, batches", "commands", "commands, too")
"""What each worker does: deliver one by one, under a new name with the former one declared, and so on."""


def _totals(name: str, *, formerly: Sequence[str] = (), is_async: bool = False) -> object:
    class Totals:
        @on("added")
        def add(self, event: dict[str, Any], session: Session) -> None:
            add(event, session)

    class AsyncTotals:
        @on("added")
        async def add(self, event: dict[str, Any], session: AsyncSession) -> None:
            await session.run_sync(lambda inner: add(event, inner))

    made: object = projector(idempotent=True, name=name, formerly=formerly)(AsyncTotals if is_async else Totals)()
    return made


@command(name="place")
def place(key: str, call: Call) -> int:
    """Place an order."""
    order = Order(note=key, amount=1)
    call.session.add(order)
    call.session.flush()
    return order.number


# The input ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What is sent to whom: numbers of messages for each worker that delivers, keys for each that handles commands."""

    amounts: dict[int, tuple[str, int]]
    streams: dict[str, list[int]]
    deliveries: int
    commands: int

    @classmethod
    def of(cls, seed: int, deliveries: int) -> Plan:
        """Return the same plan for the same seed. A tenth as many commands come as deliveries, each twice."""
        dice = random.Random(seed)
        amounts = {n: (f"a{dice.randrange(ACCOUNTS)}", dice.randint(1, 99)) for n in range(deliveries * 2 // 3)}
        stream = [*amounts, *dice.sample(sorted(amounts), deliveries - len(amounts))]
        keys = [number % max(1, deliveries // 20) for number in range(deliveries // 10)]
        dice.shuffle(stream)
        dice.shuffle(keys)
        of_commands = [way for way in WAYS if way.startswith("commands")]
        others = [way for way in WAYS if way not in of_commands]
        dealt = {way: stream[at :: len(others)] for at, way in enumerate(others)}
        dealt |= {way: keys[at :: len(of_commands)] for at, way in enumerate(of_commands)}
        return cls(amounts, dealt, len(stream), len(keys))

    def message(self, number: int) -> Message:
        """The message of a number."""
        account, amount = self.amounts[number]
        return Message(f"m-{number}", {"account": account, "amount": amount}, type="added")

    def totals(self) -> dict[str, int]:
        """The amount of each account: a sum over the input."""
        found = Counter({f"a{number}": 0 for number in range(ACCOUNTS)})
        for account, amount in self.amounts.values():
            found[account] += amount
        return dict(found)


# A worker -----------------------------------------------------------------------------------------------------------

Deliver = Callable[[Sequence[int]], Sequence[object]]
"""Delivers messages, or handles commands; returns what is known of each, or raises."""


class Log:
    """The lines that a worker has synced: a number, and what is known of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._counted = 0  # bytes and lines
        path.touch()

    def lines(self) -> list[list[str]]:
        """What is there."""
        return [line.split() for line in self._path.read_text().splitlines()]

    def count(self) -> int:
        """Return how many lines there are. It reads only what is new."""
        with self._path.open("rb") as file:
            file.seek(self._seen)
            new = file.read()
        self._seen += len(new)
        self._counted += new.count(b"\n")
        return self._counted

    @contextlib.contextmanager
    def appending(self) -> Iterator[Callable[[Iterable[tuple[int, object]]], None]]:
        """Yield a function that appends lines, and returns when they are on the disk."""
        with self._path.open("ab", buffering=0) as file:

            def append(lines: Iterable[tuple[int, object]]) -> None:
                file.write(b"".join(f"{number} {known}\n".encode() for number, known in lines))
                os.fsync(file.fileno())

            yield append


@dataclass
class Worker:
    """One way to deliver: a process of its own, which is killed and started again."""

    way: str
    url: URL
    plan: Plan
    folder: Path
    pid: int | None = None

    @cached_property
    def log(self) -> Log:
        """What this worker may acknowledge."""
        return Log(self.folder / self.way)

    def start(self) -> None:
        """Fork; the child ends when its share is delivered."""
        self.pid = os.fork()
        if self.pid == 0:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                self._work()
            except BaseException:  # noqa: BLE001  # a copy of the parent must not go on
                traceback.print_exc()
                os._exit(1)
            os._exit(0)

    def has_ended(self) -> bool:
        """True if its share is delivered. Raises ``RuntimeError`` if the worker ended otherwise."""
        if self.pid is not None and (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            self._note_end(ended[1])
        return self.pid is None

    def end(self) -> None:
        """Kill it if it still runs."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def kill(self) -> None:
        """Kill it, and start it again; unless it has just ended by itself."""
        if self.pid is not None:
            os.kill(self.pid, signal.SIGKILL)
            self._note_end(os.waitpid(self.pid, 0)[1])

    def _note_end(self, status: int) -> None:
        self.pid = None
        match os.waitstatus_to_exitcode(status):
            case 0:
                pass
            case code if code == -signal.SIGKILL:
                self.start()
            case code:
                raise RuntimeError(f"the worker '{self.way}' has ended by itself, with {code}")

    def _work(self) -> None:
        stream = self.plan.streams[self.way]
        begin = self.log.count()
        with self.log.appending() as append, self._deliver() as (size, deliver):
            for at in range(begin, len(stream), size):
                numbers = stream[at : at + size]
                append(zip(numbers, self._until_delivered(deliver, numbers), strict=True))
                if self.way == SPARED and at in (len(stream) // 4, len(stream) - 1):
                    self._note_resources()

    def _until_delivered(self, deliver: Deliver, numbers: Sequence[int]) -> Sequence[object]:
        while True:
            try:
                return deliver(numbers)
            except Exception as error:
                verdict = verdict_of(error)
                if verdict.action not in (Action.RETRY_NOW, Action.RETRY_LATER):
                    raise
                self._note("errors", type(error).__name__)
                time.sleep(min(verdict.delay, 0.05))

    def _note_resources(self) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        mebibytes = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
        self._note("resources", f"{mebibytes:.0f} {len(os.listdir('/proc/self/fd'))}")

    def _note(self, name: str, line: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write(f"{line}\n")

    @contextlib.contextmanager
    def _deliver(self) -> Iterator[tuple[int, Deliver]]:
        """Yield how many are delivered together, and by what."""
        message = self.plan.message
        if self.way == "asyncio, batches":
            awaited = AsyncDispatcher(
                async_sessionmaker(create_async_engine(self.url)), _totals("totals", is_async=True)
            )
            with asyncio.Runner() as runner:
                yield BATCH, lambda numbers: outcomes(runner.run(awaited.deliver_batch(map(message, numbers))))
            return
        with self._cutting() as (url, cut):
            few = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 0.3} if self.way == "few connections" else {}
            factory = sessionmaker(create_engine(url, **few))
            renamed = self.way == "a new name"
            dispatcher = Dispatcher(factory, _totals("totals.2", formerly=["totals"]) if renamed else _totals("totals"))
            if self.way.startswith("commands"):
                commands = Commands(factory)
                yield 1, lambda keys: [commands.handle(place, f"k-{n}", key=f"k-{n}").result for n in keys]
            elif self.way == "few connections":
                with ThreadPoolExecutor(4) as threads:
                    yield 4, lambda numbers: outcomes(threads.map(dispatcher.deliver, map(message, numbers)))
            elif self.way == "batches":
                yield BATCH, lambda numbers: outcomes(dispatcher.deliver_batch(map(message, numbers)))
            else:

                def deliver(numbers: Sequence[int]) -> list[str]:
                    cut(numbers[0])
                    return outcomes([dispatcher.deliver(message(numbers[0]))])

                yield 1, deliver

    @contextlib.contextmanager
    def _cutting(self) -> Iterator[tuple[URL, Callable[[int], None]]]:
        """Yield the server's URL, and what to call before each message; one way meets a proxy that cuts COMMITs."""
        if self.way != "cut":
            yield self.url, lambda _: None
            return
        sides: Iterator[Any] = itertools.cycle(("before", "after"))
        met = set[int]()
        with CutProxy(self.url) as proxy:

            def cut(number: int) -> None:
                if number % CUT_EVERY == 0 and number not in met:
                    met.add(number)
                    where = next(sides)
                    self._note("cuts", where)
                    proxy.cut_commit(where)

            yield proxy.through(self.url), cut


def outcomes(deliveries: Iterable[Delivery]) -> list[str]:
    """Return what is written into the log of each delivery."""
    return [delivery.outcome.name for delivery in deliveries]


# The servers --------------------------------------------------------------------------------------------------------


class PostgreSQL:
    """A server of the command's own."""

    drivers: ClassVar[Mapping[str, str]] = {
        "asyncio, batches": "asyncpg",
        "batches": "psycopg2",
        "commands, too": "psycopg2",
    }
    usual = "psycopg"
    sessions = "select count(*) from pg_stat_activity where backend_type = 'client backend' and pid <> pg_backend_pid()"

    def __init__(self, folder: Path) -> None:
        self._server = PrivatePostgres(folder / "data")
        self.url = make_url(self._server.url).set(drivername="postgresql+psycopg")

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._server.__exit__(*error)

    def crash(self) -> None:
        """Stop as in a crash, and start again."""
        self._server.restart()

    def read_only(self, is_on: bool) -> None:
        """Let no transaction write from now on, or let them again."""
        statements = [f"alter system set default_transaction_read_only = {is_on}", "select pg_reload_conf()"]
        _execute(self.url, "set default_transaction_read_only = off", *statements)


class MariaDB:
    """A server of the command's own."""

    drivers: ClassVar[Mapping[str, str]] = {
        "asyncio, batches": "asyncmy",
        "batches": "mysqldb",
        "commands, too": "mysqldb",
    }
    usual = "pymysql"
    sessions = "select count(*) from information_schema.processlist where user = 'worker' and id <> connection_id()"

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        self._server = PrivateMariaDB(folder / "server")
        self.url = self._server.url.set(database="torture", username="worker")  # root may write though it is read-only

    def __enter__(self) -> Self:
        self._server.install()
        self._start()
        statements = ("create database torture", "create user worker", "grant all on torture.* to worker")
        _execute(self._server.url, *statements)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.kill()

    def _start(self) -> None:
        # To turn read-only, it waits for statements that wait for a lock, and lets nobody write who holds that lock.
        self._server.start(innodb_lock_wait_timeout=2)
        self._server.wait()

    def crash(self) -> None:
        """Kill it, and start it again."""
        self._server.kill()
        self._start()

    def read_only(self, is_on: bool) -> None:
        """Let no worker write from now on, or let them again."""
        _execute(self._server.url, f"set global read_only = {int(is_on)}")


def _execute(url: URL, *statements: str) -> list[Any]:
    """Run statements, each in a transaction of its own; return the rows of the last."""
    rows: list[Any] = []
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        for statement in statements:
            result = connection.execute(text(statement))
            rows = [*result.all()] if result.returns_rows else []
    engine.dispose()
    return rows


# The run ------------------------------------------------------------------------------------------------------------


class Run:
    """One database: its workers, what is done to them, and what is found in the end."""

    def __init__(self, server: PostgreSQL | MariaDB, folder: Path, seed: int, deliveries: int) -> None:
        self.server, self.plan, self._folder = server, Plan.of(seed, deliveries), folder
        self._dice, self._faults = random.Random(seed), Counter[str]()
        self._workers = [Worker(way, self._url(way), self.plan, folder) for way in WAYS]

    def _url(self, way: str) -> URL:
        driver = self.server.drivers.get(way, self.server.usual)
        return self.server.url.set(drivername=f"{self.server.url.get_backend_name()}+{driver}")

    def go(self, kills: int, crashes: int, read_only: int) -> Iterator[str]:
        """Deliver everything, with the faults spread over the run. Yield lines of the throughput."""
        self._create()
        gc.freeze()
        due = [(number / kills, self._kill_one) for number in range(kills)]
        due += [((number + 0.6) / crashes, self._crash) for number in range(crashes)]
        due += [((number + 0.3) / read_only, self._turn_read_only) for number in range(read_only)]
        due.sort(key=lambda fault: fault[0], reverse=True)
        whole, before, faults_before = self.plan.deliveries + self.plan.commands, 0, Counter[str]()
        began = told = time.monotonic()
        try:
            for each in self._workers:
                each.start()
            while sum(not each.has_ended() for each in self._workers):
                time.sleep(0.05)
                done = sum(each.log.count() for each in self._workers)
                while due and due[-1][0] <= done / whole:
                    due.pop()[1]()
                if time.monotonic() - told >= WINDOW:
                    yield _line(told - began, done - before, self._faults - faults_before)
                    told, before, faults_before = told + WINDOW, done, self._faults.copy()
        finally:
            for each in self._workers:
                each.end()
        self.row = " | ".join(map(str, self._row(time.monotonic() - began)))

    def _kill_one(self) -> None:
        if alive := [each for each in self._workers if each.pid is not None and each.way != SPARED]:
            self._dice.choice(alive).kill()
            self._faults["SIGKILLs"] += 1

    def _crash(self) -> None:
        self.server.crash()
        self._faults["crashes"] += 1

    def _turn_read_only(self) -> None:
        self.server.read_only(True)
        time.sleep(0.3)
        self.server.read_only(False)
        self._faults["read-only"] += 1

    def _create(self) -> None:
        engine = create_engine(self.server.url)
        Order.metadata.create_all(tables_on(engine))
        with Session(engine) as session, session.begin():
            session.add_all(Total(account=f"a{number}", amount=0) for number in range(ACCOUNTS))
        engine.dispose()

    def _row(self, seconds: float) -> list[object]:
        engine = create_engine(self.server.url)
        with engine.connect() as connection:
            found = {row.account: row.amount for row in connection.execute(select(Total.account, Total.amount))}
            marked = set(connection.scalars(select(default_tables.marker.c.message_id)))
            orders = Counter(connection.scalars(select(Order.note)))
        engine.dispose()
        expected, answers = self.plan.totals(), defaultdict[str, set[str]](set)
        for each in self._workers:
            for number, known in each.log.lines() if each.way.startswith("commands") else ():
                answers[number].add(known)
        wrong = {
            "missing": len({f"m-{number}" for number in self.plan.amounts} - marked),
            "wrong totals": sum(found[name] != amount for name, amount in expected.items()),
            "doubled": sum(times - 1 for times in orders.values()),
            "answers that differ": sum(len(each) > 1 for each in answers.values()) + len(answers) - len(orders),
            "left open": self._left_open(),
        }
        notes = [line.split() for line in (self._folder / "resources").read_text().splitlines()]
        memory, descriptors = (" to ".join(values) for values in zip(*notes, strict=True))
        plan, faults = self.plan, self._faults
        return [
            *(
                self.server.url.get_backend_name(),
                f"{plan.deliveries:,}",
                f"{plan.commands:,}",
                f"{faults['SIGKILLs']:,}",
            ),
            *(faults["crashes"], self._counted("cuts"), faults["read-only"], self._counted("errors"), *wrong.values()),
            *(memory, descriptors, round(seconds), "as promised" if not any(wrong.values()) else "NOT AS PROMISED"),
        ]

    def _left_open(self) -> int:
        """Sessions that the server still has: it needs a moment to notice that a killed client is gone."""
        tries = 100
        while (left := int(_execute(self.server.url, self.server.sessions)[0][0])) and tries:
            tries -= 1
            time.sleep(0.1)
        return left

    def _counted(self, name: str) -> int:
        path = self._folder / name
        return len(path.read_text().splitlines()) if path.exists() else 0


def _line(seconds: float, delivered: int, faults: Counter[str]) -> str:
    """A line of the throughput."""
    rate = delivered / WINDOW
    told = ", ".join(f"{count} {name}" for name, count in faults.items())
    return f"{seconds:6.0f} s {rate:7,.0f} a second {'█' * round(rate / 40)}  {told}"


SERVERS: dict[str, type[PostgreSQL | MariaDB]] = {"postgresql": PostgreSQL, "mariadb": MariaDB}


def main() -> int:
    """Print the throughput, then a table in Markdown; return 0 if everything was as promised."""
    parser = argparse.ArgumentParser(prog="make torture", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("servers", nargs="?", choices=("all", *SERVERS), default="all")
    parser.add_argument("--deliveries", type=int, default=200_000, help="on each database (200000)")
    parser.add_argument("--kills", type=int, default=1_000, help="of workers, on each database (1000)")
    parser.add_argument("--crashes", type=int, default=20, help="of each server (20)")
    parser.add_argument("--read-only", type=int, default=5, help="times that each database turns read-only (5)")
    parser.add_argument("--seed", type=int, default=1, help="of messages, their order and the kills (1)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # every server is ended, as it is by Ctrl-C
    logging.disable(logging.ERROR)  # a killed server is not news here
    rows = [" | ".join(COLUMNS), "|".join(["---"] * len(COLUMNS))]
    for name in [options.servers] if options.servers in SERVERS else SERVERS:
        with folder_for_servers("torture-") as folder, SERVERS[name](folder) as server:
            (logs := folder / "logs").mkdir()
            run = Run(server, logs, options.seed, options.deliveries)
            for line in run.go(options.kills, options.crashes, options.read_only):
                print(line, flush=True)
            rows.append(run.row)
    print("", *(f"| {row} |" for row in rows), sep="\n")
    return 0 if all("NOT AS PROMISED" not in row for row in rows) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (KeyboardInterrupt, NotInstalledError, ImportError, RuntimeError) as reason:
        sys.exit(f"make torture: {str(reason) or 'stopped'}")
