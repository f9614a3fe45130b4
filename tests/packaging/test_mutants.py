"""The mutants themselves: each has its place in the library and tests that exist, and a verdict can be trusted."""

import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from mutants.catalogue import GROUPS, MUTANTS, picked, read
from mutants.mutant import Library, Mutant, NotApplicableError
from mutants.running import ROOT, Copy, Runner, Verdict

LIBRARY = {
    "pyproject.toml": """
        [tool.setuptools]
        packages = ["library", "library.extra"]
        [tool.setuptools.package-dir]
        "library.extra" = "beside"
        [tool.pytest.ini_options]
        """,
    "library/__init__.py": """
        def answer():
            return 42

        class Box:
            def answer(self):
                return 42 + 0
        """,
    "beside/__init__.py": "def other():\n    return 1\n",
    "tests/test_it.py": """
        import subprocess, sys

        from library import answer

        def test_here():
            assert answer() == 42

        def test_in_a_program():
            program = "import library, library.extra; print(library.answer(), library.extra.other())"
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
            assert done.stdout == "42 1\\n"
        """,
    "tests/test_red.py": "def test_red():\n    assert False\n",
    "tests/test_skipped.py": "import pytest\n\ndef test_skipped():\n    pytest.skip('no such engine')\n",
}
TESTS = ("tests/test_it.py",)


def _mutant(where: str, old: str, new: str, *, tests: tuple[str, ...] = TESTS) -> Mutant:
    return Mutant("example", "Nothing that matters.", where, old, new, tests)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of two packages, one of which lies beside the other, and its tests."""
    folder = tmp_path_factory.mktemp("library")
    for name, text in LIBRARY.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return folder


@pytest.fixture(scope="module")
def runner(library: Path) -> Iterator[Runner]:
    """A runner of mutants of that library."""
    with Copy.of(library) as copy:
        copy.verify()
        yield Runner(copy)


@pytest.mark.parametrize(
    ("mutant", "verdict", "why"),
    [
        (_mutant("answer", "return 42", "return 40 + 2"), Verdict.SURVIVED, "the test that is missing"),
        (_mutant("other", "1", "2"), Verdict.KILLED, ""),
        (_mutant("answer", "42", "forty_two"), Verdict.NOT_APPLICABLE, "NameError"),
        (_mutant("answer", "42", "41", tests=("tests/test_gone.py",)), Verdict.NOT_APPLICABLE, "correct `tests`"),
        (_mutant("answer", "42", "41", tests=("tests/test_red.py",)), Verdict.NOT_APPLICABLE, "fail without it too"),
        (_mutant("answer", "42", "41", tests=("tests/test_skipped.py",)), Verdict.NOT_RUN, "skipped"),
    ],
    ids=["changes nothing", "changes a program", "names nothing", "a test that is gone", "a red test", "a skipped one"],
)
def test_what_becomes_of_a_mutant(runner: Runner, mutant: Mutant, verdict: Verdict, why: str) -> None:
    """Only a test that is green without the mutant and fails with it kills it; what cannot run proves nothing."""
    result = runner.judge(mutant)
    assert (result.verdict, why in result.why) == (verdict, True), result


@pytest.mark.parametrize(
    ("mutant", "says"),
    [
        (_mutant("Box.result", "42 + 0", "1"), r"nothing .* called Box\.result.* in Box\.answer in library"),
        (_mutant("Box.answer", "43", "1"), r"does not contain the text '43' any more.*nowhere else"),
        (_mutant("Box.answer", "return 42 + 0", "return (42"), "not Python"),
        (_mutant("Box", "answer", "reply"), None),
        (_mutant("Box.answer", "4", "5"), None),
        (_mutant("Box.answer", " ", "5"), "times"),
    ],
)
def test_a_mutant_has_one_place_or_says_what_to_do(library: Path, mutant: Mutant, says: str | None) -> None:
    """A name or text that is gone, or is there twice, is an error that says where to look."""
    if says is None:
        path, text = Library(library).mutated(mutant)
        assert text != path.read_text()
        return
    with pytest.raises(NotApplicableError) as raised:
        Library(library).mutated(mutant)
    assert re.search(says, str(raised.value).replace("\n", " "))


CATALOGUE = """
# group: A promise.
# A comment.
example: It breaks.
    where answer
    old   if 1: \\s
    old
    old       return 42
    tests tests/test_it.py::test_here[a]
    tests tests/test_it.py::test_in_a_program
    hangs
"""


def test_a_mutant_is_read_from_lines_of_words() -> None:
    """Several lines are one text, an indentation and a space at the end are kept, and what is left out is empty."""
    old, tests = "if 1: \n\n    return 42", ("tests/test_it.py::test_here[a]", "tests/test_it.py::test_in_a_program")
    expected = Mutant("example", "It breaks.", "answer", old, "", tests, hangs=True)
    assert read(CATALOGUE) == {"group": (expected,)}
    for line in ("    where answer\n", "# group: A promise.\n", "    tests tests/test_it.py::test_here[a]\n    tests "):
        with pytest.raises(ValueError, match=r"^catalogue.txt, (from )?line \d"):
            read(CATALOGUE.replace(line, "    other " if "tests" in line else ""))


def test_every_mutant_has_its_place_in_the_library() -> None:
    """Whoever moves or renames code is told here which mutants to write anew."""
    library, wrong = Library(ROOT), []
    for mutant in MUTANTS:
        try:
            library.mutated(mutant)
        except NotApplicableError as error:
            wrong.append(f"{mutant.name}: {error}")
    assert wrong == []


def test_every_mutant_names_tests_that_exist() -> None:
    """With the parameters that pytest gives them; a name without parameters stands for all."""
    named = {test for mutant in MUTANTS for test in mutant.tests}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *sorted({test.split("::")[0] for test in named})]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert named - {*collected} - {test.partition("[")[0] for test in collected} == set()


def test_mutants_have_names_of_their_own_and_say_what_they_break() -> None:
    """Every mutant can be asked for by its name, and what it breaks is one sentence."""
    assert len({*GROUPS, *(mutant.name for mutant in MUTANTS)}) == len(GROUPS) + len(MUTANTS)
    assert [mutant.name for mutant in MUTANTS if not re.fullmatch(r"[^.]([^.]|\.\S)+\.", mutant.breaks)] == []


def test_a_day_chooses_its_mutants_from_as_many_groups_as_it_can() -> None:
    """One date always chooses the same, another date others."""
    chosen = picked(GROUPS, 12, "2026-01-01")
    assert chosen == picked(GROUPS, 12, "2026-01-01")
    assert chosen != picked(GROUPS, 12, "2026-01-02")
    filled = [group for group in GROUPS.values() if group]
    assert sum(any(each in group for each in chosen) for group in filled) == min(12, len(filled))
