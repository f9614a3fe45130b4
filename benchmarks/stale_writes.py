"""Does a MariaDB server refuse every stale write? (The last figures of docs/adr/0013-mariadb.md; MDEV-39263.)

    python benchmarks/stale_writes.py mariadb+mysqldb://root@127.0.0.1/scratch

Processes read one of 16 rows and write what they read plus one, as fast as they can, with innodb_snapshot_isolation
off, then on. What was committed and is missing from the sum of the rows was lost. Nothing of the library takes part.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError

ROWS = 16


def work(url: str, setting: str, seconds: float, seed: int, results: Any) -> None:
    """One process: commits and conflicts until the time is up."""
    engine = create_engine(url)
    dice, commits, conflicts, end = random.Random(seed), 0, 0, time.monotonic() + seconds
    with engine.connect() as connection:
        connection.exec_driver_sql(f"SET SESSION innodb_snapshot_isolation = {setting}")
        connection.commit()
        while time.monotonic() < end:
            row = {"id": dice.randrange(ROWS)}
            try:
                amount = connection.scalar(text("SELECT amount FROM stale_writes WHERE id = :id"), row)
                connection.execute(
                    text("UPDATE stale_writes SET amount = :new WHERE id = :id"), row | {"new": amount + 1}
                )
                connection.commit()
                commits += 1
            except DBAPIError:
                connection.rollback()
                conflicts += 1
    results.put((commits, conflicts))


def main() -> None:
    """Print what was lost, with the setting off and on."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--processes", type=int, default=24)
    options = parser.parse_args()
    engine = create_engine(options.url)
    for setting in ("OFF", "ON"):
        with engine.begin() as connection:
            connection.execute(text("DROP TABLE IF EXISTS stale_writes"))
            connection.execute(text("CREATE TABLE stale_writes (id INT PRIMARY KEY, amount INT) ENGINE=InnoDB"))
            connection.execute(text("INSERT INTO stale_writes VALUES (:id, 0)"), [{"id": row} for row in range(ROWS)])
        results: Any = multiprocessing.Queue()
        processes = [
            multiprocessing.Process(target=work, args=(options.url, setting, options.seconds, seed, results))
            for seed in range(options.processes)
        ]
        for process in processes:
            process.start()
        found = [results.get() for _ in processes]
        for process in processes:
            process.join()
        commits, conflicts = (sum(column) for column in zip(*found, strict=True))
        with engine.connect() as connection:
            kept = connection.scalar(text("SELECT sum(amount) FROM stale_writes"))
        print(f"{setting:3}  commits {commits:8}  conflicts {conflicts:8}  lost {commits - int(kept):8}")
    with engine.begin() as connection:
        connection.execute(text("DROP TABLE stale_writes"))
    engine.dispose()


if __name__ == "__main__":
    main()
