"""The table of what a delivery costs, tests/core/costs.md: read, and written anew."""

from pathlib import Path

from databases import DRIVERS, ENGINES, Driver

PATH = Path(__file__).parents[1] / "core" / "costs.md"
COUNTED = DRIVERS
HEAD = """\
# What a delivery costs: statements / round trips

Counted by tests/core/test_round_trips.py, which fails when a count is another one. Statements are those of
SQLAlchemy; what it hands to a driver as one, with many parameters, is one. Round trips are counted at the wire, with
BEGIN, COMMIT and the ROLLBACK of the pool (on MariaDB); for SQLite they are the statements that it executes. The
handler is one SELECT and one UPDATE. Batches have 100 messages on 10 rows. `a loop`: one SELECT of all rows, then the
handler of one message for each message.

PostgreSQL with a synchronous standby takes as many: tests/dialects/test_standby.py counts there, too, what these rows
say of `new message`, `redelivery`, `claim_timeout`, `formerly` and `batch, all known`.
"""

Cells = dict[str, str]  # way to deliver -> "statements / round trips"


def column(driver: Driver) -> str:
    """Return the heading of a driver's column in the table."""
    return f"{driver.drivername.partition('+')[2]}{' (async)' if driver.is_async else ''}"


def written() -> dict[str, Cells]:
    """Read the table that is written down; return its cells by column and row."""
    table: dict[str, Cells] = {}
    head: list[str] = []
    for line in PATH.read_text().splitlines():
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            head = []
        elif not head:
            head = cells
        else:
            for heading, cell in zip(head, cells, strict=True):
                if cell[:1].isdigit():
                    table.setdefault(heading, {})[name] = cell
    return table


def rendered(table: dict[str, Cells], ways: list[str]) -> str:
    """Return the text of the table: a part for each engine, a column for each driver, a row for each of the `ways`."""
    parts = [HEAD]
    for engine in ENGINES:
        columns = [column(driver) for driver in COUNTED if driver.engine == engine]
        rows = [[way, *(table.get(each, {}).get(way, "-") for each in columns)] for way in ways]
        lines = [[f"**{engine}**", *columns], ["---"] * (1 + len(columns)), *rows]
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        for cells in lines:
            fill = "-" if cells[0] == "---" else " "
            padded = (cell.ljust(width, fill) for cell, width in zip(cells, widths, strict=True))
            parts.append("| " + " | ".join(padded) + " |")
        parts.append("")
    return "\n".join(parts)
