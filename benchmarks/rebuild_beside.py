"""What a rebuild costs the live traffic, and how fast it reads: `python benchmarks/rebuild_beside.py URL`.

Processes deliver messages at a fixed rate that the database can process. Windows without a rebuild and windows with one
alternate, so that a slow minute of the machine affects both. The program creates its tables in the database of the URL,
and drops them.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from multiprocessing.sharedctypes import Synchronized
from typing import Any

from sqlalchemy import String, create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from projector_dedup import Dispatcher, Message, make_tables, on, projector
from projector_dedup.building import building
from projector_dedup.rebuild.rebuild import end_rebuild, rebuild

ROWS = 100


class Base(DeclarativeBase):
    """Two generations of a read model, and the markers."""


class Totals(Base):
    """The old generation."""

    __tablename__ = "rebuild_bench_totals"
    account: Mapped[str] = mapped_column(String(20), primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)


class Totals2(Base):
    """The new one."""

    __tablename__ = "rebuild_bench_totals_2"
    account: Mapped[str] = mapped_column(String(20), primary_key=True)
    amount: Mapped[int] = mapped_column(default=0)


TABLES = make_tables(Base.metadata, name="rebuild_bench_marker")


def add_each(entity: type[Any], events: list[dict[str, Any]], session: Session) -> None:
    """Read the rows of all events by one SELECT, under lock, and add one for each event."""
    accounts = {event["account"] for event in events}
    rows = session.scalars(select(entity).where(entity.account.in_(accounts)).order_by(entity.account))
    totals = {row.account: row for row in rows}
    for event in events:
        totals[event["account"]].amount += 1


@projector(idempotent=True, name="bench-1", read_models=[Totals])
class Old:
    """Adds to the old generation."""

    @on(dict, name="add", batch=True)
    def add(self, events: list[dict[str, Any]], session: Session) -> None:
        """Add one for each event."""
        add_each(Totals, events, session)


@projector(idempotent=True, name="bench-2", read_models=[Totals2])
class New:
    """Adds to the new generation."""

    @on(dict, name="add", batch=True)
    def add(self, events: list[dict[str, Any]], session: Session) -> None:
        """Add one for each event."""
        add_each(Totals2, events, session)


def message(kind: str, number: int) -> Message:
    """Return a message of the history, or of a live worker."""
    return Message(f"{kind}-{number}", {"account": f"a{number % ROWS}"})


def dispatcher(url: str) -> Dispatcher:
    """Return a dispatcher of both generations."""
    return Dispatcher(sessionmaker(create_engine(url)), Old(), building(New(), beside="bench-1"), tables=TABLES)


def deliver_live(url: str, name: str, rate: float, phase: "Synchronized[int]", out: Any) -> None:
    """Deliver at the rate until the phase is negative; put (phase, seconds) of each delivery into ``out``."""
    live, took, number, due = dispatcher(url), [], 0, time.perf_counter()
    while (current := phase.value) >= 0:
        due += 1 / rate
        time.sleep(max(0.0, due - time.perf_counter()))
        began = time.perf_counter()
        live.deliver(message(name, number))
        took.append((current, time.perf_counter() - began))
        number += 1
    out.put((number, took))


def main() -> None:
    """Run the windows, and print medians, 99th percentiles and the rate of the rebuild."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--history", type=int, default=300_000, help="messages of the archive")
    parser.add_argument("--batch", type=int, default=1_000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rate", type=float, default=25, help="live messages a second and worker")
    parser.add_argument("--window", type=float, default=10, help="seconds of a window")
    given = parser.parse_args()
    engine = create_engine(given.url)
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add_all([kind(account=f"a{number}") for kind in (Totals, Totals2) for number in range(ROWS)])
    both = dispatcher(given.url)
    first = Dispatcher(sessionmaker(engine), Old(), tables=TABLES)
    for start in range(0, given.history, given.batch):
        first.deliver_batch(
            [message("old", number) for number in range(start, min(start + given.batch, given.history))]
        )

    spawn = multiprocessing.get_context("spawn")
    phase, out = spawn.Value("i", 0), spawn.Queue()
    crew = [
        spawn.Process(target=deliver_live, args=(given.url, f"live{worker}", given.rate, phase, out))
        for worker in range(given.workers)
    ]
    for process in crew:
        process.start()
    time.sleep(5)  # they connect and warm up in phase 0
    read, spent = 0, 0.0
    while read < given.history:
        phase.value = 1
        time.sleep(given.window)
        phase.value = 2
        ends = time.perf_counter() + given.window

        def part(start: int = read, ends: float = ends) -> Iterator[Message]:
            for number in range(start, given.history):
                if number % given.batch == 0 and time.perf_counter() > ends:
                    return
                yield message("old", number)

        began = time.perf_counter()
        done = rebuild(both, "bench-2", part(), batch_size=given.batch)
        spent += time.perf_counter() - began
        read += done.read
    phase.value = -1
    results = [out.get() for _ in crew]
    for process in crew:
        process.join()
    end_rebuild(both, "bench-2")
    delivered = sum(number for number, _ in results)
    with Session(engine) as session:
        totals = [sum(amount for (amount,) in session.query(kind.amount)) for kind in (Totals, Totals2)]
    Base.metadata.drop_all(engine)
    assert totals == [given.history + delivered] * 2, (totals, given.history, delivered)
    print(f"{given.history:,} messages of the archive, read in {spent:.1f} s: {given.history / spent:,.0f} a second")
    for name, wanted in (("without a rebuild", 1), ("beside a rebuild", 2)):
        took = [seconds * 1000 for _, part_of in results for when, seconds in part_of if when == wanted]
        cut = statistics.quantiles(took, n=100)
        print(f"{name}: {len(took):,} live messages, median {cut[49]:.1f} ms, p99 {cut[98]:.1f} ms")


if __name__ == "__main__":
    main()
