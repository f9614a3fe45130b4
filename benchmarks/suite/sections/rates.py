"""Every contender, one worker, every message new."""

from __future__ import annotations

from ..bench import Bench
from ..contenders import BASE, MISSING, on_engine
from ..harness import Entry, enter, race, take_turn
from ..results import Plot, Section, rates, standings

KEY = "rates"


def measure(bench: Bench) -> Section:
    """Rates, divided by that of the same ORM code without deduplication."""
    entries = [enter(bench.postgresql, contender) for contender in on_engine("postgresql").values()]
    race(entries, bench.rounds(9), lambda entry: take_turn(entry, bench.seconds))
    base = next(entry for entry in entries if entry.contender.name == BASE)
    missing = "".join(f" Not there: {name} ({why})." for name, why in MISSING.items())
    return Section(
        KEY,
        "New messages, one worker",
        f"Rates divided by that of `{BASE}` in the same round: medians (quartiles). `CPU` is the client's, for each "
        "message. The async contenders have 32 tasks and connections, all others one connection. Protean and "
        "eventsourcing have no batches." + missing,
        [standings(entries, base)],
        [
            _plot("rates-single", "One message, one transaction", [e for e in entries if e.contender.batch == 1], base),
            _plot("rates-batch", "Batches", [e for e in entries if e.contender.batch > 1], base),
        ],
        rates(entries),
    )


def _plot(file: str, title: str, entries: list[Entry], base: Entry) -> Plot:
    bars = [(entry.contender.name, entry.ratios(base)) for entry in entries]
    return Plot(file, title, f"rate ÷ {BASE}", bars, marks={BASE: 1.0}, logarithmic_x=file == "rates-batch")
