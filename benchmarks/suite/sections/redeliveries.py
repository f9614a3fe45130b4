"""Some messages come again: what a duplicate costs, and what it does to the read model of who cannot tell."""

from __future__ import annotations

from .. import contenders as who
from ..bench import Bench
from ..harness import Entry, Quartiles, enter, race
from ..results import Plot, Section, Table, rates

KEY = "redeliveries"
_SHARES = (20, 90)
_WHO = (
    who.BASE, who.DEFAULT, who.UPSERT, who.BATCH_100, who.BATCH_1000, who.SHARED_100, who.SHARED_1000,
    who.ONE_STATEMENT, who.SELECT_INSERT,
    who.ON_CONFLICT, who.CTE, who.SET_BASED, who.PROTEAN, who.EVENTSOURCING,
)  # fmt: skip


def measure(bench: Bench) -> Section:
    """Rates at each share, divided by that of who applies everything, at the same share."""
    entries: dict[tuple[str, int], Entry] = {}
    for share in _SHARES:
        everybody = who.on_engine("postgresql")
        racing = {
            (name, share): enter(bench.postgresql, everybody[name], f"{share}-", redelivered=share / 100)
            for name in _WHO
            if name in everybody
        }
        race(list(racing.values()), bench.rounds(40), bench.seconds)
        entries |= racing
    tables: list[Table] = []
    measured: dict[str, list[float]] = {}
    names = list(dict.fromkeys(name for name, _ in entries))
    for share in _SHARES:
        measured |= rates([entries[name, share] for name in names], f", {share} %")
    rows = [[name, *(str(_ratio(entries, name, share)) for share in _SHARES)] for name in names]
    tables.append(Table(["rate ÷ no dedup", *(f"{share} %" for share in _SHARES)], rows))
    rows = [[name, *(str(entries[name, share].totals()) for share in _SHARES)] for name in names]
    tables.append(Table(["read model", *(f"{share} %" for share in _SHARES)], rows))
    bars = [(name, _ratio(entries, name, 90)) for name in names]
    plot = Plot(KEY, "90 % redeliveries", f"rate ÷ {who.BASE}, which counts them all", bars, logarithmic_x=True)
    text = (
        "Each message is, with that probability, one of the last 2,000 again. Rates are divided by that of "
        f"`{who.BASE}` at the same share, which applies every redelivery; 0 % is above. eventsourcing "
        "tracks the position in one ordered stream: it refuses whatever is not later than the last."
    )
    return Section(KEY, "Redeliveries", text, tables, [plot], measured)


def _ratio(entries: dict[tuple[str, int], Entry], name: str, share: int) -> Quartiles:
    return entries[name, share].ratios(entries[who.BASE, share])
