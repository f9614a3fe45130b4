"""What the README and the documents beside it show is what happens."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "docs/commands.md")


def _snippets(document: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "snippets", [_snippets("README.md")[:1], _snippets("docs/commands.md")], ids=["the quick start", "commands"]
)
def test_what_is_typed_prints_what_it_says(tmp_path: Path, snippets: list[str]) -> None:
    """Typed into a file and run, snippets print the values that their comments promise."""
    script = tmp_path / "quick_start.py"
    script.write_text("\n".join(snippets), encoding="utf-8")
    run = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    promised = re.findall(r"print\(.*# (.+)$", script.read_text(encoding="utf-8"), re.MULTILINE)
    assert run.stdout.split("\n")[:-1] == promised


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_snippet_compiles(document: str) -> None:
    """No snippet has a typing error of ours in it."""
    for snippet in _snippets(document):
        compile(snippet, document, "exec")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    """Every relative link is a file of the repository."""
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", (ROOT / document).read_text(encoding="utf-8")):
        assert ((ROOT / document).parent / target).exists(), target
