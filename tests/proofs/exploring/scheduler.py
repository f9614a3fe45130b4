"""Run clients in each order of their round trips, on a real server.

    with Client(url) as alice, Client(url) as bob:       # each connects by `alice.proxy.through(url)`
        scheduler = Scheduler([alice, bob], server)
        explored = explore(lambda order: scheduler.run(order, [work_of_alice, work_of_bob]))

An *order* is a sequence of choices: whose round trip the server gets next, and what happens to it (`Branch`). The
scheduler stands in the proxy of each client. It holds every round trip until it is that client's turn, and grants one
round trip at a time. It lets questions to the catalog pass, because no client changes the schema. After each grant it
waits until every client stands at its next round trip, has ended, or waits for a lock. It asks the server who waits for
whom (`Server`).

`explore` runs one order after the other. It needs no state of the library or of the server: each run begins anew with
the first choices of an order, and goes on with the default choice. Every other choice that was possible on the way
begins another order.
"""

import contextlib
import heapq
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import psycopg
from sqlalchemy import URL

from cut_proxy import CutProxy
from databases import Database, mariadb_connection
from fault_points import shown

PATIENCE = 15.0
"""Seconds until clients that neither act nor wait for another client count as a failure."""

Branch = Literal["go", "cut before", "cut after", "kill"]
"""What happens to a round trip: nothing; its connection is cut before the server has it; its connection is cut after
the server has answered, and the answer is lost; or the client is killed after the server has answered. The server gets
nothing more of a killed client. To kill a client before a round trip is to kill it after the one before."""
_CATALOG = re.compile(r"SHOW |DESCRIBE |SELECT( (FROM|JOIN) (pg_|information_schema\.)[\w.]+)+$")
FAULTS: tuple[Branch, ...] = ("cut before", "cut after", "kill")


class Choice(NamedTuple):
    """One step of an order: the number of the client whose round trip is granted, and what happens to it."""

    client: int
    branch: Branch = "go"


Order = tuple[Choice, ...]


@dataclass(frozen=True)
class Step:
    """A step of a run: the choice, its round trip, and the other choices, each with what it adds to the cost."""

    choice: Choice
    trip: str
    others: tuple[tuple[int, Choice], ...]


class WrongOrderError(Exception):
    """An order says that a client acts which has ended, or waits."""


class StuckError(AssertionError):
    """Clients neither act, nor end, nor wait for one that may act."""


class DeadlockError(AssertionError):
    """Clients wait for each other. The library takes locks in one order, so no case may lead to a deadlock.

    InnoDB ends a deadlock at once, so it is seen on PostgreSQL only, which looks for deadlocks after a second.
    """


class Killed(BaseException):  # as KeyboardInterrupt is
    """Ends a client that was killed, wherever it would act again. No `except Exception` goes on with its work."""


# The server ---------------------------------------------------------------------------------------------------------


class PostgreSQLServer:
    """A connection of the scheduler's own, by which it asks `pg_blocking_pids` and `pg_stat_activity`."""

    def __init__(self, database: Database) -> None:
        self._connection = psycopg.connect(database.dsn, autocommit=True)

    def are_held(self, waiting: Sequence[set[int]], free: set[int]) -> bool:
        """True if, from each client that waits, the locks lead to a free one. Raises `DeadlockError`."""
        asked = [session for sessions in waiting for session in sessions]
        rows = self._connection.execute("SELECT pid, pg_blocking_pids(pid) FROM unnest(%s::int[]) pid", [asked])
        blockers = {pid: set(by) for pid, by in rows.fetchall()}
        held = set(free)
        while more := {pid for pid, by in blockers.items() if pid not in held and by & held}:
            held |= more
        others = {pid: by for pid, by in blockers.items() if by and pid not in held}
        if others and all(by <= others.keys() for by in others.values()):
            raise DeadlockError("clients wait for each other's locks")
        return all(sessions & held for sessions in waiting)

    def alive(self, sessions: set[int]) -> set[int]:
        """Return the backends that run."""
        return self._sessions(sessions, "true")

    def busy(self, sessions: set[int]) -> set[int]:
        """Return the backends that are in a transaction."""
        return self._sessions(sessions, "state <> 'idle'")

    def _sessions(self, sessions: set[int], condition: str) -> set[int]:
        query = f"SELECT pid FROM pg_stat_activity WHERE pid = ANY(%s) AND {condition}"
        return {pid for (pid,) in self._connection.execute(query.encode(), [list(sessions)]).fetchall()}

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


