"""Docstrings are read by strangers: each is a sentence that names its subject (what a machine can see of that)."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

NOT_ALLOWED = (  # openings that leave out who does what, or that need the text next door
    "what", "whether", "it", "they", "as", "the same", "that", "those", "this", "these", "by", "of", "his", "its",
    "also", "at", "behind", "between", "for", "from", "here", "in", "not", "on", "there", "with", "within", "without",
    "whatever", "whoever", "where", "else",
)  # fmt: skip

FILES = [path for folder in ("projector_dedup", "cli", "migrations") for path in sorted((ROOT / folder).rglob("*.py"))]


def flaws(text: str) -> list[str]:
    """What is wrong with a docstring, as far as its form says."""
    first = text.split("\n\n")[0].strip()
    found = []
    if not (first[0].isupper() or first[0] in "`'\"*" or first.startswith("...")):
        found.append("begins without a capital")
    if first[-1] not in ".:":
        found.append("its first paragraph ends without a full stop")
    words = first.lower().replace("\n", " ")
    found += [f"begins with {opening!r}" for opening in NOT_ALLOWED if words.startswith(f"{opening} ")]
    return found


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Each docstring of a file, with its place: of private and nested names too, and of the values below a name."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        for child in getattr(node, "body", ()) if not isinstance(node, (ast.Lambda, ast.IfExp)) else ():
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                yield f"{path.relative_to(ROOT)}:{child.lineno}", inspect.cleandoc(child.value.value)


def test_a_docstring_is_a_sentence_with_a_subject() -> None:
    """A capital, a full stop, and none of the openings that send a reader to the text next door."""
    assert [(place, each) for path in FILES for place, text in docstrings(path) for each in flaws(text)] == []


def test_a_bad_opening_is_found_and_a_sentence_is_fine() -> None:
    """Each rule is seen to fail; a name in backticks may begin a sentence, and a colon may stand before a list."""
    bad = ["What is kept.", "Whether it ran.", "As ``claim``.", "no capital.", "Return nothing", "By SQLSTATE."]
    good = ["Return the id.", "``claim``, awaited.", "True if it ran.", "Everything:\n\n- this"]
    assert [text for text in bad + good if flaws(text)] == bad
