"""The pages about consumers show the programs that are tested, to the letter and in one piece."""

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
def test_a_consumer_is_six_lines(example: Path) -> None:
    """Behind the dispatcher, without what makes the tables; Celery's has seven. It needs no other file."""
    tree = ast.parse(example.read_text(encoding="utf-8"))
    imported = {each.module for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) and each.module}
    assert not imported & {"flights", "payments"}
    (dispatcher,) = [each.end_lineno for each in tree.body if ast.unparse(each).startswith("dispatcher = ")]
    glue = [node for each in tree.body if each.lineno > (dispatcher or 0) for node in ast.walk(each)]
    (made,) = [{*ast.walk(each)} for each in tree.body if getattr(each, "name", "") == "create_tables"] or [set()]
    lines: set[int] = set()
    for node in glue:
        if (
            isinstance(node, ast.stmt)
            and node not in made
            and not re.search(r"create_tables\(\)|engine\.begin|create_all", ast.unparse(node).split("\n")[0])
        ):
            whole = not hasattr(node, "body")
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1) if whole else [node.lineno])
    assert 0 < len(lines) <= (7 if "celery" in example.name else 6)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_no_line_of_code_is_cut(page: Path) -> None:
    """The site shows 88 columns."""
    text = page.read_text(encoding="utf-8")
    code = [
        line
        for block in re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        for line in block.split("\n")
    ]
    assert [line for line in code if len(line) > 88] == []
    prose = [line for line in text.split("\n") if line not in code and not line.startswith(("|", "    "))]
    assert [line for line in prose if len(line) > 120] == []
