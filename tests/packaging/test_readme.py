"""What the README shows is what happens."""

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def _snippets(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def test_the_quick_start_prints_what_it_says(tmp_path: Path) -> None:
    """Typed into a file and run, the first snippet prints the values that its comments promise."""
    script = tmp_path / "quick_start.py"
    script.write_text(_snippets("python")[0], encoding="utf-8")
    run = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    promised = re.findall(r"print\(.*# (.+)$", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert run.stdout.split("\n")[:-1] == promised


def test_every_snippet_compiles() -> None:
    """No snippet has a typing error of ours in it."""
    for snippet in _snippets("python"):
        compile(snippet, "README.md", "exec")


def test_links_lead_somewhere() -> None:
    """Every relative link of the README is a file of the repository."""
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", README):
        assert (Path(__file__).parents[2] / target).exists(), target
