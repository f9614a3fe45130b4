"""A command in a fork is what it would be in a Python of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forked import PRELOADED, run_module

LOOKS = """
import atexit, os, signal, sys
atexit.register(print, "the end")
print(sys.argv[1:], __name__, os.getcwd(), sys.path[0], os.environ["MINE"], "é", sys.stdin.read(), sys.stdout.isatty())
print(sorted(name for name in sys.modules if name.startswith(("projector_dedup", "psycopg"))), sys.dont_write_bytecode)
print("alas", file=sys.stderr)
"""
ENDS = {
    "returns": "",
    "exits": "sys.exit(3)",
    "exits with words": "sys.exit('no')",
    "is killed": "sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)",
    "is interrupted": "signal.raise_signal(signal.SIGINT)",
}


@pytest.mark.parametrize("safe_path", [True, False], ids=["-P", ""])
@pytest.mark.parametrize("end", ENDS)
def test_it_sees_and_says_the_same(end: str, safe_path: bool, tmp_path: Path) -> None:
    """Arguments, folder, path, environment, streams, what is imported, what it says last, and its exit code."""
    (tmp_path / "looks").mkdir()
    (tmp_path / "looks" / "__main__.py").write_text(LOOKS + ENDS[end])
    environment = {**os.environ, "MINE": "a b", "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    flags = ["-P"] if safe_path else []
    alone = subprocess.run(
        [sys.executable, *flags, "-m", "looks", "x", "y z"],
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    forked = run_module("looks", "x", "y z", safe_path=safe_path, env=environment, cwd=tmp_path)
    assert (forked.returncode, forked.stdout) == (alone.returncode, alone.stdout)
    assert forked.stderr.splitlines()[:1] == alone.stderr.splitlines()[:1] == ["alas"]
    assert forked.stderr.splitlines()[-1:] == alone.stderr.splitlines()[-1:]


def test_nothing_of_ours_is_imported_before() -> None:
    """Else a command could lack an import, and no test would see it."""
    assert not [name for name in PRELOADED if name.startswith("projector_dedup")]
