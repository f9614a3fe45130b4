"""PostgreSQL: a primary that is killed under load, and its standby that is promoted; synchronous, and asynchronous."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from sqlalchemy import URL, make_url, text

from projector_dedup.testing.convergence import generate, totals_of
from projector_dedup.testing.kit import Harness, Subject
from projector_dedup.testing.postgres import PrivatePostgres
from standby import Primary, Standby, standby_of

from .load import PATIENCE, Broker, Handler, Ran, working

DRIVERS = ("psycopg", "psycopg", "psycopg2", "psycopg2", "asyncpg", "asyncpg")  # one worker each

# For the standby, or for a row of somebody who waits for it.
WAITING = "select 1 from pg_stat_activity where wait_event = 'SyncRep' or wait_event_type = 'Lock'"


def either(*servers: PrivatePostgres, driver: str = "psycopg") -> URL:
    """The URL of several servers, which leads to the one that takes writes: docs/clusters.md has it."""
    hosts = "&".join(f"host=127.0.0.1:{make_url(server.url).port}" for server in servers)
    return make_url(f"postgresql+{driver}://postgres@/postgres?{hosts}&target_session_attrs=read-write")


def runs(seed: int, messages: int) -> Iterator[Ran]:
    """Run the three: the same load, the same failover."""
    yield _run("synchronous standby", seed, messages, synchronous=True, cut=False)
    yield _run("synchronous standby that lags", seed, messages, synchronous=True, cut=True)
    yield _run("asynchronous standby that lags", seed, messages, synchronous=False, cut=True)


def _run(name: str, seed: int, number: int, *, synchronous: bool, cut: bool) -> Ran:
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="primary-", ignore_cleanup_errors=True))
        primary = stack.enter_context(Primary(Path(folder) / "data"))
        with _harness(make_url(primary.url).set(drivername="postgresql+psycopg")) as owner:
            owner.create_tables()
        standby = stack.enter_context(standby_of(primary))
        if synchronous:
            primary.wait_for(standby)
        else:
            until(lambda: primary.execute("select 1 from pg_stat_replication where state = 'streaming'") != [])
        broker = Broker(generate(seed, number), seed)
        handler = Handler(seed)
        harnesses = [stack.enter_context(_harness(either(primary, standby, driver=driver))) for driver in DRIVERS]
        new = stack.enter_context(_harness(make_url(standby.url).set(drivername="postgresql+psycopg")))
        workers = [handler.through(harness) for harness in harnesses]
        remarks = []
        if synchronous:
            with working(broker, workers):
                broker.wait_for(number // 2)
                if cut:
                    standby.fall_behind()
                    until(lambda: len(primary.execute(WAITING)) == len(workers))
                acknowledged = _fail_over(primary, standby, broker)
                lost = acknowledged - _markers(new)
                again = len(broker.seen)
                broker.send_again(sorted(broker.seen))
            remarks.append(f"{again:,} messages that were acknowledged were sent again after the failover")
        else:
            with working(broker, workers):
                broker.wait_for(number // 2)
                standby.fall_behind()
                before = broker.seen
            acknowledged = _fail_over(primary, standby, broker)
            lost = acknowledged - _markers(new)
            in_flight = len(workers)  # committed before the standby fell behind, acknowledged after
            assert len(acknowledged - before) - in_flight <= len(lost) <= len(acknowledged - before) + in_flight
            short = sum(totals_of(broker.messages).values()) - sum(new.totals().values())
            broker.send_again(sorted(broker.messages))
            with working(broker, workers):
                pass
            remarks.append(f"totals were {short:,} short, as this run is to show, and exact after all were sent again")
        version = new.transact(lambda session: str(session.scalar(text("SHOW server_version"))))
        found = {"new primary": new.totals()}
        fault = "primary killed under load" if not cut else "standby cut off, then primary killed"
        return Ran(
            name,
            f"{fault}; standby promoted",
            number,
            broker,
            handler.runs,
            time.monotonic() - began,
            found,
            acknowledged=len(acknowledged),
            lost=len(lost),
            must_lose=not synchronous,
            remarks=remarks,
            version=version,
        )


def _fail_over(primary: Primary, standby: Standby, broker: Broker) -> set[str]:
    """Kill the primary, promote the standby; return what had been acknowledged when the primary was gone."""
    primary.kill()
    acknowledged = broker.seen
    standby.take_over()
    return acknowledged


def _markers(harness: Harness) -> set[str]:
    return {message_id for message_id, _ in harness.markers()}


def _harness(url: URL) -> Harness:
    return Harness(Subject(url))


def until(true: Callable[[], bool]) -> None:
    """Wait for something that must happen."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)
