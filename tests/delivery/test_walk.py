"""How many files of the library one message enters: whoever wants to follow it has to open no more."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import projector_dedup
from databases import Database
from projector_dedup.testing.kit import Added, Harness, Subject, Total

PACKAGE = Path(projector_dedup.__file__).parent
BOTH = Added(("a", "b"))
MOST = {"new message": 15, "new message, reads": 17}


@pytest.fixture
def harness(postgresql: Database) -> Iterator[Harness]:
    """PostgreSQL by psycopg."""
    with Harness(Subject(postgresql.url("postgresql+psycopg"))) as harness:
        harness.create_tables()
        harness.transact(lambda session: session.add_all([Total(key=key, amount=0) for key in "ab"]))
        yield harness


def files_entered(call: Callable[[], object]) -> set[str]:
    """Return the files of the library in which ``call`` enters a function; those of the tests' kit do not count."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.add(str(path.relative_to(PACKAGE)))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {each for each in entered if not each.startswith("testing/")}


@pytest.mark.parametrize("way", MOST)
def test_a_message_enters_few_files(harness: Harness, way: str) -> None:
    """Counted on a warm dispatcher: what is found out once for an engine is not counted."""
    settings: dict[str, Any] = {} if way.endswith("reads") else {"reads": None}
    dispatcher = harness.dispatcher(harness.handler(**settings))
    for number in range(3):
        harness.deliver(dispatcher, BOTH, f"warm-{number}")
    entered = files_entered(lambda: harness.deliver(dispatcher, BOTH, "measured"))
    assert len(entered) <= MOST[way], " ".join(sorted(entered))
