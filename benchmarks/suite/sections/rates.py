"""Every contender, one worker, every message new."""

from __future__ import annotations

from ..bench import Bench
from ..contenders import ASYNC, BASE, BASE_ASYNC, MISSING, on_engine
from ..harness import Entry, enter, race
from ..results import Plot, Section, rates, standings

KEY = "rates"


def measure(bench: Bench) -> Section:
    """Rates, divided by that of the same ORM code without deduplication."""
    everybody = on_engine("postgresql")
    entries = [enter(bench.postgresql, each) for each in everybody.values() if each.tasks == 1]
    race(entries, bench.rounds(40), bench.seconds)
    base = next(entry for entry in entries if entry.contender.name == BASE)
    tables, measured = [standings(entries, base)], rates(entries)
    for driver in ASYNC:  # one after the other: each has 64 connections
        pair = [enter(bench.postgresql, everybody[name]) for name in (BASE_ASYNC[driver], ASYNC[driver])]
        race(pair, bench.rounds(40), 2 * bench.seconds)
        tables.append(standings(pair, pair[0]))
        measured |= rates(pair)
    missing = "".join(f" Not there: {name} ({why})." for name, why in MISSING.items())
    return Section(
        KEY,
        "New messages, one worker",
        f"Rates divided by that of `{BASE}` in the same round, those under asyncio by that of the same driver "
        "without deduplication: medians (quartiles). `CPU` is the client's, for each message. The contenders under "
        "asyncio have 32 tasks and connections, all others one connection. Protean and eventsourcing have no batches."
        + missing,
        tables,
        [
            _plot("rates-single", "One message, one transaction", [e for e in entries if e.contender.batch == 1], base),
            _plot("rates-batch", "Batches", [e for e in entries if e.contender.batch > 1], base),
        ],
        measured,
    )


def _plot(file: str, title: str, entries: list[Entry], base: Entry) -> Plot:
    bars = [(entry.contender.name, entry.ratios(base)) for entry in entries]
    return Plot(file, title, f"rate ÷ {BASE}", bars, marks={BASE: 1.0}, logarithmic_x=file == "rates-batch")
