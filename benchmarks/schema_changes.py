"""How long does a claim wait while the marker table is changed beside it? (The figures of docs/adr/0016.)

    python benchmarks/schema_changes.py postgresql+psycopg://postgres@127.0.0.1/scratch --rows 10000000

Fills a table of its own with that many markers by the database's own means, and then makes one change after the other
while another connection claims without a pause; the longest of those claims is what a change costs. Drops the table.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import uuid4

from sqlalchemy import Engine, MetaData, create_engine, text
from sqlalchemy.exc import DBAPIError

from projector_dedup import configure_sqlite, make_tables
from projector_dedup.dialects import dialect_of
from projector_dedup.markers import insert_marker, marker_key

NAME = "schema_changes"
HANDLER = "projections.account_totals.AccountTotals.add_payment"
TABLES = make_tables(MetaData(), NAME)

FILL = {
    "postgresql": f"INSERT INTO {NAME} (message_id, handler, processed_at) SELECT gen_random_uuid()::text, "
    f"'{HANDLER}', now() - n * interval '50 ms' FROM generate_series(1, :rows) n",
    "mysql": f"INSERT INTO {NAME} (message_id, handler, processed_at) SELECT concat(lpad(hex(seq), 12, '0'), '-', "
    f"uuid()), '{HANDLER}', utc_timestamp(6) - INTERVAL seq * 50000 MICROSECOND FROM seq_1_to_{{rows}}",
    "sqlite": f"INSERT INTO {NAME} (message_id, handler, processed_at) WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL "
    "SELECT i + 1 FROM n WHERE i < :rows) SELECT printf('%012x-', i) || lower(hex(randomblob(16))), "
    f"'{HANDLER}', datetime('now', '-' || (i / 20) || ' seconds') FROM n",
}
BLOCKED = "ADD COLUMN while somebody's transaction of 3 s is open"
CHANGES: dict[str, list[tuple[str, str]]] = {
    "postgresql": [
        ("ADD COLUMN, nullable, no default", f"ALTER TABLE {NAME} ADD COLUMN a text"),
        ("ADD COLUMN, constant default", f"ALTER TABLE {NAME} ADD COLUMN b integer NOT NULL DEFAULT 0"),
        ("ADD COLUMN, volatile default", f"ALTER TABLE {NAME} ADD COLUMN c timestamptz DEFAULT clock_timestamp()"),
        ("CREATE INDEX CONCURRENTLY", f"CREATE INDEX CONCURRENTLY {NAME}_i ON {NAME} (occurred_at)"),
        ("CREATE INDEX", f"CREATE INDEX {NAME}_j ON {NAME} (occurred_at)"),
        (BLOCKED, f"ALTER TABLE {NAME} ADD COLUMN d text"),
        (BLOCKED + ", lock_timeout 100 ms and retry", f"ALTER TABLE {NAME} ADD COLUMN e text"),
    ],
    "mysql": [
        ("ADD COLUMN, ALGORITHM=INSTANT", f"ALTER TABLE {NAME} ADD COLUMN a TEXT, ALGORITHM=INSTANT"),
        (
            "ADD INDEX, ALGORITHM=INPLACE, LOCK=NONE",
            f"ALTER TABLE {NAME} ADD INDEX i (occurred_at), ALGORITHM=INPLACE, LOCK=NONE",
        ),
        ("ADD COLUMN, ALGORITHM=COPY", f"ALTER TABLE {NAME} ADD COLUMN c INTEGER, ALGORITHM=COPY"),
        (BLOCKED, f"ALTER TABLE {NAME} ADD COLUMN d TEXT, ALGORITHM=INSTANT"),
        (BLOCKED + ", lock_wait_timeout 1 s and retry", f"ALTER TABLE {NAME} ADD COLUMN e TEXT, ALGORITHM=INSTANT"),
    ],
    "sqlite": [
        ("ADD COLUMN", f"ALTER TABLE {NAME} ADD COLUMN a TEXT"),
        ("CREATE INDEX", f"CREATE INDEX {NAME}_i ON {NAME} (occurred_at)"),
    ],
}
BOUND = {"postgresql": "SET lock_timeout = '100ms'", "mysql": "SET lock_wait_timeout = 1"}


@contextmanager
def claiming(engine: Engine) -> Iterator[list[float]]:
    """Claim new messages, each in a transaction of its own, for as long as the block lasts; the seconds of each."""
    seconds: list[float] = []
    stop = threading.Event()

    def claim() -> None:
        dialect = dialect_of(engine)
        while not stop.is_set():
            began = time.perf_counter()
            try:
                with engine.connect() as connection, connection.begin():
                    dialect.begin(connection, None, None)
                    insert_marker(connection, dialect, TABLES, marker_key(str(uuid4()), HANDLER))
            except DBAPIError as error:
                print(f"    a claim failed: {error.orig}")
            seconds.append(time.perf_counter() - began)

    thread = threading.Thread(target=claim)
    thread.start()
    try:
        time.sleep(1)
        seconds.clear()
        yield seconds
    finally:
        stop.set()
        thread.join()


@contextmanager
def open_transaction(engine: Engine) -> Iterator[None]:
    """Somebody has claimed, and takes three seconds to commit."""

    def hold() -> None:
        with engine.begin() as connection:
            insert_marker(connection, dialect_of(engine), TABLES, marker_key(str(uuid4()), HANDLER))
            holds.set()
            time.sleep(3)

    holds = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    try:
        yield
    finally:
        thread.join()


def change(engine: Engine, statement: str, bound: str | None) -> None:
    """Run it until it goes through."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        if bound:
            connection.exec_driver_sql(bound)
        while True:
            try:
                connection.exec_driver_sql(statement)
                break
            except DBAPIError:
                if bound is None:
                    raise
                time.sleep(0.2)
        connection.invalidate()  # with its settings


