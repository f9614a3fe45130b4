"""Running a mutant: the tests that must notice it, on a copy of the repository in which the library is changed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from xml.etree import ElementTree

from .mutant import Library, Mutant, NotApplicableError, packages

ROOT = Path(__file__).parents[3]

_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", ".*_cache", ".hypothesis", "*.egg-info", "build", "dist", "node_modules", "*.sqlite3"
)
_TEST, _ALL = 60, 600  # seconds for one test, and for all tests of one mutant
_HANGING_TEST = 20

# An error that only code which does not fit raises: it would turn any test red, whatever the test is about.
_MISFITS = re.compile(
    r"\b(?:NameError: (?:name|free variable)|UnboundLocalError: |ImportError: |ModuleNotFoundError: "
    r"|AttributeError: '\w+' object has no|TypeError: [\w.<>]+\(\) (?:got an unexpected|missing|takes))[^\n]*"
)
_HUNG = re.compile(r"Failed: Timeout \(?>|\+ Timeout \+")


class Verdict(Enum):
    """How a mutant ended; only the first is well."""

    KILLED = "killed"
    SURVIVED = "SURVIVED"
    NOT_APPLICABLE = "not applicable"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Result:
    """The verdict on one mutant, why, how long it took and the words of pytest."""

    mutant: Mutant
    verdict: Verdict
    why: str = ""
    seconds: float = 0.0
    output: str = ""


@dataclass(frozen=True)
class _Run:
    """One run of pytest."""

    code: int | None  # None: it was stopped because it did not end
    failed: int
    broken: int
    skipped: int
    output: str


class Copy:
    """A copy of the repository, in which the tests find the library beside them and nowhere else."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    @contextmanager
    def of(cls, root: Path) -> Iterator[Copy]:
        """Make a copy that is removed in the end."""
        with tempfile.TemporaryDirectory(prefix="projector-dedup-mutant-", ignore_cleanup_errors=True) as folder:
            copy = cls(Path(folder) / "copy")
            shutil.copytree(root, copy.root, ignore=_NOT_COPIED, symlinks=True)
            copy._install()
            yield copy

    def _install(self) -> None:
        """Put the packages that lie elsewhere where an import looks for them, as an installation does."""
        for name, folder in packages(self.root).items():
            place = self.root / name.replace(".", "/")
            if not place.exists():
                place.symlink_to(os.path.relpath(folder, place.parent), target_is_directory=True)

    @property
    def environment(self) -> dict[str, str]:
        """Return what the tests run with: the copy before everything that is installed, and no wish of CI's."""
        unwanted = ("PROJECTOR_DEDUP_TEST_REQUIRE", "PROJECTOR_DEDUP_TEST_MATRIX", "PYTEST_", "COVERAGE", "COV_")
        ours = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
        return {**ours, "PYTHONPATH": str(self.root), "PY_COLORS": "0", "COLUMNS": "120"}

    def verify(self) -> None:
        """Raise unless a program that is started anywhere imports every package from the copy."""
        names = list(packages(self.root))
        program = f"import importlib; [print(importlib.import_module(each).__file__) for each in {names}]"
        command = [sys.executable, "-P", "-c", program]
        done = subprocess.run(
            command, env=self.environment, cwd=tempfile.gettempdir(), capture_output=True, text=True, check=False
        )
        files = done.stdout.splitlines()
        if done.returncode or len(files) != len(names) or not all(each.startswith(str(self.root)) for each in files):
            raise SystemExit(f"The tests would not import the copy in {self.root}:\n{done.stdout}{done.stderr}")

    def run(self, tests: Collection[str], *, seconds: float = _TEST, jobs: int = 1, stop: bool = True) -> _Run:
        """Run pytest on some tests, up to the first that fails if ``stop``."""
        report = self.root / "mutants.xml"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-ra", "-p", "no:cacheprovider", "--tb=short"]
        command += [f"--timeout={seconds:g}", f"--junitxml={report}", *(["-x"] if stop else [])]
        command += ["-n", str(jobs)] if jobs > 1 else []
        limit = max(_ALL, len(tests) * 5)
        code, output = _finished([*command, *tests], self.environment, self.root, limit)
        if report.exists():
            suites = ElementTree.parse(report).getroot().iter("testsuite")
            counts = {name: int(value) for suite in suites for name, value in suite.attrib.items() if value.isdecimal()}
        else:
            counts = {}
        return _Run(code, counts.get("failures", 0), counts.get("errors", 0), counts.get("skipped", 0), output)


