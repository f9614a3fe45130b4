"""Report what a run of the tests reached: drivers, brokers, and the contract through each driver at each level.

The last lines of a run say what was not tested, why, and how to test that too.
`PROJECTOR_DEDUP_TEST_REQUIRE=postgresql,mariadb,sqlite,pgbouncer,rabbitmq,nats,redis,galera`, in one word, makes it a
failure if a driver of these, or one of these, is not tested. A plain `make test` leaves out the tests that are marked
`slow` or `nightly`. Whoever requires an engine runs the slow ones too, and whoever selects tests (by a path, `-k` or
`-m`) all that are selected.
`PROJECTOR_DEDUP_TEST_MATRIX=write` puts the contract's part into docs/tested-on.md, `check` fails where that page says
something else. Tests may run in several processes (pytest-xdist): what a test reached travels with its report.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import pytest
import sqlalchemy
from sqlalchemy import Connection, Engine, event

from databases import DRIVERS

ROOT = Path(__file__).parents[2]
PAGE, RECORD = ROOT / "docs" / "tested-on.md", ROOT / "tests" / "support" / "matrix.json"
BEGIN, END = "<!-- matrix: made by `make matrix` -->\n", "<!-- end of matrix -->"
LEVELS = ("default", "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE")
NAMES = {
    "postgresql": "PostgreSQL",
    "norelease": "PostgreSQL without RELEASE",
    "mariadb": "MariaDB",
    "mysql": "MariaDB",
    "sqlite": "SQLite",
}
COMBINATION = (
    f"Python {sys.version_info[0]}.{sys.version_info[1]}, SQLAlchemy {'.'.join(sqlalchemy.__version__.split('.')[:2])}"
)
SERVERS = ("pgbouncer", "rabbitmq", "nats", "redis", "galera", "prometheus")
PARTS = {**{str(driver): driver.engine for driver in DRIVERS}, **{name: name for name in SERVERS}}
"""Everything that a run reports on, with the word by which it is required."""

REMEDIES = {
    "postgresql": "PROJECTOR_DEDUP_TEST_POSTGRESQL_URL=postgresql://user@host/postgres",
    "mariadb": "apt-get install mariadb-server",
    "pgbouncer": "apt-get install pgbouncer",
    "rabbitmq": "PROJECTOR_DEDUP_TEST_RABBITMQ_URL=amqp://guest:guest@host",
    "nats": "PROJECTOR_DEDUP_TEST_NATS_URL=nats://host",
    "redis": "PROJECTOR_DEDUP_TEST_REDIS_URL=redis://host:6379/0",
    "galera": "apt-get install mariadb-server galera-4 rsync",
    "prometheus": "apt-get install prometheus",
}
"""How to test what was not tested, by the word by which it is required; CONTRIBUTING.md has the rest."""
SLOW = "slow: left out of a plain run; make test ARGS=tests"
NIGHTLY = "nightly: make nightly; make test ARGS=tests"

REQUIRED = set(os.environ.get("PROJECTOR_DEDUP_TEST_REQUIRE", "").replace(",", " ").split())
MATRIX = os.environ.get("PROJECTOR_DEDUP_TEST_MATRIX")
PART = os.environ.get("PROJECTOR_DEDUP_TEST_PART")  # one of several parts of the tests: it need not reach everything
if unknown := REQUIRED - set(PARTS.values()):
    raise pytest.UsageError(f"PROJECTOR_DEDUP_TEST_REQUIRE names {unknown}; known are {set(PARTS.values())}.")

Table = dict[str, dict[str, str]]  # row -> level -> what the cell says


def left_out(config: pytest.Config) -> dict[str, str]:
    """Return the marks whose tests are left out, with the reason: none where the command line selects tests."""
    if config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword or config.option.markexpr:
        return {}
    return {"nightly": NIGHTLY} if REQUIRED else {"slow": SLOW, "nightly": NIGHTLY}


class Reached:
    """A pytest plugin that remembers, from the reports of all tests."""

    def __init__(self) -> None:
        self.ran: dict[str, str] = {}  # part -> version of the server that was reached
        self.unavailable: dict[str, str] = {}  # part or engine -> why it could not be had
        self.cells: dict[tuple[str, str], Counter[str]] = {}
        self.orders: Counter[str] = Counter()  # case -> orders that were run (tests/proofs/exploring)
        self._news: list[tuple[str, Any]] = []  # since the last report
        # Not to engine_connect, where a listener may choose a database: the library would ask for its tables each time;
        # nor to commit, before which a listener may execute something: no statement would take COMMIT along.
        event.listen(Engine, "before_cursor_execute", self._connected)

    def saw(self, part: str, version: str) -> None:
        """Note that a driver or server was there and answered, and its version."""
        if (news := ("ran", (part, version))) not in self._news:
            self._news.append(news)

    def explored(self, case: str, orders: int) -> None:
        """Note how many orders of a case were run."""
        self._news.append(("orders", (case, orders)))

    def give_up(self, required_by: str, what: str, why: str) -> NoReturn:
        """End the test: it is a failure where this was required, else a skip that the last lines tell of."""
        self._news.append(("unavailable", (what, why)))
        if required_by in REQUIRED:
            pytest.fail(f"{what} is required here, but: {why}", pytrace=False)
        pytest.skip(f"{what}: {why}")

    def _connected(self, connection: Connection, *_: object) -> None:
        """Believe only connections that were made: a fixture that was asked for proves nothing."""
        dialect = connection.dialect
        driver = f"{dialect.name}+{dialect.driver.removesuffix('_async')}"
        for known in DRIVERS:
            if known.drivername == driver and known.is_async == dialect.is_async:
                self.saw(str(known), ".".join(map(str, dialect.server_version_info or ())))

    # Where the test runs --------------------------------------------------------------------------------------------

    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Note the cell of the matrix to which a test of the contract belongs, while its subject is known."""
        if item.get_closest_marker("contract") and isinstance(item, pytest.Function) and "subject" in item.funcargs:
            self._news.append(("cell", _cell(item)))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> None:
        """Put what was noted into the report of the test, before that is made."""
        item.user_properties += dict.fromkeys(self._news)
        self._news.clear()

    # Where the reports come together --------------------------------------------------------------------------------

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the news from the report."""
        name: str
        value: Any
        for name, value in report.user_properties:
            if name in ("ran", "unavailable"):
                getattr(self, name).update([value])
            elif name == "orders" and report.when == "call":
                self.orders.update(dict([value]))
            elif name == "cell" and (report.when == "call" or report.failed):
                self.cells.setdefault(tuple(value), Counter())[report.outcome] += 1

    def not_run(self) -> list[str]:
        """The parts that no test reached."""
        return [part for part in PARTS if part not in self.ran]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Turn success into failure if something required was not reached, or the page's matrix is not true."""
        if hasattr(session.config, "workerinput") or session.config.option.collectonly:
            return
        if MATRIX == "write":
            self._write_page()
        missing = not PART and any(PARTS[part] in REQUIRED for part in self.not_run())
        if (missing or self._differs()) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def why_not(self, part: str) -> str:
        """The reason why no test reached a part."""
        return self.unavailable.get(PARTS[part]) or self.unavailable.get(part) or "no test asked for it"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say what was not tested: where it was required, that makes this run a failure."""
        skipped = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
        for reason in (SLOW, NIGHTLY):
            if left := sum(each.endswith(reason) for each in skipped):
                terminalreporter.write_line(f"not tested: {left:,} tests ({reason})")
        for part in self.not_run():
            if PARTS[part] in REQUIRED and not PART:
                terminalreporter.write_line(f"REQUIRED, but not tested: {part} ({self.why_not(part)})", red=True)
            elif part in self.unavailable or PARTS[part] in self.unavailable:
                terminalreporter.write_line(
                    f"not tested: {part} ({self.why_not(part)}); {REMEDIES.get(PARTS[part], '')}"
                )
        if self.orders:
            cases = len(self.orders)
            terminalreporter.write_line(f"explored: {self.orders.total():,} orders of round trips, in {cases} cases")
            for case, orders in sorted(self.orders.items()) if terminalreporter.verbosity > 0 else ():
                terminalreporter.write_line(f"  {orders:9,}  {case}")
        if different := self._differs():
            terminalreporter.write_line(f"docs/tested-on.md is not what was run: {different}; make matrix", red=True)

    # The matrix of the page -----------------------------------------------------------------------------------------

    def _table(self) -> Table:
        table: Table = {}
        for (row, level), outcomes in sorted(self.cells.items()):
            failed = outcomes["failed"]
            table.setdefault(row, {})[level] = f"**{failed} failed**" if failed else str(outcomes["passed"])
        return table

    def _differs(self) -> str:
        """The rows of this Python and SQLAlchemy where the page says something else of a cell that ran."""
        record = _record()
        if (
            MATRIX != "check" or PART or COMBINATION not in record
        ):  # it tells of the combinations that were asked to write it
            return ""
        recorded, found = record[COMBINATION], self._table()
        rows = [row for row, cells in found.items() if not cells.items() <= recorded.get(row, {}).items()]
        return ", ".join(rows) or ("" if rendered(record) in PAGE.read_text() else "its text was changed by hand")

    def _write_page(self) -> None:
        record = {**_record(), COMBINATION: self._table()}
        RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + rendered(record) + rest[rest.index(END) + len(END) :])


reached = Reached()


def _cell(item: pytest.Function) -> tuple[str, str]:
    subject: Any = item.funcargs["subject"]
    name = subject.url.get_backend_name()
    driver = subject.url.get_dialect()
    database = ", ".join(filter(None, [NAMES.get(name, name), getattr(item.cls, "note", "")]))
    row = f"{database} | {driver.driver.removesuffix('_async')}{' (async)' if driver.is_async else ''}"
    return row, subject.dispatcher_isolation or subject.option_isolation or subject.engine_isolation or "default"


def _record() -> dict[str, Table]:
    found: dict[str, Table] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return found


def rendered(record: dict[str, Table]) -> str:
    """The matrix as Markdown: a row for each driver, a column for each level, a number for each combination."""
    combinations = sorted(record)
    rows = sorted({row for table in record.values() for row in table}, key=str.casefold)

    def cells(row: str) -> list[str]:
        return [" / ".join(record[each].get(row, {}).get(level, "-") for each in combinations) for level in LEVELS]

    lines = [
        f"| database | driver | {' | '.join(LEVELS)} |",
        f"|---|---{'|---' * len(LEVELS)}|",
        *(f"| {row} | {' | '.join(cells(row))} |" for row in rows),
        "",
        f"Each cell: tests of the contract that passed, on {' / '.join(combinations)}. `-`: not run.",
    ]
    return BEGIN + "\n".join(lines) + "\n" + END
