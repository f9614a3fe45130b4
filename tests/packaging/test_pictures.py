"""The pictures that the pages show are there, light and dark, and show what the commands print today."""

import html
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
STATIC = DOCS / "static"


@pytest.fixture(scope="module")
def pictures() -> Any:
    """The program that `make pictures` runs."""
    spec = spec_from_file_location("pictures", DOCS / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _lines(picture: str) -> list[str]:
    """Return the lines of a picture of a terminal, without the spaces between its differently coloured parts."""
    lines: dict[str, str] = {}
    for y, text in re.findall(r'<text [^>]*y="([\d.]+)"[^>]*>(.*?)</text>', picture):
        lines[y] = lines.get(y, "") + html.unescape(text)
    return ["".join(line.split()) for line in lines.values()]


def test_each_page_finds_its_pictures() -> None:
    """Each picture that a page names is in docs/static, and each of them is small, is named, and has its dark twin."""
    named = set()
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        for path in re.findall(r'(?:\]\(|src="|srcset=")([^\s")]+\.svg)', page.read_text(encoding="utf-8")):
            named.add((page.parent / path).resolve())
    assert {path.name for path in named} >= {f"{each}-light.svg" for each in ("transaction", "exactly-once", "check")}
    twins = {path.with_name(path.name.replace("-light", "-dark")) for path in named}
    assert named | twins == set(STATIC.glob("*.svg"))
    assert [path for path in named | twins if path.stat().st_size > 60_000] == []


def test_a_dark_picture_has_other_colours_alone(pictures: Any) -> None:
    """It is what `make pictures` makes of the light one."""
    for name in pictures.TWINS:
        light, dark = ((STATIC / f"{name}-{each}.svg").read_text(encoding="utf-8") for each in ("light", "dark"))
        assert pictures.dark(light) == dark


def test_the_picture_of_the_check_is_of_today(pictures: Any, tmp_path: Path) -> None:
    """`idempotency check`, run again, prints what its picture shows."""
    pictures.prepare(tmp_path)
    command = pictures.COMMANDS["check"]
    today = pictures.terminal("check", command, pictures.printed(command, tmp_path))
    shown = _lines((STATIC / "check-light.svg").read_text(encoding="utf-8"))
    assert shown == _lines(today)
    assert shown[0] == "$idempotencycheck"


def test_the_picture_of_a_failing_test_shows_what_the_page_says(pictures: Any) -> None:
    """Each line that docs/testing.md prints of a failing `exactly_once` is in the picture."""
    shown = _lines((STATIC / "exactly-once-light.svg").read_text(encoding="utf-8"))
    (said,) = re.findall(
        r"^```text\n(The read model.*?)^```", (DOCS / "testing.md").read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    assert shown[0] == "".join(f"$ {pictures.COMMANDS['exactly-once']}".split())
    assert [line for line in said.splitlines() if "".join(line.split()) not in [*shown, ""]] == []
