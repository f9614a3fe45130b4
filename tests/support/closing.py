"""How a run of the tests looks: how far it is, each failure as it comes, and three closing lines.

They say what passed, what was not tested and why, and how to test that too. A plain `make test` leaves out the tests
that are marked `slow`; whoever selects tests (by a path, `-k` or `-m`) or requires an engine runs those too.
"""

import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import pytest

from reached import PARTS, REQUIRED, reached

SLOW, PLAIN = "slow tests", "left out of a plain run"

REMEDIES = {
    "postgresql": "PROJECTOR_DEDUP_TEST_POSTGRESQL_URL=postgresql://user@host/postgres",
    "mariadb": "apt-get install mariadb-server",
    "pgbouncer": "apt-get install pgbouncer",
    "rabbitmq": "PROJECTOR_DEDUP_TEST_RABBITMQ_URL=amqp://guest:guest@host",
    "nats": "PROJECTOR_DEDUP_TEST_NATS_URL=nats://host",
    "redis": "PROJECTOR_DEDUP_TEST_REDIS_URL=redis://host",
    "galera": "apt-get install mariadb-server galera-4 rsync",
    SLOW: "make test ARGS=tests",
}
"""How to test what was not tested, by the word by which it is required; CONTRIBUTING.md has the rest."""

SECONDS_BETWEEN = 10.0


def is_plain(config: pytest.Config) -> bool:
    """True if no test was selected on the command line, and no engine is required."""
    selected = config.args_source is pytest.Config.ArgsSource.ARGS or config.option.keyword or config.option.markexpr
    return not selected and not REQUIRED


class Closing:
    """A pytest plugin for the process that has the terminal: progress, failures and the closing lines."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._began = self._printed = time.monotonic()
        self._done = 0
        self._outcomes: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()  # by reason

    def _say(self, line: str, **markup: bool) -> None:
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        terminal.write_line(line, **markup)
        terminal.flush()  # where it is read from a file

    def pytest_sessionstart(self) -> None:
        """Leave out the names of files, which are there only in a run of one process."""
        terminal: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        terminal.showfspath = terminal.showfspath and self._config.get_verbosity() > 0

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Generator[None, tuple[str, Any, Any], tuple[str, Any, Any]]:
        """Print no letter for a test, unless asked to be verbose: there are thousands."""
        status = yield
        if self._config.get_verbosity() > 0:
            return status
        category, _, word = status
        return category, "", word if category in ("failed", "error") else ""  # the word is for the summary

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count the test, and name it at once if it failed."""
        if report.failed:
            self._outcomes["failed"] += 1
            self._say(f"FAILED in {report.when}: {report.nodeid}", red=True)
        elif report.skipped and isinstance(report.longrepr, tuple):
            self._skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
        elif report.when == "call":
            self._outcomes[report.outcome] += 1

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """Say now and then how far the run is."""
        self._done += 1
        if time.monotonic() - self._printed > SECONDS_BETWEEN and self._config.get_verbosity() == 0:
            self._printed = time.monotonic()
            session: Any = self._config.pluginmanager.get_plugin("session")
            total = session.testscollected
            self._say(f"{self._done / total:4.0%} of {total:,} tests, {self._time()}")

    def pytest_unconfigure(self) -> None:
        """Print the closing lines, below everything else."""
        if self._done:
            for line in self._closing_lines():
                self._say(line)

    def _closing_lines(self) -> Iterator[str]:
        failed = f", {self._outcomes['failed']:,} FAILED" if self._outcomes["failed"] else ""
        yield f"passed: {_tests(self._outcomes['passed'])}{failed}, in {self._time()}, on {_by_engine(reached.ran)}"
        missing = {PLAIN: [SLOW]} if self._skipped[PLAIN] else {}  # by reason
        for part in reached.not_run():
            if part in reached.unavailable or PARTS[part] in reached.unavailable:
                missing.setdefault(reached.why_not(part), []).append(part)
        groups = [f"{_by_engine(parts)} ({reason}{self._tests_of(reason)})" for reason, parts in missing.items()]
        if others := sum(count for reason, count in self._skipped.items() if not reason.endswith(tuple(missing))):
            groups.append(f"{_tests(others)} of what this database, driver or machine does not have")
        if not is_plain(self._config) and not REQUIRED:
            groups.append("what was not selected")
        yield f"not tested: {'; '.join(groups) or 'nothing was left out'}"
        words = dict.fromkeys(PARTS.get(part, part) for parts in missing.values() for part in parts)
        if remedies := [REMEDIES[word] for word in words if word in REMEDIES]:
            yield f"to test that too: {'; '.join(remedies)}; see CONTRIBUTING.md"

    def _tests_of(self, reason: str) -> str:
        count = sum(count for each, count in self._skipped.items() if each.endswith(reason))
        return f": {_tests(count)}" if count else ""

    def _time(self) -> str:
        minutes, seconds = divmod(round(time.monotonic() - self._began), 60)
        return f"{minutes}:{seconds:02} minutes"


def _tests(count: int) -> str:
    return f"{count:,} test{'s' if count != 1 else ''}"


def _by_engine(parts: Iterable[str]) -> str:
    """Return the parts with the drivers of each engine together: "mariadb by pymysql, asyncmy (async); pgbouncer"."""
    drivers: dict[str, list[str]] = {}
    for part in parts:
        engine, _, driver = part.partition("+")
        drivers.setdefault(engine, []).extend([driver] if driver else [])
    named = [f"{engine} by {', '.join(by)}" if by else engine for engine, by in sorted(drivers.items())]
    return "; ".join(named) or "no database"
