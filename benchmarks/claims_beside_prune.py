"""What claims notice of a prune: the second half of `benchmarks/prune.py`, which runs it."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import Engine, MetaData, create_engine
from sqlalchemy.orm import Session

from projector_dedup import claim, make_tables
from projector_dedup.maintenance.cleanup import prune
from prune import BATCH, fill, retention_before

METADATA = MetaData()
CLAIMED = make_tables(METADATA, "benchmark_claimed")


def claims(engine: Engine, markers: int, expired: int) -> dict[str, list[float]]:
    """Idle and beside a process that prunes, in turns: the machine is not as fast in one minute as in the next."""
    unique = itertools.count()
    idle: list[float] = []
    beside: list[float] = []
    METADATA.drop_all(engine)
    METADATA.create_all(engine)
    fill(engine, CLAIMED.marker.name, 0, markers)

    def claiming(over: Callable[[], bool]) -> Iterator[float]:
        while not over():
            began = time.perf_counter()
            with Session(engine) as session:
                assert claim(session, f"claim-{next(unique)}", "benchmark", tables=CLAIMED)
                session.commit()
            yield time.perf_counter() - began

    context, parts = multiprocessing.get_context("spawn"), 10
    for part in range(1, parts + 1):
        idle += itertools.islice(claiming(lambda: False), 300)
        ready, go, done = (context.Event() for _ in range(3))
        url, hours = engine.url.render_as_string(hide_password=False), retention_before(expired * part // parts)
        pruner = context.Process(target=_prune_apart, args=(url, hours, ready, go, done))
        pruner.start()
        ready.wait()
        go.set()
        beside += claiming(done.is_set)
        pruner.join()
    METADATA.drop_all(engine)
    return {"idle": idle, "beside a prune": beside}


def _prune_apart(url: str, hours: float, ready: Any, go: Any, done: Any) -> None:
    engine = create_engine(url)
    engine.connect().close()
    ready.set()
    go.wait()
    prune(engine, retention_hours=hours, tables=CLAIMED, batch_size=BATCH)
    done.set()
