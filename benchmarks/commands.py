"""Commands beside a projector and beside no library: the same ORM handler, in turns, on one PostgreSQL or MariaDB.

    python benchmarks/commands.py postgresql+psycopg://postgres@127.0.0.1/postgres

Prints ratios of one run, round by round: the median, and the quartiles. Of rates, in wall time; and of what the
client's processor takes, which the load of the machine touches less. Creates tables of its own, and drops them.
"""

from __future__ import annotations

import argparse
import statistics
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from sqlalchemy import MetaData, String, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from projector_dedup import Dispatcher, make_tables, on, projector
from projector_dedup.commands import Call, Commands, command, make_command_tables

ROWS = 1_000
METADATA = MetaData()
MARKERS = make_tables(METADATA, "bench_command_marker")
RECORDS = make_command_tables(METADATA, "bench_command_record")


class Base(DeclarativeBase):
    """The base of the benchmark's entity."""

    metadata = METADATA


class Total(Base):
    """What is added to."""

    __tablename__ = "bench_command_total"
    key: Mapped[int] = mapped_column(primary_key=True)
    amount: Mapped[int]
    note: Mapped[str] = mapped_column(String(20), default="")


@dataclass(frozen=True)
class Add:
    """A command, and an event."""

    key: int
    amount: int = 1


@dataclass(frozen=True)
class Added:
    """The result of the command."""

    amount: int


def add(asked: Add, session: Session) -> int:
    """Do the same work whoever asks: one SELECT, one UPDATE."""
    total = session.get_one(Total, asked.key)
    total.amount += asked.amount
    return total.amount


@command(name="bench.add")
def adding(asked: Add, call: Call) -> Added:
    """Add, and record the new amount."""
    return Added(add(asked, call.session))


@projector(idempotent=True, name="bench.totals")
@on(Add)
def totals(asked: Add, session: Session) -> None:
    """Add, and record nothing but the marker."""
    add(asked, session)


def contenders(factory: sessionmaker[Session]) -> dict[str, Callable[[Add, str], object]]:
    """Return what is measured, by its name."""
    commands, dispatcher = Commands(factory, tables=RECORDS), Dispatcher(factory, totals, tables=MARKERS)

    def plain(asked: Add, _key: str) -> None:
        with factory.begin() as session:
            add(asked, session)

    return {
        "plain": plain,
        "projector": lambda asked, key: dispatcher.deliver(asked, message_id=key),
        "command": lambda asked, key: commands.handle(adding, asked, key=key),
    }


def keys(number: int, known: int) -> list[str]:
    """Return keys of which ``known`` of a hundred came before."""
    found: list[str] = []
    for place in range(number):
        again = 0 < place % 100 <= known
        found.append(found[place // 100 * 100] if again else str(uuid.uuid4()))
    return found


def ratio(ones: list[float], others: list[float]) -> str:
    """Return the median and the quartiles of the ratios of all rounds but the first, which warms up."""
    ratios = [one / other for one, other in zip(ones[1:], others[1:], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    return f"{statistics.median(ratios):.2f} ({low:.2f}..{high:.2f})"


def main() -> None:
    """Measure in turns, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--each", type=int, default=200, help="commands in a round")
    arguments = parser.parse_args()
    engine = create_engine(arguments.database)
    METADATA.drop_all(engine)
    METADATA.create_all(engine)
    factory = sessionmaker(engine)
    with factory.begin() as session:
        session.add_all([Total(key=key, amount=0) for key in range(1, ROWS + 1)])
    try:
        for known in (0, 90):
            rates: dict[str, list[float]] = {name: [] for name in contenders(factory)}
            costs: dict[str, list[float]] = {name: [] for name in rates}
            for _ in range(arguments.rounds + 1):
                for name, ask in contenders(factory).items():
                    given = keys(arguments.each, known)
                    began, busy = time.perf_counter(), time.process_time()
                    for place, key in enumerate(given):
                        ask(Add(1 + (place // 100 if known else place) % ROWS), key)
                    rates[name].append(arguments.each / (time.perf_counter() - began))
                    costs[name].append(time.process_time() - busy)
            print(f"{known} % asked again:")
            for one, other in (("command", "projector"), ("command", "plain"), ("projector", "plain")):
                print(
                    f"  {one} / {other}: rate {ratio(rates[one], rates[other])}, CPU {ratio(costs[one], costs[other])}"
                )
    finally:
        METADATA.drop_all(engine)
        engine.dispose()


if __name__ == "__main__":
    main()
