"""Print the demo: its progress, the table of totals, and the verdict."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ..errors import Failed
from .result import Result, contradicted
from .scene import Sums, Words
from .workers import Tally

try:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise Failed("rich, which prints the demo, is not installed; run: pip install 'projector-dedup[demo]'") from error


class Report:
    """Prints the demo: with colours on a terminal, as plain lines anywhere else; with a bar if there is a terminal."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._console = Console(highlight=False)

    def opening(self, text: str) -> None:
        """Print what is about to happen."""
        self._console.print(text)
        self._console.print()

    @contextmanager
    def progress(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show the progress of one side; yield a function to call with the number of acknowledged deliveries.

        The bar is drawn on stdout, or, if only stderr is a terminal, there, until the line on stdout is printed.
        """
        title = f"{name:<20}"
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        if self._console.is_terminal:
            bar = Progress(*columns, console=self._console)
        else:
            bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        with bar:
            task = bar.add_task(title, total=total)
            yield lambda acknowledged: bar.update(task, completed=acknowledged)
        if not self._console.is_terminal:
            self._console.print(f"{title} {total:,} {self._words.acknowledged}")

    def result(self, result: Result) -> None:
        """Print the table of totals and the verdict."""
        self._console.print()
        self._console.print(_table(result, self._words))
        for line in verdict(result, self._words):
            self._console.print(line)


def _table(result: Result, words: Words) -> Table:
    sides = (result.naive, result.idempotent, result.expected)
    table = Table(box=SIMPLE_HEAD, show_footer=True, padding=0, pad_edge=False)
    table.add_column(words.group, footer="all")
    naive, ours, truth = words.columns
    for number, field in enumerate(words.fields):
        footers = _row([_sum(totals) for totals in sides], number)
        headers = (f"{field}\n{naive}  ", f"\n{ours}", f"\n{truth}")
        for header, footer in zip(headers, footers, strict=True):
            table.add_column(header, footer, justify="right")
    for group in _groups(result):
        rows = [totals.get(group, (0, 0)) for totals in sides]
        table.add_row(group, *(cell for number, _ in enumerate(words.fields) for cell in _row(rows, number)))
    return table


def _row(totals: Sequence[Sums], number: int) -> list[Text]:
    naive, ours, expected = (total[number] for total in totals)
    return [_cell(naive, expected), _cell(ours, expected), Text(f"{expected:,}")]


def _groups(result: Result) -> list[str]:
    return sorted(result.expected.keys() | result.naive.keys() | result.idempotent.keys())


def _cell(value: int, expected: int) -> Text:
    """Return a number, marked by colour and by "!" if it is wrong: some readers see no colour."""
    return Text(f"{value:,}  ", "green") if value == expected else Text(f"{value:,} !", "bold red")


def verdict(result: Result, words: Words) -> list[str]:
    """Return the lines that sum up the run: its numbers, and which side was right."""
    (expected, _), (naive, _) = _sum(result.expected), _sum(result.naive)
    tally = result.tally
    killed = f", and {tally.killed} times by somebody else" if tally.killed else ""
    refused = f"; {tally.refused} {words.deliveries} refused for now" if tally.refused else ""
    off = naive - expected
    width = max(map(len, words.columns[:2])) + 1
    first, second = (f"[bold]{name}[/]{':':<{width - len(name)}}" for name in words.columns[:2])
    return [
        f"{expected:,} {words.messages}, {tally.deliveries:,} {words.deliveries}, {tally.deliveries - expected:,} of "
        f"them again. Workers were killed {tally.crashes_before_commit} times before the commit and "
        f"{tally.crashes_after_commit} times between commit and {words.acknowledgement}{killed}.",
        f"{second} {_rightness(result, result.idempotent, words)}; {tally.duplicates:,} {words.duplicates}{refused}"
        f"{_sameness(tally, words)}, {tally.seconds:.1f} s",
        f"{first} {_rightness(result, result.naive, words)}, {abs(off):,} {words.fields[0]} too "
        f"{'few' if off < 0 else 'many'}{_sameness(result.naive_tally, words)}; {result.naive_tally.seconds:.1f} s",
    ]


def _rightness(result: Result, totals: Mapping[str, Sums], words: Words) -> str:
    groups = _groups(result)
    if wrong := sum(totals.get(group) != result.expected.get(group) for group in groups):
        return f"[bold red]wrong[/] for {wrong} of {len(groups)} {words.group}s"
    return f"[bold green]exact[/] for all {len(groups)} {words.group}s"


def _sameness(tally: Tally, words: Words) -> str:
    """Return whether the callers of each message got the same answer; nothing if nobody was answered."""
    if not tally.answers:
        return ""
    if different := contradicted(tally):
        return f"; callers of {different:,} {words.messages} got [bold red]different answers[/]"
    return "; the callers of each got [bold green]the same answer[/]"


def _sum(totals: Mapping[str, Sums]) -> Sums:
    return sum(number for number, _ in totals.values()), sum(amount for _, amount in totals.values())
