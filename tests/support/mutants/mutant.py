"""One mutant: a small change of the library, found by the name of a function and by the text that it changes there.

The place is looked for in every package of the library, so a mutant survives that a file is moved, merged or split.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


class NotApplicableError(Exception):
    """The mutant or its tests do not fit the library as it is now; the text says what to do."""


@dataclass(frozen=True)
class Mutant:
    """A change that breaks a promise, and the tests of which at least one must fail then."""

    name: str
    breaks: str
    """One sentence: what a user would meet."""
    where: str
    """The qualified name of a function, a class or a constant, such as `UnitOfWork.commit`, without the module."""
    old: str
    """The text that is replaced. Of all that is called `where`, one has it, once."""
    new: str
    tests: tuple[str, ...]
    """The tests that notice the mutant, as pytest takes them: `tests/core/test_claim.py::test_x[sqlite+pysqlite]`."""
    hangs: bool = False
    """True if a test that does not end is how this mutant is noticed."""


@dataclass(frozen=True)
class Definition:
    """A function, a class or a constant in a source file: its lines, decorators included."""

    name: str
    path: Path
    first: int
    last: int
    text: str


def packages(root: Path) -> dict[str, Path]:
    """Return the library's packages and their folders, as `pyproject.toml` names them."""
    setuptools = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    elsewhere = setuptools.get("package-dir", {})
    return {name: root / elsewhere.get(name, name.replace(".", "/")) for name in setuptools["packages"]}


class Library:
    """The source files of the library as they are now, and the places that mutants name in them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._sources = {
            path: path.read_text(encoding="utf-8")
            for folder in packages(root).values()
            for path in sorted(folder.glob("*.py"))
        }
        self._definitions = [each for path, text in self._sources.items() for each in _definitions(path, text)]

    def mutated(self, mutant: Mutant) -> tuple[Path, str]:
        """Return the file that the mutant changes and its new text; raise `NotApplicableError` without just one place."""
        called = [each for each in self._definitions if each.name == mutant.where]
        if not called:
            raise NotApplicableError(f"nothing in the library is called {mutant.where}. {self._advice(mutant)}")
        places = [each for each in called if mutant.old in each.text]
        if not places:
            raise NotApplicableError(
                f"{mutant.where} does not contain the text {mutant.old!r} any more. {self._advice(mutant)}"
            )
        times = sum(each.text.count(mutant.old) for each in places)
        if times > 1:
            raise NotApplicableError(
                f"{mutant.where} contains the text {mutant.old!r} {times} times: add what stands beside it to `old`"
            )
        (place,) = places
        lines = self._sources[place.path].splitlines(keepends=True)
        changed = place.text.replace(mutant.old, mutant.new)
        text = "".join([*lines[: place.first], changed, *lines[place.last :]])
        try:
            # Not the whole file: that is longer, and 450 mutants ask for it.
            ast.parse(f"if True:\n{changed}" if changed[:1].isspace() else changed)
        except SyntaxError as error:
            raise NotApplicableError(f"with `new` put in, {place.path.name} is not Python any more: {error}") from None
        return place.path, text

    def _advice(self, mutant: Mutant) -> str:
        """Say where the text is now, or what to do if it is nowhere."""
        having = [each for each in self._definitions if mutant.old in each.text]
        innermost = [each for each in having if not any(other.name.startswith(f"{each.name}.") for other in having)]
        if not innermost:
            return (
                "Its text is nowhere else either. Find the code that keeps this promise now, and write its name and "
                "text behind `where` and `old`; remove the mutant only if the promise is gone"
            )
        names = ", ".join(f"{each.name} in {each.path.relative_to(self.root)}" for each in innermost[:3])
        return f"Its text is in {names}: write the right name behind `where`"


def _definitions(path: Path, source: str) -> Iterator[Definition]:
    lines = source.splitlines(keepends=True)
    for name, first, last in _named(ast.parse(source), ""):
        yield Definition(name, path, first, last, "".join(lines[first:last]))


def _named(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
    """Return the qualified name of everything below a node, and its lines, counted from 0."""
    for child in ast.iter_child_nodes(node):
        inner = prefix
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
            yield prefix + child.name, first - 1, child.end_lineno or first
            inner = f"{prefix}{child.name}."
        elif isinstance(child, (ast.Assign, ast.AnnAssign)) and isinstance(node, (ast.Module, ast.ClassDef)):
            for target in child.targets if isinstance(child, ast.Assign) else [child.target]:
                if isinstance(target, ast.Name):
                    yield prefix + target.id, child.lineno - 1, child.end_lineno or child.lineno
        yield from _named(child, inner)
