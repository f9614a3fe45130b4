"""What former names cost while they are declared: claims of one, two and four names (the figures of docs/adr/0017).

    python benchmarks/former_names.py postgresql+psycopg://user@host/database    # or mariadb+pymysql://, sqlite:///

One worker. Each message is a unit of work of nothing but a claim and a COMMIT, so that no handler hides the difference;
then the same messages again, as duplicates; then messages that only code of the old name has applied. Contenders run
interleaved, in rounds; times are ratios to one name in the same round, medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

from sqlalchemy import Engine, MetaData, create_engine, delete
from sqlalchemy.orm import Session, sessionmaker

from projector_dedup import UnitOfWork, configure_sqlite, make_tables

metadata = MetaData()
TABLES = make_tables(metadata, name="benchmark_marker")
CONTENDERS = {"one": [], "two": ["b"], "four": ["b", "d", "a"]}


def seconds(factory: sessionmaker[Session], handler: str, formerly: Sequence[str], messages: int) -> float:
    """For that many messages, each in a unit of work of its own."""
    begin = time.perf_counter()
    for number in range(messages):
        with UnitOfWork(factory, tables=TABLES) as uow:
            if uow.claim(f"message {number:08}", handler, formerly=formerly):
                uow.commit()
    return time.perf_counter() - begin


def empty(engine: Engine) -> None:
    """Forget everything."""
    with engine.begin() as connection:
        connection.execute(delete(TABLES.marker))


def measure(engine: Engine, rounds: int, messages: int) -> None:
    """Print a line for each contender."""
    factory = sessionmaker(engine)
    ratios: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
    for round_number in range(rounds + 1):  # the first warms up
        times = {}
        for name, formerly in CONTENDERS.items():
            empty(engine)
            new = seconds(factory, "c", formerly, messages)
            redelivered = seconds(factory, "c", formerly, messages)
            empty(engine)
            seconds(factory, "b" if formerly else "c", [], messages)
            times[name] = [new, redelivered, seconds(factory, "c", formerly, messages)]
        if round_number:
            for name, found in times.items():
                ratios[name].append([mine / one for mine, one in zip(found, times["one"], strict=True)])
    print("| names | new | redelivered | redelivered, applied under an old name only |\n|---|---|---|---|")
    for name, found in ratios.items():
        medians = (f"{statistics.median(column):.2f}" for column in zip(*found, strict=True))
        print(f"| {name} | {' | '.join(medians)} |")


def main() -> None:
    """On the database of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--messages", type=int, default=300)
    arguments = parser.parse_args()
    engine = create_engine(arguments.url)
    if engine.dialect.name == "sqlite":
        configure_sqlite(engine)
    metadata.create_all(engine)
    try:
        measure(engine, arguments.rounds, arguments.messages)
    finally:
        metadata.drop_all(engine)


if __name__ == "__main__":
    main()
