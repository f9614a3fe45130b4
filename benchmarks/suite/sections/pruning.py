"""How fast expired markers go: the library's `prune`, the statement that one writes first, and Protean's cleanup."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import URL, create_engine, select, tuple_

from projector_dedup.maintenance import cleanup

from .. import contenders as who
from ..contenders.orm import TABLES
from ..harness import Bench, Contender, enter, progress, quartiles
from ..results import Section, Table

_MARKERS, _EXPIRED = 600_000, 500_000
_BATCH = 5_000
_HOURS = 24.0  # the markers before that are expired
_LIMIT = 20  # seconds after which the second way is stopped


def _ours(url: URL, _contender: Contender) -> int:
    engine = create_engine(url)
    done = cleanup.prune(engine, retention_hours=_HOURS, batch_size=_BATCH, tables=TABLES)
    engine.dispose()
    return done.deleted


def _naive(url: URL, _contender: Contender) -> int:
    engine, marker, deleted, end = create_engine(url), TABLES.marker, 0, time.monotonic() + _LIMIT
    expired = marker.c.processed_at < datetime.now(UTC) - timedelta(hours=_HOURS)
    oldest = select(*marker.primary_key).where(expired).order_by(marker.c.processed_at).limit(_BATCH)
    rows = _BATCH
    while rows == _BATCH and time.monotonic() < end:
        with engine.begin() as connection:
            rows = connection.execute(marker.delete().where(tuple_(*marker.primary_key).in_(oldest))).rowcount
        deleted += rows
    engine.dispose()
    return deleted


def _protean(url: URL, contender: Any) -> int:
    from protean.utils.consume_idempotency import cleanup_processed_messages

    contender.connect(url)
    deleted = int(cleanup_processed_messages(contender.domain, retention_hours=_HOURS, batch_size=_BATCH))
    contender.disconnect()
    return deleted


_WAYS: dict[str, tuple[str, Callable[[URL, Any], int]]] = {
    "ours": (who.DEFAULT, _ours),
    "pk IN (SELECT ... LIMIT)": (who.DEFAULT, _naive),
    "Protean": (who.PROTEAN, _protean),
}


def prune(bench: Bench) -> Section:
    """Everybody in turns, each on a table that was just filled; markers of all ages lie side by side."""
    everybody = who.on_engine("postgresql")
    rates: dict[str, list[float]] = {}
    for _ in range(bench.rounds(2)):
        for name, (contender, way) in _WAYS.items():
            if contender not in everybody:
                continue
            entry = enter(bench.postgresql, everybody[contender])
            _fill(bench, entry.place.run, with_id=name == "Protean")
            began = time.perf_counter()
            deleted = way(entry.place.url, everybody[contender])
            rates.setdefault(name, []).append(deleted / (time.perf_counter() - began))
            progress(f"{name}: {deleted:,} deleted, {rates[name][-1]:,.0f}/s")
            bench.postgresql.drop(entry.place)
    rows = [
        [
            name,
            f"{statistics.median(found):,.0f}",
            str(quartiles(ours / rate for ours, rate in zip(rates["ours"], found, strict=True))),
        ]
        for name, found in rates.items()
    ]
    return Section(
        "prune",
        "Prune",
        f"{bench.size(_EXPIRED):,} of {bench.size(_MARKERS):,} markers deleted, in turns, {_BATCH:,} at a time; the "
        f"second way is stopped after {_LIMIT} seconds.",
        [Table(["", "markers/s", "ours is, times"], rows)],
        rounds=rates,
    )


def _fill(bench: Bench, run: Callable[..., None], *, with_id: bool) -> None:
    """Markers in no order of their ids, one of six of them not expired."""
    expired, markers = bench.size(_EXPIRED), bench.size(_MARKERS)
    names, values = ("id, ", "gen_random_uuid()::text, ") if with_id else ("", "")
    run(
        f"INSERT INTO processed_message ({names}message_id, handler, processed_at) SELECT {values}md5(n::text), "
        f"'billing.AccountTotals.add_payment', now() - interval '{_HOURS} hours' + (n - {expired}) * "
        f"interval '10 milliseconds' FROM generate_series(1, {markers}) n",
        "VACUUM ANALYZE processed_message",
        "CHECKPOINT",
    )