def _finished(command: list[str], environment: dict[str, str], folder: Path, limit: float) -> tuple[int | None, str]:
    """Run a command to its end, or kill it with all that it started; return its exit code and what it wrote."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as written:
        with subprocess.Popen(
            command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=written, stderr=written,
            start_new_session=True,
        ) as process:  # fmt: skip
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        written.seek(0)
        return code, written.read()


class Runner:
    """Judges mutants, each in a copy of its own, after their tests were seen green in a copy without a mutant."""

    def __init__(self, unchanged: Copy) -> None:
        self._unchanged = unchanged
        self._library = Library(unchanged.root)
        self._red: dict[tuple[str, ...], str] = {}  # tests that are not green without a mutant, and why
        self._all_green = False

    def see_green(self, mutants: Iterable[Mutant], jobs: int) -> bool:
        """Run all tests of the mutants without a mutant; return True if none failed."""
        tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        self._all_green = not tests or self._unchanged.run(tests, jobs=jobs, stop=False).code == 0
        return self._all_green

    def judge(self, mutant: Mutant) -> Result:
        """Apply one mutant, run its tests, and say what became of it."""
        began = time.monotonic()
        try:
            verdict, why, output = self._judged(mutant)
        except NotApplicableError as error:
            verdict, why, output = Verdict.NOT_APPLICABLE, str(error), ""
        return Result(mutant, verdict, why, time.monotonic() - began, output)

    def _judged(self, mutant: Mutant) -> tuple[Verdict, str, str]:
        path, text = self._library.mutated(mutant)
        if not self._all_green and (why := self._why_red(mutant.tests)):
            return Verdict.NOT_APPLICABLE, why, ""
        with Copy.of(self._unchanged.root) as copy:
            (copy.root / path.relative_to(self._unchanged.root)).write_text(text, encoding="utf-8")
            run = copy.run(mutant.tests, seconds=_HANGING_TEST if mutant.hangs else _TEST)
        return (*_verdict(mutant, run), run.output)

    def _why_red(self, tests: tuple[str, ...]) -> str:
        """Say why these tests prove nothing; empty if they are green without a mutant."""
        if tests not in self._red:
            run = self._unchanged.run(tests)
            if run.code == 0:
                self._red[tests] = ""
            elif run.code == 1:
                self._red[tests] = f"its tests fail without it too:\n{_end_of(run.output)}"
            else:
                self._red[tests] = f"pytest cannot run its tests, correct `tests`:\n{_end_of(run.output)}"
        return self._red[tests]


def _verdict(mutant: Mutant, run: _Run) -> tuple[Verdict, str]:
    if run.code is None or _HUNG.search(run.output):
        if mutant.hangs:
            return Verdict.KILLED, ""
        return Verdict.NOT_APPLICABLE, "a test did not end; if that is how it is noticed, say `hangs`"
    if run.code not in (0, 1):
        return Verdict.NOT_APPLICABLE, f"pytest ended with exit code {run.code}:\n{_end_of(run.output)}"
    if run.code == 1:
        if misfit := _MISFITS.search(run.output):
            return Verdict.NOT_APPLICABLE, f"`new` does not fit the code around it any more: {misfit[0]}"
        if not run.failed:
            return Verdict.NOT_APPLICABLE, f"no test failed, a fixture did:\n{_end_of(run.output)}"
        return Verdict.KILLED, ""
    if run.skipped:
        return Verdict.NOT_RUN, f"{run.skipped} of its tests were skipped:\n{_end_of(run.output)}"
    return Verdict.SURVIVED, "write the test that is missing, or name the one that is there behind `tests`"


def _end_of(output: str) -> str:
    """Return the part of pytest's output that names what failed, or was skipped."""
    lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "SKIPPED", "E  "))]
    return "\n".join((lines or output.splitlines())[-6:])