class MariaDBServer:
    """Asks the process list, and `SHOW ENGINE INNODB STATUS`, which is never older than the question.

    `information_schema.innodb_trx` is a cache that is not renewed while somebody reads it.
    """

    def __init__(self, database: Database) -> None:
        self._connection = mariadb_connection(database.url())

    def are_held(self, waiting: Sequence[set[int]], free: set[int]) -> bool:
        """True if each client waits. InnoDB ends a deadlock at once, so they wait for one that may act."""
        blocked = {thread for thread, text in self._transactions() if "LOCK WAIT" in text}
        blocked |= {row[0] for row in self._asked("SHOW PROCESSLIST") if "Waiting for" in str(row[6])}
        return bool(free) and all(sessions & blocked for sessions in waiting)

    def alive(self, sessions: set[int]) -> set[int]:
        """Return the threads that run."""
        return sessions & {row[0] for row in self._asked("SHOW PROCESSLIST")}

    def busy(self, sessions: set[int]) -> set[int]:
        """Return the threads that have a transaction."""
        return sessions & {thread for thread, text in self._transactions() if "ACTIVE" in text}

    def _transactions(self) -> Iterator[tuple[int, str]]:
        ((_, _, status),) = self._asked("SHOW ENGINE INNODB STATUS")
        for text in status.split("---TRANSACTION ")[1:]:
            if found := re.search(r"thread id (\d+)", text):
                yield int(found[1]), text

    def _asked(self, query: str) -> list[tuple]:  # type: ignore[type-arg]
        with self._connection.cursor() as cursor:
            cursor.execute(query)
            return list(cursor.fetchall())

    def close(self) -> None:
        """Hang up."""
        self._connection.close()


Server = PostgreSQLServer | MariaDBServer


def server_of(database: Database) -> Server:
    """Return a connection to the server of a database."""
    return PostgreSQLServer(database) if database.engine == "postgresql" else MariaDBServer(database)


# The clients --------------------------------------------------------------------------------------------------------


class Client:
    """A thread that works as a process would: it reaches the server by a proxy of its own, and can be killed."""

    def __init__(self, url: URL) -> None:
        self.proxy = CutProxy(url)
        self.turn = threading.Condition()  # the scheduler replaces it by the one of all its clients
        self.thread = ThreadPoolExecutor(1)
        self.trip: str | None = None  # the round trip at which the client stands
        self.error: Exception | None = None  # by which the work ended
        self.moves = 0  # the round trips that were granted
        self._is_scheduled = self._is_running = False
        self._granted: Branch | None = None

    def __enter__(self) -> Self:
        self.proxy.__enter__()
        self.proxy.at_trip = self.at_trip
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.shutdown()
        self.proxy.__exit__(None, None, None)

    def begin(self, work: Callable[[Self], object]) -> Future[None]:
        """Start the work, whose round trips wait for their turn."""
        self.moves, self.error = 0, None
        self._is_scheduled = self._is_running = True
        return self.thread.submit(self._work, work)

    def _work(self, work: Callable[[Self], object]) -> None:
        try:
            with contextlib.suppress(Killed):
                work(self)
        except Exception as error:  # noqa: BLE001  # for the test to judge
            self.error = error.with_traceback(None)
        finally:
            with self.turn:
                self._is_running = False
                self.turn.notify_all()

    def at_trip(self, where: Literal["before", "after"], trip: list[str]) -> None:
        """Wait for the turn of a round trip. Called by the proxy, and by the client before and after any other call.

        Raises EOFError if the order says that the connection is cut here, or the client killed.
        """
        with self.turn:
            if where == "before" and self._is_scheduled and not _CATALOG.match(shown(trip)):
                self.trip, self._granted = shown(trip), None
                self.turn.notify_all()
                self.turn.wait_for(lambda: self._granted is not None or not self._is_scheduled)
            branch = self._granted
        if branch == f"cut {where}":
            raise EOFError
        if branch == "kill" and where == "after":
            self.proxy.kill()
            raise EOFError

    def grant(self, branch: Branch) -> None:
        """Let the round trip go, or meet its fault. The caller holds `turn`."""
        self.moves += 1
        self.trip, self._granted = None, branch
        self.turn.notify_all()

    def release(self) -> None:
        """Let the work go on without a schedule."""
        with self.turn:
            self._is_scheduled, self.trip, self._granted = False, None, None
            self.turn.notify_all()

    @property
    def acts(self) -> bool:
        """True if the client has neither ended nor stands at a round trip: it computes, or waits for the server."""
        return self._is_running and self.trip is None

    def refuse_if_killed(self) -> None:
        """Raise `Killed` in a client that was killed. Call it before it touches anything behind another door."""
        if self.proxy.is_dead:
            raise Killed


