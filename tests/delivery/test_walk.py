"""How many files of the library one message enters: whoever wants to follow it has to open no more."""

from collections.abc import Iterator
from typing import Any

import pytest

from databases import Database
from projector_dedup.testing.kit import Added, Harness, Subject, Total
from walk import files_entered

BOTH = Added(("a", "b"))
MOST = {"new message": 15, "new message, reads": 17}


@pytest.fixture
def harness(postgresql: Database) -> Iterator[Harness]:
    """PostgreSQL by psycopg."""
    with Harness(Subject(postgresql.url("postgresql+psycopg"))) as harness:
        harness.create_tables()
        harness.transact(lambda session: session.add_all([Total(key=key, amount=0) for key in "ab"]))
        yield harness


@pytest.mark.parametrize("way", MOST)
def test_a_message_enters_few_files(harness: Harness, way: str) -> None:
    """Counted on a warm dispatcher: what is found out once for an engine is not counted."""
    settings: dict[str, Any] = {} if way.endswith("reads") else {"reads": None}
    dispatcher = harness.dispatcher(harness.handler(**settings))
    for number in range(3):
        harness.deliver(dispatcher, BOTH, f"warm-{number}")
    with files_entered() as entered:
        harness.deliver(dispatcher, BOTH, "measured")
    assert len(entered) <= MOST[way], " ".join(sorted(entered))
