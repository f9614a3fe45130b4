"""A user's editor and type checker see the public API as it is."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
APIS = [str(ROOT / "tests" / "support" / name) for name in ("typed_api.py", "typed_commands.py")]


def test_mypy_agrees_with_every_assert_type() -> None:
    """Decorators keep the types of what they decorate; `deliver` and `handle` return what they say."""
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *APIS], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout


def test_pyright_agrees_as_well() -> None:
    """The same file, read by the checker that most editors use; the library's own types are complete for it."""
    run = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable, *APIS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [entry for entry in json.loads(run.stdout)["generalDiagnostics"] if entry["severity"] == "error"]
    assert not errors, errors


WRONG = """
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker

from projector_dedup.commands import AsyncCommands, Commands
from typed_commands import Place, place, place_later


async def wrong() -> None:
    Commands(sessionmaker()).handle(place, "no command", key="k")
    Commands(sessionmaker()).handle(place_later, Place(1), key="k")
    await AsyncCommands(async_sessionmaker()).handle(place, Place(1), key="k")
"""


def test_a_command_of_another_type_is_an_error(tmp_path: Path) -> None:
    """So is an operation of the other kind, sync for async or the reverse."""
    (tmp_path / "wrong.py").write_text(WRONG)
    lines = [number for number, line in enumerate(WRONG.split("\n"), 1) if ".handle(" in line]
    environment = {**os.environ, "MYPYPATH": str(ROOT / "tests" / "support")}
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(tmp_path / "wrong.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    found = re.findall(r"wrong\.py:(\d+): error", run.stdout)
    assert sorted({int(line) for line in found}) == lines, run.stdout