def measured(what: str, engine: Engine, act: Callable[[], None]) -> None:
    """Print how long it took, and how long the claims beside it."""
    with claiming(engine) as waits:
        began = time.perf_counter()
        act()
        took = time.perf_counter() - began
    waits.sort()
    print(
        f"{what:80} {took:8.2f} s   {len(waits):7,} claims, median {waits[len(waits) // 2] * 1000:6.2f} ms, "
        f"longest {waits[-1] * 1000:9.1f} ms",
        flush=True,
    )


def main() -> None:
    """Print a line for each change."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--rows", type=int, default=10_000_000)
    options = parser.parse_args()
    engine = create_engine(options.url)
    name = {"mariadb": "mysql"}.get(engine.dialect.name, engine.dialect.name)
    if name == "sqlite":
        configure_sqlite(engine, busy_timeout=600)
    metadata = TABLES.marker.metadata
    metadata.drop_all(engine)
    metadata.create_all(engine)
    try:
        began = time.perf_counter()
        with engine.begin() as connection:
            connection.execute(text(FILL[name].format(rows=options.rows)), {"rows": options.rows})
        print(f"{options.rows:,} markers, filled in {time.perf_counter() - began:.0f} s", flush=True)
        if name == "postgresql":
            change(engine, f"VACUUM ANALYZE {NAME}", None)
        measured("nothing, for 5 s", engine, lambda: time.sleep(5))
        for what, statement in CHANGES[name]:
            bound = BOUND[name] if "retry" in what else None
            if what.startswith(BLOCKED):
                with open_transaction(engine):
                    measured(what, engine, lambda s=statement, b=bound: change(engine, s, b))  # type: ignore[misc]
            else:
                measured(what, engine, lambda s=statement: change(engine, s, None))  # type: ignore[misc]
    finally:
        metadata.drop_all(engine)
        engine.dispose()


if __name__ == "__main__":
    main()
