"""Two messages, one row: what each way of keeping both costs (the figures of docs/adr/0003 and 0013).

    python benchmarks/lost_updates.py postgresql+psycopg://user@host/database    # or mariadb+pymysql://...

Contenders run interleaved, in rounds; rates are ratios to the unprotected contender of the same round, medians over
the rounds. `kept` counts increments that survived, from the database; `runs` how often a handler body ran per message;
`late` the deliveries that outlived the retry policy and had to be delivered again.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine, create_engine, delete, func, insert, select
from sqlalchemy.dialects import mysql, postgresql
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from projector_dedup import Dispatcher, RetriesExhaustedError, RetryPolicy, make_tables, on, projector


class Base(DeclarativeBase):
    """The benchmark's own tables."""


class Total(Base):
    """One row of the read model."""

    __tablename__ = "benchmark_total"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    amount: Mapped[int]


TABLES = make_tables(Base.metadata, name="benchmark_marker")


class Change:
    """Adds one to each of its rows."""

    def __init__(self, rows: tuple[int, ...]) -> None:
        self.rows = rows


def add_by_orm(event: Change, session: Session) -> None:
    """What people write."""
    for row in event.rows:
        total = session.get(Total, row)
        if total is None:
            total = Total(id=row, amount=0)
            session.add(total)
        total.amount += 1


def add_by_upsert(event: Change, session: Session) -> None:
    """What is always right, and fastest."""
    for row in event.rows:
        if session.get_bind().dialect.name == "postgresql":
            session.execute(
                postgresql.insert(Total)
                .values(id=row, amount=1)
                .on_conflict_do_update(index_elements=["id"], set_={"amount": Total.amount + 1})
            )
        else:
            session.execute(
                mysql.insert(Total).values(id=row, amount=1).on_duplicate_key_update(amount=Total.amount + 1)
            )


# The handler, the isolation level of the engine, the settings of the projector. A level of the engine is set once for
# each connection; one of the dispatcher would cost MariaDB four round trips for each message.
CONTENDERS: dict[str, tuple[Callable[[Change, Session], None], str | None, dict[str, Any]]] = {
    "unprotected": (add_by_orm, "READ COMMITTED", {}),
    "default": (add_by_orm, None, {}),
    "read_models": (add_by_orm, None, {"read_models": [Total]}),
    "serializable": (add_by_orm, "SERIALIZABLE", {}),
    "upsert": (add_by_upsert, "READ COMMITTED", {}),
}

WORKLOADS: dict[str, Callable[[random.Random, int], tuple[int, ...]]] = {
    "hot": lambda _, __: (1,),
    "100 rows": lambda rng, _: (rng.randrange(100),),
    "2 of 10": lambda rng, _: tuple(rng.sample(range(10), 2)),
    "create": lambda _, number: (number // 8,),
}


def run(
    engines: dict[str | None, Engine],
    contender: str,
    workload: str,
    workers: int,
    messages: int,
    seed: int,
    policy: RetryPolicy,
) -> dict[str, float]:
    """One measurement: deliver everything, redeliver what was late, and count what was kept."""
    body, level, settings = CONTENDERS[contender]
    engine = engines[level]
    runs = itertools.count()
    rng = random.Random(seed)
    changes = [Change(WORKLOADS[workload](rng, number)) for number in range(messages)]
    with engine.begin() as connection:
        connection.execute(delete(Total))
        connection.execute(delete(TABLES.marker))
        if workload != "create":
            connection.execute(insert(Total), [{"id": row, "amount": 0} for row in range(100)])

    @projector(idempotent=True, name="benchmark", **settings)
    @on(Change)
    def handler(event: Change, session: Session) -> None:
        next(runs)
        body(event, session)

    dispatcher = Dispatcher(sessionmaker(engine), handler, tables=TABLES, retry=policy)
    late = itertools.count()
    queue = iter(list(enumerate(changes)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                item = next(queue, None)
            if item is None:
                return
            while True:
                try:
                    dispatcher.deliver(item[1], message_id=str(item[0]))
                    break
                except RetriesExhaustedError:
                    next(late)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    with engine.connect() as connection:
        kept = connection.scalar(select(func.coalesce(func.sum(Total.amount), 0)))
    expected = sum(len(change.rows) for change in changes)
    return {
        "rate": messages / seconds,
        "kept": kept / expected,
        "runs": next(runs) / messages,
        "late": next(late) / messages,
    }


def main() -> None:
    """Print a row for each workload, number of workers and contender."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--messages", type=int, default=400)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 4, 8])
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--contenders", nargs="*", default=list(CONTENDERS))
    parser.add_argument("--base", type=float, default=RetryPolicy.base)
    parser.add_argument("--cap", type=float, default=RetryPolicy.cap)
    parser.add_argument("--attempts", type=int, default=RetryPolicy.attempts)
    options = parser.parse_args()
    policy = RetryPolicy(attempts=options.attempts, base=options.base, cap=options.cap)
    logging.getLogger("projector_dedup").setLevel(logging.ERROR)  # that READ COMMITTED loses updates is the point
    levels = {level for _, level, _ in CONTENDERS.values()}
    size = max(options.workers)
    engines: dict[str | None, Engine] = {
        level: create_engine(options.url, pool_size=size, **({"isolation_level": level} if level else {}))
        for level in levels
    }
    engine = engines[None]
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    print(f"{'workload':10} {'workers':>7} {'contender':12} {'ratio':>6} {'kept':>7} {'runs/msg':>8} {'late':>6}")
    for workload, workers in itertools.product(options.workloads, options.workers):
        rounds = [
            {name: run(engines, name, workload, workers, options.messages, seed, policy) for name in options.contenders}
            for seed in range(options.rounds)
        ]
        for name in options.contenders:
            ratio = statistics.median(r[name]["rate"] / r[options.contenders[0]]["rate"] for r in rounds)
            kept = min(r[name]["kept"] for r in rounds)
            runs = statistics.median(r[name]["runs"] for r in rounds)
            late = statistics.mean(r[name]["late"] for r in rounds)
            print(f"{workload:10} {workers:7} {name:12} {ratio:6.2f} {kept:7.1%} {runs:8.2f} {late:6.1%}")
    Base.metadata.drop_all(engine)
    for engine in engines.values():
        engine.dispose()


if __name__ == "__main__":
    main()
