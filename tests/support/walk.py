"""Which files of the library a message enters: whoever wants to follow it has to open these, and no more."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

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
