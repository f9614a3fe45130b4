"""A run of the tests closes with what passed, what was not tested and why, and how to test that too."""

import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import copy

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TESTS = """
    import pytest
    from reached import reached

    def test_right():
        reached.saw("sqlite+pysqlite", "3")

    @pytest.mark.slow
    def test_slow():
        pass

    @pytest.mark.nightly
    def test_nightly():
        pass

    def test_on_mariadb():
        reached.give_up("mariadb", "mariadb", "no server")

    def test_elsewhere():
        pytest.skip("one writer")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with our conftest.py and tests: a usual, a slow, a nightly one; one wants MariaDB; one is elsewhere."""
    (tmp_path / "tests").mkdir()
    copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_it.py").write_text(TESTS.replace("\n    ", "\n"), encoding="utf-8")
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\ntestpaths = tests\nmarkers =\n  slow\n  nightly\n  contract\n", encoding="utf-8"
    )
    return tmp_path


def _run(project: Path, *arguments: str, required: str = "", part: str = "") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "tests" / "support"), str(ROOT / "tests" / "contract"), str(ROOT)])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "PROJECTOR_DEDUP_TEST_REQUIRE": required,
        "PROJECTOR_DEDUP_TEST_MATRIX": "",
        "PROJECTOR_DEDUP_TEST_PART": part,
    }
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)


def test_a_plain_run_says_what_was_left_out(project: Path) -> None:
    """The slow and nightly tests, and those that found no server, by reason; and how to have them."""
    run = _run(project, "-n", "2")
    assert run.returncode == 0, run.stdout
    assert "not tested: 1 tests (slow: left out of a plain run; make test ARGS=tests)" in run.stdout
    assert "not tested: 1 tests (nightly: make nightly; make test ARGS=tests)" in run.stdout
    assert "not tested: mariadb+pymysql (no server); apt-get install mariadb-server" in run.stdout


@pytest.mark.parametrize("selection", [["tests"], ["-k", "test"], ["-m", "slow or not slow"]], ids=str)
def test_a_selection_runs_what_it_names(project: Path, selection: list[str]) -> None:
    """By a path, `-k` or `-m`: the slow and the nightly ones too."""
    assert "3 passed, 2 skipped" in _run(project, "-n", "0", *selection).stdout


def test_where_engines_are_required_the_slow_ones_run(project: Path) -> None:
    """Not the nightly ones; and an engine that was not there is a failure with a name."""
    run = _run(project, "-n", "0", required="mariadb")
    assert run.returncode == 1
    assert "REQUIRED, but not tested: mariadb+pymysql (no server)" in run.stdout
    assert "1 failed, 2 passed, 2 skipped" in run.stdout


def test_the_parts_of_a_run_are_the_whole(project: Path) -> None:
    """Each test is in one of them, whatever the others are."""
    parts = [_run(project, "-n", "0", "-v", "tests", part=f"{number}/3").stdout for number in (1, 2, 3)]
    ran = [name for part in parts for name in re.findall(r"::(test_\w+) [A-Z]", part)]
    assert sorted(ran) == ["test_elsewhere", "test_nightly", "test_on_mariadb", "test_right", "test_slow"]
