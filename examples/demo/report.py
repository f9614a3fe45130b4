"""Print the demo: its progress, the totals of each carrier, and right beside wrong as bars. 80 columns are enough."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from .flights import Totals
from .workers import Tally

NAIVE, IDEMPOTENT = "@projector", "@projector(idempotent=True)"
_BAR = 29  # columns of the longest bar
_SHOWN = 6  # carriers with a row of their own: the whole demo fits a terminal of 24 rows
_WIDTHS = (8, 11, 10, 12, 12, 11)  # columns of the numbers of the table
_GREEN, _RED = 32, 31


@dataclass(frozen=True)
class Result:
    """The totals of both projectors, those ``expected`` by the data file, and what both lived through."""

    expected: Mapping[str, Totals]
    naive: Mapping[str, Totals]
    idempotent: Mapping[str, Totals]
    naive_tally: Tally
    tally: Tally

    @property
    def exact(self) -> bool:
        """True if the idempotent projector is right, carrier by carrier."""
        return self.idempotent == self.expected


@contextmanager
def progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that draws how many deliveries are acknowledged: on stderr, if that is a terminal."""
    seen = sys.stderr.isatty()

    def draw(acknowledged: int) -> None:
        if seen:
            done = 24 * acknowledged // total
            print(f"\r{name:<28} {'#' * done:.<24} {acknowledged:,} of {total:,}", end="", file=sys.stderr, flush=True)

    try:
        yield draw
    finally:
        if seen:
            print(f"\r{'':<79}\r", end="", file=sys.stderr, flush=True)


def show(result: Result) -> None:
    """Print the totals of the carriers, the faults that both projectors met, and the bars."""
    tally, flights = result.tally, _all(result.expected).flights
    print(*_table(result), sep="\n")
    others = f", and {tally.by_others} times by somebody else" if tally.by_others else ""
    print(
        f"\n{flights:,} flights in {tally.deliveries:,} deliveries. The idempotent projector skipped\n"
        f"{tally.duplicates:,} duplicates. Workers were killed {tally.before_commit} times before the commit and\n"
        f"{tally.after_commit} times between commit and acknowledgement{others}.\n"
    )
    print(*_bars(result), sep="\n")


def _table(result: Result) -> Iterator[str]:
    sides = (result.naive, result.idempotent, result.expected)
    yield f"{'flights':>15}{'miles':>35}"
    heads = zip(_WIDTHS, ("naive", "idempotent", "data file") * 2, strict=True)
    yield "carrier" + "".join(f"{head:>{width}}{'' if head == 'data file' else '  '}" for width, head in heads)
    carriers = sorted(result.expected, key=lambda carrier: result.expected[carrier].flights, reverse=True)
    for carrier in carriers[:_SHOWN]:
        yield f"{carrier:7}" + _row([_all(totals, [carrier]) for totals in sides])
    if others := carriers[_SHOWN:]:
        yield f"others {_row([_all(totals, others) for totals in sides])}"
    yield f"{'all':7}" + _row([_all(totals) for totals in sides])


def _row(totals: Sequence[Totals]) -> str:
    """Return the cells of a carrier; a number that is wrong has a "!" beside it, because some readers see no colour."""
    cells, widths = "", iter(_WIDTHS)
    for naive, idempotent, expected in zip(*totals, strict=True):
        for value in (naive, idempotent):
            right = value == expected
            cells += _paint(f"{value:>{next(widths)},} {' ' if right else '!'}", _GREEN if right else _RED)
        cells += f"{expected:>{next(widths)},}"
    return cells


def _bars(result: Result) -> Iterator[str]:
    """Yield a bar for each count of flights; what was counted too often sticks out of the bar of the data file."""
    expected = _all(result.expected).flights
    counts = {name: _all(totals).flights for name, totals in ((NAIVE, result.naive), (IDEMPOTENT, result.idempotent))}
    longest = max(expected, *counts.values())
    full, over = ("█", "▒") if _can_print("█▒") else ("=", "+")
    right = min(_BAR * expected // longest, _BAR - (longest > expected))
    yield f"{'flights in the data file':28}{full * right:{_BAR}} {expected:>7,}"
    for name, counted in counts.items():
        length = _BAR * counted // longest if counted != expected else right
        bar = _paint(full * min(right, length), _GREEN) + _paint(over * (length - right), _RED)
        exact = result.exact if name == IDEMPOTENT else result.naive == result.expected
        verdict = _paint("exact", _GREEN) if exact else _paint(f"WRONG {counted - expected:+,}", _RED)
        yield f"{name:28}{bar}{' ' * (_BAR - length)} {counted:>7,} {verdict}"


def _all(totals: Mapping[str, Totals], carriers: Collection[str] | None = None) -> Totals:
    """Return the sums over all carriers, or over these."""
    counted = [each for carrier, each in totals.items() if carriers is None or carrier in carriers]
    return Totals(sum(each.flights for each in counted), sum(each.miles for each in counted))


def _paint(text: str, colour: int) -> str:
    if not text or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


def _can_print(text: str) -> bool:
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True
