"""A user's editor and type checker see the public API as it is."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
API = str(ROOT / "tests" / "support" / "typed_api.py")


def test_mypy_agrees_with_every_assert_type() -> None:
    """`@on` and `@projector` keep the types of what they decorate, and `deliver` returns a `Delivery`."""
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", API], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout


def test_pyright_agrees_as_well() -> None:
    """The same file, read by the checker that most editors use; the library's own types are complete for it."""
    run = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, API],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [entry for entry in json.loads(run.stdout)["generalDiagnostics"] if entry["severity"] == "error"]
    assert not errors, errors
