"""How fast expired markers go, and what claims notice of it: `benchmarks/prune.py`, in this run."""

from __future__ import annotations

import statistics

from sqlalchemy import create_engine

import prune
from claims_beside_prune import claims

from ..bench import Bench
from ..harness import progress, quartiles
from ..results import Section, Table

KEY = "prune"
_MARKERS, _EXPIRED = 600_000, 500_000


def measure(bench: Bench) -> Section:
    """Ours, the statement that one writes first, and Protean's."""
    place = bench.postgresql.place()
    engine = create_engine(place.url)
    markers, expired = bench.size(_MARKERS), bench.size(_EXPIRED)
    turns: dict[str, list[prune.Pruned]] = {}
    for turn in prune.compare(engine, bench.rounds(2), markers, expired):
        progress(f"{turn.contender}: {turn.deleted:,} deleted, {turn.rate:,.0f}/s")
        turns.setdefault(turn.contender, []).append(turn)
    waits = claims(engine, markers, expired)
    engine.dispose()
    bench.postgresql.drop(place)
    rates = {name: [turn.rate for turn in found] for name, found in turns.items()}
    rows = []
    for name, found in turns.items():
        ratios = quartiles(mine / rate for mine, rate in zip(rates["ours"], rates[name], strict=True))
        longest = max(max(turn.statements) for turn in found) * 1000
        rows.append([name, f"{statistics.median(rates[name]):,.0f}", f"{longest:,.1f}", str(ratios)])
    cuts = {name: statistics.quantiles(seconds, n=100) for name, seconds in waits.items()}
    claimed = [
        [name, f"{len(waits[name]):,}", f"{cut[49] * 1000:.2f}", f"{cut[98] * 1000:.2f}"] for name, cut in cuts.items()
    ]
    return Section(
        KEY,
        "Prune",
        f"{expired:,} of {markers:,} markers deleted, in turns; the second statement is stopped after 20 seconds. Then "
        "claims, one after the other, in turns idle and beside a process that prunes.",
        [
            Table(["", "markers/s", "longest statement, ms", "ours is, times"], rows),
            Table(["claims", "number", "p50, ms", "p99, ms"], claimed),
        ],
        rounds=rates,
    )
