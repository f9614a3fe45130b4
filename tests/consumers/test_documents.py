"""The pages about consumers show the programs that are tested, which have ten lines beside the handlers at most."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "consumers").glob("*.md"))
EXAMPLES = sorted((ROOT / "examples" / "consumers").glob("with_*.py"))
BROKERS = [page for page in PAGES if page.name != "README.md"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_every_program_that_is_tested_is_on_a_page(example: Path) -> None:
    """To the letter."""
    shown = f"```python\n{example.read_text(encoding='utf-8')}```"
    assert [page.name for page in PAGES if shown in page.read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", BROKERS, ids=lambda path: path.name)
def test_every_page_is_found_from_the_first(page: Path) -> None:
    """ "Writing a consumer" has a line for each."""
    assert f"]({page.name})" in PAGES[0].read_text(encoding="utf-8")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_a_consumer_is_ten_lines(example: Path) -> None:
    """Beside the handlers, the imports and what explains it."""
    tree = ast.parse(example.read_text(encoding="utf-8"))
    lines: set[int] = set()
    for node in ast.walk(tree):
        explains = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.Import, ast.ImportFrom)) and not explains:
            whole = not hasattr(node, "body")
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1) if whole else [node.lineno])
    assert 0 < len(lines) <= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    """Every relative link is a file of the repository."""
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_snippet_compiles(page: Path) -> None:
    """No snippet has a typing error of ours in it."""
    for snippet in re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        compile(snippet, page.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
