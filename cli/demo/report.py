"""Print the demo: its progress, the table of carriers, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..errors import Failed
from .flights import Totals
from .result import Result

try:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table
    from rich.text import Text
except ImportError as error:
    raise Failed("rich, which prints the demo, is not installed; run: pip install 'projector-dedup[demo]'") from error


class Report:
    """Prints the demo: with colours and a moving bar on a terminal, as plain lines anywhere else."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)

    def opening(self, flights: int, of: int, redelivered: float, workers: int, seed: int, database: str) -> None:
        """Print what is about to happen."""
        self._console.print(
            f"{flights:,} of the {of:,} flights out of New York in 2013 are delivered at least once: "
            f"{redelivered:.0%} come twice, and {workers} {'worker delivers' if workers == 1 else 'workers deliver'} "
            f"them and crash. {database}, seed {seed}."
        )
        self._console.print()

    @contextmanager
    def progress(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show the progress of one projector; yield a function to call with the number of acknowledged deliveries."""
        title = f"{name + ' projector':<20}"
        if not self._console.is_terminal:
            yield lambda _acknowledged: None
            self._console.print(f"{title} {total:,} deliveries acknowledged")
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as bar:
            task = bar.add_task(title, total=total)
            yield lambda acknowledged: bar.update(task, completed=acknowledged)

    def result(self, result: Result) -> None:
        """Print the table of carriers and the verdict."""
        self._console.print()
        self._console.print(_table(result))
        for line in verdict(result):
            self._console.print(line)


def _table(result: Result) -> Table:
    read_models = (result.naive, result.idempotent, result.expected)
    table = Table(box=SIMPLE_HEAD, show_footer=True, padding=0, pad_edge=False)
    table.add_column("carrier", footer="all")
    for field in Totals._fields:
        footers = _row([_sum(totals) for totals in read_models], field)
        headers = (f"{field}\nnaive  ", "\nidempotent", "\ndata file")
        for header, footer in zip(headers, footers, strict=True):
            table.add_column(header, footer, justify="right")
    for carrier in _carriers(result):
        rows = [totals.get(carrier, Totals(0, 0)) for totals in read_models]
        table.add_row(carrier, *(cell for field in Totals._fields for cell in _row(rows, field)))
    return table


def _row(totals: Sequence[Totals], field: str) -> list[Text]:
    naive, ours, expected = (getattr(total, field) for total in totals)
    return [_cell(naive, expected), _cell(ours, expected), Text(f"{expected:,}")]


def _carriers(result: Result) -> list[str]:
    return sorted(result.expected.keys() | result.naive.keys() | result.idempotent.keys())


def _cell(value: int, expected: int) -> Text:
    """Return a number, marked by colour and by "!" if it is wrong: some readers see no colour."""
    return Text(f"{value:,}  ", "green") if value == expected else Text(f"{value:,} !", "bold red")


def verdict(result: Result) -> list[str]:
    """Return the lines that sum up the run: its numbers, and which projector was right."""
    expected, naive = _sum(result.expected), _sum(result.naive)
    carriers = _carriers(result)
    wrong, ours_wrong = (
        sum(totals.get(carrier) != result.expected.get(carrier) for carrier in carriers)
        for totals in (result.naive, result.idempotent)
    )
    tally = result.tally
    killed = f", {tally.killed} killed by somebody else" if tally.killed else ""
    refused = f", {tally.refused} deliveries refused for now" if tally.refused else ""
    off = naive.flights - expected.flights
    return [
        f"{expected.flights:,} messages, {tally.deliveries:,} deliveries, "
        f"{tally.deliveries - expected.flights:,} of them again. Workers crashed {tally.crashes_before_commit} times "
        f"before the commit and {tally.crashes_after_commit} times between commit and acknowledgement{killed}.",
        f"[bold]idempotent[/]: {_rightness(ours_wrong, len(carriers))}; {tally.duplicates:,} duplicates skipped"
        f"{refused}, {tally.seconds:.1f} s",
        f"[bold]naive[/]:      {_rightness(wrong, len(carriers))}, {abs(off):,} flights too "
        f"{'few' if off < 0 else 'many'}; {result.naive_tally.seconds:.1f} s",
    ]


def _rightness(wrong: int, carriers: int) -> str:
    if wrong:
        return f"[bold red]wrong[/] for {wrong} of {carriers} carriers"
    return f"[bold green]exact[/] for all {carriers} carriers"


def _sum(totals: dict[str, Totals]) -> Totals:
    return Totals(sum(total.flights for total in totals.values()), sum(total.miles for total in totals.values()))
