"""What former names cost while they are declared: claims of one, two and four names (the figures of docs/adr/0017).

    python benchmarks/former_names.py postgresql+psycopg://user@host/database    # or mariadb+pymysql://, sqlite:///

One worker. Each message is a unit of work of nothing but a claim and a COMMIT, so that no handler hides the difference;
then the same messages again, as duplicates; then messages that only code of the old name has applied. Contenders take
turns message by message; figures are ratios of the median times.
"""

from __future__ import annotations

import argparse
import statistics
import time

from sqlalchemy import Engine, MetaData, create_engine
from sqlalchemy.orm import Session, sessionmaker

from projector_dedup import UnitOfWork, configure_sqlite, make_tables

metadata = MetaData()
TABLES = make_tables(metadata, name="benchmark_marker")
CONTENDERS = {"one": ["c"], "two": ["c", "b"], "four": ["c", "b", "d", "a"]}


def seconds(factory: sessionmaker[Session], message_id: str, names: list[str]) -> float:
    """Of one delivery."""
    begin = time.perf_counter()
    with UnitOfWork(factory, tables=TABLES) as uow:
        if uow.claim(message_id, names[0], formerly=names[1:]):
            uow.commit()
    return time.perf_counter() - begin


def measure(engine: Engine, messages: int) -> None:
    """Print a line for each contender."""
    factory = sessionmaker(engine)
    for number in range(messages):
        for contender, names in CONTENDERS.items():
            seconds(factory, f"historic {contender} {number:08}", names[1:2] or names)
    medians: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
    for kind in ("new", "new", "historic"):  # the second time they are duplicates
        times: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
        for number in range(messages):
            for contender, names in CONTENDERS.items():
                times[contender].append(seconds(factory, f"{kind} {contender} {number:08}", names))
        for contender, found in times.items():
            medians[contender].append(statistics.median(found))
    print("| names | new | redelivered | redelivered, applied under an old name only |\n|---|---|---|---|")
    for contender, found in medians.items():
        ratios = (f"{mine / one:.2f}" for mine, one in zip(found, medians["one"], strict=True))
        print(f"| {contender} | {' | '.join(ratios)} |")


def main() -> None:
    """On the database of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--messages", type=int, default=1000)
    arguments = parser.parse_args()
    engine = create_engine(arguments.url)
    if engine.dialect.name == "sqlite":
        configure_sqlite(engine)
    metadata.create_all(engine)
    try:
        measure(engine, arguments.messages)
    finally:
        metadata.drop_all(engine)


if __name__ == "__main__":
    main()
