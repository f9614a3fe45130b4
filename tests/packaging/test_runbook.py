"""Whoever is on call finds in `docs/runbook.md` whatever the library and the command say."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from projector_dedup.cli.main import main

from projector_dedup import errors

ROOT = Path(__file__).parents[2]
FOLDERS = ("projector_dedup", "cli", "migrations")
PAGE = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
RUNBOOK = " ".join(PAGE.split())

LOGGED = {f"logger.{level}" for level in ("debug", "info", "warning", "error", "exception", "critical", "log")}
FOUND = {"Finding", "advice"}
FAILED = {"Failed"}


def _texts(names: set[str]) -> Iterator[tuple[str, ast.expr]]:
    """Where one of these is called, and with what text."""
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        if "testing" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in names:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.args[ast.unparse(node.func) == "logger.log"]


def _fixed(text: ast.expr) -> str:
    """The longest part of a text that is always the same, up to five words of it; empty if nothing is."""
    if isinstance(text, ast.IfExp):
        return _fixed(text.body)
    if isinstance(text, ast.BinOp):
        return max(_fixed(text.left), _fixed(text.right), key=len)
    pieces = text.values if isinstance(text, ast.JoinedStr) else [text]
    constants = [str(piece.value) for piece in pieces if isinstance(piece, ast.Constant)]
    parts = [part for constant in constants for part in re.split(r"%\w|[;:(]", constant)]
    return " ".join(max(parts, key=len, default="").split()[:5])


def _said(names: set[str]) -> dict[str, str]:
    said = {place: _fixed(text) for place, text in _texts(names)}
    return {place: words for place, words in said.items() if len(words) > 3}  # else it is made elsewhere


def test_every_error_is_in_the_runbook() -> None:
    """By the name of its class; a private base is never raised."""
    classes = [each for each in vars(errors).values() if isinstance(each, type)]
    ours = [each.__name__ for each in classes if each.__module__ == errors.__name__ and each.__name__[0] != "_"]
    assert len(ours) > 10
    assert [name for name in ours if f"`{name}`" not in RUNBOOK] == []


def test_every_command_is_in_the_runbook() -> None:
    """As it is typed."""
    assert [name for name in sorted(main.commands) if f"`idempotency {name}" not in RUNBOOK] == []


@pytest.mark.parametrize(
    ("names", "at_least"), [(LOGGED, 7), (FOUND, 20), (FAILED, 20)], ids=["logged", "found", "failed"]
)
def test_everything_that_is_said_is_in_the_runbook(names: set[str], at_least: int) -> None:
    """Log lines, findings of `check`, failures of commands, by their fixed words: what each means, what to do."""
    said = _said(names)
    assert len(said) >= at_least
    assert {place: words for place, words in said.items() if words not in RUNBOOK} == {}


# It is read at night --------------------------------------------------------------------------------------------------


def test_each_section_is_one_screen() -> None:
    """At most 26 lines, and within them something to type; the whole page has at most 4,000 words."""
    sections = re.split(r"^#+ ", PAGE, flags=re.MULTILINE)
    named = re.findall(r"^### (.+)$", PAGE, re.MULTILINE)
    assert len(named) > 30
    assert [section.partition("\n")[0] for section in sections if section.strip().count("\n") > 26] == []
    typed = re.compile(r"^(    \S|```)", re.MULTILINE)
    assert [each for each in sections if each.partition("\n")[0] in named and not typed.search(each)] == []
    words = len(PAGE.split())
    assert words <= 4000, f"docs/runbook.md has {words} words: shorten it elsewhere"


def test_each_command_exists() -> None:
    """With each of its options, in the blocks and in the sentences."""
    blocks = re.findall(r"^ +(?:python -m projector_dedup|idempotency) (.*?)(?: +#.*)?$", PAGE, re.MULTILINE)
    lines = [*blocks, *re.findall(r"`idempotency ([^`]*)`", RUNBOOK)]
    assert len(lines) > 40
    for line in lines:
        found: click.Command = main
        given = 0
        for word in shlex.split(line):
            if isinstance(found, click.Group) and given < sum(
                isinstance(each, click.Argument) for each in found.params
            ):
                given += 1
            elif isinstance(found, click.Group) and not word.startswith("-"):
                assert word in found.commands, line
                found = found.commands[word]
            elif word.startswith("--"):
                assert any(word in each.opts for each in found.params), line