class Scheduler:
    """Runs the work of its clients in one order of their round trips."""

    def __init__(self, clients: Sequence[Client], server: Server) -> None:
        self.clients, self._server = clients, server
        self._turn = threading.Condition()
        for client in clients:
            client.turn = self._turn
        self.steps: list[Step] = []  # of the last run

    def run(self, order: Order, work: Sequence[Callable[[Any], object]], faults: int = 0) -> list[Step]:
        """Run the work of each client, first by these choices and then by the default ones. Return all steps.

        By default the client that acted last goes on, without a fault. Clients with the same work are alike: while none
        of them has begun, only the first may. `faults` is how many choices of the order, and of the alternatives in the
        steps, may be a fault.

        Raises `WrongOrderError` if a choice is not possible, and `StuckError`.
        """
        steps: list[Step] = []
        self.steps = steps
        futures = [client.begin(each) for client, each in zip(self.clients, work, strict=True)]
        try:
            while standing := self._standing():
                last = steps[-1].choice.client if steps else None
                first = last if last is not None and last in standing else standing[0]
                left = faults - sum(step.choice.branch != "go" for step in steps)
                options = {
                    Choice(number, branch): int(number != first and first == last) + (branch != "go")
                    for number in standing
                    if not self._begins_too_early(number, work)
                    for branch in ("go", *(FAULTS if left > 0 else ()))
                }
                choice = order[len(steps)] if len(steps) < len(order) else Choice(first)
                if choice not in options:
                    raise WrongOrderError(f"step {len(steps) + 1} is {tuple(choice)}, and possible are {[*options]}")
                others = tuple((cost, other) for other, cost in options.items() if other != choice)
                client = self.clients[choice.client]
                with self._turn:
                    steps.append(Step(choice, client.trip or "", others))
                    client.grant(choice.branch)
        finally:
            for client in self.clients:
                if client.acts or client.trip:  # the run has failed: nothing of it may stay
                    client.proxy.kill()
                client.release()
            for future in futures:
                future.result(2 * PATIENCE)
        return steps

    def _begins_too_early(self, number: int, work: Sequence[object]) -> bool:
        alike = (each for each in range(number) if work[each] is work[number])
        return self.clients[number].moves == 0 and any(self.clients[each].moves == 0 for each in alike)

    def _standing(self) -> list[int]:
        """Wait until no client acts, unless it waits for another one's lock; return those that stand at a trip."""
        deadline, pause = time.monotonic() + PATIENCE, 0.002
        while True:
            with self._turn:
                self._turn.wait_for(lambda: not self._acting(), pause)
                acting = self._acting()
            standing = [number for number, client in enumerate(self.clients) if client.trip is not None]
            if self._have_closed_connections_ended() and (not acting or self._are_held(acting, standing)):
                with self._turn:
                    if self._acting() == acting:
                        return standing
            if time.monotonic() > deadline:
                raise StuckError(
                    f"{', '.join(f'client {each}' for each in acting)}: neither acts nor waits for another"
                )
            pause = min(2 * pause, 0.02)

    def _acting(self) -> list[int]:
        return [number for number, client in enumerate(self.clients) if client.acts]

    def _are_held(self, acting: Iterable[int], standing: Iterable[int]) -> bool:
        free = set().union(*(self.clients[number].proxy.sessions for number in standing))
        return self._server.are_held([{*self.clients[each].proxy.sessions} for each in acting], free)

    def _have_closed_connections_ended(self) -> bool:
        """True if the server has rolled back, and forgotten, each connection that was cut."""
        for client in self.clients:
            if closed := {*client.proxy.closed}:
                client.proxy.closed -= closed - self._server.alive(closed)
        return not any(client.proxy.closed for client in self.clients)


# The search ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explored:
    """The result of a search: how many orders were run, and up to which cost there is no other order."""

    orders: int
    complete: bool  #: True if there is no other order, or none up to the cost that was asked for
    surprises: int  #: the highest cost of an order that was run


def explore(
    run: Callable[[Order], Sequence[Step]],
    *,
    surprises: int | None = None,
    seconds: float | None = None,
    seed: int = 1,
) -> Explored:
    """Run every order, the cheapest first, and return how many there were.

    The cost of an order is the number of its surprises: a fault, or a client that is interrupted although it could go
    on. So the first order that fails is one with the fewest surprises. `surprises` leaves out orders with more of them;
    `seconds` ends the search early. Among orders of one cost the seed chooses.
    """
    dice = random.Random(seed)
    deadline = None if seconds is None else time.monotonic() + seconds
    waiting: list[tuple[int, float, Order]] = [(0, 0.0, ())]
    orders = highest = 0
    while waiting and (deadline is None or time.monotonic() < deadline):
        cost, _, prefix = heapq.heappop(waiting)
        steps = run(prefix)
        orders, highest = orders + 1, max(highest, cost)
        chosen = tuple(step.choice for step in steps)
        for at in range(len(prefix), len(steps)):
            for more, other in steps[at].others:
                if surprises is None or cost + more <= surprises:
                    heapq.heappush(waiting, (cost + more, dice.random(), (*chosen[:at], other)))
    return Explored(orders, not waiting, highest)
