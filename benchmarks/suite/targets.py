"""What was promised before anything was measured, held against the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import contenders as who
from .harness import Quartiles
from .results import Run, Table


@dataclass(frozen=True)
class Target:
    """``of`` divided by ``by`` in one section, or what it has more (``extra``); smaller is better for a cost."""

    text: str
    must: float
    aim: float
    section: str
    of: str
    by: str
    extra: bool = False
    cost: bool = False

    def measured(self, run: Run) -> Quartiles | None:
        """None where the section did not run, or one of the two was not there."""
        for section in run.sections:
            if section.key == self.section:
                return section.difference(self.of, self.by) if self.extra else section.ratio(self.of, self.by)
        return None

    def verdict(self, found: float) -> str:
        """In a word."""
        sign = -1 if self.cost or self.extra else 1
        if sign * found >= sign * self.aim:
            return "aim"
        return "must" if sign * found >= sign * self.must else "MISSED"


TARGETS = (
    Target("ORM handler, new ÷ no dedup", 0.78, 0.92, "rates", who.DEFAULT, who.BASE),
    Target("the same: round trips more", 1, 0, "trips", who.DEFAULT, who.BASE, extra=True),
    Target("Core-upsert handler, new ÷ no dedup", 0.68, 0.85, "rates", who.UPSERT, who.BASE_UPSERT),
    Target("20 % redeliveries, ORM", 0.95, 1.1, "redeliveries", f"{who.DEFAULT}, 20 %", f"{who.BASE}, 20 %"),
    Target("90 % redeliveries, ORM", 2.2, 4, "redeliveries", f"{who.DEFAULT}, 90 %", f"{who.BASE}, 90 %"),
    Target("batch handler 1000 ÷ raw set-based", 0.4, 0.8, "rates", who.ONE_STATEMENT, who.SET_BASED),
    Target("deliver ÷ Protean", 4, 6, "rates", who.DEFAULT, who.PROTEAN),
    *(
        Target(f"AsyncDispatcher, {driver} ÷ no dedup", 0.74, 0.9, "rates", who.ASYNC[driver], who.BASE_ASYNC[driver])
        for driver in who.ASYNC
    ),
    Target("cost at 10 M markers ÷ at 10 k", 1.3, 1.1, "table-size", "10,000,000", "10,000", cost=True),
    Target("SQLite, ORM ÷ no dedup", 0.75, 0.92, "engines", f"{who.DEFAULT}, SQLite", f"{who.BASE}, SQLite"),
    Target("MariaDB, ORM ÷ no dedup", 0.75, 0.92, "engines", f"{who.DEFAULT}, MariaDB", f"{who.BASE}, MariaDB"),
)


def table(run: Run, targets: Sequence[Target] = TARGETS) -> Table:
    """Every target, the missed ones too."""
    rows = []
    for target in targets:
        found, sign = target.measured(run), "≤" if target.cost or target.extra else "≥"
        measured, verdict = (str(found), target.verdict(found.middle)) if found else ("-", "-")
        rows.append([target.text, f"{sign} {target.must:g}", f"{sign} {target.aim:g}", measured, verdict])
    return Table(["target", "must", "aim", "measured", "met"], rows)
