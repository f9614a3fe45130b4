"""Which files of the library a message enters: whoever wants to follow it has to open these, and no more."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, ModuleType

import pytest
from sqlalchemy.orm import registry

import projector_dedup

PACKAGE = Path(projector_dedup.__file__).parent


@contextlib.contextmanager
def files_entered() -> Iterator[set[str]]:
    """The files in which this thread enters a function meanwhile; those of the tests' kit do not count."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE) and "testing" not in path.parts:
            entered.add(str(path.relative_to(PACKAGE)))

    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(None)


def map_anew(monkeypatch: pytest.MonkeyPatch, module: ModuleType, *entities: str) -> None:
    """Give the module other entities on the same tables.

    ``read_models`` listens for good to an entity that any test of this process declared: its file would be entered too.
    """
    for name in entities:
        anew = type(name, (), {})
        registry().map_imperatively(anew, getattr(module, name).__table__)
        monkeypatch.setattr(module, name, anew)
