"""The Python of a page, typed into one module."""

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def snippets(page: str, language: str = "python") -> list[str]:
    """Return the blocks of a page in one language. The page is named from the root of the repository."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def typed(blocks: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module with the quick start of README and these blocks, run in a folder."""
    monkeypatch.chdir(folder)  # where the quick start makes its database
    module: Any = ModuleType("typed")
    monkeypatch.setitem(sys.modules, "typed", module)  # where SQLAlchemy and dataclasses look for annotations
    for block in [snippets("README.md")[0], *blocks]:
        exec(compile(block, "a page", "exec"), vars(module))
    module.engine.dispose()
    return module
