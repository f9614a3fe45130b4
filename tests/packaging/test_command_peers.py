"""The benchmark of commands beside their peers counts what was done twice, and counts it right."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import URL

from command_peers import __main__ as measuring
from command_peers import contenders
from command_peers.__main__ import Entry, crashes, rates
from databases import Database
from suite.servers import Server


class AnswersInAFile(contenders.Plain):
    """Keeps answers in a second store, written after the commit of the first, as `TwoStores` does in Redis."""

    name = "answers in a file"
    folder: Path

    def one(self, key: str, row: int) -> Any:
        """Answer from the file, if it is there."""
        if (self.folder / key).exists():
            return (self.folder / key).read_text()
        answer = str(super().one(key, row))
        (self.folder / key).write_text(answer)
        return answer


class Stubborn(contenders.Ours):
    """Connects through a port that nobody listens on, so that it never begins."""

    def connect(self, url: URL, redis: str | None) -> None:
        """Lose the way."""
        super().connect(url.set(port=1), redis)


@pytest.fixture
def server(postgresql: Database) -> Iterator[Server]:
    """The server of the tests; the databases that are made there are dropped."""
    server = Server(postgresql.url())
    yield server
    server.close()


@pytest.mark.parametrize(
    ("kind", "twice"),
    [(contenders.Ours, 0), (contenders.HttpOurs, 0), (AnswersInAFile, 3)],
    ids=["commands", "http", "file"],
)
def test_what_is_done_twice_is_counted(
    server: Server, tmp_path: Path, kind: type[contenders.Contender], twice: int
) -> None:
    """A worker that dies between the two stores does its command again; ours has one store, and does not."""
    entry = Entry.of(kind, server)
    vars(entry.contender)["folder"] = tmp_path
    found = crashes(entry, 3)
    assert (found.killed, found.twice, found.unanswered) == (3, twice, 0)


def test_a_worker_that_was_not_killed_is_not_counted_as_killed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever never commits is not killed after the commit, and whoever is never answered is told."""
    monkeypatch.setattr(measuring, "PATIENCE", 0)
    found = crashes(Entry.of(Stubborn, server), 1)
    assert (found.killed, found.twice, found.unanswered) == (0, -1, 1)


def test_no_library_does_again_what_is_asked_again(server: Server) -> None:
    """Totals are read from the rows, and held against the keys that were given."""
    entries = [Entry.of(kind, server) for kind in (contenders.Ours, contenders.Plain)]
    found = rates(entries, rounds=3, each=20, known=90)
    assert [len(each) for each in found] == [3, 3]
    ours, plain = (entry.total() for entry in entries)
    assert ours == "right"
    assert plain.startswith("+")
