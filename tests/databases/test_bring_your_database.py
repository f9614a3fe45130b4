"""What docs/bring-your-database.md shows is what happens."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from databases import Database
from projector_dedup.dialects import _DIALECTS, dialect_of

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "bring-your-database.md"
SUITE, DIALECT = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def _run(folder: Path, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_our_database.py").write_text(SUITE, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "test_our_database.py", *arguments],
        cwd=folder,
        env={**os.environ, "OUR_DATABASE_URL": url},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_suite_runs_as_it_is_printed(postgresql: Database, tmp_path: Path) -> None:
    """Copied into a file, it passes on a driver that is not known; the page leaves nothing out."""
    pytest.importorskip("pg8000")
    url = postgresql.url().set(drivername="postgresql+pg8000").render_as_string(hide_password=False)
    run = _run(tmp_path, url, "-k", "commit_together or look_alikes or processes_converge or rivals_wait")
    assert run.returncode == 0, run.stdout
    assert "5 passed" in run.stdout


def test_the_dialect_is_registered_as_it_is_printed() -> None:
    """Whoever connects to it gets it."""
    names: dict[str, Any] = {}
    exec(DIALECT, names)
    try:
        bind = cast(Any, SimpleNamespace(dialect=SimpleNamespace(name="ourdb", driver="ourdriver")))
        assert type(dialect_of(bind)) is names["OurDatabase"]
    finally:
        del _DIALECTS["ourdb", "ourdriver"]
